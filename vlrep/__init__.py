__version__ = "0.1.0"

import warnings

warnings.filterwarnings('ignore', message='`torch.jit.script` is deprecated', category=FutureWarning)  # fastai, when it is imported


def load(run, plugins=(), device='auto'):
    """Open a run folder for use: `m = load(run)`, then `m.caption(img)`, `m.embed(img)`, `m.search(photos, text)`

    `plugins`: Python files of the run that may be imported, since you trust them; `device`: auto (the GPU if there is
    one), cpu, cuda, cuda:1 or mps
    """
    from vlrep.experiments.load_run import open_run
    return open_run(run, device=device, plugins=plugins)
