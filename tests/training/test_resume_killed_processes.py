"A run whose process is shot, and taken up, is the run that nobody disturbed; another run is refused"

import os
import shutil
import signal
import time

import forked
import pytest
import torch
from run_folders import rows
from tools import NET, SIZES, refused, sets

from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import recorded_spec, run_spec
from vlrep.training.checkpoint import Checkpointer
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import Run, open_run_folder

JOB = [*SIZES, 'vocab=300', 'size=32', 'steps=64', 'baselines=False', *NET]


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed') / 'run'
    return pretrain(run_spec(changes=JOB, seed=5, threads=1), out=out, log=lambda s: None)


def shoot(words, cwd, run, after, sig, wait=120):
    "Start, wait for a checkpoint later than step `after`, send the signal: exit code and stderr"
    p = forked.start(words, cwd)
    end = time.monotonic() + wait
    try:
        while p.poll() is None and max(Run(run).saved(), default=0) <= after and time.monotonic() < end:
            time.sleep(0.02)
        assert p.poll() is None, p.said()[1]
        p.send_signal(sig)
        out, err = p.communicate(timeout=wait)
    finally:
        p.kill()
    return p.returncode, err


@pytest.fixture(scope='module')
def shot(undisturbed, tmp_path_factory):
    """A run stopped by SIGTERM, then taken up and killed by SIGKILL, then taken up and stopped by Ctrl-C

    (code, stderr, newest checkpoint) of each
    """
    cwd = tmp_path_factory.mktemp('shot')
    run = cwd / 'run'
    got = []
    begin = ['pretrain', '--threads', 1, '--seed', 5, '--save-every', 8, '--out', run, *sets(JOB)]
    for after, sig, words in ((7, signal.SIGTERM, begin), (23, signal.SIGKILL, None), (39, signal.SIGINT, None)):
        got.append((*shoot(words or ['resume', run], cwd, run, after, sig), Run(run).saved()[-1]))
        if sig == signal.SIGTERM:
            shutil.copytree(run, cwd / 'stopped')
    return run, got


def test_a_killed_and_resumed_process_ends_in_the_same_bits(shot, undisturbed):
    run, got = shot
    # kept, like the other options
    assert [c for c, *_ in got] == [143, -9, 130] and open_run_folder(run).info['save_every'] == 8
    for (code, err, step), name, command in ((got[0], 'SIGTERM', 'pretrain'), (got[2], 'SIGINT', 'resume')):
        last = err.strip().splitlines()[-1]
        assert last == f'vlrep {command}: stopped by {name} after step {step}; resume with: vlrep resume {run}'
        assert 'Traceback' not in err, err
    resume_run(run, log=lambda s: None)
    a = open_run_folder(run)
    b = open_run_folder(undisturbed)
    for which in ('last', 'best'):
        w = b.weights(which)
        assert all(torch.equal(v, w[k]) for k, v in a.weights(which).items())
    assert rows(run) == rows(undisturbed)
    x, y = (r.results()[-1]['numbers'] for r in (a, b))
    assert x['table'] == y['table'] and x['held_loss'] == y['held_loss'] and x['best_step'] == y['best_step']
    # said once, when it began
    assert {'steps=64', 'size=32', 'scenes=200'} <= set(a.results()[-1]['changes'])


OTHER = {
    'bs': (['--set', 'bs=8'], 'bs: was 16, now 8'),
    'recipe': (['--set', 'lr=.1'], 'lr: was 0.2, now 0.1'),
    'threads': (['--threads', 2], 'threads: was 1, now 2'),
    'data': (['--set', 'scenes=199'], 'data scenes: was 200, now 199'),
    'seed': (['--seed', 6], 'seed: was 5, now 6'),
    'accumulate': (['--accumulate', 2], 'accumulate: was 1, now 2'),
    'precision': (['--precision', 'PRECISION'], 'precision: was'),
}


@pytest.mark.parametrize('what', OTHER)
def test_resume_as_another_run_is_refused(shot, tmp_path, capsys, what):
    old = shot[0].parent / 'stopped'
    words, says = OTHER[what]
    now = dict(fp32='bf16', bf16='fp32')[open_run_folder(old).info['precision']]
    err = refused(capsys, 'resume', old, *[now if w == 'PRECISION' else w for w in words])
    torch.set_num_threads(1)
    assert (
        'would not be the same run' in err
        and says in err
        and '--inexact' in err
        and open_run_folder(old).saved() == Run(old).saved()
    )


