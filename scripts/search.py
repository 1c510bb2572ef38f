"""Finds the flags with which train.py reaches the best AUC on your validation data, by Optuna.

    .venv-search/bin/python scripts/search.py --minutes=30 -- \\
        --training_data_dir=data/train --val_data_dir=data/val

The flags after `--` are train.py's; those that you give there are not searched. Each trial is a run
of train.py. The first has train.py's defaults, then Optuna's TPE chooses. SIGTERM prunes a trial
whose best evaluation so far is below the median of the trials before it, from its second on.

The same command goes on with the search in --output_dir, also after a kill: a trial that was cut
short is told as failed, and tried again from its checkpoint. A larger --trials extends a search.
The output is a table, search.png, the best trial's model, and best.flags for train.py's --flagfile.
"""

import fcntl
import itertools
import json
import math
import os
import pathlib
import shutil
import statistics
import sys
import time
import warnings
from importlib.util import find_spec
from typing import List

import programs  # first
from programs import ROOT, BadInput, program

# isort: split
from absl import flags, logging
from tables_and_plots import axes_of, markdown, png
from tune_candidates import this_machine

FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_integer("trials", 50, "Trials of the search, with those of earlier starts.", 1)
flags.DEFINE_float("minutes", None, "Minutes that this start may take. Default: no limit.", 0.01)
flags.DEFINE_integer("parallel", 0,
    "Trials at a time, which share the cores; 0: one with GPUs, else one a core, at most 8.", 0)
flags.DEFINE_multi_string("tune", [],
    "A flag of train.py to search, once for each: NAME=LOWEST..HIGHEST, with :log at its end to "
    "try as many small values as large ones, or NAME=VALUE|VALUE.")
flags.DEFINE_integer("eval_every_records", 0,
    "Training records between two evaluations of a trial; 0: after each epoch. Give it where "
    "epochs are long, so that bad trials end within one.", 0)
flags.DEFINE_integer("seed", 1, "Seed of Optuna's choices.", 0)
flags.DEFINE_string("output_dir", "search", "Folder for the search and its results.")
# fmt: on

_SPACE = {  # flag of train.py: (values as in --tune, its default)
    "embedding_size": ("4|8|16|32|64", "32"),
    "deep_layers": ("32|64,32|128,64|256,128,64|400,400,400", "256,128,64"),
    "dropout": ("0..0.7", 0.5),
    "learning_rate": ("0.0001..0.01:log", 0.001),
    "l2_reg": ("0.000001..0.01:log", 0.0001),
    "global_batch_size": ("256|512|1024|2048|4096", "1024"),
}
_ENDS = {"num_epochs": 10, "early_stopping_patience": 2}  # unless train.py's flags say when
# Flags of train.py that search.py sets.
_OURS = (
    "model_dir", "checkpoint_dir", "servable_model_dir", "task_type", "export", "best_metric",
    "eval_every_steps", "clear_existing_model", "abandon_interrupted_run",
)  # fmt: skip
_INTERRUPTED = 143, -15  # exit codes of a training that SIGTERM has ended
_LAST_CHECKPOINT = 10  # seconds that trainings may take to end after SIGTERM
_SHOWN = 10  # trials in the table


def main(arguments):
    if find_spec("optuna") is None:
        raise BadInput(
            f"this Python ({sys.executable}) has no Optuna; make .venv-search as docs/tuning.md "
            "says, then start this program with .venv-search/bin/python."
        )
    programs.need("matplotlib", "tensorflow_core")
    stopped = []  # numbers of the signals that came
    program.handle_signals(lambda number, _: stopped.append(number))
    needed = {"training_data_dir": "data/train", "val_data_dir": "data/val"}
    given = programs.training_flags(arguments[1:], _OURS, needed)
    if not {"num_epochs", "max_steps"} & set(given):
        given = {**_ENDS, **given}
    space = _space(given)
    output = pathlib.Path(FLAGS.output_dir)
    program.make_output_dir(output)
    folder = os.open(output, os.O_RDONLY)  # locked as long as this process lives
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"--output_dir={output}: another search runs there; give another.") from None
    search = Search(output, given, space)
    search.run(stopped)
    search.conclude()
    return 128 + stopped[0] if stopped else 0


def _space(given) -> dict:
    """{flag: Optuna's distribution} of what is searched, beside the flags that are given."""
    from optuna import distributions

    asked = {name: values for name, (values, _) in _SPACE.items() if name not in given}
    if "batch_size" in given:
        del asked["global_batch_size"]
    for text in FLAGS.tune:
        name, _, asked[name] = text.partition("=")
        if name in given or name in _OURS:
            raise BadInput(f"--tune={text}: --{name} is set already; leave it out.")
    space = {}
    for name, values in asked.items():
        kind, values, *scale = programs.values_to_tune(f"{name}={values}", values)
        if kind == "Categorical":
            space[name] = distributions.CategoricalDistribution(values)
        else:
            of = {"Integer": "IntDistribution", "Continuous": "FloatDistribution"}[kind]
            space[name] = getattr(distributions, of)(*values, log=scale == ["Logarithmic"])
    return space


