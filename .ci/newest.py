"""What a user gets who installs the wheel without the development tools

That is, the newest fastai and fastcore that settings.ini admits. Torch and CUDA (5 GB) are not installed again but
linked from .venv, and so is what pip would install in the version that .venv has. The library itself is not on the
path here, only the wheel is.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environment import ROOT, VENV, Failed, alone, build, pip, quiet

NEWEST = ROOT / '.venv-newest'
HEAVY = 'torch', 'torchvision', 'triton', 'nvidia-', 'cuda-'
LIMIT = 300  # seconds for one command
TRACKERS = 'tensorboard,wandb'  # extras: callbacks of others for these have failed with the newest fastcore
TESTS = 'tests/training/test_trackers.py', 'tests/cli/test_config_files.py', 'tests/cli/test_commands.py'
TOOLS = 'pytest', 'pytest-timeout', 'hypothesis'
TINY = (
    'scenes=96 valid=32 probe=60 probe_held=60 test=60 shown=8 point=12 size=32 vocab=300 '  # in miniature
    'visual_width=8 width=32 heads=2 bs=16 warmup=2 steps=20'
).split()

LIST = """
import importlib.metadata as im
for d in im.distributions():
    tops = {f.parts[0] for f in d.files or []} - {'..', '__pycache__'}
    print(d.metadata['Name'].lower().replace('_', '-'), d.version, d.locate_file(''), *sorted(tops))
