"""The errors that a user sees as one sentence, and names in flags and sentences."""

import contextlib
import json
from typing import Optional, Sequence, Tuple


class BadInput(ValueError):
    """Wrong input or flags that the user can fix; its text is the one sentence that they see."""


class RemoteError(OSError):
    """Something remote cannot be reached, read or written; the text is one sentence."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names in a sentence."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def words_of(text: Optional[str]) -> Tuple[str, ...]:
    """The names in a flag: a comma list, or a JSON list, whose names may hold commas.

    Raises:
        ValueError: it begins as JSON, but is none.
    """
    text = text or ""
    if text.startswith("["):
        return tuple(map(str, json.loads(text)))
    return tuple(filter(None, map(str.strip, text.split(","))))


@contextlib.contextmanager
def refusing(what: str, advice: str):
    """Refuses (BadInput) a JSON file in which the block finds an error: `what (why); advice.`"""
    try:
        yield
    except BadInput:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(f"{what} ({reason}); {advice}.") from error


@contextlib.contextmanager
def naming(path: str):
    """Adds a path to an OSError that names none, for example a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            raise OSError(error.errno, error.strerror, path) from error
        raise
