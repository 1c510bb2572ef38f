// Parsers for packed records, serialized tf.train.Examples or plain LibSVM lines.
//
// data/records.py and data/libsvm.py do the same with TensorFlow's own ops; tests compare the two.
//
// B: records in a batch. F: fields. M: the most values of a record.
#include <cmath>

#include "kernels.h"
#include "packed.h"
#include "tensorflow/core/lib/strings/numbers.h"

namespace deepfm {

REGISTER_OP("DeepfmParse")
    .Input("serialized: string")             // packed
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, F]
    .Output("values: float")                 // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1").Attr("feature_size: int").Attr("with_labels: bool")
    .Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(Ranks<1, 2, 2>)
    .Doc("Parses Examples with a label of 0, 1 or -1, ids in [0, feature_size) and finite values. "
         "Without with_labels, labels and weights are passed over. With num_weights 1 a record may "
         "have a weight, finite and not negative; without one it weighs 1. Fails if any record is "
         "not so, or is ambiguous: if a feature, a message or a list comes twice or in parts.");

REGISTER_OP("DeepfmParseMultiValued")
    .Input("serialized: string")             // packed
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, M]
    .Output("values: float")                 // [B, M]
    .Output("counts: int32")                 // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1").Attr("feature_size: int").Attr("with_labels: bool")
    .Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(Ranks<1, 2, 2, 2>)
    .Doc("As DeepfmParse, for records in which each field has as many values as `counts` says, or "
         "one if there are no counts.");

// Reads a serialized tf.train.Example that is, apart from its numbers, byte for byte as
// records.encode writes it, from its beginning; after a failure `good` stays false.
struct Reader {
  const uint8* at;
  const uint8* end;
  bool good = true;

  uint64 Varint() {
    uint64 number = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
      const uint8 byte = *at++;
      number |= uint64{byte & 127u} << shift;
      if (byte < 128) return number;
    }
    good = false;
    return 0;
  }

  // The size in bytes of a field with this tag, whose length must be in its shortest encoding.
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

  // Reads the tag and length of a field that must end at `until`.
  void Last(uint8 tag, const uint8* until) {
    const uint64 size = Field(tag);
    good &= at + size == until;
  }

  // Reads up to the packed numbers, in `list`, of the feature with this name; returns their end.
  const uint8* List(const char* name, size_t length, uint8 list) {
    const uint64 entry = Field(0x0A);  // of Features.feature
    const uint8* until = at + entry;
    good &= Field(0x0A) == length && length <= static_cast<size_t>(end - at);
    if (!good) return at;
    good &= std::memcmp(at, name, length) == 0;  // FeatureEntry.key
    at += length;
    Last(0x12, until);  // FeatureEntry.value
    Last(list, until);  // Feature.float_list or int64_list
    if (at == until) return until;  // an empty list
    Last(0x0A, until);  // value
    return until;
  }
};

constexpr uint8 kFeatures = 0x0A, kFloats = 0x12, kInt64s = 0x1A;

Reader ReaderOf(StringPiece message) {
  const uint8* begin = reinterpret_cast<const uint8*>(message.data());
  return {begin, begin + message.size()};
}

// A reader of what is in a message of one field with this tag; `good` is false if it is another.
Reader Inside(StringPiece message, uint8 tag) {
  Reader reader = ReaderOf(message);
  reader.Last(tag, reader.end);
  return reader;
}

// Reads any message field by field, as protocol buffers are: unknown fields are passed over.
class Fields {
 public:
  enum Type { kVarint, kFixed64, kBytes, kGroup, kEndGroup, kFixed32 };

  explicit Fields(const Reader& message) : reader_(message) {}

  // Goes to the next field; false at the end, or if what follows is none.
  bool Next() {
    if (reader_.at == reader_.end || !reader_.good) return false;
    return Read(100) && type != kEndGroup ? true : reader_.good = false;
  }

  bool good() const { return reader_.good; }

  // Of the field that was read.
  uint64 number, varint;
  Type type;
  StringPiece content;  // of kBytes, kFixed32 and kFixed64

