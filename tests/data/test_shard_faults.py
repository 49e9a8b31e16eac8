"""Shards as others write and damage them: which file is the photo, joined and hostile tar files, killed builds, bits

The rule of webdataset is compared with the library itself over random shards; faults are drawn from seeds.
"""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import tarfile
import tracemalloc
import warnings

import numpy as np
import pytest
from mutations import IN_PLACE, SHIFTING, mutations, within
from PIL import Image
from run_folders import in_child
from tools import NET, refused, sets

import vlrep.data.shard_index as shard_index
import vlrep.data.shards as shards
from vlrep.cli import main
from vlrep.data.image_files import IMAGE_SUFFIXES, adding_to
from vlrep.data.records import ArrayDataset
from vlrep.data.shard_index import ShardDataset, ShardIndex
from vlrep.data.shards import expand_braces, shard_members, shard_samples, write_shards
from vlrep.datasets.base import DATASETS
from vlrep.datasets.webdataset.reader import make_shards, read_webdataset

TINY = sets(['size=32', 'vocab=200', *NET, 'steps=4'])


def picture(k, form='PNG'):
    "A small image whose colour is its number"
    out = io.BytesIO()
    Image.new('RGB', (8, 8), (k * 7 % 256, k * 31 % 256, k % 256)).save(out, form)
    return out.getvalue()


def tar_of(path, files, form=tarfile.GNU_FORMAT):
    "Write files in the order of a list of (name, bytes)"
    with tarfile.open(path, 'w', format=form) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def plain(n, begin=0):
    "Files of samples with a photo and a text"
    return [
        f
        for k in range(begin, begin + n)
        for f in ((f'{k:04}.jpg', picture(k, 'JPEG')), (f'{k:04}.txt', f'photo number {k}'.encode()))
    ]


def heard(work):
    "What `work` returns, and the warnings it gives, as one text"
    with warnings.catch_warnings(record=True) as text:
        warnings.simplefilter('always')
        out = work()
    return out, '\n'.join(str(w.message) for w in text)


def captions(index):
    texts = index.captions()
    return {i: texts[k] for k, i in enumerate(index.ids(np.arange(len(index))))}


def read(root, **options):
    "The images of shards as a dataset, and what is said about them"
    return heard(lambda: read_webdataset(root, 16, **options))


def opened(root, text, **options):
    "The parts of shards; what is logged is added to the list `text`"
    webdataset = DATASETS['webdataset']
    return webdataset.open(type(webdataset.options)(**options), root, 16, ('captions',), text.append)


def narrated(data):
    return {i: data.captions[k] for k, i in enumerate(data.ids)}


# ---------------------------------------------------------------- the rule of webdataset

NAMES = ['a', 'b', 'dir/a', 'dir/b', 'x.y/a', './c', '__index__', '__a', 'ä', 'no dot', 'dir']
EXTENSIONS = ['jpg', 'JPG', 'jpeg', 'png', 'webp', 'depth.png', 'rgb.jpg', 'txt', 'TXT', 'json', 'cls', '2.json', '']


def random_files(draw):
    "Names and contents of a random shard"
    files = []
    for k in range(draw.randrange(1, 12)):
        stem = draw.choice(NAMES) + draw.choice(['', str(k % 4)])
        for extension in draw.sample(EXTENSIONS, draw.randrange(1, 5)):
            kind = extension.lower().rpartition('.')[2]
            form = dict(jpg='JPEG', jpeg='JPEG', webp='WEBP').get(kind, 'PNG')
            data = (
                f'text {k} {extension}'.encode()
                if kind == 'txt'
                else json.dumps(dict(caption=f'json {k} {extension}')).encode()
                if kind == 'json'
                else picture(draw.randrange(200), form)
                if kind in IMAGE_SUFFIXES
                else b'3'
            )
            files.append((f'{stem}.{extension}' if draw.random() < 0.95 else stem, data))
    if draw.random() < 0.2:
        draw.shuffle(files)
    return files


