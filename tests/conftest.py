"""Small data sets and jobs for the tests."""

import contextlib
import gc
import glob
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_clustering_fuel=0")  # as deepfm.runtime.program
# Milliseconds between Horovod's looks for tensors to reduce. Each look talks to the other ranks: at
# its own 1 ms, a short job spends a sixth of its CPU time on looks that find nothing.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "10")
# Seconds that a rank waits for the others to begin; its own 30 end jobs on a busy machine.
os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "120")
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))

import numpy as np
import psutil
import pytest
import warm
from absl import logging
from programs import wait_until
from s3_server import PORTS
from tensorflow.core.protobuf.config_pb2 import CallableOptions
from tensorflow.python.client import session

from deepfm.config import InputConfig, JobConfig, OptimizerConfig
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.modes.common.mode import Mode
from deepfm.records import build as of_codec
from deepfm.records import codec
from deepfm.records.storage import places
from deepfm.runtime import remote_files, sagemaker
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
tf.compat.v1.enable_resource_variables()  # as program.py does
places.read_remote_by(remote_files)
gc.set_threshold(100_000)  # as program.py does
for number in (signal.SIGHUP, signal.SIGQUIT):  # which nohup and a shell's & ignore
    signal.signal(number, signal.SIG_DFL)
warm.remember_signatures()
warm.forget_origins()


def _leave_graphs_as_they_are():
    """Has this process's sessions without a configuration not rewrite graphs, as in programs where
    the kernels take the steps: that takes longer than most tests run their graph."""
    plain = session.BaseSession.__init__
    as_they_are = tf.compat.v1.ConfigProto()
    as_they_are.graph_options.rewrite_options.disable_meta_optimizer = True

    def make(self, target="", graph=None, config=None):
        plain(self, target, graph, config or as_they_are)

    session.BaseSession.__init__ = make


_leave_graphs_as_they_are()

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
both_ops = pytest.mark.parametrize("ops", [TENSORFLOW, COMPILED], ids=["tensorflow", "kernels"])


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """A file's tests share a process, for their fixtures; long ones that share little need not.

    Their file says in EACH_ALONE how many seconds the longest takes: those begin first, so that no
    process is left with one at the end.
    """
    alone = lambda item: getattr(item.module, "EACH_ALONE", 0)
    for item in items:
        if not alone(item):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=alone, reverse=True)


def shared_data(name):
    """A file of the shared data sets; skips the test if it is missing."""
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not on this machine")
    return str(path)


def mode_of(**attributes):
    """A Mode of one process and one replica, but for some attributes."""
    mode = Mode()
    vars(mode).update(attributes)
    return mode


def job_of(**fields):
    """The JobConfig of no flags, but for some fields."""
    plain = OptimizerConfig(), InputConfig(), TENSORFLOW, Mode(), sagemaker.Job()
    return JobConfig({}, (), *plain, flags={})._replace(**fields)


def example(label, ids, values, counts=None, weight=None):
    """A serialized tf.Example, made the slow and obvious way."""
    features = tf.train.Features()
    lists = {"counts": counts, "ids": ids, "label": [label], "values": values}
    lists["weight"] = None if weight is None else [weight]
    for name, numbers in lists.items():
        if numbers is not None:
            feature = features.feature[name]
            of_kind = feature.int64_list if name in ("counts", "ids") else feature.float_list
            of_kind.value.extend(numbers)
    message = tf.train.Example(features=features)
    return message.SerializeToString(deterministic=True)  # the order of our own encoder


def examples_of(path):
    """Yields {name: its numbers} of each record of a TFRecord file."""
    options = tf.io.TFRecordOptions("GZIP" if str(path).endswith(".gz") else "")
    for payload in tf.compat.v1.io.tf_record_iterator(str(path), options):
        features = tf.train.Example.FromString(payload).features.feature
        lists = lambda x: x.int64_list.value or x.float_list.value or x.bytes_list.value
        yield {k: list(lists(x)) for k, x in features.items()}


