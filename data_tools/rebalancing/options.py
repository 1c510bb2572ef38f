"""The flags of rebalance, on one machine and on Spark, and which of them contradict one another."""

import dataclasses
from typing import Optional

from data_tools.common.command_line import REQUIRED, flag
from deepfm.errors import BadInput

SEEDS = 2**32


def _rate(label):
    text = (
        f"Copies to write of each record with label {label}, on average: 0.1 keeps a random tenth, "
        "2.5 writes each two or three times. Default: 1."
    )
    return flag(text, lower_bound=0, upper_bound=1000000)


@dataclasses.dataclass(frozen=True)
class RebalanceOptions:
    """The flags, as plain values."""

    # fmt: off
    input: str = flag(
        "TFRecord or LibSVM files, plain or .gz: a directory, a glob, or a comma list of these.",
        REQUIRED)
    output_dir: str = flag("Directory for the files; on Spark also s3:// or hdfs://.", REQUIRED)
    num_files: int = flag(
        "Files to write, on all hosts together, with equal numbers of records. 0: as many as are "
        "read.", default=0, lower_bound=0)
    shuffle: bool = flag("Shuffle all records; false: keep their order.", default=True)
    seed: int = flag(
        "Random seed of the order and the sampling; the same seed writes the same bytes.",
        default=1, lower_bound=0, upper_bound=SEEDS - 1)
    negative_rate: Optional[float] = _rate(0)
    positive_rate: Optional[float] = _rate(1)
    positive_share: Optional[float] = flag(
        "Share of label 1 that the output should have, above 0 and below 1; sets both rates. 0.5: "
        "as many records of each label.")
    oversample: bool = flag(
        "With --positive_share, repeat records of the scarcer label instead of dropping records of "
        "the other.", default=False)
    compress: bool = flag("Compress the files (.gz); smaller, but slower.", default=False)
    memory_mb: int = flag(
        "Memory for records, in MB, for all processes together. Lower it if memory is short.",
        default=512, lower_bound=64)
    num_workers: int = flag("Number of processes; try one per core.", default=1, lower_bound=1)
    max_bad_records: int = flag(
        "Number of bad records to log and skip; one more ends the run.", default=0, lower_bound=0)
    overwrite: bool = flag("Replace the data set in --output_dir.", default=False)
    # fmt: on


def check(options):
    """Refuses (BadInput) flags that contradict one another."""
    share, rates = options.positive_share, (options.negative_rate, options.positive_rate)
    if share is not None and not 0 < share < 1:
        raise BadInput(f"--positive_share={share} is not between 0 and 1; try 0.5.")
    if share is not None and rates != (None, None):
        raise BadInput(
            "--positive_share sets both rates; leave out --negative_rate and --positive_rate, or "
            "leave out --positive_share."
        )
    if options.oversample and share is None:
        raise BadInput("--oversample needs --positive_share, such as --positive_share=0.5.")
