"The rehearsal of a whole paper: every command runs, every cell of its tables is filled; `make rehearse` does all five"

import pytest

import vlrep.cli as cli
from vlrep.models.timm_torchvision import initial_backbone
from vlrep.reproduce.commands import open_plan, rehearse
from vlrep.reproduce.mock_datasets import write_imitation
from vlrep.reproduce.plan import paper_names, plan_commands, planned_recipe, read_plan
from vlrep.reproduce.rehearsal import rehearsed
from vlrep.reproduce.run import run_plan
from vlrep.reproduce.tables import command_state, table_rows

PAPER = 'virtex'


def test_every_cell_of_a_paper_is_filled_by_its_rehearsal(tmp_path):
    lines = []
    plan, places = open_plan(PAPER, out=tmp_path, rehearsal=True, workers=0)
    assert rehearse(plan, places, execute=cli._exit_code, log=lines.append) == {}, lines
    cells = [cell for rows in table_rows(plan, places).values() for cell in rows]
    reasons = {row.missing for table in plan.tables for row in table.rows if row.missing}
    assert all(cell['status'] == 'done' or cell['status'] in reasons for cell in cells)
    assert sum(cell['status'] == 'done' for cell in cells) > 80
    assert 'Its numbers mean nothing' in (tmp_path / 'tables.html').read_text()
    real, places = open_plan(PAPER, places.root, tmp_path)
    commands = plan_commands(real, places)
    assert {command_state(real, command) for command in commands} == {'other'}
    failed = run_plan(real, places, execute=pytest.fail, log=lines.append)
    assert failed.keys() == {command.name for command in commands}
    assert all('contains a run of a different plan' in why for why in failed.values())
    assert not any(cell['ours'] for rows in table_rows(real, places).values() for cell in rows)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    [folder] = write_imitation(['weights'], tmp_path_factory.mktemp('data'))
    return folder


@pytest.mark.parametrize('paper', paper_names())
def test_every_rehearsed_network_is_small_and_takes_its_weights(paper, weights):
    for run in rehearsed(read_plan(paper)).pretraining:
        recipe, _ = planned_recipe(run)
        if not hasattr(recipe, 'visual_depth'):
            continue  # VisualBERT and ViLBERT see regions
        file = None if run.weights.startswith('run:') or not run.weights else weights / run.weights
        net = initial_backbone(recipe, run.backbone or None, file)  # a `ValueError` if they do not fit
        assert sum(p.numel() for p in net.parameters()) < 1e6, run.name
