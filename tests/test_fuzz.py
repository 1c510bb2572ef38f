"""The readers and the converter against the explainers: a corpus of odd cases, and random ones.

tests/soak_fuzz.py does the same, as long as you like.
"""

import fuzz_checks
import pytest
import soak_fuzz

CORPUS = sorted(path for path in soak_fuzz.CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus_is_read_as_it_is_explained(path):
    outcome = fuzz_checks.check(path)
    assert outcome.differences == []
    assert outcome.accepted + outcome.refused > 0
    if path.parent.name == "check_metadata":
        assert outcome.accepted == (path.stem == "good")


@pytest.mark.parametrize(
    "case",
    [*soak_fuzz.line_cases(7, 400), *soak_fuzz.record_cases(7, 200)],
    ids=lambda case: case.check,
)
def test_drawn_files_are_read_as_they_are_explained(case, tmp_path):
    path = tmp_path / case.name
    path.write_bytes(case.data)
    outcome = getattr(fuzz_checks, case.check)(str(path), case.schema)
    assert outcome.differences == []
