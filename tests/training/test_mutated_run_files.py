"""Fields of a run's files with values of other types: one line that names the file, or no difference; never a traceback

The checksum in `recipe.json` is made to fit, as somebody would who means it.
"""

import json
import shutil

import pytest
from PIL import Image
from run_folders import build, facts
from tools import STUDY, refused

from vlrep.cli import main
from vlrep.core.files import read_json, write_json
from vlrep.core.run_files import facts_seal, log_rows, read_log
from vlrep.core.text_files import read_toml
from vlrep.reports.reference_curves import compare_curve
from vlrep.studies.runs import recorded_speed, recorded_tasks
from vlrep.training.run_folder import open_run_folder

OBJECT = {'a': {'b': []}}
ODD = [None, -1, float('inf'), 'x', [], OBJECT, True]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run with every file that a command reads, and one that was fine-tuned from it, as far as its facts"
    d = tmp_path_factory.mktemp('files')
    run = build(d / 'run')
    shown = facts()
    (run / 'result.jsonl').write_text(json.dumps(shown['result.jsonl']) + '\n')
    write_json(run / 'samples.json', shown['samples.json'])
    (run / 'log.csv').write_text('step,train_loss,valid_loss,lr0,lr1\n3,2.5,,.1,.2\n9,2.,2.2,.1,.2\n')
    Image.new('RGB', (40, 40)).save(d / 'x.png')
    return d


def put_facts(run, d):
    "Facts with a checksum that fits, infinite numbers as JSON has them"
    d = {k: v for k, v in d.items() if k != 'sha256'}
    text = json.dumps(dict(d, sha256=facts_seal(json.loads(json.dumps(d)))))
    (run / 'recipe.json').write_text(text.replace('Infinity', '1e400'))


def ask(words, capsys):
    "Exit code and errors of a command"
    capsys.readouterr()
    try:
        main([str(w) for w in words])
    except SystemExit as e:
        return e.code or 0, capsys.readouterr().err
    return 0, capsys.readouterr().err


def held(words, names, capsys, at):
    "The command says in one line which file or folder it is, or does what it does"
    code, err = ask(words, capsys)
    assert 'Traceback' not in err and 'where it happened' not in err, (at, err)
    assert err.count('\n') == (code != 0), (at, err)
    assert not code or any(str(n) in err for n in names), (at, err)
    return code != 0


FINE = dict(
    task='vqa',
    data='world',
    plan={},
    run='RUN',
    which='best',
    root=None,
    labels_file=None,
    region_files=None,
    region_store=None,
    first_weights='x',
    grid_and_text=False,
    max_len=9,
    side=32,
    classes=3,
    examples={'train': 'x'},
)
MORE = dict(
    plugins=[],
    notes=[],
    inexact=[],
    weights_file=None,
    root=None,
    backbone=None,
    weights=None,
    plugin_code=None,
    contents=None,
    images={'train': 'x'},
    workers=0,
    save_every=0,
    max_corrupt=None,
    accumulate=1,
    world_size=1,
    processor='x',
    commit='x',
    finetune=FINE,
)


def places(run):
    "Each fact of a run, and each of a fine-tuning"
    present = read_json(run / 'recipe.json')
    return sorted({*present, *MORE} - {'sha256'})


def test_facts_of_a_run_with_odd_values_open_or_name_the_file(whole, tmp_path, capsys):
    "Every fact x every odd value, by every command that opens a run"
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    plain = {**read_json(run / 'recipe.json'), **{k: v for k, v in MORE.items() if k != 'finetune'}}
    count = refusals = 0
    for name in places(run):
        for odd in ODD:
            put_facts(run, {**plain, name: odd})
            wanted = [['resume', run, '--bs', 0]]
            if odd in (-1, 'x', []):
                wanted.append(['report', run])
            if odd in (-1, OBJECT):
                wanted += [['caption', run, whole / 'x.png'], ['finetune', run, '--task', 'vqa', '--steps', 0]]
            for words in wanted:
                count += 1
                refusals += held(words, [run, 'bs=0', 'steps=0'], capsys, (name, odd, words[0]))
    assert count > 300 and refusals > 250
    put_facts(run, plain)
    assert not ask(['report', run], capsys)[0] and not ask(['caption', run, whole / 'x.png'], capsys)[0]


def test_facts_of_a_fine_tuning_with_odd_values_open_or_name_the_file(whole, tmp_path, capsys):
    run = tmp_path / 'tuned'
    shutil.copytree(whole / 'run', run)
    plain = read_json(run / 'recipe.json')
    write_json(run / 'labels.json', ['a', 'b', 'c'])
    for name in FINE:
        for odd in ODD:
            put_facts(run, {**plain, 'finetune': {**FINE, name: odd}})
            wanted = [['report', run], ['resume', run]]
            if odd == OBJECT:
                wanted.append(['caption', run, whole / 'x.png'])
            for words in wanted:
                held(words, [run, 'recipe.json', 'finetune'], capsys, (name, odd, words))


def nested(x, path=()):
    "The paths to all values in a nest of dicts and lists, of a list its first one"
    items = x.items() if isinstance(x, dict) else enumerate(x[:1]) if isinstance(x, list) else ()
    for k, v in items:
        yield (*path, k)
        yield from nested(v, (*path, k))


def with_odd(d, path, odd):
    d = json.loads(json.dumps(d))
    at = d
    for k in path[:-1]:
        at = at[k]
    at[path[-1]] = odd
    return d


