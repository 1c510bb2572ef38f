// What all parts of the codec share. It includes no header of TensorFlow, whose integers these are.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace deepfm {
namespace codec {

using uint8 = unsigned char;
using uint32 = unsigned int;
#ifdef DEEPFM_TENSORFLOW_2  // where the operators include this
using int64 = std::int64_t;
using uint64 = std::uint64_t;
#else
using int64 = long long;            // NOLINT
using uint64 = unsigned long long;  // NOLINT
#endif

// Bytes of someone else's memory.
struct Bytes {
  const char* data;
  size_t size;
};

template <typename T>
T Load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// The number that TensorFlow's threads see: denormal numbers are 0.
inline float Normal(float number) { return std::fabs(number) < FLT_MIN ? 0 : number; }

inline bool IsLabel(float number) { return Normal(number) == 0 || std::fabs(number) == 1; }
inline bool IsWeight(float number) { return std::isfinite(number) && Normal(number) >= 0; }

}  // namespace codec
}  // namespace deepfm
