"""Do the checks on learning hold with other seeds, precisions, threads and instruction sets? For `make robust`

A notebook's cells that begin with `#| learns` train something and say with `check_learning` how far it came. Here
they run again, each time with other values of `seed` and `precision`; so do the functions of
`tests/support/learning.py`.
Where nothing is trained in a precision that can be chosen (chapters of the course in plain PyTorch), fp32 stands alone.
A margin of 1 is what `make test` asks for, MARGIN is asked here.

    ONLY="NAME ..."     only these notebooks (methods/virtex/40_method), or functions (falls)
    SEEDS=N             seeds 0 to N-1 at the default; 20
    ISA="NAME ..."      only these of: default SSE41 AVX2 AVX512_CORE
    THREADS="N ..."     only with these numbers of threads
    RESULTS=FILE        where results are kept (runs/robust.jsonl)

An interrupted `make robust` goes on where it was: results of the same commit in that file are not run again. Run it
before a release; it then writes data/robust.csv, a line for each check: the smallest margin, where that was, the
number of runs, and the commit.
"""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARGIN = 1.25
TABLE = ROOT / 'data' / 'robust.csv'
LEARNING = ROOT / 'tests' / 'support' / 'learning.py'
ISAS = ('default', 'SSE41', 'AVX2', 'AVX512_CORE')


def matrix(isa, seeds, precisions=('fp32', 'bf16')):
    "(seed, threads, precision) of an instruction set: all seeds as they come, or three seeds in every other way"
    if isa == 'default':
        return [(s, 1, 'auto') for s in range(seeds)]
    return [(s, t, p) for t in (1, 2) for p in precisions for s in range(min(seeds, 3))]


def precisions(path):
    "In what a source can train: fp32 alone where `precision` is not passed on to a learner"
    if path.suffix != '.ipynb':
        return 'fp32', 'bf16'
    src = '\n'.join(cells(path))
    wanted = re.search(r'^precision = ', src, re.M) and re.search(r'\bprecision=precision\b', src)
    return ('fp32', 'bf16') if wanted else ('fp32',)


def cells(path):
    "Source of each code cell of a notebook"
    return [
        ''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code'
    ]


def learns(src):
    return bool(re.match(r'(#\|.*\n)*#\| learns', src))


def left_out(src):
    "Slow cells are run if something is learned there"
    slow = '' if learns(src) else 'slow|'
    return bool(re.search(rf'^#\|\s*({slow}notest|data|cuda|dist|eval:\s*false)', src, re.M))


