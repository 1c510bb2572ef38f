"""Programs that prepare data, one per file."""

import deepfm  # noqa: F401  explains what to do if TensorFlow 1.15 is missing
