"""Files from elsewhere: pictures, captions, narratives, weights, run folders

Each fault ends in one line that names the file, or is tolerated and reported.

Readers of one format are tested in their notebooks (nbs/datasets); here is what needs several of them, a run, or the
shell.
"""

import copy
import gzip
import io
import json
import math
import shutil
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from run_folders import build, reseal, resign
from safetensors.torch import load_file, save_file
from tools import NET, PHOTOS, needs_clear_refs, peak, refused, sets

import vlrep
from vlrep.core.files import read_json, write_json
from vlrep.data.records import CorruptImage, open_image
from vlrep.datasets.base import DATASETS
from vlrep.datasets.coco import read_coco, write_coco
from vlrep.datasets.csv import read_csv, write_csv
from vlrep.datasets.flickr8k import read_flickr8k
from vlrep.datasets.image_folder import read_folder
from vlrep.datasets.narratives import read_localized, write_localized
from vlrep.datasets.voc07 import read_voc_xml
from vlrep.datasets.world.dataset import scene
from vlrep.experiments.load_run import open_run
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import recorded_spec, run_spec
from vlrep.methods.virtex.model import CaptioningModel
from vlrep.methods.virtex.official import load_virtex, virtex_state
from vlrep.models.backbone_weights import load_backbone, read_state
from vlrep.models.backbones import make_backbone
from vlrep.reports.run_report import write_report
from vlrep.training.run_folder import Run, open_run_folder

TINY = ['size=32', 'vocab=300', 'steps=4', 'shuffles=1', *NET]

# ---------------------------------------------------------------- pictures


def test_ghostscript_is_never_run(tmp_path, monkeypatch):
    "An EPS under any name; Pillow would run a program on it"
    called = []
    monkeypatch.setattr(
        EpsImagePlugin, 'Ghostscript', lambda *a, **k: called.append(a) or Image.new('RGB', (10, 10)).im
    )
    for name in ('x.jpg', 'x.png', 'x.eps', 'x'):
        (tmp_path / name).write_bytes(
            b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n'
        )
        with pytest.raises(CorruptImage, match=f'{name}: damaged or not an image .not JPEG, PNG'):
            open_image(tmp_path / name)
    assert not called


MEANT = dict(JPEG='RGB', PNG='RGBA', WEBP='RGBA', BMP='RGB', GIF='P', TIFF='CMYK', PPM='RGB', MPO='RGB')
OTHERS = dict(PCX='RGB', SGI='RGB', TGA='RGB', JPEG2000='RGB', ICO='RGB', IM='RGB', DDS='RGB', SPIDER='F', MSP='1')


@pytest.mark.parametrize('kind', [*MEANT, *OTHERS])
def test_the_format_of_a_picture_is_that_of_its_content(tmp_path, kind):
    "By the content of the file, not by its name"
    mode = (MEANT | OTHERS)[kind]
    Image.new(mode, (32, 32)).save(tmp_path / f'x.{kind}', kind)
    (tmp_path / f'x.{kind}').rename(tmp_path / 'x.jpg')  # SPIDER claims the ending it is saved under
    if kind in MEANT:
        assert open_image(tmp_path / 'x.jpg').mode == 'RGB'
    else:
        with pytest.raises(CorruptImage, match='not JPEG, PNG'):
            open_image(tmp_path / 'x.jpg')


def png(w, h):
    "The head of a PNG that claims so many pixels"

    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', struct.pack('>IIBBBBB', w, h, 8, 2, 0, 0, 0))
        + chunk(b'IDAT', zlib.compress(bytes(10**5)))
        + chunk(b'IEND', b'')
    )


def test_a_picture_of_too_many_pixels_is_refused(tmp_path):
    for n in (8001, 13_300, 13_377, 10**6):
        (tmp_path / 'x.png').write_bytes(png(n, n))
        with pytest.raises(CorruptImage) as e:
            open_image(tmp_path / 'x.png', 64)
        assert 'more than 64 million' in str(e.value) or n > 13_376 and 'decompression bomb' in str(e.value), e.value
    (tmp_path / 'x.png').write_bytes(png(64_000_000, 1))
    assert 'more than' not in str(pytest.raises(CorruptImage, open_image, tmp_path / 'x.png').value)
    # somebody else's setting does not lift the limit
    old = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        assert 'more than 64 million' in str(
            pytest.raises(CorruptImage, open_image, tmp_path / 'x.png', max_pixels=64e6 - 1).value
        )
    finally:
        Image.MAX_IMAGE_PIXELS = old


