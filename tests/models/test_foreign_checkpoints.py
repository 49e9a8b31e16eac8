"""Checkpoints of other people's programs: the network is found, nothing runs, nothing unpacks to more than the file

Every reader of foreign weights: ResNets, networks of timm and torchvision, VirTex, BERT, detectors.
"""

import argparse
import collections
import copy
import functools
import pickle
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from tools import needs_clear_refs, peak
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vlrep.core.weights import read_pickle
from vlrep.methods.virtex.model import CaptioningModel
from vlrep.methods.virtex.official import load_virtex, virtex_state
from vlrep.models.backbone_weights import load_backbone, read_state
from vlrep.models.backbones import make_backbone
from vlrep.models.bert_model import Bert, BertConfig
from vlrep.models.bert_weights import load_bert, save_bert
from vlrep.models.region_sources import load_detector
from vlrep.models.timm_torchvision import NamedBackbone, named_backbone
from vlrep.training.run_folder import load_weights

IMG = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope='module')
def net():
    "torchvision's ResNet-18 with statistics, so that a wrong tensor would show"
    torch.manual_seed(0)
    net = torchvision.models.resnet18()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.running_mean, 0, 0.1)
    return net.eval()


@pytest.fixture(scope='module')
def grid(net):
    net = nn.Sequential(*list(net.children())[:-2])
    return copy.deepcopy(net).to(memory_format=torch.channels_last)(IMG).detach()  # as ours is held


@pytest.fixture
def no_random_weights(monkeypatch):
    "Networks are made with zeros: drawing weights that a file replaces is most of the time of a test"
    monkeypatch.setattr(nn.Conv2d, 'reset_parameters', lambda self: nn.init.zeros_(self.weight))
    monkeypatch.setattr(nn.init, 'kaiming_normal_', lambda weight, **kw: weight)


def parity(source, grid):
    "What is logged; the opened network computes what the original does"
    lines = []
    torch.testing.assert_close(load_backbone(source, lines.append)(IMG), grid)
    return ' '.join(lines)


# ---------------------------------------------------------------- as libraries write them


