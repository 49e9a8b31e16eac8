"Evaluations by two processes that torchrun has started, and by workers, are those of one process"

import json

import numpy as np
import pytest
from ranks import SIZES, codes, run_ranks

from vlrep.datasets.image_folder import write_folder
from vlrep.datasets.world.dataset import scene
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import run_spec

SMALL = [*SIZES, 'size=32', 'steps=4', 'warmup=1', 'baselines=False', 'visual_depth=10', 'visual_width=8', 'bs=16']


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "What became of each command, and the folder of all of them"
    cwd = tmp_path_factory.mktemp('processes')
    run = str(pretrain(run_spec('supervised', SMALL, seed=1), out=cwd / 'run', log=str))
    for part, split in (('train', 'train'), ('val', 'test')):
        write_folder((scene(split, i, size=64) for i in range(43)), cwd / 'folder' / part, of=lambda r: r.setting)
    words = {
        'folder': ['evaluate', run, '--on', 'folder', '--root', str(cwd / 'folder'), '--probe', 'moco'],
        'features': ['features', run, '--part', 'train', '--pooling', 'grid2'],
    }
    runs = {}
    for name, (command, *rest) in words.items():
        for n in (1, 2):
            own = ['--out', str(cwd / f'{name}{n}')] if command == 'features' else []
            runs[f'{name}{n}'] = dict(command=command, words=[[*rest, *own]] * n)
    return run_ranks(cwd, runs), cwd


def test_only_the_main_process_prints_and_writes(done):
    got, cwd = done
    for name, ranks in got.items():
        assert codes(ranks) == [0] * len(ranks), (name, ranks)
        assert ranks[0]['out'] and not any(r['out'] for r in ranks[1:])
    assert len((cwd / 'run' / 'evaluations.jsonl').read_text().splitlines()) == 2


def test_two_processes_give_the_rows_of_one(done):
    "The probe is trained on random views; each process computes half of every batch"
    one, two = (json.loads(l)['rows'] for l in (done[1] / 'run' / 'evaluations.jsonl').read_text().splitlines())
    assert [r['n'] for r in one] == [r['n'] for r in two]
    for a, b in zip(one, two, strict=True):
        assert a['value'] == pytest.approx(b['value'], abs=1e-3)
    assert one[0]['tried'][0]['loss'] == pytest.approx(two[0]['tried'][0]['loss'], rel=1e-3)


def test_features_of_two_processes_are_those_of_one(done):
    (one,) = (done[1] / 'features1').iterdir()
    (two,) = (done[1] / 'features2').iterdir()
    a, b = (np.load(f / 'features.npy') for f in (one, two))
    assert one.name == two.name and (one / 'ids.json').read_text() == (two / 'ids.json').read_text()
    assert len(a) == 200 and a.any(1).all()  # each image once
    np.testing.assert_allclose(a, b, atol=1e-5)
