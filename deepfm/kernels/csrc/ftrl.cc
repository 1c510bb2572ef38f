// FTRL for rows of a table or for whole variables, without L1; the rate falls as the root of the sum
// of squared gradients.
//
// H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1.
// https://research.google/pubs/pub41159/
// TensorFlow's own passes over a whole variable without vectors, and over rows without prefetching.
#include <cmath>

#include "updates.h"

namespace deepfm {

struct Ftrl {
  Ftrl(OpKernelContext* context, float l2)
      : rate(Number(context, 1)), per_rate(1 / rate), l2(l2) {}

  const float rate, per_rate, l2;
};

DEEPFM_CLONES
void Update(const Ftrl& ftrl, int64 n, const float* __restrict grad, float* __restrict variable,
            float* __restrict accum, float* __restrict linear) {
  for (int64 k = 0; k < n; ++k) {
    const float g = grad[k] + ftrl.l2 * variable[k];
    const float sum = accum[k] + g * g, root = std::sqrt(sum);
    linear[k] += g - (root - std::sqrt(accum[k])) * ftrl.per_rate * variable[k];
    variable[k] = -linear[k] * ftrl.rate / root;
    accum[k] = sum;
  }
}

DEEPFM_REGISTER_UPDATE("DeepfmFtrl")
    .Input("variable: resource").Input("accum: resource").Input("linear: resource")
    .Input("grad: float")
    .Input("rate: float")
    .Doc("FTRL for a variable.");
DEEPFM_REGISTER("DeepfmFtrl", UpdateWhole<Ftrl>);

DEEPFM_REGISTER_UPDATE_OF_ROWS("DeepfmFtrlRows")
    .Input("variable: resource").Input("accum: resource").Input("linear: resource")
    .Input("indices: T")   // [U]
    .Input("grad: float")  // [U, ...]
    .Input("rate: float")
    .Doc("FTRL for the distinct rows `indices`, after adding l2 times each row to its gradient.");
DEEPFM_REGISTER_INDEXED("DeepfmFtrlRows", UpdateRows, Ftrl);

}  // namespace deepfm
