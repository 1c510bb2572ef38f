"""The ModelConfig of a job: what was asked for, else what was trained, else what the data tell."""

import json
import os
from typing import Any, Dict, Optional

import tensorflow as tf
from absl import logging

from deepfm.config import ModelAsked, ModelConfig
from deepfm.data import datasets, records
from deepfm.errors import BadInput
from deepfm.model.model_fn import logit_offset
from deepfm.runtime import atomic_files
from deepfm.state import model_json
from deepfm.state.remote_model_dir import MODEL_FILE


def keep(model_dir: str, config: ModelConfig):
    """Writes model.json, from which other jobs take the ModelConfig."""
    atomic_files.write_whole(_file(model_dir), json.dumps(config._asdict(), indent=1) + "\n")


def is_kept(model_dir: str) -> bool:
    """Whether there is a model.json."""
    return tf.io.gfile.exists(_file(model_dir))


def _file(model_dir):
    return os.path.join(model_dir, MODEL_FILE)


def kept(model_dir: str, chief: bool = True) -> Dict[str, Any]:
    """{field of ModelConfig: value} of model.json; {} where there is none, which the chief logs."""
    if is_kept(model_dir):
        return model_json.read(_file(model_dir))
    if chief:
        logging.warning(
            "%s is missing: the flags have to be those that the model was trained with, and what "
            "it kept of its data (a correction for sampling, their feature map) is not known.",
            _file(model_dir),
        )
    return {}


def of_trained(
    asked: ModelAsked, known: Dict[str, Any], data: Optional[datasets.DataSet] = None
) -> ModelConfig:
    """The ModelConfig of a model that has been trained.

    Args:
        asked: ModelAsked.
        known: what `kept` says of it.
        data: that it is applied to, if any.
    """
    _check_same(asked, known, asked.fields, [name for name in _STAYS if name in asked.given])
    fields = _asked_or_kept(asked, known)
    if asked.correct_calibration and not fields["logit_offset"]:
        raise BadInput(
            f"--correct_calibration: the model of --model_dir={asked.model_dir} was trained "
            "without; train with it, or leave the flag out."
        )
    return _config(asked, fields, [data] if data else [])


def to_train(
    asked: ModelAsked,
    known: Dict[str, Any],
    data: datasets.DataSet,
    validation: Optional[datasets.DataSet] = None,
) -> ModelConfig:
    """The ModelConfig of a model that is to be trained.

    Args:
        asked: ModelAsked.
        known: what `kept` says of the model that training goes on with.
        data, validation: DataSets.
    """
    fields = _asked_or_kept(asked, known)
    _take_from_training_data(asked, data, fields)
    return _config(asked, fields, [data, *filter(None, [validation])])


def _asked_or_kept(asked, known):
    """{field of ModelConfig: value}: what was given, else what is kept, else the flag's default."""
    fields = dict(asked.fields, hash_buckets=None, feature_map=None, logit_offset=0.0)
    found = {k: v for k, v in known.items() if k in fields and k not in asked.given}
    return {**fields, **found}


def _config(asked, fields, data_sets):
    """The ModelConfig, with what the data tell where nothing else does."""
    for name in ("field_size", "feature_size"):
        fields[name] = fields[name] or (getattr(data_sets[0], name) if data_sets else None)
        if name == "field_size" and data_sets and not fields[name] and data_sets[0].files:
            first = data_sets[0]
            fields[name] = first.format.first_record(first.files[0].path)[0]
        if not fields[name]:
            raise BadInput(
                f"--{name} is missing and no dataset.json beside the data tells it (in Pipe mode "
                "none can); `python -m data_tools.inspect_dataset --data=...` finds it."
            )
    if fields["multi_valued"] is None or "multi_valued" not in asked.given:
        fields["multi_valued"] = bool(fields["multi_valued"]) or any(map(_multi_valued, data_sets))
    for name in ("hash_buckets", "feature_map") if data_sets else ():
        if fields[name] is None:
            fields[name] = getattr(data_sets[0], name)
    _check_validation(data_sets[1:], fields["feature_size"])
    for data in data_sets:
        _check_hashes(data.name, data.hash_buckets, fields["hash_buckets"])
        _check_map(data.name, data.feature_map, fields["feature_map"])
    layers = tuple(fields["deep_layers"])
    dropout = tuple(fields["dropout"])
    if len(dropout) not in (1, len(layers)):
        raise BadInput(
            f"--dropout has {len(dropout)} values for {len(layers)} hidden layers "
            f"(--deep_layers={','.join(map(str, layers))}); give 1 or {len(layers)}."
        )
    fields["deep_layers"] = layers
    fields["dropout"] = dropout * len(layers) if len(dropout) == 1 else dropout
    return ModelConfig(**fields)


