"""The ModelConfig of a job, from the flags given, else from model.json, else from the data."""

import os
from typing import Any, Dict, Optional, Tuple

from absl import logging

from deepfm.config import JobConfig, ModelConfig
from deepfm.config.setting import STAYS
from deepfm.data import bad_records, datasets
from deepfm.errors import BadInput
from deepfm.model.model_fn import logit_offset
from deepfm.records import atomic_files, dataset_json
from deepfm.records.schema import Schema
from deepfm.runtime.tf import tf
from deepfm.state import model_json

_OF_ROWS = ("feature_size",)  # the field that added rows change
_OF_MAP = (*_OF_ROWS, "feature_map", "ids")  # the fields that a feature map decides
_STAYS = [name for name, each in ModelConfig.settings.items() if each.kind == STAYS]


def keep(model_dir: str, config: ModelConfig):
    """Writes model.json, from which other jobs take the ModelConfig."""
    atomic_files.write_json(_file(model_dir), config._asdict())


def _file(model_dir):
    return os.path.join(model_dir, model_json.FILE)


def keep_again(model_dir: str, known: Dict[str, Any]):
    """Writes model.json as `known` from `kept`, if it is missing."""
    if known and not tf.io.gfile.exists(_file(model_dir)):
        atomic_files.write_json(_file(model_dir), known)


def kept(model_dir: str, saved: Dict[str, Any]) -> Dict[str, Any]:
    """{field of ModelConfig: value} from model.json, but for what depends on the checkpoint.

    If model.json is missing, `saved`, with a warning; also if that is empty.

    Args:
        saved: the same, as the checkpoint to use noted it (saving.model_of).
    """
    if tf.io.gfile.exists(_file(model_dir)):
        return as_saved(model_json.load(_file(model_dir)), saved)
    advice = "using what the checkpoint says of the model." if saved else (
        "give the flags that the model was trained with. Whether its data were sampled, and which "
        "feature map they used, is unknown."
    )  # fmt: skip
    logging.warning("%s is missing: %s", _file(model_dir), advice)
    return {name: value for name, value in saved.items() if name in ModelConfig._fields}


def of_trained(
    job: JobConfig, known: Dict[str, Any], data: Optional[datasets.DataSet] = None
) -> ModelConfig:
    """The ModelConfig of a trained model, `known` from `kept`, that is applied to data, if any.

    It has the ids of the data, if these are of another feature map of the model's line of days.
    """
    if data:
        first = data.field_size or (datasets.first_record(data).field_size if data.files else None)
        _check_fields(job, known, data, first)
        if moves(known, data.feature_map) and related(data, known):
            known = {name: x for name, x in known.items() if name not in _OF_MAP}
    _check_same(job, known, job.model, [name for name in _STAYS if name in job.given])
    fields = _asked_or_kept(job, known)
    if job.correct_calibration and not fields["logit_offset"]:
        raise BadInput(
            f"--correct_calibration: the model of --model_dir={job.model_dir} was trained "
            "without it; train with it, or give --nocorrect_calibration."
        )
    return _config(job, fields, [data] if data else [])


def to_train(
    job: JobConfig,
    known: Dict[str, Any],
    data: datasets.DataSet,
    validation: Optional[datasets.DataSet] = None,
) -> ModelConfig:
    """The ModelConfig of a model to train; what it continues with is `known` from `kept`."""
    if moves(known, data.feature_map) and (job.move_rows or _grew(data, known)):
        known = {name: x for name, x in known.items() if name not in _OF_MAP}
    for each in filter(None, (data, validation)):
        _check_fields(job, known, each, each.field_size)
    fields = _asked_or_kept(job, known)
    _take_from_training_data(job, data, fields)
    above = validation and dataset_json.far_above(validation.rows or 0, validation.made, data.made)
    if above:
        logging.warning("%s: %s", validation.name, above)
    return _config(job, fields, [data, *filter(None, [validation])])


def _check_fields(job, known, data, found):
    """Refuses (BadInput) data whose records have `found` fields, if the model has others."""
    wanted = known.get("field_size")
    if wanted and found and found != wanted:
        source = "dataset.json" if data.field_size else "the first one"
        raise BadInput(
            f"{data.name}: its records have {found} fields, says {source}, but the model of "
            f"--model_dir={job.model_dir} has {wanted}, says model.json; give data of {wanted} "
            "fields, or another --model_dir."
        )


