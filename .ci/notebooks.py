"""Run the notebooks

`notebooks.py test [NAME]` nbdev_test's check of each of them (or of those named), three at a time: no flagged cell, no
                           CUDA, no network; `--results FILE` writes which passed
`notebooks.py run [NAME]`  run all (or those named: models/10_backbones) from top to bottom, slow cells too, and rewrite
                           their outputs
"""

import base64
import gc
import importlib
import io
import json
import os
import pkgutil
import re
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import solutions
from tokens import Tokens

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / 'nbs'
# processes at a time, one more than cores: some wait for files or others; seconds for one
WORKERS = 3
LIMIT = 600
# the slowest ones, which begin: none of them is left over at the end, alone
SLOWEST = """
tutorials/detection course/05_captioning methods/loctex/40_method methods/virtex/40_method evaluation/30_transfer
experiments/65_pretrain models/10_backbones evaluation/40_captioning methods/supervised/40_method tutorials/tour
models/30_text_encoder models/55_export tutorials/your_method methods/virtex/50_official course/10_icmlm index
90_cli
""".split()


def notebooks(names=()):
    "Paths of the notebooks that nbdev sees, in reading order; only those in `names` if given"
    from nbdev.doclinks import nbglob

    fns = sorted(p.absolute() for p in nbglob(NBS, as_path=True))
    known = {p.relative_to(NBS).with_suffix('').as_posix(): p for p in fns}
    names = [n.removesuffix('.ipynb') for n in names]
    for n in names:
        if n not in known:
            sys.exit(f'no notebook {n}; there are: {" ".join(known)}')
    return [known[n] for n in names] or fns


def slowest_last(fns):
    "The same paths for `pop`: what takes longest is at the end, before it what comes late in reading, which trains"
    place = {NBS / f'{name}.ipynb': -i for i, name in enumerate(SLOWEST)}
    return sorted(fns, key=lambda fn: place.get(fn, -len(place)))


