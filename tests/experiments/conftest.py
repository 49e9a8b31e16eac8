import pytest
from run_folders import TINY, untrained


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
