"""Data in shards: the library that gave the layout its name, exact resuming, damage, captions of similar length

What a shard is, its index, and what a million captions cost is checked in nbs/data/70_shards and 75_shard_index.
"""

import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import leaving
from tools import both_spellings, refused, sets

import vlrep.data.shards as shards
from vlrep.cli import main
from vlrep.data.fingerprint import fingerprint
from vlrep.data.loader import StatefulLoader, TooManyCorrupt, loaders
from vlrep.data.shards import shard_samples, write_shard, write_shards
from vlrep.data.tokenizer import Tokenizer
from vlrep.data.transforms import EvalTransform
from vlrep.datasets.base import DATASETS
from vlrep.datasets.coco import write_coco
from vlrep.datasets.csv import read_csv, write_csv
from vlrep.datasets.webdataset.reader import make_shards, read_webdataset
from vlrep.datasets.world.dataset import scene
from vlrep.experiments.config import get_recipe
from vlrep.methods.base import METHODS
from vlrep.methods.learner import make_learner
from vlrep.training.run_folder import open_run_folder

N = 60


@pytest.fixture(scope='module')
def at(tmp_path_factory):
    "Photos as a CSV, and the same in five shards of a dozen"
    at = tmp_path_factory.mktemp('shards')
    write_csv([scene('train', i, size=48) for i in range(N)], at / 'csv' / 'photos.csv')
    make_shards('csv', at / 'csv' / 'photos.csv', at / 'five', 12, log=str)
    return at


PATTERN = '{000000..000004}.tar'


def changed(at, folder, change):
    "A copy of the five shards; `change` is given the path of the second"
    folder.mkdir()
    for p in sorted((at / 'five').iterdir()):
        (folder / p.name).write_bytes(p.read_bytes())
    change(folder / '000001.tar')
    return folder / PATTERN


# ---------------------------------------------------------------- the library webdataset


def test_webdataset_reads_what_is_written(at):
    import webdataset as wds

    theirs = list(wds.WebDataset(str(at / 'five' / PATTERN), shardshuffle=False).decode('pil').to_tuple('jpg', 'json'))
    ours = read_csv(at / 'csv' / 'photos.csv', size=48)
    assert len(theirs) == N
    for i, (image, side) in enumerate(theirs):
        assert (side['id'], side['captions']) == (ours.ids[i], ours.captions[i])
        assert (np.asarray(image) == np.asarray(ours[i].load())).all()


def test_what_webdataset_writes_is_read(tmp_path):
    import webdataset as wds

    recs = [scene('train', i, size=32) for i in range(7)]
    with wds.ShardWriter(str(tmp_path / '%03d.tar'), maxcount=3, verbose=0) as to:
        for i, r in enumerate(recs):
            to.write(
                {
                    '__key__': f'sub/{i:04}',
                    'png': Image.fromarray(r.image),
                    'cls': i,
                    **({'json': dict(captions=r.captions, tags=r.tags)} if i % 2 else {'txt': r.captions[0]}),
                }
            )
    data = read_webdataset(tmp_path / '{000..002}.tar', 32, labels=True)
    assert list(data.ids) == [f'sub/{i:04}' for i in range(7)]
    for i, r in enumerate(recs):
        text = [' '.join(c.split()) for c in r.captions]
        assert data.captions[i] == (text if i % 2 else text[:1]) and (np.asarray(data[i].load()) == r.image).all()
        assert data[i].tags == (sorted(set(r.tags)) if i % 2 else [])


# ---------------------------------------------------------------- a run

# 48 to learn from: an epoch has 6 steps
TINY = sets(
    [
        'size=32',
        'vocab=200',
        'visual_depth=10',
        'visual_width=8',
        'width=16',
        'heads=2',
        'depth=1',
        'bs=8',
        'steps=9',
        'warmup=1',
        'shuffles=1',
    ]
)


def trained(out, *words):
    main(['pretrain', *TINY, '--threads', '1', '--out', str(out), *map(str, words)])
    return open_run_folder(out)


