"""Every check of the project, for `make test`. All steps run, whatever fails; the last line is `N passed, M failed`

A notebook, a test of pytest and a check of this file count as one each.
"""

import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import environment
import readme
from environment import ROOT, Failed, quiet

BIN = environment.VENV / 'bin'
# in vlrep/, from no notebook: folder -> ending
KEPT = {
    'reports/templates': '.j2',
    'reports/curves': '.json',
    'reports/baselines': '.json',
    'reproduce/plans': '.toml',
    'pretrained': '',
}
WORKERS = 3  # processes at a time, one more than cores: some wait for files or others
passed = failed = 0
costs = dict(notebooks={}, tests={})  # CPU seconds of each notebook and of each test of pytest


def count(name, problem=None):
    "One check is done: `problem` is what went wrong"
    global passed, failed
    if problem:
        failed += 1
    else:
        passed += 1
    if name:
        print(f'  FAIL {name}\n{problem}' if problem else f'  ok   {name}', flush=True)


def step(name, f):
    "Run one step and say how long it took; a step that raises is a failed check"
    print(f'== {name}', flush=True)
    t = time.time()
    try:
        f()
    except Exception as e:
        count(name, str(e) if isinstance(e, Failed) else f'{type(e).__name__}: {e}')
    print(f'== {name}: {time.time() - t:.0f} s', flush=True)


def files(folder):
    "Relative paths of what belongs to `folder`, byte code apart"

    def ours(p):
        return p.is_file() and not {'__pycache__', '.ipynb_checkpoints'} & set(p.parts)

    return {p.relative_to(folder) for p in folder.rglob('*') if ours(p)}


def differences(old, new):
    "What differs between two folders, as lines"
    a = files(old)
    b = files(new)
    yield from (f'    not made by any notebook: {old.name}/{p}' for p in sorted(a - b))
    yield from (f'    missing: {old.name}/{p}' for p in sorted(b - a))
    yield from (
        f'    differs: {old.name}/{p}' for p in sorted(a & b) if not filecmp.cmp(old / p, new / p, shallow=False)
    )


def compare(what, hint, old, new):
    lines = list(differences(old, new))
    count(what, '\n'.join(lines + [f'    {hint}']) if lines else None)


