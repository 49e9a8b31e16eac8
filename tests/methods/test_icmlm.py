"""ICMLM: attention, what is frozen, every switch, a published BERT, what is refused, and a run from start to end"""

import copy
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tools import TWO_STEPS, refused

from vlrep.core.fields import check_fields
from vlrep.data.loader import loaders
from vlrep.datasets.world.dataset import world
from vlrep.evaluation.masked_words.table import masked_word_maps, masked_word_table
from vlrep.experiments.commands import evaluate
from vlrep.experiments.load_run import open_run
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import run_spec
from vlrep.methods.base import METHODS
from vlrep.methods.icmlm.heads import AttFcHead, TfmHead
from vlrep.methods.icmlm.model import MaskedWordModel
from vlrep.methods.learner import make_learner
from vlrep.models.bert_model import Bert, BertConfig
from vlrep.models.bert_weights import save_bert
from vlrep.models.concept_head import ConceptHead
from vlrep.models.pretrained import Pretrained
from vlrep.models.timm_torchvision import named_backbone
from vlrep.training.checkpoint import frozen_weights
from vlrep.training.run_folder import open_run_folder

METHOD = METHODS['icmlm']
SMALL = dict(size=32, visual_width=8, vocab=300, width=16, depth=1, heads=2, bert_steps=20, bs=16, steps=4, warmup=1)


@pytest.fixture(scope='module')
def data():
    return world('train', 48, size=32), world('valid', 16, size=32)


def recipe(**changes):
    return check_fields(replace(METHOD.recipes['world'], **{**SMALL, **changes}))


def made(data, visual=None, **changes):
    "A learner and its recipe"
    r = recipe(**changes)
    tokenizer = METHOD.train_tokenizer(r, data[0])
    dls = loaders(*data, collate=METHOD.collator(r, tokenizer), size=32, bs=16, device='cpu')
    return make_learner(METHOD, r, dls, visual=visual, precision='fp32'), r


def two_steps(data, **changes):
    "Held-out loss, and the sum of all trained weights, after the recipe's steps"
    learn, r = made(data, **changes)
    learn.fit_steps(r.steps)
    return float(learn.validate()[0]), float(sum(p.double().abs().sum() for p in learn.model.visual.parameters()))


# ---------------------------------------------------------------- the heads


@pytest.mark.parametrize('kind', [TfmHead, AttFcHead])
def test_attention_over_cells_sums_to_1_and_moves_with_the_cells(kind):
    "It sums to 1, moves with the cells, is even where all cells are alike; their order changes no answer"
    torch.manual_seed(0)
    head = kind(6, 8, 2, 2).eval()
    x = torch.randn(3, 12, 6)
    w = torch.randn(3, 7, 8)
    lengths = torch.tensor([7, 4, 5])
    place = torch.tensor([3, 1, 2])
    real = torch.arange(7) < lengths[:, None]
    out, p = head(x, w, real, place)
    order = torch.randperm(12)
    moved, q = head(x[:, order], w, real, place)
    assert torch.allclose(p.sum(1), torch.ones(3)) and torch.allclose(q, p[:, order], atol=1e-6)
    assert torch.allclose(moved, out, atol=1e-5)
    even = head(x[:, :1].expand(-1, 12, -1), w, real, place)[1]
    assert torch.allclose(even, torch.full_like(even, 1 / 12), atol=1e-6)
    padded = head(x, w.masked_fill(~real[..., None], 9.0), real, place)
    assert torch.allclose(padded[0], out, atol=1e-5) and torch.allclose(padded[1], p, atol=1e-6)


