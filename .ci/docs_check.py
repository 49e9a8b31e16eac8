"""Checks of the built documentation: every link leads to a page and a part of it, and no page loads from the network"""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself when it opens a page; a link (a href) is followed by the reader only
BY_TAG = dict(
    script={'src'},
    link={'href'},
    img={'src', 'srcset'},
    iframe={'src'},
    source={'src', 'srcset'},
    video={'src', 'poster'},
    audio={'src'},
    object={'data'},
    embed={'src'},
    input={'src'},
    use={'href', 'xlink:href'},
    image={'href', 'xlink:href'},
)
NOT_LOADED = {'canonical', 'author', 'license', 'next', 'prev', 'index', 'search'}  # values of <link rel=...>
FAR = re.compile(r'^\s*(?:https?:|wss?:|ftp:)?//', re.I)


class Page(HTMLParser):
    "The links, parts (ids), loaded resources, styles and scripts of one page"

    def __init__(self, text):
        super().__init__()
        self.ids = set()
        self.links = []
        self.loads = []
        self.styles = []
        self.scripts = []
        self.feed(text)
        self.close()

    def handle_data(self, data):
        if self.cdata_elem == 'style':
            self.styles.append(data)
        elif self.cdata_elem == 'script':
            self.scripts.append(data)

    def handle_starttag(self, tag, attrs):
        a = {k: v or '' for k, v in attrs}
        self.ids.update(a[k] for k in ('id', 'name') if k in a)
        if tag in ('a', 'area') and 'href' in a:
            self.links.append(a['href'])
        if 'style' in a:
            self.styles.append(a['style'])
        if tag == 'link' and NOT_LOADED >= set(a.get('rel', '').lower().split()):
            return
        for k in a.keys() & BY_TAG.get(tag, set()):
            self.loads += [part.split()[0] for part in a[k].split(',') if part.strip()] if k == 'srcset' else [a[k]]
        if 'srcdoc' in a:  # a page within the page; its links are its own
            inner = Page(a['srcdoc'])
            self.loads += filter(FAR.match, inner.loads)
            self.styles += inner.styles
            self.scripts += inner.scripts


def far_in_css(css):
    "Addresses on the network that a style sheet loads"
    found = re.findall(r'url\(\s*["\']?([^"\')]+)|@import\s+["\']([^"\']+)', re.sub(r'/\*.*?\*/', '', css, flags=re.S))
    return [u for pair in found for u in pair if u and FAR.match(u)]


def far_in_script(js):
    "Addresses on the network that a script within a page names where it loads"
    loads = r'(?:import|fetch|importScripts|\.src\s*=|\.href\s*=|open)'
    return re.findall(loads + r'\s*\(?\s*["\'`]((?:https?:)?//[^"\'`]+)', js)


def asks_network(page):
    "Addresses that a browser would ask the network for when it opens `page`"
    return (
        [u for u in page.loads if FAR.match(u)]
        + [u for s in page.styles for u in far_in_css(s)]
        + [u for s in page.scripts for u in far_in_script(s)]
    )


def broken(pages, here, root):
    "Links of the page `here` (a path) to a file or a part that is not there; `pages` is path -> Page"
    for link in [*pages[here].links, *(u for u in pages[here].loads if not u.startswith('data:'))]:
        url = urlsplit(link)
        if url.scheme or url.netloc or link.startswith('about:'):
            continue
        to = (here.parent / unquote(url.path)).resolve() if url.path else here
        if to.is_dir():
            to = to / 'index.html'
        if not to.exists():
            yield f'{link}: no such file'
        elif not to.is_relative_to(root):
            yield f'{link}: outside the site'
        elif url.fragment and to in pages and unquote(url.fragment) not in pages[to].ids | {'top'}:
            yield f'{link}: no such part of the page'


def problems(root):
    "Lines: everything that is wrong with the site in the folder `root`"
    root = Path(root).resolve()
    pages = {p: Page(p.read_text(encoding='utf-8')) for p in sorted(root.rglob('*.html'))}
    if not pages:
        yield f'{root}: no pages'
    for p, page in pages.items():
        name = p.relative_to(root)
        yield from (f'{name} asks the network for {u}' for u in asks_network(page))
        yield from (f'{name}: {what}' for what in broken(pages, p, root))
    for p in sorted(root.rglob('*.css')):
        far = far_in_css(p.read_text(encoding='utf-8'))
        yield from (f'{p.relative_to(root)} asks the network for {u}' for u in far)
