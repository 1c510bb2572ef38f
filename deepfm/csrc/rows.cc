// What a training step does with the rows of the embedding tables: the distinct ids of a batch,
// the FM and the MLP's input of its rows, their gradients, and Adam, of rows or of whole variables.
//
// model.py and optimizers.py hold the same in TensorFlow's own ops: that is what these are tested
// against, and what runs where they are not built. All are float32, on the CPU.
//
// B: examples. F: fields. N = B F: values. K: embedding size. U: distinct ids.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "loops.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepfm {

struct Rows {};  // names our instance of the function below

// Has the memory of a table, whose rows are read at random, put on pages of 2 MiB: with those of
// 4 KiB a tenth of a step is spent on finding them. Pages that are in use already are copied in a
// thread of its own, before Linux 6.1 by the kernel some time. It is advice: what cannot be is not.
void UseLargePages(const void* memory, size_t bytes, bool in_use) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (at + kPage - 1) / kPage * kPage, end = (at + bytes) / kPage * kPage;
  if (begin >= end) return;
  void* pages = reinterpret_cast<void*>(begin);
  if (madvise(pages, end - begin, MADV_HUGEPAGE) != 0 || !in_use) return;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
  try {
    std::thread([=] { madvise(pages, end - begin, kCollapse); }).detach();
  } catch (const std::system_error&) {  // there are as many threads as may be
  }
#endif
}

}  // namespace deepfm

namespace tensorflow {

// TensorFlow's functions of these names, whose header is not installed, and which a Tensor lets see
// whether it is shared (see resource_var.h).

// Before a variable is written as a whole: who has read it keeps what was read.
template <typename Device, typename T>
Status PrepareToUpdateVariable(OpKernelContext* context, Tensor* tensor, bool copy_on_read_mode) {
  if (!tensor->IsInitialized() || tensor->dtype() != DataTypeToEnum<T>::v()) {
    return errors::FailedPrecondition("a variable is not initialized, or of another type");
  }
  if (copy_on_read_mode || tensor->RefCountIsOne()) return Status::OK();
  PersistentTensor unused;
  Tensor* copy = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_persistent(tensor->dtype(), tensor->shape(), &unused, &copy,
                                                  AllocatorAttributes()));
  std::memcpy(copy->flat<T>().data(), tensor->flat<T>().data(), tensor->TotalBytes());
  *tensor = *copy;
  return Status::OK();
}

// From here on whoever reads the variable as a whole gets a copy, and its rows can be written in
// place.
template <typename Device, typename T>
Status EnsureSparseVariableAccess(OpKernelContext* context, Var* var) {
  if (var->copy_on_read_mode.load()) return Status::OK();
  mutex_lock lock(*var->mu());
  Tensor* tensor = var->tensor();
  TF_RETURN_IF_ERROR((PrepareToUpdateVariable<Device, T>(context, tensor, false)));
  deepfm::UseLargePages(tensor->flat<T>().data(), tensor->TotalBytes(), true);
  var->copy_on_read_mode.store(true);
  return Status::OK();
}

}  // namespace tensorflow

namespace deepfm {

using namespace tensorflow;  // NOLINT
using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

REGISTER_OP("DeepfmZeros")
    .Input("shape: int64")
    .Output("zeros: float")
    .SetIsStateful()  // not to be computed ahead, and kept
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(0, &shape));
      c->set_output(0, shape);
      return Status::OK();
    })
    .Doc("Zeros, of a table that is to be read at random.");

class ZerosOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    TensorShape shape;
    const auto sizes = context->input(0).vec<int64>();
    OP_REQUIRES_OK(context, TensorShapeUtils::MakeShape(sizes.data(), sizes.size(), &shape));
    Tensor* zeros = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &zeros));
    float* to = zeros->flat<float>().data();
    UseLargePages(to, zeros->TotalBytes(), false);
    std::memset(to, 0, zeros->TotalBytes());
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmZeros").Device(DEVICE_CPU), ZerosOp);

REGISTER_OP("DeepfmUnique")
    .Input("ids: int64")
    .Output("distinct: T")
    .Output("where: int32")
    .Attr("T: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, ids);
      return Status::OK();
    })
    .Doc("As tf.unique: the distinct ids in the order of their first use, and where each one is.");