@needs_clear_refs
@pytest.mark.parametrize('mode', ['RGBA', 'I;16', 'LA', 'P'])
def test_reading_a_picture_copies_no_more_than_its_pixels(tmp_path, mode):
    "No copy of the whole but the decoded pixels and the result: 8 bytes a pixel, where it were 14 to 20"
    n = 3000
    kw = dict(transparency=0) if mode == 'P' else {}
    (Image.fromarray(np.full((n, n), 300, np.uint16)) if mode == 'I;16' else Image.new(mode, (n, n))).save(
        tmp_path / 'x.png', **kw
    )
    grown, text = peak(lambda: open_image(tmp_path / 'x.png'))
    assert not text.startswith(('ValueError', 'OSError')) and grown < 11 * n * n, (
        f'{grown / n / n:.1f} bytes a pixel, {text}'
    )


# ---------------------------------------------------------------- damaged photos


@pytest.fixture
def photos(tmp_path):
    "80 photos in Flickr8k's layout"
    root = tmp_path / 'photos'
    (root / 'Images').mkdir(parents=True)
    names = sorted(p.name for p in (PHOTOS / 'Images').iterdir())[:80]
    for n in names:
        shutil.copy(PHOTOS / 'Images' / n, root / 'Images' / n)
    lines = (PHOTOS / 'captions.txt').read_text().splitlines(True)
    (root / 'captions.txt').write_text(''.join(l for l in lines if l.startswith(('image,', *names))))
    return root


def trained_on(root):
    return read_flickr8k(root, size=32), DATASETS['flickr8k'].open(root=root, size=32, log=str)['train']


def test_two_damaged_photos_of_eighty_are_within_the_limit(photos, tmp_path, capsys):
    "By default, at the shell; a smaller limit stops the run and keeps it, and it goes on with a larger one"
    for name in trained_on(photos)[1].ids[:2]:
        (photos / 'Images' / name).write_bytes(b'')
    out = pretrain(run_spec('token_cls', TINY, data='flickr8k', root=photos), out=tmp_path / 'run', log=lambda s: None)
    assert len(open_run_folder(out).results()[-1]['numbers']['corrupt']) == 2
    words = [
        'pretrain',
        '--method',
        'token_cls',
        '--data',
        'flickr8k',
        '--root',
        photos,
        '--out',
        tmp_path / 'strict',
        *sets(TINY),
    ]
    says = refused(capsys, *words, '--max-corrupt', '1')
    assert (
        '2 of 66 images cannot be read, and max_corrupt=1 allows 1' in says
        and f'vlrep resume {tmp_path / "strict"} --max-corrupt NUMBER' in says
    )
    assert open_run_folder(tmp_path / 'strict').info['max_corrupt'] == '1'
    assert 'allows 1' in refused(capsys, 'resume', tmp_path / 'strict')
    vlrep.cli.main(['resume', str(tmp_path / 'strict'), '--max-corrupt', '5%'])
    assert (
        open_run_folder(tmp_path / 'strict').results()
        and open_run_folder(tmp_path / 'strict').info['max_corrupt'] == '5%'
    )
    a, b = (open_run_folder(p).weights('best') for p in (tmp_path / 'run', tmp_path / 'strict'))
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize('what', ['dry-run', 'overfit'])
def test_dry_runs_have_the_limit_of_damage_of_the_run(photos, capsys, what):
    "A photo that cannot be read stops what tries a run out, unless --max-corrupt lets it pass"
    for name in trained_on(photos)[1].ids[:2]:
        (photos / 'Images' / name).write_bytes(b'')
    words = ['pretrain', '--method', 'token_cls', '--data', 'flickr8k', '--root', photos, f'--{what}', *sets(TINY)]
    says = refused(capsys, *words, '--max-corrupt', '0')
    assert 'images cannot be read, and max_corrupt=0 allows 0' in says
    try:
        vlrep.cli.main([*map(str, words), '--max-corrupt', '5'])
    except SystemExit:
        assert what == 'overfit' and 'failed to overfit' in capsys.readouterr().out