def make_records(rows, field_size=4, feature_size=50, seed=0):
    """(labels float32 [rows], ids int64 [rows, F], values float32 [rows, F]); the first feature
    value of row i is i + 1, so that a record can be recognised; labels can be learned."""
    random = np.random.RandomState(seed)
    ids = random.randint(1, feature_size, size=(rows, field_size)).astype(np.int64)
    values = random.rand(rows, field_size).astype(np.float32)
    logits = np.sin(ids).sum(axis=1)
    labels = (random.rand(rows) < 1 / (1 + np.exp(-2 * logits))).astype(np.float32)
    return labels, ids, values


def write_payloads(path, payloads):
    """Writes a TFRecord file by TensorFlow."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)
    return str(path)


def write_tfrecords(path, records):
    """Writes what make_records returns."""
    return write_payloads(path, [example(*record) for record in zip(*records)])


def write_libsvm(path, records):
    """Writes what make_records returns as LibSVM."""
    with open(path, "w") as f:
        for label, ids, values in zip(*records):
            pairs = " ".join(f"{i}:{v!r}" for i, v in zip(ids.tolist(), values.tolist()))
            f.write(f"{int(label)} {pairs}\n")
    return str(path)


def write_own_ids(paths, sizes):
    """Writes files of `sizes` records of one field, whose ids are 0, 1, ... over all files."""
    rows = sum(sizes)
    ids = np.arange(rows).reshape([-1, 1])
    columns = (ids[:, 0] % 2).astype(np.float32), ids, np.ones([rows, 1], np.float32)
    first = 0
    for path, size in zip(paths, sizes):
        write_tfrecords(path, [column[first : first + size] for column in columns])
        first += size


def run_train(*flags, fresh=False, env=None, timeout=180, code=None, **options):
    """Runs train.py with flags; returns the finished process with its text.

    Args:
        fresh: whether to start Python, rather than fork a process that has loaded TensorFlow.
        code: what it has to exit with; by default, anything.
        options: options of subprocess.run; any of them starts Python, too.
    """
    return _run(["train.py", *flags], fresh, env, timeout, code, **options)


def callable_of(session, place, tensors):
    """A function of strings that returns tensors, as session.run does, for thousands of calls."""
    options = CallableOptions(feed=[place.name], fetch=[x.name for x in tensors])
    call = session._make_callable_from_options(options)
    return lambda strings: call(np.array(strings, object))


def encoded(labels, ids, values, counts=None, weights=None):
    """The payloads that the codec makes of arrays."""
    frames, sizes = codec.encode(
        *(x if x is None else np.asarray(x) for x in (labels, ids, values, counts, weights))
    )
    return [frames[end - size + 12 : end - 4] for size, end in zip(sizes, np.cumsum(sizes))]


def compiler(folder, script):
    """The path of a compiler that is a shell script."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def copying_compiler(folder):
    """The environment of a compiler that takes the built libraries instead of compiling them, which
    takes 17 s or more. It notes each call in folder/compiled, but that for the codec."""
    from deepfm.kernels.build import library

    note = f"echo call >> {folder}/compiled; sleep 0.1"
    script = (
        f'case "$*" in *codec.cc*) of={of_codec.build()} ;;\n'
        f"*) of={library()}; {note} ;; esac\n"
        'while [ "$1" != -o ]; do shift; done\ncp $of "$2"'
    )
    return {"CXX": compiler(folder, script)}


def run_tool(name, *flags, fresh=False, env=None, timeout=180, code=None, **options):
    """Runs a program of data_tools; the same."""
    return _run(["-m", f"data_tools.{name}", *flags], fresh, env, timeout, code, **options)


def _run(words, fresh, env, timeout, code, **options):
    env = dict(os.environ if env is None else env)  # see `started`
    if not fresh and not options and warm.fits(env):
        return _ended(warm.run(words, env, timeout=timeout), code)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, **options,
    )  # fmt: skip
    return _ended(done, code)


