"""What goes wrong on the way, done on purpose: each test injects one fault and checks what was promised

Faults of images and captions are tested with their readers (tests/datasets and the notebooks of nbs/datasets), stops
and kills in test_resume.py, padding and order in methods/test_invariance.py.
"""

import errno
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from fastai.callback.core import Callback
from forked import COMMAND, Program
from forked import start as program
from resuming import STEPS, Ask, Crash, everything, make, same, train
from run_folders import flip, in_child, resign, rows
from tools import FOUR_STEPS, quiet, refused, sets

from vlrep.core.run_files import read_log
from vlrep.data.loader import StatefulLoader, _unwatched
from vlrep.data.workers import begin_worker
from vlrep.datasets.world.dataset import world
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import run_spec
from vlrep.methods.base import METHODS
from vlrep.methods.supervised.method import SupervisedModel
from vlrep.training.interrupts import StopOnSignal, StopSignal, TrainingInterrupted
from vlrep.training.resume import resume
from vlrep.training.run_folder import Run, open_run_folder


@pytest.fixture(scope='module')
def stopped(tmp_path_factory, source):
    path = tmp_path_factory.mktemp('stopped') / 'run'
    train(path, source, 9)
    return path


@pytest.fixture
def run(tmp_path, stopped):
    "A run stopped at step 9, with checkpoints of the steps 6 and 9"
    return Path(shutil.copytree(stopped, tmp_path / 'run'))


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
    return tmp_path_factory.mktemp('whole') / 'run'


@pytest.fixture(scope='module')
def whole(whole_run, source):
    return train(whole_run, source)


# ---------------------------------------------------------------- a process is killed while it writes a checkpoint


def test_a_kill_in_mid_write_leaves_the_last_checkpoint(run, source, whole, monkeypatch):
    save = torch.save

    def dying(obj, to, **kw):
        b = io.BytesIO()
        save(obj, b, **kw)
        to.write(b.getvalue()[: len(b.getvalue()) // 2])
        to.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr('vlrep.training.run_folder.torch.save', dying)
    before = Run(run).saved()
    assert in_child(lambda: train(run, source)) == -signal.SIGKILL
    # the old ones stand, the torn one is aside
    assert Run(run).saved() == before and open_run_folder(run).state()['step'] == 9 and [p for p in run.rglob('.*.tmp')]
    monkeypatch.setattr('vlrep.training.run_folder.torch.save', save)
    l = train(run, source)
    same(everything(l), everything(whole))
    assert not [p for p in run.rglob('.*.tmp')]


# ---------------------------------------------------------------- a checkpoint cannot be written


def test_a_full_disk_leaves_old_checkpoints_and_can_be_saved_later(run, source, whole):
    "Loud; old checkpoints stand; what is in memory can be trained on and saved once there is room"

    def work():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with Run.reopen(run) as r:
            l = make(r, source)
            resume(l, r)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            with pytest.raises(OSError) as e:
                l.fit_steps(STEPS)
            assert e.value.errno == errno.EFBIG and l.train_state.step == 12
            assert r.saved() == [6, 9] and r.state()['step'] == 9 and not [p for p in run.rglob('.*.tmp')]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            l.fit_steps(STEPS)
            same(everything(l), everything(whole))
            assert r.state()['step'] == STEPS

    assert in_child(work) == 0


def test_a_full_disk_at_the_shell_is_one_line(tmp_path):
    "One line, exit code 1, and the folder can be taken up"
    code = 'import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (102_400, 102_400))'  # `ulimit -f 100`
    p = Program(
        f'{code}\n{COMMAND}',
        ['pretrain', '--out', tmp_path / 'run', '--method', 'supervised', *sets(FOUR_STEPS)],
        tmp_path,
    )
    out, err = p.communicate(timeout=120)
    assert p.returncode == 1 and err.strip().count('\n') == 0 and 'File too large' in err, err
    # nothing was saved: the name is free again
    assert not (tmp_path / 'run').exists()


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can become somebody else')
def test_a_folder_without_permission_is_one_line(run):
    "Root may write anywhere, so somebody else tries"
    with tempfile.TemporaryDirectory() as d:
        os.chmod(d, 0o755)
        shutil.copytree(run, Path(d) / 'run')

        def work():
            os.setgid(65534)
            os.setuid(65534)
            with pytest.raises(ValueError, match='new: cannot write there'):
                Run.create(Path(d) / 'new', recipe={}, method='m', data='d', seed=0)
            with pytest.raises(ValueError, match='run: cannot write there'):
                Run.reopen(Path(d) / 'run')
            # reading is allowed
            assert open_run_folder(Path(d) / 'run').state()['step'] == 9

        assert in_child(work) == 0


def test_a_read_only_place_is_refused(capsys):
    err = refused(capsys, 'pretrain', '--out', '/proc/vlrep/run', '--method', 'supervised', *sets(FOUR_STEPS))
    assert '/proc/vlrep/run: cannot write there' in err


# ---------------------------------------------------------------- damaged, foreign and hostile checkpoints


def without(key):
    def harm(d):
        s = torch.load(d / 'state.pt', weights_only=True)
        key(s)
        torch.save(s, d / 'state.pt')
        resign(d)

    return harm


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Evil.mark),)


