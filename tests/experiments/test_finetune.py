"Fine-tuning of finished runs: four tasks, about the world and in their own files; frozen bodies; stops and goes on"

import hashlib
import html
import json
import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import SCENES, TINY, WRITERS, untrained
from tools import quiet, refused

import vlrep
from vlrep.cli import main
from vlrep.data.collate import caption_lines
from vlrep.data.records import ArrayDataset
from vlrep.data.region_store import RegionStore, RegionWriter
from vlrep.data.tasks import TaskDataset
from vlrep.data.tokenizer import Tokenizer
from vlrep.datasets.vqa import write_vqa
from vlrep.datasets.world.dataset import world
from vlrep.datasets.world.task_options import WorldTaskOptions
from vlrep.evaluation.finetune.plan import PLANS, TASKS, FinetuneTask, TaskSource
from vlrep.evaluation.finetune.training import TaskCollator
from vlrep.experiments.finetune import finetune
from vlrep.experiments.pretrain import resume_run
from vlrep.experiments.spec import Runtime, finetune_spec, recorded_spec, run_spec
from vlrep.reports.run_report import report
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import open_run_folder

PARTS = 'train', 'valid', 'test'
PLAN = ['steps=6', 'bs=8', 'every=3', 'warmup=2', 'lr=0.01']


@pytest.fixture(scope='module')
def tuned(body, tmp_path_factory):
    "The same, fine-tuned on questions, and stopped by nothing"
    return finetune(
        finetune_spec(body, 'vqa', [*PLAN, *SCENES]), out=tmp_path_factory.mktemp('runs') / 'vqa', log=quiet
    )


@pytest.fixture
def scenes_in_vqa(tmp_path):
    "Four scenes with questions, to train and to validate on, written to `root` in VQA's layout"
    scenes = [world('train', 8, size=48, with_='questions')[i] for i in range(4)]
    for split in ('train', 'valid'):
        write_vqa(scenes, tmp_path / 'root', split)
    return scenes


# ---------------------------------------------------------------- a whole job


def test_fine_tuning_leaves_a_run_folder(tuned):
    run = open_run_folder(tuned)
    (line,) = run.results()
    rows = {(r['question'], r['backbone']): r for r in line['numbers']['table']}
    for split in ('valid', 'test'):
        for who in ('visualbert', 'visualbert, no image'):
            r = rows[f'vqa {split}', who]
            assert r['metric'] == 'accuracy' and 0 < r['chance'] < 100
            assert 0 <= r['low'] <= r['value'] <= r['high'] <= 100
        text = json.loads((run / f'predictions-{split}.json').read_text())
        wanted = [f'{split}-{k:06d}' for k in range(6)]
        assert {s['question_id'].rsplit('-', 1)[0] for s in text} == set(wanted) and len(text) == r['n']
        labels = json.loads((run / 'labels.json').read_text())
        assert {s['answer'] for s in text} <= set(labels) - {'<unk>'}
    assert [h[0] for h in line['numbers']['history']] == [3, 6] and run.saved() == [3, 6]
    remaining = run.state('best')['training']['callbacks']['save_run']
    assert max(h[2] for h in line['numbers']['history']) == remaining['score']


def test_the_table_is_that_of_the_best_checkpoint(tuned, body):
    "The validation accuracy in the table is the score by which the checkpoint was chosen"
    run = open_run_folder(tuned)
    (line,) = run.results()
    (row,) = [r for r in line['numbers']['table'] if (r['question'], r['backbone']) == ('vqa valid', 'visualbert')]
    assert row['value'] == pytest.approx(100 * max(h[2] for h in line['numbers']['history']), abs=1e-3)


