"An export opens elsewhere, by the lines that the command prints; what nothing else could open is refused"

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tools import refused

import vlrep
from vlrep.cli import main
from vlrep.data.loader import loaders
from vlrep.datasets.base import DATASETS
from vlrep.datasets.world.dataset import scene, world
from vlrep.experiments.config import get_recipe, recipe_lines
from vlrep.methods.base import METHODS
from vlrep.methods.supervised.method import supervised_learner
from vlrep.models.export import LAYOUTS
from vlrep.training.run_folder import Run


def untrained(folder, data, **net):
    "A run whose weights were never trained, but whose BatchNorms are not as new"
    recipe = replace(get_recipe('supervised', 'world'), size=64, **net)
    dataset = world('train', 8, size=64)
    learn = supervised_learner(recipe, loaders(dataset, dataset, size=64, bs=4, device='cpu'))
    model = learn.model
    side = DATASETS[data].stored_size(recipe.size)
    facts = dict(name='world', precision='fp32', threads=1, sizes=learn.sizes, side=side)
    g = torch.Generator().manual_seed(0)
    for m in model.visual.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.weight.data.uniform_(0.5, 1.2, generator=g)
            m.running_mean.normal_(0, 0.1, generator=g)
            m.running_var.uniform_(0.5, 1.5, generator=g)
    with Run.create(folder, recipe=recipe, method='supervised', data=dict(name=data), seed=0, **facts) as run:
        run.save('best', model.state_dict(), dict(step=0))
    return folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('nets')
    big = dict(visual_depth=18, visual_width=64)
    return {
        'world': untrained(tmp / 'world', 'world', **big),
        'flickr8k': untrained(tmp / 'flickr8k', 'flickr8k', **big),
        'small': untrained(tmp / 'small', 'world'),
    }


@pytest.mark.parametrize('data', ['world', 'flickr8k'])
@pytest.mark.parametrize('to', ['torchvision', 'timm'])
def test_the_printed_lines_open_an_export(to, data, runs, tmp_path, capsys, monkeypatch):
    "Pasted as printed, they compute our features of a photo"
    if to == 'timm':
        pytest.importorskip('timm')
    monkeypatch.chdir(tmp_path)
    Image.fromarray(scene('test', 3, size=64 if data == 'world' else 240).image).save('photo.jpg', quality=95)
    main(['export', str(runs[data]), '--to', to, '--out', 'net'])
    text = capsys.readouterr().out
    names = {}
    exec(compile(text, 'printed', 'exec'), names)
    assert '(1, 512)' in text and '([1, 512])' in capsys.readouterr().out and not names['net'].training
    ours = vlrep.load(runs[data]).embed('photo.jpg')
    theirs = names['features'][0].numpy()
    if data == 'world':
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max()
    # a large photo is made smaller by another filter
    else:
        assert ours @ theirs > 0.99 * np.linalg.norm(ours) * np.linalg.norm(theirs)


def test_the_lines_for_detectron2_are_python_and_name_its_files(runs, tmp_path, capsys, monkeypatch):
    """detectron2 cannot be had here

    Its lines are Python, name the files that are there, and say how pixels are prepared
    """
    monkeypatch.chdir(tmp_path)
    main(['export', str(runs['world']), '--to', 'detectron2', '--out', 'net'])
    text = capsys.readouterr().out
    compile(text, 'printed', 'exec')
    assert all(
        repr(f'net/resnet18.{x}') in text and (tmp_path / f'net/resnet18.{x}').is_file() for x in ('pkl', 'yaml')
    )
    assert 'PIXEL_MEAN' in text and 'resize((64, 64))' in text
    for name in ('voc', 'coco', 'coco_c4', 'lvis'):  # the papers' detectors, on top of the backbone's own configuration
        assert f'# net/{name}.yaml' in text
        assert json.loads((tmp_path / f'net/{name}.yaml').read_text())['_BASE_'] == 'resnet18.yaml'
    assert pickle.loads((tmp_path / 'net/resnet18.pkl').read_bytes())['model']['res5.1.conv2.weight'].shape == (
        512,
        512,
        3,
        3,
    )


@pytest.mark.parametrize('to', LAYOUTS)
def test_an_export_that_nothing_else_can_open_is_refused(to, runs, tmp_path, capsys):
    text = refused(capsys, 'export', runs['small'], '--to', to, '--out', tmp_path / 'net')
    assert (
        f'{to} has no network like this one (visual_depth 10' in text
        and '--set visual_depth=18' in text
        and '--recipes' in text
    )
    assert not (tmp_path / 'net').exists()


def test_the_default_for_photos_can_be_opened_elsewhere_if_there_is_a_backbone():
    for method in METHODS:
        named = METHODS[method].recipes
        for name in {'flickr8k', 'coco'} & set(named):
            line = next(l for l in recipe_lines(method) if l.split()[1] == name)
            expected = 'opens in vlrep only' if METHODS[method].no_backbone else 'opens in torchvision'
            assert expected in line, line
            assert named[name].size in (64, 96)
