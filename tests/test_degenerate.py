"Numbers and figures at their limits: metrics of nothing, names that are formulas, views of a pixel, pages of many runs"

import copy
import inspect
import itertools
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from test_foreign import facts

from vlrep.core import plotting
from vlrep.core.plotting import bars, drawable, show_images
from vlrep.data.transforms import EvalTransform, TrainTransform, crop_labels, denormalise, move_points, resize_crop
from vlrep.evaluation.captioning import show_attention
from vlrep.evaluation.data_efficiency import efficiency_curve
from vlrep.evaluation.retrieval.pictures import nearest_captions, nearest_images
from vlrep.methods.mct.views import HeldOutViews, TwoViews
from vlrep.metrics import captioning, multilabel, pointing_game, ranking, retrieval, vqa
from vlrep.reports.page import comparison_html
from vlrep.reports.weight_drift import drift_figure
from vlrep.studies.report import show_comparisons

# ---------------------------------------------------------------- metrics

nan = float('nan')
none = np.zeros
one = torch.tensor([0])

# (function, arguments) -> the argument that the message names, or the value, as documented
METRICS = [
    (captioning.caption_words, ('',), []),
    (captioning.cider_d, (['a dog'], [['a dog']]), 'refs: CIDEr-D .* of one image'),
    (captioning.cider_d, ([], []), 'refs'),
    (captioning.cider_d, ([nan, 'a'], [['a'], ['b']]), 'a caption is one string'),
    (captioning.cider_d, ([None, 'a'], [['a'], ['b']]), 'a caption is one string'),
    (captioning.cider_d, (['', ''], [['a'], ['']]), [0, 0]),
    (captioning.References, ([[nan], ['a']],), 'refs: image 0 has nan'),
    (captioning.References, ([[]],), 'refs: image 0 has no references'),
    (captioning.References, ([],), 'refs'),
    (captioning.bleu_counts, ([], []), 'refs'),
    (captioning.bleu, (none(10),), [0] * 4),
    (captioning.bleu, (none(3),), 'counts'),
    (captioning.bleu, ([nan] * 10,), 'counts'),
    (captioning.rouge_l, (['', ''], [['a'], ['b']]), [0, 0]),
    (captioning.rouge_l, (['a'], [['a']]), [1]),
    (captioning.judge_captions, (['a'], [['a']]), 'refs'),
    (ranking.average_precision, ([], []), 'scores: empty'),
    (ranking.average_precision, ([0.1], [1]), 1),
    (ranking.average_precision, ([0.5] * 3, [1, 0, 0]), 1 / 3),
    (ranking.average_precision, ([nan, 1], [1, 0]), 'scores: holds NaN'),
    (ranking.average_precision, ([0.2, 1], [0, 0]), nan),
    (ranking.average_precision, ([0.2, 1], [1, 0], [-1, 0]), 'weights'),
    (ranking.mean_ap, ([[0.2], [1]], [[0], [0]]), (nan, 0)),
    (ranking.mean_ap, (none((2, 0)), none((2, 0))), 'scores: empty'),
    (ranking.correct, (none((0, 3)), none(0)), 'scores: empty'),
    (ranking.correct, ([[nan, 1]], [0]), 'scores: holds NaN'),
    (ranking.correct, (none((2, 0)), [0, 0]), 'scores: empty'),
    (ranking.correct, ([[1.0]], [0]), [1]),
    (ranking.top1, (none((0, 3)), none(0)), 'scores: empty'),
    (ranking.top1, ([[1, 1.0]], [0]), 1),
    (ranking.chance_ap, ([],), 'labels: empty'),
    (ranking.chance_top1, ([], []), 'train: empty'),
    (ranking.chance_top1, ([1], []), 'test: empty'),
    (ranking.draw_counts, (0,), 'n=0'),
    (ranking.draw_counts, (3, 0), 'draws=0'),
    (ranking.bootstrap, ([1.0],), (1, 1)),
    (ranking.bootstrap, ([],), 'n: '),
    (ranking.bootstrap, ([nan],), 'stat: holds NaN'),
    (ranking.bootstrap, (lambda w: w.sum(1) * nan, 3), (nan, nan)),
    (ranking.caption_nouns, ([], []), dict(precision=0, recall=0, both=0, said=0, there=0, n=0)),
    (retrieval.retrieval_ranks, (torch.ones(1, 2), torch.ones(1, 2), one), 'images: 1 of them'),
    (retrieval.retrieval_ranks, (torch.full((2, 2), nan), torch.ones(2, 2), torch.arange(2)), 'images: hold values'),
    (retrieval.chance_recall, ([], 3, 1), 'right: not a single'),
    (retrieval.chance_recall, ([5], 3, 1), 'right: from 1 to 3'),
    (retrieval.chance_recall, ([1], 3, 9), 'k=9'),
    (retrieval.chance_median, ([], 3), 'right: not a single'),
    (retrieval.chance_median, ([0], 3), 'right: from 1 to 3'),
    (retrieval.chance_median, ([1], 1), 1),
    (retrieval.retrieval_folds, (1,), '1 images'),
    (retrieval.retrieval_folds, (10, 'x'), 'protocol'),
    (vqa.normalise_answer, (nan,), 'an answer is text'),
    (vqa.normalise_answer, ('',), ''),
    (vqa.soft_scores, ([],), {}),
    (vqa.soft_scores, ([nan],), 'an answer is text'),
    (vqa.answer_vocabulary, ([],), 'answers'),
    (vqa.by_image, ([1, 2], [0]), 'images: 1 for 2'),
    (vqa.mean_interval, ([],), 'scores'),
    (vqa.mean_interval, ([1.0],), (1, 1, 1)),
    (vqa.mean_interval, ([nan, 1],), 'scores: holds NaN'),
    (multilabel.f1_scores, (none((0, 2)), none((0, 2))), 'predictions'),
    (multilabel.f1_scores, (none((2, 0)), none((2, 0))), 'predictions'),
    (multilabel.f1_scores, ([[0]], [[0]]), dict(micro=0, macro=0)),
    (multilabel.f1_scores, ([[nan]], [[1]]), 'predictions'),
    (multilabel.f1_interval, ([[1]], [[1]]), (1, 1, 1)),
    (pointing_game.cell_cover, (torch.zeros(1, 0, 0), 2), 'mask'),
    (pointing_game.pointing_hits, (torch.ones(1, 2, 2), torch.ones(1, 4, 4)), [1]),
    (pointing_game.pointing_hits, (torch.full((1, 2, 2), nan), torch.zeros(1, 3, 3)), 'maps'),
    (pointing_game.pointing_hits, (torch.zeros(1, 0, 0), torch.zeros(1, 3, 3)), 'maps'),
    (pointing_game.mass_inside, (torch.zeros(1, 2, 2), torch.zeros(1, 3, 3)), 'maps'),
    (pointing_game.mass_inside, (torch.full((1, 2, 2), 0.25), torch.zeros(1, 0, 0)), 'masks'),
]