class Running:
    """A trial that runs in a folder.

    Attributes:
        pruned: whether it was asked to end because its evaluations are bad.
    """

    def __init__(self, trial, folder: pathlib.Path, words: List[str]):
        self.trial, self.folder, self.pruned = trial, folder, False
        self._said, self._evaluations = [], 0
        command = [sys.executable, str(ROOT / "train.py"), *words, f"--model_dir={folder}"]
        options = {"preexec_fn": programs.end_with_parent}
        self.process, self.reader = programs.start(command, self._said.append, **options)

    def look(self) -> List[float]:
        """Tells Optuna of new evaluations, and prunes the trial if they are bad; the AUC of all."""
        path = self.folder / "evaluations.json"
        entries = json.loads(path.read_text()) if path.exists() else []
        found = [e["auc"] for e in entries if math.isfinite(e["auc"] or math.nan)]
        for i in range(self._evaluations, len(found)):
            self.trial.report(found[i], i)
        if len(found) > self._evaluations and not self.pruned and self.trial.should_prune():
            self.pruned = True
            self.process.terminate()
        self._evaluations = max(self._evaluations, len(found))
        return found

    def failure(self) -> str:
        """Why it has failed, in a sentence."""
        self.reader.join(timeout=5)
        lines = [line.strip() for line in self._said if line.strip()]
        last = f"exit code {self.process.returncode}, {' '.join(lines[-1:])}"
        return next((line for line in lines if "train.py: " in line), last)


