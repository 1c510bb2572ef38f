"""The model applied to many candidates for one user: the signature `candidates` of an export."""

from deepfm.model.embeddings import look_up, values_of
from deepfm.model.layers.terms import first_kernel
from deepfm.model.network import network
from deepfm.runtime.tf import tf

v1 = tf.compat.v1


def logits_of_candidates(user, items, item_fields, config, ops):
    """The logits of one user with each of N items, the user's part of the network computed once.

    With e_f the embeddings of field f, scaled, and s = sum_f e_f over the fields of one part, the
    pairs of fields of both parts add <s_user, s_item> to the FM; the first layer of the MLP is the
    sum of the products of both parts with their rows of its kernel.

    Args:
        user: features as for `network`, of one example and only the user's fields.
        items: those of N examples and only the items' fields.
        item_fields: their numbers, ascending.

    Returns:
        float32 [N].
    """
    width, kernel = config.embedding_size, tf.convert_to_tensor(first_kernel(config))
    of_fields = tf.reshape(kernel, [config.field_size, width, -1])

    def part(features, fields):
        """(products with the first kernel [B, H], s [B, K], first_order + second_order [B])."""
        # To gather rows twice takes less time than to find out which are distinct.
        own = config._replace(field_size=len(fields), lazy_updates=False, l2_scope="table")
        x, fm = look_up(values_of(features, own), own, False, ops).terms()
        rows = tf.reshape(tf.gather(of_fields, fields), [len(fields) * width, -1])
        # Initialized, as look-up tables are, when an exported model has been restored.
        local = [v1.GraphKeys.LOCAL_VARIABLES]
        rows = v1.Variable(rows, trainable=False, collections=local, name="deep_0/kernel_of_part")
        s = tf.reduce_sum(tf.reshape(x, [-1, len(fields), width]), axis=1)
        return tf.matmul(x, rows), s, fm

    user_fields = sorted(set(range(config.field_size)) - set(item_fields))
    (x, s, fm), (of_items, s_items, fm_items) = part(user, user_fields), part(items, item_fields)
    first = (
        tf.nn.bias_add(of_items, tf.reshape(x, kernel.shape[1:])),
        fm + fm_items + tf.reduce_sum(s * s_items, axis=1),
    )
    return network(None, config, ops=ops, first=first).logits
