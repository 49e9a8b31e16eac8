"""Several processes: cells of notebooks flagged `#| dist`; two gloo processes against one, for every method; resuming
them; and what happens when one of them fails"""

import json
import os
import re
import signal

import forked
import pytest
import torch
from ranks import SIZES, TAGS, codes, free_port, last, run_ranks
from run_folders import rows
from tools import ENV, QUICK, ROOT, sets

from vlrep.training.run_folder import open_run_folder

CODE = """
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
flags = [f for f in get_config().tst_flags.split() if f != 'dist']
sys.exit(0 if test_nb(Path(sys.argv[1]), skip_flags=flags, basepath=Path(sys.argv[2]))[0] else 1)
"""


def has_such_cells(path):
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return any(re.search(r'^#\|\s*dist\s*$', ''.join(c['source']), re.M) for c in cells if c['cell_type'] == 'code')


FOUND = (p for p in (ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
NOTEBOOKS = sorted(p for p in FOUND if has_such_cells(p))


def test_there_are_notebooks_with_cells_of_several_processes():
    assert {'05_distributed', '30_learner'} <= {p.stem for p in NOTEBOOKS}


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_of_several_processes_pass(path):
    env = dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    done = forked.run(CODE, [path, ROOT], ROOT / 'nbs', env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


# ---------------------------------------------------------------- two processes equal one


def ranks(code, words, cwd, n=2, port=None, each=None):
    "Processes that train together, started as torchrun would; `each`: more words for each rank"
    port = port or free_port()

    def start(r):
        env = {
            **ENV,
            'PYTHONPATH': f'{ROOT}:{ROOT / "tests" / "support"}',
            'CUDA_VISIBLE_DEVICES': '',
            'RANK': str(r),
            'LOCAL_RANK': str(r),
            'WORLD_SIZE': str(n),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(port),
        }
        more = each[r] if each else []
        return forked.Program(code, [*words, *more], cwd, env)

    return [start(r) for r in range(n)]


def ended(ps, timeout=200):
    "Exit code, stdout and stderr of each"
    try:
        return [(*p.communicate(timeout=timeout)[::-1], p.returncode)[::-1] for p in ps]
    finally:
        for p in ps:
            p.kill()


def compared(out, *names, n=2):
    "What `two_processes.py` found of `n` processes"
    done = ended(ranks('import sys, two_processes; two_processes.main(*sys.argv[1:])', [out, *names], out.parent, n))
    assert [code for code, *_ in done] == [0] * n, done
    return json.loads(out.read_text())


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    return compared(tmp_path_factory.mktemp('pair') / 'out.json')


METHODS = (
    'virtex captioning masked_lm token_cls multilabel supervised loctex mct icmlm tag_prediction rotnet visualbert '
    'vilbert clip'
).split()
VARIANTS = [
    'loctex, groups of 4, all with all',
    'loctex, a process without rows',
    'supervised, frozen stem',
    'supervised, averaged weights',
    'captioning, a head for the words',
    'captioning, words at once',
    'clip, sigmoid, all with all',
    'icmlm in 3 parts',
    'clip and words in 3 parts',
    'loctex and words in 3 parts',
    'mct, tags and words in 3 parts',
]


def check_equal(name, got):
    print(name, got)
    assert len(got['one']) == 4 and got['one'] == pytest.approx(got['two'], rel=2e-5)
    assert got['held'][0] == pytest.approx(got['held'][1], rel=2e-5) and got['samples'][0] == got['samples'][1]
    assert got['first'] < 5e-5 and got['last'] < 2e-3 and got['weights'] < 5e-4
    window = 3 if '3 parts' in name else 1
    assert got['agree'] == ([False] * (window - 1) + [True]) * 4  # gradients travel with the last part of a window only


@pytest.mark.parametrize('name', METHODS + VARIANTS)
def test_two_processes_equal_one(pair, name):
    "Losses of four steps, gradients of the first and of the last, the held-out loss, the weights, the images counted"
    check_equal(name, pair[name])


def test_three_processes_equal_one(tmp_path):
    "16 images are shared as 6, 5 and 5, in an epoch's last batch as 1, 0 and 0; parts of 4 as 2, 1 and 1"
    names = 'captioning', 'supervised', 'icmlm in 3 parts'
    for name, got in compared(tmp_path / 'out.json', *names, n=3).items():
        check_equal(name, got)


def test_averaged_weights_are_those_of_all(pair):
    "In a second fit, too, and where each process has running statistics of its own"
    for name in 'supervised, averaged weights', 'supervised, averaged weights, BatchNorm per rank':
        ((first, second),) = pair[name]['averages']
        assert first == second, name


def test_only_batchnorm_per_rank_differs_from_one_process(pair):
    got = pair['virtex, BatchNorm per rank']
    assert got['first'] > 0.05 and abs(got['one'][0] - got['two'][0]) > 1e-4
    assert pair['virtex']['first'] < 0.001 * got['first']


def test_shuffled_batchnorm_is_that_of_groups_in_one_process(pair):
    "Keys normalised among images of both processes are those of one process that shuffles its groups"
    got = pair['mct, BatchNorm of shuffled groups']
    apart = pair['mct, BatchNorm per rank']
    assert got['one'] == pytest.approx(got['two'], rel=2e-4) and got['first'] < 5e-5
    assert apart['first'] > 0.01 and abs(apart['one'][0] - apart['two'][0]) > 1e-3


# ---------------------------------------------------------------- the command: resume and faults


QUEUE = [
    'size=32',
    'steps=12',
    'baselines=False',
    'visual_width=8',
    'bs=16',
    'warmup=2',
    'width=16',
    'heads=2',
    'vocab=200',
    'head_width=16',
    'queue=44',
    'tag=1',
    'tag_threshold=0',
    'virtual_batch_size=4',
    'scenes=80',
    'valid=16',
    *SIZES[2:],
]
MCT = ['--method', 'mct', '--threads', '1', '--precision', 'fp32', '--save-every', '2', *sets(QUEUE)]

LATE = """
import time
from vlrep.training.data_parallel import DDPTraining
before,steps = DDPTraining.before_batch,[]
def before_batch(self):
    steps.append(0)
    if len(steps) == 4: time.sleep(10)
    before(self)
DDPTraining.before_batch = before_batch
"""
BROKEN = LATE.replace('time.sleep(10)', "raise ValueError('img-17 is a map of the moon')")
FULL = """
import errno, vlrep.training.run_folder as folder
def save_checkpoint(path, *args): raise OSError(errno.ENOSPC, 'No space left on device', str(path))
folder.save_checkpoint = save_checkpoint
"""


def faults(cwd):
    "The runs of `forked_ranks.py`, in this order"

    def new(name, *more):
        return [*TAGS, '--out', str(cwd / name), *more]

    run = str(cwd / 'run')

    def both(*words):
        return [list(words)] * 2

    return dict(
        whole=dict(words=both(*new('whole', '--save-every', '4'))),
        killed=dict(words=both(*new('run', '--save-every', '4')), kill=[f'{run}/steps/[0-9]*', 2, signal.SIGKILL, [1]]),
        stopped=dict(
            words=both(run),
            command='resume',
            kill=[f'{run}/steps/00001[6-9]', 1, signal.SIGTERM, [0, 1]],
            copy=[run, str(cwd / 'copy')],
        ),
        resumed=dict(words=both(run), command='resume'),
        alone=dict(words=[[str(cwd / 'copy')]], command='resume'),
        inexact=dict(
            words=[[str(cwd / 'copy'), '--inexact']],
            command='resume',
            kill=[f'{cwd}/copy/steps/00002*', 1, signal.SIGTERM, [0]],
        ),
        told=dict(words=both(*new('told', '--save-every', '4')), kill=[f'{cwd}/told/steps/*', 1, signal.SIGTERM, [1]]),
        keys_whole=dict(words=both(*MCT, '--out', str(cwd / 'keys_whole')), before={0: QUICK}),
        keys_stopped=dict(
            words=both(*MCT, '--out', str(cwd / 'keys')), kill=[f'{cwd}/keys/steps/[0-9]*', 2, signal.SIGTERM, [0, 1]]
        ),
        keys_resumed=dict(words=both(str(cwd / 'keys')), command='resume', before={0: QUICK}),
        port=dict(words=both(*new('port'))[:1], world_size=2, hold=True),
        recipe=dict(words=[new('recipe'), new('recipe', '--lr', '.1')]),
        small=dict(words=[new('small', '--set', 'valid=4')] * 5),
        slow=dict(words=both(*new('slow', '--timeout', '2')), before={1: LATE}),
        broken=dict(words=both(*new('broken')), before={1: BROKEN}),
        full=dict(words=both(*new('full', '--save-every', '4')), before={0: FULL}),
    )


@pytest.fixture(scope='module')
def fault(tmp_path_factory):
    "What became of each run, and the folder of all of them"
    cwd = tmp_path_factory.mktemp('faults')
    return run_ranks(cwd, faults(cwd)), cwd


def test_every_process_ends_with_code_0(fault):
    "The main process alone writes, prints and measures; the others leave with 0 when they have trained"
    got, cwd = fault
    assert codes(got['whole']) == [0, 0] and open_run_folder(cwd / 'whole').info['world_size'] == 2
    assert 'shared by 2 processes' in got['whole'][0]['out'] and 'report: ' in got['whole'][0]['out']
    assert got['whole'][1]['out'] == got['whole'][1]['err'] == got['whole'][0]['err'] == ''
    assert open_run_folder(cwd / 'whole').results()[-1]['numbers']['views'] == 3 * 200 + 16


def test_resume_is_exact(fault):
    "Two processes, one of them shot in mid-epoch, taken up, both stopped, taken up: the bits of a run nobody disturbed"
    got, cwd = fault
    assert codes(got['killed']) == [1, -signal.SIGKILL]
    assert last(got['killed'][0]) == 'vlrep pretrain: rank 1 ended without a message (killed?)'
    assert got['killed'][0]['seconds'] < 10
    assert codes(got['stopped']) == [143, 143] and codes(got['resumed']) == [0, 0]
    (says,) = {last(r) for r in got['stopped']}
    stop = int(re.search('stopped by SIGTERM after step (\\d+);', says)[1])
    goes = 'resuming from step '
    began = int(got['stopped'][0]['out'].split(goes)[1].split()[0])
    assert 13 > began and stop % 13 and f'{goes}{stop}' in got['resumed'][0]['out']  # 13 steps an epoch
    a = open_run_folder(cwd / 'run')
    b = open_run_folder(cwd / 'whole')
    assert rows(a.path) == rows(b.path) and sum(r['valid_loss'] is not None for r in rows(a.path)) == 4
    for which in ('last', 'best'):
        w = b.weights(which)
        assert all(torch.equal(v, w[k]) for k, v in a.weights(which).items()) and w
    assert a.results()[-1]['numbers']['table'] == b.results()[-1]['numbers']['table']


def test_resume_of_a_queue_is_exact(fault):
    "MCT in two processes, shuffled groups: stopped when its queue has begun to wrap around, and taken up"
    got, cwd = fault
    assert codes(got['keys_whole']) == codes(got['keys_resumed']) == [0, 0] and codes(got['keys_stopped']) == [143, 143]
    step = int(re.search('stopped by SIGTERM after step (\\d+);', last(got['keys_stopped'][0]))[1])
    assert 3 < step < 12 and f'resuming from step {step}' in got['keys_resumed'][0]['out']
    a = open_run_folder(cwd / 'keys')
    b = open_run_folder(cwd / 'keys_whole')
    assert rows(a.path) == rows(b.path) and a.info['notes'] == b.info['notes'] != []
    for which in ('last', 'best'):
        w = b.weights(which)
        assert all(torch.equal(v, w[k]) for k, v in a.weights(which).items()) and 'queue.keys_image_intra' in w
    held_out = b.weights('last')['queue.ids']
    assert int(b.weights('last')['queue.steps']) == 12 and (held_out >= 0).all() and len(held_out) == 60


def test_resume_with_another_number_of_processes_is_refused_unless_inexact(fault):
    got, cwd = fault
    assert codes(got['alone']) == [2] and codes(got['inexact']) == [143]
    assert 'would not be the same run (world_size: was 2, now 1)' in last(got['alone'][0])
    assert '--inexact' in last(got['alone'][0])
    assert 'no longer exact, it differs in: world_size: was 2, now 1' in got['inexact'][0]['out']
    assert open_run_folder(cwd / 'copy').info['world_size'] == 1 and 'no longer' not in got['resumed'][0]['out']


def test_a_signal_to_one_rank_stops_all(fault):
    got, cwd = fault
    assert codes(got['told']) == [143, 143] and max(r['seconds'] for r in got['told']) < 10
    assert last(got['told'][0]) == last(got['told'][1])
    assert f'after step {open_run_folder(cwd / "told").saved()[-1]};' in last(got['told'][0])


def test_a_taken_port_is_named(fault):
    (only,) = fault[0]['port']
    assert only['code'] == 2 and 'another program has this port; torchrun --standalone finds a free one' in last(only)


def test_ranks_with_different_recipes_are_refused(fault):
    got, cwd = fault
    assert codes(got['recipe']) == [2, 2] and not (cwd / 'recipe').exists()
    for r in got['recipe']:
        assert 'rank 1 would train a different run (lr 0.5 in rank 0 and 0.1 in rank 1)' in last(r)


def test_fewer_images_than_processes_are_refused(fault):
    got, cwd = fault
    assert codes(got['small']) == [2] * 5 and not (cwd / 'small').exists()
    assert all('4 images cannot be shared by 5 processes' in last(r) for r in got['small'])


def test_a_slow_rank_is_named(fault):
    got, _ = fault
    assert last(got['slow'][0]) == 'vlrep pretrain: rank 1 did not answer for 2 s'
    assert codes(got['slow']) == [1, 1] and last(got['slow'][1]).startswith('vlrep pretrain: rank 0')


def test_an_exception_in_one_rank_stops_all(fault):
    one, two = fault[0]['broken']
    assert (one['code'], two['code']) == (1, 2) and 'img-17 is a map of the moon' in last(two)
    assert 'rank 1 failed: ValueError: ' in last(one) and 'img-17 is a map of the moon' in last(one)
    assert abs(one['seconds'] - two['seconds']) < 10


def test_a_full_disk_on_the_main_process_stops_all(fault):
    one, two = fault[0]['full']
    assert (one['code'], two['code']) == (1, 1) and 'No space left on device' in last(one)
    assert 'rank 0 failed: OSError: ' in last(two) and 'No space left on device' in last(two)
