"""A limit on the processes of several programs together

The gate starts the notebooks and the tests side by side with `VLREP_TOKENS=READ,WRITE`: two ends of a pipe that holds a
byte for each process there may be. A program takes one before it starts a process, and gives it back afterwards.
"""

import os


class Tokens:
    "The pipe that this program shares with others; without one there is no limit"

    def __init__(self):
        self.ends = [int(fd) for fd in os.environ.pop('VLREP_TOKENS', '').split(',') if fd]
        if self.ends:
            os.set_blocking(self.ends[0], False)

    def take(self):
        "Is there one? Then it is ours"
        try:
            return not self.ends or bool(os.read(self.ends[0], 1))
        except BlockingIOError:
            return False

    def give(self):
        if self.ends:
            os.write(self.ends[1], b'+')