class Lightly(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.backbone = nn.Sequential(*list(net.children())[:-1])
        self.projection_head = nn.Linear(512, 8)


class Other(nn.Module):
    "A network, twice: what is learned from, and another one"

    def __init__(self, **parts):
        super().__init__()
        for k, m in parts.items():
            setattr(self, k, m)


def shifted(net):
    return {k: v + 1 if v.is_floating_point() else v for k, v in net.state_dict().items()}


def other_net(net):
    other = torchvision.models.resnet18()
    other.load_state_dict(shifted(net))
    return other


WRITTEN = {
    'torch.compile': lambda net: torch.compile(net).state_dict(),
    'DataParallel': lambda net: nn.DataParallel(net).state_dict(),
    'DataParallel of torch.compile': lambda net: nn.DataParallel(torch.compile(net)).state_dict(),
    'AveragedModel': lambda net: AveragedModel(net).state_dict(),
    'timm': lambda net: timm.create_model('resnet18', pretrained=False).state_dict() | net.state_dict(),
    'lightly': lambda net: dict(state_dict=Lightly(net).state_dict(), hyper_parameters={}),
    'DINO': lambda net: dict(
        student=Other(module=other_net(net)).state_dict(),
        teacher=Other(backbone=net, head=nn.Linear(2, 2)).state_dict(),
        epoch=3,
    ),
    'BYOL': lambda net: Other(online=net, target_network=other_net(net)).state_dict(),
    'MoCo v3': lambda net: dict(state_dict=Other(base_encoder=net, momentum_encoder=other_net(net)).state_dict()),
    'EMA of timm': lambda net: dict(state_dict=shifted(net), state_dict_ema=net.state_dict()),
    'SwAV': lambda net: (
        net.state_dict() | {'projection_head.0.weight': torch.ones(3, 3), 'prototypes.weight': torch.ones(3, 3)}
    ),
    'VISSL': lambda net: dict(
        classy_state_dict=dict(
            base_model=dict(
                model=dict(trunk={f'_feature_blocks.{k}': v for k, v in net.state_dict().items()}, heads={})
            )
        )
    ),
    'training script': lambda net: dict(
        model=net.state_dict(),
        args=argparse.Namespace(lr=0.1, path=Path('x'), f=functools.partial(np.mean, axis=0)),
        optimizer=torch.optim.SGD(net.parameters(), 0.1).state_dict(),
        best=np.float64(0.5),
        epoch=1,
        metrics=collections.defaultdict(list, loss=[1.0]),
    ),
    'own class': lambda net: dict(net=net.state_dict(), options=Config(a=1, b=dict(c=2)), more=collections.deque([1])),
}


class Config(dict):
    "As Lightning's AttributeDict, yacs' CfgNode: a dict with attributes"

    def __init__(self, **kw):
        super().__init__(**kw)
        self.frozen = True


@pytest.mark.parametrize('legacy', [False, True])
@pytest.mark.parametrize('by', WRITTEN)
def test_weights_are_read_as_libraries_write_them(by, legacy, net, grid, no_random_weights, tmp_path):
    "The same features as the original's, from both formats of PyTorch's files; what is left out is listed"
    torch.save(WRITTEN[by](net), tmp_path / 'w.pth', _use_new_zipfile_serialization=not legacy)
    text = parity(tmp_path / 'w.pth', grid)
    assert 'fc.* (2)' in text or by == 'lightly', text
    expected = dict(DINO='teacher.backbone.*; not used are', BYOL='online.*; not used are', SwAV='prototypes.* (1)')
    assert expected.get(by, '') in text


@pytest.mark.parametrize('seed', range(30))
def test_a_network_is_found_under_any_keys_and_prefixes(seed, tmp_path):
    net = make_backbone(10, 8).eval()
    draw = random.Random(seed)
    grid = net(IMG).detach()
    keys = 'state_dict model model_state_dict net network weights backbone student ema model_ema averaged'.split()
    dots = (
        'module. _orig_mod. backbone. base_encoder. encoder_q. encoder. student. teacher. visual. model. '
        'momentum_encoder. trunk. resnet.'
    ).split()
    prefix = ''.join(draw.choices(dots, k=draw.randrange(4)))
    state = {prefix + k: v for k, v in net.state_dict().items()} | {
        'queue': torch.ones(2),
        'n_averaged': torch.tensor(1),
    }
    for _ in range(draw.randrange(4)):
        state = {draw.choice(keys): state, 'epoch': 1, 'optimizer': {'state': {0: {}}}}
    torch.save(state, tmp_path / 'w.pth')
    text = parity(tmp_path / 'w.pth', grid)
    assert 'queue' in text and 'n_averaged' in text and (not prefix or prefix + '*' in text)
    at = state
    while isinstance(next(iter(at.values())), dict):
        at = next(iter(at.values()))
    del at[prefix + 'layer3.0.conv1.weight']
    with pytest.raises(ValueError, match='missing: layer3.0.conv1.weight'):
        load_backbone(state)


def test_two_networks_that_nothing_tells_apart_are_refused(net):
    both = Other(rgb=net, depth=other_net(net)).state_dict()
    with pytest.raises(ValueError, match=r'several networks, rgb\.\* and depth\.\*'):
        load_backbone(both)
    load_backbone(Other(model=net, alias=net).state_dict(), None)  # one and the same


def test_the_log_says_what_was_found_and_left_out(net, tmp_path):
    "What the commands use says it, too"
    torch.save(dict(state_dict=nn.DataParallel(net).state_dict()), tmp_path / 'w.pth')
    lines = []
    named_backbone('resnet18', weights=tmp_path / 'w.pth', log=lines.append)
    assert lines == [
        f'{tmp_path / "w.pth"}: the network is state_dict.module.*; not used are state_dict.module.fc.* (2)'
    ]


# ---------------------------------------------------------------- other readers than that of ResNets


def small_detector():
    return torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3
    )


def open_timm(path):
    net = NamedBackbone('timm/mobilenetv3_small_050')
    net.load(path)
    return net.net


def open_bert(path):
    "A folder with these weights"
    folder = path.parent / 'bert'
    save_bert(BERT(), folder)
    (folder / 'model.safetensors').unlink()
    path.rename(folder / 'pytorch_model.bin')
    return load_bert(folder, log=None)


def BERT():
    return Bert(BertConfig(20, 32, 1, 1, max_len=16), 3)


