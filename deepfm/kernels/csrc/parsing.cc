// Parsers for packed records as records.encode writes them, and for plain LibSVM lines.
//
// data/records.py does the same with TensorFlow's own ops; tests compare the two, and it takes over
// if these are not built.
//
// B: records in a batch. F: fields.
#include <cmath>

#include "kernels.h"
#include "packed.h"
#include "tensorflow/core/lib/strings/numbers.h"

namespace deepfm {

REGISTER_OP("DeepfmPack")
    .Input("records: string")
    .Output("packed: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return Status::OK();
    });

void Pack(OpKernelContext* context) {
  Tensor* packed = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({2}), &packed));
  const auto records = context->input(0).flat<string>();
  Packer packer;
  for (int64 i = 0; i < records.size(); ++i) packer.Add(records(i));
  packer.MoveTo(packed);
}
DEEPFM_REGISTER("DeepfmPack", Pack);

REGISTER_OP("DeepfmUnpack")
    .Input("packed: string")
    .Output("records: string")
    .SetShapeFn(Ranks<1>);

void Unpack(OpKernelContext* context) {
  Packed packed;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &packed));
  const int64 n = packed.size();
  string* records;
  OP_REQUIRES_OK(context, Allocate(context, 0, {n}, &records));
  for (int64 i = 0; i < n; ++i) records[i].assign(packed[i].data(), packed[i].size());
}
DEEPFM_REGISTER("DeepfmUnpack", Unpack);

// As Ranks, with a vector for each further output.
template <int... ranks>
Status RanksAndVectors(InferenceContext* c) {
  for (int i = sizeof...(ranks); i < c->num_outputs(); ++i) {
    c->set_output(i, c->UnknownShapeOfRank(1));
  }
  return Ranks<ranks...>(c);
}

REGISTER_OP("DeepfmParse")
    .Input("serialized: string")             // packed
    .Output("good: bool")                    // []
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, F]
    .Output("values: float")                 // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1")
    .Attr("feature_size: int")
    .Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(RanksAndVectors<0, 1, 2, 2>)
    .Doc("Parses records that are, apart from their numbers, byte for byte as records.encode "
         "writes them, with a label of 0 or 1, ids in [0, feature_size) and finite values. With "
         "num_weights 1 a record may have a weight, finite and not negative; without one it weighs "
         "1. If any record is not so, `good` is false and the other outputs are meaningless.");

// Reads a serialized tf.train.Example from its beginning; after a failure `good` stays false.
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

constexpr uint8 kFloats = 0x12, kInt64s = 0x1A;

// A reader of a record's features; `good` is false if it has none.
Reader Features(StringPiece record) {
  const uint8* begin = reinterpret_cast<const uint8*>(record.data());
  Reader reader{begin, begin + record.size()};
  reader.Last(0x0A, reader.end);  // Example.features
  return reader;
}

bool IsWeight(float number) { return std::isfinite(number) && number >= 0; }

// Parses the ids, the label, the values, `fields` of each, and the weight, unless that is null;
// returns whether these are good.
bool ParseFeatures(Reader reader, int64 fields, int64 feature_size, float* label, int64* ids,
                   float* values, float* weight) {
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
  if (!reader.good || until - reader.at != 4 * fields) return false;
  std::memcpy(values, reader.at, 4 * fields);
  bool finite = true;
  for (int64 i = 0; i < fields; ++i) finite &= std::isfinite(values[i]);
  if (weight != nullptr) *weight = 1;
  if (until == reader.end) return finite;
  if (weight == nullptr) return false;
  reader.at = until;
  until = reader.List("weight", 6, kFloats);
  if (!reader.good || until - reader.at != 4 || until != reader.end) return false;
  std::memcpy(weight, reader.at, 4);
  return finite && IsWeight(*weight);
}

// Allocates output i for the weights of n records; null if the operator has no such output.
Status AllocateWeights(OpKernelContext* context, int i, int64 n, float** weights) {
  *weights = nullptr;
  return i < context->num_outputs() ? Allocate(context, i, {n}, weights) : Status::OK();
}

float* WeightOf(float* weights, int64 i) { return weights == nullptr ? nullptr : weights + i; }

