"vlrep study: a tiny study from end to end, killed twice on its way, and what is judged by hand"

import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from paths import ROOT
from tools import STUDY, refused

from vlrep.experiments.comparisons import Difference
from vlrep.experiments.finetune import finetune
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import finetune_spec, run_spec
from vlrep.models.timm_torchvision import weights_digest
from vlrep.studies import runs as study_runs
from vlrep.studies.judging import from_start, judge_study, unstable_run
from vlrep.studies.plan import read_study, read_toml, task_plan
from vlrep.studies.records import best_runs, read_study_lines, runs_by_rate
from vlrep.studies.report import write_study_report
from vlrep.studies.runs import StudyFolder, plan_study, run_study, run_variants
from vlrep.studies.tasks import task_line
from vlrep.studies.verdicts import holm, needed_seeds, p_value, verdict
from vlrep.training.callbacks import TrainingDiverged
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import open_run_folder

# ---------------------------------------------------------------- one study, shared by the tests


def processes(word):
    "Ids of the processes whose command line holds `word`"

    def line(p):
        try:
            return p.read_bytes().decode(errors='replace')
        except OSError:
            return ''

    return [int(p.parent.name) for p in Path('/proc').glob('[0-9]*/cmdline') if word in line(p)]


def wait(until, seconds=120):
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, 'it took too long'
        time.sleep(0.05)


def stop_in_training(file, out):
    "SIGTERM as the first run has its first checkpoint; the lines that were printed"
    lines = []

    def log(line):
        lines.append(line)
        if line.startswith('step 4,') and '-- sets-0-rate0' in lines:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        run_study(file, out, log=log)
    return lines


def kill_two_at_a_time(file, out):
    "The study in another process, two trainings at a time, killed as both have begun; which runs had begun"
    pid = os.fork()
    if not pid:
        try:
            run_study(file, out, jobs=2, log=str)
        finally:
            os._exit(0)
    wait(lambda: (out / 'runs' / 'labels-0-rate0' / 'steps').is_dir())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return sorted(p.parent.name for p in (out / 'runs').glob('*/recipe.json'))


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "The study's folder after two deaths, and what was seen on the way"
    tmp = tmp_path_factory.mktemp('study')
    file = tmp / 'tiny.toml'
    out = tmp / 'out'
    file.write_text(STUDY)
    seen = dict(file=file, stopped=stop_in_training(file, out))
    seen['after stop'] = read_study_lines(out)[1]
    seen['step'] = open_run_folder(out / 'runs' / 'sets-0-rate0').saved()
    seen['begun'] = kill_two_at_a_time(file, out)
    if sys.platform == 'linux':
        wait(lambda: not processes(str(out)), 20)
    seen['resumed'] = []
    run_study(file, out, log=seen['resumed'].append)
    return dict(seen, out=out)


def test_a_finished_study_is_complete(done):
    study, lines = read_study_lines(done['out'])
    kinds = [l['kind'] for l in lines]
    assert {k: kinds.count(k) for k in set(kinds)} in (dict(run=8), dict(run=6, diverged=2))
    keys = {(l['variant'], l['seed'], l['rate']) for l in lines}
    assert keys == {(a, s, r) for a in ('sets', 'labels') for s in (0, 1) for r in (0, 1)}
    (row,) = judge_study(study, lines)
    assert row['verdict'].startswith('few rates (sets, labels') and len(row['each']) == 2
    assert 0 <= row['p'] == row['holm'] <= 1


def test_every_variant_is_trained_at_every_rate(done):
    "All seeds, the whole schedule, and a score on validation scenes; the absurd rate fails or is far behind"
    study, lines = read_study_lines(done['out'])
    for l in lines:
        grid = study.grid(study.variant(l['variant']))
        assert l['values'] == grid[l['rate']] and l['spec']['recipe']['steps'] == 12
        assert l['spec']['recipe']['cnn_lr'] == l['values']['cnn_lr']
        if l['kind'] == 'run':
            assert 0 <= l['numbers']['validation'] <= 100 and l['seconds']['validation'] > 0
    wild = [l for l in lines if l['values']['cnn_lr'] == 1e6]
    assert len(wild) == 2 and all(unstable_run(l) for l in wild)
    page = (done['out'] / 'report.md').read_text()
    assert '| labels | pretraining | cnn_lr=0.5 | 2 |' in page and '† labels, seed 0, cnn_lr=1000000.0' in page


def test_a_stopped_study_keeps_what_it_has(done):
    "After the signal: no run has ended, and the first one has a checkpoint"
    kinds = [l['kind'] for l in done['after stop']]
    assert kinds.count('begun') == 8 and 'run' not in kinds
    assert done['step'] and done['step'][-1] < 12


