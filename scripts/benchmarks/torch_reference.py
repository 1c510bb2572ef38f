"""A PyTorch DeepFM as a careful user of PyTorch would write it: what benchmark.py compares train.py
with. Prints JSON.

    python torch_reference.py --data=train.npz --feature_size=117581 --steps=300
    python torch_reference.py --data=train.npz --feature_size=117581 --predictions=p.txt

Each batch's ids are made distinct, their rows are gathered once and updated in place by Adam. It
runs eagerly and with torch.compile, and, where fbgemm_gpu is there, with FBGEMM's table-batched
embeddings, whose row-wise Adagrad updates rows in the backward pass; it reports the fastest. Its
data is in memory as tensors, so reading costs training nothing; inference reads it, and writes a
probability a line. It needs torch and numpy, in any Python. Dropout is 0.5; there is no L2.
"""

import argparse
import importlib.util
import itertools
import json
import time

import numpy as np
import peers

try:
    import torch
    from torch import nn
except ImportError as error:  # --help and checking flags need no torch
    torch, nn = error, argparse.Namespace(Module=object)

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


def train(given, ids, values, labels, compiled):
    """The figures of `steps` steps; a tenth of as many before them warms up."""
    table, model = new_table(given), DeepFM(ids.shape[1])
    m, v = torch.zeros_like(table), torch.zeros_like(table)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    loss_of = nn.BCEWithLogitsLoss()
    loss_of_batch = lambda rows, where, x, y: loss_of(model(rows, where, x), y)
    update = adam_rows
    if compiled:  # the number of distinct rows differs from step to step
        loss_of_batch = torch.compile(loss_of_batch, dynamic=True)
        update = torch.compile(adam_rows, dynamic=True)
    steps = itertools.count(1)

    def step(part):
        distinct, where = torch.unique(ids[part], return_inverse=True)
        rows = table[distinct].requires_grad_()
        loss = loss_of_batch(rows, where, values[part], labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        i = next(steps)
        correction = (1 - BETAS[1] ** i) ** 0.5 / (1 - BETAS[0] ** i)
        with torch.no_grad():
            update(table, m, v, distinct, rows.grad, torch.tensor(RATE * correction))
        return loss

    return timed(given, len(labels), step)


def train_with_fbgemm(given, ids, values, labels):
    """As `train`, with FBGEMM's table-batched embeddings on the CPU."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm

    host = fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU
    table = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(given.feature_size, EMBEDDING + 4, *host)],  # a multiple of 4, of which 3 are not used
        optimizer=fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01,
    )  # fmt: skip
    table.split_embedding_weights()[0].normal_(std=0.01)
    model, loss_of = DeepFM(ids.shape[1]), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    offsets = torch.arange(given.batch_size * ids.shape[1] + 1)

    def step(part):
        rows = table(ids[part].flatten(), offsets).view(given.batch_size, ids.shape[1], -1)
        loss = loss_of(model.logits(rows, values[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return timed(given, len(labels), step)


def timed(given, examples, step):
    """The figures of `steps` steps on the batches of some examples, after a tenth to warm up."""
    batches, warm = examples // given.batch_size, max(10, given.steps // 10)
    for i in range(warm + given.steps):
        if i == warm:
            began, cpu = time.monotonic(), time.process_time()
        loss = step(slice(i % batches * given.batch_size, (i % batches + 1) * given.batch_size))
    return {**peers.figures(given.steps * given.batch_size, began, cpu), "loss": loss.item()}


def infer(given, compiled):
    """The figures of a pass over the data, from the file to the file of predictions."""
    table, model = new_table(given), DeepFM(np.load(given.data)["ids"].shape[1]).eval()
    apply = torch.compile(model) if compiled else model

    def predict(ids, values):
        of_batch = apply if len(ids) == given.batch_size else model  # not compiled for the last
        arrays = map(torch.from_numpy, (ids, values))
        return torch.sigmoid(of_batch(table, *arrays))

    with torch.inference_mode():
        return peers.infer(given.data, given.predictions, given.batch_size, predict)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="npz of ids int64, values, labels float32")
    parser.add_argument("--feature_size", type=int, required=True, help="number of feature ids")
    parser.add_argument("--steps", type=int, default=300, help="steps that are counted")
    parser.add_argument("--batch_size", type=int, default=1024, help="records in a batch")
    parser.add_argument("--predictions", help="file to write predictions to, instead of training")
    given = parser.parse_args()
    if isinstance(torch, ImportError):
        parser.error(f"{torch}; run this with a Python that has torch.")
    if given.predictions:
        found = {kind: infer(given, kind == "compiled") for kind in ("eager", "compiled")}
    else:
        data = np.load(given.data)
        arrays = [torch.from_numpy(data[name]) for name in ("ids", "values", "labels")]
        found = {kind: train(given, *arrays, kind == "compiled") for kind in ("eager", "compiled")}
        if importlib.util.find_spec("fbgemm_gpu"):
            found["fbgemm"] = train_with_fbgemm(given, *arrays)
    rates = {kind: of_kind["examples_per_second"] for kind, of_kind in found.items()}
    best = max(rates, key=rates.get)
    print(json.dumps({**found[best], "implementation": best, "rates": rates}))


if __name__ == "__main__":
    main()
