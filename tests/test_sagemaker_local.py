"""Jobs of one and two hosts through SageMaker's own training toolkit, real FIFOs and real MPI.

`pytest -m table` runs the whole table of hosts, processes, input modes and divisions (15 minutes);
the suite runs its ends.
"""

import json
import os
import signal
import sys

import numpy as np
import psutil
import pytest
from conftest import (
    ROOT,
    copying_compiler,
    finish,
    make_records,
    report,
    run_train,
    started,
    until,
    wait_until,
    write_own_ids,
    write_tfrecords,
)
from mode_steps import check_same

from deepfm.runtime.tf import tf

pytestmark = [
    pytest.mark.skipif(
        not (ROOT / ".venv-sagemaker").exists(), reason="scripts/setup.sh --sagemaker has not run"
    ),
    # Two hosts take 55 s, of which the toolkit's worker sleeps 30; eight programs beside it, 210.
    pytest.mark.timeout(500),
]

EACH_ALONE = 40
SIZES = (127, 600, 1, 272)  # records of the files
ROWS = sum(SIZES)
EPOCHS = 2
RATE = 1e-4


def started_job(output_dir, *words, **options):
    """scripts/sagemaker/local_job.py, running."""
    program = [sys.executable, "scripts/sagemaker/local_job.py", f"--output_dir={output_dir}"]
    return started([*program, *words], **options)


def run_job(output_dir, *words, **env):
    """Runs a job; (exit code, all lines, the failure file or None)."""
    done = finish(started_job(output_dir, *words, env={**os.environ, **env}), timeout=450)
    failure = output_dir / "failure"
    return done.returncode, done.stdout, failure.read_text() if failure.exists() else None


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of files of SIZES records, each with an id of its own."""
    folder = tmp_path_factory.mktemp("data")
    write_own_ids([folder / f"tr-{i}.tfrecords" for i in range(len(SIZES))], SIZES)
    return folder


TABLE = [
    (distribution, processes, mode, sharded)
    for distribution, processes in (("ps", 1), ("horovod", 1), ("horovod", 2))
    for mode in ("File", "Pipe")
    for sharded in (False, True)
]
ENDS = (("ps", 1, "File", True), ("horovod", 2, "Pipe", True))


@pytest.mark.parametrize(
    "distribution, processes, mode, sharded",
    [pytest.param(*row, marks=[] if row in ENDS else pytest.mark.table) for row in TABLE],
)
def test_two_hosts_use_every_record_once_per_epoch(
    data, tmp_path, distribution, processes, mode, sharded
):
    # All records of a process and an epoch are one batch, and SGD moves the weight of each record
    # in a step by RATE / 2 / (records of the step), whichever process has it.
    # The hosts have no kernels: one process builds them for all, in a folder that both see.
    env = {**copying_compiler(tmp_path), "DEEPFM_KERNELS_DIR": str(tmp_path / "kernels")}
    code, text, _ = run_job(
        tmp_path, "--hosts=2", f"--distribution={distribution}", f"--s3_shard={sharded}",
        f"--processes_per_host={processes}", f"--input_mode={mode}", f"--training={data}",
        f"--evaluation={data}", "--", f"--num_epochs={EPOCHS}", f"--batch_size={ROWS}",
        f"--feature_size={ROWS}", "--field_size=1", "--embedding_size=2", "--deep_layers=4",
        "--dropout=0", "--embedding_init_stddev=0", "--l2_reg=0", "--optimizer=sgd",
        f"--learning_rate={RATE}", "--noperform_shuffle", **env,
    )  # fmt: skip
    assert code == 0, text
    assert "Building the compiled kernels" in text
    made = sorted(path.name.partition("-")[0] for path in (tmp_path / "kernels").glob("*.so"))
    assert made == ["codec", "kernels"][mode == "Pipe" :]  # FIFOs are read by TensorFlow alone
    part = json.loads((tmp_path / "model/run.json").read_text())["parts"][0]
    assert part["settings"]["compiled_kernels"] is True
    assert len((tmp_path / "compiled").read_text().split()) == 3  # two halves, and the library
    found = report(tmp_path / "model")
    assert found["distribution"] == distribution
    assert found["num_processes"] == 2 * processes
    assert found["examples"] == EPOCHS * ROWS
    # Only FIFOs hide how many records all hosts have.
    assert found["training_data"]["records"] == (ROWS if mode == "File" else None)
    assert (f"Training on {ROWS:,} records" in text) == (mode == "File")
    assert found["eval"]["examples"] == ROWS
    assert found["eval"]["positive_rate"] == 0.5  # label 1 has every other record
    moved = np.abs(tf.train.load_variable(str(tmp_path / "model"), "fm_w")) / RATE / 0.5
    step = np.full(ROWS, ROWS)  # records of the step in which each record is
    if distribution == "ps":
        of_file = np.repeat(np.arange(len(SIZES)), SIZES)
        host = of_file % 2 if sharded else np.arange(ROWS) * 2 // ROWS
        step = np.bincount(host)[host]
    np.testing.assert_allclose(moved, EPOCHS / step, rtol=1e-3)


@pytest.fixture(scope="module")
def criteo_like(tmp_path_factory):
    """A folder as the article's: tr*.tfrecords and va*.tfrecords of 39 fields."""
    folder = tmp_path_factory.mktemp("criteo")
    for i in range(4):
        write_tfrecords(folder / f"tr{i}.tfrecords", make_records(100, 39, 117581, seed=i))
    write_tfrecords(folder / "va.tfrecords", make_records(50, 39, 117581, seed=9))
    return folder


