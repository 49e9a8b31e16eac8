"""Build the documentation site in _docs/html: the course, tutorials, papers, results, notebooks, and a reference

Sphinx with myst-nb and furo, all from PyPI, in an environment of its own (.venv-docs); nothing is executed, the outputs
are those that are committed. After the first time no network is needed, and the pages themselves never ask for one.
`docs.py` has the environment ready and builds; `docs.py build` is the second half, run by that environment's Python.
"""

import json
import os
import posixpath
import re
import shutil
import sys
import time
from configparser import ConfigParser
from pathlib import Path
from urllib.parse import unquote

import contents
import docs_check
import docs_reference
import environment
import solutions
from environment import ROOT

VENV = ROOT / '.venv-docs'
SITE = ROOT / '_docs'
# file of the project -> page
DOCS = {
    'CHANGELOG.md': 'project/changelog.md',
    'CONTRIBUTING.md': 'project/contributing.md',
    'data/README.md': 'project/data.md',
    'README.md': 'index.ipynb',
}
MATH = 'tex-svg-full.js'  # MathJax 3 in one file: all extensions of TeX, and no fonts to fetch


def settings():
    "The facts of settings.ini"
    cfg = ConfigParser(delimiters=['='])
    cfg.read(ROOT / 'settings.ini', encoding='utf-8')
    return cfg['DEFAULT']


# ---------------------------------------------------------------- links


def slug(part):
    "The anchor that MyST gives a heading, from the one that Jupyter gives it: `1.-A-b` becomes `1-a-b`"
    return re.sub(r'[^\w-]', '', unquote(part).lower())


def relink(md, here, known, files, blob, page=None):
    """The links of a notebook's or a page's Markdown as the site needs them

    `here` is where it stands below nbs/, and in the site if `page` says nothing else; `known` are all pages. `files`
    maps files of the project that are pages to those; other files of the project are shown on the project's own site,
    at `blob`. A folder of notebooks becomes the page that lists them, an image on the network its words, and a badge
    is left out. What is written as code stays. A `ValueError` names a link that leads nowhere.
    """
    base = posixpath.dirname(here)
    place = posixpath.dirname(page or here) or '.'

    def to(link):
        if re.match(r'[a-z][a-z+.-]*:|//', link):
            return link
        path, hash_, part = link.partition('#')
        if not path or path.endswith('.ipynb'):
            part = slug(part)
        if not path:
            return f'#{part}'
        full = posixpath.normpath(posixpath.join('nbs', base, path))
        inner = posixpath.relpath(full, 'nbs')
        if full in files:
            inner = files[full]
        elif inner not in known and f'{inner}/index.md' in known:
            inner = f'{inner}/index.md'
        if inner in known:
            return posixpath.relpath(inner, place) + hash_ + part
        if full.startswith('..') or not (ROOT / full).exists():
            raise ValueError(f'{here}: the link {link} leads nowhere')
        return f'{blob}/{full}{hash_}{part}'

    def html(link):
        return re.sub(r'\.(ipynb|md)(#|$)', r'.html\2', to(link)) if '://' not in link else link

    def prose(s):
        s = re.sub(r'\[!\[[^\]]*\]\((?:https?:)?//[^)]*\)\]\([^)]*\)', '', s)  # a badge
        s = re.sub(r'!\[([^\]]*)\]\((?:https?:)?//[^)]*\)', r'\1', s)
        s = re.sub(r'(\]\()([^)\s]+)((?:\s+"[^"]*")?\))', lambda m: m[1] + to(m[2]) + m[3], s)
        return re.sub(r'(<[^<>]*\b(?:src|href)=")([^"]+)(")', lambda m: m[1] + html(m[2]) + m[3], s)

    parts = re.split(r'(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$|(`+)(?!`).+?(?<!`)\2(?!`))', md, flags=re.S | re.M)
    return ''.join(prose(s) + code for s, code in zip(parts[::3], [*parts[1::3], '']))


