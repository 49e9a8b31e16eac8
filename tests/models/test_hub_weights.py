"Weights by name, from caches that the libraries' own files were put into; there is no network"

import shutil

import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from tools import sets, vlrep

import vlrep as library
from vlrep.data.transforms import IMAGENET
from vlrep.models.hub_weights import fetch_weights
from vlrep.models.timm_torchvision import NamedBackbone
from vlrep.training.run_folder import open_run_folder

SMALL = sets('size=32 bs=8 steps=2 warmup=1 vocab=200 width=16 heads=2 scenes=64 valid=8 test=40 shown=4'.split())
SMALL += sets('probe=40 probe_held=40 point=4 baselines=false'.split())
RESNET = 'torchvision/resnet18:IMAGENET1K_V1'
VIT = 'timm/vit_tiny_patch16_224.augreg_in21k'
# the hub's client reads the environment when it is imported, which may be before a command begins
CLIENT = "import os; import huggingface_hub.constants as c; c.HF_HUB_CACHE = os.environ['HF_HOME'] + '/hub'\n"
PHOTO = Image.new('RGB', (40, 30), (200, 90, 10))


@pytest.fixture(scope='module')
def caches(tmp_path_factory):
    "Caches of PyTorch and of the hub, with a file each that torchvision and timm wrote; the folder of both"
    d = tmp_path_factory.mktemp('caches')
    torch.manual_seed(0)
    checkpoints = d / 'torch/hub/checkpoints'
    checkpoints.mkdir(parents=True)
    torch.save(torchvision.models.resnet18().state_dict(), checkpoints / 'resnet18-f37072fd.pth')
    repo = d / 'hf/hub/models--timm--vit_tiny_patch16_224.augreg_in21k'
    (repo / 'snapshots/abc').mkdir(parents=True)
    (repo / 'refs').mkdir()
    (repo / 'refs/main').write_text('abc')
    save_file(timm.create_model('vit_tiny_patch16_224').state_dict(), repo / 'snapshots/abc/model.safetensors')
    return d


@pytest.fixture
def env(caches, monkeypatch):
    "Both libraries look into these caches"
    monkeypatch.setenv('TORCH_HOME', str(caches / 'torch'))
    monkeypatch.setenv('HF_HOME', str(caches / 'hf'))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(caches / 'hf/hub'))
    return caches


def test_a_run_starts_from_named_weights_and_needs_them_no_more(env, tmp_path):
    "By a command: the run records file and digest, goes on and is opened when the caches are gone"
    start = ['pretrain', '--method', 'clip', *SMALL]
    vlrep(
        tmp_path,
        [*start, '--backbone', RESNET, '--out', 'resnet'],
        [*start, '--backbone', VIT, '--out', 'vit'],
        quick=True,
        before=CLIENT,
    )
    resnet, vit = (open_run_folder(tmp_path / n) for n in ('resnet', 'vit'))
    assert resnet.info['backbone'] == 'resnet18' and resnet.info['weights'].startswith('resnet18-f37072fd.pth ')
    assert vit.info['backbone'] == VIT and vit.info['weights'].startswith('model.safetensors ')
    before = torch.load(fetch_weights(RESNET))['layer1.0.conv1.weight']
    assert 0 < (resnet.weights('last')['visual.layer1.0.conv1.weight'] - before).abs().max() < 0.1
    m = library.load(vit.path)
    kept = vit.weights('best')
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    pixels = m.batch([PHOTO]) * std + mean  # in [0,1]
    net = timm.create_model('vit_tiny_patch16_224', img_size=32).eval()
    own = {k.removeprefix('visual.net.'): v for k, v in kept.items() if k.startswith('visual.net.')}
    net.load_state_dict(own, strict=False)
    with torch.no_grad():
        theirs = net.forward_features(2 * pixels - 1)[:, 1:].mean(1)
    assert (torch.from_numpy(m.embed([PHOTO])) - theirs).abs().max() < 1e-4
    for n in ('torch', 'hf'):
        shutil.move(env / n, env / f'{n}-gone')
    try:
        library.load(resnet.path)
        library.load(vit.path)
        with pytest.raises(ValueError, match='cannot be fetched'):
            fetch_weights(VIT)
        vlrep(
            tmp_path, ['resume', 'vit', '--steps', '4'], ['resume', 'resnet', '--steps', '4'], quick=True, before=CLIENT
        )
    finally:
        for n in ('torch', 'hf'):
            shutil.move(env / f'{n}-gone', env / n)
    start = ['pretrain', '--method', 'virtex', *SMALL[2:], '--size', '48', '--weights', 'vit', '--out', 'next']
    vlrep(tmp_path, start, quick=True, before=CLIENT)  # from that run, with views of another size
    assert open_run_folder(tmp_path / 'next').info['backbone'] == VIT


