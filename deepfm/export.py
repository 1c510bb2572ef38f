"""Exported models: what they take, raw tensors or serialized tf.Examples; writing them whole."""

import os
import posixpath

import tensorflow as tf

from deepfm import leftovers, records


def serving_input_receiver_fn(schema: records.Schema):
    """Makes the function that Estimator.export_saved_model wants.

    The signatures of the SavedModel, all with the output `prob` float32 [B]:
        serving_default: feat_ids int64 [B, F], feat_vals float32 [B, F]; of a model whose fields
            may hold several values [B, M], filled up with anything, and feat_counts int32 [B, F].
        examples:serving_default: examples string [B], serialized tf.Examples, label or not.
        strings:serving_default, where ids are hashes: as serving_default, with feat_strings string
            in place of feat_ids.

    Args:
        schema: the records that the model takes.
    """

    given = tf.compat.v1.placeholder_with_default

    def receiver():
        serialized = given(tf.constant([], tf.string), [None], name="examples")
        parse = lambda: records.parse(serialized, "tfrecord", schema, with_labels=False)[0]
        parsed = parse()
        alternatives = {"examples": {"examples": serialized}}
        if schema.hash_buckets:
            shape = parsed["feat_ids"].shape
            none = tf.constant([], tf.string, [0, shape[1].value or 0])
            strings = given(none, shape, name="feat_strings")
            parsed["feat_ids"] = tf.cond(
                tf.size(strings) > 0,
                lambda: records.hashed(strings, schema.hash_buckets),
                lambda: parse()["feat_ids"],
            )
            parsed["feat_ids"].set_shape(shape)
        # What is fed here directly need not be parsed.
        raw = {name: given(x, x.shape, name=name) for name, x in parsed.items()}
        if schema.hash_buckets:
            others = {name: x for name, x in raw.items() if name != "feat_ids"}
            alternatives["strings"] = {"feat_strings": strings, **others}
        return tf.estimator.export.ServingInputReceiver(raw, raw, alternatives)

    return receiver


def save(estimator: tf.estimator.Estimator, folder: str, schema: records.Schema) -> str:
    """Writes a SavedModel into a new numbered folder of a local one, whole or not at all.

    Returns:
        The number, which is the time in seconds, or the next one that is free.
    """
    os.makedirs(folder, exist_ok=True)
    with leftovers.scratch(folder, ".export-") as scratch:
        made = estimator.export_saved_model(scratch, serving_input_receiver_fn(schema)).decode()
        number = int(os.path.basename(made))
        while os.path.exists(os.path.join(folder, str(number))):
            number += 1
        os.rename(made, os.path.join(folder, str(number)))
    return str(number)


def remove(folder: str, path: str):
    """Deletes an export of a folder, and nothing else, when another one has taken its place."""
    parent, number = posixpath.split(path)  # evaluations.json is a file that anyone may have edited
    if parent != folder.rstrip("/") or not number.isdigit() or not tf.io.gfile.exists(path):
        return
    # Without this file it is no SavedModel any more, whatever else is there.
    tf.io.gfile.remove(posixpath.join(path, "saved_model.pb"))
    tf.io.gfile.rmtree(path)
