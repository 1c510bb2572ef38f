"""Runs the programs of two checkouts and compares their results, bit for bit.

    .venv/bin/python tests/same_results.py BEFORE [AFTER] [--only=tools,local]

It shows that a refactoring has changed nothing else. It knows the checkouts (AFTER defaults to this
folder) only by their command lines, and runs them in its own Python. BEFORE makes the data and the
model that both use. A case is a few commands; their exit codes, texts and files are compared, with
tensors of checkpoints and predictions of exports byte by byte. What differs between runs of BEFORE
itself is reported as not deterministic; its tensors need only agree to 1e-6 of the largest number.
Exit codes: 0 all the same, 1 with a sentence per difference, 2 bad flags.
"""

# ruff: noqa: E501

import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", PYTHONWARNINGS="ignore", CUDA_VISIBLE_DEVICES="")

import numpy as np
import psutil

LIMIT = 180  # seconds for a command
TOLERANCE = 1e-6  # of a tensor's largest number, where runs of one checkout differ
SHOWN = 20  # sentences for a case
REPEATS = 2  # more runs of BEFORE, to find out whether they do

# What may differ in any case: times, speeds, and names that are drawn.
TIMES_OF_REPORTS = (
    "seconds", "training_seconds", "examples_per_second", "input_wait_share", "cpu_utilization",
    "host_cpu_utilization", "gpu_utilization", "peak_rss_bytes", "verdict",
)  # fmt: skip
TIMES_OF_LINES = (
    (r"\b[IWEF]\d{4} [\d:.]+ +\d+ \S+\] |\b\d\d:\d\d:\d\d ", ""),  # of a log
    (r"(step \d+  loss \S+).*", r"\1"),  # speeds and what is left
    (r".*(-bound|Bound by one process|Idle GPU) \(.*\n", ""),  # the verdict on them
    (r"\d[\d.,]* (seconds|s)\b", "TIME"),
    (r"\d[\d.,]*( \w+)?/s\b", "SPEED"),
    (r"(servable/|\"export\": \")\d{10}\b", r"\1N"),  # the time gives an export its name
)

PYTHON = sys.executable
MPI = "mpirun --allow-run-as-root --oversubscribe -bind-to none -np 2"
GLOO = f"{os.path.dirname(PYTHON)}/horovodrun --gloo -np 2"
PROGRAMS = {  # others are data tools
    "train": [PYTHON, "train.py"],
    "horovod": [*GLOO.split(), PYTHON, "train.py"],
    "mpi": [*MPI.split(), PYTHON, "train.py"],
    "local_cluster": [PYTHON, "scripts/local_cluster.py"],
    "ps": [PYTHON, "scripts/local_cluster.py", "--num_servers=1", "--num_workers=0", "--"],
}
MANY = ("horovod", "mpi", "ps")  # their processes write lines in any order

