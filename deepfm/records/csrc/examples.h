// Serialized tf.train.Examples: parses and writes them.
// https://developers.google.com/protocol-buffers/docs/encoding
#pragma once

#include <algorithm>
#include <vector>

#include "bytes.h"

namespace deepfm {
namespace codec {

constexpr uint8 kFeatures = 0x0A, kBytesList = 0x0A, kFloats = 0x12, kInt64s = 0x1A;  // tags

// Reads a message from its beginning; after a failure `good` stays false.
struct Reader {
  explicit Reader(Bytes message)
      : at(reinterpret_cast<const uint8*>(message.data)), end(at + message.size) {}

  uint64 Varint() {
    if (at < end && *at < 128) return *at++;  // as most are
    uint64 number = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
      const uint8 byte = *at++;
      number |= uint64{byte & 127u} << shift;
      if (byte < 128) return number;
    }
    good = false;
    return 0;
  }

  // The next `size` bytes.
  Bytes Take(uint64 size) {
    good &= size <= static_cast<uint64>(end - at);
    const Bytes taken{reinterpret_cast<const char*>(at), good ? static_cast<size_t>(size) : 0};
    at += taken.size;
    return taken;
  }

  const uint8* at;
  const uint8* end;
  bool good = true;
};

// What is in a message of exactly one field, which has this tag and its length in the shortest
// encoding; `good` is false if it is another message.
inline Reader Inside(Bytes message, uint8 tag) {
  Reader reader(message);
  reader.good = message.size > 0 && *reader.at++ == tag;
  const uint8* begin = reader.at;
  const uint64 size = reader.Varint();
  reader.good &= size == static_cast<uint64>(reader.end - reader.at) &&
                 (reader.at - begin == 1 || reader.at[-1] != 0);
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
    const uint64 key = reader_.Varint();
    if (key == 0x0A || key == 0x12) {  // as most are: field 1 or 2, of bytes
      number = key >> 3;
      type = kBytes;
      content = reader_.Take(reader_.Varint());
      return reader_.good;
    }
    return Read(key, 100) && type != kEndGroup ? true : reader_.good = false;
  }

  bool good() const { return reader_.good; }

  // Of the field that was read.
  uint64 number, varint;
  Type type;
  Bytes content;  // of kBytes, kFixed32 and kFixed64

 private:
  // Reads what follows a field's key, and within it so many groups in each other.
  __attribute__((noinline, cold)) bool Read(uint64 key, int depth) {
    number = key >> 3;
    if (!reader_.good || number == 0 || number >= 1 << 29 || (key & 7) > kFixed32) return false;
    type = static_cast<Type>(key & 7);
    switch (type) {
      case kVarint: varint = reader_.Varint(); break;
      case kBytes: content = reader_.Take(reader_.Varint()); break;
      case kFixed64: content = reader_.Take(8); break;
      case kFixed32: content = reader_.Take(4); break;
      case kEndGroup: break;
      case kGroup: {
        const uint64 group = number;
        do {
          if (depth == 0 || !Read(reader_.Varint(), depth - 1)) return false;
        } while (type != kEndGroup);
        type = kGroup;
        return number == group;
      }
    }
    return reader_.good;
  }

  Reader reader_;
};

// Reads the numbers of a field of a list, packed or not, behind the n that are in `numbers`; returns
// whether there is room for them, all are whole, and integers are in [0, limit) and floats finite.
inline bool Append(const Fields& field, int64 room, uint64 limit, int64* numbers, int64* n) {
  bool good = true;
  int64 i = *n;
  const auto put = [&](uint64 number) {
    good &= number < limit;
    numbers[i++] = number;
  };
  if (field.type == Fields::kVarint) {
    if (i == room) return false;
    put(field.varint);
  } else if (field.type == Fields::kBytes) {
    Reader packed(field.content);
    while (packed.at < packed.end && i < room) put(packed.Varint());
    good &= packed.good && packed.at == packed.end;
  }
  *n = i;
  return good;
}

inline bool Append(const Fields& field, int64 room, uint64, float* numbers, int64* n) {
  if (field.type != Fields::kBytes && field.type != Fields::kFixed32) return true;
  const int64 more = field.content.size / 4;
  if (field.content.size % 4 != 0 || more > room - *n) return false;
  if (more > 0) std::memcpy(numbers + *n, field.content.data, 4 * more);
  bool finite = true;
  for (int64 i = *n; i < *n + more; ++i) finite &= std::isfinite(numbers[i]);
  *n += more;
  return finite;
}

