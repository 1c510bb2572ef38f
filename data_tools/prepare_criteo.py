"""The former name of data_tools.prepare, which it runs."""

import runpy

if __name__ == "__main__":
    runpy.run_module("data_tools.prepare", run_name="__main__", alter_sys=True)