def test_a_study_goes_on_where_it_was(done):
    "No run that had ended is trained again; a run that had begun goes on"
    assert {'sets-0-rate0', 'labels-0-rate0'} <= set(done['begun'])
    assert any(l.startswith('resuming from step') for l in done['resumed'])
    again = []
    was = (done['out'] / 'study.jsonl').read_bytes()
    run_study(done['file'], done['out'], log=again.append)
    assert not [l for l in again if l.startswith('--')] and (done['out'] / 'study.jsonl').read_bytes() == was


def test_a_killed_run_of_a_study_has_the_same_bits(done, tmp_path):
    "The run that was stopped, killed and finished is the run that is trained at once"
    study, lines = read_study_lines(done['out'])
    line = next(l for l in lines if (l['variant'], l['seed'], l['rate']) == ('sets', 0, 0))
    changes = [
        f'{k}={str(v).lower() if isinstance(v, bool) else v}'
        for k, v in {**study.options, **study.variants[0].changes, **line['values']}.items()
    ]
    pretrain(run_spec('token_cls', changes, seed=0, threads=1, precision='fp32'), out=tmp_path / 'whole', log=str)
    whole = open_run_folder(tmp_path / 'whole')
    parts = open_run_folder(done['out'] / 'runs' / 'sets-0-rate0')
    a = whole.weights('best')
    b = parts.weights('best')
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    first = whole.results()[-1]['numbers']
    last = parts.results()[-1]['numbers']
    assert [first[k] for k in ('table', 'held_loss', 'views')] == [last[k] for k in ('table', 'held_loss', 'views')]
    written = [json.loads(l) for l in (done['out'] / 'study.jsonl').read_text().splitlines()]
    packed = next(l for l in written if l['kind'] == 'run')
    assert isinstance(packed['numbers']['table'][0]['draws'], str)


def test_lines_of_other_code_are_not_mixed_in(done, capsys):
    "A line of other code stops the study, in one line; with --mix the page says which"
    path = done['out'] / 'study.jsonl'
    was = path.read_bytes()
    lines = [json.loads(l) for l in was.decode().splitlines()]
    next(l for l in lines if l['kind'] == 'run')['facts']['commit'] = 'older'
    path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
    try:
        text = refused(capsys, 'study', 'run', done['file'], '--out', done['out'])
        assert "made under different conditions (commit: was 'older'" in text and '--mix' in text
        run_study(done['file'], done['out'], mix=True, log=str)
        assert 'lines of different commit: ' in (done['out'] / 'report.md').read_text()
    finally:
        path.write_bytes(was)
    write_study_report(done['out'])
    assert 'lines of different' not in (done['out'] / 'report.md').read_text()


def test_what_was_changed_after_the_first_result_is_said(done, tmp_path):
    "A direction, the margin and a comparison of today are judged, and named on the page, whoever writes it"
    out = tmp_path / 'out'
    file = tmp_path / 'tiny.toml'
    shutil.copytree(done['out'], out)
    file.write_text(
        STUDY.replace('[data]', 'margin = 0.5\n[data]', 1) + "direction = 0\n\n[[comparisons]]\nid = 'Y'\n"
        "text = 'new'\ntreatment = 'sets'\ncontrol = 'chance'\n"
    )
    run_study(file, out, log=str)
    want = 'margin was 1.0, now 0.5; comparison Y was added; comparison X: direction was 1, now 0'
    for _ in range(2):
        assert f'changed in {file} after the first result: {want}' in (out / 'report.md').read_text()
        write_study_report(out)
    study, lines = read_study_lines(out)
    rows = judge_study(study, lines)
    assert [(r['direction'], r['added']) for r in rows] == [(0, True), (1, True)]  # both are other claims than before
    assert '; '.join(study.changed) == want
    file.write_text(STUDY)  # as it was: nothing is left to be said
    run_study(file, out, log=str)
    assert 'after the first result' not in (out / 'report.md').read_text()
    (out / 'study.jsonl').write_text('\n'.join([(out / 'study.jsonl').read_text().splitlines()[0]]) + '\n')
    shutil.rmtree(out / 'runs')
    file.write_text(STUDY.replace('[data]', 'margin = 0.5\n[data]', 1))
    assert 'first' not in StudyFolder(out, read_toml(file), file).head  # no result was there yet


