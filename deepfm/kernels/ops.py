"""The operations that exist twice: with TensorFlow's own ops, here, and compiled (compiled.py).

The Ops are chosen once; the code that receives them need not know which they are. With the same
seed both draw the same records and drop the same units.

B: records in a batch. F: fields. K: embedding size. N: values. U: distinct ids.
"""

import tensorflow as tf

CHUNK = 256  # records that threads pass on at once; one by one would cost more than reading them


class Ops:
    """TensorFlow's own operations.

    Raw records travel in chunks: string [n], or, if `packed`, string [2]: the bytes of all records,
    one after another, and the end of each (csrc/packed.h). An argument `plain` does an operation's
    work with TensorFlow's ops; a compiled operation leaves to it what it cannot handle.

    Attributes:
        packed: whether chunks are packed.
        adds_l2: whether `adam_rows` and `ftrl_rows` should add L2 of a table's rows.
        keeps_rows: whether `applied_first_layer` is there, for fields with one value each.
    """

    packed = adds_l2 = keeps_rows = False

    # The training step.

    def unique(self, ids, dtype):
        """As tf.unique: int64 [N] -> (distinct ids `dtype` [U], the place of each id int32 [N]).

        int32 takes two thirds of the time.
        """
        return tf.unique(tf.cast(ids, dtype))

    def gather(self, table, indices):
        """Rows of a table, which may be cut into parts: int [U] -> float32 [U, ...]."""
        # 'div' keeps neighbouring rows together, so any partitioning can read a checkpoint.
        return tf.nn.embedding_lookup(table, indices, partition_strategy="div")

    def look_up(self, weights, embeddings, where, x, counts, field_size, plain):
        """The MLP's input and the FM's terms of a batch.

        Args:
            weights: float32 [U].
            embeddings: float32 [U, K].
            where: int32 [N], the row of each value; None: value i has row i.
            x: float32 [N], the factor for each row.
            counts: int32 [B F], number of values in each field; None if each has one.
            field_size: F.
            plain: () -> the same as this returns.

        Returns:
            (float32 [B, F K], the scaled embeddings; float32 [B], first_order + second_order).
        """
        return plain()

    def first_layer(
        self, weights, embeddings, where, x, counts, kernel, field_size, pooling, whole
    ):
        """The product of the MLP's input with the first layer's kernel, and the FM's terms.

        Args:
            weights, embeddings, where, x, counts, field_size: as for `look_up`.
            kernel: float32 [F K, H].
            pooling: how the values of a field become one: sum, mean or max.
            whole: () -> the same as this returns, from the matrix that `look_up` returns.

        Returns:
            (float32 [B, H]; float32 [B], first_order + second_order).
        """
        return whole()

    def applied_first_layer(self, weights, embeddings, ids, x, kernel, field_size):
        """As `first_layer`, of fields with one value each, while the weights stay as they are.

        Keeps the products of rows from batch to batch. What it finds of an example is the same, to
        the bit, whatever else is in the batch.

        Args:
            weights, embeddings: the tables.
            ids: int64 [N].
            x, kernel, field_size: as for `first_layer`.
        """
        raise NotImplementedError

    def relu_dropout(self, x, seed, dropped):
        """max(x, 0) with dropout; the seed alone decides which units are dropped.

        A unit uses 16 random bits, so a rate is exact to 1/65,536.

        Args:
            x: float32 [B, n].
            seed: int64 [2].
            dropped: how many of the 65,536 values of a unit's bits drop it.

        Returns:
            float32 [B, n].
        """
        rows, units = tf.shape(x)[0], int(x.shape[1])
        pairs = tf.random.stateless_uniform(
            [rows, -(-units // 2)], seed, -(1 << 31), (1 << 31) - 1, tf.int32
        )
        noise = tf.reshape(tf.bitcast(pairs, tf.int16), [rows, 2 * pairs.shape[1]])[:, :units]
        kept = tf.cast(noise >= tf.constant(dropped - 32768, tf.int16), x.dtype)
        return tf.nn.relu(x) * (kept * (65536 / (65536 - dropped)))

    def zeros(self, shape, dtype=tf.float32, partition_info=None):
        """The initializer of an optimizer's slots for a table; always float32."""
        return tf.zeros(shape, dtype)

    def empty(self, shape):
        """Uninitialized float32 memory for a table that is written before it is read."""
        return tf.raw_ops.Empty(shape=shape, dtype=tf.float32)

    def clip_rows(self, table, indices, values, ratio, min_norm):
        """Clips the gradients of rows as CowClip does; see model/cowclip.py.

        Args:
            table: a resource variable.
            indices: int [U], its rows.
            values: float32 [U, K + 1], the gradient of each and, in the last column, its count.
            ratio, min_norm: r and zeta.

        Returns:
            float32 [U, ...], gradients of the shape of the rows.
        """
        rows = table.sparse_read(indices)
        width = values.shape[1].value - 1
        norm = lambda x: tf.sqrt(tf.reduce_sum(tf.square(x), axis=1, keepdims=True))
        grad, counts = values[:, :width], values[:, width:]
        limit = counts * tf.maximum(ratio * norm(tf.reshape(rows, [-1, width])), min_norm)
        factor = tf.math.divide_no_nan(limit, tf.maximum(norm(grad), limit))
        return tf.reshape(grad * factor, tf.shape(rows))

    def adam(self, variable, m, v, grad, rate, beta1, beta2, epsilon):
        """Applies Adam to a resource variable; `rate` includes the bias correction."""
        return tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=m.handle, v=v.handle, beta1_power=0.0, beta2_power=0.0, lr=rate,
            beta1=beta1, beta2=beta2, epsilon=epsilon, grad=grad,
        )  # fmt: skip

    def adam_rows(self, variable, m, v, indices, grad, rate, beta1, beta2, epsilon, l2=0.0):
        """As `adam`, for distinct rows only, with their gradient + l2 * row.

        The update of tf.contrib.opt.LazyAdamOptimizer (beta powers count steps, not the row's
        uses), without its second gather of the moments, and without loading contrib.
        """
        if l2:
            grad += l2 * variable.sparse_read(indices)
        m_rows = m.sparse_read(indices)
        m_rows += (1 - beta1) * (grad - m_rows)
        v_rows = v.sparse_read(indices)
        v_rows += (1 - beta2) * (tf.square(grad) - v_rows)
        step = rate * m_rows / (tf.sqrt(v_rows) + epsilon)
        # Raw ops, because the variables' own methods end by reading, and so copying, the table.
        scatter = tf.raw_ops.ResourceScatterUpdate
        return tf.group(
            scatter(resource=m.handle, indices=indices, updates=m_rows),
            scatter(resource=v.handle, indices=indices, updates=v_rows),
            tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=indices, updates=step),
        )

    def elapsed_adam(
        self, variable, m, v, seen, indices, grad, now, run_step, rate, beta1, beta2, epsilon, l2
    ):
        """Adam for distinct rows, at once for all n steps since each was last in a batch.

        Dense Adam also moves the rows that a batch lacks: their moments decay, the first one goes
        on moving them, and L2 shrinks them. This does the same for the batch's rows alone. The
        second moment decays by the n steps that have passed. What the coming steps would do is
        done in advance, for n of them, as that is how often the row comes:

            v := beta2^n v + (1 - beta2) g^2                  s = sqrt(v) + epsilon
            m := beta1 m + (1 - beta1) g
            w := (w - rate (1 + beta1 + ... + beta1^(n-1)) m / s) / (1 + rate l2 n / s)
            m := beta1^(n-1) m

        The last line of w is the implicit Euler step of w' = -rate l2 w / s: it never overshoots 0.
        So each row meets the same equilibrium of gradient and L2 as in dense training, whatever its
        frequency. With n = 1 and l2 = 0 it is Adam.

        Args:
            seen: variable int64 [rows], the number of steps until each row was last in a batch.
            now: int64 [], number of steps with this one.
            run_step: int, the step at which the run began; rows not seen since count from it.
            l2: lambda.
        """
        before = seen.sparse_read(indices)
        n = tf.cast(tf.maximum(now - tf.maximum(before, run_step), 1), tf.float32)
        n = tf.reshape(n, [-1] + [1] * (len(variable.shape) - 1))
        rows, m_rows = variable.sparse_read(indices), m.sparse_read(indices)
        m_rows += (1 - beta1) * (grad - m_rows)
        v_rows = tf.pow(beta2, n) * v.sparse_read(indices) + (1 - beta2) * tf.square(grad)
        scale = tf.sqrt(v_rows) + epsilon
        moves = rate * (1 - tf.pow(beta1, n)) / (1 - beta1)
        rows = (rows * scale - moves * m_rows) / (scale + rate * l2 * n)
        m_rows *= tf.pow(beta1, n - 1)
        scatter = tf.raw_ops.ResourceScatterUpdate
        put = lambda to, what: scatter(resource=to.handle, indices=indices, updates=what)
        with tf.control_dependencies([n]):  # which has read what this replaces
            updated = put(seen, tf.fill(tf.shape(indices), now))
        return tf.group(updated, put(m, m_rows), put(v, v_rows), put(variable, rows))

    def ftrl(self, variable, accum, linear, grad, rate):
        """Applies FTRL without L1 to a resource variable.

        McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1:

            n' := n + g^2
            z := z + g - (sqrt(n') - sqrt(n)) / rate w
            w := -rate z / sqrt(n')

        with n in `accum` and z in `linear`.
        """
        return tf.raw_ops.ResourceApplyFtrl(
            var=variable.handle, accum=accum.handle, linear=linear.handle, grad=grad, lr=rate,
            l1=0.0, l2=0.0, lr_power=-0.5,
        )  # fmt: skip

    def ftrl_rows(self, variable, accum, linear, indices, grad, rate, l2=0.0):
        """As `ftrl`, for distinct rows only, with their gradient + l2 * row."""
        if l2:
            grad += l2 * variable.sparse_read(indices)
        return tf.raw_ops.ResourceSparseApplyFtrl(
            var=variable.handle, accum=accum.handle, linear=linear.handle, grad=grad,
            indices=indices, lr=rate, l1=0.0, l2=0.0, lr_power=-0.5,
        )  # fmt: skip

    # Predictions.

    def lines(self, numbers):
        """The text of numbers, each as "%.9g" on a line of its own: float32 [n] -> str."""
        return "%.9g\n" * len(numbers) % tuple(numbers.tolist())

    # Raw records.

    @property
    def chunk_shape(self):
        """The shape of a chunk."""
        return [2 if self.packed else None]

    def pack(self, strings):
        """Turns a dataset of string [n] into one of chunks."""
        return strings

    def no_records(self):
        """A chunk without records."""
        return tf.zeros([2 if self.packed else 0], tf.string)

    def num_records(self, chunk):
        """int32 []: the number of records in a chunk."""
        return tf.size(chunk)

    def rechunked(self, chunks, size, shuffle_buffer=0, seed=1, skip=0, take=-1):
        """As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).take(take).batch(size), in order.

        Args:
            chunks: a dataset of chunks.
            size: records in each resulting chunk but the last.
            shuffle_buffer: records from which the next one is drawn; 0 or 1 keeps the order.
            seed: int64 [] or int, seed of the shuffling.
            skip, take: int64 [] or int, numbers of records; a negative `take` takes all.
        """
        records = chunks.unbatch()
        if shuffle_buffer > 1:
            records = records.shuffle(shuffle_buffer, seed, reshuffle_each_iteration=False)
        return records.skip(skip).take(take).batch(size)

    def read(self, path, buffer_bytes, file_bytes, plain):
        """The chunks of an uncompressed TFRecord file.

        Fails with DataLossError if the file is damaged, or if it is not `file_bytes`, int64 [],
        long (below 0: any).

        Args:
            plain: () -> a dataset of string [n].
        """
        return plain()

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

    def parse_lines(self, chunk, schema, plain):
        """As `parse`, for LibSVM lines."""
        return plain(chunk, schema)


TENSORFLOW = Ops()