template <typename T>
class UniqueOp : public OpKernel {
 public:
  explicit UniqueOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const auto ids = context->input(0).vec<int64>();
    const int64 n = ids.size();
    OP_REQUIRES(context, n < (int64{1} << 30), errors::InvalidArgument("too many ids"));
    int bits = 4;
    while ((int64{1} << bits) < 2 * n) ++bits;
    // Open addressing, at most half full; a slot holds 1 + the place of its id in `distinct`.
    std::vector<int32> slots(size_t{1} << bits);
    const uint64 mask = (uint64{1} << bits) - 1;
    std::vector<int64> distinct;
    distinct.reserve(n);
    Tensor* where = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({n}), &where));
    auto to = where->vec<int32>();
    for (int64 i = 0; i < n; ++i) {
      const uint64 hash = static_cast<uint64>(ids(i)) * 0x9e3779b97f4a7c15ull;
      uint64 slot = hash >> (64 - bits);
      while (slots[slot] != 0 && distinct[slots[slot] - 1] != ids(i)) slot = (slot + 1) & mask;
      if (slots[slot] == 0) {
        distinct.push_back(ids(i));
        slots[slot] = distinct.size();
      }
      to(i) = slots[slot] - 1;
    }
    Tensor* out = nullptr;
    const int64 found = distinct.size();
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({found}), &out));
    std::copy(distinct.begin(), distinct.end(), out->vec<T>().data());
  }
};

#define REGISTER(T) \
  REGISTER_KERNEL_BUILDER( \
      Name("DeepfmUnique").Device(DEVICE_CPU).TypeConstraint<T>("T"), UniqueOp<T>)
REGISTER(int32);
REGISTER(int64);
#undef REGISTER

REGISTER_OP("DeepfmGatherRows")
    .Input("table: resource")  // float32
    .Input("indices: T")       // [U]
    .Output("rows: float")     // [U, ...]
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const auto* known = c->input_handle_shapes_and_types(0);
      if (known == nullptr || known->empty()) {
        c->set_output(0, c->UnknownShape());
        return Status::OK();
      }
      ShapeHandle row, rows;
      TF_RETURN_IF_ERROR(c->Subshape((*known)[0].shape, 1, &row));
      TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), row, &rows));
      c->set_output(0, rows);
      return Status::OK();
    })
    .Doc("Rows of a table, fetched from memory ahead of their use.");

// How many rows ahead they are fetched, and how many are updated side by side: of wide ones one by
// one, for narrow ones alone there is too little to do.
constexpr int64 kNarrow = 32;  // floats
inline int64 RowsAtOnce(int64 width) { return std::max<int64>(kNarrow / width, 1); }
inline int64 RowsAhead(int64 width) { return std::max<int64>(6, RowsAtOnce(width)); }

template <int kToWrite>
inline void Prefetch(const float* row, int64 width) {
  for (int64 k = 0; k < width; k += 16) __builtin_prefetch(row + k, kToWrite);
}

inline void CopyRow(const float* from, int64 width, float* to) {
  if (width == 1) {
    *to = *from;
  } else {
    std::memcpy(to, from, width * sizeof(float));
  }
}

template <typename T>
Status CheckIndices(const Tensor& indices, int64 rows) {
  if (indices.dims() != 1) return errors::InvalidArgument("indices are no vector");
  const auto where = indices.vec<T>();
  for (int64 i = 0; i < where.size(); ++i) {
    if (where(i) < 0 || where(i) >= rows) {
      return errors::InvalidArgument("indices[", i, "] = ", where(i), " is not in [0, ", rows, ")");
    }
  }
  return Status::OK();
}

template <typename T>
class GatherRowsOp : public OpKernel {
 public:
  explicit GatherRowsOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> table;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &table));
    OP_REQUIRES_OK(context, (EnsureSparseVariableAccess<Rows, float>(context, table.get())));
    tf_shared_lock lock(*table->mu());
    TensorShape shape = table->tensor()->shape();
    const Tensor& indices = context->input(1);
    OP_REQUIRES(context, shape.dims() >= 1, errors::InvalidArgument("a table without rows"));
    OP_REQUIRES_OK(context, CheckIndices<T>(indices, shape.dim_size(0)));
    const int64 n = indices.dim_size(0);
    const int64 width = shape.num_elements() / std::max<int64>(shape.dim_size(0), 1);
    shape.set_dim(0, n);
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &rows));
    const auto where = indices.vec<T>();
    const float* from = table->tensor()->flat<float>().data();
    float* to = rows->flat<float>().data();
    if (width == 0) return;
    const int64 ahead = RowsAhead(width);
    Divide(context, n, 4 * width, [&](int64 first, int64 last) {
      for (int64 i = first; i < last; ++i) {
        if (i + ahead < last) Prefetch<0>(from + where(i + ahead) * width, width);
        CopyRow(from + where(i) * width, width, to + i * width);
      }
    });
  }
};

