"Classifiers that train all of a backbone: learns, resumes, shares its work, takes a share of the labels; bad input"

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import codes, last, run_ranks
from run_folders import TINY, rows, untrained
from tools import quiet, refused, same_tensors

import vlrep
from vlrep.core.testing import check_learning
from vlrep.datasets.image_folder import write_folder
from vlrep.datasets.world.dataset import world
from vlrep.datasets.world.primitives import SETTINGS
from vlrep.datasets.world.task_options import WorldTaskOptions
from vlrep.evaluation.classification.images import read_world_classes
from vlrep.evaluation.classification.results import accuracy_rows, likeliest_classes
from vlrep.evaluation.classification.tasks import CLASSIFICATION_PLANS
from vlrep.evaluation.classification.training import build_classifier, classifier_learner, classifier_steps
from vlrep.evaluation.finetune.training import fit_task
from vlrep.experiments.finetune import finetune
from vlrep.experiments.pretrain import resume_run
from vlrep.experiments.spec import Runtime, finetune_spec, run_spec
from vlrep.models.backbones import make_backbone
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import open_run_folder

FEW = ['epochs=3', 'drops=2', 'warmup=0.5', 'bs=8', 'size=40', 'scenes=24', 'valid=10', 'test=12']


@pytest.fixture(scope='module')
def body(tmp_path_factory):
    "A run whose backbone has learned nothing"
    return untrained(tmp_path_factory.mktemp('runs') / 'virtex', 'virtex', **TINY)


@pytest.fixture(scope='module')
def tuned(body, tmp_path_factory):
    "The same, fine-tuned on a few scenes, and stopped by nothing"
    out = tmp_path_factory.mktemp('runs') / 'classes'
    return finetune(finetune_spec(body, 'classification', FEW), out=out, log=quiet)


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "Scenes as photos in a folder for each of two classes"
    root = tmp_path_factory.mktemp('photos')
    for part, split in (('train', 'train'), ('val', 'valid')):
        scenes = world(split, 16, size=48)
        write_folder(scenes, root / part, of=lambda r: 'many' if len(r.objects) > 2 else 'few')
    return root


ON_PHOTOS = ['epochs=2', 'drops=1', 'bs=8', 'size=32']


def on_photos(body, root, out, changes=(), log=quiet, **runtime):
    spec = finetune_spec(body, 'classification', [*ON_PHOTOS, *changes], root=root)
    return finetune(spec, Runtime(**runtime), out=out, log=log)


# ---------------------------------------------------------------- a whole job


def test_a_classifier_leaves_a_run_folder(tuned):
    run = open_run_folder(tuned)
    (line,) = run.results()
    numbers = line['numbers']
    table = {(r['question'], r['metric']): r for r in numbers['table']}
    assert set(table) == {
        (f'classification {s}, {m}', m) for s in ('valid', 'test') for m in ('top-1', 'top-5', 'mean per class')
    }
    assert all(r['low'] <= r['value'] <= r['high'] and 0 <= r['chance'] < 100 for r in table.values())
    assert [h[0] for h in numbers['history']] == [3, 6, 9]
    best = max(h[2] for h in numbers['history'])
    assert table['classification valid, top-1', 'top-1']['value'] == pytest.approx(100 * best, abs=1e-3)
    lines = [json.loads(l) for l in (run / 'predictions-test.jsonl').read_text().splitlines()]
    assert [l['id'] for l in lines] == [f'test-{k:06d}' for k in range(12)]
    right = np.mean([l['label'] == l['best'][0][0] for l in lines])
    top5 = np.mean([l['label'] in [c for c, _ in l['best']] for l in lines])
    assert 100 * right == pytest.approx(table['classification test, top-1', 'top-1']['value'], abs=1e-3)
    assert 100 * top5 == pytest.approx(table['classification test, top-5', 'top-5']['value'], abs=1e-3)
    page = (run / 'report.html').read_text()
    assert 'Confused classes' in page and page.count('<img') >= 5 and '3 epochs of 8 examples per step' in page


