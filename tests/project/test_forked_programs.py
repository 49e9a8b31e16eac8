"What runs in a fork of the server is a process of its own"

import os
import signal

import forked


def test_a_program_is_what_subprocess_would_run(tmp_path):
    "Words, folder, environment, what it prints and reads, and its exit code"
    code = 'import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get("A"), input()); sys.exit("bad")'
    p = forked.run(code, ['x', 2], tmp_path, {**os.environ, 'A': 'b'}, input='said\n')
    assert (p.returncode, p.stdout, p.stderr) == (1, f"['x', '2'] {tmp_path} b said\n", 'bad\n')
    assert [forked.run(c).returncode for c in ('', 'import sys; sys.exit(7)', '1/0')] == [0, 7, 1]
    assert 'ZeroDivisionError' in forked.run('1/0').stderr


def test_programs_share_nothing_and_are_counted():
    before = forked.SERVER.cpu
    change = 'import vlrep.methods.base as b; b.mark = getattr(b, "mark", 0)+1; print(b.mark, sum(range(3_000_000)))'
    assert forked.run(change).stdout == forked.run(change).stdout == '1 4499998500000\n'
    assert forked.SERVER.cpu > before


def test_a_signal_reaches_the_program():
    p = forked.Program('import time; time.sleep(60)')
    assert p.poll() is None
    p.send_signal(signal.SIGTERM)
    assert p.wait(10) == -signal.SIGTERM and p.communicate() == ('', '')
