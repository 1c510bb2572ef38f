// The first layer and the FM of a model that is applied: while its weights stay as they are, a
// (field, id) pair has the same row [v W_f, v] in each batch, so the rows are kept from batch to
// batch, and only pairs that are not there are projected. Each row and each example is computed as
// first_layer.cc does it, to the bit, whatever else is in its batch.
//
// B: examples. F: fields. N = B F: values. K: embedding size. H: units.
#include "first_layer.h"
#include "tables.h"

namespace deepfm {

REGISTER_OP("DeepfmAppliedFirstLayer")
    .Input("weights: resource")     // float32 [feature_size]
    .Input("embeddings: resource")  // float32 [feature_size, K]
    .Input("kernel: float")         // [F K, H]
    .Input("ids: int64")            // [N]
    .Input("x: float")              // [N]
    .Output("y: float")             // [B, H]
    .Output("fm: float")            // [B]
    .Attr("field_size: int >= 1")
    .SetIsStateful()
    .SetShapeFn(Ranks<2, 1>)
    .Doc("The first layer's products, and first_order + second_order, of fields with one value "
         "each.");

// Which rows hold the pairs of a field. An id takes the slot of another whose hash is the same, and
// then that one is new again, so that finding a row takes no search, and no branch.
class RowsOfField {
 public:
  void Begin(int64 most) {
    ids_.assign(most + 1, 0);
    used_ = 0;
  }
  void Forget() { used_ = 0; }

  // Writes the rows of ids, plus `base`; what belongs to each example is `stride` apart.
  void Find(const int64* ids, int64 examples, int64 stride, int32 base, int32* rows) {
    int32 *slots = slots_.data(), *known = ids_.data(), used = used_;
    for (int64 i = 0; i < examples * stride; i += stride) {
      const int32 id = ids[i];
      int32* slot = slots + ((static_cast<uint64>(id) * 0x9e3779b97f4a7c15ull) >> (64 - kBits));
      int32 row = *slot;
      const bool is_new = (row >= used) | (known[row] != id);
      row = is_new ? used : row;
      known[used] = id;
      used += is_new;
      *slot = row;
      rows[i] = base + row;
    }
    used_ = used;
  }

  int32 used() const { return used_; }
  int32 id(int64 row) const { return ids_[row]; }

 private:
  static constexpr int kBits = 12;

  std::vector<int32> slots_ = std::vector<int32>(size_t{1} << kBits);  // perhaps a row of that hash
  std::vector<int32> ids_;                                             // of each row
  int32 used_ = 0;                                                     // rows
};

// Takes a variable's present value, which nobody can change in place as long as it is held here
// (but see EnsureSparseVariableAccess). Returns whether it is the one held before.
Status Hold(OpKernelContext* context, int i, Tensor* held, bool* same) {
  core::RefCountPtr<Var> variable;
  TF_RETURN_IF_ERROR(LookupResource(context, HandleFromInput(context, i), &variable));
  tf_shared_lock lock(*variable->mu());
  const Tensor& now = *variable->tensor();
  if (!now.IsInitialized() || now.dtype() != DT_FLOAT) {
    return errors::FailedPrecondition("a table is not initialized, or has another type");
  }
  *same &= held->IsInitialized() && now.shape() == held->shape() && now.SharesBufferWith(*held);
  *held = now;
  return Status::OK();
}

// Not members: C++14 would want their definitions.
constexpr int64 kExamples = 512;  // whose rows are found at once
constexpr int64 kKept = 512;      // rows of a field; with more the second cache overflows
constexpr int64 kMost = kKept + kExamples;  // as each example may have another one

class AppliedFirstLayer : public OpKernel {
 public:
  explicit AppliedFirstLayer(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
    known_.resize(fields_);
  }