def _asked_or_kept(job, known):
    """{field of ModelConfig: value}: the flag given, else model.json, else the flag's default."""
    of_data = ("feature_map",)  # a flag of this name is about the data
    found = {k: v for k, v in known.items() if k not in job.given or k in of_data}
    fields = {**ModelConfig._field_defaults, **job.model, **found}
    return {**fields, "l2_scope": _l2_scope(job, fields)}


def _l2_scope(job, fields):
    """The rows that L2 covers; elapsed is Adam for the batch's rows, and its default."""
    scope, lazy_adam = fields["l2_scope"], job.optimizer.name == "adam" and fields["lazy_updates"]
    if "l2_scope" not in job.given and scope in (None, "elapsed"):
        scope = "elapsed" if lazy_adam else "batch"
    if job.task_type == "train" and scope == "elapsed" and not lazy_adam:
        raise BadInput(
            "--l2_scope=elapsed is Adam for the batch's rows: it needs --optimizer=adam and "
            "--lazy_updates; try --l2_scope=batch."
        )
    return scope


def _config(job, fields, data_sets):
    """The ModelConfig, with values from the first of the data where nothing else gives them."""
    first = data_sets[0] if data_sets else datasets.DataSet([], "tfrecord", None, None)
    for name in ("field_size", "feature_size"):
        fields[name] = fields[name] or getattr(first, name)
        if name == "field_size" and first.files and not fields[name]:
            fields[name] = datasets.first_record(first).field_size
            if not fields[name]:  # says what the first record has instead of ids
                bad_records.check_first_records(first, Schema(1))
        if not fields[name]:
            raise BadInput(
                f"--{name} is missing and no dataset.json beside the data gives it (Pipe mode "
                "has none); `python -m data_tools.inspect_dataset --data=...` finds it, and with "
                "--write makes that file."
            )
    if fields["multi_valued"] is None or "multi_valued" not in job.given:
        several = (datasets.shows(data, "multi_valued") for data in data_sets)
        fields["multi_valued"] = bool(fields["multi_valued"]) or any(several)
    of_data = {name: getattr(first, name) for name in ("hash_buckets", "feature_map")}
    for name, value in {**of_data, "ids": first.made.get("ids")}.items():
        if fields[name] is None:
            fields[name] = value
    for data in data_sets:
        _check_ids(job, data, fields, is_validation=data is not first)
    layers, dropout = tuple(fields["deep_layers"]), tuple(fields["dropout"])
    if len(dropout) not in (1, len(layers)):
        raise BadInput(
            f"--dropout has {len(dropout)} values for {len(layers)} hidden layers "
            f"(--deep_layers={','.join(map(str, layers))}); give 1 or {len(layers)} values."
        )
    fields["deep_layers"] = layers
    fields["dropout"] = dropout * len(layers) if len(dropout) == 1 else dropout
    return ModelConfig(**fields)


def _grew(data, model):
    """Whether the feature map of data grew from the one of a model's fields."""
    return model.get("feature_map") in (data.made.get("ids") or {}).get("grew_from", ())


def related(data: datasets.DataSet, model: Dict[str, Any]) -> bool:
    """Whether one of the feature maps of data and of a model's fields grew from the other."""
    before = (model.get("ids") or {}).get("grew_from", ())
    return _grew(data, model) or data.feature_map in before


def as_saved(known: Dict[str, Any], saved: Dict[str, Any]) -> Dict[str, Any]:
    """What model.json says, but for what a checkpoint says of its feature map and its rows.

    Args:
        known: what model.json says.
        saved: {field of ModelConfig: value} of the checkpoint.
    """
    names = _OF_MAP if saved.get("feature_map") else _OF_ROWS
    return {**known, **{name: saved[name] for name in names if name in saved}}


def moves(known: Dict[str, Any], fingerprint: Optional[str]) -> bool:
    """Whether a model, `known` from `kept`, has another feature map than the one given."""
    learned = known.get("feature_map")
    return None not in (learned, fingerprint) and learned != fingerprint


