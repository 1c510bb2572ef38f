// From files to parsed batches: reading, shuffling and batching without a tensor for each record,
// and parsers of the records that records.encode writes and of plain LibSVM lines.
//
// raw_records.py and records.py do the same with TensorFlow's own datasets and ops: that is what
// these are tested against, and what runs where they are not built.
//
// B: records in a batch. F: fields.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/coding.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "tensorflow/core/lib/random/philox_random.h"
#include "tensorflow/core/lib/random/random_distributions.h"
#include "tensorflow/core/lib/strings/numbers.h"
#include "tensorflow/core/platform/env.h"

namespace deepfm {

using namespace tensorflow;  // NOLINT
using shape_inference::InferenceContext;

REGISTER_OP("DeepfmRecords")
    .Input("path: string")
    .Input("buffer_bytes: int64")  // that are read at once
    .Input("size: int64")          // records of each chunk, but of the last
    .Input("file_bytes: int64")    // that the file must have; below 0: any number
    .Output("handle: variant")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return Status::OK();
    })
    .Doc("The records of a TFRecord file that is not compressed, in chunks; string [n].");

// What the two datasets have in common: they yield string [n].
class StringsDataset : public DatasetBase {
 public:
  explicit StringsDataset(OpKernelContext* context) : DatasetBase(DatasetContext(context)) {}

  const DataTypeVector& output_dtypes() const override {
    static const auto* types = new DataTypeVector({DT_STRING});
    return *types;
  }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    static const auto* shapes = new std::vector<PartialTensorShape>({PartialTensorShape({-1})});
    return *shapes;
  }

 protected:
  // Hands out a chunk, or that there are no more.
  static void Yield(IteratorContext* context, std::vector<string>* found, std::vector<Tensor>* out,
                    bool* end_of_sequence) {
    *end_of_sequence = found->empty();
    if (found->empty()) return;
    const int64 n = found->size();
    Tensor chunk(context->allocator({}), DT_STRING, TensorShape({n}));
    std::move(found->begin(), found->end(), chunk.vec<string>().data());
    out->push_back(std::move(chunk));
  }
};

// https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details: the bytes of a
// record and their checksum stand before it, its own checksum stands behind it.
class Records : public StringsDataset {
 public:
  Records(OpKernelContext* context, string path, int64 buffer_bytes, int64 size, int64 file_bytes)
      : StringsDataset(context),
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
      std::vector<string> found;
      const size_t size = dataset()->size_;
      found.reserve(size);
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
        found.emplace_back(record, length);
        at_ += kHead + length + kTail;
        position_ += kHead + length + kTail;
      }
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
    .Input("chunks: variant")       // a dataset of string [n]
    .Input("size: int64")           // records of each chunk that comes out, but of the last
    .Input("shuffle_buffer: int64")  // records among which the next is drawn; 0 keeps the order
    .Input("seed: int64")
    .Input("seed2: int64")
    .Input("skip: int64")           // records that are left out, after shuffling
    .Output("handle: variant")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return Status::OK();
    })
    .Doc("As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).batch(size), in the same order.");

class Chunks : public StringsDataset {
 public:
  struct Options {
    int64 size, shuffle_buffer, seed, seed2, skip;
  };

