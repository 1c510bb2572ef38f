"""DeepFM on TensorFlow 1.15.

A program asks for the packages that it needs before it imports them, so that a Python that lacks
one ends with one sentence. Looking for a package does not load it.
"""

import os
import sys
from importlib.util import find_spec

_TITLES = {"tensorflow_core": "TensorFlow 1.15"}  # only 1.15, 2.0 and 2.1 have that package
_OF_SAGEMAKER = ("boto3", "moto", "sagemaker")


def need(*packages: str):
    """Ends the program with exit code 2 and one sentence if this Python lacks a package."""
    for name in packages:
        if find_spec(name) is None:
            refuse_python(f"has no {_TITLES.get(name, name)}", name in _OF_SAGEMAKER)


def refuse_python(why: str, sagemaker: bool = False):
    """Ends the program with exit code 2 and one sentence that says which Python to use."""
    option, folder = (" --sagemaker", ".venv-sagemaker") if sagemaker else ("", ".venv")
    sys.stderr.write(
        f"{os.path.basename(sys.argv[0])}: this Python ({sys.executable}, "
        f"{'.'.join(map(str, sys.version_info[:3]))}) {why}; run scripts/setup.sh{option}, then "
        f"start this program with {folder}/bin/python.\n"
    )
    sys.exit(2)