 private:
  // Reads a field, and within it so many groups in each other.
  bool Read(int depth) {
    const uint64 key = reader_.Varint();
    number = key >> 3;
    if (!reader_.good || number == 0 || number >= 1 << 29 || (key & 7) > kFixed32) return false;
    type = static_cast<Type>(key & 7);
    uint64 size = 0;
    switch (type) {
      case kVarint: varint = reader_.Varint(); return reader_.good;
      case kEndGroup: return true;
      case kGroup: {
        const uint64 group = number;
        do {
          if (depth == 0 || !Read(depth - 1)) return false;
        } while (type != kEndGroup);
        type = kGroup;
        return number == group;
      }
      case kBytes: size = reader_.Varint(); break;
      case kFixed64: size = 8; break;
      case kFixed32: size = 4; break;
    }
    if (!reader_.good || size > static_cast<uint64>(reader_.end - reader_.at)) return false;
    content = {reinterpret_cast<const char*>(reader_.at), static_cast<size_t>(size)};
    reader_.at += size;
    return true;
  }

  Reader reader_;
};

bool IsWeight(float number) { return std::isfinite(number) && number >= 0; }

// The lists of a record.
struct Lists {
  std::vector<int64> ids, counts;
  std::vector<float> values, label, weight;
  bool has_ids, has_counts, has_values, has_label, has_weight;
};

// Appends the numbers of a list's field, packed or not; returns whether it holds whole numbers.
bool Append(const Fields& field, std::vector<int64>* numbers) {
  if (field.type == Fields::kVarint) numbers->push_back(field.varint);
  if (field.type != Fields::kBytes) return true;
  Reader packed = ReaderOf(field.content);
  while (packed.good && packed.at < packed.end) numbers->push_back(packed.Varint());
  return packed.good;
}

bool Append(const Fields& field, std::vector<float>* numbers) {
  if (field.type != Fields::kBytes && field.type != Fields::kFixed32) return true;
  const size_t have = numbers->size(), bytes = field.content.size();
  if (bytes % 4 != 0) return false;
  numbers->resize(have + bytes / 4);
  if (bytes > 0) std::memcpy(numbers->data() + have, field.content.data(), bytes);
  return true;
}

// Reads the list of a feature with this tag, which must be the first of its name.
template <typename T>
bool ReadFeature(StringPiece feature, uint8 tag, std::vector<T>* numbers, bool* has) {
  Fields list(Inside(feature, tag));
  if (*has) return false;
  *has = true;
  numbers->clear();
  bool good = true;  // TensorFlow's own decoder refuses a list that ends in a part without numbers
  while (list.Next()) {
    if (list.number != 1) continue;
    good = list.type != Fields::kBytes || !list.content.empty();
    if (!Append(list, numbers)) return false;
  }
  return good && list.good();
}

// Reads any record that is not ambiguous: the same as wire.lists in records.
bool ReadLists(StringPiece record, bool with_labels, bool with_weights, Lists* lists) {
  lists->has_ids = lists->has_counts = lists->has_values = false;
  lists->has_label = lists->has_weight = false;
  Fields entries(Inside(record, kFeatures));
  while (entries.Next()) {
    if (entries.number != 1 || entries.type != Fields::kBytes) continue;
    StringPiece key, value;
    size_t size = 0;  // of an entry that is one key and one value
    Fields parts(ReaderOf(entries.content));
    while (parts.Next()) {
      if (parts.type != Fields::kBytes || parts.number > 2) continue;
      (parts.number == 1 ? key : value) = parts.content;
    }
    if (!parts.good()) return false;
    for (StringPiece part : {key, value}) {
      size += 2 + part.size();
      for (size_t n = part.size(); n > 127; n >>= 7) ++size;
    }
    const bool whole = size == entries.content.size();
    bool good = true;
    if (key == "ids") {
      good = whole && ReadFeature(value, kInt64s, &lists->ids, &lists->has_ids);
    } else if (key == "counts") {
      good = whole && ReadFeature(value, kInt64s, &lists->counts, &lists->has_counts);
    } else if (key == "values") {
      good = whole && ReadFeature(value, kFloats, &lists->values, &lists->has_values);
    } else if (key == "label" && with_labels) {
      good = whole && ReadFeature(value, kFloats, &lists->label, &lists->has_label);
    } else if (key == "weight" && with_labels) {
      good = whole && with_weights &&
             ReadFeature(value, kFloats, &lists->weight, &lists->has_weight);
    }
    if (!good) return false;
  }
  return entries.good() && lists->has_ids && lists->has_values &&
         lists->has_label == with_labels;
}

