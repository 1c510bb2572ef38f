// Parsers for packed records, serialized tf.train.Examples or LibSVM lines: the codec's, as
// operators. data/records.py and data/libsvm.py do the same with TensorFlow's own ops; tests compare
// the two.
//
// B: records in a batch. F: fields. M: the most values of a record.
#include "examples.h"
#include "kernels.h"
#include "lines.h"
#include "packed.h"

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

codec::Bytes BytesOf(StringPiece record) { return {record.data(), record.size()}; }

codec::Parser ParserOf(OpKernelContext* context) {
  return {Attribute<int64>(context, "field_size"), Attribute<int64>(context, "feature_size"),
          Attribute<bool>(context, "with_labels")};
}

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
  codec::Parser parser = ParserOf(context);
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size(), fields = Attribute<int64>(context, "field_size");
  Outputs to;
  OP_REQUIRES_OK(context, to.Allocate(context, 0, n, fields));
  for (int64 i = 0; i < n; ++i) {
    const bool good = parser.Parse(BytesOf(records[i]), to.labels + i, to.ids + i * fields,
                                   to.values + i * fields, WeightOf(to.weights, i));
    OP_REQUIRES(context, good, BadRecord(i));
  }
}
DEEPFM_REGISTER("DeepfmParse", ParseRecords);

void ParseMultiValued(OpKernelContext* context) {
  codec::Parser parser = ParserOf(context);
  Packed records;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &records));
  const int64 n = records.size(), fields = Attribute<int64>(context, "field_size");
  float *labels, *values, *weights;
  int64* ids;
  int32* counts;
  OP_REQUIRES_OK(context, Allocate(context, 0, {n}, &labels));
  OP_REQUIRES_OK(context, Allocate(context, 3, {n, fields}, &counts));
  OP_REQUIRES_OK(context, AllocateWeights(context, 4, n, &weights));
  // Not vectors, which would fill with zeros what is never used.
  const size_t most = codec::Parser::MostValues(records.bytes());
  std::unique_ptr<int64[]> all_ids(new int64[most]);
  std::unique_ptr<float[]> all_values(new float[most]);
  std::vector<int64> ends(n);
  int64 longest = 0, end = 0;
  for (int64 i = 0; i < n; ++i) {
    const int64 found =
        parser.ParseSeveral(BytesOf(records[i]), labels + i, all_ids.get() + end,
                            all_values.get() + end, counts + i * fields, WeightOf(weights, i));
    OP_REQUIRES(context, found >= 0, BadRecord(i));
    longest = std::max(longest, found);
    ends[i] = end += found;
  }
  OP_REQUIRES_OK(context, Allocate(context, 1, {n, longest}, &ids));
  OP_REQUIRES_OK(context, Allocate(context, 2, {n, longest}, &values));
  std::fill(ids, ids + n * longest, 0);
  std::fill(values, values + n * longest, 0.0f);
  for (int64 i = 0, begin = 0; i < n; begin = ends[i++]) {
    std::copy(all_ids.get() + begin, all_ids.get() + ends[i], ids + i * longest);
    std::copy(all_values.get() + begin, all_values.get() + ends[i], values + i * longest);
  }
}
DEEPFM_REGISTER("DeepfmParseMultiValued", ParseMultiValued);

REGISTER_OP("DeepfmParseLines")
    .Input("lines: string")                  // packed
    .Output("labels: float")                 // [B]
    .Output("ids: int64")                    // [B, F]
    .Output("values: float")                 // [B, F]
    .Output("weights: num_weights * float")  // [B]
    .Attr("field_size: int >= 1").Attr("feature_size: int").Attr("id_offset: int")
    .Attr("pad: bool").Attr("num_weights: int >= 0 = 0")
    .SetShapeFn(Ranks<1, 2, 2>)
    .Doc("Parses LibSVM lines of F pairs, or with pad of at most F, a label of 0, 1 or -1 and ids + "
         "id_offset in [0, feature_size). With num_weights 1 label:weight may stand for the label. "
         "Fails if any line is not so.");

void ParseLines(OpKernelContext* context) {
  const int64 fields = Attribute<int64>(context, "field_size");
  codec::LineSchema schema{};
  schema.field_size = fields;
  schema.limit = Attribute<int64>(context, "feature_size");
  schema.id_offset = Attribute<int64>(context, "id_offset");
  schema.pad = Attribute<bool>(context, "pad");
  schema.weighted = context->num_outputs() > 3;
  codec::LineParser parser(schema);
  Packed lines;
  OP_REQUIRES_OK(context, Packed::Open(context->input(0), &lines));
  const int64 n = lines.size();
  Outputs to;
  OP_REQUIRES_OK(context, to.Allocate(context, 0, n, fields));
  for (int64 i = 0; i < n; ++i) {
    const StringPiece line = lines[i];
    const int64 found =
        parser.Parse(line.begin(), line.end(), to.labels + i, to.ids + i * fields,
                     to.values + i * fields, fields, nullptr, WeightOf(to.weights, i));
    OP_REQUIRES(context, found >= 0, BadRecord(i));
  }
}
DEEPFM_REGISTER("DeepfmParseLines", ParseLines);

}  // namespace deepfm
