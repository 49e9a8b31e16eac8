"vlrep study: a bad study file is one line that names file and field, before anything is drawn or trained"

import pytest
from tools import STUDY, refused

from vlrep.studies.plan import read_study, variant_recipe

TASKS = """
name = 'tasks'
seeds = [0, 1]
equal = []

[data]
name = 'world'
draws = 20

[finetune]
tasks = ['mm_imdb']
grid = [{lr = 0.001}, {lr = 0.002}]

[[variants]]
name = 'none'
method = 'visualbert'
changes = {steps = 0}

[[variants]]
name = 'some'
method = 'visualbert'
modes = ['full', 'text_only']

[[comparisons]]
id = 'P'
text = 'any'
treatment = 'some'
control = 'none'
table = 'full'
question = 'mm_imdb'

[quick]
keep = ['none', 'some']
changes = {bs = 8}
own = {some = {steps = 4, warmup = 1}}
"""

BAD = [
    # wrong types, of tables and of what they hold
    ("name = 'tiny'", "name = ''", "name='': letters, digits"),
    ("name = 'tiny'", "name = 'ti/ny'", "name='ti/ny': letters, digits"),
    ("name = 'tiny'", 'name = 2024-01-01', '2024-01-01: dates and times are no values'),
    ("name = 'tiny'\n", '', 'name: Field required'),
    ("name = 'tiny'", "name = 'tiny'\ntitle = ['a']", 'title: Input should be a valid string'),
    ("name = 'tiny'", "name = 'tiny'\nequal = 'views'", "equal='views': Input should be a valid array"),
    (
        "name = 'tiny'",
        "name = 'tiny'\nequal = [1]",
        "equal[0]=1: Input should be 'views', 'images', 'captions', 'steps' or 'b",
    ),
    ("name = 'tiny'", "name = 'tiny'\nequal = ['views', 'views']", "equal: 'views' occurs twice"),
    ("name = 'tiny'", "name = 'tiny'\nmargin = nan", 'margin=nan: Input should be a finite number'),
    ("name = 'tiny'", "name = 'tiny'\nmargin = -1", 'margin=-1: Input should be greater than or equal to 0'),
    ("name = 'tiny'", "name = 'tiny'\nask = ['vsepp']", 'ask: Input should be an object'),
    ("name = 'tiny'", "name = 'tiny'\nfile = 'a'", "unknown field 'file'"),
    ("name = 'tiny'", "name = 'tiny'\nchanged = ['a']", "unknown field 'changed'"),
    ("precision = 'fp32'", "precision = 'fp8'", "precision='fp8': Input should be 'auto', 'fp32', 'bf16' or 'fp16'"),
    ("precision = 'fp32'", 'precision = 32', 'precision=32'),
    # seeds
    ('seeds = [0, 1]', 'seeds = []', 'seeds: Tuple should have at least 1 item after validation, not 0'),
    ('seeds = [0, 1]', 'seeds = 2', 'seeds=2: Input should be a valid array'),
    ('seeds = [0, 1]', 'seeds = [0, 1.0]', 'seeds[1]=1.0: Input should be a valid integer'),
    ('seeds = [0, 1]', 'seeds = [0, true]', 'seeds[1]=True: Input should be a valid integer'),
    ('seeds = [0, 1]', "seeds = [0, '1']", "seeds[1]='1': Input should be a valid integer"),
    ('seeds = [0, 1]', 'seeds = [0, -1]', 'seeds[1]=-1: Input should be greater than or equal to 0'),
    ('seeds = [0, 1]', 'seeds = [0, 0]', 'seeds: 0 occurs twice'),
    ('seeds = [0, 1]\n', '', 'seeds: Field required'),
    # the data
    ('scenes = 64', 'scenes = nan', 'data: scenes'),
    ('scenes = 64', 'scenes = 64.5', 'data: scenes'),
    ('scenes = 64', "scenes = 'all'", 'data: scenes'),
    ('scenes = 64', 'scenes = [64]', 'data: scenes'),
    ('scenes = 64', 'scenes = {a = 1}', 'data: scenes'),
    ("name = 'world'", "name = 'wrld'", "data.name: unknown dataset 'wrld': did you mean 'world'"),
    ("name = 'world'", 'name = 3', 'data.name=3: Input should be a valid string'),
    ("name = 'world'", "name = 'world'\nroot = 'photos'", "data.root='photos': world needs no files"),
    ("name = 'world'", "name = 'world'\nroot = 3", 'root=3: Input should be a valid string'),
    # variants
    ("name = 'sets'\n", '', 'variants[0].name: Field required'),
    ("name = 'sets'", "name = 'labels'", "variants: 'labels' occurs twice"),
    ("name = 'sets'", "name = 'chance'", "variants[chance].name='chance': letters, digits, -, _ and . are allowed;"),
    ("method = 'token_cls'", 'method = 3', 'variants[sets].method=3: Input should be a valid string'),
    ("method = 'token_cls'", "method = 'token_cls'\nrecipe = 'big'", "variants[sets].recipe: unknown recipe 'big'"),
    ("method = 'token_cls'", "method = 'token_cls'\nbackbone = 'resnet19'", 'variants[sets].changes: '),
    (
        "method = 'token_cls'",
        "method = 'token_cls'\ntasks = [1]",
        'variants[sets].tasks[0]=1: Input should be a valid string',
    ),
    (
        "method = 'token_cls'",
        "method = 'token_cls'\nmodes = []",
        'variants[sets].modes: Tuple should have at least 1 item after validation',
    ),
    (
        "method = 'token_cls'",
        "method = 'token_cls'\ngrid = []",
        'variants[sets].grid: Tuple should have at least 1 item after validation,',
    ),
    (
        "method = 'token_cls'",
        "method = 'token_cls'\ngrid = [1, 2]",
        'variants[sets].grid[0]=1: Input should be an object',
    ),
    ('vocab = 300', 'vocab = nan', 'variants[sets].changes: vocab'),
    ('vocab = 300', 'vocab = {a = 1}', 'variants[sets].changes: vocab'),
    ('vocab = 300', "vocab = '300'", "variants[sets].changes: vocab='300': must be a whole number"),
    ('vocab = 300', "vocab = 'many'", 'variants[sets].changes: vocab'),
    # learning rates
    ('extend = 0', 'extend = -1', 'rates.extend=-1: Input should be greater than or equal to 0'),
    ('extend = 0', 'extend = 0\nsteps = 8', "rates.steps: unknown field 'steps'"),
    ('extend = 0', 'extend = 1', 'variants[labels].grid: {'),
    ('extend = 0', "extend = 0\nscore = 'objct'", "rates.score: unknown score 'objct': did you mean 'objects'"),
    (
        'grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]',
        'grid = []',
        'rates.grid: Tuple should have at least 1 item after validation, not 0',
    ),
    ('grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]', 'grid = 3', 'rates.grid=3: Input should be a valid array'),
    ('grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]', 'grid = [3]', 'rates.grid[0]=3: Input should be an object'),
    (
        "{cnn_lr = 0.5}]\n\n[[variants]]\nname = 'sets'",
        "{cnn_lr = nan}]\n\n[[variants]]\nname = 'sets'",
        'variants[sets].changes, with rates.grid[1]: cnn_lr',
    ),
    ('grid = [{cnn_lr = 0.2}', 'grid = [{cnn_lrr = 0.2}', "with rates.grid[0]: unknown field 'cnn_lrr'"),
    (
        'grid = [{cnn_lr = 0.2}',
        'grid = [{scenes = 80}',
        'rates.grid[0]: scenes is not part of the grid: the data is the same at al',
    ),
    (
        'grid = [{cnn_lr = 0.5}, {cnn_lr = 1e6, lr = 1e6}]',
        'grid = [{cnn_lr = 0.5}, {queue = 300}]',
        "variants[labels].grid: unknown field 'queue'",
    ),
    (
        '[rates]\nscenes = 40\nextend = 0\ngrid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]\n',
        '',
        'variants[labels].grid: the study has no [rates]',
    ),
    ('[rates]', '[[rates]]', 'rates: Input should be an object'),
    # comparisons
    ("id = 'X'\n", "id = ''\n", "comparisons[].id='': String should have at least 1 character"),
    ("id = 'X'\n", 'id = 3\n', 'comparisons[3].id=3: Input should be a valid string'),
    ("id = 'X'\n", "id = 'X'\nsize = nan\n", 'comparisons[X].size=nan: Input should be a finite number'),
    ("id = 'X'\n", "id = 'X'\nsize = -2\n", 'comparisons[X].size=-2: Input should be greater than or equal to 0'),
    ("id = 'X'\n", "id = 'X'\nsize = '2'\n", "comparisons[X].size='2': Input should be a valid number"),
    ("id = 'X'\n", "id = 'X'\ndirection = 2\n", 'comparisons[X].direction=2: Input should be 1, 0 or -1'),
    ("id = 'X'\n", "id = 'X'\ndirection = '+'\n", "comparisons[X].direction='+'"),
    ("id = 'X'\n", "id = 'X'\nmargin = nan\n", 'comparisons[X].margin=nan'),
    (
        "id = 'X'\n",
        "id = 'X'\ntable = 'tables'\n",
        "comparisons[X].table: unknown table 'tables': did you mean 'table'",
    ),
    ("id = 'X'\n", "id = 'X'\nunequal = 'views'\n", "comparisons[X].unequal='views': Input should be a valid array"),
    (
        "id = 'X'\n",
        "id = 'X'\nunequal = ['view']\n",
        "comparisons[X].unequal[0]='view': Input should be 'views', 'images', 'ca",
    ),
    ("control = 'labels'", "control = 'sets'", "comparisons[X].treatment and control are both 'sets'"),
    (
        "control = 'labels'",
        "control = '@randm'",
        "comparisons[X].control: unknown row '@randm': did you mean '@random'",
    ),
    (
        "treatment = 'sets'\ncontrol = 'labels'",
        "treatment = 'labels'\ncontrol = '@random'",
        'comparisons[X].control: @random needs baselines = true in the changes of',
    ),
    ("control = 'labels'", "control = '@random'\ntable = 'where'\nquestion = 'pointing'", "unknown row '@random'"),
    (
        "control = 'labels'",
        "control = '@random'\ntable = 'retrieval'\nquestion = 'image to text: R@1'",
        'has only the row of the model',
    ),
    (
        "control = 'labels'",
        "control = '@text'\ntable = 'masked_words'\nquestion = 'masked word'",
        "unknown row '@text': did you mean '@text alone'",
    ),
    ("[[comparisons]]\nid = 'X'", "[comparisons]\nid = 'X'", 'comparisons: Input should be a valid array'),
    # evaluations
    (
        "name = 'tiny'",
        "name = 'tiny'\nask = {vsepp = {epochs = 'two'}}",
        "ask.vsepp: epochs='two': expected a value such as 30",
    ),
    ("name = 'tiny'", "name = 'tiny'\nask = {vsepp = {epochs = 0}}", 'ask.vsepp: epochs 0: must be from 1'),
    (
        "name = 'tiny'",
        "name = 'tiny'\nask = {vsepp = {data = 'flickr8k'}}",
        "ask.vsepp: data='flickr8k': needs files; a study evaluates its own data",
    ),
    ("name = 'tiny'", "name = 'tiny'\nask = {world = {}}", "ask: unknown evaluation 'world'"),
]


