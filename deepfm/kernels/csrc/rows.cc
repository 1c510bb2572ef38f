// What a training step computes from the rows of the embedding tables: the distinct ids of a batch,
// the FM and the MLP's input from its rows, and their gradients, which CowClip clips; and the zeros
// of their slots.
//
// rows.py and model/embeddings.py do the same with TensorFlow's own ops; tests compare the two, and
// those take over if these are not built. All are float32, on the CPU.
//
// B: examples. F: fields. N = B F: values. K: embedding size. U: distinct ids.
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

REGISTER_OP("DeepfmUnique")
    .Input("ids: int64")
    .Output("distinct: T")
    .Output("where: int32")
    .Attr("T: {int32, int64}")
    .SetShapeFn(Ranks<1, 1>)
    .Doc("As tf.unique: the distinct ids in the order of first use, and the place of each id.");

template <typename T>
void Unique(OpKernelContext* context) {
  const auto ids = context->input(0).vec<int64>();
  const int64 n = ids.size();
  OP_REQUIRES(context, n < (int64{1} << 30), errors::InvalidArgument("too many ids"));
  int bits = 4;
  while ((int64{1} << bits) < 2 * n) ++bits;
  // Open addressing, at most half full. A slot holds 1 + the place of its id in `distinct`.
  std::vector<int32> slots(size_t{1} << bits);
  const uint64 mask = (uint64{1} << bits) - 1;
  std::vector<int64> distinct;
  distinct.reserve(n);
  int32* where;
  OP_REQUIRES_OK(context, Allocate(context, 1, {n}, &where));
  for (int64 i = 0; i < n; ++i) {
    const uint64 hash = static_cast<uint64>(ids(i)) * 0x9e3779b97f4a7c15ull;
    uint64 slot = hash >> (64 - bits);
    while (slots[slot] != 0 && distinct[slots[slot] - 1] != ids(i)) slot = (slot + 1) & mask;
    if (slots[slot] == 0) {
      distinct.push_back(ids(i));
      slots[slot] = distinct.size();
    }
    where[i] = slots[slot] - 1;
  }
  T* out;
  OP_REQUIRES_OK(context, Allocate(context, 0, {static_cast<int64>(distinct.size())}, &out));
  std::copy(distinct.begin(), distinct.end(), out);
}
DEEPFM_REGISTER_INDEXED("DeepfmUnique", Unique);

REGISTER_OP("DeepfmGatherRows")
    .Input("table: resource")  // float32
    .Input("indices: T")       // [U]
    .Output("rows: float")     // [U, ...]
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnknownShape)
    .Doc("Rows of a table, prefetched from memory.");

// Calls work(i, width, the row of the table that index i asks for, row i of the output), which costs
// as much as passing over `floats` times its width. `values`, if given, must have one column more
// than the rows.
template <typename T, typename Work>
void ReadRows(OpKernelContext* context, int64 floats, const Tensor* values, const Work& work) {
  core::RefCountPtr<Var> table;
  OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &table));
  OP_REQUIRES_OK(context, (EnsureSparseVariableAccess<Rows, float>(context, table.get())));
  tf_shared_lock lock(*table->mu());
  TensorShape shape = table->tensor()->shape();
  const Tensor& indices = context->input(1);
  OP_REQUIRES(context, shape.dims() >= 1, errors::InvalidArgument("the table has no rows"));
  OP_REQUIRES_OK(context, CheckIndices<T>(indices, shape.dim_size(0)));
  const auto where = indices.vec<T>();
  const int64 n = where.size();
  const int64 width = shape.num_elements() / std::max<int64>(shape.dim_size(0), 1);
  OP_REQUIRES(context, values == nullptr || values->shape() == TensorShape({n, width + 1}),
              errors::InvalidArgument("shapes of gradients do not fit"));
  shape.set_dim(0, n);
  float* to;
  OP_REQUIRES_OK(context, Allocate(context, 0, shape, &to));
  const float* from = table->tensor()->flat<float>().data();
  if (width == 0) return;
  const int64 ahead = RowsAhead(width);
  Divide(context, n, floats * width, [&](int64 first, int64 last) {
    for (int64 i = first; i < last; ++i) {
      if (i + ahead < last) Prefetch<0>(from + where(i + ahead) * width, width);
      work(i, width, from + where(i) * width, to + i * width);
    }
  });
}

