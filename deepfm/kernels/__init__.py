"""Compiled kernels for the training step and for the readers.

    python -m deepfm.kernels        builds them, for the TensorFlow of this Python

scripts/setup.sh does so. Without them, and on a GPU, TensorFlow's own ops do the same work.
"""