# ---------------------------------------------------------------- notebooks


def flags(src):
    return re.findall(r'^#\|\s*(\S.*?)\s*$', src, re.M)


def folded(src):
    "What a folded cell holds, if it is no picture's code: a chapter's solution, or checks"
    if re.match(r'# *Solution', src):
        return 'solution'
    if len(re.findall(r'^\s*(?:test_\w+\(|assert |with expect_fail)', src, re.M)) > 2:
        return 'checks'


def code_cell(c):
    "A code cell as a reader sees it: without directives, folded if its source is hidden; None if nothing is to be seen"
    src = contents.text(c['source'])
    found = flags(src)
    tags = []
    if {'hide', 'include: false'} & set(found):
        return None
    src = re.sub(r'^#\|.*\n?', '', src, flags=re.M).strip('\n')
    outputs = [o for o in c['outputs'] if o.get('name') != 'stderr']
    if 'output: false' in found:
        outputs = []
    if not src.strip() and not outputs:
        return None
    if 'echo: false' in found:
        tags.append('remove-input')
    if c['metadata'].get('jupyter', {}).get('source_hidden') or 'code-fold: true' in found:
        tags.append('hide-input')
    if 'export' in found:
        tags.append('exported')
    meta = dict(tags=tags)
    if 'hide-input' in tags and (what := folded(src)):
        meta['mystnb'] = dict(code_prompt_show=f'Show the {what}', code_prompt_hide=f'Hide the {what}')
    return {**c, 'source': src, 'outputs': [isolated(o) for o in outputs], 'metadata': meta}


def isolated(o):
    "An output in HTML with styles of its own keeps them to itself, in a shadow tree"
    html = contents.text(o.get('data', {}).get('text/html', ''))
    if not re.search(r'<style', html):
        return o
    return {**o, 'data': {'text/html': f'<div><template shadowrootmode="open">{html}</template></div>'}}


def title_cell(src):
    "A title cell without its front matter, nbdev's lines `- key: value` and ours, at its end"
    return re.sub(r'(?:\n+- *(?:chapter|skip_exec|skip_showdoc|output-file|draft): *[^\n]*)+\s*$', '', src)


def folds(md):
    "Markdown within <details> is read as such if empty lines stand around it: they are added, and `code` in summaries"

    def summary(m):
        return re.sub(r'`([^`]+)`', r'<code>\1</code>', m[0].rstrip()) + '\n\n'

    md = re.sub(r'<summary>.*?</summary>[ \t]*\n*', summary, md, flags=re.S)
    return re.sub(r'\s*</details>[ \t]*\n?', '\n\n</details>\n', md)


def alt(heading):
    return f'Figure in the part "{heading}", drawn by code'


def notebook(nb, here, module, fix):
    "A notebook as the site shows it; `fix` mends the links of a Markdown text, `module` is what it exports or None"
    out = []
    heading = ''
    for i, c in enumerate(nb['cells']):
        src = contents.text(c['source'])
        if c['cell_type'] == 'markdown':
            src = fix(folds(title_cell(src) if i == 0 else src))
            if found := re.findall(r'^#+ +(.*?)\s*$', src, re.M):
                heading = found[-1].replace('"', "'")
            out.append({**c, 'source': src})
            if i == 0:
                out.append(below_title(here, module))
        elif c['cell_type'] == 'code' and (new := code_cell(c)):
            figures = [o for o in new['outputs'] if {'image/png', 'image/jpeg'} & o.get('data', {}).keys()]
            if figures:
                image = new['metadata'].setdefault('mystnb', {})['image'] = dict(alt=alt(heading))
                # of a figure that has twice the pixels
                meta = [o['metadata'].get(k, {}) for o in figures for k in ('image/png', 'image/jpeg')]
                if widths := [m['width'] for m in meta if 'width' in m]:
                    image['width'] = f'{max(widths)}px'
            for data in (o['data'] for o in new['outputs'] if 'text/markdown' in o.get('data', {})):
                data['text/markdown'] = fix(contents.text(data['text/markdown']))
            out += [new]
    return {**nb, 'cells': out}