def test_the_best_checkpoint_is_told(body, tmp_path, monkeypatch):
    "Scores that rise and fall: the weights of the second evaluation are kept, measured and told"
    from vlrep.evaluation.finetune.training import TaskScore
    from vlrep.experiments import finetune as job

    resets = []
    reset = TaskScore.reset
    used = []
    decide = job.decide_all

    def counted(self):
        resets.append(1)
        reset(self)

    def noted(model, *args, **kw):
        used.append(model.head.out.weight.clone())
        return decide(model, *args, **kw)

    monkeypatch.setattr(TaskScore, 'reset', counted)

    def value(self):
        return (0.1, 0.5, 0.2, 0.3, 0.4)[len(resets) - 1] if self.rows else None

    monkeypatch.setattr(TaskScore, 'value', property(value))
    monkeypatch.setattr(job, 'decide_all', noted)
    plan = ['steps=10', 'bs=8', 'every=2', 'warmup=2', 'patience=2']
    run = open_run_folder(finetune(finetune_spec(body, 'vqa', [*plan, *SCENES]), out=tmp_path / 'out', log=quiet))
    # no further
    assert [h[::2] for h in run.results()[0]['numbers']['history']] == [
        [2, 0.1],
        [4, 0.5],
        [6, 0.2],
        [8, 0.3],
    ]
    assert run.state('best')['step'] == run.results()[0]['numbers']['best_step'] == 4
    best, last = (run.weights(w)['head.out.weight'] for w in ('best', 'last'))
    assert not torch.equal(best, last) and len(used) == 4 and all(torch.equal(w, best) for w in used)


def test_full_moves_the_body_and_frozen_does_not(tuned, body, tmp_path):
    frozen = finetune(finetune_spec(body, 'vqa', [*PLAN, *SCENES, 'frozen=true']), out=tmp_path / 'frozen', log=quiet)
    was = open_run_folder(body).weights('best')
    for run, moves in ((tuned, True), (frozen, False)):
        now = {
            k.removeprefix('body.'): v for k, v in open_run_folder(run).weights('last').items() if k.startswith('body.')
        }
        assert now.keys() == was.keys()
        moved = [k for k in was if not torch.equal(was[k], now[k])]
        assert bool(moved) == moves, moved
        assert not [k for k in moved if k.startswith('region_encoder.')]  # the network of regions is never trained
    a, b = (open_run_folder(r).weights('last')['head.out.weight'] for r in (tuned, frozen))
    assert not torch.equal(a, b)


def test_a_stopped_and_resumed_fine_tuning_has_the_same_bits(tuned, body, tmp_path):
    "A signal in the middle of a round: saved, gone on with, and the weights and the table are those of a run unstopped"

    class Stop:
        def __call__(self, line):
            if line.startswith('step 3:'):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingInterrupted) as e:
        finetune(finetune_spec(body, 'vqa', [*PLAN, *SCENES]), out=tmp_path / 'stopped', log=Stop())
    assert e.value.code == 130 and open_run_folder(tmp_path / 'stopped').saved()[-1] == 4
    lines = []
    out = resume_run(tmp_path / 'stopped', log=lines.append)
    assert 'resuming from step 4' in lines
    for which in ('last', 'best'):
        a = open_run_folder(tuned).weights(which)
        b = open_run_folder(out).weights(which)
        assert all(torch.equal(a[k], b[k]) for k in a) and a.keys() == b.keys()
    a, b = (open_run_folder(r).results()[0]['numbers'] for r in (tuned, out))
    assert a['table'] == b['table'] and a['history'] == b['history']
    lines.clear()
    resume_run(out, log=lines.append)
    assert 'nothing is left to do' in lines[-1]


OTHERS = [dict(changes=['lr=0.02']), dict(changes=['scenes=13']), dict(seed=1), dict(task='vizwiz')]


@pytest.mark.parametrize('change', OTHERS)
def test_resume_as_another_fine_tuning_is_refused(body, tmp_path, change, tuned):
    (tmp_path / 'copy').mkdir()
    for p in open_run_folder(tuned).path.rglob('*'):
        if p.is_file() and p.name not in ('result.jsonl', '.lock'):
            (tmp_path / 'copy' / p.relative_to(tuned)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / 'copy' / p.relative_to(tuned)).write_bytes(p.read_bytes())
    with pytest.raises(ValueError, match='would not be the same run'):
        resume_run(tmp_path / 'copy', recorded_spec(tmp_path / 'copy').changed(**change), log=quiet)


def test_resume_with_changed_questions_is_refused(body, scenes_in_vqa, tmp_path):
    "A question that reads otherwise than when the run began"
    out = finetune(finetune_spec(body, 'vqa', PLAN, root=tmp_path / 'root'), out=tmp_path / 'out', log=quiet)
    (out / 'result.jsonl').unlink()
    path = tmp_path / 'root/v2_OpenEnded_mscoco_val2014_questions.json'
    path.write_text(path.read_text().replace('?', '??', 1))
    with pytest.raises(ValueError, match='would not be the same run .*examples valid'):
        resume_run(out, log=quiet)


