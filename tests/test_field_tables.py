"""Keys of cells, with their counts and ids; buckets of integers; random splits."""

import collections
import decimal
import random

import numpy as np
import pytest

from data_tools.click_logs import row_parser, splitting, vocabulary
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import tallies
from data_tools.tables import csv_blocks
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import BUCKETS, CATEGORY, Column


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


def test_draws_are_even_and_those_of_two_files_are_not_alike():
    starts = np.arange(0, 10**6, 100)
    split = splitting.Split((0.5, 0.25, 0.25))
    first, second = (splitting.split_of(split, name, starts) for name in ("d/a.tsv", "d/b.tsv"))
    assert np.array_equal(first, splitting.split_of(split, "other/a.tsv", starts))
    for found in (first, second):
        # Four standard deviations of 10,000 draws.
        assert np.abs(np.bincount(found) / 10**4 - [0.5, 0.25, 0.25]).max() < 0.02
    assert abs(np.mean(first == second) - (0.25 + 2 / 16)) < 0.02
