"""Records with the weight of an example: written, parsed, refused, converted and copied."""

import contextlib
import functools
import json

import numpy as np
import pytest
from conftest import (
    both_ops,
    encoded,
    example,
    examples_of,
    job_of,
    make_records,
    run_tool,
    write_payloads,
)
from test_records import run

from data_tools import inspect_dataset, libsvm_to_tfrecord, rebalance
from deepfm import open_data
from deepfm.config import InputConfig
from deepfm.data import bad_records, datasets, formats, records
from deepfm.data.input_pipeline import make_input_fn
from deepfm.data.reading import Source
from deepfm.data.records import Schema
from deepfm.errors import BadInput
from deepfm.kernels import reading
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.modes.common.mode import Mode
from deepfm.records import dataset_json
from deepfm.runtime import sagemaker
from deepfm.runtime.tf import tf
from deepfm.state.serving import saved_model

v1 = tf.compat.v1
F = 4
WEIGHTED = Schema(F, 50, weighted=True)
UNWEIGHTED = Schema(F, 50)


def weighted_example(record, weights, kind="float_list"):
    """A serialized Example of (label, ids, values) with the feature `weight`."""
    message = tf.train.Example.FromString(example(*record))
    list_type = {"float_list": tf.train.FloatList, "int64_list": tf.train.Int64List}[kind]
    feature = tf.train.Feature(**{kind: list_type(value=weights)})
    message.features.feature["weight"].CopyFrom(feature)
    return message.SerializeToString(deterministic=True)


def some(rows=20, seed=0):
    """(records of make_records, weights float32 [rows])."""
    weights = np.random.RandomState(seed).choice([0, 0.25, 1, 3, 1e-30, 1e30], rows)
    return make_records(rows, F, seed=seed), weights.astype(np.float32)


def serialized(rows=20, seed=0):
    found, weights = some(rows, seed)
    return [weighted_example(record, [w]) for record, w in zip(zip(*found), weights)]


def parse(payloads, schema=WEIGHTED, ops=TENSORFLOW, record_format=formats.TFRECORD):
    """The features and labels of payloads."""
    with tf.Graph().as_default(), v1.Session() as session:
        raw = tf.constant(payloads, tf.string, [len(payloads)])
        chunk = reading.pack(raw) if ops.packed else raw
        return session.run(record_format.parse(chunk, schema, ops))


def bits(x):
    return np.asarray(x).astype(np.float32).view(np.int32)


@both_ops
@pytest.mark.parametrize("multi_valued", [False, True])
def test_parsing_gives_what_was_encoded_and_1_for_the_weight_of_a_record_without(ops, multi_valued):
    found, weights = some()
    counts = np.ones([len(weights), F], np.int32) if multi_valued else None
    payloads = encoded(*found, counts, weights)
    payloads[1] = example(*[column[1] for column in found])  # one without a weight
    weights[1] = 1
    features, labels = parse(payloads, WEIGHTED._replace(multi_valued=multi_valued), ops)
    for one, other in zip((labels, features["feat_ids"], features["feat_vals"]), found):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(bits(features["example_weights"]), bits(weights))


@both_ops
def test_inference_passes_over_weights_and_reads_no_worse_for_them(ops):
    for schema in (WEIGHTED, UNWEIGHTED):
        features, _ = parse(serialized(), schema._replace(with_labels=False), ops)
        assert set(features) == {"feat_ids", "feat_vals"}
        np.testing.assert_array_equal(features["feat_ids"], some()[0][1])
    bad = weighted_example(next(zip(*some()[0])), [-1.0])
    parse([bad], WEIGHTED._replace(with_labels=False), ops)


def test_an_exported_model_takes_examples_with_weights():
    with tf.Graph().as_default(), v1.Session() as session:
        features, inputs = saved_model.inputs_of_ids(Schema(F, 50))
        examples = inputs["examples:serving_default"]["examples"]
        found = session.run(features, {examples: serialized()})
    np.testing.assert_array_equal(found["feat_ids"], some()[0][1])


