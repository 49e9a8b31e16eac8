"Every long stage draws a bar on a terminal, and none in a log"

import os
import re

import forked
from paths import ROOT

STAGES = """
import sys, numpy as np, torch
torch.set_num_threads(1)
from vlrep.data.duplicates import duplicates
from vlrep.experiments.sanity_checks import overfit
from vlrep.evaluation.caption_content import caption_nll
from vlrep.experiments.baselines import train_on
from vlrep.models.backbones import make_backbone
from vlrep.models.pretrained import Pretrained
from vlrep.data.evaluation_batches import readable
from vlrep.data.tokenizer import Tokenizer
from vlrep.datasets.world.dataset import world
from vlrep.experiments.config import get_recipe
from vlrep.methods.base import METHODS
from vlrep.evaluation.captioning import caption_scores
from vlrep.models.features import bn_statistics, features
from vlrep.evaluation.logistic_probe import fit_linear, fit_per_category
from vlrep.evaluation.knn import neighbours
from vlrep.evaluation.pointing import centre_map, pointing_table
from vlrep.evaluation.sgd_probe import SoftmaxRecipe, softmax_probe
from vlrep.evaluation.svm import fit_svms
from vlrep.evaluation.transfer import transfer_table
from dataclasses import replace

net = make_backbone(10, 8)
def stage(name, f):
    print(f'<{name}>', flush=True)
    f()
    print(f'</{name}>', flush=True)

made = {}
def drawn(): made.update(a=world('train', 40, size=32), b=world('test', 24, size=32, with_='masks'))
stage('world', drawn)
a,b = made['a'],made['b']
x,y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)),torch.arange(60)%3
tokenizer = Tokenizer.train(a.captions.flat(), vocab=300)
small = dict(size=32, steps=2, warmup=1, width=32, heads=2, visual_width=8, bs=16, vocab=300)
rec = replace(get_recipe('virtex', 'world'), **small)
def trained(): made['learn'] = train_on(METHODS['virtex'], rec, dict(train=a, valid=b), 'world', tokenizer,
                                        log=lambda s: None)
stage('training', trained)
model = made['learn'].model
m = Pretrained.from_learner(made['learn'])
stage('features', lambda: features(net, a))
stage('statistics', lambda: bn_statistics(net, a, bs=16))
stage('linear', lambda: fit_linear(x, y))
stage('named', lambda: fit_per_category(x, torch.stack([y, y], 1), 3))
stage('svm', lambda: fit_svms(x, np.where(torch.nn.functional.one_hot(y) > 0, 1, -1), costs=(.1, 1.)))
stage('neighbours', lambda: list(neighbours(x, k=3)))
stage('nearest', lambda: list(neighbours(x, k=1)))
stage('softmax', lambda: softmax_probe(net, a, b, 'setting', SoftmaxRecipe(epochs=1, bs=16, lrs=(.1,), wds=(0.,))))
stage('table', lambda: transfer_table(dict(net=net), a, a, b, draws=20))
stage('pointing', lambda: pointing_table(dict(centre=centre_map), b))
stage('captions', lambda: m.caption([b[i].image for i in range(3)]))
stage('writing', lambda: caption_scores(m, b))
stage('losses', lambda: caption_nll(model, made['learn'].loss_func.loss, m, b, [range(len(b))], bs=16))
stage('duplicates', lambda: duplicates(a, world('test', 24, size=32)))
stage('readable', lambda: readable(b))
stage('overfit', lambda: overfit(METHODS['virtex'], rec, dict(train=a), tokenizer=tokenizer, log=lambda s: None,
steps=3))
"""


def on_terminal(script, tmp_path):
    "What a process writes to a terminal"
    import pty
    import select

    main, other = pty.openpty()
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'VLREP_CACHE': str(tmp_path), 'COLUMNS': '120'}
    p = forked.Program(script, env=env, output=os.ttyname(other))
    out = b''
    while p.poll() is None or select.select([main], [], [], 0)[0]:
        if select.select([main], [], [], 0.05)[0]:
            out += os.read(main, 65536)
    os.close(main)
    os.close(other)
    return p.returncode, out.decode(errors='replace')


BARS = dict(
    world='drawing train',
    training='step ',
    features='features',
    statistics='statistics of BatchNorm',
    linear='fitting probes',
    named='fitting probes',
    svm='support vector machines',
    neighbours='neighbours',
    nearest='neighbours',
    softmax='softmax probe',
    table='question',
    pointing='masks',
    captions='batches of images',
    writing='batches of images',
    losses='photos, the loss of their captions',
    duplicates='thumbnails',
    readable='photos read',
    overfit='step ',
)


def test_every_long_stage_has_a_bar_on_a_terminal(tmp_path):
    code, text = on_terminal(STAGES, tmp_path)
    assert code == 0, text[-2000:]
    parts = {k: text.split(f'<{k}>')[1].split(f'</{k}>')[0] for k in BARS}
    assert not [
        f'{k}: {parts[k][-300:]!r}' for k, label in BARS.items() if f'{label}' not in parts[k] or '|' not in parts[k]
    ]
    left = [k for k, v in parts.items() if v.rstrip('\r\n').rsplit('\r', 1)[-1].strip()]
    assert not left  # and it is wiped away


def test_a_log_has_no_bar(tmp_path):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'VLREP_CACHE': str(tmp_path)}
    script = STAGES.split("stage('captions'")[0]
    got = forked.run(script, env=env)
    assert got.returncode == 0, got.stderr[-2000:]
    assert not got.stderr.strip() and not re.sub(r'</?\w+>', '', got.stdout).strip() and '\r' not in got.stdout
