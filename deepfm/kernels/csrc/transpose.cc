// The transpose of a matrix, in squares that stay in the nearest cache.
#include <algorithm>

#include "loops.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepfm {

using namespace tensorflow;  // NOLINT
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

REGISTER_OP("DeepfmTranspose")
    .Input("x: float")  // [m, n]
    .Output("y: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &x));
      c->set_output(0, c->Matrix(c->Dim(x, 1), c->Dim(x, 0)));
      return Status::OK();
    });

// Columns first ... last - 1 of x become rows of y, in squares that stay in the nearest cache.
DEEPFM_CLONES
void Transpose(const float* __restrict x, int64 m, int64 n, int64 first, int64 last,
               float* __restrict y) {
  constexpr int64 kSide = 16;
  for (int64 j0 = first; j0 < last; j0 += kSide) {
    const int64 j1 = std::min(j0 + kSide, last);
    for (int64 i0 = 0; i0 < m; i0 += kSide) {
      const int64 i1 = std::min(i0 + kSide, m);
      for (int64 j = j0; j < j1; ++j) {
        for (int64 i = i0; i < i1; ++i) y[j * m + i] = x[i * n + j];
      }
    }
  }
}

class TransposeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    OP_REQUIRES(context, x.dims() == 2, errors::InvalidArgument("x is no matrix"));
    const int64 m = x.dim_size(0), n = x.dim_size(1);
    Tensor* y = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n, m}), &y));
    const float* from = x.matrix<float>().data();
    float* to = y->matrix<float>().data();
    Divide(context, n, 2 * m, [=](int64 first, int64 last) {
      Transpose(from, m, n, first, last, to);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmTranspose").Device(DEVICE_CPU), TransposeOp);

}  // namespace deepfm