template <typename T>
void GatherRows(OpKernelContext* context) {
  ReadRows<T>(context, 4, nullptr, [](int64, int64 width, const float* row, float* to) {
    CopyRow(row, width, to);
  });
}
DEEPFM_REGISTER_INDEXED("DeepfmGatherRows", GatherRows);

REGISTER_OP("DeepfmClipRows")
    .Input("table: resource")  // float32
    .Input("indices: T")       // [U]
    .Input("values: float")    // [U, K + 1]
    .Output("clipped: float")  // [U, ...]
    .Attr("ratio: float")
    .Attr("min_norm: float")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnknownShape)
    .Doc("The gradients of rows, the first K columns of `values`, each clipped to the count in the "
         "last column, times the larger of `min_norm` and `ratio` times the norm of the row.");

// g := min(1, count max(ratio |row|, min_norm) / |g|) g
DEEPFM_CLONES
void ClipRow(float ratio, float min_norm, int64 width, const float* __restrict row,
             const float* __restrict values, float* __restrict clipped) {
  float of_row = 0, of_grad = 0;
  for (int64 k = 0; k < width; ++k) {
    of_row += row[k] * row[k];
    of_grad += values[k] * values[k];
  }
  const float limit = values[width] * std::max(ratio * std::sqrt(of_row), min_norm);
  const float norm = std::sqrt(of_grad), factor = norm > limit ? limit / norm : 1;
  for (int64 k = 0; k < width; ++k) clipped[k] = factor * values[k];
}

template <typename T>
void ClipRows(OpKernelContext* context) {
  const Tensor& values = context->input(2);
  const float ratio = Attribute<float>(context, "ratio");
  const float min_norm = Attribute<float>(context, "min_norm");
  const float* grad = values.flat<float>().data();
  ReadRows<T>(context, 8, &values, [=](int64 i, int64 width, const float* row, float* to) {
    ClipRow(ratio, min_norm, width, row, grad + i * (width + 1), to);
  });
}
DEEPFM_REGISTER_INDEXED("DeepfmClipRows", ClipRows);

REGISTER_OP("DeepfmLookUp")
    .Input("weights: float")     // [U]
    .Input("embeddings: float")  // [U, K]
    .Input("where: int32")       // [N]
    .Input("x: float")           // [N]
    .Output("scaled: float")     // [B, F K]
    .Output("fm: float")         // [B]
    .Output("sums: float")       // [B, K]
    .Attr("field_size: int >= 1")
    .SetShapeFn(Ranks<2, 1, 2>)
    .Doc("Each value's scaled row; first_order + second_order; and the sum of each example's "
         "scaled rows.");

