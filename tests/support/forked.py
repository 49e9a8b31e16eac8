"""Programs in processes of their own, without the seconds that importing PyTorch takes each time

A server imports the library once; every program is a fork of it. `start` and `run` stand for `subprocess.Popen` and
`subprocess.run` where the process matters and its start does not. What is asserted about imports, helping processes or
the words of a command as a shell finds it needs a real one.
"""

import atexit
import contextlib
import importlib
import json
import logging
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from paths import ROOT

COMMAND = 'import sys; from vlrep.cli import main; main(sys.argv[1:])'  # the command line: NAME and its options

# ---------------------------------------------------------------- in the server


def execute(code, argv):
    "Run `code` as the program of this process; its exit code"
    import traceback
    import types

    main = sys.modules['__main__'] = types.ModuleType('__main__')
    sys.argv = ['-c', *argv]
    try:
        exec(compile(code, '<program>', 'exec'), vars(main))
    except SystemExit as e:
        if isinstance(e.code, int) or e.code is None:
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(code, argv, cwd, env, files):
    "A forked process, to its end; `files`: the paths of its standard input, output and error"
    status = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        for fd, (path, mode) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
            got = os.open(path, mode | os.O_NOCTTY)
            os.dup2(got, fd)
            os.close(got)
        sys.stdin = open(0, encoding='utf-8', closefd=False)
        status = execute(code, argv)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def begin(**program):
    "Fork a child; its process id"
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork() or child(**program)


def end(pid):
    "(exit code, CPU seconds) of a child that has ended, else None"
    got, status, use = os.wait4(pid, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status), use.ru_utime + use.ru_stime) if got else None


def no_sync(fd):
    "In place of `os.fsync`: what a test writes need not survive a power failure"


def imports():
    "Import what programs use, the library too"
    import jinja2
    import matplotlib.pyplot
    import sklearn.linear_model
    import sklearn.svm
    import torch
    import torchvision
    import tyro

    import vlrep

    for optional in ('nbdev.test', 'textblob.en.taggers'):
        with contextlib.suppress(ImportError):
            importlib.import_module(optional)
    for module in pkgutil.walk_packages(vlrep.__path__, 'vlrep.'):
        importlib.import_module(module.name)
    torch.set_num_threads(1)


def serve(ask, answer):
    "Answer each line of one file with a line in the other"
    for line in ask:
        what, more = json.loads(line)
        print(json.dumps(dict(begin=begin, end=end)[what](**more)), file=answer, flush=True)


def main():
    "The server as a program: it is asked on standard input"
    os.fsync = no_sync
    ask, answer = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, 'r'), (1, 'w')))
    for fd in (ask.fileno(), answer.fileno()):
        os.set_inheritable(fd, False)
    os.dup2(2, 1)
    imports()
    serve(ask, answer)


# ---------------------------------------------------------------- in the tests


