"""Build the project's own environment, .venv, unless it is there and settings.ini is still what it was built from

The stamp is written last, so an environment that was interrupted is built again from nothing.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / '.venv'


class Failed(Exception):
    "A command failed; the message is the end of what it printed"


def quiet(*cmd, lines=40, **kw):
    "Run `cmd` and return what it printed; show its last `lines` only if it fails"
    cmd = [str(c) for c in cmd]
    kw.update(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        r = subprocess.run(cmd, **kw)
    except subprocess.TimeoutExpired as e:
        raise Failed(f'still running after {e.timeout:.0f} s: {" ".join(cmd)}')
    except OSError as e:
        raise Failed(f'{" ".join(cmd)}: {e}')
    if r.returncode == 0:
        return r.stdout
    tail = '\n'.join(r.stdout.splitlines()[-lines:])
    raise Failed(f'{tail}\n{" ".join(cmd)}: exit code {r.returncode}')


@contextmanager
def alone():
    "Two builds at once would spoil each other: the second waits"
    with open(ROOT / 'settings.ini') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def outside():
    "The Python that runs this script; where an environment is active, the one that it was made with"
    return Path(sys.executable).resolve()


def build(venv, install, more='', python=None):
    "Make `venv` and `install(its python)`, unless its stamp (settings.ini, place and `more`) is today's; True if built"
    stamp = venv / 'stamp'
    today = '\n'.join([str(ROOT), more, (ROOT / 'settings.ini').read_text()])
    if stamp.exists() and stamp.read_text() == today and (venv / 'bin' / 'python').exists():
        return False
    python = python or outside()  # before `venv` goes, which may be the one that is active
    shutil.rmtree(venv, ignore_errors=True)
    quiet(python, '-m', 'venv', venv)
    install(venv / 'bin' / 'python')
    stamp.write_text(today)
    return True


def pip(py, *args):
    "pip of the environment that `py` belongs to"
    quiet(py, '-m', 'pip', '--disable-pip-version-check', '--no-input', *args, cwd=ROOT)


def byte_code(py, *modules):
    """Import `modules` once, so that the byte code of what is in use is on disk

    Images of containers often set PYTHONDONTWRITEBYTECODE; every process would then compile torch and fastai anew.
    """
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONDONTWRITEBYTECODE'}
    quiet(py, '-W', 'ignore', '-c', f'import {", ".join(modules)}', env=env)


def install(py):
    "The library, editable, with the tools in its `dev` extra"
    print(f'Building .venv with Python {sys.version.split()[0]}: a few minutes, once', flush=True)
    pip(py, 'install', '--quiet', '--upgrade', 'pip')  # that of Debian's Python 3.11 searches for many minutes
    pip(py, 'install', '--quiet', '--no-compile', '-e', '.[dev]')
    byte_code(
        py,
        'vlrep.all',
        'nbdev.test',
        'nbdev.export',
        'ipykernel.kernelapp',
        'matplotlib.pyplot',
        'pytest',
        'sklearn.svm',
    )


def main():
    "Have .venv ready; returns its python"
    t = time.time()
    if sys.version_info < (3, 10):  # noqa: UP036
        raise Failed('vlrep needs Python 3.10 or newer: try make PYTHON=python3.12')
    with alone():
        if build(VENV, install):
            print(f'.venv built in {time.time() - t:.0f} s', flush=True)
    return VENV / 'bin' / 'python'


if __name__ == '__main__':
    try:
        main()
    except Failed as e:
        sys.exit(str(e))
