"""What every method must provide

Three names, a frozen recipe, state that is saved, a loss that falls, features that can be measured.
"""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from learning import Case, check_by_heart, check_falls, learns_by_heart, material
from paths import ROOT
from project import MODULES, public

import vlrep
from vlrep.data.loader import loaders
from vlrep.datasets.base import DATASETS
from vlrep.datasets.world.dataset import world
from vlrep.evaluation.transfer import transfer_table
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import get_recipe, override_all
from vlrep.experiments.resolve_options import tiny_changes
from vlrep.experiments.splits import open_splits
from vlrep.methods.base import METHODS, Method
from vlrep.methods.learner import make_learner
from vlrep.training.learner import GlobalMeanLoss
from vlrep.training.run_folder import Run, open_run_folder

pytestmark = pytest.mark.usefixtures('few_regions')

TASKS = {m: src for m, src in MODULES.items() if re.fullmatch(r'vlrep\.methods\.\w+\.method', m)}

# ---------------------------------------------------------------- names


def defined(src):
    "Names that a module binds at its top, in the order of the source"
    for node in ast.parse(src).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))


FIELDS = {f.name for f in dataclasses.fields(Method)} | {'learner'}


def odd(src):
    "'' if a method's module exports XModel, x_build, x_learner and other fields of `Method` as x_FIELD; else its names"
    names = [n for n in defined(src) if n in public(src)]
    model = next((n for n in names if n.endswith('Model')), 'Model')[:-5]
    parts = [n for n in names if not n.endswith('Model')]
    x = parts[-1].removesuffix('_learner')
    good = {f'{x}_{k}' for k in FIELDS}
    if model and x.replace('_', '') == model.lower() and {f'{x}_build', f'{x}_learner'} <= set(parts) <= good:
        return ''
    return f'exports {", ".join(names)}; expected XModel, x_build, x_learner and other fields of Method as x_FIELD'


@pytest.mark.parametrize('mod', TASKS)
def test_a_module_exports_the_parts_of_its_method(mod):
    assert not (problem := odd(TASKS[mod])), problem


GOOD = ['class NewModel: pass', 'def new_loss(): pass', 'def new_build(): pass', 'def new_learner(): pass']


def exports(*lines):
    names = [f'{x}_{k}' for x in ('new', 'old') for k in ('loss', 'build', 'learner', 'more')]
    return f'__all__ = {["NewModel", "OldModel", *names]}\n' + '\n'.join(lines)


def test_a_module_that_exports_more_or_less_is_seen():
    model, loss, build, learner = GOOD
    assert not odd(exports(*GOOD)) and not odd(exports('NewModel = int', build, learner))
    for bad in (
        (model, loss, build),
        (loss, build, learner),
        (model, loss, learner),
        (*GOOD[:3], 'def new_more(): pass', learner),
        ('class OldModel: pass', loss, build, learner),
        (model, 'def old_loss(): pass', build, learner),
    ):
        assert odd(exports(*bad)), bad


def test_methods_are_what_their_folders_hold():
    for name, m in METHODS.items():
        assert m.name == name and {type(r) for r in m.recipes.values()} == {m.recipe}, name
        own = m.build.__module__
        assert own in TASKS and m.recipe.__module__ == own.removesuffix('method') + 'recipe', name
        # fusion models share their loss
        assert m.loss.__module__ in (own, 'vlrep.methods.fusion_training'), name


# ---------------------------------------------------------------- one tiny training of each


@pytest.fixture(scope='module', params=METHODS)
def case(request):
    return Case(request.param)


