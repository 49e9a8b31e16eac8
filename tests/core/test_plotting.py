"The style of figures: twice the pixels in Jupyter at the same size, and the project's colours"

import base64
import struct

import matplotlib.pyplot as plt
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.colors import to_hex
from matplotlib_inline.backend_inline import set_matplotlib_formats

from vlrep.core.plotting import TONES, style


@pytest.fixture
def shell(monkeypatch):
    "An IPython shell whose figures are shown inline"
    shell = InteractiveShell.instance()
    monkeypatch.setattr(plt, 'get_backend', lambda: 'inline')
    set_matplotlib_formats('png')
    yield shell
    InteractiveShell.clear_instance()


def shown(shell):
    "Pixels of a figure as the shell stores it, and the size at which it is displayed, if it is stated"
    fig, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, 1], [0, 1])
    data, metadata = shell.display_formatter.format(fig, include={'image/png'})
    plt.close(fig)
    size = metadata.get('image/png', {})
    return struct.unpack('>II', base64.b64decode(data['image/png'])[16:24]), (size.get('width'), size.get('height'))


def test_a_kernel_draws_twice_the_pixels_and_displays_the_same_size(shell, monkeypatch):
    style()
    (width, height), stated = shown(shell)
    assert stated == (None, None)
    monkeypatch.setattr(shell, 'kernel', object(), raising=False)
    style()
    pixels, displayed = shown(shell)
    assert abs(displayed[0] - width) <= 1 and abs(displayed[1] - height) <= 1
    assert abs(pixels[0] - 2 * width) <= 2 and abs(pixels[1] - 2 * height) <= 2


def test_style_needs_no_ipython(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, 'IPython')
    style()


def test_lines_without_a_colour_take_those_of_the_project():
    style()
    fig, ax = plt.subplots()
    lines = [ax.plot([0, 1])[0] for _ in TONES]
    plt.close(fig)
    assert [to_hex(line.get_color()) for line in lines] == list(TONES)
