"""The table of published data sets says what the readers read, and the check of a folder finds what is wrong with it

Each data set is imitated with few photos in the real layout. The readers open the imitation; without any one of its
required parts they, too, fail.
"""

import gzip
import os
import shlex
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tools import quiet, refused

import vlrep.cli as cli
import vlrep.datasets.published.check as check
from vlrep.core.files import read_json, write_json
from vlrep.data.published_regions import convert_regions
from vlrep.datasets.base import DATASETS
from vlrep.datasets.coco import read_coco, read_karpathy, write_coco
from vlrep.datasets.conceptual_captions.reader import write_conceptual_captions
from vlrep.datasets.flickr8k import write_flickr8k
from vlrep.datasets.flickr30k import write_flickr30k
from vlrep.datasets.image_folder import write_folder
from vlrep.datasets.mm_imdb import write_mm_imdb
from vlrep.datasets.narratives import write_localized
from vlrep.datasets.published.check import check_published
from vlrep.datasets.published.table import PUBLISHED, published_counts, published_page
from vlrep.datasets.snli_ve import write_snli_ve
from vlrep.datasets.split_files import flickr_splits
from vlrep.datasets.visual_genome.reader import write_visual_genome
from vlrep.datasets.vizwiz import write_vizwiz
from vlrep.datasets.voc07 import read_voc, write_voc
from vlrep.datasets.vqa import write_vqa
from vlrep.datasets.world.dataset import scene, world
from vlrep.evaluation.detection.sources import (
    read_coco_split,
    read_lvis_v0_5_split,
    read_lvis_v1_split,
    read_voc_split,
)
from vlrep.evaluation.evaluate import LAYOUTS
from vlrep.evaluation.finetune.plan import TASKS
from vlrep.evaluation.zeroshot.benchmarks import read_awa2, read_cub
from vlrep.models.backbone_weights import load_backbone
from vlrep.models.timm_torchvision import NARROW_VGG, named_backbone
from vlrep.reproduce.mock_datasets import write_imitation

pytestmark = pytest.mark.filterwarnings('ignore')
N = 12
SCENES = [scene('train', i, size=48, with_='narrative') for i in range(N)]
CLASSES = sorted({o['category'] for r in SCENES for o in r.objects})
PARTS = dict(train=range(4), valid=range(4, 8), test=range(8, N))


# ---------------------------------------------------------------- imitations in the real layouts


def write_coco_of(year):
    def write(root):
        for split, part in (('train', SCENES[:8]), ('val', SCENES[8:])):
            write_coco(part, root, f'{split}{year}', classes=CLASSES)

    return write


def write_split(root):
    "COCO 2014 in Karpathy's split"
    write_coco_of(2014)(root)
    rows = []
    for split in ('train', 'val'):
        data = read_json(root / 'annotations' / f'captions_{split}2014.json')
        for k, image in enumerate(data['images']):
            sentences = [dict(raw=a['caption']) for a in data['annotations'] if a['image_id'] == image['id']]
            part = 'train' if split == 'train' else ('val', 'test')[k % 2]
            row = dict(filepath=f'{split}2014', filename=image['file_name'], cocoid=len(rows), split=part)
            rows.append(dict(row, sentences=sentences))
    write_json(root / 'dataset_coco.json', dict(images=rows))


def write_lvis(version):
    def write(root):
        for split, part in (('train', SCENES[:8]), ('val', SCENES[8:])):
            write_coco(part, root, f'{split}2017', classes=CLASSES)
            data = read_json(root / 'annotations' / f'instances_{split}2017.json')
            for r in data['images']:
                url = f'http://images.cocodataset.org/{split}2017/{r["file_name"]}'
                r.update(neg_category_ids=[], not_exhaustive_category_ids=[], coco_url=url)
            for a in data['annotations']:
                x, y, w, h = a['bbox']
                a['segmentation'] = [[x, y, x + w, y, x + w, y + h]]
            for c in data['categories']:
                c['frequency'] = 'f'
            write_json(root / f'lvis_{version}_{split}.json', data)
        shutil.rmtree(root / 'annotations')

    return write


