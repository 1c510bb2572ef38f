"""DeepFM on TensorFlow 1.15.

A program asks for the packages that it needs before it imports them, so that a Python that lacks
one ends with one sentence. Looking for a package does not load it.
"""

import os
import sys
from importlib.util import find_spec

_TITLES = {"tensorflow": "TensorFlow 1.15", "sagemaker.estimator": "SDK of SageMaker, version 2"}
# The environments that have packages which .venv lacks.
_ENVIRONMENTS = {
    **dict.fromkeys(("boto3", "sagemaker.estimator"), "sagemaker"),
    **dict.fromkeys(("pyspark", "pandas", "pyarrow"), "spark"),
}


def need(*packages: str):
    """Ends the program with exit code 2 and one sentence if this Python lacks a package."""
    for name in packages:
        if find_spec(name) is None:
            refuse_python(f"has no {_TITLES.get(name, name)}", _ENVIRONMENTS.get(name, ""))


def refuse_python(why: str, environment: str = ""):
    """Ends the program with exit code 2 and one sentence that says which Python to use.

    Args:
        why: what it lacks.
        environment: the option of setup.sh that makes the right one; empty: none.
    """
    option, folder = (f" --{environment}", f".venv-{environment}") if environment else ("", ".venv")
    sys.stderr.write(
        f"{os.path.basename(sys.argv[0])}: this Python ({sys.executable}, "
        f"{'.'.join(map(str, sys.version_info[:3]))}) {why}; run scripts/setup.sh{option}, then "
        f"start this program with {folder}/bin/python.\n"
    )
    sys.exit(2)
