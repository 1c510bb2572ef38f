"""One process, one replica."""

from deepfm.modes.common.mode import Mode


class Local(Mode):
    """What Mode is."""
