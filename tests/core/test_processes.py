"""Processes whose end the other side has to hear: workers that cannot hand over what they read, or hang; children whose
parent is killed; other ways to start processes, and the rules of other systems"""

import os
import pickle
import signal
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from ranks import TAGS
from tools import QUICK, SIZES, sets

from vlrep.data.records import ImageFileDataset
from vlrep.training.run_folder import Run, open_run_folder

# 3 MB a batch, by two workers and by none; `then` is called in between
EPOCH = """
import os, sys, time, numpy as np, torch
from vlrep.data.loader import StatefulLoader
from vlrep.data.records import ArrayDataset
pixels = np.random.default_rng(0).integers(0, 255, (64,256,256,3), np.uint8)
source = ArrayDataset(pixels, 'photos', captions=[['a dog']]*64)
plain = [b for b,_ in StatefulLoader(source, 16, device='cpu')]
def epoch(workers=2):
    begun, dl = time.monotonic(), StatefulLoader(source, 16, workers=workers, device='cpu')
    try: got = [b for b,_ in dl]
    except (OSError, ValueError) as e: print('refused:', e)
    else:
        assert len(got) == 4
        for a,b in zip(plain, got): assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        print('the same')
    dl.close()
    assert time.monotonic()-begun < 20
"""


def did(code, *words, **kw):
    "What a program printed, and said on standard error"
    p = forked.run(code, words, **kw)
    assert p.returncode == 0, p.stdout[-500:] + p.stderr[-1500:]
    return p.stdout.splitlines(), p.stderr.splitlines()


# ---------------------------------------------------------------- what workers need

MOUNT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def mount(*words): return libc.mount(*(w if w is None or isinstance(w, int) else w.encode() for w in words))
if libc.unshare(0x20000) or mount('none', '/', None, 0x44000, None) or mount('none', '/dev/shm', 'tmpfs', 0, 'size=1m'):
    print('not permitted')
    os._exit(99)
"""


def test_batches_come_with_small_shared_memory():
    "As in a container: batches come all the same, and one line says why that takes longer"
    p = forked.run(MOUNT + EPOCH + 'epoch()')
    if p.returncode == 99:
        pytest.skip('file systems cannot be mounted here')
    assert (p.returncode, p.stdout) == (0, 'the same\n'), p.stderr[-1000:]
    (line,) = p.stderr.splitlines()
    for part in ('photos: 3.1 MB of a batch', '/dev/shm has no room', 'of 1.0 MB', '--shm-size=8g', '--workers 0'):
        assert part in line, line


FULL = """
def full(self): raise RuntimeError('unable to allocate shared memory(shm) for file </torch_7>: No space left (28)')
torch.Tensor.share_memory_ = full
"""


def test_batches_come_without_shared_memory():
    "The same where nothing can be mounted"
    out, err = did(EPOCH + FULL + 'epoch()')
    assert out == ['the same'] and len(err) == 1 and 'not shared' in err[0]


@pytest.mark.parametrize('n', [12, 16, 24, 32, 64])
def test_few_open_files_give_batches_or_one_line(n):
    "Whatever the limit: the batches, or one line that names it, and nothing else; within seconds"
    out, err = did(EPOCH + f'import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({n}, {n}))\nepoch()')
    assert len(out) == 1 and len(err) <= 1 and not any('Traceback' in line for line in err), (out, err)
    if out == ['the same']:
        assert n > 14
    else:
        assert n < 48 and all(part in out[0] for part in (str(n), 'ulimit -n 1024', '--workers 0')), out


NO_MORE = """
import errno, os, threading
def fork(): raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')
def start(self): raise RuntimeError("can't start new thread")
"""


@pytest.mark.parametrize('what', ['os.fork = fork', 'import multiprocessing.popen_fork as p; p.Popen.__init__ = start'])
def test_a_limit_on_processes_is_one_line(what):
    "As under `ulimit -u`"
    out, err = did(EPOCH + NO_MORE + what.replace('= start', '= lambda *a: start(a)') + '\nepoch()')
    assert not err and out == [
        'refused: [Errno 11] photos: 2 workers cannot be started (Resource temporarily '
        'unavailable): the limit of processes is reached: ulimit -u, or --workers 0'
    ]


def test_a_bus_error_names_its_usual_cause():
    "Names its usual cause"
    hurt = 'ArrayDataset.images = lambda self, idx: os.kill(os.getpid(), 7)\nepoch()'
    out, err = did(EPOCH + hurt)
    assert 'was killed by SIGBUS (often because /dev/shm is full: docker run --shm-size=8g' in out[0], out


# ---------------------------------------------------------------- stuck

STUCK = """
import os, sys, time
from vlrep.cli import main
from vlrep.data.records import ArrayDataset
home, images, left = os.getpid(), ArrayDataset.images, [3]
def stuck(self, idx):
    left[0] -= os.getpid() != home
    if left[0] < 0: time.sleep(600)
    return images(self, idx)
ArrayDataset.images = stuck
main(sys.argv[1:])
"""


def test_a_stop_while_a_worker_is_stuck_saves_what_was_trained(tmp_path):
    "What was trained is saved, and the process ends within seconds"
    out = tmp_path / 'run'
    words = ['pretrain', *TAGS, '--workers', '2', '--save-every', '1', '--out', out]
    p = forked.Program(STUCK, words, tmp_path)
    try:
        for _ in range(1200):
            if len(Run(out).saved()) > 2 or p.poll() is not None:
                break
            time.sleep(0.05)
        time.sleep(1)
        workers = p.forks()
        p.send_signal(signal.SIGTERM)
        assert p.wait(20) == 143, p.said()
    finally:
        p.kill()
    err = p.said()[1]
    assert err.count('\n') == 1 and 'stopped by SIGTERM after step' in err and f'vlrep resume {out}' in err
    assert open_run_folder(out).state()['step'] >= 3 and workers and not any(alive(pid) for pid in workers)


# ---------------------------------------------------------------- children end with their parent


def alive(pid):
    "Is it there, and no zombie?"
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def gone(pids, seconds=20):
    "Have all ended after so long?"
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [p for p in pids if alive(p)]
    for p in left:
        os.kill(p, signal.SIGKILL)
    return not left


WORKERS = (
    EPOCH
    + """
