"""Every field of files from elsewhere with values of every wrong type: one line that names the file, or it is read

Region items (in .npy and LMDB), stores of regions and their journals, box files, label maps, config.json of a BERT,
written captions; LMDB cut off and changed.
"""

import copy
import json
import os
import pickle
import random
import shutil
import zlib

import lmdb
import numpy as np
import pytest
from paths import ROOT

from vlrep.data.box_files import BoxFile
from vlrep.data.lmdb_files import lmdb_items
from vlrep.data.published_regions import convert_regions
from vlrep.data.region_store import RegionStore, RegionWriter
from vlrep.data.tasks import read_labels
from vlrep.methods.fusion_collate import read_generated_captions
from vlrep.models.bert_model import Bert, BertConfig
from vlrep.models.bert_weights import load_bert, save_bert
from vlrep.models.sublayers import written_sublayers

DEEP = 10**5
ODD = [None, -1, float('inf'), 'x', '', '²', [], {}, float('nan'), True, 10**400, 2.5, [[[1]]], '\ud83d', 'DEEP']


def text(value):
    "JSON, with nesting where DEEP stands"
    return json.dumps(value).replace('"DEEP"', '[' * DEEP + ']' * DEEP)


def places(value, before=()):
    "Paths of all fields and elements"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for k, v in items:
        yield (*before, k)
        yield from places(v, (*before, k))


def mutated(value, path, odd):
    value = copy.deepcopy(value)
    at = value
    for k in path[:-1]:
        at = at[k]
    at[path[-1]] = odd
    return value


# ---------------------------------------------------------------- JSON


def box_lines(value):
    return '\n'.join(text(l) for l in value)


def folder_of_bert(tmp):
    save_bert(Bert(BertConfig(20, 32, 1, 1, max_len=16), 3), tmp)
    return tmp / 'config.json', json.loads((tmp / 'config.json').read_text())


LINES = [dict(image='a.jpg', width=20, height=10, boxes=[[0, 0, 5, 5], [1, 1, 4, 4]]), dict(image='b.jpg', boxes=[])]
COCO = dict(
    images=[dict(id=1, file_name='a.jpg', width=20, height=10), dict(id=2, file_name='b.jpg', width=9, height=9)],
    annotations=[dict(image_id=1, bbox=[0, 0, 5, 5]), dict(image_id=2, bbox=[0, 0, 5, 5])],
)
JSON = {
    'boxes.jsonl': (LINES, box_lines, BoxFile),
    'instances.json': (COCO, text, BoxFile),
    'labels.json': (['cat', 'dog'], text, read_labels),
    'numbers.json': ({'cat': 0, 'dog': 1}, text, read_labels),
    'names.json': ({'0': 'cat', '1': 'dog'}, text, read_labels),
    'categories.json': (dict(categories=[dict(id=3, name='cat'), dict(id=5, name='dog')]), text, read_labels),
    'captions.jsonl': (
        [dict(image='a', caption='a dog'), dict(image='b', caption='x')],
        box_lines,
        read_generated_captions,
    ),
}


@pytest.mark.parametrize('name', JSON)
def test_json_with_values_of_any_type_is_read_or_refused_by_name(name, tmp_path):
    value, written, opened = JSON[name]
    path = tmp_path / name
    refused = 0
    tried = 0
    path.write_text(written(value))
    opened(path)
    for at in places(value):
        for odd in ODD:
            path.write_text(written(mutated(value, at, odd)))
            tried += 1
            try:
                opened(path)
            except ValueError as e:
                assert str(path) in str(e) and len(str(e)) < 1000 and not isinstance(e, UnicodeError), (at, odd, e)
                refused += 1
    assert refused > 0.5 * tried, (refused, tried)
    # with a byte-order mark; files of lines with one are in datasets/test_foreign_tables.py
    for encoding in ('utf-8-sig', 'utf-16') if path.suffix == '.json' else ():
        path.write_text(written(value), encoding=encoding)
        opened(path)


def test_a_bert_config_with_values_of_any_type_is_read_or_refused_by_name(tmp_path):
    path, value = folder_of_bert(tmp_path / 'bert')
    for at in places({k: v for k, v in value.items() if k != 'vlrep'}):
        for odd in ODD:
            path.write_text(text(mutated(value, at, odd)))
            try:
                load_bert(tmp_path / 'bert', log=None)
            except ValueError as e:
                assert str(tmp_path / 'bert') in str(e), (at, odd, e)


def test_a_key_that_is_a_digit_and_no_number_is_refused(tmp_path):
    "'²' is a digit and no number"
    (tmp_path / 'l.json').write_text(json.dumps({'²': 'cat', '0': 'dog'}))
    with pytest.raises(ValueError, match='l.json: expected labels with their numbers'):
        read_labels(tmp_path / 'l.json')
    with pytest.raises(ValueError, match='width=N'):
        written_sublayers('tt[width=²]')


