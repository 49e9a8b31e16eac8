"The notebooks and modules of the project, read as text, and the floors of its packages"

import ast
import json
import re

from paths import ROOT

# The floor of each package: exported code imports from lower floors. Inside a package: from lower numbers, and a
# folder of it (datasets/world, methods/virtex) from the package's own modules, not from other folders.
FLOORS = dict(
    core=1,
    data=2,
    losses=2,
    metrics=2,
    reports=2,
    datasets=3,
    models=3,
    training=3,
    methods=4,
    evaluation=4,
    experiments=5,
    studies=6,
    reproduce=7,
    cli=8,
    all=8,
)


def load(p):
    return json.loads(p.read_text(encoding='utf-8'))


def public(src):
    "The names in a module's `__all__`"
    for node in ast.parse(src).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == '__all__':
            return ast.literal_eval(node.value)
    return []


def text(x):
    return ''.join(x) if isinstance(x, list) else x


def flags(src):
    "The directives of a cell: '#| export' -> 'export', '#| eval: false' -> 'eval:'"
    return re.findall(r'^#\|\s*(\w+:?)', src, re.M)


def read(p):
    return p.read_text(encoding='utf-8')


def hidden(p):
    return any(x[0] in '._' for x in p.relative_to(ROOT / 'nbs').parts)


NOTEBOOKS = sorted(p for p in (ROOT / 'nbs').rglob('*.ipynb') if not hidden(p))
NBS = {str(p.relative_to(ROOT / 'nbs')): json.loads(read(p)) for p in NOTEBOOKS}
FILES = sorted((ROOT / 'vlrep').rglob('*.py'))
MODULES = {'.'.join(p.relative_to(ROOT).with_suffix('').parts): read(p) for p in FILES if p.name[0] != '_'}


def code(nb):
    return [text(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']


LINK = re.compile(r'\]\(([^)#\s]+)[^)]*\)')


def broken(page, text_):
    "Links of a page to files that are not there"
    return [l for l in LINK.findall(text_) if not re.match(r'[a-z]+:', l) and not (page.parent / l).exists()]
