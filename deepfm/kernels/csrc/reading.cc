// From files to batches: reading, shuffling and batching of records that stay packed (packed.h).
//
// data/reading.py and ops.py do the same with TensorFlow's own datasets: that is what these are
// tested against, and what runs where they are not built.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "packed.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/lib/core/coding.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "tensorflow/core/lib/random/philox_random.h"
#include "tensorflow/core/lib/random/random_distributions.h"
#include "tensorflow/core/platform/env.h"

namespace deepfm {

using namespace tensorflow;  // NOLINT

REGISTER_OP("DeepfmRecords")
    .Input("path: string")
    .Input("buffer_bytes: int64")  // that are read at once
    .Input("size: int64")          // records of each chunk, but of the last
    .Input("file_bytes: int64")    // that the file must have; below 0: any number
    .Output("handle: variant")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("The records of a TFRecord file that is not compressed, in packed chunks.");

// What the two datasets have in common: they yield packed records.
class PackedDataset : public DatasetBase {
 public:
  explicit PackedDataset(OpKernelContext* context) : DatasetBase(DatasetContext(context)) {}

  const DataTypeVector& output_dtypes() const override {
    static const auto* types = new DataTypeVector({DT_STRING});
    return *types;
  }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    static const auto* shapes = new std::vector<PartialTensorShape>({PartialTensorShape({2})});
    return *shapes;
  }

 protected:
  // Hands out a chunk, or that there are no more.
  static void Yield(IteratorContext* context, Packer* found, std::vector<Tensor>* out,
                    bool* end_of_sequence) {
    *end_of_sequence = found->size() == 0;
    if (*end_of_sequence) return;
    Tensor chunk(context->allocator({}), DT_STRING, TensorShape({2}));
    found->MoveTo(&chunk);
    out->push_back(std::move(chunk));
  }
};

// https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details: the bytes of a
// record and their checksum stand before it, its own checksum stands behind it.
class Records : public PackedDataset {
 public:
  Records(OpKernelContext* context, string path, int64 buffer_bytes, int64 size, int64 file_bytes)
      : PackedDataset(context),
        path_(path),
        buffer_bytes_(buffer_bytes),
        size_(size),
        file_bytes_(file_bytes) {}

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::unique_ptr<IteratorBase>(
        new Iterator({this, strings::StrCat(prefix, "::DeepfmRecords")}));
  }
  string DebugString() const override { return "DeepfmRecords"; }
  Status CheckExternalState() const override { return Status::OK(); }

 protected:
  Status AsGraphDefInternal(SerializationContext* context, DatasetGraphDefBuilder* builder,
                            Node** output) const override {
    std::vector<Node*> inputs(4);
    TF_RETURN_IF_ERROR(builder->AddScalar(path_, &inputs[0]));
    TF_RETURN_IF_ERROR(builder->AddScalar(buffer_bytes_, &inputs[1]));
    TF_RETURN_IF_ERROR(builder->AddScalar(size_, &inputs[2]));
    TF_RETURN_IF_ERROR(builder->AddScalar(file_bytes_, &inputs[3]));
    return builder->AddDataset(this, inputs, output);
  }

 private:
  class Iterator : public DatasetIterator<Records> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Records>(params) {}

   protected:
    Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* out,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      if (!file_) TF_RETURN_IF_ERROR(context->env()->NewRandomAccessFile(dataset()->path_, &file_));
      Packer found;
      const size_t size = dataset()->size_;
      found.Reserve(size, expected_);
      while (found.size() < size) {
        constexpr uint64 kHead = 12, kTail = 4;
        TF_RETURN_IF_ERROR(Need(kHead));
        if (left() == 0) {
          TF_RETURN_IF_ERROR(CheckEnd());
          break;
        }
        if (left() < kHead) return Bad("truncated");
        const char* head = buffer_.data() + at_;
        const uint64 length = core::DecodeFixed64(head);
        if (!Matches(head, 8, head + 8)) return Bad("corrupted");
        if (length > uint64{1} << 40) return Bad("corrupted");
        TF_RETURN_IF_ERROR(Need(kHead + length + kTail));
        if (left() < kHead + length + kTail) return Bad("truncated");
        const char* record = buffer_.data() + at_ + kHead;
        if (!Matches(record, length, record + length)) return Bad("corrupted");
        found.Add({record, length});
        at_ += kHead + length + kTail;
        position_ += kHead + length + kTail;
      }
      expected_ = found.bytes() + found.bytes() / 16;
      Yield(context, &found, out, end_of_sequence);
      return Status::OK();
    }

   private:
    uint64 left() const EXCLUSIVE_LOCKS_REQUIRED(mu_) { return end_ - at_; }

    static bool Matches(const char* data, size_t n, const char* checksum) {
      return crc32c::Unmask(core::DecodeFixed32(checksum)) == crc32c::Value(data, n);
    }

    Status Bad(const char* how) const EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return errors::DataLoss(how, " record at ", position_, " of ", dataset()->path_);
    }

    // S3 may end a file early, and then calls it the end.
    Status CheckEnd() const EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const int64 expected = dataset()->file_bytes_;
      if (expected < 0 || position_ == static_cast<uint64>(expected)) return Status::OK();
      return errors::DataLoss(dataset()->path_, " ended after ", position_, " of ", expected,
                              " bytes");
    }

    // Reads on until so many bytes are left in the buffer, or all that the file has.
    Status Need(uint64 bytes) EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      while (left() < bytes && !at_end_) {
        std::memmove(&buffer_[0], buffer_.data() + at_, left());
        end_ = left();
        at_ = 0;
        // Grows with what there is: a length may be wrong, although its checksum is right.
        const size_t room = std::max<size_t>(dataset()->buffer_bytes_, end_);
        if (buffer_.size() < end_ + room) buffer_.resize(end_ + room);
        StringPiece found;
        const Status status = file_->Read(read_, room, &found, &buffer_[end_]);
        if (!status.ok() && !errors::IsOutOfRange(status)) return status;
        if (found.data() != &buffer_[end_]) {
          std::memmove(&buffer_[end_], found.data(), found.size());
        }
        at_end_ = found.empty() || errors::IsOutOfRange(status);
        end_ += found.size();
        read_ += found.size();
      }
      return Status::OK();
    }

    mutex mu_;
    std::unique_ptr<RandomAccessFile> file_ GUARDED_BY(mu_);
    std::vector<char> buffer_ GUARDED_BY(mu_) = std::vector<char>(1);
    uint64 at_ GUARDED_BY(mu_) = 0, end_ GUARDED_BY(mu_) = 0;  // what is left in the buffer
    uint64 read_ GUARDED_BY(mu_) = 0, position_ GUARDED_BY(mu_) = 0;  // bytes of the file
    bool at_end_ GUARDED_BY(mu_) = false;
    size_t expected_ GUARDED_BY(mu_) = 0;  // bytes of the next chunk
  };

  const string path_;
  const int64 buffer_bytes_, size_, file_bytes_;
};

