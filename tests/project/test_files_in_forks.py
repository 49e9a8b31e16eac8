"`pytest --forks`: what a file finds, and what is reported of it"

import os
import xml.etree.ElementTree as xml

import forked
from paths import ROOT

CONFTEST = 'from files_in_forks import pytest_addoption, pytest_report_teststatus, pytest_runtestloop'
FILES = dict(
    test_a="""
import os, pytest
@pytest.fixture(scope='module')
def shared(): return []
def test_one(shared, tmp_path):
    print('said')
    shared.append(os.getpid())
    (tmp_path / 'x').write_text('')
def test_two(shared): assert shared == [os.getpid()] != [os.getppid()]
def test_three(shared): assert shared == ['no']
""",
    test_b="""
import os, pathlib
def test_before(): pass
def test_killed(): os.kill(os.getpid(), 9)
def test_after(): assert os.getppid() == int(pathlib.Path('parent').read_text())
""",
    test_c="""
import pytest
@pytest.fixture
def broken(): raise ValueError('a broken fixture')
def test_error(broken): pass
@pytest.mark.skip
def test_skipped(): pass
""",
)
CODE = """
import os, pathlib, sys, pytest
pathlib.Path('parent').write_text(str(os.getpid()))
sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir=.', '--forks=2', '--junitxml=out.xml', '.']))
"""


def test_every_test_of_every_file_is_reported(tmp_path):
    "One that ends its process has failed, and those after it are run"
    (tmp_path / 'conftest.py').write_text(CONFTEST)
    (tmp_path / 'pytest.ini').write_text(f'[pytest]\npythonpath = {ROOT / "tests" / "support"}\n')
    for name, text in FILES.items():
        (tmp_path / f'{name}.py').write_text(text)
    ran = forked.run(CODE, [], tmp_path, {**os.environ, 'PYTEST_DEBUG_TEMPROOT': str(tmp_path)})
    assert ran.returncode == 1, ran.stdout + ran.stderr
    suite = xml.parse(tmp_path / 'out.xml').getroot().find('testsuite')
    assert {k: suite.get(k) for k in ('tests', 'failures', 'errors', 'skipped')} == dict(
        tests='8', failures='2', errors='1', skipped='1'
    )
    bad = {c.get('name'): c[0].get('message') or c[0].text for c in suite.iter('testcase') if len(c)}
    assert bad.keys() == {'test_three', 'test_killed', 'test_error', 'test_skipped'}
    assert 'this test ended its process: signal 9' in ran.stdout and 'a broken fixture' in ran.stdout
    lines = [l.split()[0] for l in ran.stdout.splitlines() if l.endswith(' tests')]
    assert sorted(lines) == ['FAIL', 'FAIL', 'FAIL', 'ok']
    assert ran.stdout.count('said') == 0  # what a test that passes prints is not shown


def test_processes_of_several_programs_are_limited_together(ci, monkeypatch):
    "As many as there are bytes in their pipe; without one, as many as they like"
    Tokens = ci('tokens').Tokens
    monkeypatch.delenv('VLREP_TOKENS', raising=False)
    assert all(Tokens().take() for _ in range(3))
    ends = os.pipe()
    os.write(ends[1], b'++')
    monkeypatch.setenv('VLREP_TOKENS', '{},{}'.format(*ends))
    one = Tokens()
    monkeypatch.setenv('VLREP_TOKENS', '{},{}'.format(*ends))
    two = Tokens()
    assert one.take() and two.take() and not one.take() and not two.take()
    two.give()
    assert one.take() and not two.take()
    for fd in ends:
        os.close(fd)