def said(tmp_path, capsys, text, *more):
    (tmp_path / 's.toml').write_text(text)
    err = refused(capsys, 'study', 'plan', tmp_path / 's.toml', *more)
    assert err.startswith(f'vlrep study: {tmp_path / "s.toml"}: '), err
    return err


@pytest.mark.parametrize('old,new,says', BAD, ids=[f'{i}-{b[2][:40]}' for i, b in enumerate(BAD)])
def test_a_bad_study_file_is_one_line(tmp_path, capsys, old, new, says):
    assert old in STUDY
    assert says in said(tmp_path, capsys, STUDY.replace(old, new, 1))


def test_a_number_may_stand_in_a_field_of_text(tmp_path):
    "Such as `init`, a deviation or 'fan_in'; and it is the recipe that the shell makes of it"
    (tmp_path / 's.toml').write_text(STUDY.replace('vocab = 300', 'vocab = 300, init = 0.01', 1))
    study = read_study(tmp_path / 's.toml')
    assert {variant_recipe(study, v)[0].init for v in study.variants if 'init' in v.changes} == {'0.01'}


BAD_TASKS = [
    ("tasks = ['mm_imdb']", 'tasks = []', 'finetune.tasks: Value should have at least 1 item after validation, not'),
    ("tasks = ['mm_imdb']", "tasks = ['mm_imdb', 'mm_imdb']", "finetune.tasks: 'mm_imdb' occurs twice"),
    (
        "tasks = ['mm_imdb']",
        "tasks = ['mm_imdb']\nmodes = ['fll']",
        "finetune.modes[0]='fll': Input should be 'full', 'frozen', 'text_only', 'share_5'",
    ),
    (
        '[finetune]\n',
        '[finetune]\nown = {vqa = {lr = 0.1}}\n',
        "finetune.own: unknown task 'vqa'",
    ),
    ('{lr = 0.002}', '{lr = nan}', "finetune.grid: {'lr': 0.001} before {'lr': nan}: expected the same fields"),
    ('{lr = 0.001}, {lr = 0.002}', '{frozen = true}', 'finetune.grid[0]: frozen is not part of the grid'),
    (
        '{lr = 0.001}, {lr = 0.002}',
        '{lr = -1}',
        'finetune.changes, with grid[0], mm_imdb, full: lr=-1.0: must be above 0',
    ),
    ('{lr = 0.002}', '3', 'finetune.grid[1]=3: Input should be an object'),
    (
        "tasks = ['mm_imdb']",
        "tasks = ['mm_imdb']\nextend = 0.5",
        'finetune.extend=0.5: Input should be a valid integer',
    ),
    ("modes = ['full', 'text_only']", "modes = ['full', 'full']", "variants[some].modes: 'full' occurs twice"),
]


