"What a notebook sees of the library: help, annotations, imports, the names of `vlrep.all`"

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys

from fastcore.docments import docments
from paths import ROOT

import vlrep.all


def test_comments_explain_functions():
    from vlrep.experiments.pretrain import pretrain

    comments = docments(pretrain)
    assert 'Workers, checkpoints, and others' in comments['runtime']
    assert "The run's folder, with report.html" in comments['return']


def modules():
    "All modules of the library, imported"
    names = [m.name for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.')]
    return [importlib.import_module(n) for n in names if n != 'vlrep.all']


def test_comments_explain_classes_and_methods():
    from vlrep.methods.virtex.recipe import VirTexRecipe
    from vlrep.models.backbones import Backbone

    assert 'Channels of the first stage' in docments(Backbone)['width']  # of __init__
    assert 'Normalised float images (b,3,H,W)' in docments(Backbone.forward)['images']
    assert 'Normalised float images (b,3,H,W)' in docments(Backbone.scales)['images']  # of a method that was patched in
    assert 'Attention heads; 0 means width/64' in docments(VirTexRecipe)['heads']  # of a field


def test_comments_explain_nearly_all():
    "fastcore finds the comments beside the parameters of public functions that have some"
    public = [getattr(m, k) for m in modules() for k in getattr(m, '__all__', ())]
    wanted = [
        o
        for o in public
        if inspect.isfunction(o)
        and o.__module__.startswith('vlrep.')
        and re.search(r'^    \w+.*,\s+# \S', inspect.getsource(o), re.M)
    ]
    lost = [f'{o.__module__}.{o.__name__}' for o in wanted if not any(docments(o).values())]
    assert len(wanted) > 200 and not lost


def public_functions():
    """(name, function) for each public function of the library, and each public method or property that it gives its
    public classes"""
    for m in modules():
        for k in getattr(m, '__all__', ()):
            o = getattr(m, k)
            own = inspect.isclass(o) and o.__module__ == m.__name__
            for n, f in vars(o).items() if own else {'': o}.items():
                # a property, a cached one, or a function
                f = getattr(f, 'fget', None) or getattr(f, 'func', None) or (getattr(o, n, None) if n else f)
                f = inspect.unwrap(getattr(f, '__func__', f)) if callable(f) else f
                if (
                    inspect.isfunction(f)
                    and f.__module__.startswith('vlrep.')
                    and not n.startswith('_')
                    and not f.__name__.startswith('_')
                ):
                    yield f'{f.__module__}.{k}' + f'.{n}' * own, f


def test_every_public_function_is_annotated():
    lost = set()
    seen = set()
    for name, f in public_functions():
        sig = inspect.signature(f)
        seen.add(name)
        for i, p in enumerate(sig.parameters.values()):
            bare = p.annotation is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if bare and not (i == 0 and p.name in ('self', 'cls')):
                lost.add(f'{name}: {p.name}')
        if sig.return_annotation is sig.empty:
            lost.add(f'{name}: what it returns')
    assert len(seen) > 500 and not lost, '\n'.join(sorted(lost))


def test_quoted_types_are_names():
    "An annotation in quotes is never evaluated: each name in it must be one that somebody knows"
    import builtins

    known = {
        *dir(builtins),
        *vlrep.all.__all__,
        *(k for m in modules() for k in getattr(m, '__all__', ())),
        'Callable',
        'DataLoaders',
        'Image',
        'Iterable',
        'Iterator',
        'Learner',
        'ModuleSpec',
        'ModuleType',
        'Path',
        'plt',
    }
    odd = [
        f'{name}: {t}'
        for name, f in public_functions()
        for t in f.__annotations__.values()
        if isinstance(t, str)
        and not {n for n in re.findall(r'(?<![\w.])[A-Za-z_]\w*', t)} <= known | set(f.__globals__)
    ]
    assert not odd


def test_importing_vlrep_imports_no_torch():
    code = "import sys, vlrep; print([m for m in ('torch', 'numpy', 'fastai') if m in sys.modules])"
    got = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)}
    )
    assert got.stdout.strip() == '[]', got.stderr


def test_types_are_shipped():
    assert (ROOT / 'vlrep' / 'py.typed').exists()
    assert "'py.typed'," in (ROOT / 'setup.py').read_text(encoding='utf-8')


def test_vlrep_all_is_short_and_has_what_a_notebook_needs():
    import vlrep.all

    names = set(vlrep.all.__all__)
    assert len(names) <= 132 and {'np', 'torch', 'nn', 'F', 'replace', 'METHODS', 'world', 'pretrain'} <= names
