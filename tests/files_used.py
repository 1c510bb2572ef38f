"""Counts the files of the project in which a function runs, and their lines.

    .venv/bin/python tests/files_used.py

One LibSVM conversion, then that and 20 training steps: what a reader has to know of to follow them.
"""

import json
import pathlib
import tempfile

import warm

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRACED = """
import atexit, json, os, runpy, sys, threading

root, listed, program, *words = sys.argv[1:]
seen = set()


def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_name[0] != "<":  # no class, no module
        seen.add(code.co_filename)


def write():
    sys.setprofile(None)
    ours = {os.path.relpath(path, root) for path in seen if path.startswith(root)}
    with open(listed, "w") as f:
        json.dump(sorted(path for path in ours if path[0] != "."), f)


atexit.register(write)
sys.path.insert(0, root)
sys.argv[:] = [program, *words]
threading.setprofile(note)
sys.setprofile(note)
runpy.run_path(os.path.join(root, program), run_name="__main__")
"""


def used(program, *words):
    """The files, as paths from the root, in which a function of a program's run runs."""
    with tempfile.NamedTemporaryFile() as listed:
        done = warm.run(["-c", TRACED, f"{ROOT}/", listed.name, program, *words])
        assert done.returncode == 0, done.stderr
        return set(json.loads(pathlib.Path(listed.name).read_text()))


def conversion_and_training(folder):
    """(the files of a conversion, of it and 20 steps), in a folder that may be written to."""
    rows = [f"{i % 2} {i % 7 + 1}:1 {i % 5 + 8}:0.5" for i in range(2000)]
    text, data = folder / "rows.libsvm", folder / "data"
    text.write_text("\n".join(rows))
    one = used("data_tools/libsvm_to_tfrecord.py", f"--input={text}", f"--output_dir={data}")
    more = used("train.py", f"--training_data_dir={data}", f"--model_dir={folder / 'model'}",
                "--batch_size=100", "--max_steps=20")  # fmt: skip
    return one, one | more


def lines(files):
    return sum(len((ROOT / path).read_text().splitlines()) for path in files)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for title, files in zip(
            ("conversion", "and 20 steps"), conversion_and_training(pathlib.Path(made))
        ):
            print(f"{title}: {len(files)} files, {lines(files)} lines")
            print("  " + " ".join(sorted(files)))
