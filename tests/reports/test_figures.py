"Figures of names that are formulas, of letters that the usual font lacks, of control characters"

import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest

from vlrep.core import plotting
from vlrep.core.plotting import bars, drawable, show_images
from vlrep.evaluation.captioning import show_attention
from vlrep.evaluation.retrieval.pictures import nearest_captions, nearest_images
from vlrep.studies.report import show_comparisons

ODD = [r'$\foo{$', '$', r'\$x$ and $', '海辺の青い', 'a\x07b', '\U000f0000']
SQUARE = np.zeros((8, 8, 3), np.uint8)


def _comparisons(name):
    names = dict.fromkeys(('id', 'text', 'treatment', 'control', 'question'), name)
    numbers = dict(p=0.01, holm=0.02, diff=1.0, half=0.5, margin=1.0, each={0: 1.0}, direction=1, size=2.0)
    return show_comparisons([dict(verdict='replicates', unstable={}, **names, **numbers)])


FIGURES = dict(
    show_images=lambda t: show_images([SQUARE], [t]),
    bars=lambda t: bars([t], {t: [(1, 0, 2)]}, ylabel=t),
    show_attention=lambda t: show_attention(SQUARE, [t], np.ones((1, 4))),
    nearest_captions=lambda t: nearest_captions(dict(images=[(0, [(0, 0.5, True)])]), [t], lambda i: SQUARE),
    nearest_images=lambda t: nearest_images(
        dict(captions=[(0, [(0, 0.5, True), (1, 0.1, False)])]), [t], lambda i: SQUARE
    ),
    show_comparisons=_comparisons,
)


@pytest.fixture
def fonts(monkeypatch):
    monkeypatch.setattr(plotting, '_NO_FONT', set())
    with plt.rc_context():
        yield
    plt.close('all')


@pytest.mark.parametrize('text', ODD)
@pytest.mark.parametrize('name', FIGURES)
def test_figures_of_odd_names_are_drawn_without_a_flood_of_warnings(name, text, fonts):
    "No formula, no flood: at most one warning, which says what to install"
    with warnings.catch_warnings(record=True) as texts:
        warnings.simplefilter('always')
        FIGURES[name](text).canvas.draw()
    assert [str(w.message)[:8] for w in texts] in ([], ['figures:']), [str(w.message) for w in texts]


def test_letters_come_from_a_font_that_has_them(fonts):
    letters = [chr(c) for c in range(0x20, 0x3000)]
    rare = max(plotting._in_fonts(letters, ['STIXGeneral']) - plotting._in_fonts(letters, plt.rcParams['font.family']))
    assert drawable(f'a {rare}') == f'a {rare}' and len(plt.rcParams['font.family']) == 2
    assert drawable('a \U000f0000\U000f0001b') == 'a \u25a1b'
