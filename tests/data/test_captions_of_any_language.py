"""Captions of any language, whatever the method

Letters as they were written, sides that a mirror exchanges, texts that are cut or unknown, characters that are none.
"""

import json
import random
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from vlrep.core.writing_systems import mirror_pairs
from vlrep.data.collate import caption_lines, mirroring_line
from vlrep.data.image_files import caption_source
from vlrep.data.records import ArrayDataset
from vlrep.data.shard_index import read_sidecar
from vlrep.data.tasks import TaskDataset
from vlrep.data.tokenizer import NORMALISATIONS, Tokenizer, normalise
from vlrep.data.transforms import swap_left_right
from vlrep.datasets.narratives import parse_narrative
from vlrep.methods.base import METHODS

READS = sorted(m for m, d in METHODS.items() if d.collate and 'captions' in d.needs(d.recipes['world']))
CUTS = [m for m in READS if METHODS[m].tokenizer]
SAID = dict(
    english=['A dog is left of a red house.', 'Two men stand on a bridge to the right.', 'A cat and the dog on a boat'],
    japanese=['海辺で青いかごが見えます。', '赤いバスがあります。', 'パンダが二ついます。'],
    vietnamese=['Một cái hộp xanh trên bãi cỏ.', 'Một con diều đỏ trên bãi cỏ.', 'Hai người đàn ông'],
    hindi=['एक लाल क्षमा घर', 'दो हरी कुर्सियाँ', 'बाएँ एक कुत्ता'],
    german=['Der Hund liegt links von der Brücke.', 'Zwei größere Häuser rechts', 'Ein rotes Auto über dem Fluß'],
)


def photos(captions, times=4):
    captions = captions * times
    pixels = np.zeros((len(captions), 16, 16, 3), np.uint8)
    return ArrayDataset(pixels, 'photos', captions=[[c] for c in captions])


def recipe_of(method, **changes):
    r = METHODS[method].recipes['world']
    small = dict(
        vocab=400,
        bert='small',
        aux_scenes=0,
        regions='grid',
        region_model='given',
        mim='off',
        min_count=1,
        min_tokens=1,
        max_len=40,
    )
    own = {k: v for k, v in small.items() if hasattr(r, k)}
    return replace(r, **own, **changes)


def reads(method, dataset, **changes):
    "The recipe of a method, its tokenizer and its collator for some photos"
    recipe = recipe_of(method, **changes)
    tokenizer = METHODS[method].train_tokenizer(recipe, dataset)
    return recipe, tokenizer, METHODS[method].collator(recipe, tokenizer)


# ---------------------------------------------------------------- letters


@pytest.mark.parametrize('method', CUTS)
@pytest.mark.parametrize('language', SAID)
def test_letters_stay_as_they_were_written(method, language):
    "Marks are dropped in English alone, and a line says so where they are not"
    data = photos(SAID[language])
    recipe, tokenizer, collate = reads(method, data)
    best = 'nfkd' if language == 'english' else 'nfkc'
    assert tokenizer.normalisation == best
    read = [tokenizer.decode(ids).replace(' ', '') for ids in collate.uncut(SAID[language])]
    assert read == [normalise(t, best).replace(' ', '') for t in SAID[language]]
    lines = caption_lines(recipe, collate, dict(train=data, valid=data))
    assert any(l.startswith('normalise=nfkc: ') for l in lines) == (best == 'nfkc')
    assert sum('of the tokens are unknown' in l for l in lines) == 2


@pytest.mark.parametrize('method', CUTS)
def test_the_field_normalise_is_followed(method):
    data = photos(SAID['japanese'])
    recipe, tokenizer, collate = reads(method, data, normalise='nfkd')
    assert tokenizer.normalisation == 'nfkd'
    lines = caption_lines(recipe, collate, dict(train=data, valid=data))
    assert 'normalise=nfkd: the tokens are those of letters without their marks' in lines[0]


def test_tokenizers_give_random_text_back():
    "What goes in comes out, in the form of the tokenizer; NUL is a space"
    draw = random.Random(1)
    pool = [chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000]
    texts = [''.join(draw.choices([*pool, *[' ', '\0'] * 500], k=20)) for _ in range(100)]
    for how in NORMALISATIONS:
        tokenizer = Tokenizer.train([t.replace('\0', ' ') for t in texts], 3000, how=how)
        for t in texts:
            ids = tokenizer.encode(t, 999)
            assert tokenizer.decode(ids) == normalise(t, how) and tokenizer.unk not in ids


# ---------------------------------------------------------------- mirrors