def check_goes_on(asked: ModelAsked, config: ModelConfig):
    """Refuses (BadInput) to go on with a model of other variables or another loss."""
    if is_kept(asked.model_dir):
        _check_same(asked, kept(asked.model_dir), config._asdict(), _STAYS)


# Fields of ModelConfig that decide which variables a model has, and what they mean.
_STAYS = (
    "field_size", "feature_size", "embedding_size", "deep_layers", "batch_norm", "loss_type",
    "pooling",
)  # fmt: skip


def _check_same(asked, known, fields, names):
    """Refuses (BadInput) fields that are others than those that a model was trained with."""
    as_flag = lambda x: ",".join(map(str, x)) if isinstance(x, (list, tuple)) else x
    for name in names:
        now, trained = as_flag(fields[name]), as_flag(known.get(name, fields[name]))
        if now != trained:
            raise BadInput(
                f"--{name}={now}, but the model of --model_dir={asked.model_dir} was trained with "
                f"--{name}={trained}; give that, or another --model_dir."
            )


def _check_validation(data_sets, feature_size):
    """Refuses (BadInput) validation data that may hold ids which the model to train does not."""
    for data in data_sets:
        if (data.feature_size or 0) > feature_size:
            raise BadInput(
                f"{data.name}: has a feature_size of {data.feature_size}, the model one of "
                f"{feature_size}; convert it with the ids and the --feature_size of the training "
                "data."
            )


def _check_map(name, found, wanted):
    """Refuses (BadInput) data of another feature map than the model's, where both are known."""
    if found and wanted and found != wanted:
        raise BadInput(
            f"{name}: has the ids of feature map {found}, the model learns those of {wanted}; "
            "encode the rows with the model's (data_tools.prepare_criteo --feature_map)."
        )


def _check_hashes(name, buckets, wanted):
    """Refuses (BadInput) data of other hashes than those of the model, where both are known."""
    if None not in (buckets, wanted) and buckets != wanted:
        tell = lambda n: f"are hashes into {n} buckets" if n else "are no hashes"
        flag = f"with --hash_buckets={wanted}" if wanted else "without --hash_buckets"
        raise BadInput(
            f"{name}: its ids {tell(buckets)}, those that the model learns {tell(wanted)}; convert "
            f"the data {flag}."
        )


def _multi_valued(data):
    """Whether fields of a data set may hold several values: as dataset.json or a record tells."""
    if data.multi_valued is None and data.files:
        return data.format.first_record(data.files[0].path)[1]
    return bool(data.multi_valued)


def _take_from_training_data(asked, data, fields):
    """Sets what the data of now tell, whatever the model was trained on before."""
    if (data.feature_size or 0) > (
        fields["feature_size"] or 0
    ) and "feature_size" not in asked.given:
        fields["feature_size"] = None  # a model with fewer rows is refused, which says so
    corrected = fields["logit_offset"] and "correct_calibration" not in asked.given
    fields.update(
        seed=asked.fields["seed"],
        logit_offset=_logit_offset(data) if asked.correct_calibration or corrected else 0.0,
    )


def _logit_offset(data):
    """The correction that --correct_calibration asks for; other jobs take it from model.json."""
    if not data.sampling_rates or 0 in data.sampling_rates:
        rates = data.sampling_rates and f"rates {tuple(data.sampling_rates)}"
        raise BadInput(
            f"--correct_calibration: dataset.json records {rates or 'no sampling rates'} for "
            f"{data.name}; data_tools.rebalance writes rates above 0, else give "
            "--nocorrect_calibration."
        )
    return logit_offset(data.sampling_rates)


def schema(config):
    """What records of the model look like."""
    return records.Schema(config.field_size, config.feature_size, multi_valued=config.multi_valued)