def evil_state(d):
    torch.save(Evil(), d / 'state.pt')
    resign(d)


def evil_weights(d):
    (d / 'model.safetensors').write_bytes(pickle.dumps(Evil()))
    resign(d)


HARM = {
    'one byte short': (
        lambda d: (d / 'state.pt').write_bytes((d / 'state.pt').read_bytes()[:-1]),
        'state.pt: truncated',
    ),
    'one bit': (lambda d: flip(d / 'model.safetensors'), 'model.safetensors: damaged'),
    'empty': (lambda d: (d / 'state.pt').write_bytes(b''), 'state.pt: empty'),
    'missing': (lambda d: (d / 'model.safetensors').unlink(), 'model.safetensors: missing'),
    'no manifest': (lambda d: (d / 'manifest.json').unlink(), 'manifest.json: no such file'),
    'no optimiser': (
        without(lambda s: s['training'].pop('optimiser')),
        'state.pt: does not fit (not a training state: optimiser missing)',
    ),
    'empty optimiser': (
        without(lambda s: s['training']['optimiser']['inner']['state'].clear()),
        'state.pt: does not fit (the optimiser knew',
    ),
    'no training': (without(lambda s: s.pop('training')), 'state.pt: contains no training state'),
    'a pickle with code as state': (evil_state, 'state.pt: contains more than data'),
    'a pickle with code as weights': (evil_weights, 'model.safetensors: damaged, not safetensors'),
}


@pytest.mark.parametrize('what', HARM)
def test_a_damaged_checkpoint_is_refused_by_name(run, source, tmp_path, what):
    "Path and reason, and never another checkpoint instead"
    harm, says = HARM[what]
    Evil.mark = tmp_path / 'owned'
    harm(run / 'steps/000009')
    with Run.reopen(run) as r:
        l = make(r, source)
        before = everything(l)
        with pytest.raises(ValueError) as e:
            resume(l, r)
        assert str(run / 'steps/000009') in str(e.value) and says in str(e.value), e.value
        assert not Evil.mark.exists() and r.saved() == [6, 9]
        if (
            says.split(':')[1].split()[0] in ('truncated', 'damaged', 'empty', 'missing')
            and 'not safetensors' not in says
        ):
            assert '[6]' in str(e.value)


def test_a_checkpoint_of_another_model_is_refused(run, source, tmp_path):
    train(tmp_path / 'tags', source, 9, method='supervised')
    shutil.rmtree(run / 'steps/000009')
    shutil.copytree(tmp_path / 'tags/steps/000009', run / 'steps/000009')
    with Run.reopen(run) as r, pytest.raises(ValueError, match='model.safetensors: the weights of a different model'):
        resume(make(r, source), r)


