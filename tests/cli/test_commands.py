"Both spellings of the command line, tiny runs of every kind, and what is said when something is wrong"

import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import build
from tools import ENV, MODULE, NET, PHOTOS, ROOT, SIZES, WORLD, command, refused, run, sets

import vlrep
import vlrep.experiments.pretrain as pretraining
from vlrep.cli import _pretrain_options, main
from vlrep.core.fields import field_rows
from vlrep.core.seeding import uniform_by_name
from vlrep.data.image_files import split_source
from vlrep.datasets.coco import write_coco
from vlrep.datasets.csv import read_csv, write_csv
from vlrep.datasets.flickr8k import read_flickr8k
from vlrep.datasets.flickr30k import write_flickr30k
from vlrep.datasets.narratives import write_localized
from vlrep.datasets.world.dataset import scene
from vlrep.evaluation.captioning import caption_scores
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.resolve_options import resolve_options
from vlrep.experiments.spec import run_spec
from vlrep.training.run_folder import open_run_folder

FILES = {'recipe.json', 'tokenizer.model', 'log.csv', 'steps', 'best', 'result.jsonl', 'samples.json', 'report.html'}


@pytest.fixture(scope='session')
def on_world(tmp_path_factory):
    "A tiny run on the world, by the module's spelling and the default folder; `on_photos` begins with a real process"
    cwd = tmp_path_factory.mktemp('world')
    words = ['pretrain', '--threads', 1, '--seed', 3, *sets(WORLD)]
    return forked.run(MODULE, words, cwd), cwd / 'runs' / 'world-virtex-1'


@pytest.fixture(scope='session')
def on_photos(tmp_path_factory):
    "A tiny run on the committed photos, by the script's spelling"
    out = tmp_path_factory.mktemp('photos') / 'out'
    return run(
        [
            *command('pretrain'),
            '--data',
            'flickr8k',
            '--root',
            PHOTOS,
            '--out',
            out,
            '--threads',
            1,
            '--tracker',
            'tensorboard',
            *sets(['size=32', 'vocab=300', 'steps=20', *NET]),
        ],
        out.parent,
    ), out


IMPORTS = """
import sys
from vlrep.cli import main
main(sys.argv[1:])
if sys.argv[1] == 'caption':
    import vlrep.experiments.commands  # evaluate, features, export
slow = 'torch', 'torch._dynamo', 'torchvision', 'fastai', 'sklearn', 'jinja2'
print('IMPORTED', *[m for m in slow if m in sys.modules])
"""


@pytest.mark.parametrize(
    'words, needed',
    [(['caption', 'run', next((PHOTOS / 'Images').iterdir())], ['torch']), (['report', 'run'], ['jinja2'])],
)
def test_a_command_imports_only_what_it_needs(on_world, tmp_path, words, needed):
    "A caption without fastai and PyTorch's compiler, which take as long to import as PyTorch; a report without PyTorch"
    shutil.copytree(on_world[1], tmp_path / 'run')
    done = subprocess.run(
        [sys.executable, '-c', IMPORTS, *words], cwd=tmp_path, capture_output=True, text=True, env=ENV
    )
    assert done.stdout.splitlines()[-1:] == [f'IMPORTED {" ".join(needed)}'], done.stderr


def test_a_run_on_the_world_leaves_its_files_and_a_table(on_world):
    done, out = on_world
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    assert FILES <= {p.name for p in out.iterdir()}
    for stage in ('world', 'tokenizer', 'bicaptioning', 'random', 'supervised', 'transfer', 'captions'):
        assert re.search(rf'^\[{stage}\] \d', done.stdout, re.M), done.stdout
    assert (
        'precision' in done.stdout
        and 'threads 1' in done.stdout
        and 'unseen objects' in done.stdout
        and 'supervised: as many steps as virtex' in done.stdout
        and str(Path('runs/world-virtex-1/report.html')) in done.stdout
    )
    info = json.loads((out / 'recipe.json').read_text())
    res = json.loads((out / 'result.jsonl').read_text())
    num = res['numbers']
    assert num['reference']['kind'] == 'none' and num['reference']['text'] in done.stdout  # not the recipe of --tiny
    assert (
        info['method'] == 'virtex'
        and info['recipe']['steps'] == 20
        and info['recipe']['momentum'] == 0.9
        and info['data']['scenes'] == 200
        and info['seed'] == 3
        and info['versions']['torch']
    )
    assert res['seed'] == 3 and res['recipe'] == 'world' and 'commit' in res and res['seconds']['bicaptioning'] > 0
    assert {r['backbone'] for r in num['table']} == {'virtex', 'supervised', 'random'} and len(
        {r['question'] for r in num['table']}
    ) == 7
    assert (
        all(0 <= r['low'] <= r['high'] <= 100 for r in num['table'])
        and 0 <= num['noun_precision'] <= 100
        and num['images_per_second'] > 0
    )


