"""The model of a job: its sizes, its Estimator, its evaluation and its export.

`job` is a JobConfig everywhere.
"""

import contextlib
import json
import math
import os
import tempfile

import tensorflow as tf
from absl import logging
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from deepfm import open_data
from deepfm.config import Distribution, ModelConfig
from deepfm.data import bad_records, data_check, datasets, input_pipeline, records
from deepfm.errors import BadInput
from deepfm.model import metrics, network, optimizers
from deepfm.model.model_fn import logit_offset, make_model_fn
from deepfm.runtime import fetches, remote_files, sessions
from deepfm.runtime import memory as model_sizes
from deepfm.state import checkpoints, export, model_json, saving
from deepfm.state.remote_model_dir import MODEL_FILE

v1 = tf.compat.v1
v1.enable_resource_variables()  # a global step counts every step, also when workers add at once


def keep_config(job, config):
    """Writes model.json, from which other jobs take the ModelConfig."""
    datasets.write_whole(_file(job), json.dumps(config._asdict(), indent=1) + "\n")


def has_config(job):
    """Whether there is a model.json."""
    return tf.io.gfile.exists(_file(job))


def _file(job):
    return os.path.join(job.model_dir, MODEL_FILE)


def kept_config(job):
    """{field of ModelConfig: value} of model.json; {} where there is none, which the log says."""
    if tf.io.gfile.exists(_file(job)):
        return model_json.read(_file(job))
    if job.distribution.rank == 0:
        logging.warning(
            "%s is missing: the flags have to be those that the model was trained with, and what "
            "it kept of its data (a correction for sampling, their feature map) is not known.",
            _file(job),
        )
    return {}


def sizes(job, *data_sets, kept=None):
    """The ModelConfig: what was given, else the trained model's, else what the data tells.

    Args:
        job: a JobConfig.
        data_sets: those of the job; where it trains, the training data first.
        kept: what kept_config says of the model that training goes on with.
    """
    trains = job.task_type == "train"
    fields = dict(job.model, hash_buckets=None, feature_map=None, logit_offset=0.0)
    kept = kept_config(job) if kept is None and not trains else kept or {}
    if not trains:
        _check_same(job, kept, fields, [name for name in _STAYS if name in job.given])
    fields.update({k: v for k, v in kept.items() if k in fields and k not in job.given})
    if trains:
        _take_from_training_data(job, data_sets[0], fields)
    if job.correct_calibration and job.task_type != "train" and not fields["logit_offset"]:
        raise BadInput(
            f"--correct_calibration: the model of --model_dir={job.model_dir} was trained without; "
            "train with it, or leave the flag out."
        )
    for name in ("field_size", "feature_size"):
        fields[name] = fields[name] or (getattr(data_sets[0], name) if data_sets else None)
        if name == "field_size" and data_sets and not fields[name] and data_sets[0].files:
            first = data_sets[0]
            fields[name] = bad_records.first_record(first.files[0].path, first.data_format)[0]
        if not fields[name]:
            raise BadInput(
                f"--{name} is missing and no dataset.json beside the data tells it (in Pipe mode "
                "none can); `python -m data_tools.inspect_dataset --data=...` finds it."
            )
    if fields["multi_valued"] is None or "multi_valued" not in job.given:
        fields["multi_valued"] = bool(fields["multi_valued"]) or any(map(_multi_valued, data_sets))
    for name in ("hash_buckets", "feature_map") if data_sets else ():
        if fields[name] is None:
            fields[name] = getattr(data_sets[0], name)
    _check_validation(data_sets[1:], fields["feature_size"])
    for data in data_sets:
        _check_hashes(data.name, data.hash_buckets, fields["hash_buckets"])
        _check_map(data.name, data.feature_map, fields["feature_map"])
    layers = tuple(fields["deep_layers"])
    dropout = tuple(fields["dropout"])
    if len(dropout) not in (1, len(layers)):
        raise BadInput(
            f"--dropout has {len(dropout)} values for {len(layers)} hidden layers "
            f"(--deep_layers={','.join(map(str, layers))}); give 1 or {len(layers)}."
        )
    fields["deep_layers"] = layers
    fields["dropout"] = dropout * len(layers) if len(dropout) == 1 else dropout
    config = ModelConfig(**fields)
    model_sizes.check(config, not job.distribution.partitioner, _load(job, config))
    return config


