// Packed raw records, between files and parsers: string [2], the bytes of all records, one after
// another, and the end of each (uint64). Thus no record needs its own allocation on its way from
// thread to thread.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "runtime.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/lib/core/errors.h"
#include "tensorflow/core/lib/core/stringpiece.h"

namespace deepfm {

// The records of a tensor, with which they share memory.
class Packed {
 public:
  Packed() = default;

  static tensorflow::Status Open(const tensorflow::Tensor& tensor, Packed* packed) {
    using tensorflow::errors::InvalidArgument;
    if (tensor.dtype() != tensorflow::DT_STRING || tensor.NumElements() != 2) {
      return InvalidArgument("packed records must be string [2]");
    }
    const auto parts = tensor.flat<tensorflow::tstring>();
    Packed found;
    found.tensor_ = tensor;
    found.bytes_ = parts(0);
    found.ends_ = parts(1);
    found.size_ = found.ends_.size() / sizeof(tensorflow::uint64);
    bool good = found.ends_.size() % sizeof(tensorflow::uint64) == 0;
    tensorflow::uint64 end = 0;
    for (size_t i = 0; i < found.size_ && good; ++i) {
      good = found.End(i) >= end;
      end = found.End(i);
    }
    if (!good || end != found.bytes_.size()) return InvalidArgument("ends do not fit the bytes");
    *packed = std::move(found);
    return Ok();
  }

  size_t size() const { return size_; }
  size_t bytes() const { return bytes_.size(); }
  tensorflow::StringPiece operator[](size_t i) const {
    const tensorflow::uint64 begin = i == 0 ? 0 : End(i - 1);
    return {bytes_.data() + begin, static_cast<size_t>(End(i) - begin)};
  }

 private:
  tensorflow::uint64 End(size_t i) const {
    tensorflow::uint64 end;
    std::memcpy(&end, ends_.data() + i * sizeof(end), sizeof(end));
    return end;
  }

  tensorflow::Tensor tensor_;  // whose memory the next two show
  tensorflow::StringPiece bytes_, ends_;
  size_t size_ = 0;
};

// Packs records.
class Packer {
 public:
  // Reserves memory for at most `records` records of about `bytes` bytes in total.
  void Reserve(size_t records, size_t bytes) {
    constexpr size_t kMost = 1 << 16;
    bytes_.reserve(bytes);
    ends_.reserve(std::min(records, kMost) * sizeof(tensorflow::uint64));
  }

  void Add(tensorflow::StringPiece record) {
    bytes_.append(record.data(), record.size());
    const tensorflow::uint64 end = bytes_.size();
    ends_.append(reinterpret_cast<const char*>(&end), sizeof(end));
    ++size_;
  }

  size_t size() const { return size_; }
  size_t bytes() const { return bytes_.size(); }

  // Moves the records into a tensor of string [2]; the packer is empty afterwards.
  void MoveTo(tensorflow::Tensor* tensor) {
    auto parts = tensor->vec<tensorflow::tstring>();
    parts(0) = std::move(bytes_);
    parts(1) = std::move(ends_);
    *this = Packer();
  }

 private:
  tensorflow::tstring bytes_, ends_;
  size_t size_ = 0;
};

}  // namespace deepfm
