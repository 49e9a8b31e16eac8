"""Fusion models: pretraining on a task's own files and on boxes of one's own, drift, answers, generated captions

What each part is and refuses is checked in nbs/datasets/88_task_images, nbs/data/56_box_files, nbs/models/56_sublayers
and nbs/evaluation/finetune/60_results; here are whole runs.
"""

import csv
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from run_folders import WRITERS
from tools import quiet, refused

import vlrep
from vlrep.cli import main
from vlrep.core.fields import check_fields
from vlrep.data.loader import loaders
from vlrep.datasets.base import DATASETS
from vlrep.datasets.csv import write_csv
from vlrep.datasets.vqa import write_vqa
from vlrep.datasets.world.dataset import scene, world
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import recipe_dict
from vlrep.experiments.finetune import finetune
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import Runtime, finetune_spec, run_spec
from vlrep.experiments.splits import open_splits
from vlrep.methods import fusion_collate
from vlrep.methods.base import METHODS
from vlrep.methods.fusion_collate import check_fusion, generate_captions
from vlrep.methods.learner import make_learner
from vlrep.models.pretrained import Pretrained
from vlrep.reports.weight_drift import weight_drift
from vlrep.training.run_folder import Run, open_run_folder

NET = dict(
    size=32,
    visual_depth=10,
    visual_width=8,
    width=16,
    heads=2,
    depth=1,
    vocab=200,
    bs=4,
    steps=3,
    warmup=1,
    bert_steps=10,
)
SMALL = [f'{k}={v}' for k, v in NET.items()]
SCENES = ['scenes=40', 'valid=16', 'test=40', 'shown=8', 'probe=40', 'probe_held=40', 'point=0', 'baselines=false']
PLAN = ['steps=4', 'bs=4', 'every=2', 'warmup=1', 'lr=0.01']
HOW = dict(threads=1, precision='fp32')


# ---------------------------------------------------------------- the files of a task


@pytest.fixture(scope='module')
def roots(tmp_path_factory):
    "Scenes of the world in the layout of each task: 24 to train, four to validate, four to test"
    at = tmp_path_factory.mktemp('tasks')
    for task, (write, extra) in WRITERS.items():
        scenes = world('train', 32, size=48, with_=extra)
        for split, rows in (('train', range(24)), ('valid', range(24, 28)), ('test', range(28, 32))):
            write([scenes[i] for i in rows], at / task, split)
    return at


@pytest.mark.parametrize('task', WRITERS)
def test_every_task_is_pretrained_on(task, roots, tmp_path, capsys):
    "`vlrep pretrain --method visualbert --data vqa --root FOLDER`, and the other tasks"
    words = [w for c in SMALL for w in ('--set', c)]
    main(
        [
            'pretrain',
            '--method',
            'visualbert',
            '--data',
            task,
            '--root',
            str(roots / task),
            '--out',
            str(tmp_path / 'run'),
            '--threads',
            '1',
            *words,
        ]
    )
    run, line = open_run_folder(tmp_path / 'run'), open_run_folder(tmp_path / 'run').results()[0]
    asks = task in ('vqa', 'vizwiz')
    assert run.info['recipe']['source'] == ('questions' if asks else 'captions')
    assert run.info['name'] == ('vqa' if asks else 'flickr8k')
    assert np.isfinite(line['numbers']['held_loss']) and (run / 'report.html').is_file()
    source = 'questions' if asks else 'captions'
    assert (
        line['numbers']['images'] >= 23
        and f'texts ({source}) of {line["numbers"]["images"]} images' in capsys.readouterr().out
    )


def test_a_pair_is_a_question_and_one_of_its_answers(roots):
    "Drawn uniformly from the ten, over all questions of the image"
    method = METHODS['visualbert']
    recipe = check_fields(replace(method.recipes['vqa'], **NET))
    splits = open_splits(method, recipe, DATASETS['vqa'].options, 'vqa', roots / 'vqa', log=quiet)
    train = splits['train']
    collate = method.collator(recipe, method.train_tokenizer(recipe, train))
    rows = np.arange(3)
    still = np.zeros(3, bool)
    seen = set()
    for epoch in range(1500):
        for i, (q, a) in enumerate(zip(*collate.pairs(train, rows, epoch, 0, still))):
            wanted = next(x for x in train[i].questions if x['question'] == q)
            assert a in wanted['answers'] and len(wanted['answers']) == 10
            seen.add((i, q, a))
    assert seen == {(i, x['question'], a) for i in rows for x in train[int(i)].questions for a in x['answers']}
    assert {r.id for r in splits['valid']} <= {f'COCO_train2014_{k:012d}' for k in range(1, 25)}
    assert {r.id for r in splits['test']} == {f'COCO_val2014_{k:012d}' for k in range(1, 5)}


