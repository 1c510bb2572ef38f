"""FarmHash's Fingerprint64 of many strings at once, with numpy alone.

The same numbers as TensorFlow's tf.strings.to_hash_bucket_fast; the formulas and the names of their
letters are those of farmhashna::Hash64 in https://github.com/google/farmhash (src/farmhash.cc). All
arithmetic is modulo 2^64.

n: strings. `words` is a view of a text in which words[i] is the 8 bytes from byte i on, as a
little-endian uint64; `s` is where each string begins in it.
"""

import numpy as np

_K0, _K1, _K2 = np.uint64([0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F])
_SEED = 81
_BLOCK = 64  # bytes of a long string that are mixed in at once


def of_strings(words: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The fingerprints of the strings text[start:end]. uint64 [n].

    Args:
        words: uint64 [bytes of the text + 1], of the text followed by 8 bytes of any value.
        starts, ends: int64 [n].
    """
    hashes, lengths = np.empty(len(starts), np.uint64), ends - starts
    kinds = np.searchsorted(np.array(_SHORTEST), lengths, side="right") - 1
    for kind in np.unique(kinds).tolist():
        some = kinds == kind
        hashes[some] = _HASHES[kind](words, starts[some], lengths[some])
    return hashes


def _rotated(x, bits):
    return x >> np.uint64(bits) | x << np.uint64(64 - bits)


def _shift_mix(x):
    return x ^ x >> np.uint64(47)


def _hash_16(u, v, mul):
    return _shift_mix((v ^ _shift_mix((u ^ v) * mul)) * mul) * mul


def _mul(length):
    return _K2 + length.astype(np.uint64) * np.uint64(2)


def _of_0(words, s, length):
    return np.full(len(s), _K2)


def _of_1_to_3(words, s, length):
    a, b, c = (words[s + i] & np.uint64(255) for i in (0, length >> 1, length - 1))
    y, z = a + (b << np.uint64(8)), length.astype(np.uint64) + (c << np.uint64(2))
    return _shift_mix(y * _K2 ^ z * _K0) * _K2


def _of_4_to_7(words, s, length):
    a, b = (words[s + i] & np.uint64(0xFFFFFFFF) for i in (0, length - 4))
    return _hash_16(length.astype(np.uint64) + (a << np.uint64(3)), b, _mul(length))


def _of_8_to_16(words, s, length):
    mul, a, b = _mul(length), words[s] + _K2, words[s + length - 8]
    c, d = _rotated(b, 37) * mul + a, (_rotated(a, 25) + b) * mul
    return _hash_16(c, d, mul)


def _of_17_to_32(words, s, length):
    mul, a, b = _mul(length), words[s] * _K1, words[s + 8]
    c, d = words[s + length - 8] * mul, words[s + length - 16] * _K2
    y, z = _rotated(a + b, 43) + _rotated(c, 30) + d, a + _rotated(b + _K2, 18) + c
    return _hash_16(y, z, mul)


def _of_33_to_64(words, s, length):
    mul, a, b = _mul(length), words[s] * _K2, words[s + 8]
    c, d = words[s + length - 8] * mul, words[s + length - 16] * _K2
    y = _rotated(a + b, 43) + _rotated(c, 30) + d
    z = _hash_16(y, a + _rotated(b + _K2, 18) + c, mul)
    e, f = words[s + 16] * mul, words[s + 24]
    g, h = (y + words[s + length - 32]) * mul, (z + words[s + length - 24]) * mul
    y, z = _rotated(e + f, 43) + _rotated(g, 30) + h, e + _rotated(f + a, 18) + g
    return _hash_16(y, z, mul)


def _of_65_and_more(words, s, length):
    n, last = len(s), (length - 1) // _BLOCK  # the last block, which may overlap the one before
    x = np.full(n, _SEED, np.uint64)
    y = x * _K1 + np.uint64(113)
    z, zero = _shift_mix(y * _K2 + np.uint64(113)) * _K2, np.zeros(n, np.uint64)
    state = np.stack([x * _K2 + words[s], y, z, zero, zero, zero, zero])
    for block in range(int(last.max())):
        left = block < last
        state[:, left] = _mixed(words, s[left] + block * _BLOCK, state[:, left], _K1, np.uint64(1))
    x, y, z, v0, v1, w0, w1 = state
    mul = _K1 + ((z & np.uint64(255)) << np.uint64(1))
    w0 = w0 + ((length - 1) % _BLOCK).astype(np.uint64)
    v0 = v0 + w0
    w0 = w0 + v0
    state = x, y, z, v0, v1, w0, w1
    x, y, z, v0, v1, w0, w1 = _mixed(words, s + length - _BLOCK, state, mul, np.uint64(9))
    one, other = _hash_16(v0, w0, mul) + _shift_mix(y) * _K0 + z, _hash_16(v1, w1, mul) + x
    return _hash_16(one, other, mul)


def _mixed(words, s, state, mul, factor):
    """The state after a block of 64 bytes."""
    x, y, z, v0, v1, w0, w1 = state
    x = _rotated(x + y + v0 + words[s + 8], 37) * mul ^ w1 * factor
    y = _rotated(y + v1 + words[s + 48], 42) * mul + v0 * factor + words[s + 40]
    z = _rotated(z + w0, 33) * mul
    v0, v1 = _weak(words, s, v1 * mul, x + w0)
    w0, w1 = _weak(words, s + 32, z + w1, y + words[s + 16])
    return z, y, x, v0, v1, w0, w1


def _weak(words, s, a, b):
    w, x, y, z = (words[s + i] for i in (0, 8, 16, 24))
    a = a + w
    b, c = _rotated(b + a + z, 21), a
    a = a + x + y
    return a + z, b + _rotated(a, 44) + c


_SHORTEST = 0, 1, 4, 8, 17, 33, 65  # bytes
_HASHES = (
    _of_0, _of_1_to_3, _of_4_to_7, _of_8_to_16, _of_17_to_32, _of_33_to_64, _of_65_and_more
)  # fmt: skip
