"""Compares the codec with numpy's decoders and encoder, which it replaces; run by hand.

    python tests/codec_fuzz.py 1000000 100000      lines, records

Lines and records are drawn good and bad; lengths and offsets lie. Under the sanitizers:

    DEEPFM_SANITIZE=1 LD_PRELOAD=... python tests/codec_fuzz.py 100000 20000
"""

import collections
import pathlib
import random
import struct
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from oracle import decoder, encoder, libsvm_decoder

from deepfm.records import codec, text_blocks, wire
from deepfm.records.libsvm_text import explain_line
from deepfm.records.schema import Schema

LINES = {
    "plain": Schema(2, 50),
    "padded": Schema(3, pad=True, id_offset=1),
    "weighted": Schema(2, weighted=True),
    "named": Schema(3, 50, pad=True, named_fields=True),
    "multi": Schema(3, 50, multi_valued=True, named_fields=True, weighted=True),
    "map": Schema(3, 51, pad=True, field_ids=((0, 10), (30, 40), (10, 20)), id_offset=1),
    "hashed": Schema(2, 50, hash_buckets=50),
    "hashed ffm": Schema(3, 9, True, named_fields=True, hash_buckets=9, weighted=True),
    "multi map": Schema(3, 50, multi_valued=True, field_ids=((0, 10), (10, 20), (30, 40))),
    "any length": Schema(3, pad=True, multi_valued=True, weighted=True),
}
R = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
pick = lambda *words: R.choice(words)
digits = lambda a, b: "".join(R.choice("0123456789") for _ in range(R.randint(a, b)))


def number():
    kind = R.randrange(12)
    if kind < 4:
        return repr(np.float32(R.gauss(0, 10 ** R.randint(-8, 8))).item())
    if kind < 6:
        return f"{R.gauss(0, 10 ** R.randint(-30, 30)):.{R.randint(1, 17)}g}"
    if kind == 6:
        return f"{R.random():.{R.randint(0, 33)}f}"
    if kind == 7:
        sign, point, exponent = (
            pick("", "+", "-"),
            pick("", "."),
            pick("", f"e{R.randint(-50, 50)}", "E+5", "e"),
        )
        return sign + digits(0, 12) + point + digits(0, 20) + exponent
    if kind == 8:  # half-way between two float32, or nearly
        x = np.float32(R.gauss(0, 10 ** R.randint(-6, 6)))
        middle = (float(x) + float(np.nextafter(x, np.float32(np.inf)))) / 2
        return f"{middle:.{R.randint(14, 25)}g}"
    return pick(
        "1",
        "0",
        "0.5",
        "0x1F",
        "-0X1f",
        "0x",
        "nan",
        "inf",
        "1e-42",
        "1_0",
        "",
        ".",
        "5.",
        "+.5",
        "-",
        "1.00000005960464478",
        "0." + "1" * 28,
        "0." + "1" * 30,
        "16777217",
        "1e39",
        "0" * 31,
        "0" * 32,
        "1e400",
        "1e-400",
        "\0",
        "1\0",
        "3.4028235677e38",
        "3.40282357e38",
        "--1",
        "1e+",
        "5e5.",
        "\xe9",
    )


def feature_id():
    if R.random() < 0.7:
        return str(R.randint(0, 45))
    return pick(
        "-0",
        "-1",
        "007",
        "2147483647",
        "2147483646",
        "9" * 19,
        "0" * 20 + "7",
        "x",
        "",
        "+1",
        "red",
        "a#b",
        "#",
        "\xe9t\xe9",
        "a\x01b",
        "\x1f",
        "\x7f",
        "s" * R.randint(1, 200),
        "qid",
        "9" * 18,
        "0" * 40,
        "-00",
        "9223372036854775808",
        "18446744073709551617",
        "1\0",
    )


