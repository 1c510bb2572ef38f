// ReLU and dropout in one pass, with the random numbers of TensorFlow's stateless operators.
//
// B: examples. W: units of the layer.
#include "kernels.h"
#include "tensorflow/core/lib/random/philox_random.h"

namespace deepfm {

REGISTER_OP("DeepfmReluDropout")
    .Input("x: float")      // [B, W]
    .Input("seed: int64")   // [2]
    .Output("y: float")     // [B, W]
    .Attr("dropped: int")   // of 65,536: a unit is dropped if its 16 bits are below this
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc("max(x, 0), with units set to 0 at the rate dropped / 65536 and the others scaled up.");

REGISTER_OP("DeepfmReluDropoutGrad")
    .Input("y: float")
    .Input("by_y: float")
    .Output("by_x: float")
    .Attr("dropped: int")
    .SetShapeFn(shape_inference::UnchangedShape);

// Philox 4x32-10 for consecutive counters in parallel, as numbers in [-2^31, 2^31 - 1): the numbers
// that tf.random.stateless_uniform draws. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
// 3", SC 2011.
constexpr int kLanes = 16;

struct Key {
  uint32 key[2], counter[4];
};

DEEPFM_CLONES
void Philox(const Key& start, uint64 group, uint32* __restrict out) {  // [kLanes, 4]
  // Each in 64 bits with an upper half of 0, so that processors can multiply several at once.
  constexpr uint64 kLow = 0xFFFFFFFFu;
  uint64 c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    c0[i] = (group + i) & kLow;
    c1[i] = (group + i) >> 32;
    c2[i] = start.counter[2];
    c3[i] = start.counter[3];
  }
  uint32 k0 = start.key[0], k1 = start.key[1];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64 a = 0xD2511F53u * (c0[i] & kLow), b = 0xCD9E8D57u * (c2[i] & kLow);
      c0[i] = (b >> 32) ^ c1[i] ^ k0;
      c2[i] = (a >> 32) ^ c3[i] ^ k1;
      c1[i] = b & kLow;
      c3[i] = a & kLow;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kLanes; ++i) {
    out[4 * i] = c0[i];
    out[4 * i + 1] = c1[i];
    out[4 * i + 2] = c2[i];
    out[4 * i + 3] = c3[i];
  }
  // As UniformDistribution draws from [-2^31, 2^31 - 1), which excludes its end.
  for (int i = 0; i < 4 * kLanes; ++i) out[i] = (out[i] == 0xFFFFFFFFu ? 0 : out[i]) ^ 0x80000000u;
}

// The key and the first counter that stateless ops derive from a seed.
Key MakeKey(const int64* seed) {
  random::PhiloxRandom::Key key;
  random::PhiloxRandom::ResultType counter;
  key[0] = 0x3ec8f720;
  key[1] = 0x02461e29;
  std::memcpy(&counter[0], seed, sizeof(counter));  // little-endian, as all that is read here
  const auto mix = random::PhiloxRandom(counter, key)();
  return {{mix[0], mix[1]}, {0, 0, mix[2], mix[3]}};
}

DEEPFM_CLONES
void ReluDropout(const float* __restrict x, const int16* __restrict noise, int64 n, int32 least,
                 float scale, float* __restrict y) {
  for (int64 i = 0; i < n; ++i) {
    const float positive = x[i] <= 0 ? 0 : x[i];  // NaN stays NaN
    y[i] = positive * (noise[i] < least ? 0 : scale);
  }
}

DEEPFM_CLONES
void ReluDropoutGrad(const float* y, const float* by_y, int64 n, float scale, float* by_x) {
  for (int64 i = 0; i < n; ++i) by_x[i] = y[i] > 0 ? by_y[i] * scale : 0;
}

float Scale(int64 dropped) { return 65536.0 / (65536 - dropped); }

void ReluDropoutOp(OpKernelContext* context) {
  const int64 dropped = Attribute<int64>(context, "dropped");
  const Tensor& x = context->input(0);
  OP_REQUIRES(context, x.dims() == 2, errors::InvalidArgument("x is not a matrix"));
  const int64 rows = x.dim_size(0), units = x.dim_size(1), pairs = (units + 1) / 2;
  OP_REQUIRES(context, units > 0, errors::InvalidArgument("x has no columns"));
  const auto seed = context->input(1).vec<int64>();
  OP_REQUIRES(context, seed.size() == 2, errors::InvalidArgument("a seed must be two numbers"));
  const Key key = MakeKey(seed.data());
  const float* from = x.matrix<float>().data();
  float* to;
  OP_REQUIRES_OK(context, Allocate(context, 0, x.shape(), &to));
  Divide(context, rows, 4 * units, [&](int64 first, int64 last) {
    // As many rows at a time as keep their random numbers in the nearest cache.
    const int64 block = std::max<int64>(2048 / pairs, 1);
    std::vector<uint32> numbers(block * pairs + 4 + 4 * kLanes);
    for (int64 row = first; row < last; row += block) {
      const int64 end = std::min(row + block, last);
      // A pair of units shares a number: pair p, counted over x, has number p % 4 of counter p / 4.
      const int64 group = row * pairs / 4, count = end * pairs - 4 * group;
      for (int64 i = 0; i < count; i += 4 * kLanes) Philox(key, group + i / 4, &numbers[i]);
      const int16* noise = reinterpret_cast<const int16*>(numbers.data());
      for (int64 r = row; r < end; ++r) {
        ReluDropout(from + r * units, noise + 2 * (r * pairs - 4 * group), units, dropped - 32768,
                    Scale(dropped), to + r * units);
      }
    }
  });
}
DEEPFM_REGISTER("DeepfmReluDropout", ReluDropoutOp);

void ReluDropoutGradOp(OpKernelContext* context) {
  const Tensor &y = context->input(0), &by_y = context->input(1);
  OP_REQUIRES(context, y.shape() == by_y.shape(), errors::InvalidArgument("shapes differ"));
  Tensor* by_x = nullptr;
  OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({1}, 0, y.shape(), &by_x));
  const float *of = y.flat<float>().data(), *from = by_y.flat<float>().data();
  float* to = by_x->flat<float>().data();
  const float scale = Scale(Attribute<int64>(context, "dropped"));
  Divide(context, y.NumElements(), 2, [=](int64 first, int64 last) {
    ReluDropoutGrad(of + first, from + first, last - first, scale, to + first);
  });
}
DEEPFM_REGISTER("DeepfmReluDropoutGrad", ReluDropoutGradOp);

}  // namespace deepfm