// A feature of a record: a message of one list.
struct Feature {
  Bytes message;
  bool there = false;

  // Reads the list with this tag; returns how many numbers it has, 0 if the feature is not there,
  // or -1 if it is another list, or bad; see Append.
  template <typename T>
  int64 Numbers(uint8 tag, int64 room, T* numbers, uint64 limit = 0) const {
    if (!there) return 0;
    Fields list(Inside(message, tag));
    int64 n = 0;
    bool good = true;  // TensorFlow's own decoder refuses a list that ends in a part without numbers
    while (list.Next()) {
      if (list.number != 1) continue;
      good = list.type != Fields::kBytes || list.content.size > 0;
      if (!Append(list, room, limit, numbers, &n)) return -1;
    }
    return good && list.good() ? n : -1;
  }
};

inline uint64 VarintSize(uint64 number) {
  uint64 size = 1;
  for (; number > 127; number >>= 7) ++size;
  return size;
}

// The bytes of a field with so many bytes in it, in a message.
inline uint64 Wrapped(uint64 size) { return 1 + VarintSize(size) + size; }

// Reads an entry of Features, whose last key and value count; returns whether it is a message.
inline bool ReadEntry(Bytes entry, Bytes* key, Bytes* value) {
  Fields parts{Reader(entry)};
  while (parts.Next()) {
    if (parts.type != Fields::kBytes || parts.number > 2) continue;
    *(parts.number == 1 ? key : value) = parts.content;
  }
  return parts.good();
}

// Parses Examples that are not ambiguous, the same as wire.numbers: with a label of 0, 1 or -1, ids in
// [0, limit) and finite values.
class Parser {
 public:
  Parser(int64 fields, int64 limit, bool with_labels)
      : fields_(fields), limit_(limit), with_labels_(with_labels), counts_(fields) {}

  // The most values that a record of so many bytes may hold: an id takes a byte, a value 4.
  static int64 MostValues(size_t bytes) { return bytes / 5; }

  // Parses a record; returns how many ids and values it has, -1 if it is bad. There is room for F,
  // or with `counts` for MostValues. These are null if each field has one; `weight` may be null.
  template <typename Count>
  int64 Parse(Bytes record, float* label, int64* ids, float* values, Count* counts,
              float* weight) {
    if (!Find(record, weight != nullptr)) return -1;
    const int64 room = counts != nullptr ? MostValues(record.size) : fields_;
    const int64 n = ids_.Numbers(kInt64s, room, ids, limit_);
    if (n < 0 || values_.Numbers(kFloats, n, values) != n) return -1;
    if (!CountsAre(n, counts)) return -1;
    *label = 0;
    if (with_labels_) {
      if (label_.Numbers(kFloats, 1, label) != 1 || !IsLabel(*label)) return -1;
      *label = Normal(*label) > 0;
    }
    if (weight == nullptr) return n;
    *weight = 1;
    return !weight_.there || (weight_.Numbers(kFloats, 1, weight) == 1 && IsWeight(*weight)) ? n
                                                                                              : -1;
  }

 private:
  // Whether the numbers of values of all fields, which this writes unless that is null, are n.
  template <typename Count>
  bool CountsAre(int64 n, Count* counts) {
    if (!counts_of_.there) {
      if (counts != nullptr) std::fill(counts, counts + fields_, 1);
      return n == fields_;
    }
    if (counts_of_.Numbers(kInt64s, fields_, counts_.data(), n + 1) != fields_) return false;
    int64 sum = 0;
    for (int64 f = 0; f < fields_; ++f) {
      if (counts == nullptr && counts_[f] != 1) return false;
      sum += counts_[f];  // none is above n, so this does not overflow
      if (counts != nullptr) counts[f] = counts_[f];
    }
    return sum == n;
  }

