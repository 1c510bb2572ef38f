"""The inference job: a probability for each record."""

import contextlib
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import chain, islice, repeat

import numpy as np
from absl import logging

from deepfm import estimators, open_data
from deepfm.data import bad_records, datasets, identity, origins
from deepfm.errors import BadInput
from deepfm.plan import Opened, apply_model
from deepfm.records import atomic_files, codec
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf

_SPECIAL = re.compile('[,"\r\n]')  # in a cell of a csv file, which is then quoted


def infer(opened: Opened) -> dict:
    """Writes a probability for each record, in their order; returns its part of the report."""
    job, damaged = opened.job, []
    given = job.input._replace(eval_on_all_ranks=False)
    validation = given.val_data_dir and not (given.infer_data_dir or job.sagemaker.pipe_mode)
    path, kind = job.predictions_path, job.predictions_format
    folder, name = os.path.split(path.rstrip("/"))
    parts = [os.path.join(folder, f".{name}.part-{i}") for i in range(job.distribution.size)]
    in_parts = kind == "parquet" or len(parts) > 1

    def check(data, model):
        if kind == "parquet" and not find_spec("pyarrow"):
            raise BadInput(
                "--predictions_format=parquet needs pyarrow: give --predictions_format=csv, or run "
                f"'{sys.executable} -m pip install pyarrow==12.0.1'."
            )
        if os.path.realpath(path) in {os.path.realpath(file.path) for file in data.files}:
            raise BadInput(
                f"--predictions_file={path} is one of the input files; give another path."
            )
        schema = _schema(model.config, data)
        damaged.extend(bad_records.find_damaged(data, schema, job.input.max_bad_records))
        if not damaged:
            bad_records.check_first_records(data, schema)
        if in_parts and job.distribution.chief:
            for part in filter(tf.io.gfile.exists, parts):
                tf.io.gfile.remove(part)  # of a job that was killed

    flag = "val_data_dir" if validation else "infer_data_dir"
    opened = opened._replace(job=job._replace(input=given))
    data, model = apply_model(opened, flag, check)
    mode, started = job.distribution, time.monotonic()
    keyed = kind != "plain" and any(mode.exchange(origins.have_keys(data)))
    part = parts[mode.rank] if in_parts else path
    damaged = bad_records.with_stand_in(data, damaged)
    rows, step = estimators.of_checkpoint(
        model, lambda checkpoint: _predict(model, data, damaged, keyed, part, checkpoint)
    )
    rows = mode.total(rows)  # all parts are written by now
    identity.check_all_read(data.files, data.rows, rows)
    if in_parts and mode.chief:
        missing = [part for part in parts if not tf.io.gfile.exists(part)]
        if missing:
            raise BadInput(
                f"--predictions_file={path}: {missing[0]}, which another process has written, is "
                "not there; name a path in a folder that all hosts share."
            )
        (_gather if kind == "parquet" else _join)(path, parts)
    seconds = time.monotonic() - started
    logging.info("Wrote %d predictions to %s (%.0f/s).", rows, path, rows / seconds)
    return {
        "global_step": step,
        "examples": rows,
        "examples_per_second": rows / seconds,
        "predictions_file": path,
        "infer_data": open_data.described(data),
        **(bad_records.reported(damaged) if job.input.max_bad_records else {}),
    }


def _schema(config, data):
    return estimators.schema(config, data)._replace(with_labels=False)


