"""The format of a record, without TensorFlow: schema, text, codec, storage, and what is bad."""
