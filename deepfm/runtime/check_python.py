"""Ends the program if this Python lacks absl or TensorFlow 1.15: imported before either."""

from deepfm import need

need("absl", "tensorflow")
