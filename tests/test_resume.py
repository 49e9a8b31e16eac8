"""A run that is stopped and continued is the run that never stopped: the same losses, the same bits

Within this process every method is stopped after every single batch, in both precisions;
`test_resume_processes.py` kills real processes.
"""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastai.callback.core import Callback
from tools import told

from vlrep.core.run_facts import read_log
from vlrep.data.loader import loaders
from vlrep.experiments.commands import METHODS
from vlrep.experiments.config import get_recipe
from vlrep.methods.learner import make_learner
from vlrep.training.checkpoint import Checkpointer
from vlrep.training.interrupts import Note, StopOnSignal, TrainingInterrupted
from vlrep.training.learner import GradientAccumulation, MicroBatchLoader, StatefulCallback, StopAtStep
from vlrep.training.logging import CSVLogger
from vlrep.training.resume import resume
from vlrep.training.run_folder import Run, load

# 96 scenes in batches of 16: two epochs of 6 steps, and 2 steps more
STEPS = 14
BATCHES = 6
SMALL = dict(steps=STEPS, warmup=3, bs=16, size=32, visual_width=8)
# MCT's wraps around every 4 steps
TEXT = dict(
    width=32, heads=2, vocab=300, dropout=0.1, lookahead_k=5, bert_steps=20, region_steps=20, aux_scenes=0, queue=44
)


@pytest.fixture(scope='module')
def source():
    return told('train', 96), told('valid', 32)


def small(method):
    "The method's recipe for the world, smaller; with dropout and Lookahead where it has them"
    r = get_recipe(method, 'world')
    return replace(r, **SMALL, **{k: v for k, v in TEXT.items() if hasattr(r, k)})


class Ask(Callback):
    "Ask to stop after so many batches, in training or within the validation that follows"

    order = 94

    def __init__(self, note, batch, valid=False):
        self.note = note
        self.batch = batch
        self.valid = valid

    def after_batch(self):
        if self.learn.training != self.valid and self.learn.train_state.batch == self.batch:
            self.note.got = signal.SIGTERM


class Crash(Callback):
    "An error of the program after so many steps"

    run_valid = False

    def __init__(self, steps):
        self.steps = steps

    def after_batch(self):
        if self.learn.train_state.step == self.steps:
            1 / 0


class Curve(Callback):
    "The loss of every training batch, as it is"

    run_valid = False

    def __init__(self):
        self.seen = {}

    def after_batch(self):
        self.seen[self.learn.train_state.batch] = self.learn.loss.item()


def make(run, source, method='virtex', precision='fp32', accumulate=1, workers=0):
    m = METHODS[method]
    r = small(method)
    dls = loaders(
        *source,
        collate=m.collator(r, m.train_tokenizer(r, source[0])),
        bs=16,
        size=32,
        seed=3,
        device='cpu',
        workers=workers,
    )
    dls.loaders[0] = MicroBatchLoader(dls.train, accumulate)
    return make_learner(
        m,
        r,
        dls,
        seed=3,
        precision=precision,
        cbs=[GradientAccumulation(accumulate), Curve(), CSVLogger(run / 'log.csv', every=2), Checkpointer(run)],
    )


def train(path, source, stop=None, valid=False, **kw):
    "Begin or go on; stop after `stop` batches. The learner"
    old = (Path(path) / 'recipe.json').exists()
    run = Run.reopen(path) if old else Run.create(path, recipe={}, method='m', data='d', seed=3)
    with run:
        l = make(run, source, **kw)
        if old:
            [v.mul_(3) for v in l.model.state_dict().values()]  # all that matters must come from the checkpoint
        resume(l, run)
        if stop is None:
            l.fit_steps(STEPS)
        else:
            note = Note()
            with pytest.raises(TrainingInterrupted):
                l.fit_steps(STEPS, [Ask(note, stop, valid), StopOnSignal(note)])
    for dl in l.dls.loaders:
        dl.close()
    return l


def everything(l):
    "Weights, buffers, the optimiser's memory, counters: all that a run is"

    def flat(o, name=''):
        if isinstance(o, dict):
            return {k: v for n, x in o.items() for k, v in flat(x, f'{name}.{n}').items()}
        if isinstance(o, (list, tuple)):
            return flat(dict(enumerate(o)), name)
        return {name: o}

    kept = {cb.name: cb.state_dict() for cb in l.cbs if isinstance(cb, StatefulCallback)}
    kept['train_state'].pop('seconds')
    return flat(dict(model=l.model.state_dict(), opt=l.opt.state_dict(), kept=kept))