#define REGISTER(T) \
  REGISTER_KERNEL_BUILDER( \
      Name("DeepfmGatherRows").Device(DEVICE_CPU).TypeConstraint<T>("T"), GatherRowsOp<T>)
REGISTER(int32);
REGISTER(int64);
#undef REGISTER

REGISTER_OP("DeepfmLookUp")
    .Input("weights: float")     // [U]
    .Input("embeddings: float")  // [U, K]
    .Input("where: int32")       // [N]
    .Input("x: float")           // [N]
    .Output("scaled: float")     // [B, F K]
    .Output("fm: float")         // [B]
    .Output("sums: float")       // [B, K]
    .Attr("field_size: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int field_size;
      TF_RETURN_IF_ERROR(c->GetAttr("field_size", &field_size));
      ShapeHandle embeddings;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &embeddings));
      DimensionHandle examples, width;
      TF_RETURN_IF_ERROR(c->Divide(c->Dim(c->input(2), 0), field_size, true, &examples));
      TF_RETURN_IF_ERROR(c->Multiply(c->Dim(embeddings, 1), field_size, &width));
      c->set_output(0, c->Matrix(examples, width));
      c->set_output(1, c->Vector(examples));
      c->set_output(2, c->Matrix(examples, c->Dim(embeddings, 1)));
      return Status::OK();
    })
    .Doc("Each value's row, scaled; first_order + second_order; and the sums of an example's "
         "rows.");

// The parts of a batch that the kernels take.
struct Batch {
  const float* weights;     // [U]
  const float* embeddings;  // [U, K]
  const int32* where;       // [N], below U
  const float* x;           // [N]
  int64 fields, width;      // F, K
};

DEEPFM_CLONES
void LookUp(const Batch& batch, int64 first, int64 last, float* scratch, float* scaled, float* fm,
            float* sums) {
  const int64 fields = batch.fields, width = batch.width;
  float* __restrict squares = scratch;  // [K]
  for (int64 b = first; b < last; ++b) {
    float* __restrict sum = sums + b * width;
    float linear = 0;
    for (int64 k = 0; k < width; ++k) sum[k] = squares[k] = 0;
    for (int64 n = b * fields; n < (b + 1) * fields; ++n) {
      const float x = batch.x[n];
      const float* __restrict row = batch.embeddings + batch.where[n] * width;
      float* __restrict out = scaled + n * width;
      for (int64 k = 0; k < width; ++k) {
        const float e = x * row[k];
        out[k] = e;
        sum[k] += e;
        squares[k] += e * e;
      }
      linear += x * batch.weights[batch.where[n]];
    }
    float pairs = 0;
    for (int64 k = 0; k < width; ++k) pairs += sum[k] * sum[k] - squares[k];
    fm[b] = linear + 0.5f * pairs;
  }
}

Status CheckBatch(const Tensor& weights, const Tensor& embeddings, const Tensor& where,
                  const Tensor& x, int64 fields, Batch* batch) {
  if (embeddings.dims() != 2 || weights.shape() != TensorShape({embeddings.dim_size(0)}) ||
      where.dims() != 1 || x.shape() != where.shape() || where.dim_size(0) % fields != 0) {
    return errors::InvalidArgument("shapes of rows and values do not fit");
  }
  const uint32 rows = embeddings.dim_size(0);
  const int32* places = where.vec<int32>().data();
  bool inside = true;
  for (int64 n = 0; n < where.NumElements(); ++n) inside &= static_cast<uint32>(places[n]) < rows;
  if (!inside) return errors::InvalidArgument("a value's row is beyond the last");
  *batch = {weights.vec<float>().data(), embeddings.matrix<float>().data(), places,
            x.vec<float>().data(), fields, embeddings.dim_size(1)};
  return Status::OK();
}