def stopped(step, out, *words):
    "A run that a signal stops after so many steps"
    with pytest.MonkeyPatch.context() as m:
        m.setitem(METHODS, 'virtex', leaving(METHODS['virtex'], step))
        with pytest.raises(SystemExit) as e:
            trained(out, *words)
    assert e.value.code == 143 and open_run_folder(out).state('last')['step'] == step


def same(a, b, which='last'):
    a = a.weights(which)
    b = b.weights(which)
    assert a.keys() == b.keys() and len(a) > 50
    return all(torch.equal(v, b[k]) for k, v in a.items())


def test_a_run_on_shards_is_the_run_on_the_photos(at, tmp_path, capsys):
    "The same images in the same parts; without a window in the same order: the same bits. A window is another order"
    photos = trained(tmp_path / 'csv', '--data', 'csv', '--root', at / 'csv' / 'photos.csv')
    words = '--data', 'webdataset', '--root', at / 'five'
    whole = trained(tmp_path / 'whole', *words, '--window', 0)
    assert same(whole, photos) and not same(trained(tmp_path / 'window', *words, '--window', 2), photos)
    num = [r.results()[0]['numbers'] for r in (whole, photos)]
    assert num[0]['held_loss'] == num[1]['held_loss'] and num[0]['right'] == num[1]['right']


@pytest.mark.parametrize('step', [2, 6, 8])  # in mid-epoch, at its end, in the next
def test_a_run_stopped_and_resumed_on_shards_has_the_same_bits(at, tmp_path, step):
    "Stopped by a signal, in windows and with sorted captions, read by other processes: the bits of an unbroken run"
    words = ['--data', 'webdataset', '--root', at / 'five' / PATTERN, '--window', 2, '--bucket', 2]
    whole = trained(tmp_path / 'whole', *words)
    stopped(step, tmp_path / 'run', *words, '--workers', 2)
    main(['resume', str(tmp_path / 'run')])
    assert same(open_run_folder(tmp_path / 'run'), whole)
    rows = [
        [{k: v for k, v in r.items() if k not in ('seconds', 'images_s', 'memory_mb')} for r in x.log()]
        for x in (whole, open_run_folder(tmp_path / 'run'))
    ]
    assert rows[0] == rows[1]


def test_resume_with_other_shards_is_refused(at, tmp_path, capsys):
    "A run does not go on with shards that are not those it began with, or with another order"
    stopped(2, tmp_path / 'run', '--data', 'webdataset', '--root', at / 'five')
    more = changed(at, tmp_path / 'more', lambda p: write_shard(p, []))
    again = 'resume', tmp_path / 'run'
    assert 'images train: was' in refused(capsys, *again, '--root', more.parent)
    assert 'window: was 10, now 3' in refused(capsys, *again, '--window', 3)
    data = [read_webdataset(p, 24) for p in (at / 'five', at / 'five' / PATTERN, more.parent)]
    a, b, c = map(fingerprint, data)
    assert a == b != c


# ---------------------------------------------------------------- the order, and a place in it


def places(data, rows):
    return [(data.index.where(data.at[r])[0], data.ids[r]) for r in rows]


@pytest.mark.parametrize('world_size', [1, 3])
def test_a_place_is_a_shard_and_a_sample(at, world_size):
    "What each rank reads after a stop is what it would have read: nothing twice or left out, one window at a time"
    data = read_webdataset(at / 'five', 24, window=2)

    def loader(rank):
        return StatefulLoader(data, 5, train=True, seed=3, rank=rank, world_size=world_size)

    plans = [loader(r).plan(4) for r in range(world_size)]
    seen = [p for step in zip(*plans) for rows in zip(*step) for p in places(data, rows)]
    seen += [p for plan in plans for rows in plan for p in places(data, rows)]
    assert Counter(i for _, i in set(seen)) == Counter(data.ids)
    order = data.order(3, 4)
    assert [len({s for s, _ in places(data, order[a : a + 24])}) for a in (0, 24, 48)] == [2, 2, 1]
    for r in range(world_size):
        whole = [b['id'].tolist() for b, _ in loader(r).seek(4)]
        for stop in (0, 2, len(whole) - 1):
            assert [b['id'].tolist() for b, _ in loader(r).seek(4, stop)] == whole[stop:]


