"""Mixed precision, as far as a CPU can show: loss scaling, its place among the wrappers, and that
the graph rewrite is requested. The tests pretend that there are tensor cores."""

import numpy as np
import pytest
import warm
from conftest import (
    SMALL_MODEL,
    finish,
    job_of,
    make_records,
    mode_of,
    run_train,
    scalars,
    started_horovod,
    started_python,
    write_tfrecords,
)
from mode_steps import check_same, weights

from deepfm import modes
from deepfm.config import ModeFlags, ModelConfig, OptimizerConfig
from deepfm.model import optimizers
from deepfm.modes.common import devices
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
_CLAIM = (
    "import runpy, sys; from deepfm.modes.common import devices;"
    "devices.has_tensor_cores = lambda session_config: True;"
    "sys.argv[0] = 'train.py'; sys.path.insert(0, '.');"
    "runpy.run_path('train.py', run_name='__main__')"
)
_FLAGS = (
    *SMALL_MODEL, "--deep_layers=8,4", "--shuffle_buffer=0", "--global_batch_size=24",
    "--dropout=0", "--clip_norm=0.5",
    "--embedding_init_stddev=0.3", "--learning_rate=0.01", "--l2_reg=0.001", "--log_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amp")
    return write_tfrecords(folder / "train.tfrecords", make_records(480))


@pytest.fixture(scope="module")
def in_float32(data, tmp_path_factory):
    """(what training without the flag said, its weights, its summaries)."""
    folder = tmp_path_factory.mktemp("float32")
    done = run_train(*_FLAGS, f"--training_data_dir={data}", f"--model_dir={folder}", code=0)
    return done.stderr, weights(folder), scalars(folder)


def test_without_tensor_cores_use_amp_says_so_and_changes_nothing(data, in_float32, tmp_path):
    flags = *_FLAGS, f"--training_data_dir={data}", f"--model_dir={tmp_path}"
    done = run_train(*flags, "--use_amp", code=0)
    said, expected, _ = in_float32
    assert (
        "--use_amp has no effect without a GPU with tensor cores" in done.stderr
        and "--use_amp" not in said
    )
    check_same(tmp_path, expected)


@pytest.mark.parametrize(
    "mode",
    [
        ["local"],
        pytest.param(["tower", "--replicas_per_process=2"], marks=pytest.mark.table, id="tower"),
        ["mirrored", "--replicas_per_process=2"],
        pytest.param(  # more than there are cores
            ["mirrored", "--replicas_per_process=4"], marks=pytest.mark.table, id="mirrored, 4"
        ),
        ["horovod"],
    ],
    ids=lambda x: x[0],
)
def test_scaled_losses_give_the_same_model_in_every_mode(data, in_float32, tmp_path, mode):
    if mode == ["horovod"]:  # contiguous shares, dealt so that the global batches are the same
        halves = np.arange(480).reshape(20, 2, 12).transpose(1, 0, 2).ravel()
        dealt = [column[halves] for column in make_records(480)]
        data = write_tfrecords(tmp_path / "dealt.tfrecords", dealt)
    words = [
        _CLAIM, *_FLAGS, "--use_amp", f"--training_data_dir={data}",
        f"--model_dir={tmp_path}/model", "--distribution", *mode,
    ]  # fmt: skip
    if mode == ["horovod"]:
        done = finish(started_horovod(2, *words, program="-c", python=warm.PYTHON), code=0)
    else:
        done = finish(started_python("-c", *words), code=0)
    assert "tensor cores" not in done.stderr
    _, expected, told = in_float32
    check_same(tmp_path / "model", expected, atol=1e-4)  # checkpoints leave out the scale
    # The summaries are those of all replicas together, under the names that local gives them.
    assert {tag for tag, _ in told} == {"log_loss", "l2", "loss", "learning_rate", "gradient_norm"}
    found = scalars(tmp_path / "model")
    assert set(found) == set(told)
    for (tag, step), value in told.items():
        # L2 is the mean of what each replica has of it, for the distinct rows of its own part.
        tolerance = 0.005 if tag in ("l2", "loss") else 1e-4
        assert found[tag, step] == pytest.approx(value, abs=tolerance), (tag, step)


