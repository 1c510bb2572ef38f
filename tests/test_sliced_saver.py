"""Variables saved in slices are restored exactly, by any Saver."""

import numpy as np
import pytest

from deepfm.runtime.tf import tf
from deepfm.state import checkpoints, damage, sliced_saver

v1 = tf.compat.v1

SHAPES = {"a": [7], "b": [10, 3], "c": [], "d": [50, 2, 2], "e": [3, 1], "f": [9]}


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(sliced_saver, "SLICE_BYTES", 36)  # 9 numbers; 3 rows of b, 2 of d


def variables(numbers):
    made = [
        v1.get_variable(name, initializer=numbers[name], use_resource=True)
        for name in SHAPES if name != "f"
    ]  # fmt: skip
    half = v1.fixed_size_partitioner(2)
    parts = v1.get_variable(
        "f", [9], partitioner=half, use_resource=True,
        initializer=lambda shape, partition_info, **_: tf.constant(
            numbers["f"][partition_info.var_offset[0] :][: shape[0]]
        ),
    )  # fmt: skip
    return [*made, *parts]


@pytest.mark.parametrize("devices", [["/cpu:0"], ["/cpu:0", "/cpu:1"]])
def test_a_checkpoint_in_slices_is_read_like_any_other(small_slices, tmp_path, devices):
    numbers = {name: np.float32(np.random.randn(*shape)) for name, shape in SHAPES.items()}
    config = v1.ConfigProto(device_count={"CPU": len(devices)})
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        place = lambda op: devices[hash(op.name.split("/")[0]) % len(devices)]
        with tf.device(place if len(devices) > 1 else None):
            variables(numbers)
            step = v1.train.get_or_create_global_step()
        saver = sliced_saver.make_saver(5)
        saver.build()
        session.run(v1.global_variables_initializer())
        session.run(step.assign(3))
        path = saver.save(session, str(tmp_path / "model.ckpt"), global_step=3)
    assert damage.problem(path) is None
    assert damage.first_damaged(path) is None
    assert checkpoints.by_step(p.name for p in tmp_path.iterdir()) == ["model.ckpt-3"]
    assert not [p for p in tmp_path.iterdir() if "temp" in p.name]
    for name, wanted in numbers.items():
        np.testing.assert_array_equal(tf.train.load_variable(path, name), wanted)
    zeros = {name: np.zeros_like(x) for name, x in numbers.items()}
    for make in (lambda: v1.train.Saver(), lambda: sliced_saver.make_saver(5)):
        with tf.Graph().as_default(), v1.Session() as session:
            found = variables(zeros)
            saver = make()
            saver.build()
            saver.restore(session, path)
            values = dict(zip(SHAPES, session.run(found[: len(SHAPES) - 1])))
            values["f"] = np.concatenate(session.run(found[len(SHAPES) - 1 :]))
        for name, wanted in numbers.items():
            np.testing.assert_array_equal(values[name], wanted)


def before_it(op):
    """All that an operation waits for."""
    found, new = set(), {op}
    while new:
        new = {other for op in new for other in [x.op for x in op.inputs] + op.control_inputs}
        new -= found
        found |= new
    return found


def test_slices_are_read_one_after_the_other_and_no_large_variable_whole(small_slices):
    with tf.Graph().as_default() as graph:
        table = v1.get_variable("table", [30, 3], use_resource=True)
        before = set(graph.get_operations())
        saver = sliced_saver.make_saver(5)
        saver.build()
        ops = [op for op in graph.get_operations() if op not in before]
        saves = [op for op in ops if op.type == "SaveV2"]
        assert len(saves) == 10
        for first, then in zip(saves, saves[1:]):
            (gather,) = [x.op for x in then.inputs if x.op.type == "ResourceGather"]
            assert first in before_it(gather) and gather.inputs[0] is table.handle
        assert "ReadVariableOp" not in {x.op.type for op in saves for x in op.inputs}


def test_notes_are_saved_and_read_before_every_variable(small_slices, tmp_path):
    with tf.Graph().as_default() as graph, v1.Session() as session:
        variables({name: np.zeros(shape, "f") for name, shape in SHAPES.items()})
        v1.train.get_or_create_global_step()
        made = []

        def make_notes():
            made.append(tf.constant([3, 4], tf.int64) + 0)
            return {"notes/steps": made[0]}

        saver = sliced_saver.make_saver(5, make_notes=make_notes)
        saver.build()
        saves = [op for op in graph.get_operations() if op.type == "SaveV2"]
        tensors = [x for op in saves for x in op.inputs[3:]]
        read = [x.op for x in tensors if x.op.type in ("ReadVariableOp", "ResourceGather")]
        assert len(read) > len(SHAPES)
        assert all(made[0].op in before_it(op) for op in read)
        session.run(v1.global_variables_initializer())
        path = saver.save(session, str(tmp_path / "model.ckpt"), global_step=3)
        saver.restore(session, path)
    assert damage.problem(path) is None
    assert tf.train.load_variable(path, "notes/steps").tolist() == [3, 4]


def test_what_a_checkpoint_lacks_begins_at_its_initial_value(tmp_path):
    numbers = {name: np.float32(np.random.randn(*shape)) for name, shape in SHAPES.items()}
    with tf.Graph().as_default(), v1.Session() as session:
        variables(numbers)
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    with tf.Graph().as_default(), v1.Session() as session:
        more = v1.get_variable("more", initializer=np.float32([5, 6]), use_resource=True)
        found = variables({name: np.zeros_like(x) for name, x in numbers.items()})
        saver = sliced_saver.make_saver(5, absent={"more": more.initial_value})
        saver.build()
        saver.restore(session, path)
        np.testing.assert_array_equal(session.run(more), [5, 6])
        np.testing.assert_array_equal(session.run(found[1]), numbers["b"])


@pytest.mark.parametrize("device", ["", "/device:GPU:0"])
def test_slices_are_read_where_the_variable_is(small_slices, device):
    with tf.Graph().as_default() as graph:
        with tf.device(device):
            v1.get_variable("table", [30, 3], use_resource=True)
        saver = sliced_saver.make_saver(5)
        saver.build()
        ops = graph.get_operations()
        assert {op.device for op in ops if op.type == "ResourceGather"} == {device}
        assert {op.device for op in ops if op.type == "SaveV2"} == {"/device:CPU:0"}


def test_the_sum_of_a_large_variable_sees_every_row(small_slices):
    numbers = np.random.RandomState(0).randn(50, 2).astype("f")
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("table", initializer=numbers, use_resource=True)
        sums = sliced_saver.sums(table)
        session.run(table.initializer)
        found = session.run(sums)
        assert len(found) == 13
        np.testing.assert_allclose(sum(found), numbers.sum(), rtol=1e-4)
