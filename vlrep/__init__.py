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


def from_csv(file, method='virtex', **more):
    "Loaders of the photos in a CSV file with the columns path and caption; see `open_loaders` for `more`"
    return _loaders('csv', file, method, more)


def from_coco(root, method='virtex', **more):
    "Loaders of the photos and captions in a folder of COCO; see `open_loaders` for `more`"
    return _loaders('coco', root, method, more)


def from_folder(root, method='virtex', **more):
    "Loaders of a folder in the layout of Flickr8k: Images/ and captions.txt; see `open_loaders` for `more`"
    return _loaders('flickr8k', root, method, more)


def _loaders(data, root, method, more):
    from vlrep.experiments.notebook import open_loaders
    return open_loaders(data, root, method, **more)


def learner(dls, **more):
    "The learner that these loaders were opened for: `learn.fit_steps(500)`; see `learner_of` for `more`"
    from vlrep.experiments.notebook import learner_of
    return learner_of(dls, **more)