def test_a_tracker_gets_the_log_and_the_captions(on_photos):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(on_photos[1] / 'tensorboard'))
    seen.Reload()
    for column in ('train_loss', 'valid_loss'):
        log = open_run_folder(on_photos[1]).log()
        rows = list({r['step']: r[column] for r in log[::-1] if r[column] is not None}.items())[::-1]
        assert [e.step for e in seen.Scalars(column)] == [step for step, _ in rows]
        assert [e.value for e in seen.Scalars(column)] == pytest.approx([value for _, value in rows])
    captions = json.loads((on_photos[1] / 'samples.json').read_text())['captions']
    assert len(seen.Tags()['images']) == len(captions) > 0


def test_the_report_of_a_run_is_one_page(on_world, on_photos):
    for _, out in (on_world, on_photos):
        page = (out / 'report.html').read_text()
        assert page.startswith('<!doctype html>') and '<svg' in page and 'data:image/jpeg;base64,' in page
        assert (
            not re.search(r"""(src|href)\s*=\s*["']?(?!data:)\w""", page)
            and '<script' not in page
            and 'url(' not in page
        )
    assert (
        'supervised' in (on_world[1] / 'report.html').read_text()
        and 'given another photo' in (on_photos[1] / 'report.html').read_text()
    )


def test_a_run_on_photos_leaves_its_files_and_a_table(on_photos):
    done, out = on_photos
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    assert FILES <= {p.name for p in out.iterdir()}
    res = json.loads((out / 'result.jsonl').read_text())
    num = res['numbers']
    assert (
        len(num['wrong_each']) == 3
        and abs(num['wrong'] - np.mean(num['wrong_each'])) < 1e-9
        and 1 < num['right'] < 12
        and 'table' not in num
    )
    value, low, high = num['worth']  # of the photo, over photos
    assert low < value < high and value == pytest.approx(num['wrong'] - num['right'], abs=1e-6)
    assert f'the photo is worth {value:.3f} [{low:.3f}, {high:.3f}] a word' in done.stdout
    assert f'over photos 95 % from {low:+.3f} to {high:+.3f}' in (out / 'report.html').read_text()
    assert num['images'] == (uniform_by_name(os.listdir(PHOTOS / 'Images'), 0, 'held out') >= 0.2).sum()


def test_captions_at_the_shell_are_those_in_python(on_world, tmp_path, capsys):
    _, run_folder = on_world
    names = []
    for i in range(2):
        names.append(str(tmp_path / f'{i}.png'))
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (40 + i, 60, 3), dtype=np.uint8)).save(names[-1])
    # what the script calls; that scripts start is asked by `on_photos`
    a = forked.run('from vlrep.cli import main; main()', ['caption', run_folder, *names], tmp_path)
    capsys.readouterr()
    main(['caption', str(run_folder), *names])
    assert a.returncode == 0 and not a.stderr and a.stdout == capsys.readouterr().out and a.stdout.count('\n') == 2
    m = vlrep.load(run_folder)
    assert m.caption(names) == a.stdout.splitlines() and m.caption(names[0]) == a.stdout.splitlines()[0]
    assert m.embed(names).shape == (2, m.backbone.width) and np.allclose(
        m.embed(Image.open(names[1])), m.embed(names)[1], atol=1e-5
    )


