"""What a tool shows of its progress: a bar in a terminal, lines elsewhere."""

import io
import sys

import pytest
from absl import logging

from data_tools.common import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_a_bar_and_a_log_lines(monkeypatch, terminal):
    shown, lines = io.StringIO(), []
    monkeypatch.setattr(shown, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(logging, "info", lambda text, *args: lines.append(text % args))
    for name in ("SECONDS_BETWEEN_BARS", "SECONDS_BETWEEN_LINES"):
        monkeypatch.setattr(progress, name, 0)
    told = progress.Progress("Counting", 8, "MB")
    for _ in range(2):
        told.add(3)
    told.finish()
    if terminal:
        bars = shown.getvalue().split("\r")[1:]
        assert [bar[10:40].count("=") for bar in bars] == [11, 22, 30]
        assert bars[-1].endswith("] 100% of 8 MB\n") and not lines
    else:
        assert not shown.getvalue() and len(lines) == 2
        assert lines[1].startswith("Counting: 75 % of 8 MB in 0 s, about 0 s left.")
