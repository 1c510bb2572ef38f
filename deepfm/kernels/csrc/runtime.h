// TensorFlow 1.15 or 2.15: what the two call otherwise in C++.
#pragma once

#include "tensorflow/core/lib/core/status.h"
#include "tensorflow/core/public/version.h"

#if TF_MAJOR_VERSION > 1
#define DEEPFM_TENSORFLOW_2
#endif

#ifdef DEEPFM_TENSORFLOW_2
#include "tensorflow/core/platform/blocking_counter.h"
#else
#include "tensorflow/core/lib/core/blocking_counter.h"
#endif

namespace tensorflow {
namespace data {}  // the datasets, in 2.15
}  // namespace tensorflow

namespace deepfm {

inline tensorflow::Status Ok() { return tensorflow::Status(); }

}  // namespace deepfm
