"""Converts LibSVM, LibFFM, CSV or Parquet to TFRecord files that train.py reads, with dataset.json.

    python -m data_tools.libsvm_to_tfrecord --input=raw/ --output_dir=data/train
    python -m data_tools.libsvm_to_tfrecord --input=a9a.libsvm --output_dir=data/a9a --pad
    python -m data_tools.libsvm_to_tfrecord --input=log.ffm --output_dir=data/log --multi_valued
    python -m data_tools.libsvm_to_tfrecord --input=rows.parquet --output_dir=data/rows

The pairs of a LibSVM line are its fields, in order, unless --fields gives the ids of each field. A
LibFFM pair names its field. With --fields or LibFFM, the order in a line does not matter, and a
field may be missing. If the first line begins with label:weight, examples are weighted. The ids of
a table, CSV or Parquet, are encoded already; the names of its columns, or --columns, say what each
holds (data_tools/tables/layouts.py).
"""

from typing import List

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
from data_tools.common import command_line, publishing
from data_tools.common.command_line import ALONE, Host
from data_tools.engines.processes import Processes
from data_tools.jobs import convert as job
from data_tools.libsvm.options import ConvertOptions
from deepfm.records.data_file import DataFile


def main(options: ConvertOptions):
    convert(options, command_line.this_host(options.input, on_spark="convert"))


def convert(options: ConvertOptions, host: Host = ALONE) -> List[DataFile]:
    """jobs.convert in processes of this machine."""
    publishing.check_local(options.output_dir, "convert to a local folder")
    return job.convert(options, Processes(options.num_workers), host)


if __name__ == "__main__":
    command_line.run(main, ConvertOptions)
