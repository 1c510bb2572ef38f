"""FarmHash's Fingerprint64 in plain Python: what tf.strings.to_hash_bucket_fast and the codec use.

The formulas and their letters are those of farmhashna::Hash64 in https://github.com/google/farmhash
(src/farmhash.cc); csrc/fingerprint.h is the fast twin. All arithmetic is modulo 2^64.
"""

import struct

_MASK = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F


def _rotated(x, bits):
    return (x >> bits | x << (64 - bits)) & _MASK


def _mixed(x):
    return x ^ x >> 47


def _hash16(u, v, mul):
    a = _mixed((u ^ v) * mul & _MASK)
    return _mixed((v ^ a) * mul & _MASK) * mul & _MASK


def _weak(words, a, b):
    w, x, y, z = words
    a = a + w & _MASK
    b = _rotated(b + a + z & _MASK, 21)
    c = a
    a = a + x + y & _MASK
    return a + z & _MASK, b + _rotated(a, 44) + c & _MASK


def fingerprint64(text: bytes) -> int:
    """The hash of a text, in [0, 2^64)."""
    n = len(text)
    word = lambda at: struct.unpack_from("<Q", text, at)[0]
    mul = _K2 + 2 * n & _MASK
    if n == 0:
        return _K2
    if n <= 3:
        a = (text[0] + (text[n >> 1] << 8)) * _K2 & _MASK
        return _mixed((a ^ (n + (text[-1] << 2)) * _K0) & _MASK) * _K2 & _MASK
    if n <= 7:
        a, b = struct.unpack_from("<I", text)[0], struct.unpack_from("<I", text, n - 4)[0]
        return _hash16(n + (a << 3), b, mul)
    if n <= 16:
        a, b = word(0) + _K2 & _MASK, word(n - 8)
        c = _rotated(b, 37) * mul + a & _MASK
        return _hash16(c, (_rotated(a, 25) + b) * mul & _MASK, mul)
    if n <= 32:
        a, b, c, d = word(0) * _K1, word(8), word(n - 8) * mul, word(n - 16) * _K2
        a, c = a & _MASK, c & _MASK
        u = _rotated(a + b & _MASK, 43) + _rotated(c, 30) + d & _MASK
        return _hash16(u, a + _rotated(b + _K2 & _MASK, 18) + c & _MASK, mul)
    if n <= 64:
        a, b, c, d = word(0) * _K2 & _MASK, word(8), word(n - 8) * mul & _MASK, word(n - 16) * _K2
        y = _rotated(a + b & _MASK, 43) + _rotated(c, 30) + d & _MASK
        z = _hash16(y, a + _rotated(b + _K2 & _MASK, 18) + c & _MASK, mul)
        e, f = word(16) * mul & _MASK, word(24)
        g, h = (y + word(n - 32)) * mul & _MASK, (z + word(n - 24)) * mul & _MASK
        u = _rotated(e + f & _MASK, 43) + _rotated(g, 30) + h & _MASK
        return _hash16(u, e + _rotated(f + a & _MASK, 18) + g & _MASK, mul)
    return _long(text, word)


def _long(text, word):
    """The hash of a text of more than 64 bytes; its last block may overlap the one before."""
    seed, n = 81, len(text)
    x, y = seed * _K2 + word(0) & _MASK, seed * _K1 + 113 & _MASK
    z = _mixed(y * _K2 + 113 & _MASK) * _K2 & _MASK
    v, w = (0, 0), (0, 0)
    mul, factor = _K1, 1
    for at in [*range(0, (n - 1) // 64 * 64, 64), n - 64]:
        if at == n - 64 and mul == _K1:
            mul, factor = _K1 + ((z & 255) << 1) & _MASK, 9
            w = w[0] + ((n - 1) & 63) & _MASK, w[1]
            v = v[0] + w[0] & _MASK, v[1]
            w = w[0] + v[0] & _MASK, w[1]
        some = [word(at + 8 * i) for i in range(8)]
        x = (_rotated(x + y + v[0] + some[1] & _MASK, 37) * mul ^ w[1] * factor) & _MASK
        y = _rotated(y + v[1] + some[6] & _MASK, 42) * mul + v[0] * factor + some[5] & _MASK
        z = _rotated(z + w[0] & _MASK, 33) * mul & _MASK
        v = _weak(some[:4], v[1] * mul & _MASK, x + w[0] & _MASK)
        w = _weak(some[4:], z + w[1] & _MASK, y + some[2] & _MASK)
        z, x = x, z
    a = _hash16(v[0], w[0], mul) + _mixed(y) * _K0 + z & _MASK
    return _hash16(a, _hash16(v[1], w[1], mul) + x & _MASK, mul)
