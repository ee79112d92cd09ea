// Checks of calls that come from C, before any kernel runs; Python's are in txl_kernels/checks.py.
#pragma once
#include "../include/txl_attention.h"

namespace txl {

// Throw std::invalid_argument, whose message names the argument, what was given and what is accepted.
void check_forward(const txl_call* call);
void check_backward(const txl_call* call, const txl_gradients* gradients);

}  // namespace txl
