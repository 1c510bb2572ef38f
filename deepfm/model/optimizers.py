"""The optimizers, row-wise ("lazy") for the embedding tables.

Each receives finished gradients (gradients.RowWise) and updates only the rows of the batch.
"""

from typing import Callable, Dict, NamedTuple

import numpy as np

from deepfm.config import OptimizerConfig
from deepfm.errors import BadInput
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import embeddings
from deepfm.model.gradients import RowWise
from deepfm.model.loss_scale import LossScaled
from deepfm.runtime.tf import key_of_slots, slot_creator, summarize, tf

v1 = tf.compat.v1

SEEN = "last_seen"  # the slot, int64, of the number of steps until a row was last in a batch
DECAY = "learning_rate_decay"  # name of the variable that multiplies the learning rate


def complete(config: OptimizerConfig, model) -> OptimizerConfig:
    """The config with the settings for table rows from a ModelConfig; BadInput if they clash."""
    if config.cowclip_ratio and model.l2_scope == "table":
        raise BadInput(
            "--cowclip_ratio clips the gradients of the batch's rows before L2 is added to them, "
            "and --l2_scope=table adds it to all rows; try --l2_scope=batch."
        )
    if config.name == "ftrl" and 0 in (config.learning_rate, config.embedding_learning_rate):
        raise BadInput(
            "--optimizer=ftrl divides by its rate: --learning_rate and --embedding_learning_rate "
            "must be above 0."
        )
    if config.cowclip_ratio and not config.cowclip_min_norm:
        raise BadInput(
            "--cowclip_min_norm=0 would leave each weight of fm_w at 0, where it starts; "
            "try --cowclip_min_norm=1e-5."
        )
    l2_rows = 0.0 if model.l2_scope == "table" else model.l2_reg
    elapsed = model.l2_scope == "elapsed"
    return config._replace(l2_rows=l2_rows, elapsed=elapsed, lazy_updates=model.lazy_updates)


class _LazyAdam(v1.train.AdamOptimizer):
    """Adam that updates the moments of a row only if the row is in the batch.

    Args:
        rate: float or float32 [].
        ops: Ops that compute the update.
        l2_rows: lambda of the L2 term of the updated rows.
        elapsed: whether an update of a row covers all steps since its last (Ops.elapsed_adam).
        run_step: global step at which the run began.
        start_step: the step that rows count from if the checkpoint does not say when they were
            last in a batch.
    """

    def __init__(self, rate, ops=TENSORFLOW, l2_rows=0.0, elapsed=False, run_step=0, start_step=0):
        super().__init__(rate)
        self._ops, self._l2_rows, self._elapsed = ops, l2_rows, elapsed
        self._run_step, self._start_step = run_step, start_step

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        start = lambda shape, dtype, partition_info=None: tf.fill(shape, np.int64(self._start_step))
        slots = self._slot_dict(SEEN)
        for var in filter(embeddings.is_table, var_list if self._elapsed else ()):
            if key_of_slots(var) in slots:
                continue
            # GPUs have no gather of int64: a slot colocated with its table would pull that away.
            with tf.device(var.device):
                seen = slot_creator.create_slot_with_initializer(
                    var, start, var.shape[:1], tf.int64, SEEN, colocate_with_primary=False
                )
            slots[key_of_slots(var)] = seen
            part = getattr(var, "_save_slice_info", None)
            if part:  # TensorFlow takes the slot for one of the same shape
                sizes = part.full_shape[:1], part.var_offset[:1], part.var_shape[:1]
                seen._set_save_slice_info(
                    tf.Variable.SaveSliceInfo(f"{part.full_name}/{SEEN}", *sizes)
                )

    def _zeros_slot(self, var, slot_name, op_name):
        return self._get_or_make_slot_with_initializer(
            var, self._ops.zeros, var.shape, var.dtype.base_dtype, slot_name, op_name
        )

    def _prepare(self):
        beta1_power, beta2_power = self._get_beta_accumulators()
        with tf.device(beta1_power.device):  # a server's, so that no worker sends it the numbers
            super()._prepare()
            self._correction = tf.sqrt(1 - beta2_power) / (1 - beta1_power)
        if self._elapsed:
            self._now = tf.cast(v1.train.get_or_create_global_step(), tf.int64) + 1

    @property
    def _numbers(self):
        return self._lr_t * self._correction, self._beta1_t, self._beta2_t, self._epsilon_t

    def _resource_apply_dense(self, grad, var):
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        return self._ops.adam(var, m, v, grad, *self._numbers)

    def _resource_apply_sparse(self, grad, var, indices):
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        if not (self._elapsed and embeddings.is_table(var)):
            return self._ops.adam_rows(var, m, v, indices, grad, *self._numbers, l2=self._l2_rows)
        seen, when = self.get_slot(var, SEEN), (self._now, self._run_step)
        return self._ops.elapsed_adam(
            var, m, v, seen, indices, grad, *when, *self._numbers, l2=self._l2_rows
        )