def test_mostly_damaged_photos_stop_the_run(photos, tmp_path, capsys):
    "... and the folder that was named stays"
    for p in sorted((photos / 'Images').iterdir())[::2]:
        p.write_bytes(b'')
    out = tmp_path / 'mine'
    out.mkdir()
    (out / 'notes.txt').write_text('mine')
    says = refused(
        capsys, 'pretrain', '--method', 'token_cls', '--data', 'flickr8k', '--root', photos, '--out', out, *sets(TINY)
    )
    assert 'images cannot be read, and the default allows 10' in says and '--max-corrupt' in says
    assert (out / 'notes.txt').read_text() == 'mine' and open_run_folder(out).info['max_corrupt'] is None


@pytest.mark.parametrize('text', ['-1', 'many', '1.5', '101%', 'nan', ''])
def test_wrong_limits_of_damage_are_refused(text, capsys, tmp_path):
    assert (
        '--max-corrupt' in refused(capsys, 'pretrain', f'--max-corrupt={text}', '--out', tmp_path / 'no')
        and not (tmp_path / 'no').exists()
    )
    assert '--max-corrupt' in refused(capsys, 'pretrain', f'--max-corrupt={text}', '--dry-run')


# ---------------------------------------------------------------- captions, narratives, boxes


def test_captions_of_invisible_characters_are_no_text(tmp_path):
    "Zero-width spaces, a byte-order mark, control characters: no text, in any layout"
    recs = [scene('train', i, size=32, with_='narrative') for i in range(4)]
    nothing = '\u200b\ufeff\u200d \x07'
    for i, r in enumerate(recs):
        r.captions = [nothing, 'a dog'] if i else [nothing]
    with pytest.warns(UserWarning) as heard:
        write_csv(recs, tmp_path / 'a.csv')
        a = read_csv(tmp_path / 'a.csv', size=32)
        write_coco(recs, tmp_path / 'coco', 'train2017')
        b = read_coco(tmp_path / 'coco', size=32)
    for dataset in (a, b):
        assert len(dataset) == 3 and all(c == ['a dog'] for c in dataset.captions)
    assert sum('4 empty captions are left out' in str(w.message) for w in heard) == 2
    write_localized(recs, tmp_path / 'told')
    f = next((tmp_path / 'told').glob('*.jsonl'))
    lines = [json.loads(l) for l in f.read_text().splitlines()]
    lines[2]['caption'] = nothing
    f.write_text(''.join(json.dumps(l) + '\n' for l in lines))
    with pytest.raises(ValueError, match='line 3: the caption is empty'):
        read_localized(tmp_path / 'told', size=32, max_corrupt=0)


def narrated(root, change, n=60):
    "Photos with narratives, each line of the file changed by `change(i, line)`"
    write_localized([scene('train', i, size=32, with_='narrative') for i in range(n)], root)
    f = next(root.glob('*.jsonl'))
    lines = [json.loads(l) for l in f.read_text().splitlines()]
    for i, l in enumerate(lines):
        change(i, l)
    f.write_text(''.join(json.dumps(l) + '\n' for l in lines))


def untimed(l):
    l['timed_caption'] = []


def far_away(l):
    l['traces'] = [[dict(p, x=p['x'] + 2) for p in s] for s in l['traces']]


def untraced(l):
    l['traces'] = []


NO_PLACES = {
    'have no words with times': untimed,
    'have no point inside the image while a word is said': far_away,
    'have no trace': untraced,
}


