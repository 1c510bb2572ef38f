"""Which errors are about records, and what is said of records that have another schema."""

import pytest
from conftest import (
    BROKEN_STEP,
    SMALL_MODEL,
    make_records,
    run_python,
    run_tool,
    run_train,
    write_tfrecords,
)

from deepfm.records import wire
from deepfm.records.schema import Schema
from deepfm.runtime.tf import tf

FLOATS = tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 1]))
INTS = tf.train.Feature(int64_list=tf.train.Int64List(value=[3, 4]))
TEXTS = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"\xff"]))
LABEL = tf.train.Feature(float_list=tf.train.FloatList(value=[1]))


def serialized(is_sequence=False, **features):
    made = tf.train.Features(feature={"label": LABEL, **features})
    if not is_sequence:
        return tf.train.Example(features=made).SerializeToString()
    steps = tf.train.FeatureLists(feature_list={"ids": tf.train.FeatureList(feature=[INTS])})
    return tf.train.SequenceExample(context=made, feature_lists=steps).SerializeToString()


SCHEMAS = {
    "other names": (
        serialized(feat_ids=INTS, feat_vals=FLOATS),
        "found feat_ids (2 int64), feat_vals (2 float), label (1 float)",
    ),
    "ids are floats": (
        serialized(ids=FLOATS, values=FLOATS),
        "found ids (2 float), label (1 float), values (2 float)",
    ),
    "values are int64": (
        serialized(ids=INTS, values=INTS),
        "found ids (2 int64), label (1 float), values (2 int64)",
    ),
    "ids are strings": (
        serialized(ids=TEXTS, values=FLOATS),
        "found ids (2 bytes), label (1 float), values (2 float)",
    ),
    "no values": (serialized(ids=INTS), "found ids (2 int64), label (1 float)"),
    "a SequenceExample": (
        serialized(True),
        "found a tf.train.SequenceExample with label (1 float)",
    ),
    "no feature": (b"", "found none"),
}


@pytest.mark.parametrize("record, said", SCHEMAS.values(), ids=SCHEMAS)
def test_the_features_that_were_found_are_named_with_their_types(record, said):
    reason = wire.explain(record, Schema(2))
    assert reason.startswith("expected the features label (float), ids (int64) and values (float)")
    assert f", {said}; " in reason


def test_a_field_without_values_is_no_other_schema():
    schema = Schema(2, multi_valued=True)
    none = tf.train.Feature(int64_list=tf.train.Int64List(value=[0, 0]))
    record = serialized(counts=none, ids=tf.train.Feature(), values=tf.train.Feature())
    assert wire.explain(record, schema) is None


@pytest.mark.parametrize("name", ["other names", "values are int64", "a SequenceExample"])
def test_every_reader_of_records_names_the_features(tmp_path, name):
    record, said = SCHEMAS[name]
    path = tmp_path / "a.tfrecords"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(record)
    more = [] if name != "values are int64" else ["--feature_size=9"]
    for result in (
        run_train(f"--training_data_dir={path}", f"--model_dir={tmp_path}/m", *more),
        run_tool("inspect_dataset", f"--data={path}"),
        run_tool("rebalance", f"--input={path}", f"--output_dir={tmp_path}/out"),
    ):
        assert result.returncode == 2
        last = result.stderr.splitlines()[-1]
        assert f"{path}: record 0 at byte 0: expected the features" in last and said in last


DEVICES = ("--distribution=mirrored", "--replicas_per_process=2", *SMALL_MODEL)


def test_a_bad_record_is_named_where_the_iterator_feeds_several_devices(tmp_path):
    labels, ids, values = make_records(5000)
    ids[4990, 0] = -5  # beyond those that are looked at before training
    path = write_tfrecords(tmp_path / "a.tfrecords", (labels, ids, values))
    result = run_train(f"--training_data_dir={path}", f"--model_dir={tmp_path}/m", *DEVICES, code=2)
    assert f"{path}: record 4990 at byte " in result.stderr.splitlines()[-1]


def test_an_error_of_another_operator_is_not_taken_for_a_bad_record(tmp_path):
    path = write_tfrecords(tmp_path / "a.tfrecords", make_records(300))
    flags = f"--training_data_dir={path}", f"--model_dir={tmp_path}/m", *DEVICES
    result = run_python("-c", BROKEN_STEP, *flags)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "InvalidArgumentError: StringToNumber" in last
    assert "looking for the bad record" not in result.stderr