  Chunks(OpKernelContext* context, const DatasetBase* input, Options options)
      : StringsDataset(context), input_(input), options_(options) {
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
    std::vector<Node*> inputs(6);
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input_, &inputs[0]));
    const int64 numbers[5] = {options_.size, options_.shuffle_buffer, options_.seed,
                              options_.seed2, options_.skip};
    for (int i = 0; i < 5; ++i) TF_RETURN_IF_ERROR(builder->AddScalar(numbers[i], &inputs[i + 1]));
    return builder->AddDataset(this, inputs, output);
  }

 private:
  class Iterator : public DatasetIterator<Chunks> {
   public:
    explicit Iterator(const Params& params)
        : DatasetIterator<Chunks>(params),
          parent_(dataset()->options_.seed, dataset()->options_.seed2),
          random_(&parent_),
          to_skip_(dataset()->options_.skip) {}

    Status Initialize(IteratorContext* context) override {
      return dataset()->input_->MakeIterator(context, prefix(), &input_);
    }

   protected:
    Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* out,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      std::vector<string> found;
      const size_t size = dataset()->options_.size;
      found.reserve(size);
      string record;
      bool end = false;
      while (found.size() < size) {
        TF_RETURN_IF_ERROR(Draw(context, &record, &end));
        if (end) break;
        if (to_skip_ > 0) {
          --to_skip_;
        } else {
          found.push_back(std::move(record));
        }
      }
      Yield(context, &found, out, end_of_sequence);
      return Status::OK();
    }

   private:
    // The next record in the order of ShuffleDataset: its buffer is a ring, from which one of the
    // records is drawn and whose oldest one takes the place of that.
    Status Draw(IteratorContext* context, string* record, bool* end) EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const int64 size = dataset()->options_.shuffle_buffer;
      if (size <= 1) return Pull(context, record, end);
      while (!exhausted_ && newest_ - oldest_ < size) {
        TF_RETURN_IF_ERROR(Pull(context, record, &exhausted_));
        if (exhausted_) break;
        if (static_cast<int64>(buffer_.size()) < size) {
          buffer_.push_back(std::move(*record));
        } else {
          buffer_[newest_ % size] = std::move(*record);
        }
        ++newest_;
      }
      *end = newest_ == oldest_;
      if (*end) return Status::OK();
      const int64 drawn = (oldest_ + random_() % (newest_ - oldest_)) % size;
      *record = std::move(buffer_[drawn]);
      std::swap(buffer_[drawn], buffer_[oldest_ % size]);
      ++oldest_;
      return Status::OK();
    }

    // The next record in the order of the input.
    Status Pull(IteratorContext* context, string* record, bool* end)
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
        const int64 n = element[0].NumElements();
        const auto records = element[0].flat<string>();
        chunk_.assign(records.data(), records.data() + n);
        at_ = 0;
      }
      *record = std::move(chunk_[at_++]);
      return Status::OK();
    }

    mutex mu_;
    std::unique_ptr<IteratorBase> input_ GUARDED_BY(mu_);
    std::vector<string> chunk_ GUARDED_BY(mu_);  // of the input, of which `at_` are taken
    size_t at_ GUARDED_BY(mu_) = 0;
    std::vector<string> buffer_ GUARDED_BY(mu_);  // record i, of those below, is at i % its size
    int64 oldest_ GUARDED_BY(mu_) = 0, newest_ GUARDED_BY(mu_) = 0;
    bool exhausted_ GUARDED_BY(mu_) = false;
    random::PhiloxRandom parent_ GUARDED_BY(mu_);
    random::SingleSampleAdapter<random::PhiloxRandom> random_ GUARDED_BY(mu_);
    int64 to_skip_ GUARDED_BY(mu_);
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
        {"skip", &options.skip},
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

// Of good [], labels [B], ids and values [B, F].
Status ParsedShapes(InferenceContext* c) {
  int field_size;
  TF_RETURN_IF_ERROR(c->GetAttr("field_size", &field_size));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Vector(c->Dim(c->input(0), 0)));
  c->set_output(2, c->Matrix(c->Dim(c->input(0), 0), field_size));
  c->set_output(3, c->Matrix(c->Dim(c->input(0), 0), field_size));
  return Status::OK();
}

REGISTER_OP("DeepfmParse")
    .Input("serialized: string")  // [B]
    .Output("good: bool")         // []
    .Output("labels: float")      // [B]
    .Output("ids: int64")         // [B, F]
    .Output("values: float")      // [B, F]
    .Attr("field_size: int >= 1")
    .Attr("feature_size: int")
    .SetShapeFn(ParsedShapes)
    .Doc("Parses records that are, apart from their numbers, to the byte what records.encode "
         "writes, with a label of 0 or 1, ids in [0, feature_size) and finite values. Where one of "
         "them is not, `good` is false and the rest is of no use.");

// Reads a serialized tf.train.Example from its beginning; after a failure `good` is false for ever.
struct Reader {
  const uint8* at;
  const uint8* end;
  bool good = true;

  uint64 Varint() {
    uint64 number = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
      const uint8 byte = *at++;
      number |= uint64{byte & 127u} << shift;
      if (byte < 128) {
        good &= shift < 63 || byte == 1;
        return number;
      }
    }
    good = false;
    return 0;
  }

  // The bytes of a field of this number and type that is written in the shortest way.
  uint64 Field(uint8 tag) {
    if (at == end || *at != tag) {
      good = false;
      return 0;
    }
    const uint8* begin = ++at;
    const uint64 size = Varint();
    good &= size <= static_cast<uint64>(end - at);
    good &= at - begin == 1 || at[-1] != 0;
    return good ? size : 0;
  }

  // A field that is all that is left until `until`.
  void Last(uint8 tag, const uint8* until) {
    const uint64 size = Field(tag);
    good &= at + size == until;
  }

  // What stands before the packed numbers of a feature of this name, in `list`; returns their end.
  const uint8* List(const char* name, size_t length, uint8 list) {
    const uint64 entry = Field(0x0A);  // of Features.feature
    const uint8* until = at + entry;
    good &= Field(0x0A) == length && length <= static_cast<size_t>(end - at);
    if (!good) return at;
    good &= std::memcmp(at, name, length) == 0;  // FeatureEntry.key
    at += length;
    Last(0x12, until);  // FeatureEntry.value
    Last(list, until);  // Feature.float_list or int64_list
    Last(0x0A, until);  // value
    return until;
  }
};

