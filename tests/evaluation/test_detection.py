"""Detection and segmentation as downstream tasks: whole runs from every layout, stops, several processes, damage"""

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import codes, run_ranks
from run_folders import TINY, untrained
from tools import quiet, refused

import vlrep
from vlrep.cli import main
from vlrep.datasets.detection.coco import write_coco_detection
from vlrep.datasets.detection.detection_set import instance_mask
from vlrep.datasets.detection.voc import write_voc_detection
from vlrep.datasets.world.dataset import scene
from vlrep.datasets.world.task_options import WorldDetectionOptions
from vlrep.evaluation.detection.images import DetectionImages, ObjectCollator
from vlrep.evaluation.detection.model import build_detector, unpacked_masks
from vlrep.evaluation.detection.plan import PLANS
from vlrep.evaluation.detection.results import _result_rows
from vlrep.evaluation.detection.world import world_detection
from vlrep.experiments.finetune import finetune
from vlrep.experiments.pretrain import resume_run
from vlrep.experiments.spec import Runtime, finetune_spec
from vlrep.studies.plan import read_study, task_plan
from vlrep.studies.runs import recorded_tasks
from vlrep.studies.tasks import task_line
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import open_run_folder

SIZES = ['scenes=12', 'valid=4', 'test=5', 'size=64']
PLAN = ['steps=6', 'bs=4', 'every=3', 'warmup=2', 'drops=5', 'sides=48,64', 'side=64', 'precise_bn=2', 'threshold=0']


@pytest.fixture(scope='module')
def body(tmp_path_factory):
    "A run of VirTex that has learned nothing"
    return untrained(tmp_path_factory.mktemp('runs') / 'virtex', 'virtex', **TINY)


@pytest.fixture(scope='module')
def detector(body, tmp_path_factory):
    "The same, fine-tuned to detect, and stopped by nothing"
    out = tmp_path_factory.mktemp('runs') / 'detector'
    return finetune(finetune_spec(body, 'detection', [*PLAN, *SIZES]), out=out, log=quiet)


def test_a_detector_leaves_a_run_folder(detector):
    run = open_run_folder(detector)
    (line,) = run.results()
    rows = {r['question']: r for r in line['numbers']['table']}
    assert rows['detection test, AP50']['n'] == 5
    assert all(0 <= r['low'] <= r['value'] <= r['high'] <= 100 for r in rows.values())
    assert {q.split(',')[0] for q in rows} == {'detection valid', 'detection test'}
    found = json.loads((run / 'predictions-test.json').read_text())
    assert found and found[0].keys() == {'image_id', 'category_id', 'bbox', 'score'}
    assert (run / 'report.html').read_text().count('<img') >= 5


def test_an_opened_detector_finds_what_its_file_says(detector):
    "In an image of the test set, at any size of the caller's image"
    model = vlrep.load(detector)
    data = world_detection('test', WorldDetectionOptions(12, 4, 5, 64))
    found = json.loads((detector / 'predictions-test.json').read_text())
    for image in data.images[:2]:
        own = [f for f in found if f['image_id'] == image['id']]
        got = model.detect(data.load(image))
        assert [label for label, *_ in got] == [data.class_names[data.labels[f['category_id']] - 1] for f in own]
        np.testing.assert_allclose([s for _, s, _ in got], [f['score'] for f in own], atol=1e-4)
        corners = [[x, y, x + w, y + h] for x, y, w, h in (f['bbox'] for f in own)]
        np.testing.assert_allclose([box for *_, box in got], corners, atol=2e-2)
    assert [len(x) for x in model.detect([data.load(r) for r in data.images[:2]])] == [
        len(model.detect(data.load(r))) for r in data.images[:2]
    ]


def test_an_exported_detector_opens_without_vlrep(detector, tmp_path, capsys):
    "Pasted as printed, in a Python that cannot import this library, the lines find what the run finds"
    Image.fromarray(scene('test', 3, size=64).image).save(tmp_path / 'photo.png')
    main(['export', str(detector), '--to', 'torchscript', '--out', str(tmp_path / 'net')])
    text = capsys.readouterr().out.replace('photo.jpg', str(tmp_path / 'photo.png'))
    alone = f'import sys; sys.modules["vlrep"] = None\n{text}'
    got = subprocess.run([sys.executable, '-W', 'ignore', '-c', alone], capture_output=True, text=True, check=True)
    ours = vlrep.load(detector).detect(tmp_path / 'photo.png')
    assert len(ours) > 3 and ast.literal_eval(got.stdout) == [(name, pytest.approx(s, abs=1e-4)) for name, s, _ in ours]


