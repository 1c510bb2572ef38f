"""A remote model_dir: a local folder that is copied there in the background.

Checkpoints written straight to S3 hold training up and may fail half-way. Here training saves them
locally and goes on; a thread copies the newest one: its data, its index, and finally the file
`checkpoint` that names it, so that a reader who goes by that file only finds whole checkpoints.
"""

import contextlib
import os
import posixpath
import shutil
import tempfile
import threading
from typing import List

from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import BadInput
from deepfm.runtime import interruption, remote_files
from deepfm.runtime.owner import Owner
from deepfm.runtime.tf import tf
from deepfm.state import (
    best,
    checkpoints,
    damage,
    evaluations,
    growing,
    model_json,
    paths,
    resume,
    saving,
)

v1 = tf.compat.v1

# What training needs to resume, besides a checkpoint.
_STATE_FILES = {model_json.FILE, resume.FILE, evaluations.FILE}
REPORT = "report.json"  # of training; copied last
_TRIES = 3  # tries to fetch the newest checkpoint, which may be deleted meanwhile
_INDEX_LAST = lambda part: (part.endswith(".index"), part)  # the order of copies
_HANDED = ".handed"  # folder of links to the checkpoints that wait to be copied


@contextlib.contextmanager
def at_hand(job: JobConfig):
    """Makes a remote model_dir local for the chief, which alone reads and writes it, and copies it
    back at the end.

    Yields:
        (the JobConfig, the chief's with a local model_dir; its Mirror; None for the others).

    Raises:
        RemoteError: a server cannot be reached, or what the job made cannot be copied; the local
            folder is then kept.
    """
    path = job.model_dir
    job = job._replace(predictions_file=job.predictions_path)  # each rank writes a part of it
    if not job.distribution.chief:
        yield job, None
        return
    names = remote_files.checked_names(path, "model_dir")
    paths.check_is_no_pattern(tempfile.gettempdir(), "TMPDIR")
    mirror = Mirror(path, tempfile.mkdtemp(prefix="deepfm-model-"), job.keep_checkpoint_max)
    try:
        if job.task_type == "train":
            mirror.owner = Owner(path)
            names = remote_files.checked_names(path, "model_dir")  # as the one before has left it
            if not job.clear_existing_model:
                mirror.fetch(names)
                mirror.fetch_best(names, bool(job.servable_model_dir and job.export != "last"))
                mirror.forget_later_best()
        else:
            mirror.fetch_beside_training(names)
            mirror.fetch_best(names, whole=job.checkpoint in (best.FOLDER, best.AUTO))
        mirror.fetch_maps(names)
        yield job._replace(model_dir=mirror.local), mirror
    except BaseException as error:
        try:
            mirror.close()
        except remote_files.RemoteError as another:
            logging.error("%s", another)
        if isinstance(error, BadInput):
            raise BadInput(str(error).replace(mirror.local, path)) from error
        raise
    try:
        with job.distribution.stop.saving():
            mirror.close()
    except interruption.Interrupted:
        logging.error("--model_dir=%s is not whole; a copy is kept in %s.", path, mirror.local)
        raise
    job.distribution.stop.give_up()


