"""Zips the Python code that data_tools.on_spark needs, for spark-submit --py-files.

    python scripts/zip_for_spark.py
    spark-submit --py-files deepfm_spark.zip data_tools/on_spark.py rebalance --input=...

The same sources give the same bytes. Needs nothing but Python 3.
"""

import argparse
import io
import os
import pathlib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip file can hold


def zipped() -> bytes:
    """The zip file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as whole:
        for source in sorted(p for t in ("deepfm", "data_tools") for p in (ROOT / t).rglob("*.py")):
            entry = zipfile.ZipInfo(source.relative_to(ROOT).as_posix(), EARLIEST)
            whole.writestr(entry, source.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="deepfm_spark.zip", help="The zip file to write.")
    given = parser.parse_args()
    unfinished = pathlib.Path(f"{given.output}.tmp-{os.getpid()}")
    try:
        unfinished.write_bytes(zipped())
        os.replace(unfinished, given.output)
    finally:
        if unfinished.exists():
            unfinished.unlink()
    print(f"Wrote {given.output}.")