@pytest.mark.parametrize('seed', range(4))
def test_samples_are_those_of_webdataset(tmp_path, seed):
    "The same keys, extensions and contents; the same photo and text; the same shards refused"
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    used = failed = 0
    for k in range(60):
        files = random_files(random.Random(f'{seed} {k}'))
        path = tar_of(tmp_path / f'{k}.tar', files)
        raw = path.read_bytes()
        with open(path, 'rb') as f:
            named = (dict(d, __url__='') for d in tar_file_iterator(f))
            try:
                samples = list(group_by_keys(named))
            except ValueError:
                with pytest.raises(ValueError, match='appears twice'):
                    list(shard_samples(path))
                failed += 1
                continue
        theirs = [(d['__key__'], {e: data for e, data in d.items() if e[:2] != '__'}) for d in samples]
        ours = list(shard_samples(path))
        assert [(key, {e: raw[at : at + n] for e, (at, n) in parts.items()}) for key, parts in ours] == theirs
        index, _ = heard(lambda: ShardIndex([path], 1.0, 'jpg,jpeg,png,webp'))
        wanted = [
            (key, d) for key, d in theirs if d.keys() & {'jpg', 'jpeg', 'png', 'webp'} and d.keys() & {'txt', 'json'}
        ]
        assert list(index.ids(np.arange(len(index)))) == [key for key, _ in wanted]
        for i, (_, d) in enumerate(wanted):
            assert index.read(i) == next(d[e] for e in ('jpg', 'jpeg', 'png', 'webp') if e in d)
            text = d['txt'].decode() if 'txt' in d else json.loads(d['json'])['caption']
            assert index.captions()[i] == [text]
        used += len(wanted)
    assert used > 25 and failed > 5


def test_second_photos_with_texts_of_their_own_are_refused(tmp_path, capsys):
    "Two photos of which one has a dot too many are never mixed up: refused, or the one that is named, with its text"
    files = [
        f
        for k in range(20)
        for name, j in ((f'p{k}.2', 100 + k), (f'p{k}', k))
        for f in ((f'{name}.jpg', picture(j, 'JPEG')), (f'{name}.txt', f'photo number {j}'.encode()))
    ]
    tar_of(tmp_path / '000.tar', files)
    text = refused(capsys, 'pretrain', '--data', 'webdataset', '--root', tmp_path, '--out', tmp_path / 'run', *TINY)
    assert '20 samples contain an image with its own text' in text and '000.tar p0 (2.jpg)' in text
    assert '--image-extension jpg' in text
    for extension, first in (('jpg', 0), ('2.jpg', 100)):
        data, _ = read(tmp_path / '000.tar', image_extension=extension)
        got = narrated(data)
        assert got == {f'p{k}': [f'photo number {first + k}'] for k in range(20)}
        out = tmp_path / f'from {extension}'
        main(
            [
                'shards',
                '--data',
                'webdataset',
                '--root',
                str(tmp_path / '000.tar'),
                '--out',
                str(out),
                '--image-extension',
                extension,
            ]
        )
        assert captions(ShardIndex([out / '000000.tar'])) == got
        for i, name in enumerate(data.ids):
            assert data.image_bytes(i)[1] == picture(first + int(name[1:]), 'JPEG')


def test_further_images_and_captions_are_said(tmp_path):
    "The photo is the one with the usual extension, whatever stands before it in the tar; what else is there is counted"

    def sample(k):
        return [
            (f'{k:04}.depth.png', picture(k)),
            (f'{k:04}.jpg', picture(k + 100, 'JPEG')),
            (f'{k:04}.png', picture(k)),
            (f'{k:04}.txt', b'from the text'),
            (f'{k:04}.json', json.dumps(dict(caption='from json', alt='under alt')).encode()),
        ]

    tar_of(tmp_path / '000.tar', [f for k in range(20) for f in sample(k)])
    data, text = read(tmp_path)
    assert '20 of 20 samples have other images than jpg' in text and '000.tar 0000 (depth.png, png)' in text
    assert '20 of 20 samples have other captions under caption than in txt' in text
    assert set(map(tuple, narrated(data).values())) == {('from the text',)}
    assert data.image_bytes(7)[1] == picture(107, 'JPEG')
    data, text = read(tmp_path, image_extension='depth.png', caption_key='alt')
    assert not text and set(map(tuple, narrated(data).values())) == {('under alt',)}
    assert data.image_bytes(7) == ('png', picture(7))
    with pytest.raises(ValueError, match='20 have no image: 000.tar 0000 .depth.png'):
        read(tmp_path, image_extension='webp')
    with pytest.raises(ValueError, match='20 have no text under nothing'):
        read(tmp_path, caption_key='nothing')


def test_names_that_fit_no_rule_are_said(tmp_path):
    "Files that are no part of a sample, keys that come back, ids that come back: counted and named"
    odd = [
        ('._0000.jpg', b'x'),
        ('__MACOSX/._0000.jpg', b'x'),
        ('in/.hidden', b'x'),
        ('Thumbs.db', b'x'),
        ('.git/0.jpg', b'x'),
        ('./in/desktop.ini', b'x'),
        ('README', b'x'),
        ('__note__', b'x'),
    ]
    tar_of(tmp_path / '000.tar', odd[:6] + plain(20) + odd[6:] + plain(1))
    tar_of(tmp_path / '001.tar', plain(3, 18))
    data, text = read(tmp_path)
    assert '6 files are hidden and are left out: 000.tar ._0000.jpg' in text and '1 files have no extension' in text
    assert '__note__' not in text and len(data) == 24
    assert '1 of 24 samples have a key that came before in their shard' in text and '000.tar 0000' in text
    assert '3 of 24 samples have an id that an earlier sample has: 000.tar 0000, 001.tar 0018, 001.tar 0019' in text
    tar_of(tmp_path / 'dots.tar', [(f'./{name}', data) for name, data in plain(2)])
    assert len(list(shard_samples(tmp_path / 'dots.tar'))) == 2
    apart = tmp_path / 'apart'
    apart.mkdir()
    tar_of(apart / '000.tar', sorted(plain(20), key=lambda f: f[0][-3:]))  # first all images, then all texts
    with pytest.raises(ValueError, match='20 have no caption: .* 20 have no image'):
        read(apart)


