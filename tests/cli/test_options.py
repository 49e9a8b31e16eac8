"Every field and every option: what is invalid is refused at once and by name, what is accepted works"

import dataclasses
import math
import re
import subprocess
import sys
import typing

import pytest
from tools import ENV, WORLD, few_photos, refused

from vlrep.core.fields import check_fields, rule_of
from vlrep.datasets.base import DATASETS
from vlrep.evaluation.base import EVALUATIONS
from vlrep.evaluation.finetune.plan import TASKS, FinetunePlan
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import get_recipe
from vlrep.experiments.resolve_options import resolve_options, tiny_changes
from vlrep.experiments.spec import finetune_spec, run_spec
from vlrep.experiments.splits import open_splits
from vlrep.methods.base import METHODS
from vlrep.training.run_folder import open_run_folder

pytestmark = pytest.mark.usefixtures('few_regions')

SMALL = [
    'scenes=64',
    'valid=8',
    'probe=40',
    'probe_held=40',
    'test=40',
    'shown=4',
    'point=4',
    'steps=2',
    'warmup=1',
    'bs=8',
    'bert_steps=20',
    'region_steps=20',
]


def parts(method):
    "Recipe and job so small that two steps take a fraction of a second"
    both = [get_recipe(method, 'world'), DATASETS['world'].options]
    names = {f.name for p in both for f in dataclasses.fields(p)}
    return resolve_options(
        method, None, [*tiny_changes(*both), *(c for c in SMALL if c.split('=')[0] in names)], 'world'
    )


def trains(method, recipe, options):
    "The held-out loss after two steps of training"
    splits = open_splits(METHODS[method], recipe, options, 'world')
    learn = train_on(
        METHODS[method],
        recipe,
        splits,
        'world',
        METHODS[method].train_tokenizer(recipe, splits['train']),
        precision='fp32',
        log=str,
    )
    return float(learn.recorder.values[-1][1])


def odd(kind):
    "What a person may write by mistake, for a field of this type"
    return {
        int: ['0', '-1', 'nan', 'inf', str(10**30), '1.5', 'many', ''],
        float: ['0', '-1', 'nan', 'inf', '-inf', '1e300', 'many', ''],
        bool: ['2', 'maybe', 'nan', '-1', ''],
        str: ['0', '-1', 'nan', 'inf', '1e300', 'foo', ''],
        tuple: ['many', 'nan', '-1,many'],
    }[kind]


def fields_of_all():
    "Each recipe's fields: all of those of three methods, of the others those that no class before them has"
    seen = set()
    out = []
    for m in ('virtex', 'supervised', 'loctex', *METHODS):
        R = METHODS[m].recipe
        for f in dataclasses.fields(R):
            owner = next(c for c in R.__mro__ if f.name in vars(c).get('__annotations__', ()))
            again = (owner, f.name) in seen and m not in ('virtex', 'supervised', 'loctex')
            if f.name != 'task' and not again and (m, f.name) not in out:
                out.append((m, f.name))
            seen.add((owner, f.name))
    return out


@pytest.mark.parametrize('method,name', fields_of_all())
def test_every_field_of_every_recipe_is_refused_by_name_or_trains(method, name, monkeypatch):
    "Refused with one line that names the field, or two steps of training go well"
    recipe, options = parts(method)
    hints = typing.get_type_hints(type(recipe))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)  # names of a BERT are not looked up
    done = set()
    for text in odd(hints[name]):
        try:
            new, _ = resolve_options(method, None, [f'{name}={text}'], 'world', [recipe, options])
        except ValueError as e:
            assert name in str(e) and '\n' not in str(e), (text, e)
            continue
        value = getattr(new, name)
        assert math.isfinite(value) if isinstance(value, float) else True
        if value in done or name in ('lr', 'cnn_lr', 'text_lr') and value > 10:
            continue
        done.add(value)
        if (method, name) in ((m, n) for m in METHODS for n in ('bert', 'text')) and value != getattr(recipe, name):
            with pytest.raises(ValueError, match=f'^{re.escape(value)}: no such folder') as e:
                trains(method, new, options)
            assert '\n' not in str(e.value) and 'give the folder of a BERT' in str(e.value)
            continue
        if name == 'region_files' and value:
            with pytest.raises(ValueError, match=f'^{re.escape(value)}: no stored regions there'):
                trains(method, new, options)
            continue
        assert math.isfinite(trains(method, new, options)), (text, value)


@pytest.mark.parametrize('data', DATASETS)
def test_every_field_of_every_job_is_refused_by_name_or_within_bounds(data):
    "Refused by name, or within the bounds that are written beside it"
    method = 'loctex' if data == 'world' else 'virtex' if 'captions' in DATASETS[data].provides else 'visualbert'
    for f in dataclasses.fields(DATASETS[data].options):
        for text in odd(typing.get_type_hints(type(DATASETS[data].options))[f.name]):
            try:
                recipe, options = resolve_options(method, None, [f'{f.name}={text}'], data)
            except ValueError as e:
                assert f.name in str(e) and '\n' not in str(e), (f.name, text, e)
            else:
                usual = str(getattr(DATASETS[data].options, f.name))
                assert check_fields(options) is options
                free = rule_of(typing.get_type_hints(type(options), include_extras=True)[f.name]) == (str, None)
                assert free or text in ('0', '2', '-1', 'maybe', usual), (f.name, text)


