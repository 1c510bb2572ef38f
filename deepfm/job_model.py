"""The model of a job: its sizes, its Estimator, its evaluation and its export.

`job` is a jobs.JobConfig everywhere.
"""

import contextlib
import json
import os
import tempfile

import tensorflow as tf
from absl import logging
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from deepfm import (
    bad_records,
    checkpoints,
    data_check,
    datasets,
    export,
    hooks,
    input_pipeline,
    job_data,
    metrics,
    model,
    model_file,
    pieces,
    records,
    remote,
)
from deepfm import (
    sizes as model_sizes,
)
from deepfm.distribution import Distribution
from deepfm.entry import BadInput
from deepfm.mirror import MODEL_FILE

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


def sizes(job, *data_sets):
    """The ModelConfig: what was given, else the trained model's, else what the data tells.

    Args:
        job: a jobs.JobConfig.
        data_sets: those of the job; where it trains, the training data first.
    """
    fields = dict(job.model, hash_buckets=None, logit_offset=_logit_offset(job, data_sets))
    if job.task_type != "train" and tf.io.gfile.exists(_file(job)):
        kept = model_file.read(_file(job))
        if "pooling" in job.given:
            _check_pooling(job, kept, fields["pooling"])
        fields.update({k: v for k, v in kept.items() if k in fields and k not in job.given})
    if job.correct_calibration and job.task_type != "train" and not fields["logit_offset"]:
        raise BadInput(
            f"--correct_calibration: the model of --model_dir={job.model_dir} was trained without; "
            "train with it, or leave the flag out."
        )
    for name in ("field_size", "feature_size"):
        told = [getattr(d, name) for d in data_sets if getattr(d, name)]
        fields[name] = fields[name] or max(told, default=None)
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
    for data in (d for d in data_sets if d.hash_buckets is not None):
        if fields["hash_buckets"] is None:
            fields["hash_buckets"] = data.hash_buckets
        _check_hashes(data.name, data.hash_buckets, fields["hash_buckets"])
    layers = tuple(fields["deep_layers"])
    dropout = tuple(fields["dropout"])
    if len(dropout) not in (1, len(layers)):
        raise BadInput(
            f"--dropout has {len(dropout)} values for {len(layers)} hidden layers "
            f"(--deep_layers={','.join(map(str, layers))}); give 1 or {len(layers)}."
        )
    fields["deep_layers"] = layers
    fields["dropout"] = dropout * len(layers) if len(dropout) == 1 else dropout
    config = model.ModelConfig(**fields)
    model_sizes.check(config, one_machine=not job.distribution.partitioner)
    return config


def check_goes_on(job, config):
    """Refuses (BadInput) to go on with a model that pools otherwise, or has other ids."""
    if not tf.io.gfile.exists(_file(job)):
        return
    kept = model_file.read(_file(job))
    _check_pooling(job, kept, config.pooling)
    if None not in (kept.get("hash_buckets"), config.hash_buckets):
        name = f"--training_data_dir={job.training_data_dir}"
        _check_hashes(name, config.hash_buckets, kept["hash_buckets"])


def _check_pooling(job, kept, pooling):
    trained = kept.get("pooling", pooling)
    if trained != pooling:
        raise BadInput(
            f"--pooling={pooling}, but the model of --model_dir={job.model_dir} was trained with "
            f"--pooling={trained}; give that."
        )


def _check_hashes(name, buckets, wanted):
    if buckets != wanted:
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


def _logit_offset(job, data_sets):
    """The correction of training's flag; 0 without it. Other jobs take it from model.json."""
    if not (job.correct_calibration and job.task_type == "train"):
        return 0.0
    data = data_sets[0]
    if not data.sampling_rates or 0 in data.sampling_rates:
        rates = data.sampling_rates and f"rates {tuple(data.sampling_rates)}"
        raise BadInput(
            f"--correct_calibration: dataset.json records {rates or 'no sampling rates'} for "
            f"{data.name}; data_tools.rebalance writes rates above 0, else leave the flag out."
        )
    return model.logit_offset(data.sampling_rates)


def schema(config):
    """What records of the model look like."""
    return records.Schema(config.field_size, config.feature_size, multi_valued=config.multi_valued)


