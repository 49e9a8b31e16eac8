"Tiny runs of any method in this process, stopped after any batch and continued, and what must then be equal"

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastai.callback.core import Callback
from run_folders import rows

from vlrep.data.loader import loaders
from vlrep.experiments.config import get_recipe
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.training.checkpoint import Checkpointer
from vlrep.training.interrupts import StopOnSignal, StopSignal, TrainingInterrupted
from vlrep.training.learner import GradientAccumulation, MicroBatchLoader, StatefulCallback
from vlrep.training.logging import CSVLogger
from vlrep.training.resume import resume
from vlrep.training.run_folder import Run, open_run_folder

# 96 scenes in batches of 16: two epochs of 6 steps, and 2 steps more
STEPS = 14
SMALL = dict(steps=STEPS, warmup=3, bs=16, size=32, visual_width=8)
# MCT's wraps around every 4 steps
TEXT = dict(
    width=32, heads=2, vocab=300, dropout=0.1, lookahead_k=5, bert_steps=20, region_steps=20, aux_scenes=0, queue=44
)


def small(method, **changes):
    "The method's recipe for the world, smaller; with dropout and Lookahead where it has them"
    r = get_recipe(method, 'world')
    return replace(r, **{k: v for k, v in {**SMALL, **TEXT, **changes}.items() if hasattr(r, k)})


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


def make(run, source, method='virtex', precision='fp32', accumulate=1, workers=0, **changes):
    m = METHODS[method]
    r = small(method, **changes)
    dls = loaders(
        *source,
        collate=m.collator(r, m.train_tokenizer(r, source[0])),
        bs=r.bs,
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


def train(path, source, stop=None, valid=False, steps=STEPS, **kw):
    "Begin or go on; stop after `stop` batches. The learner"
    old = (Path(path) / 'recipe.json').exists()
    run = Run.reopen(path) if old else Run.create(path, recipe={}, method='m', data='d', seed=3)
    with run:
        l = make(run, source, steps=steps, **kw)
        if old:
            [v.mul_(3) for v in l.model.state_dict().values()]  # all that matters must come from the checkpoint
        resume(l, run)
        if stop is None:
            l.fit_steps(steps)
        else:
            note = StopSignal()
            with pytest.raises(TrainingInterrupted):
                l.fit_steps(steps, [Ask(note, stop, valid), StopOnSignal(note)])
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

    callbacks = {cb.name: cb.state_dict() for cb in l.cbs if isinstance(cb, StatefulCallback)}
    callbacks['train_state'].pop('seconds')
    return flat(dict(model=l.model.state_dict(), opt=l.opt.state_dict(), kept=callbacks))


def same(a, b):
    assert a.keys() == b.keys() and len(a) > 50
    for k in a:
        assert torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k], k


def check_chain(path, source, stops, whole=None, **kw):
    """Stop one run at each of `stops`, going on from the stop before: it ends in the bits of an undisturbed one

    Every batch is one that follows its own stop, or comes soon after it. What is not saved at any stop would be lost
    at each of them, so some single stops are looked at as well, see `check`.
    """
    at, whole = whole or (path / 'whole', train(path / 'whole', source, **kw))
    seen = {}
    for stop in (*stops, None):
        l = train(path / 'chain', source, stop, **kw)
        assert l.curve.seen == {k: v for k, v in whole.curve.seen.items() if max(seen, default=0) < k <= (stop or k)}
        seen |= l.curve.seen
    same(everything(l), everything(whole))
    assert rows(path / 'chain') == rows(at) and seen == whole.curve.seen
    assert open_run_folder(path / 'chain').state('best')['step'] == open_run_folder(at).state('best')['step']
    return at, whole


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
        assert open_run_folder(path).state('best')['step'] == open_run_folder(at).state('best')['step']
    return whole
