"""Pipe mode through SageMaker's own PipeModeDataset: real FIFOs, written epoch after epoch."""

import contextlib
import itertools
import json
import os
import re
import shutil
import threading

import numpy as np
import pytest
import test_days
from conftest import (
    BROKEN_STEP,
    SMALL_MODEL,
    make_records,
    report,
    run_horovod,
    run_python,
    run_train,
    started_train,
    until,
    write_libsvm,
    write_own_ids,
    write_tfrecords,
)

from deepfm.data import pipe_mode
from deepfm.errors import BadInput
from deepfm.records.raw import feature_map
from deepfm.runtime.sagemaker import Job
from deepfm.runtime.tf import tf


def feed(folder, channel, contents, epochs):
    """Writes the FIFO of each epoch, as SageMaker does, as long as there is a reader.

    Args:
        epochs: after how many of them there is no FIFO; None: never.
    """
    for epoch in itertools.count() if epochs is None else range(epochs):
        path = folder / f"{channel}_{epoch}"
        with contextlib.suppress(BrokenPipeError), open(path, "wb", buffering=0) as fifo:
            if epoch + 1 != epochs:
                os.mkfifo(folder / f"{channel}_{epoch + 1}")
            fifo.write(contents)


@pytest.fixture
def channels(tmp_path):
    """A function that makes channels of {name: bytes of each epoch}, and gives train.py's flags."""

    def make(epochs=None, mode="Pipe", **contents):
        data, config = tmp_path / "ml/input/data", tmp_path / "ml/input/config"
        shutil.rmtree(tmp_path / "ml", ignore_errors=True)
        data.mkdir(parents=True)
        config.mkdir()
        names = {name.replace("_", "-"): content for name, content in contents.items()}
        text = json.dumps({name: {"TrainingInputMode": mode} for name in names})
        (config / "inputdataconfig.json").write_text(text)
        for name, content in names.items():
            os.mkfifo(data / f"{name}_0")
            # A daemon, because writing never ends if nobody reads.
            args = data, name, content, epochs
            threading.Thread(target=feed, args=args, daemon=True).start()
        flags = ("--pipe_mode", f"--input_dir={tmp_path}/ml/input", "--field_size=4")
        return flags + SMALL_MODEL

    return make


def tfrecords(tmp_path, rows, seed=0):
    """The bytes of a TFRecord file of make_records."""
    path = tmp_path / f"{rows}-{seed}.tfrecords"
    write_tfrecords(path, make_records(rows, seed=seed))
    return path.read_bytes()


def lines(tmp_path, rows, seed=0, label="{0[0]}"):
    """The same as LibSVM, among comments and blank lines, without a last newline."""
    write_libsvm(tmp_path / "lines", make_records(rows, seed=seed))
    text = (tmp_path / "lines").read_text().split("\n")
    text = [re.sub("^[01]", label.format, line) for line in text]
    text[5:5], text[600:600] = ["", " # none"], ["\t"]
    return "\n".join(text).rstrip("\n").encode()


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


JOB = ("--batch_size=64", "--num_epochs=2", "--shuffle_buffer=300")


@pytest.fixture(scope="module")
def from_files(tmp_path_factory):
    """(bytes of the training data, bytes of the validation data, the report of training)."""
    folder = tmp_path_factory.mktemp("files")
    contents = tfrecords(folder, 700), tfrecords(folder, 90, seed=1)
    run_train(
        *SMALL_MODEL, *JOB, f"--training_data_dir={folder}/700-0.tfrecords",
        f"--val_data_dir={folder}/90-1.tfrecords", f"--model_dir={folder}/model", code=0,
    )  # fmt: skip
    return (*contents, report(folder / "model"))


def test_files_and_pipes_give_the_same_model(channels, from_files, tmp_path):
    training, evaluation, file = from_files
    # No FIFO is there beyond those of two epochs; to wait for one more would fail.
    flags = channels(epochs=2, training=training, evaluation=evaluation)
    run_train(*flags, *JOB, f"--model_dir={tmp_path}/pipe", code=0)
    pipe = report(tmp_path / "pipe")
    assert pipe["examples"] == file["examples"] == 1400
    assert pipe["eval"]["examples"] == 90
    assert pipe["train"]["loss"] == pytest.approx(file["train"]["loss"], abs=1e-6)
    assert pipe["eval"] == pytest.approx(file["eval"], abs=1e-6)


@pytest.mark.parametrize(
    "label, flags",
    [("{0[0]}:1", ("--example_weights", "--nocompiled_kernels")), ("{0[0]}", ())],
)
def test_lines_of_libsvm_in_a_pipe_give_the_same_model(
    channels, from_files, tmp_path, label, flags
):
    _, _, file = from_files
    texts = lines(tmp_path, 700, 0, label), lines(tmp_path, 90, 1, label)
    given = channels(epochs=2, training=texts[0], evaluation=texts[1])
    flags = *given, *JOB, *flags, "--data_format=libsvm", f"--model_dir={tmp_path}/pipe"
    run_train(*flags, code=0)
    pipe = report(tmp_path / "pipe")
    assert pipe["examples"] == 1400
    assert pipe["train"]["loss"] == pytest.approx(file["train"]["loss"], abs=1e-6)
    assert pipe["eval"] == pytest.approx(file["eval"], abs=1e-6)