home = os.getpid()
ArrayDataset.images = lambda self, idx: time.sleep(600)
from threading import Thread
Thread(target=epoch, daemon=True).start()
time.sleep(600)
"""
)
JOB = """
import json, sys, time
from pathlib import Path
from vlrep.studies.runs import _started
_started(dict(folder='job-of-nobody'), Path(sys.argv[1]))
time.sleep(600)
"""
SCENES = """
import sys, time
from vlrep.datasets.world import dataset
dataset._HELPER = 'import time; time.sleep(600)'
dataset.world('train', 1600, size=16)
"""


@pytest.mark.parametrize(
    'code,n,after', [(WORKERS, 2, 0), (WORKERS, 2, 1), (JOB, 1, 0), (JOB, 1, 1.0), (SCENES, 2, 0), (SCENES, 2, 0.5)]
)
def test_children_end_with_a_killed_parent(code, n, after, tmp_path):
    "Workers, jobs of a study, processes that draw: at once, or some seconds after they began"
    # a job would end by itself: it has no contents
    (tmp_path / 'torch.py').write_text('import time; time.sleep(600)')
    p = forked.Program(code, [tmp_path], tmp_path, {**os.environ, 'VLREP_CACHE': str(tmp_path)})
    try:
        until = time.monotonic() + 60
        while len(p.forks()) < n and p.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(after)
        children = p.forks()
    finally:
        p.kill()
    assert len(children) == n and gone(children)


# ---------------------------------------------------------------- other systems


def test_workers_that_are_no_forks_read_the_same_batches():
    "Workers that are no forks, as on macOS and Windows: the same batches"
    out, _ = did('import torch.multiprocessing as mp; mp.set_start_method("spawn")' + EPOCH + 'epoch(1)')
    assert out == ['the same']


def test_data_that_cannot_be_sent_to_a_worker_is_refused_in_one_line():
    "Where it is no fork: one line"
    out, err = did(
        'import torch.multiprocessing as mp; mp.set_start_method("spawn")' + EPOCH + 'source.own = lambda: 3\nepoch()'
    )
    assert not err and out[0].startswith('refused: photos: what is read cannot be sent'), out
    assert '--workers 0' in out[0], out


def test_photos_can_be_sent_to_a_worker(tmp_path):
    "Pages that forks share are not sent, and the images are those of the files"
    for k in range(3):
        Image.fromarray(np.full((20, 30, 3), 60 * k, np.uint8)).save(tmp_path / f'{k}.png')
    source = ImageFileDataset([tmp_path / f'{k}.png' for k in range(3)], 512)
    want = source.images(range(3))
    sent = pickle.dumps(source)
    got = pickle.loads(sent).images(range(3))
    assert len(sent) < 10_000 and all(torch.equal(a, b) for a, b in zip(want, got))


HIDE = """
import sys
for name in [m for m in sys.modules if m.split('.')[0] == 'vlrep']: del sys.modules[name]
for name in ('fcntl', 'resource', 'termios', 'pwd', 'grp'): sys.modules[name] = None        # no such module
import importlib, pkgutil, vlrep
for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.'): importlib.import_module(m.name)
from vlrep.data.workers import open_file_limit
print(open_file_limit())
"""


def test_the_library_is_imported_without_modules_that_only_unix_has():
    "All modules of the library are imported without them"
    assert did(HIDE)[0] == ['0']


WINDOWS = """
import errno, fcntl, os, stat, sys
sync, opened = os.fsync, os.open
def fsync(fd):
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY: raise OSError(errno.EBADF, 'Bad file descriptor')
def open_(path, flags, *args, **kw):
    if not isinstance(path, int) and os.path.isdir(path): raise PermissionError(errno.EACCES, 'Permission denied', path)
    return opened(path, flags, *args, **kw)
os.fsync, os.open = fsync, open_
for name in ('pread', 'pwrite', 'posix_fallocate'): delattr(os, name)
from vlrep.cli import main
main(['shards', '--data', 'world', '--scenes', '16', '--valid', '16', '--test', '40', '--out', 'shards'])
SMALL = [w for c in SIZES for w in ('--set', c)]
main(['pretrain', *sys.argv[1:], '--data', 'webdataset', '--root', 'shards', '--out', 'photos'])
main(['pretrain', *sys.argv[1:], *SMALL, '--out', 'scenes'])
"""


def test_a_run_is_written_by_the_rules_of_windows(tmp_path):
    "No folder can be opened, what is only read cannot be pushed to the disk, and there is no `pread`"
    words = [
        '--method',
        'rotnet',
        '--threads',
        '1',
        *sets(['size=32', 'steps=2', 'warmup=1', 'visual_depth=10', 'visual_width=8', 'bs=8']),
    ]
    did(
        QUICK + f'SIZES = {SIZES}' + WINDOWS,
        *words,
        cwd=tmp_path,
        env={**os.environ, 'VLREP_CACHE': str(tmp_path / 'cache')},
    )
    for name in ('photos', 'scenes'):
        assert open_run_folder(tmp_path / name).results() and not open_run_folder(tmp_path / name).missing()
