"""Processes that wait for each other before they have met: one was refused, one does not come, the address is wrong;
and ranks started by environment variables that take up a run which is trained and not evaluated"""

import os
import signal
import time

import forked
import pytest
from ranks import TAGS, codes, free_port, last, run_ranks
from tools import QUICK, sets

from vlrep.training.run_folder import open_run_folder

FEW = [*TAGS, *sets(['scenes=100', 'steps=4'])]
AT = "import os; os.environ['MASTER_ADDR'] = '{}'"
SOON = 'import vlrep.training.distributed as d; d._REACH = 1.'
AGAIN = (
    QUICK
    + """
from pathlib import Path
for name in ('result.jsonl', 'report.html'): Path({!r}, name).unlink()
"""
)


def jobs(cwd):
    "The runs of `forked_ranks.py`, in this order"

    def new(name, *more):
        return [*FEW, '--out', str(cwd / name), *more]

    run = str(cwd / 'run')
    got = dict(
        first=dict(words=[new('a', '--no-such-option', '1'), new('a'), new('a')]),
        last=dict(words=[new('b'), new('b'), new('b', '--root', '/nowhere')]),
        alone=dict(words=[new('c', '--timeout', '2')], world_size=2),
        nobody=dict(words=[[], new('d', '--timeout', '2')], before={0: 'import os; os._exit(0)'}),
        strange=dict(
            words=[[], new('d')], before={0: 'import os; os._exit(0)', 1: SOON + ';' + AT.format('no.invalid')}
        ),
        number=dict(words=[new('d')], world_size=2, before={0: "import os; os.environ['MASTER_PORT'] = 'http'"}),
        small=dict(words=[new('e', '--set', 'bs=2')] * 3),
        trained=dict(words=[[*FEW, '--out', run]] * 2, before={0: QUICK}),
    )
    for k in range(8):
        got[f'again{k}'] = dict(words=[[run]] * 2, command='resume', before={0: AGAIN.format(run)})
    return got


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "What became of each run, and the folder of all of them"
    cwd = tmp_path_factory.mktemp('ranks')
    return run_ranks(cwd, jobs(cwd)), cwd


@pytest.mark.parametrize('name,rank', [('first', 0), ('last', 2)])
def test_a_rank_that_is_refused_ends_the_others(done, name, rank):
    "By its own words, before all have met: the others end at once, with the reason"
    got, cwd = done
    ranks = got[name]
    assert [r['code'] for r in ranks] == [2 if r == rank else 1 for r in range(3)] and not list(cwd.glob('[ab]'))
    own = last(ranks[rank]).removeprefix('vlrep pretrain: ')
    for r in range(3):
        if r != rank:
            assert last(ranks[r]) == f'vlrep pretrain: rank {rank} was refused: {own}'
    assert max(r['seconds'] for r in ranks) < 15


def test_a_rank_that_does_not_come_is_named(done):
    (alone,), (_, nobody) = done[0]['alone'], done[0]['nobody']
    assert alone['code'] == nobody['code'] == 1
    assert last(alone) == 'vlrep pretrain: rank 1 of 2 did not come within 2 s'
    assert 'nobody answers there after 2 s (Connection refused)' in last(nobody) and 'MASTER_PORT=' in last(nobody)


def test_wrong_addresses_are_named(done):
    (_, strange), (number,) = done[0]['strange'], done[0]['number']
    assert strange['code'] == 1 and 'MASTER_ADDR=no.invalid' in last(strange) and strange['seconds'] < 20
    assert number['code'] == 2 and 'MASTER_PORT=http: expected a whole number' in last(number)


def test_a_batch_smaller_than_the_processes_is_refused(done):
    "Refused before there is a folder, and nobody names anything else"
    got, cwd = done
    assert codes(got['small']) == [2] * 3 and not (cwd / 'e').exists()
    for r in got['small']:
        assert r['err'] == 'vlrep pretrain: bs=2: a batch of so many images cannot be shared by 3 processes\n'


def test_a_trained_run_is_evaluated_by_resumed_ranks(done):
    "Taken up eight times: the other ranks leave well, although the main process has nothing to train"
    got, cwd = done
    assert codes(got['trained']) == [0, 0], got['trained']
    for k in range(8):
        assert codes(got[f'again{k}']) == [0, 0], got[f'again{k}']
    assert not open_run_folder(cwd / 'run').missing()


def test_a_signal_ends_a_rank_that_waits(tmp_path):
    "For another that does not come"
    env = {**os.environ, 'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    p = forked.start(['pretrain', *FEW, '--out', tmp_path / 'run'], tmp_path, env)
    try:
        time.sleep(3)
        assert p.poll() is None
        p.send_signal(signal.SIGTERM)
        assert p.wait(10) == -signal.SIGTERM
    finally:
        p.kill()
