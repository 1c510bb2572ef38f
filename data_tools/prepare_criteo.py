"""The former name of data_tools.prepare, which it runs; its rows are Criteo's if no flag says."""

import runpy
import sys

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
from data_tools.click_logs.options import with_dataset

if __name__ == "__main__":
    sys.argv = with_dataset(sys.argv)
    runpy.run_module("data_tools.prepare", run_name="__main__", alter_sys=True)
