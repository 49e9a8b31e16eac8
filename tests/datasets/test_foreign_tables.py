"Tables, photos and boxes of other programs: every reader takes the same files, and leaves out and refuses alike"

import gzip
import json
import shutil
import unicodedata
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image
from tools import NET, refused, sets, vlrep

from vlrep.data.box_files import BoxFile
from vlrep.data.image_files import find_photos, is_hidden
from vlrep.data.paraphrases import read_paraphrases
from vlrep.data.records import Record
from vlrep.data.region_inputs import RegionReader
from vlrep.data.tasks import read_labels
from vlrep.data.wordpiece import WordPieceTokenizer
from vlrep.datasets.base import DATASETS
from vlrep.datasets.coco import photo_objects, read_coco, write_coco
from vlrep.datasets.csv import read_csv, write_csv
from vlrep.datasets.flickr8k import read_flickr8k, write_flickr8k
from vlrep.datasets.flickr30k import read_flickr30k, write_flickr30k
from vlrep.datasets.image_folder import read_folder, write_folder
from vlrep.datasets.mm_imdb import read_mm_imdb, write_mm_imdb
from vlrep.datasets.narratives import read_localized, write_localized
from vlrep.datasets.snli_ve import read_snli_ve, write_snli_ve
from vlrep.datasets.vizwiz import read_vizwiz, write_vizwiz
from vlrep.datasets.voc07 import read_voc, write_voc
from vlrep.datasets.vqa import read_vqa, write_vqa
from vlrep.datasets.world.dataset import scene, world
from vlrep.datasets.world.primitives import CATEGORIES
from vlrep.evaluation.zeroshot.benchmarks import read_cub
from vlrep.methods.fusion_collate import read_generated_captions
from vlrep.studies.records import study_head
from vlrep.training.resume import _cut_lines

N = 12

# ---------------------------------------------------------------- every reader, its files, and what it read


@dataclass(frozen=True)
class Layout:
    "A reader with the folder that its writer makes"

    write: object  # (records, folder) -> None
    read: object  # (folder, **options) -> dataset
    tables: tuple  # Patterns of its text files
    photos: str  # Pattern of its photos
    kind: str  # table, json, lines: what its text files are


def _voc(root, **kw):
    return read_voc(root, size=32, **kw)


def _both_coco(root, **kw):
    return read_coco(root, instances='annotations/instances_train2017.json', size=32, **kw)


def _silent(read):
    return lambda root, **kw: read(root, size=32, log=lambda line: None, **kw)


LAYOUTS = dict(
    csv=Layout(
        lambda r, d: write_csv(r, d / 'photos.csv'),
        lambda d, **kw: read_csv(d / 'photos.csv', size=32, **kw),
        ('photos.csv',),
        'images/*',
        'table',
    ),
    flickr8k=Layout(write_flickr8k, lambda d, **kw: read_flickr8k(d, 32, **kw), ('captions.txt',), 'Images/*', 'table'),
    flickr30k=Layout(
        write_flickr30k, lambda d, **kw: read_flickr30k(d, size=32, **kw), ('*.token',), 'flickr30k-images/*', 'lines'
    ),
    results=Layout(
        lambda r, d: write_flickr30k(r, d, table='results.csv'),
        lambda d, **kw: read_flickr30k(d, size=32, **kw),
        ('results.csv',),
        'flickr30k-images/*',
        'lines',
    ),
    narratives=Layout(
        write_localized, lambda d, **kw: read_localized(d, size=32, **kw), ('*.jsonl',), 'images/*', 'lines'
    ),
    coco=Layout(write_coco, _both_coco, ('annotations/*.json',), 'train2017/*', 'json'),
    voc=Layout(write_voc, _voc, ('ImageSets/Main/*.txt',), 'JPEGImages/*', 'lines'),
    vqa=Layout(write_vqa, _silent(read_vqa), ('*.json',), 'train2014/*', 'json'),
    vizwiz=Layout(write_vizwiz, _silent(read_vizwiz), ('*.json',), 'train/*', 'json'),
    snli_ve=Layout(write_snli_ve, _silent(read_snli_ve), ('*.jsonl',), 'flickr30k_images/*', 'lines'),
    mm_imdb=Layout(write_mm_imdb, _silent(read_mm_imdb), ('split.json', 'dataset/*.json'), 'dataset/*.jpeg', 'json'),
)
CAPTIONED = 'csv', 'flickr8k', 'flickr30k', 'narratives', 'coco'  # read by a builder of `DATASETS`
TASKS = 'vqa', 'vizwiz', 'snli_ve', 'mm_imdb'


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    "The same scenes in every layout"
    at = tmp_path_factory.mktemp('written')
    narratives = world('train', N, size=32, with_='narrative')
    wanted = world('train', N, size=32, with_=('questions', 'statements', 'genre'))
    for name, layout in LAYOUTS.items():
        records = wanted if name in TASKS else narratives
        layout.write([records[i] for i in range(N)], at / name)
    return at


@pytest.fixture
def copy(written, tmp_path):
    "A copy of a layout, to spoil"

    def copied(name):
        shutil.copytree(written / name, tmp_path / name)
        return tmp_path / name

    return copied


def contents(dataset):
    "All that a reader found, to compare"
    out = [list(dataset.ids), [dataset.captions[i] for i in range(len(dataset))] if dataset.captions else None]
    for name, label in dataset.labels.items():
        out.append([name, label.tolist()])
    if getattr(dataset, 'answers', None) is not None:
        out.append([[dataset.answers[i] for i in range(len(dataset))], dataset.rows.tolist(), list(dataset.base.ids)])
    if dataset.narratives is not None:
        out.append([[(n.text, n.utterances) for n in dataset.narratives[i]] for i in range(len(dataset))])
    return out


def captions_of(dataset):
    return [dataset.captions[i] for i in range(len(dataset))]


def found(root, layout):
    return sorted(p for pattern in layout.tables for p in root.glob(pattern))


def change(root, layout, how):
    "Change the text of every table"
    for path in found(root, layout):
        path.write_bytes(how(path.read_bytes().decode()))


