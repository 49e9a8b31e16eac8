"The rules of the house that a script can check: layers, names, notebooks, packaging"

import ast
import json
import re
import sys
from configparser import ConfigParser

import pytest
from paths import ROOT
from project import FILES, FLOORS, MODULES, NBS, NOTEBOOKS, broken, code, flags, public, read, text

CFG = ConfigParser(delimiters=['='])
CFG.read(ROOT / 'settings.ini', encoding='utf-8')
CFG = CFG['DEFAULT']


# ---------------------------------------------------------------- reading the project


def module(path):
    "'models/10_backbones.ipynb' -> 'vlrep.models.backbones'; None for a notebook without a number"
    *folders, name = path.removesuffix('.ipynb').split('/')
    m = re.fullmatch(r'\d\d_(\w+)', name)
    return '.'.join(['vlrep', *folders, m[1]]) if m else None


def numbers(paths):
    "Module -> its notebook's number, '10'"
    return {module(p): p.split('/')[-1][:2] for p in paths if module(p)}


def imports(src, module, package=False):
    "(line, imported name, names taken from it) for every import of vlrep in `src`, wherever it stands"
    for node in ast.walk(ast.parse(src)):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split('.')[0] == 'vlrep':
                    yield node.lineno, a.name, ()
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                here = module.split('.') if package else module.split('.')[:-1]
                base = '.'.join(here[: len(here) - node.level + 1] + ([base] if base else []))
            if base.split('.')[0] == 'vlrep':
                yield node.lineno, base, tuple(a.name for a in node.names)


def imported(src, module, known, package=False):
    "(line, module) for every module of the library that `src` imports; a package's members are looked up in `known`"
    for line, base, names in imports(src, module, package):
        if base in known:
            yield line, base
            continue
        for n in names or ('',):
            if base == 'vlrep' and n == '__version__':
                continue
            yield line, base if n in ('', '*') else f'{base}.{n}'


def package(mod):
    return mod.rsplit('.', 1)[0]


BASES = {'vlrep.evaluation.finetune': {'vlrep.evaluation.classification', 'vlrep.evaluation.detection'}}


def may_import(mod, other, known):
    "May exported code of `mod` import `other`? Both are modules of the library"
    a = FLOORS[mod.split('.')[1]]
    b = FLOORS[other.split('.')[1]]
    if a != b or mod.split('.')[1] != other.split('.')[1]:
        return b < a or mod == 'vlrep.all'
    if package(mod) in BASES.get(package(other), ()):  # tasks build on what all of them share
        return True
    return (
        known[other] < known[mod] if package(mod) == package(other) else package(mod).startswith(package(other) + '.')
    )


def violations(sources, known):
    "One line for each import that goes up, sideways, or to no notebook's module. `sources`: module -> text"
    for mod, src in sources.items():
        for line, other in imported(src, mod, known):
            if other == mod or (mod, other) == ('vlrep.all', 'vlrep'):
                continue
            if other not in known:
                yield f'{mod}:{line} imports {other}, which no notebook makes'
            elif not may_import(mod, other, known):
                yield f'{mod} line {line} imports {other}: no lower floor or number'


KNOWN = numbers(n for n in NBS if not n.endswith('/90_paper.ipynb') and not n.startswith('course/'))
KNOWN_PATHS = {n: module(n).removeprefix('vlrep.') for n in NBS if module(n) in KNOWN}


def outputs(nb):
    return [o for c in nb['cells'] if c['cell_type'] == 'code' for o in c['outputs']]


def fail_with(lines):
    assert not (lines := list(lines)), '\n' + '\n'.join(lines)


# ---------------------------------------------------------------- layers and names


def test_no_package_imports_from_its_own_or_a_higher_floor():
    fail_with(violations(MODULES, KNOWN))


UP = [
    'import vlrep.training.learner',
    'import vlrep.training.learner as x',
    'from vlrep.training import learner',
    'from vlrep.training.learner import *',
    'from ..training.learner import learner',
    'from ..training import learner',
    'def f():\n    from vlrep.training.learner import learner',
    'try:\n    import os, vlrep.training.learner\nexcept ImportError: pass',
]


@pytest.mark.parametrize('src', UP)
def test_every_kind_of_import_is_seen(src):
    "A made-up import that goes sideways is found, and both modules are named"
    (line,) = violations({'vlrep.models.text': src}, numbers(['training/30_learner', 'models/20_text']))
    assert 'vlrep.models.text' in line and 'vlrep.training.learner' in line