class Server:
    """The server of this process, started with the first program; `cpu`: seconds that its children have taken

    Where the library has been imported already and nothing else done, `fork` starts it at once.
    """

    pipes = None
    process = None
    pid = None
    cpu = 0.0

    def ask(self, what, **more):
        if self.pid is None and (self.process is None or self.process.poll() is not None):
            self.start()
        self.pipes[0].write(json.dumps([what, more]) + '\n')
        self.pipes[0].flush()
        return json.loads(self.pipes[1].readline() or 'null')

    def fork(self):
        "Start the server as a fork of this process, without its open files and its warnings"
        ends = os.pipe(), os.pipe()
        self.pid = os.fork()
        (ask, to), (back, answer) = ends
        if not self.pid:
            try:
                error = os.dup(2)
                for fd in (1, 2):  # a program may put anything there, so Python has to take them for pipes
                    os.dup2(answer, fd)
                sys.stdout = sys.__stdout__ = open(1, 'w', encoding='utf-8', closefd=False)
                sys.stderr = sys.__stderr__ = open(2, 'w', 1, 'utf-8', 'backslashreplace', closefd=False)
                for fd in (1, 2):
                    os.dup2(error, fd)
                for fd in {*map(int, os.listdir('/dev/fd'))} - {0, 1, 2, ask, answer}:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                logging.getLogger().handlers.clear()  # pytest's log file was among those: its number will be another's
                sys.warnoptions[:] = ['ignore']
                warnings.resetwarnings()
                warnings.simplefilter('ignore')
                serve(os.fdopen(ask), os.fdopen(answer, 'w'))
            finally:
                os._exit(0)
        os.close(ask)
        os.close(answer)
        self.pipes = os.fdopen(to, 'w'), os.fdopen(back)

    def stop(self):
        "End a forked server, and wait for it"
        for f in self.pipes:
            f.close()
        os.waitpid(self.pid, 0)

    def start(self):
        env = {
            **os.environ,
            'PYTHONPATH': f'{ROOT}:{ROOT / "tests" / "support"}',
            'CUDA_VISIBLE_DEVICES': '',
            'MPLBACKEND': 'Agg',
            'OMP_NUM_THREADS': '1',
            'MKL_NUM_THREADS': '1',
        }
        self.process = subprocess.Popen(
            [sys.executable, '-W', 'ignore', __file__],
            env=env,
            text=True,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pipes = self.process.stdin, self.process.stdout
        atexit.register(self.process.stdin.close)


SERVER = Server()


class Program:
    "`code` in a process of its own, with the attributes and methods of `subprocess.Popen` that tests use"

    def __init__(self, code, argv=(), cwd=None, env=None, input='', output=None):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [str(Path(self.folder.name) / n) for n in ('input', 'output', 'error')]
        for path, text in zip(self.files, (input, '', '')):
            Path(path).write_text(text)
        if output:
            self.files[1:] = [output, output]
        env = dict(os.environ if env is None else env)
        self.returncode = None
        self.pid = SERVER.ask(
            'begin', code=code, argv=list(map(str, argv)), cwd=str(cwd or os.getcwd()), env=env, files=self.files
        )

        self.process = os.pidfd_open(self.pid) if hasattr(os, 'pidfd_open') else None  # Linux

    def poll(self):
        if self.returncode is None and self.seems_ended(0) and (got := SERVER.ask('end', pid=self.pid)):
            self.returncode, used = got
            SERVER.cpu += used
            self.process and os.close(self.process)
        return self.returncode

    def seems_ended(self, wait):
        "Wait until the process has ended, at most so many seconds, without asking all the time"
        if self.process:
            return bool(select.select([self.process], [], [], wait)[0])
        time.sleep(min(wait, 0.01))
        return True

    def wait(self, timeout=300):
        limit = time.monotonic() + timeout
        while self.poll() is None:
            if (left := limit - time.monotonic()) < 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.seems_ended(left)
        return self.returncode

    args = 'a forked program'

    def forks(self):
        "Ids of the processes that it has forked, those that load images for instance, in the order of their start"
        found = []
        for file in Path('/proc').glob('[0-9]*/stat'):
            try:
                _, parent, *rest = file.read_text().rpartition(')')[2].split()
            except OSError:  # it has just ended
                continue
            if int(parent) == self.pid:
                found.append((int(rest[17]), int(file.parent.name)))  # ticks at its start
        return [pid for _, pid in sorted(found)]

    def send_signal(self, sig):
        self.poll() is None and os.kill(self.pid, sig)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def said(self):
        return tuple(Path(p).read_text() for p in self.files[1:])

    def communicate(self, timeout=300):
        self.wait(timeout)
        return self.said()


def start(words, cwd=None, env=None):
    "The command line in a process of its own: `words` are NAME and options"
    return Program(COMMAND, words, cwd, env)


def run(code, argv=(), cwd=None, env=None, input='', timeout=300):
    "`code` to its end, like `subprocess.run` with `capture_output` and `text`"
    p = Program(code, argv, cwd, env, input)
    try:
        out, err = p.communicate(timeout)
    finally:
        p.kill()
    return subprocess.CompletedProcess(argv, p.returncode, out, err)


if __name__ == '__main__':
    main()
