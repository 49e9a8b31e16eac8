"""What fusion models read: stores of other images, what has changed before a run is resumed, widths, label maps; and
run folders that open without the BERT they began with

Stores and their readers are checked in nbs/data/57_region_store, label maps in nbs/data/58_tasks.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import leaving
from tools import quiet, refused
from torchvision.models import detection

import vlrep
from vlrep.core.weights import weights_sha256
from vlrep.data.collate import caption_lines
from vlrep.data.published_regions import convert_regions
from vlrep.data.records import ImageFileDataset
from vlrep.data.region_inputs import RegionReader
from vlrep.data.region_store import RegionStore, RegionWriter
from vlrep.data.tasks import TaskDataset, read_labels
from vlrep.datasets.world.build import counterparts
from vlrep.datasets.world.dataset import world
from vlrep.experiments.commands import evaluate, export
from vlrep.experiments.finetune import finetune
from vlrep.experiments.initial_weights import run_backbone
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.region_files import make_regions, write_regions
from vlrep.experiments.spec import finetune_spec, run_spec
from vlrep.methods import fusion_collate, fusion_training
from vlrep.methods.base import METHODS
from vlrep.methods.icmlm.model import bert_digest
from vlrep.metrics.vqa import UNKNOWN
from vlrep.models.bert_model import Bert, BertConfig
from vlrep.models.bert_weights import bert_tokenizer, save_bert, small_config
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import open_run_folder


class Colours:
    "A source of regions: the mean colour of an image"

    width = 3
    classes = 0
    names = []

    def __call__(self, images):
        return np.asarray(images, np.float32).mean((0, 1), keepdims=True)[0], np.array([[0, 0, 1, 1]], np.float32), None


def photos(folder, first, n=6, suffix='.png', names=None, **save):
    "A folder of scenes"
    folder.mkdir(parents=True)
    for i in range(n):
        name = names[i] if names else f'{i}{suffix}'
        Image.fromarray(world('train', first + n, size=64)[first + i].image).save(folder / name, **save)
    return folder


def dataset(folder):
    return ImageFileDataset(sorted(p for p in folder.iterdir()), 48, folder.name, split='train')


# ---------------------------------------------------------------- whose regions


def test_a_store_is_not_taken_for_other_images_of_the_same_names(tmp_path):
    a = photos(tmp_path / 'a', 0)
    b = photos(tmp_path / 'b', 6)
    store = write_regions(a, tmp_path / 'store', Colours(), dict(by='colours'), log=quiet).folder
    assert len(RegionReader('files', store)(dataset(a), [0, 5])['region_feats']) == 2
    for how in ('files', 'boxes'):
        with pytest.raises(ValueError, match='other images than those of b') as e:
            RegionReader(how, store)(dataset(b), [0])
        assert str(store) in str(e.value) and str(b) in str(e.value) and '6 of 6' in str(e.value)
    with pytest.raises(ValueError, match='other images than those of .*/b'):
        write_regions(b, store, Colours(), dict(by='colours'), log=quiet)
    # the same photos, smaller and compressed, in another folder
    (tmp_path / 'copy').mkdir()
    for p in a.iterdir():
        Image.open(p).resize((40, 40)).save(tmp_path / 'copy' / f'{p.stem}.jpg', quality=60)
    RegionReader('files', store)(dataset(tmp_path / 'copy'), [0])


def test_one_changed_photo_of_many_is_no_other_folder(tmp_path):
    a = photos(tmp_path / 'a', 0, 12)
    store = write_regions(a, tmp_path / 'store', Colours(), {}, log=quiet).folder
    Image.fromarray(world('train', 30, size=64)[29].image).save(a / '3.png')
    RegionReader('files', store)(dataset(a), [0])
    Image.fromarray(world('train', 30, size=64)[28].image).save(a / '4.png')
    with pytest.raises(ValueError, match='2 of 12 images .*3.png, 4.png'):
        RegionReader('files', store)(dataset(a), [0])


def test_a_store_of_another_part_of_coco_is_refused(tmp_path):
    "A store of both parts: the folder of the images decides; of one part: another part is refused by name"
    names = [f'{i:012d}.jpg' for i in range(1, 7)]
    for part, first in (('train2017', 0), ('val2017', 6)):
        photos(tmp_path / 'coco' / part, first, names=names, quality=95)
    both = write_regions(tmp_path / 'coco', tmp_path / 'both', Colours(), {}, log=quiet)
    for part in ('train2017', 'val2017'):
        d = dataset(tmp_path / 'coco' / part)
        rows, _ = RegionReader('files', both.folder)._of_store(d)
        assert [both.ids[r] for r in rows] == [f'{part}/{n}' for n in names]
    with pytest.raises(ValueError, match='000000000001.jpg might be train2017/000000000001.jpg, val2017/'):
        both.rows(names)
    val = write_regions(tmp_path / 'coco' / 'val2017', tmp_path / 'val', Colours(), {}, log=quiet).folder
    with pytest.raises(ValueError, match='val: holds the regions of other images than those of train2017'):
        RegionReader('files', val)(dataset(tmp_path / 'coco' / 'train2017'), [0])


def published(folder, names, sides):
    "Regions as mmf publishes them"
    folder.mkdir()
    for n, (w, h) in zip(names, sides):
        np.save(folder / f'{n}.npy', np.ones((2, 5), np.float32))
        np.save(
            folder / f'{n}_info.npy',
            dict(bbox=np.array([[0, 0, w / 2, h], [w / 2, 0, w, h]]), num_boxes=2, image_width=w, image_height=h),
            allow_pickle=True,
        )
    return folder


def test_published_stores_name_their_part_and_their_shapes(tmp_path):
    names = [f'COCO_val2014_{i:012d}' for i in range(1, 5)]
    store = convert_regions(published(tmp_path / 'npy', names, [(64, 48)] * 4), tmp_path / 'store', log=None)
    assert store.rows([f'{n}.jpg' for n in names]).tolist() == store.rows(['1', '2', '3', '4']).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match='4 of 4 images have no regions'):
        store.rows([n.replace('val', 'train') for n in names])
    (tmp_path / 'images').mkdir()
    for n in names:
        Image.new('RGB', (40, 30)).save(tmp_path / 'images' / f'{n}.png')
    RegionReader('files', store.folder)(dataset(tmp_path / 'images'), [0])
    for n in names:
        Image.new('RGB', (30, 40)).save(tmp_path / 'images' / f'{n}.png')
    with pytest.raises(ValueError, match='other images than those of images'):
        RegionReader('files', store.folder)(dataset(tmp_path / 'images'), [0])


def test_a_store_from_before_knows_no_images_and_opens(tmp_path):
    a = photos(tmp_path / 'a', 0)
    with RegionWriter(tmp_path / 'store', 3) as w:
        for p in sorted(a.iterdir()):
            w.add(p.name, *Colours()(Image.open(p)))
    assert not {'sides', 'looks'} & set(RegionStore(tmp_path / 'store').cols)
    RegionReader('files', tmp_path / 'store')(dataset(a), [0])


# ---------------------------------------------------------------- vlrep regions

MODEL = 'fasterrcnn_mobilenet_v3_large_320_fpn'


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    "Weights of a detector of five classes"
    torch.manual_seed(0)
    net = getattr(detection, MODEL)(weights=None, weights_backbone=None, num_classes=5)
    torch.save(net.state_dict(), at := tmp_path_factory.mktemp('detector') / 'detector.pth')
    return at


def test_the_classes_of_a_detector_are_stored(detector, tmp_path, capsys):
    at = photos(tmp_path / 'photos', 0, 1)

    def words(out, *more):
        return [
            'regions',
            at,
            '--out',
            tmp_path / out,
            '--model',
            MODEL,
            '--weights',
            detector,
            '--max-regions',
            2,
            '--device',
            'cpu',
            *more,
        ]

    names = tmp_path / 'names.json'
    names.write_text('["car", "dog", "cat"]')
    err = refused(capsys, *words('a', '--classes', names))
    assert '--classes' in err and 'names 3 classes' in err and 'has 5' in err and 'detector.pth' in err
    assert 'has 5 classes' in refused(capsys, *words('a', '--classes', 1601)) and not (tmp_path / 'a').exists()
    names.write_text('["car", "dog", "cat", "boat"]')
    vlrep_main(words('a', '--classes', names))
    assert RegionStore(tmp_path / 'a').names == ['__background__', 'car', 'dog', 'cat', 'boat']
    vlrep_main(words('b', '--classes', 5))
    assert '--classes: has no meaning' in refused(
        capsys, 'regions', at, '--out', tmp_path / 'c', '--by', 'grid', '--weights', detector, '--classes', 5
    )


def vlrep_main(words):
    from vlrep.cli import main

    main(list(map(str, words)))


def test_a_label_map_of_another_detector_is_refused():
    from vlrep.experiments.region_files import _class_names

    known = ['__background__', 'person', 'bicycle']
    assert _class_names(None, 3, known, 'net') is known
    import pathlib
    import tempfile

    f = pathlib.Path(tempfile.mkdtemp()) / 'l.txt'
    f.write_text('person\nbicycle\n')
    assert _class_names(f, 3, known, 'net') == known
    f.write_text('dog\nbicycle\n')
    with pytest.raises(ValueError, match="different data set: class 1 is 'dog' there, and 'person' in net"):
        _class_names(f, 3, known, 'net')


def test_damaged_photos_are_counted_against_a_limit(tmp_path, capsys):
    at = photos(tmp_path / 'photos', 0, 8)
    whole = {i: (at / f'{i}.png').read_bytes() for i in (1, 4, 6)}
    for i, b in whole.items():
        (at / f'{i}.png').write_bytes(b[:60])
    with pytest.raises(ValueError, match='3 of 8 photos cannot be read, at most 2 may be so .*1.png.*--max-corrupt'):
        write_regions(at, tmp_path / 'store', Colours(), {}, log=quiet)
    assert not (tmp_path / 'store').exists()
    (at / '4.png').write_bytes(whole[4])  # restored, and the same call continues
    lines = []
    store = write_regions(at, tmp_path / 'store', Colours(), {}, log=lines.append)
    assert sorted(store.left_out) == ['1.png', '6.png'] and store.row('4.png') >= 0 and len(store) == 6
    assert '2 photos could not be read' in lines[-1] and '1.png' in lines[-1]
    assert len(write_regions(at, tmp_path / 'none', Colours(), {}, max_corrupt='40%', log=quiet)) == 6
    with pytest.raises(ValueError, match='2 of 8 photos'):
        write_regions(at, tmp_path / 'few', Colours(), {}, max_corrupt=1, log=quiet)
    assert '--max-corrupt: max_corrupt=lots' in refused(capsys, 'regions', at, '--by', 'files', '--max-corrupt', 'lots')


def test_published_files_give_classes_and_count_damage(tmp_path):
    src = published(tmp_path / 'npy', [f'i{k}' for k in range(4)], [(8, 8)] * 4)
    for k in range(4):
        info = np.load(src / f'i{k}_info.npy', allow_pickle=True).item()
        np.save(src / f'i{k}_info.npy', {**info, 'cls_prob': np.full((2, 4), 0.25, np.float32)}, allow_pickle=True)
    (src / 'i3_info.npy').write_bytes(b'torn')
    with pytest.raises(ValueError, match='i3_info.npy'):
        make_regions(src, tmp_path / 'a', 'files', log=quiet)
    with pytest.raises(ValueError, match='distributions over 4 classes, and 5 are expected'):
        make_regions(src, tmp_path / 'a', 'files', classes=5, max_corrupt=1, log=quiet)
    (tmp_path / 'l.txt').write_text('a\nb\nc\nd\n')
    got = make_regions(src, tmp_path / 'a', 'files', classes=tmp_path / 'l.txt', max_corrupt=1, log=quiet)
    assert got.names == ['a', 'b', 'c', 'd'] and list(got.left_out) == ['i3']


# ---------------------------------------------------------------- runs

SMALL = [
    'scenes=24',
    'valid=8',
    'probe=40',
    'probe_held=40',
    'test=40',
    'shown=4',
    'point=0',
    'baselines=false',
    'size=32',
    'visual_depth=10',
    'visual_width=8',
    'width=16',
    'heads=2',
    'depth=1',
    'vocab=200',
    'bs=8',
    'steps=4',
    'warmup=1',
    'bert_steps=10',
    'max_len=30',
]
FILES = ['regions=files', 'region_model=given', 'cache_regions=false', 'flip_p=0', 'mim=off', 'aux_scenes=0']
TASK = ['steps=2', 'bs=4', 'every=2', 'warmup=1', 'scenes=12', 'valid=6', 'test=6']
HOW = dict(threads=1, precision='fp32')


def stored(folder, width=6, seed=0):
    "A store of random features of the boxes of the world's parts, as `SMALL` draws them"
    g = np.random.default_rng(seed)
    shutil.rmtree(folder, ignore_errors=True)
    with RegionWriter(folder, width) as w:
        for part, n in (('train', 24), ('valid', 8), ('test', 40)):
            for r in world(part, n, size=32):
                w.add(r.id, g.normal(size=(len(r.boxes), width)), r.boxes)
    return folder


def begun(out, changes, monkeypatch):
    "A run of VisualBERT that was stopped after two of its steps"
    with monkeypatch.context() as m:
        m.setitem(METHODS, 'visualbert', leaving(METHODS['visualbert']))
        with pytest.raises(TrainingInterrupted):
            pretrain(run_spec('visualbert', [*SMALL, *changes], **HOW), out=out, log=quiet)
    return out


def test_resume_with_a_changed_store_is_refused(tmp_path, monkeypatch):
    store = stored(tmp_path / 'store')
    run = begun(tmp_path / 'run', [*FILES, f'region_files={store}'], monkeypatch)
    assert set(open_run_folder(run).info['contents']) == {'region_files', 'captions of train', 'captions of valid'}
    stored(store, seed=1)
    with pytest.raises(
        ValueError,
        match=r'what it reads has changed since it began \(region_files: was .* now .*\): '
        'restore it',
    ):
        resume_run(run, log=quiet)
    lines = []
    stored(store)
    resume_run(run, log=lines.append)
    assert any('resuming from step 2' in s for s in lines) and open_run_folder(run).results()


def test_a_changed_store_may_be_excused(tmp_path, monkeypatch):
    store = stored(tmp_path / 'store')
    run = begun(tmp_path / 'run', [*FILES, f'region_files={store}'], monkeypatch)
    was = open_run_folder(run).info['contents']['region_files']
    stored(store, seed=1)
    resume_run(run, inexact=True, log=quiet)
    now = open_run_folder(run).info
    assert now['contents']['region_files'] != was and 'contents region_files' in str(now['inexact'])


def test_resume_with_changed_texts_is_refused(tmp_path, monkeypatch):
    "Captions that were written to a file"
    file = tmp_path / 'written.jsonl'

    def write(text):
        ids = [i for part, n in (('train', 24), ('valid', 8)) for i in world(part, n, size=32).ids]
        file.write_text(''.join(json.dumps(dict(image=f'{i}-twin', caption=text)) + '\n' for i in ids))

    write('a red car on the beach')
    grid = ['regions=grid', 'region_model=given', 'cache_regions=false', 'mim=off', 'aux_scenes=0', 'source=generated']
    run = begun(tmp_path / 'run', [*grid, f'generated={file}'], monkeypatch)
    write('a blue car on the beach')
    with pytest.raises(ValueError, match='generated of train: was'):
        resume_run(run, log=quiet)


# ---------------------------------------------------------------- widths


def test_another_width_is_refused_before_a_bert_is_opened(tmp_path, monkeypatch):
    store = stored(tmp_path / 'store')
    for m, k in ((fusion_collate, 'bert_tokenizer'), (fusion_training, 'make_bert')):
        monkeypatch.setattr(m, k, lambda *a, **kw: pytest.fail('a BERT was opened'))
    with pytest.raises(
        ValueError,
        match='store: has features of width 6, and region_width=2048 asks for width 2048; add --set region_width=6',
    ):
        pretrain(
            run_spec('visualbert', [*SMALL, *FILES, f'region_files={store}', 'region_width=2048'], **HOW),
            out=tmp_path / 'run',
            log=quiet,
        )
    assert not (tmp_path / 'run').exists()
    paper = METHODS['vilbert'].recipes['vilbert']
    with pytest.raises(ValueError, match='region_width=2048 asks for'):
        fusion_collate.check_region_store(replace(paper, region_files=str(store)))


def test_there_is_no_backbone_where_regions_come_from_files(tmp_path):
    store = stored(tmp_path / 'store')
    with pytest.raises(ValueError, match='regions=files: .*leave --backbone and --weights out'):
        pretrain(
            run_spec(
                'visualbert',
                [
                    *SMALL[:-12],
                    *[c for c in SMALL[-12:] if not c.startswith('visual_')],
                    *FILES,
                    f'region_files={store}',
                ],
                backbone='resnet18',
                **HOW,
            ),
            out=tmp_path / 'run',
            log=quiet,
        )


def test_fine_tuning_reads_features_of_the_same_width(tmp_path):
    store = stored(tmp_path / 'store')
    run = pretrain(
        run_spec('visualbert', [*SMALL, *FILES, f'region_files={store}'], **HOW), out=tmp_path / 'run', log=quiet
    )
    assert open_run_folder(run).info['sizes']['region_width'] == 6
    other = stored(tmp_path / 'other', 8)
    lines = []
    with pytest.raises(ValueError, match='other: has features of width 8, and this run asks for width 6'):
        finetune(finetune_spec(run, 'vqa', TASK, region_files=other), out=tmp_path / 'out', log=lines.append)
    assert not lines


# ---------------------------------------------------------------- no backbone


def test_what_needs_a_backbone_says_why_there_is_none(tmp_path, capsys):
    grid = ['regions=grid', 'region_model=given', 'cache_regions=false', 'mim=off', 'aux_scenes=0']
    run = pretrain(run_spec('vilbert', [*SMALL, *grid], **HOW), out=tmp_path / 'run', log=quiet)
    why = 'its regions come from files, or from a network that is not trained'
    assert all(METHODS[m].no_backbone.startswith(why) for m in ('visualbert', 'vilbert'))
    with pytest.raises(ValueError, match=f'no backbone of its own .{why}'):
        export(run, 'torchvision', tmp_path / 'net')
    with pytest.raises(ValueError, match=f'--weights .*vilbert run has no backbone to start from: {why}'):
        run_backbone(run)
    at = photos(tmp_path / 'photos', 0, 1)
    assert why in refused(capsys, 'regions', at, '--by', run, '--out', tmp_path / 'store')
    assert why in refused(capsys, 'pretrain', '--method', 'supervised', '--weights', run, '--out', tmp_path / 'next')
    assert why in refused(capsys, 'export', run, '--to', 'timm')
    assert not (tmp_path / 'store').exists() and not (tmp_path / 'next').exists()


# ---------------------------------------------------------------- label maps


@pytest.mark.parametrize(
    'text',
    [
        '["b", "a", "c"]',
        '{"b": 0, "c": 2, "a": 1}',
        '{"0": "b", "2": "c", "1": "a"}',
        '[{"id": 7, "name": "a"}, {"id": 1, "name": "b"}, {"id": 9, "name": "c"}]',
        '{"categories": [{"id": 1, "name": "b"}, {"id": 7, "name": "a"}, {"id": 9, "name": "c"}], "images": []}',
    ],
)
def test_label_maps_in_json_are_read(tmp_path, text):
    (tmp_path / 'l.json').write_text(text)
    (tmp_path / 'l.txt').write_text('b\na\n\nc\n')
    assert read_labels(tmp_path / 'l.json') == read_labels(tmp_path / 'l.txt') == ['b', 'a', 'c']


@pytest.mark.parametrize(
    'text,why',
    [
        ('{"a": 0, "b": 2}', 'the numbers of 2 labels are 0 to 1'),
        ('["a", "a"]', 'twice: a'),
        ('["a"]', 'at least 2 labels'),
        ('[1, 2]', 'expected a list of labels'),
        ('{"a": "b"}', 'expected labels with their numbers'),
        ('"a"', 'a list of labels'),
        ('[{"id": 1}]', '`id` and `name`'),
        ('{', 'l.json'),
    ],
)
def test_files_that_are_no_label_map_are_refused(tmp_path, text, why):
    (tmp_path / 'l.json').write_text(text)
    with pytest.raises(ValueError, match='l.json') as e:
        read_labels(tmp_path / 'l.json')
    assert why in str(e.value)


def test_a_label_map_of_another_data_set_is_refused(tmp_path):
    "Also if it has a label for all that is unknown"
    d = TaskDataset(
        world('train', 4, size=32), [0, 1, 2, 3], ['what?'] * 4, answers=[['red'], ['blue'], ['red'], ['green']]
    )

    def score(a):
        return {x if x in labels else UNKNOWN: 1.0 for x in a}

    labels = ['Drama', 'Comedy', UNKNOWN]
    with pytest.raises(ValueError, match='4 of 4 answers are none of the 3 labels .*red.*different data set'):
        d.with_targets(labels, score)
    labels = ['red', UNKNOWN]
    assert d.with_targets(labels, score).targets.toarray().tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]


# ---------------------------------------------------------------- the folder of a BERT is gone


def bert_in(folder, tokenizer, seed=3):
    "The folder of a BERT, as others publish it"
    config = replace(small_config(tokenizer, 16, 1, max_len=40), heads=2, eps=1e-6, ffn=24)
    save_bert(Bert(config, seed), folder, tokenizer)
    return folder


CHANGES = dict(
    visualbert=['regions=grid', 'region_model=given', 'cache_regions=false', 'mim=off', 'aux_scenes=0'],
    icmlm=['zeroshot=0', 'min_count=1'],
)
CHANGES['vilbert'] = CHANGES['visualbert']


@pytest.mark.parametrize('method', ['icmlm', 'visualbert', 'vilbert'])
def test_a_run_opens_without_the_folder_of_its_bert(method, tmp_path):
    train = world('train', 60, size=32)
    m = METHODS[method]
    tokenizer = bert_tokenizer('scratch', train, 300)
    folder = bert_in(tmp_path / 'bert', tokenizer)
    own = [c for c in SMALL if method != 'icmlm' or c.partition('=')[0] not in ('width', 'heads', 'depth', 'vocab')]
    run = pretrain(run_spec(method, [*own, *CHANGES[method], f'bert={folder}'], **HOW), out=tmp_path / 'run', log=quiet)
    assert (
        open_run_folder(run).info['sizes']['bert'].items() >= dict(width=16, depth=1, heads=2, ffn=24, eps=1e-6).items()
    )
    batch = dict(
        tokens=torch.tensor([[2, 9, tokenizer.mask, 7, 3]]), lengths=torch.tensor([5]), images=torch.zeros(1, 3, 32, 32)
    )

    def wanted():
        with torch.no_grad():
            return vlrep.load(run).capabilities['fill_mask'](batch)

    before = wanted()
    shutil.rmtree(folder)
    torch.testing.assert_close(wanted(), before, rtol=0, atol=0)
    on = 'masked_words' if method == 'icmlm' else 'image_ablation'
    assert evaluate(run, on, log=quiet)
    out = finetune(finetune_spec(run, 'vqa', TASK), out=tmp_path / 'out', log=quiet)
    assert vlrep.load(out).answer(np.zeros((32, 32, 3), np.uint8), 'what is it?')


# ---------------------------------------------------------------- digests


def test_digests_of_older_runs_stay_valid():
    "Those that the code before wrote of the same weights"
    bert = Bert(BertConfig(12, 8, 1, 2, max_len=6), 0, pooler=False)
    with torch.no_grad():
        for k, p in enumerate(bert.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) / 8 - k)
    assert bytes(bert_digest(bert).tolist()).hex() == OLD_BERT
    weights = dict(b=torch.arange(6).view(2, 3), a=torch.tensor([1.5, -2]), c=torch.tensor([True, False]))
    assert weights_sha256(weights) == OLD_FROZEN


OLD_BERT = '6c38577a662a6a42bca73fecf3a9dc6b564a3ba64eb30bde7faf7059fb09a77c'
OLD_FROZEN = 'cc3231537439ef7871a295150810df598adedcfb57ee9347fb02f53085420611'


@pytest.mark.parametrize('name', ['world', 'world_questions', 'world_web'])
def test_texts_of_the_world_are_within_the_limits_of_their_recipe(name):
    "The tokenizer is trained on captions; texts from the web have signs that these lack"
    method = METHODS['visualbert']
    recipe = replace(method.recipes[name], aux_scenes=300)
    train = world('train', 300, size=recipe.size, with_=['questions', 'statements', 'counterpart'])
    if recipe.source == 'web':
        train = counterparts(train)
    collate = method.collator(recipe, method.train_tokenizer(recipe, train))
    assert len(caption_lines(recipe, collate, dict(train=train, valid=train))) >= 2
