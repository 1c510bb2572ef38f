"""Fuzzes the converter and the readers, as long as you like.

    .venv/bin/python tests/soak_fuzz.py --lines=1000000 --records=100000 --seed=1

Exits with 1 at the first difference from the explainers, crash or hang, and saves the case in
tests/corpus, so that the tests run it from then on. A run is a function of its flags.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fuzz_checks
import mutation
import reference
from absl import logging

from data_tools.common.progress import Progress
from deepfm.records import text_blocks, wire
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
            [(None, 0), ((1 << 63) - 1, 1 << 62), (99, -1), (97, 0), (100, 1)]
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
        data = b"".join(map(wire.framed, payloads))
        yield Case("check_records", schema, "a.tfrecords", data, size)
    for i in range(0, count - whole, DAMAGED):
        drawn = random.Random(f"files {seed} {i}")
        schema = Schema(drawn.choice([1, 2, 40]))
        data, compressed = mutation.record_file(drawn, schema.field_size, DAMAGED)
        name = "a.tfrecords.gz" if compressed else "a.tfrecords"
        yield Case("check_file", schema, name, data, DAMAGED)


def metadata_cases(seed, count):
    for i in range(count):
        drawn = random.Random(f"metadata {seed} {i}")
        yield Case("check_metadata", Schema(1), "dataset.json", mutation.metadata(drawn), 1)


def _serve(pipe):
    """A process that checks cases: what crashes or hangs ends it, and not the soak."""
    logging.set_verbosity(logging.ERROR)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    with open(os.devnull, "w") as nowhere:  # protobuf's own complaints
        os.dup2(nowhere.fileno(), 2)
    text_blocks.TASK, text_blocks.BLOCK = 150000, 40000  # a file has several of them
    while True:
        case = pipe.recv()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, case.name)
            path.write_bytes(case.data)
            try:
                outcome = getattr(fuzz_checks, case.check)(str(path), case.schema)
            except Exception as error:  # whatever it is, it should not have come so far
                sentence = f"{type(error).__name__}: {str(error)[:300]}"
                outcome = fuzz_checks.Outcome(0, 0, [sentence])
            pipe.send(outcome)


class Checker:
    """Checks cases in a separate process, which it replaces if it dies."""

    def __init__(self):
        self._process = None

    def check(self, case):
        """The Outcome of a case; (None, sentence) if the process died or hung."""
        if self._process is None:
            self._pipe, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("fork")
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(case)
            if self._pipe.poll(SECONDS):
                return self._pipe.recv(), None
            ended = f"did not end within {SECONDS} s"
        except (EOFError, ConnectionError):
            self._process.join()
            ended = f"crashed (exit code {self._process.exitcode})"
        self.close()
        return None, ended

    def close(self):
        if self._process:
            self._process.kill()
            self._process.join()
            self._process = None


def keep(case, outcome, checker):
    """Writes what shows the fault into the corpus; returns its path."""
    data = case.data
    if outcome and outcome.cases:
        cases = sorted(set(outcome.cases), key=len)[:5]
        data = (
            b"\n".join(cases) if case.check == "check_lines" else b"".join(map(wire.framed, cases))
        )
    elif case.check in ("check_lines", "check_records"):
        data = _shrunk(case, checker)
    told = "".join(f"{k}={int(v)}." for k, v in zip(RULES, case.schema) if v)
    suffix = case.name.split(".", 1)[1]
    path = CORPUS / case.check / f"found-{hashlib.sha1(data).hexdigest()[:8]}.{told}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _shrunk(case, checker):
    """The part of a case's lines or records that is left when halves without the fault are gone."""
    if case.check == "check_lines":
        parts, join = case.data.splitlines(keepends=True), b"".join
    else:
        parts = [payload for _, payload in reference.frames(case.data)]
        join = lambda payloads: b"".join(map(wire.framed, payloads))
    while len(parts) > 1:
        for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
            outcome, ended = checker.check(case._replace(data=join(half)))
            if ended or outcome.differences:
                parts = half
                break
        else:
            break
    return join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=1000000)
    parser.add_argument("--records", type=int, default=100000)
    parser.add_argument("--metadata", type=int, default=10000, help="dataset.json files")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    logging.set_verbosity(logging.INFO)
    checker, start = Checker(), time.time()
    failures = 0
    kinds = {
        "lines": line_cases(flags.seed, flags.lines),
        "records": record_cases(flags.seed, flags.records),
        "metadata": metadata_cases(flags.seed, flags.metadata),
    }
    for kind, cases in kinds.items():
        counts, began = collections.Counter(), time.time()
        progress = Progress(f"Fuzzing {kind}", vars(flags)[kind], kind)
        for case in cases:
            outcome, ended = checker.check(case)
            progress.add(case.size)
            if outcome:
                counts.update(accepted=outcome.accepted, refused=outcome.refused)
            if ended or outcome.differences:
                counts.update(
                    crashes=bool(ended), differences=len(outcome.differences if outcome else ())
                )
                failures += 1
                path = keep(case, outcome, checker)
                said = ended or "; ".join(outcome.differences[:3])
                logging.error("%s: %s", path, said[:2000])
        counts["seconds"] = round(time.time() - began)
        sys.stdout.write(
            f"{kind}: "
            + json.dumps(
                {k: counts[k] for k in ("accepted", "refused", "differences", "crashes", "seconds")}
            )
            + "\n"
        )
    checker.close()
    sys.stdout.write(f"{failures} cases failed, {time.time() - start:.0f} s.\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
