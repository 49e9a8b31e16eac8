"The course: contents and links are written from the notebooks, and every chapter has the parts of a chapter"

import ast
import json
import re
import shutil
import subprocess
import symtable
import sys

import pytest
from paths import ROOT
from project import FLOORS, broken, code, flags, load, text

CHAPTERS = sorted(p for p in (ROOT / 'nbs' / 'course').glob('[0-9][0-9]_*.ipynb') if p.name != '00_contents.ipynb')


def save(p, nb):
    p.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


def markdown(i, src):
    return dict(cell_type='markdown', id=i, metadata={}, source=src.splitlines(keepends=True))


def notebook(*cells):
    return dict(cells=list(cells), metadata={}, nbformat=4, nbformat_minor=5)


@pytest.fixture
def copy(tmp_path):
    "The project's notebooks, free to be changed"
    hide = shutil.ignore_patterns('.ipynb_checkpoints', 'images')
    shutil.copytree(ROOT / 'nbs', tmp_path / 'nbs', ignore=hide)
    return tmp_path


def links(contents, root, name):
    "The line of links of a notebook"
    (found,) = (text(c['source']) for c in load(root / 'nbs' / name)['cells'] if c.get('id') == contents.LINKS)
    return found


# ---------------------------------------------------------------- contents and links


def test_contents_are_up_to_date(contents):
    todo = list(contents.changes())
    assert not todo, f'run `make export`, it would change: {", ".join(todo)}'


def test_every_source_has_a_chapter(contents):
    nbs = contents.read(ROOT)
    course = contents.outline(nbs)
    assert list(course) == list(range(1, 13)) and all(sources for *_, sources in course.values())
    listed = [n for *_, sources in course.values() for n in sources]
    sources = {n for n in nbs if n != 'index.ipynb' and not n.startswith('course/')}
    assert len(listed) == len(set(listed)) and set(listed) == sources


def test_the_order_of_contents_is_that_of_the_floors(contents):
    nbs = {n: nb for n, nb in contents.read(ROOT).items() if n != 'index.ipynb' and not n.startswith('course/')}
    got = contents.levels(nbs)
    assert {p: got[p] for p in FLOORS if p in got} == {p: f for p, f in FLOORS.items() if p not in ('cli', 'all')}
    assert got['tutorials'] > got['95_all.ipynb'] == got['90_cli.ipynb'] > max(FLOORS[p] for p in FLOORS if p in got)


def test_the_order_of_contents_has_no_circle(contents):
    def source(exp, imp):
        cells = f'#| default_exp {exp}', f'#| export\nimport vlrep.{imp}'
        return notebook(*(dict(cell_type='code', source=s) for s in cells))

    with pytest.raises(ValueError, match='a, b, a'):
        contents.levels({'a/1.ipynb': source('a', 'b.x'), 'b/1.ipynb': source('b', 'a.x')})


def test_the_list_leads_to_every_notebook(contents):
    page = ROOT / 'nbs' / contents.ALL
    src = '\n'.join(text(c['source']) for c in load(page)['cells'])
    to = {(page.parent / l).resolve() for l in re.findall(r'\]\(([^)]+)\)', src)}
    rest = {(ROOT / 'nbs' / n).resolve() for n in contents.read(ROOT) if n not in (contents.ALL, 'index.ipynb')}
    assert to == rest and not broken(page, src)


def test_every_chapter_has_core_notebooks(contents):
    "A reader is sent to one to seven notebooks of a chapter, and to no detail first"
    nbs = contents.read(ROOT)
    for k, (page, _, _, sources) in contents.outline(nbs).items():
        core = [n for n in sources if contents.is_core(nbs[n])]
        assert 1 <= len(core) <= 7, f'chapter {k}: {core}'
        end = text(load(ROOT / 'nbs' / page)['cells'][-1]['source'])
        assert end.startswith('## In the library') and end.count('\n- [') == len(core)


def test_the_course_says_how_long_it_takes(contents):
    "The hours of the route through all chapters are the sum of what they say"
    nbs = contents.read(ROOT)
    hours = sum(sum(contents.minutes(nbs[page])) for page, *_ in contents.outline(nbs).values()) / 60
    route = re.search(
        r'\*\*(\d+) hours\*\* \| all chapters', '\n'.join(text(c['source']) for c in nbs[contents.CONTENTS]['cells'])
    )
    assert all(all(contents.minutes(nbs[page])) for page, *_ in contents.outline(nbs).values())
    assert abs(hours - int(route[1])) <= 1, f'the chapters take {hours:.1f} hours'


