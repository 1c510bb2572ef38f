"""A setting is declared once, by a field of a config; all that concerns it follows from there.

That is its flag (flags.py), what model.json may hold of it, whether ranks compare it and a run that
goes on logs its change (settings.py), and which jobs ignore it.
"""

from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple

MAX_FIELDS = 100000
MAX_NUMBER = 2**31 - 1  # beyond it TensorFlow 1.15 overflows 32-bit numbers

# The kinds: who must have the same value, and how long. All ranks of a job but for the last kind.
STAYS = "stays with the model: another value is refused"
CHANGES = "may change when a run goes on, which logs it"
OF_RUN = "is what a run is asked to do, from its beginning"
ORDER = "decides the order of the records: an epoch starts over where it changes"
ALIKE = "is the same on all ranks, and no more"
OF_DATA = "is what the data are; ranks whose data do not say it have None"
OF_PROCESS = "may differ between the ranks of a job"

HYPERPARAMETERS = STAYS, CHANGES, OF_RUN


class Setting(NamedTuple):
    """What is known of a setting.

    Attributes:
        help: of the flag; None: there is no flag.
        asked: default of the flag, if a job makes another value of it; ...: that of the field.
        at_least, at_most, below: bounds of a number, or of each in a list.
        wanted: what a list of numbers is, for errors.
        spelled: {another word: the choice that it means}; upper case is then accepted, too.
        flag, alias: name of the flag, if not the field's; what the article's scripts call it.
        tasks: those that use it, if the others warn that it has no effect.
        type, many, optional: of a value; whether it is a tuple of these; whether it may be None.
    """

    kind: str
    default: Any
    help: Optional[str] = None
    asked: Any = ...
    at_least: Optional[float] = None
    at_most: Optional[float] = None
    below: Optional[float] = None
    wanted: str = ""
    choices: Tuple[str, ...] = ()
    spelled: Optional[Dict[str, str]] = None
    flag: str = ""
    alias: Optional[str] = None
    tasks: Tuple[str, ...] = ()
    type: Any = None
    many: bool = False
    optional: bool = False

    def allows(self, number) -> bool:
        """Whether a number is within the bounds."""
        low = self.at_least is None or number >= self.at_least
        high = self.at_most is None or number <= self.at_most
        return low and high and (self.below is None or number < self.below)


setting: Any = Setting  # in a field's default, which is of the field's type


def declares(config):
    """Gives a NamedTuple `settings`, {field: Setting}, from its fields' defaults.

    The default of such a field becomes that of the Setting.
    """
    config.settings, plain = {}, {}
    for name, default in config._field_defaults.items():
        if isinstance(default, Setting):
            default = config.settings[name] = default._replace(
                flag=default.flag or name, **_of_annotation(config.__annotations__[name])
            )
        plain[name] = default.default if isinstance(default, Setting) else default
    config._field_defaults, config.__new__.__defaults__ = plain, tuple(plain.values())
    return config


def _of_annotation(annotation):
    """The fields `type`, `many` and `optional` of a Setting."""
    optional = type(None) in getattr(annotation, "__args__", ())
    annotation = annotation.__args__[0] if optional else annotation
    many = ... in getattr(annotation, "__args__", ())
    return {
        "type": annotation.__args__[0] if many else annotation, "many": many, "optional": optional,
    }  # fmt: skip


def of_kinds(configs: Iterable, *kinds: str) -> Dict[str, Any]:
    """{flag: value} of the settings of some kinds in configs, the last of which counts."""
    return {
        each.flag: getattr(config, name)
        for config in configs
        for name, each in config.settings.items()
        if each.kind in kinds
    }
