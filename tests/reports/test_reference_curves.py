"The reference curves: shipped, of today's recipes, passed by a fresh seed, and not by runs that are broken"

import functools
import json
import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
from run_folders import facts as page_facts
from tools import ROOT

from vlrep.datasets.base import DATASETS
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import get_recipe, override_all, recipe_dict
from vlrep.experiments.resolve_options import tiny_changes
from vlrep.experiments.splits import open_splits
from vlrep.methods.base import METHODS
from vlrep.methods.virtex.model import CaptioningModel
from vlrep.reports.reference_curves import compare_curve, curve_bands, curve_verdict, reference_curve
from vlrep.reports.run_report import report_html
from vlrep.training.learner import StopAtStep
from vlrep.training.logging import CSVLogger

FOLDER = ROOT / 'vlrep' / 'reports' / 'curves'
FILES = {p.stem: json.loads(p.read_text(encoding='utf-8')) for p in sorted(FOLDER.iterdir())}
KEPT = [(m, r) for m, f in FILES.items() for r in f['recipes']]


def facts(method, recipe):
    "recipe.json of `vlrep pretrain --method METHOD --tiny`, or of the recipe of that name, as far as it is compared"
    parts = [get_recipe(method, 'world' if recipe == 'tiny' else recipe), DATASETS['world'].options]
    if recipe == 'tiny':
        parts = override_all(parts, tiny_changes(*parts))
    return dict(method=method, recipe=recipe_dict(parts[0]), data=dict(name='world', **recipe_dict(parts[1])))


def test_every_method_has_a_tiny_reference_of_several_seeds():
    lacking = [m for m in METHODS if m not in FILES or len(FILES[m]['recipes']['tiny']['seeds']) < 5]
    assert not lacking, f'no reference curves: make curves METHOD="{" ".join(lacking)}"'


@pytest.mark.parametrize('method,recipe', KEPT)
def test_references_are_of_todays_recipes(method, recipe):
    "If this fails, a recipe has changed: `make curves METHOD=... RECIPE=...`"
    entry = reference_curve(method, recipe)
    bands = curve_bands(facts(method, recipe))
    problem = curve_verdict(facts(method, recipe), [])['text']
    assert FILES[method]['method'] == method and bands, f'{problem}: make curves METHOD={method} RECIPE={recipe}'
    for name, c in entry['curves'].items():
        steps, low, high = bands[name]
        assert steps == sorted(set(steps)) and steps[-1] == entry['recipe']['steps'] and len(steps) >= 3
        assert all(l < a <= m <= b < h for l, a, m, b, h in zip(low, c['low'], c['mean'], c['high'], high))
    assert len(entry['curves']['training']['steps']) >= 20 and (recipe != 'tiny' or len(entry['overfit']) >= 4)


def test_references_are_shipped_and_small():
    setup = (ROOT / 'setup.py').read_text(encoding='utf-8')
    patterns = re.findall("'([^']+)',", re.search(r'package_data=\{.*?: \[(.*?)\]', setup, re.S)[1])
    paths = [p.relative_to(ROOT / 'vlrep').as_posix() for p in FOLDER.iterdir()]
    assert paths and not [p for p in paths if not any(fnmatch(p, pattern) for pattern in patterns)]
    assert max(p.stat().st_size for p in FOLDER.iterdir()) < 8000


def test_another_recipe_is_not_compared():
    one = facts('virtex', 'tiny')
    for part, name, value in (
        ('recipe', 'bs', 32),
        ('recipe', 'ema', 0.9),
        ('data', 'scenes', 320),
        ('', 'accumulate', 2),
        ('', 'backbone', 'resnet18'),
        ('', 'world_size', 2),
    ):
        other = dict(one, **{part: {**one[part], name: value}}) if part else dict(one, **{name: value})
        got = curve_verdict(other, [])
        assert got['kind'] == 'none' and f'{name} is {value}, not' in got['text'], got
    photos = dict(one, data=dict(one['data'], name='flickr8k'))
    assert 'data is flickr8k, not world' in curve_verdict(photos, [])['text']


# ---------------------------------------------------------------- runs that are right, and runs that are not


@functools.cache
def material():
    "Method, recipe, images and tokenizer of `vlrep pretrain --tiny`"
    method = METHODS['virtex']
    parts = [get_recipe('virtex', 'world'), DATASETS['world'].options]
    recipe, options = override_all(parts, tiny_changes(*parts))
    splits = open_splits(method, recipe, options, 'world', log=lambda s: None)
    return method, recipe, splits, method.train_tokenizer(recipe, splits['train'])


def verdict(folder, steps, times=1):
    "Of the first `steps` of a run with a fresh seed; its learning rates are `times` those that its recipe names"
    method, recipe, splits, tokenizer = material()
    wrong = replace(recipe, lr=times * recipe.lr, cnn_lr=times * recipe.cnn_lr)
    train_on(
        method,
        wrong,
        splits,
        'world',
        tokenizer,
        seed=21,
        precision='fp32',
        log=lambda s: None,
        cbs=[StopAtStep(steps), CSVLogger(folder / 'log.csv', 5)],
    )
    (folder / 'recipe.json').write_text(json.dumps(facts('virtex', 'tiny')))
    return compare_curve(folder)


def test_a_fresh_seed_is_as_usual(tmp_path):
    got = verdict(tmp_path, 30)
    assert got['kind'] == 'within' and 'the range of 5 runs' in got['text'], got


def test_rates_ten_times_too_high_are_unusual(tmp_path):
    got = verdict(tmp_path, 15, times=10)
    assert got['kind'] == 'above' and 'training' in got['text'], got


def test_a_label_shift_that_gives_the_answer_away_is_unusual(tmp_path, monkeypatch):
    "Each target is the token that was just read"
    answer = CaptioningModel.score_targets
    monkeypatch.setattr(
        CaptioningModel, 'score_targets', lambda self, x, target, *a: answer(self, x, target.roll(1), *a)
    )
    got = verdict(tmp_path, 10)
    assert got['kind'] == 'below' and 'from step' in got['text'], got


# ---------------------------------------------------------------- where it is shown


def test_the_report_shows_the_verdict_and_the_range():
    files = page_facts()
    c = reference_curve('virtex', 'tiny')['curves']['training']
    info = {**files['recipe.json'], **facts('virtex', 'tiny')}
    log = [dict(step=str(s), train_loss=str(m), valid_loss='', lr0='.1') for s, m in zip(c['steps'], c['mean'])]
    page = report_html(info, files['result.jsonl'], log, files['samples.json'])
    assert '<p>Loss as usual: within the range of 5 runs of this recipe; light areas' in page
    assert page.count('<polygon') == 1
    info['recipe'] = {**info['recipe'], 'bs': 32}
    page = report_html(info, files['result.jsonl'], log, files['samples.json'])
    assert 'no reference of this recipe (bs is 32, not 16).</p>' in page and '<polygon' not in page
