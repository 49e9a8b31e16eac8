"vlrep benchmark: what can be checked of its GPU half without a GPU, and that the command is installed like the others"

import configparser
from dataclasses import replace

import pytest
import torch
from paths import ROOT

from vlrep import cli
from vlrep.experiments import benchmark as b
from vlrep.experiments.config import get_recipe


def test_the_command_is_installed_like_the_others():
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT / 'settings.ini', encoding='utf-8')
    assert cfg['DEFAULT']['console_scripts'].split() == ['vlrep=vlrep.cli:main']
    assert 'benchmark' in cli.COMMANDS


def test_the_command_passes_on_what_it_is_told(monkeypatch, tmp_path):
    got = []
    monkeypatch.setattr(b, 'run_benchmark', lambda **kw: got.append(kw))
    cli.main(['benchmark', '--quick', '--device', 'cpu', '--batch', '4', '--out', str(tmp_path / 'a.json')])
    cli.main(['benchmark'])
    assert got == [
        dict(quick=True, device='cpu', batch=4, out=str(tmp_path / 'a.json')),
        dict(quick=False, device='auto', batch=None, out=None),
    ]


@pytest.mark.parametrize(
    'capability,bf16,can',
    [((9, 0), True, {'fp32', 'tf32', 'bf16', 'fp16', 'compiled'}), ((7, 5), False, {'fp32', 'fp16', 'compiled'})],
)
def test_a_gpu_is_measured_in_each_kind_of_step(monkeypatch, capability, bf16, can):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: capability)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: bf16 or including_emulation)
    assert {m for m in b._MODES if not b.mode_problem(m, 'cuda')} == can
    assert b._precision('compiled', 'cuda') == ('bf16' if bf16 else 'fp16')
    assert [b._precision(m, 'cuda') for m in ('fp32', 'tf32', 'fp16')] == ['fp32', 'fp32', 'fp16']


@pytest.fixture
def gpu(monkeypatch):
    "A GPU that only counts: how often it was waited for, and how much memory is said to be held"
    calls = []
    for name, answer in dict(
        synchronize=None, reset_peak_memory_stats=None, max_memory_allocated=900, memory_allocated=500
    ).items():
        monkeypatch.setattr(torch.cuda, name, lambda d=None, name=name, answer=answer: calls.append(name) or answer)
    return calls


def test_memory_of_a_gpu_leaves_out_what_others_hold(gpu):
    "500 bytes are held at the start, 70 of them by this learner, and 900 at the peak: its steps took 470"

    class Steps:
        device = 'cuda'

        def run(self, n):
            return [0.0] * n

        def optimiser_bytes(self):
            return 70

    assert b._step_memory(Steps(), 2) == ([0.0, 0.0], 470)
    assert gpu == ['reset_peak_memory_stats', 'max_memory_allocated', 'memory_allocated', 'max_memory_allocated']


def test_clocks_wait_for_a_gpu(gpu):
    tiny = replace(get_recipe('virtex', 'world'), size=32, bs=8, width=32, heads=2, visual_width=8)
    steps = b._Steps(tiny, 'fp32', 'cpu')
    steps.times.device = 'cuda'
    seconds = steps.run(2)
    assert gpu == ['synchronize'] * 4 and len(seconds) == 2 and min(seconds) > 0


def test_fp32_means_fp32(monkeypatch):
    "PyTorch allows tf32 for convolutions by default: fp32 steps must forbid it, and put it back"
    seen = []
    tiny = replace(get_recipe('virtex', 'world'), size=32, bs=8, width=32, heads=2, visual_width=8)
    steps = b._Steps(tiny, 'fp32', 'cpu')
    before = torch.backends.cudnn.conv.fp32_precision
    monkeypatch.setattr(
        steps.learn,
        'fit_steps',
        lambda n: seen.append((torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)),
    )
    for steps.mode in ('fp32', 'tf32'):
        steps.run(1)
    assert seen == [('ieee', 'ieee'), ('tf32', 'tf32')]
    assert torch.backends.cudnn.conv.fp32_precision == before