def test_the_text_of_att_fc_only_says_where_to_look(data):
    "With the weights of att-fc fixed, another sentence gives the same scores; with tfm it does not"
    for head in ('attfc', 'tfm'):
        model = made(data, head=head)[0].model.eval()
        model.head.to(torch.float32)
        x = torch.randn(2, 16, model.visual.width)
        real = torch.ones(2, 5, dtype=torch.bool)
        a, b = torch.randn(2, 2, 5, 16)
        place = torch.tensor([1, 2])
        if head == 'attfc':
            p = model.head.attention(x, a, real)
            model.head.attention = lambda *_: p
        same = torch.equal(model.words(model.head(x, a, real, place)[0]), model.words(model.head(x, b, real, place)[0]))
        assert same == (head == 'attfc')


class TwoWide(torch.nn.Module):
    "A backbone whose grid is one cell, (2,-1)"

    width = 2

    def forward(self, images):
        return torch.tensor([2.0, -1.0]).expand(len(images), 2)[..., None, None]


@pytest.mark.parametrize('mlm_head', [False, True])
def test_scores_of_att_fc_are_those_worked_out_by_hand(mlm_head):
    """att-fc's answer is a product with BERT's word vectors

    One cell (2,-1), fc the identity, words (1,0), (0,1), (1,1): 2, -1 and 1. With BERT's whole classifier, whose first
    layer is made the identity here, LayerNorm makes (1,-1) of it first, and its bias (0,0,3) is added: 1, -1 and 3.
    """
    bert = Bert(BertConfig(3, 2, 1, 1, max_len=4, pad=0), 0, pooler=False)
    with torch.no_grad():
        bert.words.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        bert.transform.weight.copy_(torch.eye(2))
        bert.transform.bias.zero_()
        bert.bias.copy_(torch.tensor([0.0, 0.0, 3.0]))
    head = AttFcHead(2, 2, 1)
    head.fc = torch.nn.Identity()

    class Tok:
        mask = 2

        def __len__(self):
            return 3

    model = MaskedWordModel(TwoWide(), bert, head, ConceptHead(2, 1), Tok(), mlm_head=mlm_head).eval()
    batch = dict(
        images=torch.zeros(1, 3, 8, 8),
        tokens=torch.tensor([[1, 2, 1]]),
        lengths=torch.tensor([3]),
        place=torch.tensor([1]),
        answer=torch.tensor([0]),
        weight=torch.ones(1),
        concepts=torch.ones(1, 1),
    )
    want = torch.tensor([[1.0, -1.0, 3.0] if mlm_head else [2.0, -1.0, 1.0]])
    for got in (model.words(torch.tensor([[2.0, -1.0]])), model(batch)['logits'], model.fill_mask(batch)):
        assert torch.allclose(got, want, atol=1e-4), got
    assert model.attend(batch['images'], batch['tokens'], batch['lengths']).flatten().tolist() == [1.0] * 3


# ---------------------------------------------------------------- BERT stays, the backbone waits


def test_no_weight_of_bert_moves(data):
    "The same bits after steps with weight decay, no gradient, no dropout while everything else trains"
    learn, r = made(data, head='attfc', wd=0.1)
    model = learn.model
    remaining = copy.deepcopy(model.bert.state_dict())
    learn.fit_steps(r.steps)
    model.train()
    assert model.visual.training and not any(m.training for m in model.bert.modules())
    b = learn.dls.train.one_batch()[0]
    first, again = (model.language(b['tokens'], b['lengths'])[0] for _ in range(2))
    assert torch.equal(first, again)
    assert all(torch.equal(v, remaining[k]) for k, v in model.bert.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.bert.parameters())
    trained = {id(p) for g in learn.opt.param_groups for p in g['params']}
    assert not trained & {id(p) for p in model.bert.parameters()}


