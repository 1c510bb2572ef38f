"""Measures training and all around it beside what it replaces, and the floor of a step.

    .venv/bin/python scripts/benchmark.py
    .venv/bin/python scripts/benchmark.py --what=training --feature_sizes=117581,1000000 --rounds=3
    .venv/bin/python scripts/benchmark.py --what=training --torch=PYTHON --output_dir=benchmark

Each pair runs in turn, `--rounds` times, and its ratio is the median of the rounds' ratios: on a
machine that others use too, a ratio can be trusted and a single time cannot.

Training is `train.py` as its user runs it, with the default flags, beside the article's
configuration (--lazy_updates=false --l2_scope=table), and, where --torch names a Python that has
it, beside a plain PyTorch DeepFM with row-wise Adam (torch_reference.py). The floor is what no step
can do without, in a session by itself: matrix products, gathers, sums of a row's gradients, row
updates. Input and conversion run in one process each. Of the tools that prepare data the CPU time
is taken, in one process, beside that of converting LibSVM. The modes run all in turn at each
feature size, beside one thread of one process.

Printed is a Markdown table; --output_dir takes that, the figures as JSON, and a plot.
"""

import itertools
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from programs import ROOT, BadInput, need, program, run_program, write_files  # first

# isort: split
import numpy as np
from absl import flags, logging
from tables_and_plots import bars, markdown, png

FLAGS = flags.FLAGS
flags.DEFINE_list(
    "what",
    "training,floor,kernels,start,modes,extras,safety,pipe,input,conversion,tools",
    "What is measured.",
)
flags.DEFINE_list("feature_sizes", "117581,1000000,10000000", "Of training.")
flags.DEFINE_integer("rounds", 3, "Times that each pair is measured.", 1)
flags.DEFINE_integer("rows", 400000, "Records of the data set that is made.", 10000)
flags.DEFINE_list("batch_sizes", "1024", "Records in a batch; all but training takes the first.")
flags.DEFINE_float("zipf", 1.1, "How steeply the popularity of ids falls; flatter is harder.")
flags.DEFINE_string(
    "work_dir",
    None,
    "A folder in whose benchmark/ data is kept for the next time; default: a temporary one.",
)
flags.DEFINE_string("output_dir", None, "Where benchmark.json, .md and .png go.")
flags.DEFINE_string("torch", None, "A Python that has torch, to compare training with.")

_MODEL = ("--embedding_size=32", "--deep_layers=128,64,32", "--l2_reg=0.0001")
_ARTICLE = ("--lazy_updates=false", "--l2_scope=table")
_TRAIN = (sys.executable, "train.py")


def _batch():
    return int(FLAGS.batch_sizes[0])


def _sizes():
    return [int(size) for size in FLAGS.feature_sizes]


def main(_):
    unknown = [what for what in FLAGS.what if what not in MEASURES]
    if unknown:
        raise BadInput(f"--what={unknown[0]} is none of {', '.join(MEASURES)}.")
    for name in ("feature_sizes", "batch_sizes"):
        for size in FLAGS[name].value or [""]:
            if not size.isdigit() or not int(size):
                raise BadInput(f"--{name}={size} is no list of numbers, like --{name}=1000,2000.")
    if FLAGS.torch and not shutil.which(FLAGS.torch):
        raise BadInput(f"--torch={FLAGS.torch} is no program; name a Python that has torch.")
    if FLAGS.output_dir:
        program.make_output_dir(FLAGS.output_dir)
    need("matplotlib")
    with tempfile.TemporaryDirectory() as temporary:
        # A folder of its own: what is measured replaces model/ there, and more.
        work = pathlib.Path(FLAGS.work_dir or temporary) / "benchmark"
        work.mkdir(parents=True, exist_ok=True)
        figures = [figure for what in FLAGS.what for figure in MEASURES[what](work)]
    texts = {"json": json.dumps(figures, indent=1), "md": _table(figures)}
    print(texts["md"])
    if FLAGS.output_dir:
        files = {f"benchmark.{kind}": f"{text}\n".encode() for kind, text in texts.items()}
        files["benchmark.png"] = _plot(figures)
        write_files(pathlib.Path(FLAGS.output_dir), files)


