"""What a power cut leaves of a folder: replays the system calls of a program up to any of them.

As on ext4, changes of names are journalled in order and survive; what was written to a file
survives up to its last fsync. The rest is lost (the file is as long as it was), zero, or torn.

    tree = power_cuts.tree_of(folder)                     # before
    calls = power_cuts.record(words, folder, log)         # runs `python WORDS` under strace
    for names in power_cuts.cuts(tree, calls, folder):
        power_cuts.rebuild(power_cuts.left(names, "lost"), elsewhere)
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys

from conftest import ROOT

from data_tools.common import publishing
from deepfm import export, model_config
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.state import best, checkpoints, damage, evaluations, resume

HOW = "kept", "lost", "zero", "torn"
_CALLS = (
    "openat,open,creat,write,pwrite64,rename,renameat,renameat2,unlink,unlinkat,link,linkat,mkdir,"
    "mkdirat,rmdir,ftruncate,fsync,fdatasync,lseek,sendfile"
)
_REFUSED = "writev,pwritev,pwritev2,truncate,copy_file_range,symlink,symlinkat,fallocate"
_LINE = re.compile(rb"\d+ +(\w+)\((.*)\) += (\d+)(<.*>)?$")
_ARGUMENT = re.compile(rb'(?:(\d+|AT_FDCWD)<([^>]*)>|"([^"]*)"|([^,\s][^,]*))(?:, |$)')


class File:
    """A file: all that was written to it, and what a power cut leaves of it for certain."""

    def __init__(self, content=b""):
        self.content, self.synced, self._left = bytearray(content), bytes(content), {}

    def write(self, begin, data):
        self.content.extend(bytes(max(begin - len(self.content), 0)))
        self.content[begin : begin + len(data)] = data
        self._left = {}

    def cut(self, size):
        del self.content[size:]
        self.write(size, b"")

    def sync(self):
        self.synced, self._left = bytes(self.content), {}

    def left(self, how):
        if not self._left:
            whole, synced = bytes(self.content), self.synced
            if not whole.startswith(synced):  # it was cut and written anew
                synced = b""
            rest = len(whole) - len(synced)
            half = whole[: len(synced) + rest // 2]
            self._left = dict(zip(HOW, (whole, synced, synced + bytes(rest), half)))
        return self._left[how]


def tree_of(folder):
    """{relative path: content, or None for a folder} of a folder."""
    found = {}
    for root, folders, names in os.walk(folder):
        for name in folders:
            found[os.path.relpath(os.path.join(root, name), folder)] = None
        for name in names:
            with open(os.path.join(root, name), "rb") as f:
                found[os.path.relpath(os.path.join(root, name), folder)] = f.read()
    return found


def record(words, folder, log):
    """Runs Python on `words`, which are to change `folder`; returns [(call, arguments, result)]."""
    strace = ["strace", "-f", "-y", "-xx", "-s", str(1 << 26), "--seccomp-bpf"]
    done = subprocess.run(
        [*strace, "-e", f"trace={_CALLS},{_REFUSED}", "-o", log, sys.executable, *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with open(log, "rb") as f:
        return list(_parsed(f, os.fsencode(os.path.realpath(folder))))


def _parsed(lines, folder):
    hexed = b"".join(b"\\x%02x" % x for x in folder)
    begun = {}
    for line in lines:
        process, _, rest = line.rstrip(b"\n").partition(b" ")
        if rest.endswith(b" <unfinished ...>"):
            begun[process] = rest[: -len(b" <unfinished ...>")].lstrip()
            continue
        if b"resumed>" in rest:
            line = process + b" " + begun.pop(process) + rest.partition(b"resumed>")[2]
        if hexed not in line or b">(deleted)" in line:
            continue
        match = _LINE.match(line.strip())
        if not match:  # it failed
            assert b"= -1 " in line or b"= ?" in line, line[-300:]
            continue
        call, text, result, _ = match.groups()
        yield call.decode(), list(map(_argument, _ARGUMENT.finditer(text))), int(result)


def _argument(match):
    fd, path, quoted, plain = match.groups()
    return (fd, _unhex(path)) if fd else plain if quoted is None else _unhex(quoted)


def _unhex(text):
    return bytes.fromhex(text.replace(b"\\x", b"").decode())


def cuts(tree, calls, folder):
    """Yields {relative path: File, or None for a folder} before each change, and after the last.

    It is the same dict each time, which then changes.
    """
    top = os.fsencode(os.path.realpath(folder))
    names = {k: None if x is None else File(x) for k, x in tree.items()}
    positions = {}

    def at(path, base=None):
        path = os.path.join(base[1], path) if base else path
        path = os.path.normpath(path)
        inside = path == top or path.startswith(top + b"/")
        return os.fsdecode(os.path.relpath(path, top)) if inside else None

    def moved(old, new):
        below = [x for x in names if x == old or x.startswith(old + "/")]
        for x in [y for y in names if y == new or y.startswith(new + "/")]:
            del names[x]
        for x in below:
            names[new + x[len(old) :]] = names.pop(x)

    for call, words, result in calls:
        if call in ("openat", "open", "creat"):
            base, path, flags = words[:3] if call == "openat" else (None, *words[:2])
            name, flags = at(path, base), flags if call != "creat" else b"O_CREAT|O_TRUNC"
            if (
                name is None
                or b"O_DIRECTORY" in flags
                or (name == "." or names.get(name, 0) is None)
            ):
                continue
            makes, cuts_off = b"O_CREAT" in flags and name not in names, b"O_TRUNC" in flags
            if makes or (cuts_off and names[name].content):
                yield names
                if makes:
                    names[name] = File()
                else:
                    names[name].cut(0)
            positions[result, id(names[name])] = None if b"O_APPEND" in flags else 0
        elif call in ("write", "pwrite64", "ftruncate", "fsync", "fdatasync", "lseek"):
            fd, name = int(words[0][0]), at(words[0][1])
            file = names.get(name)
            if file is None:  # a folder, or a file that was deleted
                continue
            key = fd, id(file)
            if call == "lseek":
                positions[key] = result if positions.get(key, 0) is not None else None
                continue
            yield names
            if call == "write":
                begin = positions.get(key, 0)
                begin = len(file.content) if begin is None else begin
                file.write(begin, words[1][:result])
                if positions.get(key, 0) is not None:
                    positions[key] = begin + result
            elif call == "pwrite64":
                file.write(int(words[3]), words[1][:result])
            elif call == "ftruncate":
                file.cut(int(words[1]))
            else:
                file.sync()
        elif call in ("rename", "renameat", "renameat2", "link", "linkat"):
            old, new = (words[1], words[3]) if call.endswith(("at", "at2")) else words[:2]
            bases = (words[0], words[2]) if call.endswith(("at", "at2")) else (None, None)
            old, new = at(old, bases[0]), at(new, bases[1])
            assert (old is None) == (new is None), f"{call} into or out of the folder"
            yield names
            if call.startswith("rename"):
                moved(old, new)
            else:
                names[new] = names[old]
        elif call in ("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"):
            base, path = words[:2] if call.endswith("at") else (None, words[0])
            yield names
            if call.startswith("mkdir"):
                names[at(path, base)] = None
            else:
                del names[at(path, base)]
        elif call == "sendfile":
            yield names
            source, target = names[at(words[1][1])], names[at(words[0][1])]
            assert result == len(source.content) and not target.content
            target.write(0, bytes(source.content))
        else:
            raise AssertionError(f"{call} is not replayed")
    yield names


def left(names, how):
    """{relative path: content, or None for a folder} that a power cut leaves."""
    return {name: None if x is None else x.left(how) for name, x in names.items()}


def rebuild(tree, folder):
    """Makes a folder anew from {relative path: content, or None for a folder}."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for name, content in tree.items():
        path = os.path.join(folder, name)
        if content is None:
            os.makedirs(path, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(content)


def states(tree, calls, folder):
    """Yields (names as `cuts`, how, what is left) of each power cut that leaves something else."""
    seen = set()
    for names in cuts(tree, calls, folder):
        for how in HOW:
            found = left(names, how)
            digest = hash(frozenset(found.items()))  # bytes remember their own
            if digest not in seen:
                seen.add(digest)
                yield names, how, found


# What has to hold after a power cut.

_NAMED = re.compile(rb'^model_checkpoint_path: "(.*)"', re.MULTILINE)
_EXPORT = re.compile(r"(servable/\d+)/saved_model.pb")


def named_in(tree, folder):
    """The checkpoint that a state file names; None: there is none."""
    found = _NAMED.search(tree.get(f"{folder}/checkpoint") or b"")
    return found and found[1].decode()


def check_model(names, found, top):
    """Checks that the next start, from `found` in top/model, loses nothing that had a name.

    Args:
        names: as `cuts`: what there was before the power went.
        found: what is left of it, rebuilt in `top`.
        top: the folder that holds model/ and servable/.
    """
    before, model = left(names, "kept"), os.path.join(top, "model")
    for name in (evaluations.FILE, resume.FILE, "model.json", "report.json"):
        assert found.get(f"model/{name}") == before.get(f"model/{name}"), f"{name} is not whole"
    promised, kept = named_in(before, "model"), named_in(before, "model/best")
    checkpoints.prepare(model, tidy=True)
    state = checkpoints.read_state(model)
    step = checkpoints.step(state.names[-1]) if state.names else 0
    assert step >= checkpoints.step(promised or "0"), f"{promised} is lost; {state.names} are left"
    for name in state.names:
        assert not damage.first_damaged(os.path.join(model, name)), f"{name} is damaged"
    if state.names:
        assert set(checkpoints.by_step(os.listdir(model))) == set(state.names), "leftovers"
    if kept:
        best.forget_later(model, step)
        there = checkpoints.read_state(os.path.join(model, best.FOLDER)).names
        assert there == [kept], f"best/{kept} is lost"
        assert not damage.first_damaged(os.path.join(model, best.FOLDER, kept))
    exports = {match[1] for match in map(_EXPORT.fullmatch, before) if match}
    whole = {x for x in exports if export.is_whole(os.path.join(top, x))}
    assert exports == whole, f"{exports - whole} are not whole"
    if os.path.exists(os.path.join(model, "model.json")):
        model_config.kept(model, {})
    resume.known_files(model)
    evaluations.load(os.path.join(model, evaluations.FILE))
    return step


def visible(tree, below=""):
    """{path: content} of the files of a tree that readers see."""
    return {
        name: content
        for name, content in tree.items()
        if content is not None and name.startswith(below)
        and not any(part.startswith(".") for part in name.split("/"))
    }  # fmt: skip


def check_data(found, top, old, new, parts=("",)):
    """Checks that readers take the old or new data, or refuse both, and that the next run helps.

    Args:
        found: what is left, rebuilt in `top`.
        top: the output folder.
        old, new: trees of the folder before and after the program.
        parts: the folders of data in it, each "" or with a slash at its end.
    """
    for part in parts:
        with contextlib.suppress(BadInput):
            datasets.find(os.path.join(top, part), "data")
            here = visible(found, part)
            of_map = lambda tree: tree.get("feature_map.json")
            trees = [x for x in (old, new) if of_map(x) == of_map(found)]
            whole = [x for x in trees if visible(x, part) == here]
            assert whole, f"readers take {sorted(here)} in {part}"
    publishing.finish(top)
    assert visible(tree_of(top)) in (visible(old), visible(new)), "old and new are lost"
