"The reference curves: shipped, of today's recipes, passed by a fresh seed, and not by runs that are broken"
import csv, json, re
from fnmatch import fnmatch
import pytest
from vlrep.datasets.base import DATASETS
from vlrep.experiments.config import get_recipe, override_all, recipe_dict
from vlrep.experiments.sanity_checks import smoke_test
from vlrep.methods.base import METHODS
from vlrep.reports.page import write_report
from vlrep.reports.reference import compare_curve, curve_bands, curve_verdict, gather_curves, reference_curve
from tools import ROOT

FOLDER = ROOT/'vlrep'/'reports'/'curves'
FILES  = {p.stem: json.loads(p.read_text(encoding='utf-8')) for p in sorted(FOLDER.iterdir())}
KEPT   = [(m, r) for m,f in FILES.items() for r in f['recipes']]

def facts(method, recipe):
    "recipe.json of `vlrep-pretrain --method METHOD --tiny`, or of the recipe of that name, as far as it is compared"
    parts = [get_recipe(method, 'world' if recipe == 'tiny' else recipe), DATASETS['world'].options]
    if recipe == 'tiny': parts = override_all(parts, smoke_test(*parts))
    return dict(method=method, recipe=recipe_dict(parts[0]), data=dict(name='world', **recipe_dict(parts[1])))

def test_every_method_has_a_tiny_reference_of_several_seeds():
    assert not [m for m in METHODS if m not in FILES or len(FILES[m]['recipes']['tiny']['seeds']) < 5]

@pytest.mark.parametrize('method,recipe', KEPT)
def test_references_are_of_todays_recipes(method, recipe):
    "If this fails, a recipe has changed: `make curves METHOD=... RECIPE=...`"
    entry, bands = reference_curve(method, recipe), curve_bands(facts(method, recipe))
    assert FILES[method]['method'] == method and bands, curve_verdict(facts(method, recipe), [])['text']
    for name,c in entry['curves'].items():
        steps, low, high = bands[name]
        assert steps == sorted(set(steps)) and steps[-1] == entry['recipe']['steps'] and len(steps) >= 3
        assert all(l < a <= m <= b < h for l,a,m,b,h in zip(low, c['low'], c['mean'], c['high'], high))
    assert len(entry['curves']['training']['steps']) >= 20 and (recipe != 'tiny' or len(entry['overfit']) >= 5)

def test_references_are_shipped_and_small():
    setup = (ROOT/'setup.py').read_text(encoding='utf-8')
    patterns = re.findall("'([^']+)'", re.search(r"package_data=\{cfg\['lib_path'\]: \[(.*?)\]", setup, re.S)[1])
    paths = [p.relative_to(ROOT/'vlrep').as_posix() for p in FOLDER.iterdir()]
    assert paths and not [p for p in paths if not any(fnmatch(p, pattern) for pattern in patterns)]
    assert max(p.stat().st_size for p in FOLDER.iterdir()) < 8000

def test_another_recipe_is_not_compared():
    one = facts('virtex', 'tiny')
    for part, name, value in (('recipe', 'bs', 32), ('recipe', 'ema', .9), ('data', 'scenes', 320), ('', 'accumulate', 2),
                              ('', 'backbone', 'resnet18'), ('', 'world_size', 2)):
        other = dict(one, **{part: {**one[part], name: value}}) if part else dict(one, **{name: value})
        got = curve_verdict(other, [])
        assert got['kind'] == 'none' and f'{name} is {value}, not' in got['text'], got
    assert 'data is flickr8k, not world' in curve_verdict(dict(one, data=dict(one['data'], name='flickr8k')), [])['text']
