"""Kills training at random moments, in every mode, and counts how often each record was used.

    .venv/bin/python tests/soak_interruptions.py
    .venv/bin/python tests/soak_interruptions.py --modes=ps --configurations=plain --kills=20
    .venv/bin/python tests/soak_interruptions.py --modes=local --kills=10 -- --cache=memory

A cell is a mode of distribution and a configuration of the job. In each, one run is left alone; the
others are killed one to three times, each at a random moment of the run or of its restart, and
started again by the same command until they finish. The flags after `--` are train.py's.

Every record has its own id, whose first-order weight begins at 0. Embeddings and the learning rate
are so small that each prediction stays near 1/2, so SGD moves that weight by rate * 1/2 / B each
time the record is used: the final weights show how often that was. The soak checks

- that each record was used once per epoch; with parameter servers at least once, and again at most
  as many as all processes take in one checkpoint interval, for each SIGKILL;
- except with parameter servers, that every tensor of the checkpoint, the evaluations and the best
  exported model equal those of the run that was left alone, bit for bit;
- that all processes end within a minute of the signal, and the last start exits with 0.

The 150 kills of the default take about 40 minutes on 2 cores. The output is a Markdown table, in
which `lost` and `again` count uses of records. The exit code is 1 if a run had a fault; its log is
shown, or kept with its folder in --output_dir.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from typing import List

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

# isort: split
import numpy as np  # noqa: E402
import psutil  # noqa: E402
from absl import logging  # noqa: E402
from conftest import LAUNCHERS, ROOT, marked, run_tool, wait_until  # noqa: E402

from deepfm.runtime.tf import tf  # noqa: E402

_KNOWN = {  # flag: its values, all of which are the default
    "modes": ("local", "tower", "mirrored", "mpi", "gloo", "ps"),  # mpi and gloo are Horovod
    "configurations": ("plain", "evaluations", "multi_valued", "cache", "no_dataset_json"),
}
_NUMBERS = {  # flag: its default, its help
    "kills": (5, "kills in each cell"),
    "processes": (2, "processes in mpi, gloo and ps (chief and workers)"),
    "rows": (3000, "records to train on, rounded up to divide evenly"),
    "seed": (1, "seed of the data and of the moments of the kills"),
}
_EPOCHS = 2
_BATCH = 16  # records that each process takes in a step
_LAST = 10  # records that each process has left for the last step of an epoch
_INTERVAL = 7  # steps of each process between two checkpoints
_MOVE = 0.00002  # by which a use in a full batch moves the weight
_SHARED = 50  # ids that many records have
_PATIENCE = 60  # seconds after a signal in which all processes have to end
_LIMIT = 300  # seconds of a start
_TRAIN = (
    "--embedding_size=4", "--deep_layers=8,4", "--dropout=0.2", "--embedding_init_stddev=0.001",
    "--l2_reg=0", "--optimizer=sgd", f"--num_epochs={_EPOCHS}", "--shuffle_buffer=500",
    "--log_steps=1000",
)  # fmt: skip
FLAGS = argparse.Namespace()


def _read_flags():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, known in _KNOWN.items():
        parser.add_argument(f"--{name}", nargs="+", default=known, choices=known)
    for name, (default, what) in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--output_dir", help="folder for table.md and runs with faults")
    parser.add_argument("train_flags", nargs="*", help="flags of train.py, after --")
    parser.parse_args(namespace=FLAGS)


def main():
    _read_flags()
    logging.set_verbosity(logging.INFO)
    for number in (signal.SIGTERM, signal.SIGINT):  # either ends the running job
        signal.signal(number, signal.default_int_handler)
    if FLAGS.output_dir:
        os.makedirs(FLAGS.output_dir, exist_ok=True)
    cells = []
    with tempfile.TemporaryDirectory(prefix="deepfm-soak-") as folder:
        data = _Data(pathlib.Path(folder))
        try:
            for mode, configuration in itertools.product(FLAGS.modes, FLAGS.configurations):
                cells.append(Cell(mode, configuration))
                _soak(cells[-1], data, pathlib.Path(folder))
        except KeyboardInterrupt:
            logging.info("Interrupted; the table is of the kills so far.")
            cells[-1].faults += 1
    table = _table(cells)
    print(table)
    if FLAGS.output_dir:
        pathlib.Path(FLAGS.output_dir, "table.md").write_text(table + "\n")
    return int(any(cell.faults for cell in cells))


@dataclasses.dataclass
class Cell:
    """A mode and a configuration, with the results of its runs."""

    mode: str
    configuration: str
    kills: int = 0
    terms: int = 0  # kills that were SIGTERM
    runs: int = 0  # that were killed
    same: int = 0  # runs that ended like the one that was left alone
    lost: int = 0  # uses of records that are missing
    again: int = 0  # uses of records beyond one per epoch
    faults: int = 0  # runs with any fault
    slowest: float = 0.0  # seconds from a signal until all processes had ended
    seconds: float = 0.0


def _table(cells):
    titles = (
        "mode", "configuration", "kills", "of them SIGTERM", "runs", "same end", "lost", "again",
        "faults", "slowest end, s", "all, s",
    )  # fmt: skip
    rows = [titles, ["---"] * len(titles)]
    for cell in cells:
        fields = dataclasses.asdict(cell)
        fields["mode"] = {"mpi": "horovod, MPI", "gloo": "horovod, Gloo"}.get(cell.mode, cell.mode)
        fields["same"] = "" if cell.mode == "ps" else cell.same
        rows.append([f"{x:.1f}" if isinstance(x, float) else str(x) for x in fields.values()])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    kills, runs, faults = (sum(getattr(c, n) for c in cells) for n in ("kills", "runs", "faults"))
    return f"{table}\n\n{kills} kills in {runs} runs; {faults} runs with a fault."


class _Data:
    """The records of each configuration, made when they are first needed.

    Each process has equally many, which fill whole batches and a last one of _LAST records. So in
    every mode, a use moves a weight by _MOVE, or by _MOVE * _BATCH / _LAST.
    """

    def __init__(self, folder):
        share = -(-FLAGS.rows // FLAGS.processes)
        self.rows = FLAGS.processes * (_LAST + 80 * max(-(-(share - _LAST) // 80), 1))
        self._folder = folder

    def flags(self, configuration, folder):
        """Flags of train.py for a run in a folder of its own."""
        name = configuration if configuration in ("multi_valued", "no_dataset_json") else "plain"
        records = self._records(name)
        given = [f"--training_data_dir={records}", f"--model_dir={folder}/model"]
        if configuration == "no_dataset_json":
            given.append(f"--feature_size={self.rows + _SHARED + 1}")
        elif configuration == "cache":
            given.append(f"--cache={folder}/cache")
        elif configuration == "evaluations":
            # With newly drawn labels, the AUC goes up and down, and the rate decays by so little
            # that uses can still be counted, though the bits show it.
            given += [
                f"--val_data_dir={self._records('validation')}", "--eval_every_steps=40",
                "--learning_rate_decay_on_plateau=0.999", "--export=best",
                f"--servable_model_dir={folder}/servable",
            ]  # fmt: skip
        return given

    def _records(self, name):
        """The folder of records of a name."""
        folder = self._folder / name
        if folder.exists():
            return folder
        several, alone = name == "multi_valued", name == "no_dataset_json"
        text, draw = folder.with_suffix(".ffm"), random.Random(f"{FLAGS.seed} {name}")
        with text.open("w") as f:
            for i in range(1, self.rows + 1):  # its own id in one field, shared ones in the other
                shared = range(draw.randrange(4) if several else 1)
                values = [f"1:{self.rows + draw.randint(1, _SHARED)}:1" for _ in shared]
                f.write(" ".join([str(draw.randrange(2)), f"0:{i}:1", *values]) + "\n")
        # With unknown rows: more files than are read at once, equally many for each process.
        files = 5 * FLAGS.processes if alone else 3
        run_tool(
            "libsvm_to_tfrecord", f"--input={text}", f"--output_dir={folder}",
            f"--num_files={files}", *["--multi_valued"] * several, fresh=True,
        ).check_returncode()  # fmt: skip
        if alone:
            (folder / "dataset.json").unlink()
        return folder


def count_uses(weights, most=7):
    """How often records were used.

    Args:
        weights: float32 [n], first-order weights of the records' own ids.
        most: the largest number of uses; up to 7, no two numbers of uses give equal sums.

    Returns:
        int [n]; raises ValueError if a weight is not a sum of uses.
    """
    pairs = itertools.product(range(most + 1), repeat=2)  # uses in full and in last batches
    sums = {
        full + last * _BATCH / _LAST: full + last for full, last in pairs if full + last <= most
    }
    moved = np.abs(weights) / _MOVE
    nearest = np.argmin(np.abs(moved[:, np.newaxis] - list(sums)), axis=1)
    away = np.abs(moved - np.array(list(sums))[nearest])
    if np.max(away) > 0.05:
        raise ValueError(f"a weight has moved as if by {moved[np.argmax(away)]:.3f} uses")
    return np.array(list(sums.values()))[nearest]


def _command(mode, more):
    """The words that start a run."""
    train, processes = [sys.executable, str(ROOT / "train.py")], str(FLAGS.processes)
    batch, interval = _BATCH * FLAGS.processes, _INTERVAL
    if mode in LAUNCHERS:
        train = [*LAUNCHERS[mode], processes, *train]
    elif mode == "ps":
        batch, interval = _BATCH, _INTERVAL * FLAGS.processes  # a step is one process's
        workers = f"--num_workers={FLAGS.processes - 1}"
        cluster = str(ROOT / "scripts" / "local_cluster.py")
        train = [sys.executable, cluster, "--num_servers=2", workers, "--"]
    else:
        train += [f"--distribution={mode}", *["--replicas_per_process=2"] * (mode != "local")]
    rate = f"--learning_rate={2 * batch * _MOVE}"
    steps = f"--global_batch_size={batch}", f"--save_checkpoints_steps={interval}"
    return [*train, *_TRAIN, rate, *steps, *more]


class _Job:
    """One start of a run; none of its processes outlives the block."""

    def __init__(self, run):
        self._model_dir, self._id = run.folder / "model", uuid.uuid4().hex
        env = {**os.environ, "DEEPFM_SOAK": self._id}
        env["OMPI_MCA_orte_tmpdir_base"] = str(run.folder)  # mpiruns of a user share the default
        with open(run.folder / "log", "ab", 0) as log:
            log.write(f"$ {' '.join(run.command)}\n".encode())
            self.started = time.monotonic()
            self._launcher = subprocess.Popen(
                run.command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def close(self):
        while self.processes():
            self._send(signal.SIGKILL, self.processes())
        self._launcher.wait()

    @property
    def code(self):
        """The exit code, None while the job runs."""
        return self._launcher.poll()

    def processes(self):
        """All processes of the job, wherever they are, by a variable that they inherited."""
        return marked("DEEPFM_SOAK", self._id)

    @staticmethod
    def _send(number, processes):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def hit(self, number, target, draw):
        """Signals the launcher, all processes, or one process of a role; returns whom it hit."""
        found = [p for p in self.processes() if target in ("all", _role(p))]
        if not found:  # the launcher is the target, or the role has no process yet
            self._launcher.send_signal(number)
            return "the launcher"
        self._send(number, found if target == "all" else [draw.choice(found)])
        return target

    def has_ended(self, seconds):
        """Waits until all processes have ended; returns whether they did in time."""
        return wait_until(lambda: self.code is not None and not self.processes(), seconds, 0.05)

    def end(self):
        """Waits for the end of a job that nothing kills any more."""
        if not self.has_ended(_LIMIT):
            raise _Fault(f"the job has not ended after {_LIMIT} s")
        if self.code:
            raise _Fault(f"the job ended with exit code {self.code}")

    @property
    def checkpoint(self):
        """The step of the newest checkpoint; -1 without any."""
        found = self._model_dir.glob("model.ckpt-*.index")
        return max((int(path.stem.rpartition("-")[2]) for path in found), default=-1)

    def next_checkpoint(self):
        """Waits for another checkpoint or the job's end; returns the step of the previous one."""
        before, left = self.checkpoint, self.started + _LIMIT - time.monotonic()
        moved = lambda: self.code is not None or self.checkpoint > before
        if not wait_until(moved, left, 0.01):
            raise _Fault(f"no new checkpoint after {_LIMIT} s")
        return before


