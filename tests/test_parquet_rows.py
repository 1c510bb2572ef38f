"""Parquet in prepare: the ids and values of a CSV with the same cells."""

import json
import re
import sys

import numpy as np
import pytest
from conftest import ROOT
from test_tables import KINDS, cells, describe, prepared, records_of, write_rows

from data_tools import libsvm_to_tfrecord
from data_tools.click_logs import splitting
from data_tools.tables import blocks, parquet_blocks
from deepfm.errors import BadInput
from deepfm.records import text_blocks
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import Column

pa = pytest.importorskip("pyarrow", reason="pyarrow is missing: scripts/setup.sh --tests")
from pyarrow import parquet  # noqa: E402

NAMES = list(KINDS)


def number(cell):
    return int(cell) if cell else None


def table_of(rows, floats="float64", text="string"):
    """The rows as a table of typed columns in another order, null for an empty cell."""
    columns = dict(zip(NAMES, zip(*rows)))
    found = {
        "article": pa.array([x or None for x in columns["article"]], text),
        "stock": pa.array(map(number, columns["stock"]), pa.int8()),
        "price": pa.array(map(number, columns["price"]), pa.int64()),
        "AGE": pa.array([float("nan") if x == "" else float(x) for x in columns["age"]], floats),
        "when": pa.array(columns["when"], pa.string()).dictionary_encode(),
        "Clicked": pa.array([x == "1" for x in columns["Clicked"]], pa.bool_()),
        "more": pa.array([[1]] * len(rows)),
    }
    return pa.table(found)


def write(path, rows, groups=50, **types):
    parquet.write_table(table_of(rows, **types), str(path), row_group_size=groups)
    return str(path)


@pytest.mark.parametrize(
    "types", [{}, dict(floats="float32", text="binary"), dict(text="large_string")]
)
def test_a_parquet_file_gives_the_ids_and_values_of_the_csv_with_its_cells(
    tmp_path, monkeypatch, types
):
    monkeypatch.setattr(parquet_blocks, "BATCH", 37)
    rows, table = list(cells()), describe(tmp_path)
    # Empty texts and nulls are the same; a CSV that ends its rows alike has the rows' order.
    text = prepared(tmp_path, write_rows(tmp_path / "a.csv", rows), "text", columns=table)
    path = write(tmp_path / "a.parquet", rows, **types)
    for workers in (1, 2):
        out = prepared(tmp_path, path, f"out{workers}", columns=table, num_workers=workers)
        assert records_of(out / "train") == records_of(text / "train")
        maps = [(folder / "feature_map.json").read_text() for folder in (text, out)]
        assert maps[0] == maps[1]


@pytest.mark.parametrize(
    "array, texts",
    [
        (
            pa.array([5.0, -0.0, 1e17, 0.1, None, float("nan")]),
            ["5", "0", str(10**17), "0.1", "", ""],
        ),
        (pa.array([0.1, 3], pa.float32()), ["0.1", "3"]),
        (pa.array([True, False, None]), ["1", "0", ""]),
        (pa.array([2**64 - 1, 0], pa.uint64()), [str(2**64 - 1), "0"]),
        (pa.array(["a", None, "b", "a"]).dictionary_encode()[1:], ["", "b", "a"]),
        (pa.nulls(2), ["", ""]),
        (pa.array([b"x", b""], pa.large_binary()), ["x", ""]),
    ],
)
def test_cells_are_what_a_text_would_hold(array, texts):
    found = parquet_blocks._texts(array).to_pylist()
    assert found == [text.encode() for text in texts]


def test_a_server_encodes_the_cells_of_json_as_parquet_is_read(tmp_path):
    rows, table = list(cells()), describe(tmp_path)
    out = prepared(tmp_path, write(tmp_path / "a.parquet", rows), columns=table)
    loaded = feature_map.load(str(out / "feature_map.json"))
    labels = iter(records_of(out / "train"))
    for _, _, age, when, price, stock, article in rows:  # as table_of types them
        row = [float(age or "nan"), when, number(price), number(stock), article or None]
        row = json.loads(json.dumps(row))
        ids, values = feature_map.encode_row(loaded, row)
        assert (ids, pytest.approx(values)) == next(labels)[1:]


@pytest.mark.parametrize(
    "cell, text",
    [(5, "5"), (5.0, "5"), (-0.0, "0"), (0.1, "0.1"), (True, "1"), (False, "0"), (10**20, 10**20)],
)
def test_a_number_of_json_is_the_category_of_its_text(cell, text):
    field = feature_map.Field(Column("x", "category"), 1, {str(text): 3})
    of_one = feature_map.FeatureMap("", "buckets", 1, 4, [field])
    assert feature_map.encode_row(of_one, [cell]) == ([3], [1.0])
    for missing in (None, float("nan"), ""):
        assert feature_map.encode_row(of_one, [missing]) == ([1], [1.0])
    with pytest.raises(ValueError, match="neither a text nor a number"):
        feature_map.encode_row(of_one, [[cell]])