def _predict(model, data, damaged, keyed, path, checkpoint):
    """Writes the predictions of this process; returns (their number, the global step)."""
    rows, step = 0, checkpoint and estimators.step_of(checkpoint)
    share, columns, known, damage = open_data.share(data, model.job), {}, None, ()
    if model.job.predictions_format != "plain" or damaged:
        data = datasets.count_rows(data)
        columns, known, damage = origins.of_share(data, damaged, share, keyed)
    input_fn = estimators.input_of(model, data, share, damaged, with_labels=False)
    naming = bad_records.naming_bad_records(data, _schema(model.config, data))
    with naming, _writing(path, model.job, columns) as write, estimators.trained(
        model
    ) as estimator, ThreadPoolExecutor(1) as writer:
        session_hooks = estimators.session_hooks(model, checkpoint)
        written = writer.submit(lambda: None)
        for batch in estimator.predict(
            input_fn, None, session_hooks, checkpoint, yield_single_examples=False
        ):
            bad = np.flatnonzero(~np.isfinite(batch["prob"]))
            if len(bad):
                raise _unpredicted(data, rows + int(bad[0]), model.job.distribution)
            batch["prob"][np.isin(np.arange(rows, rows + len(batch["prob"])), damage)] = np.nan
            written.result()  # raises what writing has raised
            written = writer.submit(write, batch["prob"])  # while the next one is computed
            rows += len(batch["prob"])
        written.result()
        if known not in (None, rows):
            raise BadInput(f"{data.name}: has other records than dataset.json says; delete that.")
    return rows, step


@contextlib.contextmanager
def _writing(path, job, columns):
    """Yields the function that writes predictions, float32 [n], beside the next n of `columns`."""
    take = lambda n: {x: list(islice(chain(y, repeat(None)), n)) for x, y in columns.items()}
    with remote_files.written(path) as local, atomic_files.open_whole(local) as out:
        if job.predictions_format == "plain":
            yield lambda prob: out.write(codec.number_lines(prob))
        elif job.predictions_format == "csv":
            if job.distribution.chief:
                out.write(",".join([*columns, "probability\n"]))
            yield lambda prob: out.write(_csv(take(len(prob)).values(), prob))
        else:
            import pyarrow as pa
            from pyarrow import parquet

            types = {"key": pa.string(), "file": pa.string(), "row": pa.int64()}
            names = [*((name, types[name]) for name in columns), ("probability", pa.float32())]
            table = lambda prob: pa.table({**take(len(prob)), "probability": prob}, f.schema)
            with parquet.ParquetWriter(out.buffer, pa.schema(names)) as f:
                yield lambda prob: f.write_table(table(prob))


def _csv(columns, prob):
    """Lines of a csv file: cells, text or numbers, before each probability."""
    quoted = lambda text: '"' + text.replace('"', '""') + '"' if _SPECIAL.search(text) else text
    cells = (map(quoted, map(str, column)) for column in columns)
    return "".join(map(",".join, zip(*cells, codec.number_lines(prob).splitlines(True))))


def _join(path, parts):
    """Puts the parts of all ranks together in order, whole or not at all, and removes them."""
    with remote_files.written(path) as local, atomic_files.open_whole(local) as whole:
        for part in parts:
            with tf.io.gfile.GFile(part, "rb") as f:
                shutil.copyfileobj(f, whole.buffer, 1 << 20)
    for part in parts:
        tf.io.gfile.remove(part)


def _gather(path, parts):
    """Puts the parts of all ranks into a folder; an older one goes when the new one is whole."""
    path, new, old = os.path.realpath(path), f"{parts[0]}.new", f"{parts[0]}.old"
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(new)
    for rank, part in enumerate(parts):
        atomic_files.replace(part, os.path.join(new, f"part-{rank:05d}.parquet"))
    if os.path.isdir(path):
        atomic_files.replace(path, old)
    atomic_files.replace(new, path)
    shutil.rmtree(old, ignore_errors=True)


def _unpredicted(data, number, mode):
    """The error for a record of this process without a prediction."""
    record = f"{data.name}: record {number} of the part of rank {mode.rank}"
    record = record if mode.size > 1 else bad_records.place_of(data, number)
    return BadInput(
        f"{record}: the prediction is not a number, because a value in the record or a weight of "
        "the model is too large; correct the record, or train with a smaller --learning_rate."
    )
