"""Trains, evaluates, applies and exports a DeepFM.

    python train.py --training_data_dir=data/train --val_data_dir=data/val --model_dir=model
    python train.py --task_type=eval --val_data_dir=data/test --model_dir=model
    python train.py --task_type=infer --infer_data_dir=data/test --model_dir=model
    python train.py --task_type=export --servable_model_dir=servable --model_dir=model

`python train.py --help` lists every flag.
"""

import os
import sys

import deepfm  # noqa: F401  says what to do where there is no absl

# isort: split
from absl import flags, logging

from deepfm import flags as deepfm_flags
from deepfm.config import ModeFlags
from deepfm.distribution import MODES, has_tensor_cores, with_kernels
from deepfm.runtime import interruption, program

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(deepfm_flags)

# Flags that are fields of ModelConfig, JobConfig, InputConfig and sagemaker.Job by the same name.
_MODEL = (
    "field_size", "feature_size", "embedding_size", "deep_layers", "dropout", "batch_norm",
    "batch_norm_decay", "loss_type", "l2_reg", "l2_scope", "lazy_updates", "embedding_init_stddev",
    "pooling", "multi_valued", "seed",
)  # fmt: skip
_JOB = (
    "task_type", "model_dir", "servable_model_dir", "predictions_file", "clear_existing_model",
    "abandon_interrupted_run", "training_data_dir", "val_data_dir", "infer_data_dir",
    "data_format", "max_bad_records",
    "max_steps", "log_steps", "save_checkpoints_steps", "save_checkpoints_secs",
    "keep_checkpoint_max", "eval_every_steps", "learning_rate_decay_on_plateau",
    "global_batch_size", "eval_on_all_ranks", "export", "best_metric", "early_stopping_patience",
    "correct_calibration",
)  # fmt: skip
_INPUT = (
    "batch_size", "num_epochs", "shuffle_buffer", "cache", "num_parallel_reads",
    "read_buffer_bytes", "seed",
)  # fmt: skip
_SAGEMAKER = (
    "hosts", "current_host", "pipe_mode", "training_channel_name", "evaluation_channel_name",
    "enable_s3_shard", "enable_data_multi_path", "worker_per_host", "input_dir",
)  # fmt: skip


def _values(names):
    return {name: FLAGS[name].value for name in names}


def before_tensorflow():
    """Takes what SageMaker tells, and sets what OpenMP reads when TensorFlow is loaded."""
    interruption.install()
    deepfm_flags.take_defaults_from(os.environ)
    if not FLAGS.perform_shuffle:
        FLAGS.shuffle_buffer = 0
    if FLAGS.omp_num_threads:
        os.environ["OMP_NUM_THREADS"] = str(FLAGS.omp_num_threads)
    if FLAGS.kmp_affinity:
        os.environ.update(KMP_AFFINITY=FLAGS.kmp_affinity, KMP_SETTINGS="1")


def main():
    # 1. How training is distributed: everything that differs between the modes is decided here.
    distribution = MODES[FLAGS.distribution](ModeFlags(**_values(ModeFlags._fields)))

    # 2. Flags become plain values; below this line nobody reads a flag.
    from deepfm import jobs
    from deepfm.config import InputConfig, JobConfig, OptimizerConfig
    from deepfm.kernels import bindings
    from deepfm.runtime import sagemaker  # TensorFlow is loaded from here on

    compiled = FLAGS.compiled_kernels and bindings.built()
    distribution = with_kernels(distribution, compiled)
    if FLAGS.compiled_kernels and not compiled and distribution.rank == 0:
        logging.info(
            "The compiled kernels are not built for this TensorFlow (python -m deepfm.kernels does "
            "it); its own ops do the same, in about 1.5 times the time."
        )
    use_amp = FLAGS.use_amp and has_tensor_cores(distribution)
    if FLAGS.use_amp and not use_amp:
        logging.warning("--use_amp: no GPU with tensor cores here; everything stays in float32.")
    optimizer = OptimizerConfig(
        name=FLAGS.optimizer,
        learning_rate=FLAGS.learning_rate * FLAGS.learning_rate_scale,
        clip_norm=FLAGS.clip_norm,
        use_amp=use_amp,
    )
    job = JobConfig(
        model=_values(_MODEL),
        given=tuple(name for name in FLAGS if FLAGS[name].present),
        optimizer=optimizer,
        input=InputConfig(compiled=compiled, **_values(_INPUT)),
        distribution=distribution,
        sagemaker=sagemaker.Job(**_values(_SAGEMAKER)),
        flags=deepfm_flags.changed(),
        **_values(_JOB),
    )

    # 3. The job.
    interruption.loaded()
    jobs.run(job)


if __name__ == "__main__":
    sys.exit(program.run(main, before_tensorflow))
