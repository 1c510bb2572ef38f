"""Which data a job reads, files or SageMaker's channels, and which part of it each process reads.

`flag` is the name of the flag that names the data; it is a field of InputConfig.
"""

import contextlib
import os
import posixpath
from typing import Dict, List, Optional, Sequence

from absl import logging

from deepfm.config import JobConfig, ModelConfig, Share
from deepfm.data import datasets, formats, pipe_mode, shares
from deepfm.errors import BadInput
from deepfm.modes.common.mode import Mode
from deepfm.records import data_file, dataset_json, libsvm_text
from deepfm.records.data_file import DataFile
from deepfm.records.raw import names
from deepfm.records.storage.places import is_remote
from deepfm.runtime import remote_files
from deepfm.state import growing, resume


def find(flag: str, job: JobConfig) -> datasets.DataSet:
    """The data set that a flag names, or in Pipe mode the channel that takes its place."""
    data, path = _find(flag, job), map_path(job)
    if not path:
        return data
    from deepfm.records.raw import column_kinds, feature_map  # only for data that have one

    try:
        known = feature_map.load(path)
    except ValueError as error:
        raise BadInput(f"--feature_map: {error}") from error
    fingerprint, line = known.fingerprint(), {"grew_from": list(known.grew_from), "day": known.day}
    if data.feature_map not in (None, fingerprint):
        raise BadInput(
            f"--feature_map={job.feature_map} has the fingerprint {fingerprint}, but dataset.json "
            f"of {data.name} names map {data.feature_map}; leave the flag out."
        )
    line = {key: x for key, x in line.items() if x}
    ids = dataset_json.ids(feature_map=fingerprint, id_offset=0, **line)
    return data._replace(
        field_size=len(known.fields), feature_size=known.feature_size, feature_map=fingerprint,
        multi_valued=any(field.kind == column_kinds.LIST for field in known.fields),
        made={"ids": ids, **data.made},
    )  # fmt: skip


def map_path(job: JobConfig) -> Optional[str]:
    """The path of the map that --feature_map names: in a channel, or itself; None without one."""
    asked = job.feature_map
    if asked in job.sagemaker.channels():
        asked = posixpath.join(job.sagemaker.input_dir, "data", asked, names.FILE)
    if asked and posixpath.basename(asked) != names.FILE:
        raise BadInput(
            f"--feature_map={asked} is neither a channel nor the path of a {names.FILE}; give one, "
            f"such as --feature_map=data/{names.FILE}."
        )
    return asked


def _find(flag, job):
    asked, of_job = job.input, job.sagemaker
    if of_job.pipe_mode:
        return _open_channel(flag, job)
    spec = getattr(asked, flag)
    if not spec:
        channels = ", ".join(of_job.channels())
        channels = channels and f" (the job's channels are {channels})"
        raise BadInput(
            f"--{flag} is missing; give a directory, a glob or a list of files{channels}."
        )
    if is_remote(spec):
        remote_files.check_readable(spec, flag)
    sharded = _is_sharded(flag, job)
    partial = sharded or (flag == "training_data_dir" and bool(of_job.enable_s3_shard))
    data = datasets.find(spec, flag, asked.data_format, partial, kinds=formats.FORMATS)
    for file in data.files:
        data_file.check_gzip(file.path)
    if asked.example_weights is None and data.weighted is None and data.format is formats.LIBSVM:
        libsvm_text.check_labelled(data)
    alone = flag == "val_data_dir" and evaluates_alone(job)
    if job.distribution.size > 1 and not alone:
        data = datasets.count_rows(data)
    weighted = asked.example_weights is not None or datasets.shows(data, "weighted")
    return data._replace(sharded=sharded, weighted=weighted)


def evaluates_alone(job: JobConfig) -> bool:
    """Whether a process evaluates all records by itself."""
    return job.input.eval_on_all_ranks or not job.distribution.synchronous


def _is_sharded(flag, job):
    """Whether each host has its own part of the records."""
    of_job, trains = job.sagemaker, flag == "training_data_dir"
    if flag == "infer_data_dir":  # no channel belongs to it
        return False
    if trains:
        of_job.check_divided_alike()
    channel = of_job.training_channel_name if trains else of_job.evaluation_channel_name
    found = of_job.is_sharded(channel, of_job.enable_s3_shard if trains else None)
    if found and of_job.num_hosts > 1:
        _check_part(channel, trains, job)
    return found


