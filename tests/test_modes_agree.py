"""The same global batches give the same result, whatever --distribution says.

Real processes: Horovod all-reduces over sockets. They are compared with local mode, whose step
test_model.py compares with numpy.
"""

import functools
import itertools
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import warm
from conftest import (
    SMALL_MODEL,
    finish,
    losses,
    make_records,
    report,
    run_cluster,
    run_horovod,
    run_mode,
    run_train,
    started_horovod,
    started_python,
    write_tfrecords,
)
from mode_steps import Case, check_same, evaluate, make_mode, train, weights

from deepfm.modes.common import devices
from deepfm.runtime.tf import tf

pytestmark = pytest.mark.timeout(300)  # whole clusters
GLOBAL_BATCH = 24
ROWS = 49 * GLOBAL_BATCH + 14  # so the last batch is short, in each process, by another number
FLAGS = (
    *SMALL_MODEL, "--shuffle_buffer=0", "--num_parallel_reads=1",
    f"--global_batch_size={GLOBAL_BATCH}", "--log_steps=1", "--dropout=0",
    "--embedding_init_stddev=0.3", "--distribution",
)  # fmt: skip
OPTIMIZERS = {
    "sgd": ("--optimizer=sgd", "--learning_rate=0.5", "--l2_reg=0"),
    "sgd_l2_clip": (
        "--optimizer=sgd", "--learning_rate=0.1", "--l2_reg=0.01", "--clip_norm=0.5",
        "--cowclip_ratio=0.01", "--cowclip_min_norm=0.001",
    ),
    "lazy_adam": (
        "--optimizer=adam", "--learning_rate=0.01", "--l2_reg=0.001", "--batch_norm",
        "--l2_reg_deep=0.0003", "--embedding_learning_rate=0.02", "--learning_rate_warmup_steps=9",
    ),
}  # fmt: skip


