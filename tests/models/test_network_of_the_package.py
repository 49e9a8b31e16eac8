"The network that comes with the package: it opens by its name, is right, and nothing is written beside it"

import json
from pathlib import Path

import numpy as np
import pytest
from tools import refused

import vlrep
from vlrep.cli import main
from vlrep.core.run_files import PRETRAINED, run_path
from vlrep.datasets.world.dataset import scene, world
from vlrep.evaluation.caption_content import noun_scores
from vlrep.experiments.commands import evaluate


@pytest.fixture(scope='module')
def model():
    return vlrep.load('world')


def test_it_is_small_and_complete():
    for name in PRETRAINED:
        files = {
            p.relative_to(run_path(name)).as_posix(): p.stat().st_size for p in run_path(name).rglob('*') if p.is_file()
        }
        assert set(files) == {
            'README.md',
            'recipe.json',
            'tokenizer.model',
            'best/manifest.json',
            'best/model.safetensors',
        }
        assert sum(files.values()) < 3e6
        assert json.loads((run_path(name) / 'recipe.json').read_text())['name'] == 'world_words'


def test_its_captions_name_what_is_there(model):
    numbers, _ = noun_scores(model, world('test', 200, size=48))
    assert numbers['noun_precision'] > 60 and numbers['noun_recall'] > 35  # 71 and 43 when it was made


def test_its_features_separate_settings_better_than_pixels_do(model):
    scenes = [scene('test', i, size=48) for i in range(120)]
    settings = np.array([s.setting for s in scenes])
    vectors = model.embed([s.load() for s in scenes])
    vectors = vectors - vectors.mean(0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = vectors @ vectors.T
    np.fill_diagonal(cosine, -2)
    assert (settings[cosine.argmax(1)] == settings).mean() > 0.8


def test_a_command_takes_its_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scene('test', 3, size=96).load().save('a.png')
    main(['caption', 'world', 'a.png'])
    assert capsys.readouterr().out.strip() == vlrep.load('world').caption('a.png')
    assert '--out is missing' in refused(capsys, 'export', 'world', '--to', 'folder')
    assert 'no such run folder' in refused(capsys, 'caption', 'word', 'a.png')


def test_a_folder_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('world').mkdir()
    assert run_path('world') == Path('world')
    with pytest.raises(ValueError, match='recipe.json is missing'):
        vlrep.load('world')


def test_an_evaluation_leaves_the_package_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(run_path('world').rglob('*'))
    rows = evaluate('world', 'captions', log=lambda line: None)
    assert rows and sorted(run_path('world').rglob('*')) == before and not list(tmp_path.iterdir())