class LookUpOp : public OpKernel {
 public:
  explicit LookUpOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
  }

  void Compute(OpKernelContext* context) override {
    Batch batch;
    OP_REQUIRES_OK(context, CheckBatch(context->input(0), context->input(1), context->input(2),
                                       context->input(3), fields_, &batch));
    const int64 examples = context->input(2).dim_size(0) / fields_, width = batch.width;
    Tensor *scaled = nullptr, *fm = nullptr, *sums = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, TensorShape({examples, fields_ * width}), &scaled));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({examples}), &fm));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({examples, width}), &sums));
    float* scaled_to = scaled->matrix<float>().data();
    float* fm_to = fm->vec<float>().data();
    float* sums_to = sums->matrix<float>().data();
    Divide(context, examples, fields_ * width, [&](int64 first, int64 last) {
      std::vector<float> scratch(width);
      LookUp(batch, first, last, scratch.data(), scaled_to, fm_to, sums_to);
    });
  }

 private:
  int64 fields_;
};
REGISTER_KERNEL_BUILDER(Name("DeepfmLookUp").Device(DEVICE_CPU), LookUpOp);

REGISTER_OP("DeepfmLookUpGrad")
    .Input("weights: float")      // [U]
    .Input("embeddings: float")   // [U, K]
    .Input("where: int32")        // [N]
    .Input("x: float")            // [N]
    .Input("sums: float")         // [B, K]
    .Input("by_scaled: float")    // [B, F K]
    .Input("by_fm: float")        // [B]
    .Output("by_weights: float")  // [U]
    .Output("by_embeddings: float")
    .Attr("field_size: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      c->set_output(1, c->input(1));
      return Status::OK();
    })
    .Doc("The gradient of DeepfmLookUp, by its rows.");

// The gradient of the rows first ... last - 1. All values are gone through in the order of the
// batch, which is that of memory. With e = x v, the FM's is by_fm (sum - e), of which by_fm e is
// taken at the end, as v is the same in all uses of a row.
DEEPFM_CLONES
void LookUpGrad(const Batch& batch, int64 examples, int64 first, int64 last, const float* sums,
                const float* by_scaled, const float* by_fm, float* own, float* by_weights,
                float* by_embeddings) {
  const int64 fields = batch.fields, width = batch.width;
  std::fill(own + first, own + last, 0.0f);
  std::fill(by_weights + first, by_weights + last, 0.0f);
  std::fill(by_embeddings + first * width, by_embeddings + last * width, 0.0f);
  for (int64 b = 0; b < examples; ++b) {
    const float* __restrict sum = sums + b * width;
    const float d = by_fm[b];
    for (int64 n = b * fields; n < (b + 1) * fields; ++n) {
      const int64 u = batch.where[n];
      if (u < first || u >= last) continue;
      const float x = batch.x[n];
      const float* __restrict grad = by_scaled + n * width;
      float* __restrict total = by_embeddings + u * width;
      for (int64 k = 0; k < width; ++k) total[k] += x * (grad[k] + d * sum[k]);
      own[u] += d * x * x;
      by_weights[u] += d * x;
    }
  }
  for (int64 u = first; u < last; ++u) {
    const float* __restrict row = batch.embeddings + u * width;
    float* __restrict total = by_embeddings + u * width;
    for (int64 k = 0; k < width; ++k) total[k] -= own[u] * row[k];
  }
}

class LookUpGradOp : public OpKernel {
 public:
  explicit LookUpGradOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
  }

  void Compute(OpKernelContext* context) override {
    Batch batch;
    OP_REQUIRES_OK(context, CheckBatch(context->input(0), context->input(1), context->input(2),
                                       context->input(3), fields_, &batch));
    const int64 examples = context->input(2).dim_size(0) / fields_, width = batch.width;
    const int64 rows = context->input(1).dim_size(0);
    const Tensor &sums = context->input(4), &by_scaled = context->input(5),
                 &by_fm = context->input(6);
    OP_REQUIRES(context,
                sums.shape() == TensorShape({examples, width}) &&
                    by_scaled.shape() == TensorShape({examples, fields_ * width}) &&
                    by_fm.shape() == TensorShape({examples}),
                errors::InvalidArgument("shapes of gradients do not fit"));
    Tensor *by_weights = nullptr, *by_embeddings = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({rows}), &by_weights));
    OP_REQUIRES_OK(context,
                   context->allocate_output(1, TensorShape({rows, width}), &by_embeddings));
    const float *sums_of = sums.matrix<float>().data(), *grad = by_scaled.matrix<float>().data(),
                *fm_grad = by_fm.vec<float>().data();
    float *weights_to = by_weights->vec<float>().data(),
          *embeddings_to = by_embeddings->matrix<float>().data();
    std::vector<float> own(rows);
    const int64 uses = examples * fields_ / std::max<int64>(rows, 1) + 1;  // of a row
    Divide(context, rows, uses * width, [&](int64 first, int64 last) {
      LookUpGrad(batch, examples, first, last, sums_of, grad, fm_grad, own.data(), weights_to,
                 embeddings_to);
    });
  }

 private:
  int64 fields_;
};
REGISTER_KERNEL_BUILDER(Name("DeepfmLookUpGrad").Device(DEVICE_CPU), LookUpGradOp);

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