@pytest.mark.parametrize('given', [dict(which=3), dict(labels_file='other.txt'), dict(region_files='other')])
def test_a_run_goes_on_from_what_it_began_with(tuned, given):
    "Nothing that was decided at the beginning is dropped in silence"
    with pytest.raises(
        ValueError, match=f'--{next(iter(given)).removesuffix("_file").replace("_", "-")} .*: the run began with'
    ):
        resume_run(tuned, recorded_spec(tuned).changed(**given), log=quiet)


# ---------------------------------------------------------------- tasks and their files


@pytest.mark.parametrize('task', ['vizwiz', 'snli_ve', 'mm_imdb'])
def test_every_task_is_trained_on_the_world(body, tmp_path, task):
    out = finetune(
        finetune_spec(body, task, ['steps=2', 'bs=8', 'every=2', 'warmup=1', *SCENES]), out=tmp_path / task, log=quiet
    )
    table = open_run_folder(out).results()[0]['numbers']['table']
    metrics = {r['metric'] for r in table}
    assert metrics == ({'micro F1', 'macro F1'} if task == 'mm_imdb' else {'accuracy'})
    assert {r['question'].split(',')[0].split(':')[0] for r in table} == {f'{task} valid', f'{task} test'}


@pytest.mark.parametrize('task', WRITERS)
def test_every_task_is_trained_on_its_own_files(body, tmp_path, task):
    "The layouts of the downloads; VQA's and VizWiz's test sets have no answers, and get a file of predictions"
    write, extra = WRITERS[task]
    root = tmp_path / 'root'
    texts = []
    for k, split in enumerate(('train', 'valid', 'test')):
        scenes = [world('train', 18, size=48, with_=extra)[i] for i in range(6 * k, 6 * k + 6)]
        if task == 'mm_imdb':
            write(scenes, root, split, rename=lambda g: 'Drama' if g == 'drama' else 'Comedy')
        else:
            write(scenes, root, split)
    out = finetune(
        finetune_spec(body, task, ['steps=2', 'bs=4', 'every=2', 'warmup=1'], root=root),
        out=tmp_path / 'out',
        log=texts.append,
    )
    run = open_run_folder(out)
    table = run.results()[0]['numbers']['table']
    tests = [r for r in table if ' test' in r['question']]
    assert bool(tests) == (task in ('snli_ve', 'mm_imdb'))
    suffix = TASKS[task].suffix
    text = (run / f'predictions-test{suffix}').read_text()
    if task == 'vqa':
        assert [a['question_id'] for a in json.loads(text)][:2] == [1000, 1001]
    if task == 'vizwiz':
        assert [a['image'] for a in json.loads(text)][1] == 'VizWiz_test_00000001.jpg'
    if task == 'snli_ve':
        assert json.loads(text.splitlines()[0]).keys() == {'pairID', 'prediction'}
        assert any('have no label (-)' in s for s in texts)
    if task == 'mm_imdb':
        assert len(json.loads(text)) == 6 and len(json.loads((run / 'labels.json').read_text())) == 23
    assert run.info['finetune']['data'] == task


def test_missing_photos_and_answers_are_counted(body, scenes_in_vqa, tmp_path):
    (tmp_path / 'root/train2014/COCO_train2014_000000000002.jpg').unlink()
    lines = []
    lost = '1 of 4 images named in .* are missing: COCO_train2014_000000000002.jpg'
    with pytest.raises(ValueError, match=lost):
        finetune(
            finetune_spec(body, 'vqa', PLAN, root=tmp_path / 'root'),
            Runtime(max_corrupt=0),
            out=tmp_path / 'out',
            log=quiet,
        )
    assert not (tmp_path / 'out').exists()
    finetune(finetune_spec(body, 'vqa', PLAN, root=tmp_path / 'root'), out=tmp_path / 'out', log=lines.append)
    assert any(re.search(lost, line) and line.endswith('they are left out') for line in lines)


