"""vlrep search and vlrep embed: what is wrong with a folder, a query or a file is one line, or is counted and named

How vectors are compared, written and kept is checked in nbs/models/68_photo_vectors; what a search prints in
nbs/experiments/37_photo_search.
"""

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image
from run_folders import TINY, untrained
from tools import refused

import vlrep
from vlrep.cli import main
from vlrep.datasets.world.dataset import scene
from vlrep.models import photo_vectors
from vlrep.models.pretrained import Pretrained

SMALL = dict(visual_depth=10, visual_width=8, width=16, depth=1, heads=2, size=32, vocab=200)


@pytest.fixture(scope='module')
def joint(tmp_path_factory):
    "A run that embeds images and texts in one space"
    return untrained(tmp_path_factory.mktemp('runs') / 'clip', 'clip', **SMALL)


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    "A run that has a backbone, and no space of images and texts"
    return untrained(tmp_path_factory.mktemp('runs') / 'virtex', 'virtex', **TINY)


@pytest.fixture
def photos(tmp_path):
    "Six photos, two of them in a folder of their own"
    folder = tmp_path / 'photos'
    (folder / 'sub').mkdir(parents=True)
    for i in range(6):
        scene('test', i, size=64).load().save(folder / ('sub' if i > 3 else '') / f'{i}.png')
    return folder


def searched(capsys, *words):
    "What a search prints as JSON, and what it says beside that"
    capsys.readouterr()
    main(['search', *map(str, words), '--json', '--workers', '0'])
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_text_finds_photos_by_their_cosine(joint, photos, capsys):
    told, err = searched(capsys, joint, photos, 'a red ball on grass', '--top', 3)
    m = vlrep.load(joint)
    paths = {name: photos / name for name in ('0.png', '1.png', '2.png', '3.png', 'sub/4.png', 'sub/5.png')}
    cosines = {name: float(m.embed_image(path) @ m.embed_text('a red ball on grass')) for name, path in paths.items()}
    best = sorted(cosines, key=cosines.get, reverse=True)[:3]
    assert [f['photo'] for f in told['found']] == best and told['space'] == 'joint' and told['photos'] == 6
    assert [f['score'] for f in told['found']] == pytest.approx([cosines[name] for name in best], abs=1e-5)
    assert '6 photos (6 read, 0 gone)' in err


def test_a_photo_finds_itself_without_a_joint_space(plain, photos, capsys):
    told, _ = searched(capsys, plain, photos, photos / 'sub' / '4.png')
    assert told['found'][0]['photo'] == 'sub/4.png' and told['space'] == 'backbone'
    assert told['found'][0]['score'] == pytest.approx(1, abs=1e-5)


def test_a_text_needs_a_joint_space(plain, photos, capsys):
    said = refused(capsys, 'search', plain, photos, 'a dog')
    assert 'has no joint space of images and texts, as the methods clip, loctex and mct learn it' in said
    assert not (photos / '.vlrep-search').exists()  # before any photo is read