def test_what_is_no_detector_cannot_be_exported_as_one(body, tmp_path, capsys):
    text = refused(capsys, 'export', body, '--to', 'torchscript', '--out', tmp_path / 'net')
    assert 'is not a detector' in text and not (tmp_path / 'net').exists()


def test_every_layer_of_the_backbone_learns(detector, body):
    was = {k: v for k, v in open_run_folder(body).weights('best').items() if k.startswith('visual.')}
    now = open_run_folder(detector).weights('best')
    convolutions = [k for k, v in was.items() if v.ndim == 4]
    assert len(convolutions) > 8
    assert [k for k in convolutions if torch.equal(was[k], now[f'net.backbone.{k}'])] == []


@pytest.mark.parametrize('model', ['fpn', 'c4'])
def test_a_stopped_and_resumed_detector_has_the_same_bits(body, tmp_path, model):
    changes = [*PLAN, *SIZES, f'model={model}']
    whole = finetune(finetune_spec(body, 'segmentation', changes), out=tmp_path / 'whole', log=quiet)

    def stop(line):
        if line.startswith('step 3,'):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingInterrupted):
        finetune(finetune_spec(body, 'segmentation', changes), out=tmp_path / 'stopped', log=stop)
    resume_run(tmp_path / 'stopped', log=quiet)
    for which in ('last', 'best'):
        a, b = (open_run_folder(tmp_path / name).weights(which) for name in ('whole', 'stopped'))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    tables = [open_run_folder(tmp_path / name).results()[0]['numbers']['table'] for name in ('whole', 'stopped')]
    assert tables[0] == tables[1] and any(', box ' in r['question'] for r in tables[0])
    assert (whole / 'predictions-test.json').read_text() == (tmp_path / 'stopped/predictions-test.json').read_text()


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    "The world in the layouts of COCO, LVIS and VOC"
    root = tmp_path_factory.mktemp('folders')
    sizes = WorldDetectionOptions(8, 4, 4, 64)
    for split, coco, voc in (('train', 'train2017', 'trainval'), ('test', 'val2017', 'test')):
        data = world_detection(split, sizes)
        write_coco_detection(data, root / 'coco', coco)
        for year in ('VOC2007', 'VOC2012') if voc == 'trainval' else ('VOC2007',):
            names = {r['id']: f'{year[-2:]}{r["file_name"].replace("/", "_")}' for r in data.images}
            renamed = replace(
                data, images=[dict(r, file_name=names[r['id']]) for r in data.images], draw=_Renamed(data)
            )
            write_voc_detection(renamed, root / 'voc', f'{year}/{voc}')
        tables = json.loads((root / f'coco/annotations/instances_{coco}.json').read_text())
        for r in tables['images']:
            r |= dict(neg_category_ids=[], not_exhaustive_category_ids=[])
            r['file_name'] = f'{coco}/{r["file_name"]}'
        for c, frequency in zip(tables['categories'], 'rcf' * 100):
            c['frequency'] = frequency
        (root / f'coco/lvis_v1_{"train" if split == "train" else "val"}.json').write_text(json.dumps(tables))
    return root


class _Renamed:
    "Draws the images of a set whose files have other names"

    def __init__(self, data):
        self.data = data
        self.of = {r['id']: r for r in data.images}

    def __call__(self, row):
        return self.data.load(self.of[row['id']])


