"Names that must not come back: nbs/tutorials/vocabulary.ipynb says which words stand for what"

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = set(
    # several meanings, or none that a reader could guess
    'asked beside blind born held img kept lens most said there told tok waiting '
    # home-made, where the field has a word
    'CountedMean FrozenStart TwoTowers WordNaming _Half _Seats _lookat _lookback _think askers bn_group by_groups '
    'captions_named chances chunked_nats coldest concept_nats concept_rules damaged fusion_rules img_vec k_hot_loss '
    'learned name_words own_answer place_t place_v rarity_in recipe_rules settled shuffled still_grid thing_masks '
    'things twin txt_vec unless_begun whole_t whole_v word_rarity '
    # renamed after readers had not found or not understood them
    'as_today ask_world fit_named parts_of split_dataset written_by without_idle twin_layout question_rows EMAUpdate '
    # not what they are used for
    'Every Group Norm2 Note Share Side'.split()
)


def names(src):
    "Every identifier of Python source, without its strings and comments"
    found = {t.string for t in tokenize.generate_tokens(io.StringIO(src).readline) if t.type == tokenize.NAME}
    return found | {n.lower() for n in found if n.isupper()}


MODULES = [p for p in sorted((ROOT / 'vlrep').rglob('*.py')) if p.name[0] != '_']


@pytest.mark.parametrize('path', MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_banned_words_do_not_come_back(path):
    used = names(path.read_text(encoding='utf-8')) & BANNED
    assert not used, (
        f'{path.relative_to(ROOT)}: not clear to readers: {used} (BANNED above); nbs/tutorials/vocabulary has words'
    )


def test_banned_words_are_seen():
    "... as a variable, a constant, a parameter, a keyword, an attribute and a field, but not in strings and comments"
    seen = names("def f(tok): said = g(img=x.held)\nclass A:\n    kept: int = 'told'  # there\nBESIDE = 1")
    assert seen & BANNED == {'tok', 'said', 'img', 'held', 'kept', 'beside'}
    assert len(MODULES) > 150


def test_the_page_names_no_banned_word():
    page = (ROOT / 'nbs' / 'tutorials' / 'vocabulary.ipynb').read_text(encoding='utf-8')
    words = set(re.findall(r'`(\w+)', page))
    assert len(words) > 50 and not words & BANNED