class _Step:
    """A step of a table and a vector, whose gradients are fed."""

    def __init__(self):
        config = OptimizerConfig("adam", 0.1, use_amp=True)
        self.grads = v1.placeholder(tf.float32, [3])
        self.table = v1.get_variable("table", initializer=tf.ones([5, 2]), use_resource=True)
        self.vector = v1.get_variable("vector", initializer=tf.ones([3]), use_resource=True)
        self.count = v1.train.get_or_create_global_step()
        rows = tf.gather(self.table, [3, 1])
        loss = tf.reduce_sum(rows[:, 0] * self.grads[:2]) + tf.reduce_sum(self.vector * self.grads)
        optimizer = optimizers.make_optimizer(config, Mode())
        self.train = optimizer.minimize(loss, self.count)
        local = {v.op.name: v for v in v1.local_variables()}
        self.scale = local["loss_scale/current_loss_scale"]
        self.steps = local["loss_scale/good_steps"]
        self.state = v1.global_variables()
        self.session = v1.Session()
        self.session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])

    def run(self, grads):
        self.session.run(self.train, {self.grads: grads})
        return self.session.run(self.scale)

    def weights(self):
        found = self.session.run(self.state)
        return {v.op.name: x for v, x in zip(self.state, found) if v is not self.count}


@pytest.fixture
def step():
    with tf.Graph().as_default():
        step = _Step()
        yield step
        step.session.close()


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e35])  # the last is too large when scaled
@pytest.mark.parametrize("where", [0, 2])  # in a row of the table, and in the vector alone
def test_a_step_that_is_not_finite_changes_nothing_but_counts(step, bad, where):
    assert step.run([1, 1, 1]) == 2**15
    before = step.weights()
    grads = np.ones(3, np.float32)
    grads[where] = bad
    assert step.run(grads) == 2**14
    after = step.weights()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert step.session.run(step.count) == 2
    step.run([1, 1, 1])
    assert (step.weights()["vector"] < before["vector"]).all()


def test_the_scale_doubles_after_2000_finite_steps(step):
    step.session.run(step.steps.assign(1998))
    assert [step.run([1, 1, 1]) for _ in range(3)] == [2**15, 2**16, 2**16]


def test_no_check_of_the_gradients_makes_a_whole_table_of_rows(step):
    graph = v1.get_default_graph()
    made = [op.name for op in graph.get_operations() if op.type == "UnsortedSegmentSum"]
    assert made == []


def test_training_asks_for_the_rewrite_and_evaluation_does_not(tmp_path):
    from deepfm import estimators

    mode = modes.make("local", ModeFlags())
    model = estimators.Model(job_of(model_dir=str(tmp_path), distribution=mode), ModelConfig(4, 50))

    def asked(estimator):
        with estimator as made:
            rewrites = made.config.session_config.graph_options.rewrite_options
            return rewrites.auto_mixed_precision

    training = lambda use_amp: estimators.in_training(model, OptimizerConfig(use_amp=use_amp))
    assert asked(training(True)) == 1
    assert asked(training(False)) == asked(estimators.trained(model)) == 0


def test_graphs_are_not_rewritten_where_the_kernels_take_the_steps(tmp_path):
    from deepfm import estimators
    from deepfm.kernels.compiled import COMPILED
    from deepfm.kernels.ops import TENSORFLOW

    def left(mode, ops, use_amp=False):
        """Whether the graphs of training, and of evaluation, are left as they are."""
        job = job_of(model_dir=str(tmp_path), distribution=mode, ops=ops)
        model = estimators.Model(job, ModelConfig(4, 50))
        made = estimators.in_training(model, OptimizerConfig(use_amp=use_amp), ops)
        found = []
        for estimator in (made, estimators.trained(model)):
            with estimator as each:
                options = each.config.session_config.graph_options.rewrite_options
                found.append(options.disable_meta_optimizer)
        return found

    mode = modes.make("local", ModeFlags())
    on_servers = mode_of(session_config=mode.session_config, partitioner=lambda: None)
    assert left(mode, COMPILED) == [True, True]
    assert left(mode, COMPILED, use_amp=True) == [False, True]
    assert left(mode, TENSORFLOW) == left(on_servers, COMPILED) == [False, False]


def test_tensor_cores_are_told_by_the_capability(monkeypatch):
    from tensorflow.python.client import device_lib

    class Device:
        device_type = "GPU"

        def __init__(self, capability):
            self.physical_device_desc = f"device: 0, name: X, compute capability: {capability}"

    def ask(*capabilities):
        monkeypatch.setattr(devices, "gpus", lambda: list(capabilities))
        found = [Device(capability) for capability in capabilities]
        monkeypatch.setattr(device_lib, "list_local_devices", lambda config: found)
        return devices.has_tensor_cores(None)

    assert [ask(), ask("6.1"), ask("7.0"), ask("8.0", "6.1")] == [False, False, True, False]
    monkeypatch.setattr(device_lib, "list_local_devices", lambda config: [])  # none can be used
    assert not devices.has_tensor_cores(None)
