"""Ends the program if this Python lacks absl or numpy: imported before either."""

from deepfm import need

need("absl", "numpy")
