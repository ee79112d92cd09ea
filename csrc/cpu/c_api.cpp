#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

#include "../include/txl_attention.h"
#include "../settings.h"
#include "c_checks.h"
#include "../errors.h"
#include "library.h"
#include "runtime.h"

namespace txl {
namespace {

std::atomic<int> g_threads{0};  // 0: the number of processors

View view_of(const txl_tensor& x) {
  if (!x.data) return {};
  return {x.data, x.stride[0], x.stride[1], x.stride[2]};
}

Bounds bounds_of(const txl_tensor& x) {
  if (!x.data) return {};
  return {static_cast<const int32_t*>(x.data), x.stride[0], x.stride[1]};
}

// As txl_kernels.call.drop_threshold.
uint32_t drop_threshold(double dropout_p) {
  return dropout_p > 0 ? static_cast<uint32_t>(std::clamp(std::nearbyint(dropout_p * 65536), 1., 65535.)) : 0;
}

Problem problem_of(const txl_call& c) {
  Problem p;
  p.type = c.type == TXL_BFLOAT16 ? Type::bf16 : Type::f32;
  p.B = c.B, p.H = c.H, p.L = c.L, p.D = c.D, p.Dv = c.Dv, p.Dr = c.Dp, p.Hkv = c.Hkv, p.T = c.T;
  Settings settings;
#define TXL_SETTING(name) settings.name = c.name;
  TXL_C_SETTINGS(TXL_SETTING)
#undef TXL_SETTING
  set_settings(p, settings, drop_threshold(c.dropout_p));
  set_memory(p, c.M);
#define TXL_VIEW(name, member, axes, is_float, any_strides) p.member = view_of(c.name);
  TXL_C_INPUTS(TXL_VIEW)
#undef TXL_VIEW
  p.start = bounds_of(c.start), p.end = bounds_of(c.end);
  p.out = view_of(c.out), p.lse = c.lse;
  p.threads = txl_threads(), p.seed = c.seed;
  return p;
}

Gradients gradients_of(const txl_gradients& x) {
  Gradients g;
  g.dout = view_of(x.out), g.dlse = x.lse;
#define TXL_VIEW(name, member, axes, is_float, any_strides) g.d##member = view_of(x.name);
  TXL_C_INPUTS(TXL_VIEW)
#undef TXL_VIEW
  return g;
}

// Runs f, which throws nothing, while this thread cannot be cancelled: the kernels' frames would be unwound while other
// threads use their memory. No destructor restores the state, since a thread that is cancelled asynchronously is
// unwound from there.
template <class F>
int without_cancellation(const F& f) {
  int before = 0, ignored = 0;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  const int code = f();
  pthread_setcancelstate(before, &ignored);
  return code;
}

}  // namespace
}  // namespace txl

int txl_forward(const txl_call* given) {
  return txl::without_cancellation([&] {
    txl_call call = {};
    const int code = txl::guard([&] { call = txl::read_call(given), txl::check_forward(call); });
    return code ? code : txl_cpu_library()->forward(txl::problem_of(call));
  });
}

int txl_forward_on(const txl_call* call, txl_parallel_for parallel_for, void* context) {
  if (!parallel_for) return txl::fail(TXL_INVALID_ARGUMENT, "parallel_for must be given, got NULL");
  const txl::OnCallersThreads on_callers_threads({parallel_for, context});
  return txl_forward(call);
}

int txl_backward(const txl_call* given, const txl_gradients* given_gradients) {
  return txl::without_cancellation([&] {
    txl_call call = {};
    txl_gradients gradients = {};
    const int code = txl::guard([&] {
      call = txl::read_call(given), gradients = txl::read_gradients(given_gradients);
      txl::check_backward(call, gradients);
    });
    return code ? code : txl_cpu_library()->backward(txl::problem_of(call), txl::gradients_of(gradients));
  });
}

const char* txl_instruction_set(void) {
  const txl::Kernels* in_use = nullptr;
  return txl_cpu_library()->kernels(&in_use) ? nullptr : in_use->isa;
}

int txl_set_instruction_set(const char* name) {
  return txl::guard([&] { txl::force_isa(name ? name : ""); });
}

int txl_threads(void) {
  const int threads = txl::g_threads.load(std::memory_order_relaxed);
  return threads ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int txl_set_threads(int threads) {
  if (threads < 1)
    return txl::fail(TXL_INVALID_ARGUMENT, ("threads must be at least 1, got " + std::to_string(threads)).c_str());
  txl::g_threads.store(threads, std::memory_order_relaxed);
  return TXL_OK;
}

const char* txl_last_error(void) { return txl::g_error; }
