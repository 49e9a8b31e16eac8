"Two nodes train together, one of them dies: the other ends, and both take the run up from the last checkpoint"

import os
import time

import forked
import pytest
from paths import ROOT
from ranks import codes, free_port, run_ranks
from run_folders import rows
from tools import same_tensors, sets

from vlrep.training.run_folder import Run, open_run_folder

SIZES = ['scenes=64', 'valid=16', 'probe=40', 'probe_held=40', 'test=40', 'shown=4', 'point=0', 'baselines=false']
NET = ['size=32', 'visual_depth=10', 'visual_width=8', 'bs=16', 'warmup=2', 'steps=60']
JOB = ['--method', 'supervised', '--threads', '1', '--precision', 'fp32', '--save-every', '2', *sets([*SIZES, *NET])]
AGENT = 'import sys; from torch.distributed.run import main; main(sys.argv[1:])'


def start_node(folder, port, words):
    "A node: an agent of torchrun with one process, as the lines of training/05_distributed and of job scripts start it"
    launch = '--nnodes 2 --nproc_per_node 1 --max-restarts 0 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint'
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    return forked.Program(AGENT, [*launch.split(), f'127.0.0.1:{port}', '-m', 'vlrep.cli', *words], folder, env)


def kill_node(agent):
    "All of its processes at once"
    for pid in agent.forks():
        os.kill(pid, 9)
    agent.kill()


def wait(until, agents, seconds=120):
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end and all(a.poll() is None for a in agents), [a.said() for a in agents]
        time.sleep(0.02)


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "A run whose second node was killed in training, and taken up by two; what the first one said"
    folder = tmp_path_factory.mktemp('nodes')
    port = free_port()
    words = ['pretrain', *JOB, '--out', folder / 'run']
    run = Run(folder / 'run')
    agents = [start_node(folder, port, words) for _ in range(2)]
    try:
        wait(lambda: max(run.saved(), default=0) >= 6, agents)
        kill_node(agents[1])
        begun = time.monotonic()
        code = agents[0].wait(60)
        seconds = time.monotonic() - begun
        said = agents[0].said()[1]
        step = run.saved()[-1]
        port = free_port()
        agents += [start_node(folder, port, ['resume', folder / 'run']) for _ in range(2)]
        again = [(a.wait(200), *a.said()) for a in agents[2:]]
    finally:
        for agent in agents:
            agent.poll() is None and kill_node(agent)
    return dict(folder=folder, code=code, seconds=seconds, said=said, step=step, again=again)


def test_the_other_node_ends_with_a_message(done):
    assert done['code'] == 1 and done['seconds'] < 40
    lines = [l for l in done['said'].splitlines() if l.startswith('vlrep pretrain: ')]
    assert len(lines) == 1 and ('rank' in lines[0] or 'process' in lines[0]), done['said'][-3000:]


def test_both_nodes_take_the_run_up_from_its_last_checkpoint(done):
    assert [code for code, *_ in done['again']] == [0, 0], done['again']
    printed = ''.join(out for _, out, _ in done['again'])
    assert printed.count(f'resuming from step {done["step"]}\n') == 1 and 6 <= done['step'] < 60
    assert not open_run_folder(done['folder'] / 'run').missing()


def test_the_run_has_the_bits_of_one_that_nobody_disturbed(done):
    "Weights, and the log without its times"
    folder = done['folder']
    whole = run_ranks(folder, dict(whole=dict(words=[[*JOB, '--out', str(folder / 'whole')]] * 2)))
    assert codes(whole['whole']) == [0, 0]
    a, b = (open_run_folder(folder / name) for name in ('run', 'whole'))
    assert rows(a.path) == rows(b.path) and len(rows(a.path)) > 10
    for which in ('best', 'last'):
        assert same_tensors(a.weights(which), b.weights(which)), which
