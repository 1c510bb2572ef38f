// What the operators that update a variable and the slots of its optimizer have in common: all of
// it, or rows of a table.
//
// U: rows.
#pragma once

#include <mutex>

#include "kernels.h"
#include "tables.h"

namespace deepfm {

constexpr int kLikeIt = 3;  // a variable and two slots of its shape

// Registers an operator that updates variables, or rows of them.
#define DEEPFM_REGISTER_UPDATE(name) \
  REGISTER_OP(name).SetIsStateful().SetShapeFn(shape_inference::NoOutputs)
#define DEEPFM_REGISTER_UPDATE_OF_ROWS(name) \
  DEEPFM_REGISTER_UPDATE(name).Attr("l2: float").Attr("T: {int32, int64}")

// The first kVars inputs are a variable and its slots, the third of which has one int64 per row.
// apply(the variable's shape, where each begins) updates them in place, while nobody else can.
template <int kVars, typename Apply>
void UpdateVariables(OpKernelContext* context, bool by_rows, const Apply& apply) {
  core::RefCountPtr<Var> vars[kVars];
  for (int i = 0; i < kVars; ++i) {
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, i), &vars[i]));
    if (!by_rows) continue;
    auto* ensure = i < kLikeIt ? &EnsureSparseVariableAccess<Rows, float>
                               : &EnsureSparseVariableAccess<Rows, int64>;
    OP_REQUIRES_OK(context, ensure(context, vars[i].get()));
  }
  // Lock in the order of addresses, as TensorFlow's own ops do.
  mutex* locks[kVars];
  for (int i = 0; i < kVars; ++i) locks[i] = vars[i]->mu();
  std::sort(locks, locks + kVars);
  OP_REQUIRES(context, std::adjacent_find(locks, locks + kVars) == locks + kVars,
              errors::InvalidArgument("a variable is given twice"));
  std::unique_lock<mutex> held[kVars];
  for (int i = 0; i < kVars; ++i) held[i] = std::unique_lock<mutex>(*locks[i]);
  float* data[kVars];
  for (int i = 0; i < kVars; ++i) {
    Tensor* tensor = vars[i]->tensor();
    const bool in_place = vars[i]->copy_on_read_mode.load();
    auto* prepare =
        i < kLikeIt ? &PrepareToUpdateVariable<Rows, float> : &PrepareToUpdateVariable<Rows, int64>;
    OP_REQUIRES_OK(context, prepare(context, tensor, in_place));
    data[i] = reinterpret_cast<float*>(const_cast<char*>(tensor->tensor_data().data()));
  }
  const TensorShape& shape = vars[0]->tensor()->shape();
  OP_REQUIRES(context, shape == vars[1]->tensor()->shape() && shape == vars[2]->tensor()->shape(),
              errors::InvalidArgument("shapes of variable and slots differ"));
  OP_REQUIRES(context,
              kVars < 4 || (shape.dims() >= 1 && vars[kVars - 1]->tensor()->shape() ==
                                                     TensorShape({shape.dim_size(0)})),
              errors::InvalidArgument("a slot does not have one number per row"));
  OP_REQUIRES_OK(context, apply(shape, data));
}

// A scalar, counted from the last input.
inline float Number(OpKernelContext* context, int from_end) {
  return context->input(context->num_inputs() - from_end).scalar<float>()();
}

// An optimizer's operator for a whole variable, whose gradient is input 3. A Rule takes its numbers
// from the context. Update(rule, n, gradient, variable, slot, slot) updates n of their floats.
template <typename Rule>
void UpdateWhole(OpKernelContext* context) {
  const Rule rule(context, 0);
  const Tensor& grad = context->input(3);
  UpdateVariables<3>(context, false, [&](const TensorShape& shape, float* const* data) {
    if (grad.shape() != shape) return errors::InvalidArgument("shapes of gradients do not fit");
    const float* from = grad.flat<float>().data();
    Divide(context, shape.num_elements(), 20, [&](int64 first, int64 last) {
      Update(rule, last - first, from + first, data[0] + first, data[1] + first, data[2] + first);
    });
    return Ok();
  });
}

template <typename T>
Status CheckRows(const TensorShape& shape, const Tensor& indices, const Tensor& grad) {
  TensorShape of_rows = shape;
  if (shape.dims() >= 1 && indices.dims() == 1) of_rows.set_dim(0, indices.dim_size(0));
  if (shape.dims() < 1 || indices.dims() != 1 || grad.shape() != of_rows) {
    return errors::InvalidArgument("shapes of variable, slots and rows do not fit");
  }
  return CheckIndices<T>(indices, shape.dim_size(0));
}

// Calls update(first, last, width, their gradients, where their floats lie) for blocks of the rows
// whose indices [U] are input kVars. A slot of one int64 per row is passed as it is.
template <typename T, int kVars, typename Update>
void UpdateBlocks(OpKernelContext* context, const Tensor& grad, const Update& update) {
  const Tensor& indices = context->input(kVars);
  UpdateVariables<kVars>(context, true, [&](const TensorShape& shape, float* const* data) {
    TF_RETURN_IF_ERROR(CheckRows<T>(shape, indices, grad));
    const int64 n = indices.dim_size(0), width = n ? grad.NumElements() / n : 0;
    const auto where = indices.vec<T>();
    const float* from = grad.flat<float>().data();
    if (width == 0) return Ok();
    const int64 block = RowsAtOnce(width), ahead = RowsAhead(width);
    Divide(context, n, 20 * width, [&](int64 first, int64 last) {
      float rows[kLikeIt][kNarrow];
      float* at[] = {rows[0], rows[1], rows[2], data[kVars - 1]};
      for (int64 begin = first; begin < last; begin += block) {
        const int64 end = std::min(begin + block, last);
        // Prefetch the next rows while these are computed.
        for (int64 i = begin + ahead; i < std::min(end + ahead, last); ++i) {
          for (int t = 0; t < kLikeIt; ++t) Prefetch<1>(data[t] + where(i) * width, width);
          if (kVars > kLikeIt) __builtin_prefetch(data[kVars - 1] + 2 * where(i), 1);
        }
        for (int t = 0; t < kLikeIt; ++t) {
          if (block == 1) at[t] = data[t] + where(begin) * width;
          for (int64 i = begin; i < end && block > 1; ++i) {
            CopyRow(data[t] + where(i) * width, width, rows[t] + (i - begin) * width);
          }
        }
        update(begin, end, width, from + begin * width, at);
        for (int t = 0; t < kLikeIt && block > 1; ++t) {
          for (int64 i = begin; i < end; ++i) {
            CopyRow(rows[t] + (i - begin) * width, width, data[t] + where(i) * width);
          }
        }
      }
    });
    return Ok();
  });
}

// An optimizer's operator for rows, whose indices are input 3 and whose gradients [U, ...] input 4.
template <typename T, typename Rule>
void UpdateRows(OpKernelContext* context) {
  const Rule rule(context, Attribute<float>(context, "l2"));
  UpdateBlocks<T, 3>(context, context->input(4), [&](int64 first, int64 last, int64 width,
                                                     const float* grad, float* const* at) {
    Update(rule, (last - first) * width, grad, at[0], at[1], at[2]);
  });
}

}  // namespace deepfm
