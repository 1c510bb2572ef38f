"""What --auto chooses for the settings that the user did not give: a rule of the number of records.

The rule was made on three public tables of 569 to 2,000 rows. From LARGE records on, it
chooses the defaults of train.py, with as many epochs as take about as long.
"""

from typing import Any, Dict, Tuple

from deepfm.config.job import JobConfig
from deepfm.config.model import ModelConfig, OptimizerConfig

SMALL, LARGE = 20_000, 200_000  # records


def rule(rows: int) -> Dict[str, Any]:
    """{flag: value} for so many records to train on."""
    width, layers, dropout, rate = (
        (8, (64, 32), 0.2, 0.003) if rows < SMALL else
        (16, (128, 64), 0.3, 0.001) if rows < LARGE else
        (32, (256, 128, 64), 0.5, 0.001)
    )  # fmt: skip
    steps = max(rows // 128, 1)
    return {
        "global_batch_size": min(max(1 << steps.bit_length() - 1, 64), 1024),
        "num_epochs": min(max(2_000_000 // max(rows, 1), 3), 30),
        "embedding_size": width,
        "deep_layers": layers,
        "dropout": (dropout,),
        "l2_reg": 0.0001,
        "learning_rate": rate,
        "early_stopping_patience": 5 if rows < SMALL else 3,
        "best_metric": "log_loss" if rows < SMALL else "auc",  # AUC of 100 rows is a draw
        "export": "auto",
    }


def complete(
    job: JobConfig, rows: int, known: Dict[str, Any], kept: Dict[str, Any], evaluates: bool
) -> Tuple[JobConfig, Dict[str, Any]]:
    """Completes a job; ranks with the same arguments get the same.

    Args:
        rows: of all ranks' training data.
        known: {field of ModelConfig: value} of the model to continue, which has its own.
        kept: what an earlier start chose, as returned; taken if it had as many rows.
        evaluates: whether there are validation data.

    Returns:
        (the job, {"rows": rows, flag: value} of what was chosen).
    """
    chosen = {**rule(rows), **(kept if kept.get("rows") == rows else {})}
    given = {*job.given, *(("global_batch_size",) if "batch_size" in job.given else ())}
    if job.optimizer.name != "adam":
        given.add("learning_rate")
    if len(job.model["dropout"]) > 1 and "dropout" in given:  # a rate for each of the layers
        given.add("deep_layers")
    chosen.update({name: x for name, x in known.items() if name in chosen})
    chosen = {k: tuple(x) if isinstance(x, list) else x for k, x in chosen.items()}
    chosen = {k: x for k, x in chosen.items() if k in rule(rows) and k not in given}
    epochs = chosen.get("num_epochs", job.input.num_epochs)
    if not evaluates or (epochs == 1 and not job.eval_every_steps):
        chosen.pop("early_stopping_patience", None)
    if not evaluates:
        chosen.pop("best_metric", None)
    of = lambda config: {k: x for k, x in chosen.items() if k in config.settings}
    rate = {k: x * job.flags.get("learning_rate_scale", 1) for k, x in of(OptimizerConfig).items()}
    batch, replicas = {}, job.distribution.replicas_in_step
    if "global_batch_size" in chosen:
        batch["batch_size"] = max(chosen["global_batch_size"] // replicas, 1)
        chosen["global_batch_size"] = batch["batch_size"] * replicas
    epochs = {k: x for k, x in chosen.items() if k == "num_epochs"}
    job = job._replace(
        model={**job.model, **of(ModelConfig)},
        optimizer=job.optimizer._replace(**rate),
        input=job.input._replace(**batch, **epochs),
        **of(JobConfig),
    )
    return job, {"rows": rows, **chosen}


def as_flags(chosen: Dict[str, Any]) -> str:
    """What was chosen, as words to copy."""
    text = lambda x: ",".join(map(str, x)) if isinstance(x, tuple) else x
    return " ".join(f"--{k}={text(x)}" for k, x in chosen.items() if k != "rows")
