"A method and a dataset from files outside the library, by the real commands; no file of the library knows of them"

import json
import os

import forked
import pytest
from tools import ROOT, sets, vlrep

from vlrep.training.run_folder import open_run_folder

NET = ['size=32', 'visual_width=8', 'bs=16', 'warmup=2']
SIZES = ['scenes=96', 'valid=32', 'probe=60', 'probe_held=60', 'test=60', 'shown=8', 'point=0', 'baselines=false']


def tutorial(*starts):
    "The cells of the tutorial on one's own method that begin like this"
    cells = json.loads((ROOT / 'nbs' / 'tutorials' / 'your_method.ipynb').read_text())['cells']
    texts = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    return [next(t for t in texts if t.startswith(s)) for s in starts]


ADD = "METHODS.add(Method('match', MatchRecipe, {'world': MatchRecipe()}, match_build, match_loss))"
STOP = """
import os, signal
from vlrep.all import *

class Stop(BaseCallback):
    "A signal, once, in the middle of the training"
    order = 94
    def after_batch(self):
        if self.training and self.learn.train_state.step == 3 and not os.path.exists('stopped'):
            open('stopped', 'w').close()
            os.kill(os.getpid(), signal.SIGTERM)

def stopping(recipe): return [Stop()]
def scenes(context):
    pictures = [jpeg_uri(scene('test', i, size=32).load()) for i in range(2)]
    return dict(figures=[dict(title=f'The {n} scene', image=p) for n,p in zip(('first','second'), pictures)])

METHODS.add(replace(METHODS['match'], callbacks=stopping, figures=scenes))
"""

MEAN = """
from vlrep.all import *

def mean_feature(context, scenes=1):
    value = float(np.mean([context.model.embed(scene('test', i, size=32).image).mean() for i in range(scenes)]))
    return [dict(question='mean feature', metric='mean', backbone=context.info['method'], n=scenes, chance=0.,
                 value=value, low=value, high=value)]

def mean_figure(context, samples):
    picture = jpeg_uri(scene('test', 0, size=32).load())
    return dict(figures=[dict(title='A picture of the mean', image=picture, explain=f'It is {samples[0]}')])

EVALUATIONS.add(Evaluation('mean', 'the mean of all features', mean_feature,
                           dict(scenes=Option(1, 'for mean: how many scenes')),
                           measure=lambda context: (dict(mean=mean_feature(context, 2)), ['of measure']),
                           figures=mean_figure))
EVALUATIONS.add(Evaluation('poem', 'never asked: no model has this capability', mean_feature,
                           needs=frozenset({'poem'}), measure=lambda context: (dict(poem=1), [])))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    d = tmp_path_factory.mktemp('outside')
    (four,) = tutorial('@dataclass(frozen=True)\nclass MatchRecipe')
    text = '\n\n'.join(['from vlrep.all import *', four, ADD])
    (d / 'match.py').write_text(text)
    (d / 'match_stopping.py').write_text(text + STOP)
    (d / 'mean.py').write_text(MEAN)
    return d


def test_a_plugin_that_was_changed_within_a_second_is_read_anew(tmp_path):
    "Two texts of one length and one time, as of an editor and of Python's cache of bytecode"
    file = tmp_path / 'mine.py'
    code = 'import sys; sys.dont_write_bytecode = False; from vlrep.core.registry import load_plugin; '
    said = []
    for text in ('value = 1', 'value = 2'):
        file.write_text(text)
        os.utime(file, (10**9, 10**9))
        program = forked.Program(code + f'print(load_plugin({str(file)!r}).value)', [], tmp_path)
        said.append(program.communicate()[0].strip())
    assert said == ['1', '2']


def test_the_tutorial_prints_the_method_that_is_tested_here():
    page = ''.join(
        ''.join(c['source'])
        for c in json.loads((ROOT / 'nbs' / 'tutorials' / 'your_method.ipynb').read_text())['cells']
    )
    assert ADD in page and 'vlrep pretrain --plugin match.py --method match' in page


def test_a_method_from_a_file_is_trained_resumed_evaluated_and_opened(folder):
    "Trained, stopped, resumed, evaluated, reported, opened; the stopped run ends as the other did"
    small = sets([*NET, 'steps=6', *SIZES])
    new = ['pretrain', '--plugin', 'match.py', '--method', 'match']
    names, fields, page, text = vlrep(
        folder,
        ['pretrain', '--plugin=match.py', '--recipes'],
        [*new, '--fields'],
        [*new, '--help'],
        [*new, '--plugin', 'mean.py', *small, '--out', 'whole'],
    )
    assert (
        'match  ' in names and 'width=64' in fields and 'match on world, recipe world: 96 images to learn from' in text
    )
    assert '--width ' in page and '(default: 64)' in page and '--depth ' not in page
    vlrep(
        folder,
        ['pretrain', '--plugin', 'match_stopping.py', '--method', 'match', *small, '--out', 'halves'],
        codes=[143],
    )
    code = (folder / 'match_stopping.py').read_text()
    (folder / 'match_stopping.py').write_text(code.replace('total / 2', 'total / 3'))
    resume = ['resume', 'halves', '--plugin', 'match_stopping.py']
    changed, field = vlrep(folder, resume, [*resume, '--depth', 2], codes=[2, 2])
    assert "plugin_code: was 'match_stopping.py" in changed and 'Unrecognized options: --depth' in field
    (folder / 'match_stopping.py').write_text(code)
    (again,) = vlrep(folder, resume)
    mean = ['evaluate', '--plugin', 'mean.py', 'whole', '--on', 'mean', '--scenes']
    table, own, *_, nothing, other, poem = vlrep(
        folder,
        [*mean[:1], '--plugin', 'match.py', *mean[1:4], '--on', 'world'],
        [*mean, 3],
        ['report', 'whole'],
        ['report', 'whole', 'halves', '--out', 'both.html'],
        ['caption', 'whole', 'none.png'],
        ['evaluate', 'whole', '--on', 'world', '--scenes', 2],
        ['evaluate', 'whole', '--on', 'poem'],
        codes=[0, 0, 0, 0, 2, 2, 2],
    )
    assert 'whole: match has no capability poem, which --on poem needs; available: world, voc07' in poem
    assert 'mean feature' in own and '--scenes 2: belongs to --on mean, not to --on world' in other
    assert json.loads((folder / 'whole' / 'evaluations.jsonl').read_text().splitlines()[1])['rows'][0]['n'] == 3
    assert 'resuming from step' in again and 'setting' in table and 'caption' in nothing
    assert (folder / 'both.html').stat().st_size > 5000
    a = open_run_folder(folder / 'whole')
    b = open_run_folder(folder / 'halves')
    num = a.results()[0]['numbers']
    assert num['mean'][0]['n'] == 2 and num['mean'][0]['backbone'] == 'match' and 'poem' not in num
    assert 'mean' not in b.results()[0]['numbers']
    page = (folder / 'whole' / 'report.html').read_text()
    assert '>A picture of the mean</h2>' in page and 'It is of measure' in page
    assert 'A picture of the mean' not in (folder / 'halves' / 'report.html').read_text()
    assert '>The first scene</h2>' not in page
    assert all(f'>The {n} scene</h2>' in (folder / 'halves' / 'report.html').read_text() for n in ('first', 'second'))
    assert all((v == b.weights('last')[k]).all() for k, v in a.weights('last').items())
    assert [r['value'] for r in a.results()[0]['numbers']['table']] == [
        r['value'] for r in b.results()[0]['numbers']['table']
    ]


def test_wrong_plugin_files_are_refused_in_one_line(folder):
    (folder / 'broken.py').write_text('METHODS.add(1)')
    (folder / 'taken.py').write_text('from vlrep.all import *\nMETHODS.add(replace(METHODS["loctex"], name="virtex"))')
    words = {
        ('--method', 'match'): "--method: unknown name 'match'",
        ('--plugin', 'none.py'): 'none.py: no such file',
        ('--plugin',): "Missing value for argument '--plugin'",
        ('--plugin', 'broken.py'): 'broken.py: NameError',
        ('--plugin', 'taken.py'): "method 'virtex': registered by vlrep.methods.virtex.recipe and by taken",
    }
    text = vlrep(folder, *(['pretrain', *w] for w in words), codes=[2] * len(words))
    for got, want in zip(text, words.values()):
        assert want in got


DOTS = """
from PIL import Image, ImageDraw
from vlrep.all import *

