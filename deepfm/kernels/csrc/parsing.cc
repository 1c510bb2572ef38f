// Parsers for packed records, serialized tf.train.Examples or LibSVM lines: the codec's, as
// operators. data/records.py and data/libsvm.py do the same with TensorFlow's own ops; tests compare
// the two.
//
// B: records in a batch. F: fields. M: the most values of a record.
#include "kernels.h"  // first: which TensorFlow
#include "examples.h"
#include "lines.h"
#include "packed.h"

namespace deepfm {

REGISTER_OP("DeepfmParse")
    .Input("records: string")                // packed
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, M], M = F without counts
    .Output("values: float")                 // [B, M]
    .Output("counts: num_counts * int32")    // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1").Attr("feature_size: int")
    .Attr("num_counts: int >= 0 = 0").Attr("num_weights: int >= 0 = 0")
    .Attr("with_labels: bool = true")
    .Attr("lines: bool = false").Attr("id_offset: int = 0").Attr("pad: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int num_counts;
      TF_RETURN_IF_ERROR(c->GetAttr("num_counts", &num_counts));
      return num_counts > 0 ? Ranks<1, 2, 2, 2>(c) : Ranks<1, 2, 2>(c);
    })
    .Doc("Parses Examples with a label of 0, 1 or -1, ids in [0, feature_size) and finite values. "
         "With num_counts 1 each field has as many values as `counts` says, or one if a record has "
         "none. Without with_labels, labels and weights are passed over. With num_weights 1 a "
         "record may have a weight, finite and not negative; without one it weighs 1. Fails if any "
         "record is not so, or is ambiguous: if a feature, a message or a list comes twice or in "
         "parts.\n"
         "Or parses LibSVM lines of F pairs, or with pad of at most F, and ids + id_offset in [0, "
         "feature_size). With num_weights 1 label:weight may stand for the label.");

void Parse(OpKernelContext* context) {
  const bool of_lines = Attribute<bool>(context, "lines");
  const bool several = !of_lines && Attribute<int64>(context, "num_counts") > 0;
  codec::Schema schema{};
  const int64 fields = schema.field_size = Attribute<int64>(context, "field_size");
  schema.limit = Attribute<int64>(context, "feature_size");
  schema.id_offset = Attribute<int64>(context, "id_offset");
  schema.pad = Attribute<bool>(context, "pad");
  schema.weighted = Attribute<int64>(context, "num_weights") > 0;
  codec::LineParser lines(schema);
  codec::Parser examples(fields, schema.limit, Attribute<bool>(context, "with_labels"));
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size();
  float *labels, *values, *weights = nullptr;
  int64* ids;
  int32* counts = nullptr;
  // If fields may have several values, rows are filled up once all are known. Not vectors, which
  // would fill with zeros what is never used.
  std::unique_ptr<int64[]> all_ids;
  std::unique_ptr<float[]> all_values;
  OP_REQUIRES_OK(context, Allocate(context, 0, {n}, &labels));
  if (schema.weighted) {
    OP_REQUIRES_OK(context, Allocate(context, context->num_outputs() - 1, {n}, &weights));
  }
  if (several) {
    const size_t most = codec::Parser::MostValues(records.bytes());
    all_ids.reset(ids = new int64[most]);
    all_values.reset(values = new float[most]);
    OP_REQUIRES_OK(context, Allocate(context, 3, {n, fields}, &counts));
  } else {
    OP_REQUIRES_OK(context, Allocate(context, 1, {n, fields}, &ids));
    OP_REQUIRES_OK(context, Allocate(context, 2, {n, fields}, &values));
  }
  std::vector<int64> ends(n);
  int64 longest = 0, end = 0;
  for (int64 i = 0; i < n; ++i) {
    const StringPiece record = records[i];
    float* weight = weights == nullptr ? nullptr : weights + i;
    const int64 found =
        of_lines ? lines.Parse(record.begin(), record.end(), labels + i, ids + end, values + end,
                               nullptr, weight)
                 : examples.Parse({record.data(), record.size()}, labels + i, ids + end,
                                  values + end, several ? counts + i * fields : nullptr, weight);
    OP_REQUIRES(context, found >= 0,
                errors::InvalidArgument("record ", i,
                                        " of a batch is damaged or breaks the schema"));
    labels[i] = labels[i] > 0;
    longest = std::max(longest, found);
    ends[i] = end += found;
  }
  if (!several) return;
  OP_REQUIRES_OK(context, Allocate(context, 1, {n, longest}, &ids));
  OP_REQUIRES_OK(context, Allocate(context, 2, {n, longest}, &values));
  std::fill(ids, ids + n * longest, 0);
  std::fill(values, values + n * longest, 0.0f);
  for (int64 i = 0, begin = 0; i < n; begin = ends[i++]) {
    std::copy(all_ids.get() + begin, all_ids.get() + ends[i], ids + i * longest);
    std::copy(all_values.get() + begin, all_values.get() + ends[i], values + i * longest);
  }
}
DEEPFM_REGISTER("DeepfmParse", Parse);

}  // namespace deepfm
