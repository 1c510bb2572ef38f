"""Batches of raw records, parsed. B: records in a batch. F: fields."""

from deepfm.kernels.build import raw_ops


class Plain:
    """With TensorFlow's operators."""

    def parse(self, chunk, schema, plain):
        """Parses serialized Examples.

        Args:
            schema: records.Schema.
            plain: (string [B], schema) -> the same as this returns; fails at a bad record.

        Returns:
            (labels float32 [B], ids int64 [B, F], values float32 [B, F]), perhaps with counts, and
            weights float32 [B] if the schema gives them.
        """
        return plain(chunk, schema)

    parse_lines = parse  # of LibSVM lines


class Compiled:
    """As Plain, with the compiled operators."""

    def parse(self, chunk, schema, plain):
        *found, counts, weights = raw_ops().deepfm_parse(
            chunk, schema.field_size, schema.limit, with_labels=schema.with_labels,
            num_counts=int(schema.multi_valued), num_weights=int(schema.with_weights),
        )  # fmt: skip
        return (*found, *counts, *weights)

    def parse_lines(self, chunk, schema, plain):
        *found, _, weights = raw_ops().deepfm_parse(
            chunk, schema.field_size, schema.limit, num_weights=int(schema.weighted),
            lines=True, id_offset=schema.id_offset, pad=bool(schema.pad),
        )  # fmt: skip
        return (*found, *(weights if schema.with_weights else ()))
