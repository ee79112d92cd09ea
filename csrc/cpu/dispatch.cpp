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

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace txl {

// Functions of isa.cpp: of an instruction set with float32 FMA, which runs both types, and of one with bf16 dot
// products, which runs bfloat16.
#define TXL_DECLARE_FMA(name)                        \
  namespace isa_##name {                             \
    void forward(const Problem&);                    \
    void backward(const Problem&, const Gradients&); \
    double fma(int64_t, int);                        \
    void read(const float*, int64_t, int);           \
    void exp(const float*, float*, int64_t);         \
  }
#define TXL_DECLARE_BF16_DOT(name)                   \
  namespace isa_##name {                             \
    void forward(const Problem&);                    \
    void backward(const Problem&, const Gradients&); \
    double bf16_dot(int64_t, int);                   \
  }

// The functions of a row of Kernels: FMA for both types, or bf16 dot products and the FMA instruction set that runs
// float32.
#define TXL_ENTRY_POINTS(name) {isa_##name::forward, isa_##name::backward}
#define TXL_FMA_KERNELS(name)                                           \
  TXL_ENTRY_POINTS(name), TXL_ENTRY_POINTS(name), {                     \
    isa_##name::fma, isa_##name::fma, isa_##name::read, isa_##name::exp \
  }
#define TXL_BF16_DOT_KERNELS(name, fma_isa)                                           \
  TXL_ENTRY_POINTS(fma_isa), TXL_ENTRY_POINTS(name), {                                \
    isa_##fma_isa::fma, isa_##name::bf16_dot, isa_##fma_isa::read, isa_##fma_isa::exp \
  }

TXL_DECLARE_FMA(baseline)
#if defined(TXL_EMULATED)
TXL_DECLARE_BF16_DOT(emulated_bf16)
TXL_DECLARE_BF16_DOT(emulated_amx)
namespace isa_emulated_bf16 {
int64_t multiplications();
}
#endif
#if defined(__x86_64__)
TXL_DECLARE_FMA(avx2)
TXL_DECLARE_FMA(avx512)
TXL_DECLARE_BF16_DOT(avx512_bf16)
TXL_DECLARE_BF16_DOT(amx)
#elif defined(__aarch64__)
TXL_DECLARE_FMA(neon)
TXL_DECLARE_BF16_DOT(neon_bf16)
#endif

namespace {

bool always() { return true; }
[[maybe_unused]] bool never() { return false; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }
bool has_avx512_bf16() {  // compilers assume that it implies the others
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// VDPBF16PS multiplies twice as fast as float32 FMA on a Zen 5, half as fast on a Sapphire Rapids. The vendor decides,
// not a measurement, so every process of a machine computes with the same instructions, and the same bits.
bool prefers_bf16_dot() { return __builtin_cpu_is("amd"); }

// Whether the processor has AMX with bfloat16; and a request to the system for its registers, which returns 0 or errno.
#if defined(__linux__)
bool processor_has_amx() {
  unsigned a, b, c, d;
  return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}
int request_amx() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0 ? 0 : errno;
}
#else
bool processor_has_amx() { return false; }
int request_amx() { return 0; }
#endif
bool has_amx() { return processor_has_amx() && request_amx() == 0; }

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
    if (name.empty() ? k.supported() && k.preferred() : name == k.isa) {
      if (!k.supported())
        throw std::runtime_error(
            "TXL_KERNELS_ISA=" + name + ": " +
            (name == "amx" && !why_not_amx().empty() ? why_not_amx() : "this processor does not have it"));
      return &k;
    }
    known += (known.empty() ? "" : ", ") + std::string(k.isa);
  }
  throw std::runtime_error("TXL_KERNELS_ISA=" + name + " is not known; this build has " + known);
}

std::atomic<const Kernels*> g_kernels{nullptr};

}  // namespace

int64_t emulated_multiplications() {
#if defined(TXL_EMULATED)
  return isa_emulated_bf16::multiplications();
#else
  return 0;
#endif
}

std::string why_not_amx() {
#if defined(__x86_64__)
  if (const int error = processor_has_amx() ? request_amx() : 0)
    return std::string("the system does not let this process use amx: ") + std::strerror(error);
#endif
  return "";
}

const std::vector<Kernels>& all_kernels() {
  // Never destroyed, since a function of atexit may make a call.
  static const auto& all = *new std::vector<Kernels>{
#if defined(__x86_64__)
      {"amx", has_amx, always, TXL_BF16_DOT_KERNELS(amx, avx512)},
      {"avx512_bf16", has_avx512_bf16, prefers_bf16_dot, TXL_BF16_DOT_KERNELS(avx512_bf16, avx512)},
      {"avx512", has_avx512, always, TXL_FMA_KERNELS(avx512)},
      {"avx2", has_avx2, always, TXL_FMA_KERNELS(avx2)},
#elif defined(__aarch64__)
      {"neon_bf16", has_neon_bf16, always, TXL_BF16_DOT_KERNELS(neon_bf16, neon)},
      {"neon", always, always, TXL_FMA_KERNELS(neon)},
#endif
      {"baseline", always, always, TXL_FMA_KERNELS(baseline)},
#if defined(TXL_EMULATED)
      {"emulated_bf16", always, never, TXL_BF16_DOT_KERNELS(emulated_bf16, baseline)},
      {"emulated_amx", always, never, TXL_BF16_DOT_KERNELS(emulated_amx, baseline)},
#endif
  };
  return all;
}

const Kernels& kernels() {
  const Kernels* found = g_kernels.load(std::memory_order_acquire);
  if (!found) {
    const char* name = std::getenv("TXL_KERNELS_ISA");
    found = find(name ? name : "");
    g_kernels.store(found, std::memory_order_release);
  }
  return *found;
}

void force_isa(const std::string& name) { g_kernels.store(find(name), std::memory_order_release); }

}  // namespace txl
