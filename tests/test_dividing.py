"""How processes and replicas divide the records: each once, in equal steps, correctly weighted."""

import numpy as np
import pytest
from conftest import make_records, mode_of, write_libsvm, write_tfrecords
from test_input_pipeline import SCHEMA, batches_of, sort

from deepfm.config import InputConfig, Position, Share
from deepfm.data import datasets
from deepfm.data.input_pipeline import make_input_fn
from deepfm.data.reading import Source
from deepfm.data.shares import Range, divide, groups, rows_of_share, steps_of_processes
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.runtime.tf import tf

USUAL = {"batch_size": 64}
SIZES = (127, 1000, 0, 2)


@pytest.fixture(params=[TENSORFLOW, COMPILED], ids=["tensorflow", "kernels"])
def ops(request, monkeypatch):
    """What reads does it with TensorFlow's own datasets and ops, and with the compiled kernels."""
    monkeypatch.setitem(USUAL, "ops", request.param)


@pytest.fixture(scope="module", params=["tfrecord", "libsvm"])
def data(request, tmp_path_factory):
    """(DataSet of files of SIZES records, the feature values of all records)."""
    folder = tmp_path_factory.mktemp(request.param)
    write = write_tfrecords if request.param == "tfrecord" else write_libsvm
    parts = [make_records(rows, seed=rows) for rows in SIZES]
    for i, part in enumerate(parts):
        write(folder / f"{i}.{request.param}s", part)
    for path in folder.glob("*.libsvms"):
        path.rename(path.with_suffix(".libsvm"))
    found = datasets.count_rows(datasets.find(str(folder), "training_data_dir"))
    return found, np.concatenate([values for _, _, values in parts])


def reading(data, shares=1, share=0, replicas=1, epoch=0, step=0, **asked):
    """What one of several processes, which keep in step, reads: (Source, Mode)."""
    rows = tuple(rows_of_share(data, (), Share(shares, i)) for i in range(shares))
    asked = {**USUAL, **asked}
    source = Source(
        data, ops=asked.pop("ops", TENSORFLOW), asked=InputConfig(**asked),
        share=Share(shares, share), position=Position(epoch, step, rows),
    )  # fmt: skip
    return source, mode_of(size=shares, rank=share, replicas_per_process=replicas)


def read(data, **how):
    """The batches of one process: a list of (values, weights)."""
    source, mode = reading(data, **how)
    fetch = lambda x, labels: [x["feat_vals"], x.get("weights", tf.ones_like(labels))]
    return batches_of(make_input_fn(source, SCHEMA, mode), fetch)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize(
    "shares, replicas",
    [
        (1, 2), (3, 1), pytest.param(2, 2, marks=pytest.mark.table),
        pytest.param(1, 3, marks=pytest.mark.table), pytest.param(2, 1, marks=pytest.mark.table),
    ],
)  # fmt: skip
def test_each_epoch_uses_every_record_once_in_equal_steps(data, shares, replicas):
    found, values = data
    processes = [
        read(found, shares=shares, share=i, replicas=replicas, num_epochs=2, shuffle_buffer=200)
        for i in range(shares)
    ]
    rows = reading(found, shares=shares)[0].position.rows_of_processes
    steps = steps_of_processes(rows, 64 * replicas, shares > 1)
    assert len(steps) == shares and len(set(steps)) == 1
    steps = steps[0]
    assert [len(batches) for batches in processes] == [2 * steps] * shares
    for epoch in (slice(0, steps), slice(steps, None)):
        used = [v[w > 0] for batches in processes for v, w in batches[epoch]]
        np.testing.assert_allclose(sort(np.concatenate(used)), sort(values), rtol=1e-6)


@pytest.mark.usefixtures("ops")
def test_a_share_that_has_no_records_left_yields_empty_batches(data):
    found, _ = data
    sizes = [[len(w) for _, w in read(found, shares=2, share=i, batch_size=564)] for i in range(2)]
    assert sizes == [[564, 0], [564, 1]]


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize(
    "shares, replicas",
    [
        (2, 2), pytest.param(2, 1, marks=pytest.mark.table),
        pytest.param(1, 2, marks=pytest.mark.table), pytest.param(3, 1, marks=pytest.mark.table),
    ],
)  # fmt: skip
def test_the_mean_over_replicas_is_that_of_the_global_batch(data, shares, replicas):
    found, _ = data
    processes = [read(found, shares=shares, share=i, replicas=replicas) for i in range(shares)]
    for step in zip(*processes):
        examples = np.concatenate([v[w > 0] for v, w in step])
        means = []
        for values, weights in step:
            parts = zip(np.split(values, replicas), np.split(weights, replicas))
            means += [(v * w[:, np.newaxis]).sum(axis=0) / max(len(w), 1) for v, w in parts]
        np.testing.assert_allclose(np.mean(means, axis=0), examples.mean(axis=0), rtol=1e-5)


def files(*rows):
    return [datasets.DataFile(f"{i}", 1, n) for i, n in enumerate(rows)]


