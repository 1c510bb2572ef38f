"""Towers: one process, one replica per device, built one after another into one graph."""

import tensorflow as tf
from tensorflow.contrib import estimator

from deepfm.modes.common import devices
from deepfm.modes.common.mode import Mode


class Tower(Mode):
    """One process, one replica per device; CPU device 0 holds the variables and adds gradients."""

    name = "tower"

    def __init__(self, session_config, on):
        super().__init__(session_config, on)
        self._stacks = {}  # name -> (the stack, number of replicas that have put in their tensor)

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
        replicated = estimator.replicate_model_fn(model_fn, devices=self.devices)

        def of_one_graph(features, labels, mode):
            self._stacks.clear()
            with tf.name_scope("replicas"):  # leaves the name "loss" to Estimator's summary
                return replicated(features, labels, mode)

        return of_one_graph

    def wrap_optimizer(self, optimizer):
        return estimator.TowerOptimizer(optimizer)

    def owns_variables(self):
        return not tf.compat.v1.get_variable_scope().reuse
