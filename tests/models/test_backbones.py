"A backbone that is not the recipe's, with weights from a file, by the real commands"

import pytest
import timm
import torch
import torchvision
from PIL import Image
from tools import sets, vlrep

import vlrep as library
from vlrep.training.run_folder import open_run_folder

SMALL = sets(
    [
        'size=32',
        'bs=8',
        'steps=2',
        'warmup=1',
        'vocab=200',
        'width=16',
        'heads=2',
        'scenes=64',
        'valid=8',
        'probe=40',
        'probe_held=40',
        'test=40',
        'shown=4',
        'point=4',
    ]
)

WHITE = Image.new('RGB', (40, 30), 'white')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    d = tmp_path_factory.mktemp('backbones')
    torch.manual_seed(0)
    resnet = torchvision.models.resnet18().state_dict()
    body = {k: v for k, v in resnet.items() if not k.startswith('fc.')}
    torch.save(resnet, d / 'torchvision.pth')
    torch.save(timm.create_model('resnet18', pretrained=False).state_dict() | resnet, d / 'timm.pth')
    torch.save(
        dict(
            state_dict={
                **{f'module.encoder_{x}.{k}': v for x in 'qk' for k, v in body.items()},
                'module.encoder_q.fc.0.weight': torch.ones(2, 512),
                'module.queue': torch.ones(2, 9),
            },
            epoch=1,
            arch='resnet18',
        ),
        d / 'moco.pth',
    )
    torch.save(
        dict(
            model={f'visual.cnn.{k}': v for k, v in body.items()} | {'textual.output.bias': torch.zeros(9)}, iteration=1
        ),
        d / 'virtex.pth',
    )
    torch.save(timm.create_model('mobilenetv3_small_050', pretrained=False).state_dict(), d / 'mobile.pth')
    return d


@pytest.fixture(scope='module')
def said(folder):
    "Trained from a file of torchvision, of timm, once more with another method, resumed when complete, exported"
    resnet = ['pretrain', '--backbone', 'resnet18', '--weights', 'torchvision.pth', *SMALL]
    mobile = [
        'pretrain',
        '--backbone',
        'timm/mobilenetv3_small_050',
        '--weights',
        'mobile.pth',
        *SMALL,
        '--set',
        'baselines=false',
    ]
    lines = vlrep(folder, [*resnet, '--out', 'resnet'], [*mobile, '--out', 'mobile'])
    lines += vlrep(
        folder,
        [*mobile, '--out', 'told', '--method', 'loctex'],
        ['resume', 'mobile'],
        ['export', 'resnet', '--to', 'torchvision'],
        ['export', 'mobile', '--to', 'timm'],
        codes=[0, 0, 0, 2],
        quick=True,
    )
    return dict(zip('resnet mobile told again export refused'.split(), lines))


def test_a_run_starts_from_weights_of_torchvision(folder, said):
    "The run says where it started, is compared with that, and ends near it"
    run = open_run_folder(folder / 'resnet')
    assert run.info['backbone'] == 'resnet18' and run.info['weights'].startswith('torchvision.pth ')
    assert (run.info['recipe']['visual_depth'], run.info['recipe']['visual_width']) == (18, 64)
    table = run.results()[0]['numbers']['table']
    assert {r['backbone'] for r in table} == {'virtex', 'supervised', 'random', 'initial'}
    before = torch.load(folder / 'torchvision.pth')['layer1.0.conv1.weight']
    after = run.weights('last')['visual.layer1.0.conv1.weight']
    assert 0 < (after - before).abs().max() < 0.1
    assert 'torchvision' in said['export']


def test_weights_in_four_layouts_start_the_same_run(folder, said):
    "The same network in files of timm, MoCo and the official VirTex: runs with the weights of that from torchvision's"
    names = 'timm moco virtex'.split()
    start = ['pretrain', '--backbone', 'resnet18', *SMALL, '--baselines', 'false']
    vlrep(folder, *([*start, '--weights', f'{n}.pth', '--out', f'from-{n}'] for n in names), quick=True)
    first, *others = (open_run_folder(folder / n).weights('last') for n in ('resnet', *(f'from-{n}' for n in names)))
    assert all(torch.equal(v, w[k]) for w in others for k, v in first.items())


def test_a_network_of_timm_opens_without_its_file(folder, said):
    "Opened without the file it started from; its weights keep timm's names"
    assert 'complete' in said['again'] and 'already a network of another library' in said['refused']
    (folder / 'mobile.pth').unlink()
    for name in ('mobile', 'told'):
        m = library.load(folder / name)
        assert m.backbone.name == 'timm/mobilenetv3_small_050' and m.embed(WHITE).shape == (288,)
    timm.create_model('mobilenetv3_small_050', num_classes=0).load_state_dict(m.backbone.net.state_dict())


def test_wrong_backbones_and_files_are_refused(folder):
    words = {
        ('--backbone', 'resnet8'): "did you mean 'resnet18'",
        ('--weights', 'none.pth'): 'none.pth: no such file',
        ('--backbone', 'timm/resnet_18'): 'unknown timm network',
        ('--backbone', 'resnet18', '--set', 'visual_depth=10'): '--backbone resnet18 decides it',
        ('--weights', 'torchvision.pth'): 'contains a ResNet-18 of width 64, and the recipe has ResNet-10',
        ('--backbone', 'resnet50', '--weights', 'torchvision.pth'): 'not resnet50',
    }
    text = vlrep(folder, *(['pretrain', *SMALL, *w] for w in words), codes=[2] * len(words))
    for got, want in zip(text, words.values()):
        assert want in got, got
