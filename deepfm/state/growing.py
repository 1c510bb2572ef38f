"""Gives a model the ids of another feature map: its rows move by name, checkpoint to checkpoint.
Without a map, an id means what it meant, and fresh rows are added for larger ones.

Before any graph is built, the chief rewrites the newest checkpoint into one with a row for each id
of the data's map; every mode restores that as it restores any. The step stays. What has no row yet
starts as a copy of the row for the rare categories of its column, with the slots of padding's row,
which no record has ever used: so a grown model predicts each record as it did before.

The maps of a model's checkpoints are model_dir/feature_maps/FINGERPRINT.json.
"""

import contextlib
import os
import re
import tempfile
import uuid
from typing import Any, Callable, Dict, Iterable, Optional, Sequence

import numpy as np
from absl import logging

from deepfm.config import JobConfig, ModelConfig
from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.records.raw import names
from deepfm.records.storage import places
from deepfm.runtime.tf import tf
from deepfm.state import best, checkpoints, model_json, saving, sliced_saver

v1 = tf.compat.v1

FOLDER = "feature_maps"
MAPS = re.compile(r"\.?[0-9a-f]{16}\.json(\.tmp-\d+)?")  # the names there


def find_move(
    job: JobConfig, config: ModelConfig, data: Iterable[str], learned: Optional[str], added: int
):
    """Copies the map of data into model_dir, and finds out where the rows of the model move.

    Args:
        config: of the model to train; its ids are those of the data.
        data: paths of the files.
        learned: the fingerprint of the model's map, if that is another; None: nothing moves.
        added: number of rows that the model, which then has no map, lacks.

    Returns:
        The moving.Move, or None.

    Raises:
        BadInput: a map is missing, or theirs are other columns, or most rows would be lost.
    """
    if added:
        from deepfm.records.raw import moving  # loaded only where rows move

        rows = config.feature_size - added
        return moving.Move(np.arange(rows), np.zeros(rows, bool), columns=0, gone=0, added=added)
    path = None
    if learned or not os.path.exists(path_of(job.model_dir, config.feature_map)):
        path = names.find_map(names.folders_of(data), config.feature_map)
        _keep_map(job.model_dir, config.feature_map, path)
    if not learned:
        return None
    move = move_between(job.model_dir, learned, config.feature_map, path)
    if len(move.source) != config.feature_size:
        raise BadInput(
            f"--feature_size={config.feature_size}, but the feature map of the data has "
            f"{len(move.source)} ids; leave it out."
        )
    stay = len(move.new) - int(np.count_nonzero(move.new))
    if move.gone > stay:
        raise BadInput(
            f"{move.gone:,} of the {move.gone + stay:,} rows of --model_dir={job.model_dir} would "
            "be lost, as the data's feature map lacks their categories; grow that from the model's "
            "(data_tools.prepare --grow, with a lower --max_evicted), or give another --model_dir."
        )
    return move


def move_between(model_dir: str, old: str, new: str, path: Optional[str]) -> Any:
    """The Move between the maps of two fingerprints, the new one at `path` or in model_dir."""
    from deepfm.records.raw import moving  # loaded only where rows move

    if path:
        beside = os.path.join(os.path.dirname(path), moving.FILE)
        found = moving.read(beside, old, new)
        if found:
            return found
        logging.info(
            "%s does not say how the model's rows move, so that its feature map and the data's are "
            "joined by name, in some 3 s for a million categories.", beside
        )  # fmt: skip
    known = names.load(path, new) if path else None
    return moving.join(_load(model_dir, old), known or _load(model_dir, new))


def _keep_map(model_dir, fingerprint, path):
    """Copies the map at `path`, if there is one, and deletes those that no checkpoint names."""
    folder = os.path.join(model_dir, FOLDER)
    if not path or os.path.exists(path_of(model_dir, fingerprint)):
        return
    os.makedirs(folder, exist_ok=True)
    atomic_files.sync(model_dir)
    content = places.of(path).content(path).decode()
    atomic_files.write_whole(path_of(model_dir, fingerprint), content)
    models = [{"feature_map": fingerprint}]
    for place in filter(os.path.isdir, (model_dir, os.path.join(model_dir, best.FOLDER))):
        paths = [os.path.join(place, name) for name in checkpoints.by_step(os.listdir(place))]
        models += map(saving.model_of, paths)
    for name in unneeded(os.listdir(folder), models):
        os.remove(os.path.join(folder, name))


def unneeded(names, models):
    """Those of the names of maps that no checkpoint, which notes one of these models, names."""
    needed = {f"{model.get('feature_map')}.json" for model in models}
    return sorted(filter(MAPS.fullmatch, set(names) - needed))


def path_of(model_dir: str, fingerprint: str) -> str:
    """Where model_dir keeps a map."""
    return os.path.join(model_dir, FOLDER, f"{fingerprint}.json")


