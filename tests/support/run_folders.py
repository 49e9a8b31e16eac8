"Run folders: untrained ones made at once, logs, what a page can show, files damaged on purpose, stops"

import base64
import hashlib
import io
import json
import os
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from PIL import Image

from vlrep.core.fields import check_fields
from vlrep.core.files import read_json, write_json
from vlrep.core.run_files import read_log
from vlrep.data.loader import loaders
from vlrep.data.region_store import RegionStore
from vlrep.data.tokenizer import TokenIds, Tokenizer
from vlrep.datasets.base import DATASETS
from vlrep.datasets.mm_imdb import write_mm_imdb
from vlrep.datasets.snli_ve import write_snli_ve
from vlrep.datasets.vizwiz import write_vizwiz
from vlrep.datasets.vqa import write_vqa
from vlrep.datasets.world.dataset import world
from vlrep.experiments.config import get_recipe, recipe_dict
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.models.bert_weights import small_config
from vlrep.training.learner import BaseCallback
from vlrep.training.run_folder import Run


def rows(path):
    times = 'seconds', 'images_s', 'memory_mb'
    return [{k: v for k, v in r.items() if k not in times} for r in read_log(Path(path) / 'log.csv')]


TINY = dict(visual_depth=10, visual_width=8, width=16, depth=1, heads=2, size=32, vocab=200)
SCENES = ['scenes=12', 'valid=6', 'test=6']


def untrained(path, method, **changes):
    "A finished run of a model that has learned nothing"
    m = METHODS[method]
    recipe = check_fields(replace(m.recipes['world'], **changes))
    tokenizer = Tokenizer.train(world('train', 30).captions.flat(), 200)
    model_sizes = dict(tokens=asdict(TokenIds.of(tokenizer, method)))
    if 'fusion' in m.loss.__module__:
        bert = small_config(tokenizer, recipe.width, recipe.depth, max(128, recipe.max_len))
        bert = replace(bert, heads=recipe.heads or bert.heads, dropout=recipe.dropout, attention_dropout=recipe.dropout)
        width = RegionStore(recipe.region_files).width if recipe.regions == 'files' else 8
        model_sizes |= dict(bert=asdict(bert), region_width=width, classes=0)
    model = m.build(recipe, model_sizes, m.backbone(recipe, 0))
    facts = dict(name='world', sizes=model_sizes, side=recipe.size)
    sizes = recipe_dict(DATASETS['world'].options)
    with Run.create(path, recipe, method, dict(name='world', **sizes), 0, **facts) as run:
        tokenizer.save(run / 'tokenizer.model')
        run.keep_part('tokenizer.model')
        run.save('best', model.state_dict(), dict(step=0))
    return path


WRITERS = dict(
    vqa=(write_vqa, 'questions'),
    vizwiz=(write_vizwiz, 'questions'),
    snli_ve=(write_snli_ve, 'statements'),
    mm_imdb=(write_mm_imdb, 'genre'),
)


def build(path, method='virtex'):
    "A run folder with untrained weights: quick to make, and as good as any to be opened"
    dataset = world('train', 40, size=32)
    options = DATASETS['world'].options
    recipe = replace(
        get_recipe(method, 'world'),
        size=32,
        bs=4,
        **dict(width=32, heads=2, vocab=300) if method != 'supervised' else {},
    )
    tokenizer = Tokenizer.train(dataset.captions.flat(), 300) if method != 'supervised' else None
    learn = make_learner(
        METHODS[method], recipe, loaders(dataset, dataset, tokenizer=tokenizer, size=32, bs=4, device='cpu')
    )
    facts = dict(name='world', sizes=learn.sizes, side=dataset.size)
    model = learn.model
    with Run.create(path, recipe, method, dict(name='world', **recipe_dict(options)), 0, **facts) as r:
        if tokenizer:
            tokenizer.save(r / 'tokenizer.model')
            r.keep_part('tokenizer.model')
        r.save('best', model.state_dict(), dict(step=1))
        r.save('last', model.state_dict(), dict(step=1))
    return Path(path)


def reseal(run, change):
    "Change what recipe.json holds, with a checksum that fits"
    d = read_json(run / 'recipe.json')
    change(d)
    Run(run)._write(d)


def picture():
    f = io.BytesIO()
    Image.new('RGB', (4, 4)).save(f, 'JPEG')
    return 'data:image/jpeg;base64,' + base64.b64encode(f.getvalue()).decode()


def table_rows(questions, who):
    return [
        dict(question=q, metric='mAP', backbone=b, n=40, value=50.0, low=40.0, high=60.0, chance=20.0)
        for q in questions
        for b in who
    ]