def dot(i):
    img = Image.new('RGB', (40, 30), 'white')
    ImageDraw.Draw(img).ellipse([10, 5, 30, 25], fill=('red','blue')[i%2])
    return img

def read(root, size):
    colours = [('red','blue')[i%2] for i in range(60)]
    return ArrayDataset.from_images([dot(i) for i in range(60)], [f'a {c} dot' for c in colours], size, name='dots')

DATASETS.add(DatasetBuilder('dots', {'captions'}, read=read))
"""


def test_a_dataset_of_images_in_memory_is_trained_on(folder):
    "A list of Pillow's images with captions, by the real command, with a method of the library and with one outside it"
    (folder / 'dots.py').write_text(DOTS)
    small = sets([*NET, 'visual_depth=10', 'steps=4', 'vocab=64', 'width=16', 'heads=2', 'dropout=0'])
    new = ['pretrain', '--plugin', 'dots.py', '--data', 'dots']
    text, scores, _, lacks = vlrep(
        folder,
        [*new, *small, '--out', 'dots-run'],
        ['evaluate', 'dots-run', '--on', 'captions'],
        [
            *new,
            '--plugin',
            'match.py',
            '--method',
            'match',
            '--out',
            'dots-match',
            *sets([*NET, 'steps=4', 'vocab=64']),
        ],
        [*new, '--method', 'supervised'],
        codes=[0, 0, 0, 2],
    )
    assert 'virtex on dots, recipe flickr8k: 46 images to learn from' in text and 'CIDEr' in scores
    num = open_run_folder(folder / 'dots-run').results()[0]['numbers']
    assert num['duplicates']['images'] == 4 and num['right'] > 0  # the same two pictures in every part
    assert 'learns from categories, and dots has none' in lacks
