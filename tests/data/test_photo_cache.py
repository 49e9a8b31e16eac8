"""Photos that are kept on the disk: batches have the same bits, whoever writes the file and however that ends"""

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from vlrep.core.seeding import rng
from vlrep.data.loader import StatefulLoader
from vlrep.data.photo_cache import cached_photos, photo_cache
from vlrep.data.records import ImageFileDataset

SIDE = 96


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "Forty photos of several kinds and shapes, and what they look like without a cache"
    folder = tmp_path_factory.mktemp('photos')
    kinds = ('RGB', 'jpg'), ('L', 'jpg'), ('CMYK', 'jpg'), ('RGBA', 'png'), ('I;16', 'png'), ('P', 'gif')
    for i in range(40):
        mode, suffix = kinds[i % len(kinds)]
        h, w = (int(n) for n in rng('shape', i).integers(20, 300, 2))
        noise = rng('noise', i).integers(0, 256, (h, w, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        if mode == 'I;16':
            image = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
        turn = Image.Exif()
        turn[274] = 1 + i % 8
        image.convert(mode).save(folder / f'{i:02d}.{suffix}', **(dict(exif=turn) if suffix == 'jpg' else {}))
    dataset = ImageFileDataset(sorted(folder.iterdir()), SIDE, 'forty', keep=0, split='train')
    return dataset, dataset.images(range(40))


def connected(dataset, folder, log=str):
    with photo_cache(folder, log):
        return cached_photos(dataset)


def forked(work):
    "Do `work` in a child process"
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


def assert_complete(dataset, photos):
    "Are all rows there, so that no photo is opened, and are they those without a cache?"
    with patch('vlrep.data.records.open_image', side_effect=AssertionError('a photo was opened')):
        for a, b in zip(dataset.images(range(40)), photos[1]):
            assert torch.equal(a, b)
    size = SIDE**2 * 3
    stored = np.load(dataset.stored.path)
    for i in range(40):
        assert np.array_equal(stored[i, :size], photos[1][0][i].permute(1, 2, 0).numpy().ravel())


def test_every_kind_of_photo_has_the_same_bits(photos, tmp_path):
    "Written by one process, read by the loader's workers, in the order of an epoch"
    kept = connected(photos[0], tmp_path)
    for dataset in (kept, kept, connected(photos[0], tmp_path)):
        for workers in (0, 2):
            loaders = [StatefulLoader(d, 7, train=True, workers=workers) for d in (photos[0], dataset)]
            for (a, *_), (b, *_) in zip(*loaders, strict=True):
                assert all(torch.equal(a[k], b[k]) for k in ('images', 'hw', 'id'))
            for loader in loaders:
                loader.close()
    assert_complete(kept, photos)


def test_processes_that_are_killed_leave_nothing_wrong(photos, tmp_path):
    "Three processes write the same rows and are killed, until all rows are there; then none is opened again"
    kept = connected(photos[0], tmp_path)
    draw = random.Random(0)
    for _ in range(12):
        children = [forked(lambda: kept.images(rng('order', os.getpid()).permutation(40))) for _ in range(3)]
        time.sleep(draw.uniform(0.002, 0.03))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for a, b in zip(connected(photos[0], tmp_path).images(range(0, 40, 9)), photos[1]):
            assert torch.equal(a, b[::9])
    for pid in [forked(lambda: kept.images(range(40))) for _ in range(2)]:
        os.waitpid(pid, 0)
    assert_complete(kept, photos)


def test_two_processes_that_begin_at_once_make_one_file(photos, tmp_path):
    "The second waits for the first, and the file is announced once"

    def announce(line):
        (tmp_path / f'{os.getpid()}.txt').write_text(line)
        time.sleep(0.2)  # the others arrive before the file is made

    def begin():
        connected(photos[0], tmp_path / 'cache', announce).images(range(40))

    for pid in [forked(begin) for _ in range(3)]:
        os.waitpid(pid, 0)
    (said,) = tmp_path.glob('*.txt')
    assert '0.00111 GB for 40 photos of forty' in said.read_text()
    (file,) = (tmp_path / 'cache').glob('*.npy')
    assert_complete(connected(photos[0], tmp_path / 'cache'), photos)


def test_a_photo_that_changes_is_read_again(photos, tmp_path):
    "Also one of the same size, in a run that goes on, and in one that begins later"
    paths = [shutil.copy(photos[0].path(i), tmp_path) for i in range(6)]
    plain = ImageFileDataset(paths, SIDE, keep=0)
    kept = connected(plain, tmp_path / 'cache')
    kept.images(range(6))
    data = Path(paths[3]).read_bytes()
    Path(paths[0]).write_bytes(data)
    Path(paths[3]).write_bytes(Path(photos[0].path(9)).read_bytes()[: len(data)].ljust(len(data), b'\0'))
    os.utime(paths[3], ns=(1, 1))
    for dataset in (kept, connected(plain, tmp_path / 'cache')):
        for rows in ([0], [1, 2, 4]):
            for a, b in zip(dataset.images(rows), plain.images(rows)):
                assert torch.equal(a, b)
        try:
            expected = plain.images([3])[0]
        except ValueError as e:
            with pytest.raises(type(e)):
                dataset.images([3])
        else:
            assert torch.equal(dataset.images([3])[0], expected)


def test_a_full_disk_is_said_before_anything_is_read(photos, tmp_path, monkeypatch):
    "If it is known to be too small, and if the room cannot be taken; nothing is left of the file"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=1_000_000))
        with pytest.raises(ValueError, match=r'--cache .*: 0.00111 GB for 40 photos of forty, and 0.001 GB are free'):
            connected(photos[0], tmp_path / 'cache')

    def full(*args):
        raise OSError(errno.ENOSPC, 'No space left on device')

    with monkeypatch.context() as m:
        m.setattr(os, 'posix_fallocate', full)
        with pytest.raises(OSError, match='the disk is full.*train-96-.*npy'):
            connected(photos[0], tmp_path / 'cache')
    assert not list((tmp_path / 'cache').glob('*.npy*')) and not list((tmp_path / 'cache').glob('.*.tmp'))
    connected(photos[0], tmp_path / 'cache').images([0])
