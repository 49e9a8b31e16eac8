"""Runs of several processes, one after the other: the library is imported once, and each rank is a fork of this process

    python tests/support/forked_ranks.py RUNS.json OUT.json

A run is a dict: `words` for each rank; perhaps `world_size`, if that is not their number; `before`, code for each rank;
`kill`: [file pattern, least number of files, signal, ranks]; `hold`, to have its port taken by another program; `copy`:
a folder and where to copy it when the run has ended; `command`, if it is not pretrain.
"""

import glob
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback

import torch

import vlrep.experiments.finetune
import vlrep.experiments.pretrain
from vlrep.cli import main


def child(rank, run, env, out):
    "A rank: what it prints goes to files"
    for fd, name in ((1, 'stdout'), (2, 'stderr')):
        os.dup2(os.open(f'{out}.{name}', os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.environ.update(env)
    code = 1
    try:
        torch.set_num_threads(1)
        exec(run.get('before', {}).get(str(rank), ''), {})
        main([run.get('command', 'pretrain'), *run['words'][rank]])
        code = 0
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()  # what the command line does not put in words
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(run, folder, port):
    n = run.get('world_size', len(run['words']))
    env = dict(WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    pids = []
    for r in range(len(run['words'])):
        own = {**env, 'RANK': str(r), 'LOCAL_RANK': str(r)} if n > 1 else {}
        if (pid := os.fork()) == 0:
            child(r, run, own, f'{folder}/rank{r}')
        pids.append(pid)
    return pids


def watch(pids, kill, limit):
    "Exit code of each, seconds at which it ended; those that are left at the end are shot"
    begun = time.monotonic()
    codes = {}
    while len(codes) < len(pids):
        now = time.monotonic()
        if kill and len(glob.glob(kill[0])) >= kill[1]:
            for r in kill[3]:
                os.kill(pids[r], kill[2])
            # seconds count from here
            kill = None
            begun = now
        for r, pid in enumerate(pids):
            if r in codes:
                continue
            got, status = os.waitpid(pid, os.WNOHANG)
            if got:
                codes[r] = os.waitstatus_to_exitcode(status), now - begun
            elif now - begun > limit:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[r] for r in range(len(pids))]


def go(run, folder):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
        if run.get('hold'):
            s.listen()
        else:
            s.close()
        ends = watch(start(run, folder, port), run.get('kill'), 100)
    if 'copy' in run:
        shutil.copytree(*run['copy'])

    def read(r, name):
        return open(f'{folder}/rank{r}.{name}').read()

    return [dict(code=c, seconds=t, out=read(r, 'stdout'), err=read(r, 'stderr')) for r, (c, t) in enumerate(ends)]


def work(runs, out):
    "Do the runs of one file, and write what became of them to the other"
    with open(runs) as f:
        todo = json.load(f)
    got = {name: go(run, os.path.dirname(out)) for name, run in todo.items()}
    with open(out, 'w') as f:
        json.dump(got, f)


if __name__ == '__main__':
    work(*sys.argv[1:])
