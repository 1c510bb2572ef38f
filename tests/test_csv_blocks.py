"""csv_blocks.py: a quoted cell is the text between its quotes; what numbers the cells hold."""

import csv
import io
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_tools.click_logs import row_parser, slices
from data_tools.click_logs.row_parser import Layout
from data_tools.tables import blocks, csv_blocks, layouts, row_checks
from data_tools.tables.csv_blocks import CsvFile, LinePart
from data_tools.tables.layouts import Field
from deepfm.records.raw import cells
from deepfm.records.raw.column_kinds import Column
from deepfm.records.schema import BadRecord, Schema
from deepfm.records.text_blocks import LineRange

COLUMNS = [Column("x", "category"), Column("y", "integer")._replace(kind="scaled")]
LAYOUT = Layout((Column("clicked", "label"),), COLUMNS)
COMMA = CsvFile(b",", 3, ("clicked", "x", "y"), (0, 1, 2), False, True)


def by_csv(text, delimiter=","):
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blocks_and_lines_are_those_of_pythons_csv(delimiter, end):
    draw = random.Random(0)
    some = ["", "a", "ab c", "7", 'it"s', "ä\r", '""'[:0]]
    rows = [[draw.choice(some) for _ in range(4)] for _ in range(500)]
    quote = lambda cell: f'"{cell}"' if draw.random() < 0.5 and '"' not in cell else cell
    text = "".join(delimiter.join(map(quote, row)) + end for row in rows)
    found = csv_blocks.unquote(text.encode(), delimiter.encode())
    plain = "".join(delimiter.join(row) + end for row in rows)
    assert found.decode() == plain
    for line, row in zip(text.split(end), rows):
        found = csv_blocks.split_line(line.encode(), delimiter.encode())
        assert found == ([cell.encode() for cell in row], None)


def test_text_without_quoted_cells_is_handed_on_as_it_is():
    for text in (b"a,b\n", b'a"b",c"\n'):
        assert csv_blocks.unquote(text, b",") is text


@pytest.mark.parametrize(
    "line, cells",
    [
        ('"a ""b""",c', ['a "b"', "c"]),
        ('"""",""', ['"', ""]),
        ('x,"""a"""', ["x", '"a"']),
        ('"a,b",c', ["a,b", "c"]),
    ],
)
def test_two_quotes_in_a_quoted_cell_are_one(line, cells):
    assert by_csv(line) == [cells]
    assert csv_blocks.unquote(f"{line}\n".encode(), b",") is None
    found = csv_blocks.split_line(line.encode(), b",")
    assert found == ([cell.encode() for cell in cells], None)


def write(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    return LinePart(str(path), LineRange(str(path)), COMMA)


def read(part):
    return [block for _, block in slices.read_rows(part, LAYOUT)]


def keys(cell):
    return row_parser.key_of("category", cell)


@pytest.mark.parametrize(
    "other", ["", '1,"say ""it""",3\n', '1,"a,b",3\n', "\n"], ids=["fast", "slow", "comma", "blank"]
)
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
        assert rows.keys[0][3] in (keys('say "it"'), keys("a,b"))
    starts, at = [], 0
    for line in text.splitlines(True):
        starts += [at] if line.strip() else []
        at += len(line)
    assert rows.starts.tolist() == starts  # by which rows are drawn for the splits


@pytest.mark.parametrize(
    "line, words",
    [
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


def encoded(part):
    reader = row_checks.RowReader(layouts.Layout("clicked", fields=(Field("x"), Field("y"))))
    for _, block in reader.read(part):
        yield from reader.records(block, Schema(2))


@pytest.mark.parametrize("reader", [read, encoded])
def test_a_bad_cell_keeps_its_line_behind_a_mark_blank_lines_and_quoted_newlines(tmp_path, reader):
    text = '\ufeff"1",4,5\r\n\r\n\n1,"two\nlines",5\n0,"6",7\r\n\n0,8,bad\n'
    *bad, rows = reader(write(tmp_path, text))
    assert [record.place for record in bad] == [":4", ":5", ":8"]
    words = ("a quoted cell does not end", "expected 3 columns", "'bad' is not an integer")
    assert all(word in record.reason for word, record in zip(words, bad))
    assert rows.labels.tolist() == [1, 0]
    if reader is read:
        assert rows.starts.tolist() == [0, text.index('0,"6"') - 1]  # without the mark


def number_like():
    return st.one_of(
        st.floats(allow_nan=False, allow_infinity=False).map(repr),
        st.from_regex(r"\A[-+]?[0-9]{0,12}\.?[0-9]{0,20}([eE][-+]?[0-9]{1,3})?\Z"),
        st.sampled_from(
            ["-0", "+1", "5.0", "0" * 40 + "7", "1e-400", "16777217", "True", "9" * 18]
        ),
    )


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(number_like(), min_size=1, max_size=8))
@example(["9" * 18, "1" * 19])
def test_numbers_of_a_block_are_those_of_its_cells(texts):
    ends = np.cumsum([len(text) for text in texts])
    places = np.append(0, ends[:-1]), ends
    for read, of_cell in ((blocks.numbers, cells.number), (blocks.integers, cells.integer)):
        expected = list(map(of_cell, texts))
        if None in expected:
            with pytest.raises(blocks.BadRows):
                read("".join(texts).encode(), *places)
        else:
            assert read("".join(texts).encode(), *places).tolist() == expected
