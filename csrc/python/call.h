// txl_kernels.call.Call in C++: the order of its fields, and how kernels get sizes, strides and
// pointers from it.
#pragma once
#include <pybind11/pybind11.h>

#include "../attention.h"
#include "tensor.h"

namespace txl {

// clang-format off
enum Field : size_t {
  // inputs, which have gradients
  Q, K, V, R, CONTENT_BIAS, POSITION_BIAS, K_MEM, V_MEM, R_BIAS, Q_POS, SINK,
  // bounds
  START, END,
  // another at every call
  SEED,
  // settings
  LEFT, RIGHT, ZERO_ROW, SCALE, DROPOUT_P, SOFTCAP, POSITION_SCALE, ZERO_OUTSIDE,
  // how many
  FIELDS
};
// clang-format on
constexpr size_t INPUTS = START;

// The names, for Python to compare with its own.
pybind11::tuple field_names();

// All of a checked call but where its tensors lie. drop_below: 0 for no dropout.
Attention attention_of(const pybind11::tuple& call, const pybind11::handle& out, Type type, uint32_t drop_below);

// Sets the pointers of the tensors; lse may be None.
void set_pointers(Attention& a, const pybind11::tuple& call, const pybind11::handle& out, const pybind11::handle& lse);

// The properties of a call, and of other tensors, that decide whether it is valid, as one string of bytes:
// m.signature(call, ordinary types, others) -> bytes or None; see txl_kernels.operators.
void define_signature(pybind11::module_& m);

}  // namespace txl