SPELLINGS = dict(
    mark=lambda text: text.encode('utf-8-sig'),
    utf16=lambda text: text.encode('utf-16'),
    utf16_big=lambda text: b'\xfe\xff' + text.encode('utf-16-be'),
    windows_lines=lambda text: text.replace('\n', '\r\n').encode(),
    mac_lines=lambda text: text.replace('\n', '\r').encode(),
    blank_lines=lambda text: (text + '\n\n').encode(),
)


@pytest.mark.parametrize('spelling', SPELLINGS)
@pytest.mark.parametrize('name', LAYOUTS)
def test_tables_in_any_encoding_give_the_same_data(name, spelling, written, copy):
    "Byte-order marks, UTF-16, line breaks of Windows and of old Macs: the same data"
    layout = LAYOUTS[name]
    root = copy(name)
    change(root, layout, SPELLINGS[spelling])
    assert contents(layout.read(root)) == contents(layout.read(written / name))


# ---------------------------------------------------------------- text that another function takes for a line break

SEPARATORS = '\u2028', '\u2029', '\x85', '\x0b', '\x0c', '\x1c'  # what `str.splitlines` splits at


@pytest.mark.parametrize('name', [n for n in LAYOUTS if n not in ('voc', 'mm_imdb')])
def test_unicode_separators_within_a_text_do_not_split_it(name, copy):
    "A text with U+2028 and its like is one text, and lines behind it keep their numbers"
    layout = LAYOUTS[name]
    root = copy(name)
    path = found(root, layout)[-1 if name == 'vqa' else 0]
    text = path.read_text()
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # nothing is left out
        before = layout.read(root)
        word = before.captions[0][0].split()[1]
        for sign in SEPARATORS:
            sign = json.dumps(sign)[1:-1] if layout.kind == 'json' or path.suffix == '.jsonl' and sign < ' ' else sign
            for p in found(root, layout):
                old = p.read_text()
                p.write_text(old.replace(f' {word} ', f' {word}{sign} '), newline='')
                got = layout.read(root)
                p.write_text(old, newline='')
                assert len(got) == len(before) and len(got.captions.ends) == len(before.captions.ends)
    assert path.read_text() == text


@pytest.mark.parametrize('name', [n for n in LAYOUTS if LAYOUTS[n].kind == 'table'])
def test_a_quoted_caption_may_run_over_two_lines(name, copy):
    "A caption in quotes may run over two lines"
    layout = LAYOUTS[name]
    root = copy(name)
    path = found(root, layout)[0]
    head, first, *rest = path.read_text().splitlines(True)
    photo, caption = first.rstrip().split(',', 1)
    words = caption.strip('"').split()
    path.write_text(head + f'{photo},"{words[0]}\n{" ".join(words[1:])}"\n' + ''.join(rest))
    assert layout.read(root).captions[0][0] == ' '.join(words)


@pytest.mark.parametrize('separator', ['\t', ';', '|'])
@pytest.mark.parametrize('name', [n for n in LAYOUTS if LAYOUTS[n].kind == 'table'])
def test_any_usual_separator_of_columns_is_recognised(name, separator, written, copy):
    layout = LAYOUTS[name]
    root = copy(name)
    change(root, layout, lambda text: text.replace(',', separator, 1).replace('.jpg,', f'.jpg{separator}').encode())
    assert contents(layout.read(root)) == contents(layout.read(written / name))


@pytest.mark.parametrize('name', ['csv', 'coco'])
def test_paths_of_windows_are_read(name, written, copy):
    "`images\\a.jpg` is `images/a.jpg` if there is no file of that very name"
    layout = LAYOUTS[name]
    root = copy(name)
    if name == 'csv':
        change(root, layout, lambda text: text.replace('images/', 'images\\').encode())
    else:

        def moved(text):
            data = json.loads(text)
            for row in data['images']:
                row['file_name'] = 'in\\' + row['file_name']
            return json.dumps(data).encode()

        change(root, layout, moved)
        (root / 'train2017').rename(root / 'in')
        (root / 'train2017').mkdir()
        (root / 'in').rename(root / 'train2017' / 'in')
    got = layout.read(root)
    want = layout.read(written / name)
    assert got.ids == [n if name == 'csv' else f'in/{n}' for n in want.ids]
    assert [got.captions[i] for i in range(N)] == [want.captions[i] for i in range(N)]


# ---------------------------------------------------------------- files of lines


def _boxes(path):
    file = BoxFile(path)
    return file.ids, file.boxes.tolist()


def _said(path):
    got = read_paraphrases(path)
    return {c: got.texts(c) for c in ('a cat', 'a dog')}


def _vocabulary(path):
    return WordPieceTokenizer(path).vocab


