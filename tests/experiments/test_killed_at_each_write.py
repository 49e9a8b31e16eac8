"""A process is killed at each of its writes, one after the other; then the run is resumed, and ends in the same bits

What ends a write is a file or a folder that gets its name: `os.replace`. The process is killed before each, and behind.
"""

import os
import signal

import torch
from run_folders import SCENES, in_child, rows
from tools import TWENTY_STEPS, quiet

from vlrep.experiments.finetune import finetune
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import finetune_spec, run_spec
from vlrep.training.run_folder import open_run_folder

PLAN = ['steps=2', 'bs=8', 'every=1', 'warmup=1', 'lr=0.01', 'report=valid']


def killed_at(k, work):
    "Do `work` in a process that is killed before its `k`-th write; was it?"

    def until():
        replace = os.replace
        calls = [0]

        def later(*names, **kw):
            calls[0] += 1
            if calls[0] == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(*names, **kw)

        os.replace = later
        work()

    code = in_child(until)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def same_run(a, b):
    "The same weights, log and numbers; and nothing is left of the write in which a process was killed"
    assert rows(a) == rows(b)
    for which in ('last', 'best'):
        w = open_run_folder(b).weights(which)
        assert w and all(torch.equal(v, w[k]) for k, v in open_run_folder(a).weights(which).items())
    x, y = (open_run_folder(r).results() for r in (a, b))
    assert len(x) == len(y) == 1 and x[0]['numbers'] == y[0]['numbers']
    assert {p.name for p in a.iterdir()} == {p.name for p in b.iterdir()}
    assert not [p for p in a.rglob('.*') if p.suffix in ('.tmp', '.old')]


def test_fine_tuning_killed_at_any_write_resumes_to_the_same_bits(body, tmp_path):
    "Before each write; where there is no run yet, the same command begins it"

    def begin(out):
        return finetune(finetune_spec(body, 'vqa', [*PLAN, *SCENES], threads=1), out=out, log=quiet)

    whole = begin(tmp_path / 'whole')
    k = 0
    lines = []
    while killed_at(k := k + 1, lambda: begin(tmp_path / f'run{k}')):
        run = tmp_path / f'run{k}'
        if (run / 'recipe.json').exists():
            resume_run(run, log=lines.append)
        else:
            begin(run)
        same_run(run, whole)
    assert k > 6 and 'no checkpoint: starting from the beginning' in lines
    assert 'resuming from step 1, that of the best checkpoint: there is no other' in lines


def test_pretraining_killed_at_any_write_resumes_to_the_same_bits(quick, tmp_path):
    "The same for pretraining"

    def begin(out):
        return pretrain(run_spec('supervised', [*TWENTY_STEPS, 'scenes=100', 'steps=4'], threads=1), out=out, log=quiet)

    whole = begin(tmp_path / 'whole')
    k = 0
    lines = []
    while killed_at(k := k + 1, lambda: begin(tmp_path / f'run{k}')):
        run = tmp_path / f'run{k}'
        if (run / 'recipe.json').exists():
            resume_run(run, log=lines.append)
        else:
            begin(run)
        same_run(run, whole)
    assert k > 6 and 'no checkpoint: starting from the beginning' in lines
    assert any(line.endswith('that of the best checkpoint: there is no other') for line in lines)
