"""Checks what every power cut leaves: thousands by recovery alone, hundreds by whole trainings.

nice .venv/bin/python tests/soak_power_cuts.py [--points=5000] [--trainings=200]
"""

import argparse
import os
import pathlib
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from absl import logging  # noqa: E402
from test_power_cuts import Training, sampled, tools  # noqa: E402


def main(points, trainings):
    logging.set_verbosity(logging.FATAL)
    checked, failed = 0, []
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(os.path.realpath(folder))
        (top / "tools").mkdir()
        runs = [(f"training that keeps {keep}", Training(top / f"keep{keep}", 12, keep))
                for keep in (1, 2)]  # fmt: skip
        for i, tool in enumerate(tools(top / "tools")):
            checked += each(f"tool {i}", tool.states(), tool.check, failed)
        for name, run in runs:
            number = sum(1 for _ in run.states())
            share = min(-(-(points - checked) // (2 if run is runs[0][1] else 1)), number)
            found = ((x, None, y) for x, y in sampled(run, share))
            checked += each(name, found, run.check, failed)
        done = 0
        for name, run in runs:
            found = ((x, None, y) for x, y in sampled(run, trainings // 2))
            check = lambda _, tree, run=run: run.check_by_training(tree)
            done += each(f"{name}, by training", found, check, failed)
    print(
        f"{checked} power cuts by recovery alone, {done} by whole trainings; {len(failed)} failed"
    )
    for line in failed[:20]:
        print(line)
    return bool(failed) or checked < points


def each(name, states, check, failed):
    count = 0
    for names, _, found in states:
        count += 1
        try:
            check(names, found)
        except Exception as error:  # an AssertionError, or what the recovery raised
            failed.append(f"{name}, {count}: {type(error).__name__}: {str(error)[:300]}")
    print(f"{name}: {count}, {len(failed)} failed so far", flush=True)
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=5000)
    parser.add_argument("--trainings", type=int, default=200)
    asked = parser.parse_args()
    sys.exit(main(asked.points, asked.trainings))
