"Job scripts for SLURM: what they ask for, and that they train, wait for each other and are put back into the queue"

import contextlib
import io
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from paths import ROOT
from tiny_plans import TINY_PLAN

from vlrep.cli import main
from vlrep.core.text_files import json_lines
from vlrep.reproduce.plan import PLANS, Places, plan_commands, read_plan
from vlrep.reproduce.slurm import SlurmOptions, job_script, write_jobs
from vlrep.training.run_folder import Run

# ---------------------------------------------------------------- a cluster of one machine

FIRST = os.getpid() % 9000  # Ports follow from the numbers of jobs, and other tests may run on this machine
TRAIN = FIRST + 1
EVALUATE = FIRST + 2

STUBS = dict(
    # Runs a job at once, in the foreground, and again whenever it was put back; not if one that it waits for failed
    sbatch="""
script=$(realpath "${!#}")
echo "$*" >> "$CLUSTER/submitted"
id=$((FIRST + $(wc -l < "$CLUSTER/submitted")))
echo "$id"
for need in $(grep -o 'afterok[:0-9]*' <<< "$*" | tr : '\\n' | grep '^[0-9]'); do
    if [ "$(cat "$CLUSTER/code.$need")" != 0 ]; then echo never > "$CLUSTER/code.$id"; exit; fi
done
export SLURM_JOB_ID=$id SLURM_NNODES=1 SLURM_JOB_NODELIST=here
log=$(sed -n 's/^#SBATCH --output="\\(.*\\)"/\\1/p' "$script")
while true; do
    bash "$script" >> "$log" 2>&1 &
    echo $! > "$CLUSTER/script.$id"
    wait $!
    echo $? > "$CLUSTER/code.$id"
    if ! rm "$CLUSTER/again.$id" 2> /dev/null; then exit; fi
done
""",
    srun="""
while [[ $1 == --* ]]; do shift; done
echo $$ > "$CLUSTER/step.$SLURM_JOB_ID"
exec "$@"
""",
    # All processes of the step have the signal, as in SLURM: those that torchrun has started, and, while they save a
    # checkpoint, torchrun, which passes it on to them
    scancel="""
step=$(cat "$CLUSTER/step.$2")
kill -TERM $(awk -v parent="$step" '$4 == parent {print $1}' /proc/[0-9]*/stat 2> /dev/null)
sleep .03
kill -TERM "$step"
""",
    scontrol="""
if [ "$1" = show ]; then echo 127.0.0.1; else touch "$CLUSTER/again.$2"; echo "$*" >> "$CLUSTER/requeued"; fi
""",
)


def cluster(folder, **others):
    "Environment in which the commands of SLURM are small scripts; `torchrun` is not on the path"
    bin = folder / 'bin'
    bin.mkdir(parents=True)
    for name, text in {**STUBS, **others}.items():
        (bin / name).write_text('#!/bin/bash\n' + text)
        (bin / name).chmod(0o755)
    path = os.pathsep.join([str(bin), '/usr/local/bin', '/usr/bin', '/bin'])
    return {**os.environ, 'PATH': path, 'CLUSTER': str(folder), 'FIRST': str(FIRST), 'PYTHONPATH': str(ROOT)}


def said(folder, name):
    "Lines of a file that the stubs wrote"
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


def written(folder, monkeypatch, text, *words):
    "Folder with spaces, the plan in it and its job scripts: path of submit.sh, as printed"
    folder.mkdir(exist_ok=True)
    (folder / 'tiny.toml').write_text(text)
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(['reproduce', 'slurm', 'tiny.toml', '--out', 'my runs', '--gpus', '1', '--cpus', '1', *words])
    assert out.getvalue().startswith('bash ')
    return Path(out.getvalue().strip().removeprefix('bash '))


# ---------------------------------------------------------------- a plan that is carried out

