"Cells of notebooks that start several processes, flagged `#| dist`"
import json, os, re, subprocess, sys
import pytest
from tools import ROOT

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
