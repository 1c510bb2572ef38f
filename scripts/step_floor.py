"""What this machine needs at least for a training step on the distinct rows of its batches.

    .venv/bin/python scripts/step_floor.py --arrays=train.npz

Two parts, in CPU-seconds per million examples. Products: those of the distinct rows with the first
layer's kernel, all fields at once, and of the layers behind it, forward and backward, each alone
and at the speed of whichever is faster at its shape: NumPy's BLAS or TensorFlow. Bytes: rows that
are gathered from the tables and updated with their two moments, at the speed at which this machine
copies memory; and the rows and gradients that are summed, each once per use, at the speed at which
it copies as many bytes as they have.

Nothing else is counted: no reading of records, no finding of distinct ids, no random numbers for
dropout, no hidden layers' activations, no starting of operators. It prints JSON.
"""

import json
import os
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy

from programs import need, run_program  # first

need("numpy", "tensorflow_core")

# isort: split
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402

v1 = tf.compat.v1

FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_string("arrays", None, "The .npz file whose `ids` int64 [n, F] are trained on.")
flags.DEFINE_integer("batch_size", 1024, "Examples of a step.", 1)
flags.DEFINE_integer("embedding_size", 32, "Width of an embedding, K.", 1)
flags.DEFINE_list("deep_layers", "128,64,32", "Units of the layers.")
flags.mark_flag_as_required("arrays")
# fmt: on

_BATCHES, _TRIES = 8, 5
_IN_MEMORY = 1 << 28  # bytes, more than any cache holds
_COPIES_OF_TABLES = 10  # of a row: gathered 2; gradient 2; variable and two moments, in and out


def main(_):
    ids = np.load(FLAGS.arrays)["ids"]
    layers = [int(units) for units in FLAGS.deep_layers]
    examples, fields = FLAGS.batch_size, ids.shape[1]
    width = FLAGS.embedding_size
    batches = [ids[i * examples :][:examples] for i in range(min(_BATCHES, len(ids) // examples))]
    distinct = np.mean([len(np.unique(batch)) for batch in batches])
    pairs = int(np.mean([sum(len(np.unique(field)) for field in batch.T) for batch in batches]))
    shapes = [(pairs, width, layers[0])]
    shapes += [(examples, *two) for two in zip(layers, [*layers[1:], 1])]
    products = sum(map(_seconds_of_product, *zip(*shapes)))
    uses = 4 * fields * examples * (width + layers[0])
    of_rows = 4 * (width + 1) * distinct * _COPIES_OF_TABLES
    forward = _bytes_per_second(4 * pairs * (width + layers[0]))
    backward = _bytes_per_second(4 * examples * (width + layers[0]))
    moved = uses / forward + uses / backward + of_rows / _bytes_per_second(_IN_MEMORY)
    per_million = 1e6 / examples
    found = {"products": products * per_million, "bytes": moved * per_million}
    print(json.dumps({"cpu_seconds_per_million": sum(found.values()), **found}))


def _seconds_of_product(n, k, m):
    """CPU-seconds of [n, k] x [k, m] and of its two gradients."""
    x, w, y = (np.ones(shape, np.float32) for shape in ((n, k), (k, m), (n, m)))
    factors = (x, w), (y, w.T), (x.T, y)
    return sum(min(_by_blas(*two), _by_tensorflow(*two)) for two in factors)


def _by_blas(a, b):
    out = np.empty([len(a), b.shape[1]], np.float32)
    return _least(lambda: np.dot(a, b, out=out), 10)


def _by_tensorflow(a, b):
    copies = 10  # so that starting the session does not count
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # it would merge equal ones
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    flipped = [not x.flags.c_contiguous for x in (a, b)]
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        x, y = (v1.get_variable(name, initializer=z.T if flip else z, use_resource=True)
                for name, z, flip in zip("xy", (a, b), flipped))  # fmt: skip
        products = []
        for _ in range(copies):  # one after the other, and none equal to another
            with tf.control_dependencies(products[-1:]):
                products.append(tf.matmul(x, y, *flipped))
        session.run(v1.global_variables_initializer())
        step = session.make_callable(tf.group(products))
        step()
        return _least(step, 1) / copies


def _bytes_per_second(size):
    """Bytes that are read and written per CPU-second by copying, if `size` are moved in all."""
    source, target = np.ones(size // 8, np.float32), np.zeros(size // 8, np.float32)
    repeats = max(1, int(2e8 / size))
    return size / _least(lambda: np.copyto(target, source), repeats)


def _least(work, repeats):
    """CPU-seconds of `work`, the least of several tries of `repeats` calls."""
    found = []
    for _ in range(_TRIES):
        before = time.process_time()
        for _ in range(repeats):
            work()
        found.append((time.process_time() - before) / repeats)
    return min(found)


if __name__ == "__main__":
    run_program(main)