def test_rows_are_drawn_by_their_file_and_number_whatever_the_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "TASK", 1)  # a row group each
    rows, table = list(cells()), describe(tmp_path)
    everything = prepared(tmp_path, write(tmp_path / "a.parquet", rows), "all", columns=table)
    known = dict(feature_map=str(everything / "feature_map.json"), min_count=None)
    expected = records_of(everything / "train")
    for how, groups in (("draw", 50), ("draw", 300), ("order", 7)):
        path = write(tmp_path / "a.parquet", rows, groups)
        monkeypatch.setattr(parquet_blocks, "BATCH", groups // 3)
        flags = dict(split="0.5,0.2,0.3", split_by=how, **known)
        out = prepared(tmp_path, path, f"{how}{groups}", **flags)
        split = splitting.Split((0.5, 0.2, 0.3), how, total=len(rows))
        drawn = splitting.split_of(split, "a.parquet", np.arange(len(rows)))
        for i, name in enumerate(splitting.SPLITS):
            mine = [record for record, s in zip(expected, drawn) if s == i]
            assert records_of(out / name) == mine


def test_rows_in_order_are_those_of_all_files_in_order_also_by_the_names_of_hive(tmp_path):
    rows, table = list(cells()), describe(tmp_path)
    for i, (begin, end) in enumerate(((0, 40), (40, 45), (45, 300))):
        write(tmp_path / f"{i:06d}_0", rows[begin:end], 30)
    flags = dict(columns=table, split="0.5,0.2,0.3", split_by="order")
    out = prepared(tmp_path, f"{tmp_path}/*_0", **flags)
    known = dict(feature_map=str(out / "feature_map.json"), min_count=None)
    whole = prepared(tmp_path, write(tmp_path / "a.pq", rows), "whole", **known)
    found = [records_of(out / name) for name in splitting.SPLITS]
    assert list(map(len, found)) == [150, 60, 90]
    assert sum(found, []) == records_of(whole / "train")


def test_a_bad_row_is_told_by_its_number_and_skipped_if_it_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_blocks, "BATCH", 20)
    monkeypatch.setattr(text_blocks, "TASK", 1)
    rows, table = list(cells(100)), describe(tmp_path)
    good = [row for i, row in enumerate(rows) if i not in (33, 71)]
    rows[33][3], rows[71][6] = "noon", "two\nlines"
    path = write(tmp_path / "a.parquet", rows, 30)
    with pytest.raises(BadInput, match=r"a\.parquet: row 33: when 'noon' is not an hour YYMMDDHH"):
        prepared(tmp_path, path, columns=table)
    out = prepared(tmp_path, path, columns=table, max_bad_records=2)
    write_rows(tmp_path / "b.csv", good)
    text = prepared(tmp_path, str(tmp_path / "b.csv"), "text", columns=table)
    assert records_of(out / "train") == records_of(text / "train")
    with pytest.raises(BadInput, match="row 71: holds a NUL character or a newline"):
        prepared(tmp_path, path, "x", columns=table, max_bad_records=1)


def test_a_test_file_may_lack_the_label_and_no_other(tmp_path):
    path, table = write(tmp_path / "a.parquet", list(cells())), describe(tmp_path)
    out = prepared(tmp_path, path, columns=table)
    bare = str(tmp_path / "b.parquet")
    parquet.write_table(parquet.read_table(path).drop(["Clicked"]), bare)
    known = dict(feature_map=str(out / "feature_map.json"), min_count=None, split=None)
    new = prepared(tmp_path, None, "new", test_input=bare, **known)
    assert [x[1:] for x in records_of(new / "test")] == [x[1:] for x in records_of(out / "train")]
    with pytest.raises(BadInput, match="b.parquet: has no column Clicked .*only --test_input may"):
        prepared(tmp_path, bare, "x", columns=table)


def test_files_that_cannot_be_read_as_rows_are_refused(tmp_path):
    table = describe(tmp_path)
    path = tmp_path / "a.parquet"
    refused = lambda words: pytest.raises(BadInput, match=words)
    path.write_text("age,Clicked\n")
    with refused("a.parquet: is not a Parquet file"):
        prepared(tmp_path, str(path), columns=table)
    whole = table_of(list(cells()))
    parquet.write_table(whole.drop(["price"]), str(path))
    with refused("a.parquet: has no column price .* its columns are article, stock, AGE, when"):
        prepared(tmp_path, str(path), columns=table)
    times = pa.array([0] * len(whole), pa.timestamp("us"))
    parquet.write_table(whole.set_column(4, "when", times), str(path))
    with refused(r"column when is of type timestamp\[us\], .* cast it to string or int64"):
        prepared(tmp_path, str(path), columns=table)
    parquet.write_table(whole, str(path))
    path.write_bytes(path.read_bytes()[:100] + bytes(200) + path.read_bytes()[300:])
    with refused(r"a\.parquet: damaged after row \d+ \("):
        prepared(tmp_path, str(path), columns=table)
    write_rows(tmp_path / "b.csv", cells())
    with refused(r"mixes Parquet and text \(.*a.parquet, .*b.csv\); name one kind"):
        prepared(tmp_path, f"{path},{tmp_path}/b.csv", columns=table)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_without_pyarrow_the_sentence_has_the_command_that_installs_it(
    tmp_path, monkeypatch, suffix
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it fails
    pinned = f"pyarrow=={blocks.VERSION}"
    for name in ("requirements.txt", "scripts/sagemaker/convert_on_sagemaker.sh"):
        assert pinned in (ROOT / name).read_text()
    command = f"'{sys.executable} -m pip install {pinned}'"
    words = f"a.{suffix}: reading a table needs pyarrow, which is not installed; run {command}"
    path = tmp_path / f"a.{suffix}"
    path.write_text("label,a\n1,2\n")
    with pytest.raises(BadInput, match=re.escape(words)):
        libsvm_to_tfrecord.convert(libsvm_to_tfrecord.ConvertOptions(str(path), f"{tmp_path}/x"))
    with pytest.raises(BadInput, match=re.escape(words)):
        prepared(tmp_path, str(path), columns=describe(tmp_path))