def write_narratives(*tables, images='photos'):
    def write(root):
        for k, table in enumerate(tables):
            write_localized(SCENES[k::3], root, images, f'{table}.jsonl')

    return write


def write_lists(root, *names):
    for name, (k, end) in zip(names, ((0, 8), (8, 10), (10, 12))):
        (root / name).write_text(''.join(f'{Path(r.id).stem}.jpg\n' for r in SCENES[k:end]))


def write_flickr(write, file):
    "Photos with Karpathy's file, and for Flickr8k with the lists of its authors"

    def written(root):
        write(SCENES, root)
        images = [dict(filename=f'{Path(r.id).stem}.jpg', split='train', sentences=[]) for r in SCENES]
        write_json(root / file, dict(images=images))
        if file == 'dataset_flickr8k.json':
            write_lists(root, *(f'Flickr_8k.{s}Images.txt' for s in ('train', 'dev', 'test')))

    return written


def write_both_voc(root):
    write_voc(SCENES[:4], root / 'VOC2007', 'trainval', CLASSES)
    write_voc(SCENES[4:8], root / 'VOC2007', 'test', CLASSES)
    write_voc(SCENES[8:], root / 'VOC2012', 'trainval', CLASSES)


def write_imagenet(root):
    write_folder(SCENES, root / 'train', lambda r: r.setting)
    write_folder(SCENES[:2], root / 'flat', lambda r: 'x')
    (root / 'flat' / 'x').rename(root / 'val')
    (root / 'flat').rmdir()
    lines = [f'{Path(r.id).stem}.jpg {sorted({s.setting for s in SCENES}).index(r.setting)}' for r in SCENES[:2]]
    (root / 'val.txt').write_text('\n'.join(lines) + '\n')


def write_places(root):
    write_folder(SCENES, root / 'images256', lambda r: r.setting)
    names = sorted({r.setting for r in SCENES})
    for split, part in (('train', SCENES), ('val', SCENES[8:])):
        rows = [f'{r.setting}/{Path(r.id).stem}.jpg {names.index(r.setting)}' for r in part]
        (root / f'{split}_places205.csv').write_text('\n'.join(rows) + '\n')


def write_inaturalist(root):
    write_folder(SCENES, root / 'train_val2018', lambda r: 'Aves')
    kinds = [dict(id=k, name=c) for k, c in enumerate(CLASSES)]
    for split, part in (('train', SCENES[:8]), ('val', SCENES[8:])):
        images = [dict(id=k, file_name=f'train_val2018/Aves/{Path(r.id).stem}.jpg') for k, r in enumerate(part)]
        labels = [dict(id=k, image_id=k, category_id=k % len(kinds)) for k, _ in enumerate(part)]
        write_json(root / f'{split}2018.json', dict(images=images, annotations=labels, categories=kinds))


def write_attributes(root, files, photos):
    "Photos of three classes, with lists"
    for k in range(3):
        for i in range(3):
            (root / photos / f'{k}').mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (16, 16), (80 * k, 20 * i, 0)).save(root / photos / f'{k}' / f'{i}.jpg')
    for name, lines in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text('\n'.join(lines) + '\n')


CUB_FILES = {
    'classes.txt': ['1 a', '2 b', '3 c'],
    'images.txt': [f'{3 * k + i + 1} {k}/{i}.jpg' for k in range(3) for i in range(3)],
    'image_class_labels.txt': [f'{3 * k + i + 1} {k + 1}' for k in range(3) for i in range(3)],
    'testclasses.txt': ['c'],
    'attributes/class_attribute_labels_continuous.txt': ['1 0', '0 1', '1 1'],
}
AWA_FILES = {
    'classes.txt': ['1 0', '2 1', '3 2'],
    'predicates.txt': ['1 black', '2 white'],
    'predicate-matrix-continuous.txt': ['1 0', '0 1', '1 1'],
    'trainclasses.txt': ['0', '1'],
    'testclasses.txt': ['2'],
}


def write_task(write):
    def written(root):
        wanted = world('train', N, size=48, with_=('questions', 'statements', 'genre'))
        for split, rows in PARTS.items():
            write([wanted[i] for i in rows], root, split)

    return written