def _role(process):
    """chief, worker, server or rank, of the processes of train.py in a job of several."""
    with contextlib.suppress(psutil.Error):
        if str(ROOT / "train.py") in process.cmdline()[1:3]:
            task = json.loads(process.environ().get("TF_CONFIG", "{}")).get("task", {})
            return {"ps": "server"}.get(task.get("type"), task.get("type", "rank"))
    return None


@dataclasses.dataclass
class _Run:
    """A run, which may take several starts."""

    folder: pathlib.Path  # of its own, with its model and its log
    command: List[str]
    hits: List[signal.Signals] = dataclasses.field(default_factory=list)  # signals sent to it
    told: List[str] = dataclasses.field(default_factory=list)  # what happened, in a few words each


class _Fault(Exception):
    """What is wrong with a run."""


def _soak(cell, data, folder):
    """Makes the runs of a cell."""
    began, draw = time.monotonic(), random.Random(f"{FLAGS.seed} {cell.mode} {cell.configuration}")
    whole = None  # what is known of the run that is left alone
    for number in itertools.count():
        path = folder / f"{cell.mode}-{cell.configuration}-{number}"
        path.mkdir()
        train_flags = data.flags(cell.configuration, path) + FLAGS.train_flags
        run = _Run(path, _command(cell.mode, train_flags))
        try:
            if whole is None:
                whole = _left_alone(run)
                _check_uses(cell, data, run, whole["end"])
            else:
                _interrupted(cell, run, whole, draw)
                end = _end_of(path)
                _check_uses(cell, data, run, end)
                _check_same(cell, run, whole["end"], end)
        except _Fault as fault:
            cell.faults += 1
            run.told.append(f"FAULT: {fault}")
            _keep(path)
        told = "; ".join(run.told)
        logging.info("%s, %s, run %d: %s.", cell.mode, cell.configuration, number, told)
        shutil.rmtree(path)
        cell.runs += bool(run.hits)
        cell.seconds = time.monotonic() - began
        if not whole or cell.kills >= FLAGS.kills:
            return


