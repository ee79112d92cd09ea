#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace txl {

#define TXL_DECLARE_ISA(name)                        \
  namespace isa_##name {                             \
    void forward(const Problem&);                    \
    void backward(const Problem&, const Gradients&); \
  }

#define TXL_CALLS_OF(name) {isa_##name::forward, isa_##name::backward}

TXL_DECLARE_ISA(baseline)
TXL_DECLARE_ISA(emulated_bf16)
TXL_DECLARE_ISA(emulated_amx)
#if defined(__x86_64__)
TXL_DECLARE_ISA(avx2)
TXL_DECLARE_ISA(avx512)
TXL_DECLARE_ISA(avx512_bf16)
TXL_DECLARE_ISA(amx)
#elif defined(__aarch64__)
TXL_DECLARE_ISA(neon)
#endif

namespace {

bool always() { return true; }
bool never() { return false; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }
bool has_avx512_bf16() {  // compilers take it to have the others, too
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Intel's VDPBF16PS multiplies half as much as its float32 units do (Sapphire Rapids), AMD's twice.
bool doubles_by_bf16() { return __builtin_cpu_is("amd"); }

// Whether the processor has AMX with bfloat16; why the system keeps its registers from this process, or 0.
#if defined(__linux__)
bool knows_amx() {
  unsigned a, b, c, d;
  return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}
int amx_refusal() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0 ? 0 : errno;
}
#else
bool knows_amx() { return false; }
int amx_refusal() { return 0; }
#endif
bool has_amx() { return knows_amx() && amx_refusal() == 0; }
#endif

const Kernels* find(const std::string& name) {
  std::string known;
  for (const Kernels& k : all_kernels()) {
    if (name.empty() ? k.supported() && k.chosen() : name == k.isa) {
      if (!k.supported())
        throw std::runtime_error("TXL_KERNELS_ISA=" + name + ": " +
                                 (name == "amx" && !refused().empty() ? refused() : "this processor does not have it"));
      return &k;
    }
    known += (known.empty() ? "" : ", ") + std::string(k.isa);
  }
  throw std::runtime_error("TXL_KERNELS_ISA=" + name + " is not known; this build has " + known);
}

std::atomic<const Kernels*> g_chosen{nullptr};

}  // namespace

std::string refused() {
#if defined(__x86_64__)
  if (const int reason = knows_amx() ? amx_refusal() : 0)
    return std::string("the system does not let this process use amx: ") + std::strerror(reason);
#endif
  return "";
}

const std::vector<Kernels>& all_kernels() {
  static const std::vector<Kernels> all = {
#if defined(__x86_64__)
      {"amx", has_amx, always, TXL_CALLS_OF(avx512), TXL_CALLS_OF(amx)},
      {"avx512_bf16", has_avx512_bf16, doubles_by_bf16, TXL_CALLS_OF(avx512), TXL_CALLS_OF(avx512_bf16)},
      {"avx512", has_avx512, always, TXL_CALLS_OF(avx512), TXL_CALLS_OF(avx512)},
      {"avx2", has_avx2, always, TXL_CALLS_OF(avx2), TXL_CALLS_OF(avx2)},
#elif defined(__aarch64__)
      {"neon", always, always, TXL_CALLS_OF(neon), TXL_CALLS_OF(neon)},
#endif
      {"baseline", always, always, TXL_CALLS_OF(baseline), TXL_CALLS_OF(baseline)},
      {"emulated_bf16", always, never, TXL_CALLS_OF(baseline), TXL_CALLS_OF(emulated_bf16)},
      {"emulated_amx", always, never, TXL_CALLS_OF(baseline), TXL_CALLS_OF(emulated_amx)},
  };
  return all;
}

const Kernels& kernels() {
  const Kernels* chosen = g_chosen.load(std::memory_order_acquire);
  if (!chosen) {
    const char* name = std::getenv("TXL_KERNELS_ISA");
    chosen = find(name ? name : "");
    g_chosen.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

void force_isa(const std::string& name) { g_chosen.store(find(name), std::memory_order_release); }

}  // namespace txl
