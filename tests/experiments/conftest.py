import pytest
from run_folders import TINY, untrained

import vlrep.experiments.pretrain


@pytest.fixture
def quick(monkeypatch):
    "What comes after training, made short: these tests look at what is written, not at the numbers"

    def page(run):
        (run / 'report.html').write_text('<html></html>\n')
        return run / 'report.html'

    monkeypatch.setattr(
        vlrep.experiments.pretrain,
        'measure',
        lambda run, recipe, options, dataset, learn, **kw: (
            dict(steps=learn.train_state.step, held_loss=learn.train_state.best_loss),
            [],
        ),
    )
    monkeypatch.setattr(vlrep.experiments.pretrain, 'write_report', page)


@pytest.fixture(scope='module')
def body(tmp_path_factory):
    "A VisualBERT that reads cells of a grid"
    return untrained(
        tmp_path_factory.mktemp('runs') / 'visualbert',
        'visualbert',
        regions='grid',
        region_model='given',
        mim='off',
        **TINY,
    )
