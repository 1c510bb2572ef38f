"""Gives the files of a new data set their final names, so that no part of it is taken for all.

While that lasts, and when it is cut short, the folder holds datasets.UNFINISHED, and readers refuse
it. A signal comes too late then: it would end what is as good as done.
"""

import os
from typing import List

from deepfm import datasets, entry


def publish(scratch: str, names: List[str], folder: str, old: List[str]):
    """Moves files from a folder to another of the same disk, in place of others there.

    Args:
        scratch: where they are.
        names: their names.
        folder: where they shall be.
        old: the names there that they replace.
    """
    entry.ignore_signals()
    mark = os.path.join(folder, datasets.UNFINISHED)
    with open(mark, "w"):
        pass
    for name in old:
        os.remove(os.path.join(folder, name))
    for name in names:
        os.replace(os.path.join(scratch, name), os.path.join(folder, name))
    os.remove(mark)
