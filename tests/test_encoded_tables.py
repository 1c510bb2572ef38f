"""The converter on tables whose ids are encoded: the bytes of the same rows in LibSVM or LibFFM."""

import gzip
import json
import os

import numpy as np
import pytest
from test_tables import write_rows

from data_tools import libsvm_to_tfrecord
from data_tools.tables import inputs, parquet_blocks
from deepfm.errors import BadInput
from deepfm.records import text_blocks

pa = pytest.importorskip("pyarrow", reason="pyarrow is missing: scripts/setup.sh --tests")
from pyarrow import parquet  # noqa: E402

ROWS, FIELDS = 400, 4
WITH_VALUES = [
    {"name": "clicked", "kind": "label"},
    {"name": "f0", "kind": "id"},
    {"name": "v1", "kind": "value", "id": "f1"},
    {"name": "v0", "kind": "value", "id": "f0"},
    {"name": "f1", "kind": "id", "offset": 40},
    {"name": "day", "kind": "ignored"},
    {"name": "v2", "kind": "value", "id": 7},
    {"name": "f3", "kind": "id"},
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Blocks and tasks of few rows, so that small files have many."""
    monkeypatch.setattr(text_blocks, "BLOCK", 1000)
    monkeypatch.setattr(text_blocks, "TASK", 3000)
    monkeypatch.setattr(parquet_blocks, "BATCH", 17)
    monkeypatch.setattr(inputs, "ROWS", 60)


class Rows:
    """Labels, weights, ids and values of random rows."""

    def __init__(self, n=ROWS, seed=0):
        rng = np.random.RandomState(seed)
        self.labels, self.weights = rng.randint(0, 2, n), rng.randint(0, 9, n) / 4
        self.ids = rng.randint(1, 1000, [n, FIELDS])
        self.values = rng.randn(n, FIELDS) * 10.0 ** rng.randint(-9, 9, [n, FIELDS])
        self.values[0] = 0, 1e-42, -3, 0.1  # the second is no normal float32

    def libsvm(self, values=None, ids=None, weights=False):
        ids, values = (x if y is None else y for x, y in ((self.ids, ids), (self.values, values)))
        first = [f"{x}:{w}" if weights else f"{x}" for x, w in zip(self.labels, self.weights)]
        pairs = (zip(*row) for row in zip(ids.tolist(), values.tolist()))
        return "".join(
            " ".join([label, *(f"{i}:{v!r}" for i, v in row)]) + "\n"
            for label, row in zip(first, pairs)
        )


def convert(source, out, **flags):
    """{name: bytes} of what the converter writes; of dataset.json what it says of the records."""
    libsvm_to_tfrecord.convert(libsvm_to_tfrecord.ConvertOptions(str(source), str(out), **flags))
    found = {path.name: path.read_bytes() for path in out.iterdir()}
    found["dataset.json"] = json.loads(found["dataset.json"].decode())
    del found["dataset.json"]["ids"]  # which tells whether columns or pairs were the fields
    return found


def from_text(text, folder, suffix="libsvm", **flags):
    (folder / f"a.{suffix}").write_text(text)
    return convert(folder / f"a.{suffix}", folder / "text", **flags)


def write(path, columns, **options):
    parquet.write_table(pa.table(columns), str(path), **options)
    return path


def describe(folder, columns):
    (folder / "columns.json").write_text(json.dumps({"columns": columns}))
    return str(folder / "columns.json")


def lists(array, kind=None):
    return pa.array(array.tolist(), kind)


@pytest.mark.parametrize(
    "types",
    [
        {},
        dict(ids=pa.list_(pa.uint16()), values=pa.large_list(pa.float32()), label=pa.float64()),
        dict(ids=pa.list_(pa.int32(), FIELDS), values=pa.list_(pa.float64()), label=pa.bool_()),
    ],
)
@pytest.mark.parametrize("num_files", [0, 3])
def test_lists_give_the_bytes_of_libsvm_with_any_number_of_processes(tmp_path, types, num_files):
    rows = Rows()
    columns = {
        "more": ["x", None] * (ROWS // 2),
        "Values": lists(rows.values, types.get("values")),
        "label": pa.array(rows.labels.tolist()).cast(types.get("label", pa.int64())),
        "ids": lists(rows.ids, types.get("ids")),
    }
    path = write(tmp_path / "a.parquet", columns, row_group_size=150)
    flags = dict(num_files=num_files, feature_size=2000)
    expected = from_text(rows.libsvm(), tmp_path, **flags)
    for workers in (1, 2):
        assert convert(path, tmp_path / f"out{workers}", num_workers=workers, **flags) == expected


def test_the_weights_of_a_table_are_those_of_libsvm_and_values_may_be_missing(tmp_path):
    rows = Rows()
    columns = {"label": rows.labels, "weight": rows.weights, "ids": lists(rows.ids)}
    expected = from_text(rows.libsvm(np.ones([ROWS, FIELDS]), weights=True), tmp_path)
    assert expected["dataset.json"]["weighted"]
    assert convert(write(tmp_path / "a.parquet", columns), tmp_path / "out") == expected


def test_counts_make_fields_of_several_values_as_libffm_does(tmp_path):
    rng = np.random.RandomState(0)
    columns, lines = {"label": [], "ids": [], "values": [], "counts": []}, []
    for i in range(ROWS):
        counts = rng.randint(0, 3, 3) if i else np.array([1, 0, 2])
        ids, values = rng.randint(0, 99, counts.sum()), rng.rand(counts.sum())
        fields = np.repeat(np.arange(3), counts)
        for name, x in zip(columns, (i % 2, ids, values, counts)):
            columns[name].append(x)
        lines.append([f"{i % 2}", *(f"{f}:{a}:{v!r}" for f, a, v in zip(fields, ids, values))])
    text = "".join(" ".join(words) + "\n" for words in lines)
    expected = from_text(text, tmp_path, "ffm", multi_valued=True)
    path = write(tmp_path / "a.parquet", columns)
    for flags in ({}, {"multi_valued": True, "field_size": 3}):
        assert convert(path, tmp_path / f"out{len(flags)}", **flags) == expected


def test_short_lists_are_filled_up_with_pad(tmp_path):
    rows = [(1, [5]), (0, []), (1, [6, 7, 8]), (0, [9, 9])]
    text = "".join(" ".join([f"{y}", *(f"{x}:1" for x in ids)]) + "\n" for y, ids in rows)
    columns = dict(zip(("label", "ids"), zip(*rows)))
    expected = from_text(text, tmp_path, pad=True, id_offset=2)
    path = write(tmp_path / "a.parquet", columns)
    assert convert(path, tmp_path / "out", pad=True, id_offset=2) == expected
    write(path, {"label": [1, 0], "ids": [[5, 6], [0]]})
    with pytest.raises(BadInput, match="row 1: column ids: feature id 0 is reserved for padding"):
        convert(path, tmp_path / "out", pad=True, overwrite=True)


def table(rows):
    """Column by column, the cells of rows whose columns WITH_VALUES describes."""
    return {
        "clicked": rows.labels,
        "f0": rows.ids[:, 0],
        "v1": rows.values[:, 1],
        "v0": rows.values[:, 0],
        "f1": rows.ids[:, 1],
        "day": np.array([f'the "{i}" day' if i % 5 else "" for i in range(len(rows.labels))]),
        "v2": rows.values[:, 2],
        "f3": rows.ids[:, 3],
    }


def cells_of(columns):
    """The rows of a table as texts."""
    text = lambda x: x if isinstance(x, str) else repr(x.item())
    return list(zip(*([text(x) for x in column] for column in columns.values())))


def expected_of(rows, folder, **flags):
    """What `convert` returns for the rows of `table` in LibSVM."""
    ids, values = rows.ids + [0, 40, 0, 0], rows.values.copy()
    ids[:, 2], values[:, 3] = 7, 1
    return from_text(rows.libsvm(values, ids), folder, **flags)


@pytest.mark.parametrize("how", ["parquet", "header", "bare", "tabs", "gzip"])
def test_columns_of_numbers_give_the_bytes_of_libsvm(tmp_path, how):
    rows, flags = Rows(), {"num_files": 3}
    expected = expected_of(rows, tmp_path, **flags)
    columns = table(rows)
    cells, flags["columns"] = cells_of(columns), describe(tmp_path, WITH_VALUES)
    names = list(columns)
    if how == "header":  # which gives the places
        cells, names = [row[::-1] for row in cells], names[::-1]
    path = write_rows(
        tmp_path / "a.csv", cells, None if how == "bare" else names, "\t" if how == "tabs" else ","
    )
    if how == "bare":
        flags["input_format"] = "csv"
        os.rename(path, str(tmp_path / "a"))
        path = tmp_path / "a"
    if how == "tabs":  # which Windows writes, with blank lines
        text = (tmp_path / "a.csv").read_text().replace("\n", "\r\n").replace("y\r\n", "y\r\n\r\n")
        (tmp_path / "a.csv").write_text("\ufeff" + text)
    if how == "gzip":
        path = tmp_path / "a.tsv.gz"
        path.write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    if how == "parquet":
        path = write(tmp_path / "a.pq", columns, row_group_size=90)
    for workers in (1, 2):
        assert convert(path, tmp_path / f"out{workers}", num_workers=workers, **flags) == expected


def test_without_a_description_each_column_beside_the_label_is_a_field(tmp_path):
    rows = Rows()
    expected = from_text(rows.libsvm(np.ones([ROWS, FIELDS])), tmp_path)
    names = ["__index_level_0__", "C3", "C1", "label", "C2", "C4"]  # the first one by pandas
    ids, index = rows.ids.T, np.arange(ROWS)
    columns = dict(zip(names, [index, ids[0], ids[1], rows.labels, ids[2], ids[3]]))
    path = write(tmp_path / "a.parquet", columns)
    assert convert(path, tmp_path / "out", field_size=FIELDS) == expected
    for i, of_index in enumerate(("", "Unnamed: 0")):
        path = write_rows(tmp_path / "a.csv", cells_of(columns), [of_index, *names[1:]])
        assert convert(path, tmp_path / f"csv{i}") == expected


def test_the_folder_of_a_spark_job_is_read_part_by_part(tmp_path):
    rows, folder = Rows(), tmp_path / "in"
    text = rows.libsvm(np.ones([ROWS, FIELDS])).splitlines(True)
    expected = from_text("".join(text), tmp_path, num_files=1)
    for i, day in enumerate(("day=1", "day=1", "day=2")):
        some = slice(i * 100, i * 100 + 100 if i < 2 else None)
        path = folder / day / f"part-{i:05d}-1b4c-c000.snappy.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {"ids": lists(rows.ids[some]), "label": rows.labels[some]}
        write(path, columns, compression="snappy")
        (path.parent / f".{path.name}.crc").write_bytes(b"crc\0")
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / "_metadata").write_bytes(b"PAR1")
    assert convert(folder, tmp_path / "out", num_files=1) == expected
    each = convert(folder, tmp_path / "each")
    assert sorted(each)[:2] == ["dataset.json", "day=1-part-00000-1b4c-c000.snappy.tfrecords"]


INT64 = np.iinfo(np.int64)
NUMBERS = {"label": [1, 0, 1], "a": [1, 2, 3], "b": [4, 5, 6]}
LISTS = {
    "label": [1, 0, 1],
    "weight": [1.0, 2.0, 3.0],
    "ids": [[1, 2], [3, 4], [5, 6]],
    "values": [[1.0, 1.0]] * 3,
}
COUNTED = {**LISTS, "counts": [[1, 1], [0, 2], [2, 0]]}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "columns, name, bad, words",
    [
        (NUMBERS, "b", None, "column b: null is not an integer"),
        (NUMBERS, "b", 9, "column b: feature id 9 is not below feature_size 9"),
        (NUMBERS, "a", -1, "column a: feature id -1 is negative"),
        (NUMBERS, "a", INT64.max, "column a: feature id 9223372036854775807 is not below"),
        (NUMBERS, "label", 2, "column label: 2 is not 0, 1, -1 or +1"),
        (NUMBERS, "label", None, "column label: null is not 0, 1"),
        (LISTS, "ids", None, "column ids: null is not a list"),
        (LISTS, "ids", [1, None], "column ids: null is not an integer"),
        (LISTS, "ids", [1, 9], "column ids: feature id 9 is not below feature_size 9"),
        (LISTS, "ids", [1], "columns ids and values: 1 ids, 2 values"),
        (LISTS, "values", [1.0], "columns ids and values: 2 ids, 1 values"),
        (LISTS, "values", None, "column values: null is not a list"),
        (LISTS, "values", [1.0, float("nan")], "column values: nan is not a finite number"),
        (LISTS, "values", [1.0, 1e39], "column values: 1e+39 is not a finite number"),
        (LISTS, "weight", float("nan"), "column weight: nan is not a finite number of at least 0"),
        (LISTS, "weight", -0.5, "column weight: -0.5 is not a finite number of at least 0"),
        (COUNTED, "counts", [1, 1, 0], "column counts: expected 2 counts, found 3"),
        (COUNTED, "counts", [2, 1], "columns ids and counts: 2 ids, the counts say 3"),
        (COUNTED, "counts", [3, -1], "column counts: -1 is not at least 0"),
    ],
)
def test_a_bad_row_is_told_by_file_row_and_column_and_skipped_if_it_may_be(
    tmp_path, columns, name, bad, words
):
    types = pa.table(columns).schema
    row = [bad if x == name else columns[x][1] for x in columns]
    worse = {x: [*columns[x], y] for x, y in zip(columns, row)}  # row 3
    path = tmp_path / "a.parquet"
    flags = dict(feature_size=9)
    parquet.write_table(pa.table(worse, types), str(path))
    with pytest.raises(BadInput) as error:
        convert(path, tmp_path / "out", **flags)
    assert str(error.value).startswith(f"{path}: row 3: {words}")
    assert not (tmp_path / "out").exists()
    skipped = convert(path, tmp_path / "out", max_bad_records=1, **flags)
    parquet.write_table(pa.table(columns, types), str(path))
    assert skipped == convert(path, tmp_path / "good", **flags)


def test_lists_of_another_length_than_the_first_are_bad_rows(tmp_path):
    columns = {"label": [0] * 200, "ids": [[1, 2]] * 163 + [[3]] + [[4, 5]] * 36}
    path = write(tmp_path / "a.parquet", columns, row_group_size=70)
    with pytest.raises(BadInput, match=r"a\.parquet: row 163: column ids: expected 2 ids, found 1"):
        convert(path, tmp_path / "out")


def test_a_file_whose_rows_are_all_bad_may_be_skipped(tmp_path):
    for name, labels in (("a", [0, 1]), ("b", [7, 7])):
        write(tmp_path / f"{name}.parquet", {"label": labels, "ids": [[3], [4]]})
    both = convert(f"{tmp_path}/?.parquet", tmp_path / "out", num_files=1, max_bad_records=2)
    assert both == convert(tmp_path / "a.parquet", tmp_path / "good", num_files=1)


def test_labels_of_minus_one_are_stored_as_those_of_libsvm(tmp_path):
    expected = from_text("-1 3:1\n1 4:1\n", tmp_path)
    path = write(tmp_path / "a.parquet", {"label": [-1, 1], "ids": [[3], [4]]})
    assert convert(path, tmp_path / "out") == expected


def test_an_offset_lifts_no_negative_id(tmp_path):
    path = write(tmp_path / "a.parquet", {"label": [0, 1], "a": [1, -1]})
    with pytest.raises(BadInput, match="row 1: column a: feature id -1 is negative"):
        convert(path, tmp_path / "out", id_offset=5)


@pytest.mark.parametrize(
    "line, words",
    [
        ("7,1,x,3", "column a: 'x' is not an integer"),
        ("7,1,2.5,3", "column a: '2.5' is not an integer"),
        ("7,1,,3", "column a: '' is not an integer"),
        ("7,1,-2,3", "column a: feature id -2 is negative"),
        ("7,1,2,9", "column b: feature id 9 is not below feature_size 9"),
        (
            "7,1,2,123456789012345678901",
            "column b: '123456789012345678901' is not an integer of at",
        ),
        ("7,yes,2,3", "column label: 'yes' is not 0, 1"),
        ("7,1,2", "expected 4 columns, found 3: '7,1,2'"),
        ('"7,1,2,3', "a quoted cell does not end in its line"),
    ],
)
def test_a_bad_line_of_a_csv_is_told_by_its_number(tmp_path, line, words):
    lines = [",label,a,b", *["7,1,2,3", "7,0,4,5"] * 200, "", line, "7,0,2,2"]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(BadInput) as error:
        convert(path, tmp_path / "out", feature_size=9)
    assert str(error.value).startswith(f"{path}:403: {words}")
    skipped = convert(path, tmp_path / "out", feature_size=9, max_bad_records=1)
    del lines[402]
    path.write_text("\n".join(lines))
    assert skipped == convert(path, tmp_path / "good", feature_size=9)


@pytest.mark.parametrize(
    "columns, flags, words",
    [
        ({"y": [1], "a": [1]}, {}, "has no column label (.*); its columns are y, a."),
        ({"label": [1]}, {}, "has no column of ids beside label"),
        ({"label": [1], "a": ["x"]}, {}, "column a is of type string, but must be an integer"),
        ({"label": [1], "a": [1.0]}, {}, "column a is of type double, but must be an integer"),
        ({"label": [1], "ids": [[0.5]]}, {}, "column ids is of type list<.*double>, but must be a"),
        ({"label": [1], "ids": [5]}, {}, "column ids is of type int64, but must be a list"),
        ({"label": ["1"], "ids": [[5]]}, {}, "column label is of type string, but must be a num"),
        ({"label": [1, -1, 0], "ids": [[5]] * 3}, {}, "row 2: label 0, but .*: row 1 has label -1"),
        ({"label": [1], "a": [1]}, {"pad": True}, "--pad does not go with a table"),
        ({"label": [1], "ids": [[1]]}, {"multi_valued": True}, "--multi_valued does not go with"),
        ({"label": [1], "a": [1]}, {"hash_buckets": 5}, "--hash_buckets does not go with a table"),
        ({"label": [1], "a": [1]}, {"field_size": 5}, "has columns for 1 fields"),
        ({"label": [1], "a": [1]}, {"input_format": "csv"}, "is Parquet; leave --input_format out"),
        (
            {"label": [1], "ids": pa.array([[]], pa.list_(pa.int8()))},
            {},
            "row 0: column ids: expected 1 ids, found 0",
        ),
        (
            {"label": pa.array([], pa.int8()), "a": pa.array([], pa.int8())},
            {},
            "the files hold no rows",
        ),
    ],
)
def test_a_table_that_cannot_be_converted_is_refused(tmp_path, columns, flags, words):
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(BadInput, match=words):
        convert(path, tmp_path / "out", **flags)


@pytest.mark.parametrize(
    "text, words",
    [
        ("1 3:1 4:1\n", "has no column label .*; LibSVM text needs --input_format=libsvm; its col"),
        ("label,ids\n1,3\n", "column ids would hold lists, .* or write Parquet"),
        ("label,a\n", "hold no rows"),
    ],
)
def test_a_csv_that_cannot_be_converted_is_refused(tmp_path, text, words):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(BadInput, match=words):
        convert(tmp_path / "a.csv", tmp_path / "out")


def test_files_with_other_columns_or_of_another_kind_are_refused(tmp_path):
    write(tmp_path / "a.parquet", {"label": [1], "a": [1]})
    for more in ({"label": [1], "b": [1]}, {"label": [1], "a": [1], "weight": [1]}):
        write(tmp_path / "b.parquet", more)
        with pytest.raises(BadInput, match="b.parquet: has a column (b|weight), which .*a.parquet"):
            convert(f"{tmp_path}/*.parquet", tmp_path / "out")
    write(tmp_path / "b.parquet", {"label": [1]})
    with pytest.raises(BadInput, match="b.parquet: has no column a"):
        convert(f"{tmp_path}/*.parquet", tmp_path / "out")
    (tmp_path / "c.libsvm").write_text("1 1:1\n")
    with pytest.raises(BadInput, match=r"mixes Parquet and LibSVM text \(.*a.parquet, .*c.libsvm"):
        convert(f"{tmp_path}/a.parquet,{tmp_path}/c.libsvm", tmp_path / "out")


@pytest.mark.parametrize(
    "columns, words",
    [
        (
            [("y", "label"), ("a", "category")],
            'column a is of kind "category", whose cells are no ids yet; data_tools.prep',
        ),
        ([("y", "label"), ("a", "value")], 'column a of kind "value" needs "id": 1, an'),
        ([("y", "label"), ("a", "value", "id", "b")], 'has "id": "b", which is no column of kind'),
        ([("y", "label"), ("a", "id", "offset", -1)], 'column a has "offset": -1; try 1'),
        ([("y", "label"), ("a", "ids", "offset", 1)], 'of kind "ids" has "offset"; leave it out'),
        ([("y", "label"), ("a", "id"), ("b", "ids")], "ids are either in one column of lists"),
        ([("y", "label"), ("a", "id"), ("b", "counts")], "ids are either in one column of lists"),
        ([("y", "label"), ("a", "ids"), ("b", "ids")], 'must be of kind "ids", but a and b are'),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(tmp_path, columns, words):
    entries = [dict([("name", c[0]), ("kind", c[1]), c[2:]] if c[2:] else
                    [("name", c[0]), ("kind", c[1])]) for c in columns]  # fmt: skip
    path = write(tmp_path / "a.parquet", {"y": [1], "a": [1]})
    with pytest.raises(BadInput, match=f"--columns: .*columns.json: .*{words}"):
        convert(path, tmp_path / "out", columns=describe(tmp_path, entries))
