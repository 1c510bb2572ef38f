"""What benchmark.py measures: pairs of runs, on data sets that it makes."""

import contextlib
import itertools
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial

import numpy as np
import programs
from absl import flags, logging

from data_tools.common import planted_model

FLAGS = flags.FLAGS
_BATCH = 1024
_CRITEO = _BATCH, 0.214  # the share of a batch's (field, id) pairs that are distinct

_MODEL = (
    "--embedding_size=32", "--deep_layers=128,64,32", "--l2_reg=0.0001", f"--batch_size={_BATCH}",
)  # fmt: skip
_ARTICLE = ("--lazy_updates=false", "--l2_scope=table")
_TRAIN = (sys.executable, "train.py")
_MKL = programs.ROOT / ".venv-mkl" / "bin" / "python"
_PEERS = programs.ROOT / ".venv-peers" / "bin" / "python"
_TF2 = programs.ROOT / ".venv-tf2" / "bin"
# What accuracy measures: flags, and data sets by name: features, and how popular their ids are.
_LARGE = "--batch_size=16384"
_TABLE = "--l2_scope=table", "--nolazy_updates"
_CHOICES = (
    (), ("--l2_scope=batch",), _TABLE, ("--l2_reg=0.0006",), ("--l2_reg=0.0006", *_TABLE),
    ("--reset_embeddings_each_epoch",), ("--batch_size=256",), (_LARGE,),
    (_LARGE, "--learning_rate=0.003", "--cowclip_ratio=0.0002"),
)  # fmt: skip
_ACCURACY = {
    "117,581 features": (117581, "--norare"),
    "117,581 features, many rare": (117581, "--rare"),
    "20,000 features, many rare": (20000, "--rare"),
}
_ONE_THREAD = ("--intra_op_threads=1", "--inter_op_threads=1")
_HOROVOD = (str(pathlib.Path(sys.executable).parent / "horovodrun"), "-np", "2", *_TRAIN)
_CLUSTER = (sys.executable, "scripts/local_cluster.py", "--num_servers=1", "--num_workers=1", "--")
# name -> the command of a mode; the batch of a replica is the same in all
_MODES = {
    "local": (*_TRAIN, "--distribution=local"),
    "tower, 2 replicas": (*_TRAIN, "--distribution=tower", "--replicas_per_process=2"),
    "mirrored, 1 replica": (*_TRAIN, "--distribution=mirrored", "--replicas_per_process=1"),
    "mirrored, 2 replicas": (*_TRAIN, "--distribution=mirrored", "--replicas_per_process=2"),
    "ps, 2 workers, 1 server": _CLUSTER,
    "horovod, 2 ranks of 1 thread": (*_HOROVOD, *_ONE_THREAD),
}