# ---------------------------------------------------------------- broken numbers


class Break(Callback):
    "Spoil some steps: pictures, loss or gradient"

    order = 4

    def __init__(self, what, steps):
        self.what = what
        self.steps = steps

    @property
    def now(self):
        return self.learn.training and self.learn.train_state.step in self.steps

    def before_batch(self):
        if self.now and self.what == 'pictures':
            b = self.learn.xb[0]
            spoiled = b.get('region_feats', b['images'])  # regions that are kept stand for the pictures
            spoiled[(0,) * spoiled.ndim] = math.nan

    def after_loss(self):
        if self.now and self.what == 'loss':
            self.learn.loss_grad = self.learn.loss_grad * math.inf

    def before_step(self):
        if self.now and self.what == 'gradient':
            g = next(self.model.parameters()).grad
            g[(0,) * g.dim()] = math.nan


@pytest.mark.parametrize('method', METHODS)
def test_a_broken_step_is_left_out(tmp_path, source, method):
    "Each kind alone, then each once more in the rest of the run"
    kinds = ['pictures', 'loss', 'gradient']
    train, valid = source
    with Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3) as r:
        l = make(r, (train, valid.subset(range(8))), method, bs=8)
        l.finite.log = r / 'skipped.jsonl'
        for at, what in zip((3, 5, 7), kinds):
            l.fit_steps(at)
            before = [p.clone() for p in l.model.parameters()]
            l.fit_steps(at + 1, [Break(what, (at,))])
            assert all(torch.equal(a, b) for a, b in zip(before, l.model.parameters())), what
        l.fit_steps(STEPS, [Break(what, (at,)) for at, what in zip((9, 11, 13), kinds)])
        assert (
            l.train_state.skipped == 6
            and l.train_state.step == STEPS
            and all(v.isfinite().all() for v in l.model.state_dict().values())
        )
        notes = [json.loads(s) for s in (r / 'skipped.jsonl').read_text().splitlines()]
        assert [n['step'] for n in notes] == [4, 6, 8, 10, 12, 14]
        assert all(len(n['samples']) == 8 and set(n['samples']) <= set(train.ids) for n in notes)
        assert [('gradient' in n['why']) for n in notes] == [False, False, True] * 2
        assert all(math.isfinite(row['train_loss']) for row in r.log())


def test_many_broken_steps_end_the_run(tmp_path, source):
    "With the samples of the batch and the last good checkpoint"
    with Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3) as r:
        l = make(r, source)
        l.finite.limit = 3
        with pytest.raises(ValueError) as e:
            l.fit_steps(STEPS, [Break('loss', range(7, 99))])
        assert 'the training loss is inf at step 10, the last of 3 bad steps in a row; samples [' in str(
            e.value
        ) and f'the last checkpoint is that of step 6 in {r.path}' in str(e.value)
        assert any(i in str(e.value) for i in source[0].ids) and all(
            v.isfinite().all() for v in r.weights('last').values()
        )


def test_left_out_steps_are_counted_over_a_stop(tmp_path, source):
    "Left out before and after a stop: the same bits, the same count"

    def go(path, stops):
        for stop in stops:
            old = (path / 'recipe.json').exists()
            r = Run.reopen(path) if old else Run.create(path, recipe={}, method='m', data='d', seed=3)
            with r:
                l = make(r, source)
                l.finite.log = r / 'skipped.jsonl'
                resume(l, r)
                try:
                    l.fit_steps(abs(stop), [Break('loss', (3, 8, 11)), *([Crash(-stop - 1)] if stop < 0 else [])])
                except ZeroDivisionError:
                    pass
        return l

    # the crash after step 10 comes four steps after the last checkpoint; step 9 is left out, and noted, twice
    a = go(tmp_path / 'a', [STEPS])
    b = go(tmp_path / 'b', [6, -11, 9, 12, STEPS])
    assert (
        all(torch.equal(v, b.model.state_dict()[k]) for k, v in a.model.state_dict().items())
        and a.train_state.skipped == b.train_state.skipped == 3
    )
    assert (tmp_path / 'a/skipped.jsonl').read_text() == (tmp_path / 'b/skipped.jsonl').read_text()