ARROWS = [
    ('models/10_backbones', 'models/20_text', False),
    ('models/20_text', 'models/10_backbones', True),
    ('losses/10_a', 'data/10_b', False),
    ('training/30_learner', 'datasets/world/50_dataset', False),
    ('evaluation/10_svm', 'methods/virtex/40_method', False),
    ('evaluation/10_svm', 'datasets/50_voc07', True),
    ('methods/virtex/10_recipe', 'methods/50_base', True),
    ('methods/50_base', 'methods/virtex/10_recipe', False),
    ('methods/virtex/40_method', 'methods/loctex/10_recipe', False),
    ('methods/virtex/40_method', 'methods/virtex/10_recipe', True),
    ('experiments/10_config', 'methods/virtex/40_method', True),
    ('core/10_files', 'data/10_records', False),
    ('90_cli', 'experiments/10_config', True),
    ('experiments/10_config', '90_cli', False),
    ('95_all', 'experiments/10_config', True),
    ('95_all', '90_cli', True),
    ('90_cli', '95_all', False),
]


@pytest.mark.parametrize('frm,to,ok', ARROWS)
def test_only_imports_that_go_down_are_allowed(frm, to, ok):
    known = numbers([frm, to])
    assert (not list(violations({module(frm): f'from {module(to)} import *'}, known))) == ok


def test_an_import_of_no_notebooks_module_is_seen():
    (line,) = violations({'vlrep.core.files': 'import vlrep.nowhere'}, numbers(['core/10_files']))
    assert 'vlrep.nowhere' in line


def stars(src, mod):
    "Modules of which every name is imported"
    yield from (base for _, base, names in imports(src, mod) if '*' in names)


def test_imports_of_exported_cells_are_explicit():
    fail_with(f'{m}: import from {o} by name' for m, src in MODULES.items() if m != 'vlrep.all' for o in stars(src, m))
    found = stars('from ..data.loader import *\nfrom ..core.files import FilePath\nfrom .b import *', 'vlrep.models.a')
    assert list(found) == ['vlrep.data.loader', 'vlrep.models.b']