// The parts of a batch that the kernels use.
struct Batch {
  const float* weights;     // [U]
  const float* embeddings;  // [U, K]
  const int32* where;       // [N], below U
  const float* x;           // [N]
  int64 fields, width;      // F, K
  int64 rows, examples;     // U, B
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

// Inputs 0 to 3 of both operators are the parts of a batch.
Status TakeBatch(OpKernelContext* context, Batch* batch) {
  const Tensor &weights = context->input(0), &embeddings = context->input(1),
               &where = context->input(2), &x = context->input(3);
  const int64 fields = Attribute<int64>(context, "field_size");
  if (embeddings.dims() != 2 || weights.shape() != TensorShape({embeddings.dim_size(0)}) ||
      where.dims() != 1 || x.shape() != where.shape() || where.dim_size(0) % fields != 0) {
    return errors::InvalidArgument("shapes of rows and values do not fit");
  }
  const int64 rows = embeddings.dim_size(0), values = where.dim_size(0);
  const int32* places = where.vec<int32>().data();
  TF_RETURN_IF_ERROR(CheckPlaces(places, values, rows));
  *batch = {weights.vec<float>().data(), embeddings.matrix<float>().data(), places,
            x.vec<float>().data(), fields, embeddings.dim_size(1), rows, values / fields};
  return Ok();
}

void LookUpOp(OpKernelContext* context) {
  Batch batch;
  OP_REQUIRES_OK(context, TakeBatch(context, &batch));
  const int64 examples = batch.examples, width = batch.width;
  float *scaled, *fm, *sums;
  OP_REQUIRES_OK(context, Allocate(context, 0, {examples, batch.fields * width}, &scaled));
  OP_REQUIRES_OK(context, Allocate(context, 1, {examples}, &fm));
  OP_REQUIRES_OK(context, Allocate(context, 2, {examples, width}, &sums));
  Divide(context, examples, batch.fields * width, [&](int64 first, int64 last) {
    std::vector<float> scratch(width);
    LookUp(batch, first, last, scratch.data(), scaled, fm, sums);
  });
}
DEEPFM_REGISTER("DeepfmLookUp", LookUpOp);

REGISTER_OP("DeepfmLookUpGrad")  // its first inputs are those of DeepfmLookUp
    .Input("weights: float").Input("embeddings: float").Input("where: int32").Input("x: float")
    .Input("sums: float")         // [B, K]
    .Input("by_scaled: float")    // [B, F K]
    .Input("by_fm: float")        // [B]
    .Output("by_weights: float")  // [U]
    .Output("by_embeddings: float")
    .Attr("field_size: int >= 1")
    .SetShapeFn(LikeInputs)
    .Doc("The gradient of DeepfmLookUp with respect to its rows.");

// The gradient of rows first ... last - 1. Goes through all values in the order of the batch, which
// is that of memory. With e = x v, the FM's gradient is by_fm (sum - e); the term by_fm e is
// subtracted at the end, since v is the same in all uses of a row.
DEEPFM_CLONES
void LookUpGrad(const Batch& batch, int64 first, int64 last, const float* sums,
                const float* by_scaled, const float* by_fm, float* own, float* by_weights,
                float* by_embeddings) {
  const int64 fields = batch.fields, width = batch.width;
  std::fill(own + first, own + last, 0.0f);
  std::fill(by_weights + first, by_weights + last, 0.0f);
  std::fill(by_embeddings + first * width, by_embeddings + last * width, 0.0f);
  for (int64 b = 0; b < batch.examples; ++b) {
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

void LookUpGradOp(OpKernelContext* context) {
  Batch batch;
  OP_REQUIRES_OK(context, TakeBatch(context, &batch));
  const int64 examples = batch.examples, rows = batch.rows, width = batch.width;
  const Tensor &sums = context->input(4), &by_scaled = context->input(5),
               &by_fm = context->input(6);
  OP_REQUIRES(context,
              sums.shape() == TensorShape({examples, width}) &&
                  by_scaled.shape() == TensorShape({examples, batch.fields * width}) &&
                  by_fm.shape() == TensorShape({examples}),
              errors::InvalidArgument("shapes of gradients do not fit"));
  float *by_weights, *by_embeddings;
  OP_REQUIRES_OK(context, Allocate(context, 0, {rows}, &by_weights));
  OP_REQUIRES_OK(context, Allocate(context, 1, {rows, width}, &by_embeddings));
  const float *sums_of = sums.flat<float>().data(), *grad = by_scaled.flat<float>().data(),
              *fm_grad = by_fm.flat<float>().data();
  std::vector<float> own(rows);
  const int64 uses = examples * batch.fields / std::max<int64>(rows, 1) + 1;  // of a row
  // As each part passes over the places of all values, there is about one for each thread.
  const int64 most = context->device()->tensorflow_cpu_worker_threads()->num_threads + 1;
  Divide(
      context, rows, uses * width,
      [&](int64 first, int64 last) {
        LookUpGrad(batch, first, last, sums_of, grad, fm_grad, own.data(), by_weights,
                   by_embeddings);
      },
      most);
}
DEEPFM_REGISTER("DeepfmLookUpGrad", LookUpGradOp);

}  // namespace deepfm
