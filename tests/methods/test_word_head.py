"""The auxiliary word head of LocTex and MCT in whole runs: stopped and resumed, opened, and left out without a trace"""

from dataclasses import replace

import pytest
import torch
from fastai.callback.core import Callback
from run_folders import leaving, rows
from tools import narrated, quiet, sets

import vlrep
from vlrep.cli import main
from vlrep.data.loader import loaders
from vlrep.datasets.world.dataset import world
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import run_spec
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.methods.mct.collate import check_views
from vlrep.methods.word_head import idf
from vlrep.training.interrupts import TrainingInterrupted
from vlrep.training.run_folder import open_run_folder

JOB = dict(
    scenes=32,
    valid=8,
    probe=40,
    probe_held=40,
    test=40,
    shown=4,
    point=0,
    baselines='false',
    size=32,
    visual_depth=10,
    visual_width=8,
    width=16,
    heads=2,
    vocab=200,
    dropout=0.1,
    bs=8,
    steps=4,
    warmup=1,
)
CASES = {
    'loctex': dict(method='loctex'),
    'mct': dict(method='mct', queue=20, head_width=16, virtual_batch_size=4),
    'mct without a text encoder': dict(
        method='mct', name='world_moco_v2', queue=20, head_width=16, virtual_batch_size=4
    ),
}


def job(case, **changes):
    "What `pretrain` is called with"
    fields = {**JOB, 'word_weight': 1.0, **CASES[case], **changes}
    given = dict(method=fields.pop('method'), name=fields.pop('name', None))
    return given | dict(changes=[f'{k}={v}' for k, v in fields.items()], threads=1, accumulate=2)


class Words(Callback):
    "The mean loss of the word head in each part of a batch"

    order = 94
    run_valid = False

    def __init__(self):
        self.seen = []

    def after_batch(self):
        total, n = self.learn.loss_func.terms['words'].tolist()
        self.seen.append(total / max(1, n))


def watched(method, watch):
    "The method, its training with one more callback"

    def callbacks(recipe):
        return [*method.callbacks(recipe), watch]

    return replace(method, callbacks=callbacks)


@pytest.mark.parametrize('case', CASES)
def test_a_run_with_a_word_head_resumes_exactly_and_opens_without_it(case, tmp_path, monkeypatch):
    "It is stopped after two of four steps, in parts, resumed to the bits of a run that was not, and opened"
    how = job(case)
    words = Words()
    method = METHODS[how['method']]
    with monkeypatch.context() as m:
        m.setitem(METHODS, method.name, watched(method, words))
        whole = pretrain(run_spec(**how), out=tmp_path / 'whole', log=quiet)
    assert len(words.seen) == 8 and all(0 < v < 20 for v in words.seen)
    with monkeypatch.context() as m:
        m.setitem(METHODS, method.name, leaving(method))
        with pytest.raises(TrainingInterrupted):
            pretrain(run_spec(**how), out=tmp_path / 'run', log=quiet)
    run = tmp_path / 'run'
    assert open_run_folder(run).state()['step'] == 2
    resume_run(run, log=quiet)
    for which in 'last', 'best':
        a, b = (open_run_folder(r).weights(which) for r in (run, whole))
        assert a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())
        assert {k for k in a if 'word_' in k} == {'word_head.weight', 'word_head.bias', 'word_idf'}
    assert rows(run) == rows(whole)
    opened = vlrep.load(run).backbone.state_dict()
    assert all(torch.equal(v, a[f'visual.{k}']) for k, v in opened.items()) and int((a['word_idf'] > 0).sum()) > 20
    assert (
        open_run_folder(run).results()[-1]['numbers']['table']
        == open_run_folder(whole).results()[-1]['numbers']['table']
    )


@pytest.mark.parametrize('method', ['loctex', 'mct'])
def test_a_dry_run_writes_nothing(method, capsys, tmp_path, monkeypatch):
    "A few steps, and nothing is written"
    monkeypatch.chdir(tmp_path)
    fields = [f'{k}={v}' for k, v in {**JOB, 'word_weight': 1.0, **CASES[method]}.items() if k != 'method']
    main(['pretrain', '--method', method, '--dry-run', '--threads', '1', *sets(fields)])
    assert 'step' in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_images_without_captions_are_refused():
    "Refused in one line that says what to leave out"
    bare = world('train', 20, size=32).subset(range(20))
    bare.captions = None
    recipe = replace(METHODS['mct'].recipes['world_moco_v2'], word_weight=1.0)
    with pytest.raises(ValueError, match='has no captions; leave out .* --word-weight 0') as e:
        check_views(recipe, dict(train=bare))
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('source,names', [('narratives', True), ('captions', False)])
def test_the_rarity_of_words_is_counted_in_the_texts_that_are_read(source, names):
    "LocTex counts in the narratives, where there are some"
    data = narrated('train', 60)
    if not names:
        data = data.with_narratives(None)
    recipe = replace(
        METHODS['loctex'].recipes['world'], size=32, visual_width=8, width=16, heads=2, vocab=200, word_weight=1.0
    )
    tokenizer = METHODS['loctex'].train_tokenizer(recipe, data)
    dls = loaders(data, data, collate=METHODS['loctex'].collator(recipe, tokenizer), size=32, bs=8, device='cpu')
    weights = make_learner(METHODS['loctex'], recipe, dls, precision='fp32').model.word_idf
    texts = {'captions': data.captions, 'narratives': names and data.narratives.texts()}[source]
    torch.testing.assert_close(weights, idf(texts.flat(), tokenizer), rtol=0, atol=0)