# ---------------------------------------------------------------- texts

WRONG = {
    'latin-1': ('txt', 'süß'.encode('latin-1'), 'have a text that is not UTF-8'),
    'cp1252 in json': ('json', '{"caption": "süß"}'.encode('cp1252'), 'have a sidecar that is not UTF-8'),
    'utf-16 without a mark': ('txt', 'sun'.encode('utf-16-le'), 'have a text with zero bytes'),
    'utf-16 json without a mark': (
        'json',
        '{"text": "a"}'.encode('utf-16-be'),
        'have a sidecar that is not valid JSON',
    ),
    'half a letter': ('txt', 'süß'.encode()[:-1], 'have a text that is not UTF-8'),
    'nested': ('json', b'{"caption": ' + b'[' * 10**5, 'have a sidecar that is not valid JSON'),
    'a long number': ('json', b'{"caption": "a", "id": ' + b'9' * 5000 + b'}', 'have a sidecar that is not valid JSON'),
    'a list': ('json', b'["caption"]', 'have a sidecar that is not an object'),
    'a number': ('json', b'{"caption": 3}', 'have caption that are no text'),
    'half a character': ('json', b'{"caption": "a \\ud83d"}', 'have half a character in their text'),
    'an id of the wrong type': ('json', b'{"caption": "a", "id": {}}', 'have an id that is neither'),
}


@pytest.mark.parametrize('what', WRONG)
def test_unreadable_texts_are_refused_by_name(tmp_path, what):
    "Never learned as other letters: a few are left out, counted and named, many are refused; both say why"
    extension, data, why = WRONG[what]

    def shard(path, bad):
        return tar_of(
            path,
            plain(40)[2 * bad :]
            + [f for k in range(bad) for f in ((f'z{k}.jpg', picture(k, 'JPEG')), (f'z{k}.{extension}', data))],
        )

    path = shard(tmp_path / 'few.tar', 2)
    few, text = read(path)
    assert f'2 of 40 samples {why}' in text and 'few.tar z0 (jpg, ' in text
    assert narrated(few) == {f'{k:04}': [f'photo number {k}'] for k in range(2, 40)}
    for many, says in ((15, '15 of 40 samples cannot be read, at most 10 may be so'), (40, 'not a single image')):
        path = shard(tmp_path / f'{many}.tar', many)
        text = []
        with pytest.raises(ValueError) as e:
            opened(path, text)
        assert f'{many} of 40 samples {why}' in '\n'.join(text)
        assert says in str(e.value) and why in str(e.value) and f'{many}.tar z0' in str(e.value)
    for more in (dict(max_corrupt=15), dict(max_corrupt='50%')):
        assert len(read(tmp_path / '15.tar', **more)[0]) == 25
    with pytest.raises(ValueError, match='at most 0 may be so'):
        read(tmp_path / 'few.tar', max_corrupt=0)


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-8-sig', 'utf-16'])
def test_marked_encodings_are_read(tmp_path, encoding):
    texts = {'0': 'süß', '1': '犬と猫', '2': 'a\u2028b'}
    files = [f for k, t in texts.items() for f in ((f'{k}.jpg', picture(1, 'JPEG')), (f'{k}.txt', t.encode(encoding)))]
    files += [('3.jpg', picture(1, 'JPEG')), ('3.json', '{"text": "ßü"}'.encode(encoding))]
    got = captions(ShardIndex([tar_of(tmp_path / '0.tar', files)]))
    assert got == {'0': ['süß'], '1': ['犬と猫'], '2': ['a b'], '3': ['ßü']}


# ---------------------------------------------------------------- joined tar files


def joined_cat(a, b, out):
    out.write_bytes(a.read_bytes() + b.read_bytes())


def joined_bare(a, b, out):
    "With a single block of zeros between them"
    whole = a.read_bytes().rstrip(b'\0')
    out.write_bytes(padded(whole) + bytes(512) + b.read_bytes())


