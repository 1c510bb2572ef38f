// What the loops of the kernels have in common.
#ifndef DEEPFM_CSRC_LOOPS_H_
#define DEEPFM_CSRC_LOOPS_H_

#include <algorithm>
#include <functional>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

// Compiled for several processors, of which the loader takes the best one that is there: what is
// built on one machine runs on another one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DEEPFM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DEEPFM_CLONES
#endif

// Registers a kernel for each type that indices of rows may have.
#define DEEPFM_REGISTER_INDEXED(name, kernel) \
  DEEPFM_REGISTER_OF_TYPE(name, kernel, int32); \
  DEEPFM_REGISTER_OF_TYPE(name, kernel, int64)
#define DEEPFM_REGISTER_OF_TYPE(name, kernel, T) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_CPU).TypeConstraint<T>("T"), kernel<T>)

namespace deepfm {

// Divides `total` pieces of work, each of about so many floats, among the threads of an operator.
inline void Divide(tensorflow::OpKernelContext* context, tensorflow::int64 total,
                   tensorflow::int64 floats,
                   const std::function<void(tensorflow::int64, tensorflow::int64)>& work) {
  const auto& threads = *context->device()->tensorflow_cpu_worker_threads();
  tensorflow::Shard(threads.num_threads, threads.workers, total,
                    std::max<tensorflow::int64>(floats, 1), work);
}

}  // namespace deepfm

#endif  // DEEPFM_CSRC_LOOPS_H_