IDS = [f'{f.__name__}-{i}' for i, (f, *_) in enumerate(METRICS)]


@pytest.mark.parametrize('function,args,want', METRICS, ids=IDS)
def test_metrics_of_nothing(function, args, want):
    "An error that names the argument, or the documented value; no warning of NumPy"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        if isinstance(want, str) and want:
            with pytest.raises(ValueError, match=want):
                function(*args)
            return
        got = function(*args)
    if isinstance(want, (dict, str)):
        assert got == want
    else:
        assert np.array_equal(np.asarray(got, float), np.asarray(want, float), equal_nan=True), got


def test_metrics_of_nothing_are_all_there():
    tried = {f.__name__ for f, *_ in METRICS}
    modules = captioning, multilabel, pointing_game, ranking, retrieval, vqa
    public = {n for m in modules for n in m.__all__ if inspect.isfunction(getattr(m, n))}
    assert public - tried == set()


# ---------------------------------------------------------------- figures

ODD = [r'$\foo{$', '$', r'\$x$ and $', '海辺の青い', 'a\x07b', '\U000f0000']
SQUARE = np.zeros((8, 8, 3), np.uint8)


def _comparisons(name):
    names = dict.fromkeys(('id', 'text', 'treatment', 'control', 'question'), name)
    numbers = dict(p=0.01, holm=0.02, diff=1.0, half=0.5, margin=1.0, each={0: 1.0}, direction=1, size=2.0)
    return show_comparisons([dict(verdict='replicates', unstable={}, **names, **numbers)])


def _drift(name):
    return drift_figure({name: [dict(layer=k, l1=1.0, angle=0.1, n=1, matrix='query') for k in (0, 1)]})


def _row(name, images):
    return dict(question=name, metric=name, backbone=name, images=images, value=1, low=0, high=2, chance=1)


FIGURES = dict(
    show_images=lambda t: show_images([SQUARE], [t]),
    bars=lambda t: bars([t], {t: [(1, 0, 2)]}, ylabel=t),
    show_attention=lambda t: show_attention(SQUARE, [t], np.ones((1, 4))),
    efficiency_curve=lambda t: efficiency_curve([_row(t, 10), _row(t, 20)]),
    nearest_captions=lambda t: nearest_captions(dict(images=[(0, [(0, 0.5, True)])]), [t], lambda i: SQUARE),
    nearest_images=lambda t: nearest_images(
        dict(captions=[(0, [(0, 0.5, True), (1, 0.1, False)])]), [t], lambda i: SQUARE
    ),
    show_comparisons=_comparisons,
    drift_figure=_drift,
)


