"vlrep study: a bad study file is one line that names file and field, before anything is drawn or trained"

import pytest
from tools import STUDY, refused

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
    ("name = 'tiny'\n", '', 'name is missing'),
    ("name = 'tiny'", "name = 'tiny'\ntitle = ['a']", "title=('a',): expected text"),
    ("name = 'tiny'", "name = 'tiny'\nequal = 'views'", "equal='views': expected a list"),
    ("name = 'tiny'", "name = 'tiny'\nequal = [1]", 'equal: 1: expected a list of words'),
    ("name = 'tiny'", "name = 'tiny'\nequal = ['views', 'views']", "equal: 'views' occurs twice"),
    ("name = 'tiny'", "name = 'tiny'\nmargin = nan", 'margin=nan: must be from 0 to 100'),
    ("name = 'tiny'", "name = 'tiny'\nmargin = -1", 'margin=-1: must be from 0 to 100'),
    ("name = 'tiny'", "name = 'tiny'\nask = ['vsepp']", "ask=('vsepp',): expected a table"),
    ("name = 'tiny'", "name = 'tiny'\nfile = 'a'", "unknown field 'file'"),
    ("name = 'tiny'", "name = 'tiny'\nchanged = ['a']", "unknown field 'changed'"),
    ("precision = 'fp32'", "precision = 'fp8'", "precision=fp8: unknown precision 'fp8'"),
    ("precision = 'fp32'", 'precision = 32', 'precision=32'),
    # seeds
    ('seeds = [0, 1]', 'seeds = []', 'seeds: is empty; expected a list of whole numbers'),
    ('seeds = [0, 1]', 'seeds = 2', 'seeds=2: expected a list'),
    ('seeds = [0, 1]', 'seeds = [0, 1.0]', 'seeds: 1.0: expected a list of whole numbers'),
    ('seeds = [0, 1]', 'seeds = [0, true]', 'seeds: True: expected a list of whole numbers'),
    ('seeds = [0, 1]', "seeds = [0, '1']", "seeds: '1': expected a list of whole numbers"),
    ('seeds = [0, 1]', 'seeds = [0, -1]', 'seeds=-1: expected whole numbers from 0'),
    ('seeds = [0, 1]', 'seeds = [0, 0]', 'seeds: 0 occurs twice'),
    ('seeds = [0, 1]\n', '', 'seeds is missing'),
    # the data
    ('scenes = 64', 'scenes = nan', 'data: scenes'),
    ('scenes = 64', 'scenes = 64.5', 'data: scenes'),
    ('scenes = 64', "scenes = 'all'", 'data: scenes'),
    ('scenes = 64', 'scenes = [64]', 'data: scenes'),
    ('scenes = 64', 'scenes = {a = 1}', 'data: scenes'),
    ("name = 'world'", "name = 'wrld'", "data.name: unknown dataset 'wrld': did you mean 'world'"),
    ("name = 'world'", 'name = 3', 'data=3: expected text'),
    ("name = 'world'", "name = 'world'\nroot = 'photos'", "data.root='photos': world needs no files"),
    ("name = 'world'", "name = 'world'\nroot = 3", 'root=3: expected text'),
    # variants
    ("name = 'sets'\n", '', 'variants[0].name is missing'),
    ("name = 'sets'", "name = 'labels'", "variants: 'labels' occurs twice"),
    ("name = 'sets'", "name = 'chance'", 'variants[chance].name: letters'),
    ("method = 'token_cls'", 'method = 3', 'variants[sets].method=3: expected text'),
    ("method = 'token_cls'", "method = 'token_cls'\nrecipe = 'big'", "variants[sets].recipe: unknown recipe 'big'"),
    ("method = 'token_cls'", "method = 'token_cls'\nbackbone = 'resnet19'", 'variants[sets].changes: '),
    ("method = 'token_cls'", "method = 'token_cls'\ntasks = [1]", 'variants[sets].tasks: 1: expected a list of words'),
    ("method = 'token_cls'", "method = 'token_cls'\nmodes = []", 'variants[sets].modes: is empty'),
    ("method = 'token_cls'", "method = 'token_cls'\ngrid = []", 'variants[sets].grid: is empty'),
    (
        "method = 'token_cls'",
        "method = 'token_cls'\ngrid = [1, 2]",
        'variants[sets].grid: 1: expected a list of tables',
    ),
    ('vocab = 300', 'vocab = nan', 'variants[sets].changes: vocab'),
    ('vocab = 300', 'vocab = {a = 1}', 'variants[sets].changes: vocab'),
    ('vocab = 300', "vocab = '300'", "variants[sets].changes: vocab='300': expected a whole number"),
    ('vocab = 300', "vocab = 'many'", 'variants[sets].changes: vocab'),
    # learning rates
    ('extend = 0', 'extend = -1', 'rates.extend=-1: must be from 0 to 8'),
    ('extend = 0', 'extend = 0\nsteps = 8', "rates.steps: unknown field 'steps'"),
    ('extend = 0', 'extend = 1', 'variants[labels].grid: {'),
    ('extend = 0', "extend = 0\nscore = 'objct'", "rates.score: unknown score 'objct': did you mean 'objects'"),
    ('grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]', 'grid = []', 'rates.grid: is empty'),
    ('grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]', 'grid = 3', 'rates.grid=3: expected a list'),
    ('grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]', 'grid = [3]', 'rates.grid: 3: expected a list of tables of fields'),
    (
        "{cnn_lr = 0.5}]\n\n[[variants]]\nname = 'sets'",
        "{cnn_lr = nan}]\n\n[[variants]]\nname = 'sets'",
        'variants[sets].changes, with rates.grid[1]: cnn_lr',
    ),
    ('grid = [{cnn_lr = 0.2}', 'grid = [{cnn_lrr = 0.2}', "with rates.grid[0]: unknown field 'cnn_lrr'"),
    ('grid = [{cnn_lr = 0.2}', 'grid = [{scenes = 80}', 'rates.grid[0]: scenes is a field of the data'),
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
    ('[rates]', '[[rates]]', 'rates=[{'),
    # comparisons
    ("id = 'X'\n", "id = ''\n", 'comparisons[].id: is empty'),
    ("id = 'X'\n", 'id = 3\n', 'comparisons[3].id=3: expected text'),
    ("id = 'X'\n", "id = 'X'\nsize = nan\n", 'comparisons[X].size=nan: must be from 0 to 100'),
    ("id = 'X'\n", "id = 'X'\nsize = -2\n", 'comparisons[X].size=-2: must be from 0'),
    ("id = 'X'\n", "id = 'X'\nsize = '2'\n", "comparisons[X].size='2': must be a number"),
    ("id = 'X'\n", "id = 'X'\ndirection = 2\n", 'comparisons[X].direction=2: unknown direction'),
    ("id = 'X'\n", "id = 'X'\ndirection = '+'\n", "comparisons[X].direction='+'"),
    ("id = 'X'\n", "id = 'X'\nmargin = nan\n", 'comparisons[X].margin=nan'),
    (
        "id = 'X'\n",
        "id = 'X'\ntable = 'tables'\n",
        "comparisons[X].table: unknown table 'tables': did you mean 'table'",
    ),
    ("id = 'X'\n", "id = 'X'\nunequal = 'views'\n", "comparisons[X].unequal='views': expected a list"),
    ("id = 'X'\n", "id = 'X'\nunequal = ['view']\n", "equal: unknown word 'view': did you mean 'views'"),
    ("control = 'labels'", "control = 'sets'", "comparisons[X]: treatment and control are both 'sets'"),
    (
        "control = 'labels'",
        "control = '@randm'",
        "comparisons[X].control: unknown row '@randm': did you mean '@random'",
    ),
    (
        "treatment = 'sets'\ncontrol = 'labels'",
        "treatment = 'labels'\ncontrol = '@random'",
        "comparisons[X].control='@random': needs baselines = true",
    ),
    ("control = 'labels'", "control = '@random'\ntable = 'where'\nquestion = 'pointing'", "unknown row '@random'"),
    (
        "control = 'labels'",
        "control = '@random'\ntable = 'retrieval'\nquestion = 'image to text: R@1'",
        'has the row of the model alone',
    ),
    (
        "control = 'labels'",
        "control = '@text'\ntable = 'masked_words'\nquestion = 'masked word'",
        "unknown row '@text': did you mean '@text alone'",
    ),
    ("[[comparisons]]\nid = 'X'", "[comparisons]\nid = 'X'", 'write each as [[comparisons]]'),
    # evaluations
    (
        "name = 'tiny'",
        "name = 'tiny'\nask = {vsepp = {epochs = 'two'}}",
        "ask.vsepp.epochs='two': expected a whole number",
    ),
    ("name = 'tiny'", "name = 'tiny'\nask = {vsepp = {epochs = 0}}", 'ask.vsepp: epochs 0: must be from 1'),
    ("name = 'tiny'", "name = 'tiny'\nask = {vsepp = {data = 'flickr8k'}}", "ask.vsepp.data='flickr8k': needs files"),
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