// Parses a batch: parse(record, F, feature_size, &label, ids, values, &weight or null) -> whether
// it is good.
template <typename Parse>
void ParseAll(OpKernelContext* context, const Parse& parse) {
  const int64 fields = Attribute<int64>(context, "field_size");
  const int64 feature_size = Attribute<int64>(context, "feature_size");
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size();
  bool* good;
  float *labels, *values;
  int64* ids;
  OP_REQUIRES_OK(context, Allocate(context, 0, {}, &good));
  OP_REQUIRES_OK(context, Allocate(context, 1, {n}, &labels));
  OP_REQUIRES_OK(context, Allocate(context, 2, {n, fields}, &ids));
  OP_REQUIRES_OK(context, Allocate(context, 3, {n, fields}, &values));
  float* weights;
  OP_REQUIRES_OK(context, AllocateWeights(context, 4, n, &weights));
  *good = true;
  for (int64 i = 0; i < n && *good; ++i) {
    *good = parse(records[i], fields, feature_size, labels + i, ids + i * fields,
                  values + i * fields, WeightOf(weights, i));
  }
}

void ParseRecords(OpKernelContext* context) {
  ParseAll(context, [](StringPiece record, int64 fields, int64 feature_size, float* label,
                       int64* ids, float* values, float* weight) {
    return ParseFeatures(Features(record), fields, feature_size, label, ids, values, weight);
  });
}
DEEPFM_REGISTER("DeepfmParse", ParseRecords);

REGISTER_OP("DeepfmParseMultiValued")
    .Input("serialized: string")             // packed
    .Output("good: bool")                    // []
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, M]
    .Output("values: float")                 // [B, M]
    .Output("counts: int32")                 // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1")
    .Attr("feature_size: int")
    .Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(RanksAndVectors<0, 1, 2, 2, 2>)
    .Doc("As DeepfmParse, for records in which each field has as many values as `counts` says, or "
         "one if there are no counts; M is the most values of a record.");

// Parses the number of values of each field; returns their sum, or -1 if they are not good.
int64 ParseCounts(Reader* reader, int64 fields, int32* counts) {
  Reader ahead = *reader;
  const uint8* until = ahead.List("counts", 6, kInt64s);
  if (!ahead.good) {
    std::fill(counts, counts + fields, 1);
    return fields;
  }
  *reader = ahead;
  int64 sum = 0;
  for (int64 f = 0; f < fields; ++f) {
    const uint64 count = reader->Varint();
    // Each value takes more than one of the record's bytes.
    if (!reader->good || count > static_cast<uint64>(reader->end - reader->at)) return -1;
    counts[f] = count;
    sum += count;
  }
  return reader->at == until && sum <= reader->end - reader->at ? sum : -1;
}

void ParseMultiValued(OpKernelContext* context) {
  const int64 fields = Attribute<int64>(context, "field_size");
  const int64 feature_size = Attribute<int64>(context, "feature_size");
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size();
  bool* good;
  float *labels, *values;
  int64* ids;
  int32* counts;
  OP_REQUIRES_OK(context, Allocate(context, 0, {}, &good));
  OP_REQUIRES_OK(context, Allocate(context, 1, {n}, &labels));
  OP_REQUIRES_OK(context, Allocate(context, 4, {n, fields}, &counts));
  float* weights;
  OP_REQUIRES_OK(context, AllocateWeights(context, 5, n, &weights));
  std::vector<int64> all_ids, ends(n);
  std::vector<float> all_values;
  int64 longest = 0, end = 0;
  *good = true;
  for (int64 i = 0; i < n && *good; ++i) {
    Reader reader = Features(records[i]);
    const int64 sum = reader.good ? ParseCounts(&reader, fields, counts + i * fields) : -1;
    *good = sum >= 0;
    if (!*good) break;
    all_ids.resize(end + sum);
    all_values.resize(end + sum);
    *good = ParseFeatures(reader, sum, feature_size, labels + i, all_ids.data() + end,
                          all_values.data() + end, WeightOf(weights, i));
    ends[i] = end += sum;
    longest = std::max(longest, sum);
  }
  const int64 rows = *good ? n : 0;
  OP_REQUIRES_OK(context, Allocate(context, 2, {rows, longest}, &ids));
  OP_REQUIRES_OK(context, Allocate(context, 3, {rows, longest}, &values));
  std::fill(ids, ids + rows * longest, 0);
  std::fill(values, values + rows * longest, 0.0f);
  for (int64 i = 0, begin = 0; i < rows; begin = ends[i++]) {
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
    .Attr("field_size: int >= 1")
    .Attr("feature_size: int")
    .Attr("id_offset: int")
    .Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(RanksAndVectors<0, 1, 2, 2>)
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
  const int64 offset = Attribute<int64>(context, "id_offset");
  ParseAll(context, [=](StringPiece line, int64 fields, int64 feature_size, float* label,
                        int64* ids, float* values, float* weight) {
    return ParseLine(line, fields, feature_size, offset, label, ids, values, weight);
  });
}
DEEPFM_REGISTER("DeepfmParseLines", ParseLines);

}  // namespace deepfm
