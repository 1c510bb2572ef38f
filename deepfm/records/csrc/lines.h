// Lines of LibSVM and LibFFM text, in which libsvm_text.explain_line finds no fault.
#pragma once

#include <algorithm>
#include <vector>

#include "bytes.h"
#include "fingerprint.h"
#include "numbers.h"

namespace deepfm {
namespace codec {

// The ids, first to last + 1, of a field.
struct Range {
  int64 begin, end, field;
};

// What a record must look like; see schema.Schema, and codec.py's _Schema, whose order this is.
struct Schema {
  int64 field_size, limit, id_offset, hash_buckets;
  int64 pad, multi_valued, named_fields, with_labels, weighted;  // 0 or 1
  int64 num_ranges;                                              // 0: ids do not tell their fields
  const Range* ranges;                                           // in ascending order
};

inline const char* PassBlanks(const char* at, const char* end) {
  while (at < end && IsBlank(*at)) ++at;
  return at;
}

// Whether a line holds a record: anything but blanks before its first #.
inline bool HoldsRecord(const char* at, const char* end) {
  at = PassBlanks(at, end);
  return at < end && *at != '#';
}

inline const char* LineEnd(const char* at, const char* end) {
  const void* newline = at < end ? std::memchr(at, '\n', end - at) : nullptr;
  return newline == nullptr ? end : static_cast<const char*>(newline);
}

// How many fields a line needs, as far as its text tells: as many as it has pairs, or if `named` the
// largest that one names + 1, but 0 if one names none.
inline int64 FieldsOf(const char* at, const char* end, bool named) {
  int64 most = 0;
  for (bool label = true; (at = PassBlanks(at, end)) < end && *at != '#'; label = false) {
    int64 colons = 0, digits = 0, field = 0;
    for (; at < end && !IsBlank(*at) && *at != '#'; ++at) {
      colons += *at == ':';
      if (colons > 0) continue;
      digits = IsDigit(*at) && digits >= 0 && digits < 6 ? digits + 1 : -1;
      if (digits > 0) field = 10 * field + (*at - '0');
    }
    if (label) continue;
    if (named && (colons != 2 || digits < 1)) return 0;
    most = named ? std::max(most, field + 1) : most + (colons > 0);
  }
  return most;
}

class LineParser {
 public:
  explicit LineParser(const Schema& schema)
      : s_(schema), positional_(!schema.named_fields && schema.num_ranges == 0),
        of_fields_(schema.field_size) {}

  // Parses a line that holds a record, whose label is 0, 1, or -1 if it has a minus sign; returns
  // how many ids and values it has, or -1 if it is bad. There is room for F; or, if fields may have
  // several values, for a pair in 4 bytes and for `counts`. `weight` may be null.
  int64 Parse(const char* at, const char* end, float* label, int64* ids, float* values,
              int64* counts, float* weight) {
    if (s_.hash_buckets > 0 && HashMayBeInId(at, end)) return -1;
    at = PassBlanks(at, end);
    if (!ParseNumber(&at, end, label) || !IsLabel(*label)) return -1;
    *label = std::signbit(*label) ? -1 : Normal(*label) > 0;
    float own = 1;
    if (s_.weighted && at < end && *at == ':') {
      ++at;
      if (!ParseNumber(&at, end, &own) || !IsWeight(own)) return -1;
    }
    if (weight != nullptr) *weight = own;
    const char* first = PassBlanks(at, end);
    if (end - first >= 4 && std::memcmp(first, "qid:", 4) == 0) return -1;  // of a query group
    if (s_.multi_valued) return ParseSeveral(at, end, ids, values, counts);
    return positional_ ? ParseSingle<true>(at, end, ids, values)
                       : ParseSingle<false>(at, end, ids, values);
  }

 private:
  struct Pair {
    int64 field, id;
    float value;
  };

  // Whether a '#' may begin a comment or belong to an id; as libsvm_text.HASH_IN_ID.
  static bool HashMayBeInId(const char* begin, const char* end) {
    for (const char* at = begin; at < end; ++at) {
      if (*at != '#' || at == begin) continue;
      if (!IsBlank(at[-1])) return true;
      if ((at[-1] == ' ' || at[-1] == '\t') && at + 1 < end && !IsBlank(at[1])) return true;
    }
    return false;
  }

  // Goes to the next pair, or to the end of the line; false if no blank precedes it.
  static bool ToPair(const char** at, const char* end) {
    if (end - *at > 1 && **at == ' ' && IsDigit((*at)[1])) {  // as most pairs are
      ++*at;
      return true;
    }
    if (*at == end || **at == '#') {
      *at = end;
      return true;
    }
    if (!IsBlank(**at)) return false;
    *at = PassBlanks(*at, end);
    if (*at < end && **at == '#') *at = end;
    return true;
  }