def kept_map(model_dir: str, fingerprint: str):
    """The FeatureMap that model_dir keeps; None without it, BadInput if it is damaged."""
    there = os.path.exists(path_of(model_dir, fingerprint))
    return _load(model_dir, fingerprint) if there else None


def _load(model_dir, fingerprint):
    path = path_of(model_dir, fingerprint)
    found = names.load(path, fingerprint)
    if not found:
        raise BadInput(
            f"{path} is missing or another map, so that the names of the "
            f"model's ids are unknown; copy the feature_map.json of fingerprint {fingerprint} "
            "there."
        )
    return found


def apply(job: JobConfig, move, model: Dict[str, Any], tables: Sequence[str], fresh: Callable):
    """Makes the moving.Move in the newest checkpoint, which then notes another model.json.

    Args:
        model: what model.json says from now on.
        tables: the names of the variables that have a row for each feature id. So have their slots.
        fresh: makes the rows to add, as fresh_tables.added does.
    """
    path = tf.train.latest_checkpoint(job.model_dir)
    name, made = os.path.basename(path), f"{path}_temp_{uuid.uuid4().hex}"
    os.mkdir(made)
    with checkpoints.naming_damage(job.model_dir):
        _rewrite(path, made, move, model, tables, job, fresh)
    parts = os.listdir(made)
    saving.add(made, job.keep_checkpoint_max)
    for old in set(checkpoints.by_name(os.listdir(job.model_dir))[name]) - set(parts):
        os.remove(os.path.join(job.model_dir, old))  # the graph of the old sizes, too
    atomic_files.write_json(os.path.join(job.model_dir, model_json.FILE), model)
    _tell(name, move)


@contextlib.contextmanager
def moved(job: JobConfig, path: str, move, tables: Sequence[str]):
    """A context: the path of a temporary checkpoint like the one at `path`, with its rows moved."""
    with tempfile.TemporaryDirectory() as made:
        _rewrite(path, made, move, saving.model_of(path), tables, job)
        _tell(os.path.basename(path), move)
        yield os.path.join(made, os.path.basename(path))


def _tell(name, move):
    if move.added:
        first, rows = len(move.source), f"{move.added:,} row{'s' * (move.added > 1)}"
        logging.info("%s: %s added, for ids from %s on.", name, rows, f"{first:,}")
        return
    new = int(np.count_nonzero(move.new))
    logging.info(
        "%s: %s new categor%s in %d column%s, %s gone, %s rows moved.", name,
        f"{new:,}", "y" if new == 1 else "ies", move.columns, "s" * (move.columns != 1),
        f"{move.gone:,}", f"{len(move.new) - new:,}",
    )  # fmt: skip


def _rewrite(path, made, move, model, tables, job, fresh=None):
    """Writes a checkpoint anew, a variable at a time, into the folder `made`."""
    prefix, written = os.path.join(made, os.path.basename(path)), []
    asked = job.distribution.session_config  # whose threads the first session decides
    config = v1.ConfigProto(
        device_count={"GPU": 0},
        intra_op_parallelism_threads=asked.intra_op_parallelism_threads,
        inter_op_parallelism_threads=asked.inter_op_parallelism_threads,
    )
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        for part in _parts(tf.train.load_checkpoint(path), move, model, tables, fresh):
            written.append(f"{prefix}-{len(written)}")
            fed = {v1.placeholder(x.dtype, x.shape): x for _, _, x in part}
            save = tf.raw_ops.SaveV2(
                prefix=written[-1],
                tensor_names=[name for name, _, _ in part],
                shape_and_slices=[bounds for _, bounds, _ in part],
                tensors=list(fed),
            )
            session.run(save, fed)
        merge = tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=False
        )
        session.run(merge)


def _parts(reader, move, model, tables, fresh):
    """Yields what is saved at once: [(name, bounds as in sliced_saver.Slice, array)]."""
    there = sorted(reader.get_variable_to_shape_map())
    with_rows = [name for name in there if name.split("/")[0] in tables]
    others = [name for name in there if name not in {saving.MODEL, *with_rows}]
    yield [(saving.MODEL, "", saving.as_note(model))] + [
        (name, "", reader.get_tensor(name)) for name in others
    ]
    for name in with_rows:
        rows = reader.get_tensor(name)
        source = move.source if name in tables else np.where(move.new, 0, move.source)
        step = max(sliced_saver.SLICE_BYTES // (rows.nbytes // len(rows)), 1)
        moved, length = len(source), len(source) + move.added
        for begin in range(0, length, step):
            end, block = min(begin + step, length), rows[source[begin : begin + step]]
            if end > moved:
                block = np.concatenate([block, fresh(name, rows, max(begin, moved), end)])
            offset = [begin] + [0] * (rows.ndim - 1)
            whole = [length, *rows.shape[1:]]
            info = tf.Variable.SaveSliceInfo("", whole, offset, list(block.shape))
            yield [(name, info.spec if len(block) < length else "", block)]