def test_unreadable_photos_of_the_validation_set_are_counted_before_training(body, scenes_in_vqa, tmp_path):
    "Their examples are left out and counted before the training, not met after it; --max-corrupt limits them"
    (tmp_path / 'root/val2014/COCO_val2014_000000000002.jpg').write_bytes(b'no photo')
    with pytest.raises(ValueError, match='1 of 4 images cannot be read, at most 0 may be so'):
        finetune(
            finetune_spec(body, 'vqa', PLAN, root=tmp_path / 'root'),
            Runtime(max_corrupt=0),
            out=tmp_path / 'out',
            log=quiet,
        )
    lines = []
    run = finetune(finetune_spec(body, 'vqa', PLAN, root=tmp_path / 'root'), out=tmp_path / 'out', log=lines.append)
    n = len(scenes_in_vqa[1].questions)
    assert any(f'{n} of ' in line and 'are about images that cannot be read' in line for line in lines), lines
    rows = open_run_folder(run).results()[-1]['numbers']['table']
    assert max(r['n'] for r in rows) == sum(len(s.questions) for s in scenes_in_vqa) - n


def test_labels_of_another_data_set_are_refused(body, tmp_path):
    (tmp_path / 'labels.txt').write_text('entailment\nneutral\n')
    with pytest.raises(ValueError, match='labels of a different data set'):
        finetune(
            finetune_spec(body, 'vqa', [*PLAN, *SCENES], labels_file=tmp_path / 'labels.txt'),
            out=tmp_path / 'out',
            log=quiet,
        )
    with pytest.raises(ValueError, match='answers are none of the 2 labels'):
        finetune(
            finetune_spec(body, 'snli_ve', [*PLAN, *SCENES], labels_file=tmp_path / 'labels.txt'),
            out=tmp_path / 'out',
            log=quiet,
        )


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('task', ['vqa', 'vizwiz', 'snli_ve', 'mm_imdb'])
def test_cut_and_unknown_texts_are_counted_and_refused_above_a_limit(task, part):
    "Cut texts and unknown tokens: counted in all three parts, and refused above what the plan allows"
    whole = TASKS[task].source('world').read('train', options=WorldTaskOptions(scenes=12))
    words = list(whole.captions.flat())
    collate = TaskCollator(Tokenizer.train(words, 300), max(len(t) for t in words) + 5)

    def ask(text, **limits):
        odd = TaskDataset(
            whole.base, whole.rows, [text] * len(whole), second=[text] * len(whole) if whole.pairs else None
        )
        plan = replace(PLANS['world'], **limits)
        return caption_lines(plan, collate, dict(train=whole, valid=whole, test=whole) | {part: odd}, PARTS)

    plain = ask(words[0])
    assert [line.partition(':')[0] for line in plain[-3:]] == [*PARTS] and all('0 % of' in line for line in plain[-3:])
    long = ' and '.join(words * 9)
    with pytest.raises(ValueError, match=f'^{part}: 100 % of {len(whole)} texts .*--max-len .*--max-cut'):
        ask(long)
    assert f'{part}: 100 % of {len(whole)} texts' in '\n'.join(ask(long, max_cut=1.0))
    with pytest.raises(ValueError, match=f'^{part}: .* [0-9]+ % of the tokens are unknown.*--max-unknown'):
        ask('犬 猫 鳥 馬')
    assert '% of the tokens are unknown' in '\n'.join(ask('犬 猫 鳥 馬', max_unknown=1.0))


def test_beginnings_of_long_texts_are_read_only_on_request(body, tmp_path):
    "Beginnings of plots are read only if that is asked for; nothing is left of a run that is refused"
    short = ['steps=1', 'bs=4', 'every=1', 'warmup=0', 'max_len=6', *SCENES]
    with pytest.raises(ValueError, match='train: 100 % of 12 texts are longer than max_len=6 .*--max-len .*--max-cut'):
        finetune(finetune_spec(body, 'mm_imdb', short), out=tmp_path / 'out', log=quiet)
    assert not (tmp_path / 'out').exists()
    lines = []
    finetune(finetune_spec(body, 'mm_imdb', [*short, 'max_cut=1']), out=tmp_path / 'out', log=lines.append)
    counted = [line for line in lines if 'of the tokens are unknown' in line]
    assert [line.partition(' texts')[0] for line in counted] == [
        'train: 100 % of 12',
        'valid: 100 % of 6',
        'test: 100 % of 6',
    ]


