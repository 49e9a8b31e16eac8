"Every option that a message names is an option of some command"
import ast, re
from dataclasses import fields
from pathlib import Path
import pytest
import vlrep
from vlrep import cli
from vlrep.datasets.base import DATASETS
from vlrep.evaluation.finetune.plan import PLANS, TASKS
from vlrep.methods.base import METHODS

HOME = Path(vlrep.__file__).parent
OPTION = re.compile(r'(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*')
OTHERS = {'--help', '--debug',
          '--nproc-per-node', '--nnodes', '--standalone',  # torchrun's
          '--shm-size', '--sparse',                       # of docker and of tar
          '--porcelain', '--short', '--error-unmatch'}     # git's

def options():
    "The options of all commands: their own, and the fields of recipes, data and plans"
    configs = [cli._Job, cli._Backbone, cli._Trial, cli._main_options(), cli._Caption, cli._evaluate_options(),
               cli._Export, cli._Report, cli._Benchmark, cli._StudyPlan, cli._StudyRun, cli._StudyReport, cli._Regions]
    names = {n for c in configs for n in cli._names(c)} | {f'--{name}' for name, *_ in cli._finetune_rows()}
    parts = [*(r for m in METHODS.values() for r in m.recipes.values()), *(d.options for d in DATASETS.values()),
             *PLANS.values(), *(s.options for t in TASKS.values() for s in t.sources.values() if s.options)]
    names |= {f'--{f.name}' for p in parts for f in fields(p)}
    for main in (cli._shards, cli._paraphrase): names |= of_data(main)
    return {n.replace('_', '-') for n in names} | OTHERS

def of_data(main):
    "The options of a command that reads any dataset"
    seen = []
    def note(name, argv, rows, about):
        seen.extend(f'--{r[0]}' for r in rows)
        raise KeyError
    with pytest.MonkeyPatch.context() as m:
        m.setattr(cli, '_of_data', note)
        with pytest.raises(KeyError): main([])
    return {*seen, '--data', '--root', '--plugin'}

def texts(path):
    "(line, text) of every text in a module that may be shown: no docstrings; of a page's template, all of it"
    if path.suffix != '.py':
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    tree = ast.parse(path.read_text())
    aside = {id(node.body[0].value) for node in ast.walk(tree)
             if isinstance(getattr(node, 'body', None), list) and node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in aside:
            yield node.lineno, node.value

def unknown(path, there):
    named = [(line, option) for line, text in texts(path) for option in OPTION.findall(text)]
    return [f'{path.relative_to(HOME)}:{line}: {o}' for line, o in named if o.replace('_', '-') not in there]

def test_every_option_in_a_message_exists():
    there = options()
    assert len(there) > 150
    files = [p for p in HOME.rglob('*') if p.suffix in ('.py', '.j2') and p.name not in ('_modidx.py', 'style.css.j2')]
    named = sum(len(OPTION.findall(text)) for p in files for _, text in texts(p))
    assert len(files) > 150 and named > 150
    assert not (bad := [b for p in files for b in unknown(p, there)]), '\n'.join(bad)

def test_the_walk_sees_a_wrong_one(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), 'HOME', tmp_path)
    code = '"--not-shown"\ndef f(x): raise ValueError(f"{x}: add --resume_inexact or --no-such-thing")\n'
    (tmp_path/'a.py').write_text(code)
    assert unknown(tmp_path/'a.py', options()) == ['a.py:2: --no-such-thing']