def test_training_shows_each_question_equally_often(roots, tmp_path):
    "Some images have one question, others six: the batches of a training hold the latter six times as often"
    shutil.copytree(roots / 'vqa', tmp_path / 'vqa')
    for kind, key in (
        ('OpenEnded_mscoco_train2014_questions', 'questions'),
        ('mscoco_train2014_annotations', 'annotations'),
    ):
        path = tmp_path / 'vqa' / f'v2_{kind}.json'
        table = json.loads(path.read_text())
        table[key] = [r for r in table[key] if r['image_id'] % 2 or r['question_id'] % 1000 == 0]
        path.write_text(json.dumps(table))
    method = METHODS['visualbert']
    recipe = check_fields(replace(method.recipes['vqa'], **NET))
    splits = open_splits(method, recipe, DATASETS['vqa'].options, 'vqa', tmp_path / 'vqa', log=quiet)
    tokenizer = method.train_tokenizer(recipe, splits['train'])
    loader = train_on(method, recipe, splits, 'vqa', tokenizer, precision='fp32', log=quiet).dls.train
    counts = np.array([len(r.questions) for r in splits['train']])
    rows = np.concatenate([row for epoch in range(counts.sum()) for row in loader.whole_batches(epoch)])
    assert set(counts) == {1, 6} and np.bincount(rows).tolist() == (len(counts) * counts).tolist()


def test_questions_are_not_read_as_captions(roots, capsys):
    assert 'learns from captions, and vqa has none' in refused(
        capsys, 'pretrain', '--data', 'vqa', '--root', roots / 'vqa'
    )
    text = refused(
        capsys, 'pretrain', '--method', 'visualbert', '--data', 'vqa', '--root', roots / 'vqa', '--set', 'captions=2'
    )
    assert 'has questions and no captions' in text
    assert 'has questions only' in refused(capsys, 'shards', '--data', 'vqa', '--root', roots / 'vqa')


def test_resume_with_other_questions_is_refused(roots, tmp_path):
    "A question that was changed after the run began, and answers that are gone"
    shutil.copytree(roots / 'vqa', tmp_path / 'vqa')
    run = pretrain(
        run_spec('visualbert', SMALL, data='vqa', root=tmp_path / 'vqa', **HOW), out=tmp_path / 'run', log=quiet
    )
    path = tmp_path / 'vqa' / 'v2_OpenEnded_mscoco_train2014_questions.json'
    path.write_text(path.read_text().replace('?', '??'))
    (run / 'result.jsonl').unlink()
    with pytest.raises(ValueError, match='has changed since it began .questions of train'):
        resume_run(run, log=quiet)
    path = tmp_path / 'vqa' / 'v2_mscoco_train2014_annotations.json'
    data = json.loads(path.read_text())
    data['annotations'][0]['answers'] = []
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match='question 1000: answers is'):
        pretrain(
            run_spec('visualbert', SMALL, data='vqa', root=tmp_path / 'vqa', **HOW),
            Runtime(max_corrupt=0),
            out=tmp_path / 'other',
            log=quiet,
        )


# ---------------------------------------------------------------- boxes of one's own images


def boxes_of(i):
    return [[0.1, 0.1, 0.3 + 0.01 * i, 0.5], [0.5, 0.2, 0.9, 0.95]]


@pytest.fixture
def photos(tmp_path):
    "Twenty photos with captions in a CSV, and a file with two boxes of each"
    write_csv([scene('train', i, size=48) for i in range(20)], tmp_path / 'photos.csv')
    with open(tmp_path / 'photos.csv', newline='') as f:
        names = list(dict.fromkeys(r['path'] for r in csv.DictReader(f)))
    lines = {n: dict(image=n, boxes=boxes_of(i)) for i, n in enumerate(names)}

    def write(lines):
        (tmp_path / 'boxes.jsonl').write_text('\n'.join(map(json.dumps, lines)))

    write(lines.values())
    return tmp_path, list(lines.values()), write


