"""The programs that pip installs, each of which is what `python -m` runs."""

import functools
import runpy

_run = functools.partial(runpy.run_module, run_name="__main__")

train = functools.partial(_run, "deepfm")
prepare = functools.partial(_run, "data_tools.prepare")
convert = functools.partial(_run, "data_tools.libsvm_to_tfrecord")