def test_the_same_seed_gives_the_same_weights(on_world, tmp_path):
    again = pretrain(run_spec(changes=WORLD, seed=3, threads=1), out=tmp_path / 'again', log=lambda s: None)
    a, b = (vlrep.load(p).backbone.state_dict() for p in (on_world[1], again))
    assert all(torch.equal(a[k], b[k]) for k in a)
    t = [json.loads((p / 'result.jsonl').read_text())['numbers'] for p in (on_world[1], again)]
    assert [r['value'] for r in t[0]['table']] == [r['value'] for r in t[1]['table']] and t[0]['held_loss'] == t[1][
        'held_loss'
    ]


WRONG = {
    'pretrain --sede 1': '--seed N',
    'pretrain --seed one': '--seed',
    'pretrain --seed': '--seed',
    'pretrain --method virtx': '--method',
    'pretrain --data wrld': '--data',
    'pretrain --recipe wrold': '--recipe',
    'pretrain --tracker wandd': "did you mean 'wandb'",
    'pretrain --widht 3': '--width INT',
    'pretrain --steps many': "--steps: 'many' is not a whole number",
    'pretrain --steps': '--steps',
    'pretrain --lr -1': 'lr=-1.0: must be from 0',
    'pretrain --lr=nan': 'lr=nan: must be from 0',
    'pretrain --task forward': '--task: the method decides it',
    'pretrain --baselines maybe': 'baselines is true or false',
    'pretrain --localise .1': 'Unrecognized options: --localise',
    'pretrain --set localise=.1': "unknown field 'localise'",
    'pretrain --method supervised --vocab 99': 'Unrecognized options: --vocab',
    'pretrain --shuffles 2': 'Unrecognized options: --shuffles',
    'evaluate x --on world --thread 2': 'Unrecognized options: --thread',
    'evaluate --on world': 'RUN',
    'pretrain --set widht=3': "unknown field 'widht': did you mean 'width'",
    'pretrain --set steps=many': 'steps is a whole number',
    'pretrain --set steps': 'field=value',
    'pretrain --precision fp61': "precision 'fp61': did you mean 'fp16'",
    'pretrain --data flickr8k': '--root',
    'pretrain --data flickr8k --root nowhere': 'nowhere',
    'pretrain --method supervised --data flickr8k': 'categories',
    'pretrain --method multilabel --data flickr8k': 'labels',
    'pretrain --set task=forward': '--method',
    'pretrain --set lr=-1': 'lr=-1.0: must be from 0',
    'pretrain --set momentum=2': 'momentum=2.0: must be from 0 to',
    'pretrain --set warmup=2600': 'warmup=2600: must be below the 2600 steps',
    'pretrain --set max_len=5': 'max_len=5: must be from 8',
    'pretrain --method loctex --set temperature=0': 'temperature=0.0: must be above 0',
    'pretrain --method loctex --set contrast=nan': 'contrast=nan: must be from 0',
    'pretrain --set point=-1': 'point=-1: must be from 0',
    'evaluate x --on voc7': "did you mean 'voc07'",
    'evaluate x --on world': 'no such run folder',
    'export x': '--to',
    'pretrain more': 'more',
    'pretrian': 'pretrain, resume, caption',
    'caption': 'RUN',
    'caption nowhere a.png': 'nowhere',
    'caption nowhere --wich last': '--which WHICH',
}


@pytest.mark.parametrize('words', WRONG)
def test_wrong_words_are_refused_in_one_line(capsys, words):
    assert WRONG[words] in refused(capsys, *words.split())


def test_wrong_files_are_refused_in_one_line(capsys, on_world, on_photos, tmp_path):
    good = tmp_path / 'good.png'
    Image.new('RGB', (30, 30)).save(good)
    cut = tmp_path / 'cut.jpg'
    photo = next((PHOTOS / 'Images').iterdir())
    cut.write_bytes(photo.read_bytes()[:900])
    out = on_world[1]
    assert 'cut.jpg' in refused(capsys, 'caption', out, good, cut, code=1)
    assert 'none.png' in refused(capsys, 'caption', out, tmp_path / 'none.png')
    assert 'IMAGE' in refused(capsys, 'caption', out)
    assert 'contains a run' in refused(capsys, 'pretrain', '--out', out)
    for name, harm, says in (
        ('recipe.json', lambda p: p.write_text('{"method":'), 'recipe.json'),
        ('tokenizer.model', lambda p: p.unlink(), 'tokenizer.model'),
        ('best/model.safetensors', lambda p: p.write_bytes(p.read_bytes()[:5000]), 'model.safetensors'),
        ('best', shutil.rmtree, 'best'),
    ):
        bad = tmp_path / 'bad'
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(out, bad)
        harm(bad / name)
        assert says in refused(capsys, 'caption', bad, good)


