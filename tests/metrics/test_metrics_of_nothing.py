"Metrics of nothing, or of what is no number: the documented value, or an error that names the argument"

import inspect
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vlrep.metrics import captioning, detection, multilabel, pointing_game, ranking, retrieval, vqa

nan = float('nan')
none = np.zeros


def objects():
    "One object in one image, as a detection set has it"
    return SimpleNamespace(
        name='one',
        images=[dict(id=1, height=9, width=9, neg_category_ids=[], not_exhaustive_category_ids=[])],
        annotations=[dict(id=1, image_id=1, category_id=1, bbox=[0, 0, 9, 9], area=81, iscrowd=0)],
        categories=[dict(id=1, name='dog', frequency='f')],
    )


EMPTY = SimpleNamespace(name='empty', images=[], annotations=[], categories=[])
NO_SCORE = [dict(image_id=1, category_id=1, bbox=[0, 0, 9, 9], score=nan)]

# (function, arguments) -> the argument that the message names, or the value, as documented
METRICS = [
    (captioning.caption_words, ('',), []),
    (captioning.cider_d, (['a dog'], [['a dog']]), 'refs: CIDEr-D .* of one image'),
    (captioning.cider_d, ([], []), 'refs'),
    (captioning.cider_d, (['', ''], [['a'], ['']]), [0, 0]),
    (captioning.References, ([[]],), 'refs: image 0 has no references'),
    (captioning.References, ([],), 'refs'),
    (captioning.bleu_counts, ([], []), 'refs'),
    (captioning.bleu, (none(10),), [0] * 4),
    (captioning.rouge_l, (['', ''], [['a'], ['b']]), [0, 0]),
    (captioning.rouge_l, (['a'], [['a']]), [1]),
    (captioning.judge_captions, (['a'], [['a']]), 'refs'),
    (ranking.average_precision, ([], []), 'scores: empty'),
    (ranking.average_precision, ([0.1], [1]), 1),
    (ranking.average_precision, ([0.5] * 3, [1, 0, 0]), 1 / 3),
    (ranking.average_precision, ([nan, 1], [1, 0]), 'scores: contains NaN'),
    (ranking.average_precision, ([0.2, 1], [0, 0]), nan),
    (ranking.average_precision, ([0.2, 1], [1, 0], [[-1, 0]]), 'weights'),
    (ranking.mean_ap, ([[0.2], [1]], [[0], [0]]), (nan, 0)),
    (ranking.mean_ap, (none((2, 0)), none((2, 0))), 'scores: empty'),
    (ranking.correct, (none((0, 3)), none(0)), 'scores: empty'),
    (ranking.correct, ([[nan, 1]], [0]), 'scores: contains NaN'),
    (ranking.correct, (none((2, 0)), [0, 0]), 'scores: empty'),
    (ranking.correct, ([[1.0]], [0]), [1]),
    (ranking.top1, (none((0, 3)), none(0)), 'scores: empty'),
    (ranking.top1, ([[1, 1.0]], [0]), 1),
    (ranking.chance_ap, ([],), 'labels: empty'),
    (ranking.chance_ap, ([nan, 1],), 'labels: contains NaN'),
    (ranking.chance_top1, ([], []), 'train: empty'),
    (ranking.chance_top1, ([1], []), 'test: empty'),
    (ranking.draw_counts, (0,), 'n=0'),
    (ranking.draw_counts, (3, 0), 'draws=0'),
    (ranking.draw_scores, (lambda w: w.sum(1), 0), 'n=0'),
    (ranking.draw_scores, (lambda w: w.sum(1), 3, 2), [3, 3]),
    (ranking.percentile_interval, (np.array([]),), (nan, nan)),
    (ranking.percentile_interval, (np.array([nan, nan]),), (nan, nan)),
    (ranking.percentile_interval, (np.array([nan, 2.0]),), (2, 2)),
    (ranking.bootstrap, ([1.0],), (1, 1)),
    (ranking.bootstrap, ([],), 'stat: empty'),
    (ranking.bootstrap, ([nan],), 'stat: contains NaN'),
    (ranking.bootstrap, (lambda w: w.sum(1) * nan, 3), (nan, nan)),
    (ranking.caption_nouns, ([], []), dict(precision=0, recall=0)),
    (retrieval.retrieval_ranks, (torch.full((2, 2), nan), torch.ones(2, 2), torch.arange(2)), 'images: hold values'),
    (retrieval.chance_recall, ([1], 3, 9), 'k=9'),
    (retrieval.chance_recall, ([], 3, 1), 'right: from 1 to 3'),
    (retrieval.chance_recall, ([5], 3, 1), 'right: from 1 to 3'),
    (retrieval.chance_median, ([], 3), 'right: from 1 to 3'),
    (retrieval.chance_median, ([0], 3), 'right: from 1 to 3'),
    (retrieval.chance_median, ([1], 1), 1),
    (retrieval.retrieval_folds, (1,), '1 images'),
    (vqa.normalise_answer, ('',), ''),
    (vqa.soft_scores, ([],), {}),
    (vqa.answer_vocabulary, ([],), 'answers'),
    (vqa.mean_interval, ([], []), 'scores'),
    (vqa.mean_interval, ([1.0], [0]), (1, 1, 1)),
    (vqa.mean_interval, ([nan, 1], [0, 1]), 'scores'),
    *((f, (EMPTY, []), 'empty: has no objects') for f in (detection.coco_ap, detection.voc_ap)),
    (detection.lvis_ap, (EMPTY, [], 'bbox'), 'empty: has no objects'),
    *((f, (objects(), NO_SCORE), 'score is nan') for f in (detection.coco_ap, detection.voc_ap)),
    (detection.lvis_ap, (objects(), NO_SCORE, 'bbox'), 'score is nan'),
    (detection.lvis_ap, (objects(), []), 'one: annotation 1 has no mask'),
    (detection.coco_ap, (objects(), []), [0, 0, 0, 0, nan, nan]),
    (detection.lvis_ap, (objects(), [], 'bbox'), [0, 0, 0, 0, nan, nan, nan, nan, 0]),
    (detection.voc_ap, (objects(), []), dict(AP=0, AP50=0, AP75=0)),
    (detection.voc_ap, (objects(), [], 2012, none((1, 1))), [nan] * 3),
    (multilabel.f1_scores, (none((0, 2)), none((0, 2))), 'predictions'),
    (multilabel.f1_scores, (none((2, 0)), none((2, 0))), 'predictions'),
    (multilabel.f1_scores, ([[1]], [[0.5]]), 'labels'),
    (multilabel.f1_scores, ([[0]], [[0]]), dict(micro=0, macro=0)),
    (multilabel.f1_scores, ([[nan]], [[1]]), 'predictions'),
    (multilabel.f1_interval, ([[1]], [[1]]), (1, 1, 1)),
    (pointing_game.cell_cover, (torch.zeros(1, 4, 4), 1), [[[0]]]),
    (pointing_game.pointing_hits, (torch.ones(1, 2, 2), torch.ones(1, 4, 4)), [1]),
    (pointing_game.pointing_hits, (torch.full((1, 2, 2), nan), torch.zeros(1, 3, 3)), 'maps'),
    (pointing_game.mass_inside, (torch.zeros(1, 2, 2), torch.zeros(1, 3, 3)), 'maps'),
]

IDS = [f'{f.__name__}-{i}' for i, (f, *_) in enumerate(METRICS)]


@pytest.mark.parametrize('function,args,want', METRICS, ids=IDS)
def test_a_metric_of_nothing_is_documented_or_refused_by_name(function, args, want):
    "An error that names the argument, or the documented value; no warning of NumPy"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        if isinstance(want, str) and want:
            with pytest.raises(ValueError, match=want):
                function(*args)
            return
        got = function(*args)
    if isinstance(got, dict) and isinstance(want, list):
        got = np.ravel(list(got.values()))
    if isinstance(want, (dict, str)):
        assert got == want
    else:
        assert np.array_equal(np.asarray(got, float), np.asarray(want, float), equal_nan=True), got


def test_every_public_metric_is_tested_here():
    tried = {f.__name__ for f, *_ in METRICS}
    modules = captioning, detection, multilabel, pointing_game, ranking, retrieval, vqa
    public = {n for m in modules for n in m.__all__ if inspect.isfunction(getattr(m, n))}
    assert public - tried == {'save_detections'}  # which writes a file
