"""What a user gets who installs the wheel without the development tools

That is, the newest fastai and fastcore that settings.ini admits. Torch and CUDA (5 GB) are not installed again but
linked from .venv. The library itself is not on the path here, only the wheel is.
"""
import shutil, subprocess, sys, tempfile, time, zipfile
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from environment import ROOT, VENV, Failed, alone, build, byte_code, pip, quiet

NEWEST = ROOT/'.venv-newest'
HEAVY  = 'torch', 'torchvision', 'triton', 'nvidia-', 'cuda-'
LIMIT  = 300       # seconds for one command
TINY   = ('scenes=200 valid=32 probe=120 probe_held=60 test=100 shown=24 size=32 vocab=300 '    # a world in miniature
          'width=32 heads=2 bs=16 warmup=2 steps=20').split()

LIST_HEAVY = f"""
import importlib.metadata as im
for d in im.distributions():
    name = d.metadata['Name'].lower().replace('_', '-')
    if any(name == h or h.endswith('-') and name.startswith(h) for h in {HEAVY}):
        print(name, d.version, d.locate_file(''), *sorted({{f.parts[0] for f in d.files}}))
"""
IMPORT_ALL = """
import importlib, pkgutil, importlib.metadata as im, vlrep
assert {venv!r} in vlrep.__file__, vlrep.__file__
names = [m.name for m in pkgutil.walk_packages(vlrep.__path__, 'vlrep.')]
for n in names: importlib.import_module(n)
main = 'torch', 'fastai', 'fastcore', 'numpy', 'pillow'
print(len(names), 'modules;', ', '.join(f'{{d}} {{im.version(d)}}' for d in main))
"""

def heavy():
    "(name, version, site-packages, top-level files) of the installed packages that are linked"
    rows = [l.split() for l in quiet(VENV/'bin'/'python', '-c', LIST_HEAVY).splitlines()]
    return [(n, v, Path(at), tops) for n,v,at,*tops in rows]

def link(py):
    "Link the heavy packages, and their metadata, into the environment of `py`"
    site = Path(quiet(py, '-c', 'import sysconfig; print(sysconfig.get_paths()["purelib"])').strip())
    for _,_,at,tops in heavy():
        for t in tops:
            if t not in ('..', '__pycache__') and not (site/t).exists(): (site/t).symlink_to(at/t)

def wheel(folder):
    """Build the wheel from a copy that holds only what it needs, and see that it carries exactly the modules of
    vlrep/, the templates of the report, and py.typed"""
    src = Path(folder)/'src'
    src.mkdir()
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE'): shutil.copy(ROOT/f, src)
    shutil.copytree(ROOT/'vlrep', src/'vlrep', ignore=shutil.ignore_patterns('__pycache__'))
    pip(VENV/'bin'/'python', 'wheel', '--quiet', '--no-deps', '-w', folder, str(src))
    whl = next(Path(folder).glob('*.whl'))
    has  = {n for n in zipfile.ZipFile(whl).namelist() if n.startswith('vlrep/')}
    want = {p.relative_to(src).as_posix() for p in (src/'vlrep').rglob('*') if p.suffix in ('.py', '.j2')
            or p.name == 'py.typed'}
    if has != want: raise Failed(f'the wheel is not vlrep/: {sorted(has ^ want)}')
    return whl

def install(whl, folder):
    "The wheel with its newest requirements; the linked packages may not be touched"
    py = NEWEST/'bin'/'python'
    pins = Path(folder)/'constraints.txt'
    pins.write_text(''.join(f'{n}=={v}\n' for n,v,_,_ in heavy()))
    def fresh(py):
        link(py)
        pip(py, 'install', '--quiet', '--no-compile', '-c', pins, whl)
    with alone():
        if not build(NEWEST, fresh, pins.read_text(), VENV/'bin'/'python'):
            pip(py, 'install', '--quiet', '--no-deps', '--force-reinstall', whl)
    pip(py, 'check')
    byte_code(py, 'vlrep.all')

def wrong_option(cmd, folder):
    "A misspelled setting: exit code 2 and one line that names it"
    kw = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
    r = subprocess.run([str(c) for c in cmd], cwd=folder, **kw)
    lines = r.stderr.strip().splitlines()
    if r.returncode != 2 or len(lines) != 1 or 'stepz' not in lines[0]:
        raise Failed(f'exit code {r.returncode} and on stderr:\n{r.stderr[-2000:]}')

DRAW = """
from PIL import Image
from vlrep.datasets.world.dataset import scene
Image.fromarray(scene('test', 0).image).save('scene.png')
"""

def checks(folder):
    "Yields (name, function) in order; a function raises `Failed`"
    bin,made,out = NEWEST/'bin', {}, Path(folder)/'run'
    def installs():
        made['wheel'] = wheel(folder)
        install(made['wheel'], folder)
    def call(name, *args): return quiet(bin/name, *args, cwd=folder, timeout=LIMIT).strip()
    def imports(): print('  ' + call('python', '-W', 'ignore', '-c', IMPORT_ALL.format(venv=str(NEWEST))), flush=True)
    def trains(): call('vlrep-pretrain', *[w for s in TINY for w in ('--set', s)], '--out', out)
    def writes():
        call('python', '-W', 'ignore', '-c', DRAW)
        said = call('vlrep-caption', out, 'scene.png')
        if not said: raise Failed('vlrep-caption printed nothing')
        print('  ' + said.splitlines()[-1], flush=True)
    yield 'wheel installs with its newest requirements', installs
    yield 'every module imports', imports
    yield 'vlrep-pretrain takes 20 steps', trains
    yield 'vlrep-caption writes a caption', writes
    wrong = [bin/'vlrep-pretrain', '--set', 'stepz=20', '--out', Path(folder)/'no']
    yield 'a wrong option is named, exit code 2', lambda: wrong_option(wrong, folder)

def results():
    "Run all checks; yields (name and seconds, None or what went wrong) as each is done"
    with tempfile.TemporaryDirectory() as folder:
        for name,f in checks(folder):
            t,problem = time.time(), None
            try: f()
            except (Failed, OSError, subprocess.SubprocessError) as e: problem = str(e) or repr(e)
            yield f'{name}: {time.time()-t:.0f} s', problem

if __name__ == '__main__':
    bad = 0
    for name,problem in results():
        bad += bool(problem)
        print(f'  FAIL {name}\n{problem}' if problem else f'  ok   {name}', flush=True)
    sys.exit(bad > 0)
