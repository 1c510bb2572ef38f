"""Each kind of raw column: blocks and single rows give the same ids, from text and from Parquet."""

import csv
import json
import random

import numpy as np
import pyarrow as pa
import pytest
from conftest import examples_of
from pyarrow import parquet

from data_tools import prepare
from data_tools.prepare import PrepareOptions
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records.raw import cells, feature_map

COLUMNS = [
    {"name": "clicked", "kind": "label", "positive": ["yes", "4"]},
    {"name": "w", "kind": "weight"},
    {"name": "who", "kind": "key"},
    {"name": "shop", "kind": "category", "min_count": 2},
    {"name": "user", "kind": "hash", "buckets": 1000},
    {"name": "age", "kind": "number"},
    {"name": "height", "kind": "number", "bounds": [-1, 0, 2.5]},
    {"name": "s", "kind": "number", "scale": "standard"},
    {"name": "m", "kind": "number", "scale": "minmax"},
    {"name": "r", "kind": "number", "scale": "robust"},
    {"name": "l", "kind": "number", "scale": "log"},
    {"name": "genres", "kind": "list", "separator": "|", "length": 3},
    {"name": "tags", "kind": "list", "separator": ",", "weights": ":"},
    {"name": "hour", "kind": "hour", "format": "iso", "timezone": "+05:30"},
    {"name": "weekday", "kind": "weekday", "format": "yyyymmdd"},
    {"name": "day", "kind": "date", "format": "unix"},
    {"name": "old", "kind": "buckets"},
    {"name": "older", "kind": "scaled"},
]
MISSING = ["NA", "\\N"]


def number(draw):
    x = draw.choice([0, 1, 5, draw.randint(-9, 99), draw.gauss(0, 10 ** draw.randint(-5, 9))])
    return draw.choice(["{}", "{:.3f}", "{:e}", "+{:.2f}", "{:.0f}."]).format(x).replace("+-", "-")


def row(draw):
    text = lambda: "".join(draw.choices("abAB 0é日_'", k=draw.choice([1, 2, 8, 9, 70, 200])))
    short = lambda: draw.choice("abcdefgh") + draw.choice(["", " ", "long name of it"])
    weighted = lambda: short() + draw.choice(["", f":{draw.random():.3g}", ":2"])
    found = [
        draw.choice(["yes", "no", "4", "4.0", "5"]),
        draw.choice(["1", "0.5", "2e0"]),
        text(),
        short(),
        text(),
        *(number(draw) for _ in range(6)),
        "|".join(short() for _ in range(draw.randrange(6))),
        ",".join(weighted() for _ in range(draw.randrange(4))),
        f"2014-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
        + draw.choice(["", "T03:04", " 23:59:59", "T10:00:00.5Z", "T10:00:00+02:00"]),
        f"2{draw.randint(0, 999):03d}{draw.randint(1, 12):02d}{draw.randint(1, 28):02d}",
        str(draw.randrange(2 * 10**9)),
        draw.choice(["5", "5.0", "-3", "123456789012345678", "1e3", "True"]),
        draw.choice(["5", "17.00", "-3", "40"]),
    ]
    return [
        x if i < 3 or draw.random() < 0.9 else draw.choice(["", *MISSING])
        for i, x in enumerate(found)
    ]


def write_table(folder, rows, columns=COLUMNS, **about):
    about = {"missing": MISSING, "separator": ",", "header": True, **about}
    (folder / "columns.json").write_text(json.dumps({"columns": columns, **about}))
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as f:
        csv.writer(f, lineterminator="\n").writerows([[c["name"] for c in columns], *rows])
    texts = list(zip(*rows)) if rows else [[] for _ in columns]
    table = pa.table({c["name"]: pa.array(x, pa.string()) for c, x in zip(columns, texts)})
    parquet.write_table(table, str(folder / "rows.parquet"))


def prepared(folder, name="rows.csv", out="out", **flags):
    flags = {"min_count": 2, "split": "1,0,0", "columns": str(folder / "columns.json"), **flags}
    prepare.prepare(PrepareOptions(str(folder / out), str(folder / name), **flags))
    files = datasets.find(str(folder / out / "train"), "data").files
    return [example for file in files for example in examples_of(file.path)]


def same(folder, rows):
    """Asserts that records are what feature_map.encode_fields makes of each row."""
    write_table(folder, rows)
    found = prepared(folder)
    ids = feature_map.load(str(folder / "out/feature_map.json"))
    for example, cells_of in zip(found, rows):
        fields = feature_map.encode_fields(ids, cells_of[3:])
        pairs = [pair for pairs in fields for pair in pairs]
        assert example["label"] == [float(cells_of[0] in ("yes", "4", "4.0"))]
        assert example["weight"] == [float(cells_of[1])]
        assert example.get("key", [b""]) == [cells_of[2].encode()]
        assert example["counts"] == list(map(len, fields)), cells_of
        assert example["ids"] == [i for i, _ in pairs], cells_of
        assert example["values"] == [np.float32(x) for _, x in pairs], cells_of
    assert len(found) == len(rows)
    data = datasets.find(str(folder / "out/train"), "data")
    assert data.multi_valued and data.weighted
    return found


def test_a_block_gives_what_single_rows_give_from_text_and_from_parquet(tmp_path):
    draw = random.Random(1)
    found = same(tmp_path, [row(draw) for _ in range(1500)])
    assert prepared(tmp_path, "rows.parquet", "parquet") == found
    maps = [tmp_path / out / "feature_map.json" for out in ("out", "parquet")]
    assert maps[0].read_text() == maps[1].read_text()
    known = dict(columns=None, min_count=None, split=None, feature_map=str(maps[0]))
    assert prepared(tmp_path, out="new", **known) == found


