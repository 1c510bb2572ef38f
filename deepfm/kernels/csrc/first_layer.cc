// The MLP's first layer and the FM on the distinct rows of a batch. The layer is linear and stands
// before any nonlinearity, so with x_bf the value and v_q the row of pair q = (field, id)
//
//     y_b = sum_f x_bf (v_q W_f)            each distinct pair is projected once
//     dW_f = sum_q v_q^T g_q,  dv_q = g_q W_f^T,  g_q = sum of x_bf dy_b over the uses of q
//
// which is what the whole [B, F K] matrix gives, apart from rounding, at the cost of its distinct
// rows. The sums of the FM are those of wider rows: [v_q W_f, v_q] going forward, and of
// [dy_b, dfm_b s_b] going back, s_b being the sum of the example's scaled rows. A field of several
// values is pooled: its e_bf, which is squared in the FM, is the sum of its scaled rows.
//
// B: examples. F: fields. N: values, those of an example side by side, in the order of their fields.
// K: embedding size. H: units. U: distinct ids. Q: distinct pairs, in the order of their fields.
#include "kernels.h"
#include "products.h"
#include "tables.h"

namespace deepfm {

REGISTER_OP("DeepfmPairs")
    .Input("where: int32")     // [N], which distinct id each value has
    .Input("x: float")         // [N]
    .Input("counts: int32")    // [B F], the number of values of each field; [0] if each has one
    .Input("num_ids: int32")   // []
    .Output("pairs: int32")    // [N], the pair of each value
    .Output("by: float")       // [N], the factor of each value
    .Output("begins: int32")   // [B F + 1], the first value of each field, and N; [0] if n = b F + f
    .Output("rows: int32")     // [Q], the distinct id of each pair
    .Output("fields: int32")   // [F + 1], the first pair of each field, and Q
    .Output("starts: int32")   // [Q + 1], the first use of each pair, and N
    .Output("uses: int32")     // [N], the example of each use
    .Output("factors: float")  // [N], the factor of each use
    .Attr("field_size: int >= 1")
    .Attr("mean: bool")  // factors are x / counts
    .SetShapeFn(Ranks<1>)
    .Doc("The distinct (field, id) pairs of a batch, and the uses of each.");

// The values of each field of each example.
struct Places {
  int64 fields;
  const int32* begins;  // null if each field has one

