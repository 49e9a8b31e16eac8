"Sections of a report: the contents, the terms of the loss, other scores, the map, differences between runs"

import copy
import re

from run_folders import facts, table_rows

from vlrep.reports.run_report import comparison_html, report_html

LOG = [
    dict(
        step=step, train_loss=3.0, valid_loss=2.0 if step > 1 else '', train_a=2.0, train_b=1.0, valid_a=2.0, valid_b=''
    )
    for step in (1, 2)
]


def page_of(files, log=LOG):
    return report_html(files['recipe.json'], files['result.jsonl'], log, files['samples.json'])


def two_runs(first, second):
    "The page of two runs whose object scores have these (value, low, high)"
    runs = []
    for seed, (value, low, high) in enumerate((first, second)):
        files = facts(seed=seed)
        for row in files['result.jsonl']['numbers']['table']:
            if (row['question'], row['backbone']) == ('objects', 'virtex'):
                row.update(value=value, low=low, high=high)
        runs.append(dict(name=f'run {seed}', info=files['recipe.json'], res=files['result.jsonl'], log=[]))
    return comparison_html(runs)


def test_the_contents_lead_to_every_section():
    page = page_of(facts())
    links = re.findall('<a href="#([^"]+)">([^<]+)</a>', page)
    headings = re.findall('<h2 id="([^"]+)">([^<]+)</h2>', page)
    assert links == headings and len(links) > 8
    order = [text for _, text in headings]
    assert order.index('What the features are good for') < order.index('Learning') < order.index('What it cost')


def test_the_terms_of_both_losses_are_named():
    page = page_of(facts())
    assert 'The training loss counts a and b, the held-out loss a only.' in page
    assert 'a, training' in page and 'a, held out' in page and 'b, training' in page and 'b, held out' not in page
    one_term = [{k: v for k, v in row.items() if not k.endswith(('_a', '_b'))} for row in LOG]
    assert 'The training loss counts' not in page_of(facts(), one_term)


def test_scores_without_a_section_of_their_own_are_shown():
    files = facts()
    assert 'Other scores' not in page_of(files)
    files['result.jsonl']['numbers']['retrieval'] = table_rows(['text to image: R@10'], ['virtex'])
    page = page_of(files)
    assert 'Other scores' in page and 'text to image: R@10' in page and 'm.search' in page
    assert '50 %</b><span>of texts find their image among ten; chance 20' in page.replace('\n', '')


def test_the_map_has_a_picture_at_each_place():
    files = facts()
    assert 'A map of the features' not in page_of(files)
    files['samples.json']['neighbours']['map'] = [['1', 3.0, 97.0], ['2', 50.25, 4.0]]
    page = page_of(files)
    drawn = page[page.index('<div class="map">') :].split('</div>')[0]
    assert drawn.count('<img') == 2 and 'left:3.0%;top:97.0%' in drawn and 'left:50.2%;top:4.0%' in drawn


def test_a_difference_is_bold_where_its_interval_excludes_zero():
    "The half width of the difference of two independent intervals: sqrt(3² + 4²) = 5"
    page = two_runs((40.0, 37.0, 43.0), (50.0, 46.0, 54.0))
    assert '<b>+10.0 [+5.0, +15.0]</b>' in page
    page = two_runs((40.0, 37.0, 43.0), (44.0, 40.0, 48.0))
    assert '+4.0 [-1.0, +9.0]' in page and '<b>+4.0' not in page


def test_settings_that_differ_are_folded_at_the_end():
    files = facts()
    other = copy.deepcopy(files)
    other['recipe.json']['recipe']['heads'] = 4
    runs = [dict(name=n, info=f['recipe.json'], res=f['result.jsonl'], log=[]) for n, f in (('a', files), ('b', other))]
    page = comparison_html(runs)
    assert page.rindex('<h2') == page.index('<h2 id="settings-that-differ"') and '<details>' in page
    assert 'heads' in page[page.index('<details>') :]
