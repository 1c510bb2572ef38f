"""Rewrites a data set as any number of files, shuffled as a whole and balanced by label.

    python -m data_tools.rebalance --input=data/train --output_dir=data/shuffled --num_files=16
    python -m data_tools.rebalance --input=data/train --output_dir=data/sampled --negative_rate=0.1

TFRecord files become TFRecord files, and LibSVM text becomes LibSVM text; records are copied as
they are. All orders are equally likely (see data_tools.rebalancing.shuffling), and the output
depends on the input, the flags and the seed alone. dataset.json records which share of each label
was kept, for train.py --correct_calibration.
"""

from typing import List

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
from data_tools.common import command_line, publishing
from data_tools.common.command_line import ALONE, Host
from data_tools.engines.processes import Processes
from data_tools.jobs import rebalance as job
from data_tools.rebalancing.options import RebalanceOptions
from deepfm.records.data_file import DataFile


def main(options: RebalanceOptions):
    rebalance(options, command_line.this_host(options.input, on_spark="rebalance"))


def rebalance(options: RebalanceOptions, host: Host = ALONE) -> List[DataFile]:
    """jobs.rebalance in processes of this machine."""
    publishing.check_local(options.output_dir, "write to a local folder")
    engine = Processes(options.num_workers, options.memory_mb << 20)
    return job.rebalance(options, engine, host)


if __name__ == "__main__":
    command_line.run(main, RebalanceOptions)