@pytest.mark.table
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_whose_host_is_taken_away_ends_as_one_that_was_not(criteo_like, tmp_path, lost):
    flags = (
        f"--training={criteo_like}/tr", "--", "--feature_size=117581", "--field_size=39",
        "--embedding_size=4", "--deep_layers=8", "--batch_size=16", "--num_epochs=150",
        "--log_steps=20", "--save_checkpoints_steps=50",
    )  # fmt: skip
    code, text, _ = run_job(tmp_path / "w", f"--checkpoints_dir={tmp_path}/whole", *flags)
    assert code == 0, text
    parts = f"--checkpoints_dir={tmp_path}/parts"
    with started_job(tmp_path / "p", parts, *flags) as process:
        until(process.stdout, "step 200 ")
        process.send_signal(lost)
        process.communicate(timeout=180)
    assert not (tmp_path / "parts/report.json").exists()
    code, text, _ = run_job(tmp_path / "p", parts, *flags)
    assert code == 0, text
    assert "Resuming at step" in text
    check_same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.table
def test_one_process_gives_the_same_model_with_and_without_sagemaker(criteo_like, tmp_path):
    flags = (
        "--feature_size=117581", "--field_size=39", "--embedding_size=4", "--deep_layers=8",
        "--batch_size=16", "--num_epochs=3",
    )  # fmt: skip
    training, evaluation = criteo_like / "tr0.tfrecords", criteo_like / "va.tfrecords"
    run_train(
        *flags, f"--training_data_dir={training}", f"--val_data_dir={evaluation}",
        f"--model_dir={tmp_path}/plain", code=0,
    )  # fmt: skip
    plain = report(tmp_path / "plain")
    for mode in ("File", "Pipe"):
        code, text, _ = run_job(
            tmp_path / mode, f"--input_mode={mode}", f"--training={training}",
            f"--evaluation={evaluation}", "--", *flags,
        )  # fmt: skip
        assert code == 0, text
        found = report(tmp_path / mode / "model")
        assert found["examples"] == plain["examples"] == 300
        assert found["train"]["loss"] == pytest.approx(plain["train"]["loss"], abs=1e-6)
        assert found["eval"] == pytest.approx(plain["eval"], abs=1e-6)


# What the article's two launch notebooks pass, but for the paths of checkpoints.
NOTEBOOK = (
    "--servable_model_dir=/opt/ml/model", "--training_data_dir=/opt/ml/input/data/training/",
    "--val_data_dir=/opt/ml/input/data/evaluation/", "--log_steps=10", "--num_epochs=10",
    "--field_size=39", "--feature_size=117581", "--deep_layers=128,64,32", "--perform_shuffle=0",
    "--batch_size=1024", "--enable_s3_shard=True", "--training_channel_name=training",
    "--evaluation_channel_name=evaluation",
)  # fmt: skip
HOROVOD_NOTEBOOK = ("--checkpoint_dir=/opt/ml/deepfm/checkpoints", "--worker_per_host=4")


def test_the_flags_of_the_articles_notebooks_are_read(tmp_path):
    folders = [f"--{name}_dir={tmp_path}/{name}" for name in ("servable_model", "checkpoint")]
    done = run_train(*NOTEBOOK, *folders, f"--training_data_dir={tmp_path}/none", code=2)
    assert f"--training_data_dir={tmp_path}/none: no file matches." in done.stderr
    done = run_train(*NOTEBOOK, *HOROVOD_NOTEBOOK, *folders, code=2)
    assert "--worker_per_host=4, but" in done.stderr


