"""The mathematics: the network, its loss, its optimizers and its metrics."""
