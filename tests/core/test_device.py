"""--device: every command that uses a finished run passes it on, a model moves as a whole, a missing one is one line

No machine of the tests has a GPU: what PyTorch reports is replaced, and what is moved is recorded.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import TINY, untrained
from tools import refused
from torch import nn

import vlrep
from vlrep.cli import main
from vlrep.data.transforms import EvalTransform
from vlrep.experiments import commands, load_run
from vlrep.models.backbones import small_resnet
from vlrep.models.pretrained import Pretrained
from vlrep.training.distributed import Dist


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp('runs') / 'virtex', 'virtex', **TINY)


@pytest.fixture
def one_gpu(monkeypatch):
    "PyTorch reports one GPU"
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)


@pytest.fixture
def moves(monkeypatch):
    "The devices that modules are moved to, in order; they stay where they are"
    devices = []

    def to(self, device=None, **kw):
        if device is not None:
            devices.append(str(device))
        return self

    monkeypatch.setattr(nn.Module, 'to', to)
    return devices


def photo(tmp_path):
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / 'a.png')
    return str(tmp_path / 'a.png')


def test_a_run_is_opened_on_the_gpu_by_default(run, one_gpu, moves):
    vlrep.load(run)
    vlrep.load(run, device='cpu')
    assert moves == ['cuda', 'cpu']


def test_a_run_is_opened_on_the_cpu_where_there_is_no_gpu(run):
    assert vlrep.load(run).device.type == 'cpu'


def test_every_command_passes_the_device_on(run, tmp_path, monkeypatch, capsys):
    asked = []

    def choose(name):
        asked.append(name)
        return 'cpu'

    monkeypatch.setattr(commands, 'choose_device', choose)
    monkeypatch.setattr(load_run, 'choose_device', choose)
    path = photo(tmp_path)
    words = dict(
        caption=[path],
        search=[str(tmp_path), path],
        embed=[path, '--out', str(tmp_path / 'a.npy')],
        features=['--out', str(tmp_path / 'f')],
    )
    for name, more in words.items():
        asked.clear()
        main([name, str(run), *more, '--device', 'cuda:1'])
        assert asked[0] == 'cuda:1', name
        asked.clear()
        (tmp_path / 'a.npy').unlink(missing_ok=True)
        (tmp_path / 'a.json').unlink(missing_ok=True)
        main([name, str(run), *more])
        assert asked[0] == 'auto', name
    asked.clear()
    with pytest.raises(SystemExit):  # the run has no space for texts
        main(['evaluate', str(run), '--on', 'retrieval', '--device', 'cuda:1'])
    assert asked[0] == 'cuda:1'


def test_a_device_that_the_machine_lacks_is_refused(run, tmp_path, one_gpu, capsys):
    said = refused(capsys, 'caption', run, photo(tmp_path), '--device', 'cuda:3')
    assert '--device cuda:3: this machine has 1 GPU\n' in said
    for words in (['search', run, tmp_path, 'a dog'], ['evaluate', run, '--on', 'captions'], ['benchmark', '--quick']):
        assert '--device cuda:3: this machine has 1 GPU\n' in refused(capsys, *words, '--device', 'cuda:3')
    with pytest.raises(ValueError, match='--device mps: PyTorch finds no Apple GPU'):
        vlrep.load(run, device='mps')


def test_a_process_of_torchrun_keeps_its_own_device():
    several = Dist(1, 2, 'cuda:1')
    assert commands._device('auto', several) == 'cuda:1'
    with pytest.raises(ValueError, match='--device cuda:0: torchrun gives each process a device of its own'):
        commands._device('cuda:0', several)
    assert commands._device('cpu', Dist(device='cuda')) == 'cpu'


def test_to_moves_whatever_the_capabilities_belong_to(moves, one_gpu):
    head, body, finder = nn.Linear(2, 2), small_resnet(8), SimpleNamespace(model=nn.Linear(3, 3))
    m = Pretrained(
        body, EvalTransform(32), 48, classify=partial(lambda model, images: images, head), detect=finder, other=len
    )
    assert set(m._owners()) == {body, head, finder.model}
    assert m.to('cuda') is m and moves == ['cuda'] * 3
    with pytest.raises(ValueError, match='--device cuda:1: this machine has 1 GPU'):
        m.to('cuda:1')