def copied(folder):
    """A copy of the project with an empty vlrep/

    Only what no notebook exports: its __init__.py, whose version line is all that nbdev writes, py.typed, the templates
    of the report, the reference curves, and kept baselines
    """
    new = Path(folder) / 'copy'
    new.mkdir()
    for f in ('settings.ini', 'setup.py', 'pyproject.toml'):
        shutil.copy(ROOT / f, new)
    shutil.copytree(ROOT / 'nbs', new / 'nbs', ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    (new / 'vlrep').mkdir()
    for f in ('__init__.py', 'py.typed'):
        shutil.copy(ROOT / 'vlrep' / f, new / 'vlrep')
    for at, end in KEPT.items():
        shutil.copytree(
            ROOT / 'vlrep' / at,
            new / 'vlrep' / at,
            ignore=lambda _, names, end=end: [n for n in names if not n.endswith(end)],
        )
    return new


def exported():
    with tempfile.TemporaryDirectory() as folder:
        new = copied(folder)
        quiet(BIN / 'nbdev_export', cwd=new)
        hint = 'edit the notebook, then `make export`'
        compare('vlrep/ is what the notebooks export', hint, ROOT / 'vlrep', new / 'vlrep')
        same = filecmp.cmp(ROOT / 'pyproject.toml', new / 'pyproject.toml', shallow=False)
        count('pyproject.toml agrees with settings.ini', None if same else '    run `make export`')


def cleaned():
    with tempfile.TemporaryDirectory() as folder:
        new = copied(folder)
        quiet(BIN / 'nbdev_clean', cwd=new)
        compare('the notebooks are clean', 'run `make export`', ROOT / 'nbs', new / 'nbs')


def lint():
    for what, words in (('ruff check', ('check',)), ('ruff format', ('format', '--check'))):
        run = subprocess.run([BIN / 'ruff', *words, '--quiet', '.'], cwd=ROOT, capture_output=True, text=True)
        count(what, run.stdout + '    `make format` mends most of it' if run.returncode else None)


def readme_built():
    todo = readme.changes()
    problem = f'    run `make readme`: it would change {", ".join(todo)}' if todo else None
    count('README.md is what nbs/index.ipynb says', problem)


def together(*cmds):
    """Run commands side by side, with their output going straight through; their exit codes

    Together they have no more than `WORKERS` processes at a time, see `tokens.py`. If we are stopped, they are told to
    stop, too.
    """
    tokens = os.pipe()
    os.write(tokens[1], b'+' * WORKERS)
    env = {**os.environ, 'VLREP_TOKENS': '{},{}'.format(*tokens)}
    kw = dict(cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, pass_fds=tokens)
    running = []
    try:
        for cmd in cmds:
            running.append(subprocess.Popen([str(c) for c in cmd], **kw))
        left = [*running]
        while left:
            for p in left:
                if p.poll() is not None:
                    left.remove(p)
                    os.write(tokens[1], b'+' * WORKERS)  # it may have ended with some of them
                    break
            else:
                time.sleep(0.1)
        return [p.returncode for p in running]
    except BaseException:
        for p in running:
            p.terminate()
        for p in running:
            p.wait()
        raise
    finally:
        for fd in tokens:
            os.close(fd)


def notebooks(results, code):
    "Count what `notebooks.py` has found"
    res = json.loads(results.read_text()) if results.exists() else {}
    if not res:
        raise Failed(f'no notebook was checked (exit code {code})')
    costs['notebooks'].update({name: cpu for name, (_, cpu) in res.items()})
    for ok, _ in res.values():
        count(None, not ok)


def pytest_costs(suite):
    "Test -> CPU seconds, which tests/conftest.py has written into the results"
    return {
        f'{case.get("classname")}::{case.get("name")}': float(p.get('value'))
        for case in suite.iter('testcase')
        for p in case.iter('property')
        if p.get('name') == 'cpu'
    }


def pytest(results, code):
    "Count what pytest has found"
    suite = xml.parse(results).getroot().find('testsuite') if results.exists() else xml.Element('testsuite')
    costs['tests'].update(pytest_costs(suite))
    n = suite.attrib
    tests, failures, errors, skipped = (int(n.get(k, 0)) for k in ('tests', 'failures', 'errors', 'skipped'))
    bad = failures + errors
    if tests == 0 or (code and not bad):
        raise Failed(f'pytest ran {tests} tests, exit code {code}')
    for i in range(tests - skipped):
        count(None, i < bad)


def notebooks_and_tests():
    "Side by side: no core is idle while one of them imports PyTorch, or at its end"
    with tempfile.TemporaryDirectory() as folder:
        books, tests = (Path(folder) / name for name in ('notebooks.json', 'tests.xml'))
        python = BIN / 'python'
        words = '-q', '--tb=short', f'--forks={WORKERS}', f'--junitxml={tests}', 'tests'
        codes = together(
            (python, '-m', 'pytest', *words),
            (python, '-W', 'ignore', '.ci/notebooks.py', 'test', '--results', books),
        )
        step('pytest', lambda: pytest(tests, codes[0]))
        step('notebooks', lambda: notebooks(books, codes[1]))


# the scenes that most checks look at, once: a smaller set is cut from a larger one in the cache
DRAW = """
import os
from vlrep.datasets.world.dataset import world
other = os.fork()
if other: jobs = [('train', 3000, 32, False), ('train', 1500, 48, False, 'narrative')]
else: jobs = [('valid', 200, 32, False), ('test', 1000, 32, False), ('train', 1000, 32, True), ('valid', 500, 32, True),
              ('test', 800, 32, True), ('train', 1200, 48, False), ('valid', 300, 48, False), ('test', 300, 48, False),
              ('train', 400, 96, False, 'narrative')]
for split,n,size,shifted,*more in jobs: world(split, n, size, shifted, with_=more)
if not other: os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
if not code: print('  ok   the world is drawn', flush=True)
os._exit(code)
"""


def dearest(n=25):
    "Lines: what notebooks and tests take in all, and the checks that take most CPU time"
    sums = ', '.join(f'{len(c)} {what} {sum(c.values()):.0f}' for what, c in costs.items())
    each = {name: seconds for c in costs.values() for name, seconds in c.items()}
    yield f'CPU seconds: {sums}, together {sum(each.values()):.0f}; the dearest are'
    yield from (f'  {seconds:6.1f} s  {name}' for name, seconds in sorted(each.items(), key=lambda kv: -kv[1])[:n])


class Background:
    "A script of checks that runs beside the other steps; its lines `ok` and `FAIL` are counted when it is waited for"

    def __init__(self, *cmd):
        self.out = tempfile.TemporaryFile('w+', errors='replace')
        self.process = subprocess.Popen(
            [str(c) for c in cmd],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self):
        "End the script and what it has started"
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def results(self):
        "Wait; print what it printed, and count"
        code = self.process.wait()
        self.out.seek(0)
        text = self.out.read()
        print(text, end='', flush=True)
        oks, fails = (sum(l.startswith(f'  {w}') for l in text.splitlines()) for w in ('ok ', 'FAIL '))
        for i in range(oks + fails):
            count(None, i < fails)
        if bool(code) != bool(fails) or not oks + fails:
            raise Failed(f'{oks + fails} checks, exit code {code}')


def main():
    start = time.time()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    step('environment', lambda: (environment.main(), count('.venv is ready')))
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', PYTHONUNBUFFERED='1')
        os.environ.setdefault('VLREP_CACHE', cache)
        for v in ('PYTHONPATH', 'IN_TEST', 'VIRTUAL_ENV', 'PYTHONDONTWRITEBYTECODE'):
            os.environ.pop(v, None)
        if not failed:
            scenes = Background(BIN / 'python', '-W', 'ignore', '-c', DRAW)
            newest = Background(sys.executable, '.ci/newest.py')  # most of its time goes into an installation
            try:
                step('export', exported)
                step('clean', cleaned)
                step('lint', lint)
                step('readme', readme_built)
                step('world', scenes.results)
                step('notebooks and tests', notebooks_and_tests)
                step('newest requirements', newest.results)
            finally:
                scenes.stop()
                newest.stop()
    print('\n'.join(dearest()))
    print(f'{time.time() - start:.0f} s in all')
    print(f'{passed} passed, {failed} failed', flush=True)
    sys.exit(failed > 0)


if __name__ == '__main__':
    main()