def test_all_of_the_backbone_is_trained(body, tuned):
    was = open_run_folder(body).weights('best')
    now = open_run_folder(tuned).weights('last')
    moved = [k for k in now if k.startswith('visual.') and k.endswith('weight') and not torch.equal(was[k], now[k])]
    assert len(moved) == len([k for k in now if k.startswith('visual.') and k.endswith('weight')])


def test_an_opened_run_classifies(tuned):
    scenes = world('test', 12, size=40)
    m = vlrep.load(tuned)
    got = m.classify([s.image for s in scenes])
    lines = [json.loads(l) for l in (Path(tuned) / 'predictions-test.jsonl').read_text().splitlines()]
    for pairs, line in zip(got, lines):
        assert [c for c, _ in pairs] == [c for c, _ in line['best']]
        assert [p for _, p in pairs] == pytest.approx([p for _, p in line['best']], abs=2e-3)
    assert [c for c, _ in m.classify(scenes[0].image, top=2)] == [c for c, _ in got[0][:2]]
    assert m.embed(scenes[0].image).shape == (64,)


def test_other_runs_do_not_classify(body):
    with pytest.raises(ValueError, match='was not fine-tuned on classes: vlrep finetune .* --task classification'):
        vlrep.load(body).classify(world('test', 1, size=32)[0].image)


def test_a_stopped_and_resumed_training_has_the_same_bits(tuned, body, tmp_path):
    "Stopped within an epoch, after an evaluation"

    def stop(line):
        if line.startswith('step 3:'):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingInterrupted):
        finetune(finetune_spec(body, 'classification', FEW), out=tmp_path / 'out', log=stop)
    assert open_run_folder(tmp_path / 'out').saved()[-1] == 4
    lines = []
    out = resume_run(tmp_path / 'out', log=lines.append)
    assert 'resuming from step 4' in lines
    for which in ('last', 'best'):
        assert same_tensors(open_run_folder(tuned).weights(which), open_run_folder(out).weights(which))
    a, b = (open_run_folder(r).results()[0]['numbers'] for r in (tuned, out))
    assert a['table'] == b['table'] and a['history'] == b['history'] and rows(tuned) == rows(out)


def test_the_trained_backbone_begins_another_run(tuned):
    "As the IN-sup rows of the papers: trained on classes, then the backbone of something else"
    spec = run_spec('rotnet', weights_file=tuned)
    assert spec.weights_file.endswith('model.safetensors') and spec.recipe.visual_width == TINY['visual_width']


# ---------------------------------------------------------------- photos


def test_of_photos_the_last_checkpoint_is_evaluated(body, photos, tmp_path):
    "The validation photos are what is reported, so they choose nothing"
    lines = []
    run = open_run_folder(on_photos(body, photos, tmp_path / 'out', log=lines.append))
    (line,) = run.results()
    assert line['numbers']['best_step'] == 4 and not any('best so far' in l for l in lines)
    table = line['numbers']['table']
    assert [r['metric'] for r in table] == ['top-1', 'mean per class'] and table[0]['n'] == 16  # two classes: no top-5
    assert json.loads((run / 'labels.json').read_text()) == ['few', 'many']
    assert same_tensors(run.weights('best'), run.weights('last'))


def test_unreadable_photos_are_left_out_of_validation_and_replaced_in_training(body, photos, tmp_path):
    root = tmp_path / 'photos'
    root.mkdir()
    for path in photos.rglob('*.jpg'):
        (root / path.relative_to(photos)).parent.mkdir(parents=True, exist_ok=True)
        (root / path.relative_to(photos)).write_bytes(path.read_bytes())
    bad = [sorted((root / part).rglob('*.jpg'))[3] for part in ('train', 'val')]
    for path in bad:
        path.write_bytes(b'no photo')
    lines = []
    run = open_run_folder(on_photos(body, root, tmp_path / 'out', log=lines.append))
    assert run.results()[0]['numbers']['table'][0]['n'] == 15
    assert any(l.startswith('left out: ') and bad[1].name in l for l in lines)
    with pytest.raises(ValueError, match=f'1 of 16 images cannot be read, .*{bad[1].name}'):
        on_photos(body, root, tmp_path / 'none', max_corrupt=0)
    bad[1].unlink()
    with pytest.raises(ValueError, match=f'1 of 16 images cannot be read.*{bad[0].name}'):
        on_photos(body, root, tmp_path / 'stopped', max_corrupt=0)  # it can go on with another limit
    (root / 'train' / 'dawn').mkdir()
    with pytest.raises(ValueError, match='dawn: no images'):
        on_photos(body, root, tmp_path / 'none')
    assert not (tmp_path / 'none').exists()


