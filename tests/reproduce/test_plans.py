"Plans of the papers: each command is accepted and trains what the plan says; a bad plan is one line"

import dataclasses
import math
import shlex
from functools import partial
from pathlib import Path

import pytest

import vlrep.cli as cli
import vlrep.experiments.spec as spec
from vlrep.datasets.base import DATASETS, DatasetBuilder
from vlrep.evaluation.base import EVALUATIONS
from vlrep.methods.base import METHODS
from vlrep.reproduce.plan import Places, paper_names, plan_commands, planned_recipe, read_plan, run_folder
from vlrep.reproduce.rehearsal import rehearsed

PLANS = {paper: read_plan(paper) for paper in paper_names()}
SMALLER = {paper: rehearsed(plan) for paper, plan in PLANS.items()}
JOBS = [
    'vlrep.experiments.pretrain.pretrain',
    'vlrep.experiments.finetune.finetune',
    'vlrep.experiments.commands.evaluate',
    'vlrep.experiments.commands.make_paraphrases',
    'vlrep.experiments.region_files.make_regions',
    'vlrep.datasets.webdataset.reader.make_shards',
]


def test_each_of_the_five_papers_has_a_plan():
    assert list(PLANS) == ['icmlm', 'loctex', 'mct', 'pretraining_right', 'virtex']


# ---------------------------------------------------------------- what its commands do


class Reached(BaseException):
    "What a command would do: the function, and its arguments"


def reached(monkeypatch):
    "Have every command stop where its work begins; files are taken to be there"

    def begin(name, *args, **options):
        raise Reached(name, args, options)

    for name in JOBS:
        monkeypatch.setattr(name, partial(begin, name.rpartition('.')[2]))
    monkeypatch.setattr(cli, 'check_run', lambda run: None)
    monkeypatch.setattr(DatasetBuilder, 'check_root', lambda self, root: None)
    monkeypatch.setattr(spec, '_initial_weights', lambda path, backbone: (path, backbone, []))
    monkeypatch.setattr(Path, 'exists', lambda self: self.name != 'recipe.json')
    monkeypatch.setattr(Path, 'is_file', lambda self: True)


def carried_out(command):
    "Parse a command as `vlrep` does, up to its work"
    try:
        cli._carry_out(list(command.words))
    except Reached as e:
        return e.args
    except (SystemExit, ValueError) as e:
        raise AssertionError(f'{command}: {e}') from None


def in_folder(value, places):
    "A value of the plan as a command has it: below the folder of all data sets"
    return value.replace('{data}', str(places.root)) if isinstance(value, str) else value


def check_pretraining(plan, command, places, got):
    "Recipe, options of the data, photos, weights and seed are those of the plan"
    run = plan.run(command.run)
    found = got[1][0]
    recipe, options = planned_recipe(run)
    paths = {k: in_folder(v, places) for k, v in run.changes.items() if str(v).startswith('{data}')}

    def placed(part):
        return dataclasses.replace(part, **{k: v for k, v in paths.items() if hasattr(part, k)})

    assert (found.recipe, found.options) == (placed(recipe), placed(options)), command
    assert (found.method, found.data, found.seed) == (run.method, run.data, command.seed), command
    assert found.root == (str((places.root / run.root).resolve()) if run.root else None), command
    weights = run.weights and str(places.root / 'weights' / run.weights)
    source = run.source and str(run_folder(places, run.source, command.seed))
    assert (found.weights_file or '') == (source or weights) and (found.backbone or '') == run.backbone, command
    assert got[1][2] == str(command.makes), command


