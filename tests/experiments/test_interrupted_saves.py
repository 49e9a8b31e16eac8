"""A run that was interrupted in its first save, or after its last; a cache that was interrupted while it was drawn

Every process here is killed, or every disk full, at one chosen moment; then the run is resumed, and compared with one
that was not interrupted.
"""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_folders import flip, in_child, rows
from tools import ENV, TWENTY_STEPS, quiet, refused, sets

import vlrep.experiments.commands
import vlrep.experiments.pretrain
import vlrep.training.run_folder
from vlrep.cli import main
from vlrep.datasets.flickr8k import write_flickr8k
from vlrep.datasets.world.dataset import scene, world
from vlrep.evaluation.base import EVALUATIONS
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import Runtime, recorded_spec, run_spec
from vlrep.training.checkpoint import Checkpointer
from vlrep.training.run_folder import Run, open_run_folder

# epochs end, and checkpoints are made, at the steps 7 and 10
TEN_STEPS = [*TWENTY_STEPS, 'scenes=100', 'valid=16', 'steps=10']
FIRST = 7


def go(out, log=quiet, **runtime):
    return pretrain(run_spec('supervised', TEN_STEPS, threads=1), Runtime(**runtime), out, log)


def again(run, changes=(), log=quiet, **how):
    return resume_run(run, recorded_spec(run).changed(changes), log=log, **how)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return go(tmp_path_factory.mktemp('whole') / 'run')


