"""The plain values that everything else takes, each made once, from flags, in __main__.py.

F: fields. K: embedding size.
"""

# ruff: noqa: F401
from deepfm.config.input import InputConfig
from deepfm.config.job import JobConfig, Position, Share
from deepfm.config.model import ModelConfig, OptimizerConfig
from deepfm.config.modes import ModeFlags
from deepfm.config.setting import MAX_FIELDS, MAX_NUMBER