  int64 begin(int64 b, int64 f) const {
    const int64 place = b * fields + f;
    return begins ? begins[place] : place;
  }
  int64 end(int64 b, int64 f) const { return begin(b, f + 1); }
};

// Output 2 of DeepfmPairs; and output 1, if it is not just x.
Status Begin(OpKernelContext* context, const Tensor& counts, int64 fields, Places* places) {
  const Tensor& x = context->input(1);
  const int64 values = x.dim_size(0), n = counts.dim_size(0);
  const int32* count = counts.vec<int32>().data();
  const bool one_each = std::all_of(count, count + n, [](int32 c) { return c == 1; });
  *places = {fields, nullptr};
  int32* begins;
  TF_RETURN_IF_ERROR(Allocate(context, 2, {one_each ? 0 : n + 1}, &begins));
  if (n % fields != 0 || (one_each && (values % fields != 0 || (n != 0 && n != values)))) {
    return errors::InvalidArgument("a number of values that fields cannot have");
  }
  if (!one_each) {
    places->begins = begins;
    int64 end = begins[0] = 0;
    for (int64 i = 0; i < n && end <= values; ++i) {
      end = count[i] < 0 ? values + 1 : end + count[i];
      begins[i + 1] = end;
    }
    if (end != values) return errors::InvalidArgument("counts do not fit the values");
  }
  if (one_each || !Attribute<bool>(context, "mean")) {
    context->set_output(1, x);
    return Ok();
  }
  float* by;
  TF_RETURN_IF_ERROR(Allocate(context, 1, {values}, &by));
  for (int64 i = 0; i < n; ++i) {
    for (int64 v = begins[i]; v < begins[i + 1]; ++v) by[v] = x.vec<float>()(v) / count[i];
  }
  return Ok();
}

void PairsOp(OpKernelContext* context) {
  const int64 fields = Attribute<int64>(context, "field_size");
  const Tensor &where = context->input(0), &x = context->input(1), &counts = context->input(2),
               &ids = context->input(3);
  OP_REQUIRES(context,
              where.dims() == 1 && x.shape() == where.shape() && counts.dims() == 1 &&
                  ids.dims() == 0 && where.dim_size(0) < (int64{1} << 31),
              errors::InvalidArgument("shapes of values do not fit"));
  const int64 values = where.dim_size(0), num_ids = ids.scalar<int32>()();
  Places places;
  OP_REQUIRES_OK(context, Begin(context, counts, fields, &places));
  const int64 examples = (places.begins ? counts.dim_size(0) : values) / fields;
  const int32* id_of = where.vec<int32>().data();
  const float* by = context->mutable_output(1)->vec<float>().data();
  OP_REQUIRES_OK(context, CheckPlaces(id_of, values, num_ids));
  int32 *pairs, *fields_of, *uses;
  float* factors;
  OP_REQUIRES_OK(context, Allocate(context, 0, {values}, &pairs));
  OP_REQUIRES_OK(context, Allocate(context, 4, {fields + 1}, &fields_of));
  OP_REQUIRES_OK(context, Allocate(context, 6, {values}, &uses));
  OP_REQUIRES_OK(context, Allocate(context, 7, {values}, &factors));
  // Field by field, each in the order of the first uses, so that what one needs stays in the cache.
  // An id's last pair is of this field if it is not below the field's first. That cannot be
  // predicted, so there is no branch on it.
  std::vector<int32> last_of(num_ids, -1), found(values + 1), begins(values + 1);
  int32 total = 0, end = 0;  // of the pairs, and of the uses of all, so far
  for (int64 f = 0; f < fields; ++f) {
    const int32 first = fields_of[f] = total;
    const auto each_value = [&](const auto& take) {
      for (int64 b = 0; b < examples; ++b) {
        for (int64 n = places.begin(b, f); n < places.end(b, f); ++n) take(b, n);
      }
    };
    each_value([&](int64, int64 n) {
      const int32 id = id_of[n], last = last_of[id];
      const bool is_new = last < first;
      const int32 pair = is_new ? total : last;
      last_of[id] = pair;
      found[total] = id;
      total += is_new;
      ++begins[pair + 1];
      pairs[n] = pair;
    });
    // From the numbers of uses to where they begin.
    for (int32 q = first; q < total; ++q) {
      const int32 count = begins[q + 1];
      begins[q + 1] = end;
      end += count;
    }
    // Once its uses are written, the begin of a pair is that of the next one.
    each_value([&](int64 b, int64 n) {
      const int32 use = begins[pairs[n] + 1]++;
      uses[use] = b;
      factors[use] = by[n];
    });
  }
  fields_of[fields] = total;
  int32 *rows, *starts;
  OP_REQUIRES_OK(context, Allocate(context, 3, {total}, &rows));
  OP_REQUIRES_OK(context, Allocate(context, 5, {total + 1}, &starts));
  std::copy(found.begin(), found.begin() + total, rows);
  std::copy(begins.begin(), begins.begin() + total + 1, starts);
}
DEEPFM_REGISTER("DeepfmPairs", PairsOp);

REGISTER_OP("DeepfmFirstLayer")
    .Input("weights: float")     // [U]
    .Input("embeddings: float")  // [U, K]
    .Input("kernel: float")      // [F K, H]
    .Input("pairs: int32")       // [N], as DeepfmPairs returns them, and all that follow
    .Input("by: float")          // [N]
    .Input("begins: int32")      // [B F + 1] or [0]
    .Input("rows: int32")        // [Q]
    .Input("fields: int32")      // [F + 1]
    .Input("starts: int32")      // [Q + 1], for the gradient, as what follows
    .Input("uses: int32")        // [N]
    .Input("factors: float")     // [N]
    .Output("y: float")          // [B, H]
    .Output("fm: float")         // [B]
    .Output("sums: float")       // [B, K]
    .Output("projected: float")  // [Q, H + K, both padded]
    .SetShapeFn(Ranks<2, 1, 2, 2>)
    .Doc("The first layer's products; first_order + second_order; the sum of each example's scaled "
         "rows; and for the gradient the rows [v W_f, v] of the pairs.");

// What the operators take: those of a batch's pairs as their inputs 0 to 7. Widths are of rows that
// lie side by side: [H, K], each padded. What DeepfmPairs has returned is not looked through again.
struct Layer {
  int64 ids, width, units, pairs, examples;
  int64 padded_units, padded_width, stride;
  Places places;
  const float *weights, *embeddings, *kernel, *by;
  const int32 *pair_of, *rows, *fields;

