"""Asks exported models."""

import contextlib

from deepfm.runtime.tf import tf

v1 = tf.compat.v1


@contextlib.contextmanager
def answering(path):
    """A function (signature, {input: cells}) -> prob of an exported model."""
    with tf.Graph().as_default(), v1.Session() as session:
        signatures = v1.saved_model.load(session, ["serve"], str(path)).signature_def

        def ask(name, inputs):
            found = signatures[name]
            assert set(inputs) == set(found.inputs)
            feed = {found.inputs[key].name: x for key, x in inputs.items()}
            return session.run(found.outputs["prob"].name, feed)

        ask.signatures = set(signatures)
        yield ask