@pytest.mark.parametrize("rows", [(127, 1000, 0, 1), (1,), (3, 3, 3), (5, 5, 5, 5), (0, 7)])
@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_shares_are_even_to_within_one_record_and_hold_each_once(rows, shares):
    used = np.zeros((len(rows), max(rows)), int)
    sizes = []
    for ranges in divide(files(*rows), (), shares):
        for r in ranges:
            end = rows[int(r.path)] if r.end is None else r.end
            used[int(r.path), r.begin : end] += 1
        sizes.append(sum((rows[int(r.path)] if r.end is None else r.end) - r.begin for r in ranges))
    for n, counts in zip(rows, used):
        assert counts.tolist() == [1] * n + [0] * (max(rows) - n)
    assert max(sizes) - min(sizes) <= 1


def test_even_files_are_not_cut():
    shares = divide(files(10, 10, 10, 10), (), 2)
    assert [[(r.path, r.whole) for r in ranges] for ranges in shares] == [
        [("0", True), ("1", True)],
        [("2", True), ("3", True)],
    ]


CONFIGS = [
    {},
    {"shuffle_buffer": 100},
    {"shuffle_buffer": 50, "num_parallel_reads": 2, "batch_size": 20},
    {"shuffle_buffer": 100, "cache": "memory"},
    {"shuffle_buffer": 100, "cache": "FILE"},
    {"shuffle_buffer": 100, "replicas": 2},
    {"shuffle_buffer": 100, "shares": 3, "share": 1, "batch_size": 20},
    {"batch_size": 40, "shares": 2, "share": 1},
]
# The suite meets each configuration once: places, and ops and data, in turn.
IN_SUITE = lambda i, j, k: k == j % 4 and i == (j + j // 4) % 4
PLACES = [
    pytest.param(ops, data, config, *place, marks=[] if IN_SUITE(i, j, k) else [pytest.mark.table])
    for i, (ops, data) in enumerate(
        [
            (TENSORFLOW, "tfrecord"),
            (COMPILED, "libsvm"),
            (COMPILED, "tfrecord"),
            (TENSORFLOW, "libsvm"),
        ]
    )
    for j, config in enumerate(CONFIGS)
    for k, place in enumerate([(0, 7), (1, 0), (2, 5), (3, 0)])
]
_wholes = {}


def whole_of(data, config):
    """What `read` returns; read once for all cases that go on in the middle of it."""
    key = repr((data.data_format, {**config, "cache": config.get("cache", "none")[:6]}))
    if key not in _wholes:
        _wholes[key] = read(data, **config)
    return _wholes[key]


@pytest.mark.parametrize("ops, data, config, epoch, step", PLACES, indirect=["ops", "data"])
def test_reading_goes_on_where_it_was(ops, data, config, epoch, step, tmp_path):
    config = dict({"num_epochs": 3, "replicas": 1}, **config)
    if "cache" in config and config["cache"] == "FILE":
        config["cache"] = str(tmp_path / "cache")
    found, _ = data
    whole = whole_of(found, config)
    used = epoch * (len(whole) // 3) + step
    rest = read(found, epoch=epoch, step=step, **config)
    assert len(rest) == len(whole) - used
    for (values, weights), (other_values, other_weights) in zip(rest, whole[used:]):
        np.testing.assert_array_equal(values, other_values)
        np.testing.assert_array_equal(weights, other_weights)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("parallel, buffer", [(1, 2), (2, 1000), (4, 5000), (3, 100000)])
def test_each_file_is_in_one_group(seed, parallel, buffer):
    random = np.random.RandomState(seed)
    sizes = random.randint(0, 1000, random.randint(1, 40))
    ranges = [Range(str(i), 0, size, True) for i, size in enumerate(sizes)]
    config = InputConfig(64, shuffle_buffer=buffer, num_parallel_reads=parallel)
    found = groups(ranges, config, by_rows=True, epoch=seed)
    assert sorted(r for group in found for r in group) == sorted(ranges)


@pytest.mark.parametrize(
    "sizes", [[400] * 21, [500] * 9, [300, 600, 257, 900, 300, 300, 1000, 100], [0, 256, 0, 512, 1]]
)
@pytest.mark.parametrize(  # groups of two files, and of more
    "buffer", [pytest.param(100, marks=pytest.mark.table), 1000]
)
def test_many_groups_of_files_are_read_once_in_one_order(tmp_path, sizes, buffer):
    values = []
    for i, size in enumerate(sizes):
        part = make_records(size, seed=i)
        write_tfrecords(tmp_path / f"{i}.tfrecords", part)
        values.append(part[2])
    data = datasets.count_rows(datasets.find(str(tmp_path), "training_data_dir"))
    orders = []
    for ops in (TENSORFLOW, COMPILED):
        how = dict(shuffle_buffer=buffer, num_parallel_reads=2, num_epochs=2, ops=ops)
        orders.append(np.concatenate([batch for batch, _ in read(data, **how)]))
    np.testing.assert_array_equal(sort(orders[0]), sort(np.concatenate(2 * values)))
    np.testing.assert_array_equal(*orders)


def test_the_largest_seed_orders_files():
    ranges = [Range(str(i), 0, 1, True) for i in range(20)]
    config = InputConfig(1, shuffle_buffer=10, seed=(1 << 32) - 1)  # as --seed allows
    assert sorted(sum(groups(ranges, config, True, 0), [])) == sorted(ranges)
