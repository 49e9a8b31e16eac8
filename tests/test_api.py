"What a notebook calls: fastai's methods on a learner, models in another precision, help, types"

import inspect
import io
import os
import pydoc
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from fastai.learner import load_learner
from PIL import Image

from vlrep.data.loader import loaders
from vlrep.data.tokenizer import Tokenizer
from vlrep.datasets.world.dataset import world
from vlrep.experiments.commands import METHODS
from vlrep.experiments.config import get_recipe
from vlrep.methods.learner import make_learner

ROOT = Path(__file__).parents[1]

# ---------------------------------------------------------------- fastai's methods


@pytest.fixture(scope='module')
def data():
    train = world('train', 32, size=32, with_='narrative')
    valid = world('valid', 16, size=32, with_='narrative')
    return train, valid, Tokenizer.train(train.captions.flat(), vocab=300)


def made(data, tmp_path, method='virtex', precision='fp32'):
    "A tiny learner of a method, its files in `tmp_path`"
    train, valid, tok = data
    recipe = get_recipe(method, 'world')
    tiny = dict(
        size=32,
        steps=8,
        warmup=2,
        width=32,
        heads=2,
        text_width=32,
        text_heads=2,
        visual_width=8,
        bs=16,
        vocab=300,
        bert_steps=20,
        region_steps=20,
        aux_scenes=0,
    )
    recipe = replace(recipe, **{k: v for k, v in tiny.items() if hasattr(recipe, k)})
    dls = loaders(train, valid, collate=METHODS[method].collator(recipe, tok), size=32, bs=16)
    learn = make_learner(METHODS[method], recipe, dls, precision=precision)
    learn.path = tmp_path
    return learn


@pytest.fixture
def learn(data, tmp_path):
    return made(data, tmp_path)


@pytest.fixture
def photo(data):
    return data[1][0].image


def exported(learn):
    "The learner, written and read again"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return load_learner(learn.export('x.pkl'))


@pytest.mark.parametrize('method', sorted(METHODS))
def test_predict_and_export(data, tmp_path, photo, method):
    """Every method predicts from a picture and from a batch, and so does its exported learner

    The learner itself can go on
    """
    learn = made(data, tmp_path, method)
    batch = learn.dls.valid.one_batch()[0]
    again = exported(learn)
    features = 'backbone' in learn.capabilities(learn.model)
    for item in (photo, Image.fromarray(photo), batch) if features else (batch,):
        one = learn.predict(item)
        two = again.predict(item)
        assert one and one.keys() == two.keys()
        for k, v in one.items():
            same = torch.equal(v, two[k]) if isinstance(v, torch.Tensor) else v == two[k]
            assert same, k
    if not features:  # it reads more than a picture
        for l in (learn, again):
            with pytest.raises(ValueError, match="no 'tok', which FusionModel reads"):
                l.predict(photo)
    one = learn.predict(photo) if features else dict(features=torch.zeros(1))
    assert one['features'].ndim == 1 and one['features'].isfinite().all()
    assert isinstance(one.get('caption', ''), str)
    assert ('caption' in one) == (type(learn.model).__name__ == 'CaptioningModel')
    assert ('logits' in one) == (method in ('tags', 'token_cls', 'multilabel', 'rotnet'))
    queue = [type(learn.enqueue_keys)()] if hasattr(learn, 'enqueue_keys') else None  # fills it with held-out keys
    assert again.validate(dl=learn.dls.valid, cbs=queue)[0] == pytest.approx(learn.validate()[0], rel=1e-5)
    learn.fit(1)


def test_predict_agrees_with_the_run_opened_for_use(learn, photo):
    from vlrep.models.pretrained import Pretrained

    m = Pretrained.from_learner(learn)
    got = learn.predict(photo)
    (batch, same) = learn.predict(photo, with_input=True)
    assert np.allclose(got['features'], m.embed(photo), atol=1e-5) and got['caption'] == m.caption(photo)
    assert torch.allclose(batch['img'], m.batch([photo])) and same['caption'] == got['caption']


def test_predict_refuses(learn):
    batch = learn.dls.valid.one_batch()[0]
    with pytest.raises(ValueError, match="no 'tok', which CaptioningModel reads"):
        learn.predict({k: v for k, v in batch.items() if k != 'tok'})
    with pytest.raises(ValueError, match='a path, a PIL image or a uint8 array'):
        learn.predict(3)
    with pytest.raises(ValueError, match='no such image file'):
        learn.predict('gone.jpg')
    with pytest.raises(NotImplementedError, match='rm_type_tfms'):
        learn.predict(batch, rm_type_tfms=1)


