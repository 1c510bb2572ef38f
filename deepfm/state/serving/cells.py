"""What the text of a raw cell means, as records.raw.cells says it, by TensorFlow's operators.

The operators are those that TensorFlow 1.15 and 2.x both load. No text makes one fail: what stands
for no number is NaN, for no integer NONE, for no moment an empty text. An empty text says anything.
TensorFlow takes a number below 2.2e-308 for 0, and the last bit of its logarithms is its own.
"""

import datetime
import re

from deepfm.records.raw import cells
from deepfm.records.raw.column_kinds import HOUR, WEEKDAY
from deepfm.runtime.tf import tf

v2 = tf.compat.v2

NONE = -(1 << 63)
_SHORT = 18  # characters of which TensorFlow reads any number; of 32 it reads none
_SPACE = "".join(chr(x) for x in range(1 << 16) if chr(x).isspace())  # what str.strip removes
_MARGINS = f"^[{_SPACE}]+|[{_SPACE}]+$"
_DAY = 24 * 60 * 60  # seconds
_matches, _replaced = tf.strings.regex_full_match, tf.strings.regex_replace
_int64 = lambda x: tf.cast(x, tf.int64)


def number(text, there):
    """As cells.number: string [...] -> float64 [...], anything but where `there`."""
    quick = _matches(text, cells.NUMBER) & (tf.strings.length(text) <= _SHORT)
    easy = lambda text: tf.strings.to_number(text, tf.float64)
    return _in_two_ways(text, there, quick, easy, _any_number)


def integer(text, there):
    """As cells.integer: string [...] -> int64 [...], anything but where `there`."""
    easy = lambda text: tf.strings.to_number(text, tf.int64)
    quick = _matches(text, f"-?[0-9]{{1,{_SHORT}}}")
    return _in_two_ways(text, there, quick, easy, _any_integer)


def whole(x):
    """The integer of at most cells.DIGITS digits that a float64 is, else NONE: int64."""
    good = tf.equal(tf.floor(x), x) & (tf.abs(x) < 10.0**cells.DIGITS)
    return v2.where(good, _int64(v2.where(good, x, 0.0)), NONE)


def _in_two_ways(text, there, quick, easy, hard):
    """easy(text) where `quick`, else hard(text), which is slow: [...] -> numbers [...]."""
    found, slow = easy(v2.where(quick, text, "0")), there & ~quick

    def others():
        at = tf.where(slow)
        return tf.scatter_nd(at, hard(tf.gather_nd(text, at)), tf.shape(text, out_type=tf.int64))

    found += tf.cond(tf.reduce_any(slow), others, lambda: tf.zeros([], found.dtype))
    found.set_shape(text.shape)
    return found


def _any_number(text):
    for x in (0, 1):
        words = "|".join(word for word, number in cells.WORDS.items() if number == x)
        text = _replaced(text, f"^(?:{words})$", str(x))
    digits = _replaced(text, cells.NO_DIGITS, "")
    good = _matches(text, cells.NUMBER) & (tf.strings.length(digits) <= cells.DIGITS)
    text, digits = v2.where(good, text, "0"), v2.where(good, digits, "0")
    # As 0DIGITSePOWER, which is short.
    places = tf.strings.length(_replaced(text, r"^[^.eE]*\.?|[eE].*$", ""))
    power = _replaced(text, r"^[^eE]*[eE]?\+?", "")
    power = tf.strings.to_number(v2.where(tf.equal(power, ""), "0", power), tf.int32) - places
    plain = tf.strings.join(["0", digits, "e", tf.strings.as_string(power)])
    return v2.where(good, _signed(text, tf.strings.to_number(plain, tf.float64)), float("nan"))


def _any_integer(text):
    plain = _matches(text, r"[+-]?[0-9]+(\.0*)?")
    digits = _replaced(text, r"^[+-]?0*|\..*$", "")
    good = plain & (tf.strings.length(digits) <= cells.DIGITS)
    digits = tf.strings.join(["0", v2.where(good, digits, "")])
    found = v2.where(good, _signed(text, tf.strings.to_number(digits, tf.int64)), NONE)
    return v2.where(plain, found, whole(_any_number(text)))


def _signed(text, x):
    return v2.where(_matches(text, "(?s)-.*"), -x, x)


