"""BERT against transformers' own: outputs, gradients, tokens, files both ways; small BERTs in two processes

What a BERT is and what its files may hold is checked in nbs/models/57_bert_model and 58_bert_weights.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tools import ENV

import vlrep.models.bert_weights as library
from vlrep.core.files import read_json, write_json
from vlrep.core.seeding import rng
from vlrep.data.records import ArrayDataset
from vlrep.data.tokenizer import Tokenizer, pad_tokens
from vlrep.data.wordpiece import WordPieceTokenizer
from vlrep.models.bert_model import Bert
from vlrep.models.bert_weights import (
    SmallBertPlan,
    bert_tokenizer,
    load_bert,
    make_bert,
    save_bert,
    small_config,
    train_small_bert,
)

SPECIAL = '[PAD] [UNK] [CLS] [SEP] [MASK]'.split()
WORDS = (
    'a an the cat dog run ##s ##ning ##ed un ##able play ##er cafe naive ##ly is on red ball ! " # $ % & \' ( ) '
    '* + , - . / : ; < = > ? @ [ \\ ] ^ _ ` { | } ~ 猫 犬 東 京 ß ss ##ß i ##i o ##o e ##e 1 2 ##3 ® ™ … — mask '
    'cls ¿ « »'
).split()
WORDS += [c for c in 'bcdfghjklmnpqrstuvwxyz'] + ['##' + c for c in 'abcdfghjklmnpqrtuvwxyz']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A tiny random BERT with both heads, as transformers writes it"
    at = tmp_path_factory.mktemp('bert')
    vocab = list(dict.fromkeys(SPECIAL + WORDS))
    (at / 'vocab.txt').write_text('\n'.join(vocab) + '\n', encoding='utf-8')
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        layer_norm_eps=1e-6,
    )
    model = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)  # biases and norms that do something
    model.save_pretrained(at)
    return at


@pytest.fixture(scope='module')
def batch(folder):
    "Texts of unequal length, and their mask"
    lengths = torch.tensor([9, 4, 1, 7, 24])
    tokens = torch.randint(5, 80, (5, 24), generator=torch.Generator().manual_seed(1))
    real = torch.arange(24) < lengths[:, None]
    return tokens.masked_fill(~real, 0), lengths, real


def theirs(cls, folder):
    return getattr(transformers, cls).from_pretrained(folder).eval()


# ---------------------------------------------------------------- the network


def test_states_and_pooled_vectors_are_those_of_transformers(folder, batch):
    tokens, lengths, real = batch
    a = load_bert(folder, log=None)
    b = theirs('BertModel', folder)
    out = b(tokens, attention_mask=real.long())
    states = a(tokens, lengths)
    torch.testing.assert_close(states[real], out.last_hidden_state[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(a.pooled(states), out.pooler_output, rtol=0, atol=1e-5)
    kinds = (torch.arange(24) > 3).long().expand(5, 24)
    other = b(tokens, attention_mask=real.long(), token_type_ids=kinds).last_hidden_state[real]
    torch.testing.assert_close(a(tokens, lengths, kinds)[real], other, rtol=0, atol=1e-5)
    assert (other - out.last_hidden_state[real]).abs().max() > 1e-2


def test_logits_and_gradients_are_those_of_transformers(folder, batch):
    tokens, lengths, real = batch
    a = load_bert(folder, log=None)
    b = theirs('BertForMaskedLM', folder)
    want = torch.where(real & (torch.arange(24) % 3 == 1), (tokens + 1) % 80, -100)
    out = b(tokens, attention_mask=real.long(), labels=want)
    states = a(tokens, lengths)
    torch.testing.assert_close(a.mlm_logits(states)[real], out.logits[real], rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(a.mlm_logits(states[want >= 0]), want[want >= 0])
    torch.testing.assert_close(loss, out.loss, rtol=0, atol=1e-5)
    loss.backward()
    out.loss.backward()
    torch.testing.assert_close(a.words.weight.grad, b.bert.embeddings.word_embeddings.weight.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.bias.grad, b.cls.predictions.bias.grad, rtol=0, atol=1e-5)
    for i, layer in enumerate(b.bert.encoder.layer):
        s = layer.attention.self
        qkv = torch.cat([m.weight.grad for m in (s.query, s.key, s.value)])
        torch.testing.assert_close(a.layers[i].self_attn.in_proj_weight.grad, qkv, rtol=0, atol=1e-5)
        torch.testing.assert_close(a.layers[i].linear1.bias.grad, layer.intermediate.dense.bias.grad, rtol=0, atol=1e-5)


def test_transformers_reads_what_we_write(folder, batch, tmp_path):
    tokens, lengths, real = batch
    bert = Bert(small_config(WordPieceTokenizer.from_folder(folder), 32, 2), 3).eval()
    save_bert(bert, tmp_path / 'ours', WordPieceTokenizer.from_folder(folder))
    out = theirs('BertForMaskedLM', tmp_path / 'ours')(tokens, attention_mask=real.long()).logits[real]
    torch.testing.assert_close(bert.mlm_logits(bert(tokens, lengths))[real], out, rtol=0, atol=1e-5)
    pooled = theirs('BertModel', tmp_path / 'ours')(tokens, attention_mask=real.long()).pooler_output
    torch.testing.assert_close(bert.pooled(bert(tokens, lengths)), pooled, rtol=0, atol=1e-5)
    assert bert_tokenizer(tmp_path / 'ours').vocab == bert_tokenizer(folder).vocab
    ids = transformers.BertTokenizer.from_pretrained(tmp_path / 'ours')('the naïve cat').input_ids
    assert bert_tokenizer(folder).encode('the naïve cat') == ids


def test_old_names_of_weights_and_files_are_read(folder, batch, tmp_path):
    "A pickle with LayerNorm as gamma and beta and with position_ids; weights of a BERT without heads"
    tokens, lengths, _ = batch
    new = load_bert(folder, log=None)
    for p in (tmp_path / 'old', tmp_path / 'bare'):
        p.mkdir()
        shutil.copy(folder / 'config.json', p)
    state = load_file(folder / 'model.safetensors')

    def before(k):
        return k.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta')

    old = {before(k): v for k, v in state.items()} | {'bert.embeddings.position_ids': torch.arange(24)[None]}
    assert any('gamma' in k for k in old)
    torch.save(old, tmp_path / 'old' / 'pytorch_model.bin')
    assert torch.equal(load_bert(tmp_path / 'old', log=None)(tokens, lengths), new(tokens, lengths))
    transformers.BertModel.from_pretrained(folder).save_pretrained(tmp_path / 'bare')
    assert 'embeddings.word_embeddings.weight' in load_file(tmp_path / 'bare' / 'model.safetensors')
    assert torch.equal(load_bert(tmp_path / 'bare', mlm=False, log=None)(tokens, lengths), new(tokens, lengths))
    with pytest.raises(ValueError, match='missing: cls.predictions.bias, cls.predictions.transform'):
        load_bert(tmp_path / 'bare', log=None)


def test_a_pickle_that_holds_code_is_not_run(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / 'ran').touch, ())

    shutil.copy(folder / 'config.json', tmp_path)
    torch.save(dict(x=Evil()), tmp_path / 'pytorch_model.bin')
    with pytest.raises(ValueError, match='pytorch_model.bin: cannot be read'):
        load_bert(tmp_path)
    assert not (tmp_path / 'ran').exists()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    'remove,says',
    [
        ('config.json', 'has no config.json'),
        ('model.safetensors', 'has no weights'),
        ('vocab.txt', 'has no vocabulary'),
    ],
)
def test_a_folder_without_one_of_its_files_is_refused(folder, tmp_path, remove, says):
    at = shutil.copytree(folder, tmp_path / 'part')
    (at / remove).unlink()
    with pytest.raises(ValueError, match=says) as e:
        make_bert(at, None, bert_tokenizer(at), log=None)
    assert 'part' in str(e.value) and '\n' not in str(e.value)


def test_models_that_are_no_bert_are_refused(folder, tmp_path):
    tokenizer = bert_tokenizer(folder)
    with pytest.raises(ValueError, match='no such folder'):
        make_bert(tmp_path / 'gone', None, tokenizer)
    other = Tokenizer.train(['a cat is on a red ball', 'a dog is running'], 40)
    with pytest.raises(ValueError, match='take the tokenizer from bert_tokenizer'):
        make_bert(folder, None, other, log=None)
    bert = make_bert(folder, None, tokenizer, log=None)
    ids, lengths = pad_tokens(tokenizer.encode(['the cat ' * 30], 60), tokenizer.pad)
    with pytest.raises(ValueError, match='60 tokens, but this BERT has positions for 24 only'):
        bert(ids, lengths)
    at = shutil.copytree(folder, tmp_path / 'wide')
    write_json(at / 'config.json', read_json(at / 'config.json') | dict(hidden_size=64))
    with pytest.raises(ValueError, match=r'word_embeddings.weight \(\d+, 32\) instead of \(\d+, 64\)'):
        load_bert(at, log=None)


# ---------------------------------------------------------------- tokens


def strings():
    "Some hundreds: words of the vocabulary, accents, capitals, punctuation, Chinese, emoji, odd spaces, controls"
    r = rng('strings')
    parts = [
        'the',
        'Cat',
        'dogs',
        'running',
        'unplayable',
        'CAFÉ',
        'naïvely',
        'Straße',
        'İstanbul',
        'Ångström',
        '東京',
        '猫and犬',
        "don't",
        'x_y',
        'a.b,c!',
        '¿qué?',
        '«no»',
        '😀',
        'e\u0301',
        '\u200b',
        'zero\u200bwidth',
        '\u00a0',
        '\u3000',
        '\t',
        '\n',
        '\r\n',
        'a\x00b',
        '\ufffd',
        'ﬁ',
        '½',
        '１２３',
        '12',
        '1,000.5',
        '---',
        '…',
        'ß',
        'ẞ',
        'ǅ',
        'q' * 101,
        'z' * 100,
        'م',
        'שלום',
        'हिन्दी',
        'нет',
        '한국어',
        'ア',
        '\u2028',
        '$5',
        '50%',
        '#tag',
        '@me',
        'C++',
        '[x]',
        '𝔘𝔫𝔦',
        '🇩🇪',
        'a\u00adb',
        '',
    ]
    some = [' '.join(parts[i] for i in r.integers(0, len(parts), r.integers(1, 9))) for _ in range(300)]
    joined = [''.join(parts[i] for i in r.integers(0, len(parts), 4)) for _ in range(100)]
    return parts + some + joined


@pytest.mark.parametrize('lower', [True, False])
def test_tokens_are_those_of_transformers(folder, tmp_path, lower):
    vocab = (folder / 'vocab.txt').read_text(encoding='utf-8').split('\n')[:-1]
    their = transformers.BertTokenizer(vocab={t: i for i, t in enumerate(vocab)}, do_lower_case=lower)
    their.save_pretrained(tmp_path)
    ours = WordPieceTokenizer(folder / 'vocab.txt', lower)
    texts = strings()
    want = [their(t).input_ids for t in texts]
    assert len(texts) > 400 and ours.encode(texts, 10**6) == want
    assert sum(1 in ids for ids in want) > 100 and sum(1 not in ids for ids in want) > 60  # known and unknown words
    saved = WordPieceTokenizer.from_folder(tmp_path)  # tokenizer.json, or vocab.txt, of this version
    assert saved.encode(texts, 10**6) == want and saved.vocab == vocab
    for ids in want[::7]:
        known = [i for i in ids if i != ours.unk]
        assert ours.decode(known) == their.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=True)


def test_a_special_token_in_a_caption_is_text(folder):
    "transformers reads [MASK] in a text as the token; a caption cannot ask for one"
    ours = WordPieceTokenizer(folder / 'vocab.txt')
    their = transformers.BertTokenizer.from_pretrained(folder)
    assert ours.mask in their('a [MASK] cat').input_ids
    ids = ours.encode('a [MASK] cat')
    assert [ours.vocab[i] for i in ids] == ['[CLS]', 'a', '[', 'mask', ']', 'cat', '[SEP]']


def test_a_run_keeps_either_kind_of_tokenizer(folder, tmp_path):
    ours = WordPieceTokenizer(folder / 'vocab.txt')
    ours.save(tmp_path / 'tokenizer.model')
    again = Tokenizer.load(tmp_path / 'tokenizer.model')
    assert isinstance(again, WordPieceTokenizer) and again.model == ours.model
    (tmp_path / 'cut.model').write_bytes(ours.model[:-20])
    with pytest.raises(ValueError, match='cut.model: damaged'):
        Tokenizer.load(tmp_path / 'cut.model')


# ---------------------------------------------------------------- the hub


def test_a_bert_is_opened_by_name_from_the_cache_of_the_hub(folder, batch, tmp_path):
    """What was downloaded once is opened without a network, and without transformers; what was not is refused in a line

    That a file does not exist is known from the download, too; that it is unknown is not the same.
    """
    for name in ('tiny-bert', 'cased-bert', 'half-bert'):
        at = tmp_path / 'hub' / f'models--someone--{name}'
        snapshot = at / 'snapshots' / ('0' * 40)
        shutil.copytree(folder, snapshot)
        (at / 'refs').mkdir()
        (at / 'refs' / 'main').write_text('0' * 40)
        gone = at / '.no_exist' / ('0' * 40)
        gone.mkdir(parents=True)
        if name == 'tiny-bert':
            (gone / 'tokenizer_config.json').touch()
        if name == 'cased-bert':
            write_json(snapshot / 'tokenizer_config.json', dict(do_lower_case=False))
    code = """if True:
        import sys
        from vlrep.models.bert_weights import *
        for name in ('tiny', 'cased'):
            tokenizer = bert_tokenizer(f'someone/{name}-bert')
            bert = make_bert(f'someone/{name}-bert', None, tokenizer)
            print(bert.config.depth, tokenizer.normalisation == 'nfkd', 'transformers' in sys.modules)
        for name in ('someone/half-bert', 'someone/other', 'bert-base-uncased'):
            try: load_bert(name)
            except ValueError as e: print(e)"""
    env = {**ENV, 'HF_HUB_CACHE': str(tmp_path / 'hub'), 'HF_HUB_OFFLINE': '1'}
    p = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    text = [l for l in p.stdout.splitlines() if 'not used' not in l]
    assert text[:2] == ['3 True False', '3 False False'] and len(text) == 5
    for line, name, file in zip(
        text[2:],
        ('someone/half-bert', 'someone/other', 'bert-base-uncased'),
        ('tokenizer_config.json', 'config.json', 'config.json'),
    ):
        assert line.startswith(f'{name}: no such folder, and {file} cannot be had from the Hugging Face hub'), line


def test_without_a_network_the_hub_is_asked_once(monkeypatch):
    "Its library tries again for half a minute"
    wanted = []

    def gone(*a, **k):
        wanted.append(a)
        raise ConnectionError('name or service not known')

    monkeypatch.setattr('huggingface_hub.get_hf_file_metadata', gone)
    monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda *a, **k: pytest.fail('a download was begun'))
    with pytest.raises(ValueError, match='nobody/nothing: no such folder.*config.json cannot be had.*not known'):
        load_bert('nobody/nothing')
    assert len(wanted) == 1


# ---------------------------------------------------------------- small


def captions():
    "Texts whose words go together, twenty of them twice, with images of two pixels"
    says = [
        [f'a {c} {n} is {v}', f'the {n} is {c}']
        for c, n, v in zip(
            ['red', 'blue', 'tall', 'old'] * 10,
            ['dog', 'cat', 'tree', 'man', 'cup'] * 8,
            ['running', 'here', 'standing', 'sleeping'] * 10,
        )
    ]
    return ArrayDataset(np.zeros((len(says), 2, 2, 3), np.uint8), 'forty', captions=says)


def trained(cache):
    "A small BERT from this cache; its tokenizer"
    d = captions()
    t = Tokenizer.train(d.captions.flat(), 60)
    old = os.environ['VLREP_CACHE']
    os.environ['VLREP_CACHE'] = str(cache)
    try:
        return train_small_bert(d, t, small_config(t, 32, 1), SmallBertPlan(steps=30, bs=16), 5, log=None), t
    finally:
        os.environ['VLREP_CACHE'] = old


def test_two_processes_that_want_a_bert_train_one(tmp_path, monkeypatch):
    "Both want the same small BERT at once: it is trained once, and both have the same bits, as has one trained alone"
    learn = library._learn

    def narratives(*args):
        with open(tmp_path / 'trainings', 'a') as f:
            f.write(f'{torch.get_num_threads()}\n')
        time.sleep(0.5)
        return learn(*args)

    monkeypatch.setattr(library, '_learn', narratives)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.save(trained(tmp_path / 'both')[0].state_dict(), tmp_path / 'child.pt')
            code = 0
        finally:
            os._exit(code)
    mine, tokenizer = trained(tmp_path / 'both')
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / 'trainings').read_text() == '1\n'
    (folder,) = [p for p in (tmp_path / 'both' / 'bert').iterdir() if p.is_dir()]
    assert bert_tokenizer(folder).model == tokenizer.model
    torch.set_num_threads(2)
    alone = trained(tmp_path / 'alone')[0].state_dict()
    child = torch.load(tmp_path / 'child.pt')
    assert all(torch.equal(v, child[k]) and torch.equal(v, alone[k]) for k, v in mine.state_dict().items())
    assert (tmp_path / 'trainings').read_text() == '1\n1\n' and torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_a_small_bert_takes_the_tokens_of_a_pretrained_one(folder):
    "Any tokenizer will do: ids of words and of padding stand elsewhere than in ours"
    d = captions()
    t = bert_tokenizer(folder)
    lines = []
    bert = make_bert(
        'small',
        d,
        t,
        config=small_config(t, 32, 1),
        plan=SmallBertPlan(steps=60, bs=16, lr=5e-3),
        pooler=False,
        log=lines.append,
    )
    assert bert.config.pad == t.pad == 0 and bert.pooler is None and 'of masked words' in lines[0]