def test_a_single_class_is_refused(body, tmp_path):
    for part in ('train', 'val'):
        write_folder(world('train', 4, size=32), tmp_path / 'photos' / part, of=lambda r: 'scene')
    with pytest.raises(ValueError, match="'scene'.*at least two are needed"):
        on_photos(body, tmp_path / 'photos', tmp_path / 'out')


# ---------------------------------------------------------------- shares of the labels


def test_shares_are_nested_and_of_each_class():
    options = WorldTaskOptions(scenes=300)
    plan = replace(CLASSIFICATION_PLANS['world'], size=32)
    parts = [read_world_classes('train', replace(plan, share=s), options=options) for s in (0.01, 0.1, 0.2, 0.5, 1)]
    for small, large in zip(parts, parts[1:]):
        assert set(small.ids) < set(large.ids)
    counts = [np.bincount(p.labels['label'], minlength=24) for p in parts]
    for share, n in zip((0.01, 0.1, 0.2, 0.5), counts):
        wanted = np.maximum(1, [round(share * k) for k in counts[-1].tolist()])
        assert (n == np.where(counts[-1] > 0, wanted, 0)).all()
    other = read_world_classes('train', replace(plan, share=0.1, share_seed=1), options=options)
    assert len(other) == len(parts[1]) and set(other.ids) != set(parts[1].ids)


def test_a_share_has_as_many_epochs_and_fewer_steps(body, tmp_path):
    lines = []
    spec = finetune_spec(body, 'classification', [*FEW, 'share=0.5', 'share_seed=3'])
    run = open_run_folder(finetune(spec, out=tmp_path / 'out', log=lines.append))
    n = len(read_world_classes('train', spec.plan, options=spec.options))
    assert 12 <= n < 24 and any(f'{3 * -(-n // 8)} steps of 8' in l for l in lines)
    assert run.results()[0]['numbers']['history'][-1][0] == 3 * -(-n // 8)
    assert run.info['finetune']['plan']['share_seed'] == 3


# ---------------------------------------------------------------- learning


def trained(net, splits, plan, seed=0, precision='fp32'):
    "Accuracy on the test scenes in percent, and chance"
    labels = splits['train'].class_names
    model = build_classifier(net, plan, labels, seed)
    fit_task(
        classifier_learner(model, splits, plan, seed=seed, precision=precision, log=quiet),
        classifier_steps(plan, splits['train']),
    )
    best, _ = likeliest_classes(model, splits['test'], plan)
    right, seen = (splits[s].labels['label'] for s in ('test', 'train'))
    row = accuracy_rows(best, right, seen)[0]
    return row['value'], row['chance']


def places(split, n):
    "Scenes with the place that they show as their class: easier to learn than the largest thing"
    scenes = world(split, n, size=32)
    return scenes.annotate(dict(label=scenes.labels['setting']), dict(label=list(SETTINGS)))


def learns(seed=0, precision='fp32'):
    "From random weights, four epochs of a few hundred scenes are enough to know most places"
    plan = replace(CLASSIFICATION_PLANS['world'], epochs=4, drops=(3,), size=32, resize=32, bs=32)
    splits = dict(train=places('train', 500), valid=places('valid', 50), test=places('test', 400))
    value, chance = trained(make_backbone(10, 8, seed=seed), splits, plan, seed, precision)
    check_learning('classification: top-1 above chance', value - chance, 15)


def test_a_classifier_learns():
    learns()


# ---------------------------------------------------------------- bad input


def test_a_frozen_body_is_pointed_to_the_probes(body, tmp_path, capsys):
    err = refused(capsys, 'finetune', body, '--task', 'classification', '--frozen', '--out', tmp_path / 'out')
    assert 'vlrep evaluate RUN --on folder --probe' in err and not (tmp_path / 'out').exists()


def test_a_run_without_a_backbone_is_refused(tmp_path):
    run = untrained(tmp_path / 'vilbert', 'vilbert', region_model='given', mim='off', **TINY)
    with pytest.raises(ValueError, match='vilbert has no backbone, which --task classification needs'):
        finetune(finetune_spec(run, 'classification', FEW), out=tmp_path / 'out', log=quiet)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'words, what',
    [
        (('--plan', 'supervized'), "did you mean 'supervised'"),
        (('--plan', 'paper'), '--plan of --task classification'),
        (('--share', '0'), 'share=0.0: must be above 0 to 1'),
        (('--drops', '2,11'), 'epochs between 0 and epochs=10'),
        (('--data', 'imagenet'), '--root is missing: the folder that holds train/ and val/ of ImageNet'),
    ],
)
def test_options_that_are_wrong_are_named(body, capsys, words, what):
    assert what in refused(capsys, 'finetune', body, '--task', 'classification', *words)


