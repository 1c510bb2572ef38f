"""The operations that exist twice: with TensorFlow's own ops, and compiled (compiled.py).

A module here has both forms of a family of operations, beside its operators in csrc/. The Ops are
chosen once; the code that receives them need not know which they are. With the same seed both draw
the same records and drop the same units.
"""

from deepfm.kernels import adam, dropout, first_layer, ftrl, parsing, reading, rows


class Ops(
    rows.Plain, first_layer.Plain, dropout.Plain, adam.Plain, ftrl.Plain,
    reading.Plain, parsing.Plain,
):  # fmt: skip
    """TensorFlow's own operations.

    An argument `plain` or `whole` does an operation's work with TensorFlow's ops; a compiled
    operation leaves to it what it cannot handle.

    Attributes:
        packed: whether chunks of raw records are packed (reading.py).
        adds_l2: whether `adam_rows` and `ftrl_rows` should add L2 of a table's rows.
        keeps_rows: whether `applied_first_layer` is there, for fields with one value each.
    """

    packed = adds_l2 = keeps_rows = False


TENSORFLOW = Ops()