@pytest.mark.table
@pytest.mark.parametrize("mode", ["File", "Pipe"])
def test_the_articles_horovod_notebook_runs_unchanged(criteo_like, tmp_path, mode):
    code, text, _ = run_job(
        tmp_path, f"--input_mode={mode}", "--distribution=horovod", "--processes_per_host=4",
        "--s3_shard", f"--training={criteo_like}/tr", f"--evaluation={criteo_like}/va",
        "--custom_mpi_options=-verbose --NCCL_DEBUG=INFO "
        "-x OMPI_MCA_btl_vader_single_copy_mechanism=none",
        "--", *NOTEBOOK, *HOROVOD_NOTEBOOK,
        f"--pipe_mode={int(mode == 'Pipe')}", f"--enable_data_multi_path={mode == 'File'}",
    )  # fmt: skip
    assert code == 0, text
    assert "Trained 10 steps on 4000 examples" in text
    assert "Evaluation: step=10 examples=50 " in text
    (export,) = (tmp_path / "model").glob("*/saved_model.pb")
    assert export.parent.name.isdigit()


@pytest.mark.table
@pytest.mark.parametrize("mode", ["File", "Pipe"])
def test_the_articles_parameter_server_notebook_runs_unchanged(criteo_like, tmp_path, mode):
    kept = tmp_path / "checkpoints"  # on a disk that all hosts see
    code, text, _ = run_job(
        tmp_path, f"--input_mode={mode}", "--distribution=ps", "--hosts=2", "--s3_shard",
        f"--training={criteo_like}/tr", f"--evaluation={criteo_like}/va",
        f"--checkpoints_dir={kept}", "--", *NOTEBOOK, f"--pipe_mode={int(mode == 'Pipe')}",
        "--model_dir=/opt/ml/checkpoints/deepfm-ps-ckpt/today",
    )  # fmt: skip
    assert code == 0, text
    assert "Trained 20 steps on 4000 examples" in text  # 10 on each host
    assert "Evaluation: step=20 examples=50 " in text
    assert list((tmp_path / "model").glob("*/saved_model.pb"))
    assert (kept / "deepfm-ps-ckpt/today/checkpoint").exists()


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            ("--training={}/tr", "--", "--bacth_size=64"),
            "Unknown command line flag 'bacth_size'. Did you mean: batch_size",
        ),
        pytest.param(
            ("--hosts=2", "--distribution=ps", "--s3_shard", "--training={}/va", "--")
            + ("--feature_size=117581",),
            "--training_data_dir=/opt/ml/input/data/training: the directory has no",
            marks=pytest.mark.table,
        ),
    ],
    ids=["an unknown hyperparameter", "a host without files"],
)
def test_what_is_wrong_is_named_in_the_failure_file(criteo_like, tmp_path, words, sentence):
    code, text, failure = run_job(tmp_path, *(word.format(criteo_like) for word in words))
    assert code == 1, text
    assert sentence in failure


def test_a_pipe_that_is_cut_short_is_named_in_the_failure_file(criteo_like, tmp_path):
    (tmp_path / "cut").write_bytes((criteo_like / "va.tfrecords").read_bytes()[:-10])
    code, text, failure = run_job(
        tmp_path, "--input_mode=Pipe", f"--training={tmp_path}/cut", "--",
        "--feature_size=117581", "--field_size=39",
    )  # fmt: skip
    assert code == 1, text
    assert "channel training: CRC check" in failure
    assert "Training on" not in failure  # the sentence, not the log


def test_a_beginning_that_no_file_has_is_refused(tmp_path):
    code, text, _ = run_job(tmp_path, f"--training={tmp_path}/nothing", "--", "--num_epochs=1")
    assert code == 2
    assert text.endswith("nothing: no file has a path that begins so; give a folder or a prefix.\n")


def test_nothing_outlives_a_job_that_is_killed(criteo_like, tmp_path):
    with started_job(
        tmp_path, "--hosts=2", "--distribution=ps", f"--training={criteo_like}/tr", "--",
        "--num_epochs=100000", "--batch_size=8", "--feature_size=117581",
        f"--servable_model_dir={tmp_path}/mark",
    ) as process:  # fmt: skip
        until(process.stdout, " step ")
        made = psutil.Process(process.pid).children(recursive=True)  # the hosts and all in them
        process.kill()
        process.wait()
        left = lambda: [x for x in psutil.process_iter(["cmdline"]) if x in made]
        assert wait_until(lambda: not any(x.info["cmdline"] for x in left()), 100)
