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

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from importlib.util import find_spec
from typing import Any, List, Tuple

import programs  # first
from programs import ROOT, BadInput, program

# isort: split
from absl import flags, logging
from tables_and_plots import markdown, png
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
    "eval_every_steps", "clear_existing_model", "abandon_interrupted_run", "export_format",
)  # fmt: skip
_INTERRUPTED = 143, -15  # exit codes of a training that SIGTERM has ended
_LAST_CHECKPOINT = 10  # seconds that trainings may take to end after SIGTERM
_SHOWN = 10  # trials in the table
_NO_AUC = "an AUC needs validation labels of both kinds"


def main(arguments):
    if find_spec("optuna") is None:
        raise BadInput(
            f"this Python ({sys.executable}) has no Optuna; make .venv-search as docs/tuning.md "
            "says, then start this program with .venv-search/bin/python."
        )
    programs.need("matplotlib", "tensorflow")
    stopped = []  # numbers of the signals that came
    program.handle_signals(lambda number, _: stopped.append(number))
    needed = {"training_data_dir": "data/train", "val_data_dir": "data/val"}
    given = programs.training_flags(arguments[1:], _OURS, needed)
    if not {"num_epochs", "max_steps"} & set(given):
        given = {**_ENDS, **given}
    space = _space(given)
    output = pathlib.Path(FLAGS.output_dir)
    program.make_output_dir(output)
    try:  # as long as this process lives
        fcntl.flock(os.open(output, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"--output_dir={output}: another search runs there; give another.") from None
    search = Search(output, given, space, stopped)
    search.run()
    if not stopped or search.best():
        search.conclude()
    return 128 + stopped[0] if stopped else 0


def _space(given) -> dict:
    """{flag: Optuna's distribution of its values} that is searched, beside the flags given."""
    from optuna import distributions

    asked = {name: values for name, (values, _) in _SPACE.items() if name not in given}
    if "batch_size" in given:
        del asked["global_batch_size"]
    for text in FLAGS.tune:
        name, _, asked[name] = text.partition("=")
        if name in given or name in _OURS:
            raise BadInput(f"--tune={text}: --{name} is set already; leave it out.")
    space = {}
    for name, text in asked.items():
        kind, values, *scale = programs.values_to_tune(f"{name}={text}", text)
        if kind == "Categorical":
            space[name] = distributions.CategoricalDistribution(values)
        else:
            of_kind = {"Integer": "IntDistribution", "Continuous": "FloatDistribution"}[kind]
            space[name] = getattr(distributions, of_kind)(*values, log=scale == ["Logarithmic"])
    return space


@dataclasses.dataclass
class Trial:
    """A trial that runs."""

    of_study: Any  # Optuna's
    folder: pathlib.Path
    started: Tuple[subprocess.Popen, threading.Thread]
    said: List[str]  # lines of its process
    found: List[float]  # the AUC of each evaluation so far
    pruned: bool = False


class Search:
    """A search and its trials.

    Args:
        output: its folder, which may have an earlier part of it.
        given: {flag: value} that all trials share.
        space: what they differ in, from `_space`.
        stopped: gets the numbers of signals.
    """

    def __init__(self, output: pathlib.Path, given: dict, space: dict, stopped: List[int]):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self._output, self._given, self._space, self._stopped = output, given, space, stopped
        self._end = time.monotonic() + 60 * (FLAGS.minutes or math.inf)
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
            if trial.state == optuna.trial.TrialState.RUNNING:  # was; another goes on with it
                self._study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def run(self):
        """Runs trials until --trials or --minutes are over, or a signal has come."""
        machine = this_machine()
        at_once = FLAGS.parallel or (1 if machine.gpus else min(machine.cores, 8))
        running, left = [], FLAGS.trials - self._count()
        self._threads, self._hopeless = max(machine.cores // at_once, 1), False
        try:
            while not self._stopped and time.monotonic() < self._end:
                running = [trial for trial in running if not self._has_ended(trial)]
                more = 0 if self._hopeless else max(min(at_once - len(running), left), 0)
                running += [self._start() for _ in range(more)]
                left -= more
                if not running:
                    return
                time.sleep(0.2)
        finally:  # unfinished trials go on with the next start
            programs.end([trial.started for trial in running], _LAST_CHECKPOINT)

    def _count(self) -> int:
        return sum(map(_over, self._study.get_trials(deepcopy=False)))

    def best(self):
        """The best of the trials that have ended well; None if there is none."""
        with contextlib.suppress(ValueError):
            return self._study.best_trial

    def _start(self) -> Trial:
        """Starts a trial."""
        trial = self._study.ask(self._space)
        folder = self._output / trial.user_attrs.get("folder", f"trial-{trial.number}")
        trial.set_user_attr("folder", folder.name)
        words, said = self._words(trial.params), []
        words += [f"--model_dir={folder}", f"--num_threads={self._threads}"]
        started = programs.start([sys.executable, str(ROOT / "train.py"), *words], said.append)
        return Trial(trial, folder, started, said, [])

    def _has_ended(self, running: Trial) -> bool:
        """Tells Optuna of a trial's new evaluations and of its end; SIGTERM prunes it."""
        from optuna.trial import TrialState

        trial, found, code = running.of_study, running.found, programs.code_of(running.started)
        for auc in _evaluations(running.folder)[len(found) :]:
            trial.report(auc, len(found))
            found.append(auc)
            if trial.should_prune() and not running.pruned:
                running.started[0].terminate()
                running.pruned = True
        if code is None:
            return False
        how = f"AUC {max(found):.6f}" if found else ""
        if running.pruned and code in _INTERRUPTED:
            how += f", pruned after {len(found)} evaluations"
            self._study.tell(trial, state=TrialState.PRUNED)
        elif code or not found:
            how = programs.reason(running.said, code) if code else _NO_AUC
            trial.set_user_attr("failure", how)
            self._study.tell(trial, state=TrialState.FAIL)
            self._hopeless = not self.best()
        else:
            self._study.tell(trial, max(found))
        text = "%s: %s; %d of %d trials"
        logging.info(text, running.folder.name, how, self._count(), FLAGS.trials)
        best = self.best()
        for other in filter(_over, self._study.get_trials(deepcopy=False)):
            if best and other.number != best.number:  # whose model alone is kept
                shutil.rmtree(self._output / other.user_attrs["folder"], ignore_errors=True)
        return True

    def _words(self, params) -> List[str]:
        """The flags of a trial, but those that depend on this machine."""
        words = {**self._given, **params}
        if FLAGS.eval_every_records:
            batch = int(words.get("global_batch_size", words.get("batch_size", 1024)))
            words["eval_every_steps"] = max(FLAGS.eval_every_records // batch, 1)
        return [f"--{name}={value}" for name, value in words.items()]

    def conclude(self):
        """Prints and writes what was found."""
        trials, best = self._study.trials, self.best()
        if not best:
            failures = [t.user_attrs["failure"] for t in trials if "failure" in t.user_attrs]
            raise BadInput(
                f"train.py does not run with these flags: {failures[0]}" if failures
                else "no trial has ended yet; the same command goes on, or raise --minutes."
            )  # fmt: skip
        name, auc, count = best.user_attrs["folder"], f"AUC {best.value:.6f}", self._count()
        lines = [f"# {name} of {count} trials: {auc}", *self._words(best.params), ""]
        text = lambda value: f"{value:.3g}" if isinstance(value, float) else str(value)
        rows = [
            [str(t.number), f"{t.value:.6f}", t.state.name.lower(), *map(text, t.params.values())]
            for t in sorted(trials, key=lambda t: -(t.value or 0))[:_SHOWN] if t.value
        ]  # fmt: skip
        train = f"{sys.executable} {ROOT / 'train.py'}"
        print(
            markdown(["trial", "AUC", "state", *best.params], rows),
            f"\n{name} is the best of {count} trials. Choosing flatters its {auc}; on records that "
            "the search has not seen:",
            f"{train} --task_type=eval --checkpoint=best --model_dir={self._output / name} "
            "--val_data_dir=data/test\n\nTo train with its flags:",
            f"{train} --flagfile={self._output / 'best.flags'} --model_dir=model",
            sep="\n", flush=True,
        )  # fmt: skip
        files = {"best.flags": "\n".join(lines).encode(), "search.png": self._plot()}
        programs.write_files(self._output, files)

    def _plot(self) -> bytes:
        """The AUC of each trial that has ended well, and the best until then."""
        from optuna.visualization import matplotlib as plots

        axes = plots.plot_optimization_history(self._study, target_name="AUC")
        found = [t.value for t in self._study.trials if t.state.name == "COMPLETE"]
        apart = max(found) - statistics.median(found) + 1e-6
        axes.set_ylim(max(found) - 3 * apart, max(found) + apart / 2)  # a bad one hides the rest
        return png(axes.figure)


def _evaluations(folder) -> List[float]:
    """The AUC of each evaluation of a training so far."""
    path = folder / "evaluations.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    return [x["auc"] for x in entries if math.isfinite(x["auc"] or math.nan)]


def _over(trial) -> bool:
    """Whether a trial has ended, and is not to be tried again."""
    return trial.state.name in ("COMPLETE", "PRUNED") or "failure" in trial.user_attrs


if __name__ == "__main__":
    programs.run_program(main, program.read_flags_before_words)
