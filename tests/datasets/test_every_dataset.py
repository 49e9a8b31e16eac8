"""Each command of the README as printed, to its report

Every method trains on every layout of data that it can read; a selection of these pairs is run by the commands, stopped
and resumed.
"""

import math
import pickle
from dataclasses import replace

import pytest
from fastcore.basics import noop
from run_folders import leaving

from vlrep.cli import main
from vlrep.data.shards import write_shards
from vlrep.datasets.base import DATASETS
from vlrep.datasets.coco import write_coco
from vlrep.datasets.conceptual_captions.reader import write_conceptual_captions
from vlrep.datasets.csv import write_csv
from vlrep.datasets.flickr8k import write_flickr8k
from vlrep.datasets.flickr30k import write_flickr30k
from vlrep.datasets.mm_imdb import write_mm_imdb
from vlrep.datasets.narratives import write_localized
from vlrep.datasets.snli_ve import write_snli_ve
from vlrep.datasets.visual_genome.reader import write_visual_genome
from vlrep.datasets.vizwiz import write_vizwiz
from vlrep.datasets.vqa import write_vqa
from vlrep.datasets.world.dataset import scene, world
from vlrep.experiments.baselines import train_on
from vlrep.experiments.comparisons import changes_of
from vlrep.experiments.pretrain import resume_run
from vlrep.experiments.resolve_options import recipe_name
from vlrep.experiments.splits import open_splits
from vlrep.methods.base import METHODS
from vlrep.training.run_folder import open_run_folder

N = 60
NET = dict(
    size=32,
    visual_depth=10,
    visual_width=8,
    width=16,
    depth=1,
    heads=2,
    vocab=200,
    bs=8,
    steps=3,
    warmup=1,
    bert_steps=20,
    region_steps=20,
    aux_scenes=0,
)
SCENES = dict(scenes=64, valid=8, probe=40, probe_held=40, test=40, shown=4, point=4, baselines=False)


def less(part, **values):
    "A recipe or a job with smaller values of the fields that it has"
    return replace(part, **{k: v for k, v in values.items() if hasattr(part, k)})


@pytest.fixture(autouse=True)
def small_defaults(monkeypatch):
    "The commands are run without options, so the defaults themselves have to be small"
    for method in METHODS.values():
        for n in {'world', 'flickr8k', 'coco', 'narratives', 'vqa'} & set(method.recipes):
            monkeypatch.setitem(method.recipes, n, less(method.recipes[n], **NET))
    for name, d in list(DATASETS.items()):
        small = less(d.options, **(SCENES if name == 'world' else dict(shuffles=1)))
        monkeypatch.setitem(DATASETS, name, replace(d, options=small))


@pytest.fixture(scope='module')
def roots(tmp_path_factory):
    "The same scenes in every layout of photos"
    at = tmp_path_factory.mktemp('layouts')
    recs = [scene('train', i, size=64, with_='narrative') for i in range(N)]
    write_csv(recs, at / 'csv' / 'photos.csv')
    write_flickr8k(recs, at / 'flickr8k')
    write_flickr30k(recs, at / 'flickr30k')
    write_localized(recs, at / 'narratives')
    write_visual_genome(recs, at / 'visual_genome')
    write_conceptual_captions(recs, at / 'conceptual_captions')
    for split, part in (('train2017', recs[:44]), ('val2017', recs[44:])):
        write_coco(part, at / 'coco', split, classes=sorted({o['category'] for r in recs for o in r.objects}))
    write_shards(world('train', N, size=64, with_='narrative'), at / 'webdataset', 20)
    wanted = world('train', 28, size=64, with_=('questions', 'statements', 'genre'))
    for task, write in WRITERS.items():
        for split, rows in (('train', range(20)), ('valid', range(20, 24)), ('test', range(24, 28))):
            write([wanted[i] for i in rows], at / task, split)
    folders = *WRITERS, 'flickr8k', 'flickr30k', 'narratives', 'coco', 'webdataset', *WEB
    return {d: at / d for d in folders} | dict(csv=at / 'csv' / 'photos.csv')


WRITERS = dict(vqa=write_vqa, vizwiz=write_vizwiz, snli_ve=write_snli_ve, mm_imdb=write_mm_imdb)
WEB = 'visual_genome', 'conceptual_captions'
FUSION = 'visualbert', 'vilbert'


def reads(method, data):
    "Can `method` learn from `data`? Of the methods that can, two learn from the statements and plots of tasks"
    if data in ('vqa', 'vizwiz'):
        return method in FUSION
    if data in WRITERS:
        return method in ('virtex', 'visualbert')
    if (method, data) == ('mct', 'conceptual_captions'):
        return False  # one caption for each image: there is no second view of the text
    return (method, data) in {
        ('multilabel', 'coco'),
        ('multilabel', 'webdataset'),
        ('multilabel', 'world'),
        ('supervised', 'world'),
    } or method not in ('multilabel', 'supervised')


