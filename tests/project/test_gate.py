"The scripts behind the Makefile: each check of the gate goes red when it should"

import base64
import io
import json
import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from paths import ROOT
from PIL import Image, ImageChops, ImageStat

CI = ROOT / '.ci'


# ---------------------------------------------------------------- the gate


def tree(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f'{name}.py').write_text(text)
    return folder


def test_edited_unknown_and_missing_modules_are_named(ci, tmp_path):
    "An edited, an unknown and a missing module are each named; byte code is not looked at"
    gate = ci('test')
    old = tree(tmp_path / 'old', a='1', b='2', c='3')
    new = tree(tmp_path / 'new', a='1', b='9', d='4')
    tree(old / '__pycache__', x='')
    lines = [l.strip() for l in gate.differences(old, new)]
    assert lines == ['not made by any notebook: old/c.py', 'missing: old/d.py', 'differs: old/b.py']
    assert not list(gate.differences(old, old))


def test_a_step_that_raises_counts_as_failed(ci, capsys):
    gate = ci('test')

    def broken():
        raise ValueError('no such thing')

    gate.step('a step', broken)
    gate.step('another', lambda: gate.count('fine'))
    assert (gate.passed, gate.failed) == (1, 1) and 'ValueError: no such thing' in capsys.readouterr().out


@pytest.mark.parametrize(
    'script,want',
    [
        ('print("  ok   a"); print("  FAIL b"); raise SystemExit(1)', (1, 1)),
        ('print("  ok   a")', (1, 0)),
        ('print("  ok   a"); raise SystemExit(1)', (1, 1)),  # ends with a failure that no line names
        ('pass', (0, 1)),  # nothing was checked
    ],
)
def test_a_background_script_is_counted_by_its_lines(ci, script, want):
    gate = ci('test')
    gate.step('beside', gate.Background(sys.executable, '-c', script).results)
    assert (gate.passed, gate.failed) == want


RESULTS = """<testsuite tests="2">
<testcase classname="tests.test_a" name="b[c]"><properties><property name="cpu" value="2.5" /></properties></testcase>
<testcase classname="tests.test_a" name="test_d" /></testsuite>"""


def test_the_most_expensive_checks_are_named(ci):
    gate = ci('test')
    got = gate.pytest_costs(xml.fromstring(RESULTS))
    assert got == {'tests.test_a::b[c]': 2.5}
    gate.costs['tests'].update(got)
    gate.costs['notebooks'].update({'a.ipynb': 40.0, 'b.ipynb': 0.5})
    first, *lines = gate.dearest(2)
    assert '2 notebooks 40, 1 tests 2, together 43' in first
    assert [l.split()[-1] for l in lines] == ['a.ipynb', 'tests.test_a::b[c]']


def test_only_packages_of_the_same_version_are_linked(ci):
    "The same version, and no folder that pip will install something else into"
    new = ci('newest')
    rows = [
        ('numpy', '2.4', Path('s'), ['numpy']),
        ('fastai', '2.7', Path('s'), ['fastai']),
        ('a-x', '1', Path('s'), ['shared', 'a']),
        ('a-y', '1', Path('s'), ['shared', 'b']),
        ('torch', '2.9', Path('s'), ['torch']),
    ]
    wanted = {'numpy': '2.4', 'fastai': '2.8', 'a-x': '1', 'a-y': '2', 'new': '1'}
    assert [r[0] for r in new.alike(rows, wanted)] == ['numpy']
    assert [r[0] for r in new.alike(rows, {**wanted, 'a-y': '1'})] == ['numpy', 'a-x', 'a-y']
    assert [r[0] for r in new.heavy(rows)] == ['torch']


def test_environment_is_rebuilt_only_for_new_settings(ci, tmp_path, monkeypatch):
    env = ci('environment')
    built = []
    monkeypatch.setattr(env, 'ROOT', tmp_path)
    monkeypatch.setattr(env, 'quiet', lambda *a: tree(a[-1] / 'bin', python=''))

    def install(py):
        (py).write_text('')
        built.append(1)

    def build(install=install):
        return env.build(tmp_path / 'v', install)

    (tmp_path / 'settings.ini').write_text('one')
    (tmp_path / 'v').mkdir()
    assert build() and not build()
    (tmp_path / 'settings.ini').write_text('two')

    def dies(py):
        raise env.Failed('disk full')

    with pytest.raises(env.Failed, match='disk full'):
        build(dies)
    assert build() and not build() and len(built) == 2  # what was left half built is built again


def test_a_quiet_command_shows_its_output_when_it_fails(ci):
    env = ci('environment')
    assert env.quiet(sys.executable, '-c', 'print(3)') == '3\n'
    fails = 'import sys; print("boom"); sys.exit(3)'
    with pytest.raises(env.Failed, match='boom(.|\n)*exit code 3'):
        env.quiet(sys.executable, '-c', fails)