def test_without_a_network_one_sentence_says_which_file_is_missing(env, tmp_path, monkeypatch):
    "Also where it belongs, and that a file can be named instead"
    PHOTO.save(tmp_path / 'photo.png')
    text = vlrep(
        tmp_path,
        *(['pretrain', *SMALL, '--backbone', b] for b in ('timm/resnet18.a1_in1k', 'torchvision/resnet34:DEFAULT')),
        ['pretrain', *SMALL, '--backbone', 'torchvision/resnet34:IMAGENET'],
        ['regions', '.', '--by', 'grid', '--backbone', 'timm/resnet18.a1_in1k'],
        codes=[2] * 4,
        before=CLIENT,
    )
    assert 'get model.safetensors of https://huggingface.co/timm/resnet18.a1_in1k' in text[0]
    assert str(env / 'hf/hub') in text[0] and '--weights FILE' in text[0] and text[0].count('\n') == 1
    assert f'to {env / "torch/hub/checkpoints/resnet34-b627a593.pth"}' in text[1]
    assert "unknown weights for torchvision/resnet34 'IMAGENET'" in text[2]
    assert 'get model.safetensors' in text[3]
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    with pytest.raises(ValueError, match='offline mode is enabled'):
        fetch_weights('timm/resnet18.a1_in1k')


def test_a_file_takes_the_place_of_named_weights(env, tmp_path):
    "The name still decides the normalisation"
    save_file(timm.create_model('vit_tiny_patch16_224').state_dict(), tmp_path / 'vit.safetensors')
    words = ['pretrain', '--backbone', 'timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k', '--weights', 'vit.safetensors']
    vlrep(tmp_path, [*words, *SMALL, '--out', 'run'], quick=True, before=CLIENT)
    run = open_run_folder(tmp_path / 'run')
    assert run.info['weights'].startswith('vit.safetensors ') and 'visual.factor' in run.weights('best')


def test_every_method_with_a_grid_takes_a_transformer(env, tmp_path):
    "By commands: a Vision Transformer has one grid, and a Swin Transformer several"
    words = ['pretrain', '--recipe', 'world', *SMALL]
    vlrep(
        tmp_path,
        [*words, '--method', 'virtex', '--backbone', 'timm/vit_tiny_patch16_224', '--out', 'virtex'],
        [*words, '--method', 'loctex', '--backbone', 'timm/swin_tiny_patch4_window7_224', '--out', 'loctex'],
        quick=True,
        before=CLIENT,
    )
    m = library.load(tmp_path / 'virtex')
    assert isinstance(m.backbone, NamedBackbone) and m.caption(PHOTO) is not None
    tokens = torch.tensor([[m.tokenizer.sos, 5, 6]])
    maps = m.capabilities['attend'](m.batch([PHOTO]), tokens, torch.tensor([3]))
    assert maps.shape == (1, 3, 2, 2) and (maps[0, 1].sum() - 1).abs() < 1e-4
    assert library.load(tmp_path / 'loctex').embed(PHOTO).shape == (768,)


def test_few_photos_and_random_weights_are_answered_with_advice(env, tmp_path):
    "One line at the start of training, and none for the drawn world or a run with weights"
    (tmp_path / 'photos').mkdir()
    lines = ['path,caption']
    for i in range(40):
        Image.new('RGB', (40, 30), (5 * i, 90, 10)).save(tmp_path / f'photos/{i}.png')
        lines.append(f'{i}.png,a wall number {i} in the sun')
    (tmp_path / 'photos/photos.csv').write_text('\n'.join(lines))
    words = ['pretrain', *sets('size=32 bs=8 steps=2 warmup=1 vocab=64 width=16 heads=2'.split())]
    words += ['--data', 'csv', '--root', 'photos/photos.csv']
    text = vlrep(
        tmp_path,
        [*words, '--backbone', 'resnet18', '--out', 'a'],
        [*words, '--backbone', RESNET, '--out', 'b'],
        ['resume', 'a', '--steps', '4'],
        ['pretrain', *SMALL, '--out', 'c'],
        quick=True,
        before=CLIENT,
    )
    advice = 'photos are few to learn from: add --backbone torchvision/resnet50:IMAGENET1K_V2'
    assert [t.count(advice) for t in text] == [1, 0, 0, 0]
