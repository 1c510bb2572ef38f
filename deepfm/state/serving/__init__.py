"""What an export takes beside feature ids: raw rows, read by TensorFlow's operators."""