class Search:
    """A search and its trials.

    Args:
        output: its folder, which may have an earlier part of it.
        given: {flag: value} that all trials share.
        space: {flag: distribution} of what they differ in.
    """

    def __init__(self, output: pathlib.Path, given: dict, space: dict):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self._output, self._given, self._space, self._running = output, given, space, []
        self._state = optuna.trial.TrialState
        self._study = optuna.create_study(
            storage=f"sqlite:///{output}/search.db", study_name="search", load_if_exists=True,
            direction="maximize", pruner=optuna.pruners.MedianPruner(n_warmup_steps=1),
        )  # fmt: skip
        earlier = self._study.trials
        # With the seed alone, a search that goes on would draw its first trials again.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=FLAGS.seed + len(earlier), multivariate=True, constant_liar=True
        )
        asked = f"{given}, {FLAGS.tune}, {FLAGS.eval_every_records}"
        before = self._study.user_attrs.get("asked", asked)
        if before != asked:
            raise BadInput(f"{output} has other flags ({before}); give another --output_dir.")
        self._study.set_user_attr("asked", asked)
        if not earlier:
            tuned = {text.partition("=")[0] for text in FLAGS.tune}
            plain = {name: _SPACE[name][1] for name in _SPACE if name in {*space} - tuned}
            self._study.enqueue_trial(plain)
        for trial in earlier:
            if trial.state == self._state.RUNNING:
                self._try_again(trial)

    def _try_again(self, trial):
        """Tells a trial that was cut short as failed; another one goes on in its folder."""
        self._study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
        self._study.tell(trial.number, state=self._state.FAIL)

    def _trials(self) -> dict:
        """{name of its folder: trial, as it was tried last} of those that were started, the best
        first."""
        trials = self._study.get_trials(deepcopy=False)
        started = {t.user_attrs["folder"]: t for t in trials if t.intermediate_values or _over(t)}
        return dict(sorted(started.items(), key=lambda item: -_auc(item[1])))

    def _count(self) -> int:
        return sum(map(_over, self._trials().values()))

    def run(self, stopped: List[int]):
        """Runs trials until --trials or --minutes are over, or `stopped` has a signal."""
        from tqdm import tqdm

        machine, end = this_machine(), time.monotonic() + 60 * (FLAGS.minutes or math.inf)
        most = FLAGS.parallel or (1 if machine.gpus else min(machine.cores, 8))
        bar = tqdm(total=FLAGS.trials, unit="trial", disable=not sys.stderr.isatty())
        tell = logging.info if bar.disable else bar.write
        count = self._count()
        try:
            while not stopped and time.monotonic() < end:
                bar.update(count - bar.n)
                while len(self._running) < min(most, FLAGS.trials - count):
                    self._start(max(machine.cores // most, 1))
                if not self._running:
                    break
                time.sleep(0.2)
                for running in [*self._running]:
                    ended, found = running.process.poll() is not None, running.look()
                    if ended:
                        self._running.remove(running)
                        how, count = self._end(running, found), self._count()
                        tell(f"{running.folder.name}: {how}; {count} of {FLAGS.trials} trials")
        finally:
            left = [(running.process, running.reader) for running in self._running]
            programs.end(left, _LAST_CHECKPOINT)
            bar.close()

    def _start(self, threads):
        trial = self._study.ask(self._space)
        name = trial.user_attrs.get("folder", f"trial-{trial.number}")
        trial.set_user_attr("folder", name)
        words = [f"--num_threads={threads}", *self._words(trial.params)]
        self._running.append(Running(trial, self._output / name, words))

    def _words(self, params) -> List[str]:
        """The flags of a trial, but those that depend on this machine."""
        words = {**self._given, **params}
        if FLAGS.eval_every_records:
            batch = int(words.get("global_batch_size", words.get("batch_size", 1024)))
            words["eval_every_steps"] = max(FLAGS.eval_every_records // batch, 1)
        return [f"--{name}={value}" for name, value in words.items()]

    def _end(self, running: Running, found: List[float]) -> str:
        """Tells Optuna how a trial has ended, and deletes all models but the best; how it ended."""
        trial, code = running.trial, running.process.returncode
        how = f"AUC {max(found):.6f}" if found else "no AUC"
        if code == 0 and found:
            self._study.tell(trial, max(found))
        elif running.pruned and code in _INTERRUPTED:
            self._study.tell(trial, state=self._state.PRUNED)
            how += f", pruned after {len(found)} evaluations"
        elif code in _INTERRUPTED:
            self._try_again(trial)
            how += ", ended by a signal, to be tried again"
        else:
            how = running.failure() if code else "an AUC needs validation labels of both kinds"
            if not any(map(_auc, self._trials().values())):
                raise BadInput(f"train.py does not run with these flags: {how}")
            trial.set_user_attr("failure", how)
            self._study.tell(trial, state=self._state.FAIL)
        for name, other in [*self._trials().items()][1:]:
            if _over(other):
                shutil.rmtree(self._output / name, ignore_errors=True)
        return how

    def conclude(self):
        """Prints and writes what was found."""
        trials = self._trials()
        best = next(iter(trials), None)
        if best is None or not _auc(trials[best]):
            raise BadInput("the search has ended before its first evaluation; raise --minutes.")
        train, auc = f"{sys.executable} {ROOT / 'train.py'}", f"AUC {_auc(trials[best]):.6f}"
        lines = [f"# {best} of {len(trials)} trials: {auc}", *self._words(trials[best].params), ""]
        text = lambda value: f"{value:.3g}" if isinstance(value, float) else str(value)
        rows = [
            [name, f"{_auc(t):.6f}", str(len(t.intermediate_values)),
             t.state.name.lower() if _over(t) else "cut short",
             *(text(t.params.get(flag, "")) for flag in self._space)]
            for name, t in [*trials.items()][:_SHOWN]
        ]  # fmt: skip
        print(
            markdown(["trial", "AUC", "evaluations", "state", *self._space], rows),
            f"\n{best} is the best of {len(trials)} trials. Choosing flatters its {auc}; on "
            "records that the search has not seen:",
            f"{train} --task_type=eval --checkpoint=best --model_dir={self._output / best} "
            "--val_data_dir=data/test\n\nTo train with its flags:",
            f"{train} --flagfile={self._output / 'best.flags'} --model_dir=model",
            sep="\n", flush=True,
        )  # fmt: skip
        files = {"best.flags": "\n".join(lines).encode(), "search.png": _plot(trials)}
        programs.write_files(self._output, files)


def _over(trial) -> bool:
    """Whether a trial was told, and is not to be tried again."""
    return trial.state.name in ("COMPLETE", "PRUNED") or "failure" in trial.user_attrs


def _auc(trial) -> float:
    """The best AUC of a trial's evaluations so far; 0 if there is none."""
    return max(trial.intermediate_values.values(), default=0.0)


def _plot(trials) -> bytes:
    """The AUC of each trial, and the best until then."""
    numbers, found = zip(*sorted((int(n.split("-")[1]), _auc(t)) for n, t in trials.items()))
    figure, axes = axes_of((8, 4), xlabel="trial", ylabel="best validation AUC")
    axes.plot(numbers, found, "o", markersize=4)
    axes.step(numbers, [*itertools.accumulate(found, max)], where="post", label="best so far")
    best = max(found)
    apart = best - statistics.median(found) + 1e-6
    axes.set_ylim(best - 3 * apart, best + apart / 2)  # what is far below would hide the rest
    axes.legend()
    return png(figure)


if __name__ == "__main__":
    programs.run_program(main, program.read_flags_before_words)
