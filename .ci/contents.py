"""Write the list of all notebooks, and the links between them

A notebook says in its title cell which chapter of the course it belongs to: `- chapter: 5`, or `- chapter: 5, core` if
a reader of that chapter should know it. From that, and from the order in which packages import each other, come the
page nbs/course/notebooks.ipynb, the table of chapters on the course's first page, one cell of links below the title of
every notebook (up to its chapter, back and on within it), and the last cell of every chapter.
`contents.py` writes, `contents.py --check` only says what would change.
"""

import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTENTS = 'course/00_contents.ipynb'  # the first page of the course
ALL = 'course/notebooks.ipynb'
LINKS = '6e617669'  # id of the cell of links, the same in every notebook
SOURCES = '6e617670'  # id of a chapter's last cell: the library's notebooks on its topic
COLAB = 'https://colab.research.google.com/github/vlrep/vlrep/blob/main/nbs'
INSTALL = '!pip install git+https://github.com/vlrep/vlrep'
TABLE = '636f7572'  # id of the cell of the course's first page that holds the chapters

# ---------------------------------------------------------------- reading the notebooks


def text(x):
    return ''.join(x) if isinstance(x, list) else x


def read(root):
    "Path below nbs/ -> notebook, of all that do not lie in a hidden folder"
    paths = sorted((p.relative_to(root / 'nbs').as_posix(), p) for p in (root / 'nbs').rglob('*.ipynb'))
    out = {}
    for name, p in paths:
        if any(part[0] in '._' for part in name.split('/')):
            continue
        try:
            out[name] = json.loads(p.read_text(encoding='utf-8'))
        except ValueError as e:
            raise ValueError(f'nbs/{name}: not valid JSON ({e})') from None
    return out


def headline(nb):
    "Title and line of a notebook"
    src = text(nb['cells'][0]['source'])
    return tuple(m[1].strip() if (m := re.search(p, src, re.M)) else '' for p in (r'^# (.*)$', r'^> (.*)$'))


def chapter(nb):
    "What the title cell says after `- chapter:`, or None"
    m = re.search(r'^- chapter: *(.*?)(, core)? *$', text(nb['cells'][0]['source']), re.M)
    return m and m[1]


def is_core(nb):
    "Whether a reader of its chapter should know this notebook; the others are details"
    return bool(re.search(r'^- chapter: .*, core *$', text(nb['cells'][0]['source']), re.M))


def package(name):
    return name.split('/')[0]


def imported(nb):
    "The packages that a notebook's exported cells import"
    src = '\n'.join(text(c['source']) for c in nb['cells'] if re.match(r'#\| *export\b', text(c['source'])))
    return set(re.findall(r'^ *(?:from|import) vlrep\.(\w+)', src, re.M))


def exports(nb):
    return any(re.search(r'^#\| *default_exp ', text(c['source']), re.M) for c in nb['cells'])


def levels(nbs):
    """Package -> how many packages stand below it, one on the other

    Notebooks that lie in no package come after all packages, folders that export nothing come last.
    """
    needs = {}
    for name, nb in nbs.items():
        if exports(nb) and '/' in name:
            needs.setdefault(package(name), set()).update(imported(nb) - {package(name)})

    def level(p, above=()):
        if p in above:
            raise ValueError(f'the packages {", ".join((*above, p))} import each other in a circle')
        return 1 + max((level(q, (*above, p)) for q in needs.get(p, ())), default=0)

    found = {p: level(p) for p in needs}
    return {package(n): found.get(package(n), len(needs) + 1 + ('/' in n)) for n in nbs}


def outline(nbs):
    """Number of a chapter -> (path of its notebook, title, line, paths of its sources in order of dependency)

    A `ValueError` lists the notebooks without a chapter.
    """
    pages = {int(m[1]): n for n in nbs if (m := re.match(r'course/(\d\d)_', n)) and n != CONTENTS}
    sources = [n for n in nbs if n != 'index.ipynb' and not n.startswith('course/')]
    bad = [f'nbs/{n}' for n in sources if chapter(nbs[n]) not in map(str, pages)]
    if bad:
        raise ValueError(
            f'no chapter: write a last line `- chapter: N`, N one of {", ".join(map(str, sorted(pages)))}, into the '
            f'first cell of {", ".join(bad)}'
        )
    height = levels({n: nbs[n] for n in sources})
    sources.sort(key=lambda n: (height[package(n)], n))
    return {
        k: (pages[k], *headline(nbs[pages[k]]), [n for n in sources if chapter(nbs[n]) == str(k)])
        for k in sorted(pages)
    }


# ---------------------------------------------------------------- writing


def link(frm, to, words):
    return f'[{words}]({Path(os.path.relpath(to, Path(frm).parent)).as_posix()})'


def around(name, row, nbs):
    "Links from `name` to what stands before and after it in `row`"
    i = row.index(name)
    near = [(w, row[j]) for w, j in (('previous', i - 1), ('next', i + 1)) if 0 <= j < len(row)]
    return [f'{w}: {link(name, to, headline(nbs[to])[0])}' for w, to in near]


