// The codec's C functions, which codec.py calls. Each does a whole block: it returns -1, or the
// index of the first record that is bad, which Python's plain readers then explain.
#include "examples.h"
#include "fingerprint.h"
#include "frames.h"
#include "lines.h"
#include "numbers.h"

namespace deepfm {
namespace codec {

// Where the numbers of records go, with room for all that they may have; codec.py's _Arrays.
struct Arrays {
  float* labels;
  int64* ids;
  float* values;
  int64* counts;   // null: each field has one value
  float* weights;  // null: there are none
  const char* text;  // to encode with keys, text[key_starts:key_ends]; null: there are none
  const int64* key_starts;
  const int64* key_ends;
};

static float* WeightOf(const Arrays& to, int64 i) {
  return to.weights == nullptr ? nullptr : to.weights + i;
}

static Bytes Cut(const char* data, const int64* starts, const int64* ends, int64 i) {
  return {data + starts[i], static_cast<size_t>(ends[i] - starts[i])};
}

extern "C" {

// The frames at the beginning of data: returns how many are good.
int64 deepfm_scan(const char* data, int64 size, int64* starts, int64* ends, int64 room,
                  int64* why) {
  Stop stop;
  const int64 n = Scan({data, static_cast<size_t>(size)}, starts, ends, room, &stop);
  *why = stop;
  return n;
}

// The first place from `at` on where a header is, or -1.
int64 deepfm_next_header(const char* data, int64 size, int64 at) {
  for (; at + static_cast<int64>(kHeader) <= size; ++at) {
    if (IsHeader(data + at)) return at;
  }
  return -1;
}

// Parses the Examples data[start:end]; `pairs` is how many ids and values they have.
int64 deepfm_decode(const char* data, const int64* starts, const int64* ends, int64 n,
                    const Schema* schema, const Arrays* to, int64* pairs) {
  Parser parser(schema->field_size, schema->limit, schema->with_labels);
  *pairs = 0;
  for (int64 i = 0; i < n; ++i) {
    int64* counts = schema->multi_valued ? to->counts + i * schema->field_size : nullptr;
    const int64 found = parser.Parse(Cut(data, starts, ends, i), to->labels + i, to->ids + *pairs,
                                     to->values + *pairs, counts, WeightOf(*to, i));
    if (found < 0) return i;
    *pairs += found;
  }
  return -1;
}

// Parses the lines of a text that hold a record; there are `rows`, with `pairs` ids and values.
int64 deepfm_decode_lines(const char* text, int64 size, const Schema* schema, const Arrays* to,
                          int64* rows, int64* pairs) {
  LineParser parser(*schema);
  *rows = *pairs = 0;
  const char* end = text + size;
  for (const char *at = text, *line_end; at < end; at = line_end + 1) {
    line_end = LineEnd(at, end);
    if (!HoldsRecord(at, line_end)) continue;
    int64* counts = schema->multi_valued ? to->counts + *rows * schema->field_size : nullptr;
    const int64 found = parser.Parse(at, line_end, to->labels + *rows, to->ids + *pairs,
                                     to->values + *pairs, counts, WeightOf(*to, *rows));
    if (found < 0) return *rows;
    *pairs += found;
    ++*rows;
  }
  return -1;
}

// The most fields that a line of a text needs; see FieldsOf.
int64 deepfm_most_fields(const char* text, int64 size, int64 named) {
  int64 most = 0;
  const char* end = text + size;
  for (const char *at = text, *line_end; at < end; at = line_end + 1) {
    line_end = LineEnd(at, end);
    most = std::max(most, FieldsOf(at, line_end, named != 0));
  }
  return most;
}

// Writes n records with rows of `width` ids as frames at the end of `room` bytes, which suffice;
// `sizes` are their bytes.
int64 deepfm_encode(const Arrays* from, int64 n, int64 width, int64 fields, char* to, int64 room,
                    int64* sizes) {
  char* end = to + room;
  for (int64 i = n - 1; i >= 0; --i) {
    int64 found = width;
    const int64* counts = from->counts == nullptr ? nullptr : from->counts + i * fields;
    if (counts != nullptr) {
      found = 0;
      for (int64 f = 0; f < fields; ++f) {
        if (counts[f] < 0 || counts[f] > width - found) return i;
        found += counts[f];
      }
    }
    Bytes key{"", 0};
    if (from->text != nullptr) key = Cut(from->text, from->key_starts, from->key_ends, i);
    const Example example{counts, fields, from->ids + i * width, from->values + i * width, found,
                          from->labels + i, WeightOf(*from, i), key};
    char* end_of_payload = end - (kFrame - kHeader);
    char* begin = WriteExample(example, end_of_payload) - kHeader;
    WriteAround(begin, end_of_payload - begin - kHeader);
    sizes[i] = end - begin;
    end = begin;
  }
  return -1;
}

// Where the key of each Example data[start:end] is; it is empty if there is none.
int64 deepfm_keys(const char* data, const int64* starts, const int64* ends, int64 n,
                  int64* key_starts, int64* key_ends) {
  for (int64 i = 0; i < n; ++i) {
    const Bytes key = KeyOf(Cut(data, starts, ends, i));
    key_starts[i] = key.data - data;
    key_ends[i] = key_starts[i] + key.size;
  }
  return n;
}

// FarmHash's Fingerprint64 of each text[start:end].
int64 deepfm_fingerprints(const char* text, const int64* starts, const int64* ends, int64 n,
                          uint64* to) {
  for (int64 i = 0; i < n; ++i) to[i] = Fingerprint(text + starts[i], ends[i] - starts[i]);
  return n;
}

// Writes each number on a line of its own, of at most 16 bytes with its end; returns their bytes.
int64 deepfm_lines(const float* numbers, int64 n, char* to) {
  char* at = to;
  for (int64 i = 0; i < n; ++i) {
    at = WriteNumber(numbers[i], at);
    *at++ = '\n';
  }
  return at - to;
}

}  // extern "C"

}  // namespace codec
}  // namespace deepfm