def test_a_broken_part_is_remembered_over_a_stop(tmp_path, source):
    "An infinite loss whose gradient is finite, in the first of three parts of a step; stopped after the second"

    class Lift(Callback):
        order = 4
        run_valid = False

        def after_loss(self):
            if self.learn.train_state.batch == 15:
                self.learn.loss_grad = self.learn.loss_grad + math.inf

    def go(path, leave=None):
        old = (path / 'recipe.json').exists()
        r = Run.reopen(path) if old else Run.create(path, recipe={}, method='m', data='d', seed=3)
        with r:
            l = make(r, source, accumulate=3)
            l.finite.log = r / 'skipped.jsonl'
            resume(l, r)
            note = StopSignal()
            try:
                l.fit_steps(STEPS, [Lift(), *([Ask(note, leave), StopOnSignal(note)] if leave else [])])
            except TrainingInterrupted:
                pass
        return l

    a = go(tmp_path / 'a')
    go(tmp_path / 'b', 17)
    b = go(tmp_path / 'b')
    same(everything(b), everything(a))
    assert a.train_state.skipped == b.train_state.skipped == 1
    assert (tmp_path / 'a/skipped.jsonl').read_text() == (tmp_path / 'b/skipped.jsonl').read_text()


def test_damaged_images_are_remembered_over_a_stop(tmp_path, source):
    with Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3) as r:
        l = make(r, source)
        l.dls.train.corrupt[5] = 'cannot be read'
        l.fit_steps(7)
        new = make(r, source)
        resume(new, r)
        assert new.dls.train.corrupt == {5: 'cannot be read'}


# ---------------------------------------------------------------- a process that reads images is killed


def test_a_killed_reader_is_one_line_and_the_run_can_go_on(tmp_path):
    "One line, exit code 1, the last checkpoint stands, and the run can go on"
    out = tmp_path / 'run'
    p = program(
        [
            'pretrain',
            '--threads',
            1,
            '--workers',
            2,
            '--save-every',
            3,
            '--out',
            out,
            '--method',
            'supervised',
            *sets([*FOUR_STEPS, 'steps=100000']),
        ],
        tmp_path,
    )
    try:
        for _ in range(2400):
            if Run(out).saved() or p.poll() is not None:
                break
            time.sleep(0.05)
        os.kill(p.forks()[0], signal.SIGKILL)
        _, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert (
        p.returncode == 1
        and err.strip().count('\n') == 0
        and 'reads images' in err.replace('worker', 'a process that reads images')
    ), err
    assert open_run_folder(out).state()['step'] > 0


def test_half_a_batch_of_a_killed_worker_is_not_waited_for():
    "Also if PyTorch's error about it was lost: the other worker keeps the pipe open, and the rest would never come"
    loader = StatefulLoader(world('train', 24, size=32), 4, workers=2)
    batches = iter(loader)
    next(batches)
    it = loader._reader._iterator
    _unwatched(it)
    it._workers[0].kill()
    it._workers[0].join()
    os.write(it._worker_result_queue._writer.fileno(), struct.pack('!i', 10**9) + b'half')
    with pytest.raises(ChildProcessError, match='worker 0'):
        list(batches)


def test_lost_connections_of_a_worker_are_not_printed(capfd):
    "Its thread that hands batches over may find the main process gone; any other error is printed"

    def work():
        begin_worker(0)
        for e in (ConnectionResetError('gone'), EOFError(), ValueError('odd')):
            sys.excepthook(type(e), e, None)

    assert in_child(work) == 0 and capfd.readouterr().err.splitlines() == ['ValueError: odd']


