"""What a job will do: with which model, on which data, and where in the data it begins.

Here, and nowhere else before the first step, the processes of a job agree. There are at most three
rounds, which all processes always make: what the chief finds in model_dir, what each process has
found in its data, and what the chief decides. If one cannot go on, all end with its sentence.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from absl import logging

from deepfm import estimators, model_config, open_data
from deepfm.config import JobConfig, ModelConfig, Position, Share, auto
from deepfm.config.setting import ALIKE, CHANGES, HYPERPARAMETERS, OF_DATA, ORDER, of_kinds
from deepfm.data import bad_records, datasets, shares
from deepfm.errors import BadInput
from deepfm.kernels import compiled
from deepfm.kernels.ops import TENSORFLOW, Ops
from deepfm.model import embeddings, fresh_tables, groups, optimizers
from deepfm.modes.common.agreement import check_alike
from deepfm.modes.common.mode import Mode
from deepfm.records.raw import names
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf
from deepfm.state import best, checkpoints, evaluations, growing, model_dir, paths, resume, saving
from deepfm.state.remote_model_dir import Mirror, at_hand

# Flags that are of no use, but do no harm, without evaluations.
_OF_EVALUATIONS = (
    "eval_every_steps", "best_metric", "min_improvement", "eval_on_all_ranks", "min_learning_rate",
    "learning_rate_decay_patience", "learning_rate_decay_metric",
)  # fmt: skip


class Opened(NamedTuple):
    """A job that has its model_dir at hand.

    Attributes:
        job: the JobConfig; the chief's model_dir is local.
        mirror: copies the chief's model_dir to the remote one that the user gave, if any.
        known: {field of ModelConfig: value} of the model there; {} if there is none.
        step: the step from which training continues, else 0.
        checkpoint: which checkpoint other jobs use, as in Model.
        chosen: what --auto chose when the run began; {} if nothing.
    """

    job: JobConfig
    mirror: Optional[Mirror]
    known: Dict[str, Any]
    step: int
    checkpoint: str
    chosen: Dict[str, Any] = {}


class Plan(NamedTuple):
    """What a training will do.

    Attributes:
        opened: the Opened job; its `job` is completed by what the data say.
        config: of the model.
        data, validation: DataSets; validation may be None.
        damaged: the files of `data` with bad records that are skipped.
        share: the Share of this process.
        by_rows: whether its rows were known before they were counted.
        ops: Ops of training steps.
        steps: of each process in an epoch, by rank; None if unknown.
        parts: resume.RunParts that led here, the last being the one that is trained now.
        position: where it begins.
        history: evaluations.History.
    """

    opened: Opened
    config: ModelConfig
    data: datasets.DataSet
    validation: Optional[datasets.DataSet]
    damaged: Sequence[shares.Skipped]
    share: Share
    by_rows: bool
    ops: Ops = TENSORFLOW
    steps: Optional[List[int]] = None
    parts: Sequence[resume.RunPart] = ()
    position: Position = Position()
    history: Optional[evaluations.History] = None

    @property
    def job(self) -> JobConfig:
        return self.opened.job

    @property
    def model(self) -> estimators.Model:
        """That is trained."""
        return estimators.Model(self.job, self.config)

    @property
    def epoch(self) -> Optional[int]:
        """The steps of an epoch, of all processes; None if unknown."""
        if self.steps is None:
            return None
        return self.steps[0] if self.job.distribution.in_step else sum(self.steps)

    @property
    def eval_steps(self) -> int:
        """Steps between two evaluations on the way; 0: there are none."""
        by_epoch = self.epoch if self.job.input.num_epochs > 1 else 0
        return (self.job.eval_every_steps or by_epoch or 0) if self.validation else 0


def together(mode: Mode, act: Callable[[], Tuple[Any, Any]]) -> Tuple[Any, List[Any]]:
    """A round: all processes call this, and all raise the BadInput that one of them raises.

    Args:
        act: () -> (what this process keeps, what it tells the others, which JSON can hold).

    Returns:
        (what this process keeps, what each process has told, by rank).
    """
    kept = told = error = None
    try:
        kept, told = act()
    except BadInput as found:
        error = found
    everyone = mode.exchange([error and str(error), told])
    if error:
        raise error
    for sentence, _ in everyone:
        if sentence:
            raise BadInput(sentence)
    return kept, [told for _, told in everyone]


def open_model(job: JobConfig, enter: Callable) -> Opened:
    """Opens the model_dir of a job, which the chief alone reads. The first round.

    Args:
        enter: enters a context that lasts as long as the job.
    """
    mode, trains = job.distribution, job.task_type == "train"

    def look():
        job.sagemaker.check(mode.local_size)
        paths.check(job)
        if job.task_type == "infer":
            model_dir.check_predictions_file(job)
        mine, mirror = enter(at_hand(job)) if remote_files.is_remote(job.model_dir) else (job, None)
        if not mode.chief:
            return (mine, mirror), None
        folder = mine.model_dir
        if trains:
            enter(checkpoints.claimed(folder))
        known, step, checkpoint, chosen = {}, 0, "last", {}
        if not (trains and job.clear_existing_model):
            checkpoints.prepare(folder, tidy=trains)
            step = estimators.global_step(folder) if trains else 0
            newest = tf.train.latest_checkpoint(folder)
            saved = saving.model_of(newest) if newest else {}
            if not trains:
                checkpoint = best.chosen(folder, job.checkpoint)
                saved = best.of_checkpoint(folder, checkpoint, saving.model_of, hold=False)
            if not trains or newest:
                known = model_config.kept(folder, saved)
                chosen = resume.chosen(folder) if job.auto else {}
        return (mine, mirror), [known, step, checkpoint, chosen]

    (job, mirror), (of_model, *_) = together(mode, look)
    return Opened(job, mirror, *of_model)


def apply_model(
    opened: Opened, flag: Optional[str] = None, check: Callable = lambda *_: None
) -> Tuple[Optional[datasets.DataSet], estimators.Model]:
    """(the data that a flag names, the trained model to apply to them). The second round.

    Args:
        check: (data, model) -> None; raises BadInput if they do not fit the job.
    """
    job, mode = opened.job, opened.job.distribution

    def find():
        data = open_data.find(flag, job) if flag else None
        config = model_config.of_trained(job, opened.known, data)
        estimators.check_fits_memory(job, config)
        numbered = open_data.with_numbers(job, config, *filter(None, [data]))
        move, new = None, config.feature_map
        if mode.chief and data and model_config.moves(opened.known, new):
            path = names.find_map(names.folders_of(open_data.paths_of(job, data)), new)
            move = growing.move_between(job.model_dir, opened.known["feature_map"], new, path)
        model = estimators.Model(numbered, config, checkpoint=opened.checkpoint, move=move)
        check(data, model)
        return (data, model), [bool(data and data.weighted), open_data.alike(flag, data)]

    (data, model), told = together(mode, find)
    check_alike([alike for _, alike in told])
    if data and not open_data.evaluates_alone(job):
        data = data._replace(weighted=any(weighted for weighted, _ in told))
    return data, model


def make_plan(opened: Opened) -> Plan:
    """Plans a training. The second and the third round.

    Raises:
        BadInput: flags or data that the user has to fix, of any process.
    """
    mode = opened.job.distribution
    plan, told = together(mode, lambda: _of_data(opened))
    if mode.size > 1:
        check_alike([each["alike"] for each in told])
    if mode.in_step:
        trained, validated = map(any, zip(*(each["weighted"] for each in told)))
        plan = plan._replace(data=plan.data._replace(weighted=trained))
        if plan.validation and not plan.job.input.eval_on_all_ranks:
            plan = plan._replace(validation=plan.validation._replace(weighted=validated))
    # Each updates its own copy of the weights, and the copies must stay equal to the bit.
    kernels = all(each["kernels"] for each in (told if mode.in_step else [told[mode.rank]]))
    ops = compiled.of_steps(plan.job.ops if kernels else TENSORFLOW, mode)
    rows = [each["rows"] for each in told]
    rows = None if None in rows else rows
    steps = shares.steps_of_processes(rows, plan.job.batch_of_process, mode.in_step)
    plan = plan._replace(ops=ops, steps=steps)
    _check_evaluations(plan)
    if plan.job.reset_embeddings_each_epoch:
        _check_fresh_tables(plan)
    others = [file for each in told for file in each["files"]]
    plan, (decided, *_) = together(mode, lambda: _decide(plan, rows, others))
    parts = [resume.RunPart(**part) for part in decided["parts"]]
    part, taken = parts[-1], mode.steps_taken(decided["taken"])
    position = Position(
        *part.place(taken, mode.rank), rows, part.order["by_rows"],
        opened.step, part.run_step,
    )  # fmt: skip
    known = decided["evaluations"]
    history = plan.history or evaluations.History(plan.job, part.run_step, opened.step, known=known)
    return plan._replace(parts=parts, position=position, history=history)


def _of_data(opened):
    """(the Plan as far as this process's flags and data decide it; what the others need of it)."""
    job, mode = opened.job, opened.job.distribution
    data = open_data.find("training_data_dir", job)
    validation = open_data.find_validation(job)
    if mode.chief and validation:
        open_data.warn_of_remembered(data.files, validation.files)
    if job.auto:
        job, data, chosen = _choose(job, opened, data, validation)
        opened = opened._replace(chosen=chosen)
    if job.export == best.AUTO:
        exports_best = validation and job.servable_model_dir
        job = job._replace(export=best.FOLDER if exports_best else "last")
    config = model_config.to_train(job, opened.known, data, validation)
    job = open_data.with_numbers(job, config, data, *filter(None, [validation]))
    grouping = estimators.Model(job, config).grouping
    if grouping:
        groups.check_fields(grouping, config.field_size)
    estimators.check_fits_memory(job, config)
    job = job._replace(optimizer=optimizers.complete(job.optimizer, config))
    schema = estimators.schema(config, data)
    damaged = bad_records.find_damaged(data, schema, job.input.max_bad_records)
    if not damaged:
        bad_records.check_first_records(data, schema)
    if validation:
        bad_records.check_first_records(validation, estimators.schema(config, validation))
    share, by_rows = open_data.share(data, job), data.rows is not None
    # With known rows it can skip what has been used, and knows the steps of an epoch and the last.
    by_epoch = bool(validation) and job.input.num_epochs > 1 and not job.eval_every_steps
    needs_rows = opened.step or job.reset_embeddings_each_epoch
    if (needs_rows or by_epoch) and not data.pipe:
        data = datasets.count_rows(data)
    elif by_epoch and data.pipe:
        logging.info("Pipe mode: one evaluation, at the end; --eval_every_steps=N makes more.")
    opened = opened._replace(job=job)
    plan = Plan(opened, config, data, validation, damaged, share, by_rows)
    return plan, {
        "alike": _alike(plan),
        "files": open_data.told_of_files(data, mode),
        "weighted": [data.weighted, bool(validation and validation.weighted)],
        "rows": shares.rows_of_share(data, damaged, share),
        "kernels": job.ops is compiled.COMPILED,
    }


def _choose(job, opened, data, validation):
    """(the job with what --auto chooses, the data with their rows, what was chosen)."""
    if data.pipe or data.sharded:
        raise BadInput(
            f"--auto goes by the number of records, which is unknown to a process that sees only "
            f"its part of them ({data.name}); use input mode File and FullyReplicated, or leave "
            "out --auto and give the flags."
        )
    data = datasets.count_rows(data)
    job, chosen = auto.complete(
        job, data.rows, opened.known, opened.chosen, evaluates=bool(validation)
    )
    if job.distribution.chief:
        logging.info("--auto for %s records: %s", f"{data.rows:,}", auto.as_flags(chosen))
    return job, data, chosen


def _alike(plan):
    """{flag: value} of what must be the same in all processes."""
    job, of_data = plan.job, open_data.alike("training_data_dir", plan.data, plan.damaged)
    if not job.distribution.in_step:
        return of_data
    mine = {name: x for name, x in of_kinds([plan.config], OF_DATA).items() if x is not None}
    configs = plan.config, job.optimizer, job.input, job
    mine.update(of_kinds(configs, *HYPERPARAMETERS, ORDER, ALIKE))
    mine["val_data_dir"] = bool(plan.validation)
    return {**mine, **of_data, **open_data.alike("val_data_dir", plan.validation)}


def _check_evaluations(plan):
    """Refuses (BadInput) flags that need evaluations, or a figure of them, that this run lacks."""
    job, data = plan.job, plan.validation
    if not data and (job.gauc_field is not None or job.slice_fields):
        raise BadInput("--gauc_field and --slice_fields need records: give --val_data_dir.")
    if job.export == "best" and not (data and job.servable_model_dir):
        raise BadInput("--export=best needs --val_data_dir and --servable_model_dir.")
    for name in ("best_metric", "learning_rate_decay_metric"):
        if getattr(job, name) == "gauc" and job.gauc_field is None:
            raise BadInput(f"--{name}=gauc needs the field of users: add --gauc_field=N.")
    least = job.learning_rate_decay_on_plateau or job.min_learning_rate
    if job.optimizer.name == "ftrl" and not least:
        raise BadInput(
            "--optimizer=ftrl divides by its rate: --learning_rate_decay_on_plateau=0 needs a "
            "--min_learning_rate above 0."
        )
    for name, asked in (
        ("learning_rate_decay_on_plateau", job.learning_rate_decay_on_plateau < 1),
        ("early_stopping_patience", job.early_stopping_patience > 0),
    ):
        if asked and not plan.eval_steps:
            raise BadInput(
                f"--{name} needs evaluations: give --val_data_dir and --eval_every_steps "
                "(without it, training evaluates after each of several epochs, but in Pipe mode "
                "once)."
            )
    for name in _OF_EVALUATIONS if job.distribution.chief and not data else ():
        if name in job.given:
            logging.warning("--%s has no effect without --val_data_dir.", name)


def _check_fresh_tables(plan):
    """Refuses (BadInput) --reset_embeddings_each_epoch where no step is known to end an epoch."""
    if not plan.job.distribution.synchronous:
        raise BadInput(
            "--reset_embeddings_each_epoch needs processes that take each step together, but "
            "here one may be an epoch ahead of another; leave it out."
        )
    if plan.epoch is None:
        raise BadInput(
            "--reset_embeddings_each_epoch needs the number of records in an epoch, which is "
            "unknown in Pipe mode; leave it out, or read files."
        )


def _decide(plan, rows, others):
    """(the chief's Plan; what it tells all: where in the data its run is, and how good it was)."""
    job, opened, mode = plan.job, plan.opened, plan.job.distribution
    if not mode.chief:
        return plan, None
    if job.clear_existing_model:
        model_dir.clear(opened.mirror.path if opened.mirror else job.model_dir)
    config, known, move = plan.config, opened.known, None
    learned, added = model_config.check_goes_on(job, config, known) if opened.step else (None, 0)
    if config.feature_map or added:
        move = growing.find_move(job, config, open_data.paths_of(job, plan.data), learned, added)
    data = datasets.identified(plan.data, resume.known_files(job.model_dir))
    order = resume.order_of(job, plan.by_rows, data, plan.damaged)
    settings = _may_change(plan)
    settings["of_day"] = evaluations.about(data.made.get("ids"), config.feature_size, move)
    part = resume.RunPart("", order, 0, opened.step, 0, plan.steps, settings)
    now = tf.train.latest_checkpoint(job.model_dir), opened.step, data, part
    total = None if rows is None else sum(rows)
    parts, taken = resume.begin(job.model_dir, *now, total, job.abandon_interrupted_run, others)
    if not opened.step:
        model_config.keep(job.model_dir, config)
    model_config.keep_again(job.model_dir, known)
    if move:
        model = model_config.as_saved(known, config._asdict())
        growing.apply(job, move, model, embeddings.NAMES, fresh_tables.added(config, opened.step))
    validation = plan.validation and datasets.identified(plan.validation)
    if validation:
        best.forget_later(job.model_dir, opened.step)
    of_data = resume.fingerprint(validation) if validation else None
    run_step, about = parts[-1].run_step, parts[-1].settings["of_day"]
    history = evaluations.History(job, run_step, opened.step, of_data, about=about)
    if validation:
        best.say_if_replaced(job.model_dir, history)
    return plan._replace(data=data, validation=validation, history=history), {
        "parts": [part._asdict() for part in parts],
        "taken": taken,
        "evaluations": [history.entries, history.data],
    }


def _may_change(plan):
    """{flag: value} of the settings that may change between an interruption and the next start."""
    found = of_kinds((plan.job.optimizer, plan.config, plan.job, plan.job.input), CHANGES)
    found = {name: list(x) if isinstance(x, tuple) else x for name, x in found.items()}
    found["compiled_kernels"] = plan.ops is not TENSORFLOW
    return {**found, "auto": plan.opened.chosen} if plan.job.auto else found
