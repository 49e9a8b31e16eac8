"""A run that is stopped and continued is the run that never stopped: the same losses, the same bits

Within this process every method is stopped after every single batch, in both precisions; then real processes are shot.
"""
import json, math, os, shutil, signal, time
from dataclasses import replace
from pathlib import Path
import pytest, torch
from fastai.callback.core import Callback
from vlrep.callbacks import LogCSV, SaveRun, read_log
from vlrep.commands import METHODS, pretrain
from vlrep.data.loader import loaders
from vlrep.learner import Accumulate, Micro, fit
from vlrep.recipes import recipe
from vlrep.resume import Note, StopOnSignal, Stopped, resume
from vlrep.runs import Run, load
from vlrep.sources import reader, vocabulary
from tools import NET, SIZES, command, refused, sets, start, told

STEPS, BATCHES = 14, 6                         # 96 scenes in batches of 16: two epochs of 6 steps, and 2 steps more
SMALL = dict(steps=STEPS, warmup=3, bs=16, size=32)
TEXT = dict(width=32, heads=2, vocab=300, dropout=.1, lookahead_k=5)

@pytest.fixture(scope='module')
def source(): return told('train', 96), told('valid', 32)

def small(method):
    "The method's recipe for the world, smaller; with dropout and Lookahead where it has them"
    r = recipe(method, 'world'); return replace(r, **SMALL, **{k: v for k, v in TEXT.items() if hasattr(r, k)})

class Ask(Callback):
    "Ask to stop after so many batches, in training or within the validation that follows"
    order = 94
    def __init__(self, note, batch, valid=False): self.note, self.batch, self.valid = note, batch, valid
    def after_batch(self):
        if self.learn.training != self.valid and self.learn.steps.batches == self.batch: self.note.got = signal.SIGTERM

class Crash(Callback):
    "An error of the program after so many steps"
    run_valid = False
    def __init__(self, steps): self.steps = steps
    def after_batch(self):
        if self.learn.steps.done == self.steps: 1/0

class Curve(Callback):
    "The loss of every training batch, as it is"
    run_valid = False
    def __init__(self): self.seen = {}
    def after_batch(self): self.seen[self.learn.steps.batches] = self.learn.loss.item()

def make(run, source, method='virtex', precision='fp32', accumulate=1, workers=0):
    m,r = METHODS[method],small(method)
    dls = loaders(*source, read=reader(m, r, vocabulary(m, r, source[0])), bs=16, size=32, seed=3, device='cpu', workers=workers)
    dls.loaders[0] = Micro(dls.train, accumulate)
    return m.learner(r, dls, seed=3, precision=precision, cbs=[Accumulate(accumulate), Curve(), LogCSV(run/'log.csv', every=2), SaveRun(run)])

def train(path, source, stop=None, valid=False, **kw):
    "Begin or go on; stop after `stop` batches. The learner"
    old = (Path(path)/'recipe.json').exists(); run = Run.reopen(path) if old else Run.create(path, recipe={}, method='m', data='d', seed=3)
    with run:
        l = make(run, source, **kw)
        if old: [v.mul_(3) for v in l.model.state_dict().values()]                     # all that matters must come from the checkpoint
        resume(l, run)
        if stop is None: fit(l, STEPS)
        else:
            note = Note()
            with pytest.raises(Stopped): fit(l, STEPS, [Ask(note, stop, valid), StopOnSignal(note)])
    for dl in l.dls.loaders: dl.close()
    return l

def everything(l):
    "Weights, buffers, the optimiser's memory, counters: all that a run is"
    def flat(o, name=''):
        if isinstance(o, dict): return {k: v for n, x in o.items() for k, v in flat(x, f'{name}.{n}').items()}
        if isinstance(o, (list, tuple)): return flat(dict(enumerate(o)), name)
        return {name: o}
    kept = {cb.name: cb.kept() for cb in l.cbs if hasattr(cb, 'kept')}; kept['tally'].pop('seconds')
    return flat(dict(model=l.model.state_dict(), opt=l.opt.state_dict(), kept=kept))

def same(a, b):
    assert a.keys() == b.keys() and len(a) > 50
    for k in a: assert torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k], k

def rows(path): return [{k: v for k, v in r.items() if k not in ('seconds', 'images_s')} for r in read_log(Path(path)/'log.csv')]

