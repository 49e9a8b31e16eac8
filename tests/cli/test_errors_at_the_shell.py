"""Whatever goes wrong in a command is one line and an exit code, and output that nobody reads ends no job

The commands are those of `COMMANDS`: a new one is asked, too. What each of them says of wrong words and files stands in
test_commands.py, test_options.py and datasets/test_foreign_files.py.
"""

import json
import re
import tempfile
from pathlib import Path

import pytest
from forked import COMMAND, Program
from PIL import Image
from run_folders import build, facts
from tools import FOUR_STEPS, refused, sets

from vlrep import cli
from vlrep.cli import COMMANDS, main
from vlrep.core.files import write_json

# ---------------------------------------------------------------- errors that nobody foresaw

ODD = {
    'TypeError: one\ntwo': TypeError('one\ntwo'),
    "KeyError: 'numbers'": KeyError('numbers'),
    'ZeroDivisionError': ZeroDivisionError(),
    'RecursionError: deep': RecursionError('deep'),
    'AssertionError: \x1b[2J': AssertionError('\x1b[2J'),
}


@pytest.fixture
def odd(monkeypatch, tmp_path):
    "The commands fail in a way that nobody foresaw"
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))

    def fail_with(error):
        def fail(argv):
            raise error

        for name in COMMANDS:
            monkeypatch.setitem(COMMANDS, name, fail)

    return fail_with


@pytest.mark.parametrize('says', ODD)
@pytest.mark.parametrize('name', COMMANDS)
def test_an_unforeseen_error_is_one_line_and_a_file(name, says, odd, tmp_path, capsys):
    odd(ODD[says])
    err = refused(capsys, name, 'RUN', code=1)
    shown = ' '.join(says.split()).replace('\x1b', '\\x1b')
    assert err.startswith(f'vlrep {name}: {shown}; the traceback is in {tmp_path}/vlrep-{name}-'), err
    remaining = Path(re.search(rf'in ({tmp_path}/\S+\.txt) ', err)[1]).read_text()
    assert 'Traceback' in remaining and 'in fail' in remaining and says.split(':')[0] in remaining


@pytest.mark.parametrize('name', COMMANDS)
def test_debug_shows_the_traceback(name, odd, capsys):
    odd(TypeError('odd'))
    with pytest.raises(SystemExit) as e:
        main([name, 'RUN', '--debug'])
    err = capsys.readouterr().err
    assert e.value.code == 1 and 'Traceback' in err and 'in fail' in err
    assert err.splitlines()[-1].startswith(f'vlrep {name}: TypeError: odd')


def test_debug_belongs_to_every_command(capsys):
    with pytest.raises(SystemExit) as e:
        main(['caption', '--debug', 'nowhere', 'x.png'])
    err = capsys.readouterr().err
    assert e.value.code == 2 and 'Traceback' in err and 'nowhere: no such run folder' in err.splitlines()[-1]


def test_without_room_for_a_traceback_the_error_is_one_line(odd, monkeypatch, capsys):
    odd(TypeError('odd'))
    monkeypatch.setattr(tempfile, 'tempdir', '/nowhere')
    assert refused(capsys, 'caption', code=1) == 'vlrep caption: TypeError: odd; --debug shows where\n'


@pytest.mark.parametrize('name', COMMANDS)
def test_what_is_no_error_passes(name, odd, capsys):
    for error, code in ((SystemExit(3), 3), (KeyboardInterrupt(), 130)):
        odd(error)
        with pytest.raises(SystemExit) as e:
            main([name])
        err = capsys.readouterr().err
        assert e.value.code == code and err.count('\n') == (code == 130) and 'Traceback' not in err
        assert ('vlrep resume' in err) == (code == 130 and name in cli._TRAINING)


# ---------------------------------------------------------------- output that nobody reads

