"""The Estimator of a model: its training, its evaluation and its export."""

import contextlib
import os
import tempfile
from typing import Any, Callable, NamedTuple, Optional

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from deepfm.config import JobConfig, ModelConfig, OptimizerConfig, Share
from deepfm.data import datasets, input_pipeline, records
from deepfm.data.reading import Source
from deepfm.kernels.ops import TENSORFLOW, Ops
from deepfm.model import groups, network, optimizers
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common.mode import Mode
from deepfm.runtime import memory, tf_patches
from deepfm.state import best, checkpoints, saving

v1 = tf.compat.v1


class Model(NamedTuple):
    """A model, where it is stored, and how this job computes it.

    Attributes:
        model_dir: a local folder.
        seed: seed of TensorFlow's random numbers.
        trains: whether this job trains it; if not, another process may be training it meanwhile.
        ops: Ops of evaluation and inference.
        batch_size: examples in a batch of evaluation and inference; 0: as they come.
        checkpoint: which one is applied: last, best, or the path of one.
        grouping: groups.Grouping of its evaluations.
    """

    model_dir: str
    config: ModelConfig
    distribution: Mode
    seed: int = 1
    trains: bool = False
    ops: Ops = TENSORFLOW
    batch_size: int = 0
    checkpoint: str = "last"
    grouping: groups.Grouping = groups.Grouping()


def batches_at_once(batch_size: int) -> int:
    """How many batches evaluation and inference read and compute at once."""
    return max(1, min(4, 16384 // batch_size))


def global_step(model_dir: str) -> int:
    """The global step of the newest checkpoint, 0 without one."""
    path = tf.train.latest_checkpoint(model_dir)
    return step_of(path) if path else 0


def step_of(path: str) -> int:
    """The global step of a checkpoint."""
    return int(tf.train.load_variable(path, "global_step"))


def schema(config: ModelConfig, data: Optional[datasets.DataSet] = None) -> records.Schema:
    """The Schema of the records that a model reads, from a DataSet or in exports."""
    return records.Schema(
        config.field_size, config.feature_size, multi_valued=config.multi_valued,
        weighted=bool(data and data.weighted),
    )  # fmt: skip


def check_fits_memory(
    config: ModelConfig,
    mode: Mode,
    batch_size: int,
    optimizer: Optional[OptimizerConfig] = None,
    evaluates: bool = False,
):
    """Refuses (BadInput) a model that this machine cannot hold; a job that trains has an optimizer,
    and may evaluate meanwhile."""
    load = memory.Load(batch_size=batch_size, processes=mode.local_size)
    # What GPUs hold takes no main memory.
    if optimizer and not tf.config.experimental.list_physical_devices("GPU"):
        load = load._replace(
            replicas=mode.replicas_per_process,
            copies=mode.replicas_per_process if mode.strategy else 1,
            trains=True,
            moments=optimizers.OPTIMIZERS[optimizer.name].moments,
            dense=not config.lazy_updates,
            evaluates=evaluates,
        )
    memory.check(config, not mode.partitioner, load)


def trained(model: Model):
    """The Estimator that applies a model; only a chief with write permission works in model_dir.

    Each use makes a new one, since an Estimator keeps nothing but its folder.
    """
    mode = model.distribution
    size = model.batch_size
    side_by_side = (size, batches_at_once(size)) if size else (0, 1)
    model_fn = make_model_fn(
        model.config, OptimizerConfig(), mode, ops=model.ops, side_by_side=side_by_side,
        grouping=model.grouping,
    )  # fmt: skip
    in_place = mode.chief and os.access(model.model_dir, os.W_OK)
    return _estimator(model_fn, model, in_place, session_config=_session_config(mode, model.ops))


def in_training(
    model: Model,
    optimizer: OptimizerConfig,
    ops: Ops = TENSORFLOW,
    max_steps: int = 0,
    log_steps: int = 100,
    keep_checkpoint_max: int = 5,
):
    """The Estimator that trains a model."""
    mode = model.distribution
    model_fn = make_model_fn(model.config, optimizer, mode, mode.partitioner, ops)
    return _estimator(
        mode.wrap_model_fn(model_fn, max_steps), model, mode.chief, mode.tf_config,
        save_summary_steps=log_steps, keep_checkpoint_max=keep_checkpoint_max,
        session_config=_session_config(mode, ops, optimizer.use_amp),
        train_distribute=mode.strategy, device_fn=mode.device_fn,
    )  # fmt: skip


def _session_config(mode, ops, use_amp=False):
    """The tf.ConfigProto of a session: whether TensorFlow rewrites its graph (grappler)."""
    config = v1.ConfigProto()
    config.CopyFrom(mode.session_config)
    rewriting = config.graph_options.rewrite_options
    if use_amp:
        rewriting.auto_mixed_precision = RewriterConfig.ON
    elif ops is not TENSORFLOW and not mode.partitioner:
        # It would only look, 0.15 s a session, for what the kernels have done. Where there are none
        # it makes steps 7 % faster; on parameter servers, 6 %.
        rewriting.disable_meta_optimizer = True
    return config


@contextlib.contextmanager
def _estimator(model_fn, model, in_place, tf_config="{}", **of_run):
    """An Estimator in the model's folder, or in a temporary one that is deleted afterwards."""
    with contextlib.ExitStack() as stack:
        folder = model.model_dir
        if not in_place:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        with _environment("TF_CONFIG", tf_config):
            run_config = tf.estimator.RunConfig(
                model_dir=folder, tf_random_seed=model.seed, log_step_count_steps=None, **of_run
            )
        stack.enter_context(checkpoints.naming_damage(folder))
        stack.enter_context(tf_patches.ended_by_input_alone())
        yield tf.estimator.Estimator(model_fn, config=run_config)


@contextlib.contextmanager
def _environment(name: str, value: str):
    """Gives an environment variable a value within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def session_hooks(model: Model, path: Optional[str] = None):
    """The hooks of every session, which check the shapes of the checkpoint at `path` (None: of the
    newest) and send weights to all."""
    mode = model.distribution
    check = [saving.CheckShapes(model.model_dir, path)] if mode.chief else []
    return [*check, *mode.session_hooks(), tf_patches.FetchesOfSteps()]


def check_fits(model: Model):
    """Refuses (BadInput) a model_dir with another model's checkpoint; needs no session."""
    with tf.Graph().as_default():
        width = [None, model.config.field_size]
        ids, values = v1.placeholder(tf.int64, width), v1.placeholder(tf.float32, width)
        features = {"feat_ids": ids, "feat_vals": values}
        network.network(features, model.config)
        saving.CheckShapes(model.model_dir).begin()


def of_checkpoint(model: Model, read: Callable[[str], Any]):
    """The result of `read(path)` for the model's checkpoint; all but the chief get path None."""
    if not model.distribution.chief:
        return read(None)
    return best.of_checkpoint(model.model_dir, model.checkpoint, read, hold=not model.trains)


def input_of(model: Model, data: datasets.DataSet, job: JobConfig, share: Share, **of_schema):
    """The input_fn of this process's share of the records, once and in order."""
    wanted = schema(model.config, data)._replace(**of_schema)
    source = Source(data, job.input, share, ops=job.ops)
    return input_pipeline.once_in_order(source, wanted, Mode(), batches_at_once(model.batch_size))