def test_exported_learner_says_what_it_cannot(learn):
    again = exported(learn)
    for f in (again.validate, again.get_preds, again.show_results, again.summary):
        with pytest.raises(ValueError, match='has no data: give a loader'):
            f()
    for f in (lambda: again.fit(1), lambda: again.fine_tune(1), again.freeze, again.lr_find):
        with pytest.raises(ValueError, match='exported learner (predicts|has no data)'):
            f()


WORK = dict(
    validate=lambda l: l.validate(),
    get_preds=lambda l: l.get_preds(),
    decoded=lambda l: l.get_preds(with_decoded=True),
    show_results=lambda l: l.show_results(),
    lr_find=lambda l: l.lr_find(show_plot=False, num_it=6),
    fit=lambda l: l.fit(1),
    one_cycle=lambda l: l.fit_one_cycle(1),
    fine_tune=lambda l: l.fine_tune(1),
    to_fp32=lambda l: l.to_fp32(),
    summary=lambda l: l.summary(),
)


@pytest.mark.parametrize('what', WORK)
def test_methods_that_work(learn, what):
    with redirect_stdout(io.StringIO()):
        WORK[what](learn)
    assert np.isfinite(learn.validate()[0])


@pytest.mark.parametrize('what', ['summary', 'show_results', 'get_preds'])
def test_methods_that_work_with_a_queue(data, tmp_path, what):
    "Validation begins with the keys of the images that are validated; `summary` has batches without a second part"
    learn = made(data, tmp_path, 'mct')
    with redirect_stdout(io.StringIO()):
        WORK[what](learn)
    assert np.isfinite(learn.validate()[0])


def test_save_and_load(data, tmp_path):
    one = made(data, tmp_path)
    two = made(data, tmp_path)
    with redirect_stdout(io.StringIO()):
        one.fit(1)
    one.save('m')
    two.load('m')
    assert one.validate()[0] == two.validate()[0]


def test_freeze(learn):
    learn.freeze()
    fixed = [p for p in learn.model.parameters() if not p.requires_grad]
    old = [p.clone() for p in fixed]
    with redirect_stdout(io.StringIO()):
        learn.fit(1)
    assert fixed and all(torch.equal(a, b) for a, b in zip(old, fixed))
    learn.unfreeze()
    assert all(p.requires_grad for p in learn.model.parameters())


REFUSED = dict(
    with_loss=(lambda l: l.get_preds(with_loss=True), NotImplementedError, 'total, count'),
    loss_not_reduced=(lambda l: l.loss_not_reduced(), NotImplementedError, 'total, count'),
    tta=(lambda l: l.tta(), NotImplementedError, 'dls.valid.new'),
    to_fp16=(lambda l: l.to_fp16(), ValueError, "precision='fp16'"),
    to_bf16=(lambda l: l.to_bf16(), ValueError, "precision='bf16'"),
    to_old_fp16=(lambda l: l.to_non_native_fp16(), ValueError, "precision='fp16'"),
    test_dl=(lambda l: l.dls.test_dl([1]), ValueError, 'predict'),
)


@pytest.mark.parametrize('what', REFUSED)
def test_methods_that_refuse(learn, what):
    f, error, reason = REFUSED[what]
    with pytest.raises(error, match=reason):
        f(learn)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize('method', sorted(METHODS))
def test_models_in_double(data, tmp_path, method):
    "A model in double precision trains in it: loss near that in single precision, every gradient double"
    learn = made(data, tmp_path, method)
    batch = learn.dls.valid.one_batch()[0]
    model = learn.model.eval()

    def mean(m, b):
        total, count = learn.loss_func.counted(m(b), b)
        return total / count

    single = mean(model, batch).item()
    model.double()
    loss = mean(model, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()})
    assert loss.item() == pytest.approx(single, rel=1e-4)
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}


# ---------------------------------------------------------------- help and types


def page(o):
    "What `help(o)` prints"
    return pydoc.plain(pydoc.render_doc(o))


def test_help_explains_functions():
    from vlrep.experiments.commands import pretrain

    text = page(pretrain)
    assert 'Parameters' in text and 'Of everything that is drawn; 0' in text
    assert 'Returns' in text and "The run's folder, with report.html" in text


def test_help_explains_classes_and_methods():
    from vlrep.methods.virtex.recipe import VirTexRecipe
    from vlrep.models.backbones import Backbone

    text = page(Backbone)
    assert 'Channels of the first stage' in text  # of __init__
    assert 'Normalised float images (b,3,H,W)' in text  # of a method that was patched in
    assert 'Attention heads; 0 means width/64' in page(VirTexRecipe)  # of a field


