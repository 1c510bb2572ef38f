"""deepfm.records.raw.feature_map, by the name that servers know."""

from deepfm.records.raw.feature_map import *  # noqa: F401,F403
