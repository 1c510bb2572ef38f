"""What is placed where, and what travels: the graph that each mode builds, even for devices that
this machine lacks."""

import functools
import json
import re

import numpy as np
import pytest
from conftest import make_records, mode_of, run_python

from deepfm import modes
from deepfm.config import ModeFlags, ModelConfig, OptimizerConfig
from deepfm.model import optimizers
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common import devices
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
CONFIG = ModelConfig(4, 50, 8, (8, 4), (0.0, 0.0), l2_reg=0.01)
NORMALIZED = CONFIG._replace(batch_norm=True)
GPUS = [f"/device:GPU:{i}" for i in range(4)]


def features(rows=48):
    labels, ids, values = make_records(rows)
    inputs = {"feat_ids": ids, "feat_vals": values, "weights": np.ones(rows, np.float32)}
    return tf.nest.map_structure(tf.constant, (inputs, labels))


def build(mode, config=CONFIG):
    """Builds a training step of a mode in the default graph; returns what the optimizer was given:
    (gradient, variable) for each replica that applies."""
    seen = []

    class Sgd(v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            grads_and_vars = list(grads_and_vars)
            seen.extend(grads_and_vars)
            return super().apply_gradients(grads_and_vars, *args, **kwargs)

    kept = optimizers.OPTIMIZERS["sgd"]
    optimizers.OPTIMIZERS["sgd"] = kept._replace(make=Sgd)
    try:
        optimizer = OptimizerConfig("sgd", 0.1, l2_rows=0.01)
        model_fn = mode.wrap_model_fn(make_model_fn(config, optimizer, mode))
        train = tf.estimator.ModeKeys.TRAIN
        if mode.strategy:
            with mode.strategy.scope():
                v1.train.get_or_create_global_step()
                mode.strategy.experimental_run_v2(lambda: model_fn(*features(), mode=train).loss)
        else:
            v1.train.get_or_create_global_step()
            model_fn(*features(), mode=train)
    finally:
        optimizers.OPTIMIZERS["sgd"] = kept
    return seen


def cut(parts):
    return mode_of(partitioner=v1.fixed_size_partitioner(parts))


REPLICAS = ["tower", "mirrored"]
MODES = {
    "local": lambda: modes.make("local", ModeFlags()),
    "tower": lambda: modes.make("tower", ModeFlags(replicas_per_process=2)),
    "mirrored": lambda: modes.make("mirrored", ModeFlags(replicas_per_process=2)),
    "horovod": lambda: modes.make("horovod", ModeFlags()),  # of one process
    "variables in 3 parts, as on parameter servers": lambda: cut(3),
}


@pytest.mark.parametrize("name", MODES)
def test_the_gradients_of_both_tables_are_rows_and_no_step_reads_a_whole_table(name):
    of_table = lambda op: op.name.startswith(("fm_w", "fm_v"))
    with tf.Graph().as_default() as graph:
        seen = build(MODES[name]())
        of_tables = [g for g, v in seen if of_table(v.op)]
        assert of_tables and all(isinstance(g, tf.IndexedSlices) for g in of_tables)
        others = [g for g, v in seen if not of_table(v.op)]
        assert others and not any(isinstance(g, tf.IndexedSlices) for g in others)
        reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    # Each variable comes with a read of its own, which no step runs.
    whole = [op.name for op in reads if of_table(op.inputs[0].op) and not of_table(op)]
    assert whole == [] or "parts" in name


def test_horovod_sends_each_distinct_row_of_its_batch_once():
    _, ids, _ = make_records(48)
    with tf.Graph().as_default() as graph:
        build(MODES["horovod"]())
        sent = [op.inputs[0] for op in graph.get_operations() if op.type == "HorovodAllgather"]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            shapes = [x.shape for x in session.run(sent)]
    distinct = len(np.unique(ids))
    assert distinct < ids.size
    assert sorted(shapes) == [(distinct,), (distinct, 1 + 8)]  # ids; weights and embeddings


def test_horovod_sends_the_sums_of_batch_norm_under_the_names_of_its_layers():
    # Ranks find each other's tensors by these names.
    with tf.Graph().as_default() as graph:
        build(MODES["horovod"](), NORMALIZED)
        sent = [op for op in graph.get_operations() if op.type == "HorovodAllgather"]
        sizes = {op.name.split("/")[-1]: op.inputs[0].shape.as_list() for op in sent}
    assert {name: size for name, size in sizes.items() if "batch_norm" in name} == {
        "batch_norm_0_moments": [1, 1 + 2 * 8], "batch_norm_1_moments": [1, 1 + 2 * 4],
        "batch_norm_0_gradient": [1, 2, 8], "batch_norm_1_gradient": [1, 2, 4],
    }  # fmt: skip


def devices_of(graph, op_type):
    return {op.device for op in graph.get_operations() if op.type == op_type}


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: GPUS)