@pytest.mark.parametrize('optimiser', ['sgd', 'radam'])
def test_the_backbone_waits_for_half_of_the_steps(data, optimiser):
    "Half of the steps without a bit of change, statistics included, whatever decay and momentum; then it learns"
    learn, r = made(data, frozen_start=0.5, wd=0.1, optimiser=optimiser, frozen_stages=1)
    net = learn.model.visual
    first = copy.deepcopy(net.state_dict())
    head = copy.deepcopy(learn.model.head.state_dict())
    learn.fit_steps(2)
    assert all(torch.equal(v, first[k]) for k, v in net.state_dict().items()) and not learn.model.frozen
    assert any(not torch.equal(v, head[k]) for k, v in learn.model.head.state_dict().items())
    learn.fit_steps(4)
    moved = {k for k, v in net.state_dict().items() if not torch.equal(v, first[k])}
    assert 'layer4.0.conv1.weight' in moved and 'layer4.0.bn1.running_mean' in moved
    assert not [k for k in moved if k.startswith(('conv1', 'bn1'))]  # and the frozen stem stays frozen


def test_lambda_0_trains_no_tags(data):
    "The concept classifier has a gradient of exactly zero, and the loss is the masked word's alone"
    learn, _ = made(data, tag_weight=0.0)
    model = learn.model.train()
    b = learn.dls.train.one_batch()[0]
    out = model(b)
    total, n = learn.loss_func.counted(out, b)
    word = torch.nn.functional.cross_entropy(out['logits'], b['answer'], reduction='none')
    assert float(n) == float(b['weight'].sum())
    assert math.isclose(float(total.detach()), float((word * b['weight']).sum().detach()), rel_tol=1e-5)
    (total / n).backward()
    assert {float(p.grad.abs().max()) for p in model.tags.parameters()} == {0.0}
    assert float(model.visual.conv1.weight.grad.abs().max()) > 0


def test_both_terms_are_logged_apart(data):
    "The held-out loss is the word's mean over triplets plus lambda times the tags' mean over images"
    learn, _ = made(data, tag_weight=0.5)
    # tags that cost differently for each image
    torch.nn.init.normal_(learn.model.tags.out.weight, generator=torch.Generator().manual_seed(0))
    loss = float(learn.validate()[0])
    b = learn.dls.valid.one_batch()[0]
    with torch.no_grad():
        out = learn.model.eval()(b)
    parts = learn.recorder.loss.terms
    word = torch.nn.functional.cross_entropy(out['logits'], b['answer'], reduction='none')
    shared = b['concepts'] / b['concepts'].sum(1, keepdim=True)
    tags = -(shared * out['tags'].log_softmax(1)).sum(1)
    assert len(b['weight'].unique()) > 1 and tags.std() > 0.1 and list(parts) == ['word', 'tags']
    assert math.isclose(parts['word'], float((word * b['weight']).sum() / b['weight'].sum()), rel_tol=1e-5)
    assert math.isclose(parts['tags'], float(tags.mean()), rel_tol=1e-5)
    assert math.isclose(loss, parts['word'] + 0.5 * parts['tags'], rel_tol=1e-5)


# ---------------------------------------------------------------- what the model is asked


@pytest.mark.parametrize('table', [True, False])
def test_evaluation_has_no_dropout(table, data):
    "In training mode the head drops half of its numbers; asked, it does not, and is in training mode again afterwards"
    learn, _ = made(data, head='tfm', dropout=0.5)
    m = Pretrained.from_learner(learn)
    heard = []
    learn.model.head.register_forward_hook(lambda head, _, out: heard.append((head.training, out[0].clone())))
    learn.model.train()
    b = learn.dls.train.one_batch()[0]
    with torch.no_grad():
        one, other = (learn.model(b)['logits'] for _ in range(2))
    assert not torch.equal(one, other)  # or nothing is tested
    heard.clear()
    for _ in range(2):
        if table:
            masked_word_table(m, data[1], n=20)
        else:
            masked_word_maps(m, data[1][0].load(), data[1].captions[0][0])
        assert learn.model.training and learn.model.head.training and learn.model.visual.training
        assert not any(x.training for x in learn.model.bert.modules())
    half = len(heard) // 2
    assert half and not any(training for training, _ in heard)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(heard[:half], heard[half:]))


# ---------------------------------------------------------------- batches


