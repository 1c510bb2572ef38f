"""What comes from outside is data: nothing in it is run, and no size or name in it is trusted."""

import ast
import itertools
import json
import os
import pathlib

import pytest
from conftest import ROOT, job_of, make_records, run_train, small_job, write_tfrecords

from deepfm import estimators
from deepfm.config import InputConfig, ModelConfig
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json
from deepfm.runtime import memory, sagemaker
from deepfm.state import model_json

# What could run what it reads: functions, modules, and keyword arguments that turn it on.
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"system", "popen", "import_module"}
MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "multiprocessing",
}  # fmt: skip
KEYWORDS = {"allow_pickle", "shell"}

JUSTIFIED = {
    # Pickles travel through pipes between a program and the workers that it has forked.
    ("data_tools/engines/pool.py", "multiprocessing"),
    # A mode is the file of its name, one of those in the folder.
    ("deepfm/modes/__init__.py", "import_module"),
    # A shell joins files, whose names the benchmark has made, into a FIFO.
    ("scripts/benchmarks/measures.py", "shell"),
}


def found_in(path):
    """What a source file has of the above."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from MODULES & {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from MODULES & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            yield from BUILTINS & {getattr(node.func, "id", None)}
            yield from METHODS & {getattr(node.func, "attr", None)}
            yield from KEYWORDS & {keyword.arg for keyword in node.keywords}


def test_nothing_that_is_read_is_unpickled_or_run():
    paths = [ROOT / "train.py"]
    for folder in ("deepfm", "data_tools", "deepfm_sklearn", "scripts", "docker"):
        paths += (ROOT / folder).rglob("*.py")
    assert len(paths) > 30
    found = {(str(path.relative_to(ROOT)), name) for path in paths for name in found_in(path)}
    assert found == JUSTIFIED


@pytest.mark.parametrize("name", ["../x.tfrecords", "{}/x.tfrecords", "/etc/passwd", "a/../../x"])
def test_a_dataset_json_names_no_file_outside_its_folder(tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    inside = write_tfrecords(folder / "a.tfrecords", make_records(3))
    outside = write_tfrecords(tmp_path / "x.tfrecords", make_records(5))
    entry = {"rows": 5, "bytes": os.path.getsize(outside), "positives": 0}
    content = {"format_version": 1, "field_size": 4, "feature_size": 50}
    content["files"] = {name.format(tmp_path): entry}
    (folder / "dataset.json").write_text(json.dumps(content))
    found = datasets.find(str(folder), "data")
    assert [(file.path, file.rows) for file in found.files] == [(inside, None)]


# Sizes.

LARGE = 10**15


@pytest.mark.parametrize(
    "field, feature", [(LARGE, 50), (-4, 50), (4, LARGE), (4, -50), (4, 2**63)]
)
def test_a_dataset_json_with_absurd_sizes_is_refused(tmp_path, field, feature):
    path = write_tfrecords(tmp_path / "a.tfrecords", make_records(9))
    file = datasets.DataFile(path, os.path.getsize(path), 9, 3)
    dataset_json.write(str(tmp_path), field, feature, [file])
    with pytest.raises(BadInput, match="_size"):
        data = datasets.find(str(tmp_path), "training_data_dir")
        memory.check_sizes(ModelConfig(data.field_size, data.feature_size))


def test_a_job_refuses_sizes_in_one_sentence_and_not_for_want_of_memory(data, tmp_path):
    done = run_train(*small_job(data, tmp_path / "model", f"--embedding_size={LARGE}"), code=2)
    assert f"size, not {LARGE}." in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "sizes_given, machine, accepted",
    [
        ((39, 10**6), True, True),
        ((39, 10**6, 32, (10**9, 10**9)), True, False),
        ((39, 2 * 10**9), True, False),
        ((39, 2 * 10**9), False, True),  # parameter servers hold it together
        ((39, 2**31), False, False),
        ((100001, 100), False, False),
    ],
)
def test_a_model_has_to_fit_into_the_machine_and_into_tensorflow(sizes_given, machine, accepted):
    config = ModelConfig(*sizes_given)
    if accepted:
        memory.check_sizes(config, machine)
    else:
        with pytest.raises(BadInput):
            memory.check_sizes(config, machine)


@pytest.mark.parametrize(
    "config, load, gigabytes",
    [
        # Adam's moments, which the weights alone do not show.
        ((39, 117581, 20000), dict(trains=True, moments=2), 28),
        ((39, 117581, 20000), dict(), 9),
        # Layers: weights, moments, gradients and what a batch computes.
        ((39, 10001, 32, (10**6,)), dict(trains=True, moments=2, batch_size=1024), 31),
        ((39, 10001, 32, (10**6,)), dict(trains=True, moments=0, batch_size=1), 15),
        ((39, 10**6), dict(trains=True, moments=2, processes=8), 3),
        ((39, 10**6), dict(trains=True, moments=2, copies=8, replicas=8), 3),
        ((39, 10**6), dict(trains=True, moments=2, dense=True, evaluates=True), 0.6),
    ],
)
def test_the_memory_of_a_job_is_more_than_that_of_its_weights(monkeypatch, config, load, gigabytes):
    config, load = ModelConfig(*config), memory.Load(**load)
    monkeypatch.setattr(memory, "_memory", lambda: 10**15)
    memory.check_sizes(config, True, load)
    monkeypatch.setattr(memory, "_memory", lambda: gigabytes * 10**9)
    with pytest.raises(BadInput, match="only .* GB may be used here"):
        memory.check_sizes(config, True, load)


@pytest.mark.parametrize(
    "epochs, asked, counts",
    [
        (1, dict(), False),
        (1, dict(eval_every_steps=5), True),
        (2, dict(), True),
        (2, dict(max_steps=5), False),  # perhaps before the first epoch ends
        (2, dict(sagemaker=sagemaker.Job(pipe_mode=True)), False),
    ],
)
def test_evaluations_on_the_way_count_as_memory(monkeypatch, epochs, asked, counts):
    loads = []
    monkeypatch.setattr(memory, "check_sizes", lambda config, one, load: loads.append(load))
    for validation, evaluates in (("a", counts), (None, False)):
        asked_of_data = InputConfig(num_epochs=epochs, val_data_dir=validation)
        job = job_of(task_type="train", input=asked_of_data, **asked)
        estimators.check_fits_memory(job, ModelConfig(4, 50))
        assert loads.pop().evaluates == evaluates


def test_memory_that_a_control_group_allows_is_what_there_is(monkeypatch):
    told = {"/sys/fs/cgroup/memory.max": "max\n", "/proc/meminfo": "MemAvailable:  7 kB\n"}
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path: told[str(path)])
    told["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = f"{10**15}\n"
    machine = memory._memory()
    assert 10**8 < machine < 10**15 and memory._free() == 7168
    told["/sys/fs/cgroup/memory.max"] = "5000\n"
    assert memory._memory() == 5000


# model.json.

GOOD = ModelConfig(4, 50)._asdict()


def test_a_model_json_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(dict(GOOD, of_a_later_version=1)))
    found = model_json.load(str(path))
    assert found == json.loads(json.dumps(GOOD))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "\xff", '"x"', "[" * 9999]
    + [
        json.dumps({**GOOD, **odd})
        for odd in (
            {"field_size": -1},
            {"field_size": "4"},
            {"feature_size": 0},
            {"feature_size": 1e400},
            {"feature_size": 10**400},
            {"embedding_size": True},
            {"embedding_size": None},
            {"deep_layers": "abc"},
            {"deep_layers": []},
            {"deep_layers": [[1]]},
            {"dropout": [1.5]},
            {"dropout": [float("nan")]},
            {"batch_norm": 1},
            {"l2_reg": float("nan")},
            {"loss_type": "__class__"},
            {"l2_scope": ["batch"]},
            {"seed": 1.5},
        )
    ],
    ids=itertools.count(),
)
def test_a_model_json_with_odd_content_is_refused_by_name(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(BadInput) as error:
        model_json.load(str(path))
    assert str(error.value).startswith(f"{path} is not a model.json (")
    assert len(str(error.value)) < 400