def below_title(here, module):
    "The line below a title: the notebook to download, and the module that it exports"
    parts = [f'{{download}}`Download this notebook </notebooks/{here}>`']
    if module:
        parts.append(f'exports [`{module}`](/reference/{module}.rst)')
    return dict(
        cell_type='markdown',
        id='d0cd0cd0',
        metadata={},
        source='\n'.join(['```{container} about-notebook', ' · '.join(parts), '```']),
    )


# ---------------------------------------------------------------- pages that are not notebooks


def toctree(entries, caption='', hidden=True, depth=1):
    "A table of contents in MyST"
    options = [':hidden:' * hidden, (f':caption: {caption}' if caption else ''), f':maxdepth: {depth}']
    return '\n'.join(['```{toctree}', *filter(None, options), '', *entries, '```', ''])


def item(nbs, name):
    "A line of a list: a link to a notebook in the same folder, and what it is about"
    title, line = contents.headline(nbs[name])
    return f'- [{title}]({posixpath.basename(name)}): {line}'


def package_pages(nbs, reading):
    "Page of each folder of notebooks -> its text: what is in it, in reading order"
    folders = {posixpath.dirname(n) for n in reading if '/' in n}
    folders |= {posixpath.dirname(f) for f in folders if '/' in f}
    pages = {}
    for f in sorted(folders):
        own = [n for n in reading if posixpath.dirname(n) == f]
        inner = [g for g in sorted(folders) if posixpath.dirname(g) == f]
        shown = [n for n in own if not n.endswith('90_paper.ipynb')]
        name = posixpath.basename(f).replace('_', ' ') if '/' in f else f.capitalize()
        package = f'vlrep.{f.replace("/", ".")}'
        lines = [f'# {name}', '', f'The notebooks of `{package}`, each after those that it needs.', '']
        lines += [item(nbs, n) for n in own]
        lines += [f'- [{posixpath.basename(g)}]({posixpath.basename(g)}/index.md)' for g in inner]
        entries = [*map(posixpath.basename, shown), *(f'{posixpath.basename(g)}/index' for g in inner)]
        pages[f'{f}/index.md'] = '\n'.join([*lines, '', toctree(entries)])
    return pages


def reading_order(nbs):
    "The library's notebooks in the order in which they need each other"
    height = contents.levels({n: nb for n, nb in nbs.items() if n != 'index.ipynb' and not n.startswith('course/')})
    return sorted(
        (n for n in nbs if n not in ('index.ipynb', 'results.ipynb') and not n.startswith(('course/', 'tutorials/'))),
        key=lambda n: (height[contents.package(n)], n),
    )


def reference_pages(mods, reading):
    "Pages of the reference: a list of modules in reading order, and a page for each"
    order = {n: i for i, n in enumerate(reading)}
    names = sorted(mods, key=lambda m: order.get(mods[m].notebook, len(order)))
    head = [
        '# Reference',
        '',
        'Every public name, by module, read from the signatures and the comments behind each parameter. The '
        '{ref}`index <genindex>` lists all names; each page leads to the notebook that explains them.',
    ]
    rows = []
    last = ''
    for m in names:
        package = m.split('.')[1]
        if package != last:
            rows += ['', f'## {package}' if m.count('.') > 1 else f'## {m}', '']
        last = package
        doc = mods[m].doc.strip().split('\n')[0].replace('<', r'\<').replace('*', r'\*')
        rows.append(f'- [`{m}`]({m}.rst): {doc}')
    pages = {f'reference/{m}.rst': docs_reference.page(mods[m]) for m in names}
    return {'reference/index.md': '\n'.join([*head, *rows, '']), **pages}


