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

SMALL_BATCHES = """
import vlrep.models.features as module
module.write_features.__defaults__ = (None, 16)  # images a batch
"""
KILLED = """
import os, signal
pool = module.pool_grid
batches = []
def killed_at_the_tenth(grid):
    batches.append(len(grid))
    if len(batches) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return pool(grid)
module.pool_grid = killed_at_the_tenth
"""


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
    command, *rest = words['features']
    for name, folder in dict(undisturbed='undisturbed', killed='killed', continued='killed').items():
        first = SMALL_BATCHES if name == 'undisturbed' else SMALL_BATCHES + KILLED
        out = [*rest, '--out', str(cwd / folder)]
        runs[name] = dict(command=command, words=[out] * 2, before={'0': first, '1': SMALL_BATCHES})
    return run_ranks(cwd, runs), cwd


def test_only_the_main_process_prints_and_writes(done):
    got, cwd = done
    for name, ranks in got.items():
        if name == 'killed':
            continue
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


def test_an_extraction_that_was_killed_is_continued(done):
    """The main process is killed at its tenth batch of 13, and has four when it is continued

    The file has the bits of one that nobody disturbed
    """
    got, cwd = done
    assert codes(got['killed'])[0] == -9 and codes(got['continued']) == [0, 0]
    one, two = (next((cwd / name).iterdir()) for name in ('undisturbed', 'killed'))
    assert one.name == two.name and {p.name for p in one.iterdir()} == {p.name for p in two.iterdir()}
    assert (one / 'features.npy').read_bytes() == (two / 'features.npy').read_bytes()