@pytest.mark.parametrize(
    'says,exit,ok',
    [
        ('no setting stepz', 2, True),
        ('no setting stepz', 1, False),
        ('two lines\nno setting stepz', 2, False),
        ('something is wrong', 2, False),
    ],
)
def test_a_wrong_option_is_refused(ci, tmp_path, says, exit, ok):
    new = ci('newest')
    env = ci('environment')
    cmd = [sys.executable, '-c', f'import sys; print({says!r}, file=sys.stderr); sys.exit({exit})']
    if ok:
        return new.wrong_option(cmd, tmp_path)
    with pytest.raises(env.Failed, match=f'exit code {exit}'):
        new.wrong_option(cmd, tmp_path)


# ---------------------------------------------------------------- README.md


@pytest.mark.parametrize(
    'md,want',
    [
        ('[a](00_core.ipynb)', '[a](nbs/00_core.ipynb)'),
        ('![](images/x.png)', '![](nbs/images/x.png)'),
        ('[l](../LICENSE)', '[l](LICENSE)'),
        ('[w](https://a.org/b)', '[w](https://a.org/b)'),
        ('[s](#map)', '[s](#map)'),
        ('<img src="images/x.png" width="9">', '<img src="nbs/images/x.png" width="9">'),
        ('f(x)', 'f(x)'),
    ],
)
def test_links_of_the_readme_lead_to_the_files(ci, md, want):
    assert ci('readme').relink(md) == want


def test_the_readme_is_made_of_the_index_notebook(ci):
    png = base64.b64encode(b'a picture').decode()

    def code(src, *outs):
        return dict(cell_type='code', source=src, outputs=list(outs))

    def shows(**data):
        return dict(output_type='display_data', data={k.replace('_', '/'): v for k, v in data.items()})

    nb = dict(
        cells=[
            dict(cell_type='markdown', source=['# vlrep\n', '> A line']),
            code('#| hide\nsecret = 1', shows(text_plain='secret')),
            code('#| echo: false\ndraw()', shows(image_png=png, text_plain='<Figure>')),
            code('#| echo: false\ndraw()', shows(image_png=png) | dict(metadata={'image/png': dict(width=300)})),
            code(
                '1+1',
                dict(output_type='execute_result', data={'text/plain': ['2']}),
                dict(output_type='stream', name='stdout', text='hi\n'),
                dict(output_type='stream', name='stderr', text='noise'),
            ),
            code(
                'table()',
                shows(text_html='<b>t</b>', text_plain='<HTML object>'),
                shows(text_markdown='|a|', text_plain='x'),
            ),
        ]
    )
    made = ci('readme').render(nb)
    assert made['nbs/images/index_1.png'] == made['nbs/images/index_2.png'] == b'a picture' and len(made) == 3
    text = made['README.md'].decode()
    blocks = [
        '# vlrep\n> A line',
        '![](nbs/images/index_1.png)',
        '<img src="nbs/images/index_2.png" width="300">',
        '```python\n1+1\n```',
        '```\n2\n```',
        '```\nhi\n```',
        '```python\ntable()\n```',
        '<b>t</b>',
        '|a|\n',
    ]
    assert text.split('\n\n')[1:] == blocks
    assert ci('readme').render(nb) == made


def test_the_readme_is_short():
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1200


def findings():
    "The part of README.md that says what was found, and what the results page shows"
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    cells = json.loads((ROOT / 'nbs' / 'results.ipynb').read_text(encoding='utf-8'))['cells']
    outputs = [o.get('data', {}) for c in cells for o in c.get('outputs', ())]
    found = readme.partition('\n## What we found\n')[2].partition('\n## ')[0]
    return found, '\n'.join(''.join(o.get('text/markdown', '')) for o in outputs)


def test_the_numbers_of_the_readme_are_those_of_the_results():
    "Every decimal number, and how many comparisons there are"
    found, results = findings()
    numbers = re.findall(r'\d+\.\d+|\d+ of \d+ comparisons', found)
    assert len(numbers) >= 7
    assert not [n for n in numbers if not re.search(rf'(?<![\d.]){re.escape(n)}(?![\d])', results)]


def test_the_slowest_notebooks_are_there_and_begin(ci):
    "In the order of the list; the others follow, the last of the reading order first"
    notebooks = ci('notebooks')
    slowest = [notebooks.NBS / f'{name}.ipynb' for name in notebooks.SLOWEST]
    assert not [path for path in slowest if not path.is_file()]
    first, last = (notebooks.NBS / name for name in ('core/00_seeding.ipynb', 'training/10_optim.ipynb'))
    todo = notebooks.slowest_last([slowest[1], first, slowest[0], last])
    assert [todo.pop() for _ in range(4)] == [*slowest[:2], last, first]