BOXES = ['regions=boxes', 'shuffles=1']


def test_boxes_of_a_file_are_pretrained_and_fine_tuned_on(photos, tmp_path):
    "RoI features of a backbone for boxes of one's own, in pretraining and then in fine-tuning"
    at, lines, write = photos
    write([*lines, dict(image='elsewhere.jpg', boxes=[[0, 0, 1, 1]])])
    text = []
    file = at / 'boxes.jsonl'
    run = pretrain(
        run_spec('visualbert', [*SMALL, *BOXES, f'region_files={file}'], data='csv', root=at / 'photos.csv', **HOW),
        out=tmp_path / 'run',
        log=text.append,
    )
    assert any('36 boxes of 18 images' in s for s in text), text  # two are the test set
    assert any('3 of 21 images of the file are not in the data' in s for s in text)
    method = METHODS['visualbert']
    recipe = check_fields(replace(method.recipes['flickr8k'], **NET, regions='boxes', region_files=str(file)))
    splits = open_splits(method, recipe, DATASETS['csv'].options, 'csv', at / 'photos.csv', log=quiet)
    d = splits['train']
    got = method.collator(recipe, method.train_tokenizer(recipe, d)).reader(d, range(len(d)))
    number = {l['image']: i for i, l in enumerate(lines)}
    for i, n in enumerate(d.ids):
        assert got['region_boxes'][i].numpy() == pytest.approx(np.array(boxes_of(number[n])), abs=1e-6)
    for split in ('train', 'valid'):
        write_vqa([scene('train', i, size=48, with_='questions') for i in range(4)], tmp_path / 'vqa', split)
    write(
        [dict(image=f'COCO_{s}2014_{i:012d}', boxes=[[0, 0, 0.5, 0.5]]) for s in ('train', 'val') for i in range(1, 5)]
    )
    out = finetune(
        finetune_spec(run, 'vqa', PLAN, root=tmp_path / 'vqa', region_files=file), out=tmp_path / 'vqa-run', log=quiet
    )
    assert vlrep.load(out).answer(scene('test', 0, size=48).image, 'what is it?', [(0, 0, 0.5, 0.5)])


@pytest.mark.parametrize(
    'change,says',
    [
        (lambda l: l[:-1], 'images have no boxes in .*boxes.jsonl: '),
        (
            lambda l: [dict(l[0], boxes=[[0.5, 0, 0.1, 1]]), *l[1:]],
            r'boxes.jsonl, line 1: image .*, box 0: .* is reversed',
        ),
        (
            lambda l: [*l[:2], dict(l[2], boxes=[[0, 0, 1, 1], [0, 0, 20, 30]]), *l[3:]],
            r'boxes.jsonl, line 3: image .*, box 1: .* lies outside the image .*pixels need the width',
        ),
        (
            lambda l: [dict(l[0], width=48, height=48, boxes=[[0, 0, 60, 48]]), *l[1:]],
            r'outside the image \(48 x 48 pixels\)',
        ),
    ],
)
def test_bad_boxes_are_named(photos, tmp_path, change, says):
    "Before anything is computed: no run is left behind"
    at, lines, write = photos
    for k in range(len(lines)):  # whichever image is missing: one that is read
        write(change(lines[k:] + lines[:k]))
        try:
            pretrain(
                run_spec(
                    'visualbert',
                    [*SMALL, *BOXES, f'region_files={at / "boxes.jsonl"}'],
                    data='csv',
                    root=at / 'photos.csv',
                    **HOW,
                ),
                out=tmp_path / f'run{k}',
                log=quiet,
            )
        except ValueError as e:
            assert re.search(says, str(e)), e
            assert not (tmp_path / f'run{k}').exists()
            return
    pytest.fail('accepted')


def test_a_file_of_boxes_is_refused_where_no_boxes_are_read(photos, capsys):
    at, _, _ = photos
    words = ['pretrain', '--method', 'visualbert', '--data', 'csv', '--root', at / 'photos.csv', '--set']
    assert 'regions=files or regions=boxes' in refused(
        capsys, *words, 'regions=grid', '--set', f'region_files={at / "boxes.jsonl"}'
    )
    assert 'learns from boxes, and csv has none' in refused(capsys, *words, 'regions=boxes')
    assert 'is a file, and features are read from the folder' in refused(
        capsys,
        *words,
        'regions=files',
        '--set',
        'region_model=given',
        '--set',
        'flip_p=0',
        '--set',
        'cache_regions=false',
        '--set',
        f'region_files={at / "boxes.jsonl"}',
    )