def test_a_fifth_task_is_one_add(body, tmp_path):
    "Two classes, made of the texts' lengths, with the functions of another task"
    vqa = TASKS['vqa']
    parts = {k: getattr(TASKS['snli_ve'], k) for k in 'labels score loss decide measure constant submit'.split()}

    def read(split, size, options, log):
        d = TASKS['snli_ve'].source('world').read(split, size, options, log=log)
        d.answers = type(d.answers)(['yes' if len(d.texts([i])[0][0]) % 2 else 'no'] for i in range(len(d)))
        return d

    source = TaskSource(read, options=vqa.source('world').options, plan='world')
    try:
        TASKS.add(
            FinetuneTask(
                'even',
                'is the text of even length?',
                dict(world=source),
                **{**parts, 'labels': lambda train, plan: ['no', 'yes']},
            )
        )
        out = finetune(finetune_spec(body, 'even', [*PLAN, *SCENES]), out=tmp_path / 'out', log=quiet)
        assert open_run_folder(out).results()[0]['numbers']['table'][0]['question'] == 'even valid'
    finally:
        TASKS.pop('even', None)


# ---------------------------------------------------------------- regions of images that are not square, and of files


def photos(root, task='vqa', side=(64, 32), **kw):
    "Scenes of the world as photos of another shape, in the layout of VQA 2.0: train, valid and test"
    for k, split in enumerate(('train', 'valid', 'test')):
        scenes = [world('train', 12, size=48, with_='questions')[i] for i in range(4 * k, 4 * k + 4)]
        write_vqa(scenes, root, split)
    for path in root.glob('*/*.jpg'):
        Image.open(path).resize(side).save(path, quality=95)
    return root


def store_of(root, path, leave_out='', width=1):
    "A store with two boxes of each photo, the features random"
    g = np.random.default_rng(0)
    with RegionWriter(path, width) as w:
        for p in sorted(root.glob('*/*.jpg')):
            if leave_out not in str(p) or not leave_out:
                w.add(p.stem, g.normal(size=(2, width)), np.array([[0, 0, 0.2, 1], [0.8, 0, 1, 1]]))
    return path


@pytest.fixture(scope='module')
def boxed(tmp_path_factory):
    "A VisualBERT that reads regions of boxes"
    return untrained(
        tmp_path_factory.mktemp('runs') / 'boxed',
        'visualbert',
        regions='boxes',
        region_model='given',
        mim='off',
        **TINY,
    )


SHORT = ['steps=2', 'bs=4', 'every=2', 'warmup=1']


@pytest.mark.parametrize('how', ['grid', 'boxes'])
def test_the_edges_of_a_wide_photo_are_seen(body, boxed, tmp_path, how):
    "Photos of 2:1 that differ at the left edge alone: training, evaluation and `answer` look at it, and at its boxes"
    root = photos(tmp_path / 'root')
    given = dict(region_files=store_of(root, tmp_path / 'store')) if how == 'boxes' else {}
    run = finetune(
        finetune_spec(dict(grid=body, boxes=boxed)[how], 'vqa', SHORT, root=root, **given),
        out=tmp_path / 'out',
        log=quiet,
    )
    m = vlrep.load(run)
    plain = np.full((48, 96, 3), 128, np.uint8)
    other = plain.copy()
    other[:, :20] = 255, 0, 0
    boxes = dict(boxes=[(0, 0, 0.2, 1), (0.8, 0, 1, 1)]) if how == 'boxes' else {}
    a, b = (m.answer(i, 'what is it?', **boxes) for i in (plain, other))
    assert dict(a) != dict(b)
    left, right = (m.batch([i])[0, 0].mean(0) for i in (plain, other))
    assert (left != right)[:6].all() and torch.equal(left[8:], right[8:])  # a fifth of the width of 32, not more
    if how == 'boxes':
        one, two = (
            m.capabilities['answer'].__self__.model.body.regions(
                {'images': m.batch([i]), **m.capabilities['answer'].__self__.boxes([[(0, 0, 0.2, 1)]])}
            )
            for i in (plain, other)
        )
        assert (one['region_feats'] - two['region_feats']).abs().max() > 1e-4


