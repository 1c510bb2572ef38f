// From files to batches: reading, shuffling and batching of records that stay packed (packed.h).
//
// data/reading.py and kernels/reading.py do the same with TensorFlow's own datasets; tests compare
// the two, and those take over if these are not built.
#include "kernels.h"  // first: which TensorFlow
#include "frames.h"
#include "packed.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/lib/random/philox_random.h"
#include "tensorflow/core/lib/random/random_distributions.h"
#include "tensorflow/core/platform/env.h"

namespace deepfm {

using namespace tensorflow::data;  // NOLINT

REGISTER_OP("DeepfmPack")
    .Input("records: string")
    .Output("packed: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return Ok();
    });

void Pack(OpKernelContext* context) {
  Tensor* packed = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({2}), &packed));
  const auto records = context->input(0).flat<tstring>();
  Packer packer;
  for (int64 i = 0; i < records.size(); ++i) packer.Add(records(i));
  packer.MoveTo(packed);
}
DEEPFM_REGISTER("DeepfmPack", Pack);

REGISTER_OP("DeepfmRecords")
    .Input("path: string")
    .Input("buffer_bytes: int64")  // bytes to read at once
    .Input("size: int64")          // records in each chunk but the last
    .Input("file_bytes: int64")    // length that the file must have; below 0: any
    .Output("handle: variant")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("The records of an uncompressed TFRecord file, in packed chunks.");

int64 Int64(OpKernelContext* context, int i) { return context->input(i).scalar<int64>()(); }

// The common part of the two datasets: they yield packed records, in chunks of `size`.
template <typename Dataset>
class PackedDataset : public DatasetBase {
 public:
  PackedDataset(OpKernelContext* context, int64 size)
      : DatasetBase(DatasetContext(context)), size(size) {}

  // The operator, of whose inputs a dataset is made.
  class Op : public DatasetOpKernel {
   public:
    using DatasetOpKernel::DatasetOpKernel;

   protected:
    void MakeDataset(OpKernelContext* context, DatasetBase** output) override {
      *output = new Dataset(context);
    }
  };

  const DataTypeVector& output_dtypes() const override {
    static const auto* types = new DataTypeVector({DT_STRING});
    return *types;
  }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    static const auto* shapes = new std::vector<PartialTensorShape>({PartialTensorShape({2})});
    return *shapes;
  }
  string DebugString() const override { return type_string(); }
#ifdef DEEPFM_TENSORFLOW_2
  Status CheckExternalState() const override { return Ok(); }
  Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    if (input() != nullptr) inputs->push_back(input());
    return Ok();
  }
#endif
  virtual const DatasetBase* input() const { return nullptr; }
  std::unique_ptr<IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::unique_ptr<IteratorBase>(new typename Dataset::Iterator(
        {static_cast<const Dataset*>(this), strings::StrCat(prefix, "::", type_string())}));
  }

  const size_t size;

 protected:
  // Keeps tf.data from rewriting this dataset and its inputs.
  Status AsGraphDefInternal(SerializationContext*, DatasetGraphDefBuilder*,
                            Node**) const override {
    return errors::Unimplemented(type_string());
  }
};

template <typename Dataset>
class PackedIterator : public DatasetIterator<Dataset> {
 public:
  using DatasetIterator<Dataset>::DatasetIterator;

 protected:
#ifdef DEEPFM_TENSORFLOW_2
  Status SaveInternal(SerializationContext*, IteratorStateWriter*) override {
    return errors::Unimplemented("SaveInternal");
  }
  Status RestoreInternal(IteratorContext*, IteratorStateReader*) override {
    return errors::Unimplemented("RestoreInternal");
  }
#endif

  // Gets the next record, which stays valid until the next call, or sets `end` if there is none.
  // Only one thread at a time calls it.
  virtual Status Next(IteratorContext* context, StringPiece* record, bool* end) = 0;

  Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* out,
                         bool* end_of_sequence) override {
    mutex_lock lock(mu_);
    Packer found;
    found.Reserve(this->dataset()->size, expected_);
    for (bool end = false; found.size() < this->dataset()->size;) {
      StringPiece record;
      TF_RETURN_IF_ERROR(Next(context, &record, &end));
      if (end) break;
      found.Add(record);
    }
    expected_ = found.bytes() + found.bytes() / 16;
    *end_of_sequence = found.size() == 0;
    if (*end_of_sequence) return Ok();
    Tensor chunk(context->allocator({}), DT_STRING, TensorShape({2}));
    found.MoveTo(&chunk);
    out->push_back(std::move(chunk));
    return Ok();
  }

 private:
  mutex mu_;
  size_t expected_ = 0;  // bytes of the next chunk
};

