"""Data and model must have the same ids: the feature map's fingerprint, and the sizes."""

import json
import os

import numpy as np
import pytest
from conftest import job_of, make_records, write_libsvm, write_tfrecords

from data_tools import libsvm_to_tfrecord, rebalance
from data_tools.click_logs import field_tables
from data_tools.libsvm_to_tfrecord import ConvertOptions
from deepfm import export, model_config
from deepfm.config import ModelConfig
from deepfm.data import datasets
from deepfm.data.datasets import DataSet
from deepfm.errors import BadInput
from deepfm.records import dataset_json, text_blocks
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import DATASETS, Column, Table, fields
from deepfm.records.raw.feature_map import Field
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

TABLE = Table("criteo", DATASETS["criteo"])
ONE, OTHER = "0123456789abcdef", "fedcba9876543210"


def a_map(**changed):
    """The fields of a map of Criteo's columns; I1 has two buckets, C1 a short and a long text."""
    made, first = [], 1
    for column in fields(DATASETS["criteo"], "buckets"):
        texts = {"I1": ["SP1", "5"], "C1": ["ä", "longer than 8 bytes"]}.get(column.name, [])
        made.append(Field(column, first, {t: first + 2 + i for i, t in enumerate(texts)}))
        made[-1] = made[-1]._replace(**changed.get(column.name, {}))
        first += 2 + len(texts)
    return made


def test_a_fingerprint_is_that_of_the_ids_and_not_of_the_file(tmp_path):
    made = a_map()
    loaded = feature_map.FeatureMap("criteo", "buckets", 10, made[-1].first_id + 2, made)
    tables = list(map(field_tables.from_texts, loaded.fields))
    expected = feature_map.fingerprint(made)
    assert feature_map.fingerprint(map(field_tables.by_texts, tables)) == expected
    for min_count in (10, 11):
        path = tmp_path / "feature_map.json"
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(field_tables.json_lines(tables, TABLE, "buckets", min_count))
        assert feature_map.fingerprint(feature_map.load(str(path)).fields) == expected
    others = [
        {"C1": {"vocabulary": {"ä": 3, "longer than 8 byteS": 4}}},
        {"C1": {"vocabulary": {"longer than 8 bytes": 3, "ä": 4}}},
        {"I2": {"column": Column("I2", "scaled"), "low": 1, "high": 2}}, {"C3": {"first_id": 9}},
        {"C3": {"column": Column("C3", "category", min_count=3)}},
    ]  # fmt: skip
    found = {feature_map.fingerprint(a_map(**other)) for other in others}
    assert len(found | {expected}) == 6 and all(len(x) == 16 for x in found)


# dataset.json.


def write(folder, of_map, feature_size=50):
    """A data set of ten records."""
    folder.mkdir(exist_ok=True)
    path = write_tfrecords(folder / "a.tfrecords", make_records(10))
    described = [datasets.DataFile(path, os.path.getsize(path), 10, 3)]
    dataset_json.write(str(folder), 4, feature_size, described, feature_map=of_map)
    return str(folder)


def test_a_data_set_tells_its_map(tmp_path):
    assert datasets.find(write(tmp_path / "a", ONE), "data").feature_map == ONE
    assert datasets.find(write(tmp_path / "b", None), "data").feature_map is None
    # Of a part it is not known, so of all together neither.
    assert datasets.find(f"{tmp_path}/a,{tmp_path}/b", "data").feature_map is None
    write(tmp_path / "b", OTHER)
    with pytest.raises(BadInput, match=f"differ in feature_map: .'{ONE}', '{OTHER}'."):
        datasets.find(f"{tmp_path}/a,{tmp_path}/b", "data")


def test_rebalance_carries_the_map_over(tmp_path):
    rebalance.rebalance(rebalance.RebalanceOptions(write(tmp_path / "a", ONE), str(tmp_path / "b")))
    assert datasets.find(str(tmp_path / "b"), "data").feature_map == ONE