LONG = TINY_PLAN.replace('steps = 4', 'steps = 40')


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "A plan whose training is told to end after its first checkpoint, as at the end of its time"
    tmp = tmp_path_factory.mktemp('slurm')
    home = tmp / 'a home'
    env = cluster(tmp / 'a cluster')
    with pytest.MonkeyPatch.context() as m:
        submit = written(home, m, LONG, '1.labels')
    run = Run(home / 'my runs' / 'labels-0')
    p = subprocess.Popen(['bash', submit], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + 120
        while not run.saved() and p.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(int((tmp / 'a cluster' / f'script.{TRAIN}').read_text()), signal.SIGTERM)
        out = p.communicate(timeout=240)[0]
    finally:
        p.kill()
    return dict(tmp=tmp, home=home, cluster=tmp / 'a cluster', code=p.returncode, out=out, run=run)


def test_submitted_jobs_train_and_evaluate(done):
    assert done['code'] == 0 and done['out'] == '2 jobs submitted\n', done['out']
    logs = [p.read_text()[-2000:] for p in sorted((done['home'] / 'my runs' / 'logs').glob('*.log'))]
    assert said(done['cluster'], f'code.{TRAIN}') == said(done['cluster'], f'code.{EVALUATE}') == ['0'], logs
    assert not done['run'].missing()
    ((_, line),) = json_lines(done['run'].path / 'evaluations.jsonl')
    assert line['on'] == 'world' and line['rows']


def test_a_job_waits_for_the_one_that_it_needs(done):
    train, evaluate = said(done['cluster'], 'submitted')
    assert train == '--parsable labels-0.sh'
    assert evaluate == f'--parsable --dependency=afterok:{TRAIN} --kill-on-invalid-dep=yes labels-0-scenes.sh'


def test_a_job_whose_time_is_up_is_put_back_and_resumed(done):
    assert said(done['cluster'], 'requeued') == [f'requeue {TRAIN}']
    log = (done['home'] / 'my runs' / 'logs' / 'labels-0.log').read_text()
    steps = [int(s) for s in re.findall(r'resuming from step (\d+)', log)]
    assert len(steps) == 1 and 0 < steps[0] < 40, log[-2000:]
    stopped = [int(s) for s in re.findall(r'stopped by SIGTERM after step (\d+)', log)]
    assert stopped == steps


def test_nothing_is_left_to_submit_and_the_table_is_filled(done, monkeypatch):
    submit = written(done['home'], monkeypatch, LONG, '1.labels')
    assert 'sbatch' not in submit.read_text() and submit.read_text().endswith('\necho 0 jobs submitted\n')
    main(['reproduce', 'table', 'tiny.toml', '--out', 'my runs'])
    (row,) = [l for l in (done['home'] / 'my runs' / 'tables.md').read_text().splitlines() if l.startswith('| Labels')]
    assert re.fullmatch(r'\| Labels \| mAP \| 52.8 \| [\d.]+ \| [-+][\d.]+ \| 1 \| done \|', row)


# ---------------------------------------------------------------- what becomes of other jobs


def submitted(folder, monkeypatch, srun, begun=False):
    "Submit the plan where `srun` is this script, perhaps with a run that has begun; the folder of the cluster"
    submit = written(folder / 'a home', monkeypatch, TINY_PLAN, '1.labels')
    if begun:
        (submit.parents[1] / 'labels-0').mkdir()
        (submit.parents[1] / 'labels-0' / 'recipe.json').touch()
    env = cluster(folder / 'cluster', srun=srun)
    subprocess.run(['bash', submit], env=env, check=True, capture_output=True, timeout=60)
    return folder / 'cluster'


def test_a_job_that_fails_is_not_put_back_and_those_that_need_it_never_begin(tmp_path, monkeypatch):
    found = submitted(tmp_path, monkeypatch, 'exit 3')
    assert said(found, f'code.{TRAIN}') == ['3'] and said(found, f'code.{EVALUATE}') == ['never']
    assert not said(found, 'requeued')


def test_an_evaluation_whose_time_is_up_is_not_put_back(tmp_path, monkeypatch):
    "It would begin anew each time; a training that ends well within these two minutes is not put back, either"
    ended = """
if [ $SLURM_JOB_ID = $((FIRST + 1)) ]; then kill -TERM $PPID; sleep .3; exit 0; fi
trap 'exit 7' TERM
echo $$ > "$CLUSTER/step.$SLURM_JOB_ID"
kill -TERM $PPID
while true; do sleep .1; done
"""
    found = submitted(tmp_path, monkeypatch, ended)
    assert said(found, f'code.{TRAIN}') == ['0'] and said(found, f'code.{EVALUATE}') == ['7']
    assert not said(found, 'requeued')


def test_two_jobs_on_a_node_meet_at_different_ports(tmp_path, monkeypatch):
    "And a command is started by the Python that wrote the script, with all its words"
    found = submitted(tmp_path, monkeypatch, 'printf "%s\\n" "$@" >> "$CLUSTER/words.$SLURM_JOB_ID"')
    words = [said(found, f'words.{i}') for i in (TRAIN, EVALUATE)]
    ends = [w[w.index('--rdzv_endpoint') + 1] for w in words]
    assert ends == [f'127.0.0.1:{20000 + i}' for i in (TRAIN, EVALUATE)]
    assert all(w[0] == '--cpus-per-task=1' and w[2:4] == ['-m', 'torch.distributed.run'] for w in words)
    assert words[0][words[0].index('-m', 4) + 2 :][:3] == ['pretrain', '--method', 'supervised']
    assert words[1][-4:] == ['evaluate', 'my runs/labels-0', '--on', 'world']
    assert said(found, f'code.{TRAIN}') == said(found, f'code.{EVALUATE}') == ['0']


def test_a_run_that_has_begun_is_resumed(tmp_path, monkeypatch):
    found = submitted(tmp_path, monkeypatch, 'printf "%s\\n" "$@" >> "$CLUSTER/words.$SLURM_JOB_ID"', begun=True)
    assert said(found, f'words.{TRAIN}')[-2:] == ['resume', 'my runs/labels-0']
    assert said(found, f'words.{EVALUATE}')[-4:] == ['evaluate', 'my runs/labels-0', '--on', 'world']


# ---------------------------------------------------------------- what is written


def test_every_script_of_every_paper_is_bash(tmp_path):
    for paper in sorted(p.stem for p in PLANS.glob('*.toml')):
        submit = write_jobs(read_plan(paper), Places(Path("the 'data'"), tmp_path / paper))
        scripts = sorted(submit.parent.glob('*.sh'))
        assert len(scripts) > 50
        text = '\n'.join(f'function _{i} () {{\n{s.read_text()}\n}}' for i, s in enumerate(scripts))
        done = subprocess.run(['bash', '-n'], input=text, capture_output=True, text=True)
        assert not done.returncode and not done.stderr, done.stderr[:500]


def test_a_script_asks_for_what_was_said(tmp_path):
    plan = read_plan('virtex')
    places = Places(Path('data'), tmp_path, plugins=('my code.py',))
    options = SlurmOptions(2, 4, 6, 8, 'long', 'source .venv/bin/activate')
    commands = {c.kind: c for c in plan_commands(plan, places)}
    train = job_script(commands['pretrain'], places, options)
    for line in (
        '#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=24',
        '#SBATCH --time=8:00:00 --signal=B:TERM@120 --requeue --open-mode=append',
        '#SBATCH --partition=long',
        'source .venv/bin/activate',
        'if [ -n "$run" ] && [ -e "$run/recipe.json" ]; then command=(resume "$run" --plugin \'my code.py\'); fi',
    ):
        assert line in train.splitlines(), line
    assert all(c.words[-2:] == ('--plugin', 'my code.py') for c in commands.values())
    one = job_script(commands['evaluate'], places, options).splitlines()
    assert '#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=6' in one
