"vlrep study on a folder of photos: planned, run, resumed, judged by evaluations that keep redraws of the test photos"

import ast
import json
import shutil

import pytest
from tools import ROOT, refused

from vlrep.cli import main
from vlrep.datasets.flickr8k import write_flickr8k
from vlrep.datasets.world.dataset import scene
from vlrep.studies.judging import judge_study
from vlrep.studies.paper_results import stored_study, verdict_text
from vlrep.studies.plan import read_study, variant_recipe
from vlrep.studies.records import read_study_lines
from vlrep.studies.report import write_study_report
from vlrep.studies.runs import files_hash, plan_study, run_study
from vlrep.training.run_folder import open_run_folder

NET = (
    'steps = 6, warmup = 1, size = 32, bs = 8, visual_depth = 10, visual_width = 8, width = 16, heads = 2, vocab = 200'
)
STUDY = f"""
name = 'photos_tiny'
seeds = [0, 1]
precision = 'fp32'

[data]
name = 'flickr8k'
draws = 30
shuffles = 1
train = 0.6
valid = 0.2
test = 0.2

[rates]
score = 'held_loss'
extend = 0
grid = [{{cnn_lr = 0.2}}, {{cnn_lr = 0.4}}]

[[variants]]
name = 'soft'
method = 'clip'
changes = {{{NET}}}

[[variants]]
name = 'sigmoid'
method = 'clip'
changes = {{{NET}, loss = 'sigmoid'}}

[[comparisons]]
id = 'R5'
text = 'the sigmoid is as good as the softmax'
treatment = 'sigmoid'
control = 'soft'
table = 'retrieval'
question = 'image to text: R@5'
direction = 0

[[comparisons]]
id = 'T'
text = 'and finds more words of captions'
treatment = 'sigmoid'
control = 'soft'
table = 'tagging'
question = 'words of captions'
size = 2.0

[[comparisons]]
id = 'T, random'
text = 'more than the untrained network'
treatment = 'soft'
control = '@random'
table = 'tagging'
question = 'words of captions'

[[comparisons]]
id = 'chance'
text = 'retrieval is above chance'
treatment = 'soft'
control = 'chance'
table = 'retrieval'
question = 'text to image: R@5'

[ask]
tagging = {{tags = 30, k = 3, epochs = 1}}
"""


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "A folder of sixty pictures in Flickr8k's layout"
    root = tmp_path_factory.mktemp('photos') / 'pictures'
    write_flickr8k([scene('train', i, size=48) for i in range(60)], root)
    return root


@pytest.fixture(scope='module')
def done(photos, tmp_path_factory):
    "The study, run through the command line with --root"
    tmp = tmp_path_factory.mktemp('study')
    (tmp / 's.toml').write_text(STUDY)
    main(['study', 'run', str(tmp / 's.toml'), '--out', str(tmp / 'out'), '--root', str(photos)])
    return tmp


def test_a_study_of_photos_is_judged(done):
    "Both evaluations, every seed: the redraws are those of the same test photos, and every comparison has a verdict"
    study, lines = read_study_lines(done / 'out')
    runs = [l for l in lines if l['kind'] == 'run']
    assert len(runs) == 8 and {l['rate'] for l in runs} == {0, 1}
    for l in runs:
        n = l['numbers']
        assert (
            'table' not in n and 'validation' not in n and {r['backbone'] for r in n['tagging']} == {'clip', 'random'}
        )
        for r in (*n['retrieval'], *n['tagging']):
            assert len(r['draws']) == 30
        assert {r['n'] for r in n['tagging']} == {14} and {
            r['candidates'] for r in n['retrieval'] if 'to image' in r['question']
        } == {14}
    rows = judge_study(study, lines)
    assert all('p' in r and len(r['each']) == 2 for r in rows), [r['verdict'] for r in rows]
    assert any(r['s_scene'] > 0 for r in rows)
    page = (done / 'out' / 'report.md').read_text()
    for text in ('| tie |', 'sigmoid − soft', 'soft − random', '- **data**: flickr8k draws=30'):
        assert text in page, text


def test_lines_know_which_photos_they_saw(done, photos):
    "The path is not kept, a hash of the photos is; other photos are not mixed in"
    _, lines = read_study_lines(done / 'out')
    assert {l['facts']['photos'] for l in lines if 'facts' in l} == {files_hash(str(photos))}
    first = json.loads((done / 'out' / 'study.jsonl').read_text().splitlines()[0])
    assert 'root' not in first['table']['data']


