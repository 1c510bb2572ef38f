"""What a tool says of its progress."""

from absl import logging

from data_tools.common import progress


def test_a_log_says_how_much_is_done_and_how_long_the_rest_takes(monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    told = progress.Progress("Counting", 8, "MB")
    for _ in range(2):
        told.add(3)
    assert len(lines) == 2
    assert lines[1].startswith("Counting: 75 % of 8 MB in 0 s, about 0 s left.")