  // Fields that have one value each; those without one get 0.
  template <bool kInOrder>
  int64 ParseSingle(const char* at, const char* end, int64* ids, float* values) {
    std::fill(ids, ids + s_.field_size, 0);
    std::fill(values, values + s_.field_size, 0.0f);
    std::fill(of_fields_.begin(), of_fields_.end(), 0);
    for (int64 n = 0; ToPair(&at, end); ++n) {
      if (at == end) return kInOrder && !s_.pad && n < s_.field_size ? -1 : s_.field_size;
      Pair pair;
      if (!ParsePair<kInOrder>(&at, end, n, &pair)) return -1;
      if (!kInOrder && of_fields_[pair.field]++ > 0) return -1;
      ids[pair.field] = pair.id;
      // No -0 in padded rows, as if it were added to the zeros that fill them.
      values[pair.field] = kInOrder && s_.pad ? pair.value + 0.0f : pair.value;
    }
    return -1;
  }

  int64 ParseSeveral(const char* at, const char* end, int64* ids, float* values, int64* counts) {
    pairs_.clear();
    std::fill(counts, counts + s_.field_size, 0);
    for (int64 n = 0; ToPair(&at, end); ++n) {
      if (at == end) {
        if (positional_ && !s_.pad && n < s_.field_size) return -1;
        for (int64 f = 0, next = 0; f < s_.field_size; next += counts[f++]) of_fields_[f] = next;
        for (const Pair& pair : pairs_) {
          const int64 place = of_fields_[pair.field]++;
          ids[place] = pair.id;
          values[place] = pair.value;
        }
        return n;
      }
      Pair pair;
      if (!ParsePair<false>(&at, end, n, &pair)) return -1;
      ++counts[pair.field];
      pairs_.push_back(pair);
    }
    return -1;
  }

  // Parses the n-th pair of a line and checks it. Its field is n if `kInOrder`, or if nothing else
  // tells it.
  template <bool kInOrder>
  bool ParsePair(const char** at, const char* end, int64 n, Pair* pair) {
    pair->field = n;
    if (!kInOrder && s_.named_fields) {
      const char* begin = *at;
      for (pair->field = 0; *at < end && IsDigit(**at) && *at - begin < 7; ++*at) {
        pair->field = 10 * pair->field + (**at - '0');
      }
      if (*at == begin || *at - begin > 6 || *at == end || *(*at)++ != ':') return false;
    }
    if (!ParseId(at, end, &pair->id)) return false;
    if (!kInOrder && s_.num_ranges > 0) pair->field = FieldOf(pair->id);
    return pair->field >= 0 && pair->field < s_.field_size && ToId(&pair->id) &&
           ParseNumber(at, end, &pair->value) && std::isfinite(pair->value);
  }

  // Parses an id as it is written, and the colon behind it; that of a string is its hash.
  bool ParseId(const char** at, const char* end, int64* id) {
    const char* begin = *at;
    const char* p = begin;
    if (s_.hash_buckets > 0) {
      for (; p < end && *p != ':' && !IsBlank(*p); ++p) {
        if (static_cast<uint8>(*p) < ' ') return false;
      }
      if (p == begin || p == end || *p != ':') return false;
      *id = 1 + Fingerprint(begin, p - begin) % (s_.hash_buckets - 1);
      *at = p + 1;
      return true;
    }
    const bool negative = p < end && *p == '-';
    if (negative) begin = ++p;
    uint64 number = 0;
    for (; p < end && IsDigit(*p); ++p) number = 10 * number + (*p - '0');
    if (p == begin || p == end || *p != ':') return false;
    if (p - begin > 18) {
      while (*begin == '0' && p - begin > 1) ++begin;
      if (p - begin > 18) return false;
    }
    if (negative && number != 0) return false;
    *id = number;
    *at = p + 1;
    return true;
  }

  // The id in the table, if it is one.
  bool ToId(int64* id) const {
    *id += s_.id_offset;
    return *id >= 0 && *id < s_.limit && (*id != 0 || !s_.pad || s_.multi_valued);
  }

  // The field whose range holds an id, -1 if there is none.
  int64 FieldOf(int64 id) const {
    const Range* end = s_.ranges + s_.num_ranges;
    const Range* range = std::upper_bound(s_.ranges, end, id,
                                          [](int64 x, const Range& r) { return x < r.begin; });
    return range == s_.ranges || id >= range[-1].end ? -1 : range[-1].field;
  }

  const Schema s_;
  const bool positional_;
  std::vector<int64> of_fields_;
  std::vector<Pair> pairs_;
};

}  // namespace codec
}  // namespace deepfm
