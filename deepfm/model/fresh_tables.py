"""Fresh embedding tables at the start of each epoch, and an MLP that goes on: MEDA.

CTR models overfit as soon as the second epoch begins (Zhang et al., "Towards Understanding the
Overfitting Phenomenon of Deep Click-Through Rate Models", CIKM 2022,
https://arxiv.org/abs/2209.06053): the rows of rare ids know their few examples by then. Fan et al.,
"Multi-Epoch Learning with Data Augmentation for Deep Click-Through Rate Prediction", 2024,
https://arxiv.org/abs/2407.01607, let the MLP learn from new embeddings in each epoch instead.

K: embedding size.
"""

from typing import Callable, Dict

import numpy as np

from deepfm.config import ModelConfig
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import embeddings, optimizers
from deepfm.model.layers import initializers
from deepfm.runtime.tf import tf

v1 = tf.compat.v1


def added(config: ModelConfig, step: int) -> Callable:
    """Makes rows to add to the tables of a checkpoint, and to their slots: those of a new model.

    Args:
        config: of the larger model.
        step: global step of the checkpoint; added rows count from there.

    Returns:
        (name of a variable there, its rows, first, end) -> its rows [first, end), an array; to call
        where there is a session.
    """

    def make(name, rows, first, end):
        shape, slot = [end - first, *rows.shape[1:]], name.rpartition("/")[2]
        if name == embeddings.NAMES[1]:
            whole, offset = [config.feature_size, *shape[1:]], [first, 0]
            part = tf.Variable.SaveSliceInfo("", whole, offset, shape)
            draw = initializers.normal(config.embedding_init_stddev, config.seed, TENSORFLOW)
            return draw(shape, partition_info=part).eval()
        fresh = step if slot == optimizers.SEEN else optimizers.FRESH.get(slot, 0)
        return np.full(shape, fresh, rows.dtype)

    return make


class FreshTables(v1.train.SessionRunHook):
    """Gives the tables fresh numbers, and their slots the initial ones, before epochs begin.

    The embeddings are a function of the seed and the epoch. Checkpoints and evaluations at the end
    of an epoch have the trained tables, because the next step's beginning replaces them.

    Args:
        epochs: {global step: epoch} of the steps with which an epoch after the first, from 0,
            begins; all processes must take each step together.
    """

    def __init__(self, config: ModelConfig, epochs: Dict[int, int]):
        self._config, self._epochs = config, epochs

    def begin(self):
        self._epoch = v1.placeholder(tf.int64, [])
        found = [copy for v in v1.global_variables() for copy in getattr(v, "values", [v])]
        found = {variable.op.name: variable for variable in found if embeddings.is_table(variable)}
        done = []
        for variable in found.values():  # one after the other, as each may need memory
            with tf.control_dependencies(done), tf.device(variable.device):
                done = [self._renewed(variable)]
        self._renew = tf.group(*done)

    def after_create_session(self, session, coord):
        self._step = int(session.run(v1.train.get_global_step()))

    def before_run(self, run_context):
        epoch = self._epochs.get(self._step)
        if epoch is not None:
            run_context.session.run(self._renew, {self._epoch: epoch})

    def after_run(self, run_context, run_values):
        self._step += 1

    def _renewed(self, variable):
        """The op that renews a table, or a slot of one.

        Where rows are updated, assigning would copy the table. Where they are not, writing rows
        would make each later read copy it.
        """
        config, in_place = self._config, self._config.lazy_updates
        if optimizers.SEEN in variable.op.name.split("/"):  # fresh rows count from now
            now = tf.cast(v1.train.get_global_step(), tf.int64)
            return initializers.write_alike(variable, now[tf.newaxis])
        drawn = embeddings.is_drawn(variable)
        numbers = config.embedding_init_stddev, config.seed
        if drawn and in_place:
            return initializers.write_normal(variable, *numbers, self._epoch)
        if in_place:  # all rows begin alike
            return initializers.write_alike(variable, variable.initial_value[:1])
        value = variable.initial_value
        if drawn:
            make = initializers.normal(*numbers, TENSORFLOW, self._epoch)
            value = make(variable.shape.as_list())
        return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