def test_links_go_back_and_forth(contents):
    "Who follows `next` from a chapter's first notebook meets each of its notebooks once, and `previous` leads back"
    for page, _, _, sources in contents.outline(contents.read(ROOT)).values():

        def step(name, word):
            m = re.search(rf'{word}: \[[^]]*\]\(([^)]+)\)', links(contents, ROOT, name))
            return m and ((ROOT / 'nbs' / name).parent / m[1]).resolve().relative_to(ROOT / 'nbs').as_posix()

        seen = [sources[0]]
        while (n := step(seen[-1], 'next')) and n not in seen:
            seen.append(n)
        assert seen == sources and [step(n, 'previous') for n in seen] == [None, *seen[:-1]]
        assert {step(n, 'Up') for n in seen} == {page or contents.CONTENTS}


def test_a_new_notebook_edits_no_list(contents, copy):
    "A notebook with a chapter in its title cell stands in the contents and between its neighbours"
    new = '# Momentum encoder\n\n> A slow copy of the encoder\n\n- chapter: 8'
    save(copy / 'nbs' / 'models' / '35_momentum.ipynb', notebook(markdown('0a0b0c0d', new)))
    contents.main(root=copy)
    assert not contents.changes(copy)
    page = ''.join(text(c['source']) for c in load(copy / 'nbs' / contents.ALL)['cells'])
    assert page.count('- [Momentum encoder](../models/35_momentum.ipynb): A slow copy of the encoder') == 1
    assert 'next: [Momentum encoder](35_momentum.ipynb)' in links(contents, copy, 'models/30_text_encoder.ipynb')
    assert 'previous: [Text encoder](30_text_encoder.ipynb)' in links(contents, copy, 'models/35_momentum.ipynb')
    cells = load(copy / 'nbs' / 'models' / '35_momentum.ipynb')['cells']
    assert [c['id'] for c in cells] == ['0a0b0c0d', contents.LINKS] and text(cells[0]['source']) == new


def test_a_new_chapter_edits_no_list(contents, copy):
    save(copy / 'nbs' / 'course' / '13_more.ipynb', notebook(markdown('0a0b0c0d', '# More\n\n> What else there is')))
    source = notebook(markdown('0a0b0c0e', '# Rest\n\n> The rest\n\n- chapter: 13, core'))
    save(copy / 'nbs' / 'models' / '99_rest.ipynb', source)
    contents.main(root=copy)
    assert not contents.changes(copy)
    first = ''.join(text(c['source']) for c in load(copy / 'nbs' / contents.CONTENTS)['cells'])
    assert '| 13 | [More](13_more.ipynb) | What else there is | 0 + 0 |' in first
    assert links(contents, copy, 'models/99_rest.ipynb') == 'Up: [chapter 13, More](../course/13_more.ipynb)'
    own = links(contents, copy, 'course/13_more.ipynb')
    end = text(load(copy / 'nbs' / 'course' / '13_more.ipynb')['cells'][-1]['source'])
    assert (
        own.startswith('Up: [the course](00_contents.ipynb) · previous: [')
        and '- [Rest](../models/99_rest.ipynb)' in end
    )


def test_links_are_replaced(contents, copy):
    "A line of links that somebody edited or moved comes back, once, below the title; nothing else changes"
    p = copy / 'nbs' / 'losses' / '20_contrastive.ipynb'
    was = p.read_text(encoding='utf-8')
    nb = load(p)
    (cell,) = (c for c in nb['cells'] if c['id'] == contents.LINKS)
    nb['cells'].remove(cell)
    nb['cells'].append({**cell, 'source': ['old']})
    save(p, nb)
    assert list(contents.changes(copy)) == ['losses/20_contrastive.ipynb']
    contents.main(root=copy)
    assert p.read_text(encoding='utf-8') == was


@pytest.mark.parametrize('line', ['', '- chapter: 13', '- chapter: five'])
def test_a_missing_chapter_is_named(contents, copy, line):
    save(copy / 'nbs' / 'models' / '35_momentum.ipynb', notebook(markdown('0a0b0c0d', f'# M\n\n> A line\n\n{line}')))
    with pytest.raises(ValueError, match='(?s)- chapter: N.*nbs/models/35_momentum.ipynb'):
        contents.changes(copy)


