"A model travels over the hub: the commands against a server that speaks its protocol; there is no other network"

import huggingface_hub.constants
import huggingface_hub.hf_api
import huggingface_hub.utils
import pytest
from hub_server import hub_server
from PIL import Image
from run_folders import build
from tools import refused

import vlrep
from vlrep.cli import main
from vlrep.training.run_folder import Run, open_run_folder

PHOTO = Image.new('RGB', (40, 30), (200, 90, 10))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    "An empty hub, which the client of this process talks to, with a cache of its own"
    with hub_server() as server:
        constants = huggingface_hub.constants
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        monkeypatch.setattr(constants, 'ENDPOINT', server.url)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
        monkeypatch.setattr(huggingface_hub.hf_api.api, 'endpoint', server.url)
        monkeypatch.setenv('HF_TOKEN', 'hf_nobody')
        huggingface_hub.utils.disable_progress_bars()
        yield server
        huggingface_hub.utils.enable_progress_bars()


@pytest.fixture
def run(tmp_path):
    build(tmp_path / 'run')
    return tmp_path / 'run'


def test_a_model_is_pushed_pulled_and_loaded(hub, run, tmp_path, capsys):
    "It is the same model in a folder, from the cache, and from the cache without the hub"
    main(['push', str(run), 'me/model'])
    assert f'{hub.url}/me/model/commit/' in capsys.readouterr().out
    files = hub.repos['me/model']
    assert {'README.md', 'recipe.json', 'best/model.safetensors'} <= set(files) and b'state' not in b''.join(
        files.values()
    )
    main(['pull', 'me/model', str(tmp_path / 'copy')])
    ours = vlrep.load(run).embed(PHOTO)
    assert (vlrep.load(tmp_path / 'copy').embed(PHOTO) == ours).all()
    assert (vlrep.load('hf://me/model').embed(PHOTO) == ours).all()
    assert open_run_folder(tmp_path / 'copy').info['exported'] == 'run'
    main(['push', str(tmp_path / 'copy'), 'me/again'])
    assert hub.repos['me/again'] == files
    hub.down = True
    assert (vlrep.load('hf://me/model').embed(PHOTO) == ours).all()


def test_all_parts_of_a_run_travel(hub, run, tmp_path):
    "The ids of the test photos, too, so that an evaluation there uses no photo that was trained on"
    (run / 'test_photos.json').write_text('[["27.png", "f1e099626ebda700"]]')
    with Run.reopen(run) as r:
        r.keep_part('test_photos.json')
    main(['push', str(run), 'me/model'])
    main(['pull', 'me/model', str(tmp_path / 'copy')])
    parts = open_run_folder(tmp_path / 'copy').info['parts']
    assert 'test_photos.json' in parts and all((tmp_path / 'copy' / p).is_file() for p in parts)


def test_what_the_hub_does_not_have_is_named(hub, run, tmp_path, capsys):
    assert 'me/none: cannot be fetched' in refused(capsys, 'pull', 'me/none', tmp_path / 'copy')
    hub.repos['me/other'] = {'config.json': b'{}'}
    assert 'it is not a model of this library' in refused(capsys, 'pull', 'me/other', tmp_path / 'copy')
    assert 'model: is not a name on the hub' in refused(capsys, 'push', run, 'model')
    assert 'exists already' in refused(capsys, 'pull', 'me/other', run)
    with pytest.raises(ValueError, match='hf://me/none: cannot be fetched'):
        vlrep.load('hf://me/none')
    hub.down = True
    assert 'cannot be uploaded' in refused(capsys, 'push', run, 'me/model')


def test_damage_on_the_way_is_seen(hub, run, tmp_path, capsys):
    main(['push', str(run), 'me/model'])
    files = hub.repos['me/model']
    files['best/model.safetensors'] = files['best/model.safetensors'][:-1]
    assert 'model.safetensors: truncated' in refused(capsys, 'pull', 'me/model', tmp_path / 'copy')
