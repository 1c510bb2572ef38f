"""Which flags and data all processes share, and which flags may change between two starts."""

import os
from typing import Any, Dict

from deepfm.cluster import agreement
from deepfm.config import MAY_CHANGE, JobConfig, ModelConfig
from deepfm.state import resume

_OF_OPTIMIZER = (
    "learning_rate", "embedding_learning_rate", "learning_rate_warmup_steps", "clip_norm",
    "cowclip_ratio", "cowclip_min_norm",
)  # fmt: skip
_OF_EPOCHS = (
    "learning_rate_decay_on_plateau", "learning_rate_decay_patience", "min_learning_rate",
    "learning_rate_decay_metric", "min_improvement", "reset_embeddings_each_epoch",
)  # fmt: skip


def check_alike(job: JobConfig, config: ModelConfig, data, validation, damaged):
    """Refuses (BadInput) processes in one step whose flags or data differ.

    Args:
        data, validation: DataSets; validation may be None.
        damaged: the files of `data` with bad records that are skipped.
    """
    if not job.distribution.processes.in_step:
        return
    names = (
        "max_steps", "eval_every_steps", *_OF_EPOCHS, "best_metric", "early_stopping_patience",
        "gauc_field", "slice_fields",
    )  # fmt: skip
    of_input = (
        "eval_on_all_ranks", "example_weights", "batch_size", "num_epochs", "shuffle_buffer",
        "num_parallel_reads", "seed",
    )  # fmt: skip
    mine = {
        **config._asdict(), **of_run(job, config), "use_amp": job.optimizer.use_amp,
        **{name: getattr(job.input, name) for name in of_input},
        **{name: getattr(job, name) for name in names},
        "val_data_dir": bool(validation),
    }  # fmt: skip
    for name in ("hash_buckets", "feature_map", "ids"):  # a host's part may lack dataset.json
        if mine[name] is None:
            del mine[name]
    if not (data.pipe or data.sharded or data.own_channel):
        bad = {file.path: len(file.places) for file in damaged}
        files = [(os.path.basename(f.path), f.bytes, f.rows, bad.get(f.path)) for f in data.files]
        mine["training_data_dir"] = f"{len(files)} files, {resume.digest(files)}"
    agreement.check_alike(mine, job.distribution.processes.exchange)


def of_run(job: JobConfig, config: ModelConfig) -> Dict[str, Any]:
    """{flag: value} of the settings that may change between an interruption and the next start."""
    chosen = job.optimizer
    settings = {
        "optimizer": chosen.name,
        **{name: getattr(chosen, name) for name in _OF_OPTIMIZER},
        **{name: getattr(config, name) for name in MAY_CHANGE},
        **{name: getattr(job, name) for name in _OF_EPOCHS},
        "example_weights": job.input.example_weights,
    }
    return {name: list(x) if isinstance(x, tuple) else x for name, x in settings.items()}
