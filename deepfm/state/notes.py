"""What each checkpoint notes beside the variables, as bytes; no other program needs these tensors.

They are the parts of the run (`resume`), and what model.json and evaluations.json say, so that
these can be made again if a power cut has emptied them.
"""

import json
import os
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from deepfm.records import atomic_files
from deepfm.state import evaluations, model_json, resume

v1 = tf.compat.v1

_MODEL, _EVALUATIONS = f"{resume.NOTES}model", f"{resume.NOTES}evaluations"


def make_notes(
    parts: Sequence[resume.RunPart], config: Dict[str, Any], count: Optional[Callable] = None
):
    """Makes the function that makes the tensors which a checkpoint holds about its run.

    Args:
        parts: all so far, the last being the one that is trained now.
        config: what model.json says.
        count: () -> int64 [processes], the steps of each in this part, if these differ.

    Returns:
        () -> {name: tensor}; each save is fed what `evaluated` returns.
    """
    text, model = json.dumps([part._asdict() for part in parts]), atomic_files.as_json(config)

    def make():
        notes = {resume.PARTS: tf.constant(_bytes(text)), _MODEL: tf.constant(_bytes(model))}
        with tf.name_scope(None):
            notes[_EVALUATIONS] = v1.placeholder_with_default(_bytes("[]\n"), [None], _EVALUATIONS)
        return {**notes, resume.STEPS: count()} if count else notes

    return make


def evaluated(entries: List[Dict[str, Any]]) -> Dict[str, Any]:
    """{name of a tensor: value}, which notes the evaluations so far."""
    return {f"{_EVALUATIONS}:0": _bytes(atomic_files.as_json(entries))}


def _bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def restore(model_dir: str):
    """Makes files that are empty or zeroed again, from what the newest checkpoint notes."""
    checkpoint = tf.train.latest_checkpoint(model_dir)
    again = {resume.FILE: resume.PARTS, model_json.FILE: _MODEL, evaluations.FILE: _EVALUATIONS}
    for name, note in again.items() if checkpoint else ():
        path, reader = os.path.join(model_dir, name), tf.train.load_checkpoint(checkpoint)
        if not os.path.isfile(path) or not reader.has_tensor(note):
            continue
        with open(path, "rb") as f:
            if f.read().strip(b"\0"):
                continue
        text = reader.get_tensor(note).tobytes().decode()
        if name == resume.FILE:
            resume.restore(model_dir, text)
        else:
            atomic_files.write_whole(path, text)
        logging.warning("%s was empty; made it again from what %s notes.", path, checkpoint)