LINES = {
    'vocabulary': ('vocab.txt', ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a\u2028b'], _vocabulary),
    'study': ('study.jsonl', [dict(kind='study', file='a\u2028b', table={})], study_head),
    'labels': ('l.txt', ['yes', 'no', 'two words'], read_labels),
    'written': (
        'w.jsonl',
        [dict(image='a', caption='a\u2028cat'), dict(image='b', caption='a dog')],
        read_generated_captions,
    ),
    'boxes': ('b.jsonl', [dict(image='a', boxes=[[0, 0, 0.5, 1]]), dict(image='b', boxes=[])], _boxes),
    'paraphrases': (
        'p.jsonl',
        [
            dict(image=c, caption_index=0, caption=c, paraphrases=[dict(via='fr', text=f'{c}\u2028!')])
            for c in ('a cat', 'a dog')
        ],
        _said,
    ),
    'csv': (
        'metadata.jsonl',
        [dict(file_name=f'{i}.jpg', text=f'a\u2028{i}') for i in range(3)],
        lambda p: contents(read_csv(p, size=16)),
    ),
}


@pytest.mark.parametrize('spelling', [*SPELLINGS, 'gz'])
@pytest.mark.parametrize('name', LINES)
def test_files_of_lines_are_read_in_any_encoding(name, spelling, tmp_path):
    "One value a line: read alike, however the file was saved"
    file, values, read = LINES[name]
    if name == 'vocabulary' and spelling == 'blank_lines':
        pytest.skip('each line is a token')
    for i in range(3):
        Image.new('RGB', (8, 8)).save(tmp_path / f'{i}.jpg')
    lines = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    text = '\n'.join(lines) + '\n'
    path = tmp_path / file
    path.write_text(text)
    want = read(path)
    if spelling == 'gz':
        path = tmp_path / f'{file}.gz'
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_bytes(SPELLINGS[spelling](text))
    assert read(path) == want


@pytest.mark.parametrize('name', [n for n in LINES if n not in ('labels', 'vocabulary', 'study')])
def test_lines_nested_too_deeply_are_refused_by_number(name, tmp_path):
    file, values, read = LINES[name]
    (tmp_path / file).write_text('\n'.join([json.dumps(v) for v in values]) + '\n' + '[' * 100_000)
    with pytest.raises(ValueError, match=f'{file}, line {len(values) + 1}: .*nested too deeply'):
        read(tmp_path / file)


def test_a_log_of_skipped_steps_is_cut(tmp_path):
    "Lines that are torn off or nested too deeply are dropped, and the rest is kept to the letter"
    path = tmp_path / 'skipped.jsonl'
    remaining = [json.dumps(dict(step=i, why=f'a\u2028{i}'), ensure_ascii=False) + '\n' for i in (1, 2)]
    path.write_text(''.join(remaining) + '{"step": 9}\n' + '[' * 100_000 + '\n{"ste')
    _cut_lines(path, 5)
    assert path.read_text() == ''.join(remaining)
    path.write_bytes(b'{"step": 1, "why": "\xe9"}\n')
    with pytest.raises(ValueError, match='skipped.jsonl, line 1: not UTF-8'):
        _cut_lines(path, 5)


# ---------------------------------------------------------------- numbers as text and as floats, ids that repeat


def _as_text(row, keys):
    return row | {k: str(row[k]) for k in keys if k in row}


def _as_floats(row, keys):
    return row | {k: float(row[k]) for k in keys if k in row}


IDS = 'id', 'image_id', 'category_id', 'question_id'


@pytest.mark.parametrize('how', [_as_text, _as_floats])
@pytest.mark.parametrize('name', ['coco', 'vqa'])
def test_numbers_written_as_text_or_floats_are_read(name, how, written, copy):
    layout = LAYOUTS[name]
    root = copy(name)

    def changed(text):
        data = json.loads(text)
        for key, rows in data.items():
            if isinstance(rows, list):
                data[key] = [how(r, [*IDS, 'width', 'height']) if isinstance(r, dict) else r for r in rows]
        return json.dumps(data).encode()

    change(root, layout, changed)
    assert contents(layout.read(root)) == contents(layout.read(written / name))


@pytest.mark.parametrize('given', ['7', 7, 7.0])
def test_ids_that_name_photos_follow_the_rule_for_names(given, copy):
    "An id is the name of a photo's file, with the same rule as elsewhere"
    root = copy('snli_ve')
    (root / 'flickr30k_images' / 'train000000.jpg').rename(root / 'flickr30k_images' / '7.jpg')
    path = root / 'snli_ve_train.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row['Flickr30K_ID'] == 'train000000':
            row['Flickr30K_ID'] = given
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    assert '7' in LAYOUTS['snli_ve'].read(root, max_corrupt=0).base.ids


@pytest.mark.parametrize('how', [_as_text, _as_floats])
@pytest.mark.parametrize('table', ['images', 'annotations'])
def test_numbers_in_box_files_may_be_text_or_floats(table, how, written, copy):
    path = copy('coco') / 'annotations' / 'instances_train2017.json'
    want = BoxFile(path).boxes.tolist()
    data = json.loads(path.read_text())
    data[table] = [how(r, [*IDS, 'width', 'height']) for r in data[table]]
    if how is _as_text and table == 'annotations':
        for row in data[table]:
            row['bbox'] = [str(v) for v in row['bbox']]
    path.write_text(json.dumps(data))
    assert np.allclose(BoxFile(path).boxes, want)


@pytest.mark.parametrize('value', [True, float('nan'), None, 7.5, [1]])
def test_values_that_are_no_number_are_refused(value, copy):
    root = copy('coco')
    for path in found(root, LAYOUTS['coco']):
        data = json.loads(path.read_text())
        data['annotations'][0]['image_id'] = value
        path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match='image_id is'):
        _both_coco(root, max_corrupt=0)


def test_ids_that_nobody_reads_may_repeat(written, copy):
    root = copy('coco')

    def changed(text):
        data = json.loads(text)
        for row in data['annotations']:
            row['id'] = 7
        return json.dumps(data).encode()

    change(root, LAYOUTS['coco'], changed)
    assert contents(_both_coco(root)) == contents(_both_coco(written / 'coco'))


@pytest.mark.parametrize(
    'name,table,key',
    [('coco', 'images', 'id'), ('vqa', 'questions', 'question_id'), ('vqa', 'annotations', 'question_id')],
)
def test_ids_that_matter_may_not_repeat(name, table, key, copy):
    "A later row would silently replace the first"
    root = copy(name)
    for path in found(root, LAYOUTS[name]):
        data = json.loads(path.read_text())
        if table in data and 'categories' not in data:
            data[table][1][key] = data[table][0][key]
            path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f'the {key} .* appears twice'):
        LAYOUTS[name].read(root)


# ---------------------------------------------------------------- missing photos and unusable rows


@pytest.mark.parametrize('name', LAYOUTS)
def test_missing_photos_are_left_out_and_counted_up_to_a_limit(name, copy):
    "Left out and counted; refused above the limit, with the option that lets them pass"
    layout = LAYOUTS[name]
    root = copy(name)
    whole = layout.read(root)
    for path in sorted(root.glob(layout.photos))[:2]:
        if path.suffix in ('.jpg', '.jpeg'):
            path.unlink()
    with pytest.warns(UserWarning, match=f'2 of {N} images named in .* are missing: .*; they are left out'):
        got = layout.read(root)
    images = getattr(got, 'base', got)
    assert len(images) == N - 2 and set(map(str, images.ids)) < set(map(str, getattr(whole, 'base', whole).ids))
    with pytest.raises(ValueError, match=f'2 of {N} images .* max_corrupt=1 allows 1, --max-corrupt 2 lets them pass'):
        layout.read(root, max_corrupt=1)
    for path in sorted(root.glob(layout.photos))[1:]:
        if path.suffix in ('.jpg', '.jpeg'):
            path.unlink()
    with pytest.raises(ValueError, match=f'{N - 1} of {N} images .* are missing.* the default allows 3'):
        layout.read(root)


