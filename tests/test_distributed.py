"""Several processes: cells of notebooks flagged `#| dist`; two gloo processes against one, for every method; resuming
them; and what happens when one of them fails"""
import json, os, re, socket, subprocess, sys
import pytest
from tools import ENV, ROOT

CODE = """
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
flags = [f for f in get_config().tst_flags.split() if f != 'dist']
sys.exit(0 if test_nb(Path(sys.argv[1]), skip_flags=flags, basepath=Path(sys.argv[2]))[0] else 1)
"""

def has_such_cells(path):
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return any(re.search(r'^#\|\s*dist\s*$', ''.join(c['source']), re.M) for c in cells if c['cell_type'] == 'code')

FOUND     = (p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
NOTEBOOKS = sorted(p for p in FOUND if has_such_cells(p))

def test_there_are_some(): assert {'05_distributed', '30_learner'} <= {p.stem for p in NOTEBOOKS}

@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_of_several_processes(path):
    env = dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', CODE, path, ROOT], cwd=ROOT/'nbs', env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout+done.stderr)[-3000:]

# ---------------------------------------------------------------- two processes equal one

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def ranks(words, cwd, n=2, port=None, each=None, **kw):
    "Processes that train together, started as torchrun would; `each`: more words for each rank"
    port = port or free_port()
    def start(r):
        env = {**ENV, 'PYTHONPATH': f'{ROOT}:{ROOT/"tests"}', 'CUDA_VISIBLE_DEVICES': '', 'RANK': str(r),
               'LOCAL_RANK': str(r), 'WORLD_SIZE': str(n), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
        more = each[r] if each else []
        return subprocess.Popen([sys.executable, '-W', 'ignore', *map(str, [*words, *more])], cwd=cwd, env=env,
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)
    return [start(r) for r in range(n)]

def ended(ps, timeout=200):
    "Exit code, stdout and stderr of each"
    try: return [(*p.communicate(timeout=timeout)[::-1], p.returncode)[::-1] for p in ps]
    finally:
        for p in ps: p.kill()

@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    "What `two_processes.py` found"
    out = tmp_path_factory.mktemp('pair')/'out.json'
    done = ended(ranks([ROOT/'tests'/'two_processes.py', out], out.parent))
    assert [code for code,*_ in done] == [0,0], done
    return json.loads(out.read_text())

METHODS = 'virtex captioning masked_lm token_cls multilabel tags loctex'.split()
VARIANTS = ['loctex in 3 parts', 'loctex, groups of 4, all with all', 'loctex, a process without rows']

@pytest.mark.parametrize('name', METHODS+VARIANTS)
def test_two_processes_equal_one(pair, name):
    "Losses of five steps, gradients of the first and of the last, the held-out loss, the weights, the images counted"
    got = pair[name]
    print(name, got)
    assert len(got['one']) == 5 and got['one'] == pytest.approx(got['two'], rel=2e-5)
    assert got['held'][0] == pytest.approx(got['held'][1], rel=2e-5) and got['samples'][0] == got['samples'][1]
    assert got['first'] < 5e-5 and got['last'] < 2e-3 and got['weights'] < 5e-4
    window = 3 if '3 parts' in name else 1
    assert got['agree'] == ([False]*(window-1) + [True])*5      # gradients travel with the last part of a window only

def test_batchnorm_per_rank_is_the_exception(pair):
    got = pair['virtex, BatchNorm per rank']
    assert got['first'] > .05 and abs(got['one'][0]-got['two'][0]) > 1e-4
    assert pair['virtex']['first'] < .001*got['first']
