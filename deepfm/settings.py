"""Which flags and data all processes share, and which flags may change between two starts."""

import os
from typing import Any, Dict

from deepfm.config import JobConfig, ModelConfig
from deepfm.config.setting import ALIKE, CHANGES, HYPERPARAMETERS, OF_DATA, ORDER, of_kinds
from deepfm.modes.common import agreement
from deepfm.state import resume


def check_alike(job: JobConfig, config: ModelConfig, data, validation, damaged):
    """Refuses (BadInput) processes in one step whose flags or data differ.

    Args:
        data, validation: DataSets; validation may be None.
        damaged: the files of `data` with bad records that are skipped.
    """
    if not job.distribution.processes.in_step:
        return
    mine = {name: x for name, x in of_kinds(config, OF_DATA).items() if x is not None}
    for each in (config, job.optimizer, job.input, job):
        mine.update(of_kinds(each, *HYPERPARAMETERS, ORDER, ALIKE))
    mine["val_data_dir"] = bool(validation)
    if not (data.pipe or data.sharded or data.own_channel):
        bad = {file.path: len(file.places) for file in damaged}
        files = [(os.path.basename(f.path), f.bytes, f.rows, bad.get(f.path)) for f in data.files]
        mine["training_data_dir"] = f"{len(files)} files, {resume.digest(files)}"
    agreement.check_alike(mine, job.distribution.processes.exchange)


def of_run(job: JobConfig, config: ModelConfig) -> Dict[str, Any]:
    """{flag: value} of the settings that may change between an interruption and the next start."""
    found = {}
    for each in (job.optimizer, config, job, job.input):
        found.update(of_kinds(each, CHANGES))
    return {name: list(x) if isinstance(x, tuple) else x for name, x in found.items()}
