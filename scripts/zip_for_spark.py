"""Zips the Python code that data_tools.on_spark needs, for spark-submit --py-files.

    python scripts/zip_for_spark.py
    spark-submit --py-files deepfm_spark.zip data_tools/on_spark.py rebalance --input=...

The same sources give the same bytes. Needs nothing but Python 3.
"""

import argparse
import os
import pathlib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip file can hold


def write_zip(path):
    """Writes the zip file, whole or not at all; returns the number of modules in it."""
    sources = sorted(p for top in ("deepfm", "data_tools") for p in (ROOT / top).rglob("*.py"))
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as whole:
            for source in sources:
                entry = zipfile.ZipInfo(source.relative_to(ROOT).as_posix(), EARLIEST)
                whole.writestr(entry, source.read_bytes(), zipfile.ZIP_DEFLATED)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    return len(sources)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="deepfm_spark.zip", help="The zip file to write.")
    given = parser.parse_args()
    print(f"Wrote {given.output}: {write_zip(given.output)} modules.")
