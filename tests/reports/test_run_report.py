"The page of a run: nothing in its files reaches it unescaped, pictures are part of it, all runs are on it"

import copy

import pytest
from run_folders import facts, picture, put

from vlrep.reports.run_report import comparison_html, write_comparison, write_report

HOSTILE = '"\'><script>alert(1)</script>'


def places(x, path=()):
    "The paths to all values in a nest of dicts and lists; a key is a place, too"
    for k, v in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield (*path, k), False
        if isinstance(x, dict):
            yield (*path, k), True
        yield from places(v, (*path, k))


def with_hostile(d, path, key):
    d = copy.deepcopy(d)
    at = d
    for k in path[:-1]:
        at = at[k]
    if key:
        at[path[-1] + HOSTILE] = at.pop(path[-1])
    else:
        at[path[-1]] = HOSTILE
    return d


def test_nothing_reaches_a_page_unescaped(tmp_path):
    "Every value and every key of the three files replaced by a script: escaped, or refused with the folder's name"
    files = facts()
    run = tmp_path / 'run'
    other = put(tmp_path / 'other', facts('supervised', 1))
    page = write_report(put(run, files)).read_text()
    both = write_comparison([run, other], tmp_path / 'both.html').read_text()
    for head in (
        'Attention of each generated word',
        'Where the mouse was',
        'Nearest neighbours',
        'What was left out',
        'How captions score',
        'Where is it?',
        'Learning',
        'over all 9',
        'How it learned',
        'One line a seed.',
    ):
        assert head in page, head
    assert 'Settings that differ' in both and 'different numbers of scenes' not in both
    shown = refusals = 0
    for name, d in files.items():
        for path, key in places(d):
            put(run, {**files, name: with_hostile(d, path, key)})
            for ask in (lambda: write_report(run), lambda: write_comparison([run, other], tmp_path / 'both.html')):
                try:
                    page = ask().read_text()
                except ValueError as e:
                    assert str(run) in str(e), (name, path, e)
                    refusals += 1
                    continue
                assert '<script' not in page and 'alert(1)</' not in page and '"\'>' not in page, (name, path, key)
                assert '&amp;lt;' not in page and '&amp;#' not in page, (name, path, key)  # escaped once
                shown += 'alert(1)' in page
    assert shown > 60 and refusals > 100, (shown, refusals)


def test_pictures_of_a_page_are_part_of_it(tmp_path):
    "No address of elsewhere, no SVG"
    files = facts()
    for uri in (
        'http://elsewhere/x.png',
        'javascript:alert(1)',
        'data:text/html;base64,AAAA',
        'data:image/svg+xml;base64,AAAA',
        picture() + '" onload="x',
        '',
        None,
        3,
    ):
        for place in ('captions', 'words', 'traces', 'neighbours', 'figures'):
            d = copy.deepcopy(files)
            s = d['samples.json'][place]
            if place == 'neighbours':
                s['pics']['1'] = uri
            else:
                s[0]['image'] = uri
            with pytest.raises(ValueError, match='run: .*not a picture'):
                write_report(put(tmp_path / 'run', d))


def test_a_page_shows_more_runs_than_there_are_colours():
    "More runs than colours: every one of them is on the page"
    files = facts('a run')
    info = files['recipe.json']
    res = files['result.jsonl']
    log = [dict(step=str(k), train_loss='2.5', valid_loss='2.', lr0='.1') for k in (3, 6)]
    runs = []
    for seed in range(75):
        own = copy.deepcopy(info)
        result = copy.deepcopy(res)
        own['seed'] = result['seed'] = seed
        runs.append(dict(name=f'run{seed}', info=own, res=result, log=log))
    page = comparison_html(runs)
    assert page.startswith('<!doctype html>') or '<html' in page
    assert not [f'run{s}' for s in range(75) if f'run{s}' not in page]