def test_a_signal_to_every_process_still_saves_a_checkpoint(tmp_path):
    "What a terminal or a scheduler sends reaches the reading processes, too; the checkpoint is made all the same"
    run = tmp_path / 'run'
    end = time.monotonic() + 120
    p = forked.start(
        [
            'pretrain',
            '--threads',
            1,
            '--workers',
            2,
            '--save-every',
            5,
            '--method',
            'supervised',
            '--out',
            run,
            *sets([*SIZES, 'size=32', 'steps=100000', 'bs=16']),
        ],
        tmp_path,
    )
    try:
        while not Run(run).saved() and p.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        readers = p.forks()
        assert len(readers) >= 2
        for pid in (*readers, p.pid):
            os.kill(pid, signal.SIGTERM)
        out, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert p.returncode == 143 and 'stopped by SIGTERM' in err and 'Traceback' not in err, err
    assert open_run_folder(run).state()['step'] == int(err.split('after step ')[1].split(';')[0])


def test_resume_as_another_run_is_inexact_on_request(shot, quick, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(shot[0].parent / 'stopped', run)
    lines = []
    resume_run(run, recorded_spec(run).changed(['bs=8', 'steps=40']), inexact=True, log=lines.append)
    assert any('no longer exact' in s and 'bs: was 16, now 8' in s and 'steps: was 64, now 40' in s for s in lines)
    info = open_run_folder(run).info
    assert info['recipe']['bs'] == 8 and len(info['inexact']) == 2 and open_run_folder(run).state()['step'] == 40
    assert open_run_folder(run).results()[-1]['numbers']['steps'] == 40


def test_an_inexact_resume_as_another_model_is_refused(shot, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(shot[0].parent / 'stopped', run)
    assert 'the weights of a different model' in refused(
        capsys, 'resume', run, '--inexact', '--set', 'width=48', '--set', 'heads=3'
    )


def test_resume_from_an_earlier_checkpoint_is_exact(shot, undisturbed, quick, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(shot[0].parent / 'stopped', run)
    *early, new = Run(run).saved()
    p = run / f'steps/{new:06d}/state.pt'
    p.write_bytes(p.read_bytes()[:-1])
    err = refused(capsys, 'resume', run)
    assert f'{p}: truncated' in err and f'checkpoints of the steps {early}' in err
    resume_run(run, at=str(early[-1]), log=lambda s: None)
    w = open_run_folder(undisturbed).weights('last')
    assert all(torch.equal(v, w[k]) for k, v in open_run_folder(run).weights('last').items())


def test_folders_that_cannot_be_resumed_are_refused(shot, undisturbed, tmp_path, capsys):
    assert 'no such run folder' in refused(capsys, 'resume', tmp_path / 'none')
    assert '--out' in refused(capsys, 'resume', shot[0], '--out', tmp_path / 'x')
    assert 'there are last, best and the steps' in refused(
        capsys, 'resume', shot[0].parent / 'stopped', '--at', 'yesterday'
    )
    lines = []
    assert resume_run(undisturbed, log=lines.append) == undisturbed and 'complete' in lines[0]
    assert 'lr: was 0.2, now 0.3' in refused(capsys, 'resume', undisturbed, '--set', 'lr=.3')
    assert 'options: --at' in refused(capsys, 'pretrain', '--at', 7) and 'Missing from vlrep resume: RUN' in refused(
        capsys, 'resume', '--inexact'
    )
    assert '--save-every -3' in refused(capsys, 'pretrain', '--save-every', -3)


def test_a_file_changed_by_hand_is_refused(shot, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(shot[0].parent / 'stopped', run)
    p = run / 'recipe.json'
    text = p.read_text()
    p.write_text(text.replace('"seed": 5', '"seed": 6'))
    assert 'recipe.json: damaged, or changed by hand' in refused(capsys, 'resume', run)
    p.write_text(text)
    t = run / 'tokenizer.model'
    b = bytearray(t.read_bytes())
    b[len(b) // 2] ^= 1
    t.write_bytes(b)
    assert 'tokenizer.model: damaged' in refused(capsys, 'resume', run)


def test_a_signal_during_the_last_save_leaves_only_the_evaluation(tmp_path, monkeypatch):
    "It comes while the last checkpoint is written: the run stops all the same, and only the questions are left to do"
    save = Checkpointer.after_epoch

    def late(self):
        save(self)
        self.learn.train_state.step >= 20 and os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpointer, 'after_epoch', late)
    options = [*SIZES, 'size=32', 'steps=20', 'warmup=2', 'bs=16', 'baselines=False']
    with pytest.raises(TrainingInterrupted):
        pretrain(run_spec('supervised', options), out=tmp_path / 'run', log=lambda s: None)
    monkeypatch.undo()
    assert open_run_folder(tmp_path / 'run').state()['step'] == 20 and not (tmp_path / 'run/result.jsonl').exists()
    resume_run(tmp_path / 'run', log=lambda s: None)
    assert open_run_folder(tmp_path / 'run').results()[-1]['numbers']['steps'] == 20
