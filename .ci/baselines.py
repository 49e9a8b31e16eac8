"""Write the kept runs of the supervised baseline, vlrep/reports/baselines/supervised.json

    python .ci/baselines.py [METHOD ...] [--seeds 3] [--runs FOLDER]

For the world's recipe of each METHOD (virtex) its baseline is trained with one thread in fp32, minutes a seed. Run
folders are kept in FOLDER/METHOD-SEED, and those that are complete are not trained again. Other recipes stay.
"""

import argparse
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from curves import ROOT, spec, text

sys.path.insert(0, str(ROOT))
KEPT = ROOT / 'vlrep' / 'reports' / 'baselines' / 'supervised.json'


def trained(recipe, seed, folder):
    "The line of result.jsonl of a run, which is made where it is missing"
    from vlrep.core.files import read_json
    from vlrep.experiments.config import get_recipe
    from vlrep.experiments.pretrain import pretrain

    usual = get_recipe('supervised', 'world')
    changes = [
        f'{f.name}={getattr(recipe, f.name)}'
        for f in fields(recipe)
        if getattr(recipe, f.name) != getattr(usual, f.name)
    ]
    if not (folder / 'result.jsonl').exists():
        pretrain(spec('supervised', changes, 'world', seed), out=folder)
    return read_json(folder / 'result.jsonl')


def kept(line):
    "What is kept of a run"
    num = line['numbers']
    return dict(
        {k: line[k] for k in ('seed', 'precision', 'threads', 'processor', 'date', 'commit')},
        steps=num['steps'],
        views=num['views'],
        warning=num['warnings'].get('supervised'),
        rows=[r | dict(backbone='supervised') for r in num['table'] if r['backbone'] == 'supervised'],
    )


def write(method, seeds, folder):
    "Train, and write the entry of a method's recipe"
    from vlrep.core.files import read_json
    from vlrep.datasets.base import DATASETS
    from vlrep.experiments.baselines import supervised_recipe
    from vlrep.experiments.config import get_recipe
    from vlrep.experiments.evaluate_trained import baseline_facts

    recipe = supervised_recipe(get_recipe(method, 'world'))
    facts = baseline_facts(recipe, dict(name='world'), DATASETS['world'].options)
    runs = [kept(trained(recipe, s, folder / f'{method}-{s}')) for s in seeds]
    KEPT.parent.mkdir(exist_ok=True)
    others = [e for e in (read_json(KEPT) if KEPT.exists() else []) if any(e[k] != facts[k] for k in facts)]
    KEPT.write_text(text([*others, dict(facts, runs=runs)]), encoding='utf-8')
    print(f'{KEPT.relative_to(ROOT)}: {recipe.steps} steps, seeds {seeds}')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('method', nargs='*', default=['virtex'])
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--runs', type=Path)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for m in a.method:
            write(m, list(range(a.seeds)), a.runs or Path(folder))


if __name__ == '__main__':
    main()