def test_package_files_import_nothing():
    "`import vlrep.core.files` runs the packages' own files: they may not pull in the rest of the library"

    def bad(p):
        package = '.'.join(p.relative_to(ROOT).parent.parts)
        lines = [ast.unparse(n) for n in ast.parse(read(p)).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        return [l for l in lines if list(imports(l, package, True))]

    fail_with(f'{p.relative_to(ROOT)}: {l}' for p in FILES if p.name == '__init__.py' for l in bad(p))


def test_every_module_has_a_notebook():
    fail_with(f'{m}: no notebook' for m in MODULES if m not in KNOWN)


def test_every_notebook_exports_where_its_name_says():
    def bad(name, nb):
        to = [m for s in code(nb) for m in re.findall(r'^#\|\s*default_exp\s+(\S+)', s, re.M)]
        if to != ([KNOWN_PATHS[name]] if name in KNOWN_PATHS else []):
            return f'{name}: default_exp {to}'

    fail_with(filter(None, (bad(n, nb) for n, nb in NBS.items())))


def undocumented(src):
    "Public functions, classes and patched methods of a module that have no docstring"
    names = set(public(src))
    for node in ast.parse(src).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or ast.get_docstring(node):
            continue
        decorators = {getattr(d, 'id', getattr(getattr(d, 'func', d), 'id', '')) for d in node.decorator_list}
        patched = decorators & {'patch', 'patch_to'} and not node.name.startswith(('_', 'before_', 'after_'))
        if node.name in names or patched:
            yield node.name


def test_public_names_are_documented():
    fail_with(f'{m}: {n}' for m, src in MODULES.items() for n in undocumented(src))


def test_an_undocumented_public_name_is_seen():
    src = "__all__ = ['f', 'g']\ndef f(): pass\ndef g(): 'doc'\ndef _h(): pass\n@patch\ndef m(self:C): pass"
    assert list(undocumented(src)) == ['f', 'm']


# ---------------------------------------------------------------- cells, names of plug-ins


def visible_checks(name, nb, limit=12):
    "Cells of so many checks or more, with nothing to see, that are neither folded nor hidden"
    for c in (c for c in nb['cells'] if c['cell_type'] == 'code' and not c['outputs']):
        src = ''.join(c['source'])
        n = len(re.findall(r'^\s*(?:test_\w+\(|assert |with expect_fail)', src, re.M))
        if (
            n >= limit
            and not {'hide', 'export', 'learns'} & set(flags(src))
            and not c['metadata'].get('jupyter', {}).get('source_hidden')
        ):
            yield f'{name}: {n} checks in the open: {src.strip().splitlines()[0][:60]}'


def test_many_checks_are_folded():
    fail_with(l for name, nb in NBS.items() for l in visible_checks(name, nb))


def test_many_visible_checks_are_seen():
    def nb(n, **meta):
        return dict(cells=[dict(cell_type='code', outputs=[], metadata=meta, source=['test_eq(1, 1)\n'] * n)])

    assert len(list(visible_checks('a', nb(12)))) == 1 and not list(visible_checks('a', nb(11)))
    assert not list(visible_checks('a', nb(12, jupyter=dict(source_hidden=True))))


MODEL = re.compile(r'(^|[._])(model|body)$')
# a word of the log
ASKED = {
    ('training.precision', 'visual'),
    ('training.ema_and_freezing', 'visual'),  # None of a model without a backbone
}


def asked_of_models(src):
    "What `hasattr` and `getattr` ask of a model: its capabilities or declared attributes should say"
    for n in ast.walk(ast.parse(src)):
        if (
            isinstance(n, ast.Call)
            and getattr(n.func, 'id', '') in ('hasattr', 'getattr')
            and MODEL.search(ast.unparse(n.args[0]))
        ):
            yield n.lineno, getattr(n.args[1], 'value', ast.unparse(n.args[1]))


def test_models_say_what_they_can():
    "A method may look into its own models; other code asks capabilities, or attributes that every model has"
    fail_with(
        f'{m} line {line}: {what}'
        for m, src in MODULES.items()
        if not m.startswith('vlrep.methods.')
        for line, what in asked_of_models(src)
        if (m.removeprefix('vlrep.'), what) not in ASKED
    )
    assert list(
        asked_of_models("def f(model): return hasattr(model, 'fuse') or getattr(self.body, 'heads', None)")
    ) == [(1, 'fuse'), (1, 'heads')]


NAMES = re.compile(r"\b(data|method)('\])?$")


def branches_on_names(src):
    "Comparisons of what a dataset or method is called with a name that is written there"
    for n in ast.walk(ast.parse(src)):
        if isinstance(n, ast.Compare) and len(n.ops) == 1:
            a = n.left
            b = n.comparators[0]
            if NAMES.search(ast.unparse(b)):
                a, b = b, a
            given = b.elts if isinstance(b, (ast.Tuple, ast.List, ast.Set)) else [b]
            written = given and all(isinstance(getattr(x, 'value', None), str) for x in given)
            if written and NAMES.search(ast.unparse(a)):
                yield n.lineno, ast.unparse(n)


def test_no_branch_on_names_of_plug_ins():
    "What differs between datasets or methods stands in their entries of the registries"
    fail_with(f'{m} line {line}: {what}' for m, src in MODULES.items() for line, what in branches_on_names(src))
    found = branches_on_names("if data == 'world' or info['method'] in ('a', 'b') or 'x' != s.data: pass")
    assert len(list(found)) == 3
    assert not list(branches_on_names("if data == other or 'world' in names or data is None or data in DATASETS: pass"))


# ---------------------------------------------------------------- notebooks

DIRECTIVES = {'export', 'hide', 'learns', 'default_exp', 'echo:', 'output:', 'eval:', 'include:'}
PLACES = re.compile(r'(?<![\w.~])/(work|root|home|tmp|Users|mnt|opt)/[\w.]')
BAR = re.compile(r'<progress|█|\d+it/s|s/it\]|Warning:|\bConverted ')


def check_notebooks(f):
    "Fail with the name of every notebook for which `f(name, notebook)` says what is wrong"
    fail_with(f'{name}: {bad}' for name, nb in NBS.items() for bad in [f(name, nb)] if bad)


def test_notebooks_open_with_title_and_line():
    def bad(_, nb):
        first = nb['cells'][0]
        ok = first['cell_type'] == 'markdown' and re.match(r'# \S.*\n+> \S', text(first['source']))
        return None if ok else 'the first cell is not `# Title` and `> one plain line`'

    check_notebooks(bad)


def test_links_lead_somewhere():
    pages = {
        p: '\n'.join(
            text(c['source']) for c in NBS[str(p.relative_to(ROOT / 'nbs'))]['cells'] if c['cell_type'] == 'markdown'
        )
        for p in NOTEBOOKS
    }
    fail_with(
        f'{p.relative_to(ROOT)}: {l}'
        for p, s in {**pages, ROOT / 'README.md': read(ROOT / 'README.md')}.items()
        for l in broken(p, s)
    )


def test_a_link_that_leads_nowhere_is_seen():
    assert broken(
        ROOT / 'nbs/x.ipynb', '[a](gone.ipynb) [b](https://x.org) [c](../README.md "t") [d](index.ipynb#part)'
    ) == ['gone.ipynb']


def test_notebooks_are_small():
    def bad(name, _):
        size = (ROOT / 'nbs' / name).stat().st_size
        if size >= 400_000:
            return f'{size} bytes'

    check_notebooks(bad)


def test_notebooks_were_run():
    def bad(name, nb):
        outs = outputs(nb)
        written = name == 'course/notebooks.ipynb' and not code(nb)  # by .ci/contents.py
        if not outs and not written:
            return 'no outputs, see `make notebooks`'
        return [o.get('evalue', '') for o in outs if o['output_type'] == 'error']

    check_notebooks(bad)


def shown(o):
    "What an output shows a reader, pictures apart"
    data = [v for k, v in o.get('data', {}).items() if not k.startswith('image/') and isinstance(v, (str, list))]
    return '\n'.join(map(text, [o.get('text', ''), *data]))


def dirt(o):
    "What a reader should not see in an output: standard error, a path of somebody's machine, a progress bar, a warning"
    s = re.sub(r'data:image/[^"\')\s]+', '', shown(o))
    if o.get('name') == 'stderr':
        return s[:200]
    m = PLACES.search(s) or BAR.search(s)
    return s[max(0, m.start() - 30) : m.end() + 30] if m else None


def test_notebook_outputs_are_clean():
    check_notebooks(lambda _, nb: list(filter(None, map(dirt, outputs(nb)))))


@pytest.mark.parametrize(
    's,bad',
    [
        ('in /tmp/x/model', True),
        ('UserWarning: old', True),
        ('<progress value=3>', True),
        ('a ratio of 3/4, and/or left/right', False),
        ('loss 2.3', False),
    ],
)
def test_an_unclean_output_is_seen(s, bad):
    assert bool(dirt(dict(text=s, name='stdout'))) == bad


def test_notebooks_name_no_machine():
    check_notebooks(lambda _, nb: [m[0] for c in nb['cells'] for m in [PLACES.search(text(c['source']))] if m])


def test_notebook_flags_are_known():
    known = DIRECTIVES | set(CFG['tst_flags'].split())
    check_notebooks(lambda _, nb: [f'#| {f}' for s in code(nb) for f in flags(s) if f not in known])


# ---------------------------------------------------------------- packaging

IMPORT_NAMES = dict(sklearn='scikit-learn', PIL='pillow')


def test_third_party_imports_are_required():
    "The library imports what settings.ini requires: not a tool of the dev extra, nor a requirement's own requirement"
    required = {re.split(r'[<>=!~;\[]', r)[0].lower() for r in CFG['requirements'].split()}

    def tops(src):
        for node in ast.walk(ast.parse(src)):
            if isinstance(node, ast.Import):
                yield from (a.name.split('.')[0] for a in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.split('.')[0]

    known = required | set(sys.stdlib_module_names) | {'vlrep'}
    used = [(m, t) for m, src in MODULES.items() for t in sorted(set(tops(src)))]
    # inside a function, which says what it does without
    optional = {
        ('vlrep.models.export', 'timm'),
        ('vlrep.models.hub_weights', 'timm'),
        ('vlrep.models.hub_weights', 'huggingface_hub'),
        ('vlrep.core.progress', 'IPython'),
        ('vlrep.training.trackers', 'wandb'),
        ('vlrep.data.wordpiece', 'tokenizers'),
        ('vlrep.models.bert_weights', 'huggingface_hub'),
        ('vlrep.experiments.hub', 'huggingface_hub'),
        ('vlrep.datasets.detection.detection_set', 'pycocotools'),
        ('vlrep.metrics.detection', 'faster_coco_eval'),
        ('vlrep.data.paraphrases', 'transformers'),
        ('vlrep.data.paraphrases', 'huggingface_hub'),
        ('vlrep.models.photo_vectors', 'pyarrow'),
    }
    fail_with(f'{m} imports {t}' for m, t in used if IMPORT_NAMES.get(t, t) not in known and (m, t) not in optional)
    top = {
        a.name for m, _ in optional for n in ast.parse(MODULES[m]).body if isinstance(n, ast.Import) for a in n.names
    }
    assert not top & {t for _, t in optional}


def test_the_installed_metadata_is_that_of_settings_ini():
    "The installed package carries settings.ini's facts: reinstall (make test does) if this fails"
    from importlib.metadata import entry_points, metadata

    m = metadata('vlrep')
    assert (m['Name'], m['Version'], m['Summary']) == (CFG['lib_name'], CFG['version'], CFG['description'])
    assert 'Apache' in str(m['License'] or m['License-Expression']) and m['Keywords']
    assert m['Requires-Python'] == '>=' + CFG['min_python']
    assert any('Artificial Intelligence' in c for c in m.get_all('Classifier')) and m.get_payload().strip()
    assert {e.name for e in entry_points(group='console_scripts')} >= {'vlrep'}
    links = re.findall(r'\]\(([^)]+)\)', m.get_payload())
    assert len(links) > 20 and not [l for l in links if not l.startswith(('https://', '#'))]
    assert {'timm', 'tensorboard', 'wandb', 'icmlm', 'bert', 'detection', 'all', 'dev'} <= set(
        m.get_all('Provides-Extra')
    )
    optional = {
        r.partition(' ; ')[0].split(';')[0]
        for r in m.get_all('Requires-Dist')
        if "extra == 'all'" in r.replace('"', "'")
    }
    assert any(r.startswith('timm') for r in optional) and not any(r.startswith('pytest') for r in optional)


def test_there_is_one_version():
    import yaml

    import vlrep

    cff = yaml.safe_load((ROOT / 'CITATION.cff').read_text(encoding='utf-8'))
    assert vlrep.__version__ == CFG['version'] == cff['version']
    assert re.search(rf'^## {re.escape(CFG["version"])}\b', (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8'), re.M)


def test_the_citation_has_what_its_format_asks_for():
    import yaml

    cff = yaml.safe_load((ROOT / 'CITATION.cff').read_text(encoding='utf-8'))
    assert cff['cff-version'] == '1.2.0' and cff['message'] and cff['title'] and cff['license'] == 'Apache-2.0'
    for who in cff['authors'] + [a for r in cff['references'] for a in r['authors']]:
        assert 'name' in who or 'family-names' in who, who
    for r in cff['references']:
        assert r['type'] and r['title'] and r['year'], r


def test_committed_data_is_small():
    total = sum(p.stat().st_size for p in (ROOT / 'data').rglob('*') if p.is_file())
    assert total < 12_000_000, f'{total} bytes under data/'  # most of it: redraws of studies, 200 a score


# ---------------------------------------------------------------- results


def test_results_name_their_commit():
    "Every run that a table shows; lines of trials, choices and fine-tuned tasks belong to the runs of their study"
    found = []
    for p in sorted((ROOT / 'data').rglob('*.jsonl')):
        lines = [json.loads(l) for l in read(p).splitlines()]
        runs = [
            l for l in lines if l.get('kind') not in ('study', 'trial', 'choice', 'task_trial', 'task_choice', 'task')
        ]
        found += [
            f'{p.relative_to(ROOT)}: a line of {l.get("method", "?")} names no commit'
            for l in runs
            if not l.get('commit')
        ]
    fail_with(found)


# ---------------------------------------------------------------- tests


def test_folders_of_tests_are_those_of_the_library():
    tests = {p.parent.name for p in (ROOT / 'tests').glob('*/test_*.py')}
    assert len(tests) > 10 and tests <= {*FLOORS, 'project'}
    assert not list((ROOT / 'tests').glob('test_*.py'))


def test_test_files_import_nothing_from_each_other():
    fail_with(
        f'{p.name}: {line.strip()}'
        for p in sorted((ROOT / 'tests').rglob('*.py'))
        for line in read(p).splitlines()
        if re.match(r'\s*(from|import) (tests|test_|conftest)', line)
    )


def test_files_named_in_contributing_are_there():
    page = read(ROOT / 'CONTRIBUTING.md')
    named = re.findall(r'`((?:tests|nbs|vlrep|data)/[\w/.]+)`', page)
    assert len(named) > 10 and not [n for n in named if not (ROOT / n).exists() and 'NAME' not in n and 'NN_' not in n]


def test_files_named_in_the_readme_of_tests_are_there():
    page = read(ROOT / 'tests' / 'README.md')
    named = re.findall(r'`((?:\w+/)?[\w*]+\.py)`', page)
    assert len(named) > 15 and not [n for n in named if not list((ROOT / 'tests').glob(n))]
    modules = {m for row in re.findall(r'^\| ((?:`\w+`(?:, )?)+) \|', page, re.M) for m in re.findall(r'\w+', row)}
    assert modules == {p.stem for p in (ROOT / 'tests' / 'support').glob('*.py')} - {'paths'}
