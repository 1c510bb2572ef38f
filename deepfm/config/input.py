"""How the user wants records read."""

from typing import NamedTuple, Optional

from deepfm.config.model import SEED
from deepfm.config.setting import ALIKE, CHANGES, OF_PROCESS, OF_RUN, ORDER, declares, setting

# fmt: off

_DATA = "A directory, a glob, or a comma list of these; local or s3://."


@declares
class InputConfig(NamedTuple):
    """How the user wants records read."""

    batch_size: int = setting(ALIKE, 1024, "Records per batch of each replica.", at_least=1)
    num_epochs: int = setting(OF_RUN, 1,
        "How often to train on each record, counted from the start of the run.", at_least=1)
    seed: int = SEED._replace(kind=ORDER)
    shuffle_buffer: int = setting(ORDER, 0,
        "Records from which the next one is drawn at random; 0 keeps their order. Raise it if "
        "neighbouring records are alike.", at_least=0, asked=100000)
    num_parallel_reads: int = setting(ORDER, 1,
        "Files read at the same time. Raise it if the log says that training waits for input.",
        at_least=1, at_most=1024, asked=4)
    cache: str = setting(OF_PROCESS, "none",
        "Where to keep the records after the first epoch: none, memory, or the path of a cache "
        "file. Worth it where reading is slow, as from S3; files of this host gain nothing.")
    num_parsers: int = setting(OF_PROCESS, 0,
        "Batches parsed at the same time; 0: half the cores of a process, at least 1.",
        at_least=0, at_most=1024)
    prefetch_batches: int = setting(OF_PROCESS, 0,
        "Parsed batches that wait for a step; 0: twice as many as parsers, at least 4.",
        at_least=0, at_most=1 << 20)
    read_buffer_bytes: int = setting(OF_PROCESS, 8 << 20,
        "Bytes of the read buffer of each file. Raise it for slow disks and S3.", at_least=1)
    training_data_dir: Optional[str] = setting(OF_PROCESS, None,
        f"Records to train on. {_DATA}", tasks=("train",))
    val_data_dir: Optional[str] = setting(OF_PROCESS, None,
        f"Records to evaluate on, in train, eval and importance; exports take the requests from "
        f"them with which a server warms up. {_DATA}",
        tasks=("train", "eval", "importance", "export"))
    infer_data_dir: Optional[str] = setting(OF_PROCESS, None,
        f"Records to predict. Default: those of --val_data_dir. {_DATA}", tasks=("infer",))
    data_format: str = setting(OF_PROCESS, "auto",
        "Format of the records; auto goes by file names and contents.",
        choices=("auto", "tfrecord", "libsvm"))  # and the names of data.formats
    max_bad_records: int = setting(OF_PROCESS, 0,
        "Training skips up to this many unreadable records, infer predicts nan for them, and the "
        "report lists them; one more ends the job.", at_least=0)
    eval_on_all_ranks: bool = setting(ALIKE, False,
        "Every Horovod rank evaluates all records, instead of its share of them.")
    example_weights: Optional[bool] = setting(CHANGES, None,
        "Weigh each example as its record says (feature `weight`; LibSVM: label:weight). False: "
        "ignore weights. Default: as dataset.json or the first record says; Pipe mode needs the "
        "flag.")
