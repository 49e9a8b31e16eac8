"vlrep reproduce on a small plan: rehearsed from end to end, stopped, damaged, repaired, with two seeds"

import contextlib
import io
import os
import re
import shutil
import signal
import time

import forked
import pytest
from run_folders import leaving
from tiny_plans import TINY_PLAN

import vlrep.experiments.resolve_options as resolve_options
from vlrep.cli import main
from vlrep.core.files import read_json, write_json
from vlrep.methods.base import METHODS
from vlrep.reproduce.tables import REHEARSED
from vlrep.training.run_folder import Run, open_run_folder

PLAN = TINY_PLAN.replace('paper = [nan]', 'paper = [50.1]')
SMALLER = dict(scenes=64, valid=16, probe=40, probe_held=40, test=40, shown=4)  # than those of --tiny


def reproduce(folder, action, *words):
    "What `vlrep reproduce` prints, and its exit code"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(['reproduce', action, str(folder / 'tiny.toml'), '--out', str(folder / 'runs'), *words])
            code = 0
        except SystemExit as e:
            code = e.code
    return out.getvalue(), code


def rehearse(folder, *words):
    return reproduce(folder, 'run', '--rehearse', *words)


def rows(folder):
    "Rows of the table, by their labels"
    lines = (folder / 'runs' / 'tables.md').read_text().splitlines()
    return {r[1]: r[2:-1] for l in lines if len(r := [x.strip() for x in l.split('|')]) == 9}


@pytest.fixture(scope='module')
def small():
    "Rehearsals of even fewer scenes"
    with pytest.MonkeyPatch.context() as m:
        for name, n in SMALLER.items():
            m.setitem(resolve_options._TINY, name, n)
        yield


@pytest.fixture(scope='module')
def done(tmp_path_factory, small):
    """A plan that is rehearsed in three calls, with what each printed, and its exit code

    In the first a signal comes in the second step of the first training. In the second a file lies where the folder of
    the second network should be. Nothing is in the way of the third
    """
    folder = tmp_path_factory.mktemp('paper')
    (folder / 'tiny.toml').write_text(PLAN)
    with pytest.MonkeyPatch.context() as m:
        m.setitem(METHODS, 'supervised', leaving(METHODS['supervised']))
        stopped = rehearse(folder)
    (folder / 'runs' / 'turns-0').touch()
    second = rehearse(folder)
    tables = rows(folder)
    (folder / 'runs' / 'turns-0').unlink()
    third = rehearse(folder)
    return dict(folder=folder, stopped=stopped, second=second, tables=tables, third=third)


def test_a_signal_stops_a_rehearsal(done):
    "And not only the command that it came to"
    out, code = done['stopped']
    assert code == 143 and 'stopped; the same command continues where it stopped' in out and 'turns' not in out


def test_a_run_that_was_stopped_is_resumed(done):
    out, _ = done['second']
    assert re.match(r'1/4 labels-0: [\d.]+ s\n2/4 labels-0-scenes: [\d.]+ s\n', out), out
    log = (done['folder'] / 'runs' / 'logs' / 'labels-0.log').read_text()
    assert 'stopped by SIGTERM after step 2' in log and 'resuming from step 2' in log


def test_a_command_that_fails_leaves_the_others(done):
    out, code = done['second']
    *_, turns, scenes, tables, last = out.strip().splitlines()
    assert code == 1 and '3/4 turns-0: failed, ' in turns and 'turns-0.log)' in turns, out
    assert scenes == '4/4 turns-0-scenes: left out, it needs turns-0' and tables.endswith('tables.html')
    assert last == '2 commands failed or were left out; the same call tries them again'
    assert done['tables']['Labels'][-1] == 'done' and done['tables']['Turns'][-1] == 'to do'


def test_the_same_call_does_what_is_left(done):
    out, code = done['third']
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ['1/4 labels-0: done before', '2/4 labels-0-scenes: done before'], out
    assert re.match(r'3/4 turns-0: [\d.]+ s', lines[2]) and re.match(r'4/4 turns-0-scenes: [\d.]+ s', lines[3])
    assert {label: row[-1] for label, row in rows(done['folder']).items() if label in ('Labels', 'Turns')} == {
        'Labels': 'done',
        'Turns': 'done',
    }


def test_the_page_says_that_it_is_a_rehearsal(done):
    runs = done['folder'] / 'runs'
    for name in ('tables.md', 'tables.html'):
        text = (runs / name).read_text()
        assert REHEARSED in text and 'the photos are private' in text and '2 of 3 are filled' in text
    reproduce(done['folder'], 'table')  # of a run that is none
    assert REHEARSED not in (runs / 'tables.md').read_text() and 'One row needs' in (runs / 'tables.md').read_text()


def test_the_plan_prints_tables_reasons_commands_and_their_states(done):
    out, code = reproduce(done['folder'], 'plan', '--rehearse', '--seeds', '2', '1.labels')
    lines = out.splitlines()
    assert code == 0 and lines[0] == 'A tiny paper (Somebody, 2020)' and lines[1] == 'table 1, Tasks'
    assert lines[2].split() == ['1.labels', 'Labels']
    states = [line.split(' vlrep ') for line in lines[3:-2]]
    assert [s.strip() for s, _ in states] == ['done', 'done', 'to do', 'to do']
    assert [words.split()[0] for _, words in states] == ['pretrain', 'evaluate'] * 2
    assert lines[-2] == '4 commands: 2 done, 2 to do' and 'measure' in lines[-1]
    out, _ = reproduce(done['folder'], 'plan', '--rehearse')
    assert 'Stock: the photos are private\n' in out