@pytest.mark.parametrize('method', READS)
def test_images_of_captions_in_other_languages_are_not_mirrored(method):
    "Images of German captions are not mirrored, unless the words are given"
    swaps = dict(swap_sides=True) if hasattr(recipe_of(method), 'swap_sides') else {}
    cases = ('german', 'auto', True), ('german', 'links=rechts', False), ('english', 'auto', False)
    for language, words, off in cases:
        data = photos(SAID[language])
        recipe, _, collate = reads(method, data, mirror_words=words, flip_p=0.5, **swaps)
        lines = caption_lines(recipe, collate, dict(train=data, valid=data))
        assert any('images are not mirrored' in l for l in lines) == off, (language, words)


PLAIN = dict(
    english=[
        'A man in a red shirt is on a horse',
        'Two dogs run in the snow',
        'A child with a ball is on a beach',
        'A girl in a pool',
        'A boy and a dog are in a boat',
        'The man on the left is in a car',
        'People walk through a park',
        'A woman is on a bike while a dog runs',
        'A bird is on a roof',
        'Three men wearing hats',
    ],
    dutch=[
        'Een man in een rood shirt',
        'Twee honden rennen in de sneeuw',
        'Dit is a van links',
        'Het kind is in bad',
        'Een meisje of een jongen',
        'Zij is in water',
        'De hond is rechts van de boot',
        'Hond is in bos',
        'Een fiets in een park',
        'Dit is of was een huis',
    ],
    german=[
        'Ein Mann in einem roten Hemd',
        'Zwei Hunde in Schnee',
        'Das Kind ist in Wasser',
        'Hund links in Garten',
        'A und B in Berlin',
        'Junge an Bord in Eile',
        'Der Mann rechts ist in Rom',
        'Auto in Fahrt',
        'Frau an Tisch in Raum',
        'Vogel in Baum',
    ],
    italian=[
        'Un uomo a cavallo',
        'Due cani corrono in un prato',
        'Bambino a sinistra in acqua',
        'A destra in auto',
        'Una ragazza in piscina',
        'Cane a riva',
        'Uomini in barca a vela',
        'Donna a casa in cucina',
        'Uccello in volo',
        'Gatto a letto',
    ],
    portuguese=[
        'A menina a correr',
        'A mulher e a filha',
        'Um homem a cavalo',
        'A bola está a esquerda',
        'A casa a direita',
        'A praia',
        'Menino a nadar',
        'A rua a noite',
        'Uma ave a voar',
        'A porta a abrir',
    ],
    spanish=[
        'Un hombre a caballo',
        'La niña va a la playa',
        'Perro a la izquierda',
        'Mujer a pie',
        'Niño va a casa',
        'Ave a la derecha',
        'Gente a bordo',
        'El gato a oscuras',
        'A lo lejos',
        'Los perros a correr',
    ],
    french=[
        'On a un chien',
        'Un homme a cheval',
        'On voit a gauche un chat',
        'Il y a des enfants',
        'Elle a une balle',
        'On court',
        'La fille a un chapeau',
        'On nage a droite',
        'Chien a terre',
        'On a soif',
    ],
    danish=[
        'To hunde',
        'Her er en mand',
        'To piger er i parken',
        'En by i sne',
        'Manden for by',
        'Her er to heste',
        'En kat for to',
        'Drengen at by',
        'To her',
        'By at by',
    ],
    polish=[
        'To pies',
        'To dom',
        'Pies to kot',
        'To jest kobieta',
        'Dwa psy by biec',
        'To plaża',
        'By on biegł',
        'On to ma',
        'To on',
        'Kobieta to on',
    ],
    vietnamese=[
        'Một thế giới',
        'Con chó to',
        'Anh to',
        'Thể thao',
        'Trẻ em to',
        'Ô tô',
        'Một cái hộp',
        'Is to',
        'Con mèo',
        'Người on to',
    ],
)


@pytest.mark.parametrize('form', ['NFC', 'NFD'])
@pytest.mark.parametrize('language', PLAIN)
def test_small_words_that_languages_share_make_no_text_english(language, form):
    "in, is, a, on, of, to, her, by stand in captions of many languages: images of English ones alone are mirrored"
    data = photos([unicodedata.normalize(form, c) for c in PLAIN[language]], 1)
    recipe, _, collate = reads('virtex', data, flip_p=0.5)
    assert bool(mirroring_line(recipe, collate, data)) == (language != 'english')