# `group.case  command ; command`. $data is the folder of what both sides use, $out that of a case's
# results. `copy model` takes BEFORE's model of 100 steps. Commands of errors end with a code not 0.
WORDS = {
    "small": "--embedding_size=4 --deep_layers=16,8 --batch_size=32 --num_epochs=10",
    "job": "$small --max_steps=200 --training_data_dir=$data/train --val_data_dir=$data/val $model",
    "model": "--model_dir=$out/model",
    "served": "--servable_model_dir=$out/servable",
    "multi": "--training_data_dir=$data/multi --val_data_dir=$data/multi",
    "clicks": "--training_data_dir=$data/criteo/train --val_data_dir=$data/criteo/valid",
    "dropout": "--dropout=0.5 --l2_reg=0.001",
    "norm": "--batch_norm --clip_norm=0.1",
    "tower": "--distribution=tower --replicas_per_process=2",
    "mirrored": "--distribution=mirrored --replicas_per_process=2",
    "synthetic": "make_synthetic --output_dir=$out/raw --train_rows=6000 --val_rows=1000 --test_rows=1000"
    " --feature_size=2000 --field_size=8 --numeric_fields=3",
    "convert": "libsvm_to_tfrecord --input=$data/raw/*.libsvm --output_dir=$out/train",
    "criteo": "prepare_criteo --input=$data/clicks.tsv --output_dir=$out --min_count=3",
    "new_clicks": "prepare_criteo --test_input=$data/clicks.tsv --output_dir=$out"
    " --feature_map=$data/criteo/feature_map.json",
    "rebalance": "rebalance --input=$data/train --output_dir=$out/train",
}
TABLE = """
data.raw                     $synthetic
data.train                   libsvm_to_tfrecord --input=$out/raw/*.libsvm --output_dir=$out/train --feature_size=2000
data.val                     libsvm_to_tfrecord --input=$out/raw/val.libsvm --output_dir=$out/val --feature_size=2000
data.test                    libsvm_to_tfrecord --input=$out/raw/test.libsvm --output_dir=$out/test --feature_size=2000
data.multi                   libsvm_to_tfrecord --input=$out/multi.ffm --output_dir=$out/multi --multi_valued
data.criteo                  prepare_criteo --input=$out/clicks.tsv --output_dir=$out/criteo --min_count=3
data.model                   train $job --max_steps=100

errors.unknown_flag          train --learning_rat=1
errors.no_flag               train model
errors.bad_value             train --dropout=1.5 $model
errors.no_data               train $job --training_data_dir=$data/none
errors.no_model              train --task_type=eval --val_data_dir=$data/val $model
errors.field_size            train $job --field_size=9
errors.feature_size          train $job --training_data_dir=$data/big_id.libsvm --feature_size=9
errors.cut_file              train $job --training_data_dir=$data/cut.tfrecords --feature_size=2000
errors.bad_line              train $job --training_data_dir=$data/bad.libsvm --feature_size=2000
errors.replicas              train $job --distribution=tower --replicas_per_process=500
errors.global_batch          train $job $tower --global_batch_size=25
errors.convert_bad_line      $convert --input=$data/bad.libsvm
errors.convert_big_id        $convert --feature_size=100
errors.convert_no_input      libsvm_to_tfrecord --output_dir=$out/train
errors.convert_over_others   $convert --output_dir=$data/train
errors.criteo_bad_row        $criteo --input=$data/bad.libsvm
errors.inspect_cut_file      inspect_dataset --data=$data/cut.tfrecords
errors.rebalance_rates       $rebalance --positive_share=0.5 --negative_rate=0.5
errors.synthetic_sizes       make_synthetic --output_dir=$out --feature_size=10
errors.cluster_no_flags      local_cluster
errors.cluster_no_data       ps $job --training_data_dir=$data/none

tools.synthetic              $synthetic
tools.synthetic_rare         $synthetic --rare --zipf=1.1 --positive_rate=0.5 --seed=2
tools.convert                $convert
tools.convert_two_workers    $convert --num_workers=2 --num_files=3 --compress
tools.convert_padded         $convert --pad --field_size=10 --id_offset=1
tools.convert_hashed         $convert --hash_buckets=500
tools.convert_multi_valued   libsvm_to_tfrecord --input=$data/multi.ffm --output_dir=$out --multi_valued
tools.criteo                 $criteo
tools.criteo_two_workers     $criteo --num_workers=2 --split_by=order
tools.criteo_libsvm          $criteo --output_format=libsvm --integers=scaled
tools.criteo_given_map       $new_clicks
tools.avazu                  $criteo --input=$data/clicks.csv --dataset=avazu
tools.rebalance              $rebalance --num_files=3
tools.rebalance_two_workers  $rebalance --positive_share=0.5 --oversample --num_workers=2 --seed=3
tools.rebalance_libsvm       $rebalance --input=$data/raw/*.libsvm --noshuffle --negative_rate=0.5 --compress
tools.inspect                inspect_dataset --data=$data/train ; inspect_dataset --data=$data/multi
tools.inspect_json           inspect_dataset --data=$data/raw/*.libsvm --json

local.default                train $job $served
local.dropout                train $job $dropout
local.plain_ops              train $job --nocompiled_kernels --batch_norm
local.plain_dropout          train $job --nocompiled_kernels $dropout
local.multi_valued           train $job $multi $served
local.multi_valued_plain     train $job $multi --nocompiled_kernels --pooling=max
local.libsvm                 train $job --training_data_dir=$data/raw/*.libsvm --feature_size=2000 --optimizer=ftrl
local.criteo                 train $job $clicks $served --optimizer=adagrad
local.whole_table            train $job --l2_scope=table --nolazy_updates --clip_norm=0.1 --cache=memory --loss_type=square_loss
local.best                   train $job $served --optimizer=momentum --learning_rate=0.05 --eval_every_steps=40 --export=best --best_metric=log_loss --learning_rate_decay_on_plateau=0.5
local.resumed                copy model ; train $job
tower.dropout                train $job $tower $dropout
tower.batch_norm             train $job $tower $norm
mirrored.dropout             train $job $mirrored $dropout
mirrored.batch_norm          train $job $mirrored $norm
horovod.dropout              horovod $job $dropout
horovod.batch_norm           horovod $job $norm
horovod.mpi                  mpi $job $dropout
ps.dropout                   ps $job $dropout
ps.batch_norm                ps $job $norm

jobs.infer                   copy model ; train --task_type=infer --infer_data_dir=$data/test $model
jobs.infer_horovod           copy model ; horovod --task_type=infer --infer_data_dir=$data/test $model
jobs.eval                    copy model ; train --task_type=eval --val_data_dir=$data/test $model
jobs.eval_horovod            copy model ; horovod --task_type=eval --val_data_dir=$data/test $model
jobs.export                  copy model ; train --task_type=export $served $model
"""
HELP = (
    "train", "local_cluster", "inspect_dataset", "libsvm_to_tfrecord", "make_synthetic",
    "prepare_criteo", "rebalance",
)  # fmt: skip
CASES = {
    **{f"help.{program}": [[program, "--help"], [program, "--helpfull"]] for program in HELP},
    **{
        case: [command.split() for command in commands.split(" ; ")]
        for case, commands in (line.split(None, 1) for line in TABLE.splitlines() if line)
    },
}


