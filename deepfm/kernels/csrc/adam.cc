// Adam for rows of a table or for whole variables. All are float32, on the CPU.
//
// U: rows.
#include <cmath>

#include "updates.h"

namespace deepfm {

struct Adam {
  // The last inputs are the rate, beta1, beta2 and epsilon.
  Adam(OpKernelContext* context, float l2)
      : rate(Number(context, 4)), one_less_beta1(1 - Number(context, 3)),
        one_less_beta2(1 - Number(context, 2)), epsilon(Number(context, 1)), l2(l2) {}

  const float rate, one_less_beta1, one_less_beta2, epsilon, l2;
};

DEEPFM_CLONES
void Update(const Adam& adam, int64 n, const float* __restrict grad, float* __restrict variable,
            float* __restrict m, float* __restrict v) {
  for (int64 k = 0; k < n; ++k) {
    const float g = grad[k] + adam.l2 * variable[k];
    m[k] += adam.one_less_beta1 * (g - m[k]);
    v[k] += adam.one_less_beta2 * (g * g - v[k]);
    variable[k] -= adam.rate * m[k] / (std::sqrt(v[k]) + adam.epsilon);
  }
}

DEEPFM_REGISTER_UPDATE("DeepfmAdam")
    .Input("variable: resource").Input("m: resource").Input("v: resource")
    .Input("grad: float")
    .Input("rate: float").Input("beta1: float").Input("beta2: float").Input("epsilon: float")
    .Doc("Adam for a variable.");
DEEPFM_REGISTER("DeepfmAdam", UpdateWhole<Adam>);

DEEPFM_REGISTER_UPDATE_OF_ROWS("DeepfmAdamRows")
    .Input("variable: resource").Input("m: resource").Input("v: resource")
    .Input("indices: T")   // [U]
    .Input("grad: float")  // [U, ...]
    .Input("rate: float").Input("beta1: float").Input("beta2: float").Input("epsilon: float")
    .Doc("Adam for the distinct rows `indices`, after adding l2 times each row to its gradient. "
         "Other rows and their moments stay as they are.");
DEEPFM_REGISTER_INDEXED("DeepfmAdamRows", UpdateRows, Adam);

DEEPFM_REGISTER_UPDATE_OF_ROWS("DeepfmElapsedAdamRows")
    .Input("variable: resource").Input("m: resource").Input("v: resource")
    .Input("seen: resource")  // int64 [rows]
    .Input("indices: T")      // [U]
    .Input("now: int64")
    .Input("grad: float")  // [U, ...]
    .Input("rate: float").Input("beta1: float").Input("beta2: float").Input("epsilon: float")
    .Attr("run_step: int")
    .Doc("Adam for the distinct rows `indices`, at once for all steps since each was last updated; "
         "see Ops.elapsed_adam.");

// The powers of a number below 1, each by one product.
class Powers {
 public:
  explicit Powers(float base) {
    low_[0] = high_[0] = 1;
    for (int i = 1; i < kLow; ++i) low_[i] = low_[i - 1] * base;
    for (int i = 1; i < kHigh; ++i) high_[i] = high_[i - 1] * (low_[kLow - 1] * base);
  }

  float of(int64 n) const { return n < kLow * kHigh ? low_[n % kLow] * high_[n / kLow] : 0; }

 private:
  static constexpr int kLow = 128, kHigh = 512;
  float low_[kLow], high_[kHigh];
};

// What the steps since it was last updated do to a row: factors of v, of m / s, of m, and of w / s.
struct Elapsed {
  float decay, moves, back, shrinks;
};

// Updates n numbers: those of one row, or, if `kEach`, of a row each.
template <bool kEach>
inline __attribute__((always_inline)) void UpdateElapsed(
    const Adam& adam, int64 n, const Elapsed* __restrict rows, const float* __restrict grad,
    float* __restrict variable, float* __restrict m, float* __restrict v) {
  for (int64 k = 0; k < n; ++k) {
    const Elapsed& row = rows[kEach ? k : 0];
    const float g = grad[k];
    const float moment = m[k] + adam.one_less_beta1 * (g - m[k]);
    v[k] = row.decay * v[k] + adam.one_less_beta2 * (g * g);
    const float scale = std::sqrt(v[k]) + adam.epsilon;
    variable[k] = (variable[k] * scale - row.moves * moment) / (scale + row.shrinks);
    m[k] = row.back * moment;
  }
}

DEEPFM_CLONES
void Update(const Adam& adam, int64 n, int64 width, const Elapsed* rows, const float* grad,
            float* variable, float* m, float* v) {
  if (width == 1) return UpdateElapsed<true>(adam, n, rows, grad, variable, m, v);
  for (int64 i = 0, at = 0; i < n; ++i, at += width) {
    const Elapsed row = rows[i];  // which nothing else points to
    UpdateElapsed<false>(adam, width, &row, grad + at, variable + at, m + at, v + at);
  }
}

template <typename T>
void ElapsedAdamRows(OpKernelContext* context) {
  const Adam adam(context, Attribute<float>(context, "l2"));
  const int64 now = context->input(5).scalar<int64>()();
  const int64 start = Attribute<int64>(context, "run_step");
  const Powers first(1 - adam.one_less_beta1), second(1 - adam.one_less_beta2);
  const T* where = context->input(4).flat<T>().data();
  UpdateBlocks<T, 4>(context, context->input(6), [&](int64 begin, int64 end, int64 width,
                                                     const float* grad, float* const* at) {
    Elapsed rows[kNarrow];
    for (int64 i = begin; i < end; ++i) {
      int64& seen = reinterpret_cast<int64*>(at[3])[where[i]];
      const int64 steps = std::max<int64>(now - std::max(seen, start), 1);
      seen = now;
      const float moves = adam.rate * (1 - first.of(steps)) / adam.one_less_beta1;
      rows[i - begin] = {second.of(steps), moves, first.of(steps - 1),
                         adam.rate * adam.l2 * steps};
    }
    Update(adam, end - begin, width, rows, grad, at[0], at[1], at[2]);
  });
}
DEEPFM_REGISTER_INDEXED("DeepfmElapsedAdamRows", ElapsedAdamRows);

}  // namespace deepfm
