"Trackers: what TensorBoard and Weights & Biases are given is what log.csv has"

import struct
import time

import pytest

from vlrep.core.run_files import read_log
from vlrep.training.logging import CSVLogger
from vlrep.training.toy_learner import flat_weights, synth_learner
from vlrep.training.trackers import TRACKERS, check_tracker, tracker


def sent_to_wandb(folder, patience=20):
    "Name -> values, of the rows in the file of an offline run; its service may still be writing them"
    until = time.monotonic() + patience
    while 'train_loss' not in (seen := read_wandb(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    return seen


def read_wandb(folder):
    "Read a LevelDB log whose records are protocol buffers"
    from wandb.proto import wandb_internal_pb2 as pb

    (file,) = folder.glob('wandb/offline-run-*/*.wandb')
    data = file.read_bytes()
    at, parts, seen = 7, b'', {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is empty
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack('<IHB', data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = pb.Record()
            record.ParseFromString(parts)
            parts = b''
            summary = {i.key or i.nested_key[0]: i.value_json for i in record.summary.update}
            seen.update({k: float(v) for k, v in summary.items() if k.startswith('results/')})
            row = {i.key or '.'.join(i.nested_key): i.value_json for i in record.history.item}
            for name in row:
                seen.setdefault(name, []).append((float(row.get('step', 'nan')), float(row[name])))
    return seen


def sent_to_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / 'tensorboard'))
    events.Reload()
    return {k: [(s.step, s.value) for s in events.Scalars(k)] for k in events.Tags()['scalars']}


def one_a_step(rows, column):
    "Steps and values of a column: where a row of the log and the end of an epoch meet, those of the former"
    first = {}
    for row in rows:
        if row[column] is not None:
            first.setdefault(row['step'], row[column])
    return list(first.items())


READ = dict(tensorboard=sent_to_tensorboard, wandb=sent_to_wandb)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')


def trained(folder, name, steps=8):
    "Rows of the log of a toy training that is tracked by `name`, and its weights"
    with tracker(name, folder, dict(method='toy', recipe=dict(steps=steps))) as opened:
        learn = synth_learner([CSVLogger(folder / 'log.csv', 2, tracker=opened)])
        learn.fit_steps(steps)
        if opened:
            opened.results([dict(question='points', metric='acc', backbone='toy', value=75.0)], [])
    return read_log(folder / 'log.csv'), flat_weights(learn)


@pytest.mark.parametrize('name', TRACKERS)
def test_a_tracker_gets_every_number_of_every_row_of_the_log(tmp_path, name):
    rows, weights = trained(tmp_path / 'tracked', name)
    assert len(rows) == 6
    seen = READ[name](tmp_path / 'tracked')
    for column in ('train_loss', 'valid_loss', 'lr0', 'images_s', 'grad_norm'):
        wanted = one_a_step(rows, column)
        assert [step for step, _ in seen[column]] == [step for step, _ in wanted], column
        assert [value for _, value in seen[column]] == pytest.approx([value for _, value in wanted], rel=1e-5), column
    scores = {k: v for k, v in seen.items() if k.startswith('results/')}
    assert list(scores) == ['results/toy, points, acc'] and (scores['results/toy, points, acc'] in (75.0, [(0, 75.0)]))
    assert (trained(tmp_path / 'alone', None)[1] == weights).all()


@pytest.mark.parametrize('name', TRACKERS)
def test_a_resumed_run_continues_its_curves(tmp_path, name):
    for _ in range(2):  # the second one is given the folder, and so the identity, of the first
        with tracker(name, tmp_path, {}) as opened:
            opened.numbers(dict(train_loss=1.0), 2)
    if name == 'tensorboard':
        assert sent_to_tensorboard(tmp_path)['train_loss'] == [(2, 1.0)]
    else:
        files = [p.name for p in tmp_path.glob('wandb/offline-run-*/run-*.wandb')]
        assert len(files) == 2 and len(set(files)) == 1


def test_a_full_disk_ends_the_tracker_and_not_the_training(tmp_path):
    class Full:
        def numbers(self, values, step):
            raise OSError('no space left')

    lines = []
    learn = synth_learner([CSVLogger(tmp_path / 'log.csv', 2, log=lines.append, tracker=Full())])
    learn.fit_steps(8)
    assert len(read_log(tmp_path / 'log.csv')) == 6
    (line,) = lines
    assert 'no more numbers (no space left)' in line


@pytest.mark.parametrize('name', TRACKERS)
def test_a_missing_package_is_named_before_anything_begins(monkeypatch, name):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(ValueError, match=f'--tracker {name}: .*pip install'):
        check_tracker(name)