def _spoil_csv(lines):
    lines[2] = 'a,b,c,d'


def _spoil_token(lines):
    lines[2] = 'no number'


def _spoil_narrative(lines):
    row = json.loads(lines[2])
    del row['traces']
    lines[2] = json.dumps(row)


def _spoil_times(lines):
    row = json.loads(lines[2])
    row['timed_caption'][1].update(start_time=5, end_time=2)
    lines[2] = json.dumps(row)


def _spoil_line(lines):
    lines[2] = '{"Flickr30K_ID": "x"'


def _spoil_values(**values):
    def spoil(lines):
        lines[2] = json.dumps(json.loads(lines[2]) | values)

    return spoil


def _spoil_json(table, **values):
    def spoil(lines):
        data = json.loads('\n'.join(lines))
        rows = data if table is None else data[table]
        rows[2].update(values)
        lines[:] = [json.dumps(data)]

    return spoil


SPOILT = {
    'csv': ('csv', 0, _spoil_csv),
    'flickr8k': ('flickr8k', 0, _spoil_csv),
    'flickr30k': ('flickr30k', 0, _spoil_token),
    'results': ('results', 0, _spoil_token),
    'narratives-traces': ('narratives', 0, _spoil_narrative),
    'narratives-times': ('narratives', 0, _spoil_times),
    'snli_ve-json': ('snli_ve', 0, _spoil_line),
    'snli_ve-label': ('snli_ve', 0, _spoil_values(gold_label='maybe')),
    'snli_ve-sentence': ('snli_ve', 0, _spoil_values(sentence2=None)),
    'snli_ve-list': ('snli_ve', 0, _spoil_values(sentence2=['a', 'b'])),
    'snli_ve-id': ('snli_ve', 0, _spoil_values(Flickr30K_ID=7.5)),
    'coco-caption': ('coco', 0, _spoil_json('annotations', caption=None)),
    'coco-image': ('coco', 0, _spoil_json('annotations', image_id=99)),
    'coco-box': ('coco', 1, _spoil_json('annotations', bbox=[1, 2])),
    'coco-file': ('coco', 0, _spoil_json('images', file_name=3)),
    'vqa-question': ('vqa', 0, _spoil_json('questions', question=7)),
    'vqa-answers': ('vqa', 1, _spoil_json('annotations', answers=[])),
    'vqa-image': ('vqa', 1, _spoil_json('annotations', image_id=99)),
    'vizwiz': ('vizwiz', 0, _spoil_json(None, answers=None)),
    'mm_imdb': ('mm_imdb', 2, lambda lines: lines.__setitem__(slice(None), ['{"genres": 3}'])),
}


@pytest.mark.parametrize('spoilt', SPOILT)
def test_unusable_rows_are_left_out_and_counted_up_to_a_limit(spoilt, copy):
    "A row that cannot be used is left out, named and counted; max_corrupt=0 refuses it"
    name, which, spoil = SPOILT[spoilt]
    layout = LAYOUTS[name]
    root = copy(name)
    before = layout.read(root)
    path = found(root, layout)[which]
    lines = path.read_text().splitlines()
    spoil(lines)
    path.write_text('\n'.join(lines) + '\n')
    with pytest.warns(UserWarning, match=r'1 of [\d,]+ .*; they are left out'):
        got = layout.read(root)
    assert 0 < len(got) <= len(before)
    with pytest.raises(ValueError, match=r'1 of [\d,]+ .*max_corrupt=0 allows 0, --max-corrupt 1 lets them pass'):
        layout.read(root, max_corrupt=0)


@pytest.mark.parametrize('which', [0, 1])
def test_annotations_about_unknown_images_are_refused(which, copy):
    "Those about an image that is left out are counted; those about no image are refused, also beside one left out"
    root = copy('coco')
    path = found(root, LAYOUTS['coco'])[which]
    data = json.loads(path.read_text())
    lost = data['images'][2]['id']
    data['images'][2]['file_name'] = 3
    path.write_text(json.dumps(data))
    n = sum(a['image_id'] == lost for a in data['annotations'])
    with pytest.warns(UserWarning, match=f'{n} annotations are about images that are left out'):
        assert len(_both_coco(root)) == N - 1
    for row in data['annotations'][N:]:
        row['image_id'] = 99
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match='annotations cannot be used.* there is no image 99'):
        _both_coco(root)


def test_answers_to_unknown_questions_are_counted(copy):
    "Counted: a list of questions may be a part of the published one, and its answers may be those of another"
    root = copy('vqa')
    questions = found(root, LAYOUTS['vqa'])[0]
    data = json.loads(questions.read_text())
    del data['questions'][:2]
    questions.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match=r'2 of \d+ annotations answer no question that is used'):
        assert len(LAYOUTS['vqa'].read(root, max_corrupt=0)) == len(data['questions'])


# ---------------------------------------------------------------- one photo by two names

PHOTO = 'images/\xe9.jpg'  # an accent, that some systems write as a sign of its own


def _csv_twice(root, name):
    (root / 'photos.csv').write_text(f'path,caption\n{PHOTO},a\n{name},b\n')
    return read_csv(root / 'photos.csv', size=16)


