"""What modes of distribution read."""

from typing import NamedTuple, Optional

from deepfm.config.setting import OF_PROCESS, declares, setting

CROSS_DEVICE_OPS = {  # value of the flag: class in tf.distribute
    "nccl": "NcclAllReduce",
    "hierarchical_copy": "HierarchicalCopyAllReduce",
    "reduction_to_one_device": "ReductionToOneDevice",
}

# fmt: off


@declares
class ModeFlags(NamedTuple):
    """The flags that modes read.

    train.py has put allow_onednn, allow_tf32, omp_num_threads and kmp_affinity in the environment.

    Attributes:
        task_type: as in JobConfig.
    """

    intra_op_threads: int = setting(OF_PROCESS, 0,
        "Threads inside one TensorFlow operator; 0: half the cores.", at_least=0, at_most=1024)
    inter_op_threads: int = setting(OF_PROCESS, 0,
        "TensorFlow operators that run at the same time; 0: one per core.",
        at_least=0, at_most=1024)
    allow_onednn: bool = setting(OF_PROCESS, False,
        "Let TensorFlow 2.15 use oneDNN, which adds up in another order, so that results differ "
        "in more digits from those of 1.15; 1.15 has none.")
    allow_tf32: bool = setting(OF_PROCESS, False,
        "Let GPUs of compute capability 8.0 or above round the factors of float32 products to 10 "
        "bits, as TensorFlow does by default; off, they train what a CPU trains.")
    omp_num_threads: int = setting(OF_PROCESS, 0,
        "Threads of OpenMP, for builds of TensorFlow with MKL; 0: OMP_NUM_THREADS of the "
        "environment, or else the cores, divided by the ranks of this host.",
        at_least=0, at_most=1024)
    kmp_affinity: Optional[str] = setting(OF_PROCESS, None,
        "KMP_AFFINITY of OpenMP, for builds of TensorFlow with MKL, for example verbose,disabled. "
        "Default: disabled, which binds no thread to a core.")
    replicas_per_process: int = setting(OF_PROCESS, 0,
        "Devices that each process uses with tower, mirrored and ps; 0: all GPUs, or else CPU "
        "cores - 1 (ps: one).", at_least=0)
    cross_device_ops: Optional[str] = setting(OF_PROCESS, None,
        "How mirrored adds up the gradients of its devices; nccl needs GPUs. Default: nccl on "
        "GPUs, reduction_to_one_device on CPUs.", choices=tuple(CROSS_DEVICE_OPS))
    num_cpus: int = setting(OF_PROCESS, 0,
        "CPU cores for the processes of this host; 0: all that the host grants.",
        at_least=0, alias="num_CPUs")
    num_gpus: int = setting(OF_PROCESS, 0,
        "Number of GPUs that TensorFlow must find on this host; with fewer, training refuses to "
        "start. 0 does not check.", at_least=0, alias="num_GPUs")
    task_type: str = "train"
