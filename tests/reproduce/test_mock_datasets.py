"Imitations of data sets are read by the readers of the real ones, and by nothing else"

import hashlib
import json
import warnings
from functools import partial

import pytest
import torch

from vlrep.data.paraphrases import read_paraphrases
from vlrep.data.published_regions import convert_regions
from vlrep.data.wordpiece import WordPieceTokenizer
from vlrep.datasets.coco import coco_splits, photo_objects, read_coco, read_karpathy
from vlrep.datasets.conceptual_captions.reader import read_conceptual_captions
from vlrep.datasets.detection.coco import read_coco_detection
from vlrep.datasets.detection.detection_set import instance_mask
from vlrep.datasets.detection.lvis import read_lvis
from vlrep.datasets.detection.voc import read_voc_detection
from vlrep.datasets.flickr8k import read_flickr8k
from vlrep.datasets.flickr30k import read_flickr30k
from vlrep.datasets.mm_imdb import read_mm_imdb
from vlrep.datasets.narratives import read_localized
from vlrep.datasets.snli_ve import read_snli_ve
from vlrep.datasets.split_files import flickr_splits
from vlrep.datasets.visual_genome.reader import read_visual_genome
from vlrep.datasets.vizwiz import read_vizwiz
from vlrep.datasets.voc07 import read_voc
from vlrep.datasets.vqa import read_vqa
from vlrep.datasets.world.primitives import CATEGORIES, SEEN, UNSEEN
from vlrep.evaluation.evaluate import LAYOUTS
from vlrep.evaluation.zeroshot.benchmarks import read_awa2, read_cub
from vlrep.models.backbone_weights import load_backbone
from vlrep.models.bert_weights import load_bert
from vlrep.models.timm_torchvision import NARROW_VGG, named_backbone
from vlrep.reproduce.mock_datasets import IMITATIONS, write_imitation

TRAIN = 16
TEST = 6
FULL = TRAIN, TEST, TEST


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    "All imitations"
    root = tmp_path_factory.mktemp('data')
    write_imitation(IMITATIONS, root, TRAIN, TEST)
    return root


def parts(read, root):
    "How many images train, valid and test have"
    return tuple(len(read(root, part, 96).base) for part in ('train', 'valid', 'test'))