RECORD = next(zip(*make_records(1, F)))
BAD = {
    "negative": (
        weighted_example(RECORD, [-0.5]),
        "weight -0.5 is not a finite number of at least",
    ),
    "nan": (weighted_example(RECORD, [np.nan]), "weight nan is not a finite number of at least 0"),
    "infinite": (weighted_example(RECORD, [np.inf]), "weight inf is not a finite number"),
    "empty": (weighted_example(RECORD, []), "weight [] is not one number"),
    "two": (weighted_example(RECORD, [1.0, 2.0]), "weight [1.0, 2.0] is not one number"),
    "an integer": (weighted_example(RECORD, [1], "int64_list"), "weight [] is not one number"),
}


@both_ops
@pytest.mark.parametrize("what", BAD)
def test_a_bad_weight_is_refused_and_its_record_named(tmp_path, what, ops):
    payload, reason = BAD[what]
    write_payloads(tmp_path / "1.tfrecords", [*serialized(300), payload, *serialized(2)])
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.DataLossError)):
        parse([payload], ops=ops)
    (bad,) = bad_records.find_bad(str(tmp_path / "1.tfrecords"), formats.TFRECORD, WEIGHTED)
    assert "1.tfrecords: record 300 at byte" in str(bad) and reason in str(bad)


@both_ops
def test_a_weight_in_unweighted_data_is_refused_not_ignored(tmp_path, ops):
    write_payloads(tmp_path / "1.tfrecords", [example(*RECORD), *serialized(1)])
    with pytest.raises(tf.errors.InvalidArgumentError):
        parse(serialized(1), UNWEIGHTED, ops)
    data = datasets.find(str(tmp_path), "training_data_dir")
    with pytest.raises(BadInput, match=r"record 1 at byte \d+: has a weight, but .* by the first"):
        bad_records.check_first_records(data, UNWEIGHTED)


# Which data are weighted.


@pytest.mark.parametrize("weighted", [False, True])
def test_the_first_record_says_whether_examples_are_weighted(tmp_path, weighted):
    first = serialized(1) if weighted else [example(*RECORD)]
    write_payloads(tmp_path / "1.tfrecords", [*first, *serialized(1)])
    (tmp_path / "2.libsvm").write_text("1:0.5 3:1\n" if weighted else "1 3:1\n")
    for name in ("1.tfrecords", "2.libsvm"):
        data = datasets.find(str(tmp_path / name), "training_data_dir")
        assert datasets.shows(data, "weighted") == weighted


def test_dataset_json_says_so_before_the_first_record(tmp_path):
    write_payloads(tmp_path / "1.tfrecords", [example(*RECORD), *serialized(1)])
    size = (tmp_path / "1.tfrecords").stat().st_size
    file = datasets.DataFile(str(tmp_path / "1.tfrecords"), size, 2, 1)
    for weighted in (True, False):
        dataset_json.write(str(tmp_path), F, 50, [file], weighted=weighted)
        assert datasets.find(str(tmp_path), "training_data_dir").weighted == weighted
        assert ("weighted" in json.loads((tmp_path / "dataset.json").read_text())) == weighted


def test_data_without_weights_get_the_features_and_the_parser_that_they_had():
    with tf.Graph().as_default() as graph:
        raw = v1.placeholder(tf.string, [2])
        features, _ = formats.TFRECORD.parse(raw, UNWEIGHTED, COMPILED)
        (parser,) = [op for op in graph.get_operations() if op.type == "DeepfmParse"]
    assert set(features) == {"feat_ids", "feat_vals"}
    assert len(parser.outputs) == 3


def test_ignoring_weights_leaves_them_out_of_the_features(tmp_path):
    write_payloads(tmp_path / "1.tfrecords", serialized())
    data = datasets.find(str(tmp_path), "training_data_dir")
    names = {}
    for wanted in (None, False):
        source = Source(data, InputConfig(8, example_weights=wanted))
        with tf.Graph().as_default():
            dataset = make_input_fn(source, WEIGHTED, Mode())()
            names[wanted] = set(v1.data.make_one_shot_iterator(dataset).get_next()[0])
    assert names[None] - names[False] == {"example_weights"}


# LibSVM.

