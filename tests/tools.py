"What the tests share: the command line in both spellings, and tiny jobs"

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from vlrep.cli import main
from vlrep.data.narratives import narratives_of
from vlrep.datasets.world.dataset import world

ROOT = Path(__file__).resolve().parent.parent
PHOTOS = ROOT / 'data' / 'flickr8k-world'
NET = ['visual_depth=10', 'visual_width=16', 'width=32', 'heads=2', 'bs=16', 'warmup=2']
SIZES = ['scenes=200', 'valid=32', 'probe=80', 'probe_held=60', 'test=60', 'shown=24', 'point=12']
WORLD = [*SIZES, 'vocab=300', 'size=32', 'steps=20', *NET]
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}


def told(split, n, size=32):
    "Scenes with captions, labels and narratives: what any method may read"
    dataset = world(split, n, size=size, with_='narrative')
    return dataset.with_narratives(narratives_of(dataset))


def sets(changes):
    return [w for c in changes for w in ('--set', c)]


def command(name, module=True):
    "A command in one of its two spellings: as a module, or as the script that installing makes"
    if module:
        return [sys.executable, '-m', 'vlrep.cli', name]
    script = Path(sys.executable).parent / 'vlrep'
    call = [str(script)] if script.exists() else [sys.executable, '-c', 'from vlrep.cli import main; main()']
    return [*call, name]


MODULE = "import runpy; runpy.run_module('vlrep.cli', run_name='__main__', alter_sys=True)"


def both_spellings(name, words, folders):
    "What became of a command: as the script that installing makes, in a process of its own; as a module, in a fork"
    return [run([*command(name, False), *words], folders[0]), forked.run(MODULE, [name, *words], folders[1])]


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


def vlrep(folder, *commands, codes=None):
    "Commands in `folder`, one after the other in a process of their own; what each printed"
    words = [list(map(str, c)) for c in commands]
    p = forked.run(RUN, [json.dumps(words)], folder)
    *out, got = p.stdout.split('----\n')
    said = [a + b for a, b in zip(out, p.stderr.split('----\n'))]
    assert p.returncode == 0 and json.loads(got) == (codes or [0] * len(words)), p.stdout[-2000:] + p.stderr[-2000:]
    return said
