"""Reads the rows of tables: those with encoded ids as the converter reads lines.

Needs neither TensorFlow nor absl, which Spark's executors lack.
"""

import dataclasses
from typing import Iterator, Union

from data_tools.tables import blocks, csv_blocks, parquet_blocks, row_checks
from data_tools.tables.layouts import Layout
from deepfm.records.schema import Schema

Part = Union[parquet_blocks.RowPart, csv_blocks.LinePart]  # of a file, which a task reads


def read(part: Part) -> Iterator:
    """Yields (bytes of the file read, a block) for the rows of a part."""
    # On Spark, named tuples keep their fields, not their class.
    return (parquet_blocks if hasattr(part, "groups") else csv_blocks).read(part)


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads rows whose columns are a Layout; its methods do what those of pieces.LineReader do."""

    layout: Layout
    what = "id"

    def read(self, part: Part) -> Iterator:
        return read(part)

    def count(self, part: Part, schema: Schema) -> Iterator:
        lists = schema.pad and self.layout.ids  # whose lengths are the rows' fields
        if hasattr(part, "groups") and not lists:  # the file says it
            rows = part.end - part.begin
            yield part.bytes * rows // part.rows, None, (rows, 0)
            return
        for size, block in read(part):
            yield size, None, (len(block), block.longest(lists) if lists else 0)

    def records(self, block, schema: Schema) -> Iterator:
        accept = lambda some: row_checks.batch(some, self.layout, schema)
        return blocks.sifted(block, accept, lambda some, row: self.explain(some, row, schema))

    def explain(self, block, row: int, schema: Schema):
        return row_checks.explain(block, row, self.layout, schema)

    def fields(self, block, row: int) -> int:
        cells = row_checks.cells_of(block, row, self.layout)
        lists = self.layout.counts or self.layout.ids
        return 0 if isinstance(cells, str) else len(cells[lists] or ())

    def label(self, block, row: int) -> bytes:
        cells = row_checks.cells_of(block, row, self.layout)
        return b"%d" % int(row_checks.number(cells[self.layout.label]))
