"The templates of the report: they escape everything, are all used and shipped, and are read with the first page"

import re
import subprocess
import sys
from fnmatch import fnmatch
from html.parser import HTMLParser

import pytest
from run_folders import facts, put
from tools import ENV, ROOT

from vlrep.reports.figures import page_html, render_macro, render_template, table_html
from vlrep.reports.run_report import comparison_html, report_html, write_report

FOLDER = ROOT / 'vlrep' / 'reports' / 'templates'
TEMPLATES = {p.name: p.read_text(encoding='utf-8') for p in sorted(FOLDER.iterdir())}
NAME = """<script>a('b')</script> & "c" {{ 1+1 }}"""


class Reader(HTMLParser):
    "What a page shows: its texts, and the texts of attributes that are read aloud"

    def __init__(self, page):
        super().__init__()
        self.said = []
        self.tags = set()
        self.skip = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.skip = tag == 'style'
        self.said += [v for k, v in attrs if k in ('alt', 'aria-label')]

    def handle_data(self, data):
        self.said += [] if self.skip else [data]


def named(name):
    "`facts` of a run in which everything that can have a name has this one"
    files = facts(name)
    info, res, samples = (files[f] for f in ('recipe.json', 'result.jsonl', 'samples.json'))
    info['data']['name'] = info['name'] = info['recipe']['norm'] = info['versions']['torch'] = name
    res['numbers']['corrupt'] = {name: name}
    res['seconds'] = {name: 1.0}
    res['numbers']['warnings'] = {name: dict(text=name)}
    for r in res['numbers']['table']:
        r.update(question=r['question'] + name, metric=name)
    card, words, narratives = (samples[k][0] for k in ('captions', 'words', 'traces'))
    card.update(caption=name, reference=name, right=[name], wrong=[name], missed=[name], note=name)
    words.update(reference=name, words=[dict(words['words'][0], word=name)])
    narratives.update(spoken=[[name, None], [name, 0.5]])
    samples['figures'][0].update(title=name, explain=name)
    samples['neighbours']['queries'] = [{'id': '1', name: [['2', 0.5]]}]
    samples['neighbours']['share'] = {name: 50.0, 'any two': 20.0}
    return info, res, samples


def test_text_arrives_as_it_was():
    "A name with a script, both quotes, an ampersand and a template's braces: shown letter by letter, escaped once"
    info, res, samples = named(NAME)
    log = [dict(step='3', train_loss='2.5', valid_loss='2.', lr0='.1')]
    page = report_html(info, res, log, samples)
    both = comparison_html([dict(name=k, info=info, res=res, log=log) for k in (NAME, 'other')])
    for p, least in ((page, 30), (both, 10)):
        assert '<script' not in p and '{{ 1+1 }}' in p and '&amp;lt;' not in p
        read = Reader(p)
        assert 'script' not in read.tags and sum(NAME in s for s in read.said) >= least, len(read.said)
        assert not any(re.search('&(lt|amp|#34|#39|quot);', s) for s in read.said)


def test_text_of_a_page_is_escaped():
    page = page_html(NAME, {NAME: NAME, 'table': table_html([{NAME: NAME}], NAME)}, NAME)
    assert '<script' not in page and sum(NAME in s for s in Reader(page).said) == 8  # the title twice


@pytest.mark.parametrize('name', TEMPLATES)
def test_templates_escape_everything(name):
    "No way around autoescape, no program, no address; lines as short as everywhere"
    text = TEMPLATES[name]
    ways = r'\|\s*safe\b', r'\bautoescape\b', r'<script', r'\bon\w+=', r'https?:', r'@import', r'url\('
    assert not [w for w in ways if re.search(w, text)]
    assert not [l for l in text.splitlines() if len(l) > 120]
    # an attribute is quoted: a space in a value cannot begin another one
    assert not re.search(r'=\{\{', re.sub(r'\{%.*?%\}', '', text))


def test_all_macros_are_used():
    "Each by another template or by a function"
    macros = re.findall(r'{% macro (\w+)\(', TEMPLATES['macros.j2'])
    python = '\n'.join(p.read_text(encoding='utf-8') for p in (ROOT / 'vlrep').rglob('*.py'))
    used = {
        *re.findall(r'(?<!macro )\b(\w+)\(', '\n'.join(TEMPLATES.values())),
        *re.findall(r"render_macro\(\s*'(\w+)'", python),
    }
    assert len(macros) > 10 and not set(macros) - used


def test_a_missing_value_is_an_error():
    with pytest.raises(ValueError, match="'title' is undefined"):
        render_template('page.j2', dict(sections={}, lead=''))
    with pytest.raises(ValueError, match='no attribute .caption'):
        render_macro('cards', [dict(image='')])


def test_templates_are_shipped():
    "setup.py names a pattern that every template matches"
    setup = (ROOT / 'setup.py').read_text(encoding='utf-8')
    patterns = re.findall("'([^']+)',", re.search(r'package_data=\{.*?: \[(.*?)\]', setup, re.S)[1])
    lost = [n for n in TEMPLATES if not any(fnmatch(f'reports/templates/{n}', p) for p in patterns)]
    assert len(TEMPLATES) > 3 and not lost


LIGHT = """
import sys
from vlrep.reports.run_report import write_report
print([m for m in ('jinja2', 'matplotlib', 'torch', 'fastai') if m in sys.modules])
write_report(sys.argv[1])
print([m for m in ('jinja2', 'matplotlib', 'torch', 'fastai') if m in sys.modules])
"""


def test_a_page_depends_on_its_folder_only(tmp_path):
    "Two processes with other hashes write the same bytes; Jinja2 is imported with the first page, PyTorch never"
    run = put(tmp_path / 'run', facts())
    pages = []
    for seed in ('1', '2'):
        done = subprocess.run(
            [sys.executable, '-c', LIGHT, run], capture_output=True, text=True, env={**ENV, 'PYTHONHASHSEED': seed}
        )
        assert done.stdout.split('\n')[:2] == ['[]', "['jinja2']"], done.stdout + done.stderr
        pages.append((run / 'report.html').read_bytes())
    assert pages[0] == pages[1] == write_report(run).read_bytes()
