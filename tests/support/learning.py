"""What each method must learn in a tiny training

`methods/test_contract.py` asks it once, `make robust` with other seeds, precisions, threads and instruction sets.
"""

import dataclasses
import functools
import json
import re

import torch
from paths import ROOT

from vlrep.core.testing import check_learning
from vlrep.datasets.base import DATASETS
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import get_recipe, override_all
from vlrep.experiments.resolve_options import tiny_changes
from vlrep.experiments.sanity_checks import overfit
from vlrep.experiments.splits import open_splits
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner


@functools.cache
def material(name):
    "Method, tiny recipe, images and tokenizer"
    method = METHODS[name]
    parts = [get_recipe(name, 'world'), DATASETS['world'].options]
    recipe, options = override_all(
        parts, [*tiny_changes(*parts), 'scenes=320', 'valid=32', 'shown=16', 'steps=60', 'warmup=15']
    )
    splits = open_splits(method, recipe, options, 'world')
    return method, recipe, splits, method.train_tokenizer(recipe, splits['train'])


class Case:
    """A method, its tiny recipe and images

    `learn` is trained for three short epochs, `before` is its held-out loss at first
    """

    def __init__(self, name, seed=0, precision='fp32'):
        self.name = name
        self.method, self.recipe, self.splits, self.tokenizer = material(name)

        def look(learn):
            self.before = float(learn.validate()[0])

        self.learn = train_on(
            self.method,
            self.recipe,
            self.splits,
            'world',
            self.tokenizer,
            seed=seed,
            precision=precision,
            log=lambda s: None,
            begin=look,
        )
        self.batch = self.learn.dls.valid.one_batch()[0]

    def fresh(self, **kw):
        return make_learner(self.method, self.recipe, self.learn.dls, precision='fp32', **kw)

    def answer(self, model):
        with torch.no_grad():
            return model.eval()(self.batch)


def check_falls(case):
    """The training loss of the last epoch is lower than the loss at first, by 2 % of it

    A model that begins with a BERT learns less in so few steps than sets of fifty masked words differ from each other:
    it is asked for the same words again
    """
    again = 'fuse' in case.learn.capabilities(case.learn.model)
    after = float(case.learn.validate()[0]) if again else case.learn.train_state.mean()
    check_learning(f'{case.name}: fall of the loss in 60 steps', case.before - after, 0.02 * case.before)


def learns_by_heart(name, steps, seed=0, precision='fp32', **changes):
    "Overfit a few images, sixteen where a BERT has to learn from their captions; did it work, and what was said?"
    method, recipe, splits, tokenizer = material(name)
    changes = {k: v for k, v in dict(width=64, heads=4, **changes).items() if hasattr(recipe, k)}
    recipe = dataclasses.replace(recipe, **changes)
    n = 16 if hasattr(recipe, 'bert_steps') else 8
    lines = []
    kw = dict(tokenizer=tokenizer, seed=seed, precision=precision, log=lines.append, n=n, steps=steps)
    return overfit(method, recipe, splits, **kw), lines[-1]


def check_by_heart(name, seed=0, precision='fp32', maximum=600):
    "A few images are overfitted"
    done, said = learns_by_heart(name, maximum, seed, precision)
    steps = int(re.search(r'in (\d+) steps', said)[1]) if done else float('inf')
    n = re.search(r'(\d+) images', said)[1]
    check_learning(f'{name}: steps there were for {n} images, times those needed', maximum / steps, 1.0)


def falls(seed, precision):
    for name in METHODS:
        check_falls(Case(name, seed, precision))


def by_heart(seed, precision):
    for name in METHODS:
        check_by_heart(name, seed, precision)


def first_example(seed, precision):
    "The README's example, as printed but for seed and precision"
    cells = json.loads((ROOT / 'nbs' / 'index.ipynb').read_text(encoding='utf-8'))['cells']
    sources = (''.join(c['source']) for c in cells if c['cell_type'] == 'code')
    (code,) = (s for s in sources if 'learn.fit_steps(' in s)
    for old, new in (
        ("method='virtex', ", f"method='virtex', seed={seed}, "),
        ('learner_of(dls)', f'learner_of(dls, precision={precision!r})'),
    ):
        assert code.count(old) == 1, (old, code)
        code = code.replace(old, new)
    ns = {}
    exec(code, ns)
    fall = ns['before'] - ns['learn'].validate()[0]
    check_learning('README: fall of the held-out loss in 100 steps', fall, 0.25 * ns['before'])
