"What makes the host wait for a GPU: counted on a CPU, by the operations whose result the host reads"

import traceback
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vlrep

LIBRARY = f'{Path(vlrep.__file__).parent}/'
READ = {'_local_scalar_dense', 'nonzero', 'masked_select', 'equal', 'is_nonzero', '_unique2', 'unique_dim', 'bincount'}
MASKED = {'index', 'index_put', 'index_put_'}  # with a mask, how many elements there are must be known


def _place():
    "Name the line that reads; '' where only a CPU does: optimisers count their steps, padding is left out"
    frames = traceback.extract_stack()
    ours = [f for f in frames if f.filename.startswith(LIBRARY)]
    if any('/torch/optim/' in f.filename for f in frames):
        return ''
    if any("device.type == 'cpu'" in f.line or 'Packing(' in f.line or '= real.' in f.line for f in ours):
        return ''
    return f'{ours[-1].filename.removeprefix(LIBRARY)}: {ours[-1].line}'


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.places = []

    def add(self):
        if place := _place():
            self.places.append(place)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kinds = [t.dtype for t in (args[1] if name in MASKED else []) if t is not None]
        unsized = name == 'repeat_interleave' and 'output_size' not in (kwargs or {})
        if name in READ or unsized or torch.bool in kinds or torch.uint8 in kinds:
            self.add()
        return func(*args, **(kwargs or {}))


@contextmanager
def host_waits(learn):
    "List the lines at which steps of a learner read what a tensor holds; its loader and the log are not looked at"
    counter = _Counter()
    one_batch = learn.one_batch

    def counted(was):
        def read(self, *args, **kwargs):
            counter.add()
            return was(self, *args, **kwargs)

        return read

    def watched(*args):
        reads = {name: counted(getattr(torch.Tensor, name)) for name in ('tolist', 'numpy', '__array__')}
        with patch.multiple(torch.Tensor, **reads), counter:
            one_batch(*args)

    with patch.object(learn, 'one_batch', watched):
        yield counter.places
