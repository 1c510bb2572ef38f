"""Horovod in real processes: uneven data, evaluation, inference, resuming, a rank that dies."""

import contextlib
import os

import numpy as np
import psutil
import pytest
from conftest import (
    UNEVEN,
    make_records,
    report,
    run_horovod,
    run_train,
    scalars,
    small_job,
    small_training,
    started_horovod,
    until,
    write_tfrecords,
)

from deepfm.runtime.tf import tf


@pytest.fixture(scope="module")
def trained(uneven, tmp_path_factory):
    """The model_dir of 3 processes that trained 2 epochs and evaluated at the end."""
    model_dir = tmp_path_factory.mktemp("horovod") / "model"
    run_horovod(
        3,
        *small_job(
            uneven, model_dir, "--num_epochs=2", "--eval_every_steps=12", "--profile_steps=9,11"
        ),
        code=0,
    )
    return model_dir


def test_uneven_files_train_every_record_once_in_equal_steps(trained):
    found = report(trained)
    assert found["distribution"] == "horovod"  # chosen by auto
    assert found["num_processes"] == found["num_replicas"] == 3
    assert found["global_step"] == 2 * 6  # 376 records of the largest share, batch 64
    assert found["examples"] == 2 * sum(UNEVEN)


def test_evaluation_over_processes_equals_that_of_one(trained, uneven):
    together = report(trained)["eval"]
    run_train("--task_type=eval", f"--val_data_dir={uneven}", f"--model_dir={trained}", code=0)
    alone = report(trained, "eval")["eval"]
    assert together["examples"] == alone["examples"] == sum(UNEVEN)
    for name in ("auc", "log_loss", "calibration", "loss"):
        assert together[name] == pytest.approx(alone[name], abs=1e-6), name


def test_tensorboard_shows_the_loss_of_all_records(trained):
    shown = scalars(trained / "eval")
    loss = pytest.approx(report(trained)["eval"]["loss"], abs=1e-6)
    assert shown["loss", 12] == shown["mean_loss", 12] == loss


@pytest.mark.table
def test_the_articles_script_starts_with_its_own_flags(uneven, tmp_path):
    script = (
        "--batch_norm False --batch_norm_decay 0.9 --batch_size 64 --clear_existing_model False "
        f"--checkpoint_dir {tmp_path}/model --deep_layers 8,4 --dropout 0.5,0.5 --embedding_size 4 "
        "--enable_data_multi_path False --enable_s3_shard False --feature_size 50 --field_size 4 "
        "--l2_reg 0.0001 --learning_rate 0.0005 --log_steps 10 --loss_type log_loss "
        "--num_epochs 1 --optimizer Adam --perform_shuffle 0 --pipe_mode 0 "
        f"--training_data_dir {uneven} --val_data_dir {uneven} --worker_per_host 2 --dist_mode 3"
    ).split()  # fmt: skip
    run_horovod(2, *script, code=0)
    assert report(tmp_path / "model")["examples"] == sum(UNEVEN)
    run_horovod(2, *script, "--task_type=infer", "--eval_on_all_ranks", code=0)
    lines = (tmp_path / "model" / "predictions.txt").read_text().splitlines()
    assert len(lines) == sum(UNEVEN)


def test_every_rank_may_evaluate_all_records(trained, uneven):
    alone = report(trained, "eval")["eval"]
    flags = ("--task_type=eval", f"--val_data_dir={uneven}", f"--model_dir={trained}")
    done = run_horovod(2, *flags, "--eval_on_all_ranks", code=0)
    # Nothing is divided, so nothing has to be counted.
    assert "Counting the records" not in done.stderr
    assert report(trained, "eval")["num_processes"] == 2
    assert report(trained, "eval")["eval"] == pytest.approx(alone, abs=1e-6)


def test_inference_over_processes_keeps_the_order_of_the_records(trained, uneven, tmp_path):
    infer = ("--task_type=infer", f"--infer_data_dir={uneven}", f"--model_dir={trained}")
    run_horovod(2, *infer, f"--predictions_file={tmp_path}/together.txt", code=0)
    run_train(*infer, f"--predictions_file={tmp_path}/alone.txt", code=0)
    found = np.loadtxt(str(tmp_path / "together.txt"))
    assert len(found) == sum(UNEVEN)
    np.testing.assert_allclose(found, np.loadtxt(str(tmp_path / "alone.txt")), atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.txt", "together.txt"]


def test_only_the_chief_writes_to_model_dir(trained):
    assert len(list(trained.glob("events.out.tfevents.*"))) == 1
    assert report(trained)["profile"]["steps"] == 3 and (trained / "timeline.json").exists()


def test_training_that_has_reached_max_steps_ends_at_once_on_all_ranks(trained, uneven):
    done = run_horovod(2, *small_training(uneven, trained, "--max_steps=12"), code=0)
    assert "has reached --max_steps=12." in done.stderr
    assert tf.train.load_variable(str(trained), "global_step") == 12


def test_fewer_records_than_processes_do_not_stall(tmp_path):
    write_tfrecords(tmp_path / "one.tfrecords", make_records(1))
    done = run_horovod(2, *small_training(tmp_path / "one.tfrecords", tmp_path / "model"), code=0)
    assert report(tmp_path / "model")["examples"] == 1
    # The plan of the division is logged.
    assert "Process 0 reads 0 records: -." in done.stderr
    assert "Process 1 reads 1 records: one.tfrecords." in done.stderr


def test_a_rank_that_dies_ends_the_job_with_a_code(uneven, tmp_path):
    endless = small_training(uneven, tmp_path / "model", "--num_epochs=1000000", "--log_steps=1")
    with started_horovod(2, *endless) as launcher:
        until(launcher.stdout, r"step \d\d+ ")
        workers = []
        for process in psutil.Process(launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "train.py" in words and "horovodrun" not in " ".join(words):
                    workers.append(process)
        assert len(workers) == 2
        workers[1].kill()
        launcher.communicate(timeout=180)
        assert launcher.returncode != 0


def test_without_horovod_one_sentence_says_so(uneven, tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('not built')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_train(
        *small_job(uneven, tmp_path / "model", "--distribution=horovod"), env=env, code=2
    )
    assert "Horovod cannot be loaded (not built)" in done.stderr.splitlines()[-1]
