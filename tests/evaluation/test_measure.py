"An evaluation at the end of a training gets what its context promises, on scenes and on photos"

import pytest
from tools import NET, PHOTOS

from vlrep.data.evaluation_batches import evaluation_loader
from vlrep.datasets.world.dataset import world
from vlrep.evaluation.base import EVALUATIONS, Evaluation, score_row
from vlrep.experiments.commands import evaluate
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import Runtime, run_spec
from vlrep.training.run_folder import open_run_folder

DATA = dict(
    world=['scenes=64', 'valid=32', 'probe=40', 'probe_held=40', 'test=40', 'shown=8', 'point=0', 'baselines=False'],
    flickr8k=['shuffles=1'],
)


def baselines_of(context):
    loader = evaluation_loader(context.splits['test'], bs=1)
    numbers = dict(baselines_seen=sorted(context.baselines()), test_images=len(loader.source), workers=loader.workers)
    return numbers, []


def workers_of(context):
    n = evaluation_loader(world('test', 2, size=24), bs=1).workers
    return [score_row('workers', 'number', context.method, 1, chance=0, value=n, low=n, high=n, unit=1)]


@pytest.mark.parametrize('data', DATA)
def test_a_registered_measure_runs_on_every_kind_of_data(data, tmp_path, monkeypatch):
    monkeypatch.setitem(EVALUATIONS, 'counted', Evaluation('counted', 'counts', baselines_of, measure=baselines_of))
    root = PHOTOS if data == 'flickr8k' else None
    changes = [*NET, *DATA[data], 'size=32', 'vocab=300', 'steps=2', 'warmup=1']
    spec = run_spec(changes=changes, data=data, root=root, threads=1)
    run = pretrain(spec, Runtime(workers=1), out=tmp_path / 'run', log=str)
    numbers = open_run_folder(run).results()[-1]['numbers']
    assert numbers['baselines_seen'] == [] and numbers['test_images'] > 0 and numbers['workers'] == 1
    monkeypatch.setitem(EVALUATIONS, 'workers', Evaluation('workers', 'counts', workers_of))
    assert evaluate(run, 'workers', workers=2, log=str)[0]['value'] == 2
