// A decode call.
#pragma once
#include "../cuda_problem.h"

namespace txl_cuda {

struct DecodeProblem : Problem {  // L in [1, 16], D a multiple of 8 up to 256
  bool aligned = false;           // all rows of k, v and r start at multiples of 16 bytes
  int64_t first_key = 0;          // of the first part; earlier keys are outside the window of all queries
  int64_t part_keys = 0;          // keys of a part; first_key + parts * part_keys >= M + L
};

}  // namespace txl_cuda
