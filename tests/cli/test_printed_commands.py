"Every command that a page prints to be pasted is accepted, and those for several processes train a paper's recipe"

import json
import re
import shlex

import pytest
from paths import ROOT

import vlrep.cli as cli
from vlrep.datasets.base import DATASETS
from vlrep.experiments.resolve_options import resolve_options

FILES_FIRST = re.compile(r'^(resume|study) | --plugin |\bNAME\b')  # These read a file before all options are known


def shell_lines(page):
    "The lines of a page's shell blocks; of a notebook those in its Markdown cells"
    text = page.read_text(encoding='utf-8')
    if page.suffix == '.ipynb':
        text = '\n'.join(''.join(c['source']) for c in json.loads(text)['cells'] if c['cell_type'] == 'markdown')
    blocks = re.findall(r'^```(?:sh|bash|shell)\n(.*?)^```', text, re.M | re.S)
    return [line for block in blocks for line in re.sub(r'\\\n\s*', ' ', block).splitlines()]


def command(line):
    "The words behind `vlrep` in a line, as text; '' for a line without"
    found = re.search(r'\bvlrep(?:\.cli)? ([a-z][^#|&;>]*)', line)
    return found[1].replace(' ...', '').strip() if found else ''


PRINTED = {}  # Command -> is it started by torchrun?
for page in [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'nbs').rglob('*.ipynb'))]:
    for line in shell_lines(page):
        if (text := command(line)) and not FILES_FIRST.search(text + ' '):
            PRINTED[text] = PRINTED.get(text, False) or 'torchrun' in line


class Parsed(BaseException):
    "Arguments were accepted"


def accepted(text, monkeypatch):
    "Parse the arguments of a command, and go no further"
    for name in ('_parse', 'subcommand_cli_from_dict'):  # the latter of commands that are divided: vlrep data check

        def parse_and_stop(*args, parse=getattr(cli, name), **options):
            raise Parsed(parse(*args, **options))

        monkeypatch.setattr(cli, name, parse_and_stop)
    with pytest.raises(Parsed) as e:
        cli._carry_out(shlex.split(text))
    return e.value.args[0]


@pytest.mark.parametrize('text', PRINTED)
def test_a_printed_command_is_accepted(text, monkeypatch):
    got = accepted(text, monkeypatch)
    if PRINTED[text] and text.startswith('pretrain --'):
        names = got.names
        recipe, _ = resolve_options(names.method or 'virtex', names.recipe, (), names.data)
        assert DATASETS[names.data].root_help and (recipe.visual_depth, recipe.size) == (50, 224), recipe


def test_there_are_commands():
    assert len(PRINTED) > 10 and sum(PRINTED.values()) >= 3


@pytest.mark.parametrize(
    'text',
    ['pretrain --methd virtex', 'pretrain --recipe loctex_r50', 'captoin RUN photo.jpg', 'data check coco --rot DIR'],
)
def test_a_wrong_command_is_seen(text, monkeypatch):
    with pytest.raises((SystemExit, ValueError)):
        accepted(text, monkeypatch)