def no_network():
    "From now on a connection to another machine is an error, in this process and those it forks"
    connect = socket.socket.connect

    def local(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ('127.0.0.1', '::1', 'localhost'):
            raise OSError(f'checks run without a network, and this one asked for {address[0]}')
        return connect(self, address)

    socket.socket.connect = local


def preload():
    "What most notebooks import, the library too: done once here, and every forked check starts with it"
    import fastai.basics
    import fastai.callback.all
    import IPython.core.history
    import IPython.core.magics
    import IPython.core.oinspect
    import jinja2
    import matplotlib.pyplot
    import matplotlib_inline.backend_inline
    import nbdev.showdoc
    import sentencepiece
    import sklearn.linear_model
    import sklearn.svm
    import textblob.en.taggers
    import timm
    import torch
    import torchvision
    import torchvision.models.detection
    import tyro

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    try:
        import vlrep.evaluation.options  # before those of its folders

        for module in pkgutil.walk_packages(vlrep.__path__, 'vlrep.'):
            importlib.import_module(module.name)
    except Exception:
        pass  # a notebook that imports what is broken says so, and only such a one fails
    finally:
        sys.path.remove(str(ROOT))
    gc.freeze()  # garbage is not looked for in what stays anyway


def cheap_figures():
    "From now on a figure is drawn once, for the cell's output, and what nobody keeps is hardly compressed"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib_inline.config import InlineBackend

    FigureCanvasAgg.draw_idle = lambda self, *args, **kw: None
    InlineBackend.instance().print_figure_kwargs = dict(bbox_inches=None, pil_kwargs=dict(compress_level=1))


def check_stubs():
    "From now on stubs of exercises run, then their solutions: the checks must refuse the former and accept the latter"
    import nbdev.test
    from execnb.nbio import dict2nb

    class Processor(nbdev.test.NBProcessor):
        def __init__(self, path, **kw):
            nb = dict2nb(solutions.with_stubs(solutions.joined(solutions.read(path), path)))
            nb.path_ = str(path)
            super().__init__(path, nb=nb, **kw)

    nbdev.test.NBProcessor = Processor


def fork(fn, skip, folder):
    "Start the check of notebook `fn` in a process of its own, with `folder` for temporary files; its id and its output"
    import nbdev.test
    from execnb.shell import CaptureShell

    nbdev.test.CaptureShell = partial(CaptureShell, mpl_format='png')  # figures are drawn, at half the resolution
    test_nb = nbdev.test.test_nb
    log = tempfile.TemporaryFile('w+', errors='replace')
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid, log
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ['TMPDIR'] = tempfile.tempdir = folder.name
        check_stubs()
        code = 0 if test_nb(fn, skip_flags=skip, basepath=ROOT)[0] else 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def report(fn, status, cpu, wall, log):
    "One line for a finished notebook, and what it printed if it failed; True if it passed"
    ok = status == 0
    print(f'  {"ok  " if ok else "FAIL"} {wall:6.1f} s, CPU {cpu:6.1f} s   {fn.relative_to(NBS)}', flush=True)
    if ok:
        return True
    log.seek(0)
    print(re.sub(r'\x1b\[[0-9;]*m', '', log.read())[-6000:], flush=True)
    if os.WIFSIGNALED(status):
        print(f'  ended by signal {os.WTERMSIG(status)} (the limit is {LIMIT} s)', flush=True)


def test(names, results=None):
    "Check all notebooks, or those in `names`; exit code 1 if one failed; `results`: a file for [passed, CPU seconds]"
    from nbdev.config import get_config

    os.environ.update(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', MKL_NUM_THREADS='1')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below ends what we started
    os.chdir(NBS)
    preload()
    cheap_figures()
    no_network()
    os.fsync = lambda fd: None  # what checks write need not survive a power failure
    todo = slowest_last(notebooks(names))
    skip = get_config().tst_flags.split()
    running = {}
    passed = {}
    tokens = Tokens()
    try:
        while todo or running:
            while todo and len(running) < WORKERS and tokens.take():
                fn = todo.pop()
                folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                pid, log = fork(fn, skip, folder)
                running[pid] = fn, log, folder, time.time()
            time.sleep(0.05)
            for pid, (fn, log, folder, start) in list(running.items()):
                done, status, use = os.wait4(pid, os.WNOHANG)
                if done:
                    del running[pid]
                    tokens.give()
                    folder.cleanup()
                    cpu = use.ru_utime + use.ru_stime
                    wall = time.time() - start
                    passed[str(fn.relative_to(NBS))] = bool(report(fn, status, cpu, wall, log)), round(cpu, 1)
                elif time.time() - start > LIMIT:
                    os.killpg(pid, signal.SIGKILL)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
    if results:
        Path(results).write_text(json.dumps(passed))
    sys.exit(0 if all(ok for ok, _ in passed.values()) else 1)


SIZE = 390_000  # bytes of a notebook; tests/project allow 400,000
VISIBLE = 3  # mean change of a colour, of 255, above which a palette is not used


def encoded(image, **kw):
    "An image as the text that a notebook stores"
    f = io.BytesIO()
    image.save(f, optimize=True, **kw)
    return base64.b64encode(f.getvalue()).decode()


def as_png(image, *palettes):
    "The smallest PNG of an image: in all its colours, or in one of these numbers of colours if that is not seen"
    from PIL import ImageChops, ImageStat

    made = [encoded(image, format='PNG')]
    for colors in palettes:
        few = image.quantize(colors, dither=0, kmeans=1)  # without k-means, rare colours shift
        changes = ImageStat.Stat(ImageChops.difference(few.convert('RGB'), image)).mean
        if max(changes) < VISIBLE:
            made.append(encoded(few, format='PNG'))
    return min(made, key=len)


def shrink(nb, size=SIZE):
    "Store figures in few bytes; if the notebook is too large, the largest first in fewer colours, as JPEG, or smaller"
    import nbformat
    from PIL import Image

    def three_quarters(image):
        return image.resize([3 * side // 4 for side in image.size], Image.Resampling.BOX)

    outputs = [o for c in nb.cells for o in c.get('outputs', []) if 'image/png' in o.get('data', {})]
    figures = [(o, Image.open(io.BytesIO(base64.b64decode(o.data['image/png']))).convert('RGB')) for o in outputs]
    for o, image in figures:
        o.data['image/png'] = as_png(image, 256)
    steps = [
        ('image/png', lambda image: as_png(image, 64)),
        ('image/png', lambda image: as_png(image, 32)),
        ('image/jpeg', lambda image: encoded(image, format='JPEG', quality=85)),
        ('image/png', lambda image: as_png(three_quarters(image), 256, 32)),
    ]

    def stored(o):
        return next((kind, o.data[kind]) for kind in ('image/png', 'image/jpeg') if kind in o.data)

    for kind, made in steps:
        for o, image in sorted(figures, key=lambda figure: -len(stored(figure[0])[1])):
            if len(nbformat.writes(nb).encode()) < size:
                return
            old, now = stored(o)
            new = made(image)
            if len(new) < len(now):
                del o.data[old]
                o.data[kind] = new
                o.metadata = {kind: o.metadata.get(old, {})}


def left_alone(src, cuda):
    "A cell that `run` cannot run here: it needs a GPU or a download. It keeps its outputs"
    flags = set(re.findall(r'^#\|\s*(\w+)\s*$', src, re.M))
    return 'data' in flags or ('cuda' in flags and not cuda) or bool(re.search(r'^#\|\s*eval:\s*false', src, re.M))


def run(names):
    "Run notebooks, each in a fresh kernel, and keep the outputs; one that fails stays as it was: exit code 1"
    import nbformat
    import torch
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    os.environ['PYTHONWARNINGS'] = 'ignore::FutureWarning:torch.jit._script'  # fastai uses torch.jit.script
    failed = []
    for fn in notebooks(names):
        nb = nbformat.from_dict(solutions.joined(nbformat.read(fn, 4), fn))
        t = time.time()
        cuda = torch.cuda.is_available()
        skipped = [c for c in nb.cells if c.cell_type == 'code' and left_alone(c.source, cuda)]
        for c in skipped:
            c.metadata['tags'] = ['skip-execution']
        place = {'metadata': {'path': str(fn.parent)}}
        try:
            NotebookClient(nb, timeout=None, kernel_name='python3', resources=place).execute()
        except CellExecutionError as e:
            failed.append(str(fn.relative_to(NBS)))
            print(f'  FAIL {failed[-1]}\n{e}', flush=True)
            continue
        for c in skipped:
            del c.metadata['tags']
        shrink(nb)
        solutions.keep_outputs(nb, fn)
        nbformat.write(nbformat.from_dict(solutions.apart(nb)), fn)
        print(f'  {time.time() - t:6.1f} s, {fn.stat().st_size / 1000:4.0f} kB   {fn.relative_to(NBS)}', flush=True)
    sys.exit(f'failed: {", ".join(failed)}' if failed else 0)


if __name__ == '__main__':
    sys.path.pop(0)  # this folder: nothing in a notebook should come from here
    what, *rest = sys.argv[1:] or ['']
    if what == 'test':
        at = rest.index('--results') if '--results' in rest else len(rest)
        test(rest[:at], *rest[at + 1 :])
    elif what == 'run':
        run(rest)
    else:
        sys.exit(__doc__)
