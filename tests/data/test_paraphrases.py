"""vlrep paraphrase with Marian models of transformers, tiny and random: the real path, stopped and gone on with

The file and its reader are checked in nbs/data/55_paraphrases.
"""

import functools
import json

import pytest
import sentencepiece
import torch
import transformers
from tools import both_spellings, refused

from vlrep.cli import main
from vlrep.data.paraphrases import MarianTranslator, read_paraphrases
from vlrep.datasets.csv import write_csv
from vlrep.datasets.world.dataset import scene

CAPTIONS = [c for i in range(4) for c in scene('train', i, size=16).captions]


LONGEST = 24  # tokens: of gibberish, few sentences end by themselves


@pytest.fixture(scope='module', autouse=True)
def short():
    with pytest.MonkeyPatch.context() as m:
        m.setattr(MarianTranslator.__init__, '__kwdefaults__', dict(beams=4, max_len=LONGEST))
        yield


@pytest.fixture(scope='module')
def at(tmp_path_factory):
    "Photos as a CSV, and four models: en-fr, fr-en, en-de, de-en"
    at = tmp_path_factory.mktemp('paraphrase')
    write_csv([scene('train', i, size=16) for i in range(4)], at / 'photos.csv')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CAPTIONS),
        model_prefix=str(at / 'all'),
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_file=str(at / 'all.model'))
    pieces = ['</s>', '<unk>', *(p for i in range(len(sp)) if (p := sp.id_to_piece(i))[0] != '<'), '<pad>']
    for k, pair in enumerate(('en-fr', 'fr-en', 'en-de', 'de-en')):
        folder = at / pair
        folder.mkdir()
        for n in ('source', 'target'):
            (folder / f'{n}.spm').write_bytes((at / 'all.model').read_bytes())
        (folder / 'vocab.json').write_text(json.dumps({p: i for i, p in enumerate(pieces)}))
        torch.manual_seed(k)
        n = len(pieces) - 1
        config = transformers.MarianConfig(
            vocab_size=n + 1,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=256,
            pad_token_id=n,
            decoder_start_token_id=n,
            eos_token_id=0,
            forced_eos_token_id=0,
            bad_words_ids=[[n]],
            init_std=0.7,
        )
        model = transformers.MarianMTModel(config)
        model.final_logits_bias[0, 0] = 4.0  # so that a sentence ends
        model.save_pretrained(folder)
    return at


def words(at, out, *more):
    return [
        'paraphrase',
        '--data',
        'csv',
        '--root',
        at / 'photos.csv',
        '--out',
        out,
        '--forward-model',
        f'{at}/en-{{via}}',
        '--back',
        f'{at}/{{via}}-en',
        '--beams',
        2,
        '--device',
        'cpu',
        *more,
    ]


@pytest.fixture(scope='module')
def whole(at):
    main(list(map(str, words(at, at / 'whole.jsonl', '--limit', 10, '--batch', 4))))
    return at / 'whole.jsonl'


def test_paraphrases_are_those_of_the_marian_models(at, whole):
    "What stands in the file is what transformers says, there by one model and back by the other"
    lines = [json.loads(l) for l in whole.read_text(encoding='utf-8').splitlines()]
    assert [l['caption'] for l in lines] == [' '.join(c.split()) for c in CAPTIONS[:10]]
    assert all(l['caption_index'] == i % 5 for i, l in enumerate(lines))

    @functools.cache
    def opened(pair):
        tokenizer = transformers.MarianTokenizer.from_pretrained(at / pair)
        return tokenizer, transformers.MarianMTModel.from_pretrained(at / pair).eval()

    def translate(pair, text):
        tokenizer, model = opened(pair)
        out = model.generate(
            **tokenizer([text], return_tensors='pt'), num_beams=2, do_sample=False, max_new_tokens=LONGEST
        )
        return tokenizer.decode(out[0], skip_special_tokens=True)

    for l in lines[::4]:
        want = {v: ' '.join(translate(f'{v}-en', translate(f'en-{v}', l['caption'])).split()) for v in ('fr', 'de')}
        assert {p['via']: p['text'] for p in l['paraphrases']} == {v: t for v, t in want.items() if t}
    text = [t for l in lines for t in read_paraphrases(whole).texts(l['caption'])]
    assert len(text) > 10 and len(set(text)) > 5  # gibberish, but not the same for all


def test_a_stopped_job_goes_on_to_the_same_bytes(at, whole, tmp_path, capsys):
    part = tmp_path / 'part.jsonl'
    part.write_bytes(whole.read_bytes()[:-30])  # the last line is torn
    main(list(map(str, words(at, part, '--limit', 10, '--batch', 4))))
    assert part.read_bytes() == whole.read_bytes()
    out = capsys.readouterr().out
    assert 'the last line was torn' in out and '9 of 10 captions are there' in out and '1 of them new' in out


def test_a_job_interrupted_at_the_shell_goes_on_to_the_same_bytes(at, whole, tmp_path, capsys, monkeypatch):
    "Ctrl-C during the second batch: one line, code 130, whole lines; the same words again finish, with the same bytes"
    out = tmp_path / 'out.jsonl'
    calls = []
    call = MarianTranslator.__call__

    def stopped(self, texts):
        calls.append(texts)
        if len(calls) == 34:
            raise KeyboardInterrupt  # eight lines a time, through two languages and back
        return call(self, texts)

    monkeypatch.setattr(MarianTranslator, '__call__', stopped)
    text = refused(capsys, *words(at, out, '--limit', 10, '--batch', 1), code=130)
    assert 'the same command continues where it stopped' in text
    present = out.read_bytes()
    assert present.count(b'\n') == 8 and whole.read_bytes().startswith(present)
    monkeypatch.undo()
    main(list(map(str, words(at, out, '--limit', 10, '--batch', 1))))
    assert '8 of 10 captions are there' in capsys.readouterr().out
    assert out.read_bytes() == whole.read_bytes()


def test_both_spellings_of_the_command_write_the_same_file(tmp_path):
    for done in both_spellings('paraphrase', ['--data', 'csv', '--root', 'nowhere'], [tmp_path] * 2):
        assert done.returncode == 2 and 'nowhere' in done.stderr and done.stderr.count('\n') == 1, done.stderr


def test_wrong_words_and_files_are_refused_in_one_line(at, whole, tmp_path, capsys):
    assert 'no Marian model that can be opened' in refused(capsys, *words(at, tmp_path / 'a', '--via', 'xx'))
    assert 'whole.jsonl:1: is of other captions or languages' in refused(capsys, *words(at, whole, '--via', 'fr'))
    assert 'whole.jsonl:6: more lines than' in refused(capsys, *words(at, whole, '--limit', 5))
    assert 'is a folder' in refused(capsys, *words(at, tmp_path))
    with pytest.raises(ValueError, match='gone: no Marian model'):
        MarianTranslator(at / 'gone')