SIZES = {type(s.options) for t in TASKS.values() for s in t.sources.values() if s.options}


@pytest.mark.parametrize('task', TASKS)
def test_every_field_of_fine_tuning_is_refused_by_name_or_within_bounds(task):
    "Those of the plan and of the sizes: refused by name, or within the bounds that are written beside it"
    source = TASKS[task].source('world')
    for part in (TASKS[task].plan('world'), source.options):
        for f in dataclasses.fields(part):
            for text in odd(typing.get_type_hints(type(part))[f.name]):
                try:
                    spec = finetune_spec('run', task, [f'{f.name}={text}'], 'world')
                except ValueError as e:
                    assert f.name in str(e) and '\n' not in str(e), (f.name, text, e)
                else:
                    assert check_fields(spec.plan) is spec.plan and check_fields(spec.options) is spec.options
                    assert text in ('0', '2', '-1', 'maybe'), (f.name, text)


NUMBERS = [(e, k, o) for e, x in EVALUATIONS.items() for k, o in x.options.items() if type(o.default) in (int, float)]


@pytest.mark.parametrize('on,name,option', NUMBERS, ids=[f'{e}-{k}' for e, k, _ in NUMBERS])
def test_every_number_of_every_evaluation_is_checked_before_the_run_is_opened(on, name, option, capsys):
    "Before the run is opened"
    name = name.replace('_', '-')
    assert option.bounds and option.bounds.low <= option.default <= option.bounds.high
    for text in odd(type(option.default)):
        if text == str(option.default):
            continue
        assert f'--{name}' in refused(capsys, 'evaluate', 'nowhere', '--on', on, f'--{name}={text}'), text
    words = ['evaluate', 'nowhere', '--on', on, f'--{name}={option.default}']
    root = ['--root', '.'] if EVALUATIONS[on].root_help else []
    assert 'nowhere: no such run' in refused(capsys, *words, *root)


def test_the_walk_sees_a_field_without_bounds():
    """A plain annotation lets nan through to nobody, but a silly number to the training

    Recipes have a rule for every number
    """
    jobs = {type(d.options) for d in DATASETS.values()} | {FinetunePlan} | SIZES
    for R in {m.recipe for m in METHODS.values()} | jobs:
        for n, h in typing.get_type_hints(R, include_extras=True).items():
            kind, rule = rule_of(h)
            assert kind in (bool, str) or rule, f'{R.__name__}.{n} has no bounds'


def test_the_smallest_job_is_enough_for_every_evaluation(tmp_path):
    "The lower bounds of the world's job are enough for every question that is asked of it"
    from vlrep.experiments.pretrain import pretrain

    low = {
        f.name: rule_of(typing.get_type_hints(type(DATASETS['world'].options), include_extras=True)[f.name])[1]
        for f in dataclasses.fields(DATASETS['world'].options)
    }
    least = [f'{k}={low[k].low}' for k in ('scenes', 'valid', 'probe', 'probe_held', 'test', 'shown')]
    net = [
        c
        for c in WORLD
        if c.split('=')[0]
        not in ('scenes', 'valid', 'probe', 'probe_held', 'test', 'shown', 'point', 'steps', 'bs', 'vocab')
    ]
    for method, more in (('virtex', ['point=1']), ('loctex', ['point=1', 'baselines=false'])):
        out = pretrain(
            run_spec(method, [*least, *net, *more, 'steps=2', 'warmup=1', 'bs=4', 'vocab=64'], threads=1),
            out=tmp_path / method,
            log=str,
        )
        assert (out / 'report.html').is_file() and open_run_folder(out).results()[-1]['numbers']['table']


# ---------------------------------------------------------------- options

WRONG = {
    '--threads 100000': '--threads 100000: must be from 1 to 512',
    '--threads 0': '--threads 0',
    '--root x': '--root x: world needs no files',
    '--workers 9999': '--workers 9999',
    '--accumulate 0': '--accumulate 0',
    '--accumulate 100 --set bs=64': '--accumulate 100: a batch has 64 images',
    '--save-every -1': '--save-every -1',
    '--method loctex --accumulate 64': 'have no negatives',
}


@pytest.mark.parametrize('words', WRONG)
def test_invalid_options_are_refused_by_name(words, capsys):
    assert WRONG[words] in refused(capsys, 'pretrain', *words.split())


PATHS = {
    'pretrain': ['--out', '--root', '--weights', '--plugin'],
    'export x --to timm': ['--out'],
    'report x y': ['--out'],
    'benchmark': ['--out'],
    'study run x.toml': ['--out'],
    'study report x': ['--out'],
    'data check coco': ['--root'],
    'reproduce run virtex': ['--root', '--out'],
    'reproduce plan virtex': ['--measured'],
    'shards --data world': ['--out'],
    'finetune x --task vqa': ['--root', '--out', '--labels', '--region-files'],
    'regions x': ['--out'],
    'evaluate x --on captions': ['--root'],
}