// Parses records of an operator's attributes.
class Parser {
 public:
  explicit Parser(OpKernelContext* context)
      : fields_(Attribute<int64>(context, "field_size")),
        feature_size_(Attribute<int64>(context, "feature_size")),
        with_labels_(Attribute<bool>(context, "with_labels")) {}

  int64 fields() const { return fields_; }

  // Parses a record of one value a field; returns whether it is good. `weight` may be null.
  bool Parse(StringPiece record, float* label, int64* ids, float* values, float* weight) {
    Reader reader = Inside(record, kFeatures);
    if (AsEncoded(reader, fields_, label, ids, values, weight)) return true;
    if (!Other(record, label, weight) || lists_.ids.size() != static_cast<size_t>(fields_)) {
      return false;
    }
    for (int64 count : lists_.counts) {
      if (count != 1) return false;
    }
    std::copy(lists_.ids.begin(), lists_.ids.end(), ids);
    std::copy(lists_.values.begin(), lists_.values.end(), values);
    return true;
  }

  // Parses a record with counts, or one value a field, and appends its ids and values.
  bool Parse(StringPiece record, float* label, std::vector<int64>* ids, std::vector<float>* values,
             int32* counts, float* weight) {
    const size_t begin = ids->size();
    Reader reader = Inside(record, kFeatures);
    const int64 sum = Counts(&reader, counts);
    if (sum >= 0) {
      ids->resize(begin + sum);
      values->resize(begin + sum);
      if (AsEncoded(reader, sum, label, ids->data() + begin, values->data() + begin, weight)) {
        return true;
      }
      ids->resize(begin);
      values->resize(begin);
    }
    if (!Other(record, label, weight)) return false;
    std::fill(counts, counts + fields_, 1);
    std::copy(lists_.counts.begin(), lists_.counts.end(), counts);
    ids->insert(ids->end(), lists_.ids.begin(), lists_.ids.end());
    values->insert(values->end(), lists_.values.begin(), lists_.values.end());
    return true;
  }

 private:
  // Reads the number of values of each field; returns their sum, or -1 if they are not as encoded.
  int64 Counts(Reader* reader, int32* counts) {
    Reader ahead = *reader;
    const uint8* until = ahead.List("counts", 6, kInt64s);
    if (!ahead.good) {
      std::fill(counts, counts + fields_, 1);
      return fields_;
    }
    *reader = ahead;
    int64 sum = 0;
    for (int64 f = 0; f < fields_; ++f) {
      const uint64 count = reader->Varint();
      // Each value takes more than one of the record's bytes.
      if (!reader->good || count > static_cast<uint64>(reader->end - reader->at)) return -1;
      counts[f] = count;
      sum += count;
    }
    return reader->at == until && sum <= reader->end - reader->at ? sum : -1;
  }