def bert_weights(folder):
    save_bert(BERT(), folder)
    return read_state(folder / 'model.safetensors')


READERS = dict(
    timm=(lambda d: timm.create_model('mobilenetv3_small_050', pretrained=False).state_dict(), open_timm),
    virtex=(
        lambda d: virtex_state(CaptioningModel(make_backbone(10, 8), 30, width=64, depth=1, heads=1)),
        lambda p: load_virtex(p, log=None),
    ),
    bert=(lambda d: bert_weights(d / 'first'), open_bert),
    detector=(
        lambda d: small_detector().state_dict(),
        lambda p: load_detector('fasterrcnn_mobilenet_v3_large_320_fpn', p)[0],
    ),
    resnet=(lambda d: make_backbone(10, 8).state_dict(), lambda p: load_backbone(p, None)),
)

WRAPPED = {
    'as it is': lambda s: s,
    'model': lambda s: dict(model=s, epoch=1),
    'module': lambda s: {f'module.{k}': v for k, v in s.items()},
    'script': lambda s: dict(
        state_dict={f'_orig_mod.module.{k}': v for k, v in s.items()}, args=argparse.Namespace(a=1)
    ),
}


@pytest.mark.parametrize('how', WRAPPED)
@pytest.mark.parametrize('reader', READERS)
def test_every_reader_finds_its_network(reader, how, tmp_path):
    made, opened = READERS[reader]
    state = made(tmp_path)
    torch.save(WRAPPED[how](state), tmp_path / 'w.pth')
    got = opened(tmp_path / 'w.pth').state_dict()
    same = [k for k, v in got.items() if any(v.shape == w.shape and torch.equal(v, w) for w in state.values())]
    assert len(same) > 0.7 * len(got)


# ---------------------------------------------------------------- bombs and hostile files


def zipped(path, entries, how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, 'w', how) as z:
        for name, data in entries.items():
            z.writestr(f'w/{name}', data)


def deflated(path):
    "A file of PyTorch, packed again with compression: 40 MB of zeros"
    torch.save(dict(a=torch.zeros(10**7)), path)
    with zipfile.ZipFile(path) as z:
        entries = {n.split('/', 1)[1]: z.read(n) for n in z.namelist()}
    zipped(path, entries, zipfile.ZIP_DEFLATED)


def called(path, module, name, args):
    "A pickle that calls something"

    class Call:
        def __reduce__(self):
            return Called, args

    data = pickle.dumps(dict(a=Call()), protocol=2).replace(
        f'c{__name__}\nCalled\n'.encode(), f'c{module}\n{name}\n'.encode()
    )
    zipped(path, {'data.pkl': data, 'version': b'3\n', 'byteorder': b'little'})


class Called:
    def __init__(self, *args):
        pass


def rebuilt(path, module, name, *args):
    return lambda p: called(p, module, name, args)


BOMBS = dict(
    deflated=deflated,
    bytearray=lambda p: called(p, 'builtins', 'bytearray', (2**31 - 1,)),
    old_bytearray=lambda p: called(p, '__builtin__', 'bytearray', (2**31 - 1,)),
    storage=lambda p: called(p, 'torch', 'FloatTensor', (10**9,)),
    expanded=lambda p: torch.save(
        {
            k: torch.zeros(1).expand(10**6, 3, 7, 7) if k == 'conv1.weight' else v
            for k, v in make_backbone(10, 8).state_dict().items()
        },
        p,
    ),
)

HOSTILE = {
    f'{m}.{n}': (m, n, a)
    for m, n, a in (
        ('os', 'system', ('touch RAN',)),
        ('posix', 'system', ('touch RAN',)),
        ('builtins', 'eval', ('1',)),
        ('builtins', 'exec', ('1',)),
        ('__builtin__', 'eval', ('1',)),
        ('subprocess', 'Popen', (['touch', 'RAN'],)),
        ('builtins', 'open', ('RAN', 'w')),
        ('importlib', 'import_module', ('this',)),
        ('shutil', 'rmtree', ('RAN',)),
    )
}

OPENERS = dict(
    backbone=lambda p: load_backbone(p, None),
    virtex=lambda p: load_virtex(p, log=None),
    detector=lambda p: load_detector('fasterrcnn_mobilenet_v3_large_320_fpn', p),
    timm=open_timm,
    bert=open_bert,
    pickle=read_pickle,
)


