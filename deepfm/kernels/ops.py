"""The operations that exist twice: as TensorFlow's own, here, and compiled (compiled.py).

What uses them is given an Ops, which is chosen once, and does not ask which it has. With the same
seed both draw the same records and drop the same units.

B: records in a batch. F: fields. K: embedding size. N: values. U: distinct ids.
"""

import tensorflow as tf

CHUNK = 256  # records that pass between threads at once: one by one costs more than reading them


class Ops:
    """TensorFlow's own.

    Raw records pass in chunks: string [n], or where `packed` string [2], the bytes of all of them,
    one after another, and where each ends (csrc/packed.h). Where an operation takes `plain`, that
    does the same with TensorFlow's ops: a compiled one hands over to it what it does not take.

    Attributes:
        adds_l2: whether L2 of a table's rows is best left to `adam_rows`.
    """

    packed = adds_l2 = False

    # A step of training.

    def unique(self, ids, dtype):
        """As tf.unique: int64 [N] -> (distinct ids, `dtype` [U]; which of them each is, int32 [N]).

        int32 take two thirds of the time.
        """
        return tf.unique(tf.cast(ids, dtype))

    def gather(self, table, indices):
        """Rows of a table, which may be cut into parts: int [U] -> float32 [U, ...]."""
        # 'div' keeps neighbouring rows together: a checkpoint means the same with any parts.
        return tf.nn.embedding_lookup(table, indices, partition_strategy="div")

    def look_up(self, weights, embeddings, where, x, counts, field_size, plain):
        """The MLP's input and the FM's terms of a batch.

        Args:
            weights: float32 [U].
            embeddings: float32 [U, K].
            where: int32 [N], the row of each value; None: they have a row each.
            x: float32 [N], what each row is scaled by.
            counts: int32 [B F], the values of each field; None where each has one.
            field_size: F.
            plain: () -> what this returns.

        Returns:
            (float32 [B, F K], the scaled embeddings; float32 [B], first_order + second_order).
        """
        return plain()

    def relu_dropout(self, x, seed, dropped):
        """max(x, 0) with units dropped; which ones is a function of the seed alone.

        A unit takes 16 random bits, so a rate is met to 1/65,536.

        Args:
            x: float32 [B, n].
            seed: int64 [2].
            dropped: of the 65,536 values of a unit's bits, those with which it is dropped.

        Returns:
            float32 [B, n].
        """
        rows, units = tf.shape(x)[0], int(x.shape[1])
        pairs = tf.random.stateless_uniform(
            [rows, -(-units // 2)], seed, -(1 << 31), (1 << 31) - 1, tf.int32
        )
        noise = tf.reshape(tf.bitcast(pairs, tf.int16), [rows, -1])[:, :units]
        kept = tf.cast(noise >= tf.constant(dropped - 32768, tf.int16), x.dtype)
        return tf.nn.relu(x) * (kept * (65536 / (65536 - dropped)))

    def zeros(self, shape, dtype=tf.float32, partition_info=None):
        """The initializer of what an optimizer keeps for a table; it is float32."""
        return tf.zeros(shape, dtype)

    def empty(self, shape):
        """float32 memory of a table, which is written before it is read."""
        return tf.raw_ops.Empty(shape=shape, dtype=tf.float32)

    def adam(self, variable, m, v, grad, rate, beta1, beta2, epsilon):
        """Adam of a resource variable, its biases corrected in `rate`; returns the operation."""
        return tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=m.handle, v=v.handle, beta1_power=0.0, beta2_power=0.0, lr=rate,
            beta1=beta1, beta2=beta2, epsilon=epsilon, grad=grad,
        )  # fmt: skip

    def adam_rows(self, variable, m, v, indices, grad, rate, beta1, beta2, epsilon, l2=0.0):
        """As `adam`, of some rows, which differ, and their gradient + l2 * row.

        The update of tf.contrib.opt.LazyAdamOptimizer (beta powers count steps, not the row's
        uses), without that one's second gather of the moments, and without loading contrib.
        """
        if l2:
            grad += l2 * variable.sparse_read(indices)
        m_rows = m.sparse_read(indices)
        m_rows += (1 - beta1) * (grad - m_rows)
        v_rows = v.sparse_read(indices)
        v_rows += (1 - beta2) * (tf.square(grad) - v_rows)
        step = rate * m_rows / (tf.sqrt(v_rows) + epsilon)
        # Raw ops: the variables' own methods end by reading, and so copying, the whole table.
        scatter = tf.raw_ops.ResourceScatterUpdate
        return tf.group(
            scatter(resource=m.handle, indices=indices, updates=m_rows),
            scatter(resource=v.handle, indices=indices, updates=v_rows),
            tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=indices, updates=step),
        )

    # Raw records.

    @property
    def chunk_shape(self):
        """The shape of a chunk."""
        return [2 if self.packed else None]

    def pack(self, strings):
        """A dataset of chunks, of one of string [n]."""
        return strings

    def no_records(self):
        """A chunk without a record."""
        return tf.zeros([2 if self.packed else 0], tf.string)

    def num_records(self, chunk):
        """int32 []: how many a chunk holds."""
        return tf.size(chunk)

    def rechunked(self, chunks, size, shuffle_buffer=0, seed=1, skip=0, take=-1):
        """As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).take(take).batch(size), in order.

        Args:
            chunks: a dataset of chunks.
            size: records of each chunk that comes out, apart from the last.
            shuffle_buffer: records among which the next one is drawn; at most 1 keeps the order.
            seed: int64 [] or int, of the shuffling.
            skip, take: int64 [] or int, records; all are taken below 0.
        """
        records = chunks.unbatch()
        if shuffle_buffer > 1:
            records = records.shuffle(shuffle_buffer, seed, reshuffle_each_iteration=False)
        return records.skip(skip).take(take).batch(size)

    def read(self, path, buffer_bytes, file_bytes, plain):
        """The chunks of a TFRecord file that is not compressed.

        Fails with DataLossError where the file is damaged, and where it has not `file_bytes`, int64
        [] (below 0: any).

        Args:
            plain: () -> a dataset of string [n].
        """
        return plain()

    def parse(self, chunk, schema, plain, plain_any):
        """Parses serialized Examples.

        Args:
            schema: records.Schema.
            plain: (string [B], schema) -> what this returns; fails at a bad record.
            plain_any: the same, made for Examples that the compiled operator does not take.

        Returns:
            (labels float32 [B], ids int64 [B, F], values float32 [B, F]), or more of it.
        """
        return plain(chunk, schema)

    def parse_lines(self, chunk, schema, plain):
        """As `parse`, of LibSVM lines."""
        return plain(chunk, schema)


TENSORFLOW = Ops()
