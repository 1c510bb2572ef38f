"""The conversion jobs on Apache Spark, on its driver and its executors, without TensorFlow."""