def coco(root):
    train, test = (read_coco_detection(root, part) for part in ('train2017', 'val2017'))
    assert any(a['iscrowd'] for a in train.annotations) and train.class_names == list(SEEN)
    assert all(instance_mask(a, train.images[0]).any() for a in train.annotations)
    lvis = [read_lvis(root / f'lvis_v0.5_{part}.json', root) for part in ('train', 'val')]
    assert [len(d) for d in lvis] == [len(train), len(test)]
    assert not any(a['iscrowd'] for a in lvis[0].annotations)
    captioned = [read_coco(root, f'annotations/captions_{part}.json', None, part) for part in ('train2017', 'val2017')]
    assert [len(d) for d in captioned] == [len(train), len(test)]
    assert list(coco_splits(root)) == ['folders', 'karpathy']
    objects = photo_objects(root)
    karpathy = [len(read_karpathy(root, part, objects=objects)) for part in ('train', 'val', 'test')]
    assert karpathy == [TRAIN, TEST // 2, TEST // 2]
    narrated = read_localized(root)
    assert all(i.startswith('train2017/') for i in narrated.ids) and len(narrated) == TRAIN
    assert list(narrated.captions.flat())[0] == narrated[0].narrative.text
    return len(train), len(test)


def voc(root):
    sizes = [len(read_voc(root / 'VOC2007', part)) for part in ('train', 'val', 'trainval', 'test')]
    assert sizes == [TRAIN // 2, TRAIN // 2, TRAIN, TEST]
    labels = read_voc(root / 'VOC2007', 'trainval')
    assert set(labels.names['present']) == set(SEEN)
    assert (labels.labels['present'] == 1).any(1).any()
    assert len(read_voc_detection(root)) == 2 * TRAIN
    return TRAIN, len(read_voc_detection(root, ['VOC2007/test']))


def classes(layout, root):
    train, valid = LAYOUTS[layout](root, 96, None)
    assert train.names['label'] == valid.names['label']
    assert set(train.labels['label']) == set(range(10)) >= set(valid.labels['label'])
    return len(train), len(valid)


def attributes(read, root):
    bench = read(root)
    assert len(bench.classes) == len(CATEGORIES)
    assert {c.lower()[-5:] for c, u in zip(bench.classes, bench.unseen) if u} == {c[-5:] for c in UNSEEN}
    parts = bench.parts()
    assert all(len(rows) > 12 for rows in parts.values())
    return sum(map(len, parts.values()))


def flickr(read, root):
    photos = read(root)
    split = flickr_splits(root)['karpathy'].read()
    assert sorted(split) == sorted(photos.ids) and len(photos.captions[0]) == 5
    return tuple(list(split.values()).count(part) for part in ('train', 'valid', 'test'))


def vqa(root):
    captioned = [read_coco(root, f'annotations/captions_{year}.json', None, year) for year in ('train2014', 'val2014')]
    assert [len(d) for d in captioned] == [TRAIN, TEST]
    return parts(read_vqa, root)


def weights(root):
    files = sorted(root.glob('*.pth*'))
    nets = [named_backbone(NARROW_VGG, 0, p) if 'vgg' in p.name else load_backbone(p, None) for p in files]
    assert len({tuple(next(n.parameters()).flatten()[:3].tolist()) for n in nets}) == len(nets)
    tokenizer = WordPieceTokenizer.from_folder(root / 'bert-base-uncased')
    ids = tokenizer.encode('A brown dog sits left of 2 umbrellas, quixotic!')
    assert tokenizer.unk not in ids
    bert = load_bert(root / 'bert-base-uncased', log=None)
    assert bert(torch.tensor([ids]), torch.tensor([len(ids)])).isfinite().all()
    return len(nets)


def paraphrases(root):
    other = read_paraphrases(root / 'coco.jsonl')
    captions = set(read_coco(root.parent / 'coco').captions.flat())
    assert other.coverage(captions) == (len(captions), len(captions))
    return len(captions)


def regions(sources, root, tmp):
    store = convert_regions(root, tmp / root.name, log=None)
    assert store.width == 2048 and store.classes == 1 + len(CATEGORIES)
    photos = {p.stem for s in sources for p in (root.parent / s).rglob('*.jp*g')}
    assert photos and all(store.row(f'{n}.jpg') >= 0 for n in photos)
    return len(store) - len(photos)


READERS = dict(
    coco=(coco, FULL[:2]),
    voc=(voc, FULL[:2]),
    imagenet=(partial(classes, 'imagenet'), FULL[:2]),
    places205=(partial(classes, 'places205'), FULL[:2]),
    inaturalist=(partial(classes, 'inaturalist'), FULL[:2]),
    cub=(partial(attributes, read_cub), 116),
    awa2=(partial(attributes, read_awa2), 116),
    flickr8k=(partial(flickr, read_flickr8k), FULL),
    flickr30k=(partial(flickr, read_flickr30k), FULL),
    visual_genome=(lambda root: len(read_visual_genome(root)), TRAIN),
    conceptual_captions=(lambda root: len(read_conceptual_captions(root)), TRAIN),
    open_images=(lambda root: len(read_localized(root)), TRAIN),
    flickr30k_narratives=(lambda root: len(read_localized(root)), TRAIN),
    ade20k_narratives=(lambda root: len(read_localized(root)), TRAIN),
    vqa=(vqa, FULL),
    vizwiz=(partial(parts, read_vizwiz), FULL),
    snli_ve=(partial(parts, read_snli_ve), FULL),
    mm_imdb=(partial(parts, read_mm_imdb), FULL),
    weights=(weights, 8),
    paraphrases=(paraphrases, 5 * TRAIN),
)
SOURCES = dict(
    coco_features=('coco', 'vqa'),
    conceptual_captions_features=('conceptual_captions',),
    flickr30k_features=('flickr30k', 'snli_ve'),
    vizwiz_features=('vizwiz',),
    mm_imdb_features=('mm_imdb',),
)


def test_each_imitation_has_a_reader_here():
    assert {*READERS, *SOURCES} == set(IMITATIONS)


@pytest.mark.parametrize('name', READERS)
def test_the_reader_of_the_real_files_reads_the_imitation(data, name):
    read, want = READERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        warnings.filterwarnings('ignore', '.* have no (object|images)')  # Classes, of so few photos
        assert read(data / name) == want


@pytest.mark.parametrize('name', SOURCES)
def test_region_features_are_those_of_the_photos(data, tmp_path, name):
    assert regions(SOURCES[name], data / name, tmp_path) == 0


def digest(root):
    return {p.relative_to(root): hashlib.sha256(p.read_bytes()).digest() for p in root.rglob('*') if p.is_file()}


def test_the_same_bytes_twice(data, tmp_path):
    write_imitation(IMITATIONS, tmp_path, TRAIN, TEST)
    assert digest(tmp_path) == digest(data)


def test_other_sizes_replace_an_imitation_and_nothing_else(tmp_path):
    write_imitation(['places205'], tmp_path, 16, 4)
    (tmp_path / 'imagenet').mkdir()
    with pytest.raises(ValueError, match='imagenet: exists, and is not an imitation'):
        write_imitation(['imagenet', 'places205'], tmp_path, 20, 4)
    assert json.loads((tmp_path / 'places205/imitation.json').read_text())['train'] == 16
    write_imitation(['places205'], tmp_path, 20, 4)
    assert len((tmp_path / 'places205/train_places205.csv').read_text().splitlines()) == 20


def test_features_of_real_photos_are_never_imitated(tmp_path):
    (tmp_path / 'vizwiz').mkdir()
    with pytest.raises(ValueError, match='vizwiz: exists, and is not an imitation'):
        write_imitation(['vizwiz_features'], tmp_path)
    assert not (tmp_path / 'vizwiz_features').exists()