def test_what_is_no_folder_or_no_query_is_refused(joint, photos, tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts' / 'a.txt').write_text('a dog')
    for folder in ('empty', 'texts'):
        assert 'not a single image file (jpg, jpeg' in refused(capsys, 'search', joint, tmp_path / folder, 'a dog')
    assert 'no such folder with photos' in refused(capsys, 'search', joint, tmp_path / 'gone', 'a dog')
    assert 'no such folder with photos' in refused(capsys, 'search', joint, photos / '0.png', 'a dog')
    assert 'the query is empty' in refused(capsys, 'search', joint, photos, ' ')
    assert 'dog.jpg: no such image file' in refused(capsys, 'search', joint, photos, 'dog.jpg')
    assert 'must end with .html' in refused(capsys, 'search', joint, photos, 'a dog', '--out', 'page.pdf')
    (tmp_path / 'a.html').mkdir()
    assert 'is a folder' in refused(capsys, 'search', joint, photos, 'a dog', '--out', tmp_path / 'a.html')
    assert not (photos / '.vlrep-search').exists()


def test_damaged_photos_are_counted_and_named(joint, photos, capsys):
    (photos / '1.png').write_bytes((photos / '1.png').read_bytes()[:300])
    (photos / 'sub' / '5.png').write_text('')
    for _ in range(2):  # when they are read, and when they are known
        told, err = searched(capsys, joint, photos, 'a dog')
        assert '2 of 6 photos cannot be read: 1.png: damaged' in err and 'sub/5.png' in err
        assert set(told['corrupt']) == {'1.png', 'sub/5.png'} and len(told['found']) == told['photos'] == 4
    # what the index has to say stands before it
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(['search', str(joint), str(photos), 'a dog', '--max-corrupt', '1'])
    assert (
        e.value.code == 2
        and '2 of 6 photos cannot be read, more than --max-corrupt 1 allows' in capsys.readouterr().err
    )
    for path in photos.rglob('*.png'):
        path.write_text('no photo')
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(['search', str(joint), str(photos), 'a dog'])
    assert e.value.code == 2 and '6 of 6 photos cannot be read' in capsys.readouterr().err


def test_a_name_that_is_not_utf8_is_named(joint, plain, photos, tmp_path, capsys):
    odd = os.fsencode(photos) + b'/a\xff.png'
    shutil.copy(os.fsencode(photos / '0.png'), odd)
    for _ in range(2):
        told, err = searched(capsys, joint, photos, 'a dog')
        assert r"1 of 7 photos cannot be read: 'a\udcff.png': the name is not UTF-8" in err and told['photos'] == 6
    os.remove(odd)
    assert searched(capsys, joint, photos, 'a dog')[1] == ''
    shutil.copy(os.fsencode(photos / '0.png'), odd)
    said = refused(capsys, 'embed', joint, photos, '--out', tmp_path / 'a.npy')
    assert r"a\udcff.png': the name is not UTF-8, rename the file" in said
    main(['caption', str(plain), str(photos)])
    assert r'a\udcff.png' + '\t' in capsys.readouterr().out


def test_photos_that_are_new_changed_or_gone_are_noticed(joint, photos, capsys):
    searched(capsys, joint, photos, 'a dog')
    assert searched(capsys, joint, photos, 'a cat')[1] == ''  # all are known
    (photos / '0.png').unlink()
    shutil.copy(photos / '1.png', photos / 'new.png')
    scene('test', 7, size=64).load().save(photos / '2.png')
    told, err = searched(capsys, joint, photos, 'a dog')
    assert '6 photos (2 read, 1 gone)' in err
    scores = {f['photo']: f['score'] for f in told['found']}
    assert scores['new.png'] == pytest.approx(scores['1.png'], abs=1e-6) and '0.png' not in scores
    new = vlrep.load(joint)
    expected = float(new.embed_image(photos / '2.png') @ new.embed_text('a dog'))
    assert scores['2.png'] == pytest.approx(expected, abs=1e-5)


def test_each_run_has_an_index_of_its_own(joint, plain, photos, tmp_path, capsys):
    other = untrained(tmp_path / 'other', 'clip', **SMALL | dict(visual_width=16))
    first, _ = searched(capsys, joint, photos, 'a dog')
    second, err = searched(capsys, other, photos, 'a dog')
    assert '6 photos (6 read' in err and first['found'] != second['found']
    again, err = searched(capsys, joint, photos, 'a dog')
    assert again == first and err == ''
    # vectors of another run in the place of this one's
    a, b = (p.parent for p in sorted((photos / '.vlrep-search').glob('*/index.json')))
    for path in (a, b):
        shutil.move(path, tmp_path / path.name)
    shutil.move(tmp_path / a.name, b)
    shutil.move(tmp_path / b.name, a)
    again, err = searched(capsys, joint, photos, 'a dog')
    assert again == first and 'are of different weights or a different folder; the index is rebuilt' in err


def test_an_index_may_lie_elsewhere(joint, photos, tmp_path, capsys, monkeypatch):
    searched(capsys, joint, photos, 'a dog', '--index', tmp_path / 'index')
    assert not (photos / '.vlrep-search').exists() and list((tmp_path / 'index').glob('*/vectors.npy'))
    (photos / '.vlrep-search').write_text('a file in its place')
    assert 'name another folder with --index DIR' in refused(capsys, 'search', joint, photos, 'a dog')
    (photos / '.vlrep-search').unlink()
    monkeypatch.setattr(os, 'access', lambda path, mode: mode != os.W_OK)  # as on a read-only disk
    assert '(no permission); name another folder with --index DIR' in refused(capsys, 'search', joint, photos, 'a dog')


def test_an_index_that_was_interrupted_is_continued(joint, photos, capsys, monkeypatch):
    monkeypatch.setattr(photo_vectors, '_CHUNK', 2)
    m = vlrep.load(joint)
    embed = Pretrained.photo_vectors
    calls = []

    def stops(self, dataset, *args):
        calls.append(len(dataset))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(self, dataset, *args)

    monkeypatch.setattr(Pretrained, 'photo_vectors', stops)
    with pytest.raises(KeyboardInterrupt):
        m.photo_index(photos, log=str)
    index = m.photo_index(photos, log=str)
    assert calls == [2, 2, 2, 2] and len(index) == 6
    np.testing.assert_allclose(index.vectors[-1], m.embed_image(photos / 'sub' / '5.png'), atol=1e-6)


def test_one_place_keeps_the_indices_of_several_folders(joint, photos, tmp_path, capsys):
    other = tmp_path / 'others'
    shutil.copytree(photos, other)
    scene('test', 20, size=64).load().save(other / '0.png')
    size = max((folder / '0.png').stat().st_size for folder in (photos, other))
    for folder in (photos, other):  # photos of the same name, size and time
        os.truncate(folder / '0.png', size)
    os.utime(other / '0.png', ns=((photos / '0.png').stat().st_mtime_ns,) * 2)
    first, _ = searched(capsys, joint, photos, 'a dog', '--index', tmp_path / 'index')
    second, err = searched(capsys, joint, other, 'a dog', '--index', tmp_path / 'index')
    assert '(6 read, 0 gone)' in err and second['found'] != first['found']
    again, err = searched(capsys, joint, photos, 'a dog', '--index', tmp_path / 'index')
    assert again == first and err == ''


def test_a_page_shows_the_query_and_the_photos(joint, photos, tmp_path, capsys):
    shutil.copy(photos / '0.png', photos / 'a & <b>.png')
    page = tmp_path / 'page.html'
    for _ in range(2):  # an older page is replaced
        main(['search', str(joint), str(photos), str(photos / '0.png'), '--top', '3', '--out', str(page)])
    text = page.read_text()
    assert text.count('<img') == 4 and 'the query' in text and 'a &amp; &lt;b&gt;.png' in text


def test_vectors_are_written_with_ids_and_their_space(joint, plain, photos, tmp_path, capsys):
    for run, space, width in ((joint, 'joint', None), (plain, 'backbone', vlrep.load(plain).backbone.width)):
        out = tmp_path / f'{space}.npy'
        capsys.readouterr()
        main(['embed', str(run), str(photos / 'sub'), str(photos / '0.png'), '--out', str(out), '--workers', '0'])
        said = capsys.readouterr().out
        assert ('joint space' if space == 'joint' else 'features of the backbone') in said
        about = json.loads(out.with_suffix('.json').read_text())
        assert about['space'] == space and about['ids'] == [
            str(photos / n) for n in ('sub/4.png', 'sub/5.png', '0.png')
        ]
        vectors = np.load(out)
        m = vlrep.load(run)
        assert vectors.dtype == np.float32 and width in (None, vectors.shape[1])
        np.testing.assert_allclose(vectors[2], m.photo_vectors(photos / '0.png'), atol=1e-6)


def test_parquet_holds_the_same(joint, photos, tmp_path):
    parquet = pytest.importorskip('pyarrow.parquet')
    main(['embed', str(joint), str(photos), '--out', str(tmp_path / 'a.parquet'), '--workers', '0'])
    main(['embed', str(joint), str(photos), '--out', str(tmp_path / 'a.npy'), '--workers', '0'])
    table = parquet.read_table(tmp_path / 'a.parquet')
    assert table['id'].to_pylist() == json.loads((tmp_path / 'a.json').read_text())['ids']
    assert (np.float32(table['vector'].to_pylist()) == np.load(tmp_path / 'a.npy')).all()
    assert table.schema.metadata[b'space'] == b'joint'


def test_a_file_that_vectors_cannot_go_to_is_refused(joint, photos, tmp_path, capsys, monkeypatch):
    def said(*words):
        return refused(capsys, 'embed', joint, *words)

    assert 'must end with .npy, .parquet, .safetensors' in said(photos, '--out', tmp_path / 'a.csv')
    for name in ('a.npy', 'a.json'):  # the file, and that of its ids
        (tmp_path / name).write_text('precious')
        assert f'{tmp_path / name} exists already' in said(photos, '--out', tmp_path / 'a.npy')
        assert (tmp_path / name).read_text() == 'precious'
        (tmp_path / name).unlink()
    monkeypatch.setattr(photo_vectors, 'find_spec', lambda name: None)
    assert 'pip install pyarrow' in said(photos, '--out', tmp_path / 'a.parquet')
    assert 'PHOTOS is missing' in said('--out', tmp_path / 'a.npy')
    assert '--data world: is for a dataset' in said(photos, '--data', 'world', '--out', tmp_path / 'a.npy')
    (photos / 'none').mkdir()
    assert 'not a single image file' in said(photos / 'none', '--out', tmp_path / 'a.npy')
    for name in ('0.png', '1.png'):
        (photos / name).write_text('no photo')
    assert '2 of 6 images cannot be read, at most 1' in said(photos, '--out', tmp_path / 'a.npy', '--workers', 0)
    assert not list(tmp_path.glob('a.*'))


def test_captions_of_a_folder_are_named(plain, photos, capsys):
    main(['caption', str(plain), str(photos)])
    lines = capsys.readouterr().out.splitlines()
    names = ['0.png', '1.png', '2.png', '3.png', 'sub/4.png', 'sub/5.png']
    assert [l.split('\t')[0] for l in lines] == [str(photos / name) for name in names]
    assert [l.split('\t')[1] for l in lines] == vlrep.load(plain).caption([photos / name for name in names])
    Image.new('RGB', (8, 8)).save(photos / 'sub' / 'in.jpg')
    (photos / '0.png').write_text('no photo')
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(['caption', str(plain), str(photos)])
    out, err = capsys.readouterr()
    assert e.value.code == 1 and out.splitlines()[0] == f'{photos / "0.png"}\t' and out.count('\n') == 7
    assert '0.png: damaged' in err


def test_a_run_without_captions_says_what_it_has(joint, photos, capsys):
    said = refused(capsys, 'caption', joint, photos / '0.png')
    assert 'capabilities: backbone, embed_image, embed_text (features of images: `embed`; photos for a text' in said
