"""Training steps in a mode, without the start of train.py: many cases in one process.

    python tests/mode_steps.py MODE '{"replicas": 4, "inter_op_threads": 1, "cases": [...]}'

Some cases need a process of their own: Horovod's ranks, and other numbers of threads.
"""

import functools
import gc
import json
import os
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import numpy as np

from deepfm import estimators, evaluation, modes
from deepfm.config import (
    InputConfig,
    JobConfig,
    ModeFlags,
    ModelConfig,
    OptimizerConfig,
    Position,
    Share,
)
from deepfm.data import datasets, input_pipeline, shares
from deepfm.data.reading import Source
from deepfm.kernels import compiled
from deepfm.model import embeddings
from deepfm.modes.common import devices
from deepfm.runtime import sagemaker
from deepfm.runtime.tf import tf
from deepfm.state.resume import NOTES


class Case(NamedTuple):
    """What to train, and where to put it.

    Attributes:
        data: a TFRecord file of make_records.
        model_dir: folder that gets a checkpoint.
        global_batch: records per step of all replicas together.
        epochs: how often each record is used.
    """

    data: str
    model_dir: str
    global_batch: int
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    clip_norm: float = 0.0
    cowclip_ratio: float = 0.0
    elapsed: bool = False
    batch_norm: bool = True
    l2_reg: float = 0.001
    epochs: int = 1


def make_mode(name, replicas=1, **flags):
    """A Mode, with more replicas than this machine has cores if the case wants them."""
    cores = devices.cores
    devices.cores = lambda: max(cores(), replicas)
    try:
        return modes.make(name, ModeFlags(replicas_per_process=replicas, **flags))
    finally:
        devices.cores = cores


def config_of(case):
    return ModelConfig(
        4, 50, 4, (8, 4), (0.0, 0.0), batch_norm=case.batch_norm, l2_reg=case.l2_reg,
        embedding_init_stddev=0.3,
    )  # fmt: skip


def job_of(mode, case, size):
    """The case's job, in batches of `size`."""
    plain = OptimizerConfig(), InputConfig(size, case.epochs), compiled.COMPILED, mode
    job = JobConfig({}, (), *plain, sagemaker.Job(), {})
    return job._replace(model_dir=case.model_dir, keep_checkpoint_max=1)


def evaluate(mode, case, size):
    """The results of the case's checkpoint on its data, in batches of `size`."""
    data, config = datasets.find(case.data, "val_data_dir"), config_of(case)
    return evaluation.evaluate_model(estimators.Model(job_of(mode, case, size), config), data)[1]


def train(mode, case):
    """Trains, without shuffling; each process on its share."""
    config, job = config_of(case), job_of(mode, case, case.global_batch // mode.replicas_in_step)
    data = datasets.count_rows(datasets.find(case.data, "training_data_dir"))
    data = data._replace(weighted=datasets.shows(data, "weighted"))
    ops = compiled.of_steps(compiled.COMPILED, mode)
    share = Share(mode.size, mode.rank)
    source = Source(
        data, job.input, share,
        Position(rows_of_processes=mode.exchange(shares.rows_of_share(data, (), share))),
        ops=ops,
    )  # fmt: skip
    model = estimators.Model(job, config)
    optimizer = OptimizerConfig(
        case.optimizer, case.learning_rate, clip_norm=case.clip_norm, l2_rows=case.l2_reg,
        cowclip_ratio=case.cowclip_ratio, cowclip_min_norm=0.001, elapsed=case.elapsed,
    )  # fmt: skip
    ahead = functools.partial(embeddings.ahead, config=config, ops=ops)
    input_fn = input_pipeline.make_input_fn(source, estimators.schema(config, data), mode, ahead)
    with estimators.in_training(model, optimizer, ops) as estimator:
        estimator.train(input_fn, hooks=estimators.session_hooks(model))


def weights(model_dir):
    """All tensors of a folder's newest checkpoint, by name, but for the notes of its run."""
    path = tf.train.latest_checkpoint(str(model_dir))
    names = [name for name, _ in tf.train.list_variables(path) if not name.startswith(NOTES)]
    return {name: tf.train.load_variable(path, name) for name in names}


def check_same(found, wanted, atol=0, rtol=0):
    """Checks that two folders, or what `weights` returns of them, hold the same tensors."""
    found, wanted = (x if isinstance(x, dict) else weights(x) for x in (found, wanted))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def main(name, options):
    gc.set_threshold(100_000)  # as program.py does
    tf.compat.v1.enable_resource_variables()
    options = json.loads(options)
    cases = [Case(**case) for case in options.pop("cases")]
    mode = make_mode(name, **options)
    for case in cases:
        train(mode, case)
    mode.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