  // Parses the ids, the label, the values, n of each, and the weight, unless that is null; returns
  // whether these are good and as encoded, with a label of 0 or 1.
  bool AsEncoded(Reader reader, int64 n, float* label, int64* ids, float* values, float* weight) {
    if (!reader.good) return false;
    const uint8* until = reader.List("ids", 3, kInt64s);
    if (!reader.good) return false;
    uint64 largest = 0;
    for (int64 i = 0; i < n; ++i) {
      const uint64 id = reader.Varint();
      largest = std::max(largest, id);
      ids[i] = id;
    }
    if (!reader.good || reader.at != until || largest >= static_cast<uint64>(feature_size_)) {
      return false;
    }
    until = reader.List("label", 5, kFloats);
    if (!reader.good || until - reader.at != 4) return false;
    uint32 bits;
    std::memcpy(&bits, reader.at, 4);
    std::memcpy(label, reader.at, 4);
    if (bits != 0 && *label != 1) return false;
    if (!with_labels_) *label = 0;
    reader.at = until;
    until = reader.List("values", 6, kFloats);
    if (!reader.good || until - reader.at != 4 * n) return false;
    std::memcpy(values, reader.at, 4 * n);
    bool finite = true;
    for (int64 i = 0; i < n; ++i) finite &= std::isfinite(values[i]);
    if (weight != nullptr) *weight = 1;
    if (until == reader.end) return finite;
    if (weight == nullptr) return false;
    reader.at = until;
    until = reader.List("weight", 6, kFloats);
    if (!reader.good || until - reader.at != 4 || until != reader.end) return false;
    std::memcpy(weight, reader.at, 4);
    return finite && IsWeight(*weight);
  }

  // Parses any other record into lists_, with counts that are there or empty; whether it is good.
  bool Other(StringPiece record, float* label, float* weight) {
    if (!ReadLists(record, with_labels_, weight != nullptr, &lists_)) return false;
    const int64 n = lists_.ids.size();
    if (!lists_.has_counts) lists_.counts.clear();
    int64 sum = lists_.has_counts ? 0 : fields_;
    for (int64 count : lists_.counts) {
      // One by one, because a sum of large counts might overflow to the right one.
      if (count < 0 || count > n) return false;
      sum += count;
    }
    if (lists_.has_counts && lists_.counts.size() != static_cast<size_t>(fields_)) return false;
    if (sum != n || lists_.values.size() != lists_.ids.size()) return false;
    for (int64 id : lists_.ids) {
      if (id < 0 || id >= feature_size_) return false;
    }
    for (float value : lists_.values) {
      if (!std::isfinite(value)) return false;
    }
    *label = 0;
    if (with_labels_) {
      if (lists_.label.size() != 1) return false;
      // Denormal numbers are 0 to TensorFlow's threads, here as in its own ops.
      if (lists_.label[0] != 0 && std::fabs(lists_.label[0]) != 1) return false;
      *label = lists_.label[0] > 0;
    }
    if (weight == nullptr) return true;
    *weight = 1;
    if (!lists_.has_weight) return true;
    if (lists_.weight.size() != 1) return false;
    *weight = lists_.weight[0];
    return IsWeight(*weight);
  }

  const int64 fields_, feature_size_;
  const bool with_labels_;
  Lists lists_;
};

Status BadRecord(int64 i) {
  return errors::InvalidArgument("record ", i, " of a batch is damaged or breaks the schema");
}

// Allocates output i for the weights of n records; null if the operator has no such output.
Status AllocateWeights(OpKernelContext* context, int i, int64 n, float** weights) {
  *weights = nullptr;
  return i < context->num_outputs() ? Allocate(context, i, {n}, weights) : Status::OK();
}

float* WeightOf(float* weights, int64 i) { return weights == nullptr ? nullptr : weights + i; }

// Memory for what is parsed: outputs from `first` on.
struct Outputs {
  float *labels, *values, *weights;
  int64* ids;

  Status Allocate(OpKernelContext* context, int first, int64 n, int64 fields) {
    TF_RETURN_IF_ERROR(deepfm::Allocate(context, first, {n}, &labels));
    TF_RETURN_IF_ERROR(deepfm::Allocate(context, first + 1, {n, fields}, &ids));
    TF_RETURN_IF_ERROR(deepfm::Allocate(context, first + 2, {n, fields}, &values));
    return AllocateWeights(context, first + 3, n, &weights);
  }
};

void ParseRecords(OpKernelContext* context) {
  Parser parser(context);
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size(), fields = parser.fields();
  Outputs to;
  OP_REQUIRES_OK(context, to.Allocate(context, 0, n, fields));
  for (int64 i = 0; i < n; ++i) {
    const bool good = parser.Parse(records[i], to.labels + i, to.ids + i * fields,
                                   to.values + i * fields, WeightOf(to.weights, i));
    OP_REQUIRES(context, good, BadRecord(i));
  }
}
DEEPFM_REGISTER("DeepfmParse", ParseRecords);