def _json_twice(root, name):
    rows = [dict(path=PHOTO, caption='a'), dict(path=name, caption='b')]
    (root / 'photos.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    return read_csv(root / 'photos.jsonl', size=16)


def _token_twice(root, name):
    (root / 'results.token').write_text(f'{PHOTO}#0\ta\n{name}#0\tb\n')
    return read_flickr30k(root, 'results.token', '.', size=16)


def _vizwiz_twice(root, name):
    rows = [dict(image=n, question=t, answers=[dict(answer='yes')]) for n, t in ((PHOTO, 'a'), (name, 'b'))]
    (root / 'train.json').write_text(json.dumps(rows))
    (root / 'train').symlink_to('.')
    return read_vizwiz(root, size=16, log=str)


TWICE = dict(csv=_csv_twice, jsonl=_json_twice, flickr30k=_token_twice, vizwiz=_vizwiz_twice)


@pytest.fixture
def one_photo(tmp_path):
    (tmp_path / 'images').mkdir()
    Image.new('RGB', (8, 8)).save(tmp_path / PHOTO)
    return tmp_path


@pytest.mark.parametrize('name', [f'./{PHOTO}', PHOTO.replace('/', '//'), PHOTO.replace('/', '\\')])
@pytest.mark.parametrize('reader', TWICE)
def test_two_names_of_a_photo_are_one_photo(reader, name, one_photo):
    "Another way to write its path makes no second photo, which would be dealt to another part of the split"
    got = TWICE[reader](one_photo, name)
    assert len(getattr(got, 'base', got)) == 1
    assert sum(captions_of(got), []) == ['a', 'b']


@pytest.mark.parametrize('absolute', [True, False])
@pytest.mark.parametrize('reader', TWICE)
def test_a_photo_by_names_that_cannot_be_joined_is_refused(reader, absolute, one_photo):
    "Absolute and relative, composed and decomposed letters: refused, with both names"
    name = str(one_photo / PHOTO) if absolute else unicodedata.normalize('NFD', PHOTO)
    if reader == 'vizwiz' and absolute:
        name = str(one_photo / 'train' / PHOTO)
    with pytest.raises(ValueError, match='are the same photo; call it by one name'):
        TWICE[reader](one_photo, name)


@pytest.mark.parametrize('name', [f'./{PHOTO}', PHOTO.replace('/', '\\')])
@pytest.mark.parametrize('form', ['csv', 'jsonl'])
def test_all_names_of_a_photo_belong_to_one_split(form, name, one_photo):
    rows = [dict(path=PHOTO, caption='a', split='train'), dict(path=name, caption='b', split='test')]
    path = one_photo / f'photos.{form}'
    lines = (
        [json.dumps(r) for r in rows]
        if form == 'jsonl'
        else ['path,caption,split', *(','.join(r.values()) for r in rows)]
    )
    path.write_text('\n'.join(lines) + '\n')
    with pytest.raises(ValueError, match=f"{PHOTO} is both in 'test' and in 'train'"):
        read_csv(path, size=16)


@pytest.mark.parametrize('which', [0, 1])
def test_coco_photos_that_are_there_twice_are_refused(which, copy):
    root = copy('coco')
    path = found(root, LAYOUTS['coco'])[which]
    data = json.loads(path.read_text())
    data['images'][1]['file_name'] = './' + data['images'][0]['file_name']
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match='the file train-000000.jpg appears twice'):
        _both_coco(root)


# ---------------------------------------------------------------- rows of JSON lines, texts beside photos


def test_columns_of_json_lines_are_found_by_name(tmp_path):
    "The rules of tables: the usual name counts, else a name must be the only one; null is nothing"
    Image.new('RGB', (8, 8)).save(tmp_path / 'a.jpg')
    path = tmp_path / 'm.jsonl'

    def read(**row):
        path.write_text(json.dumps(row) + '\n')
        return read_csv(path, size=16, max_corrupt=0)

    assert read(path='a.jpg', caption='a', split=None).parts is None
    assert read(path='a.jpg', image='b.jpg', caption='a').ids == ['a.jpg']
    with pytest.raises(ValueError, match='line 1: the path may be in file_name or image; name them: --columns path='):
        read(file_name='a.jpg', image='b.jpg', caption='a')
    for wrong in dict(path=None), dict(caption=None), dict(caption=['a', None]):
        with pytest.raises(ValueError, match='line 1: expected an object with path and caption'):
            read(**dict(path='a.jpg', caption='a') | wrong)


@pytest.mark.parametrize(
    'photos,texts,problem',
    [
        (['a.jpg', 'a.png'], ['a.txt'], '1 of 2 texts cannot be used: a.jpg and a.png have one text'),
        (['a.jpg'], ['a.txt', 'a.caption'], '2 of 3 texts cannot be used: a.caption is one of several texts of a.jpg'),
        ([], ['a.txt'], '1 of 2 texts cannot be used: a.txt has no photo'),
    ],
)
def test_texts_that_belong_to_no_single_photo_are_left_out(photos, texts, problem, tmp_path):
    "What is said to be left out is left out"
    for name in *photos, 'b.jpg':
        Image.new('RGB', (8, 8)).save(tmp_path / name)
    for name in *texts, 'b.txt':
        (tmp_path / name).write_text(f'the text {name}')
    with pytest.warns(UserWarning, match=problem):
        got = read_csv(tmp_path, size=16, max_corrupt=2)
    assert got.ids == ['b.jpg'] and captions_of(got) == [['the text b.txt']]


@pytest.mark.parametrize('name', ['flickr8k', 'flickr30k', 'results', 'texts'])
def test_photos_without_captions_are_counted(name, written, copy):
    if name == 'texts':
        root = copy('csv')
        for line in (root / 'photos.csv').read_text().splitlines()[1:]:
            (root / line.split(',')[0]).with_suffix('.txt').write_text('a b')
        (root / 'photos.csv').unlink()
        folder = root / 'images'

        def read(d):
            return read_csv(d, size=32)
    else:
        root = copy(name)
        read = LAYOUTS[name].read
        folder = next(root.glob(LAYOUTS[name].photos)).parent
    Image.new('RGB', (8, 8)).save(folder / 'extra.jpg')
    with pytest.warns(UserWarning, match=f'1 of {N + 1} images have no caption and are left out: .*extra.jpg'):
        assert len(read(root)) == N


@pytest.mark.parametrize(
    'text',
    [
        '<annotation>',
        '<?xml version="1.0" encoding="klingon"?><a/>',
        None,
        '<?xml version="1.0" encoding="shift_jis"?><a/>',
        '\xff\xfe<',
    ],
)
def test_unreadable_voc_annotations_are_left_out_and_counted(text, copy):
    root = copy('voc')
    path = sorted((root / 'Annotations').iterdir())[3]
    if text is None:
        path.unlink()
    else:
        path.write_text(text, encoding='latin-1')
    with pytest.warns(UserWarning, match=f'1 of {N} files cannot be used: {path.name}'):
        got = _voc(root)
    assert len(got) == N - 1 == len(got.labels['present']) and path.stem not in got.ids
    with pytest.raises(ValueError, match=path.name):
        _voc(root, max_corrupt=0)