def test_one_contrast_that_cannot_be_judged_leaves_the_others(done, tmp_path):
    "A missing table, question, variant or field is the reason in its row, and the page is written"
    out = tmp_path / 'out'
    shutil.copytree(done['out'], out)
    head, *lines = [json.loads(l) for l in (out / 'study.jsonl').read_text().splitlines()]
    base = head['table']['comparisons'][0]
    head['file'] = str(tmp_path / 'gone.toml')
    more = [
        dict(table='lost'),
        dict(question='colour'),
        dict(control='nobody'),
        dict(control='@lost'),
        dict(control='chance'),
    ]
    head['table']['comparisons'] += [base | m | dict(id=f'N{i}') for i, m in enumerate(more)]
    (out / 'study.jsonl').write_text('\n'.join(map(json.dumps, [head, *lines])) + '\n')
    page = write_study_report(out).parent / 'report.md'
    rows = {r['id']: r['verdict'] for r in judge_study(*read_study_lines(out))}
    assert rows['N0'].startswith("not run (sets 0, 1 at cnn_lr=0.2: no 'objects' in 'lost'")
    assert not any(rows[k].startswith(('not run', 'not judged')) for k in ('X', 'N4'))
    for i, says in ((1, "no row 'random' for sets"), (2, "no variant 'nobody'"), (3, "no 'objects' of lost")):
        assert rows[f'N{i}'].startswith('not judged (') and says in rows[f'N{i}'] and says in page.read_text()
    head['table']['seeds'] = [0]
    (out / 'study.jsonl').write_text('\n'.join(map(json.dumps, [head, *lines])) + '\n')
    write_study_report(out)
    assert 'not judged (1 seed: at least 2 are needed' in page.read_text()


@pytest.mark.parametrize(
    'old,new,says',
    [
        ('steps = 12', 'steps = 11', 'is not what'),
        ('cnn_lr = 0.2', 'cnn_lr = 0.3', 'sets, seed 0, cnn_lr=0.2 is not what'),
        ("name = 'tiny'", "name = 'other'", "contains the study 'tiny'"),
        ('scenes = 40', 'scenes = 50', 'chosen_by scenes: was 40'),
    ],
)
def test_a_changed_study_is_refused(done, tmp_path, old, new, says, capsys):
    assert old in STUDY
    (tmp_path / 's.toml').write_text(STUDY.replace(old, new))
    assert says in refused(capsys, 'study', 'run', tmp_path / 's.toml', '--out', done['out'])


def test_more_seeds_keep_the_runs_that_are_there(done, tmp_path):
    (tmp_path / 's.toml').write_text(STUDY.replace('seeds = [0, 1]', 'seeds = [0, 1, 2]'))
    from vlrep.studies.plan import read_toml

    keep = (done['out'] / 'study.jsonl').read_bytes()
    try:
        folder = StudyFolder(done['out'], read_toml(tmp_path / 's.toml'), 's.toml')
        (row,) = judge_study(folder.study, folder.lines)
        assert row['verdict'].startswith('not run (sets 2 at cnn_lr=0.2; sets 2 at cnn_lr=0.5; labels 2 at cnn_lr=0.5')
        assert len(folder.find(seed=0)) == 4
    finally:
        (done['out'] / 'study.jsonl').write_bytes(keep)


def test_the_plan_counts_what_the_study_did(done):
    study, lines = read_study_lines(done['out'])
    narratives = plan_study(study, done['out'] / 'runs', log=str)
    assert (narratives['runs'], narratives['views']) == (8, 8 * 12 * 16) and narratives['hours'] > 0


# ---------------------------------------------------------------- the grid grows


def test_the_grid_grows_where_the_best_rate_is_its_end(tmp_path, monkeypatch):
    "By one rate at that end, for both variants, at most `extend` times; what was trained is not trained again"
    scores = {0.1: 1.0, 0.2: 2.0, 0.4: 3.0, 0.8: 4.0, 1.6: 5.0}
    trained = []

    def finished(folder, job, log):
        "In place of a training: a line with the score of its rate, which differs from seed to seed"
        (begun,) = folder.find(kind='begun', **{k: job[k] for k in ('variant', 'seed', 'rate')})
        folder.lines.remove(begun)
        score = scores[job['values']['cnn_lr']] + 0.1 * job['seed']
        folder.lines.append(begun | dict(kind='run', method='', numbers=dict(validation=score)))
        trained.append((job['variant'], job['seed'], job['rate']))

    monkeypatch.setattr(study_runs, 'run_jobs', lambda todo, *args, **kw: iter(todo))
    monkeypatch.setattr(study_runs, '_finished', finished)
    for extend, highest in ((0, 2), (1, 3), (2, 4), (4, 4)):
        if extend == 4:
            scores[1.6] = 3.5  # the best rate is inside
        text = STUDY.replace('extend = 0', f'extend = {extend}')
        text = text.replace('{cnn_lr = 0.2}, {cnn_lr = 0.5}', '{cnn_lr = 0.1}, {cnn_lr = 0.2}, {cnn_lr = 0.4}')
        (tmp_path / 's.toml').write_text(text.replace('\ngrid = [{cnn_lr = 0.5}, {cnn_lr = 1e6, lr = 1e6}]', ''))
        folder = StudyFolder(tmp_path / f'out{extend}', read_toml(tmp_path / 's.toml'), 's.toml')
        for _ in range(2):
            run_variants(folder, folder.study.variants, log=str)
        wanted = {(a, s, r) for a in ('sets', 'labels') for s in (0, 1) for r in range(highest + 1)}
        assert len(trained) == len(wanted) and {*trained} == wanted
        trained.clear()


