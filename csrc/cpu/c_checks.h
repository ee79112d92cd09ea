// Checks of calls that come from C, before any kernel runs; Python's are in txl_kernels/checks.py. All functions throw
// std::invalid_argument, whose message names the argument, what was given and what is accepted.
#pragma once
#include "../include/txl_attention.h"

namespace txl {

// Return a copy of a caller's struct, with zeros for the fields that its header does not have yet.
txl_call read_call(const txl_call* given);
txl_gradients read_gradients(const txl_gradients* given);

void check_forward(const txl_call& call);
void check_backward(const txl_call& call, const txl_gradients& gradients);

}  // namespace txl
