"""Tests run on the CPU with one thread and without a network, the way `make test` runs them

The results record the CPU seconds of each test, its fixtures and its processes; the slowest files begin first.
"""

import os
import resource
import socket
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', MPLBACKEND='Agg')

import forked
import pytest
from files_in_forks import pytest_addoption, pytest_report_teststatus, pytest_runtestloop  # noqa: F401

os.fsync = forked.no_sync


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    "A connection to another machine is an error"
    connect = socket.socket.connect

    def local(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ('127.0.0.1', '::1', 'localhost'):
            raise OSError(f'tests run without a network, and this one asked for {address[0]}')
        return connect(self, address)

    monkeypatch.setattr(socket.socket, 'connect', local)


@pytest.fixture(scope='session', autouse=True)
def cache(tmp_path_factory, pytestconfig):
    "One cache for all tests, in whichever process they run (of `make test`, that of its notebooks), and one thread"
    import torch

    place = tmp_path_factory.getbasetemp()
    place = place.parent if 'PYTEST_XDIST_WORKER' in os.environ or pytestconfig.option.forks else place
    old = os.environ.get('VLREP_CACHE'), torch.get_num_threads()
    os.environ['VLREP_CACHE'] = old[0] or str(place / 'cache')
    torch.set_num_threads(1)
    yield
    os.environ.pop('VLREP_CACHE') if old[0] is None else os.environ.update(VLREP_CACHE=old[0])
    torch.set_num_threads(old[1])


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    "A cache of this test alone"
    monkeypatch.setenv('VLREP_CACHE', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


@pytest.fixture(scope='module')
def source():
    "Scenes to train on and to validate on, as any method reads them"
    from tools import narrated

    return narrated('train', 96), narrated('valid', 32)


@pytest.fixture(scope='module')
def few_regions():
    "Learners of fusion models measure the scale of regions: of 32 images instead of 512, as evenly spread"
    from vlrep.models.region_cache import region_sample

    with pytest.MonkeyPatch.context() as m:
        m.setitem(region_sample.__kwdefaults__, 'max_images', 32)
        yield


@pytest.fixture
def quick(monkeypatch):
    "What comes after training, made short: these tests look at what is written, not at the numbers"
    import vlrep.experiments.pretrain

    def page(run):
        (run / 'report.html').write_text('<html></html>\n')
        return run / 'report.html'

    monkeypatch.setattr(
        vlrep.experiments.pretrain,
        'measure',
        lambda run, recipe, options, dataset, learn, **kw: (
            dict(steps=learn.train_state.step, held_loss=learn.train_state.best_loss),
            [],
        ),
    )
    monkeypatch.setattr(vlrep.experiments.pretrain, 'write_report', page)


# ---------------------------------------------------------------- what a test costs

# files, the slowest first
SLOWEST = """
methods/test_contract training/test_distributed datasets/test_every_dataset cli/test_options studies/test_study
training/test_resume experiments/test_initial_weights cli/test_commands training/test_resume_killed_processes
training/test_faults data/test_paraphrases methods/test_mct methods/test_icmlm models/test_backbones
reproduce/test_rehearsal experiments/test_interrupted_saves methods/test_fusion_inputs methods/test_word_head
core/test_processes
""".split()


def pytest_collection_modifyitems(items):
    "A file is the work of one process, so that what its tests share is made once: the slowest ones begin"
    tests = Path(__file__).parent
    slow = {tests / f'{name}.py': i for i, name in enumerate(SLOWEST)}
    assert all(path.is_file() for path in slow), 'SLOWEST names files that are gone'
    items.sort(key=lambda item: slow.get(item.path, len(slow)))


def cpu():
    "CPU seconds of this process and of those it has waited for"
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in use) + forked.SERVER.cpu


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    item.stash['begun'] = cpu()
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == 'teardown':
        item.user_properties.append(('cpu', round(cpu() - item.stash['begun'], 2)))


def pytest_terminal_summary(terminalreporter):
    "The ten most expensive tests"
    reports = [r for group in terminalreporter.stats.values() for r in group if getattr(r, 'when', '') == 'teardown']
    cost = sorted(((dict(r.user_properties).get('cpu', 0), r.nodeid) for r in reports), reverse=True)
    terminalreporter.section(f'CPU seconds: {sum(c for c, _ in cost):.0f}')
    for seconds, name in cost[:10]:
        terminalreporter.write_line(f'{seconds:7.1f} s  {name}')
