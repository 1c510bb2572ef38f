"""Interrupts training at random moments, starts it again, and compares the weights bit for bit.

    .venv/bin/python scripts/soak_interruptions.py --terms=50 --kills=50
    .venv/bin/python scripts/soak_interruptions.py --terms=2 --kills=2 -- --cache=memory

One run is not interrupted. Each other one gets one SIGTERM or kill -9 at a moment drawn from the
time that the first one took, and is then started again by the same command until it ends. What
follows `--` are further flags of train.py. The exit code is 0 if all end with the same weights.
"""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_integer("terms", 50, "Runs that get SIGTERM.", 0)
flags.DEFINE_integer("kills", 50, "Runs that get SIGKILL.", 0)
flags.DEFINE_integer("rows", 30000, "Records of the training data.", 1)
flags.DEFINE_integer("seed", 1, "Of the moments of interruption.")

ROOT = pathlib.Path(__file__).resolve().parent.parent
_TRAIN = (
    "--num_epochs=3", "--batch_size=256", "--embedding_size=8", "--deep_layers=32,16",
    "--batch_norm", "--dropout=0.2", "--shuffle_buffer=5000", "--save_checkpoints_steps=25",
    "--log_steps=1000",
)  # fmt: skip
_FEATURES = 5000
_LIMIT = 300  # seconds of a run


def main(argv):
    if shutil.disk_usage(tempfile.gettempdir()).free < 1 << 30:
        logging.warning("Less than 1 GB is free in %s.", tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="deepfm-soak-") as folder:
        sys.exit(_soak(pathlib.Path(folder), argv[1:]))


def _soak(folder, more):
    """Runs all; the exit code."""
    _make_data(folder)
    train = lambda model_dir: [
        sys.executable, str(ROOT / "train.py"), f"--training_data_dir={folder}/train",
        f"--model_dir={model_dir}", *_TRAIN, *more,
    ]  # fmt: skip
    started = time.time()
    _to_the_end(train(folder / "whole"), folder)
    seconds = time.time() - started
    wanted = _weights(folder / "whole")
    logging.info("Uninterrupted: %.1f s, %d tensors.", seconds, len(wanted))
    moments = random.Random(FLAGS.seed)
    kinds = [signal.SIGTERM] * FLAGS.terms + [signal.SIGKILL] * FLAGS.kills
    same = 0
    for i, kind in enumerate(kinds, 1):
        model_dir, code = folder / "model", 0
        while code == 0:  # it was at its end before the signal: that is no interruption
            moment = moments.uniform(0, seconds)
            shutil.rmtree(model_dir, ignore_errors=True)
            step, code = _interrupted(train(model_dir), folder, moment, kind, model_dir)
        _to_the_end(train(model_dir), folder)
        found = _weights(model_dir)
        differ = [name for name in wanted if not np.array_equal(wanted[name], found.get(name))]
        same += not differ
        logging.info(
            "%d of %d: %s after %.1f s, exit code %d, newest checkpoint %d: %s.",
            i, len(kinds), kind.name, moment, code, step,
            f"other weights: {', '.join(differ[:3])}" if differ else "same weights",
        )  # fmt: skip
    logging.info("%d of %d interrupted runs ended with the same weights.", same, len(kinds))
    return 0 if same == len(kinds) else 1


def _make_data(folder):
    size = f"--feature_size={_FEATURES}"
    make = [sys.executable, "-m", "data_tools.make_synthetic", f"--output_dir={folder}/raw", size]
    rows = [f"--train_rows={FLAGS.rows}", "--val_rows=0", "--test_rows=100"]
    convert = [
        sys.executable, "-m", "data_tools.libsvm_to_tfrecord", "--num_files=3", size,
        f"--input={folder}/raw/train.libsvm", f"--output_dir={folder}/train",
    ]  # fmt: skip
    for command in ([*make, *rows], convert):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=_LIMIT)


def _to_the_end(command, folder):
    with open(folder / "log", "wb") as log:
        code = subprocess.run(command, stdout=log, stderr=log, timeout=_LIMIT).returncode
    if code:
        sys.stderr.write((folder / "log").read_text())
        raise RuntimeError(f"training ended with exit code {code}")


def _interrupted(command, folder, moment, kind, model_dir):
    """Starts a run and ends it after `moment` s; (step of its newest checkpoint, exit code)."""
    with open(folder / "log", "wb") as log, subprocess.Popen(
        command, stdout=log, stderr=log
    ) as process:
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(kind)
        try:
            process.wait(60)
        finally:
            process.kill()
    path = tf.train.latest_checkpoint(str(model_dir))
    step = int(tf.train.load_variable(path, "global_step")) if path else 0
    return step, process.returncode


def _weights(model_dir):
    """All tensors of the newest checkpoint, the optimizer's among them."""
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(model_dir)))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


if __name__ == "__main__":
    app.run(main)