# ---------------------------------------------------------------- drift and answers of a fine-tuned run


@pytest.fixture(scope='module')
def body(tmp_path_factory):
    "A VisualBERT that has learned a little"
    return pretrain(
        run_spec(
            'visualbert', [*SMALL, *SCENES, 'regions=grid', 'region_model=given', 'aux_scenes=0'], name='world', **HOW
        ),
        out=tmp_path_factory.mktemp('runs') / 'body',
        log=quiet,
    )


TASK = ['scenes=12', 'valid=6', 'test=6']


@pytest.fixture(scope='module')
def tuned(body, tmp_path_factory):
    return finetune(finetune_spec(body, 'vqa', [*PLAN, *TASK]), out=tmp_path_factory.mktemp('runs') / 'vqa', log=quiet)


def test_drift_is_in_the_report(body, tuned):
    "A row for each matrix of attention, from the weights before and after, as figures and a table"
    rows = open_run_folder(tuned).results()[0]['numbers']['drift']
    want = weight_drift(open_run_folder(body).weights('best'), open_run_folder(tuned).weights('best'))
    assert [r['matrix'] for r in rows] == ['W_Q', 'W_K', 'W_V', 'W_O']
    named = {b['matrix']: b for b in want}
    for a in rows:
        b = named[a['matrix']]
        assert [a[k] for k in ('layer', 'part')] == [b[k] for k in ('layer', 'part')] and a['angle'] > 0
        assert [a[k] for k in ('l1', 'angle')] == pytest.approx([b[k] for k in ('l1', 'angle')], rel=1e-5)
    page = (tuned / 'report.html').read_text()
    section = page[page.index('Drift of the weights') :]
    assert section.count('<svg') >= 2 and f'{rows[0]["angle"]:.4f}' in section and f'{rows[3]["l1"]:.2e}' in section


def test_the_report_has_no_drift_where_there_is_none(body, tuned, tmp_path):
    "A frozen body does not move; initial weights that are gone or changed are said, and the report goes without"
    frozen = finetune(finetune_spec(body, 'vqa', [*PLAN, *TASK, 'frozen=true']), out=tmp_path / 'frozen', log=quiet)
    assert 'drift' not in open_run_folder(frozen).results()[0]['numbers']
    assert 'Drift of the weights' not in (frozen / 'report.html').read_text()
    shutil.copytree(body, tmp_path / 'body')
    out = finetune(finetune_spec(tmp_path / 'body', 'vqa', [*PLAN, *TASK]), out=tmp_path / 'out', log=quiet)
    assert (
        open_run_folder(out).results()[0]['numbers']['drift'] == open_run_folder(tuned).results()[0]['numbers']['drift']
    )
    shutil.rmtree(tmp_path / 'body')
    lines = []
    (out / 'result.jsonl').unlink()
    resume_run(out, log=lines.append)
    assert any(s.startswith('the drift of the weights is not known: ') and 'body' in s for s in lines)
    assert 'drift' not in open_run_folder(out).results()[0]['numbers']


def test_questions_and_pictures_out_of_bounds_are_refused(tuned, tmp_path):
    "Questions that are empty, too long or no text; pictures that are none; several at once"
    m = vlrep.load(tuned)
    pics = [scene('test', i, size=48).image for i in range(3)]
    asks = ['what is it?', 'how many dogs are there in the middle of the picture?', 'is it light?']
    one = [m.answer(p, q, top=3) for p, q in zip(pics, asks)]
    for got, want in zip(m.answer(pics, asks, top=3), one):
        assert [a for a, _ in got] == [a for a, _ in want]
        assert [p for _, p in got] == pytest.approx([p for _, p in want], abs=1e-5)
    assert [g[0][0] for g in m.answer(pics[0], asks)][0] == one[0][0][0]
    with pytest.warns(UserWarning, match=f'1 of 2 questions are longer than the {m.max_len} tokens'):
        m.answer(pics[0], ['what is it?', 'what is it? ' * 100])
    for image, question, says in (
        (pics[0], ' \u200b', 'question: is empty'),
        (pics[0], 3, 'a text is expected, not 3'),
        (pics, asks[:2], '2 for 3 images'),
        (tmp_path / 'gone.jpg', 'what?', 'no such image'),
        (None, 'what?', 'image: .*not NoneType'),
        ('', 'what?', 'no such image'),
        (pics[0] / 255, 'what?', 'uint8'),
        (pics[0][..., 0], 'what?', 'image: not an image'),
    ):
        with pytest.raises(ValueError, match=says):
            m.answer(image, question)