def test_no_module_calls_isdigit():
    "`str.isdigit` is true for '²', which `int` refuses; `str.isdecimal` is not"
    modules = (ROOT / 'vlrep').rglob('*.py')
    assert not [p for p in modules if '.isdigit(' in p.read_text(encoding='utf-8')]


# ---------------------------------------------------------------- stores of regions


def store(folder):
    with RegionWriter(folder, 4, 2, names=['a', 'b'], about=dict(by='me')) as w:
        for i in range(3):
            w.add(f'i{i}', np.ones((1, 4), 'f4'), np.float32([[0, 0, 1, 1]]), np.float32([[0.5, 0.5]]))
        w.leave_out('bad', 'torn')
    return folder


def test_a_store_index_with_values_of_any_type_is_read_or_refused_by_name(tmp_path):
    "With a checksum that fits: refused with the file's name, or as before"
    path = store(tmp_path / 'store') / 'index.json'
    value = json.loads(path.read_text())
    value.pop('crc')
    refused = 0

    def write(index):
        try:
            crc = zlib.crc32(json.dumps(index).encode())
        except RecursionError:
            crc = 0
        path.write_text(text(dict(index, crc=crc)))

    for at in [*places(value), *(('files', k) for k in ('../x.npy', '/etc/passwd', 'sides.npy', 'x.npz', 'features'))]:
        for odd in ODD:
            write(mutated(value, at, odd))
            try:
                s = RegionStore(tmp_path / 'store')
                s.read(range(len(s)))
            except ValueError as e:
                assert str(tmp_path / 'store') in str(e), (at, odd, e)
                refused += 1
    write(value)
    assert refused > 250 and len(RegionStore(tmp_path / 'store')) == 3, refused


def test_columns_of_a_store_that_contradict_each_other_are_refused(tmp_path):
    "Files of other shapes, types and order, with checksums that fit"
    from vlrep.core.files import write_index

    store(tmp_path / 'good')
    value = json.loads((tmp_path / 'good' / 'index.json').read_text())
    facts = {k: v for k, v in value.items() if k not in ('files', 'crc')}
    changes = [
        lambda a: a[:-1],
        lambda a: a[::-1].copy(),
        lambda a: a.astype('f8'),
        lambda a: a.reshape(-1)[:1],
        lambda a: np.concatenate([a, a]),
        lambda a: a.astype(object),
        lambda a: a - 1 if a.dtype != object else a,
    ]
    held_out = 0
    for name in value['files']:
        for change in changes:
            folder = tmp_path / 'bad'
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / 'good', folder)
            np.save(folder / name, change(np.load(folder / name)), allow_pickle=True)
            write_index(folder, facts)
            try:
                s = RegionStore(folder)
                s.read(range(len(s)))
                s.rows(['i0'])
            except (ValueError, IndexError) as e:
                assert str(folder) in str(e) or 'data' in str(e), (name, e)
                held_out += 1
    assert held_out > 35, held_out


def test_a_damaged_line_of_a_journal_is_named(tmp_path):
    "A killed writer's journal with every line damaged: a line that names it"
    out = tmp_path / 'out'

    def begin():
        with RegionWriter(out, 4, resume=True) as w:
            for i in range(3):
                if f'i{i}' not in w:
                    w.add(f'i{i}', np.ones((1, 4), 'f4'), np.float32([[0, 0, 1, 1]]), sides=(9, 9))
            if 'bad' not in w:
                w.leave_out('bad', 'torn')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    journal = tmp_path / '.out.partial' / 'journal'
    head, *lines = journal.read_text().splitlines()
    entries = [json.loads(l) for l in lines]
    refused = 0
    for at in places(entries):
        for odd in ODD:
            journal.write_text('\n'.join([head, *(text(e) for e in mutated(entries, at, odd)), '']))
            try:
                begin()
            except KeyboardInterrupt:
                pass
            except ValueError as e:
                assert '.out.partial' in str(e) or str(out) in str(e), (at, odd, e)
                refused += 1
            journal.write_text('\n'.join([head, *lines, '']))
    assert refused > 100, refused


# ---------------------------------------------------------------- published regions


def item():
    return dict(
        features=np.ones((2, 4), 'f4'),
        bbox=np.float32([[0, 0, 5, 5], [1, 1, 6, 6]]),
        num_boxes=2,
        image_width=20,
        image_height=10,
        cls_prob=np.float32([[0.5, 0.5], [1, 0]]),
        objects=np.array([0, 1]),
    )


def deep(n=200):
    x = []
    for _ in range(n):
        x = [x]
    return x