def a_line(named):
    good = R.random() < 0.6
    line = (
        pick("0", "1", "-1", "+1")
        if good or R.random() < 0.6
        else pick(
            "2",
            "0x1",
            "1.0",
            "1:2",
            "0:",
            ":1",
            "1:-1",
            "1:1e-45",
            "1:0.25",
            "1:1:1",
            "a",
            "-0",
            "1e0",
            "3e-40",
            "#",
            "1:nan",
        )
    )
    for _ in range(R.choice([2, 2, 2, 0, 1, 3, 4])):
        colon = ":" if good or R.random() < 0.9 else pick("", "::", " :", ": ")
        value = f"{R.gauss(0, 1):.6g}" if good else number()
        name = str(R.randint(1, 39)) if good else feature_id()
        field = (
            ""
            if not named
            else (
                str(R.randint(0, 2))
                if good
                else pick("0", "1", "2", "3", "00", "-1", "1000000", "000001", "0000001", "")
            )
            + ":"
        )
        line += pick(" ", " ", " ", "  ", "\t", "\r", "\v", "\f") + field + name + colon + value
    return (
        pick("", "", " ")
        + line
        + pick("", "", "", " ", "\r", " # 3:4", " #3:4", "#", "# ", " # a #b")
    )


def bits(batch):
    return [None if x is None else (x.shape, x.dtype.str, x.tobytes()) for x in batch]


def slow_zeros(batch):
    """Zeros without a sign: numpy's decoder kept it only of short numbers."""
    return batch._replace(
        values=batch.values + np.float32(0),
        weights=None if batch.weights is None else batch.weights + np.float32(0),
    )


seen = collections.Counter()


def lines(count):
    names = list(LINES)
    for i in range(count):
        schema = LINES[names[i % len(names)]]
        text = a_line(schema.named_fields).encode("utf-8") + b"\n"
        if R.random() < 0.02:
            text = text[: R.randrange(len(text))]
        found, holds = codec.decode_lines(text, schema), bool(text.split(b"#")[0].strip())
        bad = holds and explain_line(text.split(b"\n")[0], schema) is not None
        if (found is None) != bad:
            print("DIFFERS from explain_line", text, schema)
        # Of lines without a record, numpy's decoder refuses some comments.
        if (
            i % 10 == 0
            and holds
            and (found is None) != (libsvm_decoder.decode(text, schema) is None)
        ):
            print("DIFFERS from libsvm_decoder", text, schema)
        seen["lines bad" if bad else "lines good"] += 1
        if holds and not bad:
            good[names[i % len(names)]].append(text)
    for name, texts in good.items():
        for i in range(0, len(texts), 500):
            text = (b"\n" if LINES[name].hash_buckets else b"# x\n \n").join(texts[i : i + 500])
            a, b = (f(text, LINES[name]) for f in (codec.decode_lines, libsvm_decoder.decode))
            assert (a is None) == (b is None) and a is not None, name
            assert bits(slow_zeros(a)) == bits(slow_zeros(b)), name
            assert (codec.record_starts(text) == text_blocks.record_starts(text)).all()
            seen["lines in blocks"] += len(a.labels)


good = collections.defaultdict(list)


def drawn(rng, rows):
    fields, multi, weighted = rng.choice([1, 2, 3, 39]), rng.rand() < 0.5, rng.rand() < 0.5
    counts, width = None, fields
    if multi:
        counts = rng.choice(
            [0, 1, 1, 1, 2, 3, 200], [rows, fields], p=[0.1, 0.3, 0.3, 0.1, 0.1, 0.09, 0.01]
        )
        width = int(counts.sum(axis=1).max())
    ids = rng.randint(0, 1 << rng.choice([3, 8, 20, 30]), [rows, width])
    if rng.rand() < 0.05:
        ids[rng.rand(*ids.shape) < 0.01] = -1
    values = rng.standard_normal([rows, width]).astype(np.float32)
    values[rng.rand(*values.shape) < 0.0005] = np.inf
    labels = rng.choice(
        np.float32([0, 1, 1, 0, 1, -1, 2, 1e-42]),
        rows,
        p=[0.4, 0.4, 0.05, 0.05, 0.07, 0.01, 0.01, 0.01],
    )
    weights = (
        rng.choice(
            np.float32([1, 2.5, 0, -1, np.nan, 1e-45, -1e-45]),
            rows,
            p=[0.5, 0.4, 0.05, 0.01, 0.01, 0.02, 0.01],
        )
        if weighted
        else None
    )
    return labels, ids, values, counts, weights


