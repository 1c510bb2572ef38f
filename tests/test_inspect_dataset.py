"""inspect_dataset.py: its numbers equal those of a slow count, and it names bad data."""

import collections
import gzip
import json
import math

import numpy as np
import pytest
from conftest import example, run_tool, shared_data

from data_tools import inspect_dataset, libsvm_to_tfrecord
from deepfm.errors import BadInput
from deepfm.records import text_blocks
from deepfm.runtime.tf import tf


def summarize_slowly(rows):
    """The summary of [(label, [(id, value)])], counted one by one."""
    fields = []
    for j in range(max(len(pairs) for _, pairs in rows)):
        here = [pairs[j] for _, pairs in rows if len(pairs) > j]
        ids, values = [i for i, _ in here], [v for _, v in here]
        top = max(ids.count(i) for i in set(ids))
        fields.append(
            {
                "field": j,
                "rows": len(here),
                "values": len(here),
                "distinct_ids": len(set(ids)),
                "smallest_id": min(ids),
                "largest_id": max(ids),
                "most_frequent_id": min(i for i in set(ids) if ids.count(i) == top),
                "most_frequent_share": top / len(here),
                "min_value": min(values),
                "max_value": max(values),
                "mean_value": math.fsum(values) / len(here),
                "zero_share": values.count(0) / len(here),
            }
        )
    by_field = (i for i, _ in {(i, j) for _, pairs in rows for j, (i, _) in enumerate(pairs)})
    positives = sum(label > 0 for label, _ in rows)
    return {
        "rows": len(rows),
        "positives": positives,
        "label_rate": positives / len(rows),
        "field_size": len(fields),
        "shortest_row": min(len(pairs) for _, pairs in rows),
        "feature_size": 1 + max(i for _, pairs in rows for i, _ in pairs),
        "shared_ids": sum(n > 1 for n in collections.Counter(by_field).values()),
        "fields": fields,
    }


@pytest.mark.parametrize("line, words", [("1 99999999999:1", "id 99999999999"), ("x 1:1", "'x'")])
def test_a_bad_line_after_a_byte_order_mark_has_its_number(tmp_path, line, words):
    (tmp_path / "a.libsvm").write_text("\ufeff1 1:1\n" + line + "\n")
    with pytest.raises(BadInput, match=rf"a\.libsvm:2: .*{words}"):
        inspect_dataset.inspect(str(tmp_path))
    (tmp_path / "a.libsvm").write_text("\ufeff1 1:1\n0 2:1\n")
    assert inspect_dataset.inspect(str(tmp_path))["rows"] == 2


def assert_summary(found, rows):
    expected = summarize_slowly(rows)
    for field, slowly in zip(found["fields"], expected.pop("fields")):
        assert field == pytest.approx(slowly, rel=1e-12)
    assert {key: found[key] for key in expected} == expected


def some_rows(n, shortest, longest, seed=0):
    rng = np.random.RandomState(seed)
    rows = []
    for _ in range(n):
        size = rng.randint(shortest, longest + 1)
        values = (rng.randint(-2, 4, size) / 4).tolist()
        rows.append((int(rng.randint(2)), list(zip(rng.zipf(1.5, size).tolist(), values))))
    return rows


def as_text(rows):
    return "".join(
        f"{label} " + " ".join(f"{i}:{v}" for i, v in pairs) + "\n" for label, pairs in rows
    )


def write_tfrecord(path, rows):
    compression = "GZIP" if path.name.endswith(".gz") else ""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for label, pairs in rows:
            writer.write(example(label, [i for i, _ in pairs], [v for _, v in pairs]))


@pytest.mark.parametrize("shortest", [4, 1])
def test_libsvm_is_counted_right_also_where_rows_differ_in_length(tmp_path, monkeypatch, shortest):
    monkeypatch.setattr(text_blocks, "BLOCK", 300)
    rows = some_rows(500, shortest, 4)
    (tmp_path / "a.libsvm").write_text("# head\n\n" + as_text(rows[:200]))
    (tmp_path / "b.libsvm.gz").write_bytes(gzip.compress(as_text(rows[200:]).encode()))
    assert_summary(inspect_dataset.inspect(str(tmp_path)), rows)


