"""The code of a run folder runs only if whoever opens the run names it

A folder comes from a colleague, a server, a paper; `recipe.json` in it may name any file. Every command and every
function that opens a run is asked here, with a file that leaves a mark where it is run.
"""

import json
import shutil
import sys

import pytest
from PIL import Image
from run_folders import build, facts, reseal
from tools import STUDY, WORLD, refused, sets

import vlrep
from vlrep.cli import main
from vlrep.core import registry
from vlrep.core.files import read_json, write_json
from vlrep.core.registry import load_plugin
from vlrep.experiments.commands import evaluate, export
from vlrep.experiments.finetune import finetune
from vlrep.experiments.load_run import caption, open_run
from vlrep.experiments.pretrain import resume_run
from vlrep.experiments.region_files import make_regions
from vlrep.experiments.spec import finetune_spec
from vlrep.methods.fusion_collate import generate_captions
from vlrep.training.run_folder import Run

HOSTILE = "from pathlib import Path\nPath('MARK').write_text('run')\n"


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A run folder with a result that names the file in it, a photo, and runs that lead to it"
    d = tmp_path_factory.mktemp('foreign')
    run = build(d / 'run')
    (run / 'result.jsonl').write_text(json.dumps(facts()['result.jsonl']) + '\n')
    write_json(run / 'samples.json', {})
    (run / 'odd_helper.py').write_text(HOSTILE.replace('MARK', str(d / 'mark')))
    reseal(run, lambda facts: facts.update(plugins=[str(run / 'odd_helper.py')]))
    tuned = dict(read_json(run / 'recipe.json'))
    tuned['finetune'] = dict(
        task='vqa',
        data='world',
        plan={},
        sizes={},
        run=str(run),
        which='best',
        root=None,
        grid_and_text=False,
        max_len=9,
        side=32,
    )
    (d / 'tuned').mkdir()
    Run(d / 'tuned')._write(tuned)
    (d / 'photos').mkdir()
    Image.new('RGB', (40, 40)).save(d / 'photos' / 'x.png')
    (d / 'study.toml').write_text(STUDY)
    return d


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(registry, '_plugins', {})
    yield
    sys.modules.pop('odd_helper', None)


WORDS = dict(
    caption='caption RUN PHOTO',
    evaluate='evaluate RUN --on world',
    captions='evaluate RUN --on captions',
    export='export RUN --to timm',
    resume='resume RUN',
    steps='resume RUN --steps 9',
    help='resume RUN --help',
    inexact='resume RUN --inexact',
    finetune='finetune RUN --task vqa',
    tuned='resume TUNED',
    tuned_caption='caption TUNED PHOTO',
    regions='regions PHOTOS --by RUN --out OUT',
)


def words_of(name, folder):
    places = dict(
        RUN=folder / 'run',
        TUNED=folder / 'tuned',
        PHOTOS=folder / 'photos',
        PHOTO=folder / 'photos' / 'x.png',
        OUT=folder / 'out',
    )
    return [str(places.get(w, w)) for w in WORDS[name].split()]


@pytest.mark.parametrize('name', WORDS)
def test_no_command_runs_the_code_of_a_run_folder(name, folder, capsys):
    err = refused(capsys, *words_of(name, folder))
    assert f'add --plugin {folder / "run" / "odd_helper.py"} (in Python' in err and 'not trusted' in err, err
    assert not (folder / 'mark').exists() and 'odd_helper' not in sys.modules


ASK = dict(
    load=lambda d: vlrep.load(d / 'run'),
    open_run=lambda d: open_run(d / 'run'),
    tuned=lambda d: open_run(d / 'tuned'),
    caption=lambda d: caption(d / 'run', [d / 'photos' / 'x.png']),
    evaluate=lambda d: evaluate(d / 'run', 'world'),
    export=lambda d: export(d / 'run', 'timm'),
    resume=lambda d: resume_run(d / 'run'),
    finetune=lambda d: finetune(finetune_spec(d / 'run', 'vqa')),
    finetune_resume=lambda d: resume_run(d / 'tuned'),
    regions=lambda d: make_regions(d / 'photos', d / 'out', d / 'run'),
    captions_of_a_run=lambda d: generate_captions(d / 'run', vlrep.datasets.world.dataset.world('train', 8, size=32)),
)


@pytest.mark.parametrize('name', ASK)
def test_no_function_runs_the_code_of_a_run_folder(name, folder):
    says = 'not trusted and was not imported: inspect it, then add --plugin .*odd_helper.py.*plugins='
    with pytest.raises(ValueError, match=says):
        ASK[name](folder)
    assert not (folder / 'mark').exists() and 'odd_helper' not in sys.modules


def code_of(words):
    "The exit code of a command"
    try:
        main([str(w) for w in words])
    except SystemExit as e:
        return e.code or 0
    return 0


NEED_NONE = dict(
    report=lambda d: ['report', d / 'run'],
    weights=lambda d: ['pretrain', '--weights', d / 'run', '--dry-run', *sets(WORLD)],
    recorded=lambda d: ['study', 'plan', d / 'study.toml', '--recorded', d],
)


@pytest.mark.parametrize('name', NEED_NONE)
def test_what_needs_no_code_does_without(name, folder, capsys):
    "A page is made of files alone, and initial weights are numbers alone"
    assert code_of(NEED_NONE[name](folder)) == 0, capsys.readouterr().err
    assert not (folder / 'mark').exists() and 'odd_helper' not in sys.modules


def test_the_code_runs_if_whoever_opens_the_run_names_it(folder, capsys):
    main(['caption', '--plugin', str(folder / 'run' / 'odd_helper.py'), *words_of('caption', folder)[1:]])
    assert (folder / 'mark').exists() and capsys.readouterr().out.count('\n') == 1
    (folder / 'mark').unlink()
    registry._plugins.clear()
    assert (
        vlrep.load(folder / 'run', plugins=[folder / 'run' / 'odd_helper.py']).caption(folder / 'photos' / 'x.png')
        is not None
    )
    assert (folder / 'mark').exists()
    (folder / 'mark').unlink()


def test_a_file_of_this_name_elsewhere_is_the_users_own(folder, tmp_path):
    "A run that was copied names the file where it was; the one that is given is taken, and the other is not run"
    (tmp_path / 'odd_helper.py').write_text('')
    load_plugin(tmp_path / 'odd_helper.py')
    open_run(folder / 'run')
    assert not (folder / 'mark').exists()


def test_advice_quotes_names_that_could_do_something_to_a_shell(folder, tmp_path, capsys):
    shutil.copytree(folder / 'run', tmp_path / 'run')
    reseal(tmp_path / 'run', lambda facts: facts.update(plugins=['/tmp/a; rm -rf x/\x1b[2Jb.py', 'c d.py']))
    err = refused(capsys, 'caption', tmp_path / 'run', folder / 'photos' / 'x.png')
    assert "--plugin '/tmp/a; rm -rf x/\\x1b[2Jb.py' --plugin 'c d.py'" in err and '\x1b' not in err
