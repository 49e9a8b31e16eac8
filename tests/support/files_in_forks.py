"""`pytest --forks N`: whole files, N at a time, each in a fork of the process that has collected them

What takes seconds, importing PyTorch and collecting, is done once for all files; what the tests of a file share is made
once, too. `make test` runs the notebooks beside the tests, and together they have no more processes than either alone.
"""

import gc
import multiprocessing
import os
import pickle
import selectors
import signal
import struct
import sys
import time

import forked
import pytest
from _pytest.runner import runtestprotocol
from paths import ROOT

sys.path.insert(0, str(ROOT / '.ci'))
from tokens import Tokens

sys.path.pop(0)

LENGTH = struct.Struct('>I')


def pytest_addoption(parser):
    parser.addoption('--forks', type=int, default=0, metavar='N', help='files at a time, each in a process of its own')


# ---------------------------------------------------------------- in a fork


class Reports:
    "Sends what became of each test to the parent"

    def __init__(self, fd):
        self.fd = fd

    def send(self, *message):
        data = pickle.dumps(message)
        data = LENGTH.pack(len(data)) + data
        while data:
            data = data[os.write(self.fd, data) :]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.send('begins', item.nodeid)
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            self.send('report', item.config.hook.pytest_report_to_serializable(config=item.config, report=report))
        self.send('ends', item.nodeid)
        return True


def child(config, items, fd, temporary):
    "Run the tests of a file, to the end of this process"
    code = 1
    try:
        os.setpgid(0, 0)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, signal.SIG_DFL)
        forked.SERVER.fork()
        capture = config.pluginmanager.getplugin('capturemanager')
        if capture.is_globally_capturing():  # the files that it writes to would be shared
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        temporary.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = temporary
        config.pluginmanager.register(Reports(fd))
        for item, after in zip(items, [*items[1:], None]):
            config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        for left in multiprocessing.active_children():  # they hold the pipe at whose end the server stops
            left.kill()
        forked.SERVER.stop()
        code = 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# ---------------------------------------------------------------- in the process that has collected


class File:
    "A file whose tests run in a fork"

    def __init__(self, config, items, number):
        self.config = config
        self.items = items
        self.running = None
        self.done = 0
        self.bad = []
        self.begun = time.time()
        self.data = b''
        temporary = config._tmp_path_factory.getbasetemp() / f'file{number}'
        self.fd, fd = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.fd)
            child(config, items, fd, temporary)
        os.close(fd)

    def read(self):
        "Take over what the fork has sent; False at its end"
        new = os.read(self.fd, 1 << 20)
        self.data += new
        while len(self.data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.data)[0]
            if len(self.data) < end:
                break
            what, got = pickle.loads(self.data[LENGTH.size : end])
            self.data = self.data[end:]
            if what == 'report':
                self.log(self.config.hook.pytest_report_from_serializable(config=self.config, data=got))
            else:
                self.running = got if what == 'begins' else None
                self.done += what == 'ends'
        return bool(new)

    def log(self, report):
        if report.failed:
            self.bad.append(report.nodeid)
        self.config.hook.pytest_runtest_logreport(report=report)

    def ended(self):
        "Say how it went; a test that has ended the process has failed. The tests that are still to be run"
        os.close(self.fd)
        _, status, use = os.wait4(self.pid, 0)
        left = self.items[self.done :]
        if left:
            code = os.waitstatus_to_exitcode(status)
            item = left.pop(0)
            how = f'signal {-code}' if code < 0 else f'exit code {code}'
            for when, outcome, text in (
                ('call', 'failed', f'this test ended its process: {how}'),
                ('teardown', 'passed', None),
            ):
                self.log(pytest.TestReport(item.nodeid, item.location, {}, outcome, text, when))
            self.done += 1
        seconds = f'{time.time() - self.begun:6.1f} s, CPU {use.ru_utime + use.ru_stime:6.1f} s'
        name = self.items[0].path.relative_to(self.config.rootpath)
        line = f'  {"FAIL" if self.bad else "ok  "} {seconds}   {name}: {self.done} tests'
        self.config.get_terminal_writer().line(line, flush=True)
        return left


def stopped(*_):
    raise SystemExit(143)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    config = session.config
    n = config.option.forks
    if not n or config.option.collectonly or session.testsfailed:
        return None
    todo = {}
    for item in session.items:
        todo.setdefault(item.path, []).append(item)
    todo = list(todo.values())
    forked.imports()
    gc.collect()
    gc.freeze()
    old = signal.signal(signal.SIGTERM, stopped)
    tokens = Tokens()
    running = selectors.DefaultSelector()
    number = 0
    try:
        while todo or running.get_map():
            while todo and len(running.get_map()) < n and tokens.take():
                file = File(config, todo.pop(0), number := number + 1)
                running.register(file.fd, selectors.EVENT_READ, file)
            for key, _ in running.select(0.1):
                if not key.data.read():
                    running.unregister(key.fd)
                    if left := key.data.ended():
                        todo.insert(0, left)
                    tokens.give()
    finally:
        for key in running.get_map().values():
            os.killpg(key.data.pid, signal.SIGKILL)
            tokens.give()
        signal.signal(signal.SIGTERM, old)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_report_teststatus(report, config):
    "A line for each file is enough: no dots"
    result = yield
    if config.option.forks and (found := result.get_result()):
        result.force_result((found[0], '', ''))
