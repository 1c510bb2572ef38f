"""A second implementation of LibSVM lines and TFRecord files: slow, and strictly by the book.

The fuzz tests compare the program with it. So it uses nothing of the program, TensorFlow or
protobuf: it rounds decimal numbers to float32 by integer arithmetic, computes checksums bit by bit,
and reads protocol buffers byte by byte.

Bad input raises Refused, whose text is for the reader of a failed test.
"""

import fractions
import functools
import re
import struct
import zlib
from typing import List, NamedTuple, Optional, Tuple

BLANKS = b" \t\r\v\f"
INT64_MAX = 2**63 - 1
MOST_ROWS = 2**31 - 1  # of a table of TensorFlow


class Refused(Exception):
    """The record breaks a rule of the format."""


class Record(NamedTuple):
    """label 0 or 1; ids; values, each as the 32 bits of its float32."""

    label: int
    ids: List[int]
    values: List[int]


class Rules(NamedTuple):
    """The flags that say what is allowed; see the converter's help."""

    field_size: int
    feature_size: Optional[int] = None
    pad: bool = False
    id_offset: int = 0


# Numbers.

INFINITY = 0x7F800000
_SMALLEST_NORMAL = 0x00800000
_SIGN = 1 << 31


def float32_bits(number: fractions.Fraction, negative: bool) -> int:
    """The float32 nearest to a number >= 0, ties to even; infinity from half a step beyond.

    Below the normal numbers (2^-126) it is 0, as TensorFlow's threads have the processor do.
    """
    sign = _SIGN if negative else 0
    if number < fractions.Fraction(2) ** -127:
        return sign
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    if number < fractions.Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, -126)  # 2^exponent <= number, unless it is subnormal
    significand = round(number / fractions.Fraction(2) ** (exponent - 23))  # Python's ties to even
    bits = ((exponent + 126) << 23) + significand  # a carry runs into the exponent, as it should
    return sign | min(bits, INFINITY) if bits >= _SMALLEST_NORMAL else sign


_DECIMAL = re.compile(rb"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?")
_HEXADECIMAL = re.compile(rb"([+-]?)0[xX]([0-9a-fA-F]+)")


@functools.lru_cache(maxsize=1 << 16)
def number(text: bytes) -> int:
    """A number of a line as float32 bits: decimal or hexadecimal, at most 31 characters."""
    if len(text) > 31:
        raise Refused("more than 31 characters")
    match = _HEXADECIMAL.fullmatch(text)
    if match:
        return float32_bits(fractions.Fraction(int(match[2], 16)), match[1] == b"-")
    match = _DECIMAL.fullmatch(text)
    if not match or not (match[2] or match[3]):
        raise Refused("not a number")
    digits = int((match[2] + (match[3] or b"")) or b"0")
    power = int(match[4] or b"0") - len(match[3] or b"")
    if digits == 0 or power < -400:
        return float32_bits(fractions.Fraction(0), match[1] == b"-")
    if power > 400:
        return INFINITY | (_SIGN if match[1] == b"-" else 0)
    return float32_bits(digits * fractions.Fraction(10) ** power, match[1] == b"-")


_LABELS = {0x00000000: 0, _SIGN: 0, 0x3F800000: 1, 0xBF800000: 0}  # 0, -0, 1, -1


def _label(bits):
    if bits & ~_SIGN < _SMALLEST_NORMAL:
        return 0
    if bits not in _LABELS:
        raise Refused("the label is none of 0, 1 and -1")
    return _LABELS[bits]


def _values(values):
    if any(bits & INFINITY == INFINITY for bits in values):
        raise Refused("a value is infinite or not a number")
    return values


def _ids(ids, feature_size):
    for feature_id in ids:
        if not 0 <= feature_id < (feature_size or MOST_ROWS):
            raise Refused("an id is out of bounds")
    return ids


# LibSVM.


def records_of_text(text: bytes) -> List[Tuple[int, bytes]]:
    """(number from 1, line without comment) of each line that holds a record."""
    text = text[3:] if text.startswith(b"\xef\xbb\xbf") else text  # a byte order mark
    lines = [line.split(b"#", 1)[0] for line in text.split(b"\n")]
    return [(i, line) for i, line in enumerate(lines, start=1) if line.strip(BLANKS)]


