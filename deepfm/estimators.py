"""The Estimator of a model: its training, its evaluation and its export."""

import contextlib
import os
import tempfile
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from deepfm.config import JobConfig, ModelConfig, OptimizerConfig, Share
from deepfm.data import bad_records, datasets, input_pipeline, records
from deepfm.data.reading import Source
from deepfm.kernels import compiled
from deepfm.kernels.ops import TENSORFLOW, Ops
from deepfm.model import embeddings, groups, network, optimizers
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common.mode import Mode
from deepfm.runtime import memory, tf_patches
from deepfm.runtime.tf import RewriterConfig, tf
from deepfm.state import best, checkpoints, growing, saving

v1 = tf.compat.v1


class Model(NamedTuple):
    """A model, and the job that trains or applies it.

    Attributes:
        checkpoint: which one is applied: last, best, or the path of one.
        move: the moving.Move of its rows to the ids of `config`, if it has others.
    """

    job: JobConfig
    config: ModelConfig
    checkpoint: str = "last"
    move: Any = None

    @property
    def grouping(self) -> Optional[groups.Grouping]:
        """Of its evaluations, if the job asks for one."""
        user, slices = self.job.gauc_field, self.job.slice_fields  # by now numbers
        if user is None and not slices:
            return None
        return groups.Grouping(None if user is None else int(user), tuple(map(int, slices)))


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


def check_fits_memory(job: JobConfig, config: ModelConfig):
    """Refuses (BadInput) a model that this machine cannot hold for a job."""
    mode, size, trains = job.distribution, job.input.batch_size, job.task_type == "train"
    # --max_steps may come before the end of an epoch. The last evaluation follows training.
    by_epoch = job.input.num_epochs > 1 and not (job.max_steps or job.sagemaker.pipe_mode)
    load = memory.Load(size if trains else size * batches_at_once(size), processes=mode.local_size)
    # What GPUs hold takes no main memory.
    if trains and not tf.config.experimental.list_physical_devices("GPU"):
        load = load._replace(
            replicas=mode.replicas_per_process,
            copies=mode.replicas_per_process if mode.strategy else 1,
            trains=True,
            moments=optimizers.OPTIMIZERS[job.optimizer.name].moments,
            dense=not config.lazy_updates,
            evaluates=bool(job.input.val_data_dir and (job.eval_every_steps or by_epoch)),
        )
    memory.check_sizes(config, not mode.partitioner, load)


def trained(model: Model, to_serve: bool = False):
    """The Estimator that applies a model, or exports one that any server can read (`to_serve`);
    only a chief with write permission works in model_dir.

    Each use makes a new one, since an Estimator keeps nothing but its folder.
    """
    job, mode = model.job, model.job.distribution
    ops = TENSORFLOW if to_serve else compiled.of_applied(job.ops)
    size = job.input.batch_size
    side_by_side = (0, 1) if to_serve else (size, batches_at_once(size))
    model_fn = make_model_fn(
        model.config, OptimizerConfig(), mode, ops=ops, side_by_side=side_by_side,
        grouping=model.grouping,
    )  # fmt: skip
    in_place = mode.chief and os.access(job.model_dir, os.W_OK)
    return _estimator(model_fn, job, in_place, session_config=_session_config(mode, ops))