void ParseMultiValued(OpKernelContext* context) {
  Parser parser(context);
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size(), fields = parser.fields();
  float *labels, *values, *weights;
  int64* ids;
  int32* counts;
  OP_REQUIRES_OK(context, Allocate(context, 0, {n}, &labels));
  OP_REQUIRES_OK(context, Allocate(context, 3, {n, fields}, &counts));
  OP_REQUIRES_OK(context, AllocateWeights(context, 4, n, &weights));
  std::vector<int64> all_ids, ends(n);
  std::vector<float> all_values;
  int64 longest = 0, end = 0;
  for (int64 i = 0; i < n; ++i) {
    const bool good = parser.Parse(records[i], labels + i, &all_ids, &all_values,
                                   counts + i * fields, WeightOf(weights, i));
    OP_REQUIRES(context, good, BadRecord(i));
    longest = std::max<int64>(longest, all_ids.size() - end);
    ends[i] = end = all_ids.size();
  }
  OP_REQUIRES_OK(context, Allocate(context, 1, {n, longest}, &ids));
  OP_REQUIRES_OK(context, Allocate(context, 2, {n, longest}, &values));
  std::fill(ids, ids + n * longest, 0);
  std::fill(values, values + n * longest, 0.0f);
  for (int64 i = 0, begin = 0; i < n; begin = ends[i++]) {
    std::copy(all_ids.data() + begin, all_ids.data() + ends[i], ids + i * longest);
    std::copy(all_values.data() + begin, all_values.data() + ends[i], values + i * longest);
  }
}
DEEPFM_REGISTER("DeepfmParseMultiValued", ParseMultiValued);

REGISTER_OP("DeepfmParseLines")
    .Input("lines: string")                  // packed
    .Output("good: bool")                    // []
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, F]
    .Output("values: float")                 // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1").Attr("feature_size: int").Attr("id_offset: int")
    .Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(Ranks<0, 1, 2, 2>)
    .Doc("Parses LibSVM lines of F pairs, one space before each, numbers without exponents, a "
         "label of 0, 1 or -1 and ids + id_offset in [0, feature_size). With num_weights 1 "
         "label:weight may stand for the label. If any line is not so, `good` is false and the "
         "other outputs are meaningless.");

// Parses the decimal number at `at`, as the nearest float, and moves `at` past it.
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

bool ParseLine(StringPiece line, int64 fields, int64 feature_size, int64 id_offset, float* label,
               int64* ids, float* values, float* weight) {
  const char *at = line.data(), *end = at + line.size();
  if (!ParseDecimal(&at, end, label)) return false;
  if (*label != 0 && std::fabs(*label) != 1) return false;
  *label = *label > 0;
  if (weight != nullptr) {
    *weight = 1;
    if (at < end && *at == ':') {
      ++at;
      if (!ParseDecimal(&at, end, weight) || !IsWeight(*weight)) return false;
    }
  }
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

void ParseLines(OpKernelContext* context) {
  const int64 fields = Attribute<int64>(context, "field_size");
  const int64 feature_size = Attribute<int64>(context, "feature_size");
  const int64 offset = Attribute<int64>(context, "id_offset");
  Packed lines;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &lines));
  const int64 n = lines.size();
  bool* good;
  OP_REQUIRES_OK(context, Allocate(context, 0, {}, &good));
  Outputs to;
  OP_REQUIRES_OK(context, to.Allocate(context, 1, n, fields));
  *good = true;
  for (int64 i = 0; i < n && *good; ++i) {
    *good = ParseLine(lines[i], fields, feature_size, offset, to.labels + i, to.ids + i * fields,
                      to.values + i * fields, WeightOf(to.weights, i));
  }
}
DEEPFM_REGISTER("DeepfmParseLines", ParseLines);

}  // namespace deepfm
