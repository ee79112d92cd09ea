// txl::RelAttention, an operator for ONNX Runtime: its interface, and one run of it. docs/how-to/onnx.md describes it.
#pragma once
#include <iterator>
#include <exception>
#include <new>
#include <stdexcept>

#include "onnxruntime_api.h"

namespace txl::onnx {

constexpr const char* INPUTS[] = {"q",     "k",     "v",   "r",     "content_bias", "position_bias", "k_mem",
                                  "v_mem", "start", "end", "q_pos", "r_bias",       "sink"};
enum Input : size_t { Q, K, V, R, CONTENT_BIAS, POSITION_BIAS, K_MEM, V_MEM, START, END, Q_POS, R_BIAS, SINK };
constexpr size_t INPUT_COUNT = std::size(INPUTS), NEEDED_INPUTS = 3;

enum class Outside { refuse, clamp, zero };
enum class Layout { bhld, blhd };  // whether heads lie before or after queries and keys, and in r before or after rows

// The attributes of a node, in range. left, right and zero_row: -1 for their defaults; scale and position_scale: 0.
struct Attributes {
  bool causal = true, r_descending = false;
  int64_t left = -1, right = -1, zero_row = -1;
  float scale = 0, position_scale = 0, softcap = 0;
  Outside outside = Outside::refuse;
  Layout layout = Layout::bhld;
};

// An error of ONNX Runtime; who catches it owns the status.
struct StatusError {
  OrtStatus* status;
};

inline void require_ok(OrtStatus* status) {
  if (status) throw StatusError{status};
}

// Runs f and returns what it throws as a status, null for nothing: no exception may leave a function that ONNX Runtime
// calls.
template <class F>
OrtStatus* status_of(const Api& api, const F& f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const StatusError& error) {
    return error.status;
  } catch (const std::invalid_argument& error) {
    return api.CreateStatus(INVALID_ARGUMENT, error.what());
  } catch (const std::bad_alloc&) {
    return api.CreateStatus(FAIL, "txl::RelAttention: out of memory");
  } catch (const std::exception& error) {
    return api.CreateStatus(FAIL, error.what());
  }
}

// Computes the node's output on the session's threads. Throws std::invalid_argument, whose message names the input,
// what was given and what is accepted, or StatusError.
void compute(const Api& api, const Attributes& attributes, OrtKernelContext* context);

}  // namespace txl::onnx
