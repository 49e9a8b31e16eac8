"""Every option that a message names is an option of some command, where it can be told of the one that says it

It can be told of the modules in `SAY`, and of texts that name a command; not of experiments/resolve_options.py,
spec.py, readers and models, whose messages several commands show.
"""

import ast
import io
import re
import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

import vlrep
from vlrep.cli import COMMANDS, main
from vlrep.datasets.base import DATASETS
from vlrep.evaluation.finetune.plan import PLANS, TASKS
from vlrep.methods.base import METHODS

HOME = Path(vlrep.__file__).parent
OPTION = re.compile(r'(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*')
# git's
OTHERS = {
    '--version',
    '--help',
    '--debug',
    '--nproc-per-node',
    '--nnodes',
    '--standalone',  # torchrun's
    '--shm-size',
    '--sparse',  # of docker and of tar
    '--porcelain',
    '--short',
    '--error-unmatch',
}


def fields_of(*parts):
    return {f'--{f.name}' for p in parts for f in fields(p)}


def options():
    "The options of each command: its own, and the fields of recipes, data and plans"
    data = fields_of(*(d.options for d in DATASETS.values()))
    recipes = fields_of(*(r for m in METHODS.values() for r in m.recipes.values()))
    plans = fields_of(*PLANS.values(), *(s.options for t in TASKS.values() for s in t.sources.values() if s.options))
    with pytest.MonkeyPatch.context() as m:
        present = {c: shown(c, m) for c in COMMANDS}
    present['pretrain'] |= recipes | data
    present['resume'] |= recipes | data | plans
    present['finetune'] |= plans
    for c in ('shards', 'paraphrase'):
        present[c] |= data
    return {c: {n.replace('_', '-') for n in names} for c, names in present.items()}


def shown(command, patch):
    "The options in the help of a command, and of what it is divided into"
    pages = io.StringIO()
    patch.setattr(sys, 'stdout', pages)
    divided = dict(
        study=('plan', 'run', 'report'),
        data=('list', 'check'),
        reproduce=('plan', 'measure', 'run', 'slurm', 'table'),
    )
    for argv in ([command], *([command, w] for w in divided.get(command, ()))):
        with pytest.raises(SystemExit):
            main([*argv, '--help'])
    return set(OPTION.findall(pages.getvalue()))


def texts(path):
    "(line, text) of every text in a module that may be shown: no docstrings; of a page's template, all of it"
    if path.suffix != '.py':
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    tree = ast.parse(path.read_text())
    aside = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(getattr(node, 'body', None), list) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in aside:
            yield node.lineno, node.value


def unknown(path, present):
    named = [(line, option) for line, text in texts(path) for option in OPTION.findall(text)]
    return [f'{path.relative_to(HOME)}:{line}: {o}' for line, o in named if o.replace('_', '-') not in present]


def modules():
    return [p for p in HOME.rglob('*') if p.suffix in ('.py', '.j2') and p.name not in ('_modidx.py', 'style.css.j2')]


def test_every_option_in_a_message_exists():
    present = set().union(*options().values(), OTHERS)
    assert len(present) > 150
    files = modules()
    named = sum(len(OPTION.findall(text)) for p in files for _, text in texts(p))
    assert len(files) > 150 and named > 150
    others = {HOME / 'reproduce/slurm.py'}  # Text of job scripts: options of SLURM
    assert not (bad := [b for p in files if p not in others for b in unknown(p, present)]), '\n'.join(bad)


def test_an_option_that_does_not_exist_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), 'HOME', tmp_path)
    code = '"--not-shown"\ndef f(x): raise ValueError(f"{x}: add --save_every or --no-such-thing")\n'
    (tmp_path / 'a.py').write_text(code)
    assert unknown(tmp_path / 'a.py', set().union(*options().values())) == ['a.py:2: --no-such-thing']


# ---------------------------------------------------------------- the command that says it

# The commands that show the messages of a module, of which each must have the options; the first line that fits counts
SAY = {
    'experiments/finetune.py': 'finetune',
    'evaluation/finetune/*': 'finetune',
    'evaluation/detection/torchscript.py': 'export',
    'evaluation/*': 'evaluate',
    'experiments/job.py': 'resume',
    'experiments/evaluate_trained.py': 'resume',
    'experiments/pretrain.py': 'resume',
    'experiments/initial_weights.py': 'pretrain',
    'methods/*': 'pretrain',
    'experiments/sanity_checks.py': 'pretrain',
    'training/trackers.py': 'pretrain',
    'experiments/benchmark.py': 'benchmark',
    'studies/*': 'study',
    'reproduce/commands.py': 'reproduce',
    'datasets/published/check.py': 'data',
    'experiments/region_files.py': 'regions',
    'data/paraphrases.py': 'paraphrase',
    'data/collate.py': 'pretrain finetune',
    'data/loader.py': 'pretrain finetune',
    'data/workers.py': 'pretrain finetune',
    'training/interrupts.py': 'pretrain finetune',
    'data/image_files.py': 'pretrain finetune evaluate shards paraphrase',
    'data/evaluation_batches.py': 'pretrain finetune evaluate features',
    'core/registry.py': ' '.join(c for c in COMMANDS if c != 'pull'),  # which opens no code
}
# No advice: what is taken away from a message, or looked for in it; or said of the run that is evaluated
ASIDE = {
    ('studies/runs.py', '--max-corrupt'),
    ('evaluation/held_out.py', '--split'),
    # fine-tuning mirrors nothing
    ('data/collate.py', '--mirror-words'),
}
NAMED = re.compile(r'vlrep ([a-z]+)([^;,]*)')


def messages(path):
    "(line, text) as `texts` has it, but of an f-string all of it"
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                ''.join(str(part.value) if isinstance(part, ast.Constant) else '{}' for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def misplaced(path, present):
    "The options that a module names and a command that shows its messages does not have"
    name = path.relative_to(HOME).as_posix()
    say = next((commands.split() for k, commands in SAY.items() if fnmatch(name, k)), [])
    shown = {line for line, _ in texts(path)}
    for line, text in messages(path):
        if line not in shown:
            continue
        named = [
            (command, o) for command, argv in NAMED.findall(text) if command in present for o in OPTION.findall(argv)
        ]
        named += [(command, o) for o in OPTION.findall(NAMED.sub('', text)) for command in say]
        for command, option in named:
            if option.replace('_', '-') not in present[command] | OTHERS and (name, option) not in ASIDE:
                yield f'{name}:{line}: vlrep {command} has no {option}'


def test_every_option_is_one_of_the_command_that_names_it():
    present = options()
    files = [p for p in modules() if p.suffix == '.py']
    named = [k for k in SAY if not any(fnmatch(p.relative_to(HOME).as_posix(), k) for p in files)]
    assert not named and sorted(present) == sorted(COMMANDS)
    assert not (bad := [b for p in files for b in misplaced(p, present)]), '\n'.join(bad)


def test_an_option_of_another_command_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), 'HOME', tmp_path)
    (tmp_path / 'experiments').mkdir()
    (tmp_path / 'experiments/finetune.py').write_text(
        'def f(x):\n    print(f"{x}: add --seed 1, or: vlrep study run {x} --jobs 2, or --bert")\n'
        '    raise ValueError(f"{x}; resume with: vlrep study run {x} --resume --out {x}")\n'
    )
    assert list(misplaced(tmp_path / 'experiments/finetune.py', options())) == [
        'experiments/finetune.py:2: vlrep finetune has no --bert',
        'experiments/finetune.py:3: vlrep study has no --resume',
    ]