# ---------------------------------------------------------------- a variant that starts from the run of another one

WARM = (
    STUDY.replace("name = 'tiny'", "name = 'warm'")
    .replace('\ngrid = [{cnn_lr = 0.5}, {cnn_lr = 1e6, lr = 1e6}]', '')
    .replace(
        """name = 'labels'
method = 'multilabel'
""",
        """name = 'long'
method = 'token_cls'
""",
    )
    .replace(
        'changes = {steps = 12, warmup = 2, size = 32, bs = 16, visual_width = 8}',
        'changes = {steps = 24, warmup = 2, size = 32, bs = 16, visual_width = 8, vocab = 300}',
    )
    .replace(
        '[[comparisons]]',
        """[[variants]]
name = 'after'
method = 'multilabel'
weights = '@sets'
changes = {steps = 12, warmup = 2, size = 32, bs = 16, visual_width = 8}

[[comparisons]]""",
        1,
    )
    .replace("treatment = 'sets'\ncontrol = 'labels'", "treatment = 'after'\ncontrol = 'long'")
    .replace('scenes = 40\nextend = 0\n', "score = 'held_loss'\nextend = 0\n")
    .replace('steps = 12', 'steps = 6')
    .replace('steps = 24', 'steps = 12')
)


def test_a_variant_starts_from_the_run_of_another_one(tmp_path, monkeypatch):
    "With the weights of the run of the same seed at its best rate; its views and steps are those of both runs"
    file = tmp_path / 'warm.toml'
    file.write_text(WARM)
    out = tmp_path / 'out'
    run_study(file, out, log=str)
    study, lines = read_study_lines(out)
    source = best_runs(study, runs_by_rate(study, lines, 'sets'))
    best = source[0]['rate']
    assert {l['rate'] for l in source} == {best}
    for s in (0, 1):
        for rate in (0, 1):
            info = open_run_folder(out / 'runs' / f'after-{s}-rate{rate}').info
            start = open_run_folder(out / 'runs' / f'sets-{s}-rate{best}').checkpoint('best') / 'model.safetensors'
            assert (info['weights_file'], info['weights']) == (str(start.resolve()), weights_digest(start))
    (row,) = judge_study(study, lines)
    assert len(row['each']) == 2 and not row['verdict'].startswith(('not judged', 'not run'))
    runs = {
        l['variant']: [m for m in lines if m['kind'] == 'run' and m['variant'] == l['variant']]
        for l in lines
        if 'variant' in l
    }
    assert {l['numbers']['views'] for l in runs['after']} == {6 * 16}
    assert {l['numbers']['views'] for l in from_start(study, runs, 'after')} == {12 * 16}
    for l in lines:
        if l.get('variant') == 'sets' and l['kind'] == 'run':
            l['numbers']['views'] += 1
    assert 'measured views=' in judge_study(study, lines)[0]['verdict']
    after = next(l for l in lines if l.get('variant') == 'after' and l['kind'] == 'run')
    assert after['spec']['weights'] == '@sets'
    shutil.rmtree(out / 'runs' / f'sets-0-rate{best}')
    remaining = [l for l in lines if l.get('variant') != 'after']
    head = (out / 'study.jsonl').read_text().splitlines()[0]
    (out / 'study.jsonl').write_text('\n'.join([head, *map(json.dumps, remaining)]) + '\n')
    for run in (out / 'runs').glob('after-*'):
        shutil.rmtree(run)
    with pytest.raises(ValueError, match=f'sets-0-rate{best}'):
        run_study(file, out, log=str)  # no run without its start
    assert not [l for l in read_study_lines(out)[1] if l.get('variant') == 'after' and l['kind'] == 'run']


# ---------------------------------------------------------------- pretrained once, fine-tuned on tasks

DATA = STUDY[STUDY.index('[data]') : STUDY.index('[rates]')]
SOURCES = f"""
name = 'sources'
seeds = [0, 1]
equal = ['images']
precision = 'bf16'

{DATA}"""
SOURCES += """[finetune]
tasks = ['mm_imdb']
modes = ['full', 'frozen']
changes = {steps = 4, bs = 16, every = 2, warmup = 1, scenes = 24, valid = 8, test = 16}
grid = [{lr = 0.001}, {lr = 0.002}]
extend = 0

[[variants]]
name = 'writer'
method = 'virtex'
changes = {SMALL}
tasks = []

[[variants]]
name = 'vb-none'
method = 'visualbert'
changes = {SMALL, FUSION, steps = 0, warmup = 0}

[[variants]]
name = 'vb-generated'
method = 'visualbert'
changes = {SMALL, FUSION, source = 'generated', generated = '@writer', steps = 6, warmup = 2}

[[comparisons]]
id = 'T'
text = 'any'
treatment = 'vb-generated'
control = 'vb-none'
question = 'mm_imdb, macro F1'
table = 'frozen'
unequal = ['views', 'steps']
"""
SMALL = 'size = 32, visual_width = 8, width = 16, depth = 1, heads = 2, vocab = 200, bs = 16'
SOURCES = SOURCES.replace('{SMALL}', f'{{{SMALL}, steps = 6, warmup = 2}}').replace('SMALL', SMALL)
SOURCES = SOURCES.replace('FUSION', 'region_steps = 10, bert_steps = 10, aux_scenes = 0')


