"""A stopped or finished run goes on: with its data at another place, for more steps, beside another evaluation

What is said of other changes stands in training/test_resume_killed_processes.py.
"""

import json
import shutil

import forked
import pytest
from PIL import Image
from run_folders import build
from tools import NET, PHOTOS, STUDY, refused

import vlrep
from vlrep.cli import main
from vlrep.experiments.load_run import caption
from vlrep.experiments.pretrain import pretrain, resume_run
from vlrep.experiments.spec import recorded_spec, run_spec
from vlrep.training.run_folder import Run, open_run_folder

SMALL = ['size=32', 'vocab=300', 'shuffles=1', *NET]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    "A finished run on photos that were moved afterwards"
    d = tmp_path_factory.mktemp('more')
    shutil.copytree(PHOTOS, d / 'photos')
    pretrain(
        run_spec(changes=[*SMALL, 'steps=6', 'warmup=1'], data='flickr8k', root=d / 'photos', threads=1),
        out=d / 'run',
        log=str,
    )
    (d / 'photos').rename(d / 'moved')
    return d


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained / 'run', tmp_path / 'run')


def words(*more):
    return [str(w) for w in more]


def test_a_finished_run_trains_more_steps_with_moved_photos(trained, run, capsys):
    "resume RUN --root NEW --steps MORE: the data set is that of the run, and the photos are found"
    before = open_run_folder(run).log()
    err = refused(capsys, 'resume', run, '--steps', 9)
    assert 'photos' in err and '--root' in err, err
    main(words('resume', run, '--root', trained / 'moved', '--steps', 9))
    text = capsys.readouterr().out
    assert 'the run was finished and goes on to 9 steps, on a new schedule of that length' in text, text
    assert 'at step 6 the learning rate is 0.' in text and 'no longer exact, it differs in: steps: was 6, now 9' in text
    done = open_run_folder(run)
    assert [r['numbers']['steps'] for r in done.results()] == [6, 9] and done.saved()[-1] == 9
    assert done.info['inexact'] == ['steps: was 6, now 9'] and done.info['root'] == str(trained / 'moved')
    assert [r['step'] for r in done.log()][: len(before)] == [r['step'] for r in before]
    assert done.log()[-1]['step'] == 9
    main(words('resume', run))
    assert 'complete, nothing is left to do' in capsys.readouterr().out


def test_a_run_stopped_on_the_way_to_more_steps_is_not_finished(trained, run, capsys):
    "The result of fewer steps does not count as one of more"
    from vlrep.experiments import pretrain as pretraining
    from vlrep.training.interrupts import TrainingInterrupted

    def stop(*a, **kw):
        error = TrainingInterrupted(15, 9)
        error.run = run
        raise error

    with pytest.MonkeyPatch.context() as m:
        m.setattr(pretraining, '_finish', stop)
        with pytest.raises(SystemExit) as e:
            main(words('resume', run, '--root', trained / 'moved', '--steps', 9))
    assert e.value.code == 143 and open_run_folder(run).unfinished()
    capsys.readouterr()
    main(words('resume', run))
    assert 'report: ' in capsys.readouterr().out
    assert [r['numbers']['steps'] for r in open_run_folder(run).results()] == [6, 9]


WRONG = {
    '--steps 5': 'is finished, and this would be a different run (steps: was 6, now 5)',
    '--steps 9 --lr .5': 'is finished, and this would be a different run (lr: was 0.2, now 0.5)',
    '--seed 4': 'is finished, and this would be a different run (seed: was 0, now 4)',
}


@pytest.mark.parametrize('more', WRONG)
def test_advice_about_a_finished_run_leads_on(more, trained, run, capsys):
    "One line, whose advice leads on: no option that answers that nothing is left to do"
    err = refused(capsys, 'resume', run, '--root', trained / 'moved', *more.split())
    assert WRONG[more] in err and '--inexact' not in err, err


def test_more_steps_for_an_unfinished_run_are_refused(trained, run, capsys):
    (run / 'result.jsonl').unlink()
    err = refused(capsys, 'resume', run, '--root', trained / 'moved', '--steps', 9)
    assert 'would not be the same run (steps: was 6, now 9)' in err and '--inexact' in err


def test_the_data_of_the_run_is_asked_not_the_default(trained, run, tmp_path, capsys):
    lines = []
    resume_run(run, recorded_spec(run).changed(root=trained / 'moved'), log=lines.append)
    assert 'complete' in lines[-1]
    build(tmp_path / 'world')
    err = refused(capsys, 'resume', tmp_path / 'world', '--root', tmp_path)
    assert 'world needs no files' in err
    with pytest.raises(ValueError, match='world needs no files'):
        resume_run(tmp_path / 'world', recorded_spec(tmp_path / 'world').changed(root=tmp_path))


# ---------------------------------------------------------------- several photos


@pytest.fixture
def photos(tmp_path):
    for i, c in enumerate(('red', 'blue', 'green')):
        Image.new('RGB', (40, 40), c).save(tmp_path / f'{i}.png')
    (tmp_path / 'cut.png').write_bytes((tmp_path / '0.png').read_bytes()[:60])
    return [tmp_path / f'{i}.png' for i in range(3)]


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    return build(tmp_path_factory.mktemp('plain') / 'run')