def check(tmp_path, source, stops, whole=None, **kw):
    "Stop at each of `stops`, go on, compare with `whole`"
    whole = whole or train(tmp_path/'whole', source, **kw)
    for i, stop in enumerate(stops):
        path = tmp_path/f'{i}'; first = train(path, source, *stop if isinstance(stop, tuple) else (stop,), **kw)
        l = train(path, source, **kw); same(everything(l), everything(whole)); assert rows(path) == rows(tmp_path/'whole')
        n = max(first.curve.seen); assert l.curve.seen == {k: v for k, v in whole.curve.seen.items() if k > n} and {**first.curve.seen, **l.curve.seen} == whole.curve.seen
        assert load(path).state('best')['step'] == load(tmp_path/'whole').state('best')['step']
    return whole

# After every batch: in mid-epoch, at an epoch's border (6, 12), before the first step of a Lookahead window (5, 10) and within one, at the very end (14)
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_stop_at_every_step(tmp_path, source, precision):
    whole = check(tmp_path, source, range(1, STEPS+1), precision=precision)
    assert whole.opt.opt.counter == STEPS%5 and len(set(whole.curve.seen.values())) == STEPS and whole.steps.epoch == 2

@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_stop_within_an_accumulation_window(tmp_path, source, precision):
    whole = check(tmp_path, source, [1, 2, 8, 17, 18, 19, 31, 41], precision=precision, accumulate=3)
    assert whole.steps.batches == 3*STEPS and whole.steps.done == STEPS

def test_stop_within_validation(tmp_path, source): check(tmp_path, source, [(6, True), (12, True), (14, True)])

def test_stop_with_workers(tmp_path, source):
    whole = train(tmp_path/'whole', source)
    check(tmp_path, source, [4, 6, 9], whole=whole, workers=2)                              # stopped and continued with 2, compared with 0

def test_crash_between_checkpoints(tmp_path, source):
    "The log has gone further than the checkpoint: it is cut back, and the steps are done again"
    whole = train(tmp_path/'whole', source)
    with Run.create(tmp_path/'run', recipe={}, method='m', data='d', seed=3) as r:
        with pytest.raises(ZeroDivisionError): fit(make(r, source), STEPS, [Crash(11)])
        assert r.saved() == [6] and r.log()[-1]['step'] == 10
    l = train(tmp_path/'run', source); same(everything(l), everything(whole)); assert rows(tmp_path/'run') == rows(tmp_path/'whole')

def test_stop_twice(tmp_path, source):
    whole = train(tmp_path/'whole', source)
    for stop in (3, 4, 12, None): l = train(tmp_path/'often', source, stop)
    same(everything(l), everything(whole)); assert rows(tmp_path/'often') == rows(tmp_path/'whole')

@pytest.mark.parametrize('method', METHODS)
def test_every_method(tmp_path, source, method): check(tmp_path, source, [7], method=method)

def test_state_is_complete(tmp_path, source):
    "A check that can fail: forget something, and the bits differ"
    whole = everything(train(tmp_path/'whole', source))
    def spoil(path, change):
        with Run.reopen(path) as run: state = run.state(); change(state['training']); run.save('last', run.weights('last'), state)
    for i, change in enumerate([lambda s: s['optimiser'].update(counter=0), lambda s: s['callbacks']['steps'].update(batches=8),
                                lambda s: [v['momentum_buffer'].zero_() for v in s['optimiser']['inner']['state'].values()]]):
        train(tmp_path/f'{i}', source, 9); spoil(tmp_path/f'{i}', change); l = everything(train(tmp_path/f'{i}', source))
        assert any(not torch.equal(l[k], v) for k, v in whole.items() if k.startswith('.model') and torch.is_tensor(v))

# Real processes

JOB = [*SIZES, 'vocab=300', 'size=32', 'steps=260', *NET]

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed')/'run'
    return pretrain(changes=JOB, seed=5, threads=1, out=out, say=lambda s: None)

def shoot(words, cwd, run, after, sig, wait=120):
    "Start, wait for a checkpoint later than step `after`, send the signal: exit code and stderr"
    p = start(words, cwd); end = time.monotonic()+wait
    try:
        while p.poll() is None and max(Run(run).saved(), default=0) <= after and time.monotonic() < end: time.sleep(.02)
        assert p.poll() is None, p.stderr.read()
        p.send_signal(sig); out, err = p.communicate(timeout=wait)
    finally: p.kill()
    return p.returncode, err