# ---------------------------------------------------------------- several processes

PLAN = dict(epochs=3, drops=2, bs=8, size=32, scenes=19, valid=41, test=6, sync_bn=None, jitter=0.2)
WORDS = ['--task', 'classification', '--threads', '1', '--precision', 'fp32', '--save-every', '1']
WORDS += [w for k, v in PLAN.items() for w in ([f'--{k.replace("_", "-")}'] if v is None else [f'--{k}', str(v)])]


@pytest.fixture(scope='module')
def done(body, tmp_path_factory):
    "What became of each run of `forked_ranks.py`, and the folder of all of them"
    cwd = tmp_path_factory.mktemp('ranks')

    def new(name, n, **more):
        return dict(command='finetune', words=[[str(body), *WORDS, '--out', str(cwd / name)]] * n, **more)

    runs = dict(
        one=new('one', 1),
        two=new('two', 2),
        stopped=new('run', 2, kill=[f'{cwd}/run/steps/*', 2, signal.SIGTERM, [1]]),
        resumed=dict(command='resume', words=[[str(cwd / 'run')]] * 2),
    )
    return run_ranks(cwd, runs), cwd


def test_two_processes_equal_one(done):
    got, cwd = done
    assert codes(got['one']) == [0] and codes(got['two']) == [0, 0], last(got['two'][0])
    one, two = (open_run_folder(cwd / name) for name in ('one', 'two'))
    for a, b in zip(one.results()[0]['numbers']['history'], two.results()[0]['numbers']['history'], strict=True):
        assert b == pytest.approx(a, rel=1e-3)
    assert min(h[2] for h in one.results()[0]['numbers']['history']) > 0  # what is 0 shows no lost part
    a, b = (run.weights('last') for run in (one, two))
    assert a.keys() == b.keys() and max(float((a[k].float() - b[k].float()).abs().max()) for k in a) < 2e-3
    assert [r['train_loss'] for r in rows(cwd / 'one')] == pytest.approx(
        [r['train_loss'] for r in rows(cwd / 'two')], rel=1e-3
    )
    a, b = ((cwd / n / 'predictions-test.jsonl').read_text().splitlines() for n in ('one', 'two'))
    assert [json.loads(x)['id'] for x in a] == [json.loads(x)['id'] for x in b]
    assert got['two'][1]['out'] == got['two'][1]['err'] == ''


def test_two_processes_resume_exactly(done):
    got, cwd = done
    assert codes(got['stopped']) == [143, 143] and codes(got['resumed']) == [0, 0], got['stopped']
    a, b = (open_run_folder(cwd / name) for name in ('run', 'two'))
    assert a.results()[0]['numbers']['table'] == b.results()[0]['numbers']['table'] and rows(a.path) == rows(b.path)
    assert same_tensors(a.weights('last'), b.weights('last'))