def same(a, b):
    assert a.keys() == b.keys() and len(a) > 50
    for k in a:
        assert torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k], k


def rows(path):
    times = 'seconds', 'images_s', 'memory_mb'
    return [{k: v for k, v in r.items() if k not in times} for r in read_log(Path(path) / 'log.csv')]


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, source):
    "Folder and learner of a run that was never stopped"
    path = tmp_path_factory.mktemp('undisturbed') / 'whole'
    return path, train(path, source)


def check(tmp_path, source, stops, whole=None, **kw):
    "Stop at each of `stops`, go on, compare with `whole`, the folder and the learner of an undisturbed run"
    at, whole = whole or (tmp_path / 'whole', train(tmp_path / 'whole', source, **kw))
    for i, stop in enumerate(stops):
        path = tmp_path / f'{i}'
        first = train(path, source, *stop if isinstance(stop, tuple) else (stop,), **kw)
        l = train(path, source, **kw)
        same(everything(l), everything(whole))
        assert rows(path) == rows(at)
        n = max(first.curve.seen)
        assert (
            l.curve.seen == {k: v for k, v in whole.curve.seen.items() if k > n}
            and {**first.curve.seen, **l.curve.seen} == whole.curve.seen
        )
        assert load(path).state('best')['step'] == load(at).state('best')['step']
    return whole


# After every batch: in mid-epoch, at an epoch's border (6, 12), before the first step of a Lookahead window (5, 10) and
# within one, at the very end (14)
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_stop_at_every_step(tmp_path, source, precision, undisturbed):
    whole = undisturbed if precision == 'fp32' else None
    whole = check(tmp_path, source, range(1, STEPS + 1), whole, precision=precision)
    assert whole.opt.opt.counter == STEPS % 5 and len(set(whole.curve.seen.values())) == STEPS
    assert whole.train_state.epoch == 2


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_stop_within_an_accumulation_window(tmp_path, source, precision):
    whole = check(tmp_path, source, [1, 2, 8, 17, 18, 19, 31, 41], precision=precision, accumulate=3)
    assert whole.train_state.batch == 3 * STEPS and whole.train_state.step == STEPS


def test_stop_within_validation(tmp_path, source, undisturbed):
    check(tmp_path, source, [(6, True), (12, True), (14, True)], undisturbed)


def test_stop_with_workers(tmp_path, source, undisturbed):
    "Stopped and continued with 2, compared with 0"
    check(tmp_path, source, [4, 6, 9], undisturbed, workers=2)


def test_crash_between_checkpoints(tmp_path, source, undisturbed):
    "The log has gone further than the checkpoint: it is cut back, and the steps are done again"
    at, whole = undisturbed
    with Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3) as r:
        with pytest.raises(ZeroDivisionError):
            make(r, source).fit_steps(STEPS, [Crash(11)])
        assert r.saved() == [6] and r.log()[-1]['step'] == 10
    l = train(tmp_path / 'run', source)
    same(everything(l), everything(whole))
    assert rows(tmp_path / 'run') == rows(at)


def test_validated_untrained_and_again(tmp_path, source):
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


def test_stop_twice(tmp_path, source, undisturbed):
    at, whole = undisturbed
    for stop in (3, 4, 12, None):
        l = train(tmp_path / 'often', source, stop)
    same(everything(l), everything(whole))
    assert rows(tmp_path / 'often') == rows(at)


@pytest.mark.parametrize('method', METHODS)
def test_every_method(tmp_path, source, method, undisturbed):
    check(tmp_path, source, [7], undisturbed if method == 'virtex' else None, method=method)


def test_state_is_complete(tmp_path, source, undisturbed):
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
            lambda s: s['callbacks']['train_state'].update(batch=8),
            lambda s: [v['momentum_buffer'].zero_() for v in s['optimiser']['inner']['state'].values()],
        ]
    ):
        train(tmp_path / f'{i}', source, 9)
        spoil(tmp_path / f'{i}', change)
        l = everything(train(tmp_path / f'{i}', source))
        assert any(not torch.equal(l[k], v) for k, v in whole.items() if k.startswith('.model') and torch.is_tensor(v))
