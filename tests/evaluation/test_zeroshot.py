"Zero-shot recognition: CUB and AWA2 as they are handed out, what is wrong with a folder, and who is recognised"

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from vlrep.data.transforms import EvalTransform
from vlrep.datasets.base import DATASETS
from vlrep.evaluation.base import EVALUATIONS, EvaluationContext
from vlrep.evaluation.zeroshot.benchmarks import read_awa2, read_cub
from vlrep.evaluation.zeroshot.zeroshot import evaluate_zeroshot, fit_attributes, zeroshot_hits
from vlrep.models.backbones import make_backbone
from vlrep.models.pretrained import Pretrained

COLORS = dict(
    antelope=(200, 30, 30), **{'grizzly+bear': (30, 200, 30), 'killer+whale': (30, 30, 200), 'bat': (200, 200, 30)}
)


def near(b, i, color):
    "Is the pixel in the middle of image `i` of this colour, as far as JPEG allows?"
    return abs(b.images.images([i])[0][0, :, 10, 10].numpy().astype(int) - color).max() < 8


def photos(folder, names, color):
    folder.mkdir(parents=True)
    for n in names:
        Image.new('RGB', (30, 20), color).save(folder / n)


@pytest.fixture
def awa2(tmp_path):
    "Animals_with_Attributes2 in its layout: numbers set with blanks and tabs, + for a blank in a name, -1 for unknown"
    root = tmp_path / 'Animals_with_Attributes2'
    for c, color in COLORS.items():
        photos(root / 'JPEGImages' / c, [f'{c}_1000{i}.jpg' for i in range(5)], color)
    for name, lines in {
        'classes.txt': [f'{i:8}\t{c}' for i, c in enumerate(COLORS, 1)],
        'predicates.txt': ['       1\tred', '       2\tgreen', '       3\tblue'],
        'predicate-matrix-continuous.txt': [
            ' 98.00  0.00  -1.00',
            ' 0.00 80.30 0.00',
            '0.00 0.00 55.00',
            '50.00 50.00 0.00',
        ],
        'trainclasses.txt': list(COLORS)[:3],
        'testclasses.txt': list(COLORS)[3:],
    }.items():
        (root / name).write_text('\n'.join(lines) + '\n')
    return root


@pytest.fixture
def cub(tmp_path):
    "CUB_200_2011 in its layout, with the list of unseen classes beside"
    root = tmp_path / 'CUB_200_2011'
    birds = [f'00{i}.Bird_{i}' for i in (1, 2, 3)]
    names = []
    for b, color in zip(birds, COLORS.values()):
        mine = [f'{b[4:]}_000{i}_79{i}.jpg' for i in range(4)]
        photos(root / 'images' / b, mine, color)
        names += [f'{b}/{n}' for n in mine]
    (root / 'attributes').mkdir()
    for name, lines in {
        'classes.txt': [f'{i} {b}' for i, b in enumerate(birds, 1)],
        'images.txt': [f'{i} {n}' for i, n in enumerate(names, 1)],
        'image_class_labels.txt': [f'{i + 1} {i // 4 + 1}' for i in range(12)],
        'testclasses.txt': birds[1:2],
        'attributes/class_attribute_labels_continuous.txt': ['0.0 7.5 12.0', '100.0 0.0 3.1', '0.0 50.0 50.0'],
    }.items():
        (root / name).write_text('\n'.join(lines) + '\n')
    return root


def test_awa2_is_read_as_it_is_handed_out(awa2):
    b = read_awa2(awa2, 32)
    assert b.classes == tuple(COLORS) and b.unseen.tolist() == [False, False, False, True]
    assert np.allclose(b.attributes, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5**0.5, 0.5**0.5, 0]])  # unknown counts as
    # absent
    for i in range(len(b.images)):
        (tag,) = b.images[i].tags
        assert tag == b.classes[b.label[i]] and near(b, i, COLORS[tag]), i
    rows = b.parts()
    assert sorted(np.concatenate(list(rows.values()))) == list(range(20)) and len(rows['validation']) == 3
    assert not b.unseen[b.label[rows['train']]].any() and {*b.label[rows['validation']]} == {0, 1, 2}


def test_cub_is_read_as_it_is_handed_out(cub):
    b = read_cub(cub, 32)
    assert b.label.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and b.unseen.tolist() == [False, True, False]
    assert np.allclose(np.linalg.norm(b.attributes, axis=1), 1)
    assert near(b, 0, COLORS['antelope']) and near(b, 11, COLORS['killer+whale'])


WRONG = [
    ('awa2', 'classes.txt', '1 antelope\n3 bat\n', 'classes.txt, line 2: begins with 3, expected 2'),
    ('awa2', 'predicate-matrix-continuous.txt', '1 2 3\n1 2\n1 2 3\n1 2 3\n', 'line 2: 2 words; expected 3'),
    ('awa2', 'predicate-matrix-continuous.txt', '1 2 x\n' * 4, 'predicate-matrix-continuous.txt, line 1'),
    ('awa2', 'predicate-matrix-continuous.txt', '1 2\n' * 4, '2 numbers per line for the 3 names of predicates.txt'),
    ('awa2', 'predicate-matrix-continuous.txt', '0 0 0\n' * 4, 'no attribute in row 1, 2, 3 and 1 more'),
    ('awa2', 'testclasses.txt', 'bat\nantelope\n', 'antelope must be in one of trainclasses.txt and testclasses'),
    ('awa2', 'testclasses.txt', 'wolf\n', 'testclasses.txt, line 1: wolf is no class of classes.txt'),
    ('awa2', 'trainclasses.txt', None, 'trainclasses.txt: no such file'),
    ('awa2', 'JPEGImages/bat', None, 'no image of bat'),
    ('cub', 'image_class_labels.txt', '1 1\n99 1\n', 'image_class_labels.txt, line 2: 99 1: expected an image'),
    ('cub', 'attributes/class_attribute_labels_continuous.txt', '1 2\n', '1 lines for 3 classes'),
    ('cub', 'testclasses.txt', None, 'part of the archive xlsa17'),
    ('cub', 'images/001.Bird_1', None, '4 of 12 images named in images.txt are missing'),
]