def _keep(folder):
    """Keeps the folder of a run with a fault, or shows its log."""
    if FLAGS.output_dir:
        # A name that an earlier soak has not given.
        kept = tempfile.mkdtemp(prefix=f"{folder.name}-{FLAGS.seed}-", dir=FLAGS.output_dir)
        shutil.copytree(folder, pathlib.Path(kept) / "run")
    else:
        sys.stderr.write((folder / "log").read_text(errors="replace"))


def _left_alone(run):
    """Makes a run without a signal: its seconds, those after its first checkpoint, its end."""
    with contextlib.closing(_Job(run)) as job:
        job.next_checkpoint()
        first = time.monotonic()
        job.end()
        now = time.monotonic()
    run.told.append(f"left alone, {now - job.started:.1f} s")
    return {"seconds": now - job.started, "training": now - first, "end": _end_of(run.folder)}


def _interrupted(cell, run, whole, draw):
    """Makes a run that is killed up to three times, unless it finishes before."""
    left = min(draw.choice([1, 1, 2, 3]), FLAGS.kills - cell.kills)
    while True:
        with contextlib.closing(_Job(run)) as job:
            if not left or not _reach_moment(job, whole, draw):
                job.end()
                break
            number, target = _signal(cell.mode, draw)
            step, at = job.checkpoint, time.monotonic()
            whom = job.hit(number, target, draw)
            has_ended = job.has_ended(_PATIENCE)
            took = time.monotonic() - at
        if has_ended and job.code == 0:  # it finished before the signal
            break
        run.hits.append(number)
        run.told.append(
            f"{number.name} for {whom} after {at - job.started:.1f} s (checkpoint {step}, exit "
            f"code {job.code}, all ended after {took:.1f} s)"
        )
        cell.kills, cell.terms = cell.kills + 1, cell.terms + (number == signal.SIGTERM)
        cell.slowest, left = max(cell.slowest, took), left - 1
        if not has_ended:
            raise _Fault(f"processes still ran {_PATIENCE} s after {number.name} for {whom}")
    if not run.hits:
        run.told.append("finished before the signal")


