"""Runs the conversion jobs on Apache Spark, for data that one machine does not hold.

    python -m data_tools.on_spark convert --input=raw/ --output_dir=data/train
    python -m data_tools.on_spark prepare --input=train.txt --output_dir=data/criteo
    python -m data_tools.on_spark rebalance --input=data/train --output_dir=data/shuffled
    spark-submit --py-files=deepfm_spark.zip data_tools/on_spark.py rebalance --input=...

The first word says which job: convert is data_tools.libsvm_to_tfrecord, prepare and rebalance are
the programs of that name. The flags and the files that it writes are those of that program
(docs/spark.md). Needs pyspark, numpy, pandas and pyarrow, but not
TensorFlow; scripts/setup.sh --spark makes .venv-spark for it.
"""

import dataclasses
import sys

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
from absl import flags

from data_tools.click_logs.options import PrepareOptions, with_dataset
from data_tools.common import command_line
from data_tools.jobs import convert, prepare, rebalance
from data_tools.libsvm.options import ConvertOptions
from data_tools.rebalancing.options import RebalanceOptions
from deepfm import need

# The flags of each job.
JOBS = {"convert": ConvertOptions, "prepare": PrepareOptions, "rebalance": RebalanceOptions}
RUN = {"convert": convert.convert, "prepare": prepare.prepare, "rebalance": rebalance.rebalance}
MASTER = (
    "Where to run, if spark-submit does not say it: local[CORES,ATTEMPTS] in this process, or "
    "spark://HOST:PORT. Default: local[*,3], all cores and three attempts for a task."
)
# What the program of one machine asks, and Spark's own settings or the shuffle answer.
NOT_HERE = ("num_workers", "memory_mb")


def run(name: str, session, options):
    """Runs a job in a SparkSession."""
    from data_tools.engines.spark import Spark  # which needs Spark

    RUN[name](options, Spark(session))


def main(words):
    """Runs the job that the first of the words names; never returns."""
    name = words[1] if len(words) > 1 else ""
    if name == "prepare_criteo":  # the former name of the program
        name, words = "prepare", with_dataset(words)
    if name.lstrip("-") in ("help", "helpfull", "h"):
        _print_help()
        sys.exit(0)
    if name not in JOBS:
        sys.stderr.write(f"on_spark.py: '{name}' is not a job; give one of {', '.join(JOBS)}.\n")
        sys.exit(2)

    def start(options):  # flags are read, and can be checked, without Spark
        need("pyspark", "numpy", "pandas", "pyarrow")
        if name == "prepare":
            options = dataclasses.replace(options, guess=True)
        from data_tools.engines import spark_session

        with spark_session.session(f"deepfm {name}", flags.FLAGS.master) as session:
            run(name, session, options)

    flags.DEFINE_string("master", "", MASTER)
    sys.argv = [words[0], *words[2:]]
    command_line.run(start, JOBS[name], hosts=False, without=NOT_HERE)


def _print_help():
    """Prints what the program does, and the flags of every job."""
    print(f"{__doc__}\n  --master: {MASTER}")
    for name, options in JOBS.items():
        print(f"\n{name}:")
        for field in dataclasses.fields(options):
            if field.metadata and field.name not in NOT_HERE:
                print(f"  --{field.name}: {field.metadata['help']}")


if __name__ == "__main__":
    main(sys.argv)