def test_rebalance_describes_libsvm_text_that_was_described(tmp_path):
    (tmp_path / "a").mkdir()
    path = write_libsvm(tmp_path / "a" / "a.libsvm", make_records(10))
    files = [datasets.DataFile(path, os.path.getsize(path), 10, 3)]
    for described in (False, True):
        if described:
            dataset_json.write(str(tmp_path / "a"), 4, 60, files, feature_map=ONE)
        options = rebalance.RebalanceOptions(f"{tmp_path}/a", f"{tmp_path}/b", overwrite=True)
        rebalance.rebalance(options)
        found = datasets.find(str(tmp_path / "b"), "data")
        expected = (ONE, 60, 4, 10) if described else (None,) * 4
        assert (found.feature_map, found.feature_size, found.field_size, found.rows) == expected


# The model.


def asked(model_dir, **given):
    names = ("field_size", "feature_size", "multi_valued")
    given = {**dict.fromkeys(names), "deep_layers": (4,), "dropout": (0.0,), "seed": 1, **given}
    names = tuple(name for name, value in given.items() if value is not None)
    return job_of(model=given, given=names, model_dir=str(model_dir))


def of_trained(folder, *data):
    return model_config.of_trained(asked(folder), model_config.kept(str(folder), {}), *data)


def data(of_map=None, feature_size=50, name="--training_data_dir=x"):
    return DataSet([], "tfrecord", 4, feature_size, False, 0, name, feature_map=of_map)


def validation(*args):
    return data(*args, name="--val_data_dir=y")


@pytest.mark.parametrize(
    "found, words",
    [
        (validation(ONE), None),
        (validation(None, 40), None),
        (validation(None, None), None),
        (validation(OTHER), f"y: its ids come from feature map {OTHER}, the model's "),
        (validation(None, 51), "y: its feature_size is 51, the model has 50; convert it with"),
    ],
)  # fmt: skip
def test_validation_data_have_the_ids_of_the_training_data(tmp_path, found, words):
    if words:
        with pytest.raises(BadInput, match=f"--val_data_dir={words}"):
            model_config.to_train(asked(tmp_path), {}, data(ONE), found)
    else:
        config = model_config.to_train(asked(tmp_path), {}, data(ONE), found)
        assert (config.feature_size, config.feature_map) == (50, ONE)


def test_validation_data_decide_nothing_of_the_model(tmp_path):
    with pytest.raises(BadInput, match="--feature_size is missing"):
        model_config.to_train(asked(tmp_path), {}, data(None, None), validation(ONE))
    mine = asked(tmp_path, feature_size=60)
    config = model_config.to_train(mine, {}, data(None, None), validation(ONE))
    assert (config.feature_size, config.feature_map) == (60, None)


@pytest.fixture
def trained(tmp_path):
    """A model_dir with a checkpoint of step 1 whose model.json says feature map ONE."""
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.train.create_global_step()
        session.run(step.initializer)
        session.run(step.assign(1))
        v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), 1)
    model_config.keep(str(tmp_path), config(ONE))
    return tmp_path


def config(of_map):
    return ModelConfig(4, 50, deep_layers=(4,), dropout=(0.0,), feature_map=of_map)


def test_evaluation_and_inference_refuse_the_ids_of_another_map(trained):
    for of_map in (ONE, None):
        assert of_trained(trained, data(of_map)).feature_map == ONE
    with pytest.raises(BadInput, match=f"feature map {OTHER}, the model's from {ONE}"):
        of_trained(trained, data(OTHER))


def test_training_goes_on_with_the_same_map_or_with_data_that_tell_none(trained):
    known = lambda: model_config.kept(str(trained), {})
    go_on = lambda of_day: model_config.to_train(asked(trained), known(), of_day)
    for of_map in (ONE, None):
        model_config.keep(str(trained), go_on(data(of_map)))
        assert of_trained(trained).feature_map == ONE
    with pytest.raises(BadInput, match=f"its ids come from feature map {OTHER}, the model's"):
        go_on(data(OTHER))


def test_the_seed_is_that_of_the_job_as_that_of_its_order_is(trained):
    mine = asked(trained, embedding_size=4)._replace(given=())
    kept = {**model_config.kept(str(trained), {}), "seed": 5, "embedding_size": 8}
    found = model_config.to_train(mine, kept, data(ONE))
    assert (found.seed, found.embedding_size) == (1, 8)


