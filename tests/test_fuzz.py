"""The readers and the converter against the explainers: a corpus of odd cases, and random ones.

tests/soak_fuzz.py does the same, as long as you like.
"""

import fuzz_checks
import pytest
import soak_fuzz

from deepfm.records.schema import Schema

CORPUS = sorted(path for path in soak_fuzz.CORPUS.glob("*/*") if path.is_file())


def schema_of(path):
    """The Schema in a file's name, as in found.field_size=3.pad=1.libsvm."""
    told = [part.split("=") for part in path.name.split(".") if "=" in part]
    return Schema(**{"field_size": 1, **{key: int(value) for key, value in told}})


def names(path):
    """The name that a case is checked under."""
    if path.parent.name == "check_metadata":
        return "dataset.json"
    return "a" + "".join(f".{part}" for part in path.name.split(".")[1:] if "=" not in part)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus_is_read_as_it_is_explained(path, tmp_path):
    copy = tmp_path / names(path)
    copy.write_bytes(path.read_bytes())
    outcome = getattr(fuzz_checks, path.parent.name)(str(copy), schema_of(path))
    assert outcome.differences == []
    assert outcome.accepted + outcome.refused > 0
    if path.parent.name == "check_metadata":
        assert outcome.accepted == (path.stem == "good")


@pytest.mark.parametrize(
    "case",
    [
        *soak_fuzz.line_cases(7, 400),
        *soak_fuzz.record_cases(7, 200),
        *soak_fuzz.metadata_cases(7, 60),
    ],
    ids=lambda case: case.check,
)
def test_drawn_files_are_read_as_they_are_explained(case, tmp_path):
    path = tmp_path / case.name
    path.write_bytes(case.data)
    outcome = getattr(fuzz_checks, case.check)(str(path), case.schema)
    assert outcome.differences == []
