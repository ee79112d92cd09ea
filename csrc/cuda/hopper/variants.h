// Alternatives of the kernels, to be timed against them: the letters of CMakeLists.txt's TXL_HOPPER_VARIANT, each of which
// defines its macro.
#pragma once

namespace txl_cuda {

// A: forward skews the scores of the next tile during the softmax of this one.
#ifdef TXL_HOPPER_A
constexpr bool INTERLEAVED = true;
#else
constexpr bool INTERLEAVED = false;
#endif

}  // namespace txl_cuda
