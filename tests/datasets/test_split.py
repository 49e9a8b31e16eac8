"""The part of a photo follows from the photo, and a run is tested on the photos that it was tested on before

Photos come and go in every layout that is split; splits that come with data are followed; evaluations after a change.
"""

import ast
import json
import shutil
from dataclasses import replace

import pytest
from tools import NET, ROOT, refused

from vlrep.core.seeding import rng, uniform_by_name
from vlrep.data.image_files import caption_source
from vlrep.datasets.base import DATASETS
from vlrep.datasets.coco import write_coco
from vlrep.datasets.conceptual_captions.reader import write_conceptual_captions
from vlrep.datasets.csv import write_csv
from vlrep.datasets.flickr8k import write_flickr8k
from vlrep.datasets.flickr30k import write_flickr30k
from vlrep.datasets.narratives import write_localized
from vlrep.datasets.visual_genome.reader import write_visual_genome
from vlrep.datasets.vizwiz import write_vizwiz
from vlrep.datasets.vqa import write_vqa
from vlrep.datasets.webdataset.reader import make_shards
from vlrep.datasets.world.dataset import scene, world
from vlrep.experiments.commands import evaluate
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import run_spec
from vlrep.training.held_out_photos import read_test_photos
from vlrep.training.run_folder import open_run_folder

N = 60
TINY = [*NET, 'size=32', 'vocab=200', 'steps=3', 'shuffles=1']

# ---------------------------------------------------------------- photos come and go


@pytest.fixture(scope='module')
def drawn():
    "Scenes that any layout can be written from"
    narratives = [scene('train', i, size=32, with_='narrative') for i in range(N)]
    wanted = world('train', N, size=32, with_=('questions',))
    return narratives, [wanted[i] for i in range(N)]


def as_shards(records, root):
    write_csv(records, root / 'photos.csv')
    make_shards('csv', root / 'photos.csv', root / 'shards', 16, log=str)
    return root / 'shards'


def as_coco(records, root):
    write_coco(records, root, 'train2017', classes=sorted({o['category'] for r in records for o in r.objects}))
    write_coco([scene('test', i, size=32) for i in range(3)], root, 'val2017')
    for p in root.glob('annotations/instances_*'):
        p.unlink()
    return root


def in_parts(write):
    def both(records, root):
        write(records, root, 'train')
        write(records[:2], root, 'valid')
        return root

    return both


def plain(write, at=''):
    def one(records, root):
        write(records, root / at)
        return root / at

    return one


LAYOUTS = dict(
    csv=plain(write_csv, 'photos.csv'),
    flickr8k=plain(write_flickr8k, 'photos'),
    flickr30k=plain(write_flickr30k),
    narratives=plain(write_localized),
    webdataset=as_shards,
    coco=as_coco,
    vqa=in_parts(write_vqa),
    vizwiz=in_parts(write_vizwiz),
    visual_genome=plain(write_visual_genome),
    conceptual_captions=plain(write_conceptual_captions),
)


def test_every_layout_that_is_split_is_tested_here():
    "A new dataset has to say here that its photos stay where they are, or that it comes with its own split"
    own = {'world', 'snli_ve', 'mm_imdb'}
    assert set(LAYOUTS) | own == set(DATASETS), 'add what writes photos in the layout of the new dataset to LAYOUTS'


@pytest.mark.parametrize('data', LAYOUTS)
def test_photos_that_come_and_go_move_no_others(data, drawn, tmp_path):
    records = drawn[1] if data in ('vqa', 'vizwiz') else drawn[0]
    shares = dict(valid=0.3) if data in ('coco', 'vqa', 'vizwiz') else dict(train=0.4, valid=0.3, test=0.3)

    def parts(rows, at):
        "The part of each photo of these scenes; vqa and vizwiz number their photos by their place"
        root = LAYOUTS[data]([records[i] for i in rows], tmp_path / at)
        got = DATASETS[data].open(replace(DATASETS[data].options, **shares), root, 32, log=str)
        return {i: part for part, photos in got.items() for i in photos.ids}

    draw = rng('come and go', data)
    before = parts(range(10, 50), 'before')
    assert {'train', 'valid', 'test'} == set(before.values())
    rows = sorted({*range(5), *draw.permutation(N)[:40]})  # the first five sort before all
    after = parts(rows, 'after')
    both = before.keys() & after.keys()
    assert len(both) > 15 and after.keys() - before.keys()
    assert {i: before[i] for i in both} == {i: after[i] for i in both}


# ---------------------------------------------------------------- splits that come with data


def table(root, words):
    "Photos as a CSV with a column split"
    write_csv([scene('train', i, size=32) for i in range(len(words))], root / 'photos.csv')
    lines = (root / 'photos.csv').read_text().splitlines()
    rows = [f'{l},{words[int(l.split(".jpg")[0][-6:])]}' for l in lines[1:]]
    (root / 'photos.csv').write_text('\n'.join([f'{lines[0]},split', *rows]) + '\n')
    return root / 'photos.csv'