def test_help_explains_nearly_all():
    "Public functions and classes of which a parameter is explained in the source have it in their docstring"
    import importlib
    import pkgutil

    import vlrep

    mods = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.')
        if m.name not in ('vlrep.all', 'vlrep.core.docs')
    ]
    public = [getattr(m, k) for m in mods for k in getattr(m, '__all__', ())]
    asked = [
        o
        for o in public
        if inspect.isfunction(o)
        and o.__module__.startswith('vlrep.')
        and re.search(r'^    \w+.*,\s+# \S', inspect.getsource(o), re.M)
    ]
    lost = [f'{o.__module__}.{o.__name__}' for o in asked if 'Parameters\n---' not in (o.__doc__ or '')]
    assert len(asked) > 200 and not lost


def public_functions():
    """(name, function) for each public function of the library, and each public method or property that it gives its
    public classes"""
    import importlib
    import pkgutil

    import vlrep

    mods = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.')
        if m.name != 'vlrep.all'
    ]
    for m in mods:
        for k in getattr(m, '__all__', ()):
            o = getattr(m, k)
            own = inspect.isclass(o) and o.__module__ == m.__name__
            for n, f in vars(o).items() if own else {'': o}.items():
                # a property, a cached one, or a function
                f = getattr(f, 'fget', None) or getattr(f, 'func', None) or (getattr(o, n, None) if n else f)
                f = inspect.unwrap(getattr(f, '__func__', f)) if callable(f) else f
                if (
                    inspect.isfunction(f)
                    and f.__module__.startswith('vlrep.')
                    and not n.startswith('_')
                    and not f.__name__.startswith('_')
                ):
                    yield f'{f.__module__}.{k}' + f'.{n}' * own, f


def test_every_public_function_is_annotated():
    lost = set()
    seen = set()
    for name, f in public_functions():
        sig = inspect.signature(f)
        seen.add(name)
        for i, p in enumerate(sig.parameters.values()):
            bare = p.annotation is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if bare and not (i == 0 and p.name in ('self', 'cls')):
                lost.add(f'{name}: {p.name}')
        if sig.return_annotation is sig.empty:
            lost.add(f'{name}: what it returns')
    assert len(seen) > 500 and not lost, '\n'.join(sorted(lost))


def test_quoted_types_are_names():
    "An annotation in quotes is never evaluated: each name in it must be one that somebody knows"
    import builtins

    import vlrep.all

    known = {
        *dir(builtins),
        *vlrep.all.__all__,
        'Callable',
        'DataLoaders',
        'Image',
        'Iterable',
        'Iterator',
        'Learner',
        'ModuleSpec',
        'ModuleType',
        'Path',
        'plt',
    }
    odd = [
        f'{name}: {t}'
        for name, f in public_functions()
        for t in f.__annotations__.values()
        if isinstance(t, str)
        and not {n for n in re.findall(r'(?<![\w.])[A-Za-z_]\w*', t)} <= known | set(f.__globals__)
    ]
    assert not odd


def test_import_needs_no_torch():
    code = "import sys, vlrep; print([m for m in ('torch', 'numpy', 'fastai') if m in sys.modules])"
    got = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)}
    )
    assert got.stdout.strip() == '[]', got.stderr


def test_types_are_shipped():
    assert (ROOT / 'vlrep' / 'py.typed').exists() and "package_data={cfg['lib_path']: ['py.typed', " in (
        ROOT / 'setup.py'
    ).read_text(encoding='utf-8')


def test_all_brings_every_public_name():
    import importlib
    import pkgutil

    import vlrep
    import vlrep.all

    mods = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.')
        if m.name not in ('vlrep.all', 'vlrep.cli', 'vlrep.core.docs')
    ]
    missing = [
        f'{m.__name__}.{k}'
        for m in mods
        for k in getattr(m, '__all__', ())
        if getattr(vlrep.all, k, None) is not getattr(m, k)
    ]
    assert not missing and {'np', 'torch', 'nn', 'F', 'replace'} <= set(vlrep.all.__all__)


# ---------------------------------------------------------------- a bar on a terminal

