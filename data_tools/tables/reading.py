"""Reads the rows of tables, CSV or Parquet.

Needs neither TensorFlow nor absl, which Spark's executors lack.
"""

from typing import Iterator, Union

from data_tools.tables import csv_blocks, parquet_blocks

Part = Union[parquet_blocks.RowPart, csv_blocks.LinePart]  # of a file, which a task reads


def read(part: Part) -> Iterator:
    """Yields (bytes of the file read, a block) for the rows of a part."""
    # On Spark, named tuples keep their fields, not their class.
    return (parquet_blocks if hasattr(part, "groups") else csv_blocks).read(part)
