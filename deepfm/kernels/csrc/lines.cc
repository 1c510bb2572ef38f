// The text of probabilities, as Python's "%.9g" writes it, to the letter.
#include <cmath>
#include <cstdio>

#include "kernels.h"

namespace deepfm {

// 5^0 ... 5^26.
struct PowersOf5 {
  uint64 of[27];
  PowersOf5() {
    of[0] = 1;
    for (int i = 1; i < 27; ++i) of[i] = 5 * of[i - 1];
  }
};

// Writes the nine digits of a number in [1e-18, 1], rounded to nearest and ties to even, and
// returns the power of ten of the first. It is m 2^e, so m 5^k 2^(e + k) has them before its point,
// for some k: all exact in 128 bits.
int NineDigits(float number, char* digits) {
  static const PowersOf5 powers;
  int exponent;
  const uint64 m = std::ldexp(std::frexp(number, &exponent), 24);
  exponent -= 24;
  uint32 nine = 0;
  int power = std::floor(std::log10(number));
  for (bool sure = false; !sure;) {
    const int k = 8 - power;
    const unsigned __int128 scaled = static_cast<unsigned __int128>(m) * powers.of[k];
    const int shift = -(exponent + k);
    const uint64 whole = scaled >> shift;
    sure = whole >= 100000000 && whole < 1000000000;  // else log10 is off by its rounding
    if (!sure) {
      power += whole < 100000000 ? -1 : 1;
      continue;
    }
    const unsigned __int128 half = static_cast<unsigned __int128>(1) << (shift - 1),
                            rest = scaled & (2 * half - 1);
    nine = whole + (rest > half || (rest == half && whole % 2 == 1));
    if (nine == 1000000000) {
      nine /= 10;
      ++power;
    }
  }
  for (int i = 8; i >= 0; --i, nine /= 10) digits[i] = '0' + nine % 10;
  return power;
}

// Writes a number; returns the end.
char* Write(float number, char* to) {
  if (std::isnan(number)) {
    std::memcpy(to, "nan", 3);  // printf writes a sign, too
    return to + 3;
  }
  if (!(number >= 1e-18f && number <= 1)) return to + std::sprintf(to, "%.9g", number);
  char digits[9];
  const int power = NineDigits(number, digits);
  int count = 9;
  while (count > 1 && digits[count - 1] == '0') --count;
  const bool scientific = power < -4;
  if (!scientific && power < 0) {
    *to++ = '0';
    *to++ = '.';
    for (int i = -1; i > power; --i) *to++ = '0';
    std::memcpy(to, digits, count);
    return to + count;
  }
  *to++ = digits[0];
  if (count > 1) {
    *to++ = '.';
    std::memcpy(to, digits + 1, count - 1);
    to += count - 1;
  }
  return scientific ? to + std::sprintf(to, "e-%02d", -power) : to;
}

// Writes each number on a line of its own, of at most 16 bytes each with its end; returns how many
// bytes all have. Not an operator, so that a thread of Python can call it beside a session.
extern "C" int64 deepfm_lines(const float* numbers, int64 n, char* to) {
  char* at = to;
  for (int64 i = 0; i < n; ++i) {
    at = Write(numbers[i], at);
    *at++ = '\n';
  }
  return at - to;
}

}  // namespace deepfm