def global_step(model_dir):
    """The global step of the newest checkpoint, 0 without one."""
    path = tf.train.latest_checkpoint(model_dir)
    return int(tf.train.load_variable(path, "global_step")) if path else 0


@contextlib.contextmanager
def estimator(job, config, training=False):
    """The Estimator of a model; made anew for each use, for it keeps nothing but its folder.

    Processes other than the chief get a folder of their own, which is deleted afterwards.
    """
    mode = job.distribution
    with contextlib.ExitStack() as stack:
        folder = job.model_dir
        if mode.rank > 0:
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
        model_fn = model.make_model_fn(config, job.optimizer, mode)
        if training:
            model_fn = _saved_in_pieces(mode.wrap_model_fn(model_fn), job.keep_checkpoint_max)
        stack.enter_context(checkpoints.naming_damage(folder))
        yield tf.estimator.Estimator(model_fn, config=run_config)


def _saved_in_pieces(model_fn, keep_checkpoint_max):
    """A model_fn with a Saver of its own in place of the one that Estimator would make."""

    def with_saver(features, labels, mode):
        spec = model_fn(features, labels, mode)
        if not tf.distribute.has_strategy():  # which makes one for all its replicas
            saver = pieces.make_saver(keep_checkpoint_max)
            v1.add_to_collection(v1.GraphKeys.SAVERS, saver)
        return spec

    return with_saver


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


def session_hooks(job):
    """The hooks of every session: the checkpoint fits the model, and all processes have it."""
    mode = job.distribution
    check = [hooks.CheckShapes(job.model_dir)] if mode.rank == 0 else []
    return [*check, *mode.make_hooks(), hooks.FetchesOfSteps()]


def check_fits(job, config):
    """Refuses (BadInput) a model_dir whose checkpoint is another model's, without a session."""
    with tf.Graph().as_default():
        width = [None, config.field_size]
        ids, values = v1.placeholder(tf.int64, width), v1.placeholder(tf.float32, width)
        features = {"feat_ids": ids, "feat_vals": values}
        model.network(features, config, training=False)
        hooks.CheckShapes(job.model_dir).begin()


def in_order(config):
    """Every record once, in order, in batches that are not divided among replicas."""
    return config._replace(
        num_epochs=1, first_epoch=0, first_step=0, shuffle_buffer=0, cache="none",
        num_parallel_reads=1, replicas=1, split=False, in_step=False,
    )  # fmt: skip


def evaluate(job, data, config, more_hooks=()):
    """Evaluates the newest checkpoint on every record once, and logs the stable line.

    Returns:
        (the results, the curves of metrics.Curves).
    """
    wanted = schema(config)
    job = _alone(job) if job_data.evaluates_alone(job) else job_data.with_share(job, data)
    once = in_order(job.input)
    input_fn = input_pipeline.make_input_fn(data, wanted, once)
    with data_check.naming_bad_records(data, wanted), estimator(job, config) as trained:
        curves = metrics.Curves()
        found = trained.evaluate(input_fn, hooks=[*session_hooks(job), *more_hooks, curves])
    results = {name: float(found[name]) for name in metrics.RESULTS}
    results["examples"] = int(results["examples"])
    remote.check_all_read(data.files, data.rows, results["examples"])
    results["loss"] = results.pop("mean_loss")
    logging.info(
        "Evaluation: step=%d examples=%d auc=%.6f log_loss=%.6f calibration=%.4f",
        found["global_step"], results["examples"], results["auc"], results["log_loss"],
        results["calibration"],
    )  # fmt: skip
    return results, curves.of_report


def save_export(job, config):
    """Writes a SavedModel into a new numbered folder, whole or not at all; returns its path."""
    with remote.written(job.servable_model_dir) as folder, estimator(job, config) as trained:
        wanted = schema(config)._replace(hash_buckets=config.hash_buckets or 0)
        number = export.save(trained, folder, wanted)
    path = os.path.join(job.servable_model_dir, number)
    logging.info("Exported the model of step %d to %s.", global_step(job.model_dir), path)
    return path


def global_batch(job):
    """Records of a step, of all replicas together."""
    return job.input.batch_size * job.distribution.replicas_in_step