@pytest.mark.parametrize('why', NO_PLACES)
def test_narratives_without_places_are_refused_where_places_are_learned(tmp_path, why, capsys):
    "All narratives: refused; some: said and counted; without the localisation loss: trained"
    narrated(tmp_path / 'all', lambda i, l: NO_PLACES[why](l))
    words = [
        'pretrain',
        '--method',
        'loctex',
        '--data',
        'narratives',
        '--out',
        tmp_path / 'no',
        *sets([c for c in TINY if 'shuffles' not in c]),
    ]
    says = refused(capsys, *words, '--root', tmp_path / 'all')
    assert (
        f'no narrative has a usable trace (45 of 45 narratives {why})' in says
        and 'localise=0' in says
        and not (tmp_path / 'no').exists()
    )
    narrated(tmp_path / 'some', lambda i, l: i % 5 or NO_PLACES[why](l))
    n = 0
    lines = []

    class Enough(Exception):
        pass

    def log(s):
        lines.append(s)
        if s.startswith('loctex on'):
            raise Enough

    for more, root in ([], 'some'), (['localise=0'], 'all'):
        with pytest.raises(Enough):
            pretrain(
                run_spec('loctex', [*TINY[:-5], *NET, *more], data='narratives', root=tmp_path / root),
                out=tmp_path / 'no',
                log=log,
            )
    counts = [int(s.split()[0]) for s in lines if f'of 45 narratives {why}: the localisation loss leaves them out' in s]
    assert len(counts) == 2 and 1 <= counts[0] <= 12 and counts[1] == 45, lines


def coco(root, **other):
    "COCO's layout, with the same three categories in both splits unless `other` says"
    recs = [scene('train', i, size=32) for i in range(12)]
    for i, r in enumerate(recs):
        r.objects = [dict(category='car', box=(0.1, 0.1, 0.5, 0.5))]
    for split, part in (('train2017', recs[:8]), ('val2017', recs[8:])):
        write_coco(part, root, split, classes=other.get(split, ['car', 'cat', 'dog']))


def test_coco_categories_that_differ_between_train_and_val_are_refused(tmp_path):
    builder = DATASETS['coco']

    def opened(root):
        return builder.open(replace(builder.options, train=0.8, valid=0.2), root, 32, log=str)

    coco(tmp_path / 'same')
    assert opened(tmp_path / 'same')['test'].names['tags'] == ['car', 'cat', 'dog']
    for k, (names, why) in enumerate(
        {
            ('car', 'cow', 'dog'): 'train alone has cat; val alone has cow',
            ('car', 'cat'): 'train alone has dog',
            ('dog', 'cat', 'car'): 'in a different order, car and dog',
        }.items()
    ):
        coco(tmp_path / f'{k}', val2017=list(names))
        with pytest.raises(ValueError) as e:
            opened(tmp_path / f'{k}')
        assert 'instances_val2017.json differ' in str(e.value) and why in str(e.value)


ODD = [None, True, False, [], [1], {}, {'a': 1}, 'x', '', -1, 0, 1e308, math.inf, math.nan, 10**400, '\ud83d', [[[[]]]]]


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_coco_values_of_other_types_are_read_or_refused_by_name(tmp_path):
    "Each value of each table replaced by values of other types: read, or refused with the file's name"
    root = tmp_path / 'coco'
    coco(root)
    tried = 0
    for name in ('captions_train2017.json', 'instances_train2017.json'):
        f = root / 'annotations' / name
        whole = json.loads(f.read_text())
        small = {k: v[:2] if k != 'images' else v for k, v in whole.items()}
        for table in small:
            for key in small[table][0]:
                for odd in ODD:
                    d = copy.deepcopy(small)
                    d[table][1][key] = odd
                    f.write_text(json.dumps(d))
                    tried += 1
                    try:
                        read_coco(
                            root,
                            'annotations/captions_train2017.json',
                            'annotations/instances_train2017.json',
                            'train2017',
                            32,
                        )
                    except ValueError as e:
                        assert str(root) in str(e) and not isinstance(e, UnicodeError), (key, odd, e)
        for odd in ODD:
            for d in (odd, dict(small, images=odd), dict(small, annotations=odd)):
                f.write_text(json.dumps(d))
                if isinstance(d, dict) and d.get('annotations') == [] and 'inst' in name:
                    continue  # photos without objects
                with pytest.raises(ValueError, match=name):
                    read_coco(
                        root,
                        'annotations/captions_train2017.json',
                        'annotations/instances_train2017.json',
                        'train2017',
                        32,
                    )
        f.write_text('[' * 100_000)
        with pytest.raises(ValueError, match=f'{name}: damaged, not valid JSON .nested'):
            read_coco(
                root, 'annotations/captions_train2017.json', 'annotations/instances_train2017.json', 'train2017', 32
            )
        f.write_text(json.dumps(whole))
    assert tried > 150