def test_every_recipe_is_frozen_and_complete(case):
    R = case.method.recipe
    assert dataclasses.is_dataclass(R) and R.__dataclass_params__.frozen and R.__doc__ and isinstance(R(), R)
    assert all(f.type in (int, float, str, bool, tuple) or f.default is not None for f in dataclasses.fields(R))
    with pytest.raises(TypeError, match='stepz'):
        dataclasses.replace(R(), stepz=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        R().steps = 3
    # what the jobs read
    assert {'size', 'bs', 'steps', 'warmup', 'visual_depth', 'visual_width'} <= {f.name for f in dataclasses.fields(R)}
    lines = [l for c in R.__mro__ if dataclasses.is_dataclass(c) for l in inspect.getsource(c).splitlines()]
    explained = {m[1]: '#' in l for l in lines if (m := re.match(r' {4}(\w+): \w+', l))}
    assert explained.keys() == {f.name for f in dataclasses.fields(R)} and all(explained.values())


def test_the_trained_loss_is_the_registered_one(case):
    assert case.learn.loss_func.loss.__code__ is case.method.loss(case.recipe).__code__


def test_training_lowers_the_loss(case):
    assert case.learn.train_state.step == case.recipe.steps == 3 * len(case.learn.dls.train)
    check_falls(case)
    assert np.isfinite(float(case.learn.validate()[0]))


def test_the_loss_is_a_total_and_a_count_and_pure(case):
    out = case.answer(case.learn.model)
    assert isinstance(out, dict)
    remaining = {k: v.clone() for k, v in out.items()}
    loss = GlobalMeanLoss(case.method.loss(case.recipe))
    (t, n), (t2, n2) = loss.counted(out, case.batch), loss.counted(out, case.batch)
    assert float(n) > 0 and float(t) == float(t2) and float(n) == float(n2) and torch.as_tensor(t).ndim == 0
    assert all(torch.equal(out[k], remaining[k]) for k in remaining)


def test_every_parameter_learns_in_one_group(case):
    learn = case.fresh()
    learn.model.train()
    GlobalMeanLoss(case.method.loss(case.recipe))(learn.model(case.batch), case.batch).backward()
    grown = dict(learn.model.named_parameters())
    groups = [p for g in learn.opt.param_groups for p in g['params']]
    assert len(groups) == len({id(p) for p in groups}) and {id(p) for p in groups} == {
        id(p) for p in grown.values() if p.requires_grad
    }
    assert not [k for k, p in grown.items() if p.requires_grad and p.grad is None]


def test_first_weights_depend_on_the_seed_alone(case):
    torch.manual_seed(1)
    a = case.fresh(seed=0).model.state_dict()
    torch.manual_seed(2)
    b = case.fresh(seed=0).model.state_dict()
    c = case.fresh(seed=5).model.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)


def loose(model):
    "Tensors that `state_dict` does not know: attributes, and buffers that are not saved"

    def tensors(o, at, depth=0):
        if torch.is_tensor(o):
            yield at
        elif isinstance(o, (list, tuple, dict)) and depth < 3:
            for k, v in o.items() if isinstance(o, dict) else enumerate(o):
                yield from tensors(v, f'{at}.{k}', depth + 1)

    remaining = ('_parameters', '_buffers', '_modules')
    for name, m in model.named_modules():
        for k, v in vars(m).items():
            if k not in remaining:
                yield from tensors(v, f'{name}.{k}')
    saved = set(model.state_dict())
    yield from (k for k, _ in model.named_buffers() if k not in saved)


def test_all_state_is_parameters_and_buffers(case):
    assert not list(loose(case.learn.model))


def test_state_outside_parameters_and_buffers_is_seen():
    m = torch.nn.Linear(2, 2)
    assert not list(loose(m))
    m.queue = [torch.zeros(3)]
    m.register_buffer('b', torch.zeros(1), persistent=False)
    assert list(loose(m)) == ['.queue.0', 'b']


def test_a_model_saved_and_loaded_answers_the_same(case, tmp_path):
    facts = dict(method=case.name, name='world', data=dict(name='world'), seed=0, precision='fp32', threads=1)
    facts |= dict(sizes=case.learn.sizes, side=case.splits['train'].size)
    with Run.create(tmp_path / 'run', recipe=case.recipe, **facts) as run:
        if case.tokenizer:
            case.tokenizer.save(run / 'tokenizer.model')
        run.save('best', case.learn.model.state_dict(), dict(step=case.recipe.steps))
    m = vlrep.load(tmp_path / 'run')
    want = case.answer(case.learn.model)
    fresh = case.fresh(seed=5).model
    fresh.load_state_dict(open_run_folder(tmp_path / 'run').weights())
    got = case.answer(fresh)
    assert list(got) == list(want) and all(torch.equal(got[k], want[k]) for k in want)
    pics = [case.splits['test'][i].image for i in range(2)]
    if 'backbone' not in m.capabilities:  # a model that has learned none says so, and answers otherwise
        for f in (lambda: m.embed(pics), lambda: m.export(tmp_path / 'net'), lambda: m.backbone):
            with pytest.raises(ValueError, match='no backbone of its own'):
                f()
        with m.evaluating():
            one = m.capabilities['fuse'](case.batch)
            two = case.learn.model.fuse(case.batch)
        assert set(one) == {'pooled', 'text', 'regions'} and all(torch.equal(v, two[k]) for k, v in one.items())
        assert m.batch(pics).shape == (2, 3, case.recipe.size, case.recipe.size)
        return
    with torch.no_grad():
        assert torch.equal(m.backbone(case.batch['images']), case.learn.model.visual(case.batch['images']))
    assert m.embed(pics).shape == (2, m.backbone.width)
    if hasattr(case.learn.model, 'generate'):
        assert all(isinstance(s, str) for s in m.caption(pics))
    else:
        with pytest.raises(ValueError, match='cannot write captions'):
            m.caption(pics)