def test_training_and_decisions_see_the_whole_photo(body, tmp_path, monkeypatch):
    "Every view that a wide photo gets has both of its edges"
    from vlrep.data.transforms import EvalTransform
    from vlrep.models.region_features import whole_view

    seen = []
    call = EvalTransform.__call__

    def noted(self, batch, key=None):
        assert ((batch['hw'][:, 1] - 2 * batch['hw'][:, 0]).abs() <= 1).all()
        got = call(self, batch, key)
        seen.append(torch.allclose(got['images'], whole_view(batch['images'], batch['hw'], self.size), atol=1e-5))
        return got

    monkeypatch.setattr(EvalTransform, '__call__', noted)
    finetune(finetune_spec(body, 'vqa', SHORT, root=photos(tmp_path / 'root')), out=tmp_path / 'out', log=quiet)
    assert len(seen) >= 6 and all(seen)  # training, validation, decisions with and without images


def test_boxes_have_to_come_from_somewhere(boxed, tmp_path):
    root = photos(tmp_path / 'root')
    with pytest.raises(ValueError, match='^train: .*has no boxes.*--region-files takes the boxes'):
        finetune(finetune_spec(boxed, 'vqa', SHORT, root=root), out=tmp_path / 'out', log=quiet)
    lines = []
    with pytest.raises(ValueError, match='^test: .*4 of 4 images have no regions'):  # before training
        finetune(
            finetune_spec(
                boxed, 'vqa', SHORT, root=root, region_files=store_of(root, tmp_path / 'store', leave_out='test2015')
            ),
            out=tmp_path / 'out',
            log=lines.append,
        )
    assert not (tmp_path / 'out').exists() and not any('steps of' in l for l in lines)


def planted(folder, n):
    """Blank images, and a store whose features alone tell the answer: 1 for yes, -1 for no

    Examples stand in another order than images, and two are about each image
    """

    def read(split, size, options, log):
        g = np.random.default_rng(dict(train=0, valid=1, test=2)[split])
        base = ArrayDataset(
            np.zeros((n, size, size, 3), np.uint8), 'planted', split=split, ids=[f'{split}{i}' for i in range(n)]
        )
        rows = g.permutation(2 * n) % n
        text = [[['no', 'yes'][answer(split, i)]] for i in rows]
        return TaskDataset(base, rows, ['is it so?'] * len(rows), answers=text)

    def answer(split, i):
        return hash_bit(f'{split}{i}')

    with RegionWriter(folder, 1) as w:
        for split in ('train', 'valid', 'test'):
            for i in range(n):
                w.add(f'{split}{i}', [[2 * answer(split, i) - 1.0]], np.array([[0, 0, 1, 1]]))
    return read


def hash_bit(text):
    "0 or 1"
    return hashlib.sha256(text.encode()).digest()[0] % 2


@pytest.mark.parametrize('shuffled', [False, True])
def test_each_image_has_its_own_regions(tmp_path, monkeypatch, shuffled):
    "What only the regions of an image can tell is learned; if a batch's regions go to other images, it is not"
    read = planted(tmp_path / 'store', 64)
    like = TASKS['snli_ve']
    parts = {k: getattr(like, k) for k in 'score loss decide measure constant submit'.split()}
    run = untrained(
        tmp_path / 'run',
        'visualbert',
        regions='files',
        region_files=str(tmp_path / 'store'),
        flip_p=0.0,
        cache_regions=False,
        region_model='given',
        mim='off',
        **TINY,
    )
    if shuffled:
        own = RegionStore.read
        monkeypatch.setattr(RegionStore, 'read', lambda self, rows, *a: own(self, np.roll(rows, 1), *a))
    source = TaskSource(read, options=TASKS['vqa'].source('world').options, plan='world')
    try:
        TASKS.add(FinetuneTask('planted', 'a test', dict(world=source), labels=lambda *_: ['no', 'yes'], **parts))
        plan = ['steps=60', 'bs=32', 'every=20', 'warmup=6', 'lr=0.01']
        out = finetune(finetune_spec(run, 'planted', plan), out=tmp_path / 'out', log=quiet)
    finally:
        TASKS.pop('planted', None)
    table = {(r['question'], r['backbone']): r['value'] for r in open_run_folder(out).results()[0]['numbers']['table']}
    right, text_only = (table['planted test', who] for who in ('visualbert', 'visualbert, no image'))
    assert (30 < right < 70) if shuffled else right > 97, table
    assert 30 < text_only < 70, table


