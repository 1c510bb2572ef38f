// Common parts of the kernels.
#ifndef DEEPFM_CSRC_KERNELS_H_
#define DEEPFM_CSRC_KERNELS_H_

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

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
#define DEEPFM_REGISTER_INDEXED(name, compute) \
  DEEPFM_REGISTER_OF_TYPE(name, compute, int32); \
  DEEPFM_REGISTER_OF_TYPE(name, compute, int64)
#define DEEPFM_REGISTER_OF_TYPE(name, compute, T) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_CPU).TypeConstraint<T>("T"), Kernel<compute<T>>)

namespace deepfm {

using namespace tensorflow;  // NOLINT
using shape_inference::InferenceContext;

// A shape function that sets the rank of each output.
template <int... ranks>
Status Ranks(InferenceContext* c) {
  int i = 0;
  for (int rank : {ranks...}) c->set_output(i++, c->UnknownShapeOfRank(rank));
  return Status::OK();
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
  return Status::OK();
}

// Divides `total` pieces of work, each of about `floats` floats, among the threads of an operator.
inline void Divide(OpKernelContext* context, int64 total, int64 floats,
                   const std::function<void(int64, int64)>& work) {
  const auto& threads = *context->device()->tensorflow_cpu_worker_threads();
  Shard(threads.num_threads, threads.workers, total, std::max<int64>(floats, 1), work);
}

}  // namespace deepfm

#endif  // DEEPFM_CSRC_KERNELS_H_
