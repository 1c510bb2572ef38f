"""CowClip: the gradient of an embedding row is clipped by the norm of the row itself.

    g := min(1, n max(r |w|, zeta) / |g|) g

for each row w of the tables: g is its gradient of the global batch's mean loss, without L2, and n
how often its feature id occurs in that batch. Zheng et al., "CowClip: Reducing CTR Prediction Model
Training Time from 12 hours to 10 minutes on 1 GPU", AAAI 2023, https://arxiv.org/abs/2204.06240.

The authors' code (https://github.com/bytedance/LargeBatchCTR) needs gradients of whole tables; this
needs those of the batch's rows. It also clips the rows of fm_w, which their code does not; and
their code clips L2 too, and uses zeta r sqrt(K) for zeta.

A replica knows the ids of its part of the batch only. So it sends each row's count along, as one
more column of the row's gradient: whatever adds up the rows of replicas adds up their counts.
Ops.clip_rows takes the column off and clips.

U: distinct ids.
"""

from typing import NamedTuple

from deepfm.runtime.tf import tf


class Occurrences(NamedTuple):
    """How often each feature id occurs in a replica's part of the batch.

    Attributes:
        ids: int [U], distinct.
        counts: float32 [U].
    """

    ids: tf.Tensor
    counts: tf.Tensor


def with_counts(grad, variable, occurrences):
    """The gradient of a table with one more column, the count of each row.

    Args:
        grad: tf.IndexedSlices of the rows of occurrences.ids; others are returned as they are.
        variable: the table, or the part of it that has these rows.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    ids, counts = occurrences
    part = variable._get_save_slice_info()
    if part:  # the gradient's rows are those of the part, in the order of the ids
        first, rows = part.var_offset[0], part.var_shape[0]
        counts = tf.boolean_mask(counts, (ids >= first) & (ids < first + rows))
    flat = tf.reshape(grad.values, [-1, grad.values.shape[1:].num_elements()])
    values = tf.concat([flat, counts[:, tf.newaxis]], axis=1)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