def _reach_moment(job, whole, draw):
    """Waits for a random moment, three times out of four after the first checkpoint of this start;
    returns whether the job still runs."""
    moment = job.started + draw.uniform(0, whole["seconds"])
    if draw.random() < 0.75:
        before = job.next_checkpoint()
        left = 1 - max(before, 0) / whole["end"]["checkpoint"]["global_step"]
        moment = time.monotonic() + draw.uniform(0, whole["training"] * max(left, 0))
    return not wait_until(lambda: job.code is not None, moment - time.monotonic(), 0.005)


def _signal(mode, draw):
    """(the signal, its target), four times of five SIGKILL; SIGTERM goes to the launcher, which
    passes it on."""
    ranks, tasks = ["rank", "launcher", "all"], ["chief", "worker", "server", "all"]
    targets = {"mpi": ranks, "gloo": ranks, "ps": tasks}.get(mode, ["launcher"])
    if draw.random() < 0.8:
        return signal.SIGKILL, draw.choice(targets)
    return signal.SIGTERM, "launcher"


def _end_of(folder):
    """What a run left: {"checkpoint": {name: tensor}}, likewise for evaluations and exports."""
    tensors = lambda path: {
        name: tf.train.load_variable(path, name)
        for name, _ in tf.train.list_variables(path)
        if not name.startswith("deepfm_run/")  # where the run was in its records
    }
    newest = tf.train.latest_checkpoint(str(folder / "model"))
    if not newest:
        raise _Fault("no checkpoint")
    end = {"checkpoint": tensors(newest)}
    if (folder / "servable").is_dir():
        found = json.loads((folder / "model" / "evaluations.json").read_text())
        end["evaluations"] = {entry["step"]: entry for entry in found}
        exports = [path for path in (folder / "servable").iterdir() if path.name[0] != "."]
        if len(exports) != 1:
            raise _Fault(f"{len(exports)} exported models, not one")
        end["export"] = tensors(str(exports[0] / "variables" / "variables"))
    return end


