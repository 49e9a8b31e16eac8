"A learner in a notebook: the methods of fastai, models in double precision"

import io
import warnings
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
import torch
from fastai.learner import load_learner
from host_waits import host_waits
from PIL import Image

from vlrep.data.loader import loaders
from vlrep.data.tokenizer import Tokenizer
from vlrep.datasets.world.dataset import world
from vlrep.experiments.config import get_recipe
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner

# ---------------------------------------------------------------- fastai's methods


@pytest.fixture(scope='module')
def data():
    train = world('train', 32, size=32, with_='narrative')
    valid = world('valid', 16, size=32, with_='narrative')
    return train, valid, Tokenizer.train(train.captions.flat(), vocab=300)


def made(data, tmp_path, method='virtex', precision='fp32'):
    "A tiny learner of a method, its files in `tmp_path`"
    train, valid, tokenizer = data
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
    dls = loaders(train, valid, collate=METHODS[method].collator(recipe, tokenizer), size=32, bs=16)
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


MORE_WAITS = dict(  # Where a step reads more, because the number of elements depends on the data
    loctex=['data/traces.py'],  # cells that a trace meets
    masked_lm=['methods/virtex/model.py'],  # masked words
    visualbert=['models/fusion_model.py'],
    vilbert=['models/fusion_model.py'],
)


@pytest.mark.parametrize('method', sorted(METHODS))
def test_a_step_waits_once_for_the_device(data, tmp_path, method):
    "For the check that loss and gradient are finite, with nothing else to be read before the next step begins"
    learn = made(data, tmp_path, method)
    learn.model.padded_rows = True  # as on a GPU
    learn.fit_steps(2)
    with host_waits(learn) as places:
        learn.fit_steps(5)
    files = [place.split(':')[0] for place in places]
    assert files.count('training/callbacks.py') == 3, places
    more = {*files} - {'training/callbacks.py'}
    if method in MORE_WAITS:
        more.discard('training/learner.py')  # the same, backward
    assert more == {*MORE_WAITS.get(method, [])}, places


@pytest.mark.parametrize('method', ['captioning', 'supervised', 'tag_prediction', 'token_cls', 'virtex'])
def test_a_model_compiles_as_one_graph(data, tmp_path, method):
    "As on a GPU, where padding stays: nothing that depends on values breaks the graph"
    learn = made(data, tmp_path, method)
    model = learn.model
    if method in ('captioning', 'virtex'):
        model.packed = False
        model.padded_rows = True
    batch = learn.dls.train.one_batch()[0]
    want = model(batch)
    got = torch.compile(model, backend='eager', fullgraph=True)(batch)
    scores = [name for name in want if 'logits' in name]
    assert scores and all(torch.allclose(got[name], want[name], atol=1e-5) for name in scores)


def test_reads_of_a_step_are_seen(data, tmp_path, monkeypatch):
    learn = made(data, tmp_path, 'clip')
    reads = {
        'item': lambda x: x.sum().item(),
        'branch': lambda x: 1 if x.sum() > 0 else 0,
        'mask': lambda x: x[x > 0],
        'list': lambda x: x[:1].tolist(),
        'array': lambda x: np.asarray(x[:1]),
    }
    loss = learn.loss_func.counted
    for name, read in reads.items():
        monkeypatch.setattr(learn.loss_func, 'counted', lambda out, b, read=read: (read(b['lengths']), loss(out, b))[1])
        with host_waits(learn) as places:
            learn.fit_steps(learn.train_state.step + 2)
        assert sum('self.counted' in place for place in places) >= 2, (name, places)


@pytest.mark.parametrize('method', sorted(METHODS))
def test_every_method_predicts_and_so_does_its_export(data, tmp_path, photo, method):
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
            with pytest.raises(ValueError, match="no 'tokens', which FusionModel reads"):
                l.predict(photo)
    one = learn.predict(photo) if features else dict(features=torch.zeros(1))
    assert one['features'].ndim == 1 and one['features'].isfinite().all()
    assert isinstance(one.get('caption', ''), str)
    assert ('caption' in one) == (type(learn.model).__name__ == 'CaptioningModel')
    if method in ('supervised', 'token_cls', 'multilabel', 'rotnet'):  # classifiers of images
        assert one['logits'].ndim == 1
    queue = [type(learn.enqueue_keys)()] if hasattr(learn, 'enqueue_keys') else None  # fills it with held-out keys
    assert again.validate(dl=learn.dls.valid, cbs=queue)[0] == pytest.approx(learn.validate()[0], rel=1e-5)
    learn.fit(1)


def test_predict_agrees_with_the_run_opened_for_use(learn, photo):
    from vlrep.models.pretrained import Pretrained

    m = Pretrained.from_learner(learn)
    got = learn.predict(photo)
    (batch, same) = learn.predict(photo, with_input=True)
    assert np.allclose(got['features'], m.embed(photo), atol=1e-5) and got['caption'] == m.caption(photo)
    assert torch.allclose(batch['images'], m.batch([photo])) and same['caption'] == got['caption']


def test_predict_refuses_what_it_cannot_read(learn):
    batch = learn.dls.valid.one_batch()[0]
    with pytest.raises(ValueError, match="no 'tokens', which CaptioningModel reads"):
        learn.predict({k: v for k, v in batch.items() if k != 'tokens'})
    with pytest.raises(ValueError, match='a path, a PIL image or a uint8 array'):
        learn.predict(3)
    with pytest.raises(ValueError, match='no such image file'):
        learn.predict('gone.jpg')
    with pytest.raises(NotImplementedError, match='rm_type_tfms'):
        learn.predict(batch, rm_type_tfms=1)


def test_an_exported_learner_says_what_it_cannot(learn):
    again = exported(learn)
    for f in (again.validate, again.get_preds, again.show_results, again.summary):
        with pytest.raises(ValueError, match='has no data: pass a loader'):
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
def test_methods_of_fastai_work(learn, what):
    with redirect_stdout(io.StringIO()):
        WORK[what](learn)
    assert np.isfinite(learn.validate()[0])


@pytest.mark.parametrize('what', ['summary', 'show_results', 'get_preds'])
def test_methods_of_fastai_work_with_a_queue(data, tmp_path, what):
    "Validation begins with the keys of the images that are validated; `summary` has batches without a second part"
    learn = made(data, tmp_path, 'mct')
    with redirect_stdout(io.StringIO()):
        WORK[what](learn)
    assert np.isfinite(learn.validate()[0])


def test_a_learner_loads_what_another_saved(data, tmp_path):
    one = made(data, tmp_path)
    two = made(data, tmp_path)
    with redirect_stdout(io.StringIO()):
        one.fit(1)
    one.save('m')
    two.load('m')
    assert one.validate()[0] == two.validate()[0]


def test_freeze_fixes_weights_and_unfreeze_releases_them(learn):
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
def test_methods_of_fastai_that_cannot_work_say_so(learn, what):
    f, error, reason = REFUSED[what]
    with pytest.raises(error, match=reason):
        f(learn)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize('method', sorted(METHODS))
def test_every_model_trains_in_double_precision(data, tmp_path, method):
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