def parse_line(line: bytes, rules: Rules) -> Record:
    """`label id:value id:value ...`, blanks in between."""
    label, *pairs = re.split(b"[%s]+" % BLANKS, line.strip(BLANKS))
    label = _label(number(label))
    ids, values = [], []
    for pair in pairs:
        match = re.fullmatch(rb"(-?)([0-9]+):([^:]*)", pair)
        if not match:
            raise Refused("not id:value")
        digits = match[2].lstrip(b"0") or b"0"
        if (match[1] and digits != b"0") or len(digits) > 19 or int(digits) > INT64_MAX:
            raise Refused("an id is no int64 from 0 on")
        ids.append(int(digits) + rules.id_offset)
        values.append(number(match[3]))
    if rules.pad and 0 in ids:
        raise Refused("id 0 is the padding's")
    missing = rules.field_size - len(pairs)
    if missing < 0 or (missing and not rules.pad):
        raise Refused("the wrong number of pairs")
    ids = _ids(ids, rules.feature_size)
    return Record(label, ids + [0] * missing, _values(values) + [0] * missing)


# Protocol buffers: https://developers.google.com/protocol-buffers/docs/encoding


def _varint(data, at):
    """(number, where it ends)."""
    value = 0
    for i in range(10):
        if at + i >= len(data):
            raise Refused("a varint is cut")
        value |= (data[at + i] & 127) << (7 * i)
        if data[at + i] < 128:
            return value & (2**64 - 1), at + i + 1
    raise Refused("a varint of more than 10 bytes")


def _fields(message: bytes, in_group=None, at=0):
    """[(field, wire type, payload)] of a message; of a group, also where it ends."""
    found = []
    while at < len(message):
        tag, at = _varint(message, at)
        field, wire = tag >> 3, tag & 7
        if tag >= 2**32 or field == 0:
            raise Refused("no such tag")
        if wire == 4:
            if field != in_group:
                raise Refused("the end of a group that has not begun")
            return found, at
        if wire == 0:
            payload, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            payload, at = message[at : at + size], at + size
        elif wire == 2:
            size, at = _varint(message, at)
            payload, at = message[at : at + size], at + size
        elif wire == 3:
            payload, at = _fields(message, field, at)
        else:
            raise Refused("no such wire type")
        if at > len(message):
            raise Refused("a field is cut")
        found.append((field, wire, payload))
    if in_group is not None:
        raise Refused("a group is cut")
    return found


def _alone(message, field):
    """The payload of a message that holds just this field, written as short as it can be."""
    fields = _fields(message)
    if [(f, wire) for f, wire, _ in fields] != [(field, 2)]:
        raise Refused("not just one field")
    payload = fields[0][2]
    if len(message) != 1 + len(_shortest_varint(len(payload))) + len(payload):
        raise Refused("a tag or length that is longer than need be")
    return payload


def _shortest_varint(value):
    return (
        bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _shortest_varint(value >> 7)
    )


def _list(message, kind):
    """The numbers of an Int64List or FloatList, packed or not; floats as their bits."""
    numbers = []
    parts = _fields(message)
    if [part for part in parts if part[0] == 1][-1:] == [(1, 2, b"")]:
        # TensorFlow's decode_proto fails on it, and no program writes it.
        raise Refused("a list ends in a part that holds nothing")
    for field, wire, payload in parts:
        if field == 1 and wire == 2:
            at = 0
            while at < len(payload):
                if kind == "float":
                    if at + 4 > len(payload):
                        raise Refused("a float is cut")
                    numbers.append(struct.unpack_from("<I", payload, at)[0])
                    at += 4
                else:
                    value, at = _varint(payload, at)
                    numbers.append(value)
        elif field == 1 and wire == (5 if kind == "float" else 0):
            numbers.append(struct.unpack("<I", payload)[0] if kind == "float" else payload)
    return numbers if kind == "float" else [n - 2**64 if n >= 2**63 else n for n in numbers]


