"Tests run on the CPU with one thread and without a network, the way `make test` runs them"
import os, socket
os.environ.update(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', MPLBACKEND='Agg')

import pytest

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
def cache(tmp_path_factory):
    "One cache for all tests, in whichever process they run, and one thread"
    import torch
    place = tmp_path_factory.getbasetemp()
    place = place.parent if 'PYTEST_XDIST_WORKER' in os.environ else place
    old = os.environ.get('VLREP_CACHE'), torch.get_num_threads()
    os.environ['VLREP_CACHE'] = str(place/'cache')
    torch.set_num_threads(1)
    yield
    os.environ.pop('VLREP_CACHE') if old[0] is None else os.environ.update(VLREP_CACHE=old[0])
    torch.set_num_threads(old[1])