def test_a_split_column_is_followed_and_recorded(tmp_path):
    words = ['train'] * 14 + ['restval'] * 2 + ['dev'] * 4 + ['test'] * 5 + [''] * 3
    root = table(tmp_path, words)
    lines = []
    out = pretrain(run_spec(changes=TINY, data='csv', root=root, threads=1), out=tmp_path / 'run', log=lines.append)
    line = next(l for l in lines if l.startswith('split: '))
    assert line.startswith(
        'split: from the column split of photos.csv: 16 train, 4 valid, 5 test; 3 photos that it '
        'puts into no part are left out: images/train-000025.jpg'
    )
    run = open_run_folder(out)
    assert [name[-6:-4] for name, _ in read_test_photos(run)] == ['20', '21', '22', '23', '24']
    assert run.info['data']['split'] == 'column'
    # another column makes training photos of test photos: refused
    swapped = root.read_text().replace(',test\n', ',x\n').replace(',train\n', ',test\n').replace(',x\n', ',train\n')
    root.write_text(swapped)
    with pytest.raises(ValueError, match=r'test photos of the run, 5 are missing \(5 are in train or valid now'):
        evaluate(out, 'captions', log=str)


def test_words_of_a_split_that_mean_nothing_are_refused(tmp_path):
    root = table(tmp_path / 'one', ['train'] * 8 + ['holdout'] * 4)
    with pytest.raises(ValueError, match="photos.csv.*'holdout' is not a known split"):
        DATASETS['csv'].open(root=root, size=32, log=str)
    root = table(tmp_path / 'two', ['train'] * 8 + ['test'] * 4)
    lines = root.read_text().splitlines()
    root.write_text('\n'.join([*lines, lines[1].replace(',train', ',test')]) + '\n')
    with pytest.raises(ValueError, match="train-000000.jpg.*'test'.*'train'"):
        DATASETS['csv'].open(root=root, size=32, log=str)


def test_a_reader_gives_the_split_names_of_the_data(tmp_path):
    "What `caption_source` takes from any reader"
    write_csv([scene('train', i, size=32) for i in range(4)], tmp_path / 'photos.csv')
    names = [f'train-{i:06d}.jpg' for i in range(4)]
    words = dict(zip(names, ('restval', 'Validation', 'test')))
    dataset = caption_source(
        {n: ['a photo'] for n in names}, tmp_path / 'images', tmp_path / 'photos.csv', 32, split_of=words
    )
    assert dataset.parts == ['train', 'valid', 'test', '']
    assert dataset.subset([2, 0]).parts == ['test', 'train']


@pytest.fixture
def two_splits(tmp_path):
    "A folder in the layout of Flickr8k with the lists of its authors and Karpathy's file"
    root = tmp_path / 'flickr'
    write_flickr8k([scene('train', i, size=32) for i in range(24)], root)
    names = [f'train-{i:06d}.jpg' for i in range(24)]
    for part, mine in dict(train=names[:16], dev=names[16:19], test=names[19:]).items():
        (root / f'Flickr_8k.{part}Images.txt').write_text('\n'.join(mine))
    deal = ['test'] * 4 + ['val'] * 2 + ['train'] * 18
    rows = [dict(filename=n, split=s, sentences=[]) for n, s in zip(names, deal)]
    (root / 'dataset_flickr8k.json').write_text(json.dumps(dict(images=rows)))
    return root


def test_with_two_splits_the_user_chooses(two_splits, tmp_path, capsys):
    words = (
        'pretrain',
        '--data',
        'flickr8k',
        '--root',
        two_splits,
        '--out',
        tmp_path / 'run',
        *(w for c in TINY for w in ('--set', c)),
    )
    text = refused(capsys, *words)
    assert 'lists: Flickr_8k.trainImages.txt' in text and 'karpathy: dataset_flickr8k.json' in text
    assert '--split lists, --split karpathy, --split hash' in text and not (tmp_path / 'run').exists()
    assert '--split column: ' in refused(capsys, *words, '--split', 'column')
    assert "did you mean 'karpathy'" in refused(capsys, *words, '--split', 'karpaty')


def test_a_run_keeps_to_the_split_that_it_began_with(two_splits, tmp_path):
    "A split that is put into the folder later changes nothing"
    late = two_splits / 'dataset_flickr8k.json'
    aside = late.rename(tmp_path / 'aside.json')
    out = pretrain(run_spec(changes=TINY, data='flickr8k', root=two_splits, threads=1), out=tmp_path / 'run', log=str)
    assert open_run_folder(out).info['data']['split'] == 'lists'
    rows = evaluate(out, 'captions', log=str)
    aside.rename(late)
    assert evaluate(out, 'captions', log=str) == rows


# ---------------------------------------------------------------- a run knows its test photos


