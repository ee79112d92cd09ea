// A call of the CUDA kernels. Its tensors are on the device.
#pragma once
#include "../attention.h"

namespace txl_cuda {

using txl::Bounds;
using txl::Type;
using txl::View;

struct Problem : txl::Attention {
  // Whether q_pos is given, so that rows of r have a width of their own, Dr; and the sink.
  bool has_q_pos = false, has_sink = false;
  const int64_t* seed = nullptr;  // one element; read only with dropout
  int64_t parts = 0;              // number of parts into which the keys of a block are split
  int64_t multiprocessors = 1;    // of the device; read by launches
  float* partial = nullptr;       // B * H * L * parts * (D + 2) floats, see merge.cuh; unused if parts == 1
};

}  // namespace txl_cuda
