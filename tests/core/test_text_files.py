"Properties that hold for all inputs: hypothesis looks for one that breaks them, with the same draws in every run"

import csv
import io
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlrep.core.fields import corrupt_limit
from vlrep.core.files import parse_json, text_encoding
from vlrep.core.text_files import json_lines, raw_lines, table_rows, text_lines


def prop(examples=100):
    "So many draws, the same ones each time; a slow machine is no failure"
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


TEXT = st.text(st.characters(exclude_categories=('Cs',), exclude_characters='\0'), max_size=30)
ENCODINGS = st.sampled_from(['utf-8', 'utf-8-sig', 'utf-16', 'utf-32'])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)

# ---------------------------------------------------------------- text that other programs wrote


@prop(150)
@given(
    rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6), separator=st.sampled_from(',\t;|'), encoding=ENCODINGS
)
def test_tables_are_read_as_they_were_written(tmp_path, rows, separator, encoding):
    "Whatever a caption holds: separators, quotes, line breaks, U+2028, marks"
    text = io.StringIO(newline='')
    writer = csv.writer(text, delimiter=separator, lineterminator='\r\n')
    writer.writerow(['path', 'caption'])
    writer.writerows(rows)
    path = tmp_path / 'table.csv'
    path.write_bytes(text.getvalue().encode(encoding))
    read = [(r['path'], r['caption']) for _, r in table_rows(path, dict(path=('path',), caption=('caption',)))]
    assert read == [r for r in rows if any(c.strip() for c in r)]


@prop(150)
@given(values=st.lists(JSON, max_size=5), encoding=ENCODINGS, end=st.sampled_from(['\n', '\r\n']), ascii_=st.booleans())
def test_json_lines_are_read_as_they_were_written(tmp_path, values, encoding, end, ascii_):
    path = tmp_path / 'lines.jsonl'
    path.write_bytes(''.join(json.dumps(v, ensure_ascii=ascii_) + end for v in values).encode(encoding))
    assert list(json_lines(path)) == list(enumerate(values, 1))


@prop()
@given(
    lines=st.lists(
        st.text(st.characters(exclude_categories=('Cs',), exclude_characters='\n\r'), max_size=20), max_size=6
    ),
    encoding=ENCODINGS,
)
def test_lines_have_the_numbers_that_an_editor_shows(tmp_path, lines, encoding):
    path = tmp_path / 'lines.txt'
    path.write_bytes('\n'.join(lines).encode(encoding))
    assert [l.rstrip('\n') for l in raw_lines(path)] == (lines if lines and lines[-1] else lines[:-1])
    assert all(lines[n - 1].strip() == text for n, text in text_lines(path))


@prop(200)
@given(data=st.binary(max_size=40) | JSON.map(lambda v: json.dumps(v).encode()))
def test_bytes_are_json_or_a_value_error(data):
    try:
        value = parse_json(data)
    except ValueError:
        return
    encoding, mark = text_encoding(data[:4])
    assert repr(value) == repr(json.loads(data[len(mark) :].decode(encoding)))


@prop(200)
@given(data=st.binary(max_size=60))
def test_bytes_are_lines_or_a_value_error(tmp_path, data):
    "A file of anything: its lines, or an error that names it"
    path = tmp_path / 'any.txt'
    path.write_bytes(data)
    for read in (raw_lines, json_lines, lambda p: table_rows(p, dict(path=('path',)), optional=('path',))):
        try:
            list(read(path))
        except ValueError as e:
            assert 'any.txt' in str(e)


@prop(200)
@given(n=st.integers(0, 10**6), most=st.none() | st.integers(-5, 10**7) | st.floats() | TEXT)
def test_limit_of_damage_is_a_number_or_a_value_error(n, most):
    try:
        limit = corrupt_limit(n, most)
    except ValueError as e:
        assert 'max_corrupt' in str(e)
    else:
        assert isinstance(limit, int) and limit >= 0
