"""Summarizes a data set: rows, labels, and the ids and values of each field.

    python -m data_tools.inspect_dataset --data=data/train
    python -m data_tools.inspect_dataset --data='raw/*.libsvm.gz' --json > raw.json
    python -m data_tools.inspect_dataset --data=from_spark --write

Reads TFRecord and LibSVM, plain or gzip. If the rows of a LibSVM file differ in length, field j is
the j-th pair of each row that has one. Memory grows with the distinct ids, not with the rows.

--write adds the dataset.json that records of Spark or another program lack.
"""

import dataclasses
import json
import os
import posixpath
import sys
from typing import List, Optional

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
import numpy as np
from absl import logging

from data_tools.common import command_line, tallies
from data_tools.common.command_line import REQUIRED, flag
from data_tools.common.progress import Progress
from data_tools.libsvm import pieces
from data_tools.rebalancing import record_blocks
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json, frames, libsvm_text
from deepfm.records.data_file import DataFile
from deepfm.records.schema import BadRecord, Schema
from deepfm.records.text_blocks import LineRange
from deepfm.runtime import memory

BAR = 40  # characters of a bar of label rate 1


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """The flags, as plain values."""

    # fmt: off
    data: str = flag(
        "TFRecord or LibSVM files: a directory, a glob, or a comma list; local or s3://.", REQUIRED)
    field_size: Optional[int] = flag(
        "Fields (ids) that every row must have; set it to find rows of another length. Default: as "
        "many as the first record for TFRecord, any number for LibSVM.",
        lower_bound=1, upper_bound=memory.MAX_FIELDS)
    json: bool = flag("Print JSON, for other programs, instead of tables.", default=False)
    write: bool = flag(
        "Also write dataset.json, with what was counted, into --data, which must be a local "
        "directory; use it for records of Spark or another program, which have none.",
        default=False)
    overwrite: bool = flag("With --write, replace the dataset.json that is there.", default=False)
    # fmt: on


class Summary:
    """The number, the sum, the zeros and the range of some float32 values."""

    def __init__(self):
        self.values = self.zeros = 0
        self.total, self.low, self.high = 0.0, np.inf, -np.inf

    def add_values(self, values):
        """Adds float32 [n], n > 0."""
        self.values += len(values)
        self.zeros += int(np.count_nonzero(values == 0))
        self.total += float(values.sum(dtype=np.float64))
        self.low, self.high = min(self.low, values.min()), max(self.high, values.max())


class WeightSummary(Summary):
    """The statistics of the weights of weighted examples."""

    of_positives = 0.0  # the sum of their weights

    def add(self, weights, labels):
        """Adds float32 [n] each, n > 0."""
        self.add_values(weights)
        self.of_positives += float(weights[labels > 0].sum(dtype=np.float64))

    def describe(self):
        """The statistics as --json prints them; label_rate is that of weighted examples."""
        return {
            "sum": self.total,
            "mean": self.total / self.values,
            "min": float(self.low),
            "max": float(self.high),
            "zero_share": self.zeros / self.values,
            "label_rate": self.of_positives / self.total if self.total else None,
        }


class FieldSummary(Summary):
    """The statistics of a field: how often each id occurs, and those of its values."""

    def __init__(self):
        super().__init__()
        self.rows, self._tally = 0, tallies.Tally()

    def add(self, ids, values, records):
        """Adds ids int64 [n] and values float32 [n], n > 0, that are in records int64 [n]."""
        self.add_values(values)
        self.rows += 1 + np.count_nonzero(np.diff(records))
        self._tally.add(*np.unique(ids, return_counts=True))

    def ids(self):
        """The distinct ids so far, int64 [n], ascending."""
        return self._tally.result()[0]

    def describe(self, field):
        """The statistics as a plain dictionary, as --json prints them."""
        ids, counts = self._tally.result()
        if not self.rows:  # no record has a value in this field
            self.low = self.high = 0
            ids, counts = np.array([-1]), np.array([0])
        top = int(np.argmax(counts))
        return {
            "field": field,
            "rows": int(self.rows),
            "values": self.values,
            "distinct_ids": len(ids) if self.rows else 0,
            "smallest_id": int(ids[0]),
            "largest_id": int(ids[-1]),
            "most_frequent_id": int(ids[top]),
            "most_frequent_share": int(counts[top]) / max(self.values, 1),
            "min_value": float(self.low),
            "max_value": float(self.high),
            "mean_value": self.total / max(self.values, 1),
            "zero_share": self.zeros / max(self.values, 1),
        }


def main(options: InspectOptions):
    own_files = command_line.this_host(options.data).own_files
    check_write(options)
    summary = inspect(options.data, options.field_size, own_files)
    if options.write:
        write_metadata(options.data, summary)
    text = json.dumps(summary, indent=1) + "\n" if options.json else format_tables(summary)
    sys.stdout.write(text)