def _table(figures):
    """The figures as a Markdown table; CPU and memory where train.py told them."""
    titles = (
        "measured", "ours", "the other", "ratio", "ratios", "CPU-s per million", "peak memory",
    )  # fmt: skip
    rows = []
    for f in figures:
        unit, digits = f.get("unit", "/s"), 1 if "unit" in f else 0
        pair = lambda name, f=f: [d[name] for d in f.get("details", []) if d and d.get(name)]
        rows.append((
            f["name"], f"{f['ours']:,.{digits}f}{unit}",
            f"{f['other']:,.{digits}f}{unit} ({f['other_name']})",
            f"{statistics.median(f['ratios']):.2f}", ", ".join(f"{r:.2f}" for r in f["ratios"]),
            " / ".join(f"{x:,.1f}" for x in pair("cpu_seconds_per_million")),
            " / ".join(f"{x / 2**30:.1f} GiB" for x in pair("peak_rss_bytes")),
        ))  # fmt: skip
    return markdown(titles, rows)


def _plot(figures) -> bytes:
    """How many times the other each figure is: a bar, and a dot for each round."""
    color = lambda f: (
        "tab:gray" if f.get("unit") == " s" else "tab:blue"
    )  # of seconds less is better
    figure, axes = bars(
        [(f"{f['name']}\nagainst {f['other_name']}", f["ratios"], color(f)) for f in figures],
        xscale="log", xlabel="times the other (gray: seconds, of which less is better)",
    )  # fmt: skip
    axes.axvline(1, color="tab:red", linewidth=1)
    return png(figure)


def _in_turn(name, ours, other_name, other):
    """Runs two functions in turn, each of which returns records per second, or a report.json that
    tells them; the figure of the pair."""
    pairs = []
    for i in range(FLAGS.rounds):
        pairs.append((ours(), other()))
        logging.info(
            "%s, round %d: %.0f/s, %s %.0f/s",
            name, i + 1, _rate_of(pairs[-1][0]), other_name, _rate_of(pairs[-1][1]),
        )  # fmt: skip
    rates = [tuple(map(_rate_of, pair)) for pair in pairs]
    details = [_details([pair[side] for pair in pairs]) for side in (0, 1)]
    return _figure(name, other_name, rates, details=details)


def _figure(name, other_name, pairs, **more):
    """What the rounds (ours, the other) of a pair come to."""
    return {
        "name": name,
        "other_name": other_name,
        "ours": statistics.median(a for a, _ in pairs),
        "other": statistics.median(b for _, b in pairs),
        "ratios": [a / b for a, b in pairs],
        **more,
    }


def _rate_of(found):
    return found["examples_per_second"] if isinstance(found, dict) else found


def _details(reports):
    """Medians of what reports tell beside the rate."""
    if not all(isinstance(report, dict) for report in reports):
        return {}
    used = lambda r: 1e6 * r["cpu_utilization"] * _cores() / r["examples_per_second"]
    return {
        "cpu_seconds_per_million": statistics.median(map(used, reports)),
        "peak_rss_bytes": statistics.median(r["peak_rss_bytes"] for r in reports),
        "report": reports[-1],
    }


def _cores():
    return len(os.sched_getaffinity(0))


def _run(*command):
    """Runs a command of the project in a Python; what it prints."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(done.args)}\n{done.stdout[-2000:]}{done.stderr}")
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


def _data(work, feature_size):
    """The folder of a data set with ids below feature_size: train.libsvm and tfrecords/."""
    folder = work / f"data-{feature_size}-{FLAGS.rows}-{FLAGS.zipf}"
    if not (folder / "test" / "dataset.json").exists():  # which is written last
        logging.info("Making %d rows with %d features.", FLAGS.rows, feature_size)
        _seconds(
            "-m", "data_tools.make_synthetic", f"--output_dir={folder}", "--overwrite",
            f"--train_rows={FLAGS.rows}", "--val_rows=0", f"--test_rows={FLAGS.rows // 4}",
            f"--feature_size={feature_size}", f"--zipf={FLAGS.zipf}",
        )  # fmt: skip
        for split, to in (("train", "tfrecords"), ("test", "test")):
            _convert(f"{folder}/{split}.libsvm", folder / to, f"--feature_size={feature_size}")
    return folder


def _words(work, *source_and_more, batch=None):
    """Flags of train.py for a new model."""
    return (
        *source_and_more, *_MODEL, f"--model_dir={work}/model", "--clear_existing_model",
        f"--batch_size={batch or _batch()}",
    )  # fmt: skip


def _train(work, folder, *extra, batch=None, command=_TRAIN):
    """report.json of a run of train.py on a data set."""
    _run(*command, *_words(work, f"--training_data_dir={folder}/tfrecords", batch=batch), *extra)
    return json.loads((work / "model" / "report.json").read_text())


def training(work):
    """Examples/s of train.py, default against the article's configuration and against PyTorch."""
    figures = []
    for size, batch in itertools.product(_sizes(), map(int, FLAGS.batch_sizes)):
        more = "" if len(FLAGS.batch_sizes) == 1 else f", batch {batch:,}"
        name = f"training, {size:,} features{more}"
        figures.append(_training(work, name, size, batch))
        if FLAGS.torch:
            figures.append(_against_torch(work, name, size, batch))
    return figures


