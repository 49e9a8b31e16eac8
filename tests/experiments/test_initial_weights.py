"RotNet, tag prediction, ICMLM: each run starts from the backbone of the one before, through files, by real commands"

import shutil

import pytest
import torch
from tools import same_tensors, sets, vlrep

from vlrep.training.run_folder import Run, open_run_folder

SIZES = [
    'size=32',
    'bs=8',
    'warmup=1',
    'scenes=64',
    'valid=8',
    'probe=40',
    'probe_held=40',
    'test=40',
    'shown=4',
    'point=4',
    'baselines=no',
]
BERT = ['vocab=300', 'width=16', 'depth=1', 'heads=2', 'bert_steps=10']
MOBILE = 'timm/mobilenetv3_small_050'
NETS = {'ours': ['--set', 'visual_width=8'], 'named': ['--backbone', MOBILE]}


def words(method, out, *more, seed=1, still=False, steps=2):
    "A tiny run; a still one has a learning rate so small that its backbone keeps the weights that it began with"
    small = [*SIZES, f'steps={steps}', *BERT * (method == 'icmlm'), *['cnn_lr=1e-30'] * still]
    return [
        'pretrain',
        '--method',
        method,
        '--recipe',
        'world',
        '--threads',
        '1',
        '--precision',
        'fp32',
        '--seed',
        str(seed),
        '--out',
        out,
        *sets(small),
        *more,
    ]


def backbone(run):
    "Parameters of the backbone in a run's best checkpoint; the statistics of BatchNorm move with every batch"
    return {
        k: v
        for k, v in open_run_folder(run).weights('best').items()
        if k.startswith('visual.') and not k.endswith(('running_mean', 'running_var', 'num_batches_tracked'))
    }


def begun(a, b):
    return a.keys() == b.keys() and all(torch.allclose(v, b[k], rtol=0, atol=1e-12) for k, v in a.items())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "The first stage, with either network, which has learned for two steps"
    d = tmp_path_factory.mktemp('chain')
    vlrep(d, *(words('rotnet', f'{k}-rotnet', *net, seed=0) for k, net in NETS.items()), quick=True)
    return d


@pytest.mark.parametrize('net', NETS)
def test_each_run_begins_with_the_backbone_of_the_one_before(folder, net):
    "By its folder, which says the architecture, too, or by its file; tag prediction learns, and ICMLM starts from that"

    def run(name):
        return folder / f'{net}-{name}'

    vlrep(
        folder,
        words('tag_prediction', f'{net}-still', '--weights', f'{net}-rotnet', still=True),
        words(
            'tag_prediction', f'{net}-file', '--weights', f'{net}-rotnet/best/model.safetensors', *NETS[net], still=True
        ),
        words('tag_prediction', f'{net}-tags', '--weights', f'{net}-rotnet'),
        words('icmlm', f'{net}-icmlm', '--weights', f'{net}-tags', still=True),
        [
            'pretrain',
            '--method',
            'icmlm',
            '--weights',
            f'{net}-tags',
            *sets(SIZES),
            *sets(BERT),
            '--set',
            'steps=2',
            '--dry-run',
        ],
        quick=True,
    )
    first, second = (backbone(run(n)) for n in ('rotnet', 'tags'))
    assert all(begun(backbone(run(n)), first) for n in ('still', 'file')) and not begun(second, first)
    assert begun(backbone(run('icmlm')), second)
    facts = open_run_folder(run('icmlm')).info
    assert facts['weights_file'] == str((run('tags') / 'best' / 'model.safetensors').resolve())
    assert facts['weights'].startswith('model.safetensors ')
    assert facts['backbone'] == (MOBILE if net == 'named' else None)
    assert net == 'named' or facts['recipe']['visual_width'] == 8


@pytest.mark.parametrize('net', NETS)
def test_a_resumed_run_needs_no_source_but_to_begin_anew(folder, net):
    "With a checkpoint, the same bits without the earlier run; from step 0, the same file or a message"
    source = folder / f'{net}-source'
    out = folder / f'{net}-stopped'
    shutil.copytree(folder / f'{net}-rotnet', source)
    vlrep(folder, words('tag_prediction', out.name, '--weights', source.name, '--save-every', '1', steps=4), quick=True)
    whole = open_run_folder(out).weights('last')

    def stopped():
        for name in ('result.jsonl', 'report.html'):
            (out / name).unlink(missing_ok=True)

    stopped()
    resume = ['resume', out.name]
    with Run.reopen(source) as r:
        r.save('best', {k: v + 1 for k, v in r.weights('best').items()}, dict(step=2))
    assert 'has changed since' in vlrep(folder, [*resume, '--at', '0'], codes=[2])[0]
    shutil.rmtree(source)
    assert 'model.safetensors: no such file' in vlrep(folder, [*resume, '--at', '0'], codes=[2])[0]
    vlrep(folder, [*resume, '--at', '2'], quick=True)
    assert same_tensors(open_run_folder(out).weights('last'), whole)


def test_wrong_sources_are_refused_in_one_line(folder):
    facts = open_run_folder(folder / 'ours-rotnet').info
    for name, weights in (('bare', {'head.weight': torch.zeros(2, 2)}), ('unsaved', None)):
        with Run.create(folder / name, facts['recipe'], 'rotnet', facts['data'], 0) as r:
            if weights:
                r.save('best', weights, dict(step=1))
    (folder / 'empty').mkdir()
    cases = {
        ('--weights', 'empty'): 'empty: contains no run',
        ('--weights', 'none'): 'none: no such file',
        ('--weights', 'bare'): 'bare: this rotnet run has no backbone to start from',
        ('--weights', 'unsaved'): 'unsaved/best: no such checkpoint',
        ('--weights', 'ours-rotnet', '--backbone', 'resnet18'): 'is ResNet-10 of width 8, not resnet18',
        ('--weights', 'ours-rotnet', '--set', 'visual_width=16'): 'contains a ResNet-10 of width 8, and the recipe',
        ('--weights', 'named-rotnet', '--backbone', 'torchvision/vgg16'): f'is {MOBILE}, not torchvision/vgg16',
        ('--weights', 'named-rotnet/best/model.safetensors'): 'contains no ResNet',
        ('--weights', 'ours-rotnet/best/model.safetensors', '--backbone', MOBILE): f'are not those of {MOBILE}',
    }
    text = vlrep(folder, *(words('icmlm', 'never', *w) for w in cases), codes=[2] * len(cases))
    for got, want in zip(text, cases.values()):
        assert want in got and 'Traceback' not in got, got
    assert not (folder / 'never').exists()


def test_a_recipe_field_named_init_is_no_folder(folder):
    "VirTex has a field of that name, which is no folder"
    few = sets(['scenes=64', 'steps=2', 'warmup=1'])
    text = vlrep(
        folder,
        ['pretrain', '--init', 'fan_in', '--fields', *few],
        ['pretrain', '--init', 'ours-rotnet', *few],
        codes=[0, 2],
    )
    assert 'init=fan_in' in text[0] and "unknown init 'ours-rotnet'" in text[1]