def _ended(done, code):
    """A finished process, which had to exit with a code."""
    assert code in (None, done.returncode), done.stderr
    return done


_HOROVODRUN = """
from horovod.runner import launch
launch.gloo_built = lambda verbose=False: True
launch.run_commandline()
"""
LAUNCHERS = {
    "gloo": [os.path.join(os.path.dirname(sys.executable), "horovodrun"), "--gloo", "-np"],
    # Without loading TensorFlow to find out that Horovod has been built with Gloo.
    "warm gloo": [sys.executable, "-c", _HOROVODRUN, "--gloo", "-np"],
    "mpi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-bind-to", "none", "-np"],
}


# For Spark: Java compiles quickly rather than well, which halves what a short job costs.
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK_JAVA = {f"SPARK_{of}_OPTS": _JAVA for of in ("SUBMIT", "LAUNCHER", "DAEMON_JAVA", "EXECUTOR")}


@contextlib.contextmanager
def started(command, **options):
    """A command, running; none of its processes outlives the block.

    If it is waited for longer than the wait or the test may last, the failure shows its lines.
    """
    usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # What MPI has set in this process, where a test has begun it here, Python does not know of; an
    # mpirun that inherits it ends at once, without a word.
    usual["env"] = dict(os.environ)
    process = subprocess.Popen(
        [str(word) for word in command], text=True, start_new_session=True, **{**usual, **options}
    )
    try:
        yield process
    except (subprocess.TimeoutExpired, pytest.fail.Exception) as late:  # the latter by the limit
        if getattr(late, "cmd", process.args) is not process.args:  # it waited for another
            raise
        _end(process)
        said = "".join(filter(None, process.communicate(timeout=10)))
        raise AssertionError(f"{late}; until then it wrote:\n{said}") from None
    finally:
        _end(process)


def _end(process):
    """Kills a process and all that it has started, and waits until they have ended."""
    children = []
    if process.poll() is None:  # otherwise its number may be another one's by now
        children = psutil.Process(process.pid).children(recursive=True)
    for one in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(_lives, children)), 60, 0.01)
    warm.settle()


def _lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def run_python(*words, fresh=False, env=None, timeout=180, code=None, **options):
    """Runs Python on a file, -m and a module or -c and a text; the same."""
    return _run(words, fresh, env, timeout, code, **options)


# train.py, in which an operator of the second step fails that has nothing to do with the data. In
# the first, no batch waits yet: TensorFlow's prefetch may end with the cancelled step, and leave
# IteratorGetNext waiting for ever.
BROKEN_STEP = """
import sys
from deepfm.runtime.tf import tf
from deepfm import __main__ as train
from deepfm.model import model_fn
from deepfm.runtime import program
whole = model_fn.l2_terms
def broken(*args):
    of_weights, of_rows = whole(*args)
    first = tf.equal(tf.train.get_global_step(), 0)
    return of_weights + tf.strings.to_number(tf.where(first, "0", "no number")), of_rows
model_fn.l2_terms = broken
sys.exit(program.run(train.main, train.before_tensorflow))
"""


_HELD = """
import sys, time
sys.path[0] = "{root}"
from deepfm import __main__ as train
from deepfm.runtime import program
from {module} import {owner}
whole, calls = {owner}.{name}, 0
def held(self, *args):
    global calls
    calls += 1
    result = whole(self, *args)
    while {when} and not train.STOP.wanted:
        time.sleep(0.01)
    return result
{owner}.{name} = held
sys.exit(program.run(train.main, train.before_tensorflow))
"""


def held_train(folder, method, when):
    """The path of a train.py that stays at the end of a call of a method, such as
    deepfm.training.StopTogether.after_run, until it is killed or a signal comes.

    Args:
        folder: which it is written to.
        when: an expression of `self` and of `calls`, the number of this call.
    """
    module, owner, name = method.rsplit(".", 2)
    text = _HELD.format(root=ROOT, module=module, owner=owner, name=name, when=when)
    (folder / "train.py").write_text(text)
    return folder / "train.py"


