// FarmHash's Fingerprint64, the same numbers as TensorFlow's tf.strings.to_hash_bucket_fast. The
// formulas and their letters are those of farmhashna::Hash64 in https://github.com/google/farmhash
// (src/farmhash.cc). All arithmetic is modulo 2^64.
#pragma once

#include <utility>

#include "bytes.h"

namespace deepfm {
namespace codec {

constexpr uint64 kK0 = 0xC3A5C85C97CB3127, kK1 = 0xB492B66FBE98F273, kK2 = 0x9AE16A3B2F90404F;

inline uint64 Word(const char* s) { return Load<uint64>(s); }
inline uint64 Rotated(uint64 x, int bits) { return x >> bits | x << (64 - bits); }
inline uint64 ShiftMix(uint64 x) { return x ^ x >> 47; }
inline uint64 Hash16(uint64 u, uint64 v, uint64 mul) {
  return ShiftMix((v ^ ShiftMix((u ^ v) * mul)) * mul) * mul;
}

// The state of a string of more than 64 bytes.
struct Mixed {
  uint64 x, y, z, v0, v1, w0, w1;

  static void Weak(const char* s, uint64 a, uint64 b, uint64* first, uint64* second) {
    const uint64 w = Word(s), x = Word(s + 8), y = Word(s + 16), z = Word(s + 24);
    a += w;
    b = Rotated(b + a + z, 21);
    const uint64 c = a;
    a += x + y;
    b += Rotated(a, 44);
    *first = a + z;
    *second = b + c;
  }

  // Mixes 64 bytes in.
  void Mix(const char* s, uint64 mul, uint64 factor) {
    x = Rotated(x + y + v0 + Word(s + 8), 37) * mul ^ w1 * factor;
    y = Rotated(y + v1 + Word(s + 48), 42) * mul + v0 * factor + Word(s + 40);
    z = Rotated(z + w0, 33) * mul;
    Weak(s, v1 * mul, x + w0, &v0, &v1);
    Weak(s + 32, z + w1, y + Word(s + 16), &w0, &w1);
    std::swap(z, x);
  }
};

inline uint64 Fingerprint(const char* s, size_t size) {
  const uint64 mul = kK2 + 2 * size;
  const char* end = s + size;
  if (size == 0) return kK2;
  if (size <= 3) {
    const uint64 a = static_cast<uint8>(s[0]), b = static_cast<uint8>(s[size >> 1]),
                 c = static_cast<uint8>(s[size - 1]);
    return ShiftMix((a + (b << 8)) * kK2 ^ (size + (c << 2)) * kK0) * kK2;
  }
  if (size <= 7) {
    const uint64 a = Load<uint32>(s), b = Load<uint32>(end - 4);
    return Hash16(size + (a << 3), b, mul);
  }
  if (size <= 16) {
    const uint64 a = Word(s) + kK2, b = Word(end - 8);
    return Hash16(Rotated(b, 37) * mul + a, (Rotated(a, 25) + b) * mul, mul);
  }
  if (size <= 32) {
    const uint64 a = Word(s) * kK1, b = Word(s + 8), c = Word(end - 8) * mul,
                 d = Word(end - 16) * kK2;
    return Hash16(Rotated(a + b, 43) + Rotated(c, 30) + d, a + Rotated(b + kK2, 18) + c, mul);
  }
  if (size <= 64) {
    const uint64 a = Word(s) * kK2, b = Word(s + 8), c = Word(end - 8) * mul,
                 d = Word(end - 16) * kK2;
    const uint64 y = Rotated(a + b, 43) + Rotated(c, 30) + d;
    const uint64 z = Hash16(y, a + Rotated(b + kK2, 18) + c, mul);
    const uint64 e = Word(s + 16) * mul, f = Word(s + 24), g = (y + Word(end - 32)) * mul,
                 h = (z + Word(end - 24)) * mul;
    return Hash16(Rotated(e + f, 43) + Rotated(g, 30) + h, e + Rotated(f + a, 18) + g, mul);
  }
  const uint64 seed = 81;
  Mixed m{};
  m.x = seed * kK2 + Word(s);
  m.y = seed * kK1 + 113;
  m.z = ShiftMix(m.y * kK2 + 113) * kK2;
  // The last block may overlap the one before.
  for (const char* last = s + (size - 1) / 64 * 64; s < last; s += 64) m.Mix(s, kK1, 1);
  const uint64 factor = kK1 + ((m.z & 255) << 1);
  m.w0 += (size - 1) & 63;
  m.v0 += m.w0;
  m.w0 += m.v0;
  m.Mix(end - 64, factor, 9);
  return Hash16(Hash16(m.v0, m.w0, factor) + ShiftMix(m.y) * kK0 + m.z,
                Hash16(m.v1, m.w1, factor) + m.x, factor);
}

}  // namespace codec
}  // namespace deepfm