def test_training_goes_on_with_the_same_hashes_or_with_data_that_tell_none(trained):
    model_config.keep(str(trained), config(None)._replace(hash_buckets=49))
    go_on = lambda buckets: model_config.to_train(
        asked(trained),
        model_config.kept(str(trained), {}),
        data(None)._replace(hash_buckets=buckets),
    )
    for buckets in (49, None):
        model_config.keep(str(trained), go_on(buckets))
        assert of_trained(trained).hash_buckets == 49
    with pytest.raises(BadInput, match="are not hashes, but the model's are hashes"):
        go_on(0)


def test_a_model_that_begins_has_no_map_of_an_earlier_one(trained):
    for path in trained.glob("*model.ckpt*"):
        path.unlink()
    (trained / "checkpoint").unlink()
    model_config.keep(str(trained), config(None))
    assert of_trained(trained).feature_map is None


# How ids were made.


def converted(folder, text="1 1:1 2:1\n0 3:1 4:1\n", **flags):
    """The data set that the converter makes of lines."""
    folder.mkdir()
    (folder / "a.libsvm").write_text(text)
    options = ConvertOptions(f"{folder}/a.libsvm", f"{folder}/out", feature_size=50, **flags)
    libsvm_to_tfrecord.convert(options)
    return datasets.find(str(folder / "out"), "val_data_dir")


@pytest.mark.parametrize(
    "flags, words",
    [
        ({}, None),
        ({"num_files": 2, "compress": True}, None),
        ({"id_offset": 1}, "id_offset 1 .* the model's with id_offset 0 "),
        ({"pad": True}, "pad true .* the model's with pad false "),
        (
            {"fields": [(0, 2), (3, 9)]},
            r"fields \[\[0, 2\], \[3, 9\]\] .* with fields \"by place\"",
        ),
    ],
)
def test_training_evaluation_and_inference_refuse_ids_made_otherwise(tmp_path, flags, words):
    if "fields" in flags:
        fields = [{"first_id": a, "last_id": b} for a, b in flags["fields"]]
        (tmp_path / "map.json").write_text(json.dumps({"fields": fields}))
        flags = {"fields": str(tmp_path / "map.json")}
    train, other = converted(tmp_path / "a"), converted(tmp_path / "b", "1 1:1 3:1\n" * 3, **flags)
    old = other._replace(made={})  # as an older version wrote it
    model = tmp_path / "model"
    model.mkdir()
    known = model_config.to_train(asked(model), {}, train, old)
    model_config.keep(str(model), known)
    jobs = (
        lambda data: model_config.to_train(asked(model), {}, train, data),
        lambda data: model_config.to_train(asked(model), model_config.kept(str(model), {}), data),
        lambda data: of_trained(model, data),
    )
    for job in jobs:
        assert job(old).ids == train.made["ids"]
        if words:
            with pytest.raises(
                BadInput, match=f"--val_data_dir=.*: its ids were made with {words}"
            ):
                job(other)
        else:
            assert job(other).ids == train.made["ids"]


def test_columns_in_another_order_are_other_ids(tmp_path):
    made = []
    for name, columns in (("a", "site,article"), ("b", "article,Site"), ("c", "SITE,article")):
        (tmp_path / f"{name}.csv").write_text(f"label,{columns}\n1,1,2\n")
        options = ConvertOptions(str(tmp_path / f"{name}.csv"), str(tmp_path / name))
        libsvm_to_tfrecord.convert(options)
        made.append(datasets.find(options.output_dir, "data").made["ids"])
    one, other = dataset_json.ids_differ(*made[:2])
    assert one.startswith('columns[0] "site" (') and other.startswith('columns[0] "article" (')
    assert dataset_json.ids_differ(made[0], made[2]) is None


def test_a_data_set_of_ids_made_in_two_ways_is_refused(tmp_path):
    converted(tmp_path / "a"), converted(tmp_path / "b", id_offset=1)
    with pytest.raises(
        BadInput, match=r"b/out/a.*: its ids were made with id_offset 1 .*id_offset 0"
    ):
        datasets.find(f"{tmp_path}/a/out,{tmp_path}/b/out", "data")


