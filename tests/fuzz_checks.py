"""Compares the program with the explainers on one file: both must get the same out of it.

Each check reads the file in every way that the program can, and returns the result, with one
sentence per difference.
"""

import contextlib
import json
import logging as std_logging
import os
import pathlib
import shutil
import tempfile
from typing import List, NamedTuple

import numpy as np
import reference
from absl import logging

from data_tools import libsvm_to_tfrecord
from deepfm.config import InputConfig
from deepfm.data import bad_records, datasets, formats, input_pipeline
from deepfm.data.reading import Source
from deepfm.errors import BadInput
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.modes.common.mode import Mode
from deepfm.records import data_file, dataset_json, libsvm_text, tfrecord, wire
from deepfm.records.schema import Schema
from deepfm.runtime.tf import tf


class Outcome(NamedTuple):
    """What became of the records of a file.

    Attributes:
        accepted, refused: records, by the explainers.
        differences: a sentence each.
        cases: what of the file is enough to see the first difference; None: all of it.
    """

    accepted: int
    refused: int
    differences: List[str]
    cases: List[bytes] = None


class Record(NamedTuple):
    """label 0 or 1; ids; values, each as the 32 bits of its float32."""

    label: int
    ids: List[int]
    values: List[int]


def check(path: pathlib.Path) -> Outcome:
    """A file of the corpus: its folder names the check, and its name tells the Schema and the kind
    of file, as in check_lines/found.field_size=3.pad=1.libsvm."""
    parts = path.name.split(".")[1:]
    told = dict(part.split("=") for part in parts if "=" in part)
    schema = Schema(**{"field_size": 1, **{key: int(value) for key, value in told.items()}})
    kind, name = path.parent.name, ".".join(["a", *(part for part in parts if "=" not in part)])
    if kind == "check_metadata":
        name = "dataset.json"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(str(path), f"{folder}/{name}")
        return globals()[kind](f"{folder}/{name}", schema)


def verdicts(payloads, numbers, schema):
    """[Record], None for what the explainers refuse."""
    found = (numbers(payload, schema) for payload in payloads)
    return [
        x and Record(int(x[0] > 0), x[1], np.float32(x[2]).view(np.uint32).tolist()) for x in found
    ]


def _compare(good, labels, ids, values):
    """Sentences on what differs from Records in a batch that was read, row by row."""
    if len(good) != len(labels):
        return [f"{len(good)} records expected, {len(labels)} read"]
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).tolist()
    found = zip(labels.tolist(), ids.tolist(), bits)
    return [
        f"record {i} of the good ones: expected {expected}, read {row}"
        for i, (expected, row) in enumerate(zip(good, found))
        if tuple(expected) != row
    ]


def _read_all(path, data_format, schema):
    """A file as training reads it: [labels, ids, values], and the sentence that stopped it.

    Raises:
        AssertionError: with the compiled kernels it is read otherwise than without them.
    """
    without, with_kernels = (
        _read(path, data_format, schema, ops) for ops in (TENSORFLOW, COMPILED)
    )
    for one, other in zip(without[0], with_kernels[0]):
        np.testing.assert_array_equal(one, other, f"{path}, read with the compiled kernels")
    assert without[1] == with_kernels[1]
    return without


def _read(path, data_format, schema, ops):
    files = [datasets.DataFile(path, os.path.getsize(path))]
    data = datasets.DataSet(files, data_format, schema.field_size, None)
    source = Source(data, InputConfig(1000, read_buffer_bytes=1 << 16), ops=ops)
    shape = [0, schema.field_size]
    batches = [(np.zeros(0), np.zeros(shape, np.int64), np.zeros(shape, np.float32))]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dataset = input_pipeline.make_input_fn(source, schema, Mode())()
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        features, labels = iterator.get_next()
        session.run(iterator.initializer)
        stopped = None
        try:
            with bad_records.naming_bad_records(data, schema):
                while True:
                    fetched = labels, features["feat_ids"], features["feat_vals"]
                    batches.append(session.run(fetched))
        except tf.errors.OutOfRangeError:
            pass
        except BadInput as error:
            stopped = str(error)
    return [np.concatenate(column) for column in zip(*batches)], stopped


