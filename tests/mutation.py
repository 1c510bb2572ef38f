"""Draws almost valid LibSVM lines, tf.train.Examples and TFRecord files, and damages them.

Everything is a function of the random.Random passed in.
"""

# ruff: noqa: E501

import gzip
import struct

from reference import field, header

from deepfm.records.tfrecord import framed

_NUMBERS = [
    b"0", b"1", b"-1", b"+1", b".5", b"5.", b"1e-3", b"1E2", b"-0", b"0.1", b"16777217", b"1e999",
    b"-1e999", b"nan", b"-nan", b"inf", b"Infinity", b"0x10", b"0X1p3", b"0x1p3", b"-0x7", b"0x", b"+",
    b"-", b".", b"+.", b"e5", b".e5", b"1e", b"1e+", b"1_0", b"1f", b"1,5", b"--1", b"++1", b"1e38",
    b"3.4028235e38", b"3.4028236e38", b"3.40282356779733661637539395e38", b"340282356779733661637539395458",
    b"1e-37", b"1.17549435e-38", b"1e-40", b"1.4e-45", b"7e-46", b"1e-400", b"1e99999999999999999999",
    b"1e-99999999999999999999", b"1" * 31, b"0" * 31, b"0" * 32, b"0." + b"0" * 28 + b"1",
    b"0x" + b"f" * 29, b"0xffffff8000001", b"0x1000001", b"0x1000003", b"1.0000000596046448",
    b"\xd9\xa1", b"1\xc2\xa0", b"oops", b"1:1", b"",
]  # fmt: skip
_IDS = [
    b"0", b"1", b"2", b"9", b"10", b"99", b"100", b"01", b"-0", b"-1", b"+1", b"1.0", b"0x1", b"1e1", b"",
    b"2147483648", b"4294967297", b"9223372036854775806", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551617", b"-9223372036854775808", b"-9223372036854775809", b"9" * 25, b"0" * 40,
    b"0" * 40 + b"7", b"-" + b"9" * 30, b"qid", b"a", b"\xc2\xb2",
]  # fmt: skip
_LABELS = [
    b"2", b"-0", b"0.0", b"1.0", b"+1", b"1e0", b"0x1", b"0x0", b"-1.0", b"0.5", b"1.00000001",
    b"0.99999999", b"1e-60", b"-1e-60", b"nan", b"inf", b"one", b"1:1", b"-", b"-x", b"-\xff", b"1,1:1",
]  # fmt: skip
_BLANKS = [b" ", b"  ", b"\t", b"\r", b"\v", b"\f", b" \t "]
_TAILS = [
    b" ", b"\t", b"\r", b" \r", b" # 3:4 \xff\n", b"#", b"# 1 1:1", b" qid:3", b" 1:1", b":",
    b"::1",
]  # fmt: skip
_INSERTS = [
    b"\0", b"\r", b"\n", b"\r\n", b"#", b":", b" ", b"-", b"+", b"\x1c", b"\x85", b"\xff", b"\xc3\xa9",
    b"\xc2\xa0", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b" qid:7 ", b"e", b"0" * 40, b",",
]  # fmt: skip


def line(random, field_size, labels):
    """A LibSVM line without its end; most are good, though odd."""
    odd = lambda: random.random() < 0.01
    blank = lambda: random.choice(_BLANKS) if odd() else b" "
    label = random.choice(_LABELS) if odd() else random.choice(labels)
    pairs = field_size + (random.choice([-1, 1, 2]) if odd() else 0)
    text = label
    for _ in range(pairs):
        feature_id = random.choice(_IDS) if odd() else b"%d" % random.randrange(1, 100)
        value = random.choice(_NUMBERS) if odd() else _value(random)
        text += blank() + feature_id + b":" + value
    if odd():
        text = random.choice(_BLANKS) + text
    return text + random.choice(_TAILS) if odd() else text


def _value(random):
    kind = random.randrange(4)
    if kind == 0:
        return b"1"
    if kind == 1:
        return b"%.4f" % random.random()
    if kind == 2:
        return repr(random.uniform(-1, 1) * 10.0 ** random.randrange(-40, 39)).encode()
    digits = bytes(random.choice(b"0123456789") for _ in range(random.randrange(1, 25)))
    at = random.randrange(len(digits) + 1)
    return (
        digits[:at] + b"." * random.randrange(2) + digits[at:] + b"e%d" % random.randrange(-50, 20)
    )


def text(random, lines, field_size, labels):
    """A LibSVM text of `lines` lines, with blank lines and comments among them, partly damaged."""
    parts = []
    for _ in range(lines):
        drawn = random.random()
        part = line(random, field_size, labels)
        if drawn < 0.05:
            part = damaged(random, part, _INSERTS)
        elif drawn < 0.12:
            part = random.choice([b"", b" ", b"\r", b"\t\v\f", b"# 1 1:1", b"  # \xff\xfe", b"#"])
        elif drawn < 0.121:
            part += b" 1:1" * random.randrange(100, 5000)
        elif drawn < 0.122:
            part += b"0" * random.randrange(100, 20000)
        parts.append(part + random.choice([b"\r\n", b"\n", b"\n", b"\n"]))
    whole = b"".join(parts)
    return whole[:-1] if random.random() < 0.5 else whole


def damaged(random, data, inserts=(b"\0", b"\xff")):
    """The bytes with one to three flips, cuts, insertions or doublings."""
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice([1, 1, 2, 5, 20]))
        kind = random.randrange(6)
        if kind <= 1 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:at] + random.choice(inserts) + data[at:]
        elif kind == 4:
            data = data[:end] + data[at:]
        elif kind == 5 and random.random() < 0.3:
            data = data[:at]
    return data