# ---------------------------------------------------------------- figures of notebooks


def figure_notebook(*images):
    "A notebook with these images, drawn with twice the pixels"
    import nbformat

    outputs = []
    for image in images:
        f = io.BytesIO()
        image.save(f, 'PNG')
        data = {'image/png': base64.b64encode(f.getvalue()).decode()}
        size = dict(width=image.width // 2, height=image.height // 2)
        outputs.append(nbformat.v4.new_output('display_data', data, metadata={'image/png': size}))
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('draw()', outputs=outputs)])


def stored(nb):
    "Format, image and metadata of each output"
    for o in nb.cells[0].outputs:
        (kind,) = o.data
        yield kind, Image.open(io.BytesIO(base64.b64decode(o.data[kind]))), o.metadata[kind]


def noise(side):
    return Image.effect_noise((side, side), 90)


def colorful(side):
    "Noise in all channels: a palette of 256 colours would be seen"
    return Image.merge('RGB', [noise(side) for _ in range(3)])


def test_figures_are_stored_with_a_palette_at_the_same_size(ci):
    drawing = noise(200).convert('RGB')
    nb = figure_notebook(drawing)
    ci('notebooks').shrink(nb)
    ((kind, image, size),) = stored(nb)
    assert (kind, image.mode, image.size, size) == ('image/png', 'P', (200, 200), dict(width=100, height=100))
    assert ImageStat.Stat(ImageChops.difference(image.convert('RGB'), drawing)).mean[0] < 1


def test_a_palette_that_would_be_seen_is_not_used(ci):
    photo = colorful(100)
    nb = figure_notebook(photo)
    ci('notebooks').shrink(nb)
    ((kind, image, _),) = stored(nb)
    assert kind == 'image/png' and not ImageChops.difference(image.convert('RGB'), photo).getbbox()


def test_the_largest_figure_of_a_large_notebook_becomes_a_jpeg(ci):
    nb = figure_notebook(colorful(60), colorful(200))
    ci('notebooks').shrink(nb, 100_000)
    assert [(kind, image.size, size['width']) for kind, image, size in stored(nb)] == [
        ('image/png', (60, 60), 30),
        ('image/jpeg', (200, 200), 100),
    ]


# ---------------------------------------------------------------- make robust


def test_every_check_on_learning_is_in_the_matrix(ci):
    "A cell that calls `check_learning` begins with `#| learns`"
    robust = ci('robust')
    books = [p for p in (robust.ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
    calls = [(p.stem, c) for p in books for c in robust.cells(p) if re.search(r'^ *check_learning\(', c, re.M)]
    assert calls and not [(name, c[:80]) for name, c in calls if not robust.learns(c) and 'expect_fail' not in c]


def test_a_source_is_tried_in_the_precisions_that_it_takes(ci):
    "A notebook that hands `precision` on is tried in both; a chapter in plain PyTorch is not"
    robust = ci('robust')
    both = [name for name, path in robust.sources().items() if robust.precisions(path) == ('fp32', 'bf16')]
    assert {'methods/virtex/40_method', 'methods/loctex/40_method', 'tutorials/tour', 'falls'} <= {*both}
    assert 'course/01_caption' not in both


def test_the_table_has_the_smallest_margin_of_each_check(ci, tmp_path, monkeypatch):
    robust = ci('robust')
    monkeypatch.setattr(robust, 'TABLE', tmp_path / 'robust.csv')

    def run(seed, *margins):
        return dict(isa='AVX2', seed=seed, threads=1, precision='fp32', commit='abc', margins=margins)

    runs = [run(0, ['loss', 3.0], ['gain', 2.0]), run(1, ['loss', 1.5]), run(2, ['gain', float('nan')])]
    rows = list(robust.rows_of(runs))
    assert [(r['check'], r['margin'], r['runs']) for r in rows] == [('gain', 0, 2), ('loss', 1.5, 2)]
    robust.write_table(rows)
    assert (tmp_path / 'robust.csv').read_text().splitlines()[2] == 'loss,1.5,"AVX2, seed 1, 1 threads, fp32",2,abc'


def test_runs_of_another_commit_do_not_count(ci, tmp_path):
    robust = ci('robust')
    found = dict(name='a', isa='AVX2', seed=0, threads=1, precision='fp32', margins=[])
    (tmp_path / 'r.jsonl').write_text(
        ''.join(json.dumps({**found, 'seed': i, 'commit': c}) + '\n' for i, c in enumerate(('old', 'new'))) + '{"name":'
    )
    assert [k[2] for k in robust.known(tmp_path / 'r.jsonl', 'new')] == [1]