class Side(NamedTuple):
    """A checkout, and where the cases find their data and leave their results."""

    name: str
    checkout: str
    data: str
    results: str


class Failed(Exception):
    """A command has ended as it should not."""


def write_inputs(folder):
    """Writes the input that no program of the project makes."""
    draw = np.random.RandomState(1)
    label = lambda: str(draw.randint(2))
    blank = lambda text: "" if draw.rand() < 0.1 else text
    category = lambda: blank(f"{draw.zipf(1.5) * 2654435761 % 2**32:08x}")
    integer = lambda: blank(str(int(draw.lognormal(2, 2)) - 2))

    def pair(field):
        return f"{field}:{50 * field + draw.randint(50)}:{draw.rand():.3f}"

    def clicks():
        return [label(), *(integer() for _ in range(13)), *(category() for _ in range(26))]

    def avazu(i):
        hour = f"1410{21 + i // 500}{i % 24:02}"
        return [str(i), label(), hour, *(category() for _ in range(21))]

    def values():
        return [pair(field) for field in range(4) for _ in range(draw.randint(4))]

    lines = {
        "clicks.tsv": ["\t".join(clicks()) for _ in range(4000)],
        "clicks.csv": [",".join(avazu(i)) for i in range(3000)],
        "multi.ffm": [" ".join([label(), *values()]) for _ in range(3000)],
        "bad.libsvm": ["0 1:1 2:1", "1 1:1 2:x"],
        "big_id.libsvm": ["0 1:1 2:1", "1 1:1 10:1"],
    }
    for name, rows in lines.items():
        (pathlib.Path(folder) / name).write_text("\n".join(rows) + "\n")