def _check_bad(found, expected, path):
    """Sentences on how [BadRecord] differs from the places that the explainers refuse."""
    places = {bad.place for bad in found}
    wrong = [f"{place}: accepted, the explainers refuse it" for place in sorted(expected - places)]
    for bad in found:
        if bad.place not in expected:
            wrong.append(f"{bad}; the explainers accept it")
        elif libsvm_text.UNEXPLAINED in bad.reason or "\n" in str(bad) or len(str(bad)) > 600:
            wrong.append(f"not a sentence that explains: {str(bad)[:600]!r}")
        elif not str(bad).startswith(f"{path}{bad.place}: "):
            wrong.append(f"no file and place: {bad}")
    return wrong


# LibSVM.


def check_lines(path: str, schema: Schema) -> Outcome:
    """A LibSVM file: the lines that are read, those that are refused, and the converter."""
    with open(path, "rb") as f:
        lines = reference.records_of_text(f.read())
    found = verdicts([line for _, line in lines], libsvm_text.numbers, schema)
    places = {f":{n}" for (n, _), verdict in zip(lines, found) if not verdict}
    differences = _check_bad(list(bad_records.find_bad(path, formats.LIBSVM, schema)), places, path)
    cases = [
        line
        for n, line in lines
        if any(d.startswith((f":{n}:", f"{path}:{n}:")) for d in differences)
    ]

    read = _lines_that_training_reads(path)
    if read != [line for _, line in lines]:
        wrong = next((i for i, (a, (_, b)) in enumerate(zip(read, lines)) if a != b), len(read))
        differences.append(
            f"line {wrong} of those with a record is read as {read[wrong : wrong + 1]}"
        )
    good = [(line, verdict) for (_, line), verdict in zip(lines, found) if verdict]
    if differences:
        return Outcome(len(good), len(places), differences, cases)

    with _text_file(b"\n".join(line for line, _ in good)) as name:
        columns, stopped = _read_all(name, "libsvm", schema) if good else ([[]] * 3, None)
    if good:
        differences += [stopped] if stopped else _compare([v for _, v in good], *columns)
    if not differences:
        differences += _check_converter(path, schema, lines, found)
    return Outcome(len(good), len(places), differences)


@contextlib.contextmanager
def _text_file(text, suffix=".libsvm"):
    with tempfile.NamedTemporaryFile(suffix=suffix) as f:
        f.write(text)
        f.flush()
        yield f.name


def _lines_that_training_reads(path):
    data = datasets.DataSet([], "libsvm", None, None)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        chunks = data.format.read(tf.constant(path), data.files, 1 << 16, TENSORFLOW)
        dataset = chunks.unbatch().batch(1 << 20)
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        session.run(iterator.initializer)
        batch, lines = iterator.get_next(), []
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                lines += session.run(batch).tolist()
    return lines


def _convert(options):
    """(sentences logged, the BadInput that ended it or None)."""
    said, handler = [], std_logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.get_absl_logger()
    handlers, logger.handlers = logger.handlers, [handler]
    level = logger.level
    logger.setLevel(std_logging.INFO)
    try:
        libsvm_to_tfrecord.convert(options)
    except BadInput as error:
        return said, str(error)
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
    return said, None


