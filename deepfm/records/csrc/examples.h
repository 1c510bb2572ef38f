// Serialized tf.train.Examples: parses and writes them.
// https://developers.google.com/protocol-buffers/docs/encoding
#pragma once

#include <algorithm>
#include <vector>

#include "bytes.h"

namespace deepfm {
namespace codec {

// Reads a serialized tf.train.Example that is, apart from its numbers, byte for byte as WriteExample
// writes it, from its beginning; after a failure `good` stays false.
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

inline Reader ReaderOf(Bytes message) {
  const uint8* begin = reinterpret_cast<const uint8*>(message.data);
  return {begin, begin + message.size};
}

// A reader of what is in a message of one field with this tag; `good` is false if it is another.
inline Reader Inside(Bytes message, uint8 tag) {
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
  Bytes content;  // of kBytes, kFixed32 and kFixed64

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

// The lists of a record.
struct Lists {
  std::vector<int64> ids, counts;
  std::vector<float> values, label, weight;
  bool has_ids, has_counts, has_values, has_label, has_weight;
};

// Appends the numbers of a list's field, packed or not; returns whether it holds whole numbers.
inline bool Append(const Fields& field, std::vector<int64>* numbers) {
  if (field.type == Fields::kVarint) numbers->push_back(field.varint);
  if (field.type != Fields::kBytes) return true;
  Reader packed = ReaderOf(field.content);
  while (packed.good && packed.at < packed.end) numbers->push_back(packed.Varint());
  return packed.good;
}

inline bool Append(const Fields& field, std::vector<float>* numbers) {
  if (field.type != Fields::kBytes && field.type != Fields::kFixed32) return true;
  const size_t have = numbers->size(), bytes = field.content.size;
  if (bytes % 4 != 0) return false;
  numbers->resize(have + bytes / 4);
  if (bytes > 0) std::memcpy(numbers->data() + have, field.content.data, bytes);
  return true;
}

// Reads the list of a feature with this tag, which must be the first of its name.
template <typename T>
bool ReadFeature(Bytes feature, uint8 tag, std::vector<T>* numbers, bool* has) {
  Fields list(Inside(feature, tag));
  if (*has) return false;
  *has = true;
  numbers->clear();
  bool good = true;  // TensorFlow's own decoder refuses a list that ends in a part without numbers
  while (list.Next()) {
    if (list.number != 1) continue;
    good = list.type != Fields::kBytes || list.content.size > 0;
    if (!Append(list, numbers)) return false;
  }
  return good && list.good();
}

// Reads any record that is not ambiguous: the same as wire.lists.
inline bool ReadLists(Bytes record, bool with_labels, bool with_weights, Lists* lists) {
  lists->has_ids = lists->has_counts = lists->has_values = false;
  lists->has_label = lists->has_weight = false;
  Fields entries(Inside(record, kFeatures));
  while (entries.Next()) {
    if (entries.number != 1 || entries.type != Fields::kBytes) continue;
    Bytes key{"", 0}, value{"", 0};
    size_t size = 0;  // of an entry that is one key and one value
    Fields parts(ReaderOf(entries.content));
    while (parts.Next()) {
      if (parts.type != Fields::kBytes || parts.number > 2) continue;
      (parts.number == 1 ? key : value) = parts.content;
    }
    if (!parts.good()) return false;
    for (const Bytes& part : {key, value}) {
      size += 2 + part.size;
      for (size_t n = part.size; n > 127; n >>= 7) ++size;
    }
    const bool whole = size == entries.content.size;
    bool good = true;
    auto is = [&](const char* name) {
      return key.size == std::strlen(name) && std::memcmp(key.data, name, key.size) == 0;
    };
    if (is("ids")) {
      good = whole && ReadFeature(value, kInt64s, &lists->ids, &lists->has_ids);
    } else if (is("counts")) {
      good = whole && ReadFeature(value, kInt64s, &lists->counts, &lists->has_counts);
    } else if (is("values")) {
      good = whole && ReadFeature(value, kFloats, &lists->values, &lists->has_values);
    } else if (is("label") && with_labels) {
      good = whole && ReadFeature(value, kFloats, &lists->label, &lists->has_label);
    } else if (is("weight") && with_labels) {
      good = whole && with_weights &&
             ReadFeature(value, kFloats, &lists->weight, &lists->has_weight);
    }
    if (!good) return false;
  }
  return entries.good() && lists->has_ids && lists->has_values &&
         lists->has_label == with_labels;
}

// Parses Examples with a label of 0, 1 or -1, ids in [0, limit) and finite values.
class Parser {
 public:
  Parser(int64 fields, int64 limit, bool with_labels)
      : fields_(fields), limit_(limit), with_labels_(with_labels) {}

  // The most values that a record of so many bytes may hold: an id takes a byte, a value 4.
  static int64 MostValues(size_t bytes) { return bytes / 5; }

  // Parses a record of one value a field; returns whether it is good. `weight` may be null.
  bool Parse(Bytes record, float* label, int64* ids, float* values, float* weight) {
    if (AsEncoded(Inside(record, kFeatures), fields_, label, ids, values, weight)) return true;
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

  // Parses a record with counts, or one value a field; returns how many ids and values it has, of
  // which there is room for MostValues, or -1 if it is bad.
  template <typename Count>
  int64 ParseSeveral(Bytes record, float* label, int64* ids, float* values, Count* counts,
                     float* weight) {
    Reader reader = Inside(record, kFeatures);
    const int64 sum = Counts(&reader, counts);
    if (sum >= 0 && AsEncoded(reader, sum, label, ids, values, weight)) return sum;
    if (!Other(record, label, weight)) return -1;
    std::fill(counts, counts + fields_, 1);
    std::copy(lists_.counts.begin(), lists_.counts.end(), counts);
    std::copy(lists_.ids.begin(), lists_.ids.end(), ids);
    std::copy(lists_.values.begin(), lists_.values.end(), values);
    return lists_.ids.size();
  }

 private:
  // Reads the number of values of each field; returns their sum, or -1 if they are not as encoded.
  template <typename Count>
  int64 Counts(Reader* reader, Count* counts) {
    Reader ahead = *reader;
    const uint8* until = ahead.List("counts", 6, kInt64s);
    if (!ahead.good) {
      std::fill(counts, counts + fields_, 1);
      return fields_ <= MostValues(reader->end - reader->at) ? fields_ : -1;
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
    return reader->at == until && sum <= MostValues(reader->end - reader->at) ? sum : -1;
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
    if (!reader.good || reader.at != until || largest >= static_cast<uint64>(limit_)) return false;
    until = reader.List("label", 5, kFloats);
    if (!reader.good || until - reader.at != 4) return false;
    *label = Load<float>(reader.at);
    if (Load<uint32>(reader.at) != 0 && *label != 1) return false;
    if (!with_labels_) *label = 0;
    reader.at = until;
    until = reader.List("values", 6, kFloats);
    if (!reader.good || until - reader.at != 4 * n) return false;
    if (n > 0) std::memcpy(values, reader.at, 4 * n);
    bool finite = true;
    for (int64 i = 0; i < n; ++i) finite &= std::isfinite(values[i]);
    if (weight != nullptr) *weight = 1;
    if (until == reader.end) return finite;
    if (weight == nullptr) return false;
    reader.at = until;
    until = reader.List("weight", 6, kFloats);
    if (!reader.good || until - reader.at != 4 || until != reader.end) return false;
    *weight = Load<float>(reader.at);
    return finite && IsWeight(*weight);
  }

  // Parses any other record into lists_, with counts that are there or empty; whether it is good.
  bool Other(Bytes record, float* label, float* weight) {
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
      if (id < 0 || id >= limit_) return false;
    }
    for (float value : lists_.values) {
      if (!std::isfinite(value)) return false;
    }
    *label = 0;
    if (with_labels_) {
      if (lists_.label.size() != 1 || !IsLabel(lists_.label[0])) return false;
      *label = Normal(lists_.label[0]) > 0;
    }
    if (weight == nullptr) return true;
    *weight = 1;
    if (!lists_.has_weight) return true;
    if (lists_.weight.size() != 1) return false;
    *weight = lists_.weight[0];
    return IsWeight(*weight);
  }

  const int64 fields_, limit_;
  const bool with_labels_;
  Lists lists_;
};

inline uint64 VarintSize(uint64 number) {
  uint64 size = 1;
  for (; number > 127; number >>= 7) ++size;
  return size;
}

inline char* WriteVarint(uint64 number, char* to) {
  for (; number > 127; number >>= 7) *to++ = static_cast<char>(number | 128);
  *to++ = static_cast<char>(number);
  return to;
}

// The bytes of a field with so many bytes in it, in a message.
inline uint64 Wrapped(uint64 size) { return 1 + VarintSize(size) + size; }

inline char* WriteField(uint8 tag, uint64 size, char* to) {
  *to = static_cast<char>(tag);
  return WriteVarint(size, to + 1);
}

// A list of an Example: Features.feature, its key, its value, the list and the packed numbers.
struct ListHeader {
  ListHeader(const char* name, uint8 tag, uint64 numbers)
      : name(name), tag(tag), numbers(numbers), length(std::strlen(name)),
        list(numbers == 0 ? 0 : Wrapped(numbers)), feature(Wrapped(list)),
        entry(Wrapped(length) + Wrapped(feature)) {}

  uint64 size() const { return Wrapped(entry); }

  // Writes all but the numbers.
  char* Write(char* to) const {
    to = WriteField(0x0A, length, WriteField(0x0A, entry, to));
    std::memcpy(to, name, length);
    to = WriteField(tag, list, WriteField(0x12, feature, to + length));
    return numbers == 0 ? to : WriteField(0x0A, numbers, to);
  }

  const char* name;
  uint8 tag;
  uint64 numbers, length, list, feature, entry;  // bytes
};

// An Example to write: n ids and values.
struct Example {
  const int64* counts;  // null: each field has one value
  int64 fields;
  const int64* ids;
  const float* values;
  int64 n;
  float label;
  const float* weight;  // null: there is none

  // The most bytes that it takes.
  static uint64 Most(int64 fields, int64 n) { return 256 + 10 * (fields + n) + 4 * n; }
};

// Writes an Example as tf.train.Example.SerializeToString does; returns its end.
inline char* WriteExample(const Example& example, char* to) {
  uint64 of_counts = 0, of_ids = 0;
  for (int64 f = 0; f < example.fields && example.counts != nullptr; ++f) {
    of_counts += VarintSize(example.counts[f]);
  }
  for (int64 i = 0; i < example.n; ++i) of_ids += VarintSize(example.ids[i]);
  const ListHeader counts("counts", kInt64s, of_counts), ids("ids", kInt64s, of_ids),
      label("label", kFloats, 4), values("values", kFloats, 4 * example.n),
      weight("weight", kFloats, 4);
  uint64 size = ids.size() + label.size() + values.size();
  if (example.counts != nullptr) size += counts.size();
  if (example.weight != nullptr) size += weight.size();
  to = WriteField(kFeatures, size, to);
  if (example.counts != nullptr) {
    to = counts.Write(to);
    for (int64 f = 0; f < example.fields; ++f) to = WriteVarint(example.counts[f], to);
  }
  to = ids.Write(to);
  for (int64 i = 0; i < example.n; ++i) to = WriteVarint(example.ids[i], to);
  auto floats = [&](const ListHeader& header, const float* numbers) {
    to = header.Write(to);
    if (header.numbers > 0) std::memcpy(to, numbers, header.numbers);
    to += header.numbers;
  };
  floats(label, &example.label);
  floats(values, example.values);
  if (example.weight != nullptr) floats(weight, example.weight);
  return to;
}

}  // namespace codec
}  // namespace deepfm
