"Regions that are computed once, features with a measured scale, and what the source of the texts must not change"

from dataclasses import replace

import pytest
import torch

from vlrep.data.loader import loaders
from vlrep.data.transforms import TrainTransform
from vlrep.datasets.world.build import counterparts
from vlrep.datasets.world.dataset import world
from vlrep.methods.base import METHODS
from vlrep.methods.fusion_collate import check_fusion
from vlrep.methods.learner import make_learner

SMALL = dict(
    size=32,
    steps=6,
    warmup=1,
    bs=16,
    width=32,
    heads=2,
    vocab=300,
    bert_steps=20,
    region_steps=20,
    visual_width=8,
    aux_scenes=0,
)


@pytest.fixture(scope='module')
def scenes():
    more = ('questions', 'statements', 'counterpart')
    return {s: world(s, n, size=32, with_=more) for s, n in (('train', 96), ('valid', 32))}


def learner(scenes, method='visualbert', train=None, seed=0, **changes):
    m = METHODS[method]
    recipe = replace(m.recipes['world'], **{**SMALL, **changes})
    train = scenes['train'] if train is None else train
    tokenizer = m.train_tokenizer(recipe, train)
    dls = loaders(
        train,
        scenes['valid'],
        collate=m.collator(recipe, tokenizer),
        size=32,
        bs=16,
        device='cpu',
        seed=seed,
        aug=TrainTransform(32, scale=(1.0, 1.0), ratio=(1.0, 1.0), jitter=(0.0,) * 4),
        flip_p=recipe.flip_p,
    )
    return make_learner(m, recipe, dls, seed=seed, precision='fp32')


def losses(learn, n=6):
    out = []
    for b, _ in learn.dls.train:
        out.append(learn.model(b)['logits'].detach())
    return out[:n]


@pytest.mark.parametrize('method', ['visualbert', 'vilbert'])
def test_cached_regions_are_those_of_the_network(scenes, method):
    a, b = (learner(scenes, method, cache_regions=c) for c in (True, False))
    x, y = (l.dls.train.one_batch()[0] for l in (a, b))
    assert 'region_feats' in x and 'region_feats' not in y and x['flip'].any() and not x['flip'].all()
    got = losses(a)
    for p, q in zip(got, losses(b)):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-3)
    other = learner(scenes, method, cache_regions=False, visual_width=16)
    assert any((p - q).abs().max() > 0.01 for p, q in zip(got, losses(other)))


def test_the_scale_of_features_is_measured_on_training_images(scenes):
    m = learner(scenes, standardize=True).model
    off = learner(scenes, standardize=False).model
    assert off.regions_in.mean is None and m.regions_in.std.std() > 0
    b = m.regions(learner(scenes, cache_regions=False).dls.valid.one_batch()[0])
    real = torch.arange(b['region_feats'].shape[1]) < b['region_counts'][:, None]
    even = ((b['region_feats'] - m.regions_in.mean) / m.regions_in.std)[real]
    assert even.mean(0).abs().mean() < 0.5 < even.std(0).mean() < 1.5


def test_the_source_of_texts_changes_texts_alone(scenes):
    "With aux_scenes the tokens, the small BERT and the region network are the same for every source"
    how = [dict(source='captions'), dict(source='questions'), dict(source='web', train=counterparts(scenes['train']))]

    def made(**kw):
        learn = learner(scenes, **kw)
        m = learn.model
        return learn.dls.train.tokenizer.model, m.encoder.state_dict(), m.region_encoder.state_dict()

    def same(a, b):
        return a[0] == b[0] and all(torch.equal(x[k], y[k]) for x, y in zip(a[1:], b[1:]) for k in x)

    first, *rest = [made(**h, aux_scenes=80) for h in how]
    assert all(same(first, r) for r in rest)
    first, *rest = [made(**h, aux_scenes=0) for h in how]
    assert not same(first, rest[-1])  # the twins would teach another detector


def test_auxiliary_scenes_are_refused_for_photos(scenes):
    recipe = replace(METHODS['visualbert'].recipes['world'], **{**SMALL, 'aux_scenes': 50})
    with pytest.raises(ValueError, match='aux_scenes=50.*the data is flickr8k'):
        check_fusion(recipe, scenes, 'flickr8k')


def test_each_learner_has_its_own_regions(scenes):
    "Two learners on the same loaders, with networks of their own"
    first = learner(scenes)
    m = METHODS['visualbert']
    recipe = replace(m.recipes['world'], **SMALL)
    tokenizer = m.train_tokenizer(recipe, scenes['train'])
    dls = loaders(scenes['train'], scenes['valid'], collate=m.collator(recipe, tokenizer), size=32, bs=16, device='cpu')
    two = [
        make_learner(m, replace(recipe, region_model='given', visual_width=w), dls, precision='fp32') for w in (8, 16)
    ]
    widths = [l.dls.train.one_batch()[0]['region_feats'].shape[2] for l in two]
    assert widths == [l.model.region_encoder.width for l in two] and widths[0] < widths[1]
    assert 'region_feats' in first.dls.train.one_batch()[0] and 'region_feats' not in dls.train.one_batch()[0]