def _check_part(channel, trains, job):
    """Refuses (BadInput) a part of a channel to a process that needs all its records."""
    mode, who = job.distribution, None
    if mode.size == 1 and job.task_type != "export":  # which reads the first records only
        who = f"the only process of --hosts={','.join(job.sagemaker.hosts)}"
    elif evaluates_alone(job) and (job.evaluate_first or not trains):
        first = "--evaluate_first and " * trains
        who = f"with {first}ps or --eval_on_all_ranks one process"
    if who:
        raise BadInput(
            f"Channel {channel} is ShardedByS3Key, but {who} needs all its records; make it "
            "FullyReplicated."
        )


def _open_channel(flag, job):
    asked, mode, of_job = job.input, job.distribution, job.sagemaker
    pipe_mode.check_flags(flag, job)
    record_format = formats.FORMATS.get(asked.data_format, formats.TFRECORD)
    weighted = asked.example_weights is not None
    nothing = datasets.DataSet([], record_format.name, None, None, weighted=weighted)
    channel, own = of_job.evaluation_channel_name, True
    if flag == "training_data_dir":
        channel, own = of_job.training_channel_name, of_job.enable_data_multi_path
        if own:
            pipe_mode.check_all_read(of_job, mode.local_size)
        channel += f"-{mode.local_rank}" if mode.local_rank else ""
    elif mode.local_rank:
        return nothing._replace(name=f"channel {channel}")  # the host's first process reads them
    pipe = pipe_mode.open_channel(of_job, channel)
    return nothing._replace(
        name=f"channel {channel}", pipe=pipe, own_channel=own, sharded=_is_sharded(flag, job)
    )


def find_validation(job: JobConfig) -> Optional[datasets.DataSet]:
    """The data set to evaluate on, or None."""
    of_job, wanted = job.sagemaker, job.input.val_data_dir
    if of_job.pipe_mode:
        there = of_job.evaluation_channel_name in of_job.channels()
        wanted = there and job.distribution.evaluates
    return find("val_data_dir", job) if wanted else None


def warn_of_remembered(trained: Sequence[DataFile], files: Sequence[DataFile]):
    """Warns of files to evaluate on whose records the model is trained on."""
    both = next(data_file.in_both(files, trained), None)
    if both:
        logging.warning(
            "--val_data_dir: %s holds records that the model is trained on (%s): the evaluations "
            "show how well it remembers them, not how well it predicts new ones.",
            both[0].path,
            both[1].path,
        )


def share(data: datasets.DataSet, job: JobConfig) -> Share:
    """The share of a data set that this process reads, so that all read each record once."""
    mode, of_job = job.distribution, job.sagemaker
    if mode.size == 1:  # also on one of several hosts
        return Share()
    if data.own_channel:  # no other process of this host sees these records
        return Share() if data.sharded else Share(of_job.num_hosts, of_job.host)
    if data.sharded:  # no other host sees them
        return Share(mode.local_size, mode.local_rank)
    return Share(mode.size, mode.rank)


def alike(
    flag: Optional[str], data: Optional[datasets.DataSet], damaged: Sequence[shares.Skipped] = ()
) -> Dict[str, str]:
    """{flag: what its data set holds}, for processes that have to see the same; {} if they do not.

    Args:
        damaged: the files of `data` with bad records that are skipped.
    """
    if not (data and data.files) or data.sharded or data.own_channel:
        return {}
    bad = {file.path: len(file.places) for file in damaged}
    files = [(os.path.basename(f.path), f.bytes, f.rows, bad.get(f.path)) for f in data.files]
    return {flag: f"{len(files)} files, {resume.digest(files)}"}


def told_of_files(data: datasets.DataSet, mode: Mode) -> List[tuple]:
    """What the chief has to know of files that only this host has, to tell them from others."""
    if mode.chief or mode.local_rank or not data.sharded:
        return []
    return resume.told_apart(datasets.identified(data))


def paths_of(job: JobConfig, data: datasets.DataSet) -> List[str]:
    """The paths of the files of a data set, and of its map if a flag names that."""
    return [*(file.path for file in data.files), *filter(None, [map_path(job)])]