def dealt(records, processes, global_batch=GLOBAL_BATCH):
    """The records in such an order that `processes` contiguous shares, in batches, make up the
    same global batches as the records in theirs."""
    number = len(records[0])
    cuts = [number * i // processes for i in range(processes + 1)]
    sizes = np.diff(cuts)
    size = global_batch // processes
    shares = [[] for _ in range(processes)]
    rows = iter(range(number))
    while any(len(share) < n for share, n in zip(shares, sizes)):
        for share, n in zip(shares, sizes):
            share.extend(itertools.islice(rows, min(size, n - len(share))))
    order = np.concatenate(shares)
    assert sorted(order) == list(range(number))
    return [column[order] for column in records]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the records in order (1.tfrecords) and dealt to 2 and 3 processes."""
    folder = tmp_path_factory.mktemp("modes")
    records = make_records(ROWS)
    for processes in (1, 2, 3):
        write_tfrecords(folder / f"{processes}.tfrecords", dealt(records, processes))
    return folder


@pytest.fixture(scope="module")
def locally(data):
    """name of OPTIMIZERS -> (losses of the steps, their summaries, weights) of local mode."""

    def run(name):
        done = run_train(
            *FLAGS, "local", *OPTIMIZERS[name], f"--training_data_dir={data}/1.tfrecords",
            f"--model_dir={data}/local_{name}", code=0,
        )  # fmt: skip
        folder = data / f"local_{name}"
        return losses(done.stderr), shown(folder), weights(folder)

    return functools.lru_cache(maxsize=None)(run)


def shown(model_dir):
    """{tag: its value at each step} of the summaries of the loss."""
    found = {"loss": {}, "log_loss": {}, "l2": {}}
    for path in sorted(pathlib.Path(model_dir).glob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found.get(value.tag, {})[event.step] = value.simple_value
    return {tag: [of_steps[step] for step in sorted(of_steps)] for tag, of_steps in found.items()}


def check(done, model_dir, expected):
    assert done.returncode == 0, done.stderr
    expected_losses, expected_shown, expected_weights = expected
    found = losses(done.stderr)
    assert len(found) == len(expected_losses) == 50
    np.testing.assert_allclose(found, expected_losses, atol=1e-4)
    assert report(model_dir)["train"]["loss"] == pytest.approx(expected_losses[-1], abs=1e-4)
    for tag, values in shown(model_dir).items():
        np.testing.assert_allclose(values, expected_shown[tag], atol=1e-4, err_msg=tag)
    check_weights(model_dir, expected_weights)


def check_weights(model_dir, expected):
    check_same(model_dir, expected, atol=1e-4, rtol=1e-7)


@pytest.mark.parametrize(
    "mode, name, more",
    [
        ("tower", "lazy_adam", ()),
        ("tower", "sgd_l2_clip", ("--replicas_per_process=1",)),
        ("mirrored", "sgd_l2_clip", ("--cross_device_ops=hierarchical_copy",)),
        pytest.param("tower", "sgd_l2_clip", (), marks=pytest.mark.table),
        pytest.param("mirrored", "lazy_adam", (), marks=pytest.mark.table),
    ],
)
def test_replicas_of_one_process_agree_with_local(data, locally, tmp_path, mode, name, more):
    done = run_train(
        *FLAGS, mode, *OPTIMIZERS[name], f"--training_data_dir={data}/1.tfrecords",
        f"--model_dir={tmp_path}", "--replicas_per_process=2", *more,
    )  # fmt: skip
    check(done, tmp_path, locally(name))


def do(task, mode, data, model_dir):
    """Another job than training."""
    run_train(
        f"--task_type={task}", f"--distribution={mode}", f"--model_dir={model_dir}",
        f"--val_data_dir={data}/1.tfrecords", f"--infer_data_dir={data}/1.tfrecords",
        f"--predictions_file={model_dir}.txt", f"--servable_model_dir={model_dir}/export",
        code=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluated_locally(data, locally):
    """The model_dir that local mode has evaluated and inferred with, too."""
    locally("lazy_adam")
    for task in ("eval", "infer"):
        do(task, "local", data, data / "local_lazy_adam")
    return data / "local_lazy_adam"


@pytest.mark.parametrize("mode", [pytest.param("tower", marks=pytest.mark.table), "mirrored"])
def test_other_jobs_give_the_same_in_every_mode(data, evaluated_locally, tmp_path, mode):
    local = evaluated_locally
    copy = shutil.copytree(str(local), str(tmp_path / "model"))
    os.remove(f"{copy}/report.eval.json")
    for task in ("eval", "infer", "export"):
        do(task, mode, data, copy)
    evaluated, wanted = (report(pathlib.Path(folder), "eval")["eval"] for folder in (copy, local))
    assert evaluated == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_allclose(np.loadtxt(f"{copy}.txt"), np.loadtxt(f"{local}.txt"), atol=1e-6)
    assert list(pathlib.Path(copy).glob("export/*/saved_model.pb"))


def cases(counts, in_table):
    """(count, name of OPTIMIZERS) of each; those that others imply are in the table alone. (Two
    ranks clip, below, with batch norm and Adam, and take plain steps of SGD on distinct pairs.)"""
    found = [(counts[0], name) for name in OPTIMIZERS] + [(counts[1], "lazy_adam")]
    return [pytest.param(*x, marks=[pytest.mark.table] * (x in in_table)) for x in found]


HOROVOD = cases((2, 3), [(2, "sgd"), (2, "sgd_l2_clip"), (3, "lazy_adam")])


@pytest.mark.parametrize("processes, name", HOROVOD)
def test_horovod_agrees_with_local(data, locally, tmp_path, processes, name):
    done = run_horovod(
        processes, *FLAGS, "horovod", *OPTIMIZERS[name], f"--model_dir={tmp_path}",
        f"--training_data_dir={data}/{processes}.tfrecords",
    )  # fmt: skip
    check(done, tmp_path, locally(name))


@pytest.mark.parametrize("replicas, name", cases((1, 2), [(1, "sgd"), (1, "lazy_adam")]))
def test_parameter_servers_with_one_worker_agree_with_local(
    data, locally, tmp_path, replicas, name
):
    done = run_cluster(
        *FLAGS, "ps", *OPTIMIZERS[name], f"--model_dir={tmp_path}",
        f"--training_data_dir={data}/1.tfrecords", f"--replicas_per_process={replicas}",
        servers=2, workers=0,
    )  # fmt: skip
    check(done, tmp_path, locally(name))


def test_mirrored_feeds_its_replicas_from_one_iterator(data, tmp_path):
    """TensorFlow's, over several devices, now and then hangs at the end, or if step 1 fails."""
    run_train(
        *FLAGS, "mirrored", f"--training_data_dir={data}/1.tfrecords", f"--model_dir={tmp_path}",
        "--replicas_per_process=2", f"--global_batch_size={10 * GLOBAL_BATCH}", code=0,
    )  # fmt: skip
    (graph,) = tmp_path.glob("model.ckpt-[1-9]*.meta")
    assert b"IteratorGetNext" in graph.read_bytes()
    assert b"MultiDeviceIterator" not in graph.read_bytes()
    assert report(tmp_path)["examples"] == ROWS


def test_replicas_that_cannot_share_a_global_batch_are_refused(data, tmp_path):
    done = run_train(
        *FLAGS, "tower", "--replicas_per_process=2", "--global_batch_size=25",
        f"--training_data_dir={data}/1.tfrecords", f"--model_dir={tmp_path}", code=2,
    )  # fmt: skip
    wanted = "2 replicas cannot share --global_batch_size=25 evenly; try --global_batch_size=24."
    assert wanted in done.stderr


def test_more_replicas_than_devices_are_refused(data, tmp_path):
    done = run_train(
        *FLAGS, "mirrored", "--replicas_per_process=500",
        f"--training_data_dir={data}/1.tfrecords", f"--model_dir={tmp_path}", code=2,
    )  # fmt: skip
    assert "--replicas_per_process=500, but this machine has" in done.stderr
    assert "; try --replicas_per_process=16." in done.stderr or os.cpu_count() > 16


@pytest.fixture(scope="module")
def large_batches(tmp_path_factory):
    """(folder, flags of steps with few distinct (field, id) pairs, weights without kernels)."""
    folder = tmp_path_factory.mktemp("large_batches")
    for processes in (1, 2):
        records = dealt(make_records(4000), processes, 1000)
        write_tfrecords(folder / f"{processes}.tfrecords", records)
    flags = (
        "--field_size=4", "--feature_size=50", "--embedding_size=16", "--deep_layers=32,8",
        "--global_batch_size=1000", "--num_epochs=4", "--shuffle_buffer=0", "--optimizer=sgd",
        "--learning_rate=0.05", "--dropout=0",
    )  # fmt: skip
    words = f"--training_data_dir={folder}/1.tfrecords", f"--model_dir={folder}/model"
    run_train(*flags, *words, "--nocompiled_kernels", code=0)
    return folder, flags, weights(folder / "model")


@pytest.mark.parametrize(
    "mode",
    [
        "horovod", "ps",  # test_two_hundred_steps.py has local steps
        *(pytest.param(mode, marks=pytest.mark.table) for mode in ("local", "tower", "mirrored")),
    ],
)  # fmt: skip
def test_steps_on_distinct_pairs_are_those_of_the_whole_matrix(large_batches, tmp_path, mode):
    folder, flags, expected = large_batches
    processes = 2 if mode == "horovod" else 1
    data = f"--training_data_dir={folder}/{processes}.tfrecords"
    run_mode(mode, *flags, data, f"--model_dir={tmp_path}", code=0)
    check_weights(tmp_path, expected)


# Three steps of each optimizer, with and without clipping (of rows, and of all) and batch norm.
RATES = {"adam": 0.01, "adagrad": 0.02, "sgd": 0.1, "momentum": 0.05, "ftrl": 0.05}
EVERY = [
    dict(
        optimizer=name,
        learning_rate=rate,
        clip_norm=clip_norm,
        cowclip_ratio=clip_norm / 50,
        batch_norm=batch_norm,
    )  # fmt: skip
    for name, rate in RATES.items()
    for clip_norm in (0.0, 0.5)
    for batch_norm in (False, True)
]
ELAPSED = dict(
    optimizer="adam", learning_rate=0.01, elapsed=True, clip_norm=0.5, batch_norm=False, epochs=2
)
EVERY.append(ELAPSED)
SUITE = {  # what runs always
    mode: [c for c in EVERY if c["optimizer"] == name and c["clip_norm"] and c["batch_norm"]]
    for mode, name in (("tower", "adam"), ("mirrored", "ftrl"), ("horovod", "adam"))
}
SUITE["tower"].append(ELAPSED)
SUITE["horovod"].append(ELAPSED)
# (records, replicas, records of a global batch): what the last batch, of one record, leaves without
# any. In towers the others have rows that only fill up; a rank has none at all.
LAST_OF_ONE = (49, 2, 24)
THREE_OF_FOUR = (65, 4, 64)


def name_of(mode, case):
    clipped, normalized = "clipped" * bool(case["clip_norm"]), "batch_norm" * case["batch_norm"]
    elapsed = "elapsed" * case.get("elapsed", False)
    return "-".join(filter(None, (mode, case["optimizer"], elapsed, clipped, normalized)))


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """(rows, replicas, global batch, the rest of a Case) -> (the Case that local mode has trained,
    the Case of processes that divide the records, the weights of local mode)."""
    folder = tmp_path_factory.mktemp("steps")
    kept = {}

    def cases(rows, replicas, global_batch, **fields):
        name = f"{rows}-{replicas}-{global_batch}"
        if not (folder / f"{name}.tfrecords").exists():
            records = make_records(rows)
            write_tfrecords(folder / f"{name}.tfrecords", records)
            order = dealt(records, replicas, global_batch)
            write_tfrecords(folder / f"{name}-dealt.tfrecords", order)
        whole = Case(str(folder / f"{name}.tfrecords"), "", global_batch, **fields)
        if whole not in kept:
            trained = whole._replace(model_dir=str(folder / f"local-{len(kept)}"))
            train(make_mode("local"), trained)
            kept[whole] = trained, weights(trained.model_dir)
        trained, expected = kept[whole]
        return trained, whole._replace(data=str(folder / f"{name}-dealt.tfrecords")), expected

    return cases


@pytest.mark.parametrize("mode", ["tower", "mirrored"])
def test_on_gpus_all_replicas_share_each_batch_of_an_evaluation(steps, monkeypatch, mode):
    case, *_ = steps(*THREE_OF_FOUR)
    alone = evaluate(make_mode("local"), case, 31)  # batches of 31, 31 and 3
    monkeypatch.setattr(devices, "gpus", lambda: ["GPU"] * 4)  # placed on the CPU instead
    replicas = make_mode(mode, replicas=4)
    assert len(replicas.evaluate_on) == 4
    together = evaluate(replicas, case, 31)
    assert together["examples"] == alone["examples"] == 65
    assert together == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(
    "mode, case",
    [
        pytest.param(
            mode, c, marks=[pytest.mark.table] * (c not in SUITE[mode]), id=name_of(mode, c)
        )
        for mode in ("tower", "mirrored")
        for c in EVERY
    ],
)
def test_every_optimizer_agrees_with_local_in_replicas(steps, tmp_path, mode, case):
    local, _, expected = steps(*LAST_OF_ONE, **case)
    train(make_mode(mode, replicas=2), local._replace(model_dir=str(tmp_path)))
    check_weights(tmp_path, expected)


@pytest.mark.timeout(600)  # of the table
@pytest.mark.parametrize(
    "every", [SUITE["horovod"], pytest.param(EVERY, marks=pytest.mark.table)], ids=len
)
def test_every_optimizer_agrees_with_local_on_two_ranks_and_an_empty_batch_is_left_out(
    steps, tmp_path, every
):
    wanted = [steps(*LAST_OF_ONE, **case) for case in every]
    model_dirs = [str(tmp_path / str(i)) for i in range(len(wanted))]
    cases = [
        case._replace(model_dir=model_dir)._asdict()
        for (_, case, _), model_dir in zip(wanted, model_dirs)
    ]
    words = "horovod", json.dumps({"cases": cases, "inter_op_threads": 1})
    finish(
        started_horovod(2, *words, program="tests/mode_steps.py", python=warm.PYTHON),
        timeout=500,
        code=0,
    )
    for (_, _, expected), model_dir in zip(wanted, model_dirs):
        check_weights(model_dir, expected)


@pytest.mark.parametrize("threads, epochs", [(1, 5), pytest.param(2, 100, marks=pytest.mark.table)])
@pytest.mark.parametrize("mode", [pytest.param("tower", marks=pytest.mark.table), "mirrored"])
def test_four_replicas_with_batch_norm_need_no_thread_each(steps, tmp_path, mode, threads, epochs):
    case, _, expected = steps(*THREE_OF_FOUR, epochs=epochs)
    cases = [case._replace(model_dir=str(tmp_path))._asdict()]
    options = json.dumps({"replicas": 4, "inter_op_threads": threads, "cases": cases})
    finish(started_python("tests/mode_steps.py", mode, options), code=0)
    check_weights(tmp_path, expected)
