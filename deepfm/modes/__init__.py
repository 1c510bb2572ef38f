"""The modes of distribution: each file of this folder is one, with a class of the file's name.

Nothing else names a mode. This module does not load TensorFlow, because flags.py needs the names
before train.py has set the environment variables of TensorFlow's threads.
"""

import importlib
import os
import pkgutil

from deepfm.errors import BadInput
from deepfm.modes.common import tf_config

NAMES = ("auto", *(found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg))


def make(name: str, flags):
    """The Mode of a name, or of the environment for auto, in this process, by its ModeFlags."""
    name = _of_environment() if name == "auto" else name
    module = importlib.import_module(f"{__name__}.{name}")
    return getattr(module, name.capitalize()).make(flags)


def _of_environment():
    """The name of the mode that the environment was set up for by its launcher."""
    described = os.environ.get("TF_CONFIG")
    cluster = tf_config.parse(described) if described else None
    if cluster and "ps" in cluster.jobs:
        return "ps"
    if cluster and cluster.num_processes > 1:
        raise BadInput(
            "TF_CONFIG holds a cluster without 'ps': add parameter servers to it, or start the "
            "processes with horovodrun and without TF_CONFIG."
        )
    # mpirun and horovodrun say here how many processes they have started.
    sizes = {os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")}
    return "horovod" if sizes - {None, "", "1"} else "local"
