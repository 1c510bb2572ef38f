"""csv_blocks.py: a quoted cell is the text between its quotes, at full speed as in csv."""

import csv
import io
import random

import pytest

from data_tools.click_logs import row_parser, slices
from data_tools.click_logs.column_kinds import Column
from data_tools.click_logs.row_parser import Layout
from data_tools.common.line_blocks import LineRange
from data_tools.prepare_criteo import Options
from data_tools.tables import csv_blocks
from data_tools.tables.csv_blocks import CsvFile, LinePart
from deepfm.records.bad_record import BadRecord

COLUMNS = [Column("x", "category"), Column("y", "integer")._replace(kind="scaled")]
OPTIONS = Options(output_dir="out", dataset="criteo", integers="buckets")
LAYOUT = Layout(0, True, COLUMNS)
COMMA = CsvFile(b",", 3, ("clicked", "x", "y"), (0, 1, 2), False, True)


def by_csv(text, delimiter=","):
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blocks_and_lines_are_those_of_pythons_csv(delimiter, end):
    draw = random.Random(0)
    cells = ["", "a", "ab c", "7", 'it"s', "ä\r", '""'[:0]]
    rows = [[draw.choice(cells) for _ in range(4)] for _ in range(500)]
    quote = lambda cell: f'"{cell}"' if draw.random() < 0.5 and '"' not in cell else cell
    text = "".join(delimiter.join(map(quote, row)) + end for row in rows)
    found = csv_blocks.unquote(text.encode(), delimiter.encode())
    plain = "".join(delimiter.join(row) + end for row in rows)
    assert found.decode() == plain
    for line, row in zip(text.split(end), rows):
        found, reason = csv_blocks.unquote_line(line.encode(), delimiter.encode())
        assert (found.decode().split(delimiter), reason) == (row, None)


def test_text_without_quoted_cells_is_handed_on_as_it_is():
    for text in (b"a,b\n", b'a"b",c"\n'):
        assert csv_blocks.unquote(text, b",") is text


@pytest.mark.parametrize(
    "line, cells",
    [('"a ""b""",c', ['a "b"', "c"]), ('"""",""', ['"', ""]), ('x,"""a"""', ["x", '"a"'])],
)
def test_two_quotes_in_a_quoted_cell_are_one(line, cells):
    assert by_csv(line) == [cells]
    assert csv_blocks.unquote(f"{line}\n".encode(), b",") is None
    found, reason = csv_blocks.unquote_line(line.encode(), b",")
    assert (found.decode().split(","), reason) == (cells, None)


def write(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    return LinePart(str(path), LineRange(str(path)), COMMA)


def read(part):
    return [block for _, block in slices.read_rows(part, LAYOUT)]


def keys(cell):
    return row_parser.key_of("category", cell.encode())


@pytest.mark.parametrize("other", ["", '1,"say ""it""",3\n', "\n"], ids=["fast", "slow", "blank"])
def test_quotes_are_no_part_of_a_category_and_two_are_a_missing_one(tmp_path, other):
    text = f'"1","x","5"\n0,"",""\n1,x,\n{other}0,"seventeen letters","6"\n'
    (rows,) = read(write(tmp_path, text))
    n = 4 + (len(other) > 1)
    assert len(rows.labels) == n and rows.labels[0] == 1
    assert rows.keys[0][:3].tolist() == [keys("x"), row_parser.MISSING, keys("x")]
    assert (rows.keys[1] == row_parser.MISSING).tolist()[:3] == [False, True, True]
    (where, texts) = rows.long[0]
    assert (where[-1], texts[-1]) == (n - 1, b"seventeen letters")
    if n == 5:
        assert (where[0], texts[0]) == (3, b'say "it"') or rows.keys[0][3] == keys('say "it"')
    starts, at = [], 0
    for line in text.splitlines(True):
        starts += [at] if line.strip() else []
        at += len(line)
    assert rows.starts.tolist() == starts  # by which rows are drawn for the splits


@pytest.mark.parametrize(
    "line, words",
    [
        ('1,"a,b",3', "a quoted cell holds the delimiter, which is not supported: '1,"),
        ('1,"a', "a quoted cell does not end in its line"),
        ('1,"a"b,3', "a quoted cell goes on after its closing quote"),
        ('1,"x","1.5"', "y '1.5' is not an integer"),
        ('"2",x,1', "label '2' is not 0 or 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_file_and_line(tmp_path, line, words):
    part = write(tmp_path, f'1,"a",3\n{line}\n0,b,4\n')
    bad, rows = read(part)
    assert isinstance(bad, BadRecord) and str(bad).startswith(f"{part.path}:2: {words}")
    assert rows.keys[0].tolist() == [keys("a"), keys("b")]


def test_a_quoted_header_names_the_columns(tmp_path):
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    path = tmp_path / "a.csv"
    path.write_text("\ufeff" + ",".join(f'"{name}"' for name in reversed(names)) + "\n")
    layout, file = slices.read_layout(str(path), True, OPTIONS)
    assert (file.header, layout.label, file.places[:2]) == (True, 0, (39, 38))
