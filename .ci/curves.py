"""Write the reference curves of methods, vlrep/reports/curves/METHOD.json, from runs with several seeds

    python .ci/curves.py [METHOD ...] [--recipe tiny] [--seeds 5] [--runs FOLDER]

Each run is trained with one thread, and asked for as little as possible afterwards; `--recipe world` takes minutes a
run. Run folders are kept in FOLDER/METHOD-SEED, and those that are complete are not trained again, so it can be
stopped and called once more. Without FOLDER they are gone in the end. Other recipes of a file stay as they are.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CURVES = ROOT / 'vlrep' / 'reports' / 'curves'
LITTLE = 'baselines=false probe=40 probe_held=40 test=40 point=0 shown=4'.split()
LINE = re.compile(r'overfitted: .* in (\d+) steps')


def text(obj):
    "JSON with a line for each list"
    import json

    def short(m):
        return '[' + ', '.join(m[1].split()).replace(',,', ',') + ']'

    return re.sub(r'\[\s+([^\[\]]*?)\s+\]', short, json.dumps(obj, indent=1)) + '\n'


def spec(method, changes, recipe, seed):
    "A run on the world that is the same on every machine: one thread, fp32"
    from vlrep.experiments.spec import run_spec

    name = dict(tiny=True) if recipe == 'tiny' else dict(name=recipe)
    return run_spec(method, changes, data='world', seed=seed, precision='fp32', threads=1, **name)


def trained(method, recipe, seed, folder):
    "recipe.json, as a dict, and the rows of log.csv of a run, which is made where it is missing"
    from vlrep.experiments.pretrain import pretrain
    from vlrep.training.run_folder import open_run_folder

    if not (folder / 'result.jsonl').exists():
        pretrain(spec(method, LITTLE, recipe, seed), out=folder)
    run = open_run_folder(folder)
    return run.info, run.log()


def overfitted(method, recipe, seed, path):
    "Steps of `--overfit`, None if it failed; what it says is kept in the file `path`"
    from vlrep.experiments.pretrain import run_checks

    if not path.exists():
        lines = []
        run_checks('overfit', spec(method, (), recipe, seed), log=lines.append)
        path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
    found = LINE.search(path.read_text(encoding='utf-8'))
    return found and int(found[1])


def write(method, recipe, seeds, folder):
    "Train, compare, and write the file of a method"
    from vlrep.core.files import read_json
    from vlrep.reports.reference_curves import gather_curves

    runs = [trained(method, recipe, s, folder / f'{method}-{s}') for s in seeds]
    took = [overfitted(method, recipe, s, folder / f'{method}-{s}.overfit') for s in seeds]
    lost = [s for s, t in zip(seeds, took) if t is None]
    if lost:
        print(f'{method}: seeds {lost} do not overfit a batch, and are left out of its steps')
    if len(lost) > len(seeds) / 5:
        sys.exit(f'{method}: too many; nothing was written')
    took = [t for t in took if t is not None]
    path = CURVES / f'{method}.json'
    known = read_json(path)['recipes'] if path.exists() else {}
    known[recipe] = gather_curves(runs, overfit=took)
    path.write_text(text(dict(method=method, recipes={k: known[k] for k in sorted(known)})), encoding='utf-8')
    print(f'{path.relative_to(ROOT)}: {recipe}, seeds {seeds}, {took} steps to overfit a batch')


def main():
    from vlrep.methods.base import METHODS

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('method', nargs='*')
    p.add_argument('--recipe', default='tiny')
    p.add_argument('--seeds', type=int, default=5)
    p.add_argument('--runs', type=Path)
    a = p.parse_args()
    if unknown := [m for m in a.method if m not in METHODS]:
        p.error(f'no method {unknown[0]!r}: {", ".join(METHODS)}')
    with tempfile.TemporaryDirectory() as folder:
        for m in a.method or METHODS:
            write(m, a.recipe, list(range(a.seeds)), a.runs or Path(folder))


if __name__ == '__main__':
    main()