def span(values):
    "The mean with the lowest and the highest; a value alone as it is"
    if not values:
        return 'nan'
    mean = f'{sum(values) / len(values):.1f}'
    return mean if len(values) == 1 else f'{mean} ({min(values):.1f} to {max(values):.1f})'


def results_page(folder):
    "The page of data/results: each method's runs as one row for each set of changes, means over seeds"
    files = sorted(folder.glob('*.jsonl'))
    lines = [json.loads(l) for p in files for l in p.read_text(encoding='utf-8').splitlines()]
    runs = [l for l in lines if l.get('kind', 'run') == 'run']
    aside = ('rivals=', 'baselines=', 'draws=')  # changes that leave the training as it is
    out = [
        '# Recorded runs',
        '',
        'The numbers of recorded runs: means over runs with different seeds, with the lowest and the highest, in '
        'percent. Each row is a method, what was changed in its recipe, and the number of seeds. *Chance* is the '
        'score of guessing. The lines that this page is made of are kept in `data/results`; [the page on data]'
        '(project/data.md) says where they come from, [the results](results.ipynb) what they '
        'mean.',
        '',
    ]
    for data in sorted({r['data'] for r in runs}):
        groups = {}
        for r in (r for r in runs if r['data'] == data):
            changed = ' '.join(c for c in r['changes'] if not c.startswith(aside))
            groups.setdefault((r['method'], r['recipe'], changed), []).append(r)
        plain_first = dict(sorted(groups.items(), key=lambda kv: bool(kv[0][2])))
        out += [f'## {data}', '', *result_tables(plain_first)]
    return '\n'.join(out)


def result_tables(groups):
    "The tables for the runs on one kind of data"

    def own(r):
        return {t['question']: t for t in r['numbers'].get('table', []) if t['backbone'] == r['method']}

    def label(key, rs):
        method, recipe, changes = key
        seeds = '1 seed' if len(rs) == 1 else f'{len(rs)} seeds'
        return ', '.join(filter(None, [f'`{method}` {recipe}', changes, seeds]))

    asked = {q: t for rs in groups.values() for r in rs for q, t in own(r).items()}
    if asked:
        head = [f'{q} ({t["metric"]})' for q, t in asked.items()]
        yield from row(['linear probes on frozen features', *head], head=True)
        yield from row(['chance', *(f'{t["chance"]:.1f}' for t in asked.values())])
        for key, rs in groups.items():
            values = [[own(r)[q]['value'] for r in rs if q in own(r)] for q in asked]
            yield from row([label(key, rs), *map(span, values)])
        yield ''
    worth = {k: rs for k, rs in groups.items() if all('wrong' in r['numbers'] for r in rs)}
    if worth:
        yield from row(['nats a word of held-out captions', 'given its photo', 'given another photo'], head=True)
        for k, rs in worth.items():
            mean = {w: sum(r['numbers'][w] for r in rs) / len(rs) for w in ('right', 'wrong')}
            yield from row([label(k, rs), f'{mean["right"]:.2f}', f'{mean["wrong"]:.2f}'])
        yield ''


def row(cells, head=False):
    yield '| ' + ' | '.join(cells) + ' |'
    if head:
        yield '|' + '---|' * len(cells)


def home(nbs, reading):
    "The tables of contents that the sidebar shows, by part"

    def numbered(n):
        k = posixpath.basename(n)[:2].lstrip('0')
        return f'{k}. {contents.headline(nbs[n])[0]} <{n}>' if k.isdigit() else n

    chapters = [numbered(n) for n in sorted(nbs) if n.startswith('course/')]
    tutorials = sorted((n for n in nbs if n.startswith('tutorials/')), key=lambda n: (n != 'tutorials/tour.ipynb', n))
    papers = [f'{contents.headline(nbs[n])[0]} <{n}>' for n in reading if n.endswith('90_paper.ipynb')]
    library = list(dict.fromkeys(f'{n.split("/")[0]}/index' if '/' in n else n for n in reading))
    parts = {
        'The course': chapters,
        'Tutorials': tutorials,
        'Papers and results': [*papers, 'results.ipynb', 'runs'],
        'The library, in reading order': library,
        'Reference': ['reference/index'],
        'The project': ['project/changelog', 'project/contributing', 'project/data'],
    }
    return '\n'.join(toctree(entries, caption, depth=3) for caption, entries in parts.items() if entries)


