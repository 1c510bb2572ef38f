"""DeepFM as a careful user of PyTorch would write it: peers.py measures it.

Each batch's ids are made distinct, their rows are gathered once and updated in place by Adam. It
runs eagerly and with torch.compile, and, where fbgemm_gpu is there, with FBGEMM's table-batched
embeddings, whose row-wise Adagrad updates rows in the backward pass. Dropout is 0.5; there is no
L2. It needs torch and numpy, in any Python.
"""

import functools
import importlib.util
import itertools

import torch
from torch import nn

BETAS, EPSILON, RATE = (0.9, 0.999), 1e-8, 0.001
EMBEDDING, LAYERS = 32, (128, 64, 32)


class DeepFM(nn.Module):
    """Guo et al., IJCAI 2017: first order, second order by Rendle's identity, and an MLP.

    A row of the table is an id's embedding and, in its last column, its weight.
    """

    def __init__(self, fields):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        width, parts = fields * EMBEDDING, []
        for units in LAYERS:
            parts += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(0.5)]
            width = units
        self.mlp = nn.Sequential(*parts, nn.Linear(width, 1))

    def forward(self, rows, where, values):
        """float32 [U, K + 1], int64 [B, F], float32 [B, F] -> logits float32 [B]."""
        return self.logits(nn.functional.embedding(where, rows), values)

    def logits(self, rows, values):
        """float32 [B, F, K + 1], float32 [B, F] -> float32 [B]."""
        scaled = rows * values[:, :, None]
        e = scaled[:, :, :EMBEDDING]
        second = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        return self.bias + scaled[:, :, EMBEDDING].sum(1) + second + self.mlp(e.flatten(1))[:, 0]


def new_table(given):
    """float32 [feature_size, K + 1], fresh."""
    torch.manual_seed(1)
    return torch.randn(given.feature_size, EMBEDDING + 1) * 0.01


def adam_rows(table, m, v, distinct, gradient, rate):
    """Adam on the distinct rows of a table, in place; `rate` is corrected for the step's bias."""
    new_m = m[distinct] * BETAS[0] + gradient * (1 - BETAS[0])
    new_v = v[distinct] * BETAS[1] + gradient.square() * (1 - BETAS[1])
    m[distinct], v[distinct] = new_m, new_v
    table[distinct] -= rate * new_m / (new_v.sqrt() + EPSILON)


def training(given, arrays, compiled):
    """A function that takes a step of a fresh training on a slice of some examples.

    Args:
        arrays: ids int64 [N, F], values float32 [N, F], labels float32 [N].
    """
    ids, values, labels = map(torch.from_numpy, arrays)
    table, model = new_table(given), DeepFM(ids.shape[1])
    m, v = torch.zeros_like(table), torch.zeros_like(table)
    loss_of = nn.BCEWithLogitsLoss()
    loss_of_batch = lambda rows, where, x, y: loss_of(model(rows, where, x), y)
    update = adam_rows
    if compiled:  # the number of distinct rows differs from step to step
        loss_of_batch = torch.compile(loss_of_batch, dynamic=True)
        update = torch.compile(adam_rows, dynamic=True)
    learn, steps = learning(model), itertools.count(1)

    def step(part):
        distinct, where = torch.unique(ids[part], return_inverse=True)
        rows = table[distinct].requires_grad_()
        learn(loss_of_batch(rows, where, values[part], labels[part]))
        i = next(steps)
        correction = (1 - BETAS[1] ** i) ** 0.5 / (1 - BETAS[0] ** i)
        with torch.no_grad():
            update(table, m, v, distinct, rows.grad, torch.tensor(RATE * correction))

    return step


def learning(model):
    """A function that improves a model, but for its table, by a loss."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def learn(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return learn


def training_with_fbgemm(given, arrays):
    """As `training`, with FBGEMM's table-batched embeddings on the CPU."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm

    ids, values, labels = map(torch.from_numpy, arrays)
    host = fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU
    table = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(given.feature_size, EMBEDDING + 4, *host)],  # a multiple of 4, of which 3 are not used
        optimizer=fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01,
    )  # fmt: skip
    table.split_embedding_weights()[0].normal_(std=0.01)
    model, loss_of = DeepFM(ids.shape[1]), nn.BCEWithLogitsLoss()
    learn, offsets = learning(model), torch.arange(given.batch_size * ids.shape[1] + 1)

    def step(part):
        rows = table(ids[part].flatten(), offsets).view(given.batch_size, ids.shape[1], -1)
        learn(loss_of(model.logits(rows, values[part]), labels[part]))

    return step


def inference(given, arrays, compiled):
    """A function of ids and values, which gives probabilities."""
    table, model = new_table(given), DeepFM(arrays[0].shape[1]).eval()
    apply = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def predict(ids, values):
        of_batch = apply if len(ids) == given.batch_size else model  # not compiled for the last
        return torch.sigmoid(of_batch(table, *map(torch.from_numpy, (ids, values))))

    return predict


def both(make):
    """{how it runs: the function that makes a step, or what predicts}."""
    ways = {"eager": False, "compiled": True}
    return {name: functools.partial(make, compiled=compiled) for name, compiled in ways.items()}


TRAININGS, INFERENCES = both(training), both(inference)
if importlib.util.find_spec("fbgemm_gpu"):
    TRAININGS["fbgemm"] = training_with_fbgemm