// What both operators of Adam have in common: inputs 0 to 2 are the variable and its slots, the
// last five are the gradient and the numbers.
class AdamOp : public OpKernel {
 public:
  AdamOp(OpKernelConstruction* context, bool by_rows) : OpKernel(context), by_rows_(by_rows) {
    OP_REQUIRES_OK(context, context->GetAttr("l2", &l2_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> vars[3];
    for (int i = 0; i < 3; ++i) {
      OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, i), &vars[i]));
      if (!by_rows_) continue;
      OP_REQUIRES_OK(context, (EnsureSparseVariableAccess<Rows, float>(context, vars[i].get())));
    }
    // As TensorFlow's own ops do: in the order of their addresses.
    mutex* locks[3] = {vars[0]->mu(), vars[1]->mu(), vars[2]->mu()};
    std::sort(locks, locks + 3);
    OP_REQUIRES(context, locks[0] != locks[1] && locks[1] != locks[2],
                errors::InvalidArgument("a variable is given twice"));
    mutex_lock lock0(*locks[0]), lock1(*locks[1]), lock2(*locks[2]);
    float* data[3];
    for (int i = 0; i < 3; ++i) {
      const bool in_place = vars[i]->copy_on_read_mode.load();
      OP_REQUIRES_OK(context, (PrepareToUpdateVariable<Rows, float>(context, vars[i]->tensor(),
                                                                    in_place)));
      data[i] = vars[i]->tensor()->flat<float>().data();
    }
    const TensorShape& shape = vars[0]->tensor()->shape();
    OP_REQUIRES(context,
                shape == vars[1]->tensor()->shape() && shape == vars[2]->tensor()->shape(),
                errors::InvalidArgument("shapes of variable and slots differ"));
    const int numbers = context->num_inputs() - 4;
    auto number = [=](int i) { return context->input(numbers + i).scalar<float>()(); };
    const Adam adam = {number(0), 1 - number(1), 1 - number(2), number(3), l2_};
    OP_REQUIRES_OK(context, Apply(context, adam, shape, context->input(numbers - 1), data));
  }

 protected:
  virtual Status Apply(OpKernelContext* context, const Adam& adam, const TensorShape& shape,
                       const Tensor& grad, float* const data[3]) const = 0;

 private:
  const bool by_rows_;
  float l2_;
};

REGISTER_OP("DeepfmAdam")
    .Input("variable: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("grad: float")
    .Input("rate: float")
    .Input("beta1: float")
    .Input("beta2: float")
    .Input("epsilon: float")
    .Attr("l2: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return Status::OK(); })
    .Doc("Adam of a variable, to whose gradient l2 times itself is added.");

class AdamWholeOp : public AdamOp {
 public:
  explicit AdamWholeOp(OpKernelConstruction* context) : AdamOp(context, false) {}

 protected:
  Status Apply(OpKernelContext* context, const Adam& adam, const TensorShape& shape,
               const Tensor& grad, float* const data[3]) const override {
    if (grad.shape() != shape) return errors::InvalidArgument("shapes of gradients do not fit");
    const float* from = grad.flat<float>().data();
    Divide(context, shape.num_elements(), 20, [&](int64 first, int64 last) {
      Update(adam, last - first, from + first, data[0] + first, data[1] + first, data[2] + first);
    });
    return Status::OK();
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmAdam").Device(DEVICE_CPU), AdamWholeOp);

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
    .SetShapeFn([](InferenceContext*) { return Status::OK(); })
    .Doc("Adam of the rows `indices`, which must differ: the others, moments and all, stay.");

template <typename T>
class AdamRowsOp : public AdamOp {
 public:
  explicit AdamRowsOp(OpKernelConstruction* context) : AdamOp(context, true) {}

 protected:
  Status Apply(OpKernelContext* context, const Adam& adam, const TensorShape& shape,
               const Tensor& grad, float* const data[3]) const override {
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
        // The next rows are on their way while these are computed.
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
  }
};

#define REGISTER(T) \
  REGISTER_KERNEL_BUILDER( \
      Name("DeepfmAdamRows").Device(DEVICE_CPU).TypeConstraint<T>("T"), AdamRowsOp<T>)
REGISTER(int32);
REGISTER(int64);
#undef REGISTER

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
