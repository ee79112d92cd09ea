// Alternatives of the kernels, to be timed against them: letters of TXL_HOPPER_VARIANT (CMakeLists.txt), each of which
// defines its macro.
#pragma once

namespace txl_cuda {

// A: forward skews the scores of the next tile during the softmax of this one.
#ifdef TXL_HOPPER_A
constexpr bool INTERLEAVED = true;
#else
constexpr bool INTERLEAVED = false;
#endif
// B: forward at width 64 has three consumer warpgroups.
#ifdef TXL_HOPPER_B
constexpr bool THREE_GROUPS = true;
#else
constexpr bool THREE_GROUPS = false;
#endif
// D: at width 128 dr leaves by TMA reductions, too, and v has one stage.
#ifdef TXL_HOPPER_D
constexpr bool WIDE_DR_BY_TMA = true;
#else
constexpr bool WIDE_DR_BY_TMA = false;
#endif

}  // namespace txl_cuda
