"The examples of README.md and of the tutorials show their imports and run as they are printed"

import builtins
import dis
import json
import os
import re

import forked
import pytest
from paths import ROOT

TUTORIALS = sorted((ROOT / 'nbs' / 'tutorials').glob('*.ipynb'))


def blocks(page):
    "The Python blocks of a Markdown page, as printed"
    return re.findall(r'^```python\n(.*?)^```', page, re.M | re.S)


def visible(nb):
    "The code cells that a reader of a notebook sees and may copy; hidden and slow ones are left out"

    def text(c):
        return ''.join(c['source'])

    cells = [text(c) for c in nb['cells'] if c['cell_type'] == 'code']
    return [c for c in cells if not re.search(r'^#\|\s*(hide|slow|data|cuda|dist|notest|echo: false)\b', c, re.M)]


def paste(code, folder, **env):
    "Run `code` in a process of its own in an empty folder"
    return forked.run(code, cwd=folder, env={**os.environ, 'MPLBACKEND': 'Agg', **env})


def shorter(code, *pairs):
    """`code` with less training, and without the line that says how far it came

    The same cells are run, as they stand, by the check of the notebook that they come from.
    """
    for old, new in pairs:
        assert code.count(old) == 1, (old, code)
        code = code.replace(old, new)
    return code


def names(code):
    "What a compiled text assigns at its top, and what it looks up there"
    made = set()
    read = set()
    todo = [code]
    while todo:
        c = todo.pop()
        todo += [k for k in c.co_consts if hasattr(k, 'co_code')]
        for i in dis.get_instructions(c):
            if i.opname in ('STORE_GLOBAL',) or i.opname == 'STORE_NAME' and c is code:
                made.add(i.argval)
            elif i.opname in ('LOAD_GLOBAL', 'LOAD_NAME'):
                read.add(i.argval)
            elif i.opname == 'STORE_NAME':
                made.add(i.argval)  # in the body of a class
    return made, read


def unknown(source):
    "Names that `source` uses and neither makes nor imports"
    here = {}
    for line in re.findall(r'^from [\w.]+ import \*', source, re.M):
        exec(line, here)
    made, read = names(compile(source, 'pasted', 'exec'))
    return sorted(read - made - set(here) - set(dir(builtins)) - {'__name__', '__annotations__'})


def test_the_readme_has_examples():
    assert len(blocks((ROOT / 'README.md').read_text(encoding='utf-8'))) >= 1


def test_the_readme_runs_as_pasted(tmp_path):
    "The Python blocks of README.md, one after the other; that each knows its names is asked below"
    code = '\n'.join(blocks((ROOT / 'README.md').read_text(encoding='utf-8')))
    code = shorter(code, ('steps=100, warmup=10', 'steps=10, warmup=2'))
    got = paste(code, tmp_path)
    assert got.returncode == 0, got.stderr[-2000:]
    assert 'the network: a red boat' in got.stdout and 'loss of held-out captions' in got.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('path', [ROOT / 'README.md', *TUTORIALS], ids=lambda p: p.stem)
def test_examples_show_their_imports(path):
    "No example uses a name that comes from a cell which the reader does not see"
    if path.suffix == '.md':
        texts = blocks(path.read_text(encoding='utf-8'))
    else:
        texts = ['\n'.join(visible(json.loads(path.read_text(encoding='utf-8'))))]
    assert texts and not [n for t in texts for n in unknown(t)]


def test_an_example_without_its_imports_is_seen():
    assert unknown('from math import *\nx = pi\nclass A:\n    y = 1\n    def f(self): return y2 + x\nprint(z)') == [
        'y2',
        'z',
    ]
    assert unknown('def f(a): return [a*b for b in range(a)]\nf(2)') == []


def test_the_tutorial_on_own_data_runs_as_pasted(tmp_path):
    "A tutorial in one paste: photos of one's own, from a table to captions"
    code = '\n'.join(visible(json.loads((ROOT / 'nbs' / 'tutorials' / 'own_data.ipynb').read_text(encoding='utf-8'))))
    fall = "check_learning('own photos: fall of the held-out loss after the first pass', losses[0] - losses[-1], 0.5)\n"
    got = paste(shorter(code, ('steps=90, warmup=9', 'steps=24, warmup=2'), (fall, '')), tmp_path)
    assert got.returncode == 0, got.stderr[-2000:]
    assert 'photos with' in got.stdout
    assert not list(tmp_path.iterdir())  # and leaves nothing behind
