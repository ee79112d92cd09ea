// txl_kernels.call.Call in C++: the order of its fields, and how kernels get sizes, strides and
// pointers from it.
#pragma once
#include <pybind11/pybind11.h>

#include "../attention.h"
#include "tensor.h"

namespace txl {

#define TXL_ENUMERATOR(enumerator, ...) enumerator,
enum Field : size_t { TXL_INPUTS(TXL_ENUMERATOR) TXL_OTHER_FIELDS(TXL_ENUMERATOR) FIELDS };
#undef TXL_ENUMERATOR
constexpr size_t INPUTS = START;

// The names, for Python to compare with its own.
pybind11::tuple field_names();

// All of a checked call but where its tensors lie and what `set_memory` sets. drop_below: 0 for no dropout. Biases that
// are None have stride 0.
Attention attention_of(const pybind11::tuple& call, const pybind11::handle& out, Type type, uint32_t drop_below);

// Sets the length of the memory, and limits `left` and `right`, which `attention_of` leaves as the call has them
// (INT64_MAX for None), to the number of keys.
void set_memory(Attention& a, const pybind11::tuple& call);

// Sets the pointers of the tensors; lse may be None.
void set_pointers(Attention& a, const pybind11::tuple& call, const pybind11::handle& out, const pybind11::handle& lse);

// m.signature(call, ordinary types, other tensors, state) -> bytes or None: everything that decides whether a call is
// valid and what runs it; see txl_kernels.prepare. state: 1 if gradients are enabled, and further bits of the caller.
void define_signature(pybind11::module_& m);

}  // namespace txl
