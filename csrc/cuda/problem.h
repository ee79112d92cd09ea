// One forward call of the CUDA kernels; its tensors lie on the device.
#pragma once
#include "../problem.h"

namespace txl_cuda {

using txl::Bounds;
using txl::Type;
using txl::View;

struct Problem : txl::Attention {    // L in [1, 16], D a multiple of 8 up to 256
  bool aligned = false;              // all rows of k, v and r start at multiples of 16 bytes
  const int64_t* seed = nullptr;     // one element; read only with dropout
  int64_t first_key = 0;             // of the first part: what lies before is outside the window of all
  int64_t parts = 0, part_keys = 0;  // keys of a part; first_key + parts * part_keys >= M + L
  float* partial = nullptr;          // B * H * L * parts * (D + 2) floats, see merge.cuh; unused if parts == 1
};

}  // namespace txl_cuda
