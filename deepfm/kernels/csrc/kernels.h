// Common parts of the kernels.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

// Compiles a function for several processors, of which the loader picks the best available, so that
// a library built on one machine runs on another.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DEEPFM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DEEPFM_CLONES
#endif

// Registers a function as the kernel of an operator, or one instance of it for each type that row
// indices may have.
#define DEEPFM_REGISTER(name, compute) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_CPU), Kernel<compute>)
#define DEEPFM_REGISTER_INDEXED(name, ...) \
  DEEPFM_REGISTER_OF_TYPE(int32, name, __VA_ARGS__); \
  DEEPFM_REGISTER_OF_TYPE(int64, name, __VA_ARGS__)
#define DEEPFM_REGISTER_OF_TYPE(T, name, compute, ...)                          \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          Kernel<compute<T, ##__VA_ARGS__>>)

namespace deepfm {

using namespace tensorflow;  // NOLINT
using shape_inference::InferenceContext;

// A shape function that sets the rank of each output; those of which it says nothing are vectors.
template <int... ranks>
Status Ranks(InferenceContext* c) {
  int i = 0;
  for (int rank : {ranks...}) c->set_output(i++, c->UnknownShapeOfRank(rank));
  while (i < c->num_outputs()) c->set_output(i++, c->UnknownShapeOfRank(1));
  return Ok();
}

// The shape function of a gradient: output i is like input i.
inline Status LikeInputs(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
  return Ok();
}

// A kernel that keeps nothing between steps.
template <void (*compute)(OpKernelContext*)>
class Kernel : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override { compute(context); }
};

// An attribute of the operator that runs.
template <typename T>
T Attribute(OpKernelContext* context, const char* name) {
  T value;
  TF_CHECK_OK(GetNodeAttr(context->op_kernel().def(), name, &value));
  return value;
}

// Memory for output i.
template <typename T>
Status Allocate(OpKernelContext* context, int i, const TensorShape& shape, T** memory) {
  Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(i, shape, &tensor));
  *memory = tensor->flat<T>().data();
  return Ok();
}

// Work in pieces, for whichever threads are free.
class Pieces : public std::enable_shared_from_this<Pieces> {
 public:
  using Runner = std::function<void(std::function<void()>)>;

  Pieces(int64 total, const std::function<void(int64)>& work, Runner* runner)
      : total_(total), work_(work), runner_(runner), left_(total) {}

  // Does pieces until none is left, after asking for another thread, which does the same. May be
  // called when the work is done and all but this object is gone.
  void Help() {
    int64 i = next_++;
    if (i + 1 < total_) {
      auto self = shared_from_this();
      (*runner_)([self] { self->Help(); });
    }
    for (; i < total_; i = next_++) {
      work_(i);
      left_.DecrementCount();
    }
  }

  void Wait() { left_.Wait(); }

 private:
  const int64 total_;
  const std::function<void(int64)>& work_;
  Runner* const runner_;
  std::atomic<int64> next_{0};
  BlockingCounter left_;
};

// Calls work(0) ... work(total - 1), in this thread and in those that run operators and have none to
// run. So a step fills the cores where its operators have to wait for each other, and no thread
// waits for another that has not begun.
inline void ForEach(OpKernelContext* context, int64 total, const std::function<void(int64)>& work) {
  auto* runner = context->runner();
  if (total <= 1 || runner == nullptr) {
    for (int64 i = 0; i < total; ++i) work(i);
    return;
  }
  auto pieces = std::make_shared<Pieces>(total, work, runner);
  pieces->Help();
  pieces->Wait();
}

// Calls work(first, last) for parts of [0, total), likewise; each number in it costs about as much
// as passing over `floats` floats. There are at most `most` parts.
inline void Divide(OpKernelContext* context, int64 total, int64 floats,
                   const std::function<void(int64, int64)>& work, int64 most = 64) {
  constexpr int64 kFloats = 1 << 16;  // worth the asking
  const int64 parts = std::min({total, most, std::max<int64>(total * floats / kFloats, 1)});
  ForEach(context, parts,
          [&](int64 i) { work(total * i / parts, total * (i + 1) / parts); });
}

}  // namespace deepfm