# ---------------------------------------------------------------- the source tree


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')


def generate(src):
    "Write everything that Sphinx reads below `src`; returns public name -> (page, anchor) of the reference"
    cfg = settings()
    blob = f'{cfg["git_url"]}/blob/{cfg["branch"]}'
    nbs = contents.read(ROOT)
    mods = docs_reference.modules(ROOT)
    reading = reading_order(nbs)
    pages = {
        **package_pages(nbs, reading),
        **reference_pages(mods, reading),
        **loose_folders(nbs),
        'runs.md': results_page(ROOT / 'data/results'),
    }
    files = {f: p for f, p in DOCS.items() if (ROOT / f).exists()}
    for f, p in files.items():
        if p.endswith('.md'):
            pages[p] = ''
    exports = {m.notebook: m.name for m in mods.values()}
    known = {*pages, *nbs}
    for f, p in files.items():
        if p.endswith('.md'):
            pages[p] = project_page(f, p, known, files, blob)
    for name, text in pages.items():
        write(src / name, text)
    for name, nb in nbs.items():

        def fix(md):
            return relink(md, name, known, files, blob)

        new = notebook(solutions.joined(nb, name), name, exports.get(name), fix)
        if name == 'index.ipynb':
            new['cells'].append(dict(cell_type='markdown', id='70c70c70', metadata={}, source=home(nbs, reading)))
        write(src / name, json.dumps(new))
        (src / 'notebooks' / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / 'nbs' / name, src / 'notebooks' / name)
    write(src / '_static/vlrep.css', (Path(__file__).parent / 'docs.css').read_text(encoding='utf-8'))
    return docs_reference.names(mods)


def loose_folders(nbs):
    "Pages for the folders of the course and the tutorials, which the home page's table of contents lists itself"
    pages = {}
    for f in ('course', 'tutorials'):
        items = [item(nbs, n) for n in sorted(nbs) if n.startswith(f'{f}/')]
        pages[f'{f}/index.md'] = '\n'.join(['---', 'orphan: true', '---', f'# {f.capitalize()}', '', *items, ''])
    return pages


def project_page(file, page, known, files, blob):
    "A Markdown file of the project as a page: its links are relative to where the file is"
    text = (ROOT / file).read_text(encoding='utf-8')
    return relink(text, posixpath.relpath(file, 'nbs'), known, files, blob, page)


# ---------------------------------------------------------------- Sphinx


def mathjax():
    "MathJax's single file, from the package that carries it"
    import mathjax

    found = Path(mathjax.__file__).parent / 'static' / 'mathjax' / 'es5' / MATH
    if not found.exists():
        raise environment.Failed(f'{found} is missing: remove {VENV.name} and run make docs again')
    return found


def configuration():
    "Everything that Sphinx is told"
    cfg = settings()
    return dict(
        project=cfg['title'],
        author=cfg['author'],
        copyright=cfg['copyright'],
        version=cfg['version'],
        release=cfg['version'],
        extensions=['myst_nb', 'sphinx.ext.mathjax'],
        root_doc='index',
        language='en',
        exclude_patterns=['notebooks/**'],
        smartquotes=False,
        nb_execution_mode='off',
        nb_merge_streams=True,
        nb_render_markdown_format='myst',
        nb_ipywidgets_js={},
        nb_code_prompt_show='Show the code',
        nb_code_prompt_hide='Hide the code',
        myst_enable_extensions=['dollarmath', 'amsmath'],
        myst_heading_anchors=5,
        suppress_warnings=['myst.header', 'misc.highlighting_failure', 'docutils', 'config.cache'],
        mathjax_path=f'mathjax/{MATH}',
        mathjax3_config=dict(options=dict(enableMenu=False)),
        python_maximum_signature_line_length=72,
        add_module_names=False,
        toc_object_entries=False,
        html_theme='furo',
        html_title=cfg['title'],
        html_static_path=['_static'],
        html_css_files=['vlrep.css'],
        html_copy_source=False,
        html_show_sourcelink=False,
        html_show_sphinx=False,
        html_theme_options=dict(navigation_with_keys=True),
    )