@pytest.fixture(scope='module')
def shot(undisturbed, tmp_path_factory):
    "A run stopped by SIGTERM, then taken up and killed by SIGKILL, then taken up and stopped by Ctrl-C: (code, stderr, newest checkpoint) of each"
    cwd = tmp_path_factory.mktemp('shot'); run = cwd/'run'; got = []; begin = [*command('pretrain'), '--threads', 1, '--seed', 5, '--save-every', 8, '--out', run, *sets(JOB)]
    for after, sig, words in ((15, signal.SIGTERM, begin), (60, signal.SIGKILL, None), (110, signal.SIGINT, None)):
        got.append((*shoot(words or [*command('pretrain', False), '--resume', run], cwd, run, after, sig), Run(run).saved()[-1]))
        if sig == signal.SIGTERM: shutil.copytree(run, cwd/'stopped')
    return run, got

def test_killed_processes(shot, undisturbed):
    run, got = shot
    assert [c for c, *_ in got] == [143, -9, 130] and load(run).info['save_every'] == 8                   # kept, like the other options
    for (code, err, step), name in ((got[0], 'SIGTERM'), (got[2], 'SIGINT')):
        assert err.strip().splitlines()[-1] == f'vlrep-pretrain: stopped by {name} after step {step}; go on with: vlrep-pretrain --resume {run}' and 'Traceback' not in err, err
    pretrain(resume_run=run, say=lambda s: None)
    a, b = load(run), load(undisturbed)
    for which in ('last', 'best'):
        w = b.weights(which); assert all(torch.equal(v, w[k]) for k, v in a.weights(which).items())
    assert rows(run) == rows(undisturbed)
    x, y = (r.results()[-1]['numbers'] for r in (a, b))
    assert x['table'] == y['table'] and x['held_loss'] == y['held_loss'] and x['best_step'] == y['best_step']
    assert {'steps=260', 'size=32', 'scenes=200'} <= set(a.results()[-1]['changes'])                     # said once, when it began

OTHER = {'bs': (['--set', 'bs=8'], 'bs: was 16, now 8'), 'recipe': (['--set', 'lr=.1'], 'lr: was 0.2, now 0.1'), 'threads': (['--threads', 2], 'threads: was 1, now 2'),
         'data': (['--set', 'scenes=199'], 'data scenes: was 200, now 199'), 'seed': (['--seed', 6], 'seed: was 5, now 6'), 'accumulate': (['--accumulate', 2], 'accumulate: was 1, now 2'),
         'method': (['--method', 'tags'], "method: was 'virtex', now 'tags'"), 'precision': (['--precision', 'PRECISION'], 'precision: was')}

@pytest.mark.parametrize('what', OTHER)
def test_another_run_is_refused(shot, tmp_path, capsys, what):
    old = shot[0].parent/'stopped'; words, says = OTHER[what]; now = dict(fp32='bf16', bf16='fp32')[load(old).info['precision']]
    err = refused(capsys, 'pretrain', '--resume', old, *[now if w == 'PRECISION' else w for w in words])
    torch.set_num_threads(1)
    assert 'would not be the same run' in err and says in err and '--resume-inexact' in err and load(old).saved() == Run(old).saved()

def test_signal_to_every_process(tmp_path):
    "What a terminal or a scheduler sends reaches the reading processes, too; the checkpoint is made all the same"
    run = tmp_path/'run'; end = time.monotonic()+120
    p = start([*command('pretrain'), '--threads', 1, '--workers', 2, '--save-every', 5, '--method', 'tags', '--out', run, *sets([*SIZES, 'size=32', 'steps=100000', 'bs=16'])], tmp_path, start_new_session=True)
    try:
        while not Run(run).saved() and p.poll() is None and time.monotonic() < end: time.sleep(.05)
        readers = [d.name for d in Path('/proc').iterdir() if d.name.isdigit() and d.name != str(p.pid) and str(run).encode() in (d/'cmdline').read_bytes()]
        assert len(readers) >= 2
        for pid in (*map(int, readers), p.pid): os.kill(pid, signal.SIGTERM)
        out, err = p.communicate(timeout=60)
    finally: p.kill()
    assert p.returncode == 143 and 'stopped by SIGTERM' in err and 'Traceback' not in err, err
    assert load(run).state()['step'] == int(err.split('after step ')[1].split(';')[0])

