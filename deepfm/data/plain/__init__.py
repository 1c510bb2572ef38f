"""Records without TensorFlow: plain Python and numpy, for programs whose Python lacks it."""