def run_command(*words):
    """Runs a command of the project; returns what it prints."""
    done = programs.run_command(*words)
    if done.returncode:
        command = f"{' '.join(done.args)}: exit code {done.returncode}"
        sys.exit(f"{command}\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def _sizes():
    shape = planted_model.Shape()
    least = planted_model.least_feature_size(shape)
    sizes = [int(size) for size in FLAGS.feature_sizes]
    if min(sizes) < least:
        few = f"--feature_sizes={min(sizes)} is too few for {shape.field_size} fields"
        raise programs.BadInput(f"{few}; try --feature_sizes={least}.")
    return sizes


def _data(work, feature_size, popularity=None):
    """The folder of a data set with ids below feature_size: train.libsvm, tfrecords/ and test/.

    Its ids are as popular as a flag of make_synthetic says; by default, as those of Criteo's log.
    """
    folder = work / f"data-{feature_size}{popularity or ''}"
    if not folder.exists():
        logging.info("Making %d rows with %d features.", FLAGS.rows, feature_size)
        size = f"--feature_size={feature_size}"
        shape = planted_model.Shape(feature_size=feature_size)
        popularity = popularity or f"--zipf={planted_model.zipf_of_share(shape, *_CRITEO)}"
        tool = lambda name, to, *words: run_command(
            sys.executable, "-m", f"data_tools.{name}", f"--output_dir={to}", *words
        )
        tool(
            "make_synthetic", folder, f"--train_rows={FLAGS.rows}", "--val_rows=0",
            f"--test_rows={FLAGS.rows // 4}", size, popularity,
        )  # fmt: skip
        for split, to in (("train", "tfrecords"), ("test", "test")):
            tool("libsvm_to_tfrecord", folder / to, f"--input={folder}/{split}.libsvm", size)
    return folder


def _arrays(folder):
    """The path of a data set's records as arrays."""
    path = folder / "train.npz"
    if not path.exists():
        text = (folder / "train.libsvm").read_text().replace(":", " ")
        rows = np.fromstring(text, sep=" ").reshape(FLAGS.rows, -1)  # label, id, value, id, ...
        np.savez(
            path, labels=rows[:, 0].astype(np.float32), ids=rows[:, 1::2].astype(np.int64),
            values=rows[:, 2::2].astype(np.float32),
        )  # fmt: skip
    return path


def _peer(what, *words):
    """The figures that peers.py prints."""
    printed = run_command(_PEERS, "scripts/benchmarks/peers.py", what, *words)
    return json.loads(printed.splitlines()[-1])


def _report(work, command, *more):
    """report.json of a run of train.py, of a new model; the flags in `more` win."""
    run_command(*command, *_MODEL, f"--model_dir={work}/model", "--clear_existing_model", *more)
    return json.loads((work / "model" / "report.json").read_text())


def _train(work, feature_size, *more, command=_TRAIN):
    """report.json of a run of train.py on the data set of a size."""
    folder = _data(work, feature_size)
    return _report(work, command, f"--training_data_dir={folder}/tfrecords", *more)


# Each measure but accuracy yields what benchmark.py runs in turn: the row and the column of a
# table, a function, the other's name, the other function; each function returns a report.


def training(work):
    """Examples/s of train.py against the article's configuration, PyTorch and intel-tensorflow."""
    for size in _sizes():
        column, folder = f"{size:,} features", _data(work, size)
        train = partial(_train, work, size)
        epoch = -(-FLAGS.rows // _BATCH)
        # With large tables, a step of the article takes seconds, so it does not run a whole epoch.
        few = epoch if size < 500000 else max(12, 40 * 1000000 // size)
        validation = [f"--val_data_dir={folder}/test"] if few == epoch else []
        article = partial(train, f"--max_steps={few}", *validation, *_ARTICLE)
        ours = partial(train, f"--max_steps={epoch}", *validation)
        yield "the article's configuration", column, ours, "article", article
        steps = FLAGS.rows // _BATCH
        ours = partial(train, f"--max_steps={steps}")
        if _PEERS.exists():
            given = f"--data={_arrays(folder)}", f"--feature_size={size}", f"--steps={steps}"
            torch = partial(_peer, "torch_training", *given, f"--batch_size={_BATCH}")
            yield "PyTorch", column, ours, "PyTorch", torch
        if _MKL.exists():
            mkl = partial(ours, command=(str(_MKL), "train.py"))
            yield "train.py on intel-tensorflow 1.15.2", column, ours, "ours", mkl


def inference(work):
    """Records/s from files to predictions, of train.py against its own operators and others."""
    for size in _sizes():
        folder = _data(work, size)
        _train(work, size, "--max_steps=20")
        infer = partial(_infer, work, folder)
        column = f"{size:,} features"
        yield "no compiled kernels", column, infer, "ours", partial(infer, "--nocompiled_kernels")
        if _PEERS.exists():
            output = work / "predictions.txt"
            given = f"--data={_arrays(folder)}", f"--output={output}", f"--servable={_export(work)}"
            for other in ("PyTorch", "onnxruntime", "tensorflow"):
                what = "torch" if other == "PyTorch" else other
                peer = partial(_peer, what, *given, f"--feature_size={size}")
                yield other, column, infer, other, peer


def _export(work):
    """The folder of an export of the model."""
    shutil.rmtree(work / "servable", ignore_errors=True)
    to = f"--servable_model_dir={work}/servable"
    run_command(*_TRAIN, "--task_type=export", f"--model_dir={work}/model", to)
    return next((work / "servable").glob("[0-9]*"))


def _infer(work, folder, *more):
    """Figures of inference without its start: the difference of a large and a small data set."""
    found = []
    for part in ("tfrecords", "test"):
        before = _children_cpu()
        model, data = f"--model_dir={work}/model", f"--infer_data_dir={folder}/{part}"
        run_command(*_TRAIN, "--task_type=infer", model, data, *more)
        cpu = _children_cpu() - before
        report = json.loads((work / "model" / "report.infer.json").read_text())
        found.append((report["examples"], report["examples"] / report["examples_per_second"], cpu))
    return _figures(*np.subtract(*found))


def _children_cpu():
    """Seconds of CPU that the programs took which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _figures(examples, seconds, cpu):
    if seconds <= 0:  # the difference of two runs that take as long
        text = f"--rows={FLAGS.rows} makes runs too short to measure; try"
        sys.exit(f"{text} --rows={10 * FLAGS.rows}.")  # all else is still measured
    return {
        "examples_per_second": examples / seconds,
        "cpu_utilization": cpu / seconds / len(os.sched_getaffinity(0)),
    }


def modes(work):
    """Examples/s of every mode against one process on one core."""
    for size in _sizes():
        train = partial(_train, work, size)
        alone = ("taskset", "-c", "0", *_MODES["local"])

        def one_core(train=train, alone=alone):
            report = train(command=alone)  # whose utilization is of that core
            share = report["cpu_utilization"] / len(os.sched_getaffinity(0))
            return {**report, "cpu_utilization": share}

        for name, command in _MODES.items():
            ours = partial(train, command=command)
            yield name, f"{size:,} features", ours, "local on one core", one_core


def runtimes(work):
    """Examples/s and CPU of every mode on TensorFlow 2.15 against 1.15."""
    train, ours = partial(_train, work, _sizes()[0]), str(pathlib.Path(sys.executable).parent)
    for name, command in _MODES.items() if _TF2.exists() else ():
        newer = [word.replace(ours, str(_TF2)) for word in command]
        for more in ((), ("--allow_onednn",)) if name == "local" else ((),):
            on_2 = partial(train, *more, command=newer)
            yield " ".join((name, *more)), "2.15", on_2, "1.15", partial(train, command=command)


def article(work):
    """Examples/s and CPU of each row of the article's table for one host, against its first row.

    Its rows for GPUs and for several hosts do not exist on one host of CPUs.
    """
    size, cores = _sizes()[0], len(os.sched_getaffinity(0))
    files = {"LibSVM": "train.libsvm", "TFRecord": "tfrecords/*.tfrecords"}
    commands = {name.partition(",")[0]: command for name, command in _MODES.items()}
    commands.update(ps=(*_CLUSTER[:-2], "--num_workers=0", "--"), horovod=_HOROVOD)

    def train(kind, pipe, mode, by_hand):
        ranks = 1 + (mode == "horovod")
        data = f"{_data(work, size)}/{files[kind]}"
        words = [f"--data_format={kind.lower()}", f"--feature_size={size}", "--field_size=39"]
        if by_hand:
            words += [f"--{x}_op_threads={max(cores // ranks, 1)}" for x in ("intra", "inter")]
        with _fifos(data, ranks * pipe) as more:
            words += more or [f"--training_data_dir={data}"]
            return _report(work, ("timeout", "100", *commands[mode]), *words)

    rows = [*itertools.product(files, (True, False), commands, (False, True))]
    for kind, pipe, mode, by_hand in rows:
        name = f"{kind}, {'Pipe' if pipe else 'File'}{', threads by hand' * by_hand}"
        ours = partial(train, kind, pipe, mode, by_hand)
        yield name, mode, ours, "first row", partial(train, *rows[0])


@contextlib.contextmanager
def _fifos(files, count):
    """Flags to read `count` channels in Pipe mode, each with all records of some files."""
    with tempfile.TemporaryDirectory() as job, contextlib.ExitStack() as stack:
        path = pathlib.Path(job, "input")  # the pipes' state is kept beside it
        names = list(programs.channels([files], count, None)) if count else []
        config = json.dumps({name: {"TrainingInputMode": "Pipe"} for name in names}).encode()
        programs.write_files(path / "config", {"inputdataconfig.json": config})
        (path / "data").mkdir()
        for name in names:
            fifo = path / "data" / f"{name}_0"
            os.mkfifo(fifo)
            feeder = subprocess.Popen(f"exec cat {files} > {fifo}", shell=True)
            stack.callback(feeder.wait)
            stack.callback(feeder.kill)
        yield ["--pipe_mode", f"--input_dir={path}"] if names else []


def tools(work):
    """Rows/s of the data tools, with their start, against others and against one process."""
    log, rows = work / "log", FLAGS.rows
    words = f"--output_dir={log}", "--days=1", f"--train_rows={rows}"
    run_command(sys.executable, "-m", "data_tools.make_synthetic", *words)
    table, text = log / "day-001.csv", _data(work, _sizes()[0]) / "train.libsvm"

    def prepare(workers=1):
        columns = f"--columns={log}/columns.json", "--split=1,0,0", f"--num_workers={workers}"
        return _timed("data_tools.prepare", rows, work / "prepared", f"--input={table}", *columns)

    def convert(workers=1):
        size = f"--feature_size={_sizes()[0]}", f"--num_workers={workers}", f"--num_files={workers}"
        to = work / "converted"
        return _timed("data_tools.libsvm_to_tfrecord", rows, to, f"--input={text}", *size)

    both = partial(prepare, 2)  # as the others use both cores
    for other in ("pandas", "polars") if _PEERS.exists() else ():
        words = other, f"--data={table}", f"--output={work}/{other}.npz"
        peer = partial(_program, rows, _PEERS, "scripts/benchmarks/peers.py", *words)
        yield f"prepare, 2 workers, against {other}", "CSV of 39 columns", both, other, peer
    for name, tool in (("CSV of 39 columns", prepare), ("LibSVM of 39 fields", convert)):
        yield f"{tool.__name__}, 2 workers against 1", name, partial(tool, 2), "1 worker", tool


def _timed(module, rows, to, *words):
    """Figures of a data tool that writes into a folder, in place of an earlier one."""
    shutil.rmtree(to, ignore_errors=True)
    return _program(rows, sys.executable, "-m", module, f"--output_dir={to}", *words)


def _program(rows, *words):
    """Figures of a program from its start to its end."""
    cpu, start = _children_cpu(), time.monotonic()
    run_command(*words)
    return _figures(rows, time.monotonic() - start, _children_cpu() - cpu)


def accuracy(work):
    """Yields {row: flags, column: data set, aucs: a list for each seed, of each epoch's AUC}."""
    for (column, shape), more in itertools.product(_ACCURACY.items(), _CHOICES):
        aucs, folder = [], _data(work, *shape)
        data = f"--training_data_dir={folder}/tfrecords", f"--val_data_dir={folder}/test"
        for seed in range(1, FLAGS.rounds + 1):
            _report(work, _TRAIN, *data, "--num_epochs=3", *more, f"--seed={seed}")
            entries = json.loads((work / "model" / "evaluations.json").read_text())
            aucs.append([entry["auc"] for entry in entries])
        row = " ".join(f"`{word}`" for word in more) or "default"
        logging.info("%s, %s: %s", row, column, aucs)
        yield {"row": row, "column": column, "aucs": aucs}


MEASURES = {
    measure.__name__: measure
    for measure in (training, inference, modes, runtimes, article, tools, accuracy)
}
