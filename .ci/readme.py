"""Write README.md from the executed nbs/index.ipynb; its pictures go to nbs/images/index_N.png

`readme.py` writes, `readme.py --check` only says what would change.
"""

import base64
import json
import posixpath
import re
import sys

from contents import ROOT, text

NOTE = '<!-- Written from nbs/index.ipynb by `make readme`: edit the notebook instead. -->'


def relink(md):
    "Links that are right from nbs/ made right from the project's root"

    def fix(m):
        link = m[2]
        if re.match(r'[a-z]+:|#|/', link):
            return m[0]
        return m[1] + posixpath.normpath(posixpath.join('nbs', link)) + m[3]

    md = re.sub(r'(\]\()([^)\s]+)((?:\s+"[^"]*")?\))', fix, md)
    return re.sub(r'(\b(?:src|href)=")([^"]+)(")', fix, md)


def fence(src, lang=''):
    return f'```{lang}\n{src.rstrip()}\n```'


def output(o, images):
    "One output of a cell as Markdown; a picture is appended to `images`"
    if o['output_type'] == 'stream':
        return fence(text(o['text'])) if o['name'] == 'stdout' else ''
    data = o.get('data', {})
    if 'image/png' in data:
        name = f'nbs/images/index_{len(images) + 1}.png'
        images[name] = base64.b64decode(text(data['image/png']))
        width = o.get('metadata', {}).get('image/png', {}).get('width')
        return f'<img src="{name}" width="{width}">' if width else f'![]({name})'
    if 'text/markdown' in data:
        return relink(text(data['text/markdown'])).strip()
    plain = text(data.get('text/plain', ''))
    if 'text/html' in data and (not plain or plain.startswith('<')):
        return text(data['text/html']).strip()
    return fence(plain) if plain.strip() else ''


def cell(c, images):
    "One cell as a list of Markdown blocks"
    src = text(c['source'])
    if c['cell_type'] == 'markdown':
        return [relink(src).strip()]
    if c['cell_type'] != 'code':
        return []
    flags = re.findall(r'^#\|\s*(\S+.*?)\s*$', src, re.M)
    if 'hide' in flags or 'include: false' in flags:
        return []
    code = re.sub(r'^#\|.*\n?', '', src, flags=re.M).strip()
    blocks = [fence(code, 'python')] if code and 'echo: false' not in flags else []
    return blocks + [output(o, images) for o in c['outputs']]


def render(nb):
    "README.md and its pictures, as a dict of path to bytes"
    images = {}
    blocks = [b for c in nb['cells'] for b in cell(c, images) if b]
    return {'README.md': ('\n\n'.join([NOTE] + blocks) + '\n').encode(), **images}


def changes():
    "What `make readme` would write (bytes) or remove (None), by path"
    new = render(json.loads((ROOT / 'nbs' / 'index.ipynb').read_text(encoding='utf-8')))
    old = [str(p.relative_to(ROOT)) for p in (ROOT / 'nbs' / 'images').glob('index_*.png')]
    gone = {p: None for p in old if p not in new}
    return {
        p: b for p, b in {**new, **gone}.items() if b is None or not (ROOT / p).exists() or (ROOT / p).read_bytes() != b
    }


def main(check=False):
    todo = changes()
    if check:
        return sys.exit(f'not up to date, run `make readme`: {", ".join(todo)}' if todo else 0)
    for p, b in todo.items():
        if b is None:
            (ROOT / p).unlink()
        else:
            (ROOT / p).parent.mkdir(exist_ok=True)
            (ROOT / p).write_bytes(b)
    print('README.md: ' + (f'wrote {", ".join(todo)}' if todo else 'up to date'))


if __name__ == '__main__':
    main('--check' in sys.argv[1:])