@pytest.mark.parametrize('name', ['narratives', 'snli_ve', 'csv'])
def test_a_file_cut_off_is_never_left_out(name, copy):
    "A last line without an end is a copy that broke off, not a row"
    root = copy(name)
    if name == 'csv':
        rows = [json.dumps(dict(path=i, caption='a')) for i in read_csv(root / 'photos.csv').ids]
        (root / 'photos.csv').unlink()
        (root / 'm.jsonl').write_text('\n'.join(rows))
    path = next(root.glob('*.jsonl'))
    path.write_bytes(path.read_bytes().rstrip()[:-5])
    read = (lambda d: read_csv(d)) if name == 'csv' else LAYOUTS[name].read
    with pytest.raises(ValueError, match='was the file cut off'):
        read(root)


@pytest.mark.parametrize('name', [*CAPTIONED, *TASKS])
def test_the_reasons_are_in_the_log_of_a_refusal(name, copy, written):
    "What was left out is logged also if what is left is too little"
    layout = LAYOUTS[name]
    root = copy(name)
    builder = DATASETS[name]
    photos = [p for p in sorted(root.glob(layout.photos)) if p.suffix in ('.jpg', '.jpeg')]
    for p in photos[1:]:
        p.unlink()
    if name == 'coco':
        write_coco([scene('valid', i, size=32) for i in range(3)], root, 'val2017')
    if name in TASKS:
        wanted = world('valid', 2, size=32, with_=('questions', 'statements', 'genre'))
        for split in ('valid', 'test'):
            layout.write(wanted, root, split)
    lines = []
    place = root / 'photos.csv' if name == 'csv' else root
    with pytest.raises(ValueError):
        builder.open(root=place, size=32, log=lines.append, max_corrupt=N - 1)
    assert any(f'{N - 1} of {N}' in line and 'missing' in line for line in lines), lines


def test_every_command_has_a_limit_of_damage(copy, capsys, tmp_path):
    "`--max-corrupt` of each command that reads data; photos that are gone are counted by it"
    root = copy('csv')
    for path in sorted((root / 'images').iterdir())[:4]:
        path.unlink()
    data = ['--data', 'csv', '--root', root / 'photos.csv']
    for words in (
        ['shards', *data, '--out', tmp_path / 's'],
        ['paraphrase', *data, '--out', tmp_path / 'p.jsonl'],
        ['pretrain', *data, '--out', tmp_path / 'run', '--dry-run'],
    ):
        if '--dry-run' in words:
            words = [w for w in words if w not in ('--out', tmp_path / 'run')]
        text = refused(capsys, *words)
        assert f'4 of {N} images named in photos.csv are missing' in text and '--max-corrupt 4 lets them pass' in text
        assert '--max-corrupt' in refused(capsys, *words, '--max-corrupt', 'many')
    from vlrep.cli import main

    main(['shards', *map(str, data), '--out', str(tmp_path / 's'), '--max-corrupt', '4'])
    assert f'4 of {N} images named in photos.csv are missing' in capsys.readouterr().out
    assert '--max-corrupt' in refused(capsys, 'evaluate', tmp_path, '--on', 'captions', '--max-corrupt', 'x')


# ---------------------------------------------------------------- layouts in use elsewhere


def test_flickr8k_unpacked_as_two_archives_is_read(written, tmp_path):
    want = LAYOUTS['flickr30k'].read(written / 'flickr30k')
    shutil.copytree(written / 'flickr30k' / 'flickr30k-images', tmp_path / 'Flickr8k_Dataset' / 'Flicker8k_Dataset')
    (tmp_path / 'Flickr8k_text').mkdir()
    shutil.copy(written / 'flickr30k' / 'results_20130124.token', tmp_path / 'Flickr8k_text' / 'Flickr8k.token.txt')
    (tmp_path / '__MACOSX').mkdir()
    assert contents(read_flickr30k(tmp_path, size=32)) == contents(want)
    with pytest.raises(ValueError, match='read by --data flickr30k'):
        read_flickr8k(tmp_path)


@pytest.mark.parametrize('folders', ['{}', 'images/{}'])
@pytest.mark.parametrize('tables', ['annotations/', ''])
def test_coco_of_2014_is_read(folders, tables, tmp_path):
    "The names of 2014, wherever the tables and the photos are"
    for split in ('train', 'val'):
        recs = [scene(split.replace('val', 'valid'), i, size=32) for i in range(4)]
        recs = [Record(f'COCO_{split}2014_{i:012d}', image=r.image, captions=r.captions) for i, r in enumerate(recs)]
        write_coco(recs, tmp_path / 'a', f'{split}2014')
        old = tmp_path / 'a' / f'{split}2014'
        new = tmp_path / folders.format(f'{split}2014')
        new.parent.mkdir(parents=True, exist_ok=True)
        old.rename(new)
        (tmp_path / (tables or '.')).mkdir(exist_ok=True)
        (tmp_path / 'a' / 'annotations' / f'captions_{split}2014.json').rename(
            tmp_path / f'{tables}captions_{split}2014.json'
        )
    builder = DATASETS['coco']
    parts = builder.open(replace(builder.options, train=0.5, valid=0.5), tmp_path, 32, log=lambda line: None)
    assert sum(map(len, parts.values())) == 8 and all('val2014' in i for i in parts['test'].ids)


@pytest.mark.parametrize('tables', ['annotations', '.'])
def test_objects_of_coco_are_found_beside_the_captions(tables, tmp_path):
    "The labels of Karpathy's split are found where the captions are"
    for split in ('train', 'valid'):
        name = split.replace('valid', 'val') + '2017'
        write_coco([scene(split, i, size=32) for i in range(2)], tmp_path, name, classes=CATEGORIES)
        path = tmp_path / 'annotations' / f'instances_{name}.json'
        data = json.loads(path.read_text())
        for row in data['images']:
            row['id'] += 10 * (split == 'valid')
        for row in data['annotations']:
            row['image_id'] += 10 * (split == 'valid')
        path.unlink()
        (tmp_path / tables / path.name).write_text(json.dumps(data))
    objects, names, _ = photo_objects(tmp_path)
    assert sorted(objects) == [1, 2, 11, 12] and names == list(CATEGORIES)


