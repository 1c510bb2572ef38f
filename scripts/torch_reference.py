"""A plain PyTorch DeepFM with row-wise Adam, as a user of PyTorch would write it: what benchmark.py
compares train.py with. Prints JSON.

    python scripts/torch_reference.py --data=train.npz --feature_size=117581 --steps=300

Its data is in memory as tensors, so reading costs nothing. It only needs torch and numpy, in any
Python. Dropout is 0.5; there is no L2, which SparseAdam does not support.
"""

import argparse
import json
import os
import resource
import time

import numpy as np

try:
    import torch
    from torch import nn
except ImportError as error:  # --help and checking flags need no torch
    torch, nn = error, argparse.Namespace(Module=object)


class DeepFM(nn.Module):
    """Guo et al., IJCAI 2017: first order, second order by Rendle's identity, and an MLP."""

    def __init__(self, fields, features, embedding, layers):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Embedding(features, 1, sparse=True)
        self.embeddings = nn.Embedding(features, embedding, sparse=True)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.embeddings.weight, std=0.01)
        width, parts = fields * embedding, []
        for units in layers:
            parts += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(0.5)]
            width = units
        self.mlp = nn.Sequential(*parts, nn.Linear(width, 1))

    def forward(self, ids, values):
        """int64 [B, F], float32 [B, F] -> logits float32 [B]."""
        first = (self.weights(ids)[:, :, 0] * values).sum(1)
        e = self.embeddings(ids) * values[:, :, None]  # [B, F, K]
        second = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        return self.bias + first + second + self.mlp(e.flatten(1))[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="npz of ids int64, values, labels float32")
    parser.add_argument("--feature_size", type=int, required=True, help="number of feature ids")
    parser.add_argument("--steps", type=int, default=300, help="the first tenth is not counted")
    parser.add_argument("--batch_size", type=int, default=1024, help="records in a batch")
    parser.add_argument("--embedding_size", type=int, default=32, help="numbers per feature id")
    parser.add_argument("--deep_layers", default="128,64,32", help="width of each hidden layer")
    given = parser.parse_args()
    if isinstance(torch, ImportError):
        parser.error(f"{torch}; run this with a Python that has torch.")
    torch.manual_seed(1)
    data = np.load(given.data)
    ids, values, labels = (torch.from_numpy(data[name]) for name in ("ids", "values", "labels"))
    layers = [int(units) for units in given.deep_layers.split(",")]
    model = DeepFM(ids.shape[1], given.feature_size, given.embedding_size, layers)
    tables = [model.weights.weight, model.embeddings.weight]
    others = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SparseAdam(tables), torch.optim.Adam(others)]
    loss_of = nn.BCEWithLogitsLoss()
    batches = len(labels) // given.batch_size
    warm = max(1, given.steps // 10)  # not counted, as in train.py
    for i in range(given.steps):
        if i == warm:
            began, cpu = time.monotonic(), time.process_time()
        rows = slice(i % batches * given.batch_size, (i % batches + 1) * given.batch_size)
        loss = loss_of(model(ids[rows], values[rows]), labels[rows])
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    examples = (given.steps - warm) * given.batch_size
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    found = {
        "examples_per_second": examples / seconds,
        "cpu_utilization": cpu / seconds / len(os.sched_getaffinity(0)),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loss": float(loss),
        "torch": torch.__version__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