def end_children(of=None):
    """Ends all processes that this one, or another, has started, and those that they have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def execute(words, cwd=None):
    """(exit code, standard output, standard error) of a command, which is ended at LIMIT."""
    ours = re.compile("SM_|SAGEMAKER|TF_CONFIG|HOROVOD_|OMPI_|PMI|PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not ours.match(name)}
    process = subprocess.Popen(
        words, cwd=cwd, env=env, start_new_session=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said, logged = process.communicate(timeout=LIMIT)
        return process.returncode, said, logged
    except subprocess.TimeoutExpired:
        raise Failed(f"'{' '.join(words)}' took more than {LIMIT} s") from None
    finally:
        end_children(process.pid)
        process.kill()
        process.wait()


def words_of(words, folders):
    """The words of a command in TABLE, with placeholders filled in."""
    for word in words:
        if word[1:] in WORDS and word[0] == "$":
            yield from words_of(WORDS[word[1:]].split(), folders)
        else:
            yield functools.reduce(
                lambda x, name: x.replace(f"${name}", folders[name]), folders, word
            )


def run(case, side, out):
    """Runs the commands of a case; {what: value}, of their texts and of the files they leave."""
    os.makedirs(out, exist_ok=True)
    found = {}
    for i, command in enumerate(CASES[case]):
        program, *words = words_of(command, {"data": side.data, "out": out})
        if program == "copy":
            shutil.copytree(f"{side.data}/{words[0]}", f"{out}/{words[0]}")
            continue
        start = PROGRAMS.get(program, [PYTHON, "-m", f"data_tools.{program}"])
        code, said, logged = execute([*start, *words], side.checkout)
        if bool(code) != case.startswith("errors."):
            last = "\n".join(logged.strip().splitlines()[-10:])
            raise Failed(f"'{' '.join(command)}' ended with code {code}: {last}")
        lines = stable(logged, side, out).splitlines()
        found[f"exit code {i}"] = str(code)
        found[f"standard error {i}"] = "\n".join(sorted(lines) if program in MANY else lines)
        if words == ["--helpfull"]:  # whichever module declares a flag
            said = "\n".join(sorted(re.findall(r"^ .*", said, re.M)))
        found[f"standard output {i}"] = stable(said, side, out)
    return found


def stable(text, side, out):
    """A text without times, and with the folders of a side by general names."""
    for path, name in ((out, "OUT"), (side.data, "DATA"), (side.checkout, "CHECKOUT")):
        text = text.replace(path, name)
    return functools.reduce(lambda x, change: re.sub(*change, x), TIMES_OF_LINES, text)


def files(side, out):
    """{what: value} of the files of a folder: tensors, scalars, predictions, texts, bytes."""
    import tensorflow as tf

    tf.compat.v1.logging.set_verbosity("ERROR")
    found = {}
    for path in sorted(glob.glob(f"{out}/**", recursive=True)):
        name = stable(os.path.relpath(path, out), side, out)
        if os.path.isdir(path) or re.search(r"\.data-\d+-of-\d+$|\.meta$", name):
            continue
        if name.endswith(".index"):
            reader = tf.train.load_checkpoint(path[: -len(".index")])
            for tensor in reader.get_variable_to_shape_map():
                found[f"{name}: {tensor}"] = np.asarray(reader.get_tensor(tensor))
        elif ".tfevents." in name:
            for event in tf.compat.v1.train.summary_iterator(path):
                for value in event.summary.value:
                    if not value.tag.startswith("speed/"):
                        what = f"{os.path.dirname(name)}/{value.tag} at step {event.step}"
                        found[what] = repr(value.simple_value)
        elif name.endswith("saved_model.pb"):
            predicted = served(os.path.dirname(path), side.data)
            found.update({f"{name}: {what}": value for what, value in predicted.items()})
        elif re.search(r"(report\S*|evaluations|extra/deepfm)\.json$", name):
            with open(path) as f:
                content = json.load(f)
            if isinstance(content, dict):
                content = {k: v for k, v in content.items() if k not in TIMES_OF_REPORTS}
            found[name] = stable(json.dumps(content, indent=1), side, out)
        else:
            with open(path, "rb") as f:
                found[name] = f.read().replace(out.encode(), b"OUT")
    return found


def served(export, data):
    """{what: value} of a SavedModel's signatures and what it predicts for 1,000 records."""
    import tensorflow as tf

    v1 = tf.compat.v1
    found = {}
    with v1.Session(graph=tf.Graph()) as session:
        signatures = v1.saved_model.load(session, ["serve"], export).signature_def
        raw = signatures["serving_default"].inputs
        fields = raw["feat_ids"].tensor_shape.dim[1].size
        folder = "multi" if "feat_counts" in raw else "test" if fields == 8 else "criteo/train"
        paths = sorted(glob.glob(f"{data}/{folder}/*.tfrecords"))
        records = [x for path in paths for x in v1.io.tf_record_iterator(path)][:1000]
        examples = [tf.train.Example.FromString(x).features.feature for x in records]
        feeds = {"examples": records}
        if "feat_counts" not in raw:
            feeds["feat_ids"] = [x["ids"].int64_list.value for x in examples]
            feeds["feat_vals"] = [x["values"].float_list.value for x in examples]
        for name, signature in sorted(signatures.items()):
            for way, tensors in (("input", signature.inputs), ("output", signature.outputs)):
                for key, tensor in sorted(tensors.items()):
                    size = [dim.size for dim in tensor.tensor_shape.dim]
                    found[f"{name} {way} {key}"] = f"{tf.as_dtype(tensor.dtype).name} {size}"
            if set(signature.inputs) <= set(feeds):
                feed = {x.name: feeds[key] for key, x in signature.inputs.items()}
                found[f"{name} prob"] = session.run(signature.outputs["prob"].name, feed)
    return found