# ---------------------------------------------------------------- two runs in one folder


def test_two_runs_in_one_folder_are_refused(tmp_path, capsys):
    out = tmp_path / 'run'
    p = program(['pretrain', '--out', out, '--method', 'supervised', *sets([*FOUR_STEPS, 'steps=100000'])], tmp_path)
    try:
        for _ in range(1200):
            if Run(out).saved():
                break
            time.sleep(0.05)
        assert 'is in use by another process' in refused(capsys, 'resume', out)
        assert 'already contains a run' in refused(
            capsys, 'pretrain', '--out', out, '--method', 'supervised', *sets(FOUR_STEPS)
        )
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 143
    finally:
        p.kill()
        p.communicate()
    assert open_run_folder(out).state()['step'] > 0


# ---------------------------------------------------------------- logger, clock, memory, strange places


def test_a_log_that_cannot_be_written_is_written_later(tmp_path, source, monkeypatch, whole, whole_run):
    "Training goes on, the rows are kept and written later"
    write = os.write
    fails = [5]

    def full(fd, data):
        if b',' in data and fails[0] > 0:
            fails[0] -= 1
            raise OSError(errno.ENOSPC, 'No space left on device')
        return write(fd, data)

    monkeypatch.setattr('vlrep.training.logging.os.write', full)
    lines = []
    with Run.create(tmp_path / 'run', recipe={}, method='m', data='d', seed=3) as r:
        l = make(r, source)
        l.log_csv.log = lines.append
        l.fit_steps(STEPS)
    assert rows(tmp_path / 'run') == rows(whole_run) and len(lines) == 1 and 'No space left on device' in lines[0]


def test_a_clock_that_jumps_changes_no_time(tmp_path, source, monkeypatch):
    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() + 1e6 * math.sin(1e3 * now()))
    l = train(tmp_path / 'run', source)
    t = [r['seconds'] for r in read_log(tmp_path / 'run' / 'log.csv')]
    assert t == sorted(t) and 0 <= t[0] and t[-1] < 600 and 0 < l.train_state.elapsed < 600


def test_out_of_memory_advises_smaller_micro_batches_that_work(capsys, monkeypatch, tmp_path):
    "A micro-batch with the same effective batch, and with it the job runs"
    forward = SupervisedModel.forward

    def little(self, batch):
        if len(batch['images']) > 8 and self.training:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
        return forward(self, batch)

    monkeypatch.setattr(SupervisedModel, 'forward', little)
    words = ['pretrain', '--method', 'supervised', '--out', tmp_path / 'run', *sets(FOUR_STEPS)]
    assert '--accumulate 2 does the same steps of 16 in 2 parts of 8' in refused(capsys, *words)
    out = pretrain(run_spec('supervised', FOUR_STEPS, accumulate=2), out=tmp_path / 'run', log=quiet)
    assert open_run_folder(out).results()[-1]['numbers']['steps'] == 4


def test_paths_with_spaces_and_other_alphabets_work(tmp_path, monkeypatch):
    "Spaces, accents and other alphabets in a relative path"
    (tmp_path / 'Läufe und ラン').mkdir()
    monkeypatch.chdir(tmp_path / 'Läufe und ラン')
    out = pretrain(run_spec('supervised', FOUR_STEPS), out='erster Lauf/№ 1', log=quiet)
    assert (
        open_run_folder(out).state()['step'] == 4
        and (tmp_path / 'Läufe und ラン' / 'erster Lauf' / '№ 1' / 'report.html').is_file()
    )


def test_a_failure_before_the_first_checkpoint_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(SupervisedModel, 'forward', lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrain(run_spec('supervised', FOUR_STEPS), out=tmp_path / 'run', log=quiet)
    assert not (tmp_path / 'run').exists()
