"""A run that is stopped and continued is the run that never stopped: the same losses, the same bits

Within this process one run is stopped after every single batch, and every method once;
`test_resume_killed_processes.py` kills real processes.
"""

from functools import partial

import pytest
import resuming
import torch
from resuming import Crash, everything, same
from run_folders import rows
from tools import narrated

from vlrep.methods.base import METHODS
from vlrep.training.learner import StopAtStep
from vlrep.training.resume import resume
from vlrep.training.run_folder import Run

# 32 scenes in batches of 8: two epochs of 4 steps, and 2 steps more; MCT's queue wraps around every 4 steps
STEPS = 10
SHORT = dict(steps=STEPS, bs=8, lookahead_k=3, queue=22)
check, check_chain, make, train = (
    partial(f, **SHORT) for f in (resuming.check, resuming.check_chain, resuming.make, resuming.train)
)


@pytest.fixture(scope='module')
def source():
    return narrated('train', 32), narrated('valid', 16)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, source):
    "Folder and learner of a run that was never stopped"
    path = tmp_path_factory.mktemp('undisturbed') / 'whole'
    return path, train(path, source)


# One run is stopped after every batch. By itself, a stop at the first step, before the first step of a Lookahead window
# (3, 6), at an epoch's border (4) and at the very end (10)
def test_a_stop_at_every_step_changes_no_bit(tmp_path, source, undisturbed):
    check_chain(tmp_path, source, range(1, STEPS + 1), undisturbed)
    whole = check(tmp_path, source, [1, 3, 4, 6, 10], undisturbed)
    assert whole.opt.opt.counter == STEPS % 3 and len(set(whole.curve.seen.values())) == STEPS
    assert whole.train_state.epoch == 2


def test_a_stop_within_an_accumulation_window_changes_no_bit(tmp_path, source):
    "At its first part, its second and its end, in the first epoch and later, and at an epoch's border (12)"
    stops = [1, 2, 5, 11, 12, 13, 22, 29]
    at, whole = check_chain(tmp_path, source, stops, accumulate=3)
    check(tmp_path, source, [5, 13], (at, whole), accumulate=3)
    assert whole.train_state.batch == 3 * STEPS and whole.train_state.step == STEPS


def test_stops_in_bf16_change_no_bit(tmp_path, source):
    "One run is stopped within a window, at its end and at an epoch's border, another one within a window alone"
    at, whole = check_chain(tmp_path, source, [1, 3, 8, 13], precision='bf16', accumulate=2)
    check(tmp_path, source, [5], (at, whole), precision='bf16', accumulate=2)
    assert whole.train_state.batch == 2 * STEPS and whole.train_state.step == STEPS


def test_a_stop_within_validation_changes_no_bit(tmp_path, source, undisturbed):
    check(tmp_path, source, [(4, True), (8, True), (10, True)], undisturbed)


def test_a_stop_with_workers_changes_no_bit(tmp_path, source, undisturbed):
    "Stopped and continued with 2, compared with 0"
    check(tmp_path, source, [2, 4, 7], undisturbed, workers=2)


def test_a_crash_between_checkpoints_cuts_the_log_back(tmp_path, source, undisturbed):
    "The log has gone further than the checkpoint: it is cut back, and the steps are done again"
    at, whole = undisturbed
    with Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3) as r:
        with pytest.raises(ZeroDivisionError):
            make(r, source).fit_steps(STEPS, [Crash(7)])
        assert r.saved() == [4] and r.log()[-1]['step'] == 6
    l = train(tmp_path / 'run', source)
    same(everything(l), everything(whole))
    assert rows(tmp_path / 'run') == rows(at)


def test_a_run_of_no_steps_has_one_row_after_a_resume(tmp_path, source):
    "A run of no steps that is resumed has its row in the log once"
    for _ in range(2):
        run = (
            Run.reopen(tmp_path / 'run')
            if (tmp_path / 'run').exists()
            else Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3)
        )
        with run:
            l = make(run, source)
            resume(l, run)
            l.fit(1, cbs=[StopAtStep(0)])
        for dl in l.dls.loaders:
            dl.close()
        assert [r['step'] for r in rows(tmp_path / 'run')] == [0]


@pytest.mark.parametrize('method', METHODS)
def test_a_stop_changes_no_bit_of_any_method(tmp_path, source, method, undisturbed):
    check(tmp_path, source, [5], undisturbed if method == 'virtex' else None, method=method)


def test_forgetting_any_state_changes_bits(tmp_path, source, undisturbed):
    "A check that can fail: forget something, and the bits differ"
    whole = everything(undisturbed[1])

    def spoil(path, change):
        with Run.reopen(path) as run:
            state = run.state()
            change(state['training'])
            run.save('last', run.weights('last'), state)

    for i, change in enumerate(
        [
            lambda s: s['optimiser'].update(counter=0),
            lambda s: s['callbacks']['train_state'].update(batch=6),
            lambda s: [v['momentum_buffer'].zero_() for v in s['optimiser']['inner']['state'].values()],
        ]
    ):
        train(tmp_path / f'{i}', source, 7)
        spoil(tmp_path / f'{i}', change)
        l = everything(train(tmp_path / f'{i}', source))
        assert any(not torch.equal(l[k], v) for k, v in whole.items() if k.startswith('.model') and torch.is_tensor(v))