def test_another_job_reads_what_a_channel_brings_from_its_first_record(channels, tmp_path):
    def examples(job, content):
        flags = channels(training=content)
        env = {**os.environ, **({"TRAINING_JOB_NAME": job} if job else {})}
        done = run_train(*flags, *JOB, f"--model_dir={tmp_path}/model", env=env, code=0)
        return sum(map(int, re.findall(r"Trained \d+ steps on (\d+)", done.stderr)))

    days = [tfrecords(tmp_path, rows) for rows in (300, 700, 500)]
    assert examples(None, days[0]) == 600
    assert examples(None, days[1]) == 1400
    assert examples("day-2", days[2]) == 1000
    assert examples("day-2", days[2]) == 0  # which SageMaker has started again
    assert examples("day-3", days[0]) == 600


ROWS = (300, 1127)  # of the streams of two processes
RATE = 1e-4


@pytest.mark.parametrize("multi_path, libsvm", [(False, True), (True, False)])
def test_processes_with_unequal_streams_use_every_record_once_and_end_together(
    channels, tmp_path, multi_path, libsvm
):
    # Each record has an id of its own, whose weight SGD moves by RATE / 2 / B when it is used.
    # Batch norm, which changes nothing here, meets the empty batches of the shorter stream.
    total = sum(ROWS)
    paths = [tmp_path / "first", tmp_path / "second"]
    write_own_ids(paths, ROWS)
    parts = [path.read_bytes() for path in paths]
    if libsvm:
        own = [b"%d %d:1\n" % (i % 2, i) for i in range(total)]
        parts = [b"".join(own[: ROWS[0]]), b"".join(own[ROWS[0] :])]
    contents = dict(zip(("training", "training_1"), parts if multi_path else [b"".join(parts)] * 2))
    flags = channels(**contents, evaluation=contents["training"])
    run_horovod(
        2, *flags, f"--model_dir={tmp_path}/model", f"--feature_size={total}", "--field_size=1",
        "--embedding_size=2", "--deep_layers=4", "--dropout=0", "--embedding_init_stddev=0",
        "--l2_reg=0", "--optimizer=sgd", f"--learning_rate={RATE}", "--batch_size=64",
        "--num_epochs=2", "--shuffle_buffer=0", "--batch_norm",
        f"--enable_data_multi_path={multi_path}", *["--data_format=libsvm"] * libsvm, code=0,
    )  # fmt: skip
    # The slow and obvious way: what each process reads, cut into batches, epoch after epoch.
    read = [list(range(ROWS[0])), list(range(ROWS[0], total))]
    if not multi_path:
        read = [list(range(total))[rank::2] for rank in range(2)]
    batches = [[r[i : i + 64] for i in range(0, len(r), 64)] * 2 for r in read]
    expected = np.zeros(total)
    steps = max(map(len, batches))
    for step in range(steps):
        together = [batch for b in batches for batch in b[step : step + 1]]
        for batch in together:
            expected[batch] += 1 / sum(map(len, together))
    moved = np.abs(tf.train.load_variable(str(tmp_path / "model"), "fm_w")) / RATE / 0.5
    np.testing.assert_allclose(moved, expected, rtol=1e-3)
    found = report(tmp_path / "model")
    assert found["examples"] == 2 * total
    assert found["global_step"] == steps
    assert found["eval"]["examples"] == (ROWS[0] if multi_path else total)


def test_a_second_process_on_a_channel_is_refused(channels, tmp_path):
    flags = channels(training=tfrecords(tmp_path, 700))
    endless = ("--num_epochs=1000000", "--batch_size=8")
    with started_train(*flags, *endless, f"--model_dir={tmp_path}/first") as first:
        until(first.stdout, "Reading")
        done = run_train(*flags, f"--model_dir={tmp_path}/second")
    assert done.returncode == 2
    assert "another process of this host reads channel training" in last_line(done)


def test_each_process_of_a_host_needs_a_channel_of_its_own(channels, tmp_path):
    flags = channels(training=tfrecords(tmp_path, 700))
    done = run_horovod(2, *flags, f"--model_dir={tmp_path}/model")
    assert done.returncode != 0
    assert "channel training-1 is not among the job's (training)" in done.stderr


def test_a_channel_that_no_process_of_the_host_reads_is_refused(channels, tmp_path):
    part = tfrecords(tmp_path, 70)
    flags = *channels(training=part, training_1=part), f"--model_dir={tmp_path}/model"
    done = run_train(*flags, "--enable_data_multi_path", code=2)
    assert "the job has 2 (training, training-1) for 1 process(es)" in last_line(done)