def started_python(*words, fresh=False, env=None, **options):
    """Python on a file, -m and a module or -c and a text, running; `fresh` as of run_train.

    If not fresh, the process that is returned stands in for the one that runs: what it is sent is
    passed on, and that one ends with it.
    """
    python = sys.executable if fresh else warm.PYTHON
    return started([python, "-u", *words], env=_env_of(python, env), **options)


def started_train(*flags, fresh=False):
    """train.py, running."""
    return started_python("train.py", *flags, fresh=fresh)


@contextlib.contextmanager
def started_horovod(processes, *words, launcher="gloo", program="train.py", python=sys.executable):
    """train.py, or another program, under horovodrun or mpirun, running."""
    if launcher == "gloo" and python == warm.PYTHON:
        launcher = "warm gloo"
    with tempfile.TemporaryDirectory() as folder:
        # An mpirun that ends removes the folder that all of a user's mpiruns share, which another
        # one that starts at that moment may have just looked for: 1 start of 2,000 failed.
        env = dict(_env_of(python), OMPI_MCA_orte_tmpdir_base=folder)
        command = [*LAUNCHERS[launcher], processes, python, program, *words]
        with started(command, env=env) as process:
            yield process


# A program of scripts/ that starts another train.py, by another Python.
SCRIPT = f"""
import random, runpy, sys
sys.path[0], (_, sys.executable, train, *sys.argv) = "scripts", sys.argv
import programs
start, whole = programs.start, str(programs.ROOT / "train.py")
of = lambda word: train if word == whole else word
programs.start = lambda words, *how, **more: start(list(map(of, words)), *how, **more)
sample = random.sample
random.sample = lambda _, count: sample({PORTS}, count)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def started_cluster(
    *flags, servers=1, workers=1, restarts=0, python=sys.executable, train=ROOT / "train.py"
):
    """train.py, or another one, on parameter servers, a chief and workers, running."""
    return started(
        [
            sys.executable, "-c", SCRIPT, python, train, "scripts/local_cluster.py",
            f"--num_servers={servers}", f"--num_workers={workers}", f"--restarts={restarts}", "--",
            *flags,
        ],
        env=_env_of(python),
    )  # fmt: skip


def _env_of(python, env=None):
    env = dict(os.environ if env is None else env)
    return warm.for_launchers(env) if python == warm.PYTHON else env


def until(lines, pattern):
    """Reads lines, such as those that a process writes, until one has what matches a pattern."""
    assert any(re.search(pattern, line) for line in lines), f"it ended without {pattern!r}"


def marked(variable, value):
    """The processes that were started with a value in their environment, wherever they are now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get(variable) == value
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def await_files(process, *patterns):
    """Waits until a process has made a file of one of the patterns, or has ended."""
    # Path.glob would stumble over folders that data jobs make once, and remove, to see if they can.
    while process.poll() is None and not any(glob.glob(x, recursive=True) for x in patterns):
        time.sleep(0.01)


def finish(context, timeout=180, code=None):
    """Waits for a started command; the finished process with its text, and `code` as above."""
    with context as process:
        text, _ = process.communicate(timeout=timeout)
        done = subprocess.CompletedProcess(process.args, process.returncode, text, text)
    return _ended(done, code)


def run_horovod(processes, *flags, launcher="gloo", fresh=False, timeout=200, code=None):
    """Runs train.py in several processes; the finished launcher with its text."""
    fresh = fresh or launcher == "mpi"  # which knows what it has started
    python = sys.executable if fresh else warm.PYTHON
    context = started_horovod(processes, *flags, launcher=launcher, python=python)
    return finish(context, timeout, code)


def run_cluster(*flags, servers=1, workers=1, fresh=False, timeout=200, code=None):
    """Runs train.py on parameter servers; the finished launcher with its text."""
    python = sys.executable if fresh else warm.PYTHON
    cluster = started_cluster(*flags, servers=servers, workers=workers, python=python)
    return finish(cluster, timeout, code)


