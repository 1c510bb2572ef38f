"""--export_format=npz: the weights as arrays, and the programs of docs/other_frameworks.md."""

import collections
import json
import pathlib
import re
import subprocess

import numpy as np
import pytest
from conftest import (
    ROOT,
    example,
    make_records,
    report,
    run_tool,
    run_train,
    small_training,
    write_payloads,
    write_tfrecords,
)
from mode_steps import weights
from test_model import K, numpy_logits

from deepfm.runtime.tf import tf
from deepfm.state import sliced_saver
from deepfm.state.serving import npz

v1 = tf.compat.v1
pytestmark = pytest.mark.timeout(300)  # Keras takes its time to load
PEERS = ROOT / ".venv-peers" / "bin" / "python"
F, ROWS = 4, 300
Exported = collections.namedtuple("Exported", "folder arrays about ids values counts")


def lists_of_values():
    """(ids [B, M], values [B, M], counts [B, F]); nan and -9 fill up the rows."""
    random = np.random.RandomState(3)
    counts = random.randint(0, 4, [ROWS, F])
    there = np.arange(counts.sum(axis=1).max()) < counts.sum(axis=1)[:, np.newaxis]
    ids = np.where(there, random.randint(1, 50, there.shape), -9)
    values = np.where(there, random.randn(*there.shape), np.nan).astype(np.float32)
    return ids, values, counts


def write_lists(path, ids, values, counts):
    ends = counts.sum(axis=1)
    labels = [float(np.sin(row[:end]).sum() > 0) for row, end in zip(ids, ends)]
    rows = zip(labels, *([x[:end] for x, end in zip(xs, ends)] for xs in (ids, values)), counts)
    write_payloads(path, [example(*row) for row in rows])


def predictions(folder):
    """What infer predicts for the records of a folder."""
    flags = f"--infer_data_dir={folder}/a.tfrecords", f"--model_dir={folder}/model"
    run_train("--task_type=infer", *flags, code=0)
    return np.loadtxt(f"{folder}/model/predictions.txt")


def export(folder, *more):
    """Exports the weights of a folder's model: (the new folder, the finished process)."""
    flags = f"--model_dir={folder}/model", f"--servable_model_dir={folder}/weights"
    done = run_train("--task_type=export", "--export_format=npz", *flags, *more, code=0)
    return pathlib.Path(report(folder / "model", "export")["export"]), done


@pytest.fixture(scope="module", params=["one value", "mean", "max"])
def exported(request, tmp_path_factory):
    """The folder of some records and of a model of them, and the export of its weights."""
    folder, pooling, counts = tmp_path_factory.mktemp("npz"), request.param, None
    flags = [f"--embedding_size={K}", "--deep_layers=7,5", "--num_epochs=4", "--learning_rate=0.05"]
    if pooling == "one value":
        labels, ids, values = make_records(ROWS)
        write_tfrecords(folder / "a.tfrecords", (labels, ids, values))
    else:
        ids, values, counts = lists_of_values()
        write_lists(folder / "a.tfrecords", ids, values, counts)
        flags += [f"--pooling={pooling}", "--batch_norm", "--batch_norm_epsilon=0.01"]
    if counts is None:
        run_train(*small_training(folder / "a.tfrecords", folder / "model", *flags), code=0)
        path = folder / "model" / "model.json"  # as --correct_calibration makes it:
        path.write_text(json.dumps({**json.loads(path.read_text()), "logit_offset": -0.7}))
        path, _ = export(folder)
    else:
        run_train(*training(folder, *flags), code=0)
        (path,) = (folder / "weights").iterdir()
    return Exported(folder, np.load(path / "weights.npz"), about(path), ids, values, counts)


def about(path):
    return json.loads((path / "model.json").read_text())


@pytest.fixture(scope="module")
def inferred(exported):
    return predictions(exported.folder)


def test_the_arrays_are_those_of_the_checkpoint(exported):
    saved, found = weights(exported.folder / "model"), exported.about["arrays"]
    assert [x["name"] for x in found] == exported.arrays.files
    for each in found:
        array = exported.arrays[each["name"]]
        assert (str(array.dtype), list(array.shape)) == (each["dtype"], each["shape"])
        np.testing.assert_array_equal(array, saved.pop(each["variable"]))
    assert {"bias", "first_order", "embeddings", "deep_1/kernel"} < set(exported.arrays.files)
    others = r".*/(Adam(_1)?|last_seen)|beta._power|learning_rate_decay|global_step"
    assert [name for name in saved if not re.fullmatch(others, name)] == []


def test_the_papers_equations_give_the_predictions(exported, inferred):
    said, of = exported.about, exported.arrays
    assert said["activation"] == "relu"

    def normalize(x, i):
        if not said["batch_norm"]:
            return x
        gamma, beta, mean, variance = (
            of[f"batch_norm_{i}/{name}"]
            for name in ("gamma", "beta", "moving_mean", "moving_variance")
        )
        return gamma * (x - mean) / np.sqrt(variance + said["batch_norm_epsilon"]) + beta

    w = {x["variable"]: of[x["name"]].astype(np.float64) for x in said["arrays"]}
    inputs = exported.ids, exported.values, exported.counts
    logits = numpy_logits(w, *inputs, said["pooling"], normalize) + said["logit_offset"]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), inferred, atol=1e-6)
    assert np.std(inferred) > 0.05


