"""What is kept between runs and decides their numbers: a byte that has changed there is never read

Caches of a small BERT, of a region classifier, of regions, of captions, of the world; stores of regions.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from tools import same_tensors

from vlrep.data.collate import caption_tokenizer
from vlrep.data.region_inputs import RegionReader
from vlrep.data.region_store import RegionStore, RegionWriter
from vlrep.datasets.world.dataset import world
from vlrep.methods import fusion_collate
from vlrep.models.backbones import make_backbone
from vlrep.models.bert_weights import SmallBertPlan, small_config, train_small_bert
from vlrep.models.region_cache import cache_regions
from vlrep.models.region_classifier import RegionClassifierPlan, train_region_classifier
from vlrep.models.region_features import RegionEncoder


class Recipe:
    vocab = 60


def small_bert(scenes, log):
    tokenizer = caption_tokenizer(Recipe, scenes)
    return train_small_bert(
        scenes, tokenizer, small_config(tokenizer, 32, 1), SmallBertPlan(steps=2, bs=8), log=log
    ).state_dict()


def classifier(scenes, log):
    return train_region_classifier(scenes, RegionClassifierPlan(steps=2, bs=4, width=8), log=log).state_dict()


def regions(scenes, log):
    encoder = RegionEncoder(make_backbone(10, 8).eval(), 'boxes')
    cache = cache_regions(encoder, scenes, RegionReader('boxes'), 32, log=log)
    return {k: v.contiguous() for k, v in cache(range(len(scenes)), np.zeros(len(scenes), bool)).items()}


class Writer:
    "In place of an opened run"

    def caption(self, images):
        return ['a dog' for _ in images]


def captions(scenes, log):
    text = fusion_collate._caption_all('run', scenes, log)
    return dict(said=torch.tensor([len(t) for t in text]), first=torch.tensor(list(text[0].encode())))


CACHES = dict(bert=small_bert, classifier=classifier, regions=regions, captions=captions)


def kept(cache):
    "The files of all caches but that of the world, and of locks"
    return [
        p
        for p in sorted(cache.rglob('*'))
        if p.is_file() and 'world' not in p.parts and p.suffix != '.lock' and not p.name.endswith('.building')
    ]


def flipped(path, part):
    "Change a byte: the first for 0, the last for 1"
    data = bytearray(path.read_bytes())
    data[round(part * (len(data) - 1))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize('name', CACHES)
def test_a_changed_byte_in_a_cache_is_made_anew(name, monkeypatch, own_cache):
    "In each file, at the beginning, in the middle and at the end; one file that is gone; the first result, and a line"
    monkeypatch.setattr(fusion_collate, '_caption_key', lambda *a: 'key')
    monkeypatch.setattr(fusion_collate, 'resolve', lambda name: lambda run: Writer())
    scenes = world('train', 20, size=32)
    first = CACHES[name](scenes, str)
    files = kept(own_cache)
    assert any(p.name == 'index.json' for p in files) and len(files) > 1
    tried = 0
    for path in files:
        for at in (0, 0.5, 1, None):
            if at is None:
                path.unlink()
            else:
                flipped(path, at)
            lines = []
            assert same_tensors(CACHES[name](scenes, lines.append), first), (path.name, at)
            assert any(path.name in s and 'rebuilt' in s for s in lines), (path.name, at, lines)
            tried += 1
        again = []
        CACHES[name](scenes, again.append)
        assert not any('rebuilt' in s for s in again)
    assert tried == 4 * len(files)


def store(folder, n=6):
    "A store of regions with distributions, sizes and thumbnails"
    draw = np.random.default_rng(0)
    with RegionWriter(folder, 8, 3, names=['a', 'b', 'c']) as w:
        for i in range(n):
            p = draw.random((2, 3), np.float32)
            boxes = np.tile(np.float32([[0, 0, 0.5, 0.5 + i / 20]]), (2, 1))
            w.add(
                f'image {i}',
                draw.random((2, 8), np.float32),
                boxes,
                p / p.sum(1, keepdims=True),
                image=Image.new('RGB', (8 + i, 8)),
            )
    return RegionStore(folder)


def read_all(folder):
    s = RegionStore(folder)
    return {**s.read(s.rows([f'image {i}' for i in range(6)])), **s.read(range(6), boxes=True)}


def test_a_changed_byte_in_a_store_is_refused(tmp_path):
    "In each file, in 40 places of each: refused with its name, or without any effect (the end of a header)"
    store(tmp_path / 'store')
    first = read_all(tmp_path / 'store')
    held_out = 0
    for path in sorted((tmp_path / 'store').iterdir()):
        whole = path.read_bytes()
        for part in np.linspace(0, 1, 40):
            flipped(path, part)
            with pytest.raises(ValueError, match='store') as e:
                assert same_tensors(read_all(tmp_path / 'store'), first)  # padding of the header of features
                raise ValueError('the same store')
            held_out += 'the same' not in str(e.value)
            path.write_bytes(whole)
        for cut in (2, len(whole) // 2, len(whole)):
            path.write_bytes(whole[: len(whole) - cut])
            with pytest.raises(ValueError, match='store'):
                read_all(tmp_path / 'store')
        path.write_bytes(whole)
    assert held_out > 250, held_out
    assert same_tensors(read_all(tmp_path / 'store'), first)
