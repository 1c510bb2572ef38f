"""formats.py: a format of records is one entry of a table."""

import pathlib
import re

import pytest
from conftest import ROOT

from deepfm.config import InputConfig
from deepfm.data import bad_records, datasets, formats
from deepfm.data.input_pipeline import make_input_fn
from deepfm.data.reading import Source
from deepfm.data.records import Schema
from deepfm.errors import BadInput
from deepfm.modes.common.mode import Mode
from deepfm.records.schema import Shape
from deepfm.runtime.tf import tf


def test_no_other_file_of_data_names_a_format():
    found = [
        path.name
        for path in pathlib.Path(ROOT, "deepfm", "data").glob("*.py")
        if re.search(r"[\"'](tfrecord|libsvm)[\"']", path.read_text())
    ]
    assert found == ["formats.py"]


def test_the_flag_takes_each_format():
    assert InputConfig.settings["data_format"].choices == ("auto", *formats.FORMATS)


@pytest.fixture
def reversed_lines(monkeypatch):
    """A format of its own: LibSVM lines that are written backwards, with other separators, so that
    they look like a CSV table's, and with a suffix that no other format has."""

    def numbered(path):
        with open(path, "rb") as f:
            for number, line in enumerate(f.read().splitlines(), start=1):
                yield f":{number}", line[::-1].replace(b",", b" ").replace(b"=", b":"), ""

    def read(path, files, buffer_bytes, ops):
        lines = lambda path: (line for _, line, _ in numbered(path.decode()))
        chunks = tf.data.Dataset.from_generator(lines, tf.string, [], [path]).batch(formats.CHUNK)
        return ops.pack(chunks)

    def first_shape(path):
        return Shape(len(next(numbered(path))[1].split()) - 1)

    entry = formats.LIBSVM._replace(
        name="reversed", title="Reversed", suffixes=(".vsb",), numbered=numbered, read=read,
        first_shape=first_shape,
    )  # fmt: skip
    monkeypatch.setattr(formats, "FORMATS", {entry.name: entry, **formats.FORMATS})


def test_another_format_is_read_counted_and_explained_by_its_entry(reversed_lines, tmp_path):
    (tmp_path / "a.vsb").write_bytes(b"1,1=1,2=5"[::-1] + b"\n" + b"0,3=1,4=1"[::-1] + b"\n")
    data = datasets.find(str(tmp_path), "training_data_dir", kinds=formats.FORMATS)
    assert data.format.name == "reversed" and datasets.count_rows(data).rows == 2
    assert data.format.first_shape(data.files[0].path).field_size == 2
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dataset = make_input_fn(Source(data, InputConfig(2)), Schema(2, 10), Mode())()
        features, labels = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        features, labels = session.run([features, labels])
    assert labels.tolist() == [1, 0] and features["feat_ids"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(BadInput, match=r"a\.vsb:2: feature id 4 is not below feature_size 4"):
        bad_records.check_first_records(data, Schema(2, 4))