LINES = [b"1:0.5 3:1 7:1", b"0:2 1:0.25 2:1", b"-1 4:1 5:2", b"  +1:3e0\t1:1  2:1"]
OF_LINES = [  # (weight, label, ids, values)
    (0.5, 1, [3, 7], [1, 1]), (2, 0, [1, 2], [0.25, 1]),
    (1, 0, [4, 5], [1, 2]), (3, 1, [1, 2], [1, 1]),
]  # fmt: skip
TWO = Schema(2, 50, weighted=True)


@both_ops
@pytest.mark.parametrize("number", [2, 4], ids=["plain", "any"])
@pytest.mark.parametrize("pad", [False, True])
def test_lines_are_read_as_xgboost_reads_them_and_short_ones_padded(ops, number, pad):
    lines, rows = LINES[:number], OF_LINES[:number]
    if pad:
        lines, rows = [*lines, b"1:5 3:1"], [*rows, (5, 1, [3, 0], [1, 0])]
    features, labels = parse(lines, TWO._replace(pad=pad), ops, formats.LIBSVM)
    weights, ids, values = (
        features[name].tolist() for name in ("example_weights", "feat_ids", "feat_vals")
    )
    assert list(zip(weights, labels, ids, values)) == rows


def read_back(folder):
    """[(label, weight, ids, values)] of a converted data set, read with protobuf."""
    rows = [row for path in sorted(folder.glob("*.tfrecords")) for row in examples_of(path)]
    return [(*row["label"], *row["weight"], row["ids"], row["values"]) for row in rows]


def convert(tmp_path, text, **flags):
    (tmp_path / "a.libsvm").write_text(text)
    libsvm_to_tfrecord.convert(
        libsvm_to_tfrecord.ConvertOptions(
            input=str(tmp_path / "a.libsvm"), output_dir=str(tmp_path / "out"), **flags
        )
    )
    said = json.loads((tmp_path / "out" / "dataset.json").read_text())
    return read_back(tmp_path / "out"), said


ROWS = [(1, 0.5, [3, 7], [1, 2]), (0, 1, [1, 2], [1, 1]), (0, 3, [4, 5], [1, 1])]


@pytest.mark.parametrize(
    "text, flags",
    [
        ("1:0.5 3:1 7:2\n# none: 1\n0 1:1 2:1\n0:3 4:1 5:1 # x:1\n", {}),
        ("1:0.5 3:1 7:2\n0 1:1 2:1\n0:3 4:1 5:1\n", {"pad": True, "num_files": 1}),
        ("1:0.5 0:3:1 1:7:2\n0 1:2:1 0:1:1\n0:3 0:4:1 1:5:1\n", {}),
        ("1:0.5 0:3:1 1:7:2\n0 1:2:1 0:1:1\n0:3 0:4:1 1:5:1\n", {"multi_valued": True}),
    ],
    ids=["libsvm", "padded", "libffm", "libffm, several values"],
)
def test_the_converter_keeps_weights(tmp_path, text, flags):
    rows, said = convert(tmp_path, text, **flags)
    assert rows == ROWS and said["weighted"]
    assert [file["positives"] for file in said["files"].values()] == [1]


def test_the_converter_keeps_weights_beside_a_field_map_and_string_ids(tmp_path):
    fields = tmp_path / "fields.json"
    ranges = [{"first_id": 1, "last_id": 4}, {"first_id": 5, "last_id": 9}]
    fields.write_text(json.dumps({"fields": ranges}))
    (tmp_path / "1").mkdir()
    rows, _ = convert(tmp_path / "1", "1:0.5 7:2 3:1\n0:2 5:1\n", fields=str(fields))
    assert rows == [(1, 0.5, [3, 7], [1, 2]), (0, 2, [0, 5], [0, 1])]
    (tmp_path / "2").mkdir()
    hashed, _ = convert(tmp_path / "2", "1:0.5 a:1 b:2\n0 c:1 d:1\n", hash_buckets=1000)
    plain = run(lambda x: records.hashed(x, 1000), [b"a", b"b", b"c", b"d"]).tolist()
    assert hashed == [(1, 0.5, plain[:2], [1, 2]), (0, 1, plain[2:], [1, 1])]


