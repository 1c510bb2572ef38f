"""The plain values that everything else takes, each made once, from flags, in train.py.

F: fields. K: embedding size.
"""

# ruff: noqa: F401
from deepfm.config.input import InputConfig, Position, Share
from deepfm.config.job import JobConfig
from deepfm.config.model import ModelConfig
from deepfm.config.modes import ModeFlags
from deepfm.config.optimizer import OptimizerConfig
from deepfm.config.setting import MAX_FIELDS, MAX_NUMBER