def _load(job, config):
    """What a job keeps in memory beside the weights of its model: sizes.Load."""
    mode, trains = job.distribution, job.task_type == "train"
    load = model_sizes.Load(batch_size=job.input.batch_size, processes=mode.local_size)
    if not trains or tf.config.experimental.list_physical_devices("GPU"):
        return load  # what GPUs hold takes nothing of this memory
    return load._replace(
        replicas=mode.replicas_per_process,
        copies=mode.replicas_per_process if mode.strategy else 1,
        trains=True,
        moments=optimizers.MOMENTS[job.optimizer.name],
        dense=not config.lazy_updates,
        evaluates=bool(job.eval_every_steps and job.val_data_dir),
    )


def check_goes_on(job, config):
    """Refuses (BadInput) to go on with a model of other variables or another loss."""
    if tf.io.gfile.exists(_file(job)):
        _check_same(job, model_json.read(_file(job)), config._asdict(), _STAYS)


# Fields of ModelConfig that decide which variables a model has, and what they mean.
_STAYS = (
    "field_size", "feature_size", "embedding_size", "deep_layers", "batch_norm", "loss_type",
    "pooling",
)  # fmt: skip


def _check_same(job, kept, fields, names):
    """Refuses (BadInput) fields that are others than those that a model was trained with."""
    as_flag = lambda x: ",".join(map(str, x)) if isinstance(x, (list, tuple)) else x
    for name in names:
        now, trained = as_flag(fields[name]), as_flag(kept.get(name, fields[name]))
        if now != trained:
            raise BadInput(
                f"--{name}={now}, but the model of --model_dir={job.model_dir} was trained with "
                f"--{name}={trained}; give that, or another --model_dir."
            )


def _check_validation(data_sets, feature_size):
    """Refuses (BadInput) validation data that may hold ids which the model to train does not."""
    for data in data_sets:
        if (data.feature_size or 0) > feature_size:
            raise BadInput(
                f"{data.name}: has a feature_size of {data.feature_size}, the model one of "
                f"{feature_size}; convert it with the ids and the --feature_size of the training "
                "data."
            )


def _check_map(name, found, wanted):
    """Refuses (BadInput) data of another feature map than the model's, where both are known."""
    if found and wanted and found != wanted:
        raise BadInput(
            f"{name}: has the ids of feature map {found}, the model learns those of {wanted}; "
            "encode the rows with the model's (data_tools.prepare_criteo --feature_map)."
        )


def _check_hashes(name, buckets, wanted):
    """Refuses (BadInput) data of other hashes than those of the model, where both are known."""
    if None not in (buckets, wanted) and buckets != wanted:
        tell = lambda n: f"are hashes into {n} buckets" if n else "are no hashes"
        flag = f"with --hash_buckets={wanted}" if wanted else "without --hash_buckets"
        raise BadInput(
            f"{name}: its ids {tell(buckets)}, those that the model learns {tell(wanted)}; convert "
            f"the data {flag}."
        )


def _multi_valued(data):
    """Whether fields of a data set may hold several values: as dataset.json or a record tells."""
    if data.multi_valued is None and data.files:
        return bad_records.first_record(data.files[0].path, data.data_format)[1]
    return bool(data.multi_valued)


def _take_from_training_data(job, data, fields):
    """Sets what the data of now tell, whatever the model was trained on before."""
    if (data.feature_size or 0) > (fields["feature_size"] or 0) and "feature_size" not in job.given:
        fields["feature_size"] = None  # a model with fewer rows is refused, which says so
    corrected = fields["logit_offset"] and "correct_calibration" not in job.given
    fields.update(
        seed=job.model["seed"],
        logit_offset=_logit_offset(data) if job.correct_calibration or corrected else 0.0,
    )


