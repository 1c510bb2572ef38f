"""Towers: one process, one replica per device, built one after another into one graph."""

from deepfm.modes.common import devices
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
_VARIABLES = "Variable", "VariableV2", "VarHandleOp"


class Tower(Mode):
    """One process, one replica per device; CPU device 0 holds the variables and adds gradients."""

    name = "tower"

    def __init__(self, session_config, on):
        super().__init__(session_config, on)
        self._begin()

    def _begin(self):
        self._stacks = {}  # name -> (the stack, number of replicas that have put in their tensor)
        self._gradients = {}  # name of a variable -> (it, the gradients of the replicas)
        self._first = None  # the scopes (of variables, of names) of the first replica
        self._built = 0  # replicas

    @classmethod
    def make(cls, flags):
        on = devices.of_replicas(flags)
        return cls(devices.session_config(flags, on), on)

    def stack(self, tensor, name):
        """The first replica fills the stack with its own tensor; each other replaces one entry.

        A collective operation would need a thread for each replica, or hang.
        """
        whole, given = self._stacks.get(name, (None, 0))
        if not given:
            with tf.device("/cpu:0"):
                whole = tf.raw_ops.Pack(values=[tensor] * len(self.devices))
        else:
            whole.op._update_input(given, tensor)
        self._stacks[name] = whole, given + 1
        return whole

    def wrap_model_fn(self, model_fn, max_steps=0):
        """The model_fn of all replicas, which share a batch evenly; the loss is their mean."""

        def of_one_graph(features, labels, mode):
            self._begin()
            with tf.name_scope("replicas"):  # leaves the name "loss" to Estimator's summary
                return self._replicated(model_fn, features, labels, mode)

        return of_one_graph

    def _replicated(self, model_fn, features, labels, mode):
        n, specs = len(self.devices), []
        parts = devices.split_batch(features, labels, n)
        for i, (device, (mine, label)) in enumerate(zip(self.devices, parts)):
            on = tf.device(self._placed(device))
            scope = tf.name_scope(f"tower_{i}" if i else "")
            with v1.variable_scope("", reuse=i > 0) as variables, scope as names, on:
                self._first = self._first or (variables, names)
                specs.append(model_fn(mine, label, mode))
            self._built += 1
        with tf.device("/cpu:0"):
            loss = tf.add_n([spec.loss / n for spec in specs], name="loss")
        return specs[-1]._replace(loss=loss)

    def wrap_optimizer(self, optimizer):
        return _Together(self, optimizer)

    def apply(self, optimizer, grads_and_vars, global_step, name):
        """Keeps the gradients of a replica; with the last one's, applies the sums of all."""
        found = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        for grad, var in found:
            self._gradients.setdefault(var.name, (var, []))[1].append(grad)
        if self._built + 1 < len(self.devices):
            with tf.control_dependencies([getattr(grad, "values", grad) for grad, _ in found]):
                return tf.no_op(name="gradients_kept")
        with v1.variable_scope(self._first[0]), tf.name_scope(self._first[1]):
            sums = [(_sum(grads, var.device), var) for var, grads in self._gradients.values()]
            return optimizer.apply_gradients(sums, global_step, name)

    def _placed(self, device):
        """Has a device hold what no operator places itself, but for the variables of several."""
        of_variables = device if len(self.devices) == 1 else "/cpu:0"

        def place(op):
            here = tf.DeviceSpec.from_string(of_variables if op.type in _VARIABLES else device)
            return here.make_merged_spec(tf.DeviceSpec.from_string(op.device or "")).to_string()

        return place

    def owns_variables(self):
        return not v1.get_variable_scope().reuse


class _Together(v1.train.Optimizer):
    """Each replica gives 1/n of its gradients; the last one has their sums applied."""

    def __init__(self, tower, optimizer):
        super().__init__(use_locking=False, name=type(self).__name__)
        self._tower, self._optimizer = tower, optimizer

    def compute_gradients(self, loss, *args, **kwargs):
        loss = loss / len(self._tower.devices)
        return self._optimizer.compute_gradients(loss, *args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self._tower.apply(self._optimizer, grads_and_vars, global_step, name)


def _sum(grads, device):
    """The sum of the replicas' gradients, which are all dense or all of rows."""
    with tf.device(device):
        if not isinstance(grads[0], tf.IndexedSlices):
            return tf.add_n(grads)
        values = tf.concat([grad.values for grad in grads], axis=0)
        indices = tf.concat([grad.indices for grad in grads], axis=0)
        return tf.IndexedSlices(values, indices, grads[0].dense_shape)