CLOSED = 'import os, sys\nos.close(1)\nsys.stdout = None\n'  # vlrep ... >&-
NO_READER = 'import os\nr, w = os.pipe()\nos.dup2(w, 1)\nos.close(w)\nos.close(r)\n'  # vlrep ... | head -0
FULL = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
NO_ERRORS = 'import os, sys\nos.close(2)\nsys.stderr = None\n'
LOST = dict(closed=CLOSED, no_reader=NO_READER, full=FULL)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A run that can caption and has a result, and a photo"
    d = tmp_path_factory.mktemp('lost')
    build(d / 'run')
    (d / 'run' / 'result.jsonl').write_text(json.dumps(facts()['result.jsonl']) + '\n')
    write_json(d / 'run' / 'samples.json', {})
    Image.new('RGB', (40, 40)).save(d / 'x.png')
    return d


def ended(how, argv, place):
    "Exit code and errors of a command whose output is lost"
    p = Program(LOST.get(how, how) + COMMAND, argv, place)
    _, err = p.communicate(timeout=300)
    return p.returncode, err


FEW = ['--data', 'world', '--scenes', 16, '--valid=4', '--shown=4', '--size', 24]
GO_ON = dict(
    help=['report', '--help'],
    pretrain_help=['pretrain', '--help'],
    names=['--help'],
    fields=['pretrain', '--fields'],
    recipes=['pretrain', '--recipes'],
    study=['study', '--help'],
    report=['report', 'run'],
    pretrain=['pretrain', '--method', 'supervised', '--out', 'new', *sets(FOUR_STEPS)],
    shards=['shards', *FEW, '--out', 'tars'],
)
MADE = dict(report='run/report.html', pretrain='new/report.html', shards='tars/train')


@pytest.mark.parametrize('how', LOST)
@pytest.mark.parametrize('name', GO_ON)
def test_a_job_goes_on_when_nobody_reads_its_output(name, how, place, tmp_path):
    argv = [w if w not in ('new', 'tars') else str(tmp_path / w) for w in GO_ON[name]]
    code, err = ended(how, argv, place)
    made = (place if name == 'report' else tmp_path) / MADE.get(name, '.')
    assert code == 0 and made.exists() and 'Traceback' not in err and 'Exception ignored' not in err, err
    text = how != 'no_reader' and name not in ('names', 'help', 'pretrain_help', 'study')
    assert err.count('\n') == text and ('standard output' in err) == text, err


@pytest.mark.parametrize(
    'how,code,says', [('closed', 1, 'it is closed'), ('no_reader', 141, ''), ('full', 1, 'No space left on device')]
)
@pytest.mark.parametrize('photos', [1, 9])
def test_a_command_that_prints_says_that_it_could_not(how, code, says, photos, place):
    got, err = ended(how, ['caption', 'run', *['x.png'] * photos], place)
    assert (got, err) == (code, f'vlrep caption: standard output: {says}\n' if says else '')


def test_errors_that_nobody_reads_end_nothing_else(place):
    p = Program(NO_ERRORS + COMMAND, ['caption', 'run', 'nowhere.png'], place)
    p.communicate()
    assert p.returncode == 2
    p = Program(NO_ERRORS + COMMAND, ['caption', 'run', 'x.png'], place)
    out, _ = p.communicate()
    assert p.returncode == 0 and out.count('\n') == 1


def test_a_file_does_not_get_what_is_printed(tmp_path):
    "A file that is opened while the standard output is closed would get its number, and what a library prints"
    code = CLOSED + (
        "from vlrep.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "f = open('data', 'w')\nos.write(1, b'printed')\nf.write('data')\nf.close()\n"
    )
    p = Program(code, [], tmp_path)
    p.communicate()
    assert p.returncode == 0 and (tmp_path / 'data').read_text() == 'data'


def test_captioning_ends_where_nobody_reads():
    "and a training does not"

    class Gone:
        def write(self, text):
            raise BrokenPipeError(32, 'gone')

        def flush(self):
            pass

    assert cli._Output(Gone()).write('a') == 1
    with pytest.raises(BrokenPipeError):
        cli._Output(Gone(), ends=True).write('a')