def parse_example(serialized: bytes, rules: Rules, with_labels=True) -> Record:
    """A tf.train.Example of `label` (float), `ids` (int64) and `values` (float).

    Features of other names are passed over, but for a weight, which would be lost. These three are
    there once, each as nothing but one list of its type: what could be read in two ways is refused.
    """
    features = {}
    for field, wire, entry in _fields(_alone(serialized, 1)):
        if (field, wire) == (1, 2):
            parts = [(f, p) for f, w, p in _fields(entry) if w == 2 and f in (1, 2)]
            key = ([b""] + [p for f, p in parts if f == 1])[-1]
            features.setdefault(key, []).append((entry, parts))
    if with_labels and b"weight" in features:
        raise Refused("a weight, though examples have none")
    numbers = {}
    for name, kind, list_field in (
        ("ids", "int64", 3),
        ("values", "float", 2),
        ("label", "float", 2),
    ):
        if name == "label" and not with_labels:
            continue
        found = features.get(name.encode(), [])
        if len(found) != 1:
            raise Refused("a feature is missing, or is there twice")
        entry, parts = found[0]
        if sorted(f for f, _ in parts) != [1, 2]:
            raise Refused("not just a key and a feature")
        if len(entry) != sum(1 + len(_shortest_varint(len(p))) + len(p) for _, p in parts):
            raise Refused("more than a key and a feature")
        numbers[name] = _list(_alone(dict(parts)[2], list_field), kind)
    for name in ("ids", "values"):
        if len(numbers[name]) != rules.field_size:
            raise Refused("the wrong number of ids or values")
    if with_labels and len(numbers["label"]) != 1:
        raise Refused("not just one label")
    label = _label(numbers["label"][0]) if with_labels else 0
    return Record(label, _ids(numbers["ids"], rules.feature_size), _values(numbers["values"]))


def serialize(record: Record) -> bytes:
    """A record as the converter writes it: features by name, lists packed, varints short."""
    floats = lambda bits: struct.pack(f"<{len(bits)}I", *bits)
    packed = (
        (b"ids", 3, b"".join(map(_shortest_varint, record.ids))),
        (b"label", 2, floats([float32_bits(fractions.Fraction(record.label), False)])),
        (b"values", 2, floats(record.values)),
    )
    entries = (field(1, name) + field(2, field(n, field(1, p))) for name, n, p in packed)
    return field(1, b"".join(field(1, entry) for entry in entries))


def field(number_: int, payload: bytes) -> bytes:
    """A field of wire type 2."""
    return bytes([number_ << 3 | 2]) + _shortest_varint(len(payload)) + payload


# TFRecord files: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details


def _crc_of_byte(crc):
    for _ in range(8):
        crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC = [_crc_of_byte(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), a byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """The checksum as it is stored."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """A record as a file stores it."""
    head = struct.pack("<Q", len(payload))
    sums = (struct.pack("<I", masked(crc32c(part))) for part in (head, payload))
    return head + next(sums) + payload + next(sums)


def frames(data: bytes) -> List[Tuple[int, Optional[bytes]]]:
    """(byte, payload) of the records of a file, the payload None where a record is damaged.

    After a damaged payload the next record follows; after a damaged header, the next place that
    begins with a whole one. A file that ends inside a record ends with a damaged one.
    """
    found, at = [], 0
    while at < len(data):
        length = _header(data, at)
        payload = data[at + 12 : at + 12 + length] if length is not None else b""
        end = at + 16 + length if length is not None else None
        whole = end is not None and end <= len(data)
        good = whole and data[end - 4 : end] == struct.pack("<I", masked(crc32c(payload)))
        found.append((at, payload if good else None))
        if end is None:
            end = at + 1
            while end < len(data) and _header(data, end) is None:
                end += 1
        at = end
    return found


def _header(data, at):
    """The length that a whole header says, or None."""
    head = data[at : at + 8]
    if len(data) < at + 12 or data[at + 8 : at + 12] != struct.pack("<I", masked(crc32c(head))):
        return None
    return struct.unpack("<Q", head)[0]


def gunzip(data: bytes) -> bytes:
    """The content of a gzip file; raises Refused if it is damaged, cut or has several members."""
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = unpack.decompress(data)
    except zlib.error as error:
        raise Refused("damaged as gzip") from error
    if not unpack.eof or unpack.unused_data:
        raise Refused("not one whole gzip member")
    return text
