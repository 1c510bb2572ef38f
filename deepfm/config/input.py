"""How records are read, which of them, and where a run is among them."""

from typing import NamedTuple, Optional, Tuple

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
        f"Records to evaluate on, during training and in eval. {_DATA}", tasks=("train", "eval"))
    infer_data_dir: Optional[str] = setting(OF_PROCESS, None,
        f"Records to predict. Default: those of --val_data_dir. {_DATA}", tasks=("infer",))
    data_format: str = setting(OF_PROCESS, "auto",
        "Format of the records; auto goes by file names and contents.",
        choices=("auto", "tfrecord", "libsvm"))  # and the names of data.formats
    max_bad_records: int = setting(OF_PROCESS, 0,
        "Training skips up to this many unreadable records and lists them in report.json; one more "
        "ends it.", at_least=0)
    eval_on_all_ranks: bool = setting(ALIKE, False,
        "Every Horovod rank evaluates all records, instead of its share of them.")
    example_weights: Optional[bool] = setting(CHANGES, None,
        "Weigh each example as its record says (feature `weight`; LibSVM: label:weight). False: "
        "ignore weights. Default: as dataset.json or the first record says; Pipe mode needs the "
        "flag.")

# fmt: on


class Share(NamedTuple):
    """Which of the records that a process can see it reads: part `index` of `of` parts."""

    of: int = 1
    index: int = 0


class Position(NamedTuple):
    """Where a run is when a training goes on with it.

    Attributes:
        epoch: number of the epoch, from 0.
        step: batches of that epoch that this process has already used; batches of all epochs if
            the rows are unknown.
        rows_of_processes: the records that each process reads in an epoch, by rank; None if
            unknown.
        by_rows: whether files are grouped by their rows; False if these were unknown when the run
            began.
        global_step: the step from which training continues.
        run_step: the global step at which the run began.
    """

    epoch: int = 0
    step: int = 0
    rows_of_processes: Optional[Tuple[int, ...]] = None
    by_rows: bool = True
    global_step: int = 0
    run_step: int = 0

    def used(self, size: int, rank: int) -> int:
        """Records of the epoch that a process has used, `size` per step; 0 if unknown."""
        return min(self.step * size, self.rows_of_processes[rank]) if self.rows_of_processes else 0
