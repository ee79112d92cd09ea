// A decode call.
#pragma once
#include "../cuda_problem.h"

namespace txl_cuda {

struct DecodeProblem : Problem {  // L in [1, 16], D a multiple of 8 up to 256
  bool aligned = false;           // all rows of k, v and r start at multiples of 16 bytes
  bool with_terms = false;        // q_pos, sink, zero_outside or grouped heads; L in [1, 4], Dr a multiple of 8 up to D
  int64_t first_key = 0;          // of the first part; earlier keys are outside the window of all queries
  int64_t part_keys = 0;          // keys of a part; first_key + parts * part_keys >= M + L
  int64_t heads = 1;              // query heads of a block, at most so many of a head of keys
  int64_t group_blocks = 1;       // blocks that share the query heads of a head of keys
};

}  // namespace txl_cuda