// https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details: the length of a
// record and the length's checksum precede it, its own checksum follows it.
class Records : public PackedDataset<Records> {
 public:
  explicit Records(OpKernelContext* context)
      : PackedDataset(context, Int64(context, 2)),
        path_(context->input(0).scalar<tstring>()()),
        buffer_bytes_(Int64(context, 1)),
        file_bytes_(Int64(context, 3)) {}

  class Iterator : public PackedIterator<Records> {
   public:
    using PackedIterator<Records>::PackedIterator;

   protected:
    Status Next(IteratorContext* context, StringPiece* record, bool* end) override {
      if (!file_) TF_RETURN_IF_ERROR(context->env()->NewRandomAccessFile(dataset()->path_, &file_));
      using codec::kFrame;
      using codec::kHeader;
      TF_RETURN_IF_ERROR(Need(kHeader));
      *end = left() == 0;
      if (*end) return CheckEnd();
      if (left() < kHeader) return Bad("truncated");
      const char* head = buffer_.data() + at_;
      const auto length = codec::Load<uint64>(head);
      if (!codec::IsHeader(head) || length > uint64{1} << 40) return Bad("corrupted");
      TF_RETURN_IF_ERROR(Need(kFrame + length));
      if (left() < kFrame + length) return Bad("truncated");
      *record = {buffer_.data() + at_ + kHeader, length};
      if (!codec::Matches(record->data(), length, record->end())) return Bad("corrupted");
      at_ += kFrame + length;
      return Ok();
    }

   private:
    uint64 left() const { return end_ - at_; }
    uint64 position() const { return read_ - left(); }

    Status Bad(const char* how) const {
      return errors::DataLoss(how, " record at ", position(), " of ", dataset()->path_);
    }

    // S3 may end a file early and report that as its end.
    Status CheckEnd() const {
      const int64 expected = dataset()->file_bytes_;
      if (expected < 0 || position() == static_cast<uint64>(expected)) return Ok();
      return errors::DataLoss(dataset()->path_, " ended after ", position(), " of ", expected,
                              " bytes");
    }

    // Reads on until the buffer has this many unread bytes, or all that the file still has.
    Status Need(uint64 bytes) {
      while (left() < bytes && !at_end_) {
        std::memmove(&buffer_[0], buffer_.data() + at_, left());
        end_ = left();
        at_ = 0;
        // Grow only with what was read: a length may be wrong although its checksum is right.
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
      return Ok();
    }

    std::unique_ptr<RandomAccessFile> file_;
    std::vector<char> buffer_ = std::vector<char>(1);
    uint64 at_ = 0, end_ = 0;  // begin and end of the unread bytes in the buffer
    uint64 read_ = 0;          // bytes read from the file
    bool at_end_ = false;
  };

 private:
  const string path_;
  const int64 buffer_bytes_, file_bytes_;
};

REGISTER_KERNEL_BUILDER(Name("DeepfmRecords").Device(DEVICE_CPU), Records::Op);

REGISTER_OP("DeepfmChunks")
    .Input("chunks: variant")       // a dataset of packed records
    .Input("size: int64")           // records in each resulting chunk but the last
    .Input("shuffle_buffer: int64")  // records from which the next is drawn; 0 keeps the order
    .Input("seed: int64")
    .Input("seed2: int64")
    .Input("skip: int64")           // records to skip, after shuffling
    .Input("take: int64")           // most records to take after these; below 0: all
    .Output("handle: variant")
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).take(take).batch(size), in the "
         "same order.");

class Chunks : public PackedDataset<Chunks> {
 public:
  explicit Chunks(OpKernelContext* context)
      : PackedDataset(context, Int64(context, 1)),
        shuffle_buffer_(Int64(context, 2)),
        seed_(Int64(context, 3)),
        seed2_(Int64(context, 4)),
        skip_(Int64(context, 5)),
        take_(Int64(context, 6)) {
    DatasetBase* input;
    OP_REQUIRES_OK(context, GetDatasetFromVariantTensor(context->input(0), &input));
    input->Ref();
    input_.reset(input);
  }
  const DatasetBase* input() const override { return input_.get(); }