def check_goes_on(
    job: JobConfig, config: ModelConfig, known: Dict[str, Any]
) -> Tuple[Optional[str], int]:
    """Refuses (BadInput) to continue a model that has other variables or another loss.

    Returns:
        (the fingerprint of its feature map, if its rows have to move first, to the ids of another;
        how many rows it lacks for larger ids, where an id means what it meant).
    """
    learned = known["feature_map"] if moves(known, config.feature_map) else None
    size, trained = config.feature_size, known.get("feature_size", config.feature_size)
    added = max(size - trained, 0) if not (config.feature_map or config.hash_buckets) else 0
    if added and "feature_size" not in job.given:
        raise BadInput(
            f"dataset.json says that ids are below {size}, but the model of "
            f"--model_dir={job.model_dir} has --feature_size={trained}; if each id means what it "
            f"meant to the model, add rows by --feature_size={size}, else give another --model_dir."
        )
    differ = _OF_MAP if learned else _OF_ROWS if added else ()
    _check_same(job, known, config._asdict(), [name for name in _STAYS if name not in differ])
    return learned, added


def _check_same(job, known, fields, names):
    """Refuses (BadInput) fields that differ from those that a model was trained with."""
    as_flag = lambda x: ",".join(map(str, x)) if isinstance(x, (list, tuple)) else x
    for name in names:
        now, trained = as_flag(fields[name]), as_flag(known.get(name, fields[name]))
        if now != trained:
            raise BadInput(
                f"--{name}={now}, but the model of --model_dir={job.model_dir} was trained with "
                f"--{name}={trained}; give that value, or another --model_dir."
            )


def _check_ids(job, data, fields, is_validation):
    """Refuses (BadInput) data whose ids are not the model's, as far as both are known.

    The ids come from another feature map, are hashed differently, or, in validation data, may be
    beyond the tables of the model to train.
    """
    size, wanted = fields["feature_size"], fields["hash_buckets"]
    other_map = moves(fields, data.feature_map)
    if is_validation and (data.feature_size or 0) > size and not other_map:
        raise BadInput(
            f"{data.name}: its feature_size is {data.feature_size}, the model has {size}; "
            f"convert it with the ids of the training data, and with --feature_size={size}."
        )
    if None not in (data.hash_buckets, wanted) and data.hash_buckets != wanted:
        kind = lambda n: f"are hashes into {n} buckets" if n else "are not hashes"
        flag = f"with --hash_buckets={wanted}" if wanted else "without --hash_buckets"
        raise BadInput(
            f"{data.name}: its ids {kind(data.hash_buckets)}, but the model's {kind(wanted)}; "
            f"convert the data {flag}."
        )
    found, learned = data.feature_map, fields["feature_map"]
    if learned and not found and (data.files or data.pipe):
        logging.warning(
            "%s: the model's ids come from feature map %s, but nothing says that these do; keep "
            "dataset.json beside the records, or give --feature_map.", data.name, learned
        )  # fmt: skip
    if other_map:
        trains = job.task_type == "train" and not is_validation
        or_move = ", or train on with the rows that both maps have (--move_rows)" * trains
        raise BadInput(
            f"{data.name}: its ids come from feature map {found}, the model's from {learned}; "
            f"encode the rows with the model's map (data_tools.prepare --feature_map){or_move}."
        )
    differ = dataset_json.ids_differ(fields["ids"], data.made.get("ids"))
    if differ:
        raise BadInput(
            f"{data.name}: its ids were made with {differ[1]}, the model's with {differ[0]}; make "
            "them as those of the model's training data."
        )


def _take_from_training_data(job, data, fields):
    """Sets the fields that come from this run's data, whatever the model was trained on before."""
    larger = (data.feature_size or 0) > (fields["feature_size"] or 0)
    if larger and "feature_size" not in job.given:
        fields["feature_size"] = None  # what follows from that is decided in check_goes_on
    corrected = fields["logit_offset"] and "correct_calibration" not in job.given
    fields.update(
        seed=job.model["seed"],
        logit_offset=_logit_offset(data) if job.correct_calibration or corrected else 0.0,
    )


def _logit_offset(data):
    """The offset for --correct_calibration; jobs other than training read it from model.json."""
    if not data.sampling_rates or 0 in data.sampling_rates:
        rates = data.sampling_rates and f"rates {tuple(data.sampling_rates)}"
        raise BadInput(
            f"--correct_calibration needs sampling rates above 0, but dataset.json records "
            f"{rates or 'none'} for {data.name}; sample with data_tools.rebalance, which records "
            "them, or give --nocorrect_calibration."
        )
    return logit_offset(data.sampling_rates)