BAD_TASKS = [
    ("tasks = ['mm_imdb']", 'tasks = []', 'finetune: tasks, modes and grid need at least one entry'),
    ("tasks = ['mm_imdb']", "tasks = ['mm_imdb', 'mm_imdb']", "finetune.tasks: 'mm_imdb' occurs twice"),
    ("tasks = ['mm_imdb']", "tasks = ['mm_imdb']\nmodes = ['fll']", "finetune.modes: unknown mode 'fll'"),
    ('{lr = 0.002}', '{lr = nan}', "finetune.grid: {'lr': 0.001} before {'lr': nan}: expected the same fields"),
    ('{lr = 0.001}, {lr = 0.002}', '{frozen = true}', 'finetune.grid[0]: frozen is no part of the grid'),
    ('{lr = 0.001}, {lr = 0.002}', '{lr = -1}', 'finetune.changes, with grid[0]: lr'),
    ('{lr = 0.002}', '3', 'finetune.grid: 3: expected a list of tables'),
    ("tasks = ['mm_imdb']", "tasks = ['mm_imdb']\nextend = 0.5", 'finetune.extend=0.5: must be a whole number'),
    ("modes = ['full', 'text_only']", "modes = ['full', 'full']", "variants[some].modes: 'full' occurs twice"),
]