TINY = ['size=32', 'vocab=300', 'steps=20', *NET]


def test_damaged_photos_are_replaced_left_out_and_counted(tmp_path, capsys):
    """What cannot be read is replaced in training, left out in the test, and said

    A caption that is missing is said, too
    """
    photos = tmp_path / 'photos'
    shutil.copytree(PHOTOS, photos)
    mute, *torn = sorted((photos / 'Images').iterdir())[5:80:15]
    lines = (photos / 'captions.txt').read_text().splitlines(True)
    (photos / 'captions.txt').write_text(''.join(l for l in lines if not l.startswith(mute.name)))
    torn[0].write_bytes(torn[0].read_bytes()[:500])
    text = []
    out = pretrain(run_spec(changes=TINY, data='flickr8k', root=photos), out=tmp_path / 'run', log=text.append)
    num = open_run_folder(out).results()[-1]['numbers']
    assert any('1 of' in s and 'no caption' in s and mute.name in s for s in text) and any(
        torn[0].name in s for s in text
    )
    assert list(num['corrupt']) == [torn[0].name] or any(s.startswith('left out') for s in text)
    assert math.isfinite(num['right']) and num['duplicates'] is not None
    for p in sorted((photos / 'Images').iterdir())[::2]:
        p.write_bytes(b'')
    # which can go on, see datasets/test_foreign_files.py
    assert 'images cannot be read' in refused(
        capsys, 'pretrain', '--data', 'flickr8k', '--root', photos, '--out', tmp_path / 'y', *sets(TINY)
    )
    assert open_run_folder(tmp_path / 'y')


@pytest.mark.parametrize('data', ['csv', 'flickr30k', 'coco'])
def test_photos_in_other_layouts_are_trained_on_and_judged(data, tmp_path, capsys, monkeypatch):
    "The same job on photos in another layout; then its captions are judged at the shell"
    dataset = read_flickr8k(PHOTOS, size=64)
    recs = [dataset[i] for i in range(60)]
    root = tmp_path / 'data'
    if data == 'csv':
        root = root / 'all.csv'
        write_csv(recs, root)
    elif data == 'flickr30k':
        write_flickr30k(recs, root)
    else:
        for split, part in (('train2017', recs[:48]), ('val2017', recs[48:])):
            write_coco(part, root, split)
    out = pretrain(
        run_spec(
            changes=[
                *TINY,
                'part=.5',
                'captions=2',
                *dict(coco=['valid=.2'], csv=['train=.5', 'valid=.3', 'test=.2']).get(data, []),
            ],
            data=data,
            root=root,
        ),
        out=tmp_path / 'run',
        log=str,
    )
    num = open_run_folder(out).results()[-1]['numbers']
    assert num['images'] == dict(csv=14, flickr30k=25, coco=20)[data] and 'right' in num
    wanted = []
    monkeypatch.setattr(
        'vlrep.evaluation.evaluate.caption_scores',
        lambda write, dataset, **kw: wanted.extend(dataset.ids) or caption_scores(write, dataset, **kw),
    )
    capsys.readouterr()
    main(['evaluate', str(out), '--on', 'captions', '--how', 'beam'])
    text = capsys.readouterr().out
    assert 'CIDEr-D' in text and 'a person' in text
    # what this run kept for its test, not what another would
    if data == 'csv':
        assert wanted == list(split_source(read_csv(root, size=64), (0.5, 0.3, 0.2), seed=0)[2].ids)


def test_a_run_without_text_cannot_caption(capsys, tmp_path):
    out = build(tmp_path / 'supervised', 'supervised')
    good = tmp_path / 'good.png'
    Image.new('RGB', (30, 30)).save(good)
    assert 'captions' in refused(capsys, 'caption', out, good)
    assert vlrep.load(out).embed(good).shape == (vlrep.load(out).backbone.width,)


LOCTEX = [*SIZES, 'baselines=False', 'vocab=300', 'size=32', 'steps=12', *NET]