def check_evaluation(plan, command, places, got):
    "It is what the plan says, of the network that the plan says"
    evaluation = plan.evaluation(command.evaluation)
    trained = str(run_folder(places, command.run, command.seed))
    if evaluation.on:
        found = got[2]
        assert (found['run'], found['on']) == (trained, evaluation.on), command
        assert found['root'] == (str(places.root / evaluation.root) if evaluation.root else None), command
        own = {k: found[k] for k in EVALUATIONS[evaluation.on].options if found[k] is not None}
        assert own == {k: in_folder(v, places) for k, v in evaluation.options.items()}, command
        return
    found = got[1][0]
    assert (found.run, found.task, found.seed) == (trained, evaluation.task, command.seed), command
    assert got[1][2] == str(command.makes), command
    values = {**vars(found.options or found.plan), **vars(found.plan)}
    wanted = {k: tuple(v) if isinstance(v, list) else v for k, v in evaluation.options.items()}
    assert {k: values[k] for k in wanted} == wanted, command
    for name in ('root', 'region_files'):
        path = getattr(evaluation, name)
        assert getattr(found, name) == (str((places.root / path).resolve()) if path else None), command


@pytest.mark.parametrize('plans', [PLANS, SMALLER], ids=['full', 'rehearsed'])
@pytest.mark.parametrize('paper', PLANS)
def test_every_command_does_what_the_plan_says(paper, plans, tmp_path, monkeypatch):
    "Of each network, and of each evaluation of the first network that it is of: the others differ by the run folder"
    plan = plans[paper]
    places = Places(tmp_path / 'all data', tmp_path / 'runs', (3,))
    commands = {c.name if c.kind == 'pretrain' else c.evaluation or c.name: c for c in plan_commands(plan, places)}
    assert {c.run for c in commands.values()} >= {r.name for r in plan.pretraining}
    assert {c.evaluation for c in commands.values()} >= {
        e.name for e in plan.evaluations if not e.name.startswith('stock_')
    }  # private
    reached(monkeypatch)
    for command in commands.values():
        got = carried_out(command)
        if command.evaluation:
            check_evaluation(plan, command, places, got)
        elif command.run:
            check_pretraining(plan, command, places, got)
        else:
            assert got, command


@pytest.mark.parametrize('paper', PLANS)
def test_commands_come_after_those_that_they_need(paper):
    commands = plan_commands(PLANS[paper], Places(seeds=(0, 1)))
    names = [c.name for c in commands]
    assert len({*names}) == len(names)
    makers = {str(c.makes): c.name for c in commands if c.kind != 'evaluate'}
    for i, command in enumerate(commands):
        assert {*command.needs} <= {*names[:i]}, command
        assert {makers[w] for w in command.words if w in makers} <= {*command.needs, command.name}, command


@pytest.mark.parametrize('paper', PLANS)
def test_a_plan_trains_the_recipes_of_its_paper(paper):
    "Each field is that of the recipe, unless the plan changes it, or warm-up and decays that follow its steps"
    for run in PLANS[paper].pretraining:
        recipe, options = planned_recipe(run)
        base = METHODS[run.method].recipes[run.recipe]
        free = {*run.changes}
        if 'steps' in run.changes:
            free |= {'warmup', 'drops'}
        if run.backbone:
            free |= {'visual_depth', 'visual_width', 'visual_kind'}
        other = {k for k, v in vars(recipe).items() if v != getattr(base, k)} - free
        assert not other and recipe.size >= 224 and recipe.visual_depth >= 50, (run.name, other)
        for part, first in ((recipe, base), (options, DATASETS[run.data].options)):
            changed = {k: v for k, v in vars(part).items() if k in run.changes and v != getattr(first, k)}
            wanted = {k: v for k, v in run.changes.items() if not str(v).startswith('{data}')}
            assert all(wanted.get(k, v) == v for k, v in changed.items()), run.name


@pytest.mark.parametrize('paper', PLANS)
def test_a_rehearsal_is_small_and_has_the_same_tables(paper):
    small = SMALLER[paper]
    assert small.tables == PLANS[paper].tables
    for run in small.pretraining:
        recipe, _ = planned_recipe(run)
        assert recipe.steps <= 20 and recipe.bs <= 8 and recipe.size <= 64, run.name
        assert bool(recipe.steps) == bool(planned_recipe(PLANS[paper].run(run.name))[0].steps), run.name


# ---------------------------------------------------------------- recipes of the papers