def _check_converter(path, schema, lines, found):
    """Sentences on what the converter does that it should not, given the verdicts."""
    bad = [n for (n, _), verdict in zip(lines, found) if not verdict]
    good = [(n, line, v) for (n, line), v in zip(lines, found) if v]
    minus = lambda line: line.strip(reference.BLANKS).startswith(b"-")
    kinds = {n: minus(line) for n, line, v in good if v.label == 0}
    with tempfile.TemporaryDirectory() as folder:
        if len(set(kinds.values())) == 2:
            stopped = _convert(_options(path, folder, schema, len(bad)))[1]
            first = next(iter(kinds.values()))
            other = next(n for n, kind in kinds.items() if kind != first)
            start, end = f"{path}:{other}: label ", "use 0 and 1, or -1 and +1, not both."
            if not (stopped and stopped.startswith(start) and stopped.endswith(end)):
                return [f"labels 0 and -1, but the converter says {stopped!r}"]
            # And now without the lines of one kind, in whose place are blank ones.
            dropped = {n for n, kind in kinds.items() if kind != first}
            text = pathlib.Path(path).read_bytes().split(b"\n")
            text = [b"" if n in dropped else line for n, line in enumerate(text, start=1)]
            path = f"{folder}/one_kind.libsvm"
            pathlib.Path(path).write_bytes(b"\n".join(text))
            good = [(n, line, v) for n, line, v in good if n not in dropped]
        logged, stopped = _convert(_options(path, folder, schema, len(bad)))
        if not good:
            return [] if stopped and "hold no rows" in stopped else [f"no rows, but {stopped!r}"]
        if stopped:
            return [f"the converter ends with {stopped!r}"]
        skipped = [s.split(": ", 1)[1] for s in logged if s.startswith("Skipping bad record")]
        expected = [f"{path}:{n}: " for n in bad]
        if len(skipped) != len(bad) or not all(map(str.startswith, skipped, expected)):
            return [f"skipped {skipped[:9]} ..., expected {expected[:9]} ..."]
        return _check_converted(pathlib.Path(folder, "out"), schema, [v for _, _, v in good])


def _options(path, folder, schema, max_bad_records):
    return libsvm_to_tfrecord.ConvertOptions(
        path,
        f"{folder}/out",
        field_size=schema.field_size,
        feature_size=schema.feature_size,
        pad=schema.pad,
        id_offset=schema.id_offset,
        max_bad_records=max_bad_records,
    )


def _check_converted(folder, schema, good):
    (file,) = folder.glob("*.tfrecords")
    data = file.read_bytes()
    values = np.array([record.values for record in good], np.uint32).view(np.float32)
    expected = [
        tfrecord.framed(wire.write(record.label, record.ids, row))
        for record, row in zip(good, values)
    ]
    if data != b"".join(expected):
        at = 0
        for i, part in enumerate(expected):
            if data[at : at + len(part)] != part:
                return [f"row {i} is stored as {data[at : at + len(part)]}, expected {good[i]}"]
            at += len(part)
        return ["more is stored than was read"]
    said = json.loads((folder / "dataset.json").read_text())
    largest = max(i for record in good for i in record.ids)
    entry = {"rows": len(good), "bytes": len(data), "positives": sum(r.label for r in good)}
    right = {
        "format_version": 1,
        "field_size": schema.field_size,
        "feature_size": schema.feature_size or largest + 1,
        "files": {file.name: entry},
    }
    found = np.float32(said.pop("value_ranges")).T.tolist()
    if found != [values.min(0).tolist(), values.max(0).tolist()]:
        return [f"dataset.json says ranges {found} of {values}"]
    ids = said.pop("ids")
    if (ids["pad"], ids["id_offset"]) != (schema.pad, schema.id_offset):
        return [f"dataset.json says {ids}"]
    return [] if said == right else [f"dataset.json says {said}, expected {right}"]


# TFRecord.


def check_records(path: str, schema: Schema) -> Outcome:
    """A TFRecord file whose frames are whole: which records are refused, and what others hold."""
    with open(path, "rb") as f:
        frames = reference.frames(f.read())
    differences, cases, counts = [], [], None
    for with_labels in (True, False):
        schema = schema._replace(with_labels=with_labels)
        payloads = [payload for _, payload in frames]
        found = verdicts(payloads, wire.numbers, schema)
        places = _refused_places(frames, found)
        bad = list(bad_records.find_bad(path, formats.TFRECORD, schema))
        wrong = _check_bad(bad, places, path)
        cases += [
            payload
            for i, (at, payload) in enumerate(frames)
            if any(f": record {i} at byte {at}:" in d for d in wrong)
        ]
        good = [(payload, v) for payload, v in zip(payloads, found) if v]
        if not wrong:
            with _text_file(b"".join(tfrecord.framed(p) for p, _ in good), ".tfrecords") as name:
                columns, stopped = _read_all(name, "tfrecord", schema)
            wrong += [stopped] if stopped else _compare([v for _, v in good], *columns)
        differences += wrong
        counts = counts or (len(good), len(places))
    return Outcome(*counts, differences, cases)


