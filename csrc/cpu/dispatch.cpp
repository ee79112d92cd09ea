#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace txl {

// One that multiplies both types, and one that multiplies pairs of bfloat16 alone (isa.cpp).
#define TXL_DECLARE_VECTORS(name)                    \
  namespace isa_##name {                             \
    void forward(const Problem&);                    \
    void backward(const Problem&, const Gradients&); \
    double fma(int64_t, int);                        \
    void read(const float*, int64_t, int);           \
    void exp(const float*, float*, int64_t);         \
  }
#define TXL_DECLARE_PAIRS(name)                      \
  namespace isa_##name {                             \
    void forward(const Problem&);                    \
    void backward(const Problem&, const Gradients&); \
    double pairs(int64_t, int);                      \
  }

// The rest of a row of Kernels: vectors alone; pairs, and the vectors that float32 is multiplied by.
#define TXL_CALLS_OF(name) {isa_##name::forward, isa_##name::backward}
#define TXL_BY_VECTORS(name) \
  TXL_CALLS_OF(name), TXL_CALLS_OF(name), { isa_##name::fma, isa_##name::fma, isa_##name::read, isa_##name::exp }
#define TXL_BY_PAIRS(name, vectors)                                                \
  TXL_CALLS_OF(vectors), TXL_CALLS_OF(name), {                                     \
    isa_##vectors::fma, isa_##name::pairs, isa_##vectors::read, isa_##vectors::exp \
  }

TXL_DECLARE_VECTORS(baseline)
#if defined(TXL_EMULATED)
TXL_DECLARE_PAIRS(emulated_bf16)
TXL_DECLARE_PAIRS(emulated_amx)
namespace isa_emulated_bf16 {
int64_t multiplications();
}
#endif
#if defined(__x86_64__)
TXL_DECLARE_VECTORS(avx2)
TXL_DECLARE_VECTORS(avx512)
TXL_DECLARE_PAIRS(avx512_bf16)
TXL_DECLARE_PAIRS(amx)
#elif defined(__aarch64__)
TXL_DECLARE_VECTORS(neon)
TXL_DECLARE_PAIRS(neon_bf16)
#endif

namespace {

bool always() { return true; }
[[maybe_unused]] bool never() { return false; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }
bool has_avx512_bf16() {  // compilers take it to have the others, too
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Rates of short runs on this thread, in turns; the best of each, which a busy machine hardly changes.
double measured_pairs() {
  constexpr int rounds = 16, iterations = 8000;  // a millisecond in all
  double best[2] = {0, 0};
  for (int n = 0; n < rounds; ++n)
    for (int z = 0; z < 2; ++z) {
      const auto began = std::chrono::steady_clock::now();
      const double done = (z ? isa_avx512_bf16::pairs : isa_avx512::fma)(iterations, 1);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      best[z] = std::max(best[z], done / std::max(took.count(), 1e-9));
    }
  return best[1] / best[0];
}

// Far from both of the rates known: 2 on a Zen 5, 0.5 on a Sapphire Rapids.
bool gains_by_pairs() { return pairs_over_floats() >= 1.4; }

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

#elif defined(__aarch64__)
bool has_neon_bf16() {
#if defined(__linux__)
  constexpr unsigned long bf16 = 1ul << 14;  // HWCAP2_BF16
  return getauxval(AT_HWCAP2) & bf16;
#elif defined(__APPLE__)
  int has = 0;
  size_t bytes = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &bytes, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
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

double pairs_over_floats() {
#if defined(__x86_64__)
  static const double ratio = has_avx512_bf16() && !knows_amx() ? measured_pairs() : 0;
  return ratio;
#else
  return 0;
#endif
}

int64_t emulated_multiplications() {
#if defined(TXL_EMULATED)
  return isa_emulated_bf16::multiplications();
#else
  return 0;
#endif
}

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
      {"amx", has_amx, always, TXL_BY_PAIRS(amx, avx512)},
      {"avx512_bf16", has_avx512_bf16, gains_by_pairs, TXL_BY_PAIRS(avx512_bf16, avx512)},
      {"avx512", has_avx512, always, TXL_BY_VECTORS(avx512)},
      {"avx2", has_avx2, always, TXL_BY_VECTORS(avx2)},
#elif defined(__aarch64__)
      {"neon_bf16", has_neon_bf16, always, TXL_BY_PAIRS(neon_bf16, neon)},
      {"neon", always, always, TXL_BY_VECTORS(neon)},
#endif
      {"baseline", always, always, TXL_BY_VECTORS(baseline)},
#if defined(TXL_EMULATED)
      {"emulated_bf16", always, never, TXL_BY_PAIRS(emulated_bf16, baseline)},
      {"emulated_amx", always, never, TXL_BY_PAIRS(emulated_amx, baseline)},
#endif
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