  Status Take(OpKernelContext* context) {
    const auto input = [context](int i) -> const Tensor& { return context->input(i); };
    const auto floats = [&](int i) { return input(i).flat<float>().data(); };
    const auto numbers = [&](int i) { return input(i).flat<int32>().data(); };
    const int64 all_fields = input(7).dim_size(0) - 1, begins = input(5).dim_size(0);
    if (input(1).dims() != 2 || input(0).shape() != TensorShape({input(1).dim_size(0)}) ||
        input(2).dims() != 2 || input(7).dims() != 1 || all_fields < 1 ||
        input(2).dim_size(0) != all_fields * input(1).dim_size(1)) {
      return errors::InvalidArgument("shapes of rows and of the first layer do not fit");
    }
    weights = floats(0), embeddings = floats(1), kernel = floats(2), by = floats(4);
    pair_of = numbers(3), rows = numbers(6), fields = numbers(7);
    places = {all_fields, begins ? numbers(5) : nullptr};
    ids = input(1).dim_size(0);
    pairs = input(6).dim_size(0);
    examples = (begins ? begins - 1 : input(3).dim_size(0)) / all_fields;
    SetWidths(input(1).dim_size(1), input(2).dim_size(1));
    return Ok();
  }

  void SetWidths(int64 of_row, int64 of_layer) {
    width = of_row, units = of_layer;
    padded_width = Padded(width), padded_units = Padded(units);
    stride = padded_units + padded_width;
  }
};

DEEPFM_BEGIN_FUSED

template <typename V>
DEEPFM_INLINE void ProjectOf(const Layer& s, int64 pairs, const float* kernel, float* projected,
                             float* squares) {
  constexpr int64 n = sizeof(V) / sizeof(float);
  for (int64 q = 0; q < pairs; ++q) {
    V sums = {};
    for (int64 k = 0; k < s.padded_width; k += n) {
      const V row = Load<V>(projected + q * s.stride + s.padded_units + k);
      sums += row * row;
    }
    float sum = 0;
    for (int64 k = 0; k < n; ++k) sum += sums[k];
    squares[2 * q] = sum;
  }
  Product<V, false>(pairs, s.width, s.padded_units, {projected + s.padded_units, s.stride, 1},
                    kernel, s.padded_units, projected, s.stride);
}
DEEPFM_FOR_VECTORS(Project)
DEEPFM_FOR_VECTORS(SumRows)

// What a block of a field's pairs adds to the kernel's gradient, and the gradient of their rows.
constexpr int64 kBlock = 24;  // pairs: their gradients stay in the cache

template <typename V>
DEEPFM_INLINE void BackOf(const Layer& s, int64 pairs, const float* g, const float* squares,
                          const float* v, const float* transposed, float* by_kernel,
                          float* by_rows) {
  constexpr int64 n = sizeof(V) / sizeof(float);
  for (int64 i = 0; i < pairs; ++i) {
    const int64 at = i * s.stride;
    for (int64 k = 0; k < s.padded_width; k += n) {
      const V sum = Load<V>(g + at + s.padded_units + k), row = Load<V>(v + at + k);
      Store(sum - squares[i] * row, by_rows + i * s.padded_width + k);
    }
  }
  Product<V>(pairs, s.units, s.padded_width, {g, s.stride, 1}, transposed, s.padded_width, by_rows,
             s.padded_width);
  Product<V>(s.width, pairs, s.padded_units, {v, 1, s.stride}, g, s.stride, by_kernel,
             s.padded_units);
}
DEEPFM_FOR_VECTORS(Back)

DEEPFM_END_FUSED

// Of n rows with these ids and field f: rows [v W_f, v], and the weight and the squared length of
// each, [n, 2]. They lie anywhere in memory, so that each is fetched some rows ahead.
void ProjectRows(const Layer& s, int64 f, int64 n, const int32* id, float* to, float* of_rows) {
  constexpr int64 kAhead = 12;
  if (n == 0) return;
  for (int64 i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch<0>(s.embeddings + id[i + kAhead] * s.width, s.width);
    CopyPadded(s.embeddings + id[i] * s.width, 1, s.width, s.padded_width, s.stride,
               to + i * s.stride + s.padded_units);
    of_rows[2 * i] = s.weights[id[i]];
  }
  const float* kernel = s.kernel + f * s.width * s.units;
  std::vector<float> padded;
  if (s.units != s.padded_units) {
    padded.resize(s.width * s.padded_units);
    CopyPadded(kernel, s.width, s.units, s.padded_units, s.padded_units, padded.data());
    kernel = padded.data();
  }
  Project(s, n, kernel, to, of_rows + 1);
}

// Sums the rows [v W_f, v] of an example's values; returns first_order + second_order. Scratch is
// of `padded_width`.
float SumExample(const Layer& s, int64 b, const float* projected, const float* of_rows,
                 float* scratch, float* sum) {
  const int64 all = s.places.fields, begin = s.places.begin(b, 0), end = s.places.end(b, all - 1);
  const int32* own = s.pair_of + begin;
  const float* by = s.by + begin;
  const int64 values = end - begin;
  float* together = sum + s.padded_units;
  float linear = 0, squares = 0, products = 0;
  if (!s.places.begins) {
    SumRows(values, own, by, projected, s.stride, s.stride, sum);
    for (int64 i = 0; i < values; ++i) {
      linear += by[i] * of_rows[2 * own[i]];
      squares += by[i] * by[i] * of_rows[2 * own[i] + 1];
    }
  } else {
    SumRows(values, own, by, projected, s.stride, s.padded_units, sum);
    for (int64 i = 0; i < values; ++i) linear += by[i] * of_rows[2 * own[i]];
    std::fill(together, together + s.padded_width, 0.0f);
    for (int64 f = 0; f < all; ++f) {
      const int64 first = s.places.begin(b, f), count = s.places.end(b, f) - first;
      if (count == 0) continue;
      SumRows(count, s.pair_of + first, s.by + first, projected + s.padded_units, s.stride,
              s.padded_width, scratch);
      for (int64 k = 0; k < s.width; ++k) {
        together[k] += scratch[k];
        squares += scratch[k] * scratch[k];
      }
    }
  }
  for (int64 k = 0; k < s.width; ++k) products += together[k] * together[k];
  return linear + 0.5f * (products - squares);
}

// Writes the outputs of all examples; `sums`, of their scaled rows, may be null.
void SumExamples(OpKernelContext* context, const Layer& s, const float* projected,
                 const float* of_rows, float* y, float* fm, float* sums) {
  Divide(context, s.examples, 4 * s.places.fields * s.stride, [&](int64 begin, int64 end) {
    std::vector<float> sum(s.stride), scratch(s.padded_width);
    for (int64 b = begin; b < end; ++b) {
      fm[b] = SumExample(s, b, projected, of_rows, scratch.data(), sum.data());
      const float* together = sum.data() + s.padded_units;
      std::copy(sum.data(), sum.data() + s.units, y + b * s.units);
      if (sums != nullptr) std::copy(together, together + s.width, sums + b * s.width);
    }
  });
}

void FirstLayerOp(OpKernelContext* context) {
  Layer s;
  OP_REQUIRES_OK(context, s.Take(context));
  float *y, *fm, *sums;
  OP_REQUIRES_OK(context, Allocate(context, 0, {s.examples, s.units}, &y));
  OP_REQUIRES_OK(context, Allocate(context, 1, {s.examples}, &fm));
  OP_REQUIRES_OK(context, Allocate(context, 2, {s.examples, s.width}, &sums));
  float* projected;
  OP_REQUIRES_OK(context, Allocate(context, 3, {s.pairs, s.stride}, &projected));
  std::vector<float> of_rows(2 * s.pairs);
  ForEach(context, s.places.fields, [&](int64 f) {
    const int64 first = s.fields[f], n = s.fields[f + 1] - first;
    ProjectRows(s, f, n, s.rows + first, projected + first * s.stride, of_rows.data() + 2 * first);
  });
  SumExamples(context, s, projected, of_rows.data(), y, fm, sums);
}
DEEPFM_REGISTER("DeepfmFirstLayer", FirstLayerOp);

REGISTER_OP("DeepfmFirstLayerGrad")  // its first inputs are those of DeepfmFirstLayer
    .Input("weights: float").Input("embeddings: float").Input("kernel: float")
    .Input("pairs: int32").Input("by: float").Input("begins: int32").Input("rows: int32")
    .Input("fields: int32").Input("starts: int32").Input("uses: int32").Input("factors: float")
    .Input("sums: float")           // [B, K]
    .Input("by_y: float")           // [B, H]
    .Input("by_fm: float")          // [B]
    .Input("projected: float")      // [Q, H + K, both padded]
    .Output("by_weights: float")    // [U]
    .Output("by_embeddings: float")  // [U, K]
    .Output("by_kernel: float")     // [F K, H]
    .SetShapeFn(LikeInputs)
    .Doc("The gradient of DeepfmFirstLayer with respect to the rows and the kernel.");

// What each example adds to the gradient of a field's pooled sum e_bf by the FM:
// by_fm_b (s_b - e_bf), [B, padded_width]. The rows `v` of all pairs are `stride` apart.
void GradientsOfPooled(const Layer& s, int64 f, const float* v, const float* by_fm,
                       const float* sums, float* of_pooled) {
  for (int64 b = 0; b < s.examples; ++b) {
    const int64 first = s.places.begin(b, f), count = s.places.end(b, f) - first;
    if (count == 0) continue;  // nothing uses it
    float* to = of_pooled + b * s.padded_width;
    SumRows(count, s.pair_of + first, s.by + first, v, s.stride, s.padded_width, to);
    for (int64 k = 0; k < s.width; ++k) to[k] = by_fm[b] * (sums[b * s.width + k] - to[k]);
  }
}

void FirstLayerGradOp(OpKernelContext* context) {
  Layer s;
  OP_REQUIRES_OK(context, s.Take(context));
  const int32 *starts = context->input(8).flat<int32>().data(),
              *uses = context->input(9).flat<int32>().data();
  const float *factors = context->input(10).flat<float>().data(),
              *sums = context->input(11).flat<float>().data(),
              *by_y = context->input(12).flat<float>().data(),
              *by_fm = context->input(13).flat<float>().data(),
              *projected = context->input(14).flat<float>().data();
  float *by_weights, *by_embeddings, *by_kernel;
  OP_REQUIRES_OK(context, Allocate(context, 0, {s.ids}, &by_weights));
  OP_REQUIRES_OK(context, Allocate(context, 1, {s.ids, s.width}, &by_embeddings));
  OP_REQUIRES_OK(context, Allocate(context, 2, {s.places.fields * s.width, s.units}, &by_kernel));
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
    shared = taken[s.rows[q]];
    taken[s.rows[q]] = true;
  }
  std::vector<float> of_pairs(shared ? s.pairs * (s.width + 1) : 0);
  ForEach(context, s.places.fields, [&](int64 f) {
    const float* own = s.kernel + f * s.width * s.units;
    const int64 all = s.fields[f + 1] - s.fields[f];
    const bool pooled = s.places.begins != nullptr;
    const int64 to_pad = s.units == s.padded_units ? 0 : s.width * s.padded_units;
    std::vector<float> transposed(s.units * s.padded_width), padded(to_pad),
        g(kBlock * s.stride), by_rows(kBlock * s.padded_width), squares(kBlock),
        of_pooled(pooled ? s.examples * s.padded_width : 0);
    float* by_own = by_kernel + f * s.width * s.units;
    float* total = padded.empty() ? by_own : padded.data();
    std::fill(total, total + s.width * s.padded_units, 0.0f);
    Transpose(own, s.width, s.units, s.padded_width, transposed.data());
    const float* v = projected + s.padded_units;
    if (pooled) GradientsOfPooled(s, f, v, by_fm, sums, of_pooled.data());
    v += s.fields[f] * s.stride;
    for (int64 first = 0; first < all; first += kBlock) {
      const int64 n = std::min<int64>(kBlock, all - first);
      for (int64 i = 0; i < n; ++i) {
        const int64 q = s.fields[f] + first + i, begin = starts[q], count = starts[q + 1] - begin;
        float* sum = g.data() + i * s.stride;
        float linear = 0, of_squares = 0;
        for (int64 j = begin; j < begin + count; ++j) {
          const float by = by_fm[uses[j]] * factors[j];
          linear += by;
          of_squares += by * factors[j];
        }
        squares[i] = pooled ? 0 : of_squares;
        (shared ? of_pairs[s.pairs * s.width + q] : by_weights[s.rows[q]]) = linear;
        if (pooled) {
          SumRows(count, uses + begin, factors + begin, gradients, s.stride, s.padded_units, sum);
          SumRows(count, uses + begin, factors + begin, of_pooled.data(), s.padded_width,
                  s.padded_width, sum + s.padded_units);
        } else {
          SumRows(count, uses + begin, factors + begin, gradients, s.stride, s.stride, sum);
        }
      }
      Back(s, n, g.data(), squares.data(), v + first * s.stride, transposed.data(), total,
           by_rows.data());
      for (int64 i = 0; i < n; ++i) {
        const int64 q = s.fields[f] + first + i;
        const float* from = by_rows.data() + i * s.padded_width;
        float* to = shared ? of_pairs.data() + q * s.width : by_embeddings + s.rows[q] * s.width;
        std::copy(from, from + s.width, to);
      }
    }
    for (int64 k = 0; k < s.width && !padded.empty(); ++k) {
      const float* from = padded.data() + k * s.padded_units;
      std::copy(from, from + s.units, by_own + k * s.units);
    }
  });
  if (!shared) return;
  std::fill(by_weights, by_weights + s.ids, 0.0f);
  std::fill(by_embeddings, by_embeddings + s.ids * s.width, 0.0f);
  for (int64 q = 0; q < s.pairs; ++q) {
    const float* from = of_pairs.data() + q * s.width;
    float* __restrict to = by_embeddings + s.rows[q] * s.width;
    for (int64 k = 0; k < s.width; ++k) to[k] += from[k];
    by_weights[s.rows[q]] += of_pairs[s.pairs * s.width + q];
  }
}
DEEPFM_REGISTER("DeepfmFirstLayerGrad", FirstLayerGradOp);