def differences(before, after):
    """{what: a sentence} of what differs between the results of a case."""
    found = {}
    for what in sorted({*before, *after}):
        old, new = before.get(what), after.get(what)
        if old is None or new is None:
            found[what] = f"{what} is there {'after' if old is None else 'before'} alone"
        elif isinstance(old, np.ndarray):
            if (old.dtype, old.shape) != (new.dtype, new.shape):
                found[what] = f"{what} was {old.dtype}{old.shape}, is {new.dtype}{new.shape}"
            elif old.tobytes() != new.tobytes():
                by = np.max(np.abs(old.astype(float) - new.astype(float)))
                found[what] = (
                    f"{what}: {np.sum(old != new)} of {old.size} differ, by up to {by:.3g}"
                )
        elif old != new:
            if isinstance(old, bytes):
                old, new = old.decode("latin1"), new.decode("latin1")
            lines = zip(f"{old}\n(end)".split("\n"), f"{new}\n(end)".split("\n"))
            number, (x, y) = next((i, z) for i, z in enumerate(lines, 1) if z[0] != z[1])
            found[what] = f"{what}: line {number} was {x[:200]!r}, is {y[:200]!r}"
    return found


def close(old, new):
    """Whether results that are not deterministic are near enough: tensors to TOLERANCE."""
    if not isinstance(old, np.ndarray):
        return True
    near = TOLERANCE * np.max(np.abs(old), initial=0)
    return old.shape == np.shape(new) and np.allclose(old, new, rtol=0, atol=near)


def compare(before, case, old, new):
    """(a word on how a case of both sides compares, sentences on what differs)."""
    if "failure" in old or "failure" in new:
        return "DIFFERENT", [x["failure"] for x in (old, new) if "failure" in x]
    found, unsteady = differences(old, new), set()
    for i in range(REPEATS if found else 0):
        unsteady.update(differences(old, outcome(before, case, f".again{i}")[0]))
    found = [
        said for x, said in found.items() if x not in unsteady or not close(old[x], new.get(x))
    ]
    if unsteady:
        say(f"Not deterministic in {case}, before: {', '.join(sorted(unsteady))}")
    return ("DIFFERENT" if found else "not deterministic" if unsteady else "same"), found


