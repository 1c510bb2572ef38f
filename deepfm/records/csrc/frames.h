// TFRecord's frames: length, its checksum, payload, its checksum. Checksums are CRC-32C, masked:
// https://www.tensorflow.org/tutorials/load_data/tfrecord. Assumes little-endian processors.
#pragma once

#include "bytes.h"

namespace deepfm {
namespace codec {

constexpr uint64 kHeader = 12, kFrame = 16;      // bytes before the payload; and all but the payload
constexpr uint64 kLongestRecord = 1ull << 30;    // as frames.LONGEST_RECORD

#if defined(__x86_64__)  // all since 2011 have the instruction
#if defined(__clang__)
__attribute__((target("sse4.2,crc32")))
#else
__attribute__((target("sse4.2")))
#endif
inline uint32 Crc(const char* data, size_t size) {
  uint64 crc = ~0u;
  for (; size >= 8; data += 8, size -= 8) crc = __builtin_ia32_crc32di(crc, Load<uint64>(data));
  uint32 rest = crc;
  for (; size > 0; ++data, --size) rest = __builtin_ia32_crc32qi(rest, static_cast<uint8>(*data));
  return ~rest;
}
#else
// The change of the checksum by each byte of 8, with those behind it (slicing; Kounavis and Berry,
// ISCC 2005, https://doi.org/10.1109/ISCC.2005.18).
struct CrcTables {
  uint32 of[8][256];
  CrcTables() {
    for (uint32 i = 0; i < 256; ++i) {
      uint32 crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1)));
      of[0][i] = crc;
    }
    for (uint32 i = 0; i < 256; ++i) {
      for (int k = 1; k < 8; ++k) of[k][i] = of[0][of[k - 1][i] & 255] ^ (of[k - 1][i] >> 8);
    }
  }
};

inline uint32 Crc(const char* data, size_t size) {
  static const CrcTables tables;
  const auto& t = tables.of;
  uint32 crc = ~0u;
  for (; size >= 8; data += 8, size -= 8) {
    const uint64 x = Load<uint64>(data) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= t[7 - i][x >> (8 * i) & 255];
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ t[0][(crc ^ static_cast<uint8>(*data)) & 255];
  return ~crc;
}
#endif

// The checksum of some bytes, as a file holds it.
inline uint32 Masked(const char* data, size_t size) {
  const uint32 crc = Crc(data, size);
  return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

inline bool Matches(const char* data, size_t size, const char* checksum) {
  return Load<uint32>(checksum) == Masked(data, size);
}

// Whether a header, a length and its checksum, is here.
inline bool IsHeader(const char* data) { return Matches(data, 8, data + 8); }

// Writes what is around a payload of this size, which is already behind the header.
inline void WriteAround(char* frame, uint64 size) {
  std::memcpy(frame, &size, 8);
  const uint32 of_length = Masked(frame, 8), of_payload = Masked(frame + kHeader, size);
  std::memcpy(frame + 8, &of_length, 4);
  std::memcpy(frame + kHeader + size, &of_payload, 4);
}

enum Stop { kCutOff, kCorrupt, kAbsurdLength };

// Scans the good frames at the beginning of data; returns how many there are, with where each
// begins and ends, and why the next one is none.
inline int64 Scan(Bytes data, int64* starts, int64* ends, int64 room, Stop* stop) {
  uint64 at = 0;
  for (int64 n = 0;; ++n) {
    *stop = kCutOff;
    if (n == room || data.size - at < kHeader) return n;
    const char* frame = data.data + at;
    const uint64 length = Load<uint64>(frame);
    *stop = length > kLongestRecord ? kAbsurdLength : kCorrupt;
    if (*stop == kAbsurdLength || !IsHeader(frame)) return n;
    if (data.size - at < kFrame + length) {
      *stop = kCutOff;
      return n;
    }
    if (!Matches(frame + kHeader, length, frame + kHeader + length)) return n;
    starts[n] = at;
    ends[n] = at += kFrame + length;
  }
}

}  // namespace codec
}  // namespace deepfm
