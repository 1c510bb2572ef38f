"""prepare --columns: any table that a JSON file describes, by loops over its cells."""

import collections
import csv
import json
import random

import pytest
from conftest import ROOT, examples_of, run_tool

from data_tools import prepare
from data_tools.prepare import PrepareOptions
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records.raw import column_kinds, feature_map

KINDS = {
    "session": "ignored",
    "Clicked": "label",
    "age": "buckets",
    "when": "hour",
    "price": "scaled",
    "stock": "integer",
    "article": "category",
}


def describe(folder, kinds=KINDS, name="shop.json", **more):
    more = {"missing": [], **more}
    columns = [{"name": n, "kind": kind} for n, kind in kinds.items()]
    (folder / name).write_text(json.dumps({"columns": columns, **more}))
    return str(folder / name)


def cells(n=300, seed=0):
    draw = random.Random(seed)
    for i in range(n):
        yield [
            f"s{i}",
            str(draw.randint(0, 1)),
            draw.choice(["", "17", "40", "2"]),
            f"141021{draw.randrange(24):02d}",
            draw.choice(["", str(draw.randrange(-5, 1000))]),
            str(draw.randrange(4)),
            draw.choice(["", "shoe", "a longer name of an article", "日本語"]) + str(i % 3),
        ]


def write_rows(path, rows, header=None, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, delimiter=delimiter, lineterminator="\n")
        writer.writerows([header, *rows] if header else rows)
    return str(path)


def prepared(tmp_path, path, output="out", **options):
    options = {"min_count": 1, "split": "1,0,0", "input": path, **options}
    prepare.prepare(PrepareOptions(output_dir=str(tmp_path / output), **options))
    return tmp_path / output


def records_of(folder):
    """[(label, ids, values)] in the order of the files."""
    files = datasets.find(str(folder), "data").files
    rows = [row for file in files for row in examples_of(file.path)]
    return [(row["label"], row["ids"], row["values"]) for row in rows]


def test_a_table_has_the_ids_of_its_columns_by_their_kinds(tmp_path):
    rows = list(cells())
    out = prepared(tmp_path, write_rows(tmp_path / "a.csv", rows), columns=describe(tmp_path))
    made = json.loads((out / "feature_map.json").read_text())
    assert made["dataset"] == "shop"
    assert made["columns"] == [{"name": n, "kind": k} for n, k in KINDS.items()]
    kinds = [("age", "buckets"), ("when", "hour"), ("price", "scaled"), ("stock", "buckets")]
    assert [(f["name"], f["kind"]) for f in made["fields"]] == [*kinds, ("article", "category")]
    counts = collections.Counter(row[6] for row in rows if row[6])
    ranked = sorted(counts, key=lambda text: (-counts[text], text.encode()))
    assert list(made["fields"][4]["vocabulary"]) == ranked
    assert set(made["fields"][1]["vocabulary"]) == {row[3][-2:] for row in rows}
    prices = [int(row[4]) for row in rows if row[4]]
    assert (made["fields"][2]["low"], made["fields"][2]["high"]) == (min(prices), max(prices))
    loaded = feature_map.load(str(out / "feature_map.json"))
    expected = [([float(row[1])], *feature_map.encode_row(loaded, row[2:])) for row in rows]
    assert records_of(out / "train") == [(a, b, pytest.approx(c)) for a, b, c in expected]


def test_a_header_places_the_columns_and_columns_that_are_not_named_are_passed_over(tmp_path):
    rows, names = list(cells()), list(KINDS)
    table = describe(tmp_path)
    plain = prepared(tmp_path, write_rows(tmp_path / "a.csv", rows), "plain", columns=table)
    order = [6, 2, 1, 5, 4, 3]  # without the session
    turned = [["x", *(row[i] for i in order)] for row in rows]
    header = ["other", *(names[i].upper() for i in order)]
    path = write_rows(tmp_path / "b.tsv", turned, header, "\t")
    named = prepared(tmp_path, path, "named", columns=table)
    assert records_of(named / "train") == records_of(plain / "train")
    maps = [(folder / "feature_map.json").read_text() for folder in (plain, named)]
    assert maps[0] == maps[1]


def test_a_map_is_for_its_columns_alone(tmp_path):
    path = write_rows(tmp_path / "a.csv", cells())
    out = prepared(tmp_path, path, columns=describe(tmp_path))
    known = dict(feature_map=str(out / "feature_map.json"), min_count=None)
    other = describe(tmp_path, {**KINDS, "age": "scaled"}, "other.json")
    with pytest.raises(BadInput, match="other.json: .* is for other columns; leave --columns out"):
        prepared(tmp_path, path, "x", columns=other, **known)
    with pytest.raises(BadInput, match="--dataset=avazu, but .* is for the table shop"):
        prepared(tmp_path, path, "x", dataset="avazu", **known)
    assert prepared(tmp_path, path, "y", columns=describe(tmp_path), **known)


@pytest.mark.parametrize("scale", ["standard", "robust", "minmax", "log"])
@pytest.mark.parametrize("low, high", [("0.3", "9.99"), ("-9.99", "-0.3"), ("0.1", "9.999")])
def test_the_range_of_a_scaled_number_contains_all_training_rows(tmp_path, scale, low, high):
    columns = [{"name": "y", "kind": "label"}, {"name": "n", "kind": "number", "scale": scale}]
    (tmp_path / "t.json").write_text(json.dumps({"columns": columns}))
    path = write_rows(tmp_path / "a.csv", [[str(i % 2), (low, high, "")[i % 3]] for i in range(30)])
    out = prepared(tmp_path, path, columns=str(tmp_path / "t.json"))
    (field,) = feature_map.load(str(out / "feature_map.json")).fields
    assert field.low <= float(low) and float(high) <= field.high
    assert (field.low, field.high) == pytest.approx((float(low), float(high)), rel=2**-16)
    described = json.loads((out / "train" / "dataset.json").read_text())
    assert described["unknown_shares"] == {"n": 0}