def write_regions(root):
    root.mkdir()
    for k in range(3):
        boxes = np.array([[0, 0, 4, 4], [1, 1, 5, 5]], np.float32)
        np.save(root / f'{k}.npy', np.ones((2, 4), np.float32))
        np.save(root / f'{k}_info.npy', np.array(dict(bbox=boxes, image_height=8, image_width=8, num_boxes=2), object))


WRITE = {
    'coco': write_coco_of(2017),
    'coco2014': write_coco_of(2014),
    'karpathy': write_split,
    'lvis_v1': write_lvis('v1'),
    'lvis_v0.5': write_lvis('v0.5'),
    'narratives_coco': write_narratives(
        'coco_train_localized_narratives-00000-of-00001', 'coco_val_localized_narratives', images='train2017'
    ),
    'narratives_open_images': write_narratives(
        'open_images_train_v6_localized_narratives-00000-of-00001',
        'open_images_validation_localized_narratives',
        'open_images_test_localized_narratives',
    ),
    'narratives_flickr30k': write_narratives(
        *(f'flickr30k_{s}_localized_narratives' for s in ('train', 'val', 'test'))
    ),
    'narratives_ade20k': write_narratives(*(f'ade20k_{s}_localized_narratives' for s in ('train', 'validation'))),
    'visual_genome': lambda root: write_visual_genome(SCENES, root),
    'conceptual_captions': lambda root: write_conceptual_captions(SCENES, root, named=False),
    'flickr8k': write_flickr(write_flickr8k, 'dataset_flickr8k.json'),
    'flickr30k': write_flickr(write_flickr30k, 'dataset_flickr30k.json'),
    'voc': write_both_voc,
    'imagenet': write_imagenet,
    'places205': write_places,
    'inaturalist': write_inaturalist,
    'cub': lambda root: write_attributes(root, CUB_FILES, 'images'),
    'awa2': lambda root: write_attributes(root, AWA_FILES, 'JPEGImages'),
    'vqa': write_task(write_vqa),
    'vizwiz': write_task(write_vizwiz),
    'snli_ve': write_task(write_snli_ve),
    'mm_imdb': write_task(write_mm_imdb),
    'regions': write_regions,
    'weights': lambda root: write_imitation(['weights'], root.parent),
}


# ---------------------------------------------------------------- the readers of each


def whole(data, **options):
    "All parts of a dataset, as vlrep pretrain opens it"

    def read(root):
        builder = DATASETS[data]
        builder.open(replace(builder.options, **options), root, 48, ('labels',), quiet, 0)

    return read


def detected(read_split, *splits):
    def read(root):
        plan = TASKS['detection'].plan('voc')
        for split in splits:
            read_split(split, plan, root, max_corrupt=0)

    return read


def coco_objects(root):
    "As vlrep evaluate --on coco and vlrep finetune read them"
    for split in ('train2017', 'val2017'):
        read_coco(root, None, f'annotations/instances_{split}.json', split, 48, max_corrupt=0)
    detected(read_coco_split, 'train', 'test')(root)


def karpathy(root):
    for part in ('train', 'val', 'test'):
        read_karpathy(root, part, 48, max_corrupt=0)


def voc07(root):
    for split in ('trainval', 'test'):
        read_voc(root / 'VOC2007', split, 48, 0)


def layout(name):
    return lambda root: LAYOUTS[name](root, 48, 0)


def task(data):
    def read(root):
        for split in PARTS:
            if DATASETS[data].examples(root, split, 48, log=quiet, max_corrupt=0) is None:
                raise ValueError('no test set')

    return read


def regions(root):
    shutil.rmtree(root.parent / 'store', ignore_errors=True)
    convert_regions(root, root.parent / 'store', log=None)


def weights(root):
    for part in PUBLISHED['weights'].parts:
        [file] = part.places
        if 'vgg' in file:
            named_backbone(NARROW_VGG, weights=root / file)
        else:
            load_backbone(root / file)