@pytest.mark.parametrize('old,new,says', BAD_TASKS, ids=[b[2][:40] for b in BAD_TASKS])
def test_a_bad_fine_tuning_is_one_line(tmp_path, capsys, old, new, says):
    assert old in TASKS
    assert says in said(tmp_path, capsys, TASKS.replace(old, new, 1))


BAD_QUICK = [
    ("keep = ['none', 'some']", "keep = ['non']", "quick.keep: unknown variant 'non'"),
    ("keep = ['none', 'some']", "keep = 'none'", "quick.keep='none': Input should be a valid array"),
    ("keep = ['none', 'some']", 'keep = [1]', 'quick.keep[0]=1: Input should be a valid string'),
    ('changes = {bs = 8}', 'changes = {bss = 8}', "quick.changes: unknown field of recipes 'bss'"),
    ('own = {some = {steps = 4, warmup = 1}}', 'own = {sme = {steps = 4}}', "quick.own: unknown variant 'sme'"),
    ('own = {some = {steps = 4, warmup = 1}}', 'own = {some = 4}', 'quick.own.some=4: Input should be an object'),
    (
        'own = {some = {steps = 4, warmup = 1}}',
        'rates = 0',
        'quick.rates=0: Input should be greater than or equal to 1',
    ),
    (
        'own = {some = {steps = 4, warmup = 1}}',
        'seeds = []',
        'quick.seeds: Tuple should have at least 1 item after validation, not 0',
    ),
    ('own = {some = {steps = 4, warmup = 1}}', 'seeds = [1.5]', 'quick.seeds[0]=1.5: Input should be a valid integer'),
    ('own = {some = {steps = 4, warmup = 1}}', 'data = {scenes = 3}', 'data: scenes=3'),
    ("treatment = 'some'\n", '', 'comparisons[P].treatment: Field required'),
    ("name = 'some'\n", '', 'variants[1].name: Field required'),
]


@pytest.mark.parametrize('old,new,says', BAD_QUICK, ids=[b[2][:40] for b in BAD_QUICK])
def test_a_bad_quick_table_is_one_line(tmp_path, capsys, old, new, says):
    assert old in TASKS
    assert says in said(tmp_path, capsys, TASKS.replace(old, new, 1), '--quick')


def test_a_file_of_bad_bytes_is_one_line(tmp_path, capsys):
    (tmp_path / 's.toml').write_bytes(b"name = '\xff'")
    assert 'not UTF-8 text' in refused(capsys, 'study', 'plan', tmp_path / 's.toml')
    assert 'no such file' in refused(capsys, 'study', 'plan', tmp_path)
