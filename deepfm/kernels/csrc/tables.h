// Access to the rows of a table: a variable of which each batch reads and writes only a few rows.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

#include "runtime.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace deepfm {

struct Rows {};  // names our instance of the function below

// Asks for 2 MiB pages for the memory of a table, whose rows are read at random: with 4 KiB pages a
// tenth of a step goes into finding them. Pages already in use are copied in a separate thread, or,
// before Linux 6.1, by the kernel at some later time. This is advice; it fails silently.
inline void UseLargePages(const void* memory, size_t bytes, bool in_use) {
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
  } catch (const std::system_error&) {  // the limit of threads is reached
  }
#endif
}

}  // namespace deepfm

namespace tensorflow {

// TensorFlow's functions of these names, whose header is not installed. Tensor has them as friends,
// so only these names can see whether it is shared (see resource_var.h).

// To call before a whole variable is written: earlier readers keep what they have read.
template <typename Device, typename T>
Status PrepareToUpdateVariable(OpKernelContext* context, Tensor* tensor, bool copy_on_read_mode) {
  if (!tensor->IsInitialized() || tensor->dtype() != DataTypeToEnum<T>::v()) {
    return errors::FailedPrecondition("a variable is not initialized, or has another type");
  }
  if (copy_on_read_mode || tensor->RefCountIsOne()) return deepfm::Ok();
  Tensor copy;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
  std::memcpy(copy.flat<T>().data(), tensor->flat<T>().data(), tensor->TotalBytes());
  *tensor = copy;
  return deepfm::Ok();
}

// From now on whoever reads the whole variable gets a copy, so that its rows can be written in
// place.
template <typename Device, typename T>
Status EnsureSparseVariableAccess(OpKernelContext* context, Var* var) {
  if (var->copy_on_read_mode.load()) return deepfm::Ok();
  mutex_lock lock(*var->mu());
  Tensor* tensor = var->tensor();
  TF_RETURN_IF_ERROR((PrepareToUpdateVariable<Device, T>(context, tensor, false)));
  deepfm::UseLargePages(tensor->flat<T>().data(), tensor->TotalBytes(), true);
  var->copy_on_read_mode.store(true);
  return deepfm::Ok();
}

}  // namespace tensorflow

namespace deepfm {

using namespace tensorflow;  // NOLINT

// How many rows ahead to prefetch, and how many rows to update at once: wide rows one by one, and
// narrow ones together, because one alone gives too little work.
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
  if (indices.dims() != 1) return errors::InvalidArgument("indices are not a vector");
  const auto where = indices.vec<T>();
  for (int64 i = 0; i < where.size(); ++i) {
    if (where(i) < 0 || where(i) >= rows) {
      return errors::InvalidArgument("indices[", i, "] = ", where(i), " is not in [0, ", rows, ")");
    }
  }
  return Ok();
}

// As CheckIndices for the places of a batch's values; does not say which is wrong, so that the loop
// has no branch.
inline Status CheckPlaces(const int32* places, int64 n, int64 rows) {
  bool inside = true;
  for (int64 i = 0; i < n; ++i) {
    inside &= static_cast<uint32>(places[i]) < static_cast<uint32>(rows);
  }
  return inside ? Ok() : errors::InvalidArgument("a value's row is beyond the last one");
}

}  // namespace deepfm
