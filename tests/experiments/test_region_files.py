"""vlrep regions with a detector of torchvision, small and random: the real path, stopped, killed and gone on with

The store, the sources of regions and the command's function are checked in nbs/data/57_region_store,
nbs/models/66_region_sources and nbs/experiments/72_region_files.
"""

import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from tools import both_spellings, refused
from torchvision.models import detection
from torchvision.transforms.functional import to_tensor

from vlrep.cli import main
from vlrep.data.records import open_image
from vlrep.data.region_store import RegionStore, RegionWriter
from vlrep.datasets.world.dataset import scene
from vlrep.experiments import region_files
from vlrep.models.region_sources import load_detector

MODEL = 'fasterrcnn_mobilenet_v3_large_320_fpn'


@pytest.fixture(scope='module')
def at(tmp_path_factory):
    "Three photos and a damaged one, and the weights of a detector of five classes"
    at = tmp_path_factory.mktemp('regions')
    (at / 'photos').mkdir()
    for i, wh in enumerate(((64, 48), (48, 48), (40, 60))):
        Image.fromarray(scene('train', i, size=64).image).resize(wh).save(at / 'photos' / f'{i}.png')
    (at / 'photos' / 'torn.png').write_bytes((at / 'photos' / '0.png').read_bytes()[:100])
    torch.manual_seed(0)
    net = getattr(detection, MODEL)(weights=None, weights_backbone=None, num_classes=5)
    for m in net.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.momentum = 1.0
    with torch.no_grad():
        net.backbone.train()(torch.randn(2, 3, 128, 128))  # with statistics, so that regions differ
        net.roi_heads.box_predictor.cls_score.weight.normal_(std=0.02)
    torch.save(net.state_dict(), at / 'detector.pth')
    return at


def words(at, out, *more):
    return list(
        map(
            str,
            [
                'regions',
                at / 'photos',
                '--out',
                out,
                '--model',
                MODEL,
                '--weights',
                at / 'detector.pth',
                '--max-regions',
                6,
                '--device',
                'cpu',
                *more,
            ],
        )
    )


@pytest.fixture(scope='module')
def whole(at):
    main(words(at, at / 'whole'))
    return at / 'whole'


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_stored_regions_are_those_of_the_detector(at, whole):
    "Its own box head makes the stored vector from the stored box, its classifier the stored distribution"
    store = RegionStore(whole)
    assert (list(store.ids), store.width, store.classes) == (['0.png', '1.png', '2.png'], 1024, 5)
    assert list(store.left_out) == ['torn.png'] and 'damaged' in store.left_out['torn.png']
    assert store.about['by'] == 'detector' and store.about['model'] == MODEL
    store.check()
    net, _ = load_detector(MODEL, at / 'detector.pth')
    for i in range(3):
        got = {k: v[0] for k, v in store.read([i]).items()}
        assert got['region_counts'] == 6
        with torch.no_grad():
            images, _ = net.transform([to_tensor(open_image(at / 'photos' / f'{i}.png'))])
            h, w = images.image_sizes[0]
            boxes = got['region_boxes'] * torch.tensor([w, h, w, h])
            feats = net.roi_heads.box_head(net.roi_heads.box_roi_pool(net.backbone(images.tensors), [boxes], [(h, w)]))
            probs = net.roi_heads.box_predictor(feats)[0].softmax(1)
        assert torch.allclose(feats, got['region_feats'], atol=1e-3)
        assert torch.allclose(probs, got['region_probs'], atol=1e-3)
        sure = got['region_probs'][:, 1:].amax(1)
        assert (sure.diff() <= 0).all() and sure[0] > sure[-1] and got['region_feats'].std(0).max() > 0.01


def test_damaged_photos_are_left_out_and_named(at, whole, capsys):
    "Once more with the same words: nothing is computed, and the damaged photo is named again"
    main(words(at, whole))
    out = capsys.readouterr().out
    assert 'nothing to do' in out and '1 photos could not be read' in out and 'torn.png' in out


