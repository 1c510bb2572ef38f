"""Programs that prepare data, one file each."""

import deepfm  # noqa: F401  says what to do where there is no TensorFlow 1.15