def run_mode(mode, *flags, processes=2, workers=0, **how):
    """Runs train.py in a mode, with two replicas in a process or with several processes."""
    flags = *flags, f"--distribution={mode}"
    if mode == "horovod":
        return run_horovod(processes, *flags, **how)
    if mode == "ps":
        return run_cluster(*flags, workers=workers, **how)
    replicas = () if mode == "local" else ("--replicas_per_process=2",)
    return run_train(*flags, *replicas, **how)


SMALL_MODEL = ("--embedding_size=4", "--deep_layers=4", "--feature_size=50")
UNEVEN = (127, 1000, 0, 1)  # records of the files of uneven


@pytest.fixture(autouse=True)
def _tf_config_stays():
    """Fails the test that leaves another TF_CONFIG, not the 30 after it."""
    before = os.environ.pop("TF_CONFIG", None)
    yield
    assert os.environ.pop("TF_CONFIG", None) is None
    if before is not None:
        os.environ["TF_CONFIG"] = before


@pytest.fixture(autouse=True)
def _log_level_of_its_own():
    """Has each test log as if it were alone, whatever level the one before it set."""
    logging.get_absl_logger().setLevel("NOTSET")


@pytest.fixture(scope="session")
def uneven(tmp_path_factory):
    """A folder of files of very different sizes, an empty one among them."""
    folder = tmp_path_factory.mktemp("uneven")
    for i, rows in enumerate(UNEVEN):
        write_tfrecords(folder / f"{i}.tfrecords", make_records(rows, seed=i))
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A file of 640 records: ten steps of the jobs below."""
    return write_tfrecords(tmp_path_factory.mktemp("data") / "a.tfrecords", make_records(640))


def small_job(data, model_dir, *more):
    """Flags that train a small model on some data and evaluate it on the same."""
    return small_training(data, model_dir, f"--val_data_dir={data}", *more)


def small_training(data, model_dir, *more):
    """Flags that train a small model and evaluate nothing, which saves a third of the run."""
    return (
        *SMALL_MODEL, f"--training_data_dir={data}", f"--model_dir={model_dir}",
        "--batch_size=64", "--dropout=0", *more,
    )  # fmt: skip


def report(model_dir, task=None):
    """The report.json of training, or the report of another task."""
    name = f"report.{task}.json" if task else "report.json"
    return json.loads((model_dir / name).read_text())


def evaluations(model_dir):
    """The entries of evaluations.json."""
    return json.loads((model_dir / "evaluations.json").read_text())


def losses(text):
    """The losses that lines of progress name."""
    return [float(x) for x in re.findall(r"step \d+  loss ([0-9.]+)", text)]


def scalars(model_dir):
    """{(tag, step): value} of the summaries of training, but of those of its speed."""
    return {
        (value.tag, event.step): value.simple_value
        for path in model_dir.glob("events.out.*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.HasField("simple_value") and not value.tag.startswith("speed/")
    }


def go_back(model_dir, step):
    """Leaves a model_dir the checkpoints until a step, as if a kill had come before the next one;
    returns the path of the last."""
    names = checkpoints.read_state(str(model_dir)).names
    kept = [name for name in names if checkpoints.step(name) <= step]
    assert kept and checkpoints.step(kept[-1]) == step < checkpoints.step(names[-1])
    checkpoints.write_state(str(model_dir), kept)
    for name in set(names) - set(kept):
        checkpoints.delete(str(model_dir), name)
    return f"{model_dir}/{kept[-1]}"


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4M", "none", str(folder)],
            stderr=subprocess.DEVNULL,
        ).returncode
    ):
        pytest.skip("needs root and the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, left):
    """Fills a small disk up but for some bytes; returns the file that does."""
    free = os.statvfs(str(folder)).f_bavail * os.statvfs(str(folder)).f_frsize
    (folder / "filling").write_bytes(bytes(max(free - left, 0)))
    return folder / "filling"