@pytest.mark.parametrize('name', ['result.jsonl', 'samples.json'])
def test_results_and_samples_with_odd_values_are_shown_or_name_the_file(whole, name, tmp_path, capsys):
    "Every field in them, by the page of a run, of several, and the times that a study is planned with"
    run = tmp_path / 'run'
    other = tmp_path / 'other'
    for r in (run, other):
        shutil.copytree(whole / 'run', r)
    d = facts()[name]
    count = 0
    for path in nested(d):
        for odd in ODD[::2]:
            text = json.dumps(with_odd(d, path, odd), indent=None).replace('Infinity', '1e400')
            (run / name).write_text(text + '\n')
            for words in (['report', run], ['report', run, other, '--out', tmp_path / 'both.html']):
                if len(words) > 2 and (name == 'samples.json' or len(path) > 2):
                    continue
                count += 1
                held(words, [run], capsys, (path, odd, words[0]))
            for ask_times in (recorded_speed, recorded_tasks):  # vlrep study plan --recorded
                try:
                    ask_times(tmp_path)
                except ValueError as e:
                    assert str(run) in str(e), (path, odd, e)
    assert count > 200


DEEP = [
    '[' * 100_000,
    '{"a":' * 100_000,
    '[' * 900 + ']' * 900,
    '\ufeff{}',
    '\x00',
    '9' * 5000,
    '',
    '[',
    '{}',
    '[]',
    'null',
    '"x"',
    '3',
    '\ud800'.encode('utf-8', 'surrogatepass').decode('latin-1'),
]
FILES = (
    'recipe.json',
    'result.jsonl',
    'samples.json',
    'log.csv',
    'skipped.jsonl',
    'evaluations.jsonl',
    'tokenizer.model',
)


@pytest.mark.parametrize('name', FILES)
def test_damaged_files_of_a_run_are_named(whole, name, tmp_path, capsys):
    "Nested too deeply, empty, cut off, of another type, of bytes that are no text"
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    for content in (*(t.encode() for t in DEEP), b'\xff\xfe', bytes(range(256)), b'a,b\n"'):
        (run / name).write_bytes(content)
        wanted = [['report', run]]
        if name in ('recipe.json', 'tokenizer.model'):
            wanted.append(['caption', run, whole / 'x.png'])
        if name == 'recipe.json':
            wanted.append(['resume', run, '--bs', 0])
        for words in wanted:
            held(words, [run, 'bs=0'], capsys, (name, content[:20], words[0]))


@pytest.mark.parametrize('row', ['3,x,,.1,.2', '3,2.5', '3,2.5,,.1,.2,7', '3 2.5'])
def test_all_readers_of_a_log_name_its_damaged_line(whole, row, tmp_path, capsys):
    "A word for a number, a row that is too short or too long: the same words by each reader; a torn last row is none"
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    good = (run / 'log.csv').read_text()
    (run / 'log.csv').write_text(f'{good}{row}\n3,2.5,,.1,.2\n')
    damage = f'{run / "log.csv"}: line 4 is damaged: {row!r}'
    for read in (
        open_run_folder(run).log,
        lambda: read_log(run / 'log.csv'),
        lambda: log_rows(run),
        lambda: compare_curve(run),
    ):
        with pytest.raises(ValueError) as e:
            read()
        assert str(e.value) == damage
    assert damage in refused(capsys, 'report', run)
    (run / 'log.csv').write_text(good + '3,2.')
    assert open_run_folder(run).log() == log_rows(run) == read_log(run / 'log.csv') and len(log_rows(run)) == 2
    main(['report', str(run)])


# ---------------------------------------------------------------- a study

LINES = [
    dict(
        kind='run',
        variant='sets',
        seed=0,
        rate=0,
        values={},
        method='token_cls',
        numbers={'table': [], 'validation': 1.0},
        facts={},
        seconds={'a': 1.0},
        curve=[[1, 2.0, 3.0]],
    ),
    dict(kind='diverged', variant='labels', seed=0, rate=0, values={}, error='x', facts={}),
    dict(kind='begun', variant='sets', seed=1, rate=0, values={}, facts={}, spec={}),
    dict(
        kind='task',
        variant='sets',
        seed=0,
        rate=0,
        values={},
        base={},
        task='vqa',
        mode='full',
        method='token_cls',
        numbers={'validation': 1.0},
        facts={},
        seconds={},
        unstable='',
    ),
]

# a study is checked by building the recipe of each rate: there is one, and every field of a study is still there
ONE_RATE = STUDY.replace('{cnn_lr = 0.2}, ', '').replace('{cnn_lr = 0.5}, ', '')


def test_lines_of_a_study_with_odd_values_are_shown_or_name_the_file(tmp_path, capsys):
    "Each field with three of the odd values in turn: the page is made, and the last time the study goes on"
    (tmp_path / 's.toml').write_text(ONE_RATE)
    head = dict(kind='study', file='s.toml', table=read_toml(tmp_path / 's.toml'))
    folder = tmp_path / 'study'
    folder.mkdir()

    def write(lines):
        (folder / 'study.jsonl').write_text(''.join(json.dumps(l).replace('Infinity', '1e400') + '\n' for l in lines))

    refusals = 0
    fields = [(i, path) for i, line in enumerate([head, *LINES]) for path in nested(line)]
    for k, (i, path) in enumerate(fields):
        for n in range(3):
            odd = ODD[(k + 2 * n) % len(ODD)]
            lines = [head, *LINES]
            lines[i] = with_odd(lines[i], path, odd)
            write(lines)
            refusals += held(['study', 'report', folder], [folder, 's.toml'], capsys, (i, path, odd))
        if i == 0 and len(path) > 2:
            continue
        held(['study', 'run', tmp_path / 's.toml', '--out', folder], [folder, 's.toml'], capsys, (i, path, odd))
    assert refusals > 200