def test_exactly_one_word_is_masked(data):
    "One [MASK] each, where `place` says; with the answer put back it is a caption of the image"
    learn, r = made(data)
    tokenizer = learn.dls.train.tokenizer
    collate = learn.dls.train.collate
    for epoch in range(3):
        b = collate(data[0], np.arange(48), epoch, 0, np.zeros(48, bool))
        assert ((b['tokens'] == tokenizer.mask).sum(1) == 1).all()
        for i in range(48):
            ids = b['tokens'][i, : b['lengths'][i]].clone()
            ids[b['place'][i]] = b['answer'][i]
            texts = [[tokenizer.sos, *collate.ids(t)[: r.max_len - 2], tokenizer.eos] for t in data[0].captions[i]]
            assert ids.tolist() in texts and tokenizer.decode([b['answer'][i]]) in collate.concepts.index
    seen = b['concepts'].sum(1)
    assert seen.min() > 0 and b['concepts'].shape == (48, len(collate.concepts))


def test_normalised_tags_of_an_image_sum_to_1(data):
    "Normalised, an image's tags sum to 1; the tags are the union over its captions"
    learn, _ = made(data)
    collate = learn.dls.train.collate
    y = torch.from_numpy(collate.tags.rows(data[0], np.arange(48), np.zeros(48, bool)))
    assert torch.allclose((y / y.sum(1, keepdim=True)).sum(1), torch.ones(48))
    ok = collate.usable(data[0])
    rows = data[0].captions.rows
    for i in range(48):
        read = [t for t, o in zip(data[0].captions[i], ok[rows[i] : rows[i + 1]]) if o]
        assert y[i].nonzero().flatten().tolist() == sorted({k for t in read for k in collate.concepts.of([t])})


# ---------------------------------------------------------------- switches

SWITCHES = [
    dict(head='attfc'),
    dict(layers=2),
    dict(heads=4),
    dict(full_width_heads=True),
    dict(full_mlm_head=True),
    dict(tag_weight=0.0),
    dict(sampling='captions'),
    dict(frozen_start=0.5),
    dict(parts='nn'),
    dict(top_k=20),
    dict(min_count=9),
    dict(max_tokens=6),
    dict(optimiser='radam'),
    dict(schedule='steps'),
    dict(tag_head='mlp'),
    dict(tag_head='conv', tag_width=8),
    dict(dropout=0.5),
    dict(width=32),
    dict(depth=2),
    dict(bert_steps=5),
    dict(bert_part=0.5),
]
OF_ATTFC = [dict(layers=2), dict(heads=4), dict(att_width=8), dict(fc_final_linear=False), dict(att_mask_specials=True)]


@pytest.fixture(scope='module')
def usual(data):
    return {h: two_steps(data, head=h) for h in ('tfm', 'attfc')}


@pytest.mark.parametrize('changes', [*SWITCHES, *(dict(head='attfc', **c) for c in OF_ATTFC)], ids=str)
def test_every_switch_trains(changes, data, usual):
    got = two_steps(data, **changes)
    before = usual['attfc' if len(changes) > 1 and 'head' in changes else 'tfm']
    assert all(map(np.isfinite, got)) and got != before


@pytest.mark.parametrize('method', ['icmlm', 'tag_prediction'])
def test_every_recipe_is_sound(method):
    for name, r in METHODS[method].recipes.items():
        assert check_fields(r) is r, name


# ---------------------------------------------------------------- a published BERT


@pytest.fixture(scope='module')
def folder(data, tmp_path_factory):
    "A BERT in a folder, as others publish it"
    at = tmp_path_factory.mktemp('bert') / 'bert'
    tokenizer = METHOD.train_tokenizer(recipe(), data[0])
    save_bert(Bert(BertConfig(len(tokenizer), 24, 1, 2, max_len=40, pad=tokenizer.pad), 3), at, tokenizer)
    return at


