// Adam for rows of a table or for whole variables, and the zeros that its moments start from.
//
// ops.py does the same with TensorFlow's own ops (see rows.cc). All are float32, on the CPU.
//
// U: rows.
#include <cmath>

#include "kernels.h"
#include "tables.h"

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

// The common part of both Adam operators: inputs 0 to 2 are the variable and its slots, the last
// five are the gradient and the numbers. apply(Adam, gradient, the variable's shape, the floats of
// the variable and its slots) does the rest.
template <typename Apply>
void ApplyAdam(OpKernelContext* context, bool by_rows, const Apply& apply) {
  core::RefCountPtr<Var> vars[3];
  for (int i = 0; i < 3; ++i) {
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, i), &vars[i]));
    if (!by_rows) continue;
    OP_REQUIRES_OK(context, (EnsureSparseVariableAccess<Rows, float>(context, vars[i].get())));
  }
  // Lock in the order of addresses, as TensorFlow's own ops do.
  mutex* locks[3] = {vars[0]->mu(), vars[1]->mu(), vars[2]->mu()};
  std::sort(locks, locks + 3);
  OP_REQUIRES(context, locks[0] != locks[1] && locks[1] != locks[2],
              errors::InvalidArgument("a variable is given twice"));
  mutex_lock lock0(*locks[0]), lock1(*locks[1]), lock2(*locks[2]);
  float* data[3];
  for (int i = 0; i < 3; ++i) {
    Tensor* tensor = vars[i]->tensor();
    const bool in_place = vars[i]->copy_on_read_mode.load();
    OP_REQUIRES_OK(context, (PrepareToUpdateVariable<Rows, float>(context, tensor, in_place)));
    data[i] = tensor->flat<float>().data();
  }
  const TensorShape& shape = vars[0]->tensor()->shape();
  OP_REQUIRES(context, shape == vars[1]->tensor()->shape() && shape == vars[2]->tensor()->shape(),
              errors::InvalidArgument("shapes of variable and slots differ"));
  const int numbers = context->num_inputs() - 4;
  auto number = [=](int i) { return context->input(numbers + i).scalar<float>()(); };
  const float l2 = by_rows ? Attribute<float>(context, "l2") : 0;
  const Adam adam = {number(0), 1 - number(1), 1 - number(2), number(3), l2};
  OP_REQUIRES_OK(context, apply(adam, context->input(numbers - 1), shape, data));
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
  ApplyAdam(context, false, [=](const Adam& adam, const Tensor& grad, const TensorShape& shape,
                                float* const data[3]) {
    if (grad.shape() != shape) return errors::InvalidArgument("shapes of gradients do not fit");
    const float* from = grad.flat<float>().data();
    Divide(context, shape.num_elements(), 20, [&](int64 first, int64 last) {
      Update(adam, last - first, from + first, data[0] + first, data[1] + first, data[2] + first);
    });
    return Status::OK();
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
  ApplyAdam(context, true, [=](const Adam& adam, const Tensor& grad, const TensorShape& shape,
                               float* const data[3]) {
    const Tensor& indices = context->input(3);
    TensorShape of_rows = shape;
    if (shape.dims() >= 1 && indices.dims() == 1) of_rows.set_dim(0, indices.dim_size(0));
    if (shape.dims() < 1 || indices.dims() != 1 || grad.shape() != of_rows) {
      return errors::InvalidArgument("shapes of variable, slots and rows do not fit");
    }
    TF_RETURN_IF_ERROR(CheckIndices<T>(indices, shape.dim_size(0)));
    const int64 n = indices.dim_size(0), width = n ? grad.NumElements() / n : 0;
    const auto where = indices.vec<T>();
    const float* from = grad.flat<float>().data();
    if (width == 0) return Status::OK();
    const int64 block = RowsAtOnce(width), ahead = RowsAhead(width);
    Divide(context, n, 20 * width, [&](int64 first, int64 last) {
      float rows[3][kNarrow];
      for (int64 begin = first; begin < last; begin += block) {
        const int64 end = std::min(begin + block, last);
        // Prefetch the next rows while these are computed.
        for (int64 i = begin + ahead; i < std::min(end + ahead, last); ++i) {
          for (int t = 0; t < 3; ++t) Prefetch<1>(data[t] + where(i) * width, width);
        }
        if (block == 1) {
          const int64 at = where(begin) * width;
          Update(adam, width, from + begin * width, data[0] + at, data[1] + at, data[2] + at);
          continue;
        }
        for (int t = 0; t < 3; ++t) {
          for (int64 i = begin; i < end; ++i) {
            CopyRow(data[t] + where(i) * width, width, rows[t] + (i - begin) * width);
          }
        }
        Update(adam, (end - begin) * width, from + begin * width, rows[0], rows[1], rows[2]);
        for (int t = 0; t < 3; ++t) {
          for (int64 i = begin; i < end; ++i) {
            CopyRow(rows[t] + (i - begin) * width, width, data[t] + where(i) * width);
          }
        }
      }
    });
    return Status::OK();
  });
}

DEEPFM_REGISTER_INDEXED("DeepfmAdamRows", AdamRows);

}  // namespace deepfm
