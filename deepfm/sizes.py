"""How large a model may be: what TensorFlow can hold, and what the machine has of memory.

Beyond it TensorFlow 1.15 overflows 32-bit numbers, or crashes, and says neither which nor why.
"""

import os

from deepfm.entry import BadInput

MAX_FIELDS = 100000
MAX_NUMBER = 2**31 - 1


def check(config, one_machine: bool = True):
    """Refuses (BadInput) sizes that no model can have, whether a flag or a file told them.

    Args:
        config: ModelConfig.
        one_machine: whether the model has to fit into this machine's memory.
    """
    if not 1 <= config.field_size <= MAX_FIELDS:
        raise BadInput(f"--field_size={config.field_size} is none of 1 to {MAX_FIELDS} fields.")
    numbers = {name: getattr(config, name) for name in ("feature_size", "embedding_size")}
    for name, number in {**numbers, "deep_layers": max(config.deep_layers)}.items():
        if not 1 <= number <= MAX_NUMBER:
            raise BadInput(f"--{name}={number} is none of 1 to {MAX_NUMBER}, TensorFlow's largest.")
    if not one_machine:
        return
    layers = [config.field_size * config.embedding_size, *config.deep_layers, 1]
    numbers = config.feature_size * (config.embedding_size + 1)
    numbers += sum(x * y for x, y in zip(layers, layers[1:]))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * numbers > memory:
        given = ",".join(map(str, config.deep_layers))
        raise BadInput(
            f"--feature_size={config.feature_size}, --embedding_size={config.embedding_size} and "
            f"--deep_layers={given} make a model of {4 * numbers / 1e9:,.0f} GB, more than the "
            f"{memory / 1e9:,.0f} GB of this machine; give smaller ones, or use parameter servers."
        )
