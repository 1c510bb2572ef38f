"""Converts raw click logs (Criteo, Avazu, any table) to records: counts categories, writes ids.

    python -m data_tools.prepare --input=train.txt --output_dir=data/criteo --num_workers=8
    python -m data_tools.prepare --feature_map=data/criteo/feature_map.json \\
        --test_input=new.tsv --output_dir=data/new

Writes output_dir/train, valid and test, as far as there are rows for them, each with dataset.json,
and feature_map.json, which feature_map.py explains; it replaces nothing else. The vocabulary comes
from the training rows alone. The same rows and flags give the same ids and splits, whatever the
number of processes. With --feature_map several hosts can do it, each on files of its own; without
one, each would count only those, so data_tools.on_spark does it.
"""

import dataclasses
from typing import List

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
from data_tools.click_logs import vocabulary
from data_tools.click_logs.options import PrepareOptions
from data_tools.common import command_line, publishing
from data_tools.common.command_line import ALONE, Host
from data_tools.engines.processes import Processes
from data_tools.jobs import prepare as job
from deepfm.records.data_file import DataFile
from deepfm.runtime import memory

OF_A_PROCESS = 4 * 10**8  # bytes of a process without the vocabulary
LEAST = 10**8  # bytes for the vocabulary where hardly any are free


def main(options: PrepareOptions):
    inputs = options.input, options.valid_input, options.test_input
    options = dataclasses.replace(options, guess=True)
    prepare(options, command_line.this_host(*inputs, on_spark="prepare"))


def prepare(options: PrepareOptions, host: Host = ALONE) -> List[DataFile]:
    """jobs.prepare in processes of this machine."""
    publishing.check_local(options.output_dir, "write locally")
    return job.prepare(options, Processes(options.num_workers, room=_room(options)), host)


def _room(options):
    """The Room for the vocabulary: --memory_mb, or what is free besides what processes take."""
    others = options.num_workers if options.num_workers > 1 else 0
    cluster = "use a cluster ('python -m data_tools.on_spark prepare')"
    if options.memory_mb:
        more = f"raise --memory_mb={options.memory_mb} if more is free, or {cluster}"
        return vocabulary.Room(options.memory_mb * 10**6, others, more)
    fewer = f"try fewer --num_workers than {others}, or " if others else ""
    free = int(0.9 * memory.available()) - OF_A_PROCESS * (1 + others)
    return vocabulary.Room(max(free, LEAST), others, fewer + cluster)


if __name__ == "__main__":
    command_line.run(main, PrepareOptions)