def test_loctex_answers_where_things_are_and_cannot_caption(tmp_path, capsys):
    "Where is it? On the world, in the table and on the page; a run of it cannot caption"
    out = pretrain(run_spec('loctex', LOCTEX, threads=1), out=tmp_path / 'run', log=str)
    num = open_run_folder(out).results()[-1]['numbers']
    page = (out / 'report.html').read_text()
    assert {(r['question'], r['backbone']) for r in num['where']} == {
        (q + s, w) for q in ('pointing', 'overlap') for s in ('', ', shifted') for w in ('loctex', 'centre')
    } and len(num['table']) == 7
    options = json.loads((out / 'samples.json').read_text())['traces']
    assert options and all(s['strokes'] and s['words'] for s in options)
    assert 'Where is it?' in page and 'Where the mouse was' in page and '<script' not in page
    good = tmp_path / 'good.png'
    Image.new('RGB', (30, 30)).save(good)
    assert 'caption' in refused(capsys, 'caption', out, good)
    for changes, why in (
        (['bs=1'], 'has no negatives'),
        (['loc_norm=rows'], "did you mean 'row'"),
        (['scales=4'], 'scales'),
    ):
        assert (
            why
            in refused(capsys, 'pretrain', '--method', 'loctex', '--out', tmp_path / 'no', *sets([*LOCTEX, *changes]))
            and not (tmp_path / 'no').exists()
        )
    assert 'parts of 1 pairs have no negatives' in refused(
        capsys, 'pretrain', '--method', 'loctex', '--accumulate', 16, '--out', tmp_path / 'no', *sets(LOCTEX)
    )


def test_photos_with_and_without_narratives_are_trained_on(tmp_path, capsys):
    "Photos with narratives, some of them without a trace; photos without any"
    root = tmp_path / 'told'
    small = ['vocab=300', 'size=32', 'steps=6', 'all_narratives=True', *NET]
    write_localized([scene('train', i, size=64, with_='narrative') for i in range(60)], root)
    table = next(root.glob('*.jsonl'))
    lines = [json.loads(l) for l in table.read_text().splitlines()]
    for l in lines[::10]:
        l['traces'] = []
    table.write_text(''.join(json.dumps(l) + '\n' for l in lines))
    text = []
    out = pretrain(
        run_spec('loctex', small, data='narratives', root=root, accumulate=2, threads=1),
        out=tmp_path / 'run',
        log=text.append,
    )
    num = open_run_folder(out).results()[-1]['numbers']
    bare = sum(not l['traces'] for l in lines)
    bare = next(s for s in text if 'have no trace' in s), bare
    assert 1 <= int(bare[0].split()[0]) <= bare[1] and 'of 45 narratives' in bare[0]
    assert (
        any('all_narratives: no image has more than one' in s for s in text)
        and any('7 negatives instead of 15' in s for s in text)
        and any('the loss is nats per pair' in s for s in text)
    )
    assert (
        num['images'] == 45
        and math.isfinite(num['held_loss'])
        and json.loads((out / 'samples.json').read_text())['traces']
    )
    table.write_text(table.read_text().replace('"caption"', '"captoin"', 1))
    strict = 'pretrain', '--method', 'loctex', '--data', 'narratives', '--root', root, '--max-corrupt', 0
    text = refused(capsys, *strict, '--out', tmp_path / 'no', *sets(small))
    assert str(table) in text and 'line 1: ' in text
    argv = [
        'pretrain',
        '--method',
        'loctex',
        '--data',
        'flickr8k',
        '--root',
        PHOTOS,
        '--out',
        tmp_path / 'photos',
        *sets(small),
    ]
    assert 'has no narratives, so nothing is left to learn' in refused(capsys, *argv, '--set', 'contrast=0')
    main([*map(str, argv), '--threads', '1'])
    assert 'captions are read instead' in capsys.readouterr().out


def test_the_list_of_fields_shows_values_that_were_changed(capsys):
    main(['pretrain', '--method', 'loctex', '--fields', '--set', 'temperature=.2'])
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r'temperature=0\.2 +\S', l) for l in lines) and any(
        l.startswith('scenes=10000 ') for l in lines
    )