def test_workers_read_the_same_samples(at):
    data = read_webdataset(at / 'five', 24, window=1)
    got = []
    for workers in (0, 2):
        ld = StatefulLoader(data, 16, train=True, workers=workers)
        got.append([(b['id'], b['images']) for b, _ in ld])
        ld.close()
    for (i, x), (j, y) in zip(*got):
        assert torch.equal(i, j) and torch.equal(x, y)


# ---------------------------------------------------------------- damage


def test_missing_and_cut_shards_are_named(at, tmp_path, capsys):
    "In one line, before anything is computed"
    words = 'pretrain', '--data', 'webdataset', '--out', tmp_path / 'run', '--root'
    gone = changed(at, tmp_path / 'gone', lambda p: p.unlink())
    text = refused(capsys, *words, gone)
    assert '1 of 5 shards are missing' in text and '000001.tar' in text
    cut = changed(at, tmp_path / 'cut', lambda p: p.write_bytes(p.read_bytes()[:20_000]))
    text = refused(capsys, *words, cut)
    assert '1 of 5 shards are damaged' in text and '000001.tar: cut off at byte 20,000' in text
    rubbish = changed(at, tmp_path / 'rubbish', lambda p: p.write_bytes(b'no tar' * 1000))
    assert '000001.tar: not a tar file, or damaged' in refused(capsys, *words, rubbish)
    assert 'no .tar files' in refused(capsys, *words, tmp_path / 'nowhere*')
    assert 'shards are missing' in refused(capsys, *words, tmp_path / 'nowhere')
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        sizes = [len(read_webdataset(p, 24, corrupt=0.2)) for p in (gone, cut, rubbish)]
    assert sizes[0] == sizes[2] == 48 < sizes[1] < 60
    assert len(heard) == 3 and all('000001.tar' in str(w.message) for w in heard)


def hurt(path, samples, rewrite):
    "Change images of a shard where they stand"
    raw = bytearray(path.read_bytes())
    for k in samples:
        at, size = list(shard_samples(path))[k][1]['jpg']
        raw[at : at + size] = rewrite(raw[at : at + size])
    path.write_bytes(raw)


def test_damaged_samples_are_named_and_counted(at, tmp_path):
    "A photo that is damaged within its shard is replaced by another one; too many of them stop the run"
    root = changed(at, tmp_path / 'hurt', lambda p: hurt(p, (3, 5), lambda b: bytes(len(b))))
    data = read_webdataset(root, 24)
    ld = StatefulLoader(data, 16, train=True)
    seen = [i for b, _ in ld for i in b['id'].tolist()]
    assert sorted(ld.corrupt) == [15, 17] and not {15, 17} & set(seen) and len(seen) == N
    at_ = data.index.where(15)[1]
    assert '2 of 60 images could not be read' in ld.corrupt_report()
    assert f'000001.tar, sample {data.ids[15]} at byte {at_:,}: damaged or not an image' in ld.corrupt_report()
    with pytest.raises(TooManyCorrupt, match='000001.tar, sample'):
        list(StatefulLoader(data, 16, max_corrupt=1))


def test_a_shard_that_changes_during_a_run_is_an_error(at, tmp_path):
    "Its byte offsets are worth nothing any more: an error at once. One that is gone counts as damaged images"
    root = changed(at, tmp_path / 'changing', lambda p: None)
    ld = StatefulLoader(read_webdataset(root, 24), 16)
    (root.parent / '000001.tar').unlink()
    with pytest.raises(TooManyCorrupt, match='000001.tar: the shard cannot be opened'):
        list(ld)
    write_shard(root.parent / '000001.tar', [])
    with pytest.raises(ValueError, match='000001.tar: the shard was changed or cut off'):
        list(StatefulLoader(ld.source, 16, max_corrupt=60))