PAIRS = [(m, d) for m in METHODS for d in DATASETS if reads(m, d)]


PHOTOS = [d for d in DATASETS if d not in ('world', *WRITERS)]
READERS = [m for m in METHODS if reads(m, 'csv')]


def selected(method, data):
    """Is this pair run by the commands? All of the world and of the tasks; each method with one layout of photos, in
    turn, and each layout with a method; and the two whose annotations only they read
    """
    if data in ('world', *WRITERS) or (method, data) in {('loctex', 'narratives'), ('multilabel', 'coco')}:
        return True
    own = [d for d in PHOTOS if reads(method, d)]
    return method in READERS and data == own[READERS.index(method) % len(own)]


# by `vlrep pretrain --data X` alone, to its end
PRINTED = [('virtex', d) for d in DATASETS if reads('virtex', d) and not selected('virtex', d)]


def test_every_method_and_every_dataset_is_selected():
    "Each method with two kinds of data, where so many fit, and each kind of data with a method"
    for i, least in ((0, 2), (1, 1)):
        for name in {p[i] for p in PAIRS}:
            these = [p for p in PAIRS if p[i] == name]
            assert sum(selected(*p) for p in these) >= min(least, len(these)), name


def opened(method, data, roots):
    "The recipe and the splits that `--method METHOD --data DATA` takes"
    recipe = METHODS[method].recipes[recipe_name(method, None, data)]
    return recipe, open_splits(METHODS[method], recipe, DATASETS[data].options, data, roots.get(data), log=noop)


@pytest.mark.parametrize('method,data', [p for p in PAIRS if not selected(*p) and p not in PRINTED])
def test_every_method_trains_on_every_dataset(method, data, roots):
    "A few steps without the commands, with the defaults of the two: finite losses in training and held out"
    recipe, splits = opened(method, data, roots)
    tokenizer = METHODS[method].train_tokenizer(recipe, splits['train'])
    learn = train_on(METHODS[method], recipe, splits, data, tokenizer, precision='fp32', log=noop)
    assert learn.train_state.step == recipe.steps
    assert math.isfinite(learn.train_state.mean()) and math.isfinite(float(learn.validate()[0]))


@pytest.mark.parametrize('data', DATASETS)
def test_every_dataset_can_be_sent_to_another_process(data, roots):
    "As to a worker on Windows and macOS, which is no fork"
    _, splits = opened('visualbert' if data in WRITERS else 'virtex', data, roots)
    for split in splits.values():
        a, b = split[0], pickle.loads(pickle.dumps(split))[0]
        assert (a.id, a.captions, a.questions, a.statements) == (b.id, b.captions, b.questions, b.statements)


def finished(run, data):
    "The run has its result and its report, and knows by which recipe it went"
    info = open_run_folder(run).info
    res = open_run_folder(run).results()
    assert len(res) == 1 and (run / 'report.html').stat().st_size > 1000
    assert math.isfinite(res[0]['numbers']['held_loss']) and info['recipe']['steps'] == res[0]['numbers']['steps']
    assert info['name'] in METHODS[info['method']].recipes and not changes_of(info)
    assert (res[0]['recipe'], res[0]['data'], res[0]['changes']) == (info['name'], data, [])


@pytest.mark.parametrize('method,data', [p for p in PAIRS if selected(*p)])
def test_a_run_by_the_commands_is_stopped_and_resumed(method, data, roots, tmp_path, monkeypatch, capsys):
    "`--data X` without another option, a stop, `vlrep resume` without another option"
    monkeypatch.chdir(tmp_path)
    words = [
        'pretrain',
        *(['--method', method] if method != 'virtex' else []),
        *(['--data', data, '--root', str(roots[data])] if data != 'world' else []),
    ]
    with monkeypatch.context() as m:
        m.setitem(METHODS, method, leaving(METHODS[method]))
        with pytest.raises(SystemExit) as e:
            main(words)
        assert e.value.code == 143
    run = tmp_path / 'runs' / f'{data}-{method}-1'
    text = capsys.readouterr().err
    assert f'vlrep resume {run.relative_to(tmp_path)}' in text, text
    main(['resume', str(run)])
    finished(run, data)
    assert 'resuming from step 2' in capsys.readouterr().out
    lines = []
    resume_run(run, log=lines.append)
    assert 'complete' in lines[0]


@pytest.mark.parametrize('method,data', PRINTED)
def test_the_printed_command_of_every_dataset_goes_to_its_end(method, data, roots, tmp_path, monkeypatch):
    "`vlrep pretrain --data X --root ...` goes to its end without a stop; with one, the other datasets do above"
    monkeypatch.chdir(tmp_path)
    main(['pretrain', '--data', data, '--root', str(roots[data])])
    finished(tmp_path / 'runs' / f'{data}-{method}-1', data)


def test_every_dataset_has_a_root(roots):
    missing = [d for d in DATASETS if d != 'world' and d not in roots]
    assert not missing, f'write scenes in the layout of {missing} in the fixture roots'
