"""Spark's driver runs this in a job of launch_sagemaker.py: packages first, then on_spark.

SageMaker's Spark image has no pyarrow (https://github.com/aws/sagemaker-spark-container/issues/104).
What is missing comes from PyPI, with the versions of requirements-spark.txt: on one host, where
driver and executors share a container and so the packages. Several hosts need an image that has
all packages, which needs no network.

Needs nothing but Python 3, and data_tools from --py-files.
"""

import importlib
import importlib.util
import json
import runpy
import subprocess
import sys

CONFIG = "/opt/ml/config/resourceconfig.json"
REQUIREMENTS = "/opt/ml/processing/input/files/requirements-spark.txt"
NEEDED = ("absl", "numpy", "pandas", "pyarrow")
OF_THE_IMAGE = ("pyspark", "py4j")


def main():
    with open(CONFIG) as f:
        hosts = json.load(f)["hosts"]
    lacks = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacks and len(hosts) > 1:
        fail(f"the image lacks {lacks[0]}, which {len(hosts)} hosts need; give one with it.", 2)
    if lacks:
        install()
    runpy.run_module("data_tools.on_spark", run_name="__main__", alter_sys=True)


def install():
    """Installs what requirements-spark.txt pins, except Spark."""
    with open(REQUIREMENTS) as f:
        pins = [line.partition("#")[0].strip() for line in f]
    pins = [pin for pin in pins if pin and pin.partition("==")[0] not in OF_THE_IMAGE]
    words = ["install", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", *pins]
    if subprocess.run([sys.executable, "-m", "pip", *words]).returncode:
        fail("pip cannot install Spark's packages; give --image_uri, an image that has them.", 1)
    importlib.invalidate_caches()


def fail(sentence, code):
    sys.stderr.write(f"spark_on_sagemaker.py: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