  // Finds the features of a record; whether those that count are there, once and in one piece.
  bool Find(Bytes record, bool with_weights) {
    for (Feature* feature : {&ids_, &counts_of_, &values_, &label_, &weight_}) {
      feature->there = false;
    }
    Fields entries(Inside(record, kFeatures));
    while (entries.Next()) {
      if (entries.number != 1 || entries.type != Fields::kBytes) continue;
      Bytes key{"", 0}, value{"", 0};
      if (!ReadEntry(entries.content, &key, &value)) return false;
      Feature* feature = FeatureOf(key);
      if (feature == nullptr) continue;
      const bool whole = Wrapped(key.size) + Wrapped(value.size) == entries.content.size;
      if (feature->there || !whole || (feature == &weight_ && !with_weights)) return false;
      *feature = {value, true};
    }
    return entries.good() && ids_.there && values_.there && label_.there == with_labels_;
  }

  // The feature with this name, if it counts.
  Feature* FeatureOf(Bytes key) {
    const auto is = [&](const char* name, size_t size) {
      return key.size == size && std::memcmp(key.data, name, size) == 0;
    };
    if (is("ids", 3)) return &ids_;
    if (is("values", 6)) return &values_;
    if (is("counts", 6)) return &counts_of_;
    if (!with_labels_) return nullptr;
    return is("label", 5) ? &label_ : is("weight", 6) ? &weight_ : nullptr;
  }

  const int64 fields_, limit_;
  const bool with_labels_;
  std::vector<int64> counts_;
  Feature ids_, counts_of_, values_, label_, weight_;
};

// The key of an Example; empty if there is none.
inline Bytes KeyOf(Bytes record) {
  Fields entries(Inside(record, kFeatures));
  while (entries.Next()) {
    if (entries.number != 1 || entries.type != Fields::kBytes) continue;
    Bytes key{"", 0}, value{"", 0};
    if (!ReadEntry(entries.content, &key, &value)) break;
    if (key.size != 3 || std::memcmp(key.data, "key", 3) != 0) continue;
    Fields list(Inside(value, kBytesList));
    if (list.Next() && list.number == 1 && list.type == Fields::kBytes) return list.content;
  }
  return {record.data, 0};
}

// An Example to write: n ids and values.
struct Example {
  const int64* counts;  // null: each field has one value
  int64 fields;
  const int64* ids;
  const float* values;
  int64 n;
  const float* label;
  const float* weight;  // null: there is none
  Bytes key;            // empty: there is none
};

// Writes messages from their ends to their beginnings, so that lengths are known in time.
struct Writer {
  void Raw(const void* from, uint64 size) {
    at -= size;
    if (size > 0) std::memcpy(at, from, size);
  }

  void Varint(uint64 number) {
    at -= VarintSize(number);
    char* to = at;
    for (; number > 127; number >>= 7) *to++ = static_cast<char>(number | 128);
    *to = static_cast<char>(number);
  }

  // The tag and the length of a field whose content ends at `end`.
  void Head(uint8 tag, const char* end) {
    Varint(end - at);
    *--at = static_cast<char>(tag);
  }

  // A feature with a list of this tag, whose only part `write` writes.
  template <typename Write>
  void Feature(const char* name, uint8 tag, const Write& write) {
    const char* end = at;
    write();
    if (at != end) Head(0x0A, end);
    Head(tag, end);
    Head(0x12, end);
    const char* end_of_name = at;
    Raw(name, std::strlen(name));
    Head(0x0A, end_of_name);
    Head(0x0A, end);
  }

  void Floats(const char* name, const float* numbers, int64 n) {
    Feature(name, kFloats, [&] { Raw(numbers, 4 * n); });
  }

  void Int64s(const char* name, const int64* numbers, int64 n) {
    Feature(name, kInt64s, [&] {
      for (int64 i = n; i > 0; --i) Varint(numbers[i - 1]);
    });
  }

  char* at;
};

// Writes an Example as tf.train.Example.SerializeToString does, up to `end`; returns its beginning.
inline char* WriteExample(const Example& example, char* end) {
  Writer to{end};
  if (example.weight != nullptr) to.Floats("weight", example.weight, 1);
  to.Floats("values", example.values, example.n);
  to.Floats("label", example.label, 1);
  if (example.key.size > 0) {
    to.Feature("key", kBytesList, [&] { to.Raw(example.key.data, example.key.size); });
  }
  to.Int64s("ids", example.ids, example.n);
  if (example.counts != nullptr) to.Int64s("counts", example.counts, example.fields);
  to.Head(kFeatures, end);
  return to.at;
}

}  // namespace codec
}  // namespace deepfm
