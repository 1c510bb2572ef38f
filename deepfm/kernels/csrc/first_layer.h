// Parts of the first layer that work on the rows of distinct (field, id) pairs.
#ifndef DEEPFM_CSRC_FIRST_LAYER_H_
#define DEEPFM_CSRC_FIRST_LAYER_H_

#include "kernels.h"
#include "products.h"

namespace deepfm {

// The values of each field of each example.
struct Places {
  int64 fields;
  const int32* begins;  // null if each field has one

  int64 begin(int64 b, int64 f) const {
    const int64 place = b * fields + f;
    return begins ? begins[place] : place;
  }
  int64 end(int64 b, int64 f) const { return begin(b, f + 1); }
};

// What the operators take: those of a batch's pairs as their inputs 0 to 7. Widths are of rows that
// lie side by side: [H, K], each padded. What DeepfmPairs has returned is not looked through again.
struct Layer {
  int64 ids, width, units, pairs, examples;
  int64 padded_units, padded_width, stride;
  Places places;
  const float *weights, *embeddings, *kernel, *by;
  const int32 *pair_of, *rows, *fields;

  Status Take(OpKernelContext* context);
};

// Copies a matrix [n, width] into the columns of rows that are `stride` apart, filled up with 0.
void CopyPadded(const float* from, int64 n, int64 width, int64 padded, int64 stride, float* to);

// Of pairs of field f, rows [v W_f, v], of which v is there; and the squared length of each v, in
// every other place of `squares`.
void ProjectField(const Layer& s, int64 f, int64 pairs, float* projected, float* squares);

// Sums the rows [v W_f, v] of an example's values; returns first_order + second_order. Scratch is of
// `padded_width`. A pair has its weight and its squared length in `of_rows`.
float SumExample(const Layer& s, int64 b, const float* projected, const float* of_rows,
                 float* scratch, float* sum);

}  // namespace deepfm

#endif  // DEEPFM_CSRC_FIRST_LAYER_H_