  void Compute(OpKernelContext* context) override {
    mutex_lock lock(mutex_);
    const Tensor &kernel = context->input(2), &ids = context->input(3), &x = context->input(4);
    bool same = kernel_.IsInitialized() && kernel.shape() == kernel_.shape() &&
                kernel.SharesBufferWith(kernel_);
    kernel_ = kernel;
    OP_REQUIRES_OK(context, Hold(context, 0, &weights_, &same));
    OP_REQUIRES_OK(context, Hold(context, 1, &embeddings_, &same));
    OP_REQUIRES(context,
                embeddings_.dims() == 2 && kernel.dims() == 2 && ids.dims() == 1 &&
                    weights_.shape() == TensorShape({embeddings_.dim_size(0)}) &&
                    kernel.dim_size(0) == fields_ * embeddings_.dim_size(1) &&
                    x.shape() == ids.shape() && ids.dim_size(0) % fields_ == 0 &&
                    embeddings_.dim_size(0) < (int64{1} << 31),
                errors::InvalidArgument("shapes of tables, values and the first layer do not fit"));
    OP_REQUIRES_OK(context, CheckIndices<int64>(ids, embeddings_.dim_size(0)));
    Layer s;
    s.width = embeddings_.dim_size(1), s.units = kernel.dim_size(1);
    s.padded_units = Padded(s.units), s.padded_width = Padded(s.width);
    s.stride = s.padded_units + s.padded_width;
    s.places = {fields_, nullptr};
    s.weights = weights_.flat<float>().data(), s.embeddings = embeddings_.flat<float>().data();
    s.kernel = kernel.flat<float>().data();
    if (!same) Begin(s);
    const int64 examples = ids.dim_size(0) / fields_;
    float *y, *fm;
    OP_REQUIRES_OK(context, Allocate(context, 0, {examples, s.units}, &y));
    OP_REQUIRES_OK(context, Allocate(context, 1, {examples}, &fm));
    std::vector<int32> rows(std::min<int64>(kExamples, examples) * fields_);
    for (int64 first = 0; first < examples; first += kExamples) {
      s.examples = std::min<int64>(kExamples, examples - first);
      s.by = x.flat<float>().data() + first * fields_;
      s.pair_of = rows.data();
      const int64* own = ids.flat<int64>().data() + first * fields_;
      constexpr int64 kParts = 8;
      Divide(
          context, fields_, 16 * s.examples,
          [&](int64 begin, int64 end) { Project(s, begin, end, own, rows.data()); }, kParts);
      Sum(context, s, y + first * s.units, fm + first);
    }
  }

 private:
  void Begin(const Layer& s) {
    projected_.reset(new float[fields_ * kMost * s.stride]);
    of_rows_.reset(new float[2 * fields_ * kMost + 1]);
    for (RowsOfField& known : known_) known.Begin(kMost);
  }

  // Finds the rows of the ids of some fields, and projects those that are not there. Several
  // threads may be here, each with other fields.
  void Project(const Layer& s, int64 first, int64 last, const int64* ids, int32* rows) {
    constexpr int64 kBlock = 256;  // examples, whose ids stay in the cache from field to field
    std::vector<int32> before(last - first);
    for (int64 f = first; f < last; ++f) {
      if (known_[f].used() > kKept) known_[f].Forget();
      before[f - first] = known_[f].used();
    }
    for (int64 begin = 0; begin < s.examples; begin += kBlock) {
      const int64 end = std::min(begin + kBlock, s.examples);
      for (int64 f = first; f < last; ++f) {
        const int64 at = begin * fields_ + f;
        known_[f].Find(ids + at, end - begin, fields_, f * kMost, rows + at);
      }
    }
    for (int64 f = first; f < last; ++f) ProjectField(s, f, before[f - first]);
  }

  // Projects the rows of a field from `begin` on.
  void ProjectField(const Layer& s, int64 f, int64 begin) {
    const int64 n = known_[f].used() - begin;
    if (n == 0) return;
    const auto id = [&](int64 i) -> int64 { return known_[f].id(begin + i); };
    float* to = projected_.get() + (f * kMost + begin) * s.stride;
    float* of_rows = of_rows_.get() + 2 * (f * kMost + begin);
    for (int64 i = 0; i < n; ++i) {
      constexpr int64 kAhead = 12;
      if (i + kAhead < n) Prefetch<0>(s.embeddings + id(i + kAhead) * s.width, s.width);
      CopyPadded(s.embeddings + id(i) * s.width, 1, s.width, s.padded_width, s.stride,
                 to + i * s.stride + s.padded_units);
      of_rows[2 * i] = s.weights[id(i)];
    }
    deepfm::ProjectField(s, f, n, to, of_rows + 1);
  }

  void Sum(OpKernelContext* context, const Layer& s, float* y, float* fm) {
    Divide(context, s.examples, 4 * fields_ * s.stride, [&](int64 begin, int64 end) {
      std::vector<float> sum(s.stride), scratch(s.padded_width);
      for (int64 b = begin; b < end; ++b) {
        fm[b] = SumExample(s, b, projected_.get(), of_rows_.get(), scratch.data(), sum.data());
        std::copy(sum.data(), sum.data() + s.units, y + b * s.units);
      }
    });
  }

  mutex mutex_;
  int64 fields_;
  Tensor weights_, embeddings_, kernel_;  // of which the rows are
  std::vector<RowsOfField> known_;        // [F]
  std::unique_ptr<float[]> projected_;    // [F, kMost, stride]
  std::unique_ptr<float[]> of_rows_;      // [F, kMost, 2]: the weight and the squared length
};
REGISTER_KERNEL_BUILDER(Name("DeepfmAppliedFirstLayer").Device(DEVICE_CPU), AppliedFirstLayer);

}  // namespace deepfm
