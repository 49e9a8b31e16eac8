"Graphs and folders of a model compute what the run computes, by the commands and the lines that they print"

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from tools import refused

import vlrep
from vlrep.cli import main
from vlrep.data.loader import loaders
from vlrep.data.tokenizer import Tokenizer
from vlrep.datasets.world.dataset import scene, world
from vlrep.experiments.config import get_recipe, override
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.training.run_folder import Run

SMALL = ['size=32', 'width=32', 'heads=2', 'vocab=300']
MADE = dict(words=('virtex', 'world_words'), clip=('clip', 'world'), loctex=('loctex', 'world'))


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "Runs that were never trained; the first is the network of `--recipe world_words`, but narrower words"
    out = {}
    dataset = world('train', 40, size=32)
    tokenizer = Tokenizer.train(dataset.captions.flat(), 300)
    torch.manual_seed(0)
    for name, (method, recipe) in MADE.items():
        recipe = override(get_recipe(method, recipe), SMALL)
        collate = METHODS[method].collator(recipe, tokenizer)
        dls = loaders(dataset, dataset, tokenizer, size=32, bs=8, device='cpu', collate=collate)
        learn = make_learner(METHODS[method], recipe, dls)
        for m in learn.model.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.1)
                m.running_var.uniform_(0.5, 1.5)
        for p in learn.model.parameters():
            if p.ndim == 2:
                p.data.normal_(0, 0.2)  # else all captions are alike
        out[name] = tmp_path_factory.mktemp('runs') / name
        facts = dict(name=MADE[name][1], sizes=learn.sizes, side=32, root='/home/me/photos')
        with Run.create(out[name], recipe=recipe, method=method, data=dict(name='world'), seed=0, **facts) as run:
            tokenizer.save(run / 'tokenizer.model')
            run.keep_part('tokenizer.model')
            run.save('both', learn.model.state_dict(), dict(step=0))
    return out


@pytest.fixture
def photo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(scene('test', 3, size=32).image).save('photo.jpg', quality=95)


def printed(capsys, *words):
    "Run a command, and then the lines that it prints; the text, and the names that they define"
    main(list(map(str, words)))
    text = capsys.readouterr().out
    names = {}
    exec(compile(text, 'printed', 'exec'), names)
    capsys.readouterr()
    return text, names


@pytest.mark.parametrize('to', ['onnx', 'torch-export'])
def test_the_printed_lines_run_a_graph_of_the_small_resnet(to, runs, photo, capsys):
    "torchvision has no ResNet-10; the graph computes the run's features of a photo"
    text, names = printed(capsys, 'export', runs['words'], '--to', to, '--out', 'net')
    assert 'not exported: caption, which is a loop over words' in text and '# net/graphs.json' in text
    ours = vlrep.load(runs['words']).embed('photo.jpg')
    theirs = np.asarray(names['out'])[0].mean((1, 2))
    assert ours.shape == (128,) and np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max()


def test_a_caption_is_written_with_two_graphs(runs, photo, capsys):
    "By a loop of five lines around them, as `graphs.json` describes"
    printed(capsys, 'export', runs['words'], '--to', 'torch-export', '--out', 'net')
    note = json.load(open('net/graphs.json'))
    m = vlrep.load(runs['words'])
    graph = {k: torch.export.load(f'net/{v["file"]}').module() for k, v in note['graphs'].items()}
    with torch.no_grad():
        cells = graph['visual_tokens'](m.batch(['photo.jpg']))
        tokens = [note['tokens']['sos']]
        while len(tokens) < note['tokens']['max_len'] and tokens[-1] != note['tokens']['eos']:
            scores = graph['next_words'](cells, torch.tensor([tokens]))
            tokens.append(int(scores[0, -1].argmax()))
        ours = m.capabilities['caption'](m.batch(['photo.jpg']))[0].tolist()
    assert tokens == ours[: len(tokens)] and len(set(tokens)) > 3


@pytest.mark.parametrize('name', ['clip', 'loctex'])
def test_onnx_compares_images_with_texts_as_the_run_does(name, runs, photo, capsys):
    "Texts of other lengths than the traced ones, in a batch of another size"
    import onnxruntime

    printed(capsys, 'export', runs[name], '--to', 'onnx', '--out', 'net')
    m = vlrep.load(runs[name])
    tokens = torch.randint(5, 300, (5, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 3, 5, 1, 8])
    tokens[torch.arange(9) >= lengths[:, None]] = m.tokenizer.pad
    images = m.batch(['photo.jpg'])
    inputs = dict(embed_image=dict(images=images), embed_text=dict(tokens=tokens, lengths=lengths))
    for k, given in inputs.items():
        session = onnxruntime.InferenceSession(f'net/{k}.onnx')
        theirs = session.run(None, {n: v.numpy() for n, v in given.items()})[0]
        with m.evaluating():
            ours = m.capabilities[k](*given.values()).numpy()
        assert np.abs(ours - theirs).max() < 1e-5 and theirs.shape == (len(list(given.values())[0]), ours.shape[1])


def test_an_exported_folder_is_a_run(runs, photo, capsys):
    "It captions, embeds and is exported as the run; it has no path of the machine, and a card"
    _, names = printed(capsys, 'export', runs['words'], '--to', 'folder', '--out', 'model')
    a, b = vlrep.load(runs['words']), names['model']
    assert a.caption('photo.jpg') == b.caption('photo.jpg') and (a.embed('photo.jpg') == b.embed('photo.jpg')).all()
    assert '/home/me' not in open('model/recipe.json').read()
    card = open('model/README.md').read()
    assert card.startswith('---\nlibrary_name: vlrep') and '`size=32`' in card and 'VirTex' in card
    printed(capsys, 'export', 'model', '--to', 'torch-export', '--out', 'net')
    text = refused(capsys, 'resume', 'model')
    assert '--weights model' in text


def test_what_cannot_be_exported_is_refused(runs, photo, tmp_path, capsys, monkeypatch):
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full/a.txt').write_text('a')
    for to in ('folder', 'onnx', 'torch-export'):
        assert 'exists already' in refused(capsys, 'export', runs['clip'], '--to', to, '--out', 'full')
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    text = refused(capsys, 'export', runs['clip'], '--to', 'onnx', '--out', 'net')
    assert 'onnxruntime is not installed (pip install "vlrep[onnx]")' in text and not (tmp_path / 'net').exists()


@pytest.mark.parametrize(
    ('harm', 'message'),
    [
        (lambda d: (d / 'best/model.safetensors').write_bytes(b'abc'), 'model.safetensors: truncated'),
        (lambda d: (d / 'best/model.safetensors').unlink(), 'model.safetensors: missing'),
        (lambda d: (d / 'tokenizer.model').write_bytes(b'abc'), 'tokenizer.model: damaged'),
        (lambda d: (d / 'recipe.json').unlink(), 'recipe.json is missing'),
        (
            lambda d: (d / 'recipe.json').write_text((d / 'recipe.json').read_text().replace('"seed": 0', '"seed": 1')),
            'changed by hand',
        ),
    ],
)
def test_a_damaged_folder_is_named(harm, message, runs, photo, tmp_path, capsys):
    printed(capsys, 'export', runs['clip'], '--to', 'folder', '--out', 'model')
    harm(tmp_path / 'model')
    with pytest.raises(ValueError, match=message):
        vlrep.load('model')