# a save writes the best checkpoint first, then gives its files a second name as the last one
HALVES = {1: (torch, 'save'), 2: (vlrep.training.run_folder, 'link_file')}


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    "A run that was killed between the two halves of its first save"
    run = tmp_path_factory.mktemp('killed') / 'run'

    def work():
        setattr(*HALVES[2], lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        go(run)

    assert in_child(work) == -signal.SIGKILL
    assert (run / 'best/state.pt').is_file() and Run(run).saved() == [] and (run / 'recipe.json').is_file()
    return run


@pytest.fixture
def run(killed, tmp_path):
    return Path(shutil.copytree(killed, tmp_path / 'run'))


def same_run(a, b):
    for which in ('last', 'best'):
        w = open_run_folder(b).weights(which)
        assert all(torch.equal(v, w[k]) for k, v in open_run_folder(a).weights(which).items())
    assert rows(a) == rows(b) and open_run_folder(a).state('best')['step'] == open_run_folder(b).state('best')['step']


# ---------------------------------------------------------------- in the first save


def test_a_run_killed_in_its_first_save_goes_on_to_the_same_bits(run, whole):
    "It goes on from the best checkpoint, which is of the same step, to the same bits and numbers"
    lines = []
    again(run, log=lines.append)
    same_run(run, whole)
    assert f'resuming from step {FIRST}, that of the best checkpoint: there is no other' in lines
    x, y = (open_run_folder(r).results() for r in (run, whole))
    assert len(x) == 1 and x[0]['numbers']['table'] == y[0]['numbers']['table']
    assert not [p for p in run.rglob('.*.tmp')] and not open_run_folder(run).missing()


@pytest.mark.parametrize('at,step', [(FIRST, FIRST), ('best', FIRST), (0, 0)])
def test_after_a_torn_first_save_a_step_can_be_named(run, whole, quick, at, step):
    lines = []
    again(run, at=str(at), log=lines.append)
    same_run(run, whole)
    assert any(
        s.startswith(f'resuming from step {step}' if step else 'no checkpoint: starting from the beginning')
        for s in lines
    )


def test_after_a_torn_first_save_an_inexact_resume_works(run, quick):
    lines = []
    again(run, inexact=True, changes=['bs=8', 'steps=30'], log=lines.append)
    assert (
        any('no longer exact' in s for s in lines)
        and open_run_folder(run).results()[0]['numbers']['steps'] == 30
        and open_run_folder(run).state()['step'] == 30
    )


def test_after_a_torn_first_save_other_options_are_refused(run, capsys):
    "What cannot be done says what can"
    assert f'there is the best one, {run}/best: ask for best' in refused(capsys, 'resume', run, '--at', 5)
    assert f'or: vlrep resume {run}' in refused(
        capsys, 'pretrain', '--out', run, '--method', 'supervised', *sets(TEN_STEPS)
    )
    assert 'Unrecognized options: --out' in refused(capsys, 'resume', run, '--out', run)
    assert f'there is the best one, {run}/best: ask for best' in refused(
        capsys, 'caption', run, 'x.jpg', '--which', 'last'
    )


def test_after_a_torn_and_a_damaged_save_the_message_says_how_to_begin_anew(run, whole, quick, capsys):
    "No checkpoint that can be used: the message says how to begin anew, and that works"
    flip(run / 'best/model.safetensors')
    err = refused(capsys, 'resume', run, '--threads', 1)
    assert 'best/model.safetensors: damaged' in err and '--at 0 restarts the run' in err
    again(run, at='0')
    same_run(run, whole)


def test_a_run_killed_before_any_checkpoint_begins_anew(tmp_path, whole, quick):
    run = tmp_path / 'run'

    def work():
        setattr(*HALVES[1], lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        go(run)

    assert in_child(work) == -signal.SIGKILL and not (run / 'best').exists()
    again(run)
    same_run(run, whole)


def test_a_disk_full_in_the_first_save_leaves_only_the_recipe(tmp_path, monkeypatch, whole, quick):
    "The recipe stays beside a checkpoint; one line names the file and the reason"

    def no_links(path, new):
        raise OSError(errno.EPERM, 'Operation not permitted')

    def full(old, copy):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'link', no_links)
    monkeypatch.setattr(shutil, 'copyfileobj', full)
    run = tmp_path / 'run'
    lines = []
    with pytest.raises(OSError) as e:
        go(run, log=lines.append)
    assert (
        e.value.errno == errno.ENOSPC
        and e.value.filename == str(run / f'steps/{FIRST:06d}')
        and e.value.strerror == 'the disk is full (No space left on device)'
    )
    assert lines[-1] == f'the checkpoints are kept; when the cause is mended: vlrep resume {run}'
    monkeypatch.undo()
    again(run)
    same_run(run, whole)


@pytest.mark.parametrize('k', [1, 2])
def test_a_worker_that_dies_in_the_first_save_is_an_error(tmp_path, monkeypatch, quick, k):
    "The error names a checkpoint that is there, or none, and the folder is gone"

    def dead(*a):
        raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed.')

    monkeypatch.setattr(*HALVES[k], dead)
    run = tmp_path / 'run'
    with pytest.raises(ChildProcessError) as e:
        go(run)
    assert 'last checkpoint' not in str(e.value) and ('best' in str(e.value)) == (k == 2) == run.exists()
    if k == 2:
        assert str(e.value).endswith(f'; the only checkpoint is {run}/best')
        monkeypatch.undo()
        assert open_run_folder(run).state('best')['step'] == FIRST


def test_a_torn_tokenizer_is_made_again(tmp_path, monkeypatch, quick):
    "Killed while the tokenizer was written: it is made again"
    run = tmp_path / 'run'
    write = Path.write_bytes

    def torn(self, b):
        write(self.with_name('tokenizer.model') if self.name.startswith('.tokenizer') else self, b[:99])
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        Path.write_bytes = torn
        pretrain(run_spec('token_cls', [*TEN_STEPS, 'vocab=300', 'width=32', 'heads=2']), out=run, log=quiet)

    assert in_child(work) == -signal.SIGKILL and (run / 'tokenizer.model').stat().st_size == 99
    again(run)
    assert open_run_folder(run).results() and open_run_folder(run).part('tokenizer.model').stat().st_size > 999


# ---------------------------------------------------------------- after the last save

TORN = {
    'empty': lambda b: b'',
    'without its end': lambda b: b[:-1],
    'half': lambda b: b[: len(b) // 2],
    'zeros': lambda b: bytes(len(b)),
    'missing': None,
}


@pytest.mark.parametrize('how', TORN)
def test_a_torn_result_is_written_again(whole, tmp_path, quick, how):
    run = Path(shutil.copytree(whole, tmp_path / 'run'))
    p = run / 'result.jsonl'
    b = p.read_bytes()
    lines = []
    p.unlink() if TORN[how] is None else p.write_bytes(TORN[how](b))
    again(run, log=lines.append)
    (new,) = open_run_folder(run).results()
    (old,) = open_run_folder(whole).results()
    assert (
        new['numbers']['held_loss'] == old['numbers']['held_loss']
        and new['numbers']['steps'] == 10
        and not open_run_folder(run).missing()
    )
    assert new['changes'] == old['changes'] and {'baselines=False', 'jitter=0.3'} <= set(new['changes'])
    assert not any('flip_p' in c for c in new['changes'])  # it was given the value that it has anyway
    assert any('torn; it will be written again' in s for s in lines) == (how != 'missing')
    again(run, log=lines.append)
    assert 'complete, nothing is left to do' in lines[-1] and len(open_run_folder(run).results()) == 1


@pytest.mark.parametrize('how', TORN)
def test_a_torn_report_is_written_again_without_reading_images(whole, tmp_path, monkeypatch, how):
    "Only the report is written, from what is there: no image is opened, and no second result is added"
    run = Path(shutil.copytree(whole, tmp_path / 'run'))
    p = run / 'report.html'
    b = p.read_bytes()
    result = (run / 'result.jsonl').read_bytes()
    lines = []
    p.unlink() if TORN[how] is None else p.write_bytes(TORN[how](b) if how != 'without its end' else b.rstrip()[:-1])
    monkeypatch.setattr(vlrep.experiments.pretrain, 'open_splits', None)
    again(run, log=lines.append)
    assert p.read_bytes() == b and (run / 'result.jsonl').read_bytes() == result and lines == [f'report: {p}']


def test_a_run_killed_before_its_report_writes_only_the_report(tmp_path, quick):
    run = tmp_path / 'run'

    def work():
        vlrep.experiments.pretrain.write_report = lambda r: os.kill(os.getpid(), signal.SIGKILL)
        go(run)

    assert (
        in_child(work) == -signal.SIGKILL
        and not (run / 'report.html').exists()
        and len(open_run_folder(run).results()) == 1
    )
    result = (run / 'result.jsonl').read_bytes()
    again(run)
    assert (run / 'report.html').is_file() and (run / 'result.jsonl').read_bytes() == result


def test_a_damaged_line_is_not_a_torn_one(whole, tmp_path, capsys):
    run = Path(shutil.copytree(whole, tmp_path / 'run'))
    p = run / 'result.jsonl'
    p.write_bytes(b'{"a"\n' + p.read_bytes())
    assert 'result.jsonl: line 1 is damaged' in refused(capsys, 'resume', run)


# ---------------------------------------------------------------- the cache of the world


def test_a_killed_drawing_of_scenes_leaves_nothing_behind(tmp_path, monkeypatch):
    "Its helpers end with it, at any moment; what it left half drawn is removed by the next process that draws"
    stub = tmp_path / 'stub'
    cache = tmp_path / 'cache'
    stub.mkdir()
    # a helper never comes as far as to notice that nobody reads what it writes
    (stub / 'json.py').write_text('import time; time.sleep(600)')
    code = (
        f'import sys; from vlrep.datasets.world.dataset import world; sys.path.insert(0, {str(stub)!r}); '
        "world('train', 1600, size=16)"
    )
    p = subprocess.Popen([sys.executable, '-c', code], env={**ENV, 'VLREP_CACHE': str(cache)})
    end = time.monotonic() + 120

    def helpers():
        out = []
        for d in Path('/proc').iterdir():
            try:
                out += [int(d.name)] if d.name.isdigit() and str(cache).encode() in (d / 'cmdline').read_bytes() else []
            except OSError:
                pass
        return out

    try:
        while len(helpers()) < 2 and p.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert len(helpers()) == 2
        p.kill()
        p.wait()
        while helpers() and time.monotonic() < end:
            time.sleep(0.05)
        left = helpers()
    finally:
        p.kill()
        for pid in helpers():
            os.kill(pid, signal.SIGKILL)
    assert not left and list((cache / 'world').glob('.train-*.tmp'))
    monkeypatch.setenv('VLREP_CACHE', str(cache))
    world('valid', 3, size=16)
    assert not list((cache / 'world').glob('.*'))


FULL = """
import os, sys, errno
from pathlib import Path
from vlrep.datasets.world import dataset as scenes
place = Path(sys.argv[1]); os.environ['VLREP_CACHE'] = str(place)
def attempt(n, known):
    if not known: scenes.shutil.disk_usage = lambda p, old=scenes.shutil.disk_usage: old(p)._replace(free=10**12)
    try: scenes.world('train', n, size=64)
    except OSError as e:
        assert e.errno == errno.ENOSPC and str(place) in e.filename, e
        assert 'the disk is full' in e.strerror, e
    else: raise AssertionError('there was room')
    assert not [p for p in (place/'world').iterdir() if p.suffix != '.lock']
attempt(200, True)                   # 2.5 MB into 2 MB
attempt(200, False)                  # where the free space is not known: when the file is made
scenes.os.posix_fallocate = lambda fd, start, n: os.truncate(fd, start+n)
attempt(200, False)                  # where the file system cannot promise it: when a row is written, without SIGBUS
from vlrep.training.run_folder import save_checkpoint
import torch
(place/'steps').mkdir()
for large in ('weights', 'state'):
    big = dict(w=torch.zeros(900_000)); small = dict(w=torch.zeros(2))
    try: save_checkpoint(place/'steps/000013', *((big, small) if large == 'weights' else (small, big)))
    except OSError as e:
        name = dict(weights='model.safetensors', state='state.pt')[large]
        assert e.errno == errno.ENOSPC and e.filename == str(place/'steps/000013'/name), e
        assert e.strerror == 'the disk is full (No space left on device)', e
    else: raise AssertionError('there was room')
    assert not list((place/'steps').iterdir())
print('held')
"""


def test_a_full_file_system_is_one_line(tmp_path):
    "A file system of 2 MB, where the system lets us make one"
    words = [
        'unshare',
        '-rm',
        'sh',
        '-c',
        'mount -t tmpfs -o size=2m none "$0" || exit 99; shift 0; exec "$@"',
        str(tmp_path),
        sys.executable,
        '-c',
        FULL,
        str(tmp_path),
    ]
    try:
        p = subprocess.run(words, capture_output=True, text=True, env=ENV, timeout=300)
    except FileNotFoundError:
        pytest.skip('no unshare')
    if p.returncode == 99 or 'unshare:' in p.stderr:
        pytest.skip('file systems cannot be mounted here')
    assert (p.returncode, p.stdout) == (0, 'held\n'), p.stderr


def test_scenes_cut_off_while_a_run_reads_them_are_an_error(tmp_path, own_cache, whole, quick):
    "An error that names the file, not a signal; the next process draws them anew, and the run goes on"
    run = tmp_path / 'run'
    save = Checkpointer.after_epoch

    def cut(self):
        save(self)
        for p in (own_cache / 'world').glob('train-0-100-*/images.npy'):
            os.truncate(p, 4096)

    def work():
        Checkpointer.after_epoch = cut
        with pytest.raises(
            ValueError,
            match='images.npy: truncated after it was opened, row .* is gone; start again, and it will be drawn again',
        ):
            go(run)

    assert in_child(work) == 0 and open_run_folder(run).state()['step'] == FIRST
    again(run)
    same_run(run, whole)


# ---------------------------------------------------------------- photos, and where words are printed


def test_missing_test_photos_keep_the_training(tmp_path, monkeypatch):
    "Said in one line; the training is kept, and asked once the photos are back"
    write_flickr8k((scene('valid', i, size=48) for i in range(60)), tmp_path / 'photos')
    away = tmp_path / 'away'
    train = vlrep.experiments.pretrain.train_on
    moved = []

    def then_gone(*a, **kw):
        learn = train(*a, **kw)
        dataset = a[2]['test']
        away.mkdir()
        for i in range(len(dataset)):
            moved.append(Path(dataset.path(i)))
            shutil.move(moved[-1], away)
        return learn

    monkeypatch.setattr(vlrep.experiments.pretrain, 'train_on', then_gone)
    run = tmp_path / 'run'
    lines = []
    changes = ['size=32', 'width=32', 'heads=2', 'vocab=200', 'bs=16', 'steps=2', 'warmup=1', 'train=.7', 'test=.2']
    with pytest.raises(ValueError) as e:
        pretrain(run_spec('masked_lm', changes, data='flickr8k', root=tmp_path / 'photos'), out=run, log=lines.append)
    n = len(moved)
    assert (
        n > 5
        and str(e.value).startswith(f'{n} of {n} test photos cannot be read, and at least 2 must be: ')
        and f'vlrep resume {run}' in str(e.value)
    )
    assert f'left out: {n - 5} more' in lines and str(moved[0]) in str(e.value) and not (run / 'result.jsonl').exists()
    monkeypatch.undo()
    for p in moved:
        shutil.move(away / p.name, p)
    again(run)
    assert open_run_folder(run).results()[-1]['numbers']['steps'] == 2 and not open_run_folder(run).missing()


@pytest.mark.parametrize('encoding', ['latin-1', 'ascii'])
def test_a_path_is_printed_on_a_terminal_that_lacks_its_letters(tmp_path, monkeypatch, quick, encoding):
    "The path that a finished training prints has letters that the terminal lacks"
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, 'stdout', out)
    monkeypatch.setattr(sys, 'stderr', err)
    main(['pretrain', '--out', str(tmp_path / 'Läufe 😀'), '--method', 'supervised', *sets(TEN_STEPS)])
    out.flush()
    monkeypatch.undo()
    assert (
        '\\U0001f600/report.html' in out.buffer.getvalue().decode(encoding)
        and open_run_folder(tmp_path / 'Läufe 😀').results()
    )


def test_a_folder_name_that_is_not_utf8_is_refused_before_training(tmp_path):
    "The library that reads weights takes no such path: said before anything is trained"
    out = tmp_path / os.fsdecode(b'l\xe4ufe')
    with pytest.raises(ValueError, match='the name of the folder is not UTF-8'):
        go(out)
    assert not out.exists()


def test_a_disk_full_while_an_evaluation_is_noted_keeps_earlier_lines(run, quick, monkeypatch, tmp_path):
    "What was noted before stands; half a line of an older version does not spoil the next"
    again(run)
    log = run / 'evaluations.jsonl'
    log.write_text('{"on": "world"}\n{"on": "wor')
    old = log.read_text()
    row = dict(question='objects', metric='mAP', backbone='supervised', n=1, chance=0.0, value=1.0, low=0.0, high=2.0)
    monkeypatch.setitem(EVALUATIONS, 'world', replace(EVALUATIONS['world'], run=lambda wanted: [row]))

    def full(self, data):
        self.touch()
        raise OSError(errno.ENOSPC, 'No space left on device', str(self))

    with monkeypatch.context() as m:
        m.setattr(Path, 'write_bytes', full)
        with pytest.raises(OSError, match='No space left'):
            vlrep.experiments.commands.evaluate(run, 'world', log=quiet)
    assert log.read_text() == old and not list(run.glob('.*.tmp'))
    vlrep.experiments.commands.evaluate(run, 'world', log=quiet)
    lines = log.read_text().splitlines()
    assert lines[:2] == old.splitlines() and json.loads(lines[2])['rows'] == [row] and len(lines) == 3