# Lines without labels.


@pytest.mark.parametrize(
    "texts, missing",
    [
        (["1:42 2:3\n1:7 2:1\n", "\n# none\n1:3 2:5 # x\n"], True),
        (["1:42 2:3\n1:7 2:1\n", "0:42 2:3\n"], False),
        (["1:42 2:3\n1 2:1\n", "1:42 2:3\n"], False),
        (["1:42 2:3\n-1:7 2:1\n", "1:42 2:3\n"], False),
        (["1 1:42 2:3\n", "1 1:42 2:3\n"], False),
    ],
)
def test_lines_that_all_begin_with_the_same_pair_have_no_labels(tmp_path, caplog, texts, missing):
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.libsvm").write_text(text)

    def read(flag, **more):
        asked = InputConfig(1, **{flag: f"{tmp_path}/*.libsvm"}, **more)
        around = sagemaker.Job(input_dir=str(tmp_path))
        return open_data.find(flag, job_of(input=asked, sagemaker=around))

    def convert(**flags):
        options = libsvm_to_tfrecord.ConvertOptions(
            f"{tmp_path}/*.libsvm", str(tmp_path / "out"), overwrite=True, **flags
        )
        return sum(file.rows for file in libsvm_to_tfrecord.convert(options))

    flags = "training_data_dir", "val_data_dir", "infer_data_dir"
    for call in (convert, *(functools.partial(read, flag) for flag in flags)):
        words = r"every line begins '1:', so labels .* sed 's/\^/0 /'"
        with pytest.raises(BadInput, match=words) if missing else contextlib.nullcontext():
            call()
    assert read("training_data_dir", example_weights=True).weighted
    assert convert(example_weights=True) == "".join(texts).count("\n") - 2 * ("#" in texts[1])
    inspect_dataset.inspect(f"{tmp_path}/*.libsvm")
    assert missing == any("labels seem to be missing" in x.getMessage() for x in caplog.records)


# The other tools.


@pytest.mark.parametrize("kind", ["described", "bare", "libsvm"])
def test_rebalance_carries_weights_along(tmp_path, kind):
    found, weights = some(200)
    lines = [
        f"{label:.0f}:{w!r} " + " ".join(f"{i}:{x!r}" for i, x in zip(ids, values))
        for label, w, ids, values in zip(found[0], weights.tolist(), found[1], found[2].tolist())
    ]
    _, said = convert(tmp_path, "\n".join(lines) + "\n", feature_size=50)
    before = read_back(tmp_path / "out")
    source = tmp_path / ("a.libsvm" if kind == "libsvm" else "out")
    if kind == "bare":
        (source / "dataset.json").unlink()
    rebalance.rebalance(
        rebalance.RebalanceOptions(input=str(source), output_dir=str(tmp_path / "new"), num_files=3)
    )
    if kind == "libsvm":
        after = [line for path in (tmp_path / "new").glob("*.libsvm") for line in path.open()]
        assert sorted(after) == sorted(f"{line}\n" for line in lines)
        return
    assert sorted(read_back(tmp_path / "new")) == sorted(before)
    assert json.loads((tmp_path / "new" / "dataset.json").read_text())["weighted"]


@pytest.mark.parametrize("kind", ["tfrecord", "libsvm"])
def test_inspect_sums_weights_up(tmp_path, kind):
    convert(tmp_path, "1:0.5 3:1 7:2\n0 1:1 2:1\n0:0 1:1 2:1\n1:2.5 4:1 5:1\n")
    source = str(tmp_path / ("out" if kind == "tfrecord" else "a.libsvm"))
    summary = inspect_dataset.inspect(source)
    assert summary["weights"] == {
        "sum": 4, "mean": 1, "min": 0, "max": 2.5, "zero_share": 0.25, "label_rate": 0.75,
    }  # fmt: skip
    assert summary["rows"] == 4 and summary["label_rate"] == 0.5 and not summary["mismatches"]
    done = run_tool("inspect_dataset", f"--data={source}")
    assert (
        "weights       0 to 2.5, mean 1, 25.00% of them 0, label rate by weight 0.7500"
        in done.stdout
    )