def test_a_finished_study_of_photos_is_not_repeated(done, photos, tmp_path, capsys):
    lines = []
    was = (done / 'out' / 'study.jsonl').read_bytes()
    run_study(done / 's.toml', done / 'out', log=lines.append, root=photos)
    assert not [l for l in lines if l.startswith('--')] and (done / 'out' / 'study.jsonl').read_bytes() == was
    shutil.copytree(photos, tmp_path / 'less')
    next((tmp_path / 'less' / 'Images').iterdir()).unlink()
    err = refused(capsys, 'study', 'run', done / 's.toml', '--out', done / 'out', '--root', tmp_path / 'less')
    assert 'made under different conditions (photos: was' in err
    assert open_run_folder(done / 'out' / 'runs' / 'soft-0-rate1').info['root'] == str(photos.resolve())


def test_the_page_needs_no_photos(done, tmp_path):
    "Committed results are read and judged where no photos are"
    (tmp_path / 'page').mkdir()
    shutil.copy(done / 's.toml', tmp_path / 'photos_tiny.toml')
    shutil.copy(done / 'out' / 'study.jsonl', tmp_path / 'photos_tiny.jsonl')
    assert write_study_report(tmp_path / 'photos_tiny.jsonl', tmp_path / 'page').is_file()
    study, lines = stored_study('photos_tiny', tmp_path)
    assert study.data == 'flickr8k' and len(lines) == 8
    text = verdict_text('photos_tiny', tmp_path, ids=('R5',))
    assert '8 of 8 runs' in text and 'R5: the sigmoid' in text and '±' in text and 'T: and finds' not in text


def test_a_plan_is_timed_on_the_photos(done, photos, capsys):
    "Timed on the photos; without them one line says where to write it"
    assert plan_study(read_study(done / 's.toml'), done / 'out' / 'runs', log=str, root=photos)['runs'] == 8
    main(['study', 'plan', str(done / 's.toml'), '--root', str(photos)])
    assert 'together' in capsys.readouterr().out
    assert 'data.root: ' in (err := refused(capsys, 'study', 'plan', done / 's.toml')) and '--root' in err
    assert '--root nowhere: no such file' in refused(capsys, 'study', 'plan', done / 's.toml', '--root', 'nowhere')


def test_the_study_file_may_name_the_root(photos, tmp_path, capsys):
    (tmp_path / 's.toml').write_text(STUDY.replace("name = 'flickr8k'", f"name = 'flickr8k'\nroot = '{photos}'"))
    assert read_study(tmp_path / 's.toml').root == str(photos)
    main(['study', 'plan', str(tmp_path / 's.toml')])
    assert 'together' in capsys.readouterr().out
    (tmp_path / 's.toml').write_text(
        "name='w'\nseeds=[0]\n[data]\nname='world'\n[[variants]]\nname='a'\nmethod='virtex'\n"
    )
    text = refused(capsys, 'study', 'plan', tmp_path / 's.toml', '--root', photos)
    assert text.startswith(f'vlrep study: --root {photos}') and 'needs no files' in text


@pytest.mark.parametrize(
    'old,new,says',
    [
        (
            "table = 'retrieval'\nquestion = 'image to text: R@5'\ndirection = 0",
            'direction = 0',
            "comparisons[R5].table: 'table' is measured on scenes under domain shift, and flickr8k has none",
        ),
        ('draws = 30', 'draws = 0', 'comparisons[R5].treatment: draws=0 of variant sigmoid'),
        ('draws = 30', 'draw = 30', "data: unknown field 'draw': did you mean 'draws'"),
        ('draws = 30', 'draws = -1', 'data: draws=-1: must be from 0'),
        ("score = 'held_loss'", "score = 'objects'", "flickr8k has no scenes; take 'held_loss'"),
        ("'@random'", "'@supervised'", "comparisons[T, random].control: unknown row '@supervised'"),
        ('[ask]\ntagging = {tags = 30, k = 3, epochs = 1}', '', 'comparisons[T].table: no run has this evaluation'),
        ('tags = 30', "data = 'coco'", "ask.tagging: data='coco': needs files"),
        ('test = 0.2', 'test = 0.5', 'data: train=0.6, valid=0.2, test=0.5: parts of the whole'),
    ],
)
def test_mistakes_about_photos_are_one_line(tmp_path, capsys, photos, old, new, says):
    assert old in STUDY
    (tmp_path / 's.toml').write_text(STUDY.replace(old, new, 1))
    err = refused(capsys, 'study', 'plan', tmp_path / 's.toml', '--root', photos)
    assert err.startswith(f'vlrep study: {tmp_path / "s.toml"}: ') and says in err