def test_tables_that_unfold_without_end_are_refused(tmp_path):
    "XML that unfolds, a line without end in gzip, nesting, folders that contain themselves"
    (tmp_path / 'a.xml').write_text(
        '<!DOCTYPE l [<!ENTITY a0 "lol">'
        + ''.join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(9))
        + ']><annotation><object>&a9;</object></annotation>'
    )
    with pytest.raises(ValueError, match='a.xml: damaged'):
        read_voc_xml(tmp_path / 'a.xml')
    root = tmp_path / 'told'
    narrated(root, lambda i, l: None, 2)
    f = next(root.glob('*.jsonl'))
    for line, why in (
        ('[' * 100_000, 'line 3: not valid JSON .nested too deeply'),
        ('{"caption": ' + '9' * 5000 + '}', 'line 3: not valid JSON'),
    ):
        g = tmp_path / 'deep'
        shutil.rmtree(g, ignore_errors=True)
        shutil.copytree(root, g)
        with (g / f.name).open('a') as h:
            h.write(line + '\n')
        with pytest.raises(ValueError, match=why):
            read_localized(g, size=32, max_corrupt=0)
    z = root / (f.name + '.gz')
    z.write_bytes(gzip.compress(f.read_bytes() + bytes(20_000_000), 1))
    f.unlink()
    assert z.stat().st_size < 1e6
    with pytest.raises(ValueError, match='line 3: longer than 16 MB'):
        read_localized(root, size=32)
    root = tmp_path / 'folders'
    (root / 'a').mkdir(parents=True)
    Image.new('RGB', (8, 8)).save(root / 'a' / 'x.png')
    (root / 'a' / 'again').symlink_to(root / 'a')
    (root / 'a' / 'up').symlink_to(root)
    assert len(read_folder(root, 32)) == 1


# ---------------------------------------------------------------- what a run folder holds


@pytest.fixture(scope='module')
def opened(tmp_path_factory):
    return build(tmp_path_factory.mktemp('built') / 'run')


@pytest.fixture
def built(opened, tmp_path):
    shutil.copytree(opened, tmp_path / 'run')
    return tmp_path / 'run'


@pytest.mark.parametrize('method', ['supervised', 'virtex'])
def test_scalars_in_place_of_weights_are_refused_by_name(method, tmp_path):
    "Every kind of tensor of a run as a number without dimensions: one error that names the run, never a traceback"
    run = build(tmp_path / 'run', method)
    f = run / 'best' / 'model.safetensors'
    w = load_file(f)
    names = {k.rpartition('.')[0].rpartition('.')[2] + k.rpartition('.')[2]: k for k in w if w[k].ndim}
    assert method != 'supervised' or 'head.bias' in names.values()
    for name in names.values():
        with safe(f) as notes:
            save_file({**w, name: w[name].flatten()[0].clone()}, f, metadata=notes)
        resign(run / 'best')
        with pytest.raises(ValueError, match=str(run)):
            open_run(run)


def test_runs_of_a_newer_vlrep_are_refused(built, capsys, tmp_path):
    open_run(built)
    Image.new('RGB', (8, 8)).save(tmp_path / 'x.png')
    man = read_json(built / 'best' / 'manifest.json')
    write_json(built / 'best' / 'manifest.json', dict(man, format=3))
    assert 'manifest.json: made by a newer vlrep (format 3, this one reads up to 2)' in refused(
        capsys, 'caption', built, tmp_path / 'x.png'
    )
    write_json(built / 'best' / 'manifest.json', dict(man, format='1'))
    assert "manifest.json: damaged, format is '1'" in refused(capsys, 'caption', built, tmp_path / 'x.png')
    reseal(built, lambda d: d.update(format=3, method='new', layout=3))
    d = read_json(built / 'recipe.json')
    d.pop('seed')
    write_json(built / 'recipe.json', d)
    for words in (
        ['caption', built, tmp_path / 'x.png'],
        ['resume', built],
        ['evaluate', built, '--on', 'world'],
        ['report', built],
    ):
        assert 'recipe.json: made by a newer vlrep (format 3' in refused(capsys, *words)