"""
IMPORT_ALL = """
import importlib, pkgutil, importlib.metadata as im, vlrep
assert {venv!r} in vlrep.__file__, vlrep.__file__
names = [m.name for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.')]
for n in names: importlib.import_module(n)
from PIL import Image
from vlrep.datasets.world.dataset import scene
Image.fromarray(scene('test', 0).image).save('scene.png')       # for the caption below
main = 'torch', 'fastai', 'fastcore', 'numpy', 'pillow'
print(len(names), 'modules;', ', '.join(f'{{d}} {{im.version(d)}}' for d in main))
"""


def installed():
    "(name, version, site-packages, top-level files) of what is installed in .venv"
    rows = [l.split() for l in quiet(VENV / 'bin' / 'python', '-c', LIST).splitlines()]
    return [(n, v, Path(at), tops) for n, v, at, *tops in rows]


def heavy(rows):
    "Those that are always linked"
    return [r for r in rows if any(r[0] == h or h.endswith('-') and r[0].startswith(h) for h in HEAVY)]


def alike(rows, wanted):
    """Those that have the version in `wanted`, name -> version, and share no folder with one that has not

    What pip installs into a folder that is a link would end up in .venv.
    """
    fit = [r for r in rows if wanted.get(r[0]) == r[1]]
    return [r for r in fit if not any({*r[3]} & {*o[3]} for o in rows if o not in fit)]


def newest(py, *words):
    "Name -> version of what pip would install, the wheel of this project apart"
    text = quiet(
        py,
        '-m',
        'pip',
        '--disable-pip-version-check',
        '--no-input',
        'install',
        '--quiet',
        '--dry-run',
        '--report',
        '-',
        *words,
        cwd=ROOT,
    )
    found = json.JSONDecoder().raw_decode(text[text.index('{') :])[0]['install']
    return {
        i['metadata']['name'].lower().replace('_', '-'): i['metadata']['version'] for i in found if not i['is_direct']
    }


def link(py, rows):
    "Link packages, and their metadata, into the environment of `py`"
    site = Path(quiet(py, '-c', 'import sysconfig; print(sysconfig.get_paths()["purelib"])').strip())
    for _, _, at, tops in rows:
        for t in tops:
            if not (site / t).exists():
                (site / t).symlink_to(at / t)


def wheel(folder):
    """Build the wheel from a copy that holds only what it needs, and see that it carries exactly the modules of
    vlrep/, the templates of the report, the reference curves, the trained network, and py.typed"""
    src = Path(folder) / 'src'
    src.mkdir()
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / f, src)
    shutil.copytree(ROOT / 'vlrep', src / 'vlrep', ignore=shutil.ignore_patterns('__pycache__'))
    pip(VENV / 'bin' / 'python', 'wheel', '--quiet', '--no-deps', '-w', folder, str(src))
    whl = next(Path(folder).glob('*.whl'))
    has = {n for n in zipfile.ZipFile(whl).namelist() if n.startswith('vlrep/')}
    want = {
        p.relative_to(src).as_posix()
        for p in (src / 'vlrep').rglob('*')
        if p.is_file()
        and (p.suffix in ('.py', '.j2', '.json', '.toml') or p.name == 'py.typed' or 'pretrained' in p.parts)
    }
    if has != want:
        raise Failed(f'the wheel is not vlrep/: {sorted(has ^ want)}')
    return whl


def install(whl, folder):
    "The wheel with its newest requirements; the linked packages may not be touched"
    py = NEWEST / 'bin' / 'python'
    rows = installed()
    pins = Path(folder) / 'constraints.txt'
    pins.write_text(''.join(f'{n}=={v}\n' for n, v, _, _ in heavy(rows)))

    def fresh(py):
        link(py, heavy(rows))
        words = '-c', pins, f'{whl}[{TRACKERS}]', *TOOLS
        link(py, alike(rows, newest(py, *words)))
        pip(py, 'install', '--quiet', '--no-compile', *words)

    with alone():
        if not build(NEWEST, fresh, pins.read_text() + ' '.join(TOOLS), VENV / 'bin' / 'python'):
            pip(py, 'install', '--quiet', '--no-deps', '--force-reinstall', whl)
    pip(py, 'check')


def wrong_option(cmd, folder):
    "A misspelled setting: exit code 2 and one line that names it"
    kw = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
    r = subprocess.run([str(c) for c in cmd], cwd=folder, **kw)
    lines = r.stderr.strip().splitlines()
    if r.returncode != 2 or len(lines) != 1 or 'stepz' not in lines[0]:
        raise Failed(f'exit code {r.returncode} and on stderr:\n{r.stderr[-2000:]}')


def checks(folder):
    "Yields (name, function) in order; a function raises `Failed`"
    bin = NEWEST / 'bin'
    made = {}
    out = Path(folder) / 'run'

    def installs():
        made['wheel'] = wheel(folder)
        install(made['wheel'], folder)

    def call(name, *args):
        return quiet(bin / name, *args, cwd=folder, timeout=LIMIT).strip()

    def imports():
        print('  ' + call('python', '-W', 'ignore', '-c', IMPORT_ALL.format(venv=str(NEWEST))), flush=True)

    def trains():
        call('vlrep', 'pretrain', *[w for s in TINY for w in ('--set', s)], '--out', out, '--tracker', 'tensorboard')
        if not list((out / 'tensorboard').iterdir()):
            raise Failed('no event file in RUN/tensorboard')

    def resumes():
        os.environ['WANDB_MODE'] = 'offline'
        call('vlrep', 'resume', out, '--steps', 24, '--tracker', 'wandb')
        if not list((out / 'wandb').glob('offline-run-*/*.wandb')):
            raise Failed('no offline run in RUN/wandb')

    def writes():
        for run in (out, 'world'):  # the second one comes with the package
            text = call('vlrep', 'caption', run, 'scene.png')
            if not text:
                raise Failed(f'vlrep caption {run} printed nothing')
            print('  ' + text.splitlines()[-1], flush=True)

    def tests():
        env = {**os.environ, 'PYTHONPATH': str(ROOT / '.ci')}
        text = quiet(bin / 'python', '-m', 'pytest', '-q', '--tb=short', *TESTS, cwd=ROOT, timeout=LIMIT, env=env)
        print('  ' + text.strip().splitlines()[-1], flush=True)

    yield 'wheel installs with its newest requirements', installs
    yield 'every module imports', imports
    yield 'vlrep pretrain takes 20 steps, seen by TensorBoard', trains
    yield 'vlrep resume takes 4 more, seen by Weights & Biases', resumes
    yield 'vlrep caption writes a caption', writes
    wrong = [bin / 'vlrep', 'pretrain', '--set', 'stepz=20', '--out', Path(folder) / 'no']
    yield 'a wrong option is named, exit code 2', lambda: wrong_option(wrong, folder)
    yield 'the tests of commands and trackers', tests


def results():
    "Run all checks; yields (name and seconds, None or what went wrong) as each is done"
    with tempfile.TemporaryDirectory() as folder:
        for name, f in checks(folder):
            t = time.time()
            problem = None
            try:
                f()
            except (Failed, OSError, subprocess.SubprocessError) as e:
                problem = str(e) or repr(e)
            yield f'{name}: {time.time() - t:.0f} s', problem


if __name__ == '__main__':
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # every process would compile the new packages
    bad = 0
    for name, problem in results():
        bad += bool(problem)
        print(f'  FAIL {name}\n{problem}' if problem else f'  ok   {name}', flush=True)
    sys.exit(bad > 0)
