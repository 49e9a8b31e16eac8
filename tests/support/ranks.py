"Runs of several processes, and what each of them said"

import json
import socket

import forked
from tools import sets


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


SIZES = ['scenes=200', 'valid=32', 'probe=40', 'probe_held=40', 'test=40', 'shown=8']
JOB = [*SIZES, 'size=32', 'steps=40', 'baselines=False', 'visual_depth=10', 'visual_width=8', 'bs=16', 'warmup=2']
TAGS = ['--method', 'supervised', '--threads', '1', '--precision', 'fp32', *sets(JOB)]


def codes(ranks):
    return [r['code'] for r in ranks]


def last(rank):
    return rank['err'].strip().splitlines()[-1]


def run_ranks(cwd, runs):
    "What became of each of these runs of `forked_ranks.py`"
    (cwd / 'runs.json').write_text(json.dumps(runs))
    code = 'import forked_ranks, sys; forked_ranks.work(*sys.argv[1:])'
    done = forked.run(code, [cwd / 'runs.json', cwd / 'out.json'], cwd, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((cwd / 'out.json').read_text())
