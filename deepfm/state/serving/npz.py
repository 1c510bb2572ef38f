"""A model's weights as NumPy's arrays, for who goes on in another framework.

    weights.npz         an array for each variable of the model, float32; nothing of the optimizer
    model.json          what else decides a prediction, and what the arrays are
    feature_map.json    which feature id a raw cell has, if that is known

docs/other_frameworks.md says what the arrays mean, and computes predictions with them.
"""

import os
import zipfile
from typing import Any, Dict, List, Optional

import numpy as np

from deepfm.records import atomic_files
from deepfm.records.storage import places
from deepfm.runtime.tf import tf
from deepfm.state import sliced_saver

v1 = tf.compat.v1

FILE, ABOUT, MAP = "weights.npz", "model.json", "feature_map.json"
NAMES = {"fm_bias": "bias", "fm_w": "first_order", "fm_v": "embeddings"}  # the rest keep theirs


def write(
    folder: str,
    checkpoint: str,
    shapes: Dict[str, List[int]],
    said: Dict[str, Any],
    map_path: Optional[str] = None,
):
    """Writes the files into a new folder.

    Args:
        shapes: {variable of the checkpoint: its shape}.
        said: what model.json says beside the arrays.
        map_path: of the feature map.
    """
    os.mkdir(folder)
    arrays, config = [], v1.ConfigProto(device_count={"GPU": 0})
    archive = zipfile.ZipFile(os.path.join(folder, FILE), "w")
    with archive, tf.Graph().as_default(), v1.Session(config=config) as session:
        which, bounds = v1.placeholder(tf.string, [1]), v1.placeholder(tf.string, [1])
        restored = tf.raw_ops.RestoreV2(
            prefix=checkpoint, tensor_names=which, shape_and_slices=bounds, dtypes=[tf.float32]
        )
        read = session.make_callable(restored[0], [which, bounds])
        for variable, shape in shapes.items():
            name = NAMES.get(variable, variable)
            arrays.append({"name": name, "shape": shape, "dtype": "float32", "variable": variable})
            header = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as f:
                np.lib.format.write_array_header_1_0(f, header)
                for part in sliced_saver.slices_of(None, tf.TensorShape(shape), tf.float32):
                    rows = read([variable], [part.bounds])
                    f.write(np.ascontiguousarray(rows, "<f4").data.cast("B"))
    if map_path:
        with open(os.path.join(folder, MAP), "wb") as f:
            f.write(places.of(map_path).content(map_path))
    atomic_files.write_json(os.path.join(folder, ABOUT), {**said, "arrays": arrays})


def is_whole(folder: str) -> bool:
    """Whether the weights in a local folder can be read."""
    try:
        with zipfile.ZipFile(os.path.join(folder, FILE)) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