def _check_uses(cell, data, run, end):
    """Checks that each record was used as often as it should be."""
    try:
        uses = count_uses(end["checkpoint"]["fm_w"][1 : data.rows + 1])
    except ValueError as error:
        raise _Fault(str(error)) from error
    lost = int(np.maximum(_EPOCHS - uses, 0).sum())
    again = int(np.maximum(uses - _EPOCHS, 0).sum())
    cell.lost, cell.again = cell.lost + lost, cell.again + again
    run.told.append(f"{len(uses)} records used {uses.min()} to {uses.max()} times, {again} again")
    may = most = 0
    if cell.mode == "ps":
        killed = run.hits.count(signal.SIGKILL)
        # If the order changed, the log says that the epoch starts over.
        anew = (run.folder / "log").read_text(errors="replace").count("starts over")
        may = killed * _INTERVAL * FLAGS.processes * _BATCH * FLAGS.processes + anew * data.rows
        most = killed + anew
    if lost or again > may or uses.max() > _EPOCHS + most:
        raise _Fault(f"{lost} uses lost, {again} again; up to {may} may come again")


def _check_same(cell, run, whole, end):
    """Checks that a run ended like the one that was left alone, in the modes where it must."""
    if cell.mode == "ps":
        return
    for what, wanted in whole.items():
        found = end.get(what, {})
        differ = [str(n) for n in wanted if not np.array_equal(wanted[n], found.get(n))]
        differ += [str(name) for name in set(found) - set(wanted)]
        if differ:
            raise _Fault(f"{what} differs from the run left alone: {', '.join(differ[:4])}")
    cell.same += bool(run.hits)
    run.told.append("same end")


if __name__ == "__main__":
    sys.exit(main())