def in_training(model: Model, optimizer: OptimizerConfig, ops: Ops = TENSORFLOW):
    """The Estimator that trains a model."""
    job, mode = model.job, model.job.distribution
    model_fn = make_model_fn(model.config, optimizer, mode, ops)
    return _estimator(
        mode.wrap_model_fn(model_fn, job.max_steps), job, mode.chief, mode.tf_config,
        save_summary_steps=job.log_steps, keep_checkpoint_max=job.keep_checkpoint_max,
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
def _estimator(model_fn, job, in_place, tf_config="{}", **of_run):
    """An Estimator in model_dir, or in a temporary one that is deleted afterwards."""
    with contextlib.ExitStack() as stack:
        folder = job.model_dir
        if not in_place:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        before = os.environ.get("TF_CONFIG")
        os.environ["TF_CONFIG"] = tf_config  # which RunConfig reads
        try:
            run_config = tf.estimator.RunConfig(
                folder, tf_random_seed=job.input.seed, log_step_count_steps=None, **of_run
            )
        finally:
            os.environ.pop("TF_CONFIG") if before is None else os.environ.update(TF_CONFIG=before)
        stack.enter_context(checkpoints.naming_damage(folder))
        stack.enter_context(tf_patches.ended_by_input_alone())
        estimator = tf.estimator.Estimator(model_fn, config=run_config)
        run = estimator._evaluate_run
        # Its own `loss` is the mean of this process's batches, however many records they have.
        mended = lambda figures: {**figures, "loss": figures["mean_loss"]}
        estimator._evaluate_run = lambda eval_dict, **of: run(eval_dict=mended(eval_dict), **of)
        yield estimator


def session_hooks(model: Model, path: Optional[str] = None):
    """The hooks of every session, which check the shapes of the checkpoint at `path` (None: of the
    newest) and send weights to all."""
    mode = model.job.distribution
    check = [saving.CheckShapes(model.job.model_dir, path)] if mode.chief else []
    return [*check, *mode.session_hooks(), tf_patches.FetchesOfSteps()]


def check_fits(model: Model, path: Optional[str] = None) -> Dict[str, List[int]]:
    """Refuses (BadInput) another model's checkpoint, by default the newest, without a session;
    returns {variable of the model: its shape}."""
    with tf.Graph().as_default():
        width = [None, model.config.field_size]
        ids, values = v1.placeholder(tf.int64, width), v1.placeholder(tf.float32, width)
        features = {"feat_ids": ids, "feat_vals": values}
        network.network(features, model.config)
        saving.CheckShapes(model.job.model_dir, path).begin()
        return {x.op.name: x.shape.as_list() for x in v1.global_variables()}


def of_checkpoint(model: Model, read: Callable[[str], Any]):
    """The result of `read(path)` for the model's checkpoint; all but the chief get path None."""
    if not model.job.distribution.chief:
        return read(None)

    def read_moved(path):
        with growing.moved(model.job, path, model.move, embeddings.NAMES) as moved:
            return read(moved)

    reads = read_moved if model.move else read
    # Another process may be training the model meanwhile, if this job does not.
    hold = model.job.task_type != "train"
    return best.of_checkpoint(model.job.model_dir, model.checkpoint, reads, hold)


def input_of(model: Model, data: datasets.DataSet, share: Share, damaged=(), **of_schema):
    """The input_fn of this process's share of the good records, once and in order."""
    job, wanted = model.job, schema(model.config, data)._replace(**of_schema)
    asked = job.input._replace(
        batch_size=job.input.batch_size * batches_at_once(job.input.batch_size),
        num_epochs=1, shuffle_buffer=0, num_parallel_reads=1, cache="none",
    )  # fmt: skip
    source = Source(data, asked, share, damaged=damaged, ops=job.ops)
    return input_pipeline.make_input_fn(source, wanted, Mode())


def batches(model: Model, data: datasets.DataSet) -> Iterator[Tuple[dict, np.ndarray]]:
    """Yields (features, labels) of the batches of an evaluation, as arrays."""
    input_fn = input_of(model, data, Share())
    with tf.Graph().as_default():
        iterator = v1.data.make_initializable_iterator(input_fn())
        batch, config = iterator.get_next(), model.job.distribution.session_config
        naming = bad_records.naming_bad_records(data, schema(model.config, data))
        with naming, v1.Session(config=config) as session:
            session.run(iterator.initializer)
            while True:
                try:
                    yield session.run(batch)
                except tf.errors.OutOfRangeError:
                    return