def inspect(data: str, field_size: Optional[int] = None, own_files: bool = False) -> dict:
    """Reads a data set once and returns what --json prints.

    Args:
        data: as --data.
        field_size: as --field_size.
        own_files: whether no other host sees these files, which may be part of a data set.

    Raises:
        BadInput: a record is bad; it names the file and the line, or the record and its byte.
    """
    found = datasets.find(data, "data", partial=own_files)
    is_text = found.data_format == "libsvm"
    if is_text and found.weighted is None:
        try:
            libsvm_text.check_labelled(found)
        except BadInput as error:
            logging.warning("%s", error)
    progress = Progress("Reading", sum(f.bytes for f in found.files) / 1e6, "MB")
    fields: List[FieldSummary] = []
    shortest, files, counted = np.inf, [], bool(found.multi_valued)
    shapes = [(libsvm_text if is_text else frames).first_shape(x.path) for x in found.files]
    weighted = bool(found.weighted or any(first.weighted for first in shapes))
    weights = WeightSummary() if weighted else None
    for file, first in zip(found.files, shapes):
        rows = positives = 0
        counted = counted or first.multi_valued
        if first.multi_valued:  # each of its fields counts, also one that no record has
            field_size = field_size or first.field_size
            fields += [FieldSummary() for _ in range(field_size - len(fields))]
        if is_text:
            blocks = record_blocks.read_lines(LineRange(file.path), weighted, field_size)
        else:
            size = field_size or first.field_size or 1
            schema = Schema(size, multi_valued=first.multi_valued, weighted=weighted)
            blocks = record_blocks.read(file.path, schema, skip=0)
        for block in blocks:
            if isinstance(block, BadRecord):
                raise BadInput(str(block))
            batch = block.batch
            if not len(batch.labels):
                continue
            if batch.weights is not None:
                weights.add(batch.weights, batch.labels)
            rows += len(batch.labels)
            positives += int(np.count_nonzero(batch.labels > 0))
            lengths = _add(fields, batch)
            shortest = min(shortest, lengths.min())
            progress.add(block.read / 1e6)
        if not rows:
            logging.warning("%s has no records.", file.path)
        files.append({"path": file.path, "bytes": file.bytes, "rows": rows, "positives": positives})
    progress.finish()
    rows, positives = (sum(file[key] for file in files) for key in ("rows", "positives"))
    if not rows:
        raise BadInput(f"--data={data}: the files have no records.")
    if not fields:
        raise BadInput(f"--data={data}: no record has an id, so there is nothing to learn from.")
    described = [field.describe(i) for i, field in enumerate(fields)]
    _, fields_of_ids = np.unique(np.concatenate([x.ids() for x in fields]), return_counts=True)
    summary = {
        "data": data,
        "data_format": found.data_format,
        "rows": rows,
        "positives": positives,
        "label_rate": positives / rows,
        "field_size": len(fields),
        "shortest_row": int(shortest),
        "multi_valued": counted or any(field["values"] > field["rows"] for field in described),
        "feature_size": 1 + max((d["largest_id"] for d in described), default=-1),
        "shared_ids": int(np.count_nonzero(fields_of_ids > 1)),
        "weights": weights and weights.describe(),
        "fields": described,
        "files": files,
    }
    return {**summary, "mismatches": _mismatches(summary)}


def _add(summaries, batch):
    """Adds each pair of a Batch to the summary of its field; returns pairs per record, int64."""
    counts = np.ones(batch.ids.shape, np.int64) if batch.counts is None else batch.counts
    lengths = counts.sum(axis=1)
    there = np.arange(batch.ids.shape[1]) < lengths[:, np.newaxis]
    fields = np.tile(np.arange(counts.shape[1]), len(counts)).repeat(counts.ravel())
    order = np.argsort(fields, kind="stable")  # field by field
    ids, values = batch.ids[there][order], batch.values[there][order]
    records = np.repeat(np.arange(len(lengths)), lengths)[order]
    ends = np.cumsum(np.bincount(fields, minlength=len(summaries)))
    summaries.extend(FieldSummary() for _ in range(len(ends) - len(summaries)))
    for summary, start, end in zip(summaries, [0, *ends[:-1]], ends):
        if start < end:
            summary.add(ids[start:end], values[start:end], records[start:end])
    return lengths


def _mismatches(summary):
    """Sentences about where the dataset.json beside the files differs from what was found."""
    sentences = []
    files = {posixpath.split(file["path"]): file for file in summary["files"]}
    for folder in dict.fromkeys(folder for folder, _ in files):
        metadata = dataset_json.load(folder)
        if metadata is None:
            continue
        path = posixpath.join(folder, dataset_json.METADATA)
        said = metadata["field_size"], metadata["feature_size"]
        if said[0] != summary["field_size"]:
            sentences.append(f"{path} says field_size {said[0]}, found {summary['field_size']}.")
        if said[1] < summary["feature_size"]:
            sentences.append(
                f"{path} says feature_size {said[1]}, found id {summary['feature_size'] - 1}."
            )
        if summary["weights"] and not metadata.get("weighted"):
            sentences.append(f"{path} does not say that examples are weighted, found weights.")
        for name, stated in metadata["files"].items():
            file = files.get((folder, name))
            for key in ("bytes", "rows", "positives") if file else ():
                if stated[key] != file[key]:
                    sentences.append(
                        f"{path} says {name} has {stated[key]} {key}, found {file[key]}."
                    )
    return sentences


