"""Exports of a model as a SavedModel, for requests of tensors, serialized tf.Examples or raw rows.

What else is said of an export is in `assets.extra/deepfm.json`; TensorFlow reserves that folder for
extra files, and servers ignore it.
"""

import os
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from deepfm.data import formats, records
from deepfm.records import atomic_files
from deepfm.runtime.tf import forget_debug_names, loader_impl, tf
from deepfm.state import damage
from deepfm.state.serving import warm_up

v1 = tf.compat.v1

FILE = "saved_model.pb"
_EXTRA = "assets.extra"
ABOUT = f"{_EXTRA}/deepfm.json"


def write(
    path: str,
    estimator: tf.estimator.Estimator,
    checkpoint: str,
    schema: records.Schema,
    said: Dict[str, Any],
    feature_map: Optional[Any] = None,
    items: Sequence[int] = (),
    rows: Optional[Dict[str, np.ndarray]] = None,
):
    """Writes a SavedModel.

    Args:
        said: what deepfm.json says.
        feature_map: the FeatureMap that made the model's ids, if raw rows are to be served.
        items: numbers of the fields of which a request holds many; (): it holds whole rows.
        rows: features with which a server can warm up; None: without.
    """
    signatures = _write(estimator, checkpoint, path, schema, feature_map, items)
    extra = os.path.join(path, _EXTRA)
    os.mkdir(extra)
    if rows:
        warm_up.write(os.path.join(extra, warm_up.FILE), signatures, rows)
    atomic_files.write_json(os.path.join(path, ABOUT), said)


def is_whole(path: str) -> bool:
    """Whether the SavedModel in a local folder can be read."""
    try:
        found = bool(loader_impl.parse_saved_model(path).meta_graphs)
    except (OSError, tf.errors.OpError):
        return False
    return found and not damage.first_damaged(os.path.join(path, "variables", "variables"))


def inputs_of_ids(schema: records.Schema) -> Tuple[Dict, Dict[str, Dict]]:
    """Makes (the features, {signature: its inputs}) of requests that hold ids.

    The signatures of the SavedModel, all with the output `prob` float32 [B]:
        serving_default: feat_ids int64 [B, F], feat_vals float32 [B, F]; for multi-valued fields
            both are [B, M], padded with anything, and there is feat_counts int32 [B, F].
        examples:serving_default: examples string [B], serialized tf.Examples; labels are optional.
        strings:serving_default, if ids are hashes: like serving_default, but with feat_strings
            (string) in place of feat_ids.
    A request with an id or a value out of bounds fails with an error that names the first row.

    With a feature map, `write` adds raw, raw_typed and candidates, whose inputs are columns.
    """

    given = v1.placeholder_with_default
    serialized = given(tf.constant([], tf.string), [None], name="examples")
    parse = lambda: formats.TFRECORD.parse(serialized, schema._replace(with_labels=False))[0]
    parsed = parse()
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
    # Tensors that are fed directly are not parsed.
    raw = {name: given(x, x.shape, name=name) for name, x in parsed.items()}
    inputs = {"serving_default": raw, "examples:serving_default": {"examples": serialized}}
    if schema.hash_buckets:
        others = {name: x for name, x in raw.items() if name != "feat_ids"}
        inputs["strings:serving_default"] = {"feat_strings": strings, **others}
    return _checked(raw, schema), inputs


def _checked(features, schema):
    """The features, or an error that names the first row with an id or a value out of bounds."""
    ids, values = features["feat_ids"], features["feat_vals"]
    if schema.multi_valued:
        counts = features["feat_counts"]
        width, lengths = tf.shape(ids)[1], tf.reduce_sum(counts, axis=1)
        good = tf.reduce_all(counts >= 0, axis=1) & (lengths <= width)
        with tf.control_dependencies(
            [records.assert_rows(good, "feat_counts do not fit feat_ids")]
        ):
            lengths = tf.identity(lengths)
        there = tf.sequence_mask(lengths, width)  # what pads a row may be anything
        ids, values = (tf.where(there, x, tf.zeros_like(x)) for x in (ids, values))
    with tf.control_dependencies(records.check_pairs(ids, values, schema)):
        return {name: tf.identity(x) for name, x in features.items()}


def _write(estimator, checkpoint, path, schema, feature_map, items):
    """Writes the SavedModel itself; returns {signature: its inputs}."""
    config, served = estimator.config, tf.estimator.ModeKeys.PREDICT
    with tf.Graph().as_default(), v1.Session(config=config.session_config) as session:
        v1.train.create_global_step()

        def from_zeros(getter, **options):
            # The weights are restored; TensorFlow 1.15 lacks operators that 2.15 draws them with.
            return getter(**dict(options, initializer=v1.zeros_initializer()))

        def prob_of(features):
            scope = v1.get_variable_scope()
            with v1.variable_scope(scope, reuse=v1.AUTO_REUSE, custom_getter=from_zeros):
                return estimator.model_fn(features, None, served, config).predictions["prob"]

        features, inputs_of = inputs_of_ids(schema)
        prob = prob_of(features)
        requests = {name: (inputs, prob) for name, inputs in inputs_of.items()}
        if feature_map:
            from deepfm.state.serving.raw_rows import RawRows

            rows = RawRows(feature_map, os.path.dirname(path), items)
            requests.update(_of_raw_rows(rows, schema, prob_of))
        signatures = {
            name: v1.saved_model.predict_signature_def(inputs, {"prob": prob})
            for name, (inputs, prob) in requests.items()
        }
        saver = v1.train.Saver(sharded=True)
        saver.restore(session, checkpoint)
        builder = v1.saved_model.Builder(path)
        builder.add_meta_graph_and_variables(
            session, [tf.saved_model.SERVING], signatures,
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.train.Scaffold.default_local_init_op(),
            saver=saver, strip_default_attrs=True,
        )  # fmt: skip
        forget_debug_names(builder)
        builder.save()
        return {name: inputs for name, (inputs, _) in requests.items()}


def _of_raw_rows(rows, schema, prob_of):
    """{signature: (inputs, prob)} of requests that hold raw rows; of a bad row, prob is NaN."""
    encode = lambda inputs: rows.encode(inputs, schema.multi_valued)
    found = {}
    for name, inputs in (("raw", rows.inputs()), ("raw_typed", rows.inputs(typed=True))):
        features, good = encode(inputs)
        found[name] = inputs, prob_of(features), good
    if rows.items:
        user, items = rows.inputs_of_candidates()
        (of_user, good), (of_items, good_items) = encode(user), encode(items)
        features = {"user": of_user, "items": of_items, "item_fields": rows.items}
        found["candidates"] = {**user, **items}, prob_of(features), good & good_items
    where, nan = tf.compat.v2.where, float("nan")
    return {name: (inputs, where(good, x, nan)) for name, (inputs, x, good) in found.items()}