def test_measuring_transfer_leaves_the_backbone_as_it_is(case):
    net = case.learn.model.visual
    old = {k: v.clone() for k, v in net.state_dict().items()}
    three = (world(s, n, size=case.recipe.size, shifted=True) for s, n in (('train', 60), ('valid', 40), ('test', 40)))
    rows = transfer_table({case.name: net}, *three, draws=20)
    assert len(rows) == 7 and all(
        r['backbone'] == case.name and 0 <= r['value'] <= 100 and r['low'] <= r['high'] for r in rows
    )
    assert all(torch.equal(v, old[k]) for k, v in net.state_dict().items())


def test_a_batch_is_learned_by_heart(case):
    check_by_heart(case.name)


@pytest.mark.parametrize('name', ['virtex', 'supervised', 'mct', 'visualbert'])
def test_a_batch_that_is_not_learned_by_heart_is_seen(name):
    "With words, labels, other images and regions; what says so is the same code for all methods"
    done, said = learns_by_heart(name, 10, lr=1e4, cnn_lr=1e4)
    assert not done and 'failed' in said


# ---------------------------------------------------------------- a model is built without its data

OPEN_ALL = """
import sys, vlrep
for run in sys.argv[1:]:
    m = vlrep.load(run)
    print(sum(p.numel() for owner in m._owners() for p in owner.parameters()) > 0)
print(sorted(m for m in sys.modules if m.startswith('vlrep.datasets')))
"""


def test_opening_a_run_reads_no_dataset_code(tmp_path):
    "Runs of all methods are opened in a new process that has neither their data nor a cache"
    for name in METHODS:
        method, recipe, splits, tokenizer = material(name)
        dls = loaders(
            splits['train'], splits['valid'], collate=method.collator(recipe, tokenizer), size=recipe.size, bs=8
        )
        learn = make_learner(method, recipe, dls)
        facts = dict(sizes=learn.sizes, side=splits['train'].size, root=str(tmp_path / 'gone'))
        with Run.create(tmp_path / name, recipe, name, 'flickr8k', 0, **facts) as run:
            if tokenizer:
                tokenizer.save(run / 'tokenizer.model')
            run.save('best', learn.model.state_dict(), dict(step=0))
    words = [sys.executable, '-W', 'ignore', '-c', OPEN_ALL, *[str(tmp_path / name) for name in METHODS]]
    env = {**os.environ, 'VLREP_CACHE': str(tmp_path / 'cache')}
    got = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert got.stdout.split('\n') == ['True'] * len(METHODS) + ['[]', ''], got.stderr


# ---------------------------------------------------------------- every switch of LocTex does something

SWITCHES = [
    'localise=0',
    'contrast=0',
    'scales=1',
    'scales=3',
    'temperature=.2',
    'direction=symmetric',
    'include_positive=true',
    'group=4',
    'loc_norm=tensor',
    'loc_norm=tensor_l1',
    'loc_scale=sqrt',
    'render=points',
    'render=bbox',
    'render=hull',
    'time_pad=.5',
    'oracle_masks=true',
    'max_len=12',
]


def two_steps(changes):
    "Losses of the second step in training and held out"
    parts = [get_recipe('loctex', 'world'), DATASETS['world'].options]
    method = METHODS['loctex']
    recipe, options = override_all(
        parts, [*tiny_changes(*parts), 'scenes=64', 'valid=16', 'shown=4', 'steps=2', 'warmup=1', *changes]
    )
    splits = open_splits(method, recipe, options, 'world')
    learn = train_on(
        method,
        recipe,
        splits,
        'world',
        method.train_tokenizer(recipe, splits['train']),
        precision='fp32',
        log=lambda s: None,
    )
    return learn.train_state.mean(), float(learn.recorder.values[-1][1])


@pytest.fixture(scope='module')
def usual():
    return two_steps([])


@pytest.mark.parametrize('switch', SWITCHES)
def test_every_switch_trains(switch, usual):
    got = two_steps([switch])
    assert all(map(np.isfinite, got)) and abs(got[1] - usual[1]) > 1e-4, (got, usual)