def link_names(names):
    "A handler for Sphinx that links `code` in the notebooks' prose that is a public name to the reference"
    from docutils import nodes

    def sure(text):
        return text.endswith('()') or re.search(r'[A-Z_]', text)

    def handler(app, doctree, docname):
        if docname.startswith('reference/'):
            return
        for n in list(doctree.findall(nodes.literal)):
            text = n.astext()
            to = names.get(text.removesuffix('()'))
            outer = n.parent
            while outer is not None and not isinstance(outer, (nodes.reference, nodes.title, nodes.pending)):
                outer = outer.parent
            if not to or not sure(text) or outer is not None:
                continue
            page = app.builder.get_relative_uri(docname, to[0])
            ref = nodes.reference('', '', internal=True, refuri=f'{page}#{to[1]}')
            n.replace_self(ref)
            ref.append(n)

    return handler


def short_sidebar(app, pagename, templatename, context, doctree):
    "The sidebar opens the part that a page belongs to, and no other: hundreds of links would slow each page down"
    whole = context.get('toctree')
    if whole:
        context['toctree'] = lambda **kw: whole(**{**kw, 'collapse': True})


def build():
    "Generate the source, run Sphinx, check what came out; exits with the problems if there are any"
    from sphinx.application import Sphinx

    start = time.time()
    src = SITE / 'source'
    html = SITE / 'html'
    shutil.rmtree(SITE, ignore_errors=True)
    names = generate(src)
    (src / '_static/mathjax').mkdir(parents=True)
    shutil.copy(mathjax(), src / '_static/mathjax' / MATH)
    app = Sphinx(
        src,
        None,
        html,
        SITE / 'doctrees',
        'html',
        confoverrides=configuration(),
        status=None,
        warningiserror=True,
        freshenv=True,
    )
    app.connect('doctree-resolved', link_names(names))
    app.connect('html-page-context', short_sidebar, priority=100)
    app.build(force_all=True)
    bad = list(docs_check.problems(html))
    if bad:
        sys.exit('\n'.join([*bad, f'{len(bad)} problems in {html}']))
    if app.statuscode:
        sys.exit(f'Sphinx warned, see above: exit code {app.statuscode}')
    n = len(list(html.rglob('*.html')))
    size = sum(p.stat().st_size for p in html.rglob('*') if p.is_file())
    print(
        f'{n} pages, {size / 1e6:.0f} MB in {time.time() - start:.0f} s; all links lead somewhere, and no page '
        'asks the '
        f'network for anything: open {(html / "index.html").relative_to(ROOT)}'
    )


def install(py):
    "What builds the site; neither torch nor the library itself"
    print('Building .venv-docs, once', flush=True)
    environment.pip(py, 'install', '--quiet', *settings()['docs_requirements'].split())


def main():
    with environment.alone():
        try:
            environment.build(VENV, install)
        except environment.Failed as e:
            sys.exit(
                f'{e}\nmake docs needs PyPI once, for the packages of docs_requirements in settings.ini; after '
                f'that it works without a network'
            )
    os.execv(VENV / 'bin' / 'python', [str(VENV / 'bin' / 'python'), '-W', 'ignore', __file__, 'build'])


if __name__ == '__main__':
    build() if sys.argv[1:] == ['build'] else main()