def test_a_bert_is_saved_once_and_older_checkpoints_load(data, folder):
    "BERT is frozen, so that a run keeps it once; older checkpoints have its digest alone, and refuse another BERT"
    learn, _ = made(data, bert=str(folder))
    state = learn.model.state_dict()
    own = [k for k in state if k.startswith('bert.')]
    assert own and set(own) <= set(frozen_weights(learn.model)) and state['digest'].shape == (32,)
    old = {k: v for k, v in state.items() if k not in own}
    made(data, bert=str(folder))[0].model.load_state_dict(old)
    whole = made(data)[0].model.state_dict()
    table = [k for k, v in whole.items() if v.shape == whole['bert.words.weight'].shape]
    assert table == ['bert.words.weight']  # the words' vectors are there once
    for w in (state, old):
        with pytest.raises(ValueError, match='a different BERT'):
            made(data, bert=str(folder))[0].model.load_state_dict({**w, 'digest': state['digest'].flip(0)})


def test_a_longer_caption_than_bert_has_positions_is_refused_before_training(data, folder):
    splits = dict(train=data[0], valid=data[1])
    with pytest.raises(ValueError, match=r'max_len=60: .*has positions for 40 tokens only'):
        METHOD.check(recipe(bert=str(folder), max_len=60), splits, 'world')
    assert METHOD.check(recipe(bert=str(folder), max_len=40), splits, 'world')


def test_a_bert_without_weights_is_refused_before_training(data, folder, tmp_path):
    "The check that runs before any network, baselines too, is trained"
    at = shutil.copytree(folder, tmp_path / 'empty')
    (at / 'model.safetensors').unlink()
    with pytest.raises(ValueError, match='empty: has no weights: neither model.safetensors nor'):
        METHOD.check(recipe(bert=str(at)), dict(train=data[0], valid=data[1]), 'world')


def test_words_are_clustered_by_the_states_of_a_given_bert(data, folder, monkeypatch):
    "By the path of the recipes of the paper; the number of clusters is checked before a BERT is opened or trained"
    import vlrep.methods.tag_prediction.collate as collate

    tags = METHODS['tag_prediction']
    splits = dict(train=data[0], valid=data[1])
    r = replace(tags.recipes['world'], concepts='cluster', vectors='bert', bert=str(folder), top_k=5)
    assert '5 concepts (cluster)' in tags.check(r, splits, 'world')[0]
    monkeypatch.setattr(collate, 'make_bert', lambda *a, **k: pytest.fail('a BERT was opened'))
    for bert in (str(folder), 'small'):
        with pytest.raises(ValueError, match='top_k=100000: the number of clusters'):
            tags.check(replace(r, bert=bert, top_k=10**5), splits, 'world')


# ---------------------------------------------------------------- VGG16, as in the main text of the paper


def test_all_of_vgg16_learns_and_waits(data, folder):
    "RotNet, tag prediction, ICMLM in turn, recipes of the paper but for sizes: all of VGG16 learns, and waits"
    visual = named_backbone('torchvision/vgg16', seed=0)

    def check_learning(method, name, **changes):
        "Which weights of VGG16 a step changes, for two steps"
        m = METHODS[method]
        r = check_fields(replace(m.recipes[name], **{**dict(size=32, bs=2, steps=4), **changes}))
        tokenizer = m.train_tokenizer(r, data[0])
        dls = loaders(*data, collate=m.collator(r, tokenizer), size=32, bs=2, device='cpu')
        learn = make_learner(m, r, dls, visual=visual, precision='fp32')
        moved = []
        assert type(learn.opt.opt).__name__ == 'RAdam' and learn.model.visual is visual
        for n in (1, 2):
            old = [p.detach().clone() for p in visual.parameters()]
            learn.fit_steps(n)
            moved.append({bool((a != b).any()) for a, b in zip(old, visual.parameters())})
        assert all(p.isfinite().all() for p in learn.model.parameters())
        return moved

    few = dict(top_k=20)
    # classifiers begin at zero, and give no gradient in the first step
    assert check_learning('rotnet', 'rotnet_vgg16')[1] == {True}
    assert check_learning('tag_prediction', 'tp_postag_vgg16', **few)[1] == {True}
    # att-fc waits for a quarter of the steps, weight decay and all
    assert check_learning('icmlm', 'icmlm_attfc_vgg16', bert=str(folder), **few) == [{False}, {True}]