spoiled = lambda change: lambda folder: change(tfrecords(folder, 700))
bad_lines = lambda folder: lines(folder, 70) + b"\n1 2:1\n"
LIBSVM = "--data_format=libsvm"
STREAMS = {  # the channel's mode, what comes through it, flags, what is said
    "cut short": (
        "Pipe", spoiled(lambda x: x[:-10]), [], "channel training: CRC check .*FIFO was cut short"
    ),
    "with dataset.json": (
        "Pipe", spoiled(lambda x: b'{"format_version": 1}' + x), [], "prefix with 'part-'"
    ),
    "empty": ("Pipe", lambda folder: b"", [], "channel training has no records"),
    "no stream": ("File", lambda folder: b"", [], "channel training has input mode File"),
    "a bad line": ("Pipe", bad_lines, [LIBSVM], "With input mode File, the line is named"),
    "records to skip": ("Pipe", spoiled(bytes), ["--max_bad_records=3"], "--max_bad_records=3"),
    "a cache file": (
        "Pipe", spoiled(bytes), ["--cache={}/x"], "--pipe_mode .*--cache=/.*--cache=memory"
    ),
    "no count": ("Pipe", spoiled(bytes), ["--auto"], "--auto goes by the number of records"),
}  # fmt: skip


@pytest.mark.parametrize("mode, content, more, said", STREAMS.values(), ids=STREAMS)
def test_a_stream_that_cannot_be_read_is_named_with_its_cause(
    channels, tmp_path, mode, content, more, said
):
    flags = channels(mode=mode, training=content(tmp_path))
    more = [word.format(tmp_path) for word in more]
    done = run_train(*flags, *more, f"--model_dir={tmp_path}/model", code=2)
    assert re.search(said, last_line(done))


def test_an_error_that_is_not_about_records_does_not_blame_the_channel(channels, tmp_path):
    flags = channels(training=tfrecords(tmp_path, 700))
    mirrored = ("--distribution=mirrored", "--replicas_per_process=2")
    flags = (*flags, *mirrored, f"--model_dir={tmp_path}/model")
    done = run_python("-c", BROKEN_STEP, *flags, code=1)
    assert "StringToNumber" in last_line(done) and "FIFO" not in last_line(done)


def test_inference_is_refused(channels, tmp_path):
    flags = *channels(training=tfrecords(tmp_path, 70)), f"--model_dir={tmp_path}/model"
    run_train(*flags, code=0)
    done = run_train(*flags, "--task_type=infer", code=2)
    assert "--task_type=infer reads files" in last_line(done)


def test_a_fifo_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pipe_mode, "_PATIENCE", 0.3)
    (tmp_path / "input/config").mkdir(parents=True)
    config = {"training": {"TrainingInputMode": "Pipe"}}
    (tmp_path / "input/config/inputdataconfig.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="training_0: still missing after 0.3 s"):
        pipe_mode.open_channel(Job(input_dir=str(tmp_path / "input")), "training")


def test_a_channel_brings_the_feature_map_and_the_model_follows_it_from_day_to_day(
    channels, tmp_path
):
    outs = [test_days.prepared(tmp_path, 0)]
    outs.append(test_days.prepared(tmp_path, 1, outs[0]))
    model, said = tmp_path / "model", []
    for out in outs:
        (data,) = (out / "train").glob("*.tfrecords")
        pipe, _, *_ = flags = channels(training=data.read_bytes())
        assert pipe == "--pipe_mode"
        config = tmp_path / "ml/input/config/inputdataconfig.json"
        about = json.loads(config.read_text())
        config.write_text(json.dumps({**about, "ids": {"TrainingInputMode": "File"}}))
        shutil.copytree(str(out), str(tmp_path / "ml/input/data/ids"))
        words = "--embedding_size=4", "--deep_layers=4", "--batch_size=64", f"--model_dir={model}"
        said.append(run_train(*flags[:2], *words, "--feature_map=ids", code=0).stderr)
    assert "rows moved" not in said[0] and "rows moved" in said[1]
    known = feature_map.load(str(outs[1] / "feature_map.json"))
    found = json.loads((model / "model.json").read_text())
    assert found["feature_map"] == known.fingerprint()
    assert (found["field_size"], found["multi_valued"]) == (5, True)
    assert found["feature_size"] == known.feature_size


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("ids", "--feature_map=ids is neither a channel nor the path of a feature_map.json"),
        ("no/feature_map.json", "--feature_map: no/feature_map.json: is not a feature map"),
        ("{outs[1]}/feature_map.json", "but dataset.json of .* names map"),
    ],
)
def test_a_feature_map_that_is_none_or_another_is_refused(tmp_path, given, sentence):
    outs = [test_days.prepared(tmp_path, 0)]
    outs.append(test_days.prepared(tmp_path, 1, outs[0]))
    words = f"--training_data_dir={outs[0]}/train", f"--model_dir={tmp_path}/model"
    refused = run_train(*words, f"--feature_map={given.format(outs=outs)}", code=2).stderr
    assert re.search(sentence, refused)