@pytest.fixture
def fonts(monkeypatch):
    monkeypatch.setattr(plotting, '_NO_FONT', set())
    with plt.rc_context():
        yield
    plt.close('all')


@pytest.mark.parametrize('text', ODD)
@pytest.mark.parametrize('name', FIGURES)
def test_figures_of_odd_names(name, text, fonts):
    "No formula, no flood: at most one warning, which says what to install"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        FIGURES[name](text).canvas.draw()
    assert [str(w.message)[:8] for w in said] in ([], ['figures:']), [str(w.message) for w in said]


def test_letters_come_from_a_font_that_has_them(fonts):
    letters = [chr(c) for c in range(0x20, 0x3000)]
    rare = max(plotting._in_fonts(letters, ['STIXGeneral']) - plotting._in_fonts(letters, plt.rcParams['font.family']))
    assert drawable(f'a {rare}') == f'a {rare}' and len(plt.rcParams['font.family']) == 2
    assert drawable('a \U000f0000\U000f0001b') == 'a \u25a1b'


# ---------------------------------------------------------------- views of a few pixels

VIEWS = dict(
    train=lambda s: TrainTransform(s, jitter_p=0),
    whole=lambda s: TrainTransform(s, jitter_p=0, whole=True),
    soft=lambda s: TrainTransform(s, (0.01, 1.0), jitter_p=0, grey_p=0.5, blur_p=1.0),
    middle=EvalTransform,
    resized=lambda s: EvalTransform(s, s + 3),
    whole_middle=lambda s: EvalTransform(s, whole=True),
    two=lambda s: TwoViews(TrainTransform(s, jitter_p=0)),
    held_out=lambda s: HeldOutViews(EvalTransform(s), TrainTransform(s, jitter_p=0)),
)


@pytest.mark.parametrize('view', VIEWS)
def test_views_of_a_few_pixels(view):
    "An image of one colour has views of that colour, from one pixel on; traces and maps stay in bounds"
    for h, w, size in itertools.product((1, 2, 5), (1, 3, 5), (1, 4)):
        side = max(h, w)
        img = torch.full((2, 3, side, side), 200, dtype=torch.uint8)
        batch = dict(
            img=img,
            hw=torch.tensor([[h, w]] * 2),
            flip=torch.tensor([True, False]),
            trace=torch.rand(2, 3, 4),
            things=torch.ones(2, side, side, dtype=torch.long),
            id=torch.arange(2),
        )
        out = VIEWS[view](size)(batch, (0, 1))
        for k in {'img', 'img2'} & out.keys():
            got = denormalise(out[k]).float()
            if view == 'soft':
                got = got.amax(1)
            assert out[k].shape == (2, 3, size, size) and ((got - 200).abs() <= 1).all(), (h, w, size)
        assert out['trace'].isfinite().all() and (out['things'] == 1).all()


def test_crops_of_a_few_pixels_can_be_mirrored():
    "A mirrored crop is the mirror image of the crop, for pixels, maps and points"
    for h, w, size in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 7)):
        side = max(h, w)
        img = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(h))
        maps = torch.arange(side * side).view(1, side, side)
        yes = torch.ones(1, dtype=torch.bool)
        for y, x in itertools.product(range(h), range(w)):
            box = torch.tensor([[y, x, h - y, w - x]])
            plain = resize_crop(img, box, size)
            torch.testing.assert_close(resize_crop(img, box, size, yes), plain.flip(3), atol=1e-4, rtol=0)
            assert (crop_labels(maps, box, size, yes) == crop_labels(maps, box, size).flip(2)).all()
            at = torch.tensor([[[(x + 0.5) / w, (y + 0.5) / h]]], dtype=torch.float64)
            a, b = (move_points(at, box, torch.tensor([[h, w]]), f) for f in (None, yes))
            torch.testing.assert_close(a[..., 0] + b[..., 0], torch.ones(1, 1, dtype=torch.float64))


# ---------------------------------------------------------------- many runs


def test_page_of_many_runs():
    "More runs than colours: every one of them is on the page"
    files = facts('a run')
    info = files['recipe.json']
    res = files['result.jsonl']
    log = [dict(step=str(k), train_loss='2.5', valid_loss='2.', lr0='.1') for k in (3, 6)]
    runs = []
    for seed in range(75):
        own = copy.deepcopy(info)
        result = copy.deepcopy(res)
        own['seed'] = result['seed'] = seed
        runs.append(dict(name=f'run{seed}', info=own, res=result, log=log))
    page = comparison_html(runs)
    assert page.startswith('<!doctype html>') or '<html' in page
    assert not [f'run{s}' for s in range(75) if f'run{s}' not in page]
