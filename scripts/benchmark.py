"""Measures training and inference against what they replace.

    .venv/bin/python scripts/benchmark.py
    .venv/bin/python scripts/benchmark.py --what=training --feature_sizes=117581,1000000 --rounds=3
    .venv/bin/python scripts/benchmark.py --what=training --torch=PYTHON --output_dir=benchmark

Each pair runs in turn, `--rounds` times, and its ratio is the median of the rounds' ratios: on a
shared machine, you can trust a ratio and not a single time.

Training is `train.py` as its user runs it, with the default flags, against the article's
configuration (--lazy_updates=false --l2_scope=table) and, with --torch, against a careful PyTorch
DeepFM with row-wise Adam (torch_reference.py). Inference is measured from files to predictions,
without its start. What a step costs depends on the share of a batch's (field, id) pairs that are
distinct; by default, the data repeats as Criteo's log does.

The matrix holds the cost of other flags and modes against the default. Each mode runs against one
thread of one process, each row of the article's table against its first. What fails is listed below
the table, and the exit code is 1.

It prints a Markdown table; --output_dir stores that, the figures as JSON, and plots.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import programs  # first
from programs import BadInput, program

# isort: split
import numpy as np
from absl import flags, logging
from tables_and_plots import bars, markdown, png

FLAGS = flags.FLAGS
_CRITEO = 1024, 0.214  # batch size, and the share of its (field, id) pairs that are distinct
# fmt: off
flags.DEFINE_list("feature_sizes", "117581,1000000,10000000",
    "Numbers of feature ids to measure with; article takes the first.")
flags.DEFINE_integer("rounds", 3, "How often each pair is measured; more on a busy machine.", 1)
flags.DEFINE_integer("rows", 400000, "Training records to generate; more make runs longer.", 10000)
flags.DEFINE_list("batch_sizes", "1024",
    "Records in a batch; measures other than training take the first.")
flags.DEFINE_float("zipf", None,
    "Zipf exponent of the ids' popularity. Lower it to use rare ids more often, which is harder. "
    f"Default: the one at which {_CRITEO[1]} of the (field, id) pairs of a batch of {_CRITEO[0]:,} "
    "are distinct, as in Criteo's log.")
flags.DEFINE_string("work_dir", None,
    "Folder whose benchmark/ keeps the data for the next run. Default: a temporary folder.")
flags.DEFINE_string("output_dir", None, "Folder for benchmark.json, .md and .png. Default: none.")
flags.DEFINE_string("torch", None,
    "Python interpreter that has torch, to compare training with PyTorch. Default: no comparison.")
# fmt: on

_MODEL = ("--embedding_size=32", "--deep_layers=128,64,32", "--l2_reg=0.0001")
_ARTICLE = ("--lazy_updates=false", "--l2_scope=table")
_TRAIN = (sys.executable, "train.py")


def _batch():
    return int(FLAGS.batch_sizes[0])


def _sizes():
    return [int(size) for size in FLAGS.feature_sizes]


def main(_):
    programs.check_list("what", MEASURES)
    programs.check_list("feature_sizes")
    programs.check_list("batch_sizes")
    if FLAGS.torch and not shutil.which(FLAGS.torch):
        raise BadInput(f"--torch={FLAGS.torch}: no such program; name a Python that has torch.")
    if FLAGS.output_dir:
        program.make_output_dir(FLAGS.output_dir)
    programs.need("matplotlib")
    with tempfile.TemporaryDirectory() as temporary:
        # A folder of its own, because the measures replace model/ and more there.
        work = pathlib.Path(FLAGS.work_dir or temporary) / "benchmark"
        work.mkdir(parents=True, exist_ok=True)
        figures = [_in_turn(*pair) for what in FLAGS.what for pair in MEASURES[what](work)]
    texts = {"json": json.dumps(figures, indent=1), "md": _table(figures)}
    print(texts["md"])
    if FLAGS.output_dir:
        files = {f"benchmark.{kind}": f"{text}\n".encode() for kind, text in texts.items()}
        files["benchmark.png"] = _plot(figures)
        programs.write_files(pathlib.Path(FLAGS.output_dir), files)
    return any(f["failed"] for f in figures)


def _table(figures):
    """The figures as a Markdown table; CPU and memory if train.py reported them; what failed."""
    titles = (
        "measured", "ours", "the other", "ratio", "ratios", "CPU of the host",
        "CPU-s per million", "peak memory",
    )  # fmt: skip
    rows = []
    for f in figures:
        shown = (lambda x: f"{x:,.0f}/s") if f["unit"] == "/s" else (lambda x: f"{x:,.1f} s")
        pair = lambda name, f=f: [d[name] for d in f["details"] if name in d]
        rows.append((
            f["name"], shown(f["ours"]), f"{shown(f['other'])} ({f['other_name']})",
            f"{statistics.median(f['ratios']):.2f}", ", ".join(f"{r:.2f}" for r in f["ratios"]),
            " / ".join(f"{x:.0%}" for x in pair("host_cpu_utilization")),
            " / ".join(f"{x:,.1f}" for x in pair("cpu_seconds_per_million")),
            " / ".join(f"{x / 2**30:.1f} GiB" for x in pair("peak_rss_bytes")),
        ))  # fmt: skip
    failed = [f"\n\n{f['name']}: {reason}" for f in figures for reason in f["failed"]]
    return markdown(titles, rows) + "".join(failed)


def _plot(figures) -> bytes:
    """A bar for the ratio of each pair, with a dot for each round."""
    colors = {"/s": "tab:blue", " s": "tab:gray"}
    figure, axes = bars(
        [(f"{f['name']}\nagainst {f['other_name']}", f["ratios"], colors[f["unit"]])
         for f in figures if not f["failed"]],
        xscale="log", xlabel="ratio to the other (gray: seconds, less is better)",
    )  # fmt: skip
    axes.axvline(1, color="tab:red", linewidth=1)
    return png(figure)


def _in_turn(name, ours, other_name, other, unit="/s"):
    """The figure of two functions, run in turn; each returns a number or a report.json."""
    pairs = []
    for i in range(FLAGS.rounds):
        pairs.append((_tried(ours), _tried(other)))
        a, b = map(_rate_of, pairs[-1])
        logging.info("%s, round %d: %.1f%s, %s %.1f%s", name, i + 1, a, unit, other_name, b, unit)
    rates = [[_rate_of(found) for found in side] for side in zip(*pairs)]
    return {
        "name": name,
        "other_name": other_name,
        "unit": unit,
        "ours": statistics.median(rates[0]),
        "other": statistics.median(rates[1]),
        "ratios": [a / b for a, b in zip(*rates)],
        "details": [_details(side) for side in zip(*pairs)],
        "failed": sorted({run["failed"] for pair in pairs for run in pair if _failed(run)}),
    }


def _tried(run):
    """What run() returns; if a program has failed, the reason, without a rate."""
    try:
        return run()
    except SystemExit as error:
        command, *lines = str(error).splitlines()
        code = command.rpartition(": ")[2]
        reasons = [f"{code}: {line}" for line in lines if "train.py: " in line]
        return {"examples_per_second": math.nan, "failed": (reasons or [command])[0]}


def _failed(found):
    return isinstance(found, dict) and "failed" in found


def _rate_of(found):
    return found["examples_per_second"] if isinstance(found, dict) else found


def _details(reports):
    """Medians of what reports contain besides the rate."""
    reports = [r for r in reports if not _failed(r)]
    if not reports or not isinstance(reports[0], dict):
        return {}
    busy = {"host_cpu_utilization": [r.get("host_cpu_utilization") for r in reports]}
    return {
        **{name: statistics.median(shares) for name, shares in busy.items() if None not in shares},
        "cpu_seconds_per_million": statistics.median(map(_cpu_seconds_per_million, reports)),
        "peak_rss_bytes": statistics.median(r["peak_rss_bytes"] for r in reports),
        "report": reports[-1],
    }


def _cpu_seconds_per_million(report, of_host=False):
    """Of the process that reports, or of all of the host, which should have nothing else to do."""
    share = report["host_cpu_utilization" if of_host else "cpu_utilization"]
    return 1e6 * share * len(os.sched_getaffinity(0)) / report["examples_per_second"]


def _run(*words):
    """Runs a command of the project; returns what it prints."""
    done = programs.run_command(*words)
    if done.returncode:
        command = f"{' '.join(done.args)}: exit code {done.returncode}"
        sys.exit(f"{command}\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def _seconds(*command):
    """Seconds that a program of the project takes."""
    started = time.monotonic()
    _run(sys.executable, *command)
    return time.monotonic() - started


def _convert(source, folder, *extra):
    """Seconds that it takes to convert LibSVM to TFRecords."""
    return _seconds(
        "-m", "data_tools.libsvm_to_tfrecord", f"--input={source}", f"--output_dir={folder}",
        "--overwrite", *extra,
    )  # fmt: skip


@functools.lru_cache(maxsize=None)
def _shape(feature_size):
    """The Shape of the data set with ids below feature_size."""
    shape = _planted_model().Shape(feature_size=feature_size)
    zipf = FLAGS.zipf
    if zipf is None:
        zipf = _planted_model().zipf_of_share(shape, *_CRITEO)
    return shape._replace(zipf=zipf)


def _planted_model():
    from data_tools.common import planted_model  # --help needs no data_tools

    return planted_model


def _features(feature_size, batch_size=None):
    """What the table calls a data set: its ids, and how often they repeat."""
    share = _planted_model().distinct_share(_shape(feature_size), batch_size or _batch())
    return f"{feature_size:,} features, {share:.3f} of the pairs distinct"


def _data(work, feature_size):
    """The folder of a data set with ids below feature_size: train.libsvm and tfrecords/."""
    zipf = _shape(feature_size).zipf
    folder = work / f"data-{feature_size}-{FLAGS.rows}-{zipf}"
    if not (folder / "test" / "dataset.json").exists():  # which is written last
        logging.info("Making %d rows with %d features.", FLAGS.rows, feature_size)
        _seconds(
            "-m", "data_tools.make_synthetic", f"--output_dir={folder}", "--overwrite",
            f"--train_rows={FLAGS.rows}", "--val_rows=0", f"--test_rows={FLAGS.rows // 4}",
            f"--feature_size={feature_size}", f"--zipf={zipf}",
        )  # fmt: skip
        for split, to in (("train", "tfrecords"), ("test", "test")):
            _convert(f"{folder}/{split}.libsvm", folder / to, f"--feature_size={feature_size}")
    return folder


def _words(work, *more):
    """Flags of train.py for a new model; `more` overrides them."""
    return (
        *_MODEL, f"--model_dir={work}/model", "--clear_existing_model", f"--batch_size={_batch()}",
        *more,
    )  # fmt: skip


def _train(work, feature_size, *more, command=_TRAIN):
    """report.json of a run of train.py on the data set of a size."""
    folder = _data(work, feature_size)
    return _report(work, command, f"--training_data_dir={folder}/tfrecords", *more)


def _report(work, command, *more):
    """report.json of a run of train.py."""
    _run(*command, *_words(work, *more))
    return json.loads((work / "model" / "report.json").read_text())


# Each measure yields what _in_turn takes, one pair after the other.


def training(work):
    """Examples/s of train.py, default against the article's configuration and against PyTorch."""
    for size, batch in itertools.product(_sizes(), map(int, FLAGS.batch_sizes)):
        more = "" if len(FLAGS.batch_sizes) == 1 else f", batch {batch:,}"
        name, folder = f"training, {_features(size, batch)}{more}", _data(work, size)
        train = partial(_train, work, size, f"--batch_size={batch}")
        epoch = -(-FLAGS.rows // batch)
        # With large tables, a step of the article takes seconds, so it does not run a whole epoch.
        few = epoch if size < 500000 else max(12, 40 * 1000000 // size)
        validation = [f"--val_data_dir={folder}/test"] if few == epoch else []
        article = partial(train, f"--max_steps={few}", *validation, *_ARTICLE)
        ours = partial(train, f"--max_steps={epoch}", *validation)
        yield name, ours, "article's configuration", article
        if FLAGS.torch:
            steps = FLAGS.rows // batch
            torch = partial(
                _torch, f"--data={_arrays(folder)}", f"--feature_size={size}",
                f"--batch_size={batch}", f"--steps={steps}",
            )  # fmt: skip
            yield name, partial(train, f"--max_steps={steps}"), "PyTorch", torch


def inference(work):
    """Records/s from files to predictions, of train.py against PyTorch, or its own operators."""
    for size in _sizes():
        folder, name = _data(work, size), f"inference, {_features(size)}"
        _train(work, size, "--max_steps=20")
        infer = partial(_infer, work, folder)
        torch = partial(
            _torch, f"--data={_arrays(folder)}", f"--feature_size={size}",
            f"--predictions={work}/predictions.txt",
        )  # fmt: skip
        without = partial(infer, "--nocompiled_kernels")
        other = ("PyTorch", torch) if FLAGS.torch else ("without compiled kernels", without)
        yield (name, infer, *other)


def _infer(work, folder, *more):
    """Figures of inference without its start: two data sets' difference."""
    found = _on_two_data_sets(work, folder, "infer", "infer_data_dir", *more)
    examples, seconds, cpu = np.subtract(*reversed(found))
    return {
        "examples_per_second": examples / seconds,
        "cpu_utilization": cpu / seconds / len(os.sched_getaffinity(0)),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def _on_two_data_sets(work, folder, task, flag, *more):
    """[(examples, seconds without the start, CPU-seconds)] of a job on a small and a large set."""
    found = []
    for part in ("test", "tfrecords"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = f"--task_type={task}", f"--model_dir={work}/model", f"--{flag}={folder}/{part}"
        _run(*_TRAIN, *words, *more)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads((work / "model" / f"report.{task}.json").read_text())
        examples = report.get("eval", report)["examples"]
        rate = report.get("examples_per_second", np.nan)  # which an evaluation does not report
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        found.append((examples, examples / rate, cpu))
    return found


def _several_values(folder, feature_size):
    """The folder of the same records with two values in every other field, and none in the rest."""
    path, to = folder / "several.libffm", folder / "several"
    if not (to / "dataset.json").exists():
        with open(folder / "train.libsvm") as lines, open(path, "w") as out:
            for label, *pairs in map(str.split, lines):
                named = (f"{field - field % 2}:{pair}" for field, pair in enumerate(pairs))
                out.write(f"{' '.join([label, *named])}\n")
        sizes = "--field_size=39", f"--feature_size={feature_size}"
        _convert(path, to, "--input_format=libffm", "--multi_valued", *sizes)
    return to


def _torch(*words):
    """The figures that torch_reference.py prints."""
    return json.loads(_run(FLAGS.torch, "scripts/benchmarks/torch_reference.py", *words))


def _arrays(folder):
    """The path of a data set's records as arrays."""
    path = folder / "train.npz"
    if not path.exists():
        text = (folder / "train.libsvm").read_text().replace(":", " ")
        rows = np.fromstring(text, sep=" ").reshape(FLAGS.rows, -1)  # label, id, value, id, ...
        unfinished = folder / "unfinished.npz"
        np.savez(
            unfinished, labels=rows[:, 0].astype(np.float32), ids=rows[:, 1::2].astype(np.int64),
            values=rows[:, 2::2].astype(np.float32),
        )  # fmt: skip
        unfinished.rename(path)
    return path


_ONE_THREAD = ("--intra_op_threads=1", "--inter_op_threads=1")
_HOROVOD = (str(pathlib.Path(sys.executable).parent / "horovodrun"), "-np", "2", *_TRAIN)
_CLUSTER = (sys.executable, "scripts/local_cluster.py", "--num_servers=1", "--num_workers=1", "--")

# name -> the command of a mode; the batch of a replica is the same in all
MODES = {
    "local": (*_TRAIN, "--distribution=local"),
    "tower, 2 replicas": (*_TRAIN, "--distribution=tower", "--replicas_per_process=2"),
    "mirrored, 1 replica": (*_TRAIN, "--distribution=mirrored", "--replicas_per_process=1"),
    "mirrored, 2 replicas": (*_TRAIN, "--distribution=mirrored", "--replicas_per_process=2"),
    "ps, 2 workers, 1 server": _CLUSTER,
    "horovod, 2 ranks of 1 thread": (*_HOROVOD, *_ONE_THREAD),
}


def modes(work):
    """Examples/s of every mode against one thread of one process."""
    for size in _sizes():
        train = partial(_train, work, size)
        one_thread = partial(train, *_ONE_THREAD, "--distribution=local")
        for name, command in MODES.items():
            ours = partial(train, command=command)
            yield f"{name}, {size:,} features", ours, "local, 1 thread", one_thread
        if 500000 <= size <= 2000000:  # the last mode: Horovod
            whole = partial(train, "--max_steps=12", *_ARTICLE, command=command)
            yield f"{name}, {size:,} features", ours, "whole tables all-reduced", whole


def article(work):
    """Examples/s and CPU of each row of the article's table for one host, against its first row.

    Its rows for GPUs and for several hosts do not exist on one host of CPUs.
    """
    size, cores = _sizes()[0], len(os.sched_getaffinity(0))
    files = {"LibSVM": "train.libsvm", "TFRecord": "tfrecords/*.tfrecords"}
    commands = {name.partition(",")[0]: command for name, command in MODES.items()}
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
        name = f"{mode}, {kind}, {'Pipe' if pipe else 'File'}{', threads by hand' * by_hand}"
        ours = partial(train, kind, pipe, mode, by_hand)
        yield name, ours, "first row", partial(train, *rows[0])


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


# Each changes one thing of the default, or two that may have to do with each other.
_CONFIGURATIONS = (
    *(f"--optimizer={name}" for name in ("sgd", "momentum", "adagrad", "ftrl")),
    "--clip_norm=10",
    "--batch_norm",
    "--l2_scope=batch",
    "--l2_scope=table",
    "--cowclip_ratio=0.0002",
    "--l2_reg_deep=0.001",
    "--embedding_learning_rate=0.0005",
    "--learning_rate_warmup_steps=100",
    "--reset_embeddings_each_epoch --num_epochs=3",
    "--num_epochs=3",
    *(f"--batch_size={size}" for size in (256, 4096, 16384)),
    "--optimizer=adagrad --clip_norm=10",
    "--batch_norm --clip_norm=10",
    "--batch_norm --batch_size=256",
    "--batch_size=4096 --clip_norm=10",
)


def matrix(work):
    """CPU-seconds per million of each configuration against the default."""
    size = _sizes()[0]

    def cost(*words, command=_TRAIN, folder=None):
        data = folder or _data(work, size) / "tfrecords"
        report = _report(work, command, f"--training_data_dir={data}", *words)
        return _cpu_seconds_per_million(report, of_host=command != _TRAIN)

    changes = {words: partial(cost, *words.split()) for words in _CONFIGURATIONS}
    several = _several_values(_data(work, size), size)
    for pooling in ("sum", "mean", "max"):
        words = f"--pooling={pooling}", "--multi_valued"
        changes[f"several values, {pooling}"] = partial(cost, *words, folder=several)
    clipped = "--clip_norm=10"
    for name, command in MODES.items():
        if name != "local":
            changes[name] = partial(cost, command=command)
            changes[f"{name}, {clipped}"] = partial(cost, clipped, command=command)
    weighted = _weighted(_data(work, size), size)
    changes["weighted examples"] = partial(cost, folder=weighted)
    for name, changed in changes.items():
        yield f"CPU-seconds per million examples, {name}", changed, "default", cost, " s"
    evaluate = partial(_evaluate, work, _data(work, size))
    for words in ("--gauc_field=13", "--slice_fields=13"):
        name = f"CPU-seconds per million examples, evaluation with {words}"
        yield name, partial(evaluate, words), "evaluation", evaluate, " s"


def _weighted(folder, feature_size):
    """The folder of the same records with weights of 0.5, 1 and 2."""
    path, to = folder / "weighted.libsvm", folder / "weighted"
    if not (to / "dataset.json").exists():
        with open(folder / "train.libsvm") as lines, open(path, "w") as out:
            for line, weight in zip(lines, itertools.cycle(("0.5", "1", "2"))):
                out.write(line.replace(" ", f":{weight} ", 1))
        _convert(path, to, f"--feature_size={feature_size}")
    return to


def _evaluate(work, folder, *more):
    """CPU-seconds per million of an evaluation without its start: two data sets' difference."""
    found = _on_two_data_sets(work, folder, "eval", "val_data_dir", *more)
    examples, _, cpu = np.subtract(*reversed(found))
    return 1e6 * cpu / examples


def compiled(work):
    """train.py with the compiled kernels against TensorFlow's own ops alone."""
    for size in _sizes():
        train = partial(_train, work, size, f"--max_steps={FLAGS.rows // _batch()}")
        without = partial(train, "--nocompiled_kernels")
        yield f"training, {size:,} features", train, "without compiled kernels", without


MEASURES = {
    "training": training,
    "inference": inference,
    "matrix": matrix,
    "kernels": compiled,
    "modes": modes,
    "article": article,
}
flags.DEFINE_list("what", ",".join(MEASURES), "What to measure; the default is all there is.")

if __name__ == "__main__":
    programs.run_program(main)