@pytest.fixture(scope='module')
def tuned(tmp_path_factory):
    "The folder of that study, after a signal in the middle of a fine-tuning"
    tmp = tmp_path_factory.mktemp('sources')
    file = tmp / 'sources.toml'
    file.write_text(SOURCES)
    out = tmp / 'out'
    lines = []
    again = []

    def log(line):
        lines.append(line)
        begun = '-- vb-none-0-mm_imdb-full-rate0' in lines[-20:]
        if line.startswith('step 2:') and begun:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        run_study(file, out, log=log)
    stopped = open_run_folder(out / 'tasks' / 'vb-none-0-mm_imdb-full-rate0').saved()
    run_study(file, out, log=again.append)
    return dict(file=file, out=out, said=lines, again=again, stopped=stopped)


def test_sources_are_pretrained_once_and_fine_tuned(tuned):
    study, lines = read_study_lines(tuned['out'])

    def count(kind, **k):
        return sum(l['kind'] == kind and all(l[a] == v for a, v in k.items()) for l in lines)

    assert [count(k) for k in ('run', 'task', 'begun', 'diverged')] == [6, 16, 0, 0]
    assert all(
        count('task', variant=a, mode=m, seed=s, rate=r) == 1
        for a in ('vb-none', 'vb-generated')
        for m in ('full', 'frozen')
        for s in (0, 1)
        for r in (0, 1)
    )
    runs = {(l['variant'], l['seed']): l for l in lines if l['kind'] == 'run'}
    assert runs['vb-none', 0]['numbers']['views'] == 0 and runs['vb-generated', 0]['numbers']['views'] == 6 * 16
    for s in (0, 1):  # who wrote has the same seed
        wrote = open_run_folder(tuned['out'] / 'runs' / f'vb-generated-{s}').info['recipe']['generated']
        assert Path(wrote) == (tuned['out'] / 'runs' / f'writer-{s}').resolve()
    for l in lines:
        if l['kind'] != 'task':
            continue
        rows = {r['question']: r for r in l['numbers'][l['mode']] if r['backbone'] == 'visualbert'}
        assert set(rows) == {'mm_imdb', 'mm_imdb, macro F1'} and len(rows['mm_imdb']['draws']) == 20
        assert ('drift' in l['numbers']) == (l['mode'] == 'full') and 0 <= l['numbers']['validation'] <= 100
        assert l['values'] == study.finetune.grid[l['rate']]
    (row,) = judge_study(study, lines)
    assert row['verdict'] and len(row['each']) == 2
    page = (tuned['out'] / 'report.md').read_text()
    assert '## Tasks, the body frozen' in page and '| visualbert | none | vb-none |' in page


def test_a_row_of_each_mode_has_the_name_of_the_method(tuned, tmp_path):
    "Comparisons, and the floor of the text alone, look for it under that name"
    study = read_study_lines(tuned['out'])[0]
    source = tuned['out'] / 'runs' / 'vb-none-0'
    for mode in ('full', 'frozen', 'text_only'):  # the others are those of tasks on images
        changes = task_plan(study, 'mm_imdb', mode, {}, draws=20)[2]
        folder = finetune(finetune_spec(source, 'mm_imdb', changes, threads=1), out=tmp_path / mode, log=str)
        line = task_line(study, dict(folder=str(folder), source=str(source), task='mm_imdb', mode=mode))
        rows = {r['question'] for r in line['numbers'][mode] if r['backbone'] == line['method']}
        assert rows == {'mm_imdb', 'mm_imdb, macro F1'}, mode