def joined_tar(a, b, out):
    if not shutil.which('tar'):
        pytest.skip('no tar')
    shutil.copy(a, out)
    done = subprocess.run(['tar', '--concatenate', '-f', out, b], capture_output=True)
    if done.returncode:
        pytest.skip('this tar does not join')


@pytest.mark.parametrize('join', [joined_cat, joined_bare, joined_tar])
def test_joined_tar_files_are_read_whole(tmp_path, join):
    a, b, c = (tar_of(tmp_path / f'{k}.tar', plain(6, 6 * k)) for k in range(3))
    join(a, b, tmp_path / 'ab.tar')
    join(tmp_path / 'ab.tar', c, tmp_path / 'abc.tar')
    got = captions(ShardIndex([tmp_path / 'abc.tar']))
    assert got == {f'{k:04}': [f'photo number {k}'] for k in range(18)}
    (tmp_path / 'tail.tar').write_bytes(a.read_bytes() + b'not a tar file')
    with pytest.raises(ValueError, match='tail.tar: damaged at byte 20,480'):
        ShardIndex([tmp_path / 'tail.tar'])


def test_a_sample_does_not_reach_over_the_seam(tmp_path):
    "The last sample of the first file and the first of the second have one key: two samples, and said"
    a = tar_of(tmp_path / 'a.tar', plain(2))
    b = tar_of(tmp_path / 'b.tar', plain(1, 1))
    joined_cat(a, b, tmp_path / 'ab.tar')
    assert [k for k, _ in shard_samples(tmp_path / 'ab.tar')] == ['0000', '0001', '0001']
    _, text = read(tmp_path / 'ab.tar')
    assert '1 of 3 samples have a key that came before' in text


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize('form', [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_those_of_tarfile(tmp_path, form):
    "Names of any length and alphabet, folders and links: name, place and size of each file"
    draw = random.Random(form)

    def name():
        parts = [''.join(draw.choices('abcä犬 .-', k=draw.choice((1, 8, 60)))) for _ in range(draw.randrange(1, 5))]
        return '/'.join(parts) if form != tarfile.USTAR_FORMAT else f'{parts[0][:30]}x'

    for _ in range(40):
        with tarfile.open(tmp_path / '0.tar', 'w', format=form) as tar:
            for _ in range(draw.randrange(8)):
                info = tarfile.TarInfo(name())
                info.type = draw.choice([tarfile.REGTYPE] * 4 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
                info.linkname = name() if info.islnk() or info.issym() else ''
                info.size = draw.choice((0, 1, 511, 512, 513, 5000)) if info.isreg() else 0
                info.mtime = draw.choice((0, 1.5, 2**34)) if form == tarfile.PAX_FORMAT else 0
                tar.addfile(info, io.BytesIO(bytes(info.size)))
        with tarfile.open(tmp_path / '0.tar', encoding='utf-8') as tar:
            theirs = [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]
        assert list(shard_members(tmp_path / '0.tar')) == theirs


def header(name, size=0, kind=tarfile.REGTYPE, **facts):
    info = tarfile.TarInfo(name)
    info.size = size
    info.type = kind
    for k, v in facts.items():
        setattr(info, k, v)
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(data):
    return data + bytes(-len(data) % 512)


def negative(size):
    return header('z.jpg', size)  # in base 256, as GNU tar writes large numbers


def pax(records, kind=tarfile.XHDTYPE):
    data = b''
    for k, v in records:
        line = f' {k}={v}\n'.encode()
        n = len(line) + 1
        while len(str(n)) + len(line) != n:
            n = len(str(n)) + len(line)
        data += str(n).encode() + line
    return header('pax', len(data), kind) + padded(data)


def long_name(name):
    return header('././@LongLink', len(name) + 1, tarfile.GNUTYPE_LONGNAME) + padded(name + b'\0')


def deep_map(blocks):
    "A sparse file whose map goes on for so many blocks"
    head = bytearray(header('z.jpg', 0, tarfile.GNUTYPE_SPARSE))
    head[482] = 1
    head[148:156] = b' ' * 8
    head[148:156] = f'{sum(head):06o}\0 '.encode()
    return bytes(head) + (bytes(504) + b'\1' + bytes(7)) * blocks + bytes(512)


HOSTILE = {
    'negative size': (negative(-512), 'z.jpg has a size of -512'),
    'negative size that goes back': (negative(-1024), 'has a size of -1024'),
    'most negative size': (negative(-(256**7)), 'has a size of -'),
    'larger than the file': (header('z.jpg', 10**6), 'cut off at byte'),
    'larger than any file': (header('z.jpg', 2**62), 'cut off at byte|has a size'),
    'negative size in pax': (pax([('size', '-512')]) + header('z.jpg', 0), 'has a size of -512'),
    'size in pax that is no number': (pax([('size', '1e3')]) + header('z.jpg', 0), 'has a size of 1e3'),
    'size of many digits': (pax([('size', '9' * 5000)]) + header('z.jpg', 0), 'has a size of 999'),
    'chained names': (long_name(b'x' * 200) * 5000, 'more than 16 headers for one file'),
    'chained pax': (pax([('path', 'y')]) * 5000, 'more than 16 headers'),
    'chained global pax': (pax([('path', 'y')], tarfile.XGLTYPE) * 5000, 'more than 16 headers'),
    'a huge name': (long_name(b'x' * 2_000_000), 'a header of 2,000,001 bytes'),
    'huge pax': (pax([('comment', 'x' * 2_000_000)]), 'a header of 2,000,0'),
    'a name larger than the file': (header('L', 2**40, tarfile.GNUTYPE_LONGNAME), 'cut off at byte'),
    'negative name': (header('L', -5, tarfile.GNUTYPE_LONGNAME), 'has a size of -5'),
    'pax without its lines': (header('p', 512, tarfile.XHDTYPE) + b'x' * 512, 'a header that cannot be understood'),
    'pax with a line of no length': (header('p', 4, tarfile.XHDTYPE) + padded(b'0 a='), 'cannot be understood'),
    'pax with a line too long': (header('p', 6, tarfile.XHDTYPE) + padded(b'99 a=b'), 'cannot be understood'),
    'a header without a file': (pax([('path', 'y')]) + bytes(512), 'where a header is expected'),
    'an endless sparse map': (deep_map(3000), ''),
}


@pytest.mark.parametrize('what', HOSTILE)
@pytest.mark.parametrize('place', ['first', 'last'])
def test_hostile_headers_end_in_one_line(tmp_path, what, place):
    "Within a second and a few megabytes: a `ValueError` with file and byte; what stands before it is whole"
    data, says = HOSTILE[what]
    good = tar_of(tmp_path / 'good.tar', plain(3)).read_bytes()
    end = [at + size for _, at, size in shard_members(tmp_path / 'good.tar')][-1]
    end = -(-end // 512) * 512
    path = tmp_path / 'bad.tar'
    path.write_bytes((data + good) if place == 'first' else good[:end] + data + bytes(1024))
    keys = [k for k, _ in shard_samples(tmp_path / 'good.tar')]
    tracemalloc.start()
    try:
        with within(5):
            if not says:
                assert [k for k, _ in shard_samples(path)] == keys
            else:
                with pytest.raises(ValueError, match=says) as e:
                    list(shard_samples(path))
                assert str(path) in str(e.value) and '\n' not in str(e.value)
                with pytest.raises(ValueError, match='1 of 1 shards are damaged'):
                    ShardIndex([path])
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


def test_members_that_are_no_plain_files(tmp_path):
    "Links, devices, sparse files: their bytes are not read as a photo; counted. Names are never paths to write to"
    a = b'photo number 7'
    odd = [
        header('l.jpg', 0, tarfile.SYMTYPE, linkname='/etc/passwd'),
        header('h.jpg', 0, tarfile.LNKTYPE, linkname='0'),
        header('d.jpg', 0, tarfile.CHRTYPE),
        header('f.jpg', 0, tarfile.FIFOTYPE),
        header('dir', 0, tarfile.DIRTYPE),
        pax([('GNU.sparse.major', '1'), ('GNU.sparse.minor', '0'), ('GNU.sparse.name', 's.jpg')])
        + header('./GNUSparseFile.0/s.jpg', 512)
        + bytes(512),
    ]
    far = [f for name in ('../../up', '/root/up') for f in ((f'{name}.jpg', picture(1, 'JPEG')), (f'{name}.txt', a))]
    tar_of(tmp_path / 'far.tar', far)
    raw = (tmp_path / 'far.tar').read_bytes()
    (tmp_path / 'odd.tar').write_bytes(b''.join(odd) + raw)
    index, text = read(tmp_path / 'odd.tar')
    assert '4 files are links or devices and are left out: odd.tar l.jpg, odd.tar h.jpg' in text
    assert '1 files are stored sparse' in text and 'odd.tar s.jpg' in text
    assert list(index.ids) == ['../../up', '/root/up'] and index.captions[0] == ['photo number 7']


def test_strange_names_are_shown_in_one_line(tmp_path):
    "Control characters and bytes that are no UTF-8 in names reach neither the log as they are nor break it"
    files = [('a\x1b[31m\nb.jpg', picture(1)), (b'\xff.jpg'.decode(errors='surrogateescape'), picture(1))]
    tar_of(tmp_path / '0.tar', plain(3) + files + [(n[:-3] + 'txt', b'x') for n, _ in files[1:]])
    _, text = read(tmp_path / '0.tar')
    assert '\x1b' not in text and text.encode() and r'a\x1b[31m\nb' in text and 'half a character' in text


@pytest.mark.parametrize('gap', [3 << 30, 9 << 30])
def test_shards_of_several_gigabytes_are_read(tmp_path, gap):
    "A sample behind 3 GB, and behind a member of 9 GB, whose size is written in base 256"
    part = tar_of(tmp_path / 'part.tar', plain(2)).read_bytes()
    with open(tmp_path / 'large.tar', 'wb') as f:
        f.write(header('filler.bin', gap))
        f.seek(gap, os.SEEK_CUR)
        f.write(part)
    index = ShardIndex([tmp_path / 'large.tar'])
    assert captions(index) == {'0000': ['photo number 0'], '0001': ['photo number 1']} and index.where(0)[1] > gap
    assert index.read(1) == picture(1, 'JPEG')


# ---------------------------------------------------------------- names of shards


@pytest.mark.parametrize('pattern', ['{000..999}{000..999}{000..999}', '{0..999999999999}', '{a,b}' * 40, '{0,1}' * 30])
def test_brace_patterns_are_counted_before_they_are_expanded(tmp_path, capsys, pattern):
    tracemalloc.start()
    try:
        with within(5):
            text = refused(capsys, 'pretrain', '--data', 'webdataset', '--root', f'{tmp_path}/{pattern}.tar')
            assert 'more than a million names' in text
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_brace_patterns_are_those_of_bash(tmp_path):
    if not shutil.which('bash'):
        pytest.skip('no bash')
    draw = random.Random(0)

    def piece():
        return draw.choice(
            ['x', '/', '.tar', '{a,b}', '{1..3}', '{03..01}', '{09..11}', '{8..10}', '{q,,r}', '{2..2}', '{8..010}']
        )

    for _ in range(30):
        pattern = ''.join(piece() for _ in range(draw.randrange(1, 5)))
        theirs = subprocess.run(['bash', '-c', f'printf "%s\\n" @{pattern}'], capture_output=True, text=True).stdout
        assert expand_braces(f'@{pattern}') == theirs.splitlines()


def test_parts_are_folders_or_names(tmp_path, capsys):
    "train/ and val/, with and without test/; other spellings; the log says what became of them"

    def part(name, begin, n):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        tar_of(tmp_path / name, plain(n, begin))

    layouts = {
        'a': ('a/train/0.tar', 'a/val/0.tar'),
        'b': ('b/train/0.tar', 'b/validation/0.tar', 'b/test/0.tar'),
        'c': ('c/cc-train-0.tar', 'c/cc-val-0.tar'),
        'd': ('d/train/0.tar', 'd/test/0.tar'),
    }
    for root, names in layouts.items():
        for name, begin, n in zip(names, (0, 100, 200), (40, 8, 6)):
            part(name, begin, n)
    (tmp_path / 'a' / 'train' / '._0.tar').write_bytes(b'junk')
    (tmp_path / 'a' / '__MACOSX').mkdir()
    (tmp_path / 'a' / '__MACOSX' / '0.tar').write_bytes(b'junk')
    (tmp_path / 'a' / 'other').mkdir()
    for root, test in (('a', 100), ('b', 200), ('c', 100), ('d', 100)):
        text = []
        parts = opened(tmp_path / root, text, valid=0.1)
        ids = {k: {int(i) for i in v.ids} for k, v in parts.items()}
        assert ids['train'] and ids['train'] | (ids['valid'] if root != 'b' else set()) == set(range(40))
        assert ids['test'] == set(range(test, test + (6 if root == 'b' else 8))) and not ids['train'] & ids['valid']
        assert ids['valid'] == set(range(100, 108)) if root == 'b' else ids['valid'] < set(range(40))
        assert 'split' in ' '.join(text) and [v.split for v in parts.values()] == ['train', 'valid', 'test']
        assert ('1 hidden files are no shards' in ' '.join(text)) == (root == 'a')
    parts = opened(tmp_path / 'a' / '*' / '0.tar', [])
    assert sorted(map(int, parts['test'].ids)) == list(range(100, 108))


# ---------------------------------------------------------------- the index


@pytest.fixture
def two(tmp_path, own_cache):
    "Two shards, and a cache of their own for the index"
    return [tar_of(tmp_path / f'{k}.tar', plain(5, 5 * k)) for k in range(2)]


def index_folder(tmp_path):
    return next((tmp_path / 'cache' / 'shards').glob('*/index.json')).parent


def test_a_changed_index_is_made_again(two, tmp_path):
    "Bits, zeros and ends of each of its files: the same captions and photos, and a line that says so"
    want = captions(ShardIndex(two))
    folder = index_folder(tmp_path)
    tried = 0
    for name in sorted(p.name for p in folder.iterdir()):
        whole = (folder / name).read_bytes()
        if not whole:
            continue
        for what, data in mutations(whole, name, 6, IN_PLACE):
            if data == whole:
                continue
            (folder / name).unlink()
            (folder / name).write_bytes(data)
            index, text = heard(lambda: ShardIndex(two))
            assert captions(index) == want and index.read(7) == picture(7, 'JPEG'), (name, what)
            assert 'was damaged and is made again' in text or name == 'index.json', (name, what)
            tried += 1
    assert tried > 60
    (folder / 'text').unlink()
    assert captions(heard(lambda: ShardIndex(two))[0]) == want


def test_options_have_an_index_of_their_own(two):
    a = ShardIndex(two)
    assert len(ShardIndex(two, caption_key='x')) == len(ShardIndex(two, image_extension='png')) == 0
    assert captions(ShardIndex(two)) == captions(a)


def test_shards_are_read_without_pread(two, monkeypatch):
    "As on Windows"
    monkeypatch.delattr(os, 'pread')
    data = ShardDataset(ShardIndex(two), 16)
    assert data.captions[3] == ['photo number 3'] and data.image_bytes(6)[1] == picture(6, 'JPEG')


def test_a_shard_cut_off_while_it_is_open_is_an_error(two):
    index = ShardIndex(two)
    index.read(0)
    os.truncate(two[0], 600)
    with pytest.raises(ValueError, match='0.tar: the shard was changed or cut off'):
        index.read(4)


# ---------------------------------------------------------------- killed


def dying(monkeypatch, owner, name, at):
    "From the `at`-th call on, `owner.name` is the end of the process, before its work or, for at < 0, behind it"
    true = getattr(owner, name)
    calls = []

    def replaced(*args, **kw):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        out = true(*args, **kw)
        if len(calls) == -at:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    monkeypatch.setattr(owner, name, replaced)


def left_behind(folder):
    return [p for p in folder.rglob('.*') if p.name.endswith(('.tmp', '.old'))]


MOMENTS = [
    (shard_index, '_scan', 1),
    (shard_index, '_scan', 2),
    (shard_index, '_scan', -2),
    (shard_index, 'write_index', 1),
    (shard_index, 'write_index', -1),
    (os, 'replace', 1),
    (os, 'replace', 2),
    (os, 'replace', -2),
]


@pytest.mark.parametrize('owner,name,at', MOMENTS)
@pytest.mark.parametrize('again', [False, True])
def test_killed_builds_of_an_index_leave_nothing_behind(two, tmp_path, owner, name, at, again):
    "At any moment, also where a damaged index is replaced: the next one is whole, and nothing is left behind"
    want = captions(ShardIndex(two))
    folder = index_folder(tmp_path)
    if again:
        (folder / 'text').write_bytes(b'x')
    else:
        shutil.rmtree(folder)

    def work():
        with pytest.MonkeyPatch.context() as m:
            dying(m, owner, name, at)
            warnings.simplefilter('ignore')
            ShardIndex(two)

    assert in_child(work) == -signal.SIGKILL
    other = tar_of(tmp_path / 'other.tar', plain(2))
    ShardIndex([other])  # another index cleans up, too
    assert not left_behind(tmp_path / 'cache')
    assert captions(heard(lambda: ShardIndex(two))[0]) == want and not left_behind(tmp_path / 'cache')


def scenes(n=6):
    return ArrayDataset(
        np.arange(n * 192, dtype=np.int64).astype(np.uint8).reshape(n, 8, 8, 3),
        'drawn',
        captions=[[f'number {k}'] for k in range(n)],
    )


class Parts:
    "A dataset in three parts, for `make_shards`"

    name = 'drawn'
    provides = {'captions'}
    options = None

    def check_root(self, root):
        pass

    def whole(self, root, size, options, max_corrupt):
        return None

    def open(self, *args):
        return {k: scenes() for k in ('train', 'valid', 'test')}


@pytest.mark.parametrize(
    'owner,name,at',
    [
        (shards, 'write_shard', 1),
        (shards, 'write_shard', 4),
        (shards, 'write_shard', -9),
        (os, 'replace', 3),
        (os, 'replace', 13),
    ],
)
def test_killed_writers_of_shards_leave_all_or_none(tmp_path, monkeypatch, owner, name, at):
    "All shards of all parts are there, or none; the next call writes them, and cleans up"
    monkeypatch.setattr('vlrep.datasets.webdataset.reader.DATASETS', {'drawn': Parts()})

    def work():
        with pytest.MonkeyPatch.context() as m:
            dying(m, owner, name, at)
            make_shards('drawn', out=tmp_path / 'out', per_shard=2, log=str)

    assert in_child(work) == -signal.SIGKILL and not (tmp_path / 'out').exists()
    paths = make_shards('drawn', out=tmp_path / 'out', per_shard=2, log=str)
    assert len(paths) == 9 and all(p.is_file() for p in paths) and not left_behind(tmp_path)


def test_what_killed_writers_leave_in_a_folder_is_removed_by_the_next(tmp_path):
    "What `write_csv` and its kind leave behind is removed by the next"

    def work():
        with adding_to(tmp_path / 'photos') as new:
            (new / 'a.jpg').write_bytes(b'a')
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL and list(tmp_path.glob('.photos*'))
    with adding_to(tmp_path / 'photos') as new:
        (new / 'a.jpg').write_bytes(b'a')
    assert [p.name for p in tmp_path.iterdir()] == ['photos']


# ---------------------------------------------------------------- writing


def test_written_texts_are_read_back(tmp_path):
    "NUL, quotes, separators of lines, ids with dots; the same bytes each time"
    text = ['a \0 b', 'quotes " and \\', 'x\u2028y', '犬', 'a.b/c']
    data = ArrayDataset(
        np.zeros((5, 8, 8, 3), np.uint8),
        'odd',
        captions=[[s] for s in text],
        ids=['a.b.jpg', 'x', '../y', 'z z', '.hidden'],
    )
    paths = write_shards(data, tmp_path / 'a')
    again = write_shards(data, tmp_path / 'b')
    assert paths[0].read_bytes() == again[0].read_bytes()
    got = captions(ShardIndex(paths))
    assert got == {i: [' '.join(s.replace('\0', '').split())] for i, s in zip(data.ids, text)}


def test_a_name_that_is_no_text_is_refused(tmp_path):
    data = ArrayDataset(np.zeros((1, 8, 8, 3), np.uint8), 'odd', captions=[['a']], ids=['\udcff.jpg'])
    with pytest.raises(ValueError, match='is not UTF-8; rename the file'):
        write_shards(data, tmp_path / 'a')
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- random damage

FIELDS = dict(name=(0, 100), mode=(100, 108), size=(124, 136), kind=(156, 157), magic=(257, 265), prefix=(345, 500))


def signed(data, draw):
    "Another byte or two in a field of one of the headers, whose checksum is made to fit"
    heads = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b'ustar']
    at = draw.choice(heads)
    a, b = FIELDS[draw.choice(['size', *FIELDS])]
    for _ in range(draw.choice((1, 2, 12))):
        data[at + draw.randrange(a, b)] = draw.choice((*b'\0 -0179LKxgSV12345./\n', draw.randrange(256), 0x80, 0xFF))
    if draw.random() < 0.2:
        data[at + 124 : at + 136] = draw.choice((b'\xff' * 12, b'\xff' * 10 + b'\xfe\0', b'\x80' + bytes(10) + b'\1'))
    data[at + 148 : at + 156] = b' ' * 8
    data[at + 148 : at + 156] = f'{sum(data[at : at + 512]):06o}\0 '.encode()


@pytest.mark.parametrize('seed', range(3))
def test_mutated_shards_are_read_or_refused_by_name(tmp_path, own_cache, seed):
    """Any bytes: a `ValueError` or a dataset, within seconds

    A sample whose own bytes stand where they were has its own caption and its own photo.
    """
    files = plain(6) + [('9.json', b'{"captions": ["a", "b"]}'), ('9.png', picture(9))]
    files += [(f'{"long" * 40}.{e}', d) for e, d in (('jpg', picture(3, 'JPEG')), ('txt', b'a long name'))]
    form = [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT][seed]
    if seed == 2:
        files = files[:-2]
    path = tar_of(tmp_path / '0.tar', files, form)
    raw = path.read_bytes()
    index = ShardIndex([path])
    want = captions(index)
    photos = {i: index.read(k) for k, i in enumerate(index.ids(np.arange(len(index))))}
    begins = {}
    ends = {}
    last = 0
    for name, at, size in shard_members(path):  # with the headers in front of it
        key = name.partition('.')[0]
        begins.setdefault(key, last)
        last = ends[key] = -(-(at + size) // 512) * 512
    refusals = opens = 0
    for what, data in mutations(raw, seed, 200, IN_PLACE | SHIFTING | dict(signed=signed)):
        path.write_bytes(data)
        try:
            with within(5):
                index, _ = heard(lambda: ShardIndex([path], 1.0))
        except ValueError:
            refusals += 1
        else:
            opens += 1
            got = captions(index)
            shown = {i: index.read(k) for k, i in enumerate(index.ids(np.arange(len(index))))}
            for i in got.keys() & want.keys() if what not in SHIFTING else ():
                own = slice(begins[i], ends[i])
                if data[own] == raw[own]:
                    assert (got[i], shown[i]) == (want[i], photos[i]), what
        shutil.rmtree(own_cache)
    assert refusals + opens == 200 and opens > 120
