"""python -m deepfm.kernels builds the compiled operators, and the codec, unless they are built."""

import subprocess
import sys

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split
from deepfm.kernels import build, compiled
from deepfm.records import library as of_records

of_records.load()
seen = of_records.version(build.library())
try:
    print(build.library() if compiled.built() else build.build(useless=seen))
except (OSError, subprocess.CalledProcessError) as error:
    sys.exit(f"The compiled kernels cannot be built ({error}); install g++, or set CXX.")
