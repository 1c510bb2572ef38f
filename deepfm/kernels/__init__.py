"""Compiled kernels of a training step and of the readers.

    python -m deepfm.kernels        builds them, for the TensorFlow of this Python

scripts/setup.sh does that. Where they are not built, and on a GPU, TensorFlow's own ops do the
same.
"""