@pytest.mark.skipif(not PEERS.exists(), reason="scripts/setup.sh --peers makes .venv-peers")
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_the_documented_programs_give_the_predictions(exported, inferred, framework, tmp_path):
    text = (ROOT / "docs" / "other_frameworks.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (program,) = [x for x in programs if f"import {framework}\n" in x]
    (tmp_path / "program.py").write_text(program)
    arrays = {"ids": exported.ids, "values": exported.values, "counts": exported.counts}
    if exported.counts is None:
        del arrays["counts"]
    else:
        arrays.update(ids=by_field(exported, "ids"), values=by_field(exported, "values"))
    np.savez(tmp_path / "rows.npz", **arrays)
    (path,) = (exported.folder / "weights").iterdir()
    words = [PEERS, tmp_path / "program.py", path, tmp_path / "rows.npz"]
    done = subprocess.run(words, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    found = np.array(done.stdout.split(), float)
    np.testing.assert_allclose(found, inferred, rtol=0, atol=1e-6)


def by_field(exported, name):
    """The lists [B, M] of all fields as lists of each, [B, F, L]."""
    found, counts = [], exported.counts
    for row, of_fields in zip(getattr(exported, name), counts):
        ends = np.cumsum(of_fields)
        lists = [row[begin:end] for begin, end in zip([0, *ends], ends)]
        found.append([np.pad(x, (0, counts.max() - len(x)), constant_values=-9) for x in lists])
    return np.array(found)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_large_table_is_written_a_slice_at_a_time(parts, tmp_path, monkeypatch):
    """Whole, or in the parts of three parameter servers."""
    table = np.random.RandomState(0).randn(100, 3).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        cut = tf.compat.v1.fixed_size_partitioner(parts)
        v1.get_variable("fm_v", initializer=tf.constant(table), partitioner=cut)
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    monkeypatch.setattr(sliced_saver, "SLICE_BYTES", 16 * 3 * 4)
    npz.write(str(tmp_path / "made"), path, {"fm_v": [100, 3]}, {})
    np.testing.assert_array_equal(np.load(tmp_path / "made/weights.npz")["embeddings"], table)


@pytest.fixture
def small(tmp_path):
    """A folder with a few records."""
    write_tfrecords(tmp_path / "a.tfrecords", make_records(64))
    return tmp_path


def training(folder, *more):
    weights = f"--servable_model_dir={folder}/weights", "--export_format=npz"
    return (*small_training(folder / "a.tfrecords", folder / "model"), *weights, *more)


def test_training_exports_once_and_again_if_damaged_and_a_path_chooses_a_checkpoint(small):
    flags = training(small, "--batch_size=16", "--save_checkpoints_steps=2")
    for _ in range(2):
        done = run_train(*flags, code=0)
    (path,) = (small / "weights").iterdir()
    assert sorted(x.name for x in path.iterdir()) == ["model.json", "weights.npz"]
    assert f"The model of step 4 is already exported at {path}." in done.stderr
    run_train(*flags, "--export_format=saved_model", code=0)  # not that of the weights
    content = bytearray((path / "weights.npz").read_bytes())
    content[300] ^= 1
    (path / "weights.npz").write_bytes(content)
    run_train(*flags, code=0)
    formats = [(x / "weights.npz").exists() for x in sorted((small / "weights").iterdir())]
    assert formats == [True, False, True]

    older = tf.train.load_variable(f"{small}/model/model.ckpt-2", "fm_bias")
    path, _ = export(small, f"--checkpoint={small}/model/model.ckpt-2")
    np.testing.assert_array_equal(np.load(path / "weights.npz")["bias"], older)
    assert about(path)["global_step"] == 2


def test_the_feature_map_comes_along(tmp_path):
    rows = [f"{i % 2},{i % 5},red|size{i % 3}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["clicked,shop,tags", *rows]) + "\n")
    columns = [
        {"name": "clicked", "kind": "label"},
        {"name": "shop", "kind": "category"},
        {"name": "tags", "kind": "list", "separator": "|"},
    ]
    (tmp_path / "columns.json").write_text(json.dumps({"columns": columns}))
    run_tool(
        "prepare", f"--input={tmp_path}/a.csv", f"--columns={tmp_path}/columns.json",
        f"--output_dir={tmp_path}/data", "--min_count=1", code=0,
    )  # fmt: skip
    train = f"--training_data_dir={tmp_path}/data/train", f"--model_dir={tmp_path}/model"
    weights = "--export_format=npz", f"--servable_model_dir={tmp_path}/first"
    run_train(*train, *weights, "--embedding_size=4", "--deep_layers=4", code=0)
    mine = (tmp_path / "data" / "feature_map.json").read_text()
    (path,) = (tmp_path / "first").iterdir()
    assert (path / "feature_map.json").read_text() == mine
    assert about(path)["feature_map"] == about(path)["ids"]["feature_map"]

    (kept,) = tmp_path.glob("model/feature_maps/*.json")
    kept.write_text(mine.replace('"red"', '"blue"'))  # its fingerprint no longer fits
    exports = "--task_type=export", "--export_format=npz", f"--servable_model_dir={tmp_path}/other"
    done = run_train(*exports, f"--model_dir={tmp_path}/model", code=2)
    assert f"{kept} is missing or another map" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "other").glob("*"))

    for kept in [tmp_path / "data/feature_map.json", *tmp_path.glob("model/feature_maps/*")]:
        kept.unlink()
    asked = f"--val_data_dir={tmp_path}/data/train"
    path, done = export(tmp_path, asked)
    assert "The export comes without a feature map: the feature_map.json that made" in done.stderr
    assert "--val_data_dir has no effect with --export_format=npz." in done.stderr


def test_what_would_export_nothing_is_refused(small):
    flags = small_training(small / "a.tfrecords", small / "model", "--export_format=npz")
    done = run_train(*flags, code=2)
    said = "train.py: --export_format=npz needs --servable_model_dir, a folder to export to."
    assert done.stderr.splitlines()[-1] == said