def check_write(options):
    """Refuses (BadInput) --write where it cannot put a dataset.json, or may not."""
    if options.overwrite and not options.write:
        raise BadInput("--overwrite has no effect without --write; leave it out.")
    if not options.write:
        return
    if not os.path.isdir(options.data):
        raise BadInput(
            f"--write: --data={options.data} is not a local directory; name the one that holds the "
            "files."
        )
    path = os.path.join(options.data, dataset_json.METADATA)
    if os.path.exists(path) and not options.overwrite:
        raise BadInput(f"--write: {path} is already there; --overwrite replaces it.")


def write_metadata(data: str, summary: dict):
    """Writes the dataset.json of a directory from what `inspect` found, in place of any there.

    What cannot be counted is kept from an older one that describes all files: the sampling rates,
    the fingerprint of the feature map, the number of hash buckets, and a larger feature_size.

    Raises:
        BadInput: the rows differ in their number of fields.
    """
    if summary["shortest_row"] != summary["field_size"] and not summary["multi_valued"]:
        raise BadInput(
            f"--write: the rows have {summary['shortest_row']} to {summary['field_size']} ids, but "
            "dataset.json is for rows of equally many; convert them with libsvm_to_tfrecord --pad "
            "or --multi_valued."
        )
    known = datasets.find(data, "data")
    extremes = ([field[x] for field in summary["fields"]] for x in ("min_value", "max_value"))
    files = [DataFile(*(f[x] for x in DataFile._fields[:4])) for f in summary["files"]]
    dataset_json.write(
        data, summary["field_size"], max(summary["feature_size"], known.feature_size or 0), files,
        known.sampling_rates, multi_valued=summary["multi_valued"],
        hash_buckets=known.hash_buckets or 0, feature_map=known.feature_map,
        weighted=bool(summary["weights"]),
        **{**known.made, "value_ranges": pieces.ranges(*extremes)},
    )  # fmt: skip
    logging.info("Wrote %s.", os.path.join(data, dataset_json.METADATA))


def format_tables(summary: dict) -> str:
    """The summary as a table for people."""
    lines = [
        f"{summary['data']}: {summary['data_format']}, {len(summary['files'])} files",
        f"rows          {summary['rows']:,}",
        f"label rate    {summary['label_rate']:.4f} ({summary['positives']:,} positive)",
        "fields        " + _fields(summary),
        f"feature_size  {summary['feature_size']:,} (largest id + 1)",
    ]
    shared, weights = summary["shared_ids"], summary["weights"]
    if shared:
        those = "is" if shared == 1 else "are"
        line = f"{shared:,} {those} in more than one field; these fields share embeddings"
        lines.append(f"shared ids    {line}")
    if weights:
        line = "{min:g} to {max:g}, mean {mean:.6g}, {zero_share:.2%} of them 0".format(**weights)
        rate = weights["label_rate"]
        line += "" if rate is None else f", label rate by weight {rate:.4f}"
        lines.append(f"weights       {line}")
    lines.append("")
    header = ("field", "rows", "values", "distinct ids", "ids from", "to", "top id", "top share")
    header += ("min value", "max value", "mean", "zeros")
    table = [header]
    for field in summary["fields"]:
        *whole, top_share, low, high, mean, zeros = field.values()
        numbers = [f"{low:.6g}", f"{high:.6g}", f"{mean:.6g}", f"{zeros:.2%}"]
        table.append([*(f"{n:,}" for n in whole), f"{top_share:.2%}", *numbers])
    lines += _align(table)
    table = [("file", "rows", "label rate", "")]
    for file in summary["files"]:
        rate = file["positives"] / max(file["rows"], 1)
        bar = ("#" * round(rate * BAR)).ljust(BAR, ".")
        table.append((file["path"], f"{file['rows']:,}", f"{rate:.4f}", bar))
    lines += ["", *_align(table)]
    lines += ["", *summary["mismatches"]] if summary["mismatches"] else []
    return "\n".join(lines) + "\n"


def _fields(summary):
    low, high = summary["shortest_row"], summary["field_size"]
    if summary["multi_valued"]:
        return f"{high}, with any number of values each"
    return str(high) if low == high else f"{low} to {high}, by row"


def _align(table):
    """Formats rows of equal length as lines with right-aligned columns."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths)).rstrip() for row in table]


if __name__ == "__main__":
    command_line.run(main, InspectOptions)