@pytest.mark.parametrize('old,new,says', BAD_TASKS, ids=[b[2][:40] for b in BAD_TASKS])
def test_a_bad_fine_tuning_is_one_line(tmp_path, capsys, old, new, says):
    assert old in TASKS
    assert says in said(tmp_path, capsys, TASKS.replace(old, new, 1))


BAD_QUICK = [
    ("keep = ['none', 'some']", "keep = ['non']", "quick.keep: unknown variant 'non'"),
    ("keep = ['none', 'some']", "keep = 'none'", "quick.keep='none': expected a list"),
    ("keep = ['none', 'some']", 'keep = [1]', "quick.keep: unknown variant '1'"),
    ('changes = {bs = 8}', 'changes = {bss = 8}', "quick.changes: unknown field of recipes 'bss'"),
    ('own = {some = {steps = 4, warmup = 1}}', 'own = {sme = {steps = 4}}', "quick.own: unknown variant 'sme'"),
    ('own = {some = {steps = 4, warmup = 1}}', 'own = {some = 4}', 'quick.own.some=4: expected a table'),
    ('own = {some = {steps = 4, warmup = 1}}', 'rates = 0', 'quick.rates=0: at least 1'),
    ('own = {some = {steps = 4, warmup = 1}}', 'seeds = []', 'seeds: is empty'),
    ('own = {some = {steps = 4, warmup = 1}}', 'seeds = [1.5]', 'seeds: 1.5: expected a list of whole numbers'),
    ('own = {some = {steps = 4, warmup = 1}}', 'data = {scenes = 3}', 'data: scenes=3'),
    ("treatment = 'some'\n", '', 'comparisons[P].treatment is missing'),
    ("name = 'some'\n", '', 'variants[1].name is missing'),
]


@pytest.mark.parametrize('old,new,says', BAD_QUICK, ids=[b[2][:40] for b in BAD_QUICK])
def test_a_bad_quick_table_is_one_line(tmp_path, capsys, old, new, says):
    assert old in TASKS
    assert says in said(tmp_path, capsys, TASKS.replace(old, new, 1), '--quick')


def test_a_file_of_bad_bytes_is_one_line(tmp_path, capsys):
    (tmp_path / 's.toml').write_bytes(b"name = '\xff'")
    assert 'not UTF-8 text' in refused(capsys, 'study', 'plan', tmp_path / 's.toml')
    assert 'no such file' in refused(capsys, 'study', 'plan', tmp_path)