class Mirror:
    """A local folder, and the remote one that it is copied to.

    Args:
        path: the remote folder.
        local: an empty folder.
        keep: how many checkpoints to keep there; 0: all.
    """

    def __init__(self, path: str, local: str, keep: int):
        self.path, self.local, self._keep = path, local, keep
        self._there = {}  # checkpoint in the remote folder -> the names of its files, oldest first
        self._stale = []  # names of files in the remote folder that no checkpoint there needs
        self._gone = []  # checkpoints that the state file there names until their files are deleted
        self._copied = {}  # name of another local file -> its _stamp when it was copied
        self._handed = 0  # checkpoints handed over
        self.owner = None  # of the remote folder, if this job trains
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        os.mkdir(os.path.join(local, _HANDED))
        self._thread.start()

    def fetch_beside_training(self, names: List[str]):
        """Like `fetch`, but tries again if training deletes what is being read.

        What is incomplete there may be a copy in progress, so it stays.
        """
        for left in reversed(range(_TRIES)):
            try:
                self.fetch(names)
                break
            except remote_files.RemoteError as error:
                if not left:
                    raise
                logging.warning("%s; listing the folder again.", error)
                names = remote_files.checked_names(self.path, "model_dir")
            finally:
                self._stale = []

    def fetch(self, names: List[str]):
        """Fetches the state files and the newest whole checkpoint; `names` are what is there."""
        for name in sorted((_STATE_FILES | {REPORT}) & set(names)):
            self._get(name)
        parts = checkpoints.by_name(names)
        named = []
        if checkpoints.STATE in names:
            self._get(checkpoints.STATE, ".state")
            named = checkpoints.read_state(self.local, ".state").names
        listed = named or checkpoints.by_step(names)
        unnamed = sorted(set(parts) - set(listed))
        ignored = list(unnamed)
        while listed and not self._fetch_checkpoint(listed[-1], parts.get(listed[-1], [])):
            ignored.append(listed.pop())
        if checkpoints.STATE in names and ignored and not listed:
            raise BadInput(
                f"--model_dir={self.path} has no complete checkpoint: {', '.join(ignored)} "
                "(files are missing or damaged); give another folder, or train from scratch with "
                "--clear_existing_model."
            )
        for name in ignored:
            path = posixpath.join(self.path, name)
            if name in unnamed and damage.has_all_parts(name, parts[name]):
                logging.warning("Ignoring %s, which %s does not name.", path, checkpoints.STATE)
                continue
            logging.warning("Ignoring %s, which was not copied completely.", path)
            self._stale += parts.get(name, [])
        self._there = {name: parts.get(name, []) for name in listed}
        if listed:
            checkpoints.write_state(self.local, listed[-1:])

    def fetch_maps(self, names: List[str]):
        """Fetches the feature maps of the checkpoints that have been fetched, if they are there."""
        folder, of_best = growing.FOLDER, os.path.join(self.local, best.FOLDER)
        newest = list(filter(None, map(tf.train.latest_checkpoint, (self.local, of_best))))
        if folder not in names or not newest:
            return
        wanted = {f"{saving.model_of(path).get('feature_map')}.json" for path in newest}
        there = remote_files.checked_names(posixpath.join(self.path, folder), "model_dir")
        for name in sorted(wanted & set(there)):
            os.makedirs(os.path.join(self.local, folder), exist_ok=True)
            self._get(posixpath.join(folder, name))

    def forget_later_best(self):
        """Removes the best checkpoint if it is of a later step than the one fetched."""
        step = best.step_of(os.path.join(self.local, best.FOLDER)) or 0
        if step > max(map(checkpoints.step, self._there), default=0):
            best.clear(posixpath.join(self.path, best.FOLDER))
            best.clear(os.path.join(self.local, best.FOLDER))

    def fetch_best(self, names: List[str], whole: bool):
        """Fetches the best checkpoint, if there is one; if not `whole`, the file that names it."""
        folder = best.FOLDER
        if folder not in names:
            return
        names = remote_files.checked_names(posixpath.join(self.path, folder), "model_dir")
        if checkpoints.STATE not in names:
            return
        os.makedirs(os.path.join(self.local, folder), exist_ok=True)
        self._get(posixpath.join(folder, checkpoints.STATE))
        named = checkpoints.read_state(os.path.join(self.local, folder)).names
        for part in checkpoints.by_name(names).get(named[-1] if named and whole else "", []):
            self._get(posixpath.join(folder, part))

    def _get(self, name, as_name=None):
        source, target = posixpath.join(self.path, name), os.path.join(self.local, as_name or name)
        remote_files.retrying(lambda: remote_files.get(source, target), f"{source} cannot be read")
        self._copied[as_name or name] = _stamp(target)  # what training has put there since, stays

    def _fetch_checkpoint(self, name, parts):
        """Fetches a checkpoint if it is whole; returns whether it is."""
        if not damage.has_all_parts(name, parts):
            return False
        for part in parts:
            self._get(part)
        if not damage.first_damaged(os.path.join(self.local, name)):
            return True
        checkpoints.delete(self.local, name)
        return False

    def hand_over(self):
        """Queues the newest local checkpoint for copying; training may then delete it.

        Raises:
            RemoteError: another process trains in the remote folder now.
        """
        self._check_owner()
        parts = tf.io.gfile.glob(f"{tf.train.latest_checkpoint(self.local)}.*")
        making = self._linked(parts, "making")
        self._handed += 1
        os.rename(making, os.path.join(self.local, _HANDED, f"{self._handed:09d}"))
        self._wake.set()

    def _linked(self, paths, name):
        """Makes a folder of links to files, in place of what a signal left; returns it."""
        folder = os.path.join(self.local, _HANDED, name)
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        for path in paths:
            best.link(path, os.path.join(folder, os.path.basename(path)))
        return folder

    def _check_owner(self):
        if self.owner and self.owner.lost:
            raise remote_files.RemoteError(
                f"--model_dir={self.path}: another process is training there now, so this one "
                f"ends; its model is kept in {self.local}."
            )

    def close(self):
        """Copies what is not there yet and deletes the local folder.

        Raises:
            RemoteError: something could not be copied; the local folder is kept.
        """
        self._closing = True
        self._wake.set()
        self._thread.join()
        try:
            if not self.owner or self.owner.is_mine():
                end = lambda: (self._copy(), self._delete_maps())
                remote_files.retrying(end, f"--model_dir={self.path} cannot be written")
        except remote_files.RemoteError as error:
            raise remote_files.RemoteError(
                f"{error}; the local copy is kept in {self.local}."
            ) from error
        finally:
            if self.owner:
                self.owner.release()
        self._check_owner()
        shutil.rmtree(self.local)

    def _work(self):
        failures = 0
        while True:
            self._wake.wait(2 ** min(failures, 6) if failures else None)
            self._wake.clear()
            if self._closing or (self.owner and not self.owner.is_mine()):
                return
            try:
                self._copy()
                failures = 0
            except remote_files.TROUBLE as error:
                failures += 1
                logging.warning(
                    "--model_dir=%s cannot be written now: %s; retrying while training goes on.",
                    self.path, remote_files.cause(error),
                )  # fmt: skip

    def _copy(self):
        """Copies what has changed, each file after those that it names."""
        folder = os.path.join(self.local, _HANDED)
        *older, newest = sorted(filter(str.isdigit, os.listdir(folder))) or [None]
        for name in older:  # first, so that they do not fill the disk while the server is down
            shutil.rmtree(os.path.join(folder, name))
        state = []  # as it is now, since it tells of the best checkpoint
        for name, stamp in self._changed(sorted(_STATE_FILES & set(os.listdir(self.local)))):
            with open(os.path.join(self.local, name), "rb") as f:
                state.append((name, stamp, f.read()))
        self._copy_changed(x for x in _others(self.local) if x.startswith(growing.FOLDER))
        self._copy_best()
        for name, stamp, content in state:
            remote_files.put_bytes(content, posixpath.join(self.path, name))
            self._copied[name] = stamp
        if newest:
            self._copy_checkpoint(os.path.join(folder, newest))
            shutil.rmtree(os.path.join(folder, newest))
        while self._stale:
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.io.gfile.remove(posixpath.join(self.path, self._stale[-1]))
            self._stale.pop()
        if self._gone:
            self._there = {x: parts for x, parts in self._there.items() if x not in self._gone}
            self._put_state()
            self._gone = []
        self._copy_changed(_others(self.local))

    def _copy_best(self):
        """Copies the best checkpoint if it changed, and deletes the one before it there."""
        local, remote = (posixpath.join(x, best.FOLDER) for x in (self.local, self.path))
        path, state = (posixpath.join(x, checkpoints.STATE) for x in (local, best.FOLDER))
        stamp = os.path.exists(path) and _stamp(path)
        named = checkpoints.read_state(local).names[-1:]
        if not named or self._copied.get(state) == stamp:
            return
        parts = sorted(checkpoints.by_name(os.listdir(local)).get(named[0], []), key=_INDEX_LAST)
        parts.append(checkpoints.STATE)
        try:
            held = self._linked([os.path.join(local, part) for part in parts], best.FOLDER)
            replaced = checkpoints.read_state(held).names[-1:] != named
        except FileNotFoundError:
            replaced = True
        if replaced:  # by a better one
            self._copy_best()
        if replaced or not damage.has_all_parts(named[0], parts):  # it was not fetched whole
            return
        for part in parts:
            remote_files.put(os.path.join(held, part), posixpath.join(remote, part))
        self._copied[state] = stamp
        shutil.rmtree(held)
        for other in remote_files.checked_names(remote, "model_dir"):
            if checkpoints.is_part(other) and other not in parts:
                tf.io.gfile.remove(posixpath.join(remote, other))

    def _delete_maps(self):
        """Deletes the feature maps there that no checkpoint there names."""
        maps, of_best = (posixpath.join(self.path, x) for x in (growing.FOLDER, best.FOLDER))
        if not self.owner or not os.path.isdir(os.path.join(self.local, growing.FOLDER)):
            return
        names = remote_files.checked_names(maps, "model_dir")
        if len(names) < 2:
            return
        paths = [posixpath.join(self.path, name) for name in self._there]
        parts = checkpoints.by_name(remote_files.checked_names(of_best, "model_dir"))
        models = [saving.model_of(x) for x in paths + [posixpath.join(of_best, x) for x in parts]]
        if all(models):  # and each could be read
            for name in growing.unneeded(names, models):
                tf.io.gfile.remove(posixpath.join(maps, name))

    def _changed(self, names):
        """Yields (name, _stamp) of those local files that changed since they were copied."""
        for name in names:
            stamp = _stamp(os.path.join(self.local, name))
            if self._copied.get(name) != stamp:
                yield name, stamp

    def _copy_changed(self, names):
        for name, stamp in self._changed(names):
            remote_files.put(os.path.join(self.local, name), posixpath.join(self.path, name))
            self._copied[name] = stamp

    def _copy_checkpoint(self, folder):
        parts = sorted(os.listdir(folder), key=_INDEX_LAST)
        for part in parts:
            remote_files.put(os.path.join(folder, part), posixpath.join(self.path, part))
        (name,) = checkpoints.by_name(parts)
        self._there.pop(name, None)
        self._there[name] = parts
        self._put_state()
        logging.info("Copied %s.", posixpath.join(self.path, name))
        self._gone = list(self._there)[: -self._keep] if self._keep else []
        self._stale += [part for name in self._gone for part in self._there[name]]
        self._stale = [part for part in self._stale if part not in parts]

    def _put_state(self):
        named = [posixpath.join(self.path, x) for x in self._there]
        state = v1.train.generate_checkpoint_state_proto(self.path, named[-1], named)  # relative
        remote_files.put_text(str(state), posixpath.join(self.path, checkpoints.STATE))


def _others(folder):
    """The files of a model_dir that are no state and belong to no checkpoint, the report last."""
    found = []
    for root, folders, names in os.walk(folder):
        theirs = lambda name: name == best.FOLDER or name.startswith((".", "model.ckpt-"))
        folders[:] = [x for x in folders if not theirs(x)]
        if root == folder:
            names = [x for x in names if not x.startswith((checkpoints.STATE, "model.ckpt-"))]
            names = set(names) - _STATE_FILES
        names = [x for x in names if x[0] != "." and ".tmp" not in x]  # those are unfinished
        found += [os.path.relpath(os.path.join(root, x), folder) for x in names]
    return sorted(found, key=lambda name: (os.path.basename(name).startswith("report."), name))


def _stamp(path):
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size
