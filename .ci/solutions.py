"""The solutions of exercises, kept apart from the notebooks that ask for them

nbs/course/_solutions/NAME.ipynb has a cell `# Solution of exercise N` for each exercise of the notebook NAME. Checks,
`make notebooks` and the site put each solution after its stub; a reader of a chapter sees only the stub.
"""

import json
import re
from pathlib import Path

from contents import ROOT, text

COURSE = ROOT / 'nbs' / 'course'
FOLDER = COURSE / '_solutions'
MARKER = re.compile(r'# *Solution of exercise (\d)')
STUB = re.compile(r"raise NotImplementedError\('exercise (\d)'\)")
NO_EVAL = re.compile(r'#\| *eval: *false\n')


def chapters():
    "Paths of the chapters"
    return sorted(p for p in COURSE.glob('[0-9][0-9]_*.ipynb') if p.name != '00_contents.ipynb')


def is_solution(c):
    return c['cell_type'] == 'code' and bool(MARKER.match(text(c['source'])))


def is_stub(c):
    return c['cell_type'] == 'code' and bool(STUB.search(text(c['source'])))


def read(path):
    return json.loads(Path(path).read_text(encoding='utf-8'))


def solutions(path):
    "Number of an exercise -> cell with its solution; none for a notebook without exercises"
    found = FOLDER / Path(path).name
    cells = read(found)['cells'] if found.exists() else []
    return {MARKER.match(text(c['source']))[1]: c for c in cells if is_solution(c)}


def joined(nb, path):
    "The notebook `nb` of `path` with each solution, folded, after its stub"
    solved = solutions(path)
    cells = []
    for c in nb['cells']:
        cells.append(c)
        if is_stub(c):
            cell = solved[STUB.search(text(c['source']))[1]]
            folded = {'jupyter': {'source_hidden': True}}
            cells.append({**cell, 'source': text(cell['source']), 'metadata': folded})
    return {**nb, 'cells': cells}


def apart(nb):
    "A notebook without its solutions"
    return {**nb, 'cells': [c for c in nb['cells'] if not is_solution(c)]}


def keep_outputs(nb, path):
    "Store what the solutions of an executed notebook print, beside them"
    outputs = {c['id']: c['outputs'] for c in nb['cells'] if is_solution(c)}
    if outputs:
        file = FOLDER / Path(path).name
        solved = read(file)
        for c in solved['cells']:
            if c['id'] in outputs:
                c['outputs'] = outputs[c['id']]
        file.write_text(json.dumps(solved, sort_keys=True, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


def with_stubs(nb):
    "A notebook as checks run it: its stubs run as well, and each must be refused by its check"
    cells = []
    for c in nb['cells']:
        if is_stub(c):
            n = STUB.search(text(c['source']))[1]
            src = NO_EVAL.sub('', text(c['source']))
            c = {
                **c,
                'source': f'try: exec({src!r}, globals())\nexcept NotImplementedError: pass\n'
                f"else: raise AssertionError('exercise {n}: its check passes on the stub')",
            }
        cells.append(c)
    return {**nb, 'cells': cells}