def _training(work, name, feature_size, batch):
    epoch = -(-FLAGS.rows // batch)
    # The article's step takes seconds where the tables are large; then no epoch is compared.
    few = epoch if feature_size < 500000 else max(12, 40 * 1000000 // feature_size)
    validation = [f"--val_data_dir={_data(work, feature_size)}/test"] if few == epoch else []
    return _pair(
        work, feature_size, name, [f"--max_steps={epoch}", *validation], "article's configuration",
        [f"--max_steps={few}", *validation, *_ARTICLE], batch,
    )  # fmt: skip


def _pair(work, feature_size, name, ours, other_name, other, batch=None):
    """The figure of train.py with some flags and with others."""
    folder = _data(work, feature_size)
    train = lambda words: _train(work, folder, *words, batch=batch)
    return _in_turn(name, lambda: train(ours), other_name, lambda: train(other))


def _against_torch(work, name, feature_size, batch):
    folder, steps = _data(work, feature_size), FLAGS.rows // batch
    torch = lambda: json.loads(
        _run(
            FLAGS.torch, "scripts/torch_reference.py", f"--data={_arrays(folder)}",
            f"--feature_size={feature_size}", f"--batch_size={batch}", f"--steps={steps}",
        )
    )  # fmt: skip
    ours = lambda: _train(work, folder, f"--max_steps={steps}", batch=batch)
    return _in_turn(name, ours, "plain PyTorch", torch)


def _arrays(folder):
    """The path of a data set's records as arrays."""
    path = folder / "train.npz"
    if not path.exists():
        columns = {"labels": [], "ids": [], "values": []}
        with open(folder / "train.libsvm") as lines:
            for line in lines:
                label, *pairs = line.split()
                ids, values = zip(*(pair.split(":") for pair in pairs))
                for column, x in zip(columns.values(), (label, ids, values)):
                    column.append(np.array(x, np.int64 if column is columns["ids"] else np.float32))
        unfinished = folder / "unfinished.npz"
        np.savez(unfinished, **{name: np.stack(column) for name, column in columns.items()})
        unfinished.rename(path)
    return path


_ONE_THREAD = ("--intra_op_threads=1", "--inter_op_threads=1")
_HOROVOD = (str(pathlib.Path(sys.executable).parent / "horovodrun"), "-np", "2", *_TRAIN)
_CLUSTER = (sys.executable, "scripts/local_cluster.py", "--num_servers=1", "--num_workers=1", "--")

_ONE = "local, 1 thread"
_RANKS = "horovod, 2 ranks of 1 thread"

# name -> the command of a mode; the batch of a replica is the same in all
MODES = {
    "local": (*_TRAIN, "--distribution=local"),
    _ONE: (*_TRAIN, "--distribution=local", *_ONE_THREAD),
    "tower, 2 replicas": (*_TRAIN, "--distribution=tower", "--replicas_per_process=2"),
    "mirrored, 1 replica": (*_TRAIN, "--distribution=mirrored", "--replicas_per_process=1"),
    "mirrored, 2 replicas": (*_TRAIN, "--distribution=mirrored", "--replicas_per_process=2"),
    "ps, 2 workers, 1 server": _CLUSTER,
    _RANKS: (*_HOROVOD, *_ONE_THREAD),
}


def modes(work):
    """Examples/s of every mode against one thread of one process."""
    figures = []
    for size in _sizes():
        folder, commands = _data(work, size), dict(MODES)
        if 500000 <= size <= 2000000:
            few = "--max_steps=12", *_ARTICLE
            commands["whole tables all-reduced"] = (*MODES[_RANKS], *few)
        rates = {name: [] for name in commands}
        for i, (name, command) in itertools.product(range(FLAGS.rounds), commands.items()):
            rates[name].append(_rate_of(_train(work, folder, command=command)))
            logging.info("%s features, round %d, %s: %.0f/s", size, i + 1, name, rates[name][-1])
        pairs = [(name, _ONE) for name in MODES if name != _ONE]
        pairs += [(_RANKS, name) for name in commands if name not in MODES]
        for name, other in pairs:
            of_rounds = list(zip(rates[name], rates[other]))
            figures.append(_figure(f"{name}, {size:,} features", other, of_rounds))
    return figures


def pipe(work):
    """Examples/s of train.py from a FIFO, as in SageMaker's Pipe mode, against the files."""
    size = _sizes()[0]
    folder = _data(work, size)
    files = sorted((folder / "tfrecords").glob("*.tfrecords"))
    config = {"training": {"TrainingInputMode": "Pipe"}}

    sizes = f"--feature_size={size}", "--field_size=39"

    def from_fifo():
        with tempfile.TemporaryDirectory() as job:
            path = pathlib.Path(job) / "input"
            (path / "config").mkdir(parents=True)
            (path / "data").mkdir()
            (path / "config" / "inputdataconfig.json").write_text(json.dumps(config))
            os.mkfifo(path / "data" / "training_0")
            feeder = subprocess.Popen(
                f"exec cat {' '.join(map(str, files))} > {path}/data/training_0", shell=True
            )
            try:
                _run(*_TRAIN, *_words(work, "--pipe_mode", f"--input_dir={path}", *sizes))
            finally:
                feeder.kill()
                feeder.wait()
        return _rate_of(json.loads((work / "model" / "report.json").read_text()))

    from_files = lambda: _rate_of(_train(work, folder, *sizes))
    return [_in_turn("training from a FIFO", from_fifo, "from files", from_files)]


def reading(work):
    """Records/s of the input pipeline against the ways that public examples read."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    from deepfm.config import InputConfig
    from deepfm.data import datasets, input_pipeline, records
    from deepfm.kernels import compiled

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    feature_size = 117581
    folder = _data(work, feature_size)
    schema = records.Schema(39, feature_size)
    files = {"tfrecord": str(folder / "tfrecords"), "libsvm": str(folder / "train.libsvm")}

    def ours(data_format):
        data = datasets.find(files[data_format], "training_data_dir")
        config = InputConfig(_batch(), ops=compiled.COMPILED if compiled.built() else None)
        return _rate(input_pipeline.make_input_fn(data, schema, config), FLAGS.rows)

    def map_then_batch():
        spec = {
            "label": tf.io.FixedLenFeature([], tf.float32),
            "ids": tf.io.FixedLenFeature([39], tf.int64),
            "values": tf.io.FixedLenFeature([39], tf.float32),
        }
        path = str(next((folder / "tfrecords").glob("*.tfrecords")))
        dataset = tf.data.TFRecordDataset(path).map(
            lambda record: tf.io.parse_single_example(record, spec), num_parallel_calls=2
        )
        return dataset.batch(_batch()).prefetch(2)

    def per_line():
        """The decoder of the article's code: strings split and converted a line at a time."""

        def decode(line):
            columns = tf.compat.v1.string_split([line], " ")
            labels = tf.strings.to_number(columns.values[0], tf.float32)
            pairs = tf.compat.v1.string_split(columns.values[1:], ":")
            ids_and_values = tf.reshape(pairs.values, pairs.dense_shape)
            ids, values = tf.split(ids_and_values, 2, axis=1)
            ids = tf.strings.to_number(ids, tf.int64)
            return ids, tf.strings.to_number(values, tf.float32), labels

        dataset = tf.data.TextLineDataset(files["libsvm"]).map(decode, num_parallel_calls=2)
        return dataset.batch(_batch()).prefetch(2)

    return [
        _in_turn(
            "input, TFRecord", lambda: ours("tfrecord"),
            "map-then-batch", lambda: _rate(map_then_batch, 100000),
        ),
        _in_turn(
            "input, LibSVM", lambda: ours("libsvm"),
            "per-line decoder", lambda: _rate(per_line, 50000),
        ),
    ]  # fmt: skip


def _rate(input_fn, rows):
    """Records per second that an input_fn yields, over at least `rows` records or its end."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        batch = v1.data.make_one_shot_iterator(input_fn()).get_next()
        with v1.Session() as session:
            step = session.make_callable(tf.shape(tf.nest.flatten(batch)[0])[0])
            count = 0
            step()  # opens the files
            started = time.monotonic()
            try:
                while count < rows:
                    count += step()
            except tf.errors.OutOfRangeError:
                pass
            return count / (time.monotonic() - started)


def conversion(work):
    """Rows/s of the converter, whole commands, against the usual loop over tf.train.Example."""
    folder = _data(work, 117581)

    def convert(workers):
        source, target = folder / "train.libsvm", work / "converted"
        return FLAGS.rows / _convert(source, target, f"--num_workers={workers}")

    def example_loop():
        script = work / "example_loop.py"
        script.write_text(_EXAMPLE_LOOP)
        rows = FLAGS.rows // 5
        return rows / _seconds(script, folder / "train.libsvm", work / "loop.tfrecords", rows)

    return [
        _in_turn("conversion", lambda: convert(1), "tf.train.Example loop", example_loop),
        _in_turn("conversion, 2 workers", lambda: convert(2), "1 worker", lambda: convert(1)),
    ]


def tools(work):
    """Rows/s per core of the tools that prepare data, and what a second worker adds.

    CPU time of whole commands, less that of the same commands with a hundredth of the rows.
    """
    folder = _data(work, 117581)
    inputs = {rows: _raw_inputs(folder, rows) for rows in (FLAGS.rows, FLAGS.rows // 100)}
    out = f"--output_dir={work}/prepared"
    commands = {
        "libsvm_to_tfrecord": lambda of: [f"--input={of['libsvm']}", "--feature_size=117581"],
        "libsvm_to_tfrecord, LibFFM": lambda of: [f"--input={of['libffm']}", "--field_size=39"],
        "libsvm_to_tfrecord, LibFFM, --multi_valued": lambda of: [
            f"--input={of['libffm']}", "--field_size=39", "--multi_valued"
        ],
        "prepare_criteo": lambda of: [f"--input={of['criteo']}"],
        "rebalance": lambda of: [f"--input={of['tfrecord']}", "--num_files=4"],
    }  # fmt: skip

    def run(name, rows, workers=1):
        """(CPU-seconds, seconds) of a tool."""
        shutil.rmtree(work / "prepared", ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = _seconds(
            "-m", f"data_tools.{name.partition(',')[0]}", *commands[name](inputs[rows]), out,
            f"--num_workers={workers}",
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(after[:2]) - sum(before[:2]), seconds

    def per_core(name):
        few = FLAGS.rows // 100
        return (FLAGS.rows - few) / (run(name, FLAGS.rows)[0] - run(name, few)[0])

    def rate(name, workers):
        return FLAGS.rows / run(name, FLAGS.rows, workers)[1]

    first, *others = commands
    figures = [
        _in_turn(f"{name}, rows/s per core", lambda name=name: per_core(name), first,
                 lambda: per_core(first))
        for name in others
    ]  # fmt: skip
    return figures + [
        _in_turn(f"{name}, 2 workers", lambda name=name: rate(name, 2), "1 worker",
                 lambda name=name: rate(name, 1))
        for name in ("prepare_criteo", "rebalance")
    ]  # fmt: skip


def _raw_inputs(folder, rows):
    """{format: path} of so many rows: LibSVM, LibFFM, TFRecord, and raw ones as Criteo's are."""
    paths = {kind: folder / f"raw-{rows}.{kind}" for kind in ("libsvm", "libffm", "criteo")}
    paths["tfrecord"] = folder / f"raw-{rows}"
    if not (paths["tfrecord"] / "dataset.json").exists():  # which is written last
        with open(folder / "train.libsvm") as lines, open(paths["libsvm"], "w") as libsvm, open(
            paths["libffm"], "w"
        ) as libffm:
            for line in itertools.islice(lines, rows):
                label, *pairs = line.split()
                libsvm.write(line)
                named = " ".join(f"{field}:{pair}" for field, pair in enumerate(pairs))
                libffm.write(f"{label} {named}\n")
        _write_criteo(paths["criteo"], rows)
        _convert(paths["libsvm"], paths["tfrecord"], "--feature_size=117581")
    return paths


def _write_criteo(path, rows):
    """Rows as Criteo's: integers of a long tail, and categories of few and of many kinds."""
    random = np.random.RandomState(1)
    with open(path, "w") as f:
        for _ in range(-(-rows // 10000)):
            n = min(10000, rows)
            rows -= n
            integers = np.floor(np.exp(random.randn(n, 13) * 2)).astype(int).astype(str)
            kinds = np.floor(10 ** random.uniform(1, 6, 26)).astype(int)
            kinds = np.floor(kinds * random.rand(n, 26) ** 3).astype(np.uint32)
            texts = np.char.mod("%08x", kinds * np.uint32(2654435761) + np.arange(26, dtype="u4"))
            cells = np.concatenate([integers, texts], axis=1)
            cells[random.rand(n, 39) < 0.1] = ""
            labels = (random.rand(n) < 0.25).astype(int).astype(str)
            f.writelines(f"{y}\t" + "\t".join(row) + "\n" for y, row in zip(labels, cells))


_EXAMPLE_LOOP = """
import itertools, sys
import tensorflow as tf

source, target, rows = sys.argv[1:]
with open(source) as lines, tf.io.TFRecordWriter(target) as writer:
    for line in itertools.islice(lines, int(rows)):
        label, *pairs = line.split()
        ids, values = zip(*(pair.split(":") for pair in pairs))
        feature = {
            "label": tf.train.Feature(float_list=tf.train.FloatList(value=[float(label)])),
            "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, ids))),
            "values": tf.train.Feature(float_list=tf.train.FloatList(value=map(float, values))),
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writer.write(example.SerializeToString())
"""


def floor(work):
    """CPU-seconds per million examples of train.py against the floor: the same matrix products,
    gathers, sums of each row's gradients and row updates by themselves, in one session."""
    figures = []
    for size in _sizes():
        folder, pairs = _data(work, size), []
        for i in range(FLAGS.rounds):
            steps = f"--max_steps={_FLOOR_STEPS}"
            found = _details([_train(work, folder, steps, "--num_epochs=9")])
            pairs.append((found["cpu_seconds_per_million"], _floor(folder, size)))
            logging.info("%s features, round %d: %.1f, floor %.1f", size, i + 1, *pairs[-1])
        name = f"CPU-seconds per million examples, {size:,} features"
        figures.append(_figure(name, "floor", pairs, unit=" s"))
    return figures


_FLOOR_STEPS = 600


def _floor(folder, feature_size, embedding_size=32, layers=(128, 64, 32, 1)):
    """CPU-seconds per million examples of what no step can do without."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    from deepfm import distribution
    from deepfm.config import ModeFlags

    v1 = tf.compat.v1
    v1.logging.set_verbosity(v1.logging.ERROR)
    threads = distribution.local(ModeFlags()).session_config
    ids = np.load(_arrays(folder))["ids"]
    starts = range(0, len(ids) - _batch() + 1, _batch())
    batches = [np.unique(ids[i : i + _batch()], return_inverse=True) for i in starts]
    batches = [  # distinct ids, and for each place of the batch which of them it has
        (distinct.astype(np.int32), np.stack([np.arange(len(where)), where], 1).astype(np.int32))
        for distinct, where in batches
    ]
    with tf.Graph().as_default(), v1.Session(config=threads) as session:
        dataset = tf.data.Dataset.from_generator(
            lambda: batches, (tf.int32, tf.int32), ([None], [None, 2])
        )
        distinct, places = v1.data.make_one_shot_iterator(dataset.repeat().prefetch(2)).get_next()
        uses = tf.cast(tf.stack([tf.shape(places)[0], tf.size(distinct)]), tf.int64)
        ones, updates = tf.ones([_batch() * 39]), []

        def times_places(rows, adjoint=False):
            return tf.raw_ops.SparseTensorDenseMatMul(
                a_indices=places, a_values=ones, a_shape=uses, b=rows, adjoint_a=adjoint
            )

        def table(name, width):
            """A table's rows of the batch; its two moments and itself get new rows."""
            fill = v1.constant_initializer(0.01)
            variables = [
                v1.get_variable(
                    f"{name}_{i}", [feature_size, width], initializer=fill, use_resource=True
                )
                for i in range(3)
            ]
            rows = [v.sparse_read(distinct) for v in variables]

            def update(gradients):
                sums = times_places(gradients, adjoint=True)
                scatter = tf.raw_ops.ResourceScatterUpdate
                for variable, old in zip(variables[1:], rows[1:]):
                    new = old + sums
                    updates.append(scatter(resource=variable.handle, indices=distinct, updates=new))
                updates.append(
                    tf.raw_ops.ResourceScatterSub(
                        resource=variables[0].handle, indices=distinct, updates=new
                    )
                )

            return times_places(rows[0]), update

        weights, update_weights = table("w", 1)
        embeddings, update_embeddings = table("v", embedding_size)
        width = 39 * embedding_size
        inputs, kernels = [tf.reshape(embeddings, [-1, width])], []
        for i, units in enumerate(layers):
            shape = [width, units]
            kernels.append(v1.get_variable(f"k_{i}", shape, use_resource=True))
            inputs.append(tf.matmul(inputs[-1], kernels[-1]))
            width = units
        grad = inputs.pop()
        for x, kernel in zip(reversed(inputs), reversed(kernels)):
            by_kernel = tf.transpose(tf.matmul(grad, x, transpose_a=True))
            updates.append(kernel.assign_sub(1e-9 * by_kernel).op)
            grad = tf.matmul(grad, kernel, transpose_b=True)
        update_embeddings(tf.reshape(grad, [-1, embedding_size]))
        update_weights(weights)
        session.run(v1.global_variables_initializer())
        step = session.make_callable(tf.group(updates))
        for _ in range(30):
            step()
        before = time.process_time()
        for _ in range(_FLOOR_STEPS):
            step()
        return 1e6 * (time.process_time() - before) / (_FLOOR_STEPS * _batch())


def start(work):
    """Seconds from the start of train.py to its first step, of each size against the smallest."""
    smallest, *others = sorted(_sizes())
    figures = []
    for size in others or [smallest]:
        pairs = [(_start(work, size), _start(work, smallest)) for _ in range(FLAGS.rounds)]
        name, other = f"start to the first step, {size:,} features", f"{smallest:,} features"
        figures.append(_figure(name, other, pairs, unit=" s"))
    return figures


def _start(work, feature_size):
    folder, began, first = _data(work, feature_size), time.monotonic(), None
    process = subprocess.Popen(
        [*_TRAIN, *_words(work, f"--training_data_dir={folder}/tfrecords")]
        + ["--max_steps=1", "--log_steps=1"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if " step 1 " in line:
            first = time.monotonic() - began
    if process.wait() or first is None:
        sys.exit("train.py has not taken a step")
    return first


def extras(work):
    """Examples/s of train.py with progress lines and summaries against none."""
    size, steps = _sizes()[0], ["--max_steps=2000", "--num_epochs=99"]
    off = [*steps, "--log_steps=1000000000", f"--save_checkpoints_secs={1 << 30}"]
    name = f"training, {size:,} features, all shown"
    return [_pair(work, size, name, steps, "nothing shown", off)]


def compiled(work):
    """train.py with the compiled kernels against TensorFlow's own ops alone."""
    steps, other = f"--max_steps={FLAGS.rows // _batch()}", "without compiled kernels"
    return [
        _pair(work, n, f"training, {n:,} features", [steps], other, [steps, "--nocompiled_kernels"])
        for n in _sizes()
    ]


def safety(work):
    """Examples/s of train.py with a checkpoint every 60 s against none, at 1,000,000 features."""
    every = lambda seconds: [  # two minutes or so
        "--max_steps=8000", "--num_epochs=1000", f"--save_checkpoints_secs={seconds}",
    ]  # fmt: skip
    name = "training, 1,000,000 features, a checkpoint every 60 s"
    return [_pair(work, 1000000, name, every(60), "none until the end", every(1 << 30))]


MEASURES = {
    "training": training,
    "modes": modes,
    "floor": floor,
    "start": start,
    "extras": extras,
    "kernels": compiled,
    "safety": safety,
    "pipe": pipe,
    "input": reading,
    "conversion": conversion,
    "tools": tools,
}

if __name__ == "__main__":
    run_program(main)
