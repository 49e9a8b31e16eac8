"Concepts and tags made of captions: what is counted, what is refused, and taggers that are not installed"

import csv
import sys

import forked
import numpy as np
import pytest
from tools import ROOT, TWO_STEPS, refused

import vlrep.data.concepts as concepts
from vlrep.data.concepts import (
    ConceptSet,
    Triplets,
    concept_counts,
    concept_words,
    plain_words,
    separate_punctuation,
    tag_words,
    usable_captions,
)
from vlrep.data.records import TextBuffer
from vlrep.datasets.world.dataset import world
from vlrep.methods.base import METHODS


@pytest.fixture(scope='module')
def captions():
    return world('train', 80, size=16).captions


def test_captions_are_filtered_by_length_and_repetition(captions):
    "3 to 25 tokens of any unit, and no caption twice for an image, whatever its case"
    for length in (lambda t: len(t.split()), len):
        ok = usable_captions(captions, 3, 25, length)
        at = 0
        for i in range(len(captions)):
            seen = set()
            for t in captions[i]:
                same = ' '.join(t.lower().split())
                assert ok[at] == (3 <= length(t) <= 25 and same not in seen), t
                seen.add(same)
                at += 1
        assert at == len(ok)
    twice = TextBuffer([list(captions[0]) * 2])
    assert usable_captions(twice).sum() == usable_captions(captions.subset([0])).sum()


def test_each_triplet_masks_one_concept(captions):
    "As many triplets as concept words, each found by its number, drawn in equal shares"
    index = ConceptSet(concept_words(concept_counts(captions.flat()), 50)).index

    def spots(t):
        return [i for i, w in enumerate(separate_punctuation(t).split()) if w in index]

    ok = usable_captions(captions)
    all_of = Triplets(captions, ok, spots)
    want = [
        (row, j, p)
        for row in range(len(captions))
        for j in range(captions.rows[row], captions.rows[row + 1])
        if ok[j]
        for p in spots(all_of.text(j))
    ]
    assert [all_of[t] for t in range(len(all_of))] == want and len({w[:2] for w in want}) > 200
    with pytest.raises(IndexError):
        all_of[len(want)]
    n = np.bincount([w[0] for w in want], minlength=len(captions))
    assert (all_of.draw(np.arange(len(captions)), np.full(len(captions), 0.999))[2] == n).all()
    row = int(n.argmax())
    u = (np.arange(n[row]) + 0.5) / n[row]
    j, which, _ = all_of.draw(np.full(n[row], row), u)
    assert [(row, a, spots(all_of.text(a))[b]) for a, b in zip(j, which)] == [w for w in want if w[0] == row]


def test_a_tagger_of_ones_own_is_used(captions):
    got = concept_counts(captions.flat(), 'nn', lambda words: ['NOUN' if w == 'dog' else '' for w in words])
    assert list(got) == ['dog'] and got['dog'] == sum(
        separate_punctuation(t).split().count('dog') for t in captions.flat()
    )


@pytest.fixture
def without(monkeypatch):
    "A package that cannot be imported, for taggers that were not opened yet"

    def hide(*names):
        for n in names:
            monkeypatch.setitem(sys.modules, n, None)

    concepts._opened.cache_clear()
    yield hide
    concepts._opened.cache_clear()


HIDDEN = """
import sys
for name in ('textblob', 'textblob.en', 'textblob.en.taggers'): sys.modules[name] = None
from vlrep.cli import main
main(sys.argv[1:])
"""


def test_a_missing_tagger_is_named(without, tmp_path):
    "The library is imported without it; what needs it says how to get it, in one line, before any training"
    without('textblob', 'textblob.en', 'textblob.en.taggers')
    with pytest.raises(ValueError, match='pip install textblob'):
        tag_words(['dog'])
    p = forked.run(HIDDEN, ['pretrain', '--method', 'tag_prediction', *TWO_STEPS], tmp_path)
    assert p.returncode == 2 and p.stderr.count('\n') == 1, p.stderr
    assert 'tagger=pattern: textblob is not installed (pip install textblob)' in p.stderr


def test_a_missing_spacy_is_named(without):
    without('spacy')
    with pytest.raises(ValueError, match=r'tagger=spacy: spacy is not installed'):
        tag_words(['dog'], 'spacy')


def test_a_missing_spacy_model_is_named(without, monkeypatch):
    spacy = pytest.importorskip('spacy')

    def gone(name, **kw):
        raise OSError(f"[E050] Can't find model '{name}'")

    monkeypatch.setattr(spacy, 'load', gone)
    with pytest.raises(ValueError, match='spacy download en_core_web_sm'):
        tag_words(['dog'], 'spacy')


BAD = {
    'top_k=5000': 'top_k=5000: the captions have only',
    'min_count=100000': 'no word of the captions is left',
    'min_tokens=400 max_tokens=400': 'no image has a concept',
    'min_tokens=9 max_tokens=8': 'min_tokens=9: more than',
    'concepts=cluster': 'top_k=0: for concepts=cluster',
    'net=vgg16': 'add --backbone torchvision/vgg16',
    'concepts=cluster top_k=9999': 'top_k=9999: the number of clusters must be from 1 to',
    'concepts=postags': "did you mean 'postag'",
}


@pytest.mark.parametrize('changes', BAD)
def test_bad_input_is_refused_in_one_line(changes, capsys):
    words = [w for c in changes.split() for w in ('--set', c)]
    assert BAD[changes] in refused(capsys, 'pretrain', '--method', 'tag_prediction', *TWO_STEPS, *words)


def test_recipes_name_the_paper():
    names = METHODS['tag_prediction'].recipes
    assert {f'tp_{k}{s}' for k in ('postag', 'cluster', 'lda', 'label') for s in ('', '_r50', '_vgg16')} <= set(names)


# ---------------------------------------------------------------- tags by hand


def by_hand(source):
    path = ROOT / 'data' / 'tagged_captions.csv'
    return [r for r in csv.DictReader(path.open(encoding='utf-8')) if r['source'] == source]


def test_taggers_agree_with_captions_tagged_by_hand():
    "100 of the world, whose words are today's captions; 100 of photos, of which no word is handed on"
    world_rows = by_hand('world')
    photos = by_hand('photos')
    assert len(world_rows) == len(photos) == 100 and not any(r['words'] for r in photos)
    scenes = world('train', 400, size=16)
    for r in world_rows:
        text = scenes.captions[int(r['image'].removeprefix('train-'))][int(r['caption'])]
        assert plain_words(text) == r['words'].split() and len(r['tags']) == len(r['words'].split()), r
    assert {t for r in world_rows + photos for t in r['tags']} == set('nav.')
    assert len({r['image'] for r in photos}) == 100
    got = [(t, g) for r in world_rows for t, g in zip(r['tags'], tag_words(r['words'].split()))]
    assert np.mean([dict(NOUN='n', ADJ='a', VERB='v').get(g, '.') == t for t, g in got]) > 0.95