def test_a_mistyped_row_is_refused(done):
    out, code = reproduce(done['folder'], 'plan', 'lables')
    assert code == 2 and "unknown table or row 'lables': did you mean 'labels'?" in out


def test_two_seeds_have_a_mean_and_a_spread(done, tmp_path):
    "The first seed is there; the second is trained; the difference is that of the mean"
    shutil.copytree(done['folder'], tmp_path, dirs_exist_ok=True)
    out, code = rehearse(tmp_path, '--seeds', '2', 'labels')
    assert code == 0 and [l.rpartition(' ')[2] for l in out.splitlines()[:2]] == ['before', 'before'], out
    assert read_json(tmp_path / 'runs' / 'labels-1' / 'recipe.json')['seed'] == 1
    _, paper, ours, difference, seeds, status = rows(tmp_path)['Labels']
    mean, spread = re.fullmatch(r'([\d.]+) ± ([\d.]+)', ours).groups()
    assert (seeds, status) == ('2', 'done') and float(spread) > 0
    assert float(difference) == pytest.approx(float(mean) - float(paper), abs=0.11)


def test_measured_times_become_hours(tmp_path):
    "Of what was measured alone; a damaged file of times is named, and kept"
    (tmp_path / 'tiny.toml').write_text(PLAN)
    file = tmp_path / 'costs.json'
    out, code = reproduce(tmp_path, 'measure', 'labels', '--bs', '4', '--measured', str(file))
    assert code == 0 and re.fullmatch(r'labels: \d+\.\d\d s per step of 4, \d+\.\d GB\n', out), out
    (row,) = read_json(file)['rows']
    assert (row['method'], row['bs']) == ('supervised', 4) and 0 < row['low'] <= row['step'] <= row['high']
    row['step'] = row['low'] = row['high'] = 3600.0 * 4  # an hour an image
    write_json(file, dict(rows=[row]))
    out, _ = reproduce(tmp_path, 'plan', '--measured', str(file))
    assert 'to do       64.0 h  vlrep pretrain --method supervised' in out  # four steps of 16
    assert 'left to do: 64 hours of one device (64 to 64 ' in out and '3 commands were not measured' in out
    file.write_text('{"rows": [')
    for action in ('plan', 'measure'):
        out, code = reproduce(tmp_path, action, '--measured', str(file))
        assert code == 2 and 'costs.json' in out and file.read_text() == '{"rows": ['


def test_a_damaged_result_is_made_again_and_a_damaged_run_is_named(done, tmp_path):
    "A result by the same call. What is left of a damaged recipe cannot be taken up: the other rows go on"
    shutil.copytree(done['folder'], tmp_path, dirs_exist_ok=True)
    (tmp_path / 'runs' / 'labels-0' / 'recipe.json').write_text('{')
    with open(tmp_path / 'runs' / 'turns-0' / 'result.jsonl', 'r+b') as f:
        f.truncate(20)
    assert 'damaged' in reproduce(tmp_path, 'plan')[0]
    out, code = rehearse(tmp_path)
    assert code == 1 and re.search(r'^1/4 labels-0: failed, .*recipe.json', out), out
    assert re.search(r'^3/4 turns-0: [\d.]+ s$', out, re.M) and not open_run_folder(tmp_path / 'runs/turns-0').missing()
    assert rows(tmp_path)['Turns'][-1] == 'done'
    shutil.rmtree(tmp_path / 'runs' / 'labels-0')
    assert '2 commands: 2 to do\n' in reproduce(tmp_path, 'plan', 'labels')[0]


def test_a_signal_ends_the_command_that_runs(tmp_path):
    "It saves a checkpoint, and nothing outlives the parent: code 143, and a run that can be resumed"
    (tmp_path / 'tiny.toml').write_text(PLAN.replace('steps = 4', 'steps = 4000'))
    p = forked.start(['reproduce', 'run', tmp_path / 'tiny.toml', '--out', tmp_path / 'runs'], tmp_path)
    run = Run(tmp_path / 'runs' / 'labels-0')
    until = time.monotonic() + 120
    try:
        while not run.saved() and p.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert p.poll() is None and run.saved(), p.said()
        (child,) = p.forks()
        p.send_signal(signal.SIGTERM)
        out, err = p.communicate(60)
    finally:
        p.kill()
    assert p.returncode == 143 and err.endswith('stopped; the same command continues where it stopped\n'), (out, err)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    log = (tmp_path / 'runs' / 'logs' / 'labels-0.log').read_text()
    assert f'stopped by SIGTERM after step {run.saved()[-1]}' in log


def test_commands_whose_data_is_not_there_are_not_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = []
    monkeypatch.setattr('vlrep.reproduce.run.run_process', lambda words, *a, **k: begun.append(words))
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as e:
        main(['reproduce', 'run', 'virtex', '1', '--root', 'data'])
    text = out.getvalue()
    assert e.value.code == 1 and not begun
    assert 'not there: data/coco' in text and 'bicaptioning-0: left out, it needs data/coco\n' in text
    assert 'bicaptioning-0-voc07: left out, it needs bicaptioning-0\n' in text
