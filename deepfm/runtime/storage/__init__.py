"""Files on remote storage, through TensorFlow: reading them, and who may write a folder."""
