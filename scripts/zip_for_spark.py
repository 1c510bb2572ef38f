"""Zips the Python code that data_tools.on_spark needs, for spark-submit --py-files.

    python scripts/zip_for_spark.py
    spark-submit --py-files deepfm_spark.zip data_tools/on_spark.py rebalance --input=...

The same sources give the same bytes. It holds the compiled codec for x86_64 and for aarch64, if the
package ziglang is there to compile them, or else for this machine, by g++.
"""

import argparse
import importlib.util
import io
import os
import pathlib
import platform
import subprocess
import sys
import zipfile
from typing import Dict

ROOT = pathlib.Path(__file__).resolve().parent.parent
EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip file can hold


MACHINES = ("x86_64", "aarch64")


def libraries() -> Dict[str, pathlib.Path]:
    """The compiled codec for each kind of machine that it can be compiled for."""
    build = [sys.executable, "-m", "deepfm.records.build"]
    run = lambda *more: subprocess.run([*build, *more], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    has_zig = importlib.util.find_spec("ziglang") is not None
    made = {x: run(x) for x in MACHINES} if has_zig else {platform.machine(): run()}
    return {x: pathlib.Path(done.stdout.strip()) for x, done in made.items() if not done.returncode}


def zipped(codecs: Dict[str, pathlib.Path]) -> bytes:
    """The zip file."""
    sources = sorted(p for t in ("deepfm", "data_tools") for p in (ROOT / t).rglob("*.py"))
    entries = {path.relative_to(ROOT).as_posix(): path for path in sources}
    entries.update({f"deepfm/records/codec-{x}.so": path for x, path in sorted(codecs.items())})
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, path in entries.items():
            entry = zipfile.ZipInfo(name, EARLIEST)
            whole.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="deepfm_spark.zip", help="The zip file to write.")
    given = parser.parse_args()
    unfinished = pathlib.Path(f"{given.output}.tmp-{os.getpid()}")
    codecs = libraries()
    try:
        unfinished.write_bytes(zipped(codecs))
        os.replace(unfinished, given.output)
    finally:
        if unfinished.exists():
            unfinished.unlink()
    print(
        f"Wrote {given.output}, with the compiled codec for {' and '.join(codecs) or 'no machine'}."
    )
    if len(codecs) < len(MACHINES):
        print("Executors on other machines need the package ziglang here: pip install ziglang.")
