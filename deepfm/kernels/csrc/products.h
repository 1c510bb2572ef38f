// Sums of scaled rows, and products of small matrices that stay in the cache, for the vectors that
// the processor has. TensorFlow's own products take whole matrices and cannot be called from here.
#pragma once

#include "kernels.h"

#define DEEPFM_INLINE inline __attribute__((always_inline))

// Here a multiplication and an addition may be fused, which other files rule out (build.py): as in
// TensorFlow's own products, the last bits depend on the processor.
#define DEEPFM_BEGIN_FUSED \
  _Pragma("GCC push_options") _Pragma("GCC optimize(\"fp-contract=fast\")")
#define DEEPFM_END_FUSED _Pragma("GCC pop_options")

// Defines `name`, which calls nameOf<V> with the widest vectors V that the processor has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DEEPFM_FOR_VECTORS(name)                                                               \
  template <typename... A>                                                                     \
  __attribute__((target("avx512f,fma"))) void name##Of16(A... a) { name##Of<Floats16>(a...); } \
  template <typename... A>                                                                     \
  __attribute__((target("avx2,fma"))) void name##Of8(A... a) { name##Of<Floats8>(a...); }      \
  template <typename... A>                                                                     \
  void name##Of4(A... a) { name##Of<Floats4>(a...); }                                          \
  template <typename... A>                                                                     \
  void name(A... a) {                                                                          \
    static const auto best = __builtin_cpu_supports("avx512f") ? name##Of16<A...>              \
                             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") \
                                 ? name##Of8<A...>                                             \
                                 : name##Of4<A...>;                                            \
    best(a...);                                                                                \
  }
#else
#define DEEPFM_FOR_VECTORS(name) \
  template <typename... A>       \
  void name(A... a) { name##Of<Floats4>(a...); }
#endif

namespace deepfm {

typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats16 __attribute__((vector_size(64)));

constexpr int64 kPad = 16;  // widths below are multiples of this

inline int64 Padded(int64 width) { return (width + kPad - 1) / kPad * kPad; }

DEEPFM_BEGIN_FUSED

// A vector at any address.
template <typename V>
DEEPFM_INLINE V Load(const float* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof(V));
  return vector;
}

template <typename V>
DEEPFM_INLINE void Store(const V& vector, float* to) {
  __builtin_memcpy(to, &vector, sizeof(V));
}

// A matrix in memory: the distances in floats from row to row and from column to column.
struct Matrix {
  const float* at;
  int64 row, column;
};

template <typename V, int rows, int vectors, bool add>
DEEPFM_INLINE void Tile(int64 inner, const Matrix& a, const float* b, int64 b_row, float* c,
                        int64 c_row) {
  constexpr int64 n = sizeof(V) / sizeof(float);
  V sums[rows][vectors];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) sums[i][j] = add ? Load<V>(c + i * c_row + j * n) : V{};
  }
  for (int64 p = 0; p < inner; ++p) {
    for (int i = 0; i < rows; ++i) {
      const float factor = a.at[i * a.row + p * a.column];
      for (int j = 0; j < vectors; ++j) sums[i][j] += factor * Load<V>(b + p * b_row + j * n);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) Store(sums[i][j], c + i * c_row + j * n);
  }
}

// c[rows, columns] = a[rows, inner] b[inner, columns], or += if `add`; `columns` is padded. Each
// entry is summed in the order of `inner`, whatever the tiles.
template <typename V, bool add = true>
DEEPFM_INLINE void Product(int64 rows, int64 inner, int64 columns, Matrix a, const float* b,
                           int64 b_row, float* c, int64 c_row) {
  constexpr int64 n = sizeof(V) / sizeof(float);
  constexpr int kRows = 6;
  for (int64 j = 0; j < columns;) {
    const bool two = columns - j >= 2 * n;
    for (int64 i = 0; i < rows;) {
      const Matrix at = {a.at + i * a.row, a.row, a.column};
      float* to = c + i * c_row + j;
      if (rows - i >= kRows) {
        two ? Tile<V, kRows, 2, add>(inner, at, b + j, b_row, to, c_row)
            : Tile<V, kRows, 1, add>(inner, at, b + j, b_row, to, c_row);
        i += kRows;
      } else {
        two ? Tile<V, 1, 2, add>(inner, at, b + j, b_row, to, c_row)
            : Tile<V, 1, 1, add>(inner, at, b + j, b_row, to, c_row);
        ++i;
      }
    }
    j += two ? 2 * n : n;
  }
}

template <typename V, int vectors>
DEEPFM_INLINE void SumVectors(int64 count, const int32* which, const float* factors,
                             const float* rows, int64 stride, float* sum) {
  constexpr int64 n = sizeof(V) / sizeof(float), kAhead = 6, kLine = 16;
  V sums[vectors] = {};
  for (int64 i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const float* later = rows + which[i + kAhead] * stride;
      for (int64 j = 0; j < vectors * n; j += kLine) __builtin_prefetch(later + j);
    }
    const float* row = rows + which[i] * stride;
    for (int j = 0; j < vectors; ++j) sums[j] += factors[i] * Load<V>(row + j * n);
  }
  for (int j = 0; j < vectors; ++j) Store(sums[j], sum + j * n);
}

// sum[width] = sum over i of factors[i] rows[which[i]], rows being `stride` apart; `width` is padded.
template <typename V>
DEEPFM_INLINE void SumRowsOf(int64 count, const int32* which, const float* factors,
                             const float* rows, int64 stride, int64 width, float* sum) {
  constexpr int64 n = sizeof(V) / sizeof(float);
  int64 j = 0;
  for (; width - j >= 10 * n; j += 10 * n) {
    SumVectors<V, 10>(count, which, factors, rows + j, stride, sum + j);
  }
  for (; width - j >= 4 * n; j += 4 * n) {
    SumVectors<V, 4>(count, which, factors, rows + j, stride, sum + j);
  }
  for (; j < width; j += n) SumVectors<V, 1>(count, which, factors, rows + j, stride, sum + j);
}

DEEPFM_END_FUSED

// Copies a matrix [n, width] into the columns of rows that are `stride` apart, filled up with 0.
inline void CopyPadded(const float* from, int64 n, int64 width, int64 padded, int64 stride,
                       float* to) {
  for (int64 i = 0; i < n; ++i) {
    std::copy(from + i * width, from + (i + 1) * width, to + i * stride);
    std::fill(to + i * stride + width, to + i * stride + padded, 0.0f);
  }
}

// Transposes a matrix [n, width] into rows that are `stride` apart.
inline void Transpose(const float* from, int64 n, int64 width, int64 stride, float* to) {
  for (int64 j = 0; j < width; ++j) {
    for (int64 i = 0; i < n; ++i) to[j * stride + i] = from[i * width + j];
  }
}

}  // namespace deepfm