def changed(rng, payload):
    text = bytearray(payload)
    for place in rng.randint(0, max(len(text), 1), rng.randint(1, 4)):
        kind = rng.randint(3)
        text[place : place + (kind != 1)] = (
            b""
            if kind == 2
            else bytes(rng.randint(0, 256, 1).tolist())
            if rng.rand() < 0.5
            else bytes([rng.choice([0, 1, 2, 3, 10, 18, 26, 127, 128, 255])])
        )
    return bytes(text)


def records(count):
    rng = np.random.RandomState(R.randrange(1 << 30))
    done = 0
    while done < count:
        rows = int(rng.choice([1, 7, 60]))
        batch = drawn(rng, rows)
        data, sizes = codec.encode(*batch)
        other, other_sizes = encoder.encode(*batch)
        assert data == other and (sizes == other_sizes).all()
        fields = batch[1].shape[1] if batch[3] is None else batch[3].shape[1]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        payloads = [data[a + 12 : b - 4] for a, b in zip(starts, ends)]
        mutated = [changed(rng, p) if rng.rand() < 0.7 else p for p in payloads]
        for some in (payloads, mutated, *([p] for p in mutated)):
            schema = Schema(
                fields,
                None if rng.rand() < 0.5 else 1 << 20,
                multi_valued=rng.rand() < 0.5,
                weighted=rng.rand() < 0.5,
                with_labels=rng.rand() < 0.7,
            )
            if rng.rand() < 0.5:
                schema = schema._replace(
                    multi_valued=batch[3] is not None, weighted=batch[4] is not None
                )
            cuts = np.cumsum([0, *map(len, some)])
            text = b"".join(some)
            found, wanted = (
                codec.decode(text, cuts[:-1], cuts[1:], schema),
                decoder.decode(text, cuts[:-1], cuts[1:], schema),
            )
            assert (found is None) == (wanted is None), (some, schema)
            seen["batches taken" if found else "batches refused"] += 1
            if found is not None:
                assert bits(found) == bits(wanted), (some, schema, found, wanted)
            lies = (
                cuts[:-1] + rng.randint(-3, 4, len(some)),
                cuts[1:] + rng.randint(-3, 4, len(some)),
            )
            codec.decode(text, *lies, schema)
            if rng.rand() < 0.05:
                codec.decode(
                    text,
                    cuts[:-1] - rng.randint(0, 1 << 60),
                    cuts[1:] + rng.randint(0, 1 << 60),
                    schema,
                )
        # Frames whose lengths lie.
        damaged = bytearray(data)
        for _ in range(rng.randint(0, 3)):
            at = int(rng.choice(starts)) if rng.rand() < 0.5 else rng.randint(len(damaged))
            damaged[at] = rng.randint(256)
        if rng.rand() < 0.3:
            at = int(rng.choice(starts))
            head = struct.pack(
                "<Q", int(rng.choice([1 << 60, 1 << 30, (1 << 30) + 1, 5000, 2**63 - 1]))
            )
            damaged[at : at + 12] = head + wire._checksum(head)
        damaged = bytes(damaged[: rng.randint(len(damaged) + 1)] if rng.rand() < 0.3 else damaged)
        a, b = codec.scan(damaged), wire.scan(damaged)
        assert (a[0] == b[0]).all() and (a[1] == b[1]).all() and a[2] == b[2]
        assert codec.next_header(damaged, 1) == next(
            (i for i in range(1, len(damaged)) if wire.is_header(damaged[i : i + 12])), -1
        )
        seen["frames"] += len(a[0])
        done += rows


for what, count in ((lines, int(sys.argv[1])), (records, int(sys.argv[2]))):
    start = time.time()
    what(count)
    print(what.__name__, count, f"{time.time() - start:.0f} s", dict(seen), flush=True)