def outcome(side, case, again=""):
    """({what: value} of a case, seconds that it took); its files are deleted."""
    out, start = f"{side.results}/{case}{again}", time.time()
    shutil.rmtree(out, ignore_errors=True)
    try:
        found = {**run(case, side, out), **files(side, out)}
    except Failed as error:
        return {"failure": f"{side.name}: {error}"}, time.time() - start
    except Exception:  # a fault of this program; the other cases go on
        return {"failure": f"{side.name}: {traceback.format_exc()}"}, time.time() - start
    shutil.rmtree(out)
    return found, time.time() - start


def prepare(side):
    """Makes the data and the model that both sides use."""
    os.makedirs(side.data)
    write_inputs(side.data)
    for case in CASES:
        if case.startswith("data."):
            run(case, side, side.data)
    part = pathlib.Path(sorted(glob.glob(f"{side.data}/train/*.tfrecords"))[0])
    pathlib.Path(side.data, "cut.tfrecords").write_bytes(part.read_bytes()[:5000])


def compare_all(cases, before, after):
    """Runs the cases, two at a time; the sentences on what differs."""
    start, sentences = time.time(), []
    prepare(before)
    say(f"{time.time() - start:4.0f} s  the data are there; {len(cases)} cases follow")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        submit = functools.partial(pool.submit, outcome)
        running = [(case, submit(before, case), submit(after, case)) for case in cases]
        for case, *futures in running:
            (old, seconds), (new, more) = (future.result() for future in futures)
            word, found = compare(before, case, old, new)
            if len(found) > SHOWN:
                found[SHOWN:] = [f"{len(found) - SHOWN} more results differ"]
            sentences += [f"{case}: {sentence}." for sentence in found]
            size = f"{len(new)} results, {seconds:.1f} + {more:.1f} s"
            say(f"{time.time() - start:4.0f} s  {word:<18} {case:<30} {size}")
    return sentences


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a checkout")
    parser.add_argument("after", nargs="?", default=".", help="another one; default: this folder")
    groups = list(
        dict.fromkeys(case.split(".")[0] for case in CASES if not case.startswith("data."))
    )
    parser.add_argument("--only", default=",".join(groups), help="groups, or cases as local.best")
    args = parser.parse_args()
    only = set(args.only.split(","))
    cases = [case for case in CASES if only & {case, case.split(".")[0]}]
    if only - {*CASES, *groups}:
        parser.error(f"--only={args.only}: take of {', '.join(groups)}, or cases of them")
    if "horovod.mpi" in cases and not shutil.which("mpirun"):
        say("No mpirun here: horovod.mpi is left out.")
        cases.remove("horovod.mpi")
    checkouts = [os.path.realpath(x) for x in (args.before, args.after)]
    for checkout in checkouts:
        if not os.path.exists(f"{checkout}/train.py"):
            parser.error(f"{checkout} is no checkout: it has no train.py")

    temporary = tempfile.mkdtemp(prefix="same_results-")

    def stop(number, _):
        end_children()
        shutil.rmtree(temporary, ignore_errors=True)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what outlives its parent stays ours
    data = f"{temporary}/data"
    before, after = (
        Side(name, checkout, data, f"{temporary}/{name}")
        for name, checkout in zip(("before", "after"), checkouts)
    )
    try:
        sentences = compare_all(cases, before, after)
    except Failed as error:
        sentences = [f"The data of both sides cannot be made: {error}."]
    finally:
        end_children()
        shutil.rmtree(temporary, ignore_errors=True)
    say(*sentences, f"{len(cases)} cases, {len(sentences)} sentences on differences.", sep="\n")
    return int(bool(sentences))


say = functools.partial(print, flush=True)

if __name__ == "__main__":
    sys.exit(main())
