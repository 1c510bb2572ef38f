"""The maths: the network, its loss, its optimizers and its metrics.

In these files `config` is a ModelConfig, or of an optimizer its OptimizerConfig; `ops`, `values`
and `occurrences` are the classes of these names, `distribution` a Mode.
"""
