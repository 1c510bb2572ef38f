"""The flags of libsvm_to_tfrecord, on one machine and on Spark."""

import dataclasses
from typing import Optional

from data_tools.common.command_line import REQUIRED, flag
from deepfm.runtime import memory


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """The flags, as plain values."""

    # fmt: off
    input: str = flag(
        "LibSVM, LibFFM or CSV files, plain or .gz, or Parquet files: a directory, a glob, or a "
        "comma list of these.", REQUIRED)
    output_dir: str = flag(
        "Directory for the TFRecord files and dataset.json; on Spark also s3:// or hdfs://.",
        REQUIRED)
    num_files: int = flag(
        "TFRecord files that each host writes; rows are spread evenly. 0: one for each input file, "
        "with the same name.", default=0, lower_bound=0)
    split: Optional[str] = flag(
        "Shares of the lines for OUTPUT_DIR/train, valid and test, such as 0.8,0.1,0.1; lines are "
        "drawn by their place. Default: all go to --output_dir.")
    seed: int = flag("Random seed of --split.", default=1)
    field_size: Optional[int] = flag(
        "Fields of each row; other rows are bad. Default: as many as the first row has pairs; with "
        "--pad the longest row; for LibFFM the largest field + 1; for a table as its columns say.",
        lower_bound=1, upper_bound=memory.MAX_FIELDS)
    feature_size: Optional[int] = flag(
        "Upper limit of ids: a row with an id outside [0, feature_size) is bad. Set it to match a "
        "model. Default: as --fields or the input's dataset.json says, else the largest id + 1.",
        lower_bound=1, upper_bound=memory.MAX_NUMBER)
    pad: bool = flag(
        "Pad rows shorter than --field_size with id 0, value 0; use it when rows differ in length. "
        "The input must then not use id 0 (--id_offset=1 shifts 0-based ids).", default=False)
    input_format: str = flag(
        "libsvm: 'label id:value ...' lines; libffm: 'label field:id:value ...'; csv: a table, "
        "whatever the names of the files; auto: Parquet, CSV if files are named .csv or .tsv, else "
        "libsvm or libffm, as the first pair is.",
        default="auto", enum_values=["auto", "libsvm", "libffm", "csv"])
    columns: Optional[str] = flag(
        "JSON file that names the columns of a CSV or Parquet table, and the kind of each; see "
        "docs/data.md. Default: the names of the columns say it.")
    fields: Optional[str] = flag(
        "JSON file with the id range of each field, for LibSVM rows whose pairs are in any order: "
        '{"fields": [{"name": "site", "first_id": 14, "last_id": 2065}, ...]}.')
    multi_valued: bool = flag(
        "Let a field have any number of values; needs LibFFM, --fields, or a table with counts. "
        "Without it, a field with two values is an error and a missing field becomes id 0, value "
        "0, so the input must not use id 0 (--id_offset=1 shifts 0-based ids).", default=False)
    hash_buckets: int = flag(
        "Hash string ids (FarmHash) to the ids 1 to hash_buckets - 1. 0: ids are numbers.",
        default=0, lower_bound=0, upper_bound=memory.MAX_NUMBER)
    id_offset: int = flag("Number to add to each id; 1 makes 0-based ids 1-based.", default=0)
    example_weights: bool = flag(
        "Labels may have weights (label:weight). Default: as the first line, if labels differ.",
        default=False)
    compress: bool = flag("Compress the files (.tfrecords.gz); smaller, but slower.", default=False)
    num_workers: int = flag("Number of processes; try one per core.", default=1, lower_bound=1)
    max_bad_records: int = flag(
        "Number of bad rows to log and skip; one more ends the run.", default=0, lower_bound=0)
    overwrite: bool = flag(
        "Replace the data set in --output_dir (the files its dataset.json names).", default=False)
    # fmt: on
