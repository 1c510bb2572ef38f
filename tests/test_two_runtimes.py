"""TensorFlow 1.15 and 2.15: what the program writes on one of them, it reads on the other.

`scripts/setup.sh --tf2` makes the environment of 2.15.
"""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from conftest import ROOT, evaluations, go_back, make_records, run_python, write_tfrecords

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
path, inputs, output = sys.argv[1:]
found = {}
with np.load(inputs, allow_pickle=True) as given, tf.Graph().as_default(), v1.Session() as session:
    graph = v1.saved_model.load(session, ["serve"], path)
    for name in ("raw", "candidates"):
        signature = graph.signature_def[name]
        feed = {signature.inputs[key].name: given[f"{name} {key}"] for key in signature.inputs}
        found[name] = session.run(signature.outputs["prob"].name, feed)
np.savez(output, **found)
"""


def run(runtime, *words):
    if (runtime == "2.15") == IS_2:
        done = run_python(*words)
    else:
        command, how = [PYTHONS[runtime], *map(str, words)], dict(cwd=ROOT, env=ENV, timeout=300)
        done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_parent_on_tensorflow_2_changes_nothing():
    code = "from deepfm.runtime.tf import tf; print(tf.zeros([2]).shape[0].value)"
    env = {**ENV, "TF2_BEHAVIOR": "1"}
    done = subprocess.run(
        [PYTHONS["1.15"], "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout == "2\n", done.stderr


def train(runtime, model_dir):
    data = write_tfrecords(model_dir.parent / "a.tfrecords", make_records(640))
    run(
        runtime, "train.py", f"--training_data_dir={data}", f"--val_data_dir={data}",
        f"--model_dir={model_dir}", "--max_steps=20", "--feature_size=50",
        "--embedding_size=4", "--deep_layers=8,4", "--batch_size=64", "--num_epochs=9",
        "--log_steps=1", "--batch_norm", "--dropout=0.1",
    )  # fmt: skip


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
def test_training_resumes_from_the_checkpoint_of_the_other(tmp_path, reader):
    (writer,) = set(PYTHONS) - {reader}
    train(writer, tmp_path / writer)
    without = shutil.ignore_patterns("events.*")
    shutil.copytree(tmp_path / writer, tmp_path / reader, ignore=without)
    go_back(tmp_path / reader, 10)
    train(reader, tmp_path / reader)
    found = {name: losses(tmp_path / name, 11) for name in (writer, reader)}
    assert sorted(found[writer]) == sorted(found[reader]) == [*range(11, 21)]
    for step, loss in found[writer].items():
        assert found[reader][step] == pytest.approx(loss, rel=1e-6), step
    of_both = [evaluations(tmp_path / name)[-1] for name in (writer, reader)]
    assert [x["step"] for x in of_both] == [20, 20]
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
        "--batch_size=64", "--deep_layers=8", "--embedding_size=4")  # fmt: skip
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
def test_each_loads_the_exports_of_both(exported, tmp_path, loader):
    cells = {f"{of} {name}": x for of in REQUESTS for name, x in REQUESTS[of].items()}
    np.savez(tmp_path / "in.npz", **{k: np.array(x, object) for k, x in cells.items()})
    found = []
    for writer, path in exported.items():
        run(loader, "-c", PREDICT, path, tmp_path / "in.npz", tmp_path / f"{writer}.npz")
        found.append(np.load(tmp_path / f"{writer}.npz"))
    for signature, bad in (("raw", [False, False, True]), ("candidates", [False] * 4)):
        probs = [x[signature] for x in found]
        np.testing.assert_allclose(*probs, rtol=1e-6)
        assert np.isnan(probs[0]).tolist() == bad and len(set(probs[0])) > 1
