// The MLP's first layer and the FM on the distinct rows of a batch. The layer is linear and stands
// before any nonlinearity, so with x_bf the value and v_q the row of pair q = (field, id)
//
//     y_b = sum_f x_bf (v_q W_f)            each distinct pair is projected once
//     dW_f = sum_q v_q^T g_q,  dv_q = g_q W_f^T,  g_q = sum of x_bf dy_b over the uses of q
//
// which is what the whole [B, F K] matrix gives, apart from rounding, at the cost of its distinct
// rows. The sums of the FM are those of wider rows: [v_q W_f, v_q] going forward, and of
// [dy_b, dfm_b s_b] going back, s_b being the sum of the example's scaled rows.
//
// B: examples. F: fields. N = B F: values. K: embedding size. H: units. U: distinct ids. Q: distinct
// pairs, in the order of their fields.
#include <atomic>

#include "kernels.h"
#include "products.h"

namespace deepfm {

REGISTER_OP("DeepfmPairs")
    .Input("where: int32")     // [N], which distinct id each value has
    .Input("x: float")         // [N]
    .Input("num_ids: int32")   // []
    .Output("pairs: int32")    // [N], the pair of each value
    .Output("rows: int32")     // [Q], the distinct id of each pair
    .Output("fields: int32")   // [F + 1], the first pair of each field, and Q
    .Output("starts: int32")   // [Q + 1], the first use of each pair, and N
    .Output("uses: int32")     // [N], the example of each use
    .Output("factors: float")  // [N], the value of each use
    .Attr("field_size: int >= 1")
    .SetShapeFn(Ranks<1, 1, 1, 1, 1, 1>)
    .Doc("The distinct (field, id) pairs of a batch, and the uses of each.");

// Calls work(0) ... work(total - 1) in the threads of an operator, each when one is free.
template <typename Work>
void ForEach(OpKernelContext* context, int64 total, const Work& work) {
  const int64 threads = context->device()->tensorflow_cpu_worker_threads()->num_threads;
  std::atomic<int64> next{0};
  Divide(context, std::min(threads, total), int64{1} << 30, [&](int64, int64) {
    for (int64 i; (i = next++) < total;) work(i);
  });
}

void PairsOp(OpKernelContext* context) {
  const int64 fields = Attribute<int64>(context, "field_size");
  const Tensor &where = context->input(0), &x = context->input(1), &ids = context->input(2);
  OP_REQUIRES(context, where.dims() == 1 && x.shape() == where.shape() && ids.dims() == 0,
              errors::InvalidArgument("shapes of values do not fit"));
  const int64 values = where.dim_size(0), examples = values / fields;
  const int64 num_ids = ids.scalar<int32>()();
  OP_REQUIRES(context, values % fields == 0 && values < (int64{1} << 31),
              errors::InvalidArgument("a number of values that fields cannot have"));
  const int32* id_of = where.vec<int32>().data();
  const float* x_of = x.vec<float>().data();
  for (int64 n = 0; n < values; ++n) {
    OP_REQUIRES(context, id_of[n] >= 0 && id_of[n] < num_ids,
                errors::InvalidArgument("a value's row is beyond the last one"));
  }
  int32 *pairs, *fields_of, *uses;
  float* factors;
  OP_REQUIRES_OK(context, Allocate(context, 0, {values}, &pairs));
  OP_REQUIRES_OK(context, Allocate(context, 2, {fields + 1}, &fields_of));
  OP_REQUIRES_OK(context, Allocate(context, 4, {values}, &uses));
  OP_REQUIRES_OK(context, Allocate(context, 5, {values}, &factors));
  // Of each field: the ids, and the number of their uses.
  std::vector<std::vector<int32>> distinct(fields), times(fields);
  ForEach(context, fields, [&](int64 f) {
    std::vector<int32> pair_of(num_ids, -1);
    for (int64 n = f; n < values; n += fields) {
      int32& pair = pair_of[id_of[n]];
      if (pair < 0) {
        pair = distinct[f].size();
        distinct[f].push_back(id_of[n]);
        times[f].push_back(0);
      }
      ++times[f][pair];
      pairs[n] = pair;
    }
  });
  fields_of[0] = 0;
  for (int64 f = 0; f < fields; ++f) fields_of[f + 1] = fields_of[f] + distinct[f].size();
  const int64 total = fields_of[fields];
  int32 *rows, *starts;
  OP_REQUIRES_OK(context, Allocate(context, 1, {total}, &rows));
  OP_REQUIRES_OK(context, Allocate(context, 3, {total + 1}, &starts));
  starts[total] = values;
  ForEach(context, fields, [&](int64 f) {
    const int32 first = fields_of[f];
    std::copy(distinct[f].begin(), distinct[f].end(), rows + first);
    int32 start = f * examples;
    for (size_t q = 0; q < times[f].size(); ++q) {
      starts[first + q] = start;
      start += times[f][q];
      times[f][q] = starts[first + q];  // from here on the place of its next use
    }
    for (int64 b = 0; b < examples; ++b) {
      const int64 n = b * fields + f;
      const int32 place = times[f][pairs[n]]++;
      uses[place] = b;
      factors[place] = x_of[n];
      pairs[n] += first;
    }
  });
}
DEEPFM_REGISTER("DeepfmPairs", PairsOp);

REGISTER_OP("DeepfmFirstLayer")
    .Input("weights: float")     // [U]
    .Input("embeddings: float")  // [U, K]
    .Input("kernel: float")      // [F K, H]
    .Input("x: float")           // [N]
    .Input("pairs: int32")       // [N]
    .Input("rows: int32")        // [Q]
    .Input("fields: int32")      // [F + 1]
    .Input("starts: int32")      // [Q + 1], for the gradient, as what follows
    .Input("uses: int32")        // [N]
    .Input("factors: float")     // [N]
    .Output("y: float")          // [B, H]
    .Output("fm: float")         // [B]
    .Output("sums: float")       // [B, K]
    .SetShapeFn(Ranks<2, 1, 2>)
    .Doc("The first layer's products; first_order + second_order; and the sum of each example's "
         "scaled rows.");

// The sizes of a batch. Widths are of rows that lie side by side: [H, K], each padded.
struct Sizes {
  int64 ids, width, fields, units, values, pairs, examples;
  int64 padded_units, padded_width, stride;
};

// Inputs 0 to 2 of both operators are the rows and the layer's kernel, input 3 is float32 [N].
// What DeepfmPairs has returned is not looked through again.
Status TakeSizes(OpKernelContext* context, const Tensor& fields, const Tensor& rows, Sizes* sizes) {
  const Tensor &weights = context->input(0), &embeddings = context->input(1),
               &kernel = context->input(2), &x = context->input(3);
  if (embeddings.dims() != 2 || weights.shape() != TensorShape({embeddings.dim_size(0)}) ||
      kernel.dims() != 2 || x.dims() != 1 || fields.dims() != 1 || rows.dims() != 1 ||
      fields.dim_size(0) < 2 ||
      kernel.dim_size(0) != (fields.dim_size(0) - 1) * embeddings.dim_size(1)) {
    return errors::InvalidArgument("shapes of rows and of the first layer do not fit");
  }
  Sizes& s = *sizes;
  s.ids = embeddings.dim_size(0), s.width = embeddings.dim_size(1);
  s.fields = fields.dim_size(0) - 1, s.units = kernel.dim_size(1);
  s.values = x.dim_size(0), s.pairs = rows.dim_size(0), s.examples = s.values / s.fields;
  s.padded_units = Padded(s.units), s.padded_width = Padded(s.width);
  s.stride = s.padded_units + s.padded_width;
  return Status::OK();
}

// Copies a matrix [n, width] into the columns of rows that are `stride` apart, filled up with 0.
void CopyPadded(const float* from, int64 n, int64 width, int64 padded, int64 stride, float* to) {
  for (int64 i = 0; i < n; ++i) {
    std::copy(from + i * width, from + (i + 1) * width, to + i * stride);
    std::fill(to + i * stride + width, to + i * stride + padded, 0.0f);
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DEEPFM_FOR_VECTORS(name, parameters, arguments)                                          \
  __attribute__((target("avx512f,fma"))) void name##Of16 parameters {                            \
    name##Of<Floats16> arguments;                                                                \
  }                                                                                              \
  __attribute__((target("avx2,fma"))) void name##Of8 parameters { name##Of<Floats8> arguments; } \
  void name##Of4 parameters { name##Of<Floats4> arguments; }                                     \
  void name parameters {                                                                         \
    static const auto best = __builtin_cpu_supports("avx512f") ? name##Of16                      \
                             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")   \
                                 ? name##Of8                                                     \
                                 : name##Of4;                                                    \
    best arguments;                                                                              \
  }
#else
#define DEEPFM_FOR_VECTORS(name, parameters, arguments) \
  void name parameters { name##Of<Floats4> arguments; }
#endif

DEEPFM_BEGIN_FUSED

// Of the pairs of a field, rows [v W_f, v], of which v is there.
template <typename V>
DEEPFM_INLINE void ProjectOf(const Sizes& s, int64 pairs, const float* kernel, float* projected) {
  for (int64 q = 0; q < pairs; ++q) {
    std::fill(projected + q * s.stride, projected + q * s.stride + s.padded_units, 0.0f);
  }
  AddProduct<V>(pairs, s.width, s.padded_units, {projected + s.padded_units, s.stride, 1}, kernel,
                s.padded_units, projected, s.stride);
}
DEEPFM_FOR_VECTORS(Project,
                   (const Sizes& s, int64 pairs, const float* kernel, float* projected),
                   (s, pairs, kernel, projected))

DEEPFM_FOR_VECTORS(SumRows,
                   (int64 count, const int32* which, const float* factors, const float* rows,
                    int64 width, float* sum),
                   (count, which, factors, rows, width, sum))

// What a block of a field's pairs adds to the kernel's gradient, and the gradient of their rows.
constexpr int64 kBlock = 24;  // pairs: their gradients stay in the cache

template <typename V>
DEEPFM_INLINE void BackOf(const Sizes& s, int64 pairs, const float* g, const float* v,
                          const float* transposed, float* by_kernel, float* by_rows) {
  AddProduct<V>(pairs, s.units, s.padded_width, {g, s.stride, 1}, transposed, s.padded_width,
                by_rows, s.padded_width);
  AddProduct<V>(s.width, pairs, s.padded_units, {v, 1, s.padded_width}, g, s.stride, by_kernel,
                s.padded_units);
}
DEEPFM_FOR_VECTORS(Back,
                   (const Sizes& s, int64 pairs, const float* g, const float* v,
                    const float* transposed, float* by_kernel, float* by_rows),
                   (s, pairs, g, v, transposed, by_kernel, by_rows))

DEEPFM_END_FUSED

void FirstLayerOp(OpKernelContext* context) {
  Sizes s;
  OP_REQUIRES_OK(context, TakeSizes(context, context->input(6), context->input(5), &s));
  const float *weights = context->input(0).flat<float>().data(),
              *embeddings = context->input(1).flat<float>().data(),
              *kernel = context->input(2).flat<float>().data(),
              *x = context->input(3).flat<float>().data();
  const int32 *pairs = context->input(4).flat<int32>().data(),
              *rows = context->input(5).flat<int32>().data(),
              *fields = context->input(6).flat<int32>().data();
  float *y, *fm, *sums;
  OP_REQUIRES_OK(context, Allocate(context, 0, {s.examples, s.units}, &y));
  OP_REQUIRES_OK(context, Allocate(context, 1, {s.examples}, &fm));
  OP_REQUIRES_OK(context, Allocate(context, 2, {s.examples, s.width}, &sums));
  Tensor memory;
  OP_REQUIRES_OK(context,
                 context->allocate_temp(DT_FLOAT, TensorShape({s.pairs, s.stride}), &memory));
  float* projected = memory.flat<float>().data();
  std::vector<float> of_rows(2 * s.pairs);  // the weight and the squared length of each pair's row
  ForEach(context, s.fields, [&](int64 f) {
    const int64 first = fields[f], n = fields[f + 1] - first;
    float* to = projected + first * s.stride;
    for (int64 q = 0; q < n; ++q) {
      const float* row = embeddings + rows[first + q] * s.width;
      CopyPadded(row, 1, s.width, s.padded_width, s.stride, to + q * s.stride + s.padded_units);
      float squares = 0;
      for (int64 k = 0; k < s.width; ++k) squares += row[k] * row[k];
      of_rows[2 * (first + q)] = weights[rows[first + q]];
      of_rows[2 * (first + q) + 1] = squares;
    }
    const float* own = kernel + f * s.width * s.units;
    std::vector<float> padded;
    if (s.units != s.padded_units) {
      padded.resize(s.width * s.padded_units);
      CopyPadded(own, s.width, s.units, s.padded_units, s.padded_units, padded.data());
      own = padded.data();
    }
    Project(s, n, own, to);
  });
  Divide(context, s.examples, 4 * s.fields * s.stride, [&](int64 begin, int64 end) {
    std::vector<float> sum(s.stride);
    for (int64 b = begin; b < end; ++b) {
      const int32* own = pairs + b * s.fields;
      const float* factors = x + b * s.fields;
      SumRows(s.fields, own, factors, projected, s.stride, sum.data());
      float linear = 0, squares = 0, products = 0;
      for (int64 f = 0; f < s.fields; ++f) {
        linear += factors[f] * of_rows[2 * own[f]];
        squares += factors[f] * factors[f] * of_rows[2 * own[f] + 1];
      }
      const float* together = sum.data() + s.padded_units;
      for (int64 k = 0; k < s.width; ++k) products += together[k] * together[k];
      std::copy(sum.data(), sum.data() + s.units, y + b * s.units);
      std::copy(together, together + s.width, sums + b * s.width);
      fm[b] = linear + 0.5f * (products - squares);
    }
  });
}
DEEPFM_REGISTER("DeepfmFirstLayer", FirstLayerOp);

REGISTER_OP("DeepfmFirstLayerGrad")
    .Input("weights: float")        // [U]
    .Input("embeddings: float")     // [U, K]
    .Input("kernel: float")         // [F K, H]
    .Input("factors: float")        // [N]
    .Input("rows: int32")           // [Q]
    .Input("fields: int32")         // [F + 1]
    .Input("starts: int32")         // [Q + 1]
    .Input("uses: int32")           // [N]
    .Input("sums: float")           // [B, K]
    .Input("by_y: float")           // [B, H]
    .Input("by_fm: float")          // [B]
    .Output("by_weights: float")    // [U]
    .Output("by_embeddings: float")  // [U, K]
    .Output("by_kernel: float")     // [F K, H]
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->input(i));
      return Status::OK();
    })
    .Doc("The gradient of DeepfmFirstLayer with respect to the rows and the kernel.");

void FirstLayerGradOp(OpKernelContext* context) {
  Sizes s;
  OP_REQUIRES_OK(context, TakeSizes(context, context->input(5), context->input(4), &s));
  const float *embeddings = context->input(1).flat<float>().data(),
              *kernel = context->input(2).flat<float>().data(),
              *factors = context->input(3).flat<float>().data(),
              *sums = context->input(8).flat<float>().data(),
              *by_y = context->input(9).flat<float>().data(),
              *by_fm = context->input(10).flat<float>().data();
  const int32 *rows = context->input(4).flat<int32>().data(),
              *fields = context->input(5).flat<int32>().data(),
              *starts = context->input(6).flat<int32>().data(),
              *uses = context->input(7).flat<int32>().data();
  float *by_weights, *by_embeddings, *by_kernel;
  OP_REQUIRES_OK(context, Allocate(context, 0, {s.ids}, &by_weights));
  OP_REQUIRES_OK(context, Allocate(context, 1, {s.ids, s.width}, &by_embeddings));
  OP_REQUIRES_OK(context, Allocate(context, 2, {s.fields * s.width, s.units}, &by_kernel));
  Tensor memory;
  OP_REQUIRES_OK(context,
                 context->allocate_temp(DT_FLOAT, TensorShape({s.examples, s.stride}), &memory));
  float* gradients = memory.flat<float>().data();  // [by_y, by_fm sums] of each example
  Divide(context, s.examples, s.stride, [&](int64 begin, int64 end) {
    for (int64 b = begin; b < end; ++b) {
      float* to = gradients + b * s.stride;
      CopyPadded(by_y + b * s.units, 1, s.units, s.padded_units, s.stride, to);
      to += s.padded_units;
      CopyPadded(sums + b * s.width, 1, s.width, s.padded_width, s.stride, to);
      for (int64 k = 0; k < s.width; ++k) to[k] *= by_fm[b];
    }
  });
  // An id that is in several fields has several pairs, whose gradients are added up at the end.
  bool shared = s.pairs != s.ids;
  std::vector<bool> taken(s.ids);
  for (int64 q = 0; q < s.pairs && !shared; ++q) {
    shared = taken[rows[q]];
    taken[rows[q]] = true;
  }
  std::vector<float> of_pairs(shared ? s.pairs * (s.width + 1) : 0);
  ForEach(context, s.fields, [&](int64 f) {
    const float* own = kernel + f * s.width * s.units;
    std::vector<float> transposed(s.units * s.padded_width), total(s.width * s.padded_units),
        g(kBlock * s.stride), v(kBlock * s.padded_width), by_rows(kBlock * s.padded_width);
    for (int64 k = 0; k < s.width; ++k) {
      for (int64 h = 0; h < s.units; ++h) {
        transposed[h * s.padded_width + k] = own[k * s.units + h];
      }
    }
    for (int64 first = fields[f]; first < fields[f + 1]; first += kBlock) {
      const int64 n = std::min<int64>(kBlock, fields[f + 1] - first);
      for (int64 i = 0; i < n; ++i) {
        const int64 q = first + i, begin = starts[q], count = starts[q + 1] - begin;
        float* sum = g.data() + i * s.stride;
        SumRows(count, uses + begin, factors + begin, gradients, s.stride, sum);
        const float* row = embeddings + rows[q] * s.width;
        CopyPadded(row, 1, s.width, s.padded_width, s.padded_width, v.data() + i * s.padded_width);
        float linear = 0, squares = 0;
        for (int64 j = begin; j < begin + count; ++j) {
          linear += by_fm[uses[j]] * factors[j];
          squares += by_fm[uses[j]] * factors[j] * factors[j];
        }
        (shared ? of_pairs[s.pairs * s.width + q] : by_weights[rows[q]]) = linear;
        float* __restrict to = by_rows.data() + i * s.padded_width;
        for (int64 k = 0; k < s.width; ++k) to[k] = sum[s.padded_units + k] - squares * row[k];
        std::fill(to + s.width, to + s.padded_width, 0.0f);
      }
      Back(s, n, g.data(), v.data(), transposed.data(), total.data(), by_rows.data());
      for (int64 i = 0; i < n; ++i) {
        const float* from = by_rows.data() + i * s.padded_width;
        float* to = shared ? of_pairs.data() + (first + i) * s.width
                           : by_embeddings + rows[first + i] * s.width;
        std::copy(from, from + s.width, to);
      }
    }
    for (int64 k = 0; k < s.width; ++k) {
      const float* from = total.data() + k * s.padded_units;
      std::copy(from, from + s.units, by_kernel + (f * s.width + k) * s.units);
    }
  });
  if (!shared) return;
  std::fill(by_weights, by_weights + s.ids, 0.0f);
  std::fill(by_embeddings, by_embeddings + s.ids * s.width, 0.0f);
  for (int64 q = 0; q < s.pairs; ++q) {
    const float* from = of_pairs.data() + q * s.width;
    float* __restrict to = by_embeddings + rows[q] * s.width;
    for (int64 k = 0; k < s.width; ++k) to[k] += from[k];
    by_weights[rows[q]] += of_pairs[s.pairs * s.width + q];
  }
}
DEEPFM_REGISTER("DeepfmFirstLayerGrad", FirstLayerGradOp);

}  // namespace deepfm