# ---------------------------------------------------------------- captions of similar length


def test_the_loss_of_a_sample_does_not_depend_on_sorting_by_length(at):
    "The loss of each caption is that which it has in any other batch; fewer places are padded"
    data = read_webdataset(at / 'five', 32)
    text = [data.captions[i][0] for i in range(N)]
    data = data.with_captions([[c, f'{c} and {" ".join(["more"] * (i % 15))}'] for i, c in enumerate(text)])
    tokenizer = Tokenizer.train(data.captions.flat(), 200)
    recipe = replace(
        get_recipe('virtex', 'world'), size=32, visual_depth=10, visual_width=8, width=16, heads=2, depth=1
    )

    def losses(bucket):
        "Row -> loss in epoch 2, and the places that the epoch fills"
        dls = loaders(data, data, tokenizer, 32, 6, aug=EvalTransform(32), bucket=bucket)
        torch.manual_seed(0)
        model = make_learner(METHODS['virtex'], recipe, dls, seed=0).model.eval()
        out = {}
        places = 0
        for b, _ in dls.train.seek(2):
            places += b['tokens'].numel()
            with torch.no_grad():
                got = model(b)
            words = torch.nn.functional.cross_entropy(got['logits_f'], got['target_f'], reduction='none')
            each = words.split((b['lengths'] - 1).tolist())
            out.update(zip(b['id'].tolist(), (w.sum().item() for w in each)))
        return out, places

    (plain, wide), (sorted_, narrow) = losses(0), losses(5)
    assert plain.keys() == sorted_.keys() == set(range(N)) and narrow < 0.9 * wide
    assert max(abs(plain[i] - sorted_[i]) for i in plain) < 1e-3 * max(plain.values())


# ---------------------------------------------------------------- writing


def test_both_spellings_of_the_command_write_the_same_bytes(at, tmp_path):
    "`vlrep shards` in both spellings; data with a split of its own, tags, narratives"
    csv = '--data', 'csv', '--root', at / 'csv' / 'photos.csv', '--per-shard', 12
    places = [tmp_path / f'{k}' for k in range(2)]
    for p in places:
        p.mkdir()
    for place, done in zip(places, both_spellings('shards', [*csv, '--out', 'again'], places)):
        assert done.returncode == 0 and not done.stderr and done.stdout.count('12 images') == 5, done.stderr
        for p in (at / 'five').iterdir():
            assert p.read_bytes() == (place / 'again' / p.name).read_bytes()
    recs = [scene('train', i, size=48) for i in range(40)]
    kinds = sorted({o['category'] for r in recs for o in r.objects})
    for split, part in (('train2017', recs[:30]), ('val2017', recs[30:])):
        write_coco(part, tmp_path / 'coco', split, kinds)
    make_shards('coco', tmp_path / 'coco', tmp_path / 'parts', log=str)
    a, b = (
        DATASETS[d].open(root=tmp_path / r, size=32, wanted=('labels',), log=str)
        for d, r in (('coco', 'coco'), ('webdataset', 'parts'))
    )
    for k in ('train', 'valid', 'test'):
        assert list(b[k].ids) == list(a[k].ids) and b[k].split == k
        met = [a[k].names['tags'].index(t) for t in b[k].names['tags']]
        assert (b[k].labels['tags'] == a[k].labels['tags'][:, met]).all() and b[k].labels['tags'].any()


def test_a_full_disk_leaves_nothing(at, tmp_path, monkeypatch):
    def full(path, samples):
        raise OSError(28, 'No space left on device', str(path))

    monkeypatch.setattr(shards, 'write_shard', full)
    with pytest.raises(OSError, match='disk is full'):
        write_shards(read_csv(at / 'csv' / 'photos.csv', size=32), tmp_path / 'new')
    assert not list(tmp_path.iterdir())