@pytest.mark.parametrize('words,option', [(w, o) for w, options in PATHS.items() for o in options])
def test_an_empty_path_is_refused(words, option, capsys, tmp_path, monkeypatch):
    "Refused; an empty name would be the folder where one is"
    monkeypatch.chdir(tmp_path)
    text = refused(capsys, *words.split(), option, '')
    assert option in text and ('a path is missing' in text or option == '--plugin')
    assert not list(tmp_path.iterdir())


def test_an_empty_name_is_refused(capsys):
    assert "--backbone: '': a value is missing" in refused(capsys, 'pretrain', '--backbone', '')


EVALUATE = {
    '--on world --spec v1': '--spec v1: belongs to --on voc07',
    '--on voc07': '--root is missing',
    '--on captions --probe moco': '--probe moco: belongs to --on folder',
    '--on folder --root nowhere': 'nowhere',
}


@pytest.mark.parametrize('words', EVALUATE)
def test_options_of_another_evaluation_are_refused(words, capsys):
    assert EVALUATE[words] in refused(capsys, 'evaluate', 'run', *words.split())


@pytest.mark.parametrize('n', [1, 3, 5])
def test_too_few_photos_are_refused_before_training(n, tmp_path, capsys):
    text = refused(capsys, 'pretrain', '--data', 'csv', '--root', few_photos(tmp_path, n), '--out', tmp_path / 'run')
    assert 'raise the share' in text or 'at least' in text and re.search(r'--set (train|valid|test)=', text)
    assert not (tmp_path / 'run').exists()


# ---------------------------------------------------------------- how long it takes to say so

# without the name of the command they are of `vlrep pretrain`
EARLY = [
    '--help',
    '--fields',
    '--sede 1',
    '--set lr=nan',
    '--lr nan',
    '--temperature 1',
    '--method loctex --help',
    '--method virtx',
    '--data csv',
    '--threads 100000',
    '--data csv --root nowhere',
    '--max-corrupt many',
    '--at 3',
    'resume nowhere',
    'resume --inexact',
    '--backbone resnet8',
    '--weights nowhere.pth',
    '--dry-run --max-corrupt many',
    'caption nowhere x.jpg',
    'evaluate nowhere --on captions',
    'export nowhere --to timm',
    'report nowhere',
    'data check coco --root nowhere',
    'reproduce plan virtx',
    'reproduce run virtex --seeds 0',
    'finetune nowhere --task vqa',
    'finetune x --task vqa --threads 0',
    'finetune x --task vqa --max-corrupt many',
]
SHELL = f"""
import sys, time
start = time.process_time()
import torch
begun = time.process_time()
from vlrep.cli import main
for words in {EARLY!r}:
    try: main([*['pretrain']*words.startswith('-'), *words.split()])
    except SystemExit as e: pass
    print('====', file=sys.stderr)
    slow = [m for m in ('fastai', 'torchvision', 'sklearn', 'matplotlib', 'jinja2') if m in sys.modules]
    if slow: sys.exit(f'SLOW {{words}}: {{slow}}')
    if words == '--help': print('HELP', (time.process_time() - begun) / (begun - start))
"""


@pytest.fixture(scope='module')
def answers():
    "What a process says that has imported torch, and then only what the words of `EARLY` need"
    return subprocess.run([sys.executable, '-c', SHELL], capture_output=True, text=True, env=ENV)


def test_words_are_answered_before_anything_slow_is_imported(answers):
    "Help costs less CPU time than three quarters of `import torch`, under a second; no error in options imports more"
    assert answers.returncode == 0 and 'SLOW' not in answers.stderr, answers.stderr
    assert float(re.search(r'^HELP (.*)', answers.stdout, re.M)[1]) < 0.75, answers.stdout


def test_every_wrong_word_is_answered(answers):
    "Each says what is wrong, but for help and the list of fields"
    texts = answers.stderr.split('====\n')[:-1]
    assert len(texts) == len(EARLY)
    assert [argv for argv, text in zip(EARLY, texts) if not text] == [
        argv for argv in EARLY if '--help' in argv or argv == '--fields'
    ]
    for part in (
        '--max-corrupt: max_corrupt=many',
        'Missing from vlrep resume',
        'nowhere: no such run folder',
        "did you mean 'resnet18'",
        'nowhere.pth: no such file',
        'vlrep finetune: --threads 0: must be from 1',
        'vlrep finetune: --max-corrupt',
        "unknown paper 'virtx': did you mean 'virtex'?",
        '--seeds: 0: at least 1',
    ):
        assert any(part in l for l in texts), (part, texts)


def test_import_vlrep_does_not_import_torch():
    done = subprocess.run(
        [sys.executable, '-c', "import vlrep, sys; print('torch' in sys.modules, vlrep.__version__)"],
        capture_output=True,
        text=True,
        env=ENV,
    )
    assert done.stdout.split()[0] == 'False', done.stderr
