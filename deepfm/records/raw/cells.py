"""What the text of a raw cell means: a number, a moment, or nothing, and the hash of a text.

The rules of `feature_map.encode_row`. data_tools reads whole columns by the same rules, mostly
through pyarrow, and tests compare the two. Plain Python, so that a server can use it as it is.
"""

import datetime
import re
from typing import Optional

# What pandas and Hive write where a value is missing; an empty cell always is.
MISSING = ("\\N", "NULL", "null", "NaN", "nan", "NA", "N/A", "n/a", "<NA>", "None", "?")
NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?"
# What of a number does not count as a digit of it.
NO_DIGITS = r"^[+-]?0*\.?0*|\.|[eE].*$"
DIGITS = 18  # of a number, at most; int64 holds them
WORDS = {"True": 1, "False": 0, "true": 1, "false": 0, "TRUE": 1, "FALSE": 0}
NO_INTEGER = f"is not an integer of at most {DIGITS} digits"
NO_NUMBER = f"is not a number of at most {DIGITS} digits"

# {format of a moment: what it is}
FORMATS = {
    "iso": "YYYY-MM-DD, perhaps with hh:mm, hh:mm:ss and an offset (ISO 8601)",
    "yyyymmdd": "YYYYMMDD",
    "yymmddhh": "YYMMDDHH",
    "unix": "seconds since 1970",
    "unix_ms": "milliseconds since 1970",
}
ZONE = "Z|[+-](?:0[0-9]|1[0-4]):?[0-5][0-9]"
LARGEST_WEIGHT = 3.4028234663852886e38  # of a member of a list, a float32
PATTERNS = {  # of the formats; their groups are numbers, but for the zone
    "iso": (
        r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
        r"(?:[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,][0-9]{1,9})?)?)?"
        rf" ?({ZONE})?"
    ),
    "yyyymmdd": "([0-9]{4})([0-9]{2})([0-9]{2})",
    "yymmddhh": "([0-9]{2})([0-9]{2})([0-9]{2})([0-9]{2})",
    "unix": r"([0-9]{1,11})(?:\.0*)?",
    "unix_ms": r"([0-9]{1,14})(?:\.0*)?",
}
_PATTERNS = {how: re.compile(pattern) for how, pattern in PATTERNS.items()}
_NUMBER, _NO_DIGITS, _ZONE = re.compile(NUMBER), re.compile(NO_DIGITS), re.compile(ZONE)
EPOCH = datetime.datetime(1970, 1, 1)


def number(text: str) -> Optional[float]:
    """The finite number that a text says, True and False being 1 and 0; None if there is none."""
    if text in WORDS:
        return float(WORDS[text])
    if not _NUMBER.fullmatch(text) or len(_NO_DIGITS.sub("", text)) > DIGITS:
        return None
    found = float(text) + 0.0  # -0.0 is 0
    return found if abs(found) <= 1.7976931348623157e308 else None


def integer(text: str) -> Optional[int]:
    """The integer of at most DIGITS digits that a text says, as 5, 5.0 or True; None if none."""
    plain = re.fullmatch(r"([+-]?[0-9]+)(?:\.0*)?", text)
    found = int(plain[1]) if plain else number(text)
    whole = found is not None and found == found // 1 and abs(found) < 10**DIGITS
    return int(found) if whole else None


def offset(zone: str) -> datetime.timedelta:
    """What a time zone such as +05:30 is ahead of UTC; raises ValueError if it is none."""
    if not _ZONE.fullmatch(zone):
        raise ValueError(f"{zone!r} is no offset from UTC; try +01:00")
    if zone == "Z":
        return datetime.timedelta()
    ahead = datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
    return -ahead if zone[0] == "-" else ahead


def moment(text: str, how: str) -> Optional[datetime.datetime]:
    """The moment that a text says, in UTC (or the zone that it does not name); None if none.

    Args:
        text: the cell.
        how: a key of FORMATS.
    """
    found = _PATTERNS[how].fullmatch(text)
    if not found:
        return None
    try:
        if how == "iso":
            *parts, zone = found.groups()
            at = datetime.datetime(*(int(x or 0) for x in parts))
            return at - offset(zone) if zone else at
        numbers = list(map(int, found.groups()))
        if how in ("unix", "unix_ms"):
            seconds = numbers[0] if how == "unix" else numbers[0] // 1000
            return EPOCH + datetime.timedelta(seconds=seconds)
        if how == "yymmddhh":
            numbers[0] += 2000
        return datetime.datetime(*numbers)
    except (ValueError, OverflowError):
        return None
