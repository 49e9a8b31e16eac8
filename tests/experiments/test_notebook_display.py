"What Jupyter shows of a training: fastai's table and fastprogress's bars, in a kernel that a person uses"

from jupyter_client.manager import start_new_kernel
from paths import PHOTOS
from tools import ENV

CODE = f"""
import vlrep
small = dict(size=32, width=32, heads=2, visual_depth=10, visual_width=8, vocab=200, bs=16, steps=12, warmup=1)
dls = vlrep.from_folder({str(PHOTOS)!r}, **small)
learn = vlrep.learner(dls)
"""


def shown(kernel, code, live=True):
    "HTML of the outputs of a cell; `live`: does somebody sit there?"
    pages = []

    def take(message):
        content = message['content']
        assert message['msg_type'] != 'error', content
        pages.append(content.get('data', {}).get('text/html', ''))

    kernel.execute_interactive(code, output_hook=take, allow_stdin=live, timeout=200)
    return [p for p in pages if p]


def test_a_fit_shows_the_table_and_the_bars_of_fastai(tmp_path):
    manager, kernel = start_new_kernel(kernel_name='python3', env={**ENV, 'OMP_NUM_THREADS': '1'}, cwd=str(tmp_path))
    try:
        assert not shown(kernel, CODE)
        for call, epochs in (('learn.fit_steps(12)', 2), ('learn.fine_tune(1)', 1), ('learn.fit_one_cycle(1)', 1)):
            pages = shown(kernel, call)
            assert any('<progress' in p for p in pages), call
            assert pages[-1].count('<tr>') == 1 + epochs and 'valid_loss' in pages[-1], (call, pages[-1])
        assert 'steps done' in shown(kernel, 'learn')[0] and '<img' in shown(kernel, 'dls.train.source')[0]
        shown(kernel, "learn.save('mine')")
        assert (tmp_path / 'models' / 'mine.pth').is_file()  # where the user is
        assert not shown(kernel, CODE + 'learn.fit_steps(2)', live=False)  # a page that is run by a program
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
