"What the tests share: the command line in both spellings, and tiny jobs"

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from paths import PHOTOS, ROOT

from vlrep.cli import main
from vlrep.data.narratives import narratives_of
from vlrep.datasets.world.dataset import world

NET = ['visual_depth=10', 'visual_width=16', 'width=32', 'heads=2', 'bs=16', 'warmup=2']
SIZES = ['scenes=200', 'valid=32', 'probe=40', 'probe_held=40', 'test=40', 'shown=8', 'point=4']
WORLD = [*SIZES, 'vocab=300', 'size=32', 'steps=20', *NET]
FOUR_STEPS = [*SIZES, 'size=32', 'steps=4', 'warmup=1', 'bs=16']
TWENTY_STEPS = [*SIZES, 'size=32', 'steps=20', 'warmup=2', 'bs=16', 'baselines=false', 'jitter=.3', 'flip_p=.5']
TWO_STEPS = [
    '--threads',
    '1',
    '--precision',
    'fp32',
    '--set',
    'scenes=64',
    '--set',
    'valid=8',
    '--set',
    'steps=2',
    '--set',
    'warmup=1',
    '--set',
    'bs=8',
    '--set',
    'size=32',
]
# a study of a few seconds
STUDY = """
name = 'tiny'
seeds = [0, 1]
precision = 'fp32'

[data]
name = 'world'
scenes = 64
valid = 16
probe = 40
probe_held = 40
test = 40
shown = 8
point = 0
draws = 20
baselines = false

[rates]
scenes = 40
extend = 0
grid = [{cnn_lr = 0.2}, {cnn_lr = 0.5}]

[[variants]]
name = 'sets'
method = 'token_cls'
changes = {steps = 12, warmup = 2, size = 32, bs = 16, visual_width = 8, vocab = 300, baselines = true}

[[variants]]
name = 'labels'
method = 'multilabel'
changes = {steps = 12, warmup = 2, size = 32, bs = 16, visual_width = 8}
grid = [{cnn_lr = 0.5}, {cnn_lr = 1e6, lr = 1e6}]

[[comparisons]]
id = 'X'
text = 'sets of words teach more than labels'
treatment = 'sets'
control = 'labels'
"""
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}


def quiet(line):
    "In place of a log: says nothing"


def few_photos(folder, n):
    "A CSV of `n` of the committed photos, copied beside it: the part of a photo follows from its name"
    photos = sorted((PHOTOS / 'Images').iterdir())[:n]
    for photo in photos:
        shutil.copy(photo, folder)
    rows = [f'"{photo.name}","a photo of a thing"' for photo in photos]
    (folder / 'few.csv').write_text('\n'.join(['path,caption', *rows]) + '\n')
    return folder / 'few.csv'


def narrated(split, n, size=32):
    "Scenes with captions, labels and narratives: what any method may read"
    dataset = world(split, n, size=size, with_='narrative')
    return dataset.with_narratives(narratives_of(dataset))


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def peak(do, first=lambda: None):
    """Bytes by which a forked process grows, and what it raised as text; a signal is an error

    `first` is done before: pages of libraries that it touches, and modules that it imports, are not counted
    """
    r, w = os.pipe()
    pid = os.fork()
    if not pid:

        def status(k):
            return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(k)) * 1024

        with contextlib.suppress(Exception):
            first()
        Path('/proc/self/clear_refs').write_text('5')
        base = status('VmRSS')
        try:
            text = f'opened {type(do()).__name__}'
        except Exception as e:
            text = f'{type(e).__name__}: {e}'
        os.write(w, f'{status("VmHWM") - base} {text[:2000]}'.encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    grown, text = os.read(r, 3000).decode().split(' ', 1)
    return int(grown), text


needs_clear_refs = pytest.mark.skipif(
    not Path('/proc/self/clear_refs').exists(), reason='peak memory is read from /proc'
)


def sets(changes):
    return [w for c in changes for w in ('--set', c)]


def command(name):
    "A command as it is typed: of the script that installing makes"
    script = Path(sys.executable).parent / 'vlrep'
    call = [str(script)] if script.exists() else [sys.executable, '-c', 'from vlrep.cli import main; main()']
    return [*call, name]


# the other spelling, `python -m vlrep.cli NAME`, for a fork
MODULE = "import runpy; runpy.run_module('vlrep.cli', run_name='__main__', alter_sys=True)"


def both_spellings(name, words, folders):
    "What became of a command: as the script that installing makes, in a process of its own; as a module, in a fork"
    return [run([*command(name), *words], folders[0]), forked.run(MODULE, [name, *words], folders[1])]


def run(words, cwd):
    return subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**ENV, 'VLREP_CACHE': os.environ['VLREP_CACHE']},
    )


def refused(capsys, *words, code=2):
    "What is said on stderr when these words are refused: one line, or what tyro says of options, as one line"
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(list(map(str, words)))
    err = capsys.readouterr().err
    assert e.value.code == code and 'Traceback' not in err, err
    if 'helptext' in err or 'Missing argument' in err:
        return ' '.join(re.sub('[─╭╮│╰╯]|--+( |$)', ' ', err, flags=re.M).split())
    assert err.count('\n') == 1, err
    return err


# what comes after training, made short
QUICK = """
import vlrep.experiments.pretrain as c
c.measure = lambda run, recipe, options, dataset, learn, **kw: (dict(steps=learn.train_state.step), [])
c.write_report = lambda run: (run/'report.html').write_text('<html></html>') and run/'report.html'
"""

RUN = """
import json, sys
from vlrep.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    try: main(words)
    except SystemExit as e: codes.append(e.code)
    else: codes.append(0)
    print('----', flush=True)
    print('----', file=sys.stderr, flush=True)
print(json.dumps(codes))
"""


def vlrep(folder, *commands, codes=None, quick=False, before=''):
    """Commands in `folder`, one after the other in a process of their own; what each printed

    `quick`: what comes after training is short, for tests that look at weights alone; `before`: code to run first
    """
    words = [list(map(str, c)) for c in commands]
    p = forked.run(before + QUICK * quick + RUN, [json.dumps(words)], folder)
    *out, got = p.stdout.split('----\n')
    text = [a + b for a, b in zip(out, p.stderr.split('----\n'))]
    assert p.returncode == 0 and json.loads(got) == (codes or [0] * len(words)), p.stdout[-2000:] + p.stderr[-2000:]
    return text