def sources():
    "Name -> notebook or file in which something is learned"
    nbs = sorted(p for p in (ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
    books = {p.relative_to(ROOT / 'nbs').with_suffix('').as_posix(): p for p in nbs if any(map(learns, cells(p)))}
    functions = re.findall(r'^def ([a-z]\w*)\(seed, precision\)', LEARNING.read_text(encoding='utf-8'), re.M)
    return books | dict.fromkeys(functions, LEARNING)


# ---------------------------------------------------------------- in a process of its own, for its instruction set


def notebook_runner(path):
    "A function of seed and precision that runs the cells that learn; the rest of the notebook is run once, here"
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    ns = shell.user_ns
    todo = []
    os.chdir(path.parent)
    src = cells(path)
    last = max(i for i, s in enumerate(src) if learns(s))

    def quiet(s):
        exec(compile(shell.transform_cell(s), str(path), 'exec'), ns)
        plt.close('all')

    for s in src[: last + 1]:
        if left_out(s):
            continue
        if learns(s):
            todo.append((s, dict(ns)))
        try:
            quiet(s)
        except AssertionError:
            if not learns(s):
                raise  # a check on learning that fails is counted below

    def again(seed, precision):
        fresh = {}
        for s, before in todo:
            here = before | fresh | dict(seed=seed, precision=precision)
            ns.clear()
            ns.update(here)
            quiet(s)
            fresh |= {k: v for k, v in ns.items() if k not in here or here[k] is not v}

    return again


def function_runner(name):
    sys.path.insert(0, str(LEARNING.parent))
    import learning

    return getattr(learning, name)


def work(name, todo):
    "Run what is to be done; a line of JSON for each run goes to the file descriptor that was standard output"
    out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    import torch

    import vlrep.core.testing as testing

    torch.set_num_threads(1)
    p = sources()[name]
    run = None
    for seed, threads, precision in todo:
        start = time.time()
        trouble = ''
        try:
            run = run or (notebook_runner(p) if p.suffix == '.ipynb' else function_runner(name))
            torch.set_num_threads(threads)
            testing.MARGINS.clear()
            start = time.time()
            run(seed, precision)
        except Exception as e:
            trouble = f'{type(e).__name__}: {e}'.splitlines()[0]
        facts = dict(seed=seed, threads=threads, precision=precision, margins=testing.MARGINS, trouble=trouble)
        print(json.dumps(facts | dict(seconds=round(time.time() - start, 1))), file=out, flush=True)
        if run is None:
            break  # the notebook itself does not run


# ---------------------------------------------------------------- the matrix, and what came out


def start(name, isa, todo):
    env = {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        'MKL_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
        'MPLBACKEND': 'Agg',
        'OMP_WAIT_POLICY': 'PASSIVE',
        'PYTHONPATH': str(ROOT),
    }
    env.pop('ONEDNN_MAX_CPU_ISA', None)
    if isa != 'default':
        env['ONEDNN_MAX_CPU_ISA'] = isa
    cmd = [sys.executable, '-W', 'ignore', __file__, 'work', name, json.dumps(todo)]
    return subprocess.Popen(cmd, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def known(path, commit):
    "What was run before at this commit: key -> result; a torn last line is not"
    out = {}
    for line in path.read_text(encoding='utf-8').splitlines() if path.is_file() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result.get('commit') == commit:
            out[key(result)] = result
    return out


def key(r):
    return r['name'], r['isa'], r['seed'], r['threads'], r['precision']


def git_commit():
    "The short hash of the commit, with + if tracked files were changed since"

    def git(*words):
        return subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git('rev-parse', '--short', 'HEAD') + ('+' if git('status', '--porcelain', '-uno') else '')


def rows_of(results):
    "A row for each check: its name, the smallest margin, where that was, and how many runs"
    checks = {}
    for r in results:
        where = f'{r["isa"]}, seed {r["seed"]}, {r["threads"]} threads, {r["precision"]}'
        for check, margin in r['margins']:
            margin = 0.0 if margin != margin else margin
            checks.setdefault(check, []).append((margin, where, r['commit']))
    for check, found in sorted(checks.items(), key=lambda item: min(item[1])):
        margin, where, commit = min(found)
        yield dict(check=check, margin=round(margin, 2), where=where, runs=len(found), commit=commit)


def write_table(rows):
    with open(TABLE, 'w', encoding='utf-8', newline='') as file:
        writer = csv.DictWriter(file, ['check', 'margin', 'where', 'runs', 'commit'], lineterminator='\n')
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda r: r['check']))


def main():
    present = sources()
    whole = not any(os.environ.get(name) for name in ('ONLY', 'ISA', 'SEEDS', 'THREADS'))
    only = os.environ.get('ONLY', '').split() or list(present)
    isas = os.environ.get('ISA', '').split() or ISAS
    seeds = int(os.environ.get('SEEDS') or 20)
    for n in only:
        if n not in present:
            sys.exit(f'ONLY: nothing is learned in {n}; there are: {" ".join(present)}')
    threads = os.environ.get('THREADS', '1 2').split()
    for i in isas:
        if i not in ISAS:
            sys.exit(f'ISA: {i} is not one of {" ".join(ISAS)}')
    path = Path(os.environ.get('RESULTS') or ROOT / 'runs' / 'robust.jsonl')
    path.parent.mkdir(parents=True, exist_ok=True)
    commit = git_commit()
    old = known(path, commit)
    wanted = []
    with open(path, 'a', encoding='utf-8') as f:
        for isa in isas:
            for name in only:
                ways = [w for w in matrix(isa, seeds, precisions(present[name])) if str(w[1]) in threads]
                wanted += [(name, isa, *w) for w in ways]
                todo = [w for w in ways if (name, isa, *w) not in old]
                if not todo:
                    continue
                p = start(name, isa, todo)
                try:
                    for line in p.stdout:
                        r = dict(name=name, commit=commit, isa=isa, **json.loads(line))
                        old[key(r)] = r
                        f.write(json.dumps(r) + '\n')
                        f.flush()
                        low = min((m for _, m in r['margins']), default=0)
                        print(
                            f'{name:20} {isa:12} seed {r["seed"]:2}, {r["threads"]} threads, {r["precision"]:4}: '
                            f'smallest margin {low:.2f}, {r["seconds"]:.0f} s {r["trouble"]}',
                            flush=True,
                        )
                finally:
                    p.kill()
                    p.wait()
    got = [old[k] for k in wanted if k in old]
    rows = list(rows_of(got))
    for r in rows:
        mark = 'ok  ' if r['margin'] >= MARGIN else 'FAIL'
        print(f'  {mark} {r["check"]}: {r["margin"]} in {r["runs"]} runs; {r["where"]}')
    broken = [r for r in got if r['trouble']]
    for r in broken:
        print(f'  FAIL {" ".join(map(str, key(r)))}: {r["trouble"]}')
    if missing := len(wanted) - len(got):
        print(f'  FAIL {missing} runs gave no result')
    low = sum(r['margin'] < MARGIN for r in rows)
    print(f'{len(got)} of {len(wanted)} runs; {low} of {len(rows)} checks have a margin below {MARGIN}')
    if whole:
        write_table(rows)
    sys.exit(bool(missing or broken or not got or low))


if __name__ == '__main__':
    sys.path.pop(0)  # this folder
    if sys.argv[1:2] == ['work']:
        sys.path.insert(0, str(ROOT))
        work(sys.argv[2], [tuple(w) for w in json.loads(sys.argv[3])])
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        main()