// Whether a record is as it should be; then its numbers are there.
bool ParseRecord(const string& record, int64 fields, int64 feature_size, float* label, int64* ids,
                 float* values) {
  constexpr uint8 kFloats = 0x12, kInt64s = 0x1A;
  const uint8* begin = reinterpret_cast<const uint8*>(record.data());
  Reader reader{begin, begin + record.size()};
  reader.Last(0x0A, reader.end);  // Example.features
  if (!reader.good) return false;
  const uint8* until = reader.List("ids", 3, kInt64s);
  if (!reader.good) return false;
  uint64 largest = 0;
  for (int64 i = 0; i < fields; ++i) {
    const uint64 id = reader.Varint();
    largest = std::max(largest, id);
    ids[i] = id;
  }
  if (!reader.good || reader.at != until || largest >= static_cast<uint64>(feature_size)) {
    return false;
  }
  until = reader.List("label", 5, kFloats);
  if (!reader.good || until - reader.at != 4) return false;
  uint32 bits;
  std::memcpy(&bits, reader.at, 4);
  std::memcpy(label, reader.at, 4);
  if (bits != 0 && *label != 1) return false;
  reader.at = until;
  until = reader.List("values", 6, kFloats);
  if (!reader.good || until - reader.at != 4 * fields || until != reader.end) return false;
  std::memcpy(values, reader.at, 4 * fields);
  bool finite = true;
  for (int64 i = 0; i < fields; ++i) finite &= std::isfinite(values[i]);
  return finite;
}

// Parses a batch: parse(record, &label, ids, values) -> whether it is good.
template <typename Parse>
void ParseAll(OpKernelContext* context, int64 fields, const Parse& parse) {
  const auto records = context->input(0).flat<string>();
  const int64 n = records.size();
  Tensor *good = nullptr, *labels = nullptr, *ids = nullptr, *values = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &good));
  OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({n}), &labels));
  OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({n, fields}), &ids));
  OP_REQUIRES_OK(context, context->allocate_output(3, TensorShape({n, fields}), &values));
  float *label = labels->vec<float>().data(), *value = values->matrix<float>().data();
  int64* id = ids->matrix<int64>().data();
  bool all = true;
  for (int64 i = 0; i < n && all; ++i) {
    // Shuffled records lie anywhere: the next ones are on their way while this one is parsed.
    if (i + 4 < n) {
      const char* next = records(i + 4).data();
      for (int line = 0; line < 6; ++line) __builtin_prefetch(next + 64 * line);
    }
    all = parse(records(i), label + i, id + i * fields, value + i * fields);
  }
  good->scalar<bool>()() = all;
}

class ParseOp : public OpKernel {
 public:
  explicit ParseOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
    OP_REQUIRES_OK(context, context->GetAttr("feature_size", &feature_size_));
  }

  void Compute(OpKernelContext* context) override {
    ParseAll(context, fields_, [this](const string& from, float* label, int64* ids, float* values) {
      return ParseRecord(from, fields_, feature_size_, label, ids, values);
    });
  }

 private:
  int64 fields_, feature_size_;
};
REGISTER_KERNEL_BUILDER(Name("DeepfmParse").Device(DEVICE_CPU), ParseOp);

REGISTER_OP("DeepfmSplitLines")
    .Input("text: string")    // []
    .Output("good: bool")     // []
    .Output("lines: string")  // [n]
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return Status::OK();
    })
    .Doc("The lines of a text that are not empty. Where one may be a comment or blank, `good` is "
         "false and the lines are of no use.");

bool StartsANumber(char c) { return (c >= '0' && c <= '9') || c == '-' || c == '+' || c == '.'; }