@pytest.mark.parametrize('which,name,text,says', WRONG, ids=[w[3][:40] for w in WRONG])
def test_wrong_folders_are_refused_by_name(which, name, text, says, request):
    root = request.getfixturevalue(which)
    path = root / name
    if path.is_dir():
        for p in path.iterdir():
            p.unlink()
        path.rmdir()
    elif text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ValueError) as e:
        dict(awa2=read_awa2, cub=read_cub)[which](root, 32)
    assert says in str(e.value), str(e.value)


def test_the_unseen_class_is_found_by_its_attributes(awa2):
    "Features that are the attributes: the yellow animal is named; with the attributes of another one it is not"
    b = read_awa2(awa2, 32)
    b.attributes[3] = [0.6, 0.6, 0.53]
    x = torch.from_numpy(b.attributes[b.label])
    got = zeroshot_hits(x, b, seeds=2, lr=0.1, epochs=100)
    new = b.unseen[b.label[got['rows']]]
    assert got['all'][~new].min() == 1 and got['unseen'][new].min() == 1 and got['unseen'][~new].max() == 0
    assert not set(got['rows']) & set(b.parts()['train'])
    with pytest.raises(ValueError, match='no image of a seen class'):
        fit_attributes(x[:0], torch.zeros(0), x[:3])


def test_any_model_is_evaluated(awa2):
    m = Pretrained(make_backbone(10, 8), EvalTransform(32), 32, name='RUN')
    about = EvaluationContext(
        m,
        SimpleNamespace(visual_depth=10, visual_width=8, size=32),
        dict(method='none', seed=0, data=dict(name='world')),
        DATASETS['world'].options,
        awa2,
        log=lambda s: None,
    )
    remaining = {k: v.clone() for k, v in m.backbone.state_dict().items()}
    rows = EVALUATIONS['zeroshot'].evaluate(about, benchmark='awa2', average='classes')
    assert {r['backbone'] for r in rows[:5]} == {'none'}
    assert {r['question']: (r['n'], r['chance']) for r in rows[:5]} == {
        'seen and unseen, of all': (8, 25.0),
        'unseen, of all': (5, 25.0),
        'unseen, of unseen': (5, 100.0),
        'seen, of all': (3, 25.0),
        'harmonic mean': (8, 25.0),
    }
    assert rows == evaluate_zeroshot(about, 'awa2', 'classes')  # the same numbers again
    assert all(torch.equal(v, remaining[k]) for k, v in m.backbone.state_dict().items())
    lost = sorted(awa2.rglob('*.jpg'))[0]
    lines = []
    lost.write_bytes(b'no photo')
    EVALUATIONS['zeroshot'].evaluate(replace(about, log=lines.append), benchmark='awa2')
    assert sum(line.startswith('left out: ') and lost.name in line for line in lines) == 1
    with pytest.raises(ValueError, match='at most 0 may be so'):
        EVALUATIONS['zeroshot'].evaluate(replace(about, max_corrupt=0), benchmark='awa2')


def test_the_published_split_decides_which_images_are_trained_on(awa2):
    "Rows are numbered in the order of another file; a damaged photo moves none of them"
    names = sorted(p.relative_to(awa2 / 'JPEGImages').as_posix() for p in awa2.rglob('*.jpg'))[::-1]
    row = {name: i + 1 for i, name in enumerate(names)}
    loc = dict(
        trainval_loc=[
            f'{n}.jpg'
            for n in ('antelope/antelope_10000', 'antelope/antelope_10001', 'killer+whale/killer+whale_10004')
        ],
        test_seen_loc=['grizzly+bear/grizzly+bear_10002.jpg'],
        test_unseen_loc=['bat/bat_10000.jpg', 'bat/bat_10003.jpg'],
    )
    savemat(awa2 / 'res101.mat', dict(image_files=np.array([f'/x/JPEGImages//{n}' for n in names], object)[:, None]))
    savemat(awa2 / 'att_splits.mat', {k: [[row[n]] for n in v] for k, v in loc.items()})
    b = read_awa2(awa2, 32)
    rows = {k: [b.images.ids[i] for i in v] for k, v in b.parts().items()}
    assert rows == dict(zip(('train', 'validation', 'test'), map(sorted, loc.values())))
    (awa2 / 'JPEGImages' / 'antelope' / 'antelope_10000.jpg').write_bytes(b'no photo')
    lines = []
    m = Pretrained(make_backbone(10, 8), EvalTransform(32), 32, name='RUN')
    recipe = SimpleNamespace(visual_depth=10, visual_width=8, size=32)
    info = dict(method='none', seed=0, data=dict(name='world'))
    about = EvaluationContext(m, recipe, info, DATASETS['world'].options, awa2, log=lines.append)
    got = evaluate_zeroshot(about, 'awa2')
    assert [r['n'] for r in got[:4]] == [3, 2, 2, 1]
    assert any('2 training images, 1 of seen and 2 of unseen classes (the published split)' in line for line in lines)