@pytest.mark.parametrize('tables', ['{kind}', 'v2_{kind}_Train_mscoco', 'annotations'])
@pytest.mark.parametrize('photos', ['Images/mscoco/train2014', 'images/train2014', 'train2014'])
def test_the_folders_of_vqa_are_found(tables, photos, written, copy):
    root = copy('vqa')
    for path in list(root.glob('*.json')):
        to = root / tables.format(kind='Questions' if 'questions' in path.name else 'Annotations') / path.name
        to.parent.mkdir(exist_ok=True)
        path.rename(to)
    if photos != 'train2014':
        (root / photos).parent.mkdir(parents=True)
        (root / 'train2014').rename(root / photos)
    assert contents(LAYOUTS['vqa'].read(root)) == contents(LAYOUTS['vqa'].read(written / 'vqa'))


def test_every_command_that_reads_a_table_takes_columns(copy, capsys, tmp_path):
    "--columns names them, in every command that reads the table; without it the message says so"
    root = copy('csv')
    change(root, LAYOUTS['csv'], lambda text: text.replace('path,caption', 'url,alt').encode())
    words = ['shards', '--data', 'csv', '--root', root, '--out', tmp_path / 's']
    assert '--columns path=NAME,caption=NAME' in refused(capsys, *words)
    from vlrep.cli import main

    main([*map(str, words), '--columns', 'path=url,caption=alt'])
    assert '12' in capsys.readouterr().out
    assert '--columns path' in refused(capsys, 'pretrain', '--data', 'csv', '--root', root, '--columns', 'path')


@pytest.mark.parametrize('name', ['csv', 'flickr8k', 'results'])
def test_a_message_about_columns_names_an_option_of_its_command(name, copy, capsys, tmp_path):
    "What a message advises is an option of the command that prints it"
    root = copy(name)
    if name == 'results':
        change(root, LAYOUTS[name], lambda text: b'image_name,number,words\na.jpg,0,b\n')
    else:
        change(root, LAYOUTS[name], lambda text: ('url,alt\n' + text.partition('\n')[2]).encode())
    data = 'flickr30k' if name == 'results' else name
    texts = refused(capsys, 'shards', '--data', data, '--root', root, '--out', tmp_path / 's')
    assert ('--data csv --columns' in texts) == (name != 'csv') and '--columns path=NAME,caption=NAME' in texts


# ---------------------------------------------------------------- entries that are none

RUBBISH = '._{}', '.DS_Store', 'Thumbs.db', '__MACOSX/{}', '.{}'


def litter(folder, *names):
    "What systems leave beside files: in each folder, after the names of its files"
    for name in names:
        for form in RUBBISH:
            path = folder / form.format(name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b'\x00\x05\x16\x07')


@pytest.mark.parametrize('name', LAYOUTS)
def test_hidden_files_are_no_photos_and_no_tables(name, written, copy):
    "Files of macOS and Windows are no photos and no tables"
    layout = LAYOUTS[name]
    root = copy(name)
    for path in [*found(root, layout), *list(root.glob(layout.photos))[:3]]:
        litter(path.parent, path.name)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert contents(layout.read(root)) == contents(layout.read(written / name))


def test_hidden_files_in_folders_are_no_photos_and_no_texts(tmp_path):
    write_folder([scene('train', i, size=32) for i in range(6)], tmp_path / 'a', lambda r: r.setting)
    photos = find_photos(tmp_path / 'a')
    for folder in (tmp_path / 'a', *(p for p in (tmp_path / 'a').iterdir() if p.is_dir())):
        litter(folder, 'x.jpg')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(read_folder(tmp_path / 'a', 32)) == 6 and find_photos(tmp_path / 'a') == photos
    for n in photos:
        (tmp_path / 'a' / n).with_suffix('.txt').write_text('a b')
    for folder in (p for p in (tmp_path / 'a').iterdir() if p.is_dir() and not is_hidden(p.name)):
        litter(folder, 'x.txt')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(read_csv(tmp_path / 'a', size=32)) == 6


# ---------------------------------------------------------------- photos that are turned by their EXIF header

UNDO = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
UPRIGHT = np.zeros((40, 80, 3), np.uint8)
UPRIGHT[8:24, 40:60] = 255
BOX = 0.5, 0.2, 0.75, 0.6  # of the white part


def stored(turn):
    "The picture as a camera stores it, and the box of its white part there, in pixels"
    image = Image.fromarray(UPRIGHT)
    if UNDO[turn] is not None:
        image = image.transpose(UNDO[turn])
    ys, xs = np.nonzero(np.asarray(image)[..., 0])
    return image, [int(v) for v in (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)]


def photograph(path, turn):
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[274] = turn
    stored(turn)[0].save(path, quality=95, exif=exif)


def given_for(turn, displayed):
    "Size and box in pixels, for the pixels as they are stored or as they are displayed"
    if displayed:
        return (80, 40), [40, 8, 60, 24]
    image, box = stored(turn)
    return image.size, box


def _coco_boxes(root, size, box):
    x0, y0, x1, y1 = box
    (root / 'annotations').mkdir()
    (root / 'annotations' / 'i.json').write_text(
        json.dumps(
            dict(
                images=[dict(id=1, file_name='a.jpg', width=size[0], height=size[1])],
                categories=[dict(id=1, name='white')],
                annotations=[dict(image_id=1, category_id=1, bbox=[x0, y0, x1 - x0, y1 - y0])],
            )
        )
    )
    return read_coco(root, None, 'annotations/i.json', 'photos', 48)[0].boxes


def _voc_boxes(root, size, box):
    x0, y0, x1, y1 = box
    (root / 'photos').rename(root / 'JPEGImages')
    for d in 'Annotations', 'ImageSets/Main':
        (root / d).mkdir(parents=True)
    (root / 'ImageSets/Main/trainval.txt').write_text('a\n')
    corners = ''.join(f'<{k}>{v}</{k}>' for k, v in zip(('xmin', 'ymin', 'xmax', 'ymax'), (x0 + 1, y0 + 1, x1, y1)))
    (root / 'Annotations' / 'a.xml').write_text(
        f'<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size><object><name>white</name>'
        f'<bndbox>{corners}</bndbox></object></annotation>'
    )
    return read_voc(root, size=48)[0].boxes


