"""The fields that all recipes inherit: averaged weights, frozen stages, less memory

For each method they change what they say and nothing else; a run has what it was trained with, and a run without them
is written as runs were before there were any.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from learning import material
from tools import WORLD

from vlrep.core.fields import check_fields
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import recipe_dict, recipe_from_dict
from vlrep.experiments.load_run import open_run
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import run_spec
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.methods.recipe import MethodRecipe, ViewFields
from vlrep.training.run_folder import open_run_folder

SHARED = [
    f.name for f in dataclasses.fields(MethodRecipe) if f.name not in {v.name for v in dataclasses.fields(ViewFields)}
]


def trained(name, steps=3, **fields):
    "The learner of a method after a few steps, its images and tokens made once"
    method, recipe, splits, tokenizer = material(name)
    recipe = check_fields(dataclasses.replace(recipe, steps=steps, warmup=1, bs=16, **fields))
    few = {k: v.subset(range(32)) for k, v in splits.items() if k in ('train', 'valid')}
    return train_on(method, recipe, few, 'world', tokenizer, precision='fp32', log=lambda s: None)


def apart(a, b):
    "The largest difference of two models' weights and buffers"
    pairs = zip(a.model.state_dict().items(), b.model.state_dict().items(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for (k, x), (l, y) in pairs if x.numel())


@pytest.mark.parametrize('name', ['virtex', 'masked_lm', 'supervised', 'loctex'])
def test_every_method_follows_the_inherited_switches(name):
    "Recomputed activations: the same bits. Chunks of scores: but for rounding. Frozen stages stay, the average differs"
    plain = trained(name)
    assert apart(trained(name, activation_checkpointing=True), plain) == 0
    if name in ('virtex', 'masked_lm'):
        assert 0 < apart(trained(name, logit_chunk=7), plain) < 1e-4
    slow = trained(name, frozen_stages=2, layer_decay=0.5, ema=0.5)
    begun = make_learner(material(name)[0], material(name)[1], slow.dls, precision='fp32').model.visual.state_dict()
    for k, v in slow.model.visual.state_dict().items():
        still = k.split('.')[0] in ('conv1', 'bn1', 'layer1')
        if still or k.endswith('running_mean'):
            assert torch.equal(v, begun[k]) == still, k
    top = slow.model.visual.layer4[0].conv1.weight
    assert name == 'supervised' or not torch.equal(top, begun['layer4.0.conv1.weight'])  # its head begins at 0
    assert slow.ema.updates == 2 and len(slow.ema.raw) == len(slow.ema.averages)


def test_compiled_stages_compute_the_same():
    "With the compiler's front end alone, which takes seconds: every way to call the backbone runs compiled stages"
    from vlrep.models.backbones import make_backbone
    from vlrep.training.ema_and_freezing import BackboneOptions

    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    nets = [make_backbone(10, 8) for _ in range(2)]
    ran = []

    def backend(graph, inputs):
        ran.append(graph)
        return graph.forward

    cb = BackboneOptions(compile='backbone', backend=backend)
    cb.learn = SimpleNamespace(model=SimpleNamespace(visual=nets[1]))
    cb.after_create()
    for a, b in zip(nets[0].scales(images, 2), nets[1].scales(images, 2)):
        assert torch.equal(a, b)
    assert len(ran) == 4 and list(nets[0].state_dict()) == list(nets[1].state_dict())
    for x, y in zip(*(n.state_dict().values() for n in nets)):
        assert torch.equal(x, y)


def test_recipes_are_written_whole():
    assert SHARED == 'ema frozen_stages layer_decay activation_checkpointing memory_format compile'.split()
    for m in METHODS.values():
        for r in m.recipes.values():
            d = recipe_dict(r)
            assert set(d) == {f.name for f in dataclasses.fields(r)} and recipe_from_dict(type(r), d) == r
            on = dataclasses.replace(r, ema=0.9)
            assert recipe_dict(on) == {**d, 'ema': 0.9} and recipe_from_dict(type(r), recipe_dict(on)) == on


def test_a_run_keeps_the_averaged_weights(tmp_path):
    "What was validated is what is saved, opened and measured; the weights that were trained are beside it"
    small = ['scenes=64', 'valid=16', 'probe=40', 'probe_held=40', 'test=40', 'shown=8', 'point=0', 'steps=8']
    changes = [
        *WORLD,
        *small,
        'baselines=false',
        'ema=0.8',
        'frozen_stages=1',
        'logit_chunk=64',
        'activation_checkpointing=yes',
    ]
    out = pretrain(run_spec('virtex', changes, threads=1, precision='fp32'), out=tmp_path / 'run', log=lambda s: None)
    run = open_run_folder(out)
    assert run.recipe['ema'] == 0.8 and run.recipe['frozen_stages'] == 1
    assert {'ema=0.8', 'logit_chunk=64'} <= set(run.results()[-1]['changes'])
    remaining = run.state('last')['training']['callbacks']['ema']
    weights = run.weights('last')
    opened = open_run(out, 'last')
    first = remaining['averages'][0]
    raw = remaining['raw'][0]
    names = [k for k, v in weights.items() if v.shape == first.shape and torch.equal(v, first)]
    assert names == ['visual.layer1.0.conv1.weight'] and not torch.equal(first, raw)  # the stem is frozen
    assert torch.equal(opened.backbone.state_dict()[names[0].removeprefix('visual.')], first)
    log = run.log()
    assert all(r['grad_norm'] > 0 and r['memory_mb'] > 0 for r in log)
    assert json.loads((out / 'recipe.json').read_text())['format'] == 2


@pytest.mark.parametrize(
    'fields,says',
    [
        (dict(ema=1.0), 'ema=1'),
        (dict(frozen_stages=6), 'frozen_stages=6'),
        (dict(layer_decay=0.0), 'layer_decay=0'),
        (dict(compile='all'), 'compile=all'),
        (dict(compile='backbone', activation_checkpointing=True), 'compile=backbone'),
        (dict(memory_format='nhwc'), 'memory_format=nhwc'),
        (dict(logit_chunk=5, task='multilabel'), 'logit_chunk=5: the task'),
    ],
)
def test_wrong_switches_are_named(fields, says):
    with pytest.raises(ValueError, match=says):
        check_fields(dataclasses.replace(METHODS['virtex'].recipes['world'], **fields))


def test_freezing_a_backbone_without_known_stages_is_refused():
    method, recipe, splits, tokenizer = material('virtex')
    visual = torch.nn.Module()
    visual.width = 8
    for field in (dict(frozen_stages=1), dict(activation_checkpointing=True)):
        with pytest.raises(ValueError, match=next(iter(field))):
            train_on(
                dataclasses.replace(method, backbone=lambda recipe, seed: visual),
                dataclasses.replace(recipe, **field),
                splits,
                'world',
                tokenizer,
                log=lambda s: None,
            )