@pytest.mark.parametrize('bf16', [False, True])
def test_a_model_without_a_part_for_bf16_is_trained_in_fp32(tmp_path, monkeypatch, bf16):
    "Whatever the processor has: regions from files leave nothing that could compute in bf16"
    for place in ('vlrep.training.precision.cpu_has_bf16',):
        monkeypatch.setattr(place, lambda: bf16)
    read = planted(tmp_path / 'store', 64)
    run = untrained(
        tmp_path / 'run',
        'visualbert',
        regions='files',
        region_files=str(tmp_path / 'store'),
        flip_p=0.0,
        cache_regions=False,
        region_model='given',
        mim='off',
        **TINY,
    )
    source = TaskSource(read, options=TASKS['vqa'].source('world').options, plan='world')
    parts = {k: getattr(TASKS['snli_ve'], k) for k in 'score loss decide measure constant submit'.split()}
    try:
        TASKS.add(FinetuneTask('planted', 'a test', dict(world=source), labels=lambda *_: ['no', 'yes'], **parts))
        out = finetune(
            finetune_spec(run, 'planted', ['steps=2', 'bs=8', 'every=2', 'warmup=1']), out=tmp_path / 'out', log=quiet
        )
        assert open_run_folder(out).results()[0]['precision'] == 'fp32'
        assert open_run_folder(out).info['precision'] == ('bf16' if bf16 else 'fp32')
        with pytest.raises(ValueError, match='precision bf16: on a CPU the model needs'):
            finetune(
                finetune_spec(run, 'planted', ['steps=2', 'bs=8', 'every=2', 'warmup=1'], precision='bf16'),
                out=tmp_path / 'no',
                log=quiet,
            )
    finally:
        TASKS.pop('planted', None)


# ---------------------------------------------------------------- the schedule, the page, a stop too early


def test_the_schedule_of_mm_imdb_is_that_of_the_paper(tmp_path):
    "60,000 steps of a line that would end after 88,000; shorter ones in proportion"
    from vlrep.evaluation.finetune.training import _warmup_then_decay

    def planned(task='mm_imdb', changes=()):
        return finetune_spec('run', task, changes, root=tmp_path).plan

    plan = planned()
    assert (plan.steps, plan.warmup, plan.decay_steps) == (60_000, 2000, 88_000)
    assert _warmup_then_decay(60_000, plan.decay_steps, plan.warmup) == pytest.approx(28 / 86)
    short = planned(changes=['steps=6000'])
    assert (short.warmup, short.decay_steps) == (2000, 8800)
    assert planned(changes=['steps=6000', 'decay_steps=0']).decay_steps == 0
    assert planned('vqa').decay_steps == 0


def test_the_table_may_leave_out_the_test_set(body, tmp_path):
    "Which split a number is of its row says"
    out = finetune(finetune_spec(body, 'snli_ve', [*SHORT, *SCENES, 'report=valid']), out=tmp_path / 'out', log=quiet)
    wanted = {r['question'] for r in open_run_folder(out).results()[0]['numbers']['table']}
    assert {q.split(':')[0] for q in wanted} == {'snli_ve valid'} and (out / 'predictions-test.jsonl').is_file()


def test_the_page_shows_task_table_curves_and_examples(tuned):
    "Task, metric with interval, without the image, curves, ten examples with picture, question, answer and truth"
    page = (tuned / 'report.html').read_text()
    run = open_run_folder(tuned)
    row = next(r for r in run.results()[0]['numbers']['table'] if r['question'] == 'vqa valid')
    value = f'{row["value"]:.1f} [{row["low"]:.1f}, {row["high"]:.1f}]'
    parts = 'visualbert on vqa', value, 'visualbert, no image', 'score in percent', 'The plan'
    assert all(part in page for part in parts)
    assert page.count('<figure><img src="data:image/jpeg;base64,') == page.count('a person: ') == 10
    examples = json.loads((tuned / 'samples.json').read_text())['examples']
    assert all(e['caption'] in html.unescape(page) and len(e['right'] + e['wrong']) == 1 for e in examples)
    (tuned / 'report.html').unlink()
    assert report([tuned], log=quiet) == tuned / 'report.html' and (tuned / 'report.html').read_text() == page


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tuned, body, tmp_path):
    "As a process that is killed leaves it: it begins anew, as it was begun, if the run that it starts from is there"
    run = tmp_path / 'run'
    run.mkdir()
    for name in ('recipe.json', 'labels.json', 'tokenizer.model'):
        (run / name).write_bytes((tuned / name).read_bytes())
    lines = []
    resume_run(run, log=lines.append)
    a, b = (open_run_folder(r).weights('last') for r in (run, tuned))
    assert lines[0] == 'no checkpoint: starting from the beginning' and all(torch.equal(v, a[k]) for k, v in b.items())
    assert open_run_folder(run).info['finetune'] == open_run_folder(tuned).info['finetune']