def test_a_job_interrupted_at_the_shell_goes_on_to_the_same_bytes(at, whole, tmp_path, capsys, monkeypatch):
    "Ctrl-C at the third photo: one line, code 130, no store; the same words again finish, with the same bytes"
    opened = []

    def stopped(path):
        opened.append(path)
        if len(opened) == 3:
            raise KeyboardInterrupt
        return open_image(path)

    monkeypatch.setattr(region_files, 'open_image', stopped)
    assert 'the same command continues where it stopped' in refused(capsys, *words(at, tmp_path / 'out'), code=130)
    assert not (tmp_path / 'out').exists()
    assert 'other settings' in refused(capsys, *words(at, tmp_path / 'out', '--half'))
    main(words(at, tmp_path / 'out'))
    assert '2 of 4 photos are there' in capsys.readouterr().out and len(opened) == 5
    assert contents(tmp_path / 'out') == contents(whole)


def test_a_killed_job_goes_on_from_its_journal(at, whole, tmp_path, capsys, monkeypatch):
    "A process that is killed writes nothing more; what its journal has is kept, what lies beyond it is dropped"
    pid = os.fork()
    if not pid:

        def killed(self, entry, log=RegionWriter._commit):
            log(self)
            self.cols['features'].add(b'half a row')
            self.cols['features'].sync()
            os.kill(os.getpid(), signal.SIGKILL)

        RegionWriter.leave_out = lambda self, image, why: killed(self, image)  # the fourth photo
        try:
            main(words(at, tmp_path / 'out'))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / 'out').exists() and (tmp_path / '.out.partial' / 'journal').exists()
    main(words(at, tmp_path / 'out'))
    assert '3 of 4 photos are there' in capsys.readouterr().out
    assert contents(tmp_path / 'out') == contents(whole)


def test_cells_of_a_run_or_a_backbone_need_no_detector(at, tmp_path, capsys):
    from vlrep.models.backbones import make_backbone

    torch.save(make_backbone(18, 64, 0).state_dict(), tmp_path / 'r18.pth')
    main(
        [
            'regions',
            str(at / 'photos'),
            '--out',
            str(tmp_path / 'cells'),
            '--by',
            'grid',
            '--backbone',
            'resnet18',
            '--size',
            '64',
            '--weights',
            str(tmp_path / 'r18.pth'),
            '--half',
            '--device',
            'cpu',
        ]
    )
    got = RegionStore(tmp_path / 'cells').read([0, 2])
    assert got['region_counts'].tolist() == [4, 4] and got['region_feats'].shape == (2, 4, 512)
    assert np.isfinite(got['region_feats'].numpy()).all() and 'region_probs' not in got


def test_wrong_words_and_files_are_refused_in_one_line(at, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))  # where nothing was downloaded
    offline = refused(capsys, 'regions', at / 'photos', '--out', tmp_path / 'a', '--model', MODEL, '--device', 'cpu')
    assert 'cannot be downloaded' in offline and 'give a file' in offline
    assert 'choose a new folder' in refused(capsys, *words(at, whole, '--max-regions', 3))
    assert '--size: has no meaning' in refused(capsys, *words(at, tmp_path / 'a', '--size', 3))
    assert 'contains something other' in refused(capsys, *words(at, at / 'photos'))
    (tmp_path / 'run').mkdir()
    assert 'run' in refused(capsys, 'regions', at / 'photos', '--out', tmp_path / 'a', '--by', tmp_path / 'run')
    assert not (tmp_path / 'a').exists()


def test_both_spellings_of_the_command_write_the_same_store(tmp_path):
    for done in both_spellings('regions', ['nowhere'], [tmp_path] * 2):
        assert done.returncode == 2 and 'nowhere: no such folder' in done.stderr, done.stderr
        assert done.stderr.count('\n') == 1, done.stderr