def check_file(path: str, schema: Schema) -> Outcome:
    """A TFRecord file, plain or gzip, that may be damaged anywhere."""
    with open(path, "rb") as f:
        data = f.read()
    compressed = path.endswith(".gz")
    differences = []
    if compressed:
        refused = _refusal(path)
        data = reference.gunzip(data)
        if data is None:
            with contextlib.suppress(BadInput):  # it may stop anywhere, but has to end
                list(formats.TFRECORD.numbered(path))
            if not (refused and refused.startswith(f"{path}: ")):
                return Outcome(
                    0, 1, [f"not one whole gzip member, but check_gzip says {refused!r}"]
                )
            return Outcome(0, 1, [])
        differences += [f"check_gzip: {refused}"] if refused else []
    frames = reference.frames(data)
    if compressed:  # which is not read past its first damage
        damaged = [i for i, (_, payload) in enumerate(frames) if payload is None]
        frames = frames[: damaged[0] + 1] if damaged else frames
    read = [(int(place.split()[-1]), x) for place, x, _ in formats.TFRECORD.numbered(path)]
    if read != frames:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(read, frames)) if a != b), min(len(read), len(frames))
        )
        differences.append(
            f"frame {wrong}: {read[wrong : wrong + 1]}, expected {frames[wrong : wrong + 1]}"
        )
    found = verdicts([p or b"" for _, p in frames], wire.numbers, schema)
    places = _refused_places(frames, found)
    differences += _check_bad(
        list(bad_records.find_bad(path, formats.TFRECORD, schema)), places, path
    )
    good = [v for v in found if v]
    if not _reader_would_abort(data, frames):
        columns, stopped = _read_all(path, "tfrecord", schema)
        first = next((i for i, v in enumerate(found) if not v), None)
        if first is None:
            differences += [stopped] if stopped else _compare(good, *columns)
        else:
            place = f"{path}: record {first} at byte {frames[first][0]}: "
            if not (stopped and stopped.startswith(place)):
                differences.append(f"{place} is bad, but reading ends with {stopped!r}")
            n = len(columns[0])
            if n > first:
                differences.append(f"{n} records are read, of which record {first} is bad")
            differences += _compare(found[:n], *columns)
    return Outcome(len(good), len(places), differences)


def _refused_places(frames, found):
    """The places of the records of [(byte, payload)] whose verdicts are none."""
    numbered = enumerate(zip(frames, found))
    return {f": record {i} at byte {at}" for i, ((at, _), verdict) in numbered if not verdict}


def _refusal(path):
    try:
        data_file.check_gzip(path)
    except BadInput as error:
        return str(error)
    return None


def _reader_would_abort(data, frames):
    """Whether TensorFlow's reader would ask for more memory than there is, and end the program."""
    lengths = (reference.length_at(data, at) for at, payload in frames if payload is None)
    return any(length is not None and length >= 1 << 30 for length in lengths)


# dataset.json.


def check_metadata(path: str, schema: Schema) -> Outcome:
    """A dataset.json: either numbers that can be, or a sentence that names it."""
    try:
        found = dataset_json.load(str(pathlib.Path(path).parent))
    except BadInput as error:
        good = (
            str(error).startswith(f"{path}: ") and "\n" not in str(error) and len(str(error)) < 600
        )
        return Outcome(0, 1, [] if good else [f"not a sentence: {error}"])
    entries = found["files"].values()
    numbers = [found["field_size"], found["feature_size"]]
    numbers += [e[key] for e in entries for key in ("rows", "bytes", "positives")]
    good = all(type(n) is int and 0 <= n < 2**63 for n in numbers) and min(numbers[:2]) > 0
    good = good and all(e["positives"] <= e["rows"] for e in entries)
    return Outcome(1, 0, [] if good else [f"accepted: {found}"])
