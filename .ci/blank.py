"""Write blank twins of the chapters into _course/, for `make blank`: the same notebooks without their solutions

A cell that begins with `# Solution of exercise N` is the marker. The twin leaves such cells out; the stubs remain, and
the cells of exercises have no outputs. A twin that you have worked on is kept: remove it, and it is written anew.
"""

import hashlib
import json
import re
import sys

from contents import ROOT, text

COURSE = ROOT / 'nbs' / 'course'
TWINS = ROOT / '_course'
MARKER = re.compile(r'# Solution of exercise \d')
STUB = re.compile(r"raise NotImplementedError\('exercise (\d)'\)")
NO_EVAL = re.compile(r'#\| *eval: *false\n')


def chapters():
    "Paths of the chapters"
    return sorted(p for p in COURSE.glob('[0-9][0-9]_*.ipynb') if p.name != '00_contents.ipynb')


def is_solution(c):
    return c['cell_type'] == 'code' and bool(MARKER.match(text(c['source'])))


def is_stub(c):
    return c['cell_type'] == 'code' and bool(STUB.search(text(c['source'])))


def without_solutions(nb):
    "A chapter without its solutions"
    cells = []
    inside = False
    for c in nb['cells']:
        if is_solution(c):
            continue
        src = text(c['source'])
        if c['cell_type'] == 'markdown':
            inside = inside or bool(re.search(r'^## Exercises', src, re.M))
            src = re.sub(r',? and a solution in the folded cell below it', '', src)
        else:
            src = NO_EVAL.sub('', src)
            if inside:
                c = {**c, 'outputs': [], 'execution_count': None}
        cells.append({**c, 'source': src.splitlines(keepends=True)})
    return {**nb, 'cells': cells}


def moved(nb):
    "A twin whose links and files are found from _course/ in place of nbs/course/"

    def to(m):
        link = m[1]
        if re.match(r'[a-z]+:|#', link):
            return m[0]
        if link.startswith('../'):
            return f']({"../nbs/" + link[3:]})'
        return m[0] if (COURSE / link).exists() and link != '00_contents.ipynb' else f'](../nbs/course/{link})'

    def source(c):
        src = text(c['source'])
        if c['cell_type'] == 'markdown':
            return re.sub(r'\]\(([^)\s]+)\)', to, src)
        return re.sub(r"(['\"])\.\./\.\./", r'\1../', src)

    return {**nb, 'cells': [{**c, 'source': source(c).splitlines(keepends=True)} for c in nb['cells']]}


def digest(s):
    return hashlib.sha256(s.encode()).hexdigest()


def dumped(nb):
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n'


def with_stubs(nb):
    """A chapter as checks run it: its stubs run, too, and each must be refused by its check

    Works on a notebook of nbdev, in place, whose directives it removes from the stubs.
    """
    for c in nb['cells']:
        if not is_stub(c):
            continue
        n = STUB.search(text(c['source']))[1]
        src = NO_EVAL.sub('', text(c['source']))
        c['source'] = (
            f'try: exec({src!r}, globals())\nexcept NotImplementedError: pass\n'
            f"else: raise AssertionError('exercise {n}: its check passes on the stub')"
        )
        c['directives_'] = {}
    return nb


def main(folder=TWINS):
    "Write the twins; those that were worked on stay as they are"
    folder.mkdir(exist_ok=True)
    for p in chapters():
        new = dumped(moved(without_solutions(json.loads(p.read_text(encoding='utf-8')))))
        to = folder / p.name
        mark = folder / f'.{p.stem}'  # the digest of what was written here last
        if to.exists() and not (mark.exists() and digest(to.read_text(encoding='utf-8')) == mark.read_text()):
            print(f'{to.name} is kept, as you have worked on it')
            continue
        to.write_text(new, encoding='utf-8')
        mark.write_text(digest(new))
    print(f'The chapters without their solutions are in {folder.name}/; to open them: make lab ARGS="--notebook-dir ."')


if __name__ == '__main__':
    sys.exit(main())
