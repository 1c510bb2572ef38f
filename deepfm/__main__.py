"""The program that train.py, deepfm-train and `python -m deepfm` start: from flags to a job."""

import os
import sys

import deepfm

deepfm.need("absl")  # what needs TensorFlow asks for it later: flags are checked without it

# isort: split
# ruff: noqa: E402
from absl import flags, logging

from deepfm import flags as deepfm_flags
from deepfm import modes
from deepfm.config import InputConfig, JobConfig, ModeFlags, ModelConfig, OptimizerConfig
from deepfm.flags import of_flags
from deepfm.modes.common import tf_config
from deepfm.runtime import interruption, program, sagemaker, utilization

FLAGS = flags.FLAGS
STOP = interruption.Stop()
flags.adopt_module_key_flags(deepfm_flags)


def before_tensorflow():
    """Takes SageMaker's defaults, and sets what OpenMP reads when TensorFlow is loaded."""
    STOP.install()
    deepfm_flags.take_defaults_from(os.environ)
    if not FLAGS.perform_shuffle:
        FLAGS.shuffle_buffer = 0
    openmp = utilization.openmp(FLAGS.omp_num_threads, FLAGS.kmp_affinity, FLAGS.num_cpus)
    os.environ.update(openmp)
    if FLAGS.allow_onednn:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    if FLAGS.allow_tf32:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "1"
    if openmp:
        logging.info("OpenMP: %s.", ", ".join(map("=".join, openmp.items())))


def main():
    # 1. How training is distributed: everything that differs between the modes is decided here.
    start = of_flags(deepfm_flags.Start)
    process = start.ps_hosts, start.worker_hosts, start.job_name, start.task_index
    if any(process):
        tf_config.take(*process)
    distribution = modes.make(start.distribution, of_flags(ModeFlags))
    distribution.stop = STOP

    # 2. Flags become plain values; no code below this line reads a flag.
    from deepfm import jobs
    from deepfm.kernels import compiled
    from deepfm.kernels.ops import TENSORFLOW
    from deepfm.modes.common.devices import has_tensor_cores

    # Workers' steps update the variables on the servers, which have to answer before the kernels
    # could be built there.
    has_kernels = compiled.built if distribution.serve else compiled.ready
    wanted = start.compiled_kernels and FLAGS.task_type != "export"
    ops = compiled.COMPILED if wanted and has_kernels() else TENSORFLOW
    chief = distribution.chief
    use_amp = FLAGS.use_amp and has_tensor_cores(distribution.session_config)
    if FLAGS.use_amp and not use_amp:
        logging.warning(
            "--use_amp has no effect without a GPU with tensor cores; training in float32."
        )
    given = tuple(name for name in FLAGS if FLAGS[name].present)
    if FLAGS.task_type == "train" and chief and not distribution.serve:
        distribution.warn_of_flags(given, FLAGS.replicas_per_process)
    rate = FLAGS.learning_rate * start.learning_rate_scale
    job = of_flags(
        JobConfig,
        model={**deepfm_flags.values(ModelConfig), "feature_map": None},  # that flag is of data
        given=given,
        optimizer=of_flags(OptimizerConfig, learning_rate=rate, use_amp=use_amp),
        input=of_flags(InputConfig),
        ops=ops,
        distribution=distribution,
        sagemaker=of_flags(sagemaker.Job),
        flags=deepfm_flags.changed(),
    )

    # 3. The job.
    STOP.loaded()
    jobs.run(job)


if __name__ == "__main__":
    sys.exit(program.run(main, before_tensorflow))