READ = {
    'coco': [whole('coco', valid=0.3), coco_objects],
    'coco2014': [whole('coco', valid=0.3)],
    'karpathy': [karpathy],
    'lvis_v1': [detected(read_lvis_v1_split, 'train', 'test')],
    'lvis_v0.5': [detected(read_lvis_v0_5_split, 'train', 'test')],
    **{n: [lambda root: DATASETS['narratives'].whole(root, 48, max_corrupt=0)] for n in WRITE if 'narratives' in n},
    **{
        n: [lambda root, n=n: DATASETS[n].whole(root, 48, max_corrupt=0)]
        for n in ('visual_genome', 'conceptual_captions', 'flickr8k', 'flickr30k')
    },
    'voc': [voc07, detected(read_voc_split, 'train', 'test')],
    **{n: [layout(n)] for n in ('imagenet', 'places205', 'inaturalist')},
    'cub': [lambda root: read_cub(root, 48, 0)],
    'awa2': [lambda root: read_awa2(root, 48, 0)],
    **{n: [task(n)] for n in ('vqa', 'vizwiz', 'snli_ve', 'mm_imdb')},
    'regions': [regions],
    'weights': [weights],
}


@pytest.fixture(scope='module')
def root_of(tmp_path_factory):
    "The imitation of a data set, written once"
    made = {}

    def root(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp('published') / name
            WRITE[name](made[name])
        return made[name]

    return root


@contextmanager
def moved(path, to):
    "A file or folder that is elsewhere for a while; with the ending .gz it is compressed"
    aside = path.with_name(f'.{path.name}.aside')
    path.rename(aside)
    new = next(p for p in [*reversed(to.parents), to] if not p.exists())  # the highest that is made
    to.parent.mkdir(parents=True, exist_ok=True)
    if aside.is_dir():
        shutil.copytree(aside, to)
    else:
        to.write_bytes(gzip.compress(aside.read_bytes()) if to.suffix == '.gz' else aside.read_bytes())
    try:
        yield
    finally:
        shutil.rmtree(new) if new.is_dir() else new.unlink()
        aside.rename(path)


@contextmanager
def without(paths):
    "The same data set without these"
    for p in paths:
        p.rename(p.with_name(f'.{p.name}.aside'))
    try:
        yield
    finally:
        for p in paths:
            p.with_name(f'.{p.name}.aside').rename(p)


def problems(name, root, **options):
    return check_published(name, root, log=quiet, **options)


# ---------------------------------------------------------------- the table


def test_every_published_data_set_is_imitated():
    assert set(WRITE) == set(READ) == set(PUBLISHED)


@pytest.mark.parametrize('name', PUBLISHED)
def test_an_entry_is_complete(name):
    data = PUBLISHED[name]
    assert data.title and data.licence and data.address.startswith('http') and data.archives
    assert '\n' not in data.licence and any(not p.optional for p in data.parts)
    for part in data.parts:
        assert part.what and part.places and part.commands
        assert all(n > 0 for c in part.counts for n in c.numbers)
        assert not any(os.path.isabs(p) or '..' in p for p in part.places)


@pytest.mark.parametrize('name', PUBLISHED)
def test_an_imitation_differs_in_its_counts_alone(name, root_of):
    root = root_of(name)
    for read in READ[name]:
        read(root)
    lines = []
    found = check_published(name, root, log=lines.append)
    assert all(line.startswith('DIFFERS') for line in found), found
    counted = [p for p in PUBLISHED[name].parts if p.counts]
    absent = [line for line in lines if line.startswith('-')]
    assert len(found) + len(absent) >= len(counted) - 1, lines  # a class list of all twenty classes may fit


REQUIRED = [(n, p) for n, d in PUBLISHED.items() for p in d.parts if not p.optional]


def words(part):
    return f'{part.what} {part.places[0]}'.replace('/', ':')


@pytest.mark.parametrize('name,part', REQUIRED, ids=lambda x: x if isinstance(x, str) else words(x))
def test_without_a_required_part_a_reader_fails_and_the_check_names_it(name, part, root_of):
    root = root_of(name)
    paths = [p for p in check._found(root, part) if p != root]
    if part.places[-1] == '.' and not paths:
        paths = [p for p in root.iterdir() if p.is_dir()]
    assert paths
    lines = []
    with without(paths):
        found = check_published(name, root, log=lines.append)
        failed = []
        for read in READ[name]:
            try:
                read(root)
            except (ValueError, OSError) as e:
                failed.append(e)
    assert failed or name.startswith('narratives') and not part.photos
    (line,) = [line for line in found if line.startswith('MISSING') and part.what in line]
    at = lines.index(line)
    assert lines[at + 1].strip() == f'needed by {part.commands[0].replace("DIR", str(root))}'


OTHER = [
    (n, p, place)
    for n, d in PUBLISHED.items()
    for p in d.parts
    for place in p.places[1:]
    if '*' not in place + p.places[0] and place != '.' and n != 'karpathy'
    if place.removesuffix('.gz').split('.')[-1] == p.places[0].split('.')[-1] or p.photos
]


@pytest.mark.parametrize('name,part,place', OTHER, ids=lambda x: x if isinstance(x, str) else x.what)
def test_every_other_place_of_a_part_is_read_and_found(name, part, place, root_of):
    root = root_of(name)
    paths = check._found(root, part)
    if not paths:  # a part of which there is another version
        assert part.optional
        return
    with moved(paths[0], root / place):
        for read in READ[name]:
            read(root)
        assert not [line for line in problems(name, root) if line.startswith(('MISSING', 'DAMAGED'))]


COUNTED = [
    ('coco', 'captions of train2017', [8 * 5]),
    ('karpathy', 'the split, with its captions', [N, N * 5]),
    ('flickr8k', 'captions', [N * 5]),
    ('flickr30k', 'captions', [N * 5]),
    ('conceptual_captions', 'captions and addresses', [N]),
    ('visual_genome', 'phrases', [N]),
    ('voc', 'trainval of 2007', [4]),
    ('voc', 'objects of 2007', [8]),
    ('voc', 'classes of trainval of 2007', [len(CLASSES)]),
    ('imagenet', 'training photos, a folder for each class', [N, len({r.setting for r in SCENES})]),
    ('cub', 'photos', [9, 3]),
    ('vizwiz', 'questions of val', [4]),
    ('mm_imdb', 'the split', [4, 4, 4]),
    ('mm_imdb', 'posters, and a file with plot and genres for each', [N, N]),
    ('narratives_ade20k', 'photos', [N - 4]),
]


def counted(name, what, root):
    part = next(p for p in PUBLISHED[name].parts if p.what == what)
    paths = check._found(root, part)
    return check._counted(part.counts, paths, check._photos_below(paths[0]) if part.photos else [])


@pytest.mark.parametrize('name,what,numbers', COUNTED)
def test_what_is_counted(name, what, numbers, root_of):
    assert counted(name, what, root_of(name)) == numbers


def test_the_names_of_columns_are_no_row(tmp_path):
    write_flickr30k(SCENES, tmp_path / 'flickr30k', 'results.csv')
    assert counted('flickr30k', 'captions', tmp_path / 'flickr30k') == [N * 5]


def test_split_files_in_a_folder_of_photos_are_found(root_of):
    "The patterns of optional lists are places where the splits are looked for"
    for name in ('flickr8k', 'flickr30k'):
        root = root_of(name)
        lists = [p for p in PUBLISHED[name].parts if p.optional]
        assert lists and all(check._found(root, p) for p in lists)
        assert len(flickr_splits(root)) == (2 if name == 'flickr8k' else 1)


COMMANDS = {c for d in PUBLISHED.values() for p in d.parts for c in p.commands}


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_the_commands_of_the_table_are_accepted(command, capsys, tmp_path):
    "What follows the options is refused: a run or a folder that does not exist"
    (tmp_path / 'VOC2007').mkdir()
    argv = shlex.split(command.replace('DIR', str(tmp_path)).replace('RUN', 'nowhere'))[1:]
    if argv[0] == 'pretrain':
        cli.main([*argv, '--fields'])
        assert 'steps' in capsys.readouterr().out
    elif argv[0] == 'regions':
        assert 'not a single image' in refused(capsys, *argv)
    else:
        assert 'nowhere: no such run' in refused(capsys, *argv)


@pytest.mark.parametrize('name', PUBLISHED)
def test_the_page_shows_every_part(name):
    page = published_page(name)
    assert PUBLISHED[name].licence in page and PUBLISHED[name].address in page
    for part in PUBLISHED[name].parts:
        assert all(f'`{p}`' in page for p in part.places) and published_counts(part) in page


def test_the_tutorial_has_a_section_for_every_data_set():
    from project import NBS

    cells = NBS['tutorials/data_sets.ipynb']['cells']
    heads = [''.join(c['source']) for c in cells if c['cell_type'] == 'markdown']
    shown = [''.join(o['data']['text/markdown']) for c in cells for o in c.get('outputs', ()) if 'data' in o]
    assert [h[4:-1] for h in heads if h.startswith('## `')] == list(PUBLISHED)
    assert shown == [published_page(name) for name in PUBLISHED]


# ---------------------------------------------------------------- what is wrong with a folder


@pytest.fixture
def coco(tmp_path, monkeypatch):
    "A folder of COCO, and a table with its own counts"
    root = tmp_path / 'coco'
    write_coco_of(2017)(root)
    parts = []
    for part in PUBLISHED['coco'].parts:
        paths = check._found(root, part)
        own = check._photos_below(paths[0]) if part.photos else []
        numbers = check._counted(part.counts, paths, own)
        parts.append(replace(part, counts=tuple(replace(c, numbers=(n,)) for c, n in zip(part.counts, numbers))))
    monkeypatch.setitem(PUBLISHED, 'coco', replace(PUBLISHED['coco'], parts=tuple(parts)))
    return root


def shell(capsys, *argv):
    "Exit code and output of vlrep data"
    try:
        cli.main(['data', *map(str, argv)])
        code = 0
    except SystemExit as e:
        code = e.code
    return code, capsys.readouterr().out


def test_a_complete_folder_ends_with_code_0(coco, capsys):
    code, out = shell(capsys, 'check', 'coco', '--root', coco)
    assert code == 0 and 'DIFFERS' not in out and out.endswith('all right\n')
    assert f'ok       train2017: {8} photos' in out and f'{N} of {N} photos opened: 0 cannot be read' in out


def lose(coco):
    (coco / 'annotations/instances_val2017.json').unlink()


def cut(coco):
    path = coco / 'annotations/captions_train2017.json'
    path.write_text(path.read_text()[:-30])


def empty(coco):
    (coco / 'annotations/captions_train2017.json').write_text('')


def rename_key(coco):
    path = coco / 'annotations/captions_train2017.json'
    path.write_text(path.read_text().replace('"annotations"', '"labels"'))


def fewer(coco):
    path = coco / 'annotations/captions_train2017.json'
    data = read_json(path)
    write_json(path, dict(data, annotations=data['annotations'][:-1]))


def damage(coco):
    photo = sorted((coco / 'val2017').iterdir())[1]
    photo.write_bytes(photo.read_bytes()[:400])


def no_photos(coco):
    shutil.rmtree(coco / 'val2017')
    (coco / 'val2017').mkdir()


FAULTS = {
    lose: 'MISSING  annotations/instances_val2017.json',
    cut: 'annotations/captions_train2017.json: damaged, not valid JSON',
    empty: 'annotations/captions_train2017.json: is empty',
    rename_key: "annotations/captions_train2017.json: has no list 'annotations'",
    fewer: f'DIFFERS  annotations/captions_train2017.json: {8 * 5 - 1} captions, {8 * 5} are published',
    damage: 'train-000009.jpg: damaged or not an image',
    no_photos: 'MISSING  val2017: photos of val2017, there are none',
}


@pytest.mark.parametrize('fault', FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_named_and_ends_with_code_1(fault, coco, capsys):
    fault(coco)
    code, out = shell(capsys, 'check', 'coco', '--root', coco)
    assert code == 1 and FAULTS[fault] in out and out.endswith('1 problems\n'), out


def test_a_line_of_json_that_is_cut_off_is_named(root_of, tmp_path):
    root = tmp_path / 'narratives'
    shutil.copytree(root_of('narratives_flickr30k'), root)
    path = root / 'flickr30k_train_localized_narratives.jsonl'
    path.write_text(path.read_text()[:-40])
    assert [p for p in problems('narratives_flickr30k', root) if p.startswith('DAMAGED') and f'{path}, last line' in p]


def test_shared_photos_are_found_by_content(coco, tmp_path, capsys):
    "Copies and links under other names; the test photos themselves are none"
    train = sorted((coco / 'train2017').iterdir())
    test = sorted((coco / 'val2017').iterdir())
    for make, at in ((shutil.copy, 0), (os.link, 1), (os.symlink, 2)):
        train[at].unlink()
        make(test[at], train[at])
    grown = train[3].read_bytes()
    train[3].write_bytes(grown[:-1] + b'x')
    (tmp_path / 'same_size').mkdir()
    (tmp_path / 'same_size' / 'x.jpg').write_bytes(grown)
    code, out = shell(
        capsys, 'check', 'coco', '--root', coco, '--against', coco / 'val2017', '--against', tmp_path / 'same_size'
    )
    assert code == 1 and f'SHARED   3 of {N} photos are also in {coco}/val2017: train2017/train-000000.jpg = ' in out
    assert f'\n0 of {N} photos are also in {tmp_path}/same_size\n' in out


def test_wrong_arguments_end_with_code_2(coco, capsys):
    for words_, says in {
        ('check', 'cocoo', '--root', coco): "did you mean 'coco",
        ('check', 'coco', '--root', 'nowhere'): '--root nowhere: no such folder',
        ('check', 'coco', '--root', ''): 'a path is missing',
        ('check', 'coco', '--root', coco, '--against', 'nowhere'): '--against nowhere: no such folder',
        ('check', 'coco', '--root', coco, '--against', ''): '--against : no such folder',
        ('check', 'coco', '--root', coco, '--against', coco / 'annotations'): 'no photos there',
        ('check', 'coco', '--root', coco, '--sample', 'many'): '--sample',
        ('check', 'coco', '--root', coco, '--sample', -1): '--sample',
        ('check', 'coco'): '--root',
    }.items():
        assert says in refused(capsys, 'data', *words_), words_


def test_the_list_names_every_data_set(capsys):
    code, out = shell(capsys, 'list')
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(PUBLISHED)


def test_a_sample_is_drawn_by_the_seed(coco, monkeypatch):
    seen = []
    monkeypatch.setattr(check, 'open_image', seen.append)
    for seed in (0, 0, 1):
        problems('coco', coco, sample=5, seed=seed)
    a, b, c = seen[:5], seen[5:10], seen[10:]
    assert a == b != c and len(set(a)) == 5
    seen.clear()
    problems('coco', coco, sample=0)
    assert not seen


def test_of_a_large_folder_names_and_sizes_are_read_and_a_sample_opened(tmp_path, monkeypatch):
    "20,000 photos: none is read whole, since no test photo has their size"
    root = tmp_path / 'flickr8k'
    write_flickr8k(SCENES[:2], root)
    first = min((root / 'Images').iterdir())
    for k in range(20_000):
        if not k % 10_000:  # file systems limit the links of a file
            source = root / 'Images' / f'source{k}.jpg'
            shutil.copy(first, source)
        os.link(source, root / 'Images' / f'{k}.jpg')
    (tmp_path / 'test').mkdir()
    (tmp_path / 'test' / 'other.jpg').write_bytes(first.read_bytes() + b' ')
    opened = []
    monkeypatch.setattr(check, 'open_image', opened.append)
    monkeypatch.setattr(check, 'file_sha256', pytest.fail)
    lines = []
    check_published('flickr8k', root, against=(tmp_path / 'test',), log=lines.append)
    assert any(line.startswith('DIFFERS  Images: 20,004 photos') for line in lines)
    assert len(opened) == 200 and f'0 of 20,004 photos are also in {tmp_path}/test' in lines


def test_the_check_imports_no_torch():
    import subprocess
    import sys

    from tools import ENV

    code = "import sys\nfrom vlrep.datasets.published.check import check_published\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], env=ENV).returncode == 0