@pytest.mark.parametrize(
    'task, data, metrics',
    [
        ('detection', 'voc', {'AP', 'AP50', 'AP75'}),
        ('detection', 'coco', {'AP', 'AP50', 'AP75'}),
        ('segmentation', 'coco', {'AP', 'AP50', 'AP75'}),
        ('segmentation', 'lvis_v1', {'AP', 'APr', 'APc', 'APf'}),
    ],
)
def test_every_collection_is_trained_on_in_its_own_layout(body, folders, tmp_path, task, data, metrics):
    "With the plan of the paper, smaller"
    root = folders / ('voc' if data == 'voc' else 'coco')
    small = ['steps=2', 'bs=2', 'warmup=1', 'sides=64', 'side=64', 'proposals=20', 'regions=8', 'width=16', 'hidden=16']
    spec = finetune_spec(body, task, [*small, 'precise_bn=1', 'detections=20'], data, root=root)
    run = open_run_folder(finetune(spec, out=tmp_path / 'out', log=quiet))
    table = run.results()[0]['numbers']['table']
    assert metrics <= {r['metric'] for r in table} and {r['n'] for r in table} == {4}


def test_a_share_of_the_data_shortens_the_schedule(body):
    plan = finetune_spec(body, 'detection', ['share=.5', 'scenes=40']).plan
    base = PLANS['world']
    assert (plan.steps, plan.warmup, plan.drops) == (
        base.steps // 2,
        base.steps // 20,
        tuple(round(d / 2) for d in base.drops),
    )


def test_damaged_and_absent_images_are_counted(body, folders, tmp_path):
    write_coco_detection(world_detection('train', WorldDetectionOptions(6, 4, 4, 64)), tmp_path, 'train2017')
    write_coco_detection(world_detection('test', WorldDetectionOptions(6, 4, 4, 64)), tmp_path, 'val2017')
    photos = sorted((tmp_path / 'train2017').rglob('*.*'))
    photos[0].write_bytes(b'no photo')
    small = ['steps=4', 'bs=4', 'warmup=1', 'sides=64', 'side=64', 'proposals=20', 'width=16', 'hidden=16', 'regions=8']
    spec = finetune_spec(body, 'detection', small, 'coco', root=tmp_path)
    with pytest.raises(ValueError, match='1 of . images cannot be read, and max_corrupt=0 allows 0'):
        finetune(spec, Runtime(max_corrupt=0), out=tmp_path / 'none', log=quiet)
    finetune(spec, out=tmp_path / 'out', log=quiet)
    (photo, *_) = sorted((tmp_path / 'val2017').rglob('*.*'))
    photo.write_bytes(b'no photo')
    with pytest.raises(ValueError, match=photo.name):
        finetune(spec, out=tmp_path / 'other', log=quiet)


def test_a_backbone_that_is_no_resnet_is_refused():
    with pytest.raises(ValueError, match='four stages of a ResNet, and this backbone is Linear'):
        build_detector(torch.nn.Linear(1, 1), PLANS['world'], ['cat'])


def test_frozen_batch_norms_of_the_backbone_do_not_move(body, tmp_path):
    out = finetune(finetune_spec(body, 'detection', [*PLAN, *SIZES, 'frozen_bn=true']), out=tmp_path / 'out', log=quiet)
    was = {k: v for k, v in open_run_folder(body).weights('best').items() if k.startswith('visual.')}
    now = open_run_folder(out).weights('best')
    moved = {k for k, v in was.items() if not torch.equal(v, now[f'net.backbone.{k}'])}
    norms = {k for k in was if '.bn' in k or 'downsample.1' in k}
    assert norms and not moved & norms and moved == set(was) - norms


def test_images_larger_than_the_limit_are_made_smaller_and_their_boxes_come_back():
    "Detections are in the pixels of the file, whatever the size at which it was read"
    data = world_detection('test', WorldDetectionOptions(6, 4, 4, 96))
    side = 32
    source = DetectionImages(data, side)
    pixels, hw = source.images([0, 1])
    assert pixels.shape == (2, 3, side, side) and hw.tolist() == [[side, side]] * 2
    batch = ObjectCollator(masks=True)(source, [0], 0, 0, None)
    n = int(batch['box_counts'][0])
    masks = unpacked_masks(batch['masks'][0, :n], side, side)[:, None].float()
    found = dict(boxes=batch['boxes'][0, :n], labels=batch['box_labels'][0, :n], scores=torch.ones(n), masks=masks)
    rows = _result_rows(data, data.images[0], found, hw[0])
    truth = [a for a in data.of_image(data.images[0]) if not a['iscrowd']]
    assert len(rows) == len(truth) == n
    for row, a in zip(rows, truth):
        np.testing.assert_allclose(row['bbox'], a['bbox'], atol=1e-3)
        assert row['category_id'] == a['category_id']
        mask = instance_mask(row | dict(id=0), data.images[0])
        whole = instance_mask(a, data.images[0])
        assert mask.shape == whole.shape and (mask & whole).sum() > 0.5 * (mask | whole).sum()


