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