def test_ids_beside_raw_columns_get_ids_of_their_own(tmp_path):
    table = describe(
        tmp_path, {"clicked": "label", "shop": "category", "user": "id", "n": "scaled"}
    )
    rows = [["1", "x", "1000007", "3"], ["0", "y", "1000009", "9"], ["1", "x", "", "9"]]
    out = prepared(tmp_path, write_rows(tmp_path / "a.csv", rows), columns=table)
    expected = [[3, 7, 11], [4, 9, 11], [3, 5, 11]]  # 5 to 9 are the user's: missing, rare, 3 ids
    assert [ids for _, ids, _ in records_of(out / "train")] == expected
    new = write_rows(tmp_path / "b.csv", [["1", "x", "1000006", "3"], ["1", "x", "1000008", "3"]])
    known = dict(feature_map=str(out / "feature_map.json"), min_count=None)
    again = prepared(tmp_path, new, "again", **known)
    assert [ids[1] for _, ids, _ in records_of(again / "train")] == [6, 8]
    described = json.loads((again / "train" / "dataset.json").read_text())
    assert described["unknown_shares"] == {"shop": 0, "user": 0.5, "n": 0}
    loaded = feature_map.load(known["feature_map"])
    assert [feature_map.encode_row(loaded, ["x", x, 3])[0][1] for x in (7, 1000008)] == [6, 8]
    write_rows(tmp_path / "a.csv", [*rows, ["1", "x", "9" * 18, "3"]])
    with pytest.raises(BadInput, match="column user: its ids, 1000007 to 9+, are too far apart"):
        prepared(tmp_path, str(tmp_path / "a.csv"), "far", columns=table)


def test_a_bad_row_of_a_table_is_told_as_that_of_a_click_log(tmp_path):
    rows = list(cells(20))
    rows[7][2] = "old"
    path, table = write_rows(tmp_path / "a.csv", rows), describe(tmp_path)
    with pytest.raises(BadInput, match=r"a\.csv:8: age 'old' is not an integer of at most 18"):
        prepared(tmp_path, path, columns=table)
    rows[7] = rows[7][:-1]
    write_rows(tmp_path / "a.csv", rows)
    with pytest.raises(BadInput, match=r"a\.csv:8: expected 7 columns \(see .*--columns.*found 6"):
        prepared(tmp_path, path, columns=table)


COLUMN = {"name": "x", "kind": "category"}
LABEL = {"name": "y", "kind": "label"}


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "Expecting property name"),
        ("[]", 'it has no list "columns", such as [{"name": "x"'),
        ({"columns": 1}, 'it has no list "columns"'),
        ({"columns": [COLUMN, LABEL], "colour": 1}, '"colour" is not known; leave it out'),
        ({"columns": [COLUMN, LABEL], "name": "criteo"}, 'try "name": "my_criteo"'),
        ({"columns": [LABEL, {"kind": "label"}]}, "column 2 has no name; try"),
        ({"columns": [LABEL, 5]}, "column 2 has no name; try"),
        ({"columns": [LABEL, {"name": " x"}]}, "column 2 has no name; try"),
        (
            {"columns": [LABEL, {"name": "x", "kind": "categorical"}]},
            f'column x is of kind "categorical", not one of {", ".join(column_kinds.KINDS)}; try '
            '"kind": "category"',
        ),
        ({"columns": [LABEL, {"name": "x"}]}, "column x is of kind null"),
        ({"columns": [LABEL, {**COLUMN, "size": 5}]}, 'column x has "size", which is not known'),
        ({"columns": [COLUMN]}, 'must be of kind "label", but none is; add it'),
        (
            {"columns": [LABEL, COLUMN, {"name": "z", "kind": "label"}]},
            'must be of kind "label", but y and z are; give z kind "ignored"',
        ),
        (
            {"columns": [LABEL, {"name": "x", "kind": "value", "id": 1}]},
            "which libsvm_to_tfrecord takes",
        ),
        ({"columns": [LABEL]}, 'no column becomes a field; give one kind "category"'),
        (
            {"columns": [COLUMN, LABEL, {**COLUMN, "name": "X"}]},
            'columns 1 and 3 are both called X (upper and lower case are the same); try "X_3"',
        ),
    ],
)
def test_a_file_that_describes_no_table_is_refused(tmp_path, content, words):
    path = tmp_path / "columns.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(BadInput) as error:
        prepared(tmp_path, "in.csv", columns=str(path))
    assert str(error.value).startswith(f"--columns: {path}: ")
    assert words in str(error.value)


def test_each_kind_is_described_and_each_word_of_the_table_of_docs_is_a_kind():
    text = (ROOT / "docs" / "data.md").read_text()
    rows = [line.split(" | ")[0] for line in text.split("\n") if line.startswith("| `")]
    assert all(any(f"`{kind}`" in row for row in rows) for kind in column_kinds.KINDS)
    assert all(f'"{option}"' in text for option in column_kinds.OPTIONS)


def test_columns_and_dataset_together_and_a_missing_file_are_refused(tmp_path):
    found = run_tool(
        "prepare_criteo", "--input=x", f"--output_dir={tmp_path}/o", "--columns=none.json", code=2
    )
    assert found.stderr == "prepare.py: --columns: none.json: No such file or directory.\n"
    with pytest.raises(BadInput, match="--columns has no effect with --dataset"):
        prepared(tmp_path, "x", columns=describe(tmp_path), dataset="criteo")