def test_the_script_checks_and_make_export_calls_it(tmp_path):
    "`--check` says nothing if all is well; make export calls the script"
    done = subprocess.run([sys.executable, ROOT / '.ci' / 'contents.py', '--check'], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    assert re.search(r'^export: venv\n(\t.*\n)*\t.*\.ci/contents\.py\n', (ROOT / 'Makefile').read_text(), re.M)


# ---------------------------------------------------------------- chapters


@pytest.fixture
def solved(ci):
    "Path -> a notebook with its solutions"
    module = ci('solutions')
    return lambda path: module.joined(load(path), path)


def exercises(nb):
    """What is missing or wrong in the exercises of a chapter, as lines

    Three times or more: task, check, stub that is not run, and its solution.
    """
    cells = nb['cells']
    tasks = [
        (i, m)
        for i, c in enumerate(cells)
        if c['cell_type'] == 'markdown'
        for m in re.findall(r'^\*\*(\d)\. .+?\*\*', text(c['source']), re.M)
    ]
    if len(tasks) < 3 or [m for _, m in tasks] != [str(k + 1) for k in range(len(tasks))]:
        yield f'exercises {[m for _, m in tasks]} instead of 1, 2, 3'
    for i, n in tasks:
        check, stub, solution = ([text(c['source']) for c in cells[i + 1 : i + 4]] + [''] * 3)[:3]
        called = rf'^check_{n}\((\w+)\)'
        names = [re.findall(called, s, re.M) for s in (stub, solution)]
        folded = [c['metadata'].get('jupyter', {}).get('source_hidden', False) for c in cells[i + 1 : i + 4]]
        if not re.search(rf'^def check_{n}\(answer\):', check, re.M):
            yield f'exercise {n}: no check_{n}'
        if 'eval:' not in flags(stub) or 'raise NotImplementedError' not in stub:
            yield f'exercise {n}: no stub'
        if 'NotImplementedError' in solution or flags(solution):
            yield f'exercise {n}: the solution is not run'
        if names[0] != names[1] or len(names[0]) != 1:
            yield f'exercise {n}: stub and solution are not both checked'
        wrong = rf'^with expect_fail\(.*(?:\n    )?.*check_{n}\('
        if not re.search(wrong, solution, re.M):
            yield f'exercise {n}: no wrong answer'
        if folded != [False, False, True]:
            yield f'exercise {n}: the solution alone is folded'


# notebooks of the library that have exercises like a chapter
PRACTISED = [
    ROOT / 'nbs' / f'{name}.ipynb' for name in ('data/70_shards', 'training/05_distributed', 'training/35_precision')
]


@pytest.mark.parametrize('path', CHAPTERS + PRACTISED, ids=lambda p: p.stem)
def test_every_chapter_has_exercises(solved, path):
    assert not list(exercises(solved(path)))


SPOILT = [
    ('raise NotImplementedError', 'return 0', 'no stub'),
    ('#| eval: false', '', 'no stub'),
    ('def check_2(answer)', 'def checked(answer)', 'no check_2'),
    ('**3. ', '**Three. ', 'instead of 1, 2, 3'),
    ('\ncheck_1(mean_nats)', '\npass', 'not both checked'),
    ('with expect_fail(', 'if (', 'no wrong answer'),
]


@pytest.mark.parametrize('old,new,says', SPOILT)
def test_incomplete_exercises_are_seen(solved, old, new, says):
    nb = solved(ROOT / 'nbs' / 'course' / '05_captioning.ipynb')
    for c in nb['cells']:
        c['source'] = text(c['source']).replace(old, new)
    assert any(says in l for l in exercises(nb))


def test_folded_cells_stay_folded(tmp_path):
    "What nbdev_clean leaves of a folded cell"
    from nbdev.clean import clean_nb
    from nbdev.config import get_config

    nb = load(ROOT / 'nbs' / 'course' / '05_captioning.ipynb')
    fold = {'jupyter': {'source_hidden': True}}
    before = [c['metadata'] == fold for c in nb['cells']]
    clean_nb(nb, allowed_cell_metadata_keys=get_config(path=ROOT).get('allowed_cell_metadata_keys').split())
    assert [c['metadata'] == fold for c in nb['cells']] == before and any(before)


def test_chapters_export_nothing():
    for p in CHAPTERS:
        code = [text(c['source']) for c in load(p)['cells'] if c['cell_type'] == 'code']
        assert code and not [f for s in code for f in flags(s) if f in ('export', 'default_exp')], p.name
        assert any(re.search('^(from|import) vlrep', s, re.M) for s in code) and any('#| learns' in s for s in code)


def parts(nb):
    """What a learner misses in a chapter, as lines

    Prerequisites and minutes below the title, two predictions with folded answers, marks, a hint and help for errors
    for each exercise, two wrong answers that each check refuses, and a summary.
    """
    cells = nb['cells']
    prose = [text(c['source']) for c in cells if c['cell_type'] == 'markdown']
    if not any('**Prerequisites:**' in s and re.search(r'\*\*Time:\*\* \d+ minutes', s) for s in prose[:3]):
        yield 'no prerequisites and minutes'
    wanted = [s.split('**Predict before you run.**')[1:] for s in prose]
    wanted = [q for qs in wanted for q in qs]
    if len(wanted) < 2:
        yield f'{len(wanted)} predictions'
    if any(q.count('<details><summary>') < 2 for q in wanted):
        yield 'a prediction without folded answers'
    tasks = [s for s in prose if re.search(r'^\*\*\d\. ', s, re.M)]
    mark = r'\*Difficulty [123] of 3 · importance [123] of 3 · \d+ minutes\.\*'
    if not all(re.search(mark, s) for s in tasks):
        yield 'an exercise without marks'
    if not all('<summary>Hint</summary>' in s for s in tasks):
        yield 'an exercise without a hint'
    if not all('<summary>If you see ...</summary>' in s for s in tasks):
        yield 'an exercise without help for errors'
    solved = [s for s in map(text, (c['source'] for c in cells)) if s.startswith('# Solution of exercise')]
    if any(len(re.findall(r'^with expect_fail\(', s, re.M)) < 2 for s in solved):
        yield 'fewer than two wrong answers'
    if not any(re.search('^## You can now explain', s, re.M) for s in prose[-2:]):
        yield 'no summary'


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_every_chapter_has_its_parts(solved, path):
    assert not list(parts(solved(path)))


MISSING = [
    ('**Prerequisites:**', '', 'no prerequisites'),
    ('**Time:**', 'Time', 'minutes'),
    ('<summary>Hint<', '<', 'hint'),
    ('**Predict before you run.**', '', '0 predictions'),
    ('<details>', '', 'folded answers'),
    ('If you see', 'See', 'help for errors'),
    ('*Difficulty ', '*', 'marks'),
    ('with expect_fail', 'pass; expect_fail', 'two wrong answers'),
    ('## You can now', '## One can now', 'no summary'),
]


@pytest.mark.parametrize('old,new,says', MISSING)
def test_a_chapter_without_its_parts_is_seen(solved, old, new, says):
    nb = solved(ROOT / 'nbs' / 'course' / '01_caption.ipynb')
    for c in nb['cells']:
        c['source'] = text(c['source']).replace(old, new)
    assert any(says in l for l in parts(nb))


def quoted_errors(nb):
    """Per exercise the messages that "If you see ..." quotes, and those that a wrong answer in the solution must give

    The latter are what `expect_fail` looks for, so they are true when the chapter runs. All white space is alike.
    """

    def one_line(s):
        return ' '.join(s.split())

    cells = nb['cells']
    for i, c in enumerate(cells):
        n = c['cell_type'] == 'markdown' and re.search(r'^\*\*(\d)\. ', text(c['source']), re.M)
        if not n:
            continue
        fold = text(c['source']).partition('<summary>If you see ...</summary>')[2].partition('</details>')[0]
        calls = [
            x
            for x in ast.walk(ast.parse(text(cells[i + 3]['source'])))
            if isinstance(x, ast.Call)
            and isinstance(x.func, ast.Name)
            and x.func.id == 'expect_fail'
            and len(x.args) == 2
        ]
        yield n[1], re.findall(r'^- `(.+?)`: ', fold, re.M), {one_line(ast.literal_eval(x.args[1])) for x in calls}


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_quoted_errors_are_true(solved, path):
    errors = list(quoted_errors(solved(path)))
    assert len(errors) >= 3
    for n, quoted, true in errors:
        assert quoted and set(quoted) == true, f'exercise {n}'


def test_a_quoted_error_that_is_untrue_is_seen(solved):
    nb = solved(ROOT / 'nbs' / 'course' / '01_caption.ipynb')
    for c in nb['cells']:
        c['source'] = text(c['source']).replace('`max |a-b| = 0.693`', '`max |a-b| = 0.7`')
    assert [n for n, quoted, true in quoted_errors(nb) if set(quoted) != true] == ['1']


# ---------------------------------------------------------------- solutions


def bodies(src):
    "What the functions of a cell do, without their names and docstrings"
    for f in ast.walk(ast.parse(src)):
        if not isinstance(f, ast.FunctionDef):
            continue
        lines = f.body[1:] if ast.get_docstring(f) else f.body
        yield ast.dump(ast.Module(lines, []))


def bound(src):
    "Names that a cell defines for the cells below it"
    symbols = symtable.symtable(src, '', 'exec').get_symbols()
    return {x.get_name() for x in symbols if x.is_assigned() or x.is_imported()}


def used(table, top=True):
    "Names that a cell, or a function in it, takes from the notebook"
    own = {x.get_name() for x in table.get_symbols() if x.is_referenced() and (top or x.is_global())}
    return own.union(*(used(t, False) for t in table.get_children()))


def leaks(nb, solved):
    "What a notebook still shows of its solutions, and what it needs of them, as lines"
    shown = {b for src in code(nb) for b in bodies(src)}
    present = set().union(*map(bound, code(nb)))
    needed = set().union(*(used(symtable.symtable(src, '', 'exec')) for src in code(nb)))
    for src in (text(c['source']) for c in solved.values()):
        if shown & set(bodies(src)):
            yield f'shown: {src.splitlines()[0]}'
        yield from (f'missing: {n}' for n in sorted((bound(src) - present) & needed))


@pytest.mark.parametrize('path', CHAPTERS + PRACTISED, ids=lambda p: p.stem)
def test_solutions_are_apart(solutions, path):
    "A notebook shows no solution, needs none of their names, and says where they are"
    nb = load(path)
    solved = solutions.solutions(path)
    assert not any(map(solutions.is_solution, nb['cells'])) and not list(leaks(nb, solved))
    assert len(solved) == sum(map(solutions.is_stub, nb['cells'])) >= 3
    assert f'_solutions/{path.name})' in '\n'.join(
        text(c['source']) for c in nb['cells'] if c['cell_type'] == 'markdown'
    )


def test_a_solution_that_is_shown_or_needed_is_seen(solutions):
    path = ROOT / 'nbs' / 'course' / '06_trust.ipynb'
    nb = solutions.joined(load(path), path)
    assert any(l.startswith('shown: ') for l in leaks(nb, solutions.solutions(path)))
    nb = load(path)
    nb['cells'].append(dict(cell_type='code', metadata={}, outputs=[], source='diagnose(1)\nby_last(1)'))
    assert 'missing: by_last' in leaks(nb, solutions.solutions(path))


def test_every_solution_has_its_exercise(solutions):
    "No file of solutions without its notebook, no solution without its stub"
    paths = {p.name: p for p in CHAPTERS + PRACTISED}
    files = sorted(solutions.FOLDER.glob('*.ipynb'))
    assert sorted(paths) == [p.name for p in files]
    assert sum(any(c['outputs'] for c in solutions.solutions(p).values()) for p in files) > 9, 'run `make notebooks`'
    for p in files:
        stubs = {solutions.STUB.search(s)[1] for s in code(load(paths[p.name])) if solutions.STUB.search(s)}
        assert set(solutions.solutions(p)) == stubs


def test_solutions_are_joined_and_taken_apart(solutions):
    path = ROOT / 'nbs' / 'course' / '01_caption.ipynb'
    nb = load(path)
    whole = solutions.joined(nb, path)
    places = [i for i, c in enumerate(whole['cells']) if solutions.is_solution(c)]
    assert len(places) >= 3 and all(solutions.is_stub(whole['cells'][i - 1]) for i in places)
    assert solutions.apart(whole) == nb


STUB = "#| eval: false\ndef f(x):\n    raise NotImplementedError('exercise 1')\n\ncheck_1(f)"


@pytest.mark.parametrize('check,passes', [('answer(1)', True), ('pass', False), ('assert 0', False)])
def test_stubs_run_and_must_fail(solutions, check, passes):
    "What checks run in place of a stub: nothing is to be said if the stub is refused, and only then"

    def code(s):
        return dict(cell_type='code', id='0a0b0c0d', metadata={}, outputs=[], source=s)

    nb = solutions.with_stubs(notebook(code(f'def check_1(answer): {check}'), code(STUB)))
    names = {}

    def run():
        for c in nb['cells']:
            exec(text(c['source']), names)

    if passes:
        run()
    else:
        with pytest.raises(AssertionError):
            run()
    runner = (ROOT / '.ci' / 'notebooks.py').read_text()
    assert 'solutions.with_stubs(' in runner and 'check_stubs()' in runner
