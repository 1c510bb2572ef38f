"""What TensorBoard's HPARAMS tab compares: the hyperparameters of the run in a model_dir.

They are an event file of their own, which each run writes anew. TensorBoard keeps the first that it
finds in a folder, so the name comes before those of all other event files. The metrics are those of
the evaluations, in eval/.
"""

import os
import time

from deepfm.config import JobConfig, ModelConfig
from deepfm.config.setting import HYPERPARAMETERS, of_kinds
from deepfm.records import atomic_files
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

FILE = "events.out.tfevents.0.hparams"


def _plain(value):
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def begin(job: JobConfig, config: ModelConfig):
    """Writes the hyperparameters of a run that begins or goes on now."""
    from tensorboard.plugins.hparams import api_pb2, summary

    values = {"distribution": job.distribution.name, "global_batch_size": job.global_batch}
    values.update(of_kinds((job.input, job.optimizer, config, job), *HYPERPARAMETERS))
    if values["example_weights"] is None:
        values["example_weights"] = "by data"
    # Numbers, texts, or None for a number that is not given and follows from others.
    values = {name: _plain(value) for name, value in values.items()}
    kind = lambda x: api_pb2.DATA_TYPE_STRING if isinstance(x, str) else api_pb2.DATA_TYPE_FLOAT64
    columns = [api_pb2.HParamInfo(name=name, type=kind(x)) for name, x in values.items()]
    name_of = lambda metric: api_pb2.MetricName(group="eval", tag=metric)
    asked = ["gauc"] if job.gauc_field is not None else []
    metrics = [
        api_pb2.MetricInfo(name=name_of(x), display_name=x) for x in ("auc", "log_loss", *asked)
    ]
    given = {name: x for name, x in values.items() if x is not None}
    experiment = summary.experiment_pb(columns, metrics)
    _write(job.model_dir, [experiment, summary.session_start_pb(given)])


def end(model_dir: str):
    """Adds that the run has ended well, unless that is there, or there is no file."""
    from tensorboard.plugins.hparams import api_pb2, metadata, summary

    found = _read(model_dir)
    if found and found[-1].value[0].tag != metadata.SESSION_END_INFO_TAG:
        _write(model_dir, [*found, summary.session_end_pb(api_pb2.STATUS_SUCCESS)])


def _read(model_dir):
    """The summaries in the file; [] if there is none."""
    path = os.path.join(model_dir, FILE)
    if not os.path.exists(path):
        return []
    return [x.summary for x in v1.train.summary_iterator(path) if x.HasField("summary")]


def _write(model_dir, summaries):
    now = time.time()
    with atomic_files.scratch(model_dir, ".reading-") as folder:
        path = os.path.join(folder, FILE)
        with tf.io.TFRecordWriter(path) as writer:
            writer.write(v1.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            for each in summaries:
                writer.write(v1.Event(wall_time=now, summary=each).SerializeToString())
        atomic_files.replace(path, os.path.join(model_dir, FILE))