# ---------------------------------------------------------------- any backbone


def test_a_backbone_gets_a_text_encoder(tmp_path):
    run = untrained(tmp_path / 'virtex', 'virtex', visual_depth=10, visual_width=8, width=32, size=32, vocab=200)
    with pytest.raises(ValueError, match='its text encoder would begin at random'):
        finetune(finetune_spec(run, 'vqa', [*PLAN, *SCENES, 'frozen=true']), out=tmp_path / 'no', log=quiet)
    out = finetune(
        finetune_spec(run, 'vqa', ['steps=2', 'bs=8', 'every=2', 'warmup=1', *SCENES]), out=tmp_path / 'out', log=quiet
    )
    m = vlrep.load(out)
    assert m.embed(world('test', 1, size=32)[0].image).shape == (m.backbone.width,)
    assert len(m.answer(world('test', 1, size=32)[0].image, 'what is it', top=3)) == 3


# ---------------------------------------------------------------- afterwards


def test_a_fine_tuned_run_answers_questions(tuned, body):
    m = vlrep.load(tuned)
    images = world('test', 2, size=64)[1].image
    got = m.answer(images, 'What color is the dog?')
    hashed_uniform = [p for _, p in got]
    assert (
        len(got) == 5
        and 0 < hashed_uniform[-1]
        and hashed_uniform[0] < 1
        and hashed_uniform == sorted(hashed_uniform, reverse=True)
    )
    assert m.answer(images, 'What color is the dog?') == got and '<unk>' not in dict(m.answer(images, 'a', top=10**6))
    with pytest.raises(ValueError, match='not fine-tuned on questions'):
        vlrep.load(body).answer(images, 'what?')
    with pytest.raises(ValueError, match='leave them out'):
        m.answer(images, 'what?', [(0, 0, 1, 1)])


def test_a_fine_tuned_run_is_refused_where_others_are_expected(tuned, body):
    with pytest.raises(ValueError, match='spec is a RunSpec, and .* was begun with a FinetuneSpec'):
        resume_run(tuned, run_spec(), log=quiet)
    with pytest.raises(ValueError, match='cannot share one with others'):
        report([tuned, tuned])
    with pytest.raises(ValueError, match='is fine-tuned already'):
        finetune(finetune_spec(tuned, 'vqa'), log=quiet)


# ---------------------------------------------------------------- the command line

WRONG = [
    (['--task', 'vqaa'], "did you mean 'vqa'"),
    (['--task', 'vqa', '--stepz', '3'], '--steps INT'),
    ([], '--task is missing'),
    (['--task', 'vqa', '--data', 'vqa'], '--root is missing'),
    (['--task', 'vqa', '--data', 'snli_ve'], 'unknown --data of --task vqa'),
    (['--task', 'vqa', '--root', '.', '--data', 'world'], 'needs no files'),
    (['--task', 'vqa', '--lr', '-1'], 'lr=-1'),
    (['--task', 'vqa', '--workers', '-1'], '--workers -1'),
    (['--task', 'vqa', '--region-files', 'x'], 'makes its own regions'),
]


@pytest.mark.parametrize('words,why', WRONG)
def test_wrong_words_are_one_line(body, words, why, capsys):
    assert why in refused(capsys, 'finetune', body, *words)


def test_the_command_trains_and_resumes(body, tmp_path, capsys):
    words = [str(body), '--task', 'vqa', '--frozen', '--out', str(tmp_path / 'out'), '--seed', '3']
    main(['finetune', *words, *(f'--{c}' for c in [*PLAN, *SCENES])])
    info = open_run_folder(tmp_path / 'out').info
    narratives = info['finetune']
    assert narratives['plan']['frozen'] is True and info['seed'] == 3 and narratives['sizes']['scenes'] == 12
    assert 'vqa test (accuracy)' in capsys.readouterr().out
    main(['resume', str(tmp_path / 'out')])
    assert 'nothing is left to do' in capsys.readouterr().out
