"""A sample's loss and embedding depend on neither its neighbours, nor their order, nor padding: for every model

In evaluation mode and single precision on one thread: what is left is rounding, a few parts in a million.
"""

from dataclasses import replace

import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from resuming import small
from tools import narrated

from vlrep.data.loader import loaders
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.training.learner import GradientAccumulation, MicroBatchLoader


def alone(method):
    "The small recipe, without what compares samples with each other, and with room for padding"
    r = small(method)
    if hasattr(r, 'mask_share'):
        r = replace(r, mask_share=0.5)  # each text asks for a word
    return replace(r, **{k: v for k, v in dict(contrast=0.0, max_len=100).items() if hasattr(r, 'contrast')})


def longer(batch, n, pad):
    "The batch with `n` more columns of padding"
    out = {**batch, 'tokens': torch.nn.functional.pad(batch['tokens'], (0, n), value=pad)}
    if 'segments' in batch:
        out['segments'] = torch.nn.functional.pad(batch['segments'], (0, n), value=1)
    if 'span' in batch:
        out['span'] = torch.cat([batch['span'], torch.tensor([0.0, -1.0]).expand(len(batch['tokens']), n, 2)], 1)
    return out


@pytest.fixture(scope='module', params=METHODS)
def case(request):
    "A method's model and loss, and a batch of 12 captioned scenes"
    method = METHODS[request.param]
    r = alone(request.param)
    train = narrated('train', 96)
    valid = narrated('valid', 24)
    dls = loaders(
        train, valid, collate=method.collator(r, method.train_tokenizer(r, train)), bs=12, size=32, seed=3, device='cpu'
    )
    learn = make_learner(method, r, dls, seed=3, precision='fp32')
    model = learn.model
    batch = next(iter(dls.valid))[0]
    if 'tokens' in batch:
        assert len(set(batch['lengths'].tolist())) > 3  # captions of different lengths, or nothing is tested
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))))
    model.eval()
    if hasattr(model.visual, 'autocast'):
        model.visual.autocast = None
    return model, learn.loss_func, batch


def rows(batch, i):
    return {k: v[i] for k, v in batch.items()}


@torch.no_grad()
def total(case, batch):
    "Total and count of the loss, or, if it has several terms, of each: these are means over samples of their own"
    whole = case[1].counted(case[0](batch), batch)
    return tuple(float(x) for pair in case[1].terms.values() or [whole] for x in pair)


def close(a, b):
    assert a == pytest.approx(b, rel=5e-6), (a, b)


def skip_pairs(model):
    "A contrast of the pairs of a batch has nothing that a sample costs alone"
    if type(model).__name__ == 'CLIPModel':
        pytest.skip('tells the pairs of a batch apart')


def single(case):
    return torch.tensor([total(case, rows(case[2], slice(i, i + 1))) for i in range(12)], dtype=torch.float64)


def test_a_sample_does_not_depend_on_its_neighbours(case):
    "The batch costs what its samples cost one by one"
    skip_pairs(case[0])
    each = single(case)
    assert len(set(each[:, 0].tolist())) == 12
    close(total(case, case[2]), tuple(each.sum(0).tolist()))


def test_a_batch_does_not_depend_on_its_order(case):
    perm = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    close(total(case, rows(case[2], perm)), total(case, case[2]))
    skip_pairs(case[0])
    for i in (0, 5, 11):
        close(
            total(case, rows(case[2], torch.tensor([i, (i + 3) % 12, (i + 7) % 12]))),
            tuple(single(case)[[i, (i + 3) % 12, (i + 7) % 12]].sum(0).tolist()),
        )


def test_a_batch_does_not_depend_on_padding(case):
    model, _, batch = case
    if 'tokens' not in batch:
        pytest.skip('reads no captions')
    pad = getattr(model, 'pad', 4)
    for n in (1, 4):
        close(total(case, longer(batch, n, pad)), total(case, batch))


def test_the_loss_does_not_depend_on_bucketing(case):
    "Batches of captions of like length cost what mixed ones cost"
    model, _, batch = case
    if 'tokens' not in batch:
        pytest.skip('reads no captions')
    skip_pairs(model)
    order = batch['lengths'].argsort()
    got = []
    for i in order.split(4):
        b = rows(batch, i)
        b.update({k: b[k][:, : int(b['lengths'].max())] for k in ('tokens', 'span', 'segments') if k in b})
        got.append(total(case, b))
    close(tuple(map(sum, zip(*got))), total(case, batch))


class Calm(Callback):
    "No BatchNorm statistics of the batch, no dropout: nothing that looks at several samples, or at dice"

    def before_batch(self):
        self.model.eval()


class Peek(Callback):
    "The gradient that reaches the optimiser"

    order = 40

    def before_step(self):
        self.grad = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.requires_grad]).clone()
        raise CancelFitException()


@pytest.mark.parametrize('method', METHODS)
def test_accumulated_gradients_are_those_of_the_batch(method):
    "The gradient of 4 parts of a batch, of unequal counts, is that of the batch"
    m = METHODS[method]
    r = alone(method)
    train = narrated('train', 96)
    valid = narrated('valid', 24)
    # ICMLM's tags are a mean over the images of each part, its words one over all triplets: parts are compared by words
    if hasattr(r, 'tag_weight'):
        r = replace(r, tag_weight=0.0)
    if hasattr(r, 'mim'):
        r = replace(r, mim='off')  # and so are ViLBERT's masked regions
    got = []
    collate = m.collator(r, m.train_tokenizer(r, train))
    for n in (1, 4):
        dls = loaders(train, valid, collate=collate, bs=18, size=32, seed=3, device='cpu')
        dls.loaders[0] = MicroBatchLoader(dls.train, n)
        l = make_learner(METHODS[method], r, dls, seed=3, precision='fp32', cbs=[GradientAccumulation(n), Calm()])
        skip_pairs(l.model)
        peek = Peek()
        l.fit_steps(1, [peek])
        got.append(peek.grad)
    assert (got[0] - got[1]).norm() < 1e-5 * got[0].norm() and got[0].norm() > 0


@torch.no_grad()
def test_an_embedding_does_not_depend_on_the_batch(case):
    model, _, batch = case
    images = batch['images']
    whole = model.visual(images).mean((2, 3))
    for i in (0, 7):
        torch.testing.assert_close(model.visual(images[i : i + 1]).mean((2, 3))[0], whole[i], rtol=1e-5, atol=1e-5)
    perm = torch.arange(11, -1, -1)
    torch.testing.assert_close(model.visual(images[perm]).mean((2, 3)), whole[perm], rtol=1e-5, atol=1e-5)