def moment(text, kind, how, timezone):
    """The category of a moment, as feature_map.text_of; of a date, its `ordinal` as a text.

    Args:
        text: string [...].
        kind: HOUR, WEEKDAY or DATE.
        how: a key of cells.FORMATS; None: YYMMDDHH, of which the last two digits are the category.
        timezone: as of a Column.
    """
    if not how:
        good = _matches(text, "[0-9]{8}")
        return v2.where(good, _replaced(text, "^.{6}", ""), "")
    pattern = cells.PATTERNS[how]
    good = _matches(text, pattern)
    text = v2.where(good, text, "")
    part = lambda i: _number_in(_replaced(text, pattern, rf"\{i}"))
    if how.startswith("unix"):
        at = part(1) // (1000 if how == "unix_ms" else 1) + cells.EPOCH.toordinal() * _DAY
    else:
        at, valid = _in_calendar(part, how)
        good &= valid
        if how == "iso":
            at -= _offset(_replaced(text, pattern, r"\7"))
    there = at + int(cells.offset(timezone or "Z").total_seconds())
    for x in (at, there):
        good &= (x >= _DAY) & (x < (datetime.date.max.toordinal() + 1) * _DAY)
    if kind == HOUR:
        found = tf.strings.as_string(there % _DAY // 3600, width=2, fill="0")
    else:
        day = there // _DAY
        found = tf.strings.as_string((day + 6) % 7 + 1 if kind == WEEKDAY else day)
    return v2.where(good, found, "")


def ordinal(date: str) -> str:
    """What `moment` makes of a date YYYYMMDD."""
    at = cells.moment(date, "yyyymmdd")
    return str(at.toordinal()) if at else date


def _number_in(digits):
    """int64 of some digits, 0 of none."""
    return tf.strings.to_number(tf.strings.join(["0", digits]), tf.int64)


def _offset(zone):
    """As cells.offset, in seconds, of a zone; 0 of an empty one."""
    ahead = _number_in(_replaced(zone, "[^0-9]", ""))  # hhmm
    return _signed(zone, (ahead // 100 * 60 + ahead % 100) * 60)


def _in_calendar(part, how):
    """(seconds since the day before 1 January of year 1, whether the calendar has this moment).

    Args:
        part: i -> the number that group i of the pattern holds, int64.
        how: iso, yyyymmdd or yymmddhh.
    """
    year, month, day = part(1) + (2000 if how == "yymmddhh" else 0), part(2), part(3)
    hour, minute, second = 0, 0, 0
    good = (year > 0) & (month > 0) & (month <= 12) & (day > 0)
    if how != "yyyymmdd":
        hour = part(4)
        good &= hour < 24
    if how == "iso":
        minute, second = part(5), part(6)
        good &= (minute < 60) & (second < 60)
    month = tf.clip_by_value(month, 1, 12)

    def before(month):
        """Days before a month, whose years begin in March; the 13th is the next year's first."""
        y = year - _int64(month < 3)
        return 365 * y + y // 4 - y // 100 + y // 400 + ((month + 9) % 12 * 306 + 5) // 10 - 306

    good &= day <= before(month + 1) - before(month)
    days = before(month) + day
    return days * _DAY + (hour * 60 + minute) * 60 + second, good


def members(text, column):
    """The members of lists, as feature_map.members: string [B] -> n members.

    Returns:
        (the number of the list that each is of, int64 [n], ascending; its place there, int64 [n];
        its category, string [n]; its weight, float64 [n], NaN if that is none).
    """
    split = tf.raw_ops.StringSplitV2(input=text, sep=column.separator, maxsplit=-1)
    text = _replaced(split.values, _MARGINS, "")
    row, text = _those(tf.not_equal(text, ""), split.indices[:, 0], text)
    rows = row[tf.newaxis]
    before = tf.raw_ops.LowerBound(sorted_inputs=rows, values=rows, out_type=tf.int64)
    place = tf.range(tf.size(row, out_type=tf.int64)) - before[0]
    if column.length:
        row, place, text = _those(place < column.length, row, place, text)
    if not column.weights:
        return row, place, text, tf.ones_like(place, tf.float64)
    pattern = f"(?s)(.*){re.escape(column.weights)}(.*)"
    marked = _matches(text, pattern)
    name, weight = (_replaced(text, pattern, group) for group in (r"\1", r"\2"))
    weight = v2.where(tf.equal(name, "") | tf.equal(weight, ""), "none", weight)
    return row, place, name, v2.where(marked, number(weight, marked), 1.0)


def _those(which, *tensors):
    return [tf.boolean_mask(x, which) for x in tensors]
