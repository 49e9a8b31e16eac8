"""Does a change of the code change a result by a single bit? Two commands, before and after the change, on one machine

    python tests/golden.py freeze DIR [NAME ...]
                                          tiny runs of every method (or of those named) with the code as it is, kept in
                                          DIR with golden.json
    python tests/golden.py compare DIR [NAME ...]
                                          the runs of DIR again (or those named), whole, and stopped and resumed,
                                          compared with DIR/golden.json

One thread, fp32. A run is compared by the SHA-256 of its weights, by its log without times, by its result's numbers and
by the fingerprints of its images. Runs differ between processors: a golden.json means nothing on another machine.
"""

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from vlrep.methods.base import METHODS  # noqa: E402

PHOTOS = ['--data', 'flickr8k', '--root', str(ROOT / 'data' / 'flickr8k-world')]
RUNS = {}
for name, method in METHODS.items():
    RUNS[name] = ['--method', name]
    if hasattr(method.recipes['world'], 'dropout'):
        RUNS[name].append('--set=dropout=.1')  # so that what is drawn in each step counts
RUNS |= {'photos': ['--method', 'virtex', *PHOTOS]}
TIMES = ('seconds', 'images_s', 'images_per_second', 'memory_mb')


def call(*words, wait=True, command='pretrain'):
    "vlrep pretrain, or another command, with one thread; the process if it is not waited for"
    env = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'OMP_NUM_THREADS': '1',
        'MKL_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
    }
    cmd = [sys.executable, '-W', 'ignore', '-m', 'vlrep.cli', command, *map(str, words)]
    p = subprocess.Popen(cmd, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not wait:
        return p
    out = p.communicate()[0]
    if p.returncode:
        sys.exit(f'{" ".join(map(str, words))}: exit code {p.returncode}\n{out}')


def start_words(name, out):
    return [*RUNS[name], '--tiny', '--threads', 1, '--precision', 'fp32', '--save-every', 20, '--out', out]


def stopped(name, out):
    "A run that got a SIGTERM after its first checkpoint"
    p = call(*start_words(name, out), wait=False)
    while p.poll() is None and not any(out.glob('steps/*')):
        time.sleep(0.02)
    p.send_signal(signal.SIGTERM)
    text = p.communicate()[0]
    if p.returncode != 143:
        sys.exit(f'{name}: was to be stopped, and ended with code {p.returncode}\n{text}')


def digest(state):
    "SHA-256 of named tensors"
    h = hashlib.sha256()
    for k in sorted(state):
        h.update(f'{k} {tuple(state[k].shape)} {state[k].dtype}'.encode())
        h.update(state[k].detach().contiguous().numpy().tobytes())
    return h.hexdigest()


def facts(run):
    "What must not change, of a finished run; files are read without the library, whose names may change"
    from safetensors.torch import load_file

    steps = sorted((run / 'steps').iterdir())
    weights = {p.name: digest(load_file(p / 'model.safetensors')) for p in (run / 'best', steps[-1])}
    with open(run / 'log.csv', newline='') as f:
        log = [{k: v for k, v in r.items() if k not in TIMES} for r in csv.DictReader(f)]
    result = json.loads((run / 'result.jsonl').read_text().splitlines()[-1])['numbers']
    info = json.loads((run / 'recipe.json').read_text())
    return dict(weights=weights, log=log, numbers=result, images=info['images'], recipe=info['recipe'])


def without_times(x):
    if isinstance(x, dict):
        return {k: without_times(v) for k, v in x.items() if k not in TIMES}
    return [without_times(v) for v in x] if isinstance(x, list) else x


def lines(was, now, at=''):
    "Where two nests of dictionaries and lists differ"
    if isinstance(was, dict) and isinstance(now, dict):
        for k in sorted({*was, *now}):
            yield from lines(was.get(k), now.get(k), f'{at}.{k}' if at else k)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was, now)):
            yield from lines(a, b, f'{at}[{i}]')
    elif was != now:
        yield f'{at}: {str(was)[:60]} was, {str(now)[:60]} is'


def as_known(now, then):
    "`now` without the columns of the log and the fields of the recipe that came after `then`"
    known = then['log'][0] if then['log'] else {}
    recipe = {k: v for k, v in now['recipe'].items() if k in then['recipe']}
    return {**now, 'recipe': recipe, 'log': [{k: v for k, v in r.items() if k in known} for r in now['log']]}


def freeze(folder, names):
    folder.mkdir(parents=True)
    golden = {}
    for name in names or RUNS:
        call(*start_words(name, folder / name))
        golden[name] = without_times(facts(folder / name))
        print(name, *(w[:12] for w in golden[name]['weights'].values()), flush=True)
    (folder / 'golden.json').write_text(json.dumps(golden, indent=1))


def compare(folder, names):
    golden = json.loads((folder / 'golden.json').read_text())
    bad = 0
    names = names or list(golden)
    if unknown := set(names) - set(golden):
        sys.exit(f'{folder}: not frozen there: {" ".join(sorted(unknown))}; there are: {" ".join(golden)}')
    with tempfile.TemporaryDirectory() as tmp:
        for name in names:
            whole = Path(tmp) / name
            half = Path(tmp) / f'{name}-stopped'
            call(*start_words(name, whole))
            stopped(name, half)
            call(half, command='resume')
            for what, run in (('again', whole), ('resumed', half)):
                now = json.loads(json.dumps(without_times(facts(run))))
                diffs = list(lines(golden[name], as_known(now, golden[name])))
                bad += bool(diffs)
                print(
                    f'{"FAIL" if diffs else "ok  "} {name:12} {what:8}',
                    *diffs[:5],
                    sep='\n       ' if diffs else ' ',
                    flush=True,
                )
    print(f'{bad} of {2 * len(names)} runs differ')
    sys.exit(bad > 0)


if __name__ == '__main__':
    words = sys.argv[1:3]
    names = sys.argv[3:]
    if len(words) != 2 or words[0] not in ('freeze', 'compare'):
        sys.exit(__doc__)
    if wrong := set(names) - set(RUNS):
        sys.exit(f'no such run: {" ".join(sorted(wrong))}; there are: {" ".join(RUNS)}')
    folder = Path(words[1]).resolve()
    {'freeze': freeze, 'compare': compare}[words[0]](folder, names)
