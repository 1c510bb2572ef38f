// What a training step makes of the rows of the embedding tables: the distinct ids of a batch, the
// FM and the MLP's input of its rows, and their gradients.
//
// ops.py and model/embeddings.py hold the same in TensorFlow's own ops: that is what these are
// tested against, and what runs where they are not built. All are float32, on the CPU.
//
// B: examples. F: fields. N = B F: values. K: embedding size. U: distinct ids.
#include <algorithm>
#include <cstring>
#include <vector>

#include "loops.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepfm {

using namespace tensorflow;  // NOLINT
using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

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

DEEPFM_REGISTER_INDEXED("DeepfmUnique", UniqueOp);

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

DEEPFM_REGISTER_INDEXED("DeepfmGatherRows", GatherRowsOp);

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

// What both operators of a batch's rows begin with: inputs 0 to 3 are its parts.
class BatchOp : public OpKernel {
 public:
  explicit BatchOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
  }

  void Compute(OpKernelContext* context) override {
    Batch batch;
    OP_REQUIRES_OK(context, CheckBatch(context->input(0), context->input(1), context->input(2),
                                       context->input(3), fields_, &batch));
    Run(context, batch, context->input(2).dim_size(0) / fields_);
  }

 protected:
  virtual void Run(OpKernelContext* context, const Batch& batch, int64 examples) const = 0;

 private:
  int64 fields_;
};

class LookUpOp : public BatchOp {
 public:
  using BatchOp::BatchOp;

 protected:
  void Run(OpKernelContext* context, const Batch& batch, int64 examples) const override {
    const int64 width = batch.width;
    Tensor *scaled = nullptr, *fm = nullptr, *sums = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, TensorShape({examples, batch.fields * width}), &scaled));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({examples}), &fm));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({examples, width}), &sums));
    float* scaled_to = scaled->matrix<float>().data();
    float* fm_to = fm->vec<float>().data();
    float* sums_to = sums->matrix<float>().data();
    Divide(context, examples, batch.fields * width, [&](int64 first, int64 last) {
      std::vector<float> scratch(width);
      LookUp(batch, first, last, scratch.data(), scaled_to, fm_to, sums_to);
    });
  }
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

class LookUpGradOp : public BatchOp {
 public:
  using BatchOp::BatchOp;

 protected:
  void Run(OpKernelContext* context, const Batch& batch, int64 examples) const override {
    const int64 width = batch.width;
    const int64 rows = context->input(1).dim_size(0);
    const Tensor &sums = context->input(4), &by_scaled = context->input(5),
                 &by_fm = context->input(6);
    OP_REQUIRES(context,
                sums.shape() == TensorShape({examples, width}) &&
                    by_scaled.shape() == TensorShape({examples, batch.fields * width}) &&
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
    const int64 uses = examples * batch.fields / std::max<int64>(rows, 1) + 1;  // of a row
    Divide(context, rows, uses * width, [&](int64 first, int64 last) {
      LookUpGrad(batch, examples, first, last, sums_of, grad, fm_grad, own.data(), weights_to,
                 embeddings_to);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmLookUpGrad").Device(DEVICE_CPU), LookUpGradOp);

}  // namespace deepfm
