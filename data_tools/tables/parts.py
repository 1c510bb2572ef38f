"""The parts of a table that tasks read: each a RowPart of a Parquet file or a LinePart of a CSV."""

from typing import Union

from data_tools.tables import csv_blocks, parquet_blocks

Part = Union[parquet_blocks.RowPart, csv_blocks.LinePart]


def reader(part: Part):
    """The module whose functions read a part."""
    # On Spark, named tuples keep their fields, not their class.
    return parquet_blocks if hasattr(part, "groups") else csv_blocks