class RecordsOp : public DatasetOpKernel {
 public:
  using DatasetOpKernel::DatasetOpKernel;

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase** output) override {
    string path;
    int64 buffer_bytes, size, file_bytes;
    OP_REQUIRES_OK(context, data::ParseScalarArgument(context, "path", &path));
    OP_REQUIRES_OK(context, data::ParseScalarArgument(context, "buffer_bytes", &buffer_bytes));
    OP_REQUIRES_OK(context, data::ParseScalarArgument(context, "size", &size));
    OP_REQUIRES_OK(context, data::ParseScalarArgument(context, "file_bytes", &file_bytes));
    OP_REQUIRES(context, buffer_bytes > 0 && size > 0, errors::InvalidArgument("must be above 0"));
    *output = new Records(context, path, buffer_bytes, size, file_bytes);
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmRecords").Device(DEVICE_CPU), RecordsOp);

REGISTER_OP("DeepfmChunks")
    .Input("chunks: variant")       // a dataset of packed records
    .Input("size: int64")           // records of each chunk that comes out, but of the last
    .Input("shuffle_buffer: int64")  // records among which the next is drawn; 0 keeps the order
    .Input("seed: int64")
    .Input("seed2: int64")
    .Input("skip: int64")           // records that are left out, after shuffling
    .Input("take: int64")           // records after these, at most; below 0: all
    .Output("handle: variant")
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).take(take).batch(size), in the "
         "same order.");

class Chunks : public PackedDataset {
 public:
  struct Options {
    int64 size, shuffle_buffer, seed, seed2, skip, take;
  };

