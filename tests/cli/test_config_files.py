"A file of options: what --print-config writes, --config reads; the command line comes first"

import logging
import re
import subprocess
import sys

import pytest
from paths import PHOTOS
from tools import ENV, TWO_STEPS, refused

from vlrep.cli import main
from vlrep.evaluation.finetune.plan import TASKS
from vlrep.experiments.spec import config_lines, recorded_spec
from vlrep.methods.base import METHODS


def printed(capsys, *words):
    main([*map(str, words)])
    return capsys.readouterr().out


@pytest.mark.parametrize('method', METHODS)
def test_the_options_of_a_method_are_read_as_they_were_printed(capsys, tmp_path, method):
    file = tmp_path / 'a.toml'
    first = printed(capsys, 'pretrain', '--method', method, '--seed', 3, '--set', 'jitter=0.3', '--print-config')
    file.write_text(first)
    assert 'seed = 3' in first and 'jitter = 0.3' in first
    assert printed(capsys, 'pretrain', '--config', file, '--print-config') == first


def test_settings_of_the_start_are_printed_too(capsys, tmp_path):
    words = '--tracker tensorboard --save-every 10 --workers 1 --max-corrupt 3 --timeout 60 --cache cc'.split()
    first = printed(capsys, 'pretrain', *words, '--print-config')
    for line in ('tracker = "tensorboard"', 'save_every = 10', 'workers = 1', 'max_corrupt = "3"', 'timeout = 60'):
        assert f'{line}\n' in first, line
    (tmp_path / 'a.toml').write_text(first)
    assert printed(capsys, 'pretrain', '--config', tmp_path / 'a.toml', '--print-config') == first


def test_the_options_of_photos_are_read_as_they_were_printed(capsys, tmp_path):
    file = tmp_path / 'a.toml'
    first = printed(capsys, 'pretrain', '--data', 'flickr8k', '--root', PHOTOS, '--shuffles', 2, '--print-config')
    file.write_text(first)
    assert f'root = "{PHOTOS}"' in first and 'shuffles = 2' in first
    assert printed(capsys, 'pretrain', '--config', file, '--print-config') == first


@pytest.mark.parametrize('task', TASKS)
def test_the_options_of_a_task_are_read_as_they_were_printed(capsys, tmp_path, task):
    file = tmp_path / 'a.toml'
    first = printed(capsys, 'finetune', 'run', '--task', task, '--bs', 3, '--print-config')
    file.write_text(first)
    assert 'bs = 3' in first
    assert printed(capsys, 'finetune', 'run', '--config', file, '--print-config') == first


def test_the_command_line_comes_before_the_file(capsys, tmp_path):
    file = tmp_path / 'a.toml'
    file.write_text("method = 'clip'\nseed = 3\nsteps = 60\nscale-min = 0.5\n")
    for words in (['--seed', 4, '--steps', 70], ['--seed=4', '--set', 'steps=70'], ['--set=steps=70', '--seed', 4]):
        got = printed(capsys, 'pretrain', *words, '--config', file, '--print-config')
        assert re.findall(r'^(?:method|seed|steps|scale_min) = \S+', got, re.M) == [
            'method = "clip"',
            'seed = 4',
            'scale_min = 0.5',
            'steps = 70',
        ]


def test_a_run_folder_is_a_file_of_options(capsys, tmp_path):
    run, again = tmp_path / 'run', tmp_path / 'again'
    main(['pretrain', '--tiny', '--quiet', '--out', str(run), *TWO_STEPS, '--set', 'baselines=false'])
    assert capsys.readouterr().out == f'{run.resolve()}\n'  # --quiet: the folder, for scripts
    main(['pretrain', '--config', str(run), '--seed', '1', '--verbose', '--out', str(again)])
    lines = capsys.readouterr().out.splitlines()
    timed = [l for l in lines if re.match(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ', l)]
    assert len(timed) > 5 and 'report: ' in timed[-1]
    first, second = (config_lines(recorded_spec(r)) for r in (run, again))
    assert [b for a, b in zip(first, second) if a != b] == ['seed = 1']
    assert not logging.getLogger('vlrep').handlers


PLUGIN = """
from dataclasses import replace
from vlrep.methods.base import METHODS
METHODS.add(replace(METHODS['supervised'], name='mine'))
"""


def test_a_method_of_a_plug_in_is_configured(tmp_path):
    "Named in the file of options; or on the command line, beside a run folder whose method it is"
    file = tmp_path / 'my_plugin.py'
    file.write_text(PLUGIN)
    (tmp_path / 'a.toml').write_text(f'method = "mine"\nplugin = ["{file}"]\n')
    run = tmp_path / 'run'
    train = ['--method', 'mine', '--out', run, '--tiny', *TWO_STEPS, '--set', 'baselines=false']
    for words in (['--config', tmp_path / 'a.toml', '--print-config'], train, ['--config', run, '--print-config']):
        if '--config' not in words or run in words:
            words = ['--plugin', file, *words]
        command = [sys.executable, '-m', 'vlrep.cli', 'pretrain', *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENV, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ('method = "mine"' in done.stdout) == ('--print-config' in words)


@pytest.mark.parametrize(
    'text, says',
    {
        'stepz = 3': "unknown field 'stepz': did you mean 'steps'",
        '[recipe]\nsteps = 3': 'a.toml: recipe is not an option',
        "config = 'b.toml'": 'a.toml: config is not an option',
        'steps = ': 'a.toml: not valid TOML',
        "method = 'clop'": 'clop',
        'steps = "many"': 'steps',
    }.items(),
)
def test_a_wrong_file_is_refused(capsys, tmp_path, text, says):
    (tmp_path / 'a.toml').write_text(text)
    with pytest.raises(SystemExit) as e:
        main(['pretrain', '--config', str(tmp_path / 'a.toml')])
    assert e.value.code == 2 and says in capsys.readouterr().err


def test_a_missing_file_and_options_that_exclude_each_other_are_refused(capsys, tmp_path):
    assert 'none.toml' in refused(capsys, 'pretrain', '--config', tmp_path / 'none.toml')
    assert '--verbose' in refused(capsys, 'pretrain', '--quiet', '--verbose', '--tiny', '--out', tmp_path / 'x')
    assert not (tmp_path / 'x').exists()


def test_the_version_is_that_of_the_package(capsys):
    from importlib.metadata import version

    assert printed(capsys, '--version') == f'vlrep {version("vlrep")}\n'
