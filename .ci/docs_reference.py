"""The reference of the documentation site, read from the exported modules without importing them

A parameter's comment stands behind it in the signature (docments), a field's behind the field. The pages are written
in reStructuredText, for Sphinx's Python domain: that gives every name an anchor, an entry in the index, and a hit in
search.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field


@dataclass
class Entry:
    "One name of the reference"

    kind: str  # function, class, method, classmethod, property, attribute or data
    name: str
    signature: str = ''  # '(a: int = 3) -> Tensor'
    doc: str = ''  # Its docstring
    params: list = field(default_factory=list)  # (names, comment) of the parameters that have a comment
    fields: list = field(default_factory=list)  # (name, type, default, comment) of a dataclass's fields
    returns: str = ''  # The comment behind the type that is returned
    members: list = field(default_factory=list)  # Entries of a class
    owner: str = ''  # The class that a patched method belongs to
    cell: str = ''  # Id of the cell that it is exported from


@dataclass
class Module:
    "What a page says of one module"

    name: str
    doc: str
    notebook: str  # Its path below nbs/
    entries: list


# ---------------------------------------------------------------- reading


def comments(src):
    "Line -> the comment at its end, with the lines below that continue it: comments alone, in the same column"
    # last: line and column of the comment before, and the line where it began
    out = {}
    last = None
    for t in tokenize.generate_tokens(io.StringIO(src).readline):
        if t.type != tokenize.COMMENT:
            continue
        line, column = t.start
        text = t.string.lstrip('#').strip()
        alone = not t.line[:column].strip()
        begin = last[2] if alone and last and last[:2] == (line - 1, column) else line
        out[begin] = f'{out[begin]} {text}' if begin != line else text
        last = line, column, begin
    return out


def annotation(node):
    "A type as source; one written as a string without its quotes"
    if node is None:
        return ''
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.unparse(ast.parse(node.value, mode='eval'))
        except SyntaxError:
            return ast.unparse(node)
    return ast.unparse(node)


def arguments(a):
    "(prefix, ast.arg, default) of each argument in the order of the signature, ('*', None, None) for a lone star"
    pos = a.posonlyargs + a.args
    for arg, default in zip(pos, [None] * (len(pos) - len(a.defaults)) + a.defaults):
        yield '', arg, default
    if a.vararg:
        yield '*', a.vararg, None
    elif a.kwonlyargs:
        yield '*', None, None
    for arg, default in zip(a.kwonlyargs, a.kw_defaults):
        yield '', arg, default
    if a.kwarg:
        yield '**', a.kwarg, None


def signature(f, skip=0):
    "Signature of a function, without its first `skip` arguments"

    def one(prefix, arg, default):
        if arg is None:
            return prefix
        kind = annotation(arg.annotation)
        s = prefix + arg.arg + (f': {kind}' if kind else '')
        return s if default is None else s + (' = ' if kind else '=') + ast.unparse(default)

    back = annotation(f.returns)
    return f'({", ".join(one(*a) for a in list(arguments(f.args))[skip:])})' + (f' -> {back}' if back else '')


def parameters(f, notes, skip=0):
    "([(names, comment)], comment of what is returned): arguments on one line share the comment at its end"
    rows = {}
    for prefix, arg, default in list(arguments(f.args))[skip:]:
        if arg is None:
            continue
        rows.setdefault((default or arg).end_lineno, []).append(prefix.replace('*', '') + arg.arg)
    last = f.returns.end_lineno if f.returns else None
    return [(names, notes[line]) for line, names in rows.items() if line in notes and line != last], notes.get(last, '')


PATCHED = dict(cls_method='classmethod', as_prop='property')  # an argument of fastcore's `patch` -> what it stands for


def decorators(f):
    "Names of its decorators, and of those that the arguments of `patch` stand for"
    names = set()
    for d in f.decorator_list:
        if isinstance(d, ast.Call):
            names |= {PATCHED[k.arg] for k in d.keywords if k.arg in PATCHED}
            d = d.func
        names.add(ast.unparse(d))
    return names


def function(f, notes, method=False):
    "Entry of a function or, with `method`, of a method"
    names = decorators(f)
    kind = 'function'
    if method:
        kind = next((k for k in ('property', 'classmethod', 'staticmethod') if k in names), 'method')
    skip = int(method and kind != 'staticmethod')
    params, back = parameters(f, notes, skip)
    shown = signature(f, skip) if kind != 'property' else annotation(f.returns)
    return Entry(kind, f.name, shown, ast.get_docstring(f) or '', params, returns=back)


def fields(c, notes):
    "(name, type, default, comment) of the fields that a class declares"
    for n in c.body:
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.target.id[0] != '_':
            value = '' if n.value is None else ast.unparse(n.value)
            yield n.target.id, annotation(n.annotation), value, notes.get(n.end_lineno, '')


def klass(c, notes):
    "Entry of a class: its __init__, its fields, its public methods that have a docstring or commented parameters"
    entry = Entry('class', c.name, doc=ast.get_docstring(c) or '')
    for f in (n for n in c.body if isinstance(n, ast.FunctionDef)):
        if f.name == '__init__':
            entry.signature = signature(f, 1)
            entry.params, _ = parameters(f, notes, 1)
            entry.doc = '\n\n'.join(filter(None, [entry.doc, ast.get_docstring(f)]))
        elif f.name[0] != '_':
            m = function(f, notes, method=True)
            if m.doc or m.params:
                entry.members.append(m)
    if any('dataclass' in d for d in decorators(c)):
        entry.fields = list(fields(c, notes))
    return entry


def patched(f):
    "The class that a function is patched into by fastcore's `patch`, or None"
    if not {'patch'} & decorators(f) or not f.args.args:
        return None
    return annotation(f.args.args[0].annotation) or None


def cells(src):
    "Line -> id of the notebook cell that it comes from, as nbdev writes it"
    out = {}
    here = ''
    for i, line in enumerate(src.splitlines(), 1):
        if m := re.match(r'# %% \S+ #(\w+)$', line):
            here = m[1]
        out[i] = here
    return out


def module(name, src):
    "What there is to say of module `name` with the text `src`"
    tree = ast.parse(src)
    notes = comments(src)
    home = cells(src)
    assigned = {getattr(n.targets[0], 'id', ''): n.value for n in reversed(tree.body) if isinstance(n, ast.Assign)}
    public = ast.literal_eval(assigned['__all__']) if '__all__' in assigned else []
    m = re.search(r'File to edit: (?:\.\./)*nbs/(\S+\.ipynb)', src)
    found = Module(name, ast.get_docstring(tree) or '', m[1] if m else '', [])
    for n in tree.body:
        entry = None
        if isinstance(n, ast.FunctionDef) and (owner := patched(n)):
            if n.name[0] != '_' and not n.name.startswith(('before_', 'after_')):
                entry = function(n, notes, method=True)
                entry.owner = owner
        elif isinstance(n, ast.FunctionDef) and n.name in public:
            entry = function(n, notes)
        elif isinstance(n, ast.ClassDef) and n.name in public:
            entry = klass(n, notes)
        elif isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') in public:
            entry = Entry('data', n.targets[0].id, ast.unparse(n.value), notes.get(n.end_lineno, ''))
        if entry:
            entry.cell = home[n.lineno]
            found.entries.append(entry)
    return found


def modules(root):
    "Name -> Module of every exported module; patched methods stand with their class where it is one of the same module"
    out = {}
    for p in sorted((root / 'vlrep').rglob('*.py')):
        name = '.'.join(p.relative_to(root).with_suffix('').parts)
        if p.name[0] != '_':
            out[name] = module(name, p.read_text(encoding='utf-8'))
    for m in out.values():
        own = {e.name: e for e in m.entries if e.kind == 'class'}
        for e in [e for e in m.entries if e.owner in own]:
            own[e.owner].members.append(e)
            m.entries.remove(e)
    return out


def names(mods):
    "Public name -> (page, anchor) of the reference"
    found = [(m.name, e.name) for m in mods.values() for e in m.entries if not e.owner]
    return {name: (f'reference/{m}', f'{m}.{name}') for m, name in found}


# ---------------------------------------------------------------- writing


def rst(text):
    "Plain text with `code` in it as reStructuredText"

    def plain(s):
        return re.sub(r'([\\*_|`<>:\[\]])', r'\\\1', s)

    parts = re.split(r'(`+)(?!\s)(.+?)\1', text)
    out = [plain(parts[0])]
    for code, rest in zip(parts[2::3], parts[3::3]):
        out += [f'\\ ``{code}``\\ ', plain(rest)]
    return ''.join(out).removesuffix('\\ ')  # at a line's end it would escape the line break


def paragraphs(doc):
    "A docstring as lines of reStructuredText"
    for part in re.split(r'\n\s*\n', doc.strip()):
        lines = [l.strip() for l in part.splitlines()]
        if all(l.startswith('- ') for l in lines):
            yield from (f'- {rst(l[2:])}' for l in lines)
        else:
            yield rst(' '.join(lines))
        yield ''


def notes_of(e):
    "The field list of an entry: parameters, fields, what is returned"
    for who, note in e.params:
        yield f':param {",".join(who)}: {rst(note)}'  # a space would make the first a type
    for name, kind, default, note in e.fields:
        shown = f'``{kind}{f" = {default}" if default else ""}``'
        yield f':param {name}: {shown}{" " + rst(note) if note else ""}'
    if e.returns:
        yield f':returns: {rst(e.returns)}'


def entry_lines(e, module, indent=''):
    "An entry as lines of reStructuredText"
    kind = 'method' if e.kind in ('classmethod', 'staticmethod') else e.kind
    owned = f'{e.owner.rsplit(".", 1)[-1]}.' if e.owner and not indent else ''
    shown = '' if kind in ('property', 'data') else e.signature
    out = [f'.. py:{kind}:: {owned}{e.name}{shown}', f'   :module: {module}']
    if e.kind in ('classmethod', 'staticmethod'):
        out.append(f'   :{e.kind}:')
    if kind == 'data' and len(e.signature) <= 100:
        out.append(f'   :value: {e.signature}')
    if kind == 'property' and e.signature:
        out.append(f'   :type: {e.signature}')
    out += ['', *(f'   {l}'.rstrip() for l in [*paragraphs(e.doc), *notes_of(e), ''])]
    for m in e.members:
        out += [*entry_lines(m, module, '   '), '']
    return [f'{indent}{l}'.rstrip() for l in out]


def page(m):
    "The page of a module"
    title = m.name
    out = [':orphan:', '', title, '=' * len(title), '', *paragraphs(m.doc)]
    shown = f'Explained, shown and checked in :doc:`/{m.notebook.removesuffix(".ipynb")}` · ' if m.notebook else ''
    out += ['.. container:: about-notebook', '', f'   {shown}:doc:`/reference/index`', '']
    for e in m.entries:
        out += [*entry_lines(e, m.name), '']
    return '\n'.join(out)
