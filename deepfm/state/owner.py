"""The mark of a training in a remote model_dir, which keeps out a second one.

S3 has no locks. So whoever trains writes a mark with a name of its own every BEAT seconds. Another
training that finds it watches it for two beats: if it changes it is a living one's; if not, its
owner was killed, and the mark is taken over. The owner reads it back before it copies a checkpoint,
and stops if it is no longer its own. The race that is left: of two that begin within a moment, both
find no mark. The one whose mark is overwritten learns of that with its first beat.
"""

import contextlib
import json
import os
import posixpath
import socket
import threading
import time
import uuid

import tensorflow as tf
from absl import logging

from deepfm.errors import BadInput
from deepfm.runtime import remote_files

BEAT = 10.0  # seconds
_OLD = 3600.0  # seconds after which no owner lives; S3 accepts no clocks that differ so much


class Owner:
    """This training as the owner of a remote folder, until `release`.

    Args:
        folder: the remote folder.

    Attributes:
        lost: whether the folder was found to be another's.

    Raises:
        BadInput: another process is training there.
    """

    def __init__(self, folder: str):
        self.lost = False
        self._path = posixpath.join(folder, remote_files.MARK)
        # SageMaker starts the same job again when a machine is lost.
        job = os.environ.get("TRAINING_JOB_NAME")
        job = job and f"{job}, {os.environ.get('SM_CURRENT_HOST')}"
        host = f"{socket.gethostname()}, process {os.getpid()}"
        self._mark = {"owner": uuid.uuid4().hex, "job": job, "host": host, "beat": 0}
        found = self._read()
        if found and not (job and found.get("job") == job):
            self._watch(folder, found)
        self._write()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _watch(self, folder, found):
        """Refuses (BadInput) the folder if its mark, which is `found` there, changes."""
        with contextlib.suppress(tf.errors.OpError):
            if time.time() - tf.io.gfile.stat(self._path).mtime_nsec / 1e9 > _OLD:
                return
        logging.info(
            "--model_dir=%s has the mark of another training (%s): watching for %.0f s "
            "whether that goes on.",
            folder, found.get("host"), 2 * BEAT,
        )  # fmt: skip
        end = time.monotonic() + 2 * BEAT
        while time.monotonic() < end:
            time.sleep(BEAT / 10)
            if (self._read() or found) != found:
                raise BadInput(
                    f"--model_dir={folder}: another process is training there "
                    f"({found.get('host')}); wait for it, or give another folder."
                )

    def _read(self):
        """The mark that is there; None without one, or if it cannot be read now."""
        try:
            with tf.io.gfile.GFile(self._path, "rb") as f:
                found = json.loads(f.read().decode())
        except (*remote_files.TROUBLE, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self):
        self._mark["beat"] += 1
        with contextlib.suppress(*remote_files.TROUBLE):
            remote_files.put_text(json.dumps(self._mark), self._path)

    def _beat(self):
        while not self._ended.wait(BEAT) and self.is_mine():
            self._write()

    def is_mine(self) -> bool:
        """Reads the mark back; whether no other process has written one."""
        found = self._read()
        self.lost = self.lost or bool(found and found.get("owner") != self._mark["owner"])
        return not self.lost

    def release(self):
        """Removes the mark, if it is this one's."""
        self._ended.set()
        self._thread.join()
        if self.is_mine():
            with contextlib.suppress(*remote_files.TROUBLE):
                tf.io.gfile.remove(self._path)