  Chunks(OpKernelContext* context, const DatasetBase* input, Options options)
      : PackedDataset(context), input_(input), options_(options) {
    input_->Ref();
  }
  ~Chunks() override { input_->Unref(); }

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::unique_ptr<IteratorBase>(
        new Iterator({this, strings::StrCat(prefix, "::DeepfmChunks")}));
  }

  string DebugString() const override { return "DeepfmChunks"; }
  Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  Status AsGraphDefInternal(SerializationContext* context, DatasetGraphDefBuilder* builder,
                            Node** output) const override {
    const int64 numbers[] = {options_.size,  options_.shuffle_buffer, options_.seed,
                             options_.seed2, options_.skip,           options_.take};
    std::vector<Node*> inputs(1);
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input_, &inputs[0]));
    for (int64 number : numbers) {
      inputs.push_back(nullptr);
      TF_RETURN_IF_ERROR(builder->AddScalar(number, &inputs.back()));
    }
    return builder->AddDataset(this, inputs, output);
  }

 private:
  class Iterator : public DatasetIterator<Chunks> {
   public:
    explicit Iterator(const Params& params)
        : DatasetIterator<Chunks>(params),
          parent_(dataset()->options_.seed, dataset()->options_.seed2),
          random_(&parent_),
          to_skip_(dataset()->options_.skip),
          to_take_(dataset()->options_.take) {}

    Status Initialize(IteratorContext* context) override {
      return dataset()->input_->MakeIterator(context, prefix(), &input_);
    }

   protected:
    Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* out,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      Packer found;
      const size_t size = dataset()->options_.size;
      found.Reserve(size, expected_);
      while (found.size() < size && to_take_ != 0) {
        StringPiece record;
        bool end = false;
        TF_RETURN_IF_ERROR(Draw(context, &record, &end));
        if (end) break;
        if (to_skip_ > 0) {
          --to_skip_;
        } else {
          found.Add(record);
          if (to_take_ > 0) --to_take_;
        }
      }
      expected_ = found.bytes() + found.bytes() / 16;
      Yield(context, &found, out, end_of_sequence);
      return Status::OK();
    }

   private:
    // The next record in the order of ShuffleDataset: its buffer is a ring, from which one of the
    // records is drawn and whose oldest one takes the place of that. A record is there until the
    // next call.
    Status Draw(IteratorContext* context, StringPiece* record, bool* end)
        EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const int64 size = dataset()->options_.shuffle_buffer;
      if (size <= 1) return Pull(context, record, end);
      while (!exhausted_ && newest_ - oldest_ < size) {
        TF_RETURN_IF_ERROR(Pull(context, record, &exhausted_));
        if (exhausted_) break;
        if (static_cast<int64>(buffer_.size()) < size) {
          buffer_.emplace_back(record->begin(), record->end());
        } else {  // in the memory of the one that was here, unless that was a far longer one
          std::vector<char>& place = buffer_[newest_ % size];
          if (place.capacity() / 2 > record->size() + 64) std::vector<char>().swap(place);
          place.assign(record->begin(), record->end());
        }
        ++newest_;
      }
      *end = newest_ == oldest_;
      if (*end) return Status::OK();
      const int64 drawn = (oldest_ + random_() % (newest_ - oldest_)) % size;
      std::vector<char>& oldest = buffer_[oldest_ % size];
      oldest.swap(buffer_[drawn]);
      *record = {oldest.data(), oldest.size()};
      ++oldest_;
      return Status::OK();
    }

    // The next record in the order of the input, which is there until the next call.
    Status Pull(IteratorContext* context, StringPiece* record, bool* end)
        EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      *end = false;
      while (at_ == chunk_.size()) {
        if (!input_) {
          *end = true;
          return Status::OK();
        }
        std::vector<Tensor> element;
        bool last = false;
        TF_RETURN_IF_ERROR(input_->GetNext(context, &element, &last));
        if (last) {
          input_.reset();
          continue;
        }
        TF_RETURN_IF_ERROR(Packed::Open(element[0], &chunk_));
        at_ = 0;
      }
      *record = chunk_[at_++];
      return Status::OK();
    }

    mutex mu_;
    std::unique_ptr<IteratorBase> input_ GUARDED_BY(mu_);
    Packed chunk_ GUARDED_BY(mu_);  // of the input, of which `at_` are taken
    size_t at_ GUARDED_BY(mu_) = 0;
    // Record i, of those that the next two count, is at i % shuffle_buffer. No strings: to swap
    // TensorFlow's touches the memory of both.
    std::vector<std::vector<char>> buffer_ GUARDED_BY(mu_);
    int64 oldest_ GUARDED_BY(mu_) = 0, newest_ GUARDED_BY(mu_) = 0;
    bool exhausted_ GUARDED_BY(mu_) = false;
    random::PhiloxRandom parent_ GUARDED_BY(mu_);
    random::SingleSampleAdapter<random::PhiloxRandom> random_ GUARDED_BY(mu_);
    int64 to_skip_ GUARDED_BY(mu_), to_take_ GUARDED_BY(mu_);
    size_t expected_ GUARDED_BY(mu_) = 0;  // bytes of the next chunk
  };

  const DatasetBase* const input_;
  const Options options_;
};

class ChunksOp : public UnaryDatasetOpKernel {
 public:
  using UnaryDatasetOpKernel::UnaryDatasetOpKernel;

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase* input, DatasetBase** output) override {
    Chunks::Options options;
    const std::pair<const char*, int64*> numbers[] = {
        {"size", &options.size},   {"shuffle_buffer", &options.shuffle_buffer},
        {"seed", &options.seed},   {"seed2", &options.seed2},
        {"skip", &options.skip},   {"take", &options.take},
    };
    for (const auto& number : numbers) {
      OP_REQUIRES_OK(context, data::ParseScalarArgument(context, number.first, number.second));
    }
    OP_REQUIRES(context, options.size > 0, errors::InvalidArgument("size must be above 0"));
    if (options.seed == 0 && options.seed2 == 0) {
      context->SetStatus(errors::InvalidArgument("a seed is needed"));
      return;
    }
    *output = new Chunks(context, input, options);
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmChunks").Device(DEVICE_CPU), ChunksOp);

}  // namespace deepfm