WEIGHTS = {
    'holds 1 of': lambda v: v.index_fill(0, torch.tensor([0]), math.nan) if v.dim() == 1 else None,
    'values that are not finite': lambda v: torch.full_like(v, math.inf),
    'holds whole numbers (torch.int64)': lambda v: torch.ones_like(v, dtype=torch.int64),
    'holds whole numbers (torch.bool)': lambda v: torch.ones_like(v, dtype=torch.bool),
    'is complex (torch.complex64)': lambda v: v.to(torch.complex64),
}


@pytest.mark.parametrize('why', WEIGHTS)
def test_weights_that_are_no_finite_floats_are_refused(built, why, tmp_path):
    "NaN, infinite, whole and complex numbers, in a run's checkpoint and in a foreign file: tensor and file are named"
    f = built / 'best' / 'model.safetensors'
    w = load_file(f)
    name = next(
        k
        for k, v in sorted(w.items())
        if v.is_floating_point() and WEIGHTS[why](v) is not None and k.startswith('visual.')
    )
    with safe(f) as tied:
        save_file({**w, name: WEIGHTS[why](w[name])}, f, metadata=tied)
    resign(built / 'best')
    with pytest.raises(ValueError) as e:
        open_run(built)
    assert why in str(e.value) and f'{f}: the tensor {name} ' in str(e.value)
    net = make_backbone(10, 16).state_dict()
    key = name.removeprefix('visual.')
    for end in ('.pth', '.safetensors'):
        p = tmp_path / f'net{end}'
        state = {**net, key: WEIGHTS[why](net[key])}
        (torch.save if end == '.pth' else save_file)({k: v.contiguous() for k, v in state.items()}, p)
        with pytest.raises(ValueError) as e:
            load_backbone(p, None)
        assert why in str(e.value) and f'{p}: the tensor {key} ' in str(e.value)
    captioner = CaptioningModel(make_backbone(10, 16), 50, width=64, depth=1, heads=1)
    state = virtex_state(captioner)
    torch.save(
        dict(model={**state, 'visual.cnn.' + key: WEIGHTS[why](state['visual.cnn.' + key])}), tmp_path / 'theirs.pth'
    )
    with pytest.raises(ValueError) as e:
        load_virtex(tmp_path / 'theirs.pth')
    assert why in str(e.value) and f'{tmp_path / "theirs.pth"}: the tensor visual.cnn.{key} ' in str(e.value)


class safe:
    "The metadata of a file of safetensors"

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        from safetensors import safe_open

        with safe_open(self.path, 'pt') as f:
            return f.metadata()

    def __exit__(self, *e):
        pass


SHAPES = dict(
    scalar=lambda v: v.sum(),
    empty=lambda v: v[:0] if v.dim() else v.reshape(1)[:0],
    flat=lambda v: v.flatten(),
    longer=lambda v: torch.cat([v.reshape(1, -1)] * 2),
    huge=lambda v: torch.zeros(1).expand(10**6, 10**6),
    text=lambda v: 'x',
    none=lambda v: None,
    list=lambda v: [v],
    gone=None,
)

KEYS = (
    'cnn.conv1.weight',
    'cnn.bn1.running_var',
    'layer1.0.conv1.weight',
    'layer4.0.conv2.weight',
    'layer4.0.downsample.0.weight',
    'output.',
    'words.weight',
    'positions',
    'visual_projection.w',
    'layers.0.self_attn.in_proj_weight',
    'layers.0.norm1.bias',
)