def test_inexact_on_request(shot, tmp_path):
    run = tmp_path/'run'; shutil.copytree(shot[0].parent/'stopped', run); lines = []
    pretrain(resume_run=run, changes=['bs=8', 'steps=280'], inexact=True, say=lines.append)
    assert any('no longer exact' in s and 'bs: was 16, now 8' in s and 'steps: was 260, now 280' in s for s in lines)
    info = load(run).info; assert info['recipe']['bs'] == 8 and len(info['inexact']) == 2 and load(run).state()['step'] == 280
    assert load(run).results()[-1]['numbers']['steps'] == 280

def test_another_model_is_refused_even_then(shot, tmp_path, capsys):
    run = tmp_path/'run'; shutil.copytree(shot[0].parent/'stopped', run)
    assert 'the weights of another model' in refused(capsys, 'pretrain', '--resume', run, '--resume-inexact', '--set', 'width=48', '--set', 'heads=3')

def test_earlier_checkpoint(shot, undisturbed, tmp_path, capsys):
    run = tmp_path/'run'; shutil.copytree(shot[0].parent/'stopped', run); *early, new = Run(run).saved()
    p = run/f'steps/{new:06d}/state.pt'; p.write_bytes(p.read_bytes()[:-1])
    err = refused(capsys, 'pretrain', '--resume', run); assert f'{p}: truncated' in err and f'checkpoints of the steps {early}' in err
    pretrain(resume_run=run, at=str(early[-1]), say=lambda s: None)
    w = load(undisturbed).weights('last'); assert all(torch.equal(v, w[k]) for k, v in load(run).weights('last').items())

def test_what_cannot_be_resumed(shot, undisturbed, tmp_path, capsys):
    assert 'no such run folder' in refused(capsys, 'pretrain', '--resume', tmp_path/'none')
    assert '--out' in refused(capsys, 'pretrain', '--resume', shot[0], '--out', tmp_path/'x')
    assert 'there are last, best and the steps' in refused(capsys, 'pretrain', '--resume', shot[0].parent/'stopped', '--resume-at', 'yesterday')
    lines = []; assert pretrain(resume_run=undisturbed, say=lines.append) == undisturbed and 'complete' in lines[0]
    assert 'lr: was 0.2, now 0.3' in refused(capsys, 'pretrain', '--resume', undisturbed, '--set', 'lr=.3')
    assert 'belong to --resume' in refused(capsys, 'pretrain', '--resume-at', 7) and 'belong to --resume' in refused(capsys, 'pretrain', '--resume-inexact')
    assert '--save-every -3' in refused(capsys, 'pretrain', '--save-every', -3)

def test_changed_by_hand(shot, tmp_path, capsys):
    run = tmp_path/'run'; shutil.copytree(shot[0].parent/'stopped', run); p = run/'recipe.json'; text = p.read_text(); p.write_text(text.replace('"seed": 5', '"seed": 6'))
    assert 'recipe.json: damaged, or changed by hand' in refused(capsys, 'pretrain', '--resume', run)
    p.write_text(text); t = run/'tokenizer.model'; b = bytearray(t.read_bytes()); b[len(b)//2] ^= 1; t.write_bytes(b); assert 'tokenizer.model: damaged' in refused(capsys, 'pretrain', '--resume', run)

def test_signal_at_the_very_end(tmp_path, monkeypatch):
    "It comes while the last checkpoint is written: the run stops all the same, and only the questions are left to do"
    save = SaveRun.after_epoch
    def late(self): save(self); self.learn.steps.done >= 20 and os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(SaveRun, 'after_epoch', late); job = [*SIZES, 'size=32', 'steps=20', 'warmup=2', 'bs=16', 'rivals=False']
    with pytest.raises(Stopped): pretrain('tags', changes=job, out=tmp_path/'run', say=lambda s: None)
    monkeypatch.undo(); assert load(tmp_path/'run').state()['step'] == 20 and not (tmp_path/'run/result.jsonl').exists()
    pretrain(resume_run=tmp_path/'run', say=lambda s: None); assert load(tmp_path/'run').results()[-1]['numbers']['steps'] == 20