# tf.train.Examples.


def _varint(number, random=None):
    number &= 2**64 - 1
    longer = random is not None and random.random() < 0.03
    parts = []
    while True:
        number, low = number >> 7, number & 127
        parts.append(low | 128)
        if not number:
            break
    if longer and len(parts) < 10:
        parts.append(128)
    parts[-1] &= 127
    return bytes(parts)


def _list(random, kind, numbers):
    """A list's message: packed, unpacked or in parts."""
    if kind == "float":
        one = lambda x: struct.pack("<f", x)
        tag = b"\x0d"
    else:
        one = lambda x: _varint(x, random)
        tag = b"\x08"
    drawn = random.random()
    if drawn < 0.8:
        return field(1, b"".join(map(one, numbers)))
    if drawn < 0.9:
        return b"".join(tag + one(x) for x in numbers)
    cut = random.randrange(len(numbers) + 1)
    parts = [
        field(1, b"".join(map(one, numbers[:cut]))),
        b"".join(tag + one(x) for x in numbers[cut:]),
    ]
    return b"".join(random.sample(parts, 2))


_UNKNOWN = [
    b"\x28\x05", b"\x2d\0\0\0\0", b"\x29" + b"\0" * 8, b"\x2a\x01x", b"\x2b\x2c", b"\xff", b"\0",
]  # fmt: skip


def example(random, field_size):
    """A serialized Example, four in five of them good, in the many ways that the format allows."""
    odd = lambda p=0.01: random.random() < p
    width = lambda: field_size + (random.choice([-1, 1, 5, -field_size]) if odd() else 0)
    extra = lambda: random.choice(_UNKNOWN) if odd(0.003) else b""
    ids = [random.randrange(1 << random.choice([3, 7, 14])) for _ in range(width())]
    values = [random.choice([0.5, 1.0, 0.0, random.random(), 1e-40]) for _ in range(width())]
    label = [random.choice([0.0, 1.0])]
    if odd():
        label = random.choice([[], [2.0], [-1.0], [-0.0], [0.5], [float("nan")], [1.0, 1.0]])
    if odd() and values:
        values[random.randrange(len(values))] = random.choice([float("nan"), float("inf"), 3.4e38])
    if odd() and ids:
        ids[random.randrange(len(ids))] = random.choice(
            [-1, 1 << 40, 2**63 - 1, 2**63 - 2, -(2**63)]
        )
    parts = [
        (b"ids", "int64", 3, ids),
        (b"label", "float", 2, label),
        (b"values", "float", 2, values),
    ]
    if odd(0.5):
        random.shuffle(parts)
    if odd(0.1):
        weight = (
            random.choice([b"weight", b"", b"id", b"idss", b"\xff", b"x" * 200]),
            "float",
            2,
            [1.0],
        )
        parts.insert(random.randrange(4), weight)
    if odd():
        parts.append(random.choice(parts))
    if odd():
        parts.pop(random.randrange(len(parts)))
    entries = []
    for key, kind, number, numbers in parts:
        if odd(0.005):
            kind, number = ("float", 2) if kind == "int64" else ("int64", 3)
            numbers = [int(x) if kind == "int64" and abs(x) < 9 else 1 for x in numbers]
        feature = field(number, _list(random, kind, numbers) + extra()) + extra()
        if odd(0.005):
            feature += field(random.choice([1, 2, 3]), _list(random, kind, numbers))
        entry = [field(1, key), field(2, feature)]
        if odd():
            entry.reverse()
        if odd(0.005):
            entry.append(random.choice(entry))
        entries.append(field(1, b"".join(entry) + extra()))
    if odd(0.005):
        cut = random.randrange(len(entries) + 1)
        return field(1, b"".join(entries[:cut])) + field(1, b"".join(entries[cut:]))
    serialized = field(1, b"".join(entries) + extra()) + extra()
    return damaged(random, serialized) if odd(0.1) else serialized


# TFRecord files.


def record_file(random, field_size, records):
    """The bytes of a file of `records` records, in nine of ten cases damaged, and whether it is gzip."""
    payloads = [example(random, field_size) for _ in range(records)]
    if random.random() < 0.1:
        payloads[random.randrange(records)] = b""
    frames = [framed(payload) for payload in payloads]
    if random.random() < 0.2:
        frames[random.randrange(records)] = _odd_frame(random)
    data = b"".join(frames)
    compress = random.random() < 0.3
    drawn = random.random()
    if drawn < 0.4:
        data = _damaged_frames(random, frames)
    elif drawn < 0.6:
        data = damaged(random, data)
    if compress:
        data = gzip.compress(data, 1)
        if drawn > 0.6:
            data = damaged(random, data)
        elif drawn > 0.55:
            data += random.choice([gzip.compress(frames[0]), b"\0", b"\0" * 512, b"x"])
    return data, compress


def _odd_frame(random):
    """A header that is right, of a record that is not there."""
    length = random.choice(
        [1 << 20, 1 << 31, 1 << 40, 1 << 60, 1 << 63, (1 << 64) - 12, (1 << 64) - 1]
    )
    return header(length) + b"1234"


def _damaged_frames(random, frames):
    frames = list(frames)
    at = random.randrange(len(frames))
    kind = random.randrange(5)
    if kind == 0:
        frames[at] = b""
    elif kind == 1:
        frames.insert(at, frames[at])
    elif kind == 2 and frames[at]:
        where = random.randrange(min(16, len(frames[at])))
        frames[at] = damaged(random, frames[at][:where]) + frames[at][where:]
    elif kind == 3:
        frames[at] = frames[at][: random.randrange(len(frames[at]) + 1)]
    else:
        frames[at] = damaged(random, frames[at])
    return b"".join(frames)
