"""Every record is used once per epoch in every mode, shown by the ids that reached the model.

Each record has its own id. The tables start at 0 and the learning rate is tiny, so every prediction
is 1/2, and each use of a record makes SGD move its first-order weight by rate * 1/2 / B, where B is
the number of examples in that global batch.
"""

import numpy as np
import pytest
from conftest import run_mode, write_own_ids

from deepfm.runtime.tf import tf

EACH_ALONE = 8
SIZES = (127, 1000, 0, 1)
ROWS = sum(SIZES)
EPOCHS = 2
BATCH = 64
RATE = 1e-4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of files of SIZES records; the ids are 0, 1, ... over all files."""
    folder = tmp_path_factory.mktemp("once")
    write_own_ids([folder / f"{i}.tfrecords" for i in range(len(SIZES))], SIZES)
    return folder


def expected(processes, replicas, synchronous):
    """For each record the sum over its uses of 1 / B, the slow and obvious way."""
    cuts = [ROWS * i // processes for i in range(processes + 1)]
    shares = [list(range(a, b)) for a, b in zip(cuts, cuts[1:])]
    size = BATCH * replicas
    found = np.zeros(ROWS)
    for step in range(-(-ROWS // size)):
        batches = [share[step * size : (step + 1) * size] for share in shares]
        for batch in batches:
            together = batches if synchronous else [batch]
            for record in batch:
                found[record] += EPOCHS / sum(map(len, together))
    return found


RUNS = {
    "local": (1, 1, True),
    "tower": (1, 2, True),
    "mirrored": (1, 2, True),
    "horovod 2": (2, 1, True),
    "horovod 3": (3, 1, True),
    "ps 1": (1, 1, False),
    "ps 3": (3, 1, False),
    "ps 2 of 2 towers": (2, 2, False),
}


IN_TABLE = ("horovod 3", "ps 1", "ps 3")  # what they show is in the others


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.table] * (n in IN_TABLE)) for n in RUNS]
)
def test_every_id_moves_as_often_as_its_record_is_read(data, tmp_path, name):
    processes, replicas, synchronous = RUNS[name]
    args = [
        f"--training_data_dir={data}", f"--model_dir={tmp_path}", f"--feature_size={ROWS}",
        "--embedding_size=2", "--deep_layers=4", "--dropout=0", "--embedding_init_stddev=0",
        "--l2_reg=0", "--optimizer=sgd", f"--learning_rate={RATE}", f"--batch_size={BATCH}",
        f"--num_epochs={EPOCHS}", "--shuffle_buffer=0", f"--replicas_per_process={replicas}",
        "--num_parallel_reads=1",
    ]  # fmt: skip
    mode = name.split()[0]
    run_mode(mode, *args, processes=processes, workers=processes - 1, code=0)
    moved = np.abs(tf.train.load_variable(str(tmp_path), "fm_w")) / RATE / 0.5
    np.testing.assert_allclose(moved, expected(processes, replicas, synchronous), rtol=1e-3)