def paths_seen(job: JobConfig, *data_sets: datasets.DataSet) -> List[str]:
    """The paths of the files of some data sets, and of those that the model has seen."""
    paths = [path for data in data_sets for path in paths_of(job, data)]
    with contextlib.suppress(BadInput):  # training says what is wrong with run.json
        paths += resume.known_files(job.model_dir)
    return paths


def names_of(job: JobConfig, config: ModelConfig, *data_sets: datasets.DataSet) -> names.Names:
    """The Names of the fields, from what made these data sets or those that the model has seen."""
    known = names.of_data(paths_seen(job, *data_sets), config.feature_map, config.ids)
    if known.fields or not config.feature_map:
        return known
    kept = growing.kept_map(job.model_dir, config.feature_map)
    return names.of_map(kept) if kept else known


def with_numbers(job: JobConfig, config: ModelConfig, *data_sets: datasets.DataSet) -> JobConfig:
    """The job with numbers for the names of fields that its flags give, as far as it uses them."""
    asked = {flag: getattr(job, flag) for flag in ("gauc_field", "slice_fields", "item_fields")}
    asked = {flag: x for flag, x in asked.items() if x}
    used = [flag for flag in asked if job.task_type in JobConfig.settings[flag].tasks]
    known = names_of(job, config, *data_sets) if used else names.NO_NAMES
    number = lambda flag, word: str(known.number(word, flag))
    found = {
        flag: number(flag, x) if isinstance(x, str) else tuple(number(flag, word) for word in x)
        for flag, x in asked.items()
        if flag in used
    }
    if "item_fields" in found:
        _check_items(found["item_fields"], known)
    nothing = {flag: None if isinstance(x, str) else () for flag, x in asked.items()}
    return job._replace(**{**nothing, **found})


def _check_items(numbers, known):
    """Refuses (BadInput) fields of items that do not divide the columns into two parts."""
    asked, fields = ",".join(numbers), len(known.fields)
    if not fields:
        raise BadInput(
            f"--item_fields={asked}: requests hold raw rows, but no {names.FILE} of these records "
            f"lies in their folder or up to {names.ABOVE} above it; copy the map there."
        )
    if max(map(int, numbers)) >= fields or len(set(numbers)) == fields:
        raise BadInput(
            f"--item_fields={asked}: the rows have the fields 0 to {fields - 1}; give those of the "
            "items, and leave out those of the user."
        )


def described(data: datasets.DataSet, rows_of_processes: Optional[Sequence[int]] = None) -> dict:
    """What a report says of a data set. If it is sharded, it tells of this host's files, and of all
    hosts' records if `rows_of_processes` has them."""
    about = {"name": data.name, "format": data.data_format, "files": len(data.files)}
    made = {key: data.made[key] for key in ("ids", "unknown_shares") if key in data.made}
    if data.sharded:
        about["sharded"] = True
    return {**about, "records": _records(data, rows_of_processes), **made}


def _records(data, rows_of_processes):
    """The number of records of a data set, on all hosts; None if unknown."""
    if not data.sharded:
        return data.rows
    return None if rows_of_processes is None else sum(rows_of_processes)


def log_training(plan):
    """Logs what a plan.Plan trains on and where it begins."""
    job, data, position = plan.job, plan.data, plan.position
    rows, here = _records(data, position.rows_of_processes), " of this host" * data.sharded
    source = f"{len(data.files)} file{'s' * (len(data.files) > 1)}{here} ({data.data_format})"
    replicas = job.distribution.replicas_in_step
    logging.info(
        "Training on %s records, %s, %d fields, %s features; "
        "%d replica%s × %s = %s records in a batch.",
        "an unknown number of" if rows is None else f"{rows:,}",
        data.name if data.pipe else source, plan.config.field_size,
        f"{plan.config.feature_size:,}", replicas, "s" * (replicas > 1),
        f"{job.input.batch_size:,}", f"{job.global_batch:,}",
    )  # fmt: skip
    if rows and job.global_batch > rows:
        logging.warning(
            "A batch is larger than the data: every step uses all %s records; try "
            "--batch_size=%d.",
            f"{rows:,}", max(rows // (10 * replicas), 1),
        )  # fmt: skip
    if not (data.pipe or data.sharded):
        shares.log_division(data.files, plan.damaged, plan.share.of)
    if position.global_step:
        logging.info(
            "Resuming at step %d, epoch %d, batch %d of this process.",
            position.global_step, position.epoch + 1, position.step + 1,
        )  # fmt: skip
