"""The mark of a training in a remote model_dir, which keeps out a second one.

S3 has no locks. So a training writes a mark of its own every BEAT seconds. Another one that finds
it watches it for two beats: if it changes, its owner lives; if not, that was killed, and the other
takes over. The owner reads the mark back before it copies a checkpoint, and stops if it is no
longer its own. A race is left: of two that begin within a moment, both find no mark. The one whose
mark is overwritten learns of that with its first beat, and never writes its own again: else both
would find the other's, and end.
"""

import contextlib
import json
import os
import posixpath
import socket
import threading
import time
import uuid

from absl import logging

from deepfm.errors import BadInput
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf

BEAT = 10.0  # seconds
_OLD = 3600.0  # seconds after which no owner lives; S3 accepts no clocks that differ so much


class Owner:
    """This training as the owner of a remote folder, until `release`.

    Raises BadInput if another process is training there. `lost` is whether that was found later.
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
        self._lock = threading.Lock()  # a checkpoint's check between a beat's two halves
        self._write()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _watch(self, folder, mark):
        """Refuses (BadInput) the folder if its mark, which `mark` is now, changes."""
        with contextlib.suppress(tf.errors.OpError):
            if time.time() - tf.io.gfile.stat(self._path).mtime_nsec / 1e9 > _OLD:
                return
        host, end = mark.get("host"), time.monotonic() + 2 * BEAT
        logging.info(
            "--model_dir=%s has the mark of another training (%s): watching for %.0f s whether "
            "that goes on.", folder, host, 2 * BEAT,
        )  # fmt: skip
        over = False
        while not over:
            time.sleep(BEAT / 10)
            over = time.monotonic() > end  # a look that began before it could miss the second beat
            if (self._read() or mark) != mark:
                raise BadInput(
                    f"--model_dir={folder}: another process is training there ({host}); wait for "
                    "it, or give another folder."
                )

    def _read(self):
        """The mark that is there; None without one, or if it cannot be read now."""
        return remote_files.json_object(self._path) or None

    def _write(self):
        self._mark["beat"] += 1
        with contextlib.suppress(*remote_files.TROUBLE):
            remote_files.put_text(json.dumps(self._mark), self._path)

    def _beat(self):
        while not self._ended.wait(BEAT) and self.is_mine(write=True):
            pass

    def is_mine(self, write: bool = False) -> bool:
        """Reads the mark back, and beats if `write`; whether no other process has written one."""
        with self._lock:
            found = self._read()
            self.lost = self.lost or bool(found and found.get("owner") != self._mark["owner"])
            if write and not self.lost:
                self._write()
            return not self.lost

    def release(self):
        """Removes the mark, if it is this one's."""
        self._ended.set()
        self._thread.join()
        if self.is_mine():
            with contextlib.suppress(*remote_files.TROUBLE):
                tf.io.gfile.remove(self._path)