def _file_boxes(root, size, box):
    "Boxes of a file, joined with the photos by the reader of regions"
    (root / 'b.jsonl').write_text(json.dumps(dict(image='a.jpg', boxes=[box], width=size[0], height=size[1])) + '\n')
    (root / 'photos.csv').write_text('path,caption\nphotos/a.jpg,a white thing\n')
    photos = read_csv(root / 'photos.csv', size=48)
    photos.ids[:] = ['a.jpg']
    got = RegionReader('boxes', root / 'b.jsonl')(photos, [0])
    return got['region_boxes'][0].numpy()


@pytest.mark.parametrize('displayed', [False, True])
@pytest.mark.parametrize('turn', UNDO)
@pytest.mark.parametrize('boxes', [_coco_boxes, _voc_boxes, _file_boxes])
def test_boxes_follow_a_turned_photo(boxes, turn, displayed, tmp_path):
    "Whichever orientation the stated size belongs to, the boxes are where the thing is in the upright image"
    if displayed and turn in (2, 3, 4):
        return  # no size can tell: the stored pixels count
    photograph(tmp_path / 'photos' / 'a.jpg', turn)
    got = boxes(tmp_path, *given_for(turn, displayed))
    assert np.allclose(got, [BOX], atol=1e-5)


@pytest.mark.parametrize('turn', UNDO)
def test_traces_follow_a_turned_photo(turn, tmp_path):
    "Traces have no size: they are given for the stored pixels"
    write_localized([scene('train', 0, size=32, with_='narrative')], tmp_path)
    path = next((tmp_path / 'images').iterdir())
    photograph(path, turn)
    (w, h), (x0, y0, x1, y1) = given_for(turn, False)
    f = next(tmp_path.glob('*.jsonl'))
    row = json.loads(f.read_text())
    row['traces'] = [[dict(x=x0 / w, y=y0 / h, t=0.0), dict(x=x1 / w, y=y1 / h, t=1.0)]]
    f.write_text(json.dumps(row) + '\n')
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        dataset = read_localized(tmp_path, size=48)
    a, b = dataset.narratives[0][0].strokes[0][:, :2]
    assert np.allclose([*np.minimum(a, b), *np.maximum(a, b)], BOX, atol=1e-3)
    assert any('turned by their EXIF header' in str(w.message) for w in heard) == (turn != 1)
    assert np.allclose(dataset.subset([0]).narratives[0][0].strokes[0][:, :2], [a, b])


@pytest.mark.parametrize('turn', [3, 6])
def test_boxes_of_square_photos_turn_with_the_stored_pixels(turn, tmp_path):
    exif = Image.Exif()
    exif[274] = turn
    (tmp_path / 'photos').mkdir()
    Image.new('RGB', (40, 40)).save(tmp_path / 'photos' / 'a.jpg', exif=exif)
    got = _coco_boxes(tmp_path, (40, 40), [0, 0, 10, 20])
    assert np.allclose(got, [[0.75, 0.5, 1, 1] if turn == 3 else [0.5, 0, 1, 0.25]])


# ---------------------------------------------------------------- benchmarks


def test_the_lists_of_cub_are_read_in_any_encoding(tmp_path):
    "Lists with a byte-order mark and in UTF-16; a missing photo is left out with its label"
    root = tmp_path / 'CUB'
    (root / 'attributes').mkdir(parents=True)
    names = [f'{c}/{i}.jpg' for c in ('a', 'b', 'c') for i in range(3)]
    for n in names:
        (root / 'images' / n).parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 8)).save(root / 'images' / n)
    texts = {
        'classes.txt': '1 a\n2 b\n3 c\n',
        'images.txt': ''.join(f'{i} {n}\n' for i, n in enumerate(names, 1)),
        'image_class_labels.txt': ''.join(f'{i} {1 + "abc".index(n[0])}\n' for i, n in enumerate(names, 1)),
        'testclasses.txt': 'c\n',
        'attributes/class_attribute_labels_continuous.txt': '1 0\n0 1\n1 1\n',
    }
    for k, (name, text) in enumerate(texts.items()):
        (root / name).write_text(text, encoding=('utf-8-sig', 'utf-16')[k % 2])
    assert len(read_cub(root, 16).images) == 9
    (root / 'images' / names[4]).unlink()
    with pytest.warns(UserWarning, match='1 of 9 images named in images.txt are missing: b/1.jpg'):
        got = read_cub(root, 16)
    assert got.label.tolist() == [0, 0, 0, 1, 1, 2, 2, 2] and got.images[3].tags == ['b']
    with pytest.raises(ValueError, match='1 of 9 images'):
        read_cub(root, 16, max_corrupt=0)


# ---------------------------------------------------------------- a run goes on with the photos that it began with


def test_resume_with_a_lost_photo_is_refused(copy, tmp_path, capsys):
    "Missing at the start, a photo is a line in the log; gone later, the run is refused; evaluations keep its limit"
    root = copy('csv')
    first, second, *_ = sorted((root / 'images').iterdir())
    first.unlink()
    small = [*NET, 'bs=4', 'steps=4', 'vocab=80', 'max_unknown=1', 'size=32', 'train=.5', 'valid=.25', 'test=.25']
    run = tmp_path / 'run'
    start = ['pretrain', '--data', 'csv', '--root', root / 'photos.csv', '--out', run, '--max-corrupt', 1]
    text, again, scores, changed = vlrep(
        tmp_path,
        [*start, *sets(small)],
        ['resume', run],
        ['evaluate', run, '--on', 'captions'],
        ['evaluate', run, '--on', 'captions', '--max-corrupt', 0],
        codes=[0, 0, 0, 2],
    )
    assert f'1 of {N} images named in photos.csv are missing' in text and 'missing' in scores
    assert 'complete' in again and 'max_corrupt=0 allows 0' in changed
    shutil.rmtree(run / 'best', ignore_errors=True)
    (run / 'result.jsonl').unlink()
    second.unlink()
    (text,) = vlrep(tmp_path, ['resume', run, '--max-corrupt', 5], codes=[2])
    assert 'images' in text and 'would not be the same run' in text