// The same for a model that is applied: while its weights stay as they are, a (field, id) pair has
// the same row [v W_f, v] in each batch, so the rows are kept from batch to batch, and only pairs that
// are not there are projected. Each row and each example is computed as above, to the bit, whatever
// else is in its batch.
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

// Not members: C++14 would want their definitions.
constexpr int64 kExamples = 512;  // whose rows are found at once
constexpr int64 kKept = 512;      // rows of a field; with more the second cache overflows
constexpr int64 kMost = kKept + kExamples;  // as each example may have another one

// Which rows hold the pairs of a field. An id takes the slot of another whose hash is the same, and
// then that one is new again, so that finding a row takes no search, and no branch.
struct RowsOfField {
  // Writes the rows of ids, plus `base`; what belongs to each example is `stride` apart.
  void Find(const int64* own, int64 examples, int64 stride, int32 base, int32* rows) {
    int32 *slot_of = slots.data(), *known = ids.data(), next = used;
    for (int64 i = 0; i < examples * stride; i += stride) {
      const int32 id = own[i];
      int32* slot = slot_of + ((static_cast<uint64>(id) * 0x9e3779b97f4a7c15ull) >> (64 - kBits));
      int32 row = *slot;
      const bool is_new = (row >= next) | (known[row] != id);
      row = is_new ? next : row;
      known[next] = id;
      next += is_new;
      *slot = row;
      rows[i] = base + row;
    }
    used = next;
  }