def test_one_damaged_photo_among_several_is_an_empty_line(plain, photos, tmp_path, capsys):
    "The others get their captions, a line each; an empty line stands for the damaged one, which is named; code 1"
    bad = [tmp_path / 'cut.png', tmp_path / 'gone.png', tmp_path / 'run.txt']
    (tmp_path / 'run.txt').write_text('no image')
    whole = caption(plain, photos, log=str)
    for places in ([0], [1], [3], [0, 1, 3], [2, 2, 2]):
        mixed = list(photos)
        for at, b in zip(places, bad):
            mixed.insert(at, b)
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            main(words('caption', plain, *mixed))
        out, err = capsys.readouterr()
        lines = out.split('\n')[:-1]
        assert e.value.code == 1 and len(lines) == len(mixed)
        assert [l for l, p in zip(lines, mixed) if p not in bad] == whole
        assert all(l == '' for l, p in zip(lines, mixed) if p in bad)
        assert err.count('\n') == len(places) and all(str(b) in err for b in bad[: len(places)])
    main(words('caption', plain, *photos))
    assert capsys.readouterr().out.split('\n')[:-1] == whole


def test_nothing_but_damaged_photos_is_an_error(plain, photos, tmp_path, capsys):
    assert 'cut.png: damaged' in refused(capsys, 'caption', plain, tmp_path / 'cut.png')
    with pytest.raises(SystemExit) as e:
        main(words('caption', plain, tmp_path / 'cut.png', tmp_path / 'gone.png'))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count('\n') == 3 and 'none of the 2 images can be read' in err


def test_python_gets_none_for_a_damaged_photo(plain, photos, tmp_path):
    lines = []
    got = caption(plain, [photos[0], tmp_path / 'cut.png', photos[1]], log=str, warn=lines.append)
    assert got[1] is None and got[0] and got[2] and len(lines) == 1 and 'cut.png' in lines[0]
    assert [got[0], got[2]] == vlrep.load(plain).caption([str(photos[0]), str(photos[1])])


# ---------------------------------------------------------------- several processes

EVALUATE = """
import sys
from vlrep.experiments import commands
class Quick:
    def check(self, root, **kw): return kw
    def evaluate(self, context, **kw):
        return [dict(question='q', metric='m', backbone='b', n=1, chance=0., value=1., low=1., high=1.)]
commands.EVALUATIONS['quick'] = Quick()
commands.open_run = lambda run, which, **kw: None
for _ in range(20): commands.evaluate(sys.argv[1], 'quick', log=str)
"""


def test_evaluations_at_the_same_time_lose_no_line(plain, tmp_path):
    "Six processes, twenty evaluations each: no line is lost"
    run = shutil.copytree(plain, tmp_path / 'run')
    programs = [forked.Program(EVALUATE, [run], tmp_path) for _ in range(6)]
    ends = [p.communicate() for p in programs]
    assert [p.returncode for p in programs] == [0] * 6, ends
    lines = (run / 'evaluations.jsonl').read_text().splitlines()
    assert len(lines) == 120 and all(json.loads(l)['on'] == 'quick' for l in lines)


# ---------------------------------------------------------------- a study whose lines are gone


def test_a_study_without_its_lines_deletes_nothing(plain, tmp_path, capsys):
    (tmp_path / 's.toml').write_text(STUDY)
    for part in ('runs', 'tasks'):
        out = tmp_path / part
        present = shutil.copytree(plain, out / part / 'sets-0')
        before = sorted(p.name for p in present.rglob('*'))
        err = refused(capsys, 'study', 'run', tmp_path / 's.toml', '--out', out)
        assert f'holds {part}/sets-0 and others, but no study.jsonl' in err and 'choose another --out' in err
        assert sorted(p.name for p in present.rglob('*')) == before and not (out / 'study.jsonl').exists()


def test_a_study_that_lost_a_line_deletes_nothing(plain, tmp_path):
    from vlrep.core.text_files import read_toml
    from vlrep.studies.runs import StudyFolder, _begin

    (tmp_path / 's.toml').write_text(STUDY)
    folder = StudyFolder(tmp_path / 'out', read_toml(tmp_path / 's.toml'), 's.toml')
    present = shutil.copytree(plain, tmp_path / 'out' / 'runs' / 'sets-0')
    with pytest.raises(ValueError, match='sets-0: contains a run of which .*study.jsonl has no line'):
        _begin(folder, 'run', 'sets-0', dict(variant='sets', seed=0, rate=0, values={}, spec={}), source=None)
    assert (present / 'recipe.json').exists() and (present / 'best').is_dir()


def test_a_run_from_before_a_field_was_added_goes_on(trained, run, capsys):
    "The field has its default; a value other than the default would make it a different run"
    with Run.reopen(run) as older:
        older.change(dict(recipe={k: v for k, v in older.info['recipe'].items() if k != 'ema'}))
    main(words('resume', run, '--root', trained / 'moved'))
    assert 'complete, nothing is left to do' in capsys.readouterr().out
    assert 'ema: was 0.0, now 0.9' in refused(capsys, 'resume', run, '--root', trained / 'moved', '--ema', 0.9)
