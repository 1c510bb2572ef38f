"""TensorFlow 1.15 and 2.15: what the program writes on one of them, it reads on the other.

`scripts/setup.sh --tf2` makes the environment of 2.15.
"""

import functools
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from conftest import ROOT, evaluations, make_records, write_tfrecords

from deepfm.runtime.tf import IS_2, tf

PYTHONS = {"1.15": ROOT / ".venv/bin/python", "2.15": ROOT / ".venv-tf2/bin/python"}
# `scripts/test.sh --tf2` tries all; the suite, what 1.15 does with the files of 2.15.
READERS = ["1.15", pytest.param("2.15", marks=() if IS_2 else pytest.mark.table)]
ENV = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
ENV.pop("TF2_BEHAVIOR", None)  # which TensorFlow 2 sets, and 1.15 reads

pytestmark = [
    pytest.mark.timeout(600),  # 2.15 starts in 8 s of an idle machine
    pytest.mark.skipif(
        not (PYTHONS["2.15"].parent.parent / "deepfm-setup").exists(),
        reason="needs scripts/setup.sh --tf2",
    ),
]

PREDICT = """
import sys
import numpy as np
import tensorflow as tf
v1 = tf.compat.v1
path, name, inputs, output = sys.argv[1:]
with np.load(inputs, allow_pickle=True) as given, tf.Graph().as_default(), v1.Session() as session:
    graph = v1.saved_model.load(session, ["serve"], path)
    signature = graph.signature_def[name]
    feed = {signature.inputs[key].name: given[key] for key in signature.inputs}
    np.save(output, session.run(signature.outputs["prob"].name, feed))
"""


def run(runtime, *words):
    command = [str(PYTHONS[runtime]), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_parent_on_tensorflow_2_changes_nothing():
    code = "from deepfm.runtime.tf import tf; print(tf.zeros([2]).shape[0].value)"
    env = {**ENV, "TF2_BEHAVIOR": "1"}
    done = subprocess.run(
        [PYTHONS["1.15"], "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout == "2\n", done.stderr


def train(runtime, data, model_dir, steps, *more):
    run(
        runtime, "train.py", f"--training_data_dir={data}", f"--val_data_dir={data}",
        f"--model_dir={model_dir}", f"--max_steps={steps}", "--feature_size=50",
        "--embedding_size=4", "--deep_layers=8,4", "--batch_size=64", "--num_epochs=9",
        "--log_steps=1", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tfrecords(tmp_path_factory.mktemp("data") / "a.tfrecords", make_records(640))


@pytest.fixture(scope="module")
def written(tmp_path_factory, data):
    """The runtime -> a model_dir with a checkpoint of step 10."""

    @functools.lru_cache(maxsize=None)
    def by(name):
        folder = tmp_path_factory.mktemp("model") / name
        train(name, data, folder, 10, "--batch_norm", "--dropout=0.1")
        return folder

    return by


def losses(folder, first):
    """{step: loss} of the events from a step on."""
    return {
        event.step: value.simple_value
        for path in folder.glob("events.out.*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "loss" and event.step >= first
    }


@pytest.mark.parametrize("reader", READERS)
def test_training_resumes_from_the_checkpoint_of_the_other(written, data, tmp_path, reader):
    (writer,), found = set(PYTHONS) - {reader}, {}
    for name in (writer, reader):
        shutil.copytree(written(writer), tmp_path / name)
        train(name, data, tmp_path / name, 20, "--batch_norm", "--dropout=0.1")
        assert evaluations(tmp_path / name)[-1]["step"] == 20
        found[name] = losses(tmp_path / name, 11)
    assert sorted(found[writer]) == sorted(found[reader]) == [*range(11, 21)]
    for step, loss in found[writer].items():
        assert found[reader][step] == pytest.approx(loss, rel=1e-6), step
    of_both = [evaluations(tmp_path / name)[-1] for name in (writer, reader)]
    for metric in ("auc", "log_loss"):
        assert of_both[0][metric] == pytest.approx(of_both[1][metric], rel=1e-6)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{the runtime: an export with raw rows and candidates}, all of one model, and the rows."""
    folder = tmp_path_factory.mktemp("exports")
    columns = [
        {"name": "clicked", "kind": "label"}, {"name": "shop", "kind": "category"},
        {"name": "age", "kind": "number", "buckets": 4},
        {"name": "day", "kind": "weekday", "format": "iso"},
        {"name": "tags", "kind": "list", "separator": "|"},
    ]  # fmt: skip
    (folder / "columns.json").write_text(json.dumps({"columns": columns}))
    rows = [
        f"{i % 3 == 0:d},{'abc'[i % 3]},{i % 17},2021-03-{i % 28 + 1:02d}T05:06,x|y{i % 5}"
        for i in range(300)
    ]
    (folder / "a.csv").write_text("\n".join(["clicked,shop,age,day,tags", *rows, ""]))
    of_data, model = folder / "data", folder / "model"
    run("1.15", "-m", "data_tools.prepare", f"--input={folder}/a.csv", "--min_count=1",
        f"--columns={folder}/columns.json", f"--output_dir={of_data}")  # fmt: skip
    run("1.15", "train.py", f"--training_data_dir={of_data}/train", f"--model_dir={model}",
        "--num_epochs=2", "--batch_size=64", "--deep_layers=8", "--embedding_size=4")  # fmt: skip
    found = {}
    for name in PYTHONS:
        run(name, "train.py", "--task_type=export", f"--model_dir={model}",
            f"--training_data_dir={of_data}/train", f"--servable_model_dir={folder / name}",
            "--item_fields=0")  # fmt: skip
        (found[name],) = (folder / name).iterdir()
    return found


REQUESTS = {
    "raw": {
        "shop": ["a", "new", ""], "age": ["3", "", "x"], "tags": ["x", "", "y1|y2"],
        "day": ["2021-03-04T05:06", "", "2021-04-31"],
    },
    "candidates": {
        "shop": ["a", "b", "c", "new"], "age": ["3"], "tags": ["x|y1"], "day": ["2021-03-04T05:06"],
    },
}  # fmt: skip


@pytest.mark.parametrize("loader", READERS)
@pytest.mark.parametrize("signature", REQUESTS)
def test_each_loads_the_exports_of_both(exported, tmp_path, signature, loader):
    inputs = {name: np.array(x, object) for name, x in REQUESTS[signature].items()}
    np.savez(tmp_path / "inputs.npz", **inputs)
    found = []
    for writer, path in exported.items():
        output = tmp_path / f"{writer}.npy"
        run(loader, "-c", PREDICT, path, signature, tmp_path / "inputs.npz", output)
        found.append(np.load(output))
    np.testing.assert_allclose(*found, rtol=1e-6)
    bad = [False, False, True] if signature == "raw" else [False] * 4
    assert np.isnan(found[0]).tolist() == bad and len(set(found[0])) > 1