  static constexpr int kBits = 12;
  std::vector<int32> slots = std::vector<int32>(size_t{1} << kBits);  // perhaps a row of that hash
  std::vector<int32> ids = std::vector<int32>(kMost + 1);             // of each row
  int32 used = 0;                                                     // rows
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
  return Ok();
}

class AppliedFirstLayer : public OpKernel {
 public:
  explicit AppliedFirstLayer(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
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
    s.SetWidths(embeddings_.dim_size(1), kernel.dim_size(1));
    s.places = {fields_, nullptr};
    s.weights = weights_.flat<float>().data(), s.embeddings = embeddings_.flat<float>().data();
    s.kernel = kernel.flat<float>().data();
    if (!same) {
      projected_.reset(new float[fields_ * kMost * s.stride]);
      of_rows_.reset(new float[2 * fields_ * kMost]);
      known_.assign(fields_, RowsOfField());
    }
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
      SumExamples(context, s, projected_.get(), of_rows_.get(), y + first * s.units, fm + first,
                  nullptr);
    }
  }

 private:
  // Finds the rows of the ids of some fields, and projects those that are not there. Several
  // threads may be here, each with other fields.
  void Project(const Layer& s, int64 first, int64 last, const int64* ids, int32* rows) {
    constexpr int64 kBlock = 256;  // examples, whose ids stay in the cache from field to field
    std::vector<int32> before(last - first);
    for (int64 f = first; f < last; ++f) {
      if (known_[f].used > kKept) known_[f].used = 0;
      before[f - first] = known_[f].used;
    }
    for (int64 begin = 0; begin < s.examples; begin += kBlock) {
      const int64 end = std::min(begin + kBlock, s.examples);
      for (int64 f = first; f < last; ++f) {
        const int64 at = begin * fields_ + f;
        known_[f].Find(ids + at, end - begin, fields_, f * kMost, rows + at);
      }
    }
    for (int64 f = first; f < last; ++f) {
      const int64 old = before[f - first], at = f * kMost + old;
      ProjectRows(s, f, known_[f].used - old, known_[f].ids.data() + old,
                  projected_.get() + at * s.stride, of_rows_.get() + 2 * at);
    }
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