@functools.lru_cache(maxsize=None)
def on_four_gpus(name, reduction=None):
    """(a mode, the graph of its training step with batch norm)."""
    with pytest.MonkeyPatch.context() as patch, tf.Graph().as_default() as graph:
        patch.setattr(devices, "gpus", lambda: GPUS)
        mode = modes.make(name, ModeFlags(cross_device_ops=reduction))
        build(mode, NORMALIZED)
        return mode, graph


def test_towers_compute_on_four_gpus_and_keep_the_variables_on_the_cpu():
    mode, graph = on_four_gpus("tower")
    assert mode.replicas_per_process == 4
    assert devices_of(graph, "MatMul") == set(GPUS)
    assert devices_of(graph, "VarHandleOp") <= {"/device:CPU:0", ""}  # "": learning_rate_decay


def test_mirrored_computes_on_four_gpus_and_keeps_a_copy_of_the_variables_on_each():
    mode, graph = on_four_gpus("mirrored")
    assert mode.replicas_in_step == 4
    on = {tf.DeviceSpec.from_string(device) for device in devices_of(graph, "MatMul")}
    assert {(d.device_type, d.device_index) for d in on} == {("GPU", i) for i in range(4)}
    tables = [
        op for op in graph.get_operations()
        if op.type == "VarHandleOp" and op.name.startswith("fm_v")
    ]  # fmt: skip
    assert len({op.device for op in tables}) == 4


@pytest.mark.parametrize("told", [(), ("reduction_to_one_device",)])
def test_mirrored_reduces_by_nccl_on_gpus_unless_told_otherwise(told):
    assert bool(devices_of(on_four_gpus("mirrored", *told)[1], "NcclAllReduce")) != bool(told)


@pytest.mark.parametrize("mode", REPLICAS)
def test_each_of_four_gpus_computes_a_part_of_an_evaluation(four_gpus, mode):
    with tf.Graph().as_default() as graph:
        replicas = modes.make(mode, ModeFlags())
        model_fn = make_model_fn(CONFIG, OptimizerConfig(), replicas, side_by_side=(48, 1))
        model_fn(*features(), mode=tf.estimator.ModeKeys.EVAL)
        assert devices_of(graph, "MatMul") == set(GPUS)


@pytest.mark.parametrize("mode", REPLICAS)
def test_on_cpus_one_replica_evaluates_with_all_cores(mode):
    assert MODES[mode]().evaluate_on == ()


@pytest.mark.parametrize("mode", REPLICAS)
def test_replicas_on_four_gpus_bring_the_sums_of_batch_norm_together_on_the_cpu(mode):
    device = lambda op: tf.DeviceSpec.from_string(op.device)
    stacks = [
        op for op in on_four_gpus(mode)[1].get_operations()
        if op.type == "Pack" and len(op.inputs) == 4
        and {device(x.op).device_type for x in op.inputs} == {"GPU"}
    ]  # fmt: skip
    assert len(stacks) == 2 * 2 + 1  # of two layers, forward and backward; and the losses
    for op in stacks:
        assert device(op).device_type == "CPU"
        assert {device(x.op).device_index for x in op.inputs} == {0, 1, 2, 3}


def test_a_horovod_rank_sees_the_gpu_of_its_local_rank_alone_and_says_so(four_gpus, caplog):
    import horovod.tensorflow as hvd

    caplog.set_level("INFO")
    mode = modes.make("horovod", ModeFlags())
    assert mode.session_config.gpu_options.visible_device_list == str(hvd.local_rank())
    assert f"4 GPUs; using /gpu:{hvd.local_rank()}." in caplog.text


@pytest.mark.parametrize("name", [*sorted(set(MODES) & set(modes.NAMES)), "ps"])
def test_every_mode_logs_the_devices_that_it_has_found_and_uses(name, caplog, monkeypatch):
    caplog.set_level("INFO")
    task = {"cluster": {"chief": ["a:1"], "ps": ["a:2"]}, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task) if name == "ps" else "")
    modes.make(name, ModeFlags())
    (line,) = [r.getMessage() for r in caplog.records if "Devices: " in r.getMessage()]
    used = "/cpu:1" if name in REPLICAS else "the CPU"
    assert re.fullmatch(rf"Devices: found \S+ CPU cores and 0 GPUs; using {used}\b.*", line)


def test_tf32_is_off_but_on_request_which_says_so_without_a_gpu(caplog, monkeypatch):
    look = (
        "import os; from absl import flags; from deepfm import __main__ as train;"
        "flags.FLAGS(['train.py', *{}]); train.before_tensorflow();"
        "import deepfm.runtime.tf; print(os.environ['NVIDIA_TF32_OVERRIDE'])"
    )
    for given, override in (([], "0"), (["--allow_tf32"], "1")):
        assert run_python("-c", look.format(given), code=0).stdout == f"{override}\n"
    monkeypatch.setattr(devices, "gpus", list)
    modes.make("local", ModeFlags(allow_tf32=True))
    assert "--allow_tf32 has no effect without a GPU" in caplog.text