# ---------------------------------------------------------------- captions of a run


@pytest.fixture(scope='module')
def writer(tmp_path_factory):
    changes = [c for c in SMALL if c.split('=')[0] != 'bert_steps']
    return pretrain(
        run_spec('captioning', [*changes, *SCENES], name='world', **HOW),
        out=tmp_path_factory.mktemp('runs') / 'writer',
        log=quiet,
    )


def test_captions_are_written_in_chunks_and_kept(writer, tmp_path, monkeypatch, own_cache):
    "A few images in memory at a time; once for the same weights and images, whatever folder and names they have"
    wanted = []
    caption = Pretrained.caption

    def counted(self, images, **kw):
        wanted.append(len(images))
        return caption(self, images, **kw)

    monkeypatch.setattr(Pretrained, 'caption', counted)
    monkeypatch.setattr(fusion_collate, '_CAPTIONED', 8)
    images = world('train', 20, size=48)
    first = generate_captions(writer, images)
    assert wanted == [8, 8, 4]
    assert first == [t or 'a picture' for t in vlrep.load(writer).caption([r.load() for r in images])]
    wanted.clear()
    shutil.copytree(writer, tmp_path / 'same')
    assert generate_captions(tmp_path / 'same', images) == first and not wanted
    generate_captions(writer, images.subset([*range(1, 20), 0]))  # as many, and others in each place
    assert wanted == [8, 8, 4]
    for remaining in (own_cache / 'captions').glob('*/captions.json'):
        remaining.write_text('[')
    assert generate_captions(writer, images) == first  # a damaged file is written anew


def test_captions_of_other_weights_are_written_anew(writer, tmp_path, own_cache):
    "Another checkpoint in the same folder"
    images = world('train', 4, size=48)
    shutil.copytree(writer, tmp_path / 'run')
    generate_captions(tmp_path / 'run', images)
    moved = {
        k: v + 0.1 if v.is_floating_point() else v for k, v in open_run_folder(tmp_path / 'run').weights('best').items()
    }
    with Run.reopen(tmp_path / 'run') as run:
        run.save('best', moved, dict(step=0))
    generate_captions(tmp_path / 'run', images)
    assert len(list((own_cache / 'captions').glob('*/captions.json'))) == 2


def test_empty_captions_are_counted(writer, monkeypatch, own_cache):
    monkeypatch.setattr(
        Pretrained,
        'caption',
        lambda self, images, **kw: ['', 'a dog', '\u200b'][: len(images)] + ['a cat'] * (len(images) - 3),
    )
    recipe = replace(
        METHODS['visualbert'].recipes['world'],
        **NET,
        aux_scenes=0,
        source='generated',
        generated=str(writer),
        regions='grid',
        region_model='given',
    )
    data = {s: world(s, 6, size=32) for s in ('train', 'valid')}
    lines = check_fusion(recipe, data, 'world')
    assert f'{writer}: 2 of 6 captions of the train images are empty and replaced by "a picture"' in lines
    assert generate_captions(writer, data['train'])[:3] == ['a picture', 'a dog', 'a picture']


# ---------------------------------------------------------------- the head for words, lists of sublayers


def learner(method, **changes):
    recipe = check_fields(
        replace(
            METHODS[method].recipes['world'],
            **{**NET, **changes},
            regions='grid',
            mim='off',
            region_model='given',
            aux_scenes=0,
            cache_regions=False,
        )
    )
    images = world('train', 12, size=32)
    m = METHODS[method]
    tokenizer = m.train_tokenizer(recipe, images)
    dls = loaders(images, images, collate=m.collator(recipe, tokenizer), size=32, bs=4, device='cpu')
    return make_learner(m, recipe, dls, seed=0, precision='fp32')


