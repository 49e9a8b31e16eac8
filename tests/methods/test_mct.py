"""Multimodal contrast: every set of losses trains all that it has, a run goes on with the same queue and copy, steps
that are left out leave no trace, and what is invalid is refused in one line"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from learning import material
from resuming import check
from tools import few_photos, narrated, refused, sets

import vlrep
from vlrep.core.fields import check_fields
from vlrep.data.loader import loaders
from vlrep.datasets.world.dataset import world
from vlrep.experiments.baselines import train_on
from vlrep.experiments.config import override
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import run_spec
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.methods.mct.collate import check_views
from vlrep.training.learner import BaseCallback
from vlrep.training.run_folder import Run, open_run_folder

VARIANTS = {
    'moco_v2': (dict(cc=0.0, ic=0.0, ci=0.0), {'heads.image_intra', 'visual'}),
    'inter': (dict(ii=0.0, cc=0.0), {'heads.image_inter', 'heads.text_inter', 'visual', 'text'}),
    'tags': (dict(tag=1.0, tag_threshold=0), None),
    'tags alone': (dict(ii=0.0, tag=1.0, cc=0.0, ic=0.0, ci=0.0, strict=False, include_own_positive=False), None),
    'words': (dict(tag=1.0, tags_from='words', tag_threshold=1), None),
    'slip': (dict(cc=0.0, inter_loss='nce', ic=0.5, ci=0.5), None),
    'unified': (
        dict(projections='unified', intra_width=32, inter_width=32),
        {'heads.image', 'heads.text', 'visual', 'text'},
    ),
    'sum, groups': (dict(hinge_reduction='sum', ic=0.1, ci=0.1, shuffle_bn=False, virtual_batch_size=4), None),
    'paraphrases': (dict(text_views='paraphrases', swap_sides=True, blur_p=0.5, mask_same=False), None),
}

TINY = dict(
    steps=2,
    warmup=1,
    bs=8,
    queue=20,
    size=32,
    visual_width=8,
    head_width=16,
    scenes=16,
    valid=4,
    probe=40,
    probe_held=40,
    test=40,
    shown=4,
    point=0,
    baselines='false',
)


def tiny(out, name='world', log=str, **changes):
    "The folder of a whole job of some seconds"
    return pretrain(
        run_spec('mct', [f'{k}={v}' for k, v in (TINY | changes).items()], name=name, threads=1), out=out, log=log
    )


class Gradients(BaseCallback):
    "Parts whose weights had a gradient in the last step, and the images of which there are two views"

    order = 40

    def before_step(self):
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        assert all(p.grad is not None for _, p in named)

        def part(n):
            return '.'.join(n.split('.')[: 2 if n.startswith('heads') else 1])

        self.parts = {part(n) for n, p in named if p.grad.abs().sum() > 0}
        self.views = (self.learn.yb[0]['images'] - self.learn.yb[0]['images2']).abs().amax((1, 2, 3))


def trained(splits=None, steps=3, cbs=(), **changes):
    "A learner after a few steps on 64 scenes"
    method, recipe, parts, tokenizer = material('mct')
    recipe = check_fields(replace(recipe, steps=steps, warmup=1, queue=40, bs=16, **changes))
    few = {k: v.subset(range(min(64, len(v)))) for k, v in (splits or parts).items() if k in ('train', 'valid')}
    return train_on(method, recipe, few, 'world', tokenizer, precision='fp32', log=lambda s: None, cbs=cbs)


@pytest.fixture(scope='module')
def has_text():
    return {k: world(k, 64, size=32, with_='paraphrases') for k in ('train', 'valid')}


@pytest.mark.parametrize('name', VARIANTS)
def test_every_set_of_losses_trains_all_that_the_model_has(name, has_text):
    "All that the model has learns, views differ, the copy follows, the queue is full, a validation is finite"
    changes, parts = VARIANTS[name]
    seen = Gradients()
    learn = trained(has_text, cbs=[seen], **changes)
    m = learn.model
    assert parts is None or seen.parts == parts
    assert float(seen.views.min()) > 0
    assert int(m.queue.steps) == 3 and int(m.queue.active.sum()) == 40 and (m.queue.ids[m.queue.active] >= 0).all()
    slow = dict(m.momentum_encoder['visual'].named_parameters())
    assert all(float((p - slow[n]).abs().max()) > 0 for n, p in m.visual.named_parameters())
    held_out = float(learn.validate()[0])
    assert np.isfinite(held_out) and held_out == float(learn.validate()[0])
    can = learn.capabilities(m)
    assert ('embed_text' in can) == bool(changes.get('ic', material('mct')[1].ic))


class Spoil(Callback):
    "One batch of images that are not numbers, in both views; looks at the model when all else is done"

    order = 90
    run_valid = False

    def __init__(self, batch):
        self.batch = batch

    def look(self):
        "What later steps depend on: of the queue, the keys that are negatives"
        q = self.model.queue
        state = self.model.state_dict()
        own = {k: v[q.active] for k, v in q.named_buffers() if v.ndim}
        return {**{k: v.clone() for k, v in state.items() if not k.startswith('queue.')}, **own}

    def before_batch(self):
        self.kept = self.look()
        if self.learn.train_state.batch == self.batch:
            for k in ('images', 'images2'):
                self.learn.xb[0][k].fill_(torch.nan)

    def after_batch(self):
        now = self.look()
        if self.learn.train_state.batch == self.batch + 1:
            self.moved = {k for k in now if not torch.equal(self.kept[k], now[k])}
            self.finite = all(v.isfinite().all() for v in self.model.state_dict().values())


def test_a_step_that_is_left_out_leaves_no_trace():
    "Neither weights nor copy nor keys; only what counts batches may move, and the next step is a step"
    spoil = Spoil(1)
    learn = trained(cbs=[spoil])
    assert learn.train_state.skipped == 1
    assert all(k.endswith('num_batches_tracked') for k in spoil.moved), spoil.moved
    assert spoil.finite and int(learn.model.queue.steps) == 2


def test_parts_of_a_step_are_one_step():
    "The copy follows once, the queue takes all parts at the end"
    method, recipe, parts, tokenizer = material('mct')
    recipe = replace(recipe, steps=2, warmup=1, queue=40, bs=16)
    few = {k: v.subset(range(min(64, len(v)))) for k, v in parts.items() if k in ('train', 'valid')}
    learn = train_on(method, recipe, few, 'world', tokenizer, precision='fp32', log=lambda s: None, accumulate=4)
    q = learn.model.queue
    assert int(q.steps) == 2 and int((q.ids[q.active] >= 0).sum()) == 32 and int(q.staged) == 0


def test_resume_within_an_accumulation_window_is_exact(tmp_path):
    "The queue, its staged keys, and the copy; in the first epoch, and in the second, when the queue has wrapped around"
    few = narrated('train', 32), narrated('valid', 16)
    check(tmp_path, few, [5, 13], method='mct', accumulate=3, steps=8, bs=8, queue=22)


def test_a_run_with_tags_opens_without_its_data(tmp_path):
    "Its queue has tags beside the keys; how many, is among the sizes of the run"
    method, recipe, parts, tokenizer = material('mct')
    recipe = replace(recipe, steps=3, warmup=1, queue=40, tag=1.0)
    learn = trained(tag=1.0)
    facts = dict(method='mct', name='world', data=dict(name='world'), seed=0, precision='fp32', threads=1)
    facts |= dict(sizes=learn.sizes, side=parts['train'].size)
    with Run.create(tmp_path / 'run', recipe=recipe, **facts) as run:
        tokenizer.save(run / 'tokenizer.model')
        run.save('best', learn.model.state_dict(), dict(step=3))
    m = vlrep.load(tmp_path / 'run')
    images = learn.dls.valid.one_batch()[0]['images']
    learn.model.eval()
    torch.testing.assert_close(m.capabilities['embed_image'](images), learn.model.embed_image(images))


def test_a_run_without_text_is_finished_opened_and_resumed(tmp_path):
    "MoCo v2 by switching losses off: a run without tokenizer, finished, opened, and gone on with"
    run = tiny(tmp_path / 'run', 'world_moco_v2')
    assert not (run / 'tokenizer.model').exists() and 'retrieval' not in open_run_folder(run).results()[0]['numbers']
    m = vlrep.load(run)
    assert m.tokenizer is None and not {'embed_image', 'embed_text'} & set(m.capabilities)
    lines = []
    resume_run(run, log=lines.append)
    assert 'nothing is left to do' in lines[0]


def test_the_report_says_which_text_views(tmp_path):
    "What the method's check says of the data is in the log, in recipe.json, and in the report, also of a resumed run"

    def shown(run):
        notes = open_run_folder(run).info['notes']
        page = (run / 'report.html').read_text(encoding='utf-8')
        assert len(notes) == 4 and all(f'<p>{n}.</p>' in page for n in notes), notes
        return notes

    lines = []
    run = tiny(tmp_path / 'run', log=lines.append, width=16, heads=2, vocab=200, virtual_batch_size=4)
    first, queue, train, valid = shown(run)
    assert all(l.startswith(f'{k}: ') and 'tokens are unknown' in l for k, l in dict(train=train, valid=valid).items())
    assert first == 'text views: two captions of an image, of 5' and queue.startswith('queue=20') and first in lines
    for f in ('result.jsonl', 'report.html'):
        (run / f).unlink()
    resume_run(run, log=str)
    assert shown(run) == [first, queue, train, valid]


def test_the_report_says_where_paraphrases_are_from(tmp_path, has_text):
    "Their file, or the data itself, and how many captions have one"
    import json

    recipe = replace(METHODS['mct'].recipes['world'], text_views='paraphrases', queue=100, bs=16)
    few = dict(train=has_text['train'].subset(range(16)))
    captions = list(few['train'].captions.flat())
    (own,) = [l for l in check_views(recipe, few) if l.startswith('text views')]
    assert own == f'text views: paraphrases of {len(captions)} of {len(captions)} captions, from the data'
    at = tmp_path / 'p.jsonl'
    half = sorted(set(captions))[:9]

    def line(c):
        return dict(image='1', caption_index=0, caption=c, paraphrases=[dict(via='fr', text='another ' + c)])

    at.write_text(''.join(json.dumps(line(c)) + '\n' for c in half), encoding='utf-8')
    (other,) = [l for l in check_views(replace(recipe, paraphrases=str(at)), few) if l.startswith('text views')]
    n = sum(c in half for c in captions)
    assert other == f'text views: paraphrases of {n} of {len(captions)} captions, from {at}' and n < len(captions)


def test_loaders_made_by_hand_have_two_views_too():
    method, recipe, parts, tokenizer = material('mct')
    dls = loaders(
        parts['train'], parts['valid'], collate=method.collator(recipe, tokenizer), size=32, bs=8, device='cpu'
    )
    learn = make_learner(method, recipe, dls, precision='fp32')
    assert 'images2' in learn.dls.train.one_batch()[0] and 'images2' not in dls.train.one_batch()[0]
    again = make_learner(method, recipe, learn.dls, precision='fp32')
    assert type(again.dls.train.aug) is type(learn.dls.train.aug) and not hasattr(again.dls.train.aug.view, 'view')


# ---------------------------------------------------------------- what is invalid

WRONG = {
    'queue=64': 'queue=64: must be longer than a batch of 64',
    'temperature=0': 'temperature=0.0: must be above 0',
    'ic=0': 'both or neither',
    'key_momentum=1.1': 'key_momentum=1.1',
    'tags_from=nouns': "'nouns'",
    'paraphrases=gone.jsonl': 'gone.jsonl: no such file',
    'tag=1 tags_from=words tag_words=0': 'tag_words=0: with tags_from=words',
    'projections=unified': 'one head for both needs one',
}


@pytest.mark.parametrize('change', WRONG)
def test_wrong_fields_are_refused_by_name(change, capsys):
    assert WRONG[change] in refused(capsys, 'pretrain', '--method', 'mct', *sets(change.split()))


def test_fields_that_need_what_the_data_lacks_are_refused(tmp_path, capsys):
    words = ['pretrain', '--method', 'mct', '--data', 'csv', '--root', few_photos(tmp_path, 60)]
    text = refused(capsys, *words, '--out', tmp_path / 'run', *sets(['queue=40', 'bs=8']))
    assert 'no image has a second caption' in text and '--text-views same --set dropout=.1' in text
    text = refused(capsys, *words, '--out', tmp_path / 'run', *sets(['queue=40', 'bs=8', 'text_views=same']))
    assert 'text=scratch has no dropout' in text and not (tmp_path / 'run').exists()
    assert 'learns from labels, and csv has none' in refused(capsys, *words, '--set', 'tag=1')
    bare = {'train': world('train', 20, size=32).subset(range(20))}
    bare['train'].labels = {}
    tagged = replace(METHODS['mct'].recipes['world'], tag=1.0)
    with pytest.raises(ValueError, match='has no tags'):
        check_views(tagged, bare)
    text = refused(
        capsys,
        'pretrain',
        '--method',
        'mct',
        '--out',
        tmp_path / 'run',
        *sets(['scenes=16', 'valid=4', 'bs=8', 'tag=1', 'tag_threshold=1000']),
    )
    assert 'tag_threshold=1,000: no image of' in text and not (tmp_path / 'run').exists()


MUTE = {
    'cc=1': 'has no captions; leave out what reads them',
    'text_views=same': 'has no captions; leave out',
    'tags_from=words': 'has no captions; leave out',
    'text_views=paraphrases': 'has no captions; leave out',
}


@pytest.mark.parametrize('change', MUTE)
def test_images_without_captions_are_refused_where_text_is_read(change):
    "One line that says what to leave out, whatever was to be read"
    bare = world('train', 20, size=32).subset(range(20))
    bare.captions = None
    moco = dict(tag=1.0, cc=0.0, ic=0.0, ci=0.0) if change == 'tags_from=words' else {}
    recipe = override(METHODS['mct'].recipes['world'], [change, *(f'{k}={v}' for k, v in moco.items())])
    with pytest.raises(ValueError, match=MUTE[change]) as e:
        check_views(recipe, dict(train=bare))
    assert '\n' not in str(e.value)


def test_data_without_paraphrases_is_refused_before_training(tmp_path, capsys):
    "Before anything is learned, and before the tokenizer"
    words = ['pretrain', '--method', 'mct', '--data', 'csv', '--root', few_photos(tmp_path, 60)]
    text = refused(capsys, *words, '--out', tmp_path / 'run', *sets(['queue=40', 'bs=8', 'text_views=paraphrases']))
    assert 'paraphrases' in text and not (tmp_path / 'run').exists()


# ---------------------------------------------------------------- a BERT as the tower of texts


def test_a_small_bert_as_text_encoder_learns_on_and_opens(tmp_path, monkeypatch):
    "It begins with what it has learned from the captions, learns on, and is opened without them"
    import vlrep.methods.mct.method as method
    from vlrep.models.bert_weights import SmallBertPlan, make_bert

    plan = SmallBertPlan(steps=2)
    monkeypatch.setattr(method, 'make_bert', lambda *a, **kw: make_bert(*a, **{'plan': plan, **kw}))
    learn = trained(text='small')
    first = method.make_bert('small', learn.dls.train.source, learn.dls.train.tokenizer, 0, mlm=False, log=None)
    moved = [k for k, p in first.named_parameters() if not torch.equal(p, dict(learn.model.text.named_parameters())[k])]
    assert 'pooler.weight' in moved and all(
        float((p - dict(learn.model.text.named_parameters())[k]).abs().max()) < 0.5 for k, p in first.named_parameters()
    )
    recipe = replace(material('mct')[1], steps=3, warmup=1, queue=40, text='small')
    facts = dict(method='mct', name='world', data=dict(name='world'), seed=0, precision='fp32', threads=1)
    facts |= dict(sizes=learn.sizes, side=recipe.size)
    with Run.create(tmp_path / 'run', recipe=recipe, **facts) as run:
        learn.dls.train.tokenizer.save(run / 'tokenizer.model')
        run.save('best', learn.model.state_dict(), dict(step=3))
    m = vlrep.load(tmp_path / 'run')
    b = learn.dls.valid.one_batch()[0]
    learn.model.eval()
    got = m.capabilities['embed_text'](b['tokens'], b['lengths'])
    want = learn.model.embed_text(b['tokens'], b['lengths'])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize('weights', ['pretrained', 'random'])
def test_a_run_is_opened_without_the_folder_of_its_bert(tmp_path, weights):
    "Its weights are in the run, and its sizes in recipe.json"
    import shutil

    from vlrep.models.bert_model import Bert
    from vlrep.models.bert_weights import load_bert, save_bert, small_config

    tokenizer = material('mct')[3]
    folder = tmp_path / 'bert'
    save_bert(Bert(replace(small_config(tokenizer, 32, 1), heads=4, eps=1e-6), 3), folder, tokenizer)
    run = tiny(tmp_path / 'run', text=folder, text_weights=weights, max_len=20)
    assert open_run_folder(run).info['sizes']['bert'].items() >= dict(width=32, depth=1, heads=4, eps=1e-6).items()

    def embed():
        return vlrep.load(run).capabilities['embed_text'](torch.tensor([[2, 9, 7, 3]]), torch.tensor([4]))

    before = embed()
    states = [open_run_folder(run).weights()['text.words.weight'], load_bert(folder, log=None).words.weight.detach()]
    alike = float(torch.corrcoef(torch.stack([w.flatten() for w in states]))[0, 1])
    assert alike > 0.7 if weights == 'pretrained' else abs(alike) < 0.3, alike  # after two steps
    shutil.rmtree(folder)
    torch.testing.assert_close(embed(), before, rtol=0, atol=0)


def test_contrast_of_images_alone_needs_no_captions():
    "MoCo v2, by switching losses off; the nouns of captions as tags need them again"
    from vlrep.methods.mct.collate import mct_tokenizer

    alone = METHODS['mct'].recipes['world_moco_v2']
    assert METHODS['mct'].needs(alone) == frozenset() and mct_tokenizer(alone, None) is None
    assert METHODS['mct'].needs(replace(alone, tag=1.0)) == {'labels'}
    assert METHODS['mct'].needs(replace(alone, tag=1.0, tags_from='words')) == {'captions'}
    assert METHODS['mct'].needs(METHODS['mct'].recipes['world']) == {'captions'}