def test_rows_without_any_id_are_refused(tmp_path):
    (tmp_path / "a.libsvm").write_text("1\n0\n")
    with pytest.raises(BadInput, match="no record has an id"):
        inspect_dataset.inspect(str(tmp_path))


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_row_without_ids_is_the_shortest_whichever_file_has_it(tmp_path, names):
    first, second = (tmp_path / f"{name}.libsvm" for name in names)
    first.write_text("1\n0 1:1 2:1 3:1\n")
    second.write_text("1 1:1 2:1 3:1\n0 1:1 2:1 3:1\n")
    found = inspect_dataset.inspect(str(tmp_path))
    assert (found["shortest_row"], found["field_size"]) == (0, 3)
    with pytest.raises(BadInput, match="--write: the rows have 0 to 3 ids"):
        inspect_dataset.write_metadata(str(tmp_path), found)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_rows_without_a_weight_weigh_1_where_another_file_has_weights(tmp_path, names):
    first, second = (tmp_path / f"{name}.libsvm" for name in names)
    first.write_text("1:3 1:1\n0:3 2:1\n")
    second.write_text("1 1:1\n0 1:1\n0 2:1\n")
    weights = inspect_dataset.inspect(str(tmp_path))["weights"]
    expected = {"sum": 9, "mean": 1.8, "min": 1, "max": 3, "zero_share": 0, "label_rate": 4 / 9}
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tfrecord_is_counted_right(tmp_path, suffix):
    rows = some_rows(500, 3, 3)
    write_tfrecord(tmp_path / f"a.tfrecords{suffix}", rows[:150])
    write_tfrecord(tmp_path / f"b.tfrecords{suffix}", rows[150:])
    assert_summary(inspect_dataset.inspect(str(tmp_path)), rows)


@pytest.mark.parametrize("end", ["1 x", "1 1:nan", "2 1:1", "1 -1:1", "1 1:1 2:1"])
def test_a_bad_line_is_named(tmp_path, monkeypatch, end):
    monkeypatch.setattr(text_blocks, "BLOCK", 20)
    path = tmp_path / "a.libsvm"
    path.write_text("1 1:1 # note\n\n" * 20 + end)
    with pytest.raises(BadInput) as error:
        inspect_dataset.inspect(str(path), field_size=1)
    assert str(error.value).startswith(f"{path}:41: ")


def test_a_bad_record_is_named(tmp_path):
    rows = some_rows(10, 3, 3)
    rows[6][1].pop()
    path = tmp_path / "a.tfrecords"
    write_tfrecord(path, rows)
    with pytest.raises(BadInput, match="record 6 at byte [0-9]+: expected 3 ids, found 2"):
        inspect_dataset.inspect(str(path))


def test_what_dataset_json_says_otherwise_is_reported(tmp_path):
    (tmp_path / "a.libsvm").write_text("1 1:1\n0 2:1\n")
    options = libsvm_to_tfrecord.ConvertOptions(f"{tmp_path}/a.libsvm", f"{tmp_path}/out")
    libsvm_to_tfrecord.convert(options)
    assert inspect_dataset.inspect(f"{tmp_path}/out")["mismatches"] == []
    path = tmp_path / "out" / "dataset.json"
    content = json.loads(path.read_text())
    content["feature_size"] = 2
    content["files"]["a.tfrecords"]["positives"] = 2
    path.write_text(json.dumps(content))
    assert inspect_dataset.inspect(f"{tmp_path}/out")["mismatches"] == [
        f"{path} says feature_size 2, found id 2.",
        f"{path} says a.tfrecords has 2 positives, found 1.",
    ]


def test_the_real_records_are_counted_as_their_readme_says():
    found = inspect_dataset.inspect(shared_data("criteo_sample/va.tfrecords"))
    assert (found["rows"], found["positives"], found["field_size"]) == (10000, 2553, 39)
    assert found["feature_size"] == 117566  # its README: ids 1..117,565


def test_json_is_all_that_json_prints(tmp_path):
    rows = some_rows(50, 1, 3)
    (tmp_path / "a.libsvm").write_text(as_text(rows))
    found = run_tool("inspect_dataset", f"--data={tmp_path}", "--json", code=0)
    assert_summary(json.loads(found.stdout), rows)


def test_bad_data_exits_with_2_and_one_sentence(tmp_path):
    (tmp_path / "a.libsvm").write_text("1 x\n")
    found = run_tool("inspect_dataset", f"--data={tmp_path}", code=2)
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1


def test_the_tables_align(tmp_path):
    (tmp_path / "a.libsvm").write_text(as_text(some_rows(50, 3, 3)))
    text = inspect_dataset.format_tables(inspect_dataset.inspect(str(tmp_path)))
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 4
    assert len({len(line) for line in table}) == 1


def test_fields_that_share_ids_are_told_apart_from_those_that_do_not(tmp_path):
    line = "shared ids    1 is in more than one field; these fields share embeddings"
    for text, shares in (("1 0:1 0:1 7:1\n0 1:1 2:1 7:1\n", True), ("1 0:1 2:1 7:1\n", False)):
        (tmp_path / "a.libsvm").write_text(text)
        found = inspect_dataset.format_tables(inspect_dataset.inspect(str(tmp_path)))
        assert (line in found.splitlines()) == shares and ("shared" in found) == shares