# ---------------------------------------------------------------- what is refused, in one line, before any training

BAD = {
    'top_k=5000': 'top_k=5000: the captions have only',
    'vocab=64 parts=nn min_count=1': 'the vocabulary splits or lacks all',
    'min_tokens=400 max_tokens=400': 'no caption of 400 to 400 tokens has a concept',
    'bert=no/such/folder': 'no/such/folder: no such folder',
    'heads=3': 'heads=3: a width of 64',
    'head=attfc full_mlm_head=yes': 'head=attfc: full_width_heads',
    'net=vgg16': 'add --backbone torchvision/vgg16',
    'min_count=100000': 'no word of the captions is left',
    'head=att-fc': "did you mean 'attfc'",
}


@pytest.mark.parametrize('changes', BAD)
def test_bad_input_is_refused_in_one_line(changes, capsys):
    words = [w for c in changes.split() for w in ('--set', c)]
    assert BAD[changes] in refused(capsys, 'pretrain', '--method', 'icmlm', *TWO_STEPS, *words)


def test_words_that_cannot_be_masked_are_counted(data):
    lines = METHOD.check(recipe(vocab=150), dict(train=data[0], valid=data[1]), 'world', 1)
    assert 'triplets of' in lines[0] and 'are not one token of the vocabulary and cannot be masked: ' in lines[1]


# ---------------------------------------------------------------- a run


def test_a_run_has_its_tables_and_opens_to_the_same_answers(tmp_path):
    "A run with att-fc has the tables of masked words and of places; opened again, it gives the same answers"
    sizes = [
        'scenes=64',
        'valid=8',
        'probe=40',
        'probe_held=40',
        'test=40',
        'shown=8',
        'point=8',
        'baselines=no',
        'zeroshot=600',
    ]
    small = [f'{k}={v}' for k, v in SMALL.items()]
    out = pretrain(
        run_spec('icmlm', [*sizes, *small], name='icmlm_attfc', threads=1, precision='fp32'),
        out=tmp_path / 'run',
        log=lambda s: None,
    )
    num = open_run_folder(out).results()[-1]['numbers']
    columns = (out / 'log.csv').read_text().splitlines()[0].split(',')
    assert {'train_word', 'train_tags', 'valid_word', 'valid_tags'} <= set(columns), columns
    rows = {(r['backbone'], r['metric']): r for r in num['masked_words']}
    assert {b for b, _ in rows} == {'icmlm', 'other image', 'text alone', 'unigram'} and num['table'] and num['where']
    assert [r['question'] for r in num['zeroshot']][::4] == ['seen and unseen, of all', 'harmonic mean']
    assert all(r['n'] > 100 and r['low'] <= r['value'] <= r['high'] for r in rows.values()), rows
    m = open_run(out)
    assert {'attend', 'fill_mask', 'masked_counts', 'backbone'} <= set(m.capabilities)
    again = {(r['backbone'], r['metric']): r['value'] for r in evaluate(out, 'masked_words', log=lambda s: None)}
    assert again == {k: r['value'] for k, r in rows.items()}
    (frozen,) = (out / 'frozen').iterdir()  # BERT: once for all checkpoints
    held_out = {p: set(load_file(p)) for p in [frozen, *out.glob('**/model.safetensors')]}
    assert len(held_out) > 2 and all(
        {k.split('.')[0] == 'bert' for k in ks} == {p == frozen} for p, ks in held_out.items()
    )
    assert set().union(*held_out.values()) == set(open_run_folder(out).weights('best'))
    samples = json.loads((out / 'samples.json').read_text())
    assert samples['words'] and all(abs(np.sum(w['map']) - 1) < 0.01 for s in samples['words'] for w in s['words'])
