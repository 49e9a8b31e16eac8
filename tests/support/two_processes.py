"""Every method trained through its Learner, alone and by two processes: what `test_distributed` compares

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python tests/support/two_processes.py OUT.json [CASE ...]

More than two processes do as well; `two` is what they found.
"""

import json
import os
import sys
from dataclasses import replace

import torch
from tools import narrated

from vlrep.core.progress import keep_memory
from vlrep.data.loader import loaders
from vlrep.data.transforms import EvalTransform, TrainTransform
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.training.distributed import Dist, init_dist
from vlrep.training.learner import BaseCallback, GradientAccumulation, MicroBatchLoader

SMALL = dict(
    visual_depth=10,
    visual_width=8,
    width=16,
    heads=2,
    vocab=200,
    size=32,
    bs=16,
    steps=4,
    warmup=1,
    dropout=0.0,
    sync_bn=True,
)
# of the recipes' rates: rounding, which depends on the processor, grows from step to step, and faster with larger ones
SLOWER = 0.2
# Adam makes whole steps of rounding where a gradient is zero, as that of the keys' biases is, unless its eps is large
FUSION = dict(bert_steps=20, region_steps=20, depth=2, adam_eps=1e-3, aux_scenes=0)
CASES = {
    m: {}
    for m in ('virtex', 'captioning', 'masked_lm', 'token_cls', 'multilabel', 'supervised', 'tag_prediction', 'rotnet')
}
CASES |= {
    'icmlm': dict(bert_steps=20),
    'loctex': {},
    'loctex, groups of 4, all with all': dict(bs=11, group=4, local_loss=False, direction='symmetric'),
    'loctex, a process without rows': dict(include_positive=True),
    'mct': dict(queue=28, bs=11),
    'mct, BatchNorm of shuffled groups': dict(queue=28, sync_bn=False, virtual_batch_size=8),
    'mct, BatchNorm per rank': dict(queue=28, sync_bn=False, virtual_batch_size=0, shuffle_bn=False),
    'captioning, a head for the words': dict(word_weight=1.0),
    'captioning, words at once': dict(parallel=0.5),
    'clip': dict(bs=11, word_weight=1.0),
    'clip, sigmoid, all with all': dict(bs=11, loss='sigmoid', local_loss=False, cnn_lr=0.1, text_lr=0.05, lr=0.05),
    'icmlm in 3 parts': dict(bert_steps=20, bs=11, sampling='captions', accumulate=3),
    'clip and words in 3 parts': dict(bs=11, word_weight=1.0, accumulate=3),
    'loctex and words in 3 parts': dict(bs=11, word_weight=1.0, accumulate=3),
    'mct, tags and words in 3 parts': dict(queue=28, bs=11, tag=1.0, tag_threshold=0, word_weight=1.0, accumulate=3),
    'visualbert': FUSION,
    'vilbert': {**FUSION, 'bs': 11},
    'virtex, BatchNorm per rank': dict(sync_bn=False),
    'supervised, frozen stem': dict(frozen_stages=1),
    'supervised, averaged weights': dict(ema=0.8),
    'supervised, averaged weights, BatchNorm per rank': dict(ema=0.8, sync_bn=False),
}


class Record(BaseCallback):
    "Loss of every step, and the gradients of the first and of the last, before they are clipped"

    order = 7
    run_valid = False

    def __init__(self):
        self.losses = []
        self.grads = []
        self.totals = []
        self.agree = []

    def after_loss(self):
        l = self.loss_func
        self.totals.append((l.global_total.item(), l.global_count.item()))

    def after_backward(self):
        "Do all processes hold the same gradient?"
        own = float(next(p.grad.abs().sum() for p in self.model.parameters() if p.requires_grad))
        self.agree.append(len(set(self.learn.dist.objects(own))) == 1)

    def before_step(self):
        total, count = map(sum, zip(*self.totals))
        self.losses.append(total / count)
        self.totals = []
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if len(self.losses) in (1, SMALL['steps']):
            self.grads.append({n: p.grad.clone() for n, p in named})


def train(name, dist, data, accumulate=1, **changes):
    "A fresh learner of the method, trained; its record"
    method = METHODS[name.partition(',')[0].partition(' ')[0]]
    recipe = next(iter(r for n, r in method.recipes.items() if n == 'world'))
    slow = {k: SLOWER * getattr(recipe, k) for k in ('cnn_lr', 'lr', 'text_lr') if hasattr(recipe, k)}
    fields = {k: v for k, v in {**SMALL, **slow, **changes}.items() if hasattr(recipe, k)}
    recipe = replace(recipe, **fields)
    tokenizer = method.train_tokenizer(recipe, data[0])
    dls = loaders(
        *data,
        collate=method.collator(recipe, tokenizer),
        size=recipe.size,
        bs=recipe.bs,
        device='cpu',
        seed=3,
        aug=TrainTransform(recipe.size, (0.6, 1.0)),
        plain=EvalTransform(recipe.size),
        rank=dist.rank,
        world_size=dist.world_size,
    )
    dls.loaders[0] = MicroBatchLoader(dls.train, accumulate)
    rec = Record()
    cbs = [GradientAccumulation(accumulate), rec]
    learn = make_learner(method, recipe, dls, seed=3, precision='fp32', cbs=cbs)
    for steps in (3, recipe.steps) if recipe.ema else [recipe.steps]:
        learn.fit_steps(steps)
    own = [float(sum(a.double().sum() for a in learn.ema.averages))] if recipe.ema else []
    rec.averages = [dist.objects(x) for x in own]
    rec.weights = learn.model.state_dict()
    rec.samples = learn.train_state.samples
    rec.held = learn.recorder.loss.value
    assert learn.dist == dist and all(type(m).__name__ != 'SyncedBatchNorm' for m in learn.model.modules())
    return rec


def far(a, b):
    "Largest difference of two dicts of tensors, as part of the largest value"
    return max(((a[k].float() - b[k].float()).abs().max() / a[k].float().abs().max().clamp(min=1e-3)).item() for k in a)


def main(out, *names):
    "Compare all cases, or those named"
    cases = {n: CASES[n] for n in names or CASES}
    torch.set_num_threads(1)
    keep_memory()
    # 33 images in batches of 16: the third one has a single image, and the second process none
    data = narrated('train', 33), narrated('valid', 17)
    rank = int(os.environ['RANK'])
    alone = {n: train(n, Dist(), data, **kw) for n, kw in cases.items()} if rank == 0 else {}
    dist = init_dist(120.0)
    got = {}
    for n, kw in cases.items():
        two = train(n, dist, data, **kw)
        if not dist.is_main:
            continue
        one = alone[n]
        got[n] = dict(
            agree=two.agree,
            averages=two.averages,
            one=one.losses,
            two=two.losses,
            held=(one.held, two.held),
            samples=(one.samples, two.samples),
            first=far(one.grads[0], two.grads[0]),
            last=far(one.grads[1], two.grads[1]),
            weights=far(one.weights, two.weights),
        )
    dist.barrier()
    if dist.is_main:
        with open(out, 'w') as f:
            json.dump(got, f)
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main(*sys.argv[1:])