class SplitLinesOp : public OpKernel {
 public:
  explicit SplitLinesOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const string& text = context->input(0).scalar<string>()();
    const char *at = text.data(), *end = at + text.size();
    bool good = std::memchr(at, '#', text.size()) == nullptr;
    std::vector<std::pair<const char*, size_t>> found;
    while (at < end && good) {
      const char* stop = static_cast<const char*>(std::memchr(at, '\n', end - at));
      if (stop == nullptr) stop = end;
      if (stop > at) {
        good = StartsANumber(*at);
        found.emplace_back(at, stop - at);
      }
      at = stop + 1;
    }
    if (!good) found.clear();
    Tensor *told = nullptr, *lines = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &told));
    told->scalar<bool>()() = good;
    const int64 n = found.size();
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({n}), &lines));
    auto to = lines->vec<string>();
    for (int64 i = 0; i < n; ++i) to(i).assign(found[i].first, found[i].second);
  }
};
REGISTER_KERNEL_BUILDER(Name("DeepfmSplitLines").Device(DEVICE_CPU), SplitLinesOp);

REGISTER_OP("DeepfmParseLines")
    .Input("lines: string")   // [B]
    .Output("good: bool")     // []
    .Output("labels: float")  // [B]
    .Output("ids: int64")     // [B, F]
    .Output("values: float")  // [B, F]
    .Attr("field_size: int >= 1")
    .Attr("feature_size: int")
    .Attr("id_offset: int")
    .SetShapeFn(ParsedShapes)
    .Doc("Parses LibSVM lines of F pairs, one space before each, numbers without exponents, a "
         "label of 0, 1 or -1 and ids + id_offset in [0, feature_size). Where one is not so, "
         "`good` is false and the rest is of no use.");

// A decimal number at `at`, which is moved behind it: the float that is nearest.
bool ParseDecimal(const char** at, const char* end, float* number) {
  const char* begin = *at;
  const char* p = begin;
  const bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) ++p;
  uint64 digits = 0;
  int count = 0, behind = 0;
  bool point = false;
  for (; p < end; ++p) {
    if (*p >= '0' && *p <= '9') {
      if (count < 19) digits = 10 * digits + (*p - '0');
      ++count;
      behind += point;
    } else if (*p == '.' && !point) {
      point = true;
    } else {
      break;
    }
  }
  if (count == 0) return false;
  *at = p;
  // Both are exact as floats, so their quotient is the nearest one (Clinger, "How to Read Floating
  // Point Numbers Accurately", PLDI 1990).
  static const float kPowers[] = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f,
                                  1e6f, 1e7f, 1e8f, 1e9f, 1e10f};
  if (count <= 19 && digits <= (1 << 24) && behind <= 10) {
    const float magnitude = static_cast<float>(digits) / kPowers[behind];
    *number = negative ? -magnitude : magnitude;
    return true;
  }
  return strings::safe_strtof(string(begin, p - begin).c_str(), number) && std::isfinite(*number);
}

bool ParseLine(const string& line, int64 fields, int64 feature_size, int64 id_offset, float* label,
               int64* ids, float* values) {
  const char *at = line.data(), *end = at + line.size();
  if (!ParseDecimal(&at, end, label)) return false;
  if (*label != 0 && std::fabs(*label) != 1) return false;
  *label = *label > 0;
  for (int64 i = 0; i < fields; ++i) {
    if (at == end || *at++ != ' ') return false;
    int64 id = 0;
    const char* begin = at;
    for (; at < end && *at >= '0' && *at <= '9'; ++at) {
      if (at - begin == 18) return false;
      id = 10 * id + (*at - '0');
    }
    if (at == begin || at == end || *at++ != ':') return false;
    if (__builtin_add_overflow(id, id_offset, &ids[i])) return false;
    if (ids[i] < 0 || ids[i] >= feature_size) return false;
    if (!ParseDecimal(&at, end, &values[i])) return false;
  }
  return at == end;
}

class ParseLinesOp : public OpKernel {
 public:
  explicit ParseLinesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("field_size", &fields_));
    OP_REQUIRES_OK(context, context->GetAttr("feature_size", &feature_size_));
    OP_REQUIRES_OK(context, context->GetAttr("id_offset", &id_offset_));
  }

  void Compute(OpKernelContext* context) override {
    ParseAll(context, fields_, [this](const string& line, float* label, int64* ids, float* values) {
      return ParseLine(line, fields_, feature_size_, id_offset_, label, ids, values);
    });
  }

 private:
  int64 fields_, feature_size_, id_offset_;
};
REGISTER_KERNEL_BUILDER(Name("DeepfmParseLines").Device(DEVICE_CPU), ParseLinesOp);

}  // namespace deepfm
