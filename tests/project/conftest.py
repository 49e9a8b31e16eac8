import importlib
import sys

import pytest
from paths import ROOT


@pytest.fixture
def ci(monkeypatch):
    "Import a script of .ci, anew in each test"
    monkeypatch.syspath_prepend(str(ROOT / '.ci'))
    yield importlib.import_module
    for script in (ROOT / '.ci').glob('*.py'):
        sys.modules.pop(script.stem, None)


@pytest.fixture
def contents(ci):
    return ci('contents')


@pytest.fixture
def solutions(ci):
    return ci('solutions')
