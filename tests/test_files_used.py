"""A reader who follows a conversion and a short training has to know of few files."""

import files_used

# At most so many files, and lines of those of both together.
CONVERSION, BOTH, LINES = 25, 72, 12_800


def test_a_conversion_and_a_short_training_run_few_files_and_lines(tmp_path):
    conversion, both = files_used.conversion_and_training(tmp_path)
    assert len(conversion) <= CONVERSION
    assert len(both) <= BOTH
    assert files_used.lines(both) <= LINES
    # Lines are no tables: none of what reads these may run.
    assert not [x for x in conversion if x.startswith(("data_tools/tables/", "data_tools/click_"))]