OF_NO_ROW = {
    'loctex_r50_oracle': 'no reader gives the outlines of COCO beside its narratives',
    'mct_r50_scratch': "the plan takes BERT's tokens and pooler, mct_r50_scratch_bert: one of two readings",
    'mct_r50_scratch_1000': 'likewise: mct_r50_scratch_bert with 231,000 steps',
    'mct_r50_stock': 'Adobe Stock is private',
    'mct_r50_moco_v2': "batch and queue of MCT; the row has MoCo v2's own, mct_r50_moco_v2_own",
    'mct_r50_slip': 'in none of the tables',
    'tp_cluster_r50': 'tables have tag prediction of clusters with VGG-16 alone',
    'tp_lda_r50': 'tables have tag prediction of topics with VGG-16 alone',
    'masked_lm_r50_l1_h2048': "in VirTex's code, not in its tables",
    'vilbert_cc_tenth': 'figure 3 prints no numbers',
    'vilbert_cc_half': 'figure 3 prints no numbers',
    'vilbert_released': 'the configuration of the code, which differs from the tables',
    'visualbert_cc_tenth': 'figure 3 prints no numbers',
    'visualbert_cc_half': 'figure 3 prints no numbers',
    'visualbert_released': 'the configuration of the code, which differs from the tables',
}
OF_NO_PAPER = {'clip'}  # Of the five


def test_every_recipe_of_a_paper_is_in_a_plan_or_has_a_reason():
    planned = {(run.method, run.recipe) for plan in PLANS.values() for run in plan.pretraining}
    idle = {
        name
        for method in METHODS.values()
        for name, recipe in method.recipes.items()
        if recipe.visual_depth >= 50 and method.name not in OF_NO_PAPER and (method.name, name) not in planned
    }
    assert idle == {*OF_NO_ROW}


def test_every_row_has_a_number_or_a_reason():
    for paper, plan in PLANS.items():
        for table in plan.tables:
            for row in table.rows:
                numbers = [x for x in row.paper if not math.isnan(x)]
                assert numbers if row.run else len(row.missing) > 10, (paper, table.id, row.label)


# ---------------------------------------------------------------- a bad plan