  class Iterator : public PackedIterator<Chunks> {
   public:
    explicit Iterator(const Params& params)
        : PackedIterator<Chunks>(params),
          parent_(dataset()->seed_, dataset()->seed2_),
          random_(&parent_),
          to_skip_(dataset()->skip_),
          to_take_(dataset()->take_) {}

    Status Initialize(IteratorContext* context) override {
#ifdef DEEPFM_TENSORFLOW_2
      return dataset()->input_->MakeIterator(context, this, prefix(), &input_);
#else
      return dataset()->input_->MakeIterator(context, prefix(), &input_);
#endif
    }

   protected:
    Status Next(IteratorContext* context, StringPiece* record, bool* end) override {
      *end = to_take_ == 0;
      for (; !*end && to_skip_ > 0; --to_skip_) TF_RETURN_IF_ERROR(Draw(context, record, end));
      if (*end) return Ok();
      if (to_take_ > 0) --to_take_;
      return Draw(context, record, end);
    }

   private:
    // Gets the next record in the order of ShuffleDataset, whose buffer is a ring: one of its
    // records is drawn, and the oldest takes that one's place. The record stays valid until the
    // next call.
    Status Draw(IteratorContext* context, StringPiece* record, bool* end) {
      const int64 size = dataset()->shuffle_buffer_;
      if (size <= 1) return Pull(context, record, end);
      while (newest_ - oldest_ < size) {
        TF_RETURN_IF_ERROR(Pull(context, record, end));
        if (*end) break;
        if (static_cast<int64>(buffer_.size()) < size) {
          buffer_.emplace_back(record->begin(), record->end());
        } else {  // reuse the memory of the previous record here, unless it was far longer
          std::vector<char>& place = buffer_[newest_ % size];
          if (place.capacity() / 2 > record->size() + 64) std::vector<char>().swap(place);
          place.assign(record->begin(), record->end());
        }
        ++newest_;
      }
      *end = newest_ == oldest_;
      if (*end) return Ok();
      std::vector<char>& oldest = buffer_[oldest_ % size];
      oldest.swap(buffer_[Drawn(0)]);
      *record = {oldest.data(), oldest.size()};
      if (newest_ - oldest_ == size) {  // fetch the next record, and where the one after it is
        __builtin_prefetch(&buffer_[Drawn(2)]);
        const std::vector<char>& next = buffer_[Drawn(1)];
        for (size_t i = 0; i < next.size(); i += 64) __builtin_prefetch(next.data() + i);
      }
      ++oldest_;
      numbers_[0] = numbers_[1];
      numbers_[1] = numbers_[2];
      numbers_[2] = random_();
      return Ok();
    }

    // The place of the record that this draw takes; or, while the buffer stays full, the draw after
    // `later` others.
    int64 Drawn(int later) const {
      return (oldest_ + later + numbers_[later] % (newest_ - oldest_)) %
             dataset()->shuffle_buffer_;
    }

    // Gets the next record in the order of the input; it stays valid until the next call.
    Status Pull(IteratorContext* context, StringPiece* record, bool* end) {
      while (at_ == chunk_.size() && input_) {
        std::vector<Tensor> element;
        TF_RETURN_IF_ERROR(input_->GetNext(context, &element, end));
        if (*end) {
          input_.reset();
        } else {
          TF_RETURN_IF_ERROR(Packed::Open(element[0], &chunk_));
          at_ = 0;
        }
      }
      *end = at_ == chunk_.size();
      if (!*end) *record = chunk_[at_++];
      return Ok();
    }

    std::unique_ptr<IteratorBase> input_;
    Packed chunk_;  // chunk of the input, of which `at_` records are taken
    size_t at_ = 0;
    // Record i, counted as in oldest_ and newest_, is at i % shuffle_buffer. Not strings, because
    // swapping two of TensorFlow's touches the memory of both.
    std::vector<std::vector<char>> buffer_;
    int64 oldest_ = 0, newest_ = 0;
    random::PhiloxRandom parent_;
    random::SingleSampleAdapter<random::PhiloxRandom> random_;
    uint32 numbers_[3] = {random_(), random_(), random_()};  // of this draw and those that follow
    int64 to_skip_, to_take_;
  };

 private:
  core::RefCountPtr<DatasetBase> input_;
  const int64 shuffle_buffer_, seed_, seed2_, skip_, take_;
};

REGISTER_KERNEL_BUILDER(Name("DeepfmChunks").Device(DEVICE_CPU), Chunks::Op);

}  // namespace deepfm
