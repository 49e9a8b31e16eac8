"""Fine-tuning by several processes: the losses, scores and weights of one; a run that was stopped goes on with the same
bits; the main process alone writes"""

import signal

import pytest
import torch
from ranks import codes, last, run_ranks
from run_folders import TINY, rows, untrained

from vlrep.training.run_folder import open_run_folder

PLAN = dict(steps=8, bs=8, every=4, warmup=2, lr=0.01, dropout=0, scenes=12, valid=7, test=6)
WORDS = [
    '--task',
    'vqa',
    '--threads',
    '1',
    '--precision',
    'fp32',
    '--save-every',
    '1',
    *[w for k, v in PLAN.items() for w in (f'--{k}', str(v))],
]


def jobs(cwd, body):
    "The runs of `forked_ranks.py`, in this order"

    def new(name, *more):
        return [str(body), *WORDS, '--out', str(cwd / name), *more]

    go_on = [str(cwd / 'run')]
    return dict(
        one=dict(words=[new('one')]),
        two=dict(words=[new('two')] * 2),
        three=dict(words=[new('three')] * 3),
        stopped=dict(words=[new('run')] * 2, kill=[f'{cwd}/run/steps/*', 1, signal.SIGTERM, [1]]),
        alone=dict(words=[go_on], command='resume'),
        resumed=dict(words=[go_on] * 2, command='resume'),
        other=dict(words=[new('other'), new('other', '--lr', '.1')]),
    )


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "What became of each run, and the folder of all of them"
    cwd = tmp_path_factory.mktemp('finetuned')
    body = untrained(cwd / 'body', 'vilbert', region_model='given', mim='off', dropout=0.0, **TINY)
    runs = {k: {'command': 'finetune', **run} for k, run in jobs(cwd, body).items()}
    return run_ranks(cwd, runs), cwd


def facts(run):
    "Steps, losses and scores of the evaluations, and the table"
    numbers = open_run_folder(run).results()[-1]['numbers']
    return numbers['history'], [r['value'] for r in numbers['table']]


def trained(run, which):
    "Weights, but for the biases of keys: their gradient is 0, of whose rounding AdamW makes whole steps"

    def part(k, w):
        if not k.endswith('project.bias'):
            return w.float()
        n = len(w) // 3
        return torch.cat([w[:n], w[2 * n :]])

    return {k: part(k, w) for k, w in open_run_folder(run).weights(which).items()}


@pytest.mark.parametrize('name', ['two', 'three'])
def test_several_processes_equal_one(done, name):
    got, cwd = done
    assert codes(got['one']) == [0] and set(codes(got[name])) == {0}, got[name]
    (one, table), (several, same) = facts(cwd / 'one'), facts(cwd / name)
    print(one, several)
    assert [h[0] for h in one] == [4, 8] and table == same
    for a, b in zip(one, several):
        assert b == pytest.approx(a, rel=2e-5)
    for which in ('last', 'best'):
        a = trained(cwd / 'one', which)
        b = trained(cwd / name, which)
        assert a.keys() == b.keys() and max(float((a[k] - b[k]).abs().max()) for k in a) < 2e-5

    def train(run):
        return [r['train_loss'] for r in rows(cwd / run)]

    assert train('one') == pytest.approx(train(name), rel=2e-5)


def test_the_main_process_alone_writes(done):
    got, cwd = done
    assert got['two'][1]['out'] == got['two'][1]['err'] == got['two'][0]['err'] == ''
    assert 'report: ' in got['two'][0]['out'] and open_run_folder(cwd / 'two').info['world_size'] == 2


def test_resume_is_exact(done):
    "A signal to one process stops both; taken up by both, the run ends with the bits of one nobody disturbed"
    got, cwd = done
    assert codes(got['stopped']) == [143, 143] and codes(got['resumed']) == [0, 0], got['stopped']
    assert 'resuming from step ' in got['resumed'][0]['out']
    a = open_run_folder(cwd / 'run')
    b = open_run_folder(cwd / 'two')
    assert facts(a.path) == facts(b.path) and rows(a.path) == rows(b.path)
    for which in ('last', 'best'):
        w = b.weights(which)
        assert w and all(torch.equal(v, w[k]) for k, v in a.weights(which).items())


def test_other_words_and_other_numbers_of_processes_are_refused(done):
    "Another number of processes, and processes with other words"
    got, cwd = done
    assert codes(got['alone']) == [2] and 'was begun by 2 process(es), and with 1 it would' in last(got['alone'][0])
    assert codes(got['other']) == [2, 2] and not (cwd / 'other').exists()
    for r in got['other']:
        assert 'rank 1 would train a different run (plan lr 0.01 in rank 0 and 0.1' in last(r), last(r)
