"An evaluation at the end of a training gets what its context promises, on scenes and on photos"

import pytest
from tools import NET, PHOTOS

from vlrep.evaluation.base import EVALUATIONS, Evaluation
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import run_spec
from vlrep.training.run_folder import open_run_folder

DATA = dict(
    world=['scenes=64', 'valid=32', 'probe=40', 'probe_held=40', 'test=40', 'shown=8', 'point=0', 'baselines=False'],
    flickr8k=['shuffles=1'],
)


def baselines_of(context):
    return dict(baselines_seen=sorted(context.baselines()), test_images=len(context.splits['test'])), []


@pytest.mark.parametrize('data', DATA)
def test_a_registered_measure_runs_on_every_kind_of_data(data, tmp_path, monkeypatch):
    monkeypatch.setitem(EVALUATIONS, 'counted', Evaluation('counted', 'counts', baselines_of, measure=baselines_of))
    root = PHOTOS if data == 'flickr8k' else None
    changes = [*NET, *DATA[data], 'size=32', 'vocab=300', 'steps=2', 'warmup=1']
    run = pretrain(run_spec(changes=changes, data=data, root=root, threads=1), out=tmp_path / 'run', log=str)
    numbers = open_run_folder(run).results()[-1]['numbers']
    assert numbers['baselines_seen'] == [] and numbers['test_images'] > 0