WRONG = [
    None,
    -1,
    1e400,
    'x',
    b'x',
    '²',
    [],
    {},
    deep(),
    float('nan'),
    True,
    10**30,
    2.5,
    np.array(['a', 'b']),
    np.ones((2, 2, 2)),
    np.array([None, {}], object),
    np.ones(3) * 1j,
    np.zeros((0, 4)),
    np.full((2, 4), np.nan),
    np.array(-1),
    (1, 2),
    3,
    1,
    0,
]


@pytest.mark.parametrize('how', ['npy', 'lmdb'])
def test_region_items_with_values_of_any_type_are_read_or_refused_by_name(how, tmp_path):
    "Each field replaced; what is read has two regions of width 4"
    refused = 0
    for k in item():
        for wrong in WRONG:
            data = dict(item(), **{k: wrong})
            source = tmp_path / 'source'
            shutil.rmtree(source, ignore_errors=True)
            source.mkdir()
            if how == 'npy':
                np.save(source / 'a.npy', np.array(data, object), allow_pickle=True)
            else:
                with lmdb.open(str(source), map_size=2**20) as env, env.begin(write=True) as t:
                    t.put(b'a', pickle.dumps(data))
            try:
                got = convert_regions(source, tmp_path / 'out', classes=2, log=None)
            except ValueError as e:
                assert str(source) in str(e) and len(str(e)) < 1000, (k, wrong, e)
                refused += 1
            else:
                assert len(got) == 1 and got.index['regions'] == 2 and got.width == 4, (k, wrong)
    assert refused > 100, refused


@pytest.mark.parametrize('num', [-1, 0, 1, 3, 10**9, '-1', 1.5, True, np.array([-2])])
def test_counts_that_contradict_the_data_are_refused(num, tmp_path):
    "Never a region less without a word; base64 and bytes, too"
    import base64

    for pack in (lambda a: a, lambda a: a.tobytes(), lambda a: base64.b64encode(a.tobytes())):
        data = {k: pack(v) if k in ('features', 'bbox', 'cls_prob') else v for k, v in item().items()}
        source = tmp_path / 's'
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        np.save(source / 'a.npy', np.array(dict(data, num_boxes=num), object), allow_pickle=True)
        with pytest.raises(ValueError, match='a.npy'):
            convert_regions(source, tmp_path / 'out', log=None)


def test_arrays_that_claim_more_than_they_have_are_refused(tmp_path):
    "Shapes in headers and pickles: refused before memory is taken"
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000), }"
    big = b'\x93NUMPY\x01\x00\x76\x00' + header.ljust(117).encode() + b'\n'
    array = pickle.dumps(np.ones((2, 4), object), protocol=2)
    for data in (
        big + bytes(32),
        big.replace(b'<f4', b'|O ') + array.replace(b'K\x02K\x04', b'J\x00\x00\x00\x7fK\x04'),
        big.replace(b'<f4', b'|O ') + b'cnumpy\nndarray\n(J\x00\x00\x00\x7ftR.',
        big.replace(b'<f4', b'|O ') + b'c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.',
    ):
        (tmp_path / 's').mkdir(exist_ok=True)
        (tmp_path / 's' / 'a.npy').write_bytes(data)
        with pytest.raises(ValueError, match='a.npy'):
            convert_regions(tmp_path / 's', tmp_path / 'out', log=None)


# ---------------------------------------------------------------- LMDB


def test_a_damaged_lmdb_file_ends_no_process(tmp_path):
    "Cut off at 60 sizes and with 300 changed bytes, in a process of its own: a ValueError or as many entries"
    with lmdb.open(str(tmp_path / 'w'), map_size=2**24, subdir=False) as env, env.begin(write=True) as t:
        for i in range(60):
            t.put(f'image {i}'.encode(), pickle.dumps(dict(item(), more=bytes(3000 if i % 3 else 10))))
    whole = (tmp_path / 'w').read_bytes()
    draw = random.Random(0)
    pages = [p for p in range(len(whole) // 4096) if whole[4096 * p + 10] in (1, 2, 4, 8)]
    files = [whole[:n] for n in np.linspace(0, len(whole) - 1, 60).astype(int)]
    files[1:1] = [whole[:n] for n in range(4096, len(whole), 4096)]
    cut = len(files)
    for _ in range(300):
        at = draw.choice(pages) * 4096 + draw.choice([draw.randrange(60), draw.randrange(4096)])
        files.append(whole[:at] + draw.randbytes(1) + whole[at + 1 :])
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        refused = []
        for i, data in enumerate(files):
            (tmp_path / 'w').write_bytes(data)
            try:
                assert len(list(lmdb_items(tmp_path / 'w'))) == 60
            except ValueError as e:
                refused.append(i) if str(tmp_path) in str(e) else None
        os.write(w, json.dumps([sum(i < cut for i in refused), len(refused)]).encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    early, all_ = json.loads(os.read(r, 100))
    assert early >= cut - 2 and all_ > cut + 20, (early, all_, cut)