def first_names(share, below, n=1):
    "Names that sort before all others, of photos whose number is below the share or not"
    names = (f'images/aaa-{i}.jpg' for i in range(10_000))
    found = [i for i in names if (uniform_by_name([i], 0, 'held out')[0] < share) == below]
    return found[:n]


def test_the_same_numbers_when_a_photo_whose_name_sorts_first_is_added(tmp_path, capsys):
    "Train; add photos; evaluate: the same test photos, and none that was trained on. Then a test photo is deleted"
    root = tmp_path / 'photos.csv'
    write_csv([scene('train', i, size=48) for i in range(40)], root)
    out = pretrain(run_spec(changes=TINY, data='csv', root=root, threads=1), out=tmp_path / 'run', log=str)
    tested = [name for name, _ in read_test_photos(open_run_folder(out))]
    before = evaluate(out, 'captions', log=str)
    lines = root.read_text().splitlines()
    new = first_names(0.1, True) + first_names(0.1, False)
    for name in new:
        shutil.copy(tmp_path / lines[1].split(',')[0], tmp_path / name)
    root.write_text('\n'.join([lines[0], *(f'{name},a photo that came later' for name in new), *lines[1:]]) + '\n')
    text = []
    assert evaluate(out, 'captions', log=text.append) == before
    assert any(f'exactly the {len(tested)} test photos of the run are used; 1 photos' in l for l in text)
    parts = DATASETS['csv'].open(root=root, size=48, log=str)
    assert new[0] in parts['test'].ids and set(tested) < set(parts['test'].ids)
    # a caption of a test photo is changed, another test photo is gone
    remaining = [l for l in lines if not l.startswith(tested[0])]
    root.write_text('\n'.join(l + ' and more' if l.startswith(tested[1]) else l for l in remaining) + '\n')
    text = refused(capsys, 'evaluate', out, '--on', 'captions')
    assert f'of the {len(tested)} test photos of the run, 1 are missing and 1 have changed' in text
    # what is left of them, on demand
    wanted = []
    rows = evaluate(out, 'captions', root, log=wanted.append)
    assert any(f'the other {len(tested) - 2} are used' in l for l in wanted) and rows != before


def test_a_stopped_run_keeps_its_test_photos(tmp_path):
    "A new photo in the test part does not disturb it, nor do its bits change; one in train is refused, as before"
    root = tmp_path / 'photos.csv'
    write_csv([scene('train', i, size=48) for i in range(40)], root)
    out = pretrain(run_spec(changes=TINY, data='csv', root=root, threads=1), out=tmp_path / 'run', log=str)
    was = open_run_folder(out).results()[-1]['numbers']['right']
    lines = root.read_text().splitlines()
    new = first_names(0.1, True)[0]
    shutil.copy(tmp_path / lines[1].split(',')[0], tmp_path / new)
    root.write_text('\n'.join([lines[0], f'{new},a photo that came later', *lines[1:]]) + '\n')
    (out / 'result.jsonl').unlink()
    text = []
    resume_run(out, log=text.append)
    assert open_run_folder(out).results()[-1]['numbers']['right'] == was
    assert any('exactly the' in l and '1 photos that were added' in l for l in text)
    new = first_names(0.2, False)[0]
    shutil.copy(tmp_path / lines[1].split(',')[0], tmp_path / new)
    root.write_text('\n'.join([lines[0], f'{new},a photo that came later', *lines[1:]]) + '\n')
    (out / 'result.jsonl').unlink()
    with pytest.raises(ValueError, match='images train: was'):
        resume_run(out, log=str)


def test_no_evaluation_opens_the_data_of_a_run_by_itself():
    "What is tested on is decided in one place"
    calls = []
    for path in sorted((ROOT / 'vlrep' / 'evaluation').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                on = getattr(node.func.value, 'id', '')
                if node.func.attr == 'open_test' or (node.func.attr in ('open', 'whole', 'read') and on == 'builder'):
                    calls.append(path.name)
    assert set(calls) == {'held_out.py'}


def test_shards_are_written_from_one_reading(tmp_path):
    "What is left out is said once; shards that are in parts stay in parts"
    root = table(tmp_path / 'photos', ['train'] * 8 + ['valid'] * 4 + ['test'] * 4)
    (root.parent / 'images' / 'train-000003.jpg').unlink()
    lines = []
    make_shards('csv', root, tmp_path / 'shards', log=lines.append)
    assert (
        sum('1 of 16 images' in line for line in lines) == 1 and sum(line.startswith('split: ') for line in lines) == 1
    )
    assert sorted(p.parent.name for p in (tmp_path / 'shards').rglob('*.tar')) == ['test', 'train', 'valid']
    with pytest.raises(ValueError, match='--split hash: webdataset comes in parts'):
        make_shards('webdataset', tmp_path / 'shards', tmp_path / 'again', split='hash')