def lines_of_links(nbs, course):
    "Path -> the line of links of each notebook that has one"
    out = {}
    chapters = [page for page, *_ in course.values()]
    for k, (page, title, _, sources) in course.items():
        for n in sources:
            out[n] = ' · '.join([f'Up: {link(n, page, f"chapter {k}, {title}")}', *around(n, sources, nbs)])
        out[page] = ' · '.join([f'Up: {link(page, CONTENTS, "the course")}', *around(page, chapters, nbs)])
        out[page] += f'\n\n[Open in Colab]({COLAB}/{page}) (not tried yet). There, run `{INSTALL}` first.'
    return out


def sources_of_chapter(page, sources, nbs):
    "The last cell of a chapter: its core notebooks with a line each, then the details"

    def linked(n):
        return link(page, n, headline(nbs[n])[0])

    core = [n for n in sources if is_core(nbs[n])]
    details = [linked(n) for n in sources if n not in core]
    lines = ['## In the library', '', *(f'- {linked(n)}: {headline(nbs[n])[1]}' for n in core)]
    return '\n'.join([*lines, *(['', f'Details: {" · ".join(details)}'] if details else [])])


def page_of_all(nbs, course):
    "The page that lists all notebooks, a notebook without code"

    def cell(i, src):
        return dict(cell_type='markdown', id=f'c0173{i:03x}', metadata={}, source=lines(src))

    def item(n):
        title = link(ALL, n, headline(nbs[n])[0])
        return f'- {f"**{title}**" if is_core(nbs[n]) else title}: {headline(nbs[n])[1]}'

    def part(k, page, title, line, sources):
        return f'## {k} · {link(ALL, page, title)}\n\n{line}.\n\n' + '\n'.join(map(item, sources))

    first = (
        '# All notebooks\n\n> The notebooks of the library, by the chapter of the course that explains their topic\n\n'
        f'The code of the library and its tests are in these notebooks. Those in **bold** are the core of their '
        f'chapter; the others are details. {link(ALL, CONTENTS, "The course")} explains the ideas.\n\n'
        'This page is written by `make export` from the line `- chapter: N` in the first cell of each notebook.'
    )
    cells = [cell(0, first), *(cell(k, part(k, *v)) for k, v in course.items())]
    kernel = dict(display_name='python3', language='python', name='python3')
    return dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)


def minutes(nb):
    "What a chapter says of its time: minutes to read, and minutes for the exercises"
    prose = '\n'.join(text(c['source']) for c in nb['cells'][:4])
    m = re.search(r'\*\*Time:\*\* (\d+) minutes to read, (\d+) for the exercises', prose)
    return (int(m[1]), int(m[2])) if m else (0, 0)


def table(nbs, course):
    "The chapters for the first page of the course, with their minutes"
    times = [minutes(nbs[page]) for page, *_ in course.values()]
    rows = [
        f'| {k} | {link(CONTENTS, page, title)} | {line} | {read} + {practise} |'
        for (k, (page, title, line, _)), (read, practise) in zip(course.items(), times)
    ]
    read, practise = map(sum, zip(*times))
    total = f'| | | *together, in hours* | {read / 60:.1f} + {practise / 60:.1f} |'
    return '\n'.join(['| | chapter | | minutes to read + to practise |', '|---|---|---|---|', *rows, total])


def lines(src):
    return src.splitlines(keepends=True)


def with_cell(nb, id_, src, at):
    "`nb` with a generated cell at its place, instead of the one that it had"
    cells = [c for c in nb['cells'] if c.get('id') != id_ and not (id_ == LINKS and text(c['source'])[:3] == 'Up:')]
    cells.insert(len(cells) if at is None else at, dict(cell_type='markdown', id=id_, metadata={}, source=lines(src)))
    return {**nb, 'cells': cells}


def written(root):
    "Path below nbs/ -> text of every notebook that holds something generated, as it should be"
    nbs = read(root)
    course = outline(nbs)
    new = {n: with_cell(nbs[n], LINKS, src, 1) for n, src in lines_of_links(nbs, course).items()}
    for page, _, _, sources in course.values():
        new[page] = with_cell(new[page], SOURCES, sources_of_chapter(page, sources, nbs), None)
    new[ALL] = page_of_all(nbs, course)
    if not any(c.get('id') == TABLE for c in nbs[CONTENTS]['cells']):
        raise ValueError(f'nbs/{CONTENTS}: the cell {TABLE}, which holds the chapters, is missing')
    cells = [{**c, 'source': lines(table(nbs, course))} if c.get('id') == TABLE else c for c in nbs[CONTENTS]['cells']]
    new[CONTENTS] = {**nbs[CONTENTS], 'cells': cells}
    return {n: json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n' for n, nb in new.items()}


def changes(root=ROOT):
    "What `make export` would write, by path below nbs/"

    def now(p):
        return p.read_text(encoding='utf-8') if p.exists() else None

    return {n: s for n, s in written(root).items() if s != now(root / 'nbs' / n)}


def main(check=False, root=ROOT):
    try:
        todo = changes(root)
    except ValueError as e:
        sys.exit(f'contents: {e}')
    if check:
        return sys.exit(f'not up to date, run `make export`: {", ".join(todo)}' if todo else 0)
    for n, s in todo.items():
        (root / 'nbs' / n).parent.mkdir(exist_ok=True)
        (root / 'nbs' / n).write_text(s, encoding='utf-8')
    print('contents: ' + (f'wrote {", ".join(todo)}' if todo else 'up to date'))


if __name__ == '__main__':
    main('--check' in sys.argv[1:])