@pytest.mark.parametrize('method', READS)
def test_given_words_are_exchanged(method):
    "A mirrored batch has the tokens, or the tags, of the exchanged captions"
    plain = ['Der Hund liegt links von der Katze', 'Das Haus rechts von dem Auto']
    other = ['Der Hund liegt rechts von der Katze', 'Das Haus links von dem Auto']
    swaps = dict(swap_sides=True, text_views='same', dropout=0.1) if hasattr(recipe_of(method), 'swap_sides') else {}
    recipe, _, collate = reads(method, photos([*plain, *other]), mirror_words='links=rechts', **swaps)
    a = photos([*plain, *other])
    b = photos([*other, *plain])
    rows = np.arange(len(a))
    if hasattr(collate, 'check'):
        for d in (a, b):
            collate.check(d)
    got = collate(a, rows, 0, 0, np.ones(len(a), bool))
    want = collate(b, rows, 0, 0, np.zeros(len(a), bool))
    names = [k for k in ('tokens', 'tokens2', 'concepts', 'answer') if k in got]
    assert names
    for k in names:
        assert (got[k] == want[k]).all(), k


def test_exchanging_sides_changes_only_the_given_words():
    "Of texts without the words nothing changes; with them, only they do"
    draw = random.Random(2)
    for pairs in (mirror_pairs('auto'), mirror_pairs('links=rechts,左=右')):
        a, b = pairs[-1]
        for _ in range(300):
            noise = ''.join(draw.choices([chr(c) for c in range(0x250)], k=12))
            if a in noise or b in noise:
                continue
            assert swap_left_right(noise, pairs=pairs) == noise
            assert swap_left_right(f'{noise}. {a} .', pairs=pairs) == f'{noise}. {b} .'


# ---------------------------------------------------------------- what is lost


@pytest.mark.parametrize('method', CUTS)
def test_cut_and_unknown_texts_are_counted_and_refused_above_a_limit(method):
    "Cut texts and unknown tokens: counted for both parts, and refused above what the recipe allows"
    short = photos(SAID['english'])
    long = photos([' and '.join(SAID['english'] * 8)])
    foreign = photos(['犬猫鳥馬'])
    recipe, _, collate = reads(method, short)

    def ask(r, part):
        return caption_lines(r, collate, dict(train=short, valid=part))

    if getattr(collate, 'windows', False):
        assert '100 % of 4 texts' in ask(recipe, long)[-1]
    elif method != 'icmlm':  # it leaves long captions out, and says so
        with pytest.raises(ValueError, match='valid: 100 % of 4 texts .*--max-len .*--max-cut'):
            ask(recipe, long)
    if method != 'icmlm':
        assert '100 % of 4 texts' in ask(replace(recipe, max_cut=1.0), long)[-1]
    with pytest.raises(ValueError, match='50 % of the tokens are unknown.*--max-unknown'):
        ask(recipe, foreign)
    assert '50 % of the tokens are unknown' in ask(replace(recipe, max_unknown=1.0), foreign)[-1]
    missing = photos(['A dog', 'nan', 'None', 'A cat'], 1)
    assert '2 are "nan", "none" or "null"' in ask(replace(recipe, max_unknown=1.0), missing)[-1]


# ---------------------------------------------------------------- characters that are none


def _narrative(text):
    line = dict(dataset_id='x', image_id='1', caption=text, timed_caption=[], traces=[])
    return parse_narrative(json.dumps(line))[1].text


def _of_file(text, folder):
    Image.new('RGB', (8, 8)).save(folder / 'a.png')
    return caption_source({'a.png': [text]}, folder, folder / 'captions.csv').captions[0][0]


def _of_task(text):
    return TaskDataset(photos(['a dog'], 1), [0], [text], answers=[['yes']]).captions[0][0]


READERS = dict(
    lists=lambda t, d: photos([t], 1).captions[0][0],
    with_captions=lambda t, d: photos(['a dog'], 1).with_captions([[t]]).captions[0][0],
    files=_of_file,
    shards=lambda t, d: read_sidecar('a', json.dumps(dict(captions=[t])).encode(), None)[1][0],
    text_of_shards=lambda t, d: read_sidecar('a', None, t.encode())[1][0],
    narratives=lambda t, d: _narrative(t),
    tasks=lambda t, d: _of_task(t),
)


@pytest.mark.parametrize('reader', READERS)
def test_control_characters_enter_no_dataset(tmp_path, reader):
    "In a text file of a shard, NUL is a sign of another encoding: see test_shard_faults.py"
    space = ' ' if reader == 'text_of_shards' else '\0'
    assert READERS[reader](f'a{space}dog on\x07a hill', tmp_path) == 'a dog on a hill'
