"Large views on a CPU are made one by one, by workers if there are some: the same bits wherever they are made"

import itertools
import os

import numpy as np
import pytest
import torch
from PIL import Image

from vlrep.data import transforms
from vlrep.data.loader import StatefulLoader
from vlrep.data.records import ImageFileDataset
from vlrep.data.transforms import EvalTransform, TrainTransform, denormalise
from vlrep.methods.mct.collate import HeldOutViews, TwoViews

BS = 6
VIEWS = dict(
    train=TrainTransform,
    soft=lambda s: TrainTransform(s, jitter_p=1, grey_p=0.4, blur_p=0.5),
    middle=lambda s: EvalTransform(s, s + 9),
    whole=lambda s: EvalTransform(s, whole=True),
    two=lambda s: TwoViews(TrainTransform(s)),
    held_out=lambda s: HeldOutViews(EvalTransform(s), TrainTransform(s)),
)


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "Nineteen photos of different shapes: the last batch of six has one"
    root = tmp_path_factory.mktemp('photos')
    draw = np.random.default_rng(0)
    for i in range(19):
        small = Image.fromarray(draw.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        small.resize((150 + 11 * i, 320 - 9 * i), Image.Resampling.BICUBIC).save(root / f'{i:02}.jpg')
    return ImageFileDataset(sorted(root.glob('*.jpg')), 240, 'photos')


def loader(photos, view, **options):
    return StatefulLoader(photos, BS, aug=view, seed=3, train=True, device='cpu', **options)


def epochs(dl, parts=1, at=(0, 0)):
    "Views of two epochs, (epoch, row) -> views; a batch cut into parts as micro-batches are"
    dl.parts = parts
    dl.seek(*at)
    seen = {}
    try:
        while dl.epoch < 2:
            epoch = dl.epoch
            for b, _ in dl:
                views = [b[k] for k in ('images', 'images2') if k in b]
                assert all(v.is_contiguous(memory_format=torch.channels_last) for v in views)
                for k, row in enumerate(b['id'].tolist()):
                    seen[epoch, row] = [v[k].clone() for v in views]
    finally:
        dl.close()
    return seen


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize('kind', VIEWS)
@pytest.mark.parametrize('size', [128, 224])
def test_no_bit_depends_on_workers_ranks_parts_threads_or_a_stop(photos, kind, size):
    "Whoever makes the views of a step, and wherever it was begun"
    view = VIEWS[kind](size)
    whole = epochs(loader(photos, view))
    assert whole.keys() == set(itertools.product((0, 1), range(19)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(same(v, whole[k]) for k, v in epochs(loader(photos, view)).items())
    finally:
        torch.set_num_threads(threads)
    resumed = epochs(loader(photos, view, workers=2), at=(1, 2))
    assert len(resumed) == 7 and all(same(v, whole[k]) for k, v in resumed.items())
    if not getattr(view, 'shares', False):
        return
    for workers, world_size, parts in (1, 2, 1), (0, 3, 2), (2, 2, 3):
        ranks = [
            epochs(loader(photos, view, workers=workers, rank=r, world_size=world_size), parts)
            for r in range(world_size)
        ]
        assert sum(map(len, ranks)) == len(whole)  # each photo once
        for k, v in {k: v for rank in ranks for k, v in rank.items()}.items():
            assert same(v, whole[k]), (workers, world_size, parts, k)


@pytest.mark.parametrize('kind', ['train', 'middle', 'whole'])
def test_views_are_those_of_the_matrices_within_a_rounding(photos, kind, monkeypatch):
    "Without colour changes no pixel differs by more than 1 of 255, and the mean difference is .28"
    view = TrainTransform(224, jitter_p=0) if kind == 'train' else VIEWS[kind](224)
    images, hw = photos.images(range(19))
    batch = dict(images=images, hw=hw, flip=torch.arange(19) % 2 == 0)
    one_by_one = view(batch, (1,))['images']
    monkeypatch.setattr(transforms, '_LARGE', 1000)
    scale = torch.tensor(view.std).view(3, 1, 1) * 255
    difference = ((one_by_one - view(batch, (1,))['images']) * scale).abs()
    assert difference.max() < 1.01 and 0 < difference.mean() < 0.35


def test_colours_do_not_depend_on_threads():
    "The mean that contrast is changed around has the same bits with any number of threads"
    threads = torch.get_num_threads()
    try:
        for side in 128, 299, 480:
            image = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
            seen = []
            for n in 1, 2, 3, 8:
                torch.set_num_threads(n)
                seen.append(transforms.jitter(image.clone(), torch.tensor([[1.1, 0.7, 1.2, 0.1]])))
            assert all(torch.equal(x, seen[0]) for x in seen[1:]), side
    finally:
        torch.set_num_threads(threads)


def test_a_large_view_of_a_single_pixel():
    "Photos of one pixel, or of one row, have views of their colour"
    for h, w in (1, 1), (1, 5), (5, 1):
        image = torch.full((2, 3, 5, 5), 200, dtype=torch.uint8)
        batch = dict(images=image, hw=torch.tensor([[h, w]] * 2), flip=torch.tensor([True, False]))
        for view in TrainTransform(128, jitter_p=0), EvalTransform(128), EvalTransform(128, whole=True):
            assert (denormalise(view(batch, (0,))['images']) == 200).all()


class Where:
    "A view that tells which process made it"

    def __init__(self, in_workers):
        self.in_workers = in_workers

    def __call__(self, batch, key):
        return batch | dict(process=torch.full((len(batch['images']),), os.getpid()))


def test_large_views_are_made_by_workers_on_a_cpu_alone(photos):
    "Views that say so are made by the workers, others in the main process, on a GPU all of them"

    def processes(**options):
        dl = loader(photos, **options)
        try:
            return {p for b, _ in dl for p in b['process'].tolist()}
        finally:
            dl.close()

    assert len(processes(view=Where(True), workers=2) - {os.getpid()}) == 2
    assert processes(view=Where(True)) == processes(view=Where(False), workers=2) == {os.getpid()}
    for view, device, parts in (
        (TrainTransform(128), 'cpu', 3),
        (TrainTransform(127), 'cpu', 2),
        (TrainTransform(128), 'meta', 2),
    ):
        dl = StatefulLoader(photos, BS, aug=view, train=True, device=device)
        assert len(dl._job(0, 0, np.arange(BS))) == parts