class _Ftrl(v1.train.FtrlOptimizer):
    """Ftrl whose slots a MirroredStrategy can create.

    TensorFlow's own first creates a constant on the variable's device, and for that reads the
    variable's handle outside a replica, which MirroredStrategy forbids.

    Args:
        rate: float or float32 [].
        ops: Ops that compute the update.
        l2_rows: lambda of the L2 term of the updated rows.
    """

    def __init__(self, rate, ops=TENSORFLOW, l2_rows=0.0):
        super().__init__(rate)
        self._ops, self._l2_rows = ops, l2_rows

    def _create_slots(self, var_list):
        start = v1.constant_initializer(self._initial_accumulator_value)
        for v in var_list:
            for name, initializer in (("accum", start), ("linear", self._ops.zeros)):
                self._get_or_make_slot_with_initializer(
                    v, initializer, v.shape, v.dtype.base_dtype, name, self._name
                )

    def _resource_apply_dense(self, grad, var):
        slots = self.get_slot(var, "accum"), self.get_slot(var, "linear")
        return self._ops.ftrl(var, *slots, grad, self._learning_rate_tensor)

    def _resource_apply_sparse(self, grad, var, indices):
        slots = self.get_slot(var, "accum"), self.get_slot(var, "linear")
        return self._ops.ftrl_rows(
            var, *slots, indices, grad, self._learning_rate_tensor, l2=self._l2_rows
        )


class Kind(NamedTuple):
    """An optimizer that can be chosen.

    Attributes:
        make: rate -> optimizer; if uses_ops, (rate, ops, l2_rows) -> optimizer.
        moments: numbers that it stores for each weight.
        uses_ops: whether Ops compute its updates.
        starts: {name of a slot in checkpoints: what it holds for a fresh row}, where not 0.
    """

    make: Callable
    moments: int
    uses_ops: bool = False
    starts: Dict[str, float] = {}


# Hyperparameters that are not flags are those of the article's code.
OPTIMIZERS: Dict[str, Kind] = {
    "adam": Kind(_LazyAdam, 2, uses_ops=True),
    "adagrad": Kind(
        lambda rate: v1.train.AdagradOptimizer(rate, 1e-8), 1, starts={"Adagrad": 1e-8}
    ),
    "sgd": Kind(v1.train.GradientDescentOptimizer, 0),
    "momentum": Kind(lambda rate: v1.train.MomentumOptimizer(rate, momentum=0.95), 1),
    "ftrl": Kind(_Ftrl, 2, uses_ops=True, starts={"Ftrl": 0.1}),
}
FRESH = {slot: x for kind in OPTIMIZERS.values() for slot, x in kind.starts.items()}


def _ops_add_l2(config, ops):
    """Whether `ops` do the whole update, and L2 of the batch's rows with it."""
    if config.elapsed:
        return True
    whole = OPTIMIZERS[config.name].uses_ops and config.lazy_updates and not config.clip_norm
    return bool(ops.adds_l2 and whole)


def loss_has_l2_of_rows(config, distribution, ops=TENSORFLOW):
    """Whether the loss's gradient includes L2 of the batch's rows; if not, the optimizer adds it.

    With several replicas, only the optimizer sees each row of the *global* batch once. CowClip
    clips gradients without L2.
    """
    alone = distribution.replicas_in_step == 1
    return alone and not _ops_add_l2(config, ops) and not config.cowclip_ratio