@pytest.mark.parametrize(
    "name, cell, sentence",
    [
        ("clicked", "", "label '' is missing"),
        ("w", "-1", "weight '-1' is not a finite number of at least 0"),
        ("age", "12 years", "age '12 years' is not a number of at most 18 digits"),
        ("age", "1234567890123456789", "is not a number of at most 18 digits"),
        ("s", "inf", "s 'inf' is not a number"),
        ("tags", "a:b", "tags 'a:b' holds a weight that is not a number"),
        ("tags", "a:-1e39", "tags 'a:-1e39' holds a weight that is not a number"),
        ("hour", "2014-13-01", "hour '2014-13-01' is not a time (YYYY-MM-DD"),
        ("hour", "9999-12-31T23:00", "hour '9999-12-31T23:00' is not a time (YYYY-MM-DD"),
        ("weekday", "2014101", "weekday '2014101' is not a time (YYYYMMDD)"),
        ("day", "-5", "day '-5' is not a time (seconds since 1970)"),
        ("old", "5.5", "old '5.5' is not an integer of at most 18 digits"),
    ],
)
def test_a_bad_cell_is_named(tmp_path, name, cell, sentence):
    draw = random.Random(2)
    rows = [row(draw) for _ in range(20)]
    rows[7][[c["name"] for c in COLUMNS].index(name)] = cell
    write_table(tmp_path, rows)
    for path, place in (("rows.csv", ":9: "), ("rows.parquet", ": row 7: ")):
        with pytest.raises(BadInput) as error:
            prepared(tmp_path, path)
        assert f"{tmp_path / path}{place}" in str(error.value) and sentence in str(error.value)


@pytest.mark.parametrize(
    "text, number, integer",
    [
        ("5", 5, 5), ("260.0", 260, 260), ("5.", 5, 5), (".5", 0.5, None), ("-0.0", 0, 0),
        ("1e3", 1000, 1000), ("+3", 3, 3), ("True", 1, 1), ("false", 0, 0), ("0x1", None, None),
        ("1_0", None, None), ("nan", None, None), ("inf", None, None), ("1e999", None, None),
        ("0.30000000000000004", 0.30000000000000004, None), ("", None, None), (" 5", None, None),
        ("1234567890123456789", None, None), ("0" * 30 + "12", 12, 12), ("5e", None, None),
        ("999999999999999999", 1e18, 999999999999999999),
    ],
)  # fmt: skip
def test_numbers_have_one_grammar(text, number, integer):
    assert cells.number(text) == number and cells.integer(text) == integer


@pytest.mark.parametrize("zone", ["+14:60", "+15:00", "-24:00", "+99:99"])
def test_a_zone_that_is_nowhere_is_none(zone):
    assert cells.moment(f"2024-01-01T10:00:00{zone}", "iso") is None
    with pytest.raises(ValueError, match="no offset from UTC"):
        cells.offset(zone)


def rows_of_splits(folder):
    """{split: the numbers of its rows}, which are their weights."""
    found = {}
    for split in ("train", "valid", "test"):
        files = datasets.find(str(folder / split), "data").files
        found[split] = [int(x["weight"][0]) for f in files for x in examples_of(f.path)]
    return found


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
@pytest.mark.parametrize("kind", ["ignored", "category"])
def test_rows_are_divided_by_a_cell(tmp_path, name, kind):
    draw = random.Random(3)
    kinds = {"y": "label", "user": kind, "at": "ignored", "w": "weight", "n": "category"}
    users = ["", *map(str, range(60))]
    cells_of = lambda i: ["01"[i % 2], draw.choice(users), str(draw.randrange(900)), str(i), "a"]
    rows = list(map(cells_of, range(2000)))
    write_table(tmp_path, rows, [{"name": x, "kind": kind} for x, kind in kinds.items()])
    flags = dict(split="0.7,0.2,0.1", min_count=1)
    prepared(tmp_path, name, split_by="hash:user", **flags)
    sides = {}
    for split, numbers in rows_of_splits(tmp_path / "out").items():
        for number in numbers:
            sides.setdefault(rows[number][1] or number, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())
    assert len({split for i in sides if isinstance(i, int) for split in sides[i]}) == 3
    prepared(tmp_path, name, "by_time", split_by="time:at", **flags)
    parts = rows_of_splits(tmp_path / "by_time").values()
    assert [len(part) for part in parts] == pytest.approx([1400, 400, 200], abs=10)
    times = [[int(rows[i][2]) for i in part] for part in parts]
    for number, wanted in ((1, 1400), (2, 1800)):  # the least that whole times have
        before = sorted(time for part in times[:number] for time in part)
        assert len(before) - before.count(before[-1]) < wanted <= len(before)
    assert max(times[0]) < min(times[1]) and max(times[1]) < min(times[2])
    assert sorted(i for part in parts for i in part) == list(range(2000))


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"split_by": "hash:x"}, "rows.csv: has no column x .* for --split_by=hash:x; its columns"),
        ({"split_by": "time"}, "--split_by=time is none of draw, order, time:COLUMN"),
        ({"split_by": "time:shop"}, "rows.csv:[0-9]+: shop '.*' is neither a number nor ISO 8601"),
        (
            {"output_format": "libsvm"},
            "--output_format=libsvm: lines hold no column of kind weight",
        ),
    ],
)
def test_what_a_split_by_a_cell_needs_is_said(tmp_path, flags, said):
    write_table(tmp_path, [row(random.Random(4)) for _ in range(9)])
    with pytest.raises(BadInput, match=said):
        prepared(tmp_path, split="0.8,0.1,0.1", **flags)