def test_a_stopped_fine_tuning_has_the_same_bits(tuned, tmp_path):
    "It was stopped before the last of four steps, and goes on; what was there before is not trained again"
    assert tuned['stopped'] and tuned['stopped'][-1] < 4
    assert next(l for l in tuned['again'] if l.startswith('-- ')) == '-- vb-none-0-mm_imdb-full-rate0'
    assert f'resuming from step {tuned["stopped"][-1]}' in tuned['again']
    study, lines = read_study_lines(tuned['out'])
    mine = dict(kind='task', variant='vb-none', seed=0, mode='full', rate=0)
    line = next(l for l in lines if all(l.get(k) == v for k, v in mine.items()))
    changes = task_plan(study, 'mm_imdb', 'full', line['values'], draws=20)[2]
    whole = open_run_folder(
        finetune(
            finetune_spec(tuned['out'] / 'runs' / 'vb-none-0', 'mm_imdb', changes, threads=1, seed=0, precision='bf16'),
            out=tmp_path / 'whole',
            log=str,
        )
    )
    parts = open_run_folder(tuned['out'] / 'tasks' / 'vb-none-0-mm_imdb-full-rate0')
    a = whole.weights('last')
    b = parts.weights('last')
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    was = (tuned['out'] / 'study.jsonl').read_bytes()
    again = []
    run_study(tuned['file'], tuned['out'], log=again.append)
    assert not [l for l in again if l.startswith('--')] and (tuned['out'] / 'study.jsonl').read_bytes() == was