def facts(method='virtex', seed=0):
    "recipe.json, result.jsonl, samples.json and log.csv of a run that has everything a page can show"
    info = dict(
        format=1,
        method=method,
        name='world',
        recipe=dict(bs=4, steps=9, heads=2, norm='pre'),
        data=dict(name='world', scenes=40),
        seed=seed,
        precision='fp32',
        threads=2,
        versions=dict(vlrep='1', python='3', torch='2', fastai='2'),
    )
    num = dict(
        images=40,
        steps=9,
        views=36,
        images_per_second=12.5,
        held_loss=1.0,
        best_step=9,
        skipped=2,
        parameters=1000,
        backbone_parameters=500,
        corrupt={'a.jpg': 'torn'},
        duplicates=dict(images=1, captions=2),
        table=table_rows(['objects', 'color'], [method, 'random']),
        where=table_rows(['pointing', 'overlap'], [method, 'centre']),
        caption_table=table_rows(['caption'], [method, 'a person']),
        noun_precision=50.0,
        noun_recall=40.0,
        person_noun_precision=70.0,
        person_noun_recall=60.0,
        right=2.0,
        wrong=3.0,
        wrong_each=[2.9, 3.1],
        worth=[1.0, 0.9, 1.1],
        right_piece=1.0,
        wrong_piece=2.0,
    )
    res = dict(
        method=method,
        recipe='world',
        changes=['steps=9'],
        data='world',
        seed=seed,
        commit='abc',
        date='2026-01-01',
        processor='cpu',
        threads=2,
        precision='fp32',
        seconds=dict(world=1.0, bicaptioning=2.0),
        numbers=num,
    )
    pic = picture()
    text = [['a', None], ['dog', 0.5]]
    samples = dict(
        captions=[
            dict(
                id='1',
                caption='a dog',
                reference='the dog',
                right=['dog'],
                wrong=['cat'],
                missed=['car'],
                note='n',
                score=s,
                tie=0,
                image=pic,
            )
            for s in (0.1, 0.5, 0.9)
        ],
        words=[dict(image=pic, words=[dict(word='dog', map=[[1.0, 0.0], [0.0, 0.0]])], reference='the dog')],
        traces=[
            dict(
                id='1',
                image=pic,
                end=2.0,
                strokes=[[[0.1, 0.1, 0.0], [0.5, 0.5, 1.0]]],
                spoken=text,
                words=[dict(at=1, mask=[[1, 0], [0, 0]], map=[[100, 0], [0, 0]], inside=50.0, area=25.0)],
            )
        ],
        neighbours=dict(
            n=9,
            k=1,
            queries=[dict(id='1', **{'before training': [['2', 0.5]], 'after': [['1', 0.6]]})],
            pics={'1': pic, '2': pic},
            share={'after': 50.0, 'any two': 20.0},
        ),
        figures=[dict(title='How it learned', image=pic, explain='One line a seed.')],
    )
    return {'recipe.json': info, 'result.jsonl': res, 'samples.json': samples}


def put(run, files):
    run.mkdir(exist_ok=True)
    for name, d in files.items():
        (run / name).write_text(json.dumps(d, indent=None if name.endswith('l') else 1) + '\n')
    (run / 'log.csv').write_text('step,train_loss,valid_loss,lr0,lr1\n3,2.5,,.1,.2\n9,2.,2.2,.1,.2\n')
    return run


def in_child(work):
    "Do `work` in a child process: its exit code, or minus the signal that ended it"
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def resign(folder):
    "Checksums that fit what is there now"
    write_json(
        folder / 'manifest.json',
        dict(
            format=1,
            files={
                p.name: dict(bytes=p.stat().st_size, sha256=hashlib.sha256(p.read_bytes()).hexdigest())
                for p in folder.iterdir()
                if p.name != 'manifest.json'
            },
        ),
    )


def flip(p):
    b = bytearray(p.read_bytes())
    b[len(b) // 2] ^= 1
    p.write_bytes(b)


class Leave(BaseCallback):
    "Asks for a stop after a step, as a signal would"

    order = 94

    def __init__(self, step):
        self.step = step

    def after_batch(self):
        if self.training and self.learn.train_state.step == self.step:
            self.learn.stop_on_signal.note.got = 15


def leaving(method, step=2):
    "The method, stopped after so many steps"

    def callbacks(recipe):
        return [*method.callbacks(recipe), Leave(step)]

    return replace(method, callbacks=callbacks)