def test_an_untied_head_is_new_as_a_whole():
    "Neither tied nor initialised from BERT, as the switch says; the default has all of BERT's head"
    tied, new = (learner('vilbert', depth=2, tie_mlm=t).model for t in (True, False))
    std = new.encoder.config.std
    for m, trained in ((tied, True), (new, False)):
        b = m.bert
        assert bool(b.bias.ne(0).any()) == trained and bool(b.transform.bias.ne(0).any()) == trained
        assert bool(b.transform_norm.weight.ne(1).any()) == trained
        assert (m.decoder is None) == trained
    assert not torch.equal(tied.bert.transform.weight, new.bert.transform.weight) and std
    for k in ('words.weight', 'positions.weight'):  # the rest is BERT's in both
        assert torch.equal(tied.bert.state_dict()[k], new.bert.state_dict()[k])


@pytest.mark.parametrize('method,name', [('visualbert', 'single_stream'), ('vilbert', 'dual_stream')])
def test_presets_of_sublayers_are_the_methods(method, name):
    "By name, and in writing: the same weights to the bit, and the same after steps"
    text = dict(visualbert='2*tt+ti+it+ii[shared]', vilbert='1*tt, ti+it, tt, ii')[method]
    runs = [learner(method, depth=2, sublayers=s) for s in ('', name, text)]
    for learn in runs:
        learn.fit_steps(3)
    first, *others = (l.model.state_dict() for l in runs)
    for o in others:
        assert o.keys() == first.keys() and all(torch.equal(o[k], first[k]) for k in first)
    plain, named = (replace(METHODS[method].recipes['world'], sublayers=s) for s in ('', name))
    assert recipe_dict(plain)['sublayers'] == '' and recipe_dict(named)['sublayers'] == name


BETWEEN = dict(visualbert='tt, 2*ti+it[width=12 heads=3], tt+ti+it+ii[shared]', vilbert='tt, ii, tt+ti, it+ii[heads=4]')


@pytest.mark.parametrize('method', BETWEEN)
def test_a_list_of_sublayers_is_trained_opened_and_fine_tuned(method, tmp_path):
    "A list on the command line: trained, opened, fine-tuned"
    words = [
        w
        for c in [*SMALL, *SCENES, 'depth=2', 'regions=grid', 'region_model=given', 'mim=off', 'aux_scenes=0']
        for w in ('--set', c)
    ]
    main(
        [
            'pretrain',
            '--method',
            method,
            '--out',
            str(tmp_path / 'run'),
            '--threads',
            '1',
            *words,
            '--sublayers',
            BETWEEN[method],
        ]
    )
    run = open_run_folder(tmp_path / 'run')
    assert run.info['recipe']['sublayers'] == BETWEEN[method]
    body = vlrep.load(run.path).capabilities['fuse'].__self__
    pairs = [l.pairs for l in body.encoder.config.sublayers]
    assert (
        pairs
        == dict(visualbert=['tt', 'ti it', 'ti it', 'tt ti it ii'], vilbert=['tt', 'ii', 'tt ti', 'it ii'])[method]
    )
    finetune(finetune_spec(run.path, 'vqa', [*PLAN, *TASK]), out=tmp_path / 'vqa', log=quiet)
    assert open_run_folder(tmp_path / 'vqa').results()[0]['numbers']['drift']


@pytest.mark.parametrize(
    'given,says',
    [
        (['sublayers=2*tx'], "cannot be read from 'tx' on"),
        (['sublayers=6*(tt'], 'opening bracket without'),
        (['sublayers=tt[shared]'], 'nothing to share'),
        (['sublayers=3*tt', 'depth=2'], '3 sublayers attend from text to text'),
        (['sublayers=2*tt[heads=5]', 'depth=2'], 'cannot be split into 5 heads'),
        (['sublayers=2*tt[heads=8]', 'depth=2'], 'heads=8, but the initial BERT has 64 and 4'),
        (['sublayers=dual_steam'], 'single_stream, dual_stream'),
    ],
)
def test_wrong_lists_of_sublayers_are_refused(capsys, given, says):
    "In one line, before anything is imported or trained"
    words = [w for c in given for w in ('--set', c)]
    assert says in refused(capsys, 'pretrain', '--method', 'visualbert', *words)