@pytest.mark.parametrize('task, mode', [('detection', 'full'), ('detection', 'share_50'), ('segmentation', 'full')])
def test_detection_and_segmentation_are_questions_of_studies(body, tmp_path, task, mode):
    "Scores of the test under the draws of the study, and that of the validation scenes, which chooses a rate"
    listed = [p.replace('=48,64', '=[48, 64]').replace('drops=5', 'drops=[5]') for p in (*PLAN, *SIZES)]
    text = f"""
name = 'boxes'
seeds = [0, 1]
[data]
draws = 20
[finetune]
tasks = ['{task}', 'classification']
modes = ['full', 'share_50']
own.classification = {{epochs = 1}}
own.{task} = {{{', '.join(listed)}}}
grid = [{{lr = 0.01}}, {{lr = 0.02}}]
[[variants]]
name = 'a'
method = 'virtex'
[[variants]]
name = 'b'
method = 'clip'
[[comparisons]]
id = 'T'
text = 'any'
treatment = 'a'
control = 'b'
table = 'full'
question = '{task}'
"""
    (tmp_path / 'study.toml').write_text(text)
    study = read_study(tmp_path / 'study.toml')
    plan, _, changes = task_plan(study, task, mode, {}, draws=20)
    assert plan.steps == 6 and plan.share == (1.0 if mode == 'full' else 0.5)  # as many steps on half of the images
    folder = finetune(finetune_spec(body, task, changes), out=tmp_path / 'run', log=quiet)
    assert [*recorded_tasks(tmp_path)] == [('virtex', task, False, False, plan.share)]
    line = task_line(study, dict(folder=str(folder), source=str(body), task=task, mode=mode))
    rows = {r['question']: r for r in line['numbers'][mode]}
    boxes = {f'{task}, box {metric}' for metric in ('AP', 'AP50', 'AP75')} if task == 'segmentation' else set()
    assert set(rows) == {task, f'{task}, AP50', f'{task}, AP75'} | boxes
    assert len(rows[task]['draws']) == 20 and 'drift' not in line['numbers']
    table = open_run_folder(folder).results()[0]['numbers']['table']
    assert line['numbers']['validation'] == next(r['value'] for r in table if r['question'] == f'{task} valid')


# ---------------------------------------------------------------- several processes


@pytest.fixture(scope='module')
def ranks(body, tmp_path_factory):
    cwd = tmp_path_factory.mktemp('ranks')
    words = [str(body), '--task', 'detection', '--threads', '1', '--precision', 'fp32']
    words += [
        w for change in (*PLAN, *SIZES) for w in (f'--{change.split("=")[0].replace("_", "-")}', change.split('=')[1])
    ]
    still = [*words, '--lr', '1e-12', '--norm', 'false', '--frozen-bn', '--precise-bn', '0']  # nothing is learned
    runs = dict(
        two=dict(command='finetune', words=[[*words, '--out', str(cwd / 'two')]] * 2),
        still=dict(command='finetune', words=[[*still, '--out', str(cwd / 'still')]] * 2),
        alone=dict(command='finetune', words=[[*still, '--out', str(cwd / 'alone')]]),
    )
    return run_ranks(cwd, runs), cwd


def test_two_processes_train_one_detector(ranks):
    done, cwd = ranks
    assert codes(done['two']) == [0, 0]
    run = open_run_folder(cwd / 'two')
    assert run.results()[0]['numbers']['table'] and (run / 'report.html').is_file()


def test_two_processes_detect_what_one_does(ranks):
    "Each image once, in the same order"
    done, cwd = ranks
    assert codes(done['still']) == [0, 0] and codes(done['alone']) == [0]
    one, two = (json.loads((cwd / name / 'predictions-test.json').read_text()) for name in ('alone', 'still'))
    assert one and [r['image_id'] for r in one] == [r['image_id'] for r in two]
    np.testing.assert_allclose([r['score'] for r in one], [r['score'] for r in two], atol=1e-3)
