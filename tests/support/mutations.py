"""Damaged files in great numbers: mutations of bytes drawn from a seed, and a limit on what reading them may take

`mutations(data, seed, n)` yields (what was done, bytes); `within(seconds)` turns a hang into an error.
"""

import random
import signal
from contextlib import contextmanager


def _flip(data, draw):
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _set(data, draw):
    data[draw.randrange(len(data))] = draw.choice((0, 0x20, 0x2D, 0x30, 0x37, 0x80, 0xFF))


def _zeros(data, draw):
    at = draw.randrange(len(data))
    n = draw.choice((1, 16, 512))
    data[at : at + n] = bytes(len(data[at : at + n]))


def _noise(data, draw):
    at = draw.randrange(len(data))
    n = draw.choice((4, 12, 100))
    data[at : at + n] = draw.randbytes(len(data[at : at + n]))


def _truncate(data, draw):
    del data[draw.randrange(len(data)) :]


def _append(data, draw):
    data += draw.randbytes(draw.choice((1, 512, 1000)))


def _blocks(data, draw):
    "Two places, in whole blocks of a tar file, and the bytes between them"
    a, b = sorted(draw.randrange(len(data) // 512 + 1) * 512 for _ in range(2))
    return a, b, data[a:b]


def _remove(data, draw):
    a, b, _ = _blocks(data, draw)
    del data[a:b]


def _repeat(data, draw):
    a, _, piece = _blocks(data, draw)
    data[a:a] = piece


def _move(data, draw):
    a, b, piece = _blocks(data, draw)
    del data[a:b]
    at = draw.randrange(len(data) // 512 + 1) * 512
    data[at:at] = piece


IN_PLACE = dict(flip=_flip, set=_set, zeros=_zeros, noise=_noise, truncate=_truncate, append=_append)
SHIFTING = dict(remove=_remove, repeat=_repeat, move=_move)


def mutations(data, seed, n, kinds=None):
    "Yield `n` mutations of some bytes: the name of its kind, and the bytes. `kinds`: name -> function, by default all"
    draw = random.Random(seed)
    kinds = kinds or IN_PLACE | SHIFTING
    for k in range(n):
        what = list(kinds)[k % len(kinds)]
        new = bytearray(data)
        kinds[what](new, draw)
        yield what, bytes(new)


@contextmanager
def within(seconds):
    "A `TimeoutError` if what stands below takes longer"

    def late(*_):
        raise TimeoutError(f'not done after {seconds} s')

    was = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