@pytest.mark.parametrize('how', SHAPES)
def test_foreign_weights_of_odd_shapes_are_refused(how, tmp_path):
    "Each kind of tensor of a checkpoint replaced by something else: `ValueError`, never another error"
    whole = virtex_state(CaptioningModel(make_backbone(10, 16), 50, width=64, depth=1, heads=1))
    p = tmp_path / 'w.pth'

    def ask(open_, state, name='weights'):
        if name != 'weights':
            torch.save(state, p)
        with pytest.raises(ValueError, match=name):
            open_(state if name == 'weights' else p)

    for k in [k for k in whole if any(part in k for part in KEYS)]:
        state = {**whole, k: SHAPES[how](whole[k])} if how != 'gone' else {n: v for n, v in whole.items() if n != k}
        if how != 'gone' and isinstance(state[k], torch.Tensor) and state[k].shape == whole[k].shape:
            continue
        ask(load_virtex, state)
        if k.startswith('visual.cnn.'):
            ask(lambda s: load_backbone(s, None), state)
    for odd in ([1], 'x', {}, {1: torch.ones(1)}, {'model': {}}, {'model': [1]}, {'module.': torch.ones(1)}, None, 3):
        for open_ in (load_virtex, lambda p: load_backbone(p, None)):
            ask(open_, odd, 'w.pth')


def test_damaged_pickles_are_read_or_refused_by_name(tmp_path):
    "Bytes flipped and cut anywhere: `ValueError` that names the file, or weights"
    torch.save(dict(model=make_backbone(10, 16).state_dict()), tmp_path / 'w.pth')
    data = (tmp_path / 'w.pth').read_bytes()
    g = np.random.default_rng(0)
    small = io.BytesIO()
    torch.save(dict(a=torch.ones(2), b=[1, 'x', dict(c=torch.arange(3))]), small)
    p = tmp_path / 'x.pth'
    held_out = 0
    for k in range(400):
        b = bytearray(small.getvalue())
        for i in g.integers(0, len(b), 1 + k % 4):
            b[i] = g.integers(256)
        p.write_bytes(bytes(b[: g.integers(1, len(b))] if k % 3 == 0 else b))
        try:
            read_state(p)
        except ValueError as e:
            assert 'x.pth' in str(e)
            held_out += 1
    assert held_out > 100


ANY = [None, True, [], {}, 'x', '', -1, 3, 1.5, [[1]], {'name': 3}, {'a': 'b'}]


def test_odd_facts_in_recipe_json_open_or_name_the_file(built, tmp_path):
    "Each fact of recipe.json replaced by values of other types: the run opens, or the file is named"
    Image.new('RGB', (8, 8)).save(tmp_path / 'x.png')
    whole = read_json(built / 'recipe.json')
    refusals = 0
    for key in whole:
        if key in ('sha256', 'recipe'):
            continue
        for odd in ANY:
            Run(built)._write({**whole, key: odd})
            for ask in (
                lambda: open_run(built),
                lambda: resume_run(built, recorded_spec(built).changed(['steps=x']), log=lambda s: None),
            ):
                try:
                    ask()
                except ValueError as e:
                    refusals += 'recipe.json' in str(e)
    assert refusals > 100
    for odd in ANY:
        Run(built)._write({**whole, 'recipe': odd})
        with pytest.raises(ValueError):
            open_run(built)
    for text, why in (
        ('[' * 100_000, 'nested too deeply'),
        ('9' * 5000, 'not valid JSON'),
        ('{"a":' * 950 + '1' + '}' * 950, 'recipe.json'),
        ('\x00', 'not valid JSON'),
        ('null', 'not a JSON object'),
        ('[]', 'not a JSON object'),
    ):
        (built / 'recipe.json').write_text(text)
        for ask in (open_run, write_report):
            if ask is write_report:
                (built / 'result.jsonl').write_text('{"numbers": {}, "seconds": {}}\n')
            with pytest.raises(ValueError, match=f'recipe.json: .*{why}' if why != 'recipe.json' else why):
                ask(built)


OUTSIDE = dict(
    depth=10**6,
    size=20_000,
    width=10**7,
    vocab=10**9,
    visual_width=10**6,
    heads=-1,
    max_len=10**9,
    bs=0,
    steps=-1,
    dropout=2.0,
    lr='x',
    norm='none',
    visual_depth=11,
)


@pytest.mark.parametrize('field', OUTSIDE)
def test_recipes_out_of_bounds_are_refused_before_a_model_is_built(built, field):
    "A recipe that would build for ever is refused before anything is built"
    reseal(built, lambda d: d['recipe'].update({field: OUTSIDE[field]}))
    with pytest.raises(ValueError) as e:
        open_run(built)
    assert 'recipe.json' in str(e.value) and field in str(e.value), e.value
