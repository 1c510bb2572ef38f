"""The maths: the network, its loss, its optimizers and its metrics."""