def test_redraws_of_photos_stand_in_their_options(tmp_path):
    (tmp_path / 's.toml').write_text(STUDY)
    study = read_study(tmp_path / 's.toml')
    assert [variant_recipe(study, a)[1].draws for a in study.variants] == [30, 30]


def test_part_and_captions_are_for_pretraining_alone(photos, tmp_path, capsys):
    "A run on a part of the photos that its seed chooses is evaluated, and with the captions of all training photos"
    words = [w for kv in NET.split(', ') for w in ('--set', kv.replace(' ', ''))]
    for name, more in (('all', ()), ('part', ('--part', '.5', '--captions', '1', '--part-seed', '-1'))):
        main(
            [
                'pretrain',
                '--method',
                'clip',
                '--data',
                'flickr8k',
                '--root',
                str(photos),
                *words,
                *more,
                '--threads',
                '1',
                '--out',
                str(tmp_path / name),
            ]
        )
    counted = []
    for name in ('all', 'part'):
        capsys.readouterr()
        main(['evaluate', str(tmp_path / name), '--on', 'tagging', '--epochs', '1'])
        counted.append(next(l for l in capsys.readouterr().out.splitlines() if 'words of captions, ' in l))
        main(['evaluate', str(tmp_path / name), '--on', 'retrieval'])
    assert counted[0] == counted[1]


# ---------------------------------------------------------------- damaged photos

DAMAGED = f"""
name = 'damaged'
seeds = [0]
precision = 'fp32'

[data]
name = 'flickr8k'
draws = 10
train = 0.6
valid = 0.2
test = 0.2

[[variants]]
name = 'soft'
method = 'clip'
changes = {{{NET}, max_unknown = 1}}

[ask]
tagging = {{tags = 30, k = 3, epochs = 1}}
"""
RATES = "\n[rates]\nscore = 'held_loss'\ngrid = [{cnn_lr = 0.2}]\n"


@pytest.mark.parametrize('rates', ['', RATES], ids=['plain', 'rates'])
def test_damaged_photos_of_a_study_are_limited(photos, tmp_path, capsys, rates):
    "Missing photos stop a study; `max_corrupt` of [data] lets runs and evaluations pass, in the same folder"
    root = tmp_path / 'photos'
    file = tmp_path / 's.toml'
    out = tmp_path / 'out'
    shutil.copytree(photos, root)
    images = sorted((root / 'Images').iterdir())
    for image in images[:11]:
        image.unlink()
    words = 'study', 'run', file, '--out', out, '--root', root
    file.write_text(DAMAGED + rates)
    lost = '11 of 60 images named in captions.txt are missing'
    advice = f'max_corrupt = 11 in [data] of {file} lets them pass'
    for text in (refused(capsys, *words), refused(capsys, 'study', 'plan', file, '--root', root)):
        assert lost in text and advice in text and '--max-corrupt' not in text
    file.write_text(DAMAGED.replace('draws = 10', "draws = 10\nmax_corrupt = '20%'") + rates)
    main([str(w) for w in words])
    study, lines = read_study_lines(out)
    assert study.max_corrupt == '20%' and open_run_folder(out / 'runs' / 'soft-0').info['max_corrupt'] == '20%'
    (run,) = [l for l in lines if l['kind'] == 'run']
    assert run['numbers']['tagging']
    plan_study(study, log=str, root=root)
    for odd in ("'many'", 'true', '[3]', '-1'):
        file.write_text(DAMAGED.replace('draws = 10', f'draws = 10\nmax_corrupt = {odd}'))
        assert 's.toml: data.max_corrupt' in refused(capsys, *words)


LIMITED = (
    'pretrain',
    'resume_run',
    'finetune',
    'evaluate',
    'run_checks',
)  # They read data, up to a limit


def test_all_that_a_study_starts_has_its_limit_of_damage():
    "Every call that reads data is given `max_corrupt`, in runs that are resumed and in estimates of the cost, too"
    calls = [
        (file.name, call)
        for file in sorted((ROOT / 'vlrep' / 'studies').glob('*.py'))
        for call in ast.walk(ast.parse(file.read_text(encoding='utf-8')))
        if isinstance(call, ast.Call) and getattr(call.func, 'id', '') in LIMITED
    ]
    assert {call.func.id for _, call in calls} == {*LIMITED}
    # itself, or in its `Runtime`
    without = [
        (name, call.lineno)
        for name, call in calls
        if not any(isinstance(k, ast.keyword) and k.arg == 'max_corrupt' for k in ast.walk(call))
    ]
    assert not without
