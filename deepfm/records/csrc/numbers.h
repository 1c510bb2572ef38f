// Numbers as text: the float nearest to a text, and what Python's "%.9g" writes.
#pragma once

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <locale.h>

#include "bytes.h"

namespace deepfm {
namespace codec {

inline bool IsBlank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
inline bool IsDigit(char c) { return c >= '0' && c <= '9'; }

constexpr int kLongestNumber = 31;  // characters that TensorFlow's decoder reads

// Parses a decimal number or a hexadecimal integer, up to a blank, a colon or a comment, and moves
// `at` past it.
__attribute__((noinline, cold)) inline bool ParseAnyNumber(const char** at, const char* end,
                                                           float* number) {
  static const locale_t kC = newlocale(LC_ALL_MASK, "C", nullptr);
  char text[kLongestNumber + 1];
  int size = 0;
  for (; *at < end && !IsBlank(**at) && **at != ':' && **at != '#'; ++*at) {
    if (size == kLongestNumber || **at == '\0') return false;
    text[size++] = **at;
  }
  text[size] = '\0';
  // strtof also reads words, and fractions in hexadecimal.
  const char* digits = text + (text[0] == '+' || text[0] == '-');
  const bool hexadecimal = digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X');
  const char* allowed = hexadecimal ? "0123456789abcdefABCDEFxX" : "0123456789.eE+-";
  if (digits + std::strspn(digits, allowed) != text + size) return false;
  char* read_to;
  *number = strtof_l(text, &read_to, kC);
  if (read_to != text + size || size == 0) return false;
  if (std::fabs(*number) < FLT_MIN) *number = std::copysign(0.0f, text[0] == '-' ? -1.0f : 1.0f);
  return true;
}

// Parses the number at `at`, as the nearest float, and moves `at` past it. A denormal one is 0, as
// to TensorFlow's threads.
inline bool ParseNumber(const char** at, const char* end, float* number) {
  const char* p = *at;
  if (p < end && IsDigit(*p) && (p + 1 == end || p[1] == ' ')) {  // as most are
    *number = *p - '0';
    *at = p + 1;
    return true;
  }
  const bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) ++p;
  uint64 digits = 0;
  int count = 0, behind = 0;
  bool point = false;
  for (; p < end; ++p) {
    if (IsDigit(*p)) {
      digits = 10 * digits + (*p - '0');
      ++count;
      behind += point;
    } else if (*p == '.' && !point) {
      point = true;
    } else {
      break;
    }
  }
  int exponent = -behind;
  if (p < end && (*p == 'e' || *p == 'E')) {
    const char* q = p + 1;
    const bool minus = q < end && *q == '-';
    if (q < end && (*q == '-' || *q == '+')) ++q;
    const char* begin = q;
    int power = 0;
    for (; q < end && IsDigit(*q) && q - begin < 4; ++q) power = 10 * power + (*q - '0');
    if (q > begin) {
      exponent += minus ? -power : power;
      p = q;
    }
  }
  // Both are exact as doubles, so their quotient or product is the nearest one
  // (Clinger, "How to Read Floating Point Numbers Accurately", PLDI 1990).
  if (count > 0 && count <= 19 && (p == end || IsBlank(*p) || *p == ':' || *p == '#')) {
    static const double kDoubles[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                      1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                      1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    if (digits <= 1ull << 53 && exponent <= 22 && exponent >= -22) {
      const double whole = digits;
      const double exact = exponent < 0 ? whole / kDoubles[-exponent] : whole * kDoubles[exponent];
      // A double that is half-way between two floats may not be where the text is.
      if ((Load<uint64>(&exact) & ((1ull << 29) - 1)) != 1ull << 28) {
        const float magnitude = static_cast<float>(exact);
        *number = negative ? -magnitude : magnitude;
        *at = p;
        return true;
      }
    }
  }
  return ParseAnyNumber(at, end, number);
}

// Writes a number as "%.9g"; returns the end.
inline char* WriteNumber(float number, char* to) {
  if (std::isnan(number)) {
    std::memcpy(to, "nan", 3);  // printf writes a sign, too
    return to + 3;
  }
  if (!(number >= 1e-4 && number < 1)) return to + std::sprintf(to, "%.9g", number);
  // A product of 24 bits and at most 5^12 is exact as a double, so rounding it gives the nine digits
  // to nearest, ties to even; no float is so near below a power of ten that they become that.
  double scaled = number * 1e9;
  *to++ = '0';
  *to++ = '.';
  for (; scaled < 1e8; scaled *= 10) *to++ = '0';
  uint32 digits = std::nearbyint(scaled);
  int count = 9;
  for (; digits % 10 == 0; digits /= 10) --count;
  for (int i = count - 1; i >= 0; --i, digits /= 10) to[i] = '0' + digits % 10;
  return to + count;
}

}  // namespace codec
}  // namespace deepfm