STAGES = """
import sys, numpy as np, torch
torch.set_num_threads(1)
from vlrep.data.duplicates import duplicates
from vlrep.experiments.sanity_checks import overfit
from vlrep.evaluation.content import caption_nll
from vlrep.experiments.baselines import train_on
from vlrep.models.backbones import make_backbone
from vlrep.models.pretrained import Pretrained
from vlrep.data.subsets import readable
from vlrep.data.tokenizer import Tokenizer
from vlrep.datasets.world.dataset import world
from vlrep.experiments.config import get_recipe
from vlrep.methods.base import METHODS
from vlrep.evaluation.captioning import write_captions
from vlrep.models.features import bn_statistics, features
from vlrep.evaluation.linear_probe import fit_linear, fit_named
from vlrep.evaluation.knn import neighbours
from vlrep.evaluation.pointing import centre_map, pointing_table
from vlrep.evaluation.softmax_probe import SoftmaxRecipe, softmax_probe
from vlrep.evaluation.svm import fit_svms
from vlrep.evaluation.transfer import transfer_table
from dataclasses import replace

net = make_backbone(10, 8)
def stage(name, f):
    print(f'<{name}>', flush=True)
    f()
    print(f'</{name}>', flush=True)

made = {}
def drawn(): made.update(a=world('train', 40, size=32), b=world('test', 24, size=32, with_='masks'))
stage('world', drawn)
a,b = made['a'],made['b']
x,y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)),torch.arange(60)%3
tok = Tokenizer.train(a.captions.flat(), vocab=300)
small = dict(size=32, steps=2, warmup=1, width=32, heads=2, visual_width=8, bs=16, vocab=300)
rec = replace(get_recipe('virtex', 'world'), **small)
def trained(): made['learn'] = train_on(METHODS['virtex'], rec, dict(train=a, valid=b), 'world', tok,
                                        log=lambda s: None)
stage('training', trained)
model = made['learn'].model
m = Pretrained.from_learner(made['learn'])
stage('features', lambda: features(net, a))
stage('statistics', lambda: bn_statistics(net, a, bs=16))
stage('linear', lambda: fit_linear(x, y))
stage('named', lambda: fit_named(x, torch.stack([y, y], 1), 3))
stage('svm', lambda: fit_svms(x, np.where(torch.nn.functional.one_hot(y) > 0, 1, -1), costs=(.1, 1.)))
stage('neighbours', lambda: list(neighbours(x, k=3)))
stage('nearest', lambda: list(neighbours(x, k=1)))
stage('softmax', lambda: softmax_probe(net, a, b, 'setting', SoftmaxRecipe(epochs=1, bs=16, lrs=(.1,), wds=(0.,))))
stage('table', lambda: transfer_table(dict(net=net), a, a, b, draws=20))
stage('pointing', lambda: pointing_table(dict(centre=centre_map), b, draws=20))
stage('captions', lambda: m.caption([b[i].image for i in range(3)]))
stage('writing', lambda: write_captions(m, b, bs=16))
stage('losses', lambda: caption_nll(model, made['learn'].loss_func.loss, m, b, range(len(b))))
stage('duplicates', lambda: duplicates(a, world('test', 24, size=32)))
stage('readable', lambda: readable(b))
stage('overfit', lambda: overfit(METHODS['virtex'], rec, dict(train=a), tok=tok, log=lambda s: None, steps=3))
"""


def on_terminal(script, tmp_path):
    "What a process writes to a terminal"
    import pty
    import select

    main, other = pty.openpty()
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'VLREP_CACHE': str(tmp_path), 'COLUMNS': '120'}
    p = forked.Program(script, env=env, output=os.ttyname(other))
    out = b''
    while p.poll() is None or select.select([main], [], [], 0)[0]:
        if select.select([main], [], [], 0.05)[0]:
            out += os.read(main, 65536)
    os.close(main)
    os.close(other)
    return p.returncode, out.decode(errors='replace')


BARS = dict(
    world='drawing train',
    training='step ',
    features='features',
    statistics='statistics of BatchNorm',
    linear='fitting probes',
    named='fitting probes',
    svm='support vector machines',
    neighbours='neighbours',
    nearest='neighbours',
    softmax='softmax probe',
    table='question',
    pointing='masks',
    captions='batches of pictures',
    writing='captions',
    losses='photos, the loss of their captions',
    duplicates='thumbnails',
    readable='photos read',
    overfit='step ',
)


def test_every_long_stage_has_a_bar_on_a_terminal(tmp_path):
    code, text = on_terminal(STAGES, tmp_path)
    assert code == 0, text[-2000:]
    parts = {k: text.split(f'<{k}>')[1].split(f'</{k}>')[0] for k in BARS}
    assert not [
        f'{k}: {parts[k][-300:]!r}' for k, label in BARS.items() if f'{label}' not in parts[k] or '|' not in parts[k]
    ]
    left = [k for k, v in parts.items() if v.rstrip('\r\n').rsplit('\r', 1)[-1].strip()]
    assert not left  # and it is wiped away


def test_no_bar_in_a_log(tmp_path):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'VLREP_CACHE': str(tmp_path)}
    script = STAGES.split("stage('captions'")[0]
    got = forked.run(script, env=env)
    assert got.returncode == 0, got.stderr[-2000:]
    assert not got.stderr.strip() and not re.sub(r'</?\w+>', '', got.stdout).strip() and '\r' not in got.stdout
