"""Says what replaced this program, which merged the dataset.json of several hosts into one."""

import sys

if __name__ == "__main__":
    sys.stderr.write(
        "merge_metadata.py: this program is gone: train.py and all tools read a data set in parts "
        "as it is; to write it anew as one, use 'python -m data_tools.on_spark rebalance' "
        "(docs/spark.md), or data_tools.rebalance on one host.\n"
    )
    sys.exit(2)