def test_an_offset_is_added_to_that_of_the_text_and_rebalance_keeps_all(tmp_path):
    first = converted(tmp_path / "a", id_offset=1)
    (tmp_path / "b").mkdir()
    text = write_libsvm(tmp_path / "b" / "a.libsvm", make_records(10))
    files = [datasets.DataFile(text, os.path.getsize(text), 10, 3)]
    dataset_json.write(str(tmp_path / "b"), 4, 50, files, ids=first.made["ids"])
    options = ConvertOptions(str(tmp_path / "b"), str(tmp_path / "c"), id_offset=2)
    libsvm_to_tfrecord.convert(options)
    made = datasets.find(str(tmp_path / "c"), "data").made
    assert made["ids"]["id_offset"] == 3
    rebalance.rebalance(rebalance.RebalanceOptions(str(tmp_path / "c"), str(tmp_path / "d")))
    assert datasets.find(str(tmp_path / "d"), "data").made == made


@pytest.mark.parametrize(
    "entry",
    [
        *({"feature_map": wrong} for wrong in (3, "x" * 16, "", None, ["0" * 16])),
        {"ids": 3}, {"ids": {}}, {"value_ranges": [[0, 1]]}, {"value_ranges": [[0, "1"]] * 4},
        {"unknown_shares": [1]},
    ],
)  # fmt: skip
def test_what_does_not_say_how_records_were_made_is_refused(tmp_path, entry):
    folder = write(tmp_path / "a", ONE)
    path = tmp_path / "a" / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    with pytest.raises(BadInput, match="is not a dataset.json"):
        datasets.find(folder, "data")


def test_dataset_json_has_the_range_of_each_field(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "TASK", 60)
    rng = np.random.RandomState(0)
    values = np.float32(rng.randint(-99, 99, [40, 3]) / 8)
    line = lambda i, form: " ".join(form.format(f, v) for f, v in enumerate(values[i]))
    expected = [[min(x), max(x)] for x in values.T.tolist()]
    for name, form, more in (
        ("lines", "{0}:{1}", {}),
        ("named", "{0}:{0}:{1}", {"id_offset": 1}),
        ("several", "{0}:{0}:{1}", {"multi_valued": True}),
    ):
        text = "".join(f"{i % 2} {line(i, form)}\n" for i in range(40))
        found = converted(tmp_path / name, text, **more)
        assert found.made["value_ranges"] == expected, name
    (tmp_path / "a.csv").write_text(
        "label,a\n" + "".join(f"{i % 2},{v:g}\n" for i, (v, _, _) in enumerate(values))
    )
    columns = [{"name": "label", "kind": "label"}, {"name": "a", "kind": "value", "id": 1}]
    (tmp_path / "c.json").write_text(json.dumps({"columns": columns}))
    options = ConvertOptions(
        str(tmp_path / "a.csv"), str(tmp_path / "csv"), columns=str(tmp_path / "c.json")
    )  # fmt: skip
    libsvm_to_tfrecord.convert(options)
    assert datasets.find(str(tmp_path / "csv"), "data").made["value_ranges"] == expected[:1]


def test_a_field_without_values_has_no_range(tmp_path):
    found = converted(tmp_path / "a", "1 0:1:-0.5 2:3:2\n0 2:3:.1 2:4:-0\n", multi_valued=True)
    assert found.made["value_ranges"] == [[-0.5, -0.5], None, [0.0, 2.0]]


def test_an_export_says_its_map_and_one_of_an_older_version_says_none(tmp_path):
    stamp = export.Stamp(1, "b", ONE)
    said = {"format_version": 1, "model_id": "a", "kind": "last", **stamp._asdict()}
    (tmp_path / "assets.extra").mkdir()
    path = tmp_path / "assets.extra" / "deepfm.json"
    path.write_text(json.dumps(said))
    assert export.stamp_of(str(tmp_path)) == stamp
    del said["feature_map"]
    path.write_text(json.dumps(said))
    assert export.stamp_of(str(tmp_path)) == stamp._replace(feature_map=None)