# What TensorFlow's optimizers call their rate, one of them in one update and another in another.
_RATES = "_learning_rate", "_learning_rate_tensor", "_lr_t"


def _change_updates(optimizer, trusts, rate_of_tables):
    """Makes an optimizer update rows as they come, and tables at a rate of their own.

    Args:
        trusts: whether no row comes twice, as RowWise sees to it; else TensorFlow combines them.
        rate_of_tables: float32 [], the rate of the embedding tables; None: that of all variables.
    """
    state = vars(optimizer)

    def changed(update):
        def apply(grad, variable, *indices):
            if rate_of_tables is None or not embeddings.is_table(variable):
                return update(grad, variable, *indices)
            before = {name: state[name] for name in _RATES if name in state}
            try:
                state.update(dict.fromkeys(before, rate_of_tables))
                return update(grad, variable, *indices)
            finally:
                state.update(before)

        return apply

    sparse = optimizer._resource_apply_sparse
    combines = optimizer._resource_apply_sparse_duplicate_indices
    optimizer._resource_apply_dense = changed(optimizer._resource_apply_dense)
    optimizer._resource_apply_sparse_duplicate_indices = changed(sparse if trusts else combines)


def _warmed_up(rate, steps, run_step):
    """A rate that rises linearly over the first steps of the run, to `rate` in the last."""
    if not steps:
        return rate
    step = tf.cast(v1.train.get_or_create_global_step() - run_step, tf.float32)
    return rate * tf.minimum((step + 1) / steps, 1.0)


def make_optimizer(config, distribution, ops=TENSORFLOW, occurrences=None) -> v1.train.Optimizer:
    """The optimizer of a mode.

    Args:
        occurrences: cowclip.Occurrences of the replica, if config.cowclip_ratio is not 0.
    """
    # Cut where evaluation stops improving (--learning_rate_decay_on_plateau). Checkpoints have it,
    # but each start sets it by the run's evaluations.
    decay = v1.get_variable(
        DECAY, [], initializer=v1.ones_initializer(), trainable=False, use_resource=True
    )
    with tf.device(decay.device):
        steps = config.learning_rate_warmup_steps
        rate = _warmed_up(config.learning_rate * decay, steps, config.run_step)
    if distribution.owns_variables():
        summarize("learning_rate", rate)
    kind, ops_add_l2 = OPTIMIZERS[config.name], _ops_add_l2(config, ops)
    l2_rows = config.l2_rows if ops_add_l2 else 0.0
    more = (ops, l2_rows) if kind.uses_ops else ()
    elapsed = (config.elapsed, config.run_step, config.start_step) if config.elapsed else ()
    optimizer = kind.make(rate, *more, *elapsed)
    rate_of_tables = config.embedding_learning_rate
    rate_of_tables = None if rate_of_tables is None else rate_of_tables * decay
    # SGD has no update of distinct rows alone: it adds each row by itself.
    sparse = type(optimizer)._resource_apply_sparse
    trusts = not distribution.strategy and sparse is not v1.train.Optimizer._resource_apply_sparse
    _change_updates(optimizer, trusts, rate_of_tables)
    if config.use_amp:
        optimizer = LossScaled(optimizer)
    # Processes that exchange rows have already combined them (Averaged).
    distinct = distribution.replicas_per_process == 1
    shown = config.l2_rows if distribution.replicas_in_step > 1 else 0.0
    if ops_add_l2 or loss_has_l2_of_rows(config, distribution, ops):
        config = config._replace(l2_rows=0.0)
    optimizer = RowWise(optimizer, config, distinct, ops, occurrences, shown)
    return distribution.wrap_optimizer(optimizer)


class DecayHook(v1.train.SessionRunHook):
    """Sets the variable that the learning rate is multiplied by.

    It is set in every run, because the checkpoint's belongs to another run or to other flags.

    Args:
        history: evaluations.History, whose earlier ones say what it is at first.
    """

    def __init__(self, history):
        self._history = history

    def begin(self):
        found = [v for v in v1.global_variables() if v.op.name == DECAY]
        self._copies = [copy for v in found for copy in getattr(v, "values", [v])]  # of replicas

    def after_create_session(self, session, coord):
        self.set(session, self._history.decay())

    def set(self, session, value):
        for copy in self._copies:
            copy.load(value, session)