def _logit_offset(data):
    """The correction that --correct_calibration asks for; other jobs take it from model.json."""
    if not data.sampling_rates or 0 in data.sampling_rates:
        rates = data.sampling_rates and f"rates {tuple(data.sampling_rates)}"
        raise BadInput(
            f"--correct_calibration: dataset.json records {rates or 'no sampling rates'} for "
            f"{data.name}; data_tools.rebalance writes rates above 0, else give "
            "--nocorrect_calibration."
        )
    return logit_offset(data.sampling_rates)


def schema(config):
    """What records of the model look like."""
    return records.Schema(config.field_size, config.feature_size, multi_valued=config.multi_valued)


def global_step(model_dir):
    """The global step of the newest checkpoint, 0 without one."""
    path = tf.train.latest_checkpoint(model_dir)
    return step_of(path) if path else 0


def step_of(path):
    """The global step of a checkpoint."""
    return int(tf.train.load_variable(path, "global_step"))


@contextlib.contextmanager
def estimator(job, config, training=False):
    """The Estimator of a model; made anew for each use, for it keeps nothing but its folder.

    Processes other than the chief, and those that may not write into model_dir, get a folder of
    their own, which is deleted afterwards.
    """
    mode = job.distribution
    with contextlib.ExitStack() as stack:
        folder = job.model_dir
        if mode.rank > 0 or not (training or os.access(folder, os.W_OK)):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        with _tf_config(mode.tf_config if training else None):
            run_config = tf.estimator.RunConfig(
                model_dir=folder,
                tf_random_seed=job.input.seed,
                save_summary_steps=job.log_steps,
                keep_checkpoint_max=job.keep_checkpoint_max,
                session_config=_session_config(job, training),
                log_step_count_steps=None,
                train_distribute=mode.strategy if training else None,
                device_fn=mode.device_fn if training else None,
            )
        model_fn = make_model_fn(config, job.optimizer, mode)
        if training:
            model_fn = _in_steps(mode.wrap_model_fn(model_fn), mode, job.max_steps)
        stack.enter_context(checkpoints.naming_damage(folder))
        stack.enter_context(sessions.ended_by_input_alone())
        yield tf.estimator.Estimator(model_fn, config=run_config)


def _in_steps(model_fn, distribution, max_steps):
    """A model_fn whose steps begin and end as the mode wants it."""

    def in_steps(features, labels, mode):
        features, labels = distribution.begin_step(features, labels, max_steps)
        spec = model_fn(features, labels, mode)
        return spec._replace(train_op=distribution.end_step(spec.train_op))

    return in_steps


def _session_config(job, training):
    """tf.ConfigProto of a mode; with mixed precision TensorFlow rewrites the graph of training."""
    config = job.distribution.session_config
    if not (training and job.optimizer.use_amp):
        return config
    mixed = v1.ConfigProto()
    mixed.CopyFrom(config)
    mixed.graph_options.rewrite_options.auto_mixed_precision = RewriterConfig.ON
    return mixed


@contextlib.contextmanager
def _tf_config(text):
    """TF_CONFIG as RunConfig is to see it, whatever the environment of this process holds."""
    kept = os.environ.pop("TF_CONFIG", None)
    if text:
        os.environ["TF_CONFIG"] = text
    try:
        yield
    finally:
        os.environ.pop("TF_CONFIG", None)
        if kept is not None:
            os.environ["TF_CONFIG"] = kept


def _alone(job):
    """The job of a process that evaluates by itself, and reads all records."""
    return job._replace(
        input=job.input._replace(num_shares=1, share=0),
        distribution=job.distribution._replace(gather=Distribution().gather),
    )


def session_hooks(job, path=None):
    """The hooks of every session: the checkpoint fits the model, and all processes have it."""
    mode = job.distribution
    check = [saving.CheckShapes(job.model_dir, path)] if mode.rank == 0 else []
    return [*check, *mode.make_hooks(), fetches.FetchesOfSteps()]


def check_fits(job, config):
    """Refuses (BadInput) a model_dir whose checkpoint is another model's, without a session."""
    with tf.Graph().as_default():
        width = [None, config.field_size]
        ids, values = v1.placeholder(tf.int64, width), v1.placeholder(tf.float32, width)
        features = {"feat_ids": ids, "feat_vals": values}
        network.network(features, config, training=False)
        saving.CheckShapes(job.model_dir).begin()