PLAN = """
title = 'A paper'
citation = 'Somebody, 2020'

[[pretraining]]
name = 'words'
method = 'virtex'
recipe = 'world'
data = 'world'
changes = {scenes = 64}

[[evaluations]]
name = 'scenes'
on = 'world'

[[evaluations]]
name = 'answers'
task = 'vqa'
data = 'world'
options = {steps = 4}

[[tables]]
id = '1'
title = 'All'
columns = [{head = 'a', evaluation = 'scenes', value = 'mAP'}, {head = 'b', evaluation = 'answers', value = 'accuracy'}]

[[tables.rows]]
label = 'Ours'
run = 'words'
paper = [1.0, nan]
"""
MISTAKES = [
    ("title = 'A paper'", "titel = 'A paper'", "titel: unknown field 'titel': did you mean 'title'?"),
    ("recipe = 'world'", "recipee = 'world'", "[words].recipee: unknown field 'recipee': did you mean 'recipe'?"),
    (
        "recipe = 'world'",
        "recipe = 'wrld'",
        "unknown recipe of virtex 'wrld': did you mean 'world'?",
    ),
    ("method = 'virtex'", "method = 'virtx'", "pretraining[words]: unknown method 'virtx': did you mean 'virtex'?"),
    (
        "data = 'world'\nchanges",
        "data = 'word'\nchanges",
        "[words]: unknown data 'word': did you mean 'world'?",
    ),
    ("data = 'world'\nchanges", "data = 'coco'\nchanges", "pretraining[words]: root=''"),
    ("data = 'world'\nchanges", "data = 'world'\nroot = 'coco'\nchanges", "pretraining[words]: root='coco'"),
    ('{scenes = 64}', '{scens = 64}', 'pretraining[words]: '),
    ('{scenes = 64}', '{scenes = -64}', 'pretraining[words]: '),
    ('{scenes = 64}', "{scenes = 64}\nweights = 'run:nobody'", "weights='run:nobody': no network above it has this"),
    ('{scenes = 64}', "{scenes = 64}\nweights = 'run:words'", "weights='run:words': no network above it has this"),
    ('{scenes = 64}', "{scenes = 64}\nbackbone = 'resnet8'", 'pretraining[words]: '),
    ("on = 'world'", "on = 'wrld'", "evaluations[scenes]: unknown on 'wrld': did you mean 'world'?"),
    ("on = 'world'", "on = 'world'\ntask = 'vqa'", 'evaluations[scenes]: expected either on'),
    ("on = 'world'", "on = 'world'\noptions = {spec = 'v1'}", "evaluations[scenes]: unknown option of world 'spec'"),
    ("on = 'world'", 'on = 3', 'evaluations[scenes].on=3: Input should be a valid string'),
    ("task = 'vqa'", "task = 'vaq'", "evaluations[answers]: unknown --task 'vaq': did you mean 'vqa'?"),
    ('{steps = 4}', '{stesp = 4}', 'evaluations[answers]: '),
    ('{steps = 4}', '{steps = 4}\nviews = -1', 'evaluations[answers].views=-1'),
    ("evaluation = 'scenes'", "evaluation = 'scene'", "tables[1]: unknown evaluation 'scene': did you mean 'scenes'?"),
    ("run = 'words'", "run = 'word'", "tables[1]: Ours: unknown run 'word': did you mean 'words'?"),
    ("run = 'words'", "run = 'words'\nmissing = 'private'", 'tables[1]: Ours: expected either run'),
    ("run = 'words'\n", '', 'tables[1]: Ours: expected either run'),
    ('[1.0, nan]', '[1.0]', 'tables[1]: Ours: paper has 1 numbers, and the table 2 columns'),
    ('[1.0, nan]', "[1.0, 'x']", "paper[1]='x'"),
    ("id = '1'", "id = '1.a'", "tables[1.a].id='1.a'"),
    ("name = 'words'", "name = 'wo/rds'", "pretraining[wo/rds].name='wo/rds'"),
    ("name = 'answers'", "name = 'scenes'", "'scenes' occurs twice"),
    ('[[tables]]', "[[evaluations]]\nname = 'more'\non = 'world'\n\n[[tables]]", 'evaluations[more]: no table needs'),
    (
        '[[evaluations]]',
        "[[pretraining]]\nname = 'idle'\nmethod = 'virtex'\nrecipe = 'world'\ndata = 'world'\n\n[[evaluations]]",
        'pretraining[idle]: no table needs it',
    ),
    ("[[tables.rows]]\nlabel = 'Ours'\nrun = 'words'\npaper = [1.0, nan]\n", '', 'rows'),
    ('[[tables]]', '[[tables', 'line '),
]


def refused_plan(folder, text):
    "What is said of a plan file"
    (folder / 'bad.toml').write_text(text)
    with pytest.raises(ValueError) as e:
        read_plan(folder / 'bad.toml')
    return str(e.value)


@pytest.mark.parametrize('old,new,says', MISTAKES, ids=[m[2][:40] for m in MISTAKES])
def test_a_mistake_is_one_line_with_file_and_field(old, new, says, tmp_path):
    assert old in PLAN
    text = refused_plan(tmp_path, PLAN.replace(old, new, 1))
    assert text.startswith('bad.toml: ') and '\n' not in text and says in text, text


def test_the_plan_without_mistakes_is_read(tmp_path):
    (tmp_path / 'good.toml').write_text(PLAN)
    plan = read_plan(tmp_path / 'good.toml')
    words = [shlex.split(str(c))[1:] for c in plan_commands(plan, Places(Path('data'), Path('out')))]
    assert words == [
        [*'pretrain --method virtex --recipe world --data world --scenes 64 --seed 0 --out out/words-0'.split()],
        [*'evaluate out/words-0 --on world'.split()],
    ]  # nan: the paper has no number, so nothing is run for it


def test_a_paper_without_a_plan_is_refused():
    with pytest.raises(ValueError, match="unknown paper 'virtx': did you mean 'virtex'?"):
        read_plan('virtx')
    with pytest.raises((ValueError, OSError), match='nowhere.toml'):
        read_plan('nowhere.toml')
