"""Fuzzes the converter and the readers, as long as you like.

    .venv/bin/python tests/soak_fuzz.py --lines=1000000 --records=100000 --seed=1

A case is in tests/corpus while it is checked, and stays there if what is read differs from the
explainers, crashes or hangs, so that the tests run it from then on. Exit codes: 0 if nothing did.
A run is a function of its flags.
"""

import argparse
import collections
import hashlib
import os
import pathlib
import random
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fuzz_checks
import mutation
from absl import logging

from deepfm.records import text_blocks, tfrecord
from deepfm.records.schema import Schema
from deepfm.runtime.tf import tf

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"
BATCH = 5000  # lines or records of a file
DAMAGED = 100  # records of a file that is damaged as a whole; one record in five is in such a file
RULES = Schema._fields[:4]  # what a case may set, and its file's name tells
SECONDS = 300  # that a file may take


class Case(collections.namedtuple("Case", "check schema name data size")):
    """A file to check: which check of fuzz_checks, its Schema, its name, its bytes, its records."""


def line_cases(seed, lines):
    for i in range(0, lines, BATCH):
        drawn = random.Random(f"lines {seed} {i}")
        feature_size, offset = drawn.choice(
            [(None, 0), ((1 << 31) - 1, 1 << 30), (99, -1), (97, 0), (100, 1)]
        )
        schema = Schema(drawn.choice([1, 2, 3, 5]), feature_size, drawn.random() < 0.3, offset)
        labels = drawn.choice([[b"0", b"1"], [b"-1", b"+1"], [b"0", b"1"], [b"0", b"-1", b"1"]])
        size = min(BATCH, lines - i)
        text = mutation.text(drawn, size, schema.field_size, labels)
        yield Case("check_lines", schema, "a.libsvm", text, size)


def record_cases(seed, count):
    whole = count * 4 // 5
    for i in range(0, whole, BATCH):
        drawn = random.Random(f"records {seed} {i}")
        schema = Schema(drawn.choice([1, 2, 3, 40]), drawn.choice([None, 10000]))
        size = min(BATCH, whole - i)
        payloads = [mutation.example(drawn, schema.field_size) for _ in range(size)]
        data = b"".join(map(tfrecord.framed, payloads))
        yield Case("check_records", schema, "a.tfrecords", data, size)
    for i in range(0, count - whole, DAMAGED):
        drawn = random.Random(f"files {seed} {i}")
        schema = Schema(drawn.choice([1, 2, 40]))
        data, compressed = mutation.record_file(drawn, schema.field_size, DAMAGED)
        name = "a.tfrecords.gz" if compressed else "a.tfrecords"
        yield Case("check_file", schema, name, data, DAMAGED)


def keep(case, data):
    """Writes the bytes of a case into the corpus; returns their path."""
    told = "".join(f"{k}={int(v)}." for k, v in zip(RULES, case.schema) if v)
    suffix = case.name.split(".", 1)[1]
    path = CORPUS / case.check / f"found-{hashlib.sha1(data).hexdigest()[:8]}.{told}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def check(case):
    """The Outcome of a case, with the path of what shows a difference, which stays in the corpus.

    A crash, or an alarm after SECONDS, ends the soak, and leaves the case there, too.
    """
    path = keep(case, case.data)
    signal.alarm(SECONDS)
    try:
        outcome = fuzz_checks.check(path)
    except Exception as error:  # whatever it is, it should not have come so far
        sentence = f"{type(error).__name__}: {str(error)[:300]}"
        outcome = fuzz_checks.Outcome(0, 0, [sentence])
    signal.alarm(0)
    if outcome.cases or not outcome.differences:
        path.unlink()
    if outcome.cases:
        cases = sorted(set(outcome.cases), key=len)[:5]
        join = (
            b"\n".join
            if case.check == "check_lines"
            else lambda x: b"".join(map(tfrecord.framed, x))
        )
        path = keep(case, join(cases))
    return outcome, path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=1000000)
    parser.add_argument("--records", type=int, default=100000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    logging.set_verbosity(logging.ERROR)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    with open(os.devnull, "w") as nowhere:  # protobuf's own complaints
        os.dup2(nowhere.fileno(), 2)
    text_blocks.TASK, text_blocks.BLOCK = 150000, 40000  # a file has several of them
    failures = 0
    kinds = {
        "lines": line_cases(flags.seed, flags.lines),
        "records": record_cases(flags.seed, flags.records),
    }
    for kind, cases in kinds.items():
        accepted, refused, began = 0, 0, time.time()
        for case in cases:
            outcome, path = check(case)
            accepted, refused = accepted + outcome.accepted, refused + outcome.refused
            if outcome.differences:
                failures += 1
                print(f"{path}: {'; '.join(outcome.differences[:3])[:2000]}", flush=True)
        took = time.time() - began
        print(f"{kind}: {accepted} accepted, {refused} refused, {took:.0f} s", flush=True)
    print(f"{failures} cases failed.")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
