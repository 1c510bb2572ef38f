// Adam for rows of a table or for whole variables, and the zeros that its moments start from.
//
// ops.py does the same with TensorFlow's own ops (see rows.cc). All are float32, on the CPU.
//
// U: rows.
#include <cmath>

#include "updates.h"

namespace deepfm {

REGISTER_OP("DeepfmZeros")
    .Input("shape: int64")
    .Output("zeros: float")
    .SetIsStateful()  // so that it is not folded into a constant
    .SetShapeFn(shape_inference::RandomShape)  // the shape that the input holds
    .Doc("Zeros for a table that will be read at random.");

void Zeros(OpKernelContext* context) {
  TensorShape shape;
  const auto sizes = context->input(0).vec<int64>();
  OP_REQUIRES_OK(context, TensorShapeUtils::MakeShape(sizes.data(), sizes.size(), &shape));
  float* zeros;
  OP_REQUIRES_OK(context, Allocate(context, 0, shape, &zeros));
  const size_t bytes = shape.num_elements() * sizeof(float);
  UseLargePages(zeros, bytes, false);
  std::memset(zeros, 0, bytes);
}
DEEPFM_REGISTER("DeepfmZeros", Zeros);

struct Adam {
  float rate, one_less_beta1, one_less_beta2, epsilon, l2;
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

// The common part of the Adam operators: the last five inputs are the gradient and the numbers.
// apply(Adam, gradient, the variable's shape, the floats of the variable and its slots) does the
// rest.
template <int kVars, typename Apply>
void ApplyAdam(OpKernelContext* context, bool by_rows, const Apply& apply) {
  UpdateVariables<kVars>(context, by_rows, [&](const TensorShape& shape, float* const* data) {
    const int numbers = context->num_inputs() - 4;
    auto number = [=](int i) { return context->input(numbers + i).scalar<float>()(); };
    const float l2 = by_rows ? Attribute<float>(context, "l2") : 0;
    const Adam adam = {number(0), 1 - number(1), 1 - number(2), number(3), l2};
    return apply(adam, context->input(numbers - 1), shape, data);
  });
}

REGISTER_OP("DeepfmAdam")
    .Input("variable: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("grad: float")
    .Input("rate: float")
    .Input("beta1: float")
    .Input("beta2: float")
    .Input("epsilon: float")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc("Adam for a variable.");

void AdamWhole(OpKernelContext* context) {
  ApplyAdam<3>(context, false, [=](const Adam& adam, const Tensor& grad, const TensorShape& shape,
                                   float* const* data) {
    return UpdateWhole(context, grad, shape, data, [&](int64 n, const float* g, float* const* at) {
      Update(adam, n, g, at[0], at[1], at[2]);
    });
  });
}
DEEPFM_REGISTER("DeepfmAdam", AdamWhole);

REGISTER_OP("DeepfmAdamRows")
    .Input("variable: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("indices: T")   // [U]
    .Input("grad: float")  // [U, ...]
    .Input("rate: float")
    .Input("beta1: float")
    .Input("beta2: float")
    .Input("epsilon: float")
    .Attr("l2: float")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc("Adam for the distinct rows `indices`, after adding l2 times each row to its gradient. "
         "Other rows and their moments stay as they are.");

template <typename T>
void AdamRows(OpKernelContext* context) {
  ApplyAdam<3>(context, true, [=](const Adam& adam, const Tensor& grad, const TensorShape& shape,
                                  float* const* data) {
    const Tensor& indices = context->input(3);
    return UpdateRows<T>(context, indices, grad, shape, data,
                         [&](int64 n, const float* g, float* const* at) {
                           Update(adam, n, g, at[0], at[1], at[2]);
                         });
  });
}

DEEPFM_REGISTER_INDEXED("DeepfmAdamRows", AdamRows);

REGISTER_OP("DeepfmElapsedAdamRows")
    .Input("variable: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("seen: resource")  // int64 [rows]
    .Input("indices: T")      // [U]
    .Input("now: int64")
    .Input("grad: float")  // [U, ...]
    .Input("rate: float")
    .Input("beta1: float")
    .Input("beta2: float")
    .Input("epsilon: float")
    .Attr("run_step: int")
    .Attr("l2: float")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
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
inline __attribute__((always_inline)) void UpdateElapsed(const Adam& adam, int64 n, const Elapsed* __restrict rows,
                                 const float* __restrict grad, float* __restrict variable,
                                 float* __restrict m, float* __restrict v) {
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
void UpdateElapsedRow(const Adam& adam, int64 width, const Elapsed& row, const float* grad,
                      float* variable, float* m, float* v) {
  const Elapsed copy = row;  // which nothing else points to
  UpdateElapsed<false>(adam, width, &copy, grad, variable, m, v);
}

DEEPFM_CLONES
void UpdateElapsedEach(const Adam& adam, int64 n, const Elapsed* rows, const float* grad,
                       float* variable, float* m, float* v) {
  UpdateElapsed<true>(adam, n, rows, grad, variable, m, v);
}

template <typename T>
void ElapsedAdamRows(OpKernelContext* context) {
  ApplyAdam<4>(context, true, [=](const Adam& adam, const Tensor& grad, const TensorShape& shape,
                                  float* const* data) {
    const Tensor& indices = context->input(4);
    TF_RETURN_IF_ERROR(CheckRows<T>(shape, indices, grad));
    const int64 n = indices.dim_size(0), width = n ? grad.NumElements() / n : 0;
    const auto where = indices.vec<T>();
    const float* from = grad.flat<float>().data();
    if (width == 0) return Status::OK();
    const int64 now = context->input(5).scalar<int64>()();
    const int64 start = Attribute<int64>(context, "run_step");
    int64* const last_seen = reinterpret_cast<int64*>(data[3]);
    const float beta1 = 1 - adam.one_less_beta1, beta2 = 1 - adam.one_less_beta2;
    const Powers first(beta1), second(beta2);
    const int64 ahead = RowsAhead(width);
    auto elapsed = [&](int64 row) {
      int64& seen = last_seen[row];
      const int64 steps = std::max<int64>(now - std::max(seen, start), 1);
      seen = now;
      const float moves = adam.rate * (1 - first.of(steps)) / adam.one_less_beta1;
      return Elapsed{second.of(steps), moves, first.of(steps - 1), adam.rate * adam.l2 * steps};
    };
    Divide(context, n, 24 * width, [&](int64 begin, int64 end) {
      Elapsed rows[kNarrow];
      float numbers[3][kNarrow];
      for (int64 i = begin; i < end;) {
        const int64 block = width == 1 ? std::min<int64>(kNarrow, end - i) : 1;
        for (int64 j = i + ahead; j < std::min(i + block + ahead, end); ++j) {
          for (int t = 0; t < 3; ++t) Prefetch<1>(data[t] + where(j) * width, width);
          __builtin_prefetch(last_seen + where(j), 1);
        }
        for (int64 j = 0; j < block; ++j) rows[j] = elapsed(where(i + j));
        if (width > 1) {
          const int64 at = where(i) * width;
          UpdateElapsedRow(adam, width, rows[0], from + i * width, data[0] + at, data[1] + at,
                           data[2] + at);
        } else {
          for (int t = 0; t < 3; ++t) {
            for (int64 j = 0; j < block; ++j) numbers[t][j] = data[t][where(i + j)];
          }
          UpdateElapsedEach(adam, block, rows, from + i, numbers[0], numbers[1], numbers[2]);
          for (int t = 0; t < 3; ++t) {
            for (int64 j = 0; j < block; ++j) data[t][where(i + j)] = numbers[t][j];
          }
        }
        i += block;
      }
    });
    return Status::OK();
  });
}

DEEPFM_REGISTER_INDEXED("DeepfmElapsedAdamRows", ElapsedAdamRows);

}  // namespace deepfm
