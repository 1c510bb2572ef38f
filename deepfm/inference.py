"""The inference job: a probability for each record."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf
from absl import logging

from deepfm import estimators, open_data
from deepfm.data import bad_records
from deepfm.errors import BadInput
from deepfm.plan import Opened, apply_model
from deepfm.records import atomic_files, codec
from deepfm.runtime import remote_files


def infer(opened: Opened) -> dict:
    """Writes a probability for each record, in their order; returns its part of the report."""
    job = opened.job
    given = job.input._replace(eval_on_all_ranks=False)
    validation = given.val_data_dir and not (given.infer_data_dir or job.sagemaker.pipe_mode)
    path = job.predictions_file or os.path.join(job.model_dir, "predictions.txt")

    def check(data, model):
        bad_records.check_first_records(data, _schema(model.config, data))
        if os.path.realpath(path) in {os.path.realpath(file.path) for file in data.files}:
            raise BadInput(
                f"--predictions_file={path} is one of the input files; give another path."
            )

    flag = "val_data_dir" if validation else "infer_data_dir"
    opened = opened._replace(job=job._replace(input=given))
    data, model = apply_model(opened, flag, check)
    mode, started = job.distribution, time.monotonic()
    share = open_data.share(data, job)
    folder, name = os.path.split(path)
    parts = [os.path.join(folder, f".{name}.part-{rank}") for rank in range(mode.size)]
    part = parts[mode.rank] if parts[1:] else path
    rows, step = estimators.of_checkpoint(
        model, lambda checkpoint: _predict(model, data, share, part, checkpoint)
    )
    rows = mode.total(rows)  # all parts are written by now
    remote_files.check_all_read(data.files, data.rows, rows)
    if mode.size > 1 and mode.chief:
        _join(path, parts)
    seconds = time.monotonic() - started
    logging.info("Wrote %d predictions to %s (%.0f/s).", rows, path, rows / seconds)
    return {
        "global_step": step,
        "examples": rows,
        "examples_per_second": rows / seconds,
        "predictions_file": path,
        "infer_data": open_data.described(data),
    }


def _schema(config, data):
    return estimators.schema(config, data)._replace(with_labels=False)


def _predict(model, data, share, path, checkpoint):
    """Writes the predictions of this process; returns (their number, the global step)."""
    rows, step = 0, checkpoint and estimators.step_of(checkpoint)
    input_fn = estimators.input_of(model, data, share, with_labels=False)
    naming = bad_records.naming_bad_records(data, _schema(model.config, data))
    write = lambda prob: out.write(codec.number_lines(prob))
    with naming, remote_files.written(path) as local, atomic_files.open_whole(
        local
    ) as out, estimators.trained(model) as estimator, ThreadPoolExecutor(1) as writer:
        session_hooks = estimators.session_hooks(model, checkpoint)
        written = writer.submit(lambda: None)
        for batch in estimator.predict(
            input_fn, None, session_hooks, checkpoint, yield_single_examples=False
        ):
            bad = np.flatnonzero(~np.isfinite(batch["prob"]))
            if len(bad):
                raise _unpredicted(data, rows + int(bad[0]), model.job.distribution)
            written.result()  # raises what writing has raised
            written = writer.submit(write, batch["prob"])  # while the next one is computed
            rows += len(batch["prob"])
        written.result()
    return rows, step


def _join(path, parts):
    """Puts the parts of all ranks together in order, whole or not at all, and removes them."""
    with remote_files.written(path) as local, atomic_files.open_whole(local) as whole:
        for part in parts:
            with tf.io.gfile.GFile(part) as f:
                shutil.copyfileobj(f, whole, 1 << 20)
    for part in parts:
        tf.io.gfile.remove(part)


def _unpredicted(data, number, mode):
    """The error for a record of this process without a prediction."""
    record = f"{data.name}: record {number} of the part of rank {mode.rank}"
    record = record if mode.size > 1 else bad_records.place_of(data, number)
    return BadInput(
        f"{record}: the prediction is not a number, because a value in the record or a weight of "
        "the model is too large; correct the record, or train with a smaller --learning_rate."
    )