def test_a_diverged_fine_tuning_is_reported(tuned, tmp_path, monkeypatch):
    "The study goes on without it; its comparison is not run, and the page says why"
    out = tmp_path / 'out'
    shutil.copytree(tuned['out'], out)
    lines = [json.loads(l) for l in (out / 'study.jsonl').read_text().splitlines()]
    gone = dict(kind='task', variant='vb-none', seed=1, task='mm_imdb', mode='frozen')  # at both rates
    lines = [l for l in lines if any(l.get(k) != v for k, v in gone.items())]
    (out / 'study.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    for rate in (0, 1):
        shutil.rmtree(out / 'tasks' / f'vb-none-1-mm_imdb-frozen-rate{rate}')  # a study removes no run by itself

    def wild(*args):
        raise TrainingDiverged('the training loss is nan at step 3')

    monkeypatch.setattr('vlrep.studies.runs.train_task', wild)
    text = []
    run_study(tuned['file'], out, log=text.append)
    assert '   diverged: the training loss is nan at step 3' in text
    assert 'T: not run (vb-none 1 at lr=0.001: diverged; vb-none 1 at lr=0.002: diverged)' in text
    page = (out / 'report.md').read_text()
    assert '(1 seed, scenes only), 2 diverged †' in page  # at both rates
    assert '† vb-none, seed 1, mm_imdb frozen, lr=0.001: the training loss is nan' in page
    again = []
    run_study(tuned['file'], out, log=again.append)  # nor is it tried again and again
    assert not [l for l in again if l.startswith('--')]


@pytest.mark.parametrize('seed', [0, 1])
def test_a_diverged_writer_leaves_its_variants_out(tuned, tmp_path, seed):
    "A variant has no run of the seed of which it has no captions; the rest is judged"
    out = tmp_path / 'out'
    shutil.copytree(tuned['out'], out)
    lines = [json.loads(l) for l in (out / 'study.jsonl').read_text().splitlines()]
    wrote = next(l for l in lines if (l.get('kind'), l.get('variant'), l.get('seed')) == ('run', 'writer', seed))

    def mine(l):
        return (l.get('variant'), l.get('seed')) == ('vb-generated', seed)

    lines = [l for l in lines if l is not wrote and not mine(l)]
    keep = {k: wrote[k] for k in ('variant', 'seed', 'rate', 'values', 'facts', 'spec')}
    lines.append(dict(kind='diverged', **keep, error='the training loss is nan at step 3'))
    (out / 'study.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    text = []
    run_study(tuned['file'], out, log=text.append)
    lines = read_study_lines(out)[1]
    gone = {l['seed']: l['error'] for l in lines if l['kind'] == 'diverged' and l['variant'] == 'vb-generated'}
    assert list(gone) == [seed]
    assert all('its source writer diverged (the training loss is nan' in e for e in gone.values())
    assert sum(l['kind'] == 'run' and l['variant'] == 'vb-generated' for l in lines) == 1
    assert any(l.startswith('T: not run (vb-generated') and 'its source writer diverged' in l for l in text)
    assert f'vb-generated, seed {seed}' in (out / 'report.md').read_text()
    was = (out / 'study.jsonl').read_bytes()
    run_study(tuned['file'], out, log=str)  # known, and not written twice
    assert (out / 'study.jsonl').read_bytes() == was


@pytest.mark.parametrize(
    'old,new,says',
    [
        ('steps = 4, bs = 16, every', 'steps = 5, bs = 16, every', 'plan'),
        ("modes = ['full', 'frozen']", "modes = ['frozen']", 'is no longer part of'),
        ('{lr = 0.002}', '{lr = 0.004}', 'lr: was 0.002, now 0.004'),
    ],
)
def test_a_changed_fine_tuning_is_refused(tuned, tmp_path, old, new, says, capsys):
    text = tuned['file'].read_text()
    assert text.count(old) == 1
    (tmp_path / 's.toml').write_text(text.replace(old, new))
    assert says in refused(capsys, 'study', 'run', tmp_path / 's.toml', '--out', tuned['out'])


def test_the_plan_counts_fine_tunings(tuned):
    study, _ = read_study_lines(tuned['out'])
    narratives = plan_study(study, tuned['out'], log=str)
    assert [narratives[k] for k in ('runs', 'tasks')] == [6, 16] and narratives['hours'] > 0


def test_a_dry_run_of_no_steps_is_refused(capsys):
    text = refused(capsys, 'pretrain', '--method', 'visualbert', '--steps', '0', '--dry-run')
    assert text == 'vlrep pretrain: --dry-run: steps=0 trains nothing, so there is nothing to try out\n'


# ---------------------------------------------------------------- mistakes, one line each

MISTAKES = [
    ("method = 'token_cls'", "method = 'token_cl'", "variants[sets].method: unknown method 'token_cl'"),
    (
        "control = 'labels'",
        "control = 'label'",
        "comparisons[X].control: unknown variant 'label': did you mean 'labels'",
    ),
    ('vocab = 300', 'vocabulary = 300', "variants[sets].changes: unknown field 'vocabulary'"),
    ('vocab = 300', 'vocab = 3', 'variants[sets].changes: vocab=3: must be from 64'),
    ('scenes = 64', 'scenes = 3', 'data: scenes=3: must be from 16'),
    ('extend = 0', "split = 'test'", "rates.split='test': Input should be 'valid'"),
    ('extend = 0', 'splits = 2', "rates.splits: unknown field 'splits': did you mean 'split'"),
    ('extend = 0', "score = 'object'", "rates.score: unknown score 'object'"),
    ('valid = 16', 'valid = 0', 'data.valid=0: there is no validation split'),
    ('draws = 20', 'draws = 1', 'comparisons[X].treatment: draws=1 of variant sets: expected redraws, suc'),
    (
        'bs = 16, visual_width = 8}',
        'bs = 8, visual_width = 8}',
        'variants[labels]: views 96, and variants[sets] has 192',
    ),
    (
        'bs = 16, visual_width = 8}',
        'bs = 16}',
        'variants[labels]: backbone 10, 16, 32, and variants[sets] has 10, 8, 32',
    ),
    ('[[comparisons]]', '[comparison]', "unknown field 'comparison': did you mean 'comparisons'"),
    ('seeds = [0, 1]', 'seeds = [0]', 'seeds: a comparison needs at least 2'),
    ("id = 'X'", "question = 'where'", 'comparisons[0].id: Field required'),
    (
        "treatment = 'sets'",
        "treatment = 'sets'\nquestion = 'where'",
        "comparisons[X].question: unknown question 'where'",
    ),
    (
        "treatment = 'sets'",
        "treatment = 'sets'\ntable = 'where'",
        "comparisons[X].question: unknown question 'objects'",
    ),
    (
        "treatment = 'sets'",
        "treatment = 'sets'\ndirection = 2",
        'comparisons[X].direction=2: Input should be 1, 0 or -1',
    ),
    (
        "treatment = 'sets'\ncontrol = 'labels'",
        "treatment = 'labels'\ncontrol = '@random'",
        'comparisons[X].control: @random needs baselines = true in the changes of',
    ),
    ('grid = [{cnn_lr = 0.5}, ', 'grid = [', 'variants[labels].grid: 1 rates, and rates.grid has 2'),
    ("name = 'world'", "name = 'flickr8k'", "data: unknown field 'scenes'"),
    ("name = 'tiny'", 'name = 3', 'name=3: Input should be a valid string'),
    (
        "name = 'tiny'",
        "name = 'tiny'\nequal = [['views']]",
        "equal[0]: Input should be 'views', 'images', 'captions', 'steps' or 'bac",
    ),
    (
        "[[variants]]\nname = 'sets'",
        "[[variants]]\nname = 'se/ts'",
        "variants[se/ts].name='se/ts': letters, digits, -, _ and . are allowed; t",
    ),
]


@pytest.mark.parametrize('old,new,says', MISTAKES, ids=[m[2][:40] for m in MISTAKES])
def test_a_mistake_is_one_line_with_file_and_field(tmp_path, capsys, old, new, says):
    assert old in STUDY
    (tmp_path / 's.toml').write_text(STUDY.replace(old, new, 1))
    err = refused(capsys, 'study', 'plan', tmp_path / 's.toml')
    assert err.startswith(f'vlrep study: {tmp_path / "s.toml"}: ') and says in err


@pytest.mark.parametrize(
    'words,says',
    [
        (('pln',), 'Available subcommands: plan, run, report'),
        (('plan',), 'Missing from vlrep study plan: FILE'),
        (('run', 'a.toml'), 'Missing from vlrep study run: --out'),
        (('report', 'nowhere'), 'nowhere: no such file'),
        (('run', 'a.toml', '--out', 'b', '--jobs', '0'), '--jobs: 0: at least 1'),
        (('plan', 'nowhere.toml'), 'nowhere.toml: no such file'),
    ],
)
def test_mistyped_words_are_refused(capsys, words, says):
    assert says in refused(capsys, 'study', *words)


# ---------------------------------------------------------------- judging, by hand


def seen(each, s_scene=0.0):
    mean = sum(each) / len(each)
    s = math.sqrt(sum((e - mean) ** 2 for e in each) / (len(each) - 1))
    return Difference(mean, None, dict(enumerate(each)), s, s_scene)


@pytest.mark.parametrize(
    'diff,half,direction,margin,want',
    [
        (2, 1, 1, 1, 'replicates'),
        (2, 1, -1, 1, 'reversed'),
        (-2, 1, 1, 1, 'reversed'),
        (-2, 1, -1, 1, 'replicates'),
        (0.5, 0.4, 1, 1, 'equivalent (within ± 1)'),
        (0.5, 0.6, 1, 1, 'not resolved (± 0.6)'),
        (0.5, 0.4, 1, 0.8, 'replicates'),
        (1, 1, 1, 1, 'not resolved (± 1.0)'),
        (0.5, 0.4, 0, 1, 'replicates (equivalent, within ± 1)'),
        (-0.5, 0.4, 0, 1, 'replicates (equivalent, within ± 1)'),
        (0.5, 0.6, 0, 1, 'not resolved (± 0.6)'),
        (1.5, 0.4, 0, 1, 'different (by more than 1)'),
        (-1.5, 0.4, 0, 1, 'different (by more than 1)'),
        (1.5, 0.6, 0, 1, 'not resolved (± 0.6)'),
    ],
)
def test_verdicts_are_those_of_the_interval(diff, half, direction, margin, want):
    assert verdict(diff, half, direction, margin) == want


@pytest.mark.parametrize(
    'p,want',
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.02], [0.02]),
        ([0.03, 0.02, 0.9, 0.01], [0.06, 0.06, 0.9, 0.04]),
        ([0.4, 0.5], [0.8, 0.8]),
        ([], []),
    ],
)
def test_holm_correction_is_that_worked_out_by_hand(p, want):
    assert holm(p) == pytest.approx(want)


