"""python -m deepfm.kernels builds the library of the compiled operators."""

import subprocess
import sys

from deepfm.kernels import build

try:
    print(build.build())
except (OSError, subprocess.CalledProcessError) as error:
    sys.exit(f"The compiled kernels cannot be built ({error}); install g++, or set CXX.")
