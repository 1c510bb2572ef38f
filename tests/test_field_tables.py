"""Keys of cells, with their counts and ids; buckets of integers; random splits."""

import collections
import decimal
import random

import numpy as np
import pytest

from data_tools.click_logs import field_tables, row_parser, splitting, vocabulary
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import tallies
from data_tools.tables import csv_blocks
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import BUCKETS, CATEGORY, DATASETS, SCALED, Column


def test_missing_cells_are_not_counted_and_long_ones_by_their_text():
    keys = np.array([0, 7, row_parser.LONG, 0, 7, row_parser.LONG], np.uint64)
    counts = vocabulary.count(CATEGORY, keys, [b"x" * 9, b"y" * 9])
    assert (counts.keys.tolist(), counts.counts.tolist()) == ([7], [2])
    assert counts.long == {b"x" * 9: 1, b"y" * 9: 1}
    ends = vocabulary.count(SCALED, np.array([8, 0, 3, 5, 0], np.uint64), [])
    assert ends.keys.tolist() == [3, 8]


def test_counts_add_up_whatever_comes_in_whatever_order(monkeypatch):
    monkeypatch.setattr(tallies, "MERGE_AT", 10)
    draw = np.random.RandomState(0)
    parts = []
    for _ in range(30):
        keys = np.unique(draw.randint(1, 200, 20)).astype(np.uint64)
        parts.append(Counts(keys, draw.randint(1, 9, len(keys)), {b"long": 1}))
    expected = collections.Counter()
    for part in parts:
        expected.update(dict(zip(part.keys.tolist(), part.counts.tolist())))
    for order in (parts, parts[::-1]):
        (result,) = vocabulary.add_up([Column("C1", CATEGORY)], ([part] for part in order))
        assert result.keys.tolist() == sorted(expected)
        assert dict(zip(result.keys.tolist(), result.counts.tolist())) == expected
        assert result.long == {b"long": 30}


@pytest.mark.parametrize("n", [0, 1, 50])
def test_neighbours_of_known_keys_are_rare_and_empty_cells_missing(n):
    known = np.random.RandomState(0).permutation(np.arange(10, 10 + 3 * n, 3)).astype(np.uint64)
    field = feature_map.Field(
        Column("C1", CATEGORY), 10, dict(zip(known.tolist(), range(12, 12 + n)))
    )
    ids = lambda keys: (
        field_tables.encode(
            row_parser.Rows(None, None, keys.astype(np.uint64)[np.newaxis], {}), [field]
        )[0]
        .ids[:, 0]
        .tolist()
    )
    assert ids(known) == list(range(12, 12 + n))
    unknown = np.concatenate([known + np.uint64(1), known - np.uint64(1), [np.uint64(2**64 - 2)]])
    assert set(ids(unknown)) == {11}
    assert ids(np.zeros(3)) == [10, 10, 10]


def floor_of_squared_log(x):
    with decimal.localcontext() as context:
        context.prec = 50
        return int(decimal.Decimal(x).ln() ** 2)


def numbers_near_bounds():
    """Both sides of each bound between two buckets up to 10^12, small and random numbers."""
    with decimal.localcontext() as context:
        context.prec = 50
        bounds = [int(decimal.Decimal(b).sqrt().exp()) for b in range(2, 760)]
    draw = random.Random(0)
    return [
        *(b + d for b in bounds for d in (-1, 0, 1, 2)),
        *range(3, 200),
        *(draw.randrange(10**18) for _ in range(200)),
    ]


def test_a_bucket_is_the_floor_of_the_squared_logarithm():
    for x in numbers_near_bounds():
        if x > 2:
            assert feature_map.bucket(x) == floor_of_squared_log(x), x
    assert [feature_map.bucket_text(feature_map.bucket(x)) for x in (2, 1, 0, -1, -30)] == [
        "SP2", "SP1", "SP0", "SP-1", "SP-30",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [BUCKETS, CATEGORY])
def test_a_key_is_that_of_its_text(kind):
    cells = [str(x) for x in numbers_near_bounds()] + ["0", "-1", "2", "-999999999999"]
    file = csv_blocks.CsvFile(b"\t", 1, ("x",), (0,), False)
    text = "".join(f"{cell}\n" for cell in cells).encode()
    block = csv_blocks.LineBlock("a.tsv", text, 0, 0, None, file)
    rows = row_parser.parse(block, row_parser.Layout((), [Column("x", kind)]))
    texts = [feature_map.text_of(Column("x", kind), cell) for cell in cells]
    expected = [row_parser.key_of(kind, text) for text in texts]
    short = [row_parser.LONG if isinstance(key, bytes) else key for key in expected]
    assert rows.keys[0].tolist() == short
    assert row_parser.texts_of(kind, expected) == texts


def test_keys_are_in_the_order_of_their_texts():
    texts = sorted({f"{random.Random(i).randrange(10**8):x}"[: i % 8 + 1] for i in range(300)})
    keys = [row_parser.key_of(CATEGORY, text) for text in texts]
    assert keys == sorted(keys)


def test_draws_are_even_and_those_of_two_files_are_not_alike():
    starts = np.arange(0, 10**6, 100)
    split = splitting.Split((0.5, 0.25, 0.25))
    first, second = (splitting.split_of(split, name, starts) for name in ("d/a.tsv", "d/b.tsv"))
    assert np.array_equal(first, splitting.split_of(split, "other/a.tsv", starts))
    for found in (first, second):
        # Four standard deviations of 10,000 draws.
        assert np.abs(np.bincount(found) / 10**4 - [0.5, 0.25, 0.25]).max() < 0.02
    assert abs(np.mean(first == second) - (0.25 + 2 / 16)) < 0.02


def test_each_data_set_has_one_label():
    for columns in DATASETS.values():
        assert [column.kind for column in columns].count("label") == 1