@needs_clear_refs
@pytest.mark.parametrize('bomb', BOMBS)
def test_files_that_unpack_to_more_than_they_are_are_refused(bomb, tmp_path):
    "Refused by every reader with the name of the file, before the memory is taken"
    for name, opened in OPENERS.items():
        if bomb in ('expanded', 'storage') and name in ('state', 'pickle'):
            continue  # made, and never filled
        BOMBS[bomb](tmp_path / 'w.pth')
        torch.save(dict(few=torch.zeros(3)), tmp_path / 'small.pth')
        grown, text = peak(lambda: opened(tmp_path / 'w.pth'), lambda: opened(tmp_path / 'small.pth'))
        assert text.startswith('ValueError: ') and grown < 40e6, (name, grown, text)
        assert 'w.pth' in text or 'pytorch_model.bin' in text, text


@pytest.mark.parametrize('what', HOSTILE)
def test_hostile_pickles_are_refused_and_nothing_runs(what, tmp_path, monkeypatch):
    "Refused by every reader with the name of what they ask for; nothing ran"
    monkeypatch.chdir(tmp_path)
    for opened in OPENERS.values():
        called(tmp_path / 'w.pth', *HOSTILE[what])
        with pytest.raises(ValueError) as e:
            opened(tmp_path / 'w.pth')
        assert what.replace('__builtin__', 'builtins') in str(e.value) and 'contains more than data' in str(e.value)
    assert not (tmp_path / 'RAN').exists() and 'this' not in __import__('sys').modules


def test_damaged_is_told_from_more_than_data(net, tmp_path):
    torch.save(net.state_dict(), tmp_path / 'w.pth')
    whole = (tmp_path / 'w.pth').read_bytes()
    draw = random.Random(0)
    for n in (1, 3, 100, len(whole) // 2, len(whole) - 10):
        (tmp_path / 'cut.pth').write_bytes(whole[:n])
        with pytest.raises(ValueError, match='damaged'):
            read_state(tmp_path / 'cut.pth')
    for n in (0, 4, 500):
        (tmp_path / 'noise.pth').write_bytes(draw.randbytes(n))
        with pytest.raises(ValueError, match='noise.pth: cannot be read, damaged'):
            read_state(tmp_path / 'noise.pth')


FOREIGN = {'net.onnx': 'ONNX', 'model.ckpt.index': 'TensorFlow', 'm.h5': 'Keras', 'f.msgpack': 'Flax', 'a.npy': 'NumPy'}


@pytest.mark.parametrize('name', FOREIGN)
def test_files_of_other_libraries_are_refused_by_name(name, tmp_path):
    (tmp_path / name).write_bytes(b'\x08\x07\x12\x04' * 10)
    with pytest.raises(ValueError, match=f'a file of {FOREIGN[name]}; .*torch.save.model.state_dict'):
        read_state(tmp_path / name)


def test_safetensors_headers_that_claim_more_than_the_file_are_refused(net, tmp_path):
    "Sizes and shapes that the file does not have, in both readers"
    save_file({'a': torch.zeros(4)}, tmp_path / 'w.safetensors')
    whole = (tmp_path / 'w.safetensors').read_bytes()
    (n,) = struct.unpack('<Q', whole[:8])

    def header(text):
        return struct.pack('<Q', len(text)) + text.encode() + whole[8 + n :]

    entry = '{"a":{"dtype":"F32","shape":%s,"data_offsets":%s}}'
    for data in (
        struct.pack('<Q', 2**62) + whole[8:],
        header(entry % ('[1000000000]', '[0,4000000000]')),
        header(entry % ('[1000000000]', '[0,16]')),
        header(entry % ('[4]', '[0,-16]')),
        header('{' * 10**5),
        header(entry % ('[18446744073709551615,2]', '[0,16]')),
        whole[:-1],
        whole[:4],
        b'',
    ):
        (tmp_path / 'w.safetensors').write_bytes(data)
        for opened in (read_state, load_weights):
            with pytest.raises(ValueError, match='w.safetensors'):
                opened(tmp_path / 'w.safetensors')