def test_p_values_are_those_worked_out_by_hand():
    "Two seeds, 1 and 3: t = 2 with one degree of freedom; agreeing seeds: the normal tail at two deviations is 2.275 %"
    assert p_value(seen([1, 3])) == pytest.approx(1 - 2 / math.pi * math.atan(2))
    assert p_value(seen([2, 2, 2], 1.0)) == pytest.approx(0.0455, abs=1e-4)
    assert p_value(seen([-1, 1])) == 1 and p_value(seen([3, 3])) == 0


def test_two_one_sided_tests_are_those_worked_out_by_hand():
    """A tie within 2: two seeds, 0 and 2, have the mean 1 and the standard error 1: the nearer edge is t = 1 away

    With one degree of freedom each tail is 1/4, and each of the two tests is at 2.5 %. A mean of 3 is as far outside
    """
    for each in ([0, 2], [-2, 0], [2, 4], [-4, -2]):
        assert p_value(seen(each), 2.0) == pytest.approx(0.5)
    assert p_value(seen([0, 0, 0], 1.0), 2.0) == pytest.approx(0.0455, abs=1e-4)  # the normal tail at two
    assert p_value(seen([2, 2]), 2.0) == 1 and p_value(seen([1, 1]), 2.0) == 0


def test_the_seeds_that_a_difference_needs_are_counted():
    "Spread 1, size 1: 2.571/sqrt(6) = 1.05 is too wide, 2.447/sqrt(7) = 0.92 is not; scenes of 0.2 make 1.005 of it"
    assert needed_seeds(seen([-1, 0, 1]), 1.0) == 7
    assert needed_seeds(seen([-1, 0, 1], 0.2), 1.0) == 8
    assert needed_seeds(seen([-1, 0, 1], 0.52), 1.0) == math.inf


# ---------------------------------------------------------------- the studies of this project

FILES = sorted((ROOT / 'data' / 'studies').glob('*.toml'))


@pytest.mark.parametrize('file', FILES, ids=lambda p: p.stem)
def test_every_committed_study_is_ready_to_run(file):
    study = read_study(file)
    assert study.name == file.stem and study.comparisons and len(study.seeds) >= 3
    assert len(study.seeds) >= 5 and study.min_gain >= 2
    grids = [study.grid(a) for a in study.variants] if study.rates else [study.finetune.grid]
    assert all(len(grid) >= 3 for grid in grids)
    assert {'views', 'images', 'steps', 'backbone'} & set(study.equal) and all(c.text for c in study.comparisons)


def test_there_are_studies():
    assert {'virtex', 'loctex', 'pretraining_right', 'mct'} <= {f.stem for f in FILES}