@pytest.mark.parametrize('method,data', [('virtex', 'csv'), ('loctex', 'world'), ('supervised', 'world')])
def test_help_lists_every_field(method, data, capsys):
    "With its meaning, its bounds and its value in the recipe that is meant"

    def plain(text):
        return re.sub(r'[\s,_│]', '', text)  # lines are broken and numbers grouped

    with pytest.raises(SystemExit) as e:
        main(['pretrain', '--help', '--method', method, '--data', data])
    page = capsys.readouterr().out
    assert not e.value.code and ('--temperature' in page) == (method == 'loctex')
    for part in resolve_options(method, None, (), data):
        for name, _, value, help_text in field_rows(part):
            entry = page.split(f' --{name} '.replace('_', '-'), 1)[1].split('\n')[:6]
            assert plain(f'{help_text} (default: {value})') in plain(''.join(entry)), (name, entry)


def test_fields_are_options(capsys):
    "In either spelling, the last word wins; the list shows what is meant"
    for argv in (
        ['--lr', '.7', '--probe-held=41'],
        ['--set', 'lr=.7', '--probe_held', 41],
        ['--set', 'lr=3', '--set=lr=.7', '--set', 'probe_held=41'],
        ['--lr', 3, '--probe-held', 50, '--lr', 0.7, '--probe-held', 41],
    ):
        main(['pretrain', '--fields', *map(str, argv)])
        lines = capsys.readouterr().out.splitlines()
        assert any(l.startswith('lr=0.7 ') for l in lines) and any(l.startswith('probe_held=41 ') for l in lines), argv
    assert 'leave one of them out' in refused(capsys, 'pretrain', '--lr', 3, '--set', 'lr=.7')


def stored():
    "Method, dataset and changes of every result that is committed"
    for p in sorted((ROOT / 'data' / 'results').glob('*.jsonl')):
        for line in map(json.loads, p.read_text().splitlines()):
            yield line['method'], line['data'], line['recipe'], tuple(line['changes'])


def test_stored_changes_still_run():
    "What results say was changed, given at the shell in either spelling, is what was changed"
    lines = {l for l in stored() if l[3]}
    assert len(lines) >= 5 and any('baselines=False' in l[3] for l in lines)
    for method, data, recipe, changes in lines:
        argv = ['--method', method, '--data', data, '--recipe', recipe]
        for more in (sets(changes), [f'--{c}' for c in changes]):
            got = _pretrain_options([*argv, *more])
            assert len(got['changes']) == len(changes)
            assert (
                resolve_options(got['method'], got['recipe'], got['changes'], got['data'])
                == resolve_options(method, recipe, changes, data)
                != resolve_options(method, recipe, (), data)
            )


def test_dry_run_overfit_and_comparison_are_first_steps(tmp_path, capsys, on_world, on_photos, monkeypatch):
    "The plan, one batch overfitted, and several runs on one page"
    argv = ['pretrain', '--method', 'supervised', '--tiny', '--threads', 1]
    main([*map(str, argv), '--dry-run'])
    text = capsys.readouterr().out
    assert all(w in text for w in ('parameters', 'steps', 'MB')) and not (tmp_path / 'runs').exists()
    main([*map(str, argv), '--overfit'])
    text = capsys.readouterr().out
    low, high = map(int, re.search(r'; usual: (\d+) to (\d+)$', text.strip()).groups())
    assert low - 4 <= int(re.search(r'in (\d+) steps', text)[1]) <= high + 4
    assert '--dry-run' in refused(capsys, *argv, '--dry-run', '--out', tmp_path / 'x')
    monkeypatch.setattr(pretraining, 'overfit', partial(pretraining.overfit, steps=30))  # enough to see that it fails
    with pytest.raises(SystemExit) as e:
        main([*map(str, argv), '--overfit', '--set', 'cnn_lr=1e4'])
    assert e.value.code == 1 and 'cnn_lr is 10000.0, not 0.5' in capsys.readouterr().out
    main(['report', str(on_world[1]), str(on_photos[1]), '--out', str(tmp_path / 'side.html')])
    page = (tmp_path / 'side.html').read_text()
    assert (
        page.startswith('<!doctype html>')
        and '<script' not in page
        and 'contains no run' in refused(capsys, 'report', tmp_path)
    )
