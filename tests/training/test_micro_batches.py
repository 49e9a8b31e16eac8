"""Losses of several terms: each is a mean over its own samples in the whole batch, into however many parts it is cut,
and over the whole validation set, in whatever batches it is read"""

from dataclasses import replace

import pytest
import torch
from tools import narrated
from two_processes import SMALL

from vlrep.data.loader import loaders
from vlrep.data.records import ArrayDataset
from vlrep.data.transforms import EvalTransform, TrainTransform
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.training.learner import BaseCallback, GradientAccumulation, MicroBatchLoader

CASES = {
    'loctex': dict(group=2),
    'loctex, hulls': dict(group=2, direction='symmetric', render='hull', scales=1),
    'mct': dict(queue=40, tag=1.0, tag_threshold=0),
    'mct, company': dict(queue=64, tag=1.0, tag_threshold=1, include_own_positive=False, strict=False),
    'icmlm': dict(bert_steps=20, sampling='captions'),
    'captioning': dict(word_weight=1.0),
    'virtex': dict(word_weight=0.5),
    'loctex, words': dict(group=2, word_weight=0.5),
    'mct, words': dict(queue=40, word_weight=0.5),
}


@pytest.fixture(scope='module')
def scenes():
    return [narrated(split, 60) for split in ('train', 'valid')]


@pytest.fixture
def data(name, scenes):
    "For methods that can do without, scenes of which some have no caption"

    def some_silent(d):
        text = [[] if i % 5 < 2 or i in (2, 3, 7) else list(d.captions[i]) for i in range(len(d))]
        return ArrayDataset(
            d.pixels, d.name, ids=d.ids, split=d.split, captions=text, labels=d.labels, narratives=d.narratives
        )

    return [some_silent(d) for d in scenes] if name[:3] in ('mct', 'icm') else scenes


class Parts(BaseCallback):
    """Gradients of a step before they are clipped, and what each term counts in each part

    BatchNorm is in evaluation: its statistics are those of a part, the one thing that parts do change.
    """

    order = 7
    run_valid = False

    def __init__(self):
        self.counts = []
        self.grads = {}

    def before_batch(self):
        for m in self.model.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                m.eval()

    def after_loss(self):
        self.counts.append(torch.stack([t[1] for t in self.loss_func.terms.values()]))

    def before_step(self):
        named = self.model.named_parameters()
        self.grads = {n: p.grad.clone() for n, p in named if p.requires_grad and p.grad is not None}


class SomeTraces:
    "A collator of narratives that loses the traces of some images"

    def __init__(self, collate):
        self.collate = collate

    def __getattr__(self, k):
        return getattr(self.__dict__['collate'], k)

    def __call__(self, source, rows, *args):
        out = self.collate(source, rows, *args)
        out['trace'][torch.as_tensor(rows) % 5 < 2, :, 2] = -1e6
        return out


def fresh(name, data, parts=1, bs=60, seen=()):
    "A new learner of the case `name`"
    method = METHODS[name.partition(',')[0]]
    recipe = next(iter(r for n, r in method.recipes.items() if n == 'world'))
    fields = {**SMALL, **CASES[name], 'bs': bs, 'steps': 2, 'sync_bn': False}
    recipe = replace(recipe, **{k: v for k, v in fields.items() if hasattr(recipe, k)})
    tokenizer = method.train_tokenizer(recipe, data[0])
    collate = method.collator(recipe, tokenizer)
    if method.name == 'loctex':
        collate = SomeTraces(collate)
    dls = loaders(
        *data,
        collate=collate,
        size=recipe.size,
        bs=bs,
        device='cpu',
        seed=3,
        aug=TrainTransform(recipe.size, (0.1, 0.3)),
        plain=EvalTransform(recipe.size),
    )
    dls.loaders[0] = MicroBatchLoader(dls.train, parts)
    return make_learner(method, recipe, dls, seed=3, precision='fp32', cbs=[GradientAccumulation(parts), *seen])


def in_parts(name, data, parts, counted=True):
    "The first step of a learner whose batch is cut into `parts`"
    seen = Parts()
    learn = fresh(name, data, parts, seen=[seen])
    if not counted:
        learn.dls.train.counts = None
    learn.fit_steps(1)
    total, count = learn.train_state.sums[0].tolist()
    return seen, total / count


def far(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.mark.parametrize('name', CASES)
def test_gradients_of_micro_batches_are_those_of_the_batch(name, data):
    "Gradients and loss of a batch in 1, 2, 3 and 5 parts; uncounted, those of 3 parts are others"
    whole, loss = in_parts(name, data, 1)
    size = max(float(g.abs().max()) for g in whole.grads.values())
    for n in (2, 3, 5):
        seen, same = in_parts(name, data, n)
        assert len(seen.counts) == n and torch.allclose(sum(seen.counts), whole.counts[0])
        print(name, n, far(whole.grads, seen.grads), size, loss - same)
        assert far(whole.grads, seen.grads) < 1e-6 * max(1, size) and abs(loss - same) < 1e-5
    apart, _ = in_parts(name, data, 3, counted=False)
    assert far(whole.grads, apart.grads) > 1e-4 * size


class Held(BaseCallback):
    "Weight, total and count of each term of the loss, batch by batch of a validation"

    def before_validate(self):
        self.seen = []

    def after_loss(self):
        self.seen.append(self.loss_func.loss(self.pred, self.learn.yb[0]))


@pytest.mark.parametrize('name', CASES)
def test_the_held_out_loss_is_that_of_all_samples(name, data):
    "The weighted sum of each term's total over its count, of all batches; no mean over batches"
    held_out = Held()
    learn = fresh(name, data, bs=16, seen=[held_out])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # untrained, all words cost alike
        torch.manual_seed(0)
        for p in learn.model.parameters():
            p += 0.05 * torch.randn_like(p)
    got = learn.validate()[0]

    def mean(k):
        each = [terms[k] for terms in held_out.seen]
        return float(sum(w * t for w, t, _ in each)) / max(1.0, float(sum(n for *_, n in each)))

    want = sum(map(mean, held_out.seen[0]))
    (total, count) = learn.recorder.loss.sums[0].tolist()
    print(name, got, want, total / count)
    assert len(held_out.seen) == 4 and got == pytest.approx(want, rel=1e-6)
    assert (abs(total / count - got) > 1e-5) == (len(learn.recorder.loss.terms) > 1)  # `words` is not asked for
