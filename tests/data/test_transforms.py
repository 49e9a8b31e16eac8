"Views and crops of images of a few pixels"

import itertools

import pytest
import torch

from vlrep.data.transforms import EvalTransform, TrainTransform, crop_labels, denormalise, move_points, resize_crop
from vlrep.methods.mct.collate import HeldOutViews, TwoViews

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
def test_images_of_a_few_pixels_have_views(view):
    "An image of one colour has views of that colour, from one pixel on; traces and maps stay in bounds"
    for h, w, size in itertools.product((1, 2, 5), (1, 3, 5), (1, 4)):
        side = max(h, w)
        image = torch.full((2, 3, side, side), 200, dtype=torch.uint8)
        batch = dict(
            images=image,
            hw=torch.tensor([[h, w]] * 2),
            flip=torch.tensor([True, False]),
            trace=torch.rand(2, 3, 4),
            object_map=torch.ones(2, side, side, dtype=torch.long),
            id=torch.arange(2),
        )
        out = VIEWS[view](size)(batch, (0, 1))
        for k in {'images', 'images2'} & out.keys():
            got = denormalise(out[k]).float()
            if view == 'soft':
                got = got.amax(1)
            assert out[k].shape == (2, 3, size, size) and ((got - 200).abs() <= 1).all(), (h, w, size)
        assert out['trace'].isfinite().all() and (out['object_map'] == 1).all()


def test_crops_of_a_few_pixels_can_be_mirrored():
    "A mirrored crop is the mirror image of the crop, for pixels, maps and points"
    for h, w, size in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 7)):
        side = max(h, w)
        images = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(h))
        maps = torch.arange(side * side).view(1, side, side)
        yes = torch.ones(1, dtype=torch.bool)
        for y, x in itertools.product(range(h), range(w)):
            box = torch.tensor([[y, x, h - y, w - x]])
            plain = resize_crop(images, box, size)
            torch.testing.assert_close(resize_crop(images, box, size, yes), plain.flip(3), atol=1e-4, rtol=0)
            assert (crop_labels(maps, box, size, yes) == crop_labels(maps, box, size).flip(2)).all()
            at = torch.tensor([[[(x + 0.5) / w, (y + 0.5) / h]]], dtype=torch.float64)
            a, b = (move_points(at, box, torch.tensor([[h, w]]), f) for f in (None, yes))
            torch.testing.assert_close(a[..., 0] + b[..., 0], torch.ones(1, 1, dtype=torch.float64))