def in_order(config):
    """Every record once, in order, in batches that are not divided among replicas."""
    return config._replace(
        num_epochs=1, first_epoch=0, first_step=0, shuffle_buffer=0, cache="none",
        num_parallel_reads=1, replicas=1, split=False, in_step=False,
    )  # fmt: skip


def of_newest(job, read):
    """What `read(path)` returns for the newest checkpoint; rank 0 reads it for all."""
    if job.distribution.rank > 0:
        return read(None)
    return checkpoints.of_newest(job.model_dir, read, hold=job.task_type != "train")


def evaluate(job, data, config, more_hooks=()):
    """Evaluates the newest checkpoint on every record once, and logs the stable line.

    Returns:
        (its global step, the results, the curves of metrics.Curves).
    """
    wanted = schema(config)
    job = _alone(job) if open_data.evaluates_alone(job) else open_data.with_share(job, data)
    once = in_order(job.input)
    input_fn = input_pipeline.make_input_fn(data, wanted, once)

    def of_checkpoint(path):
        curves = metrics.Curves()
        session = [*session_hooks(job, path), *more_hooks, curves]
        with data_check.naming_bad_records(data, wanted), estimator(job, config) as trained:
            # The summaries of what training has not evaluated itself lie in eval_test/.
            name = None if job.task_type == "train" else "test"
            found = trained.evaluate(input_fn, hooks=session, checkpoint_path=path, name=name)
            return found, curves

    found, curves = of_newest(job, of_checkpoint)
    results = {name: float(found[name]) for name in metrics.RESULTS}
    results["examples"] = int(results["examples"])
    remote_files.check_all_read(data.files, data.rows, results["examples"])
    results["loss"] = results.pop("mean_loss")
    if math.isnan(results["auc"]) and results["examples"]:
        all_0 = math.isinf(results["calibration"])
        logging.warning(
            "All %s labels of %s are %d, so %s no value; look whether the data hold their labels.",
            f"{results['examples']:,}", data.name, not all_0,
            "AUC and calibration have" if all_0 else "AUC has",
        )  # fmt: skip
    logging.info(
        "Evaluation: step=%d examples=%d auc=%.6f log_loss=%.6f calibration=%.4f",
        found["global_step"], results["examples"], results["auc"], results["log_loss"],
        results["calibration"],
    )  # fmt: skip
    return int(found["global_step"]), results, curves.of_report


def save_export(job, config, kind):
    """Writes a SavedModel of the newest checkpoint into a new numbered folder, whole or not at all.

    Unless it was asked for, one that is there already is not made again.

    Args:
        job: JobConfig.
        config: ModelConfig.
        kind: of export.KINDS.

    Returns:
        (the path of that folder, the global step).
    """
    target = job.servable_model_dir
    others = remote_files.names(target, "servable_model_dir")
    depends_on = config.pooling, config.multi_valued, config.hash_buckets, config.logit_offset
    wanted = schema(config)._replace(hash_buckets=config.hash_buckets or 0)

    def of_checkpoint(checkpoint):
        step, found = step_of(checkpoint), export.digest(checkpoint, *depends_on)
        model_id = export.model_id(job.model_dir)
        stamp = export.Stamp(model_id, step, found, kind, config.feature_map)
        there = _already_exported(target, others, stamp)
        if there:
            logging.info("The model of step %d is already exported at %s.", step, there)
            return there, step
        with remote_files.written(target) as folder, estimator(job, config) as trained:
            number = export.save(trained, checkpoint, folder, wanted, others, stamp)
        path = os.path.join(target, number)
        logging.info("Exported the model of step %d to %s.", step, path)
        return path, step

    return of_newest(job, of_checkpoint)


def _already_exported(folder, names, stamp):
    """The path of a whole export that would be made again, or None."""
    if stamp.kind == "asked" or not stamp.model_id:
        return None
    for path, said in export.find(folder, names):
        # What was made for another reason is not the best one's, which a better one replaces.
        same = said if stamp.kind == "best" else said._replace(kind=stamp.kind)
        if same == stamp and export.is_whole(path):
            return path
    return None


def global_batch(job):
    """Records of a step, of all replicas together."""
    return job.input.batch_size * job.distribution.replicas_in_step
