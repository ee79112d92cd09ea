// The Python module txl_kernels._native. Its callers have validated all arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "../include/txl_attention.h"
#include "../python/call.h"
#include "../python/interpreter.h"
#include "library.h"
#include "seen.h"

namespace py = pybind11;

namespace {

const txl::CpuLibrary* g_library = nullptr;

// The library beside the module, which Python has loaded.
const txl::CpuLibrary& library() {
  if (!g_library) throw std::runtime_error("set_library has not been called");
  return *g_library;
}

// address: of what the library's txl_cpu_library returned. Returns whether module and library are of the same sources.
bool set_library(int64_t address) {
  const auto* const found = reinterpret_cast<const txl::CpuLibrary*>(address);
  if (std::strcmp(found->source_hash, TXL_SOURCE_HASH) != 0) return false;
  g_library = found;
  return true;
}

// Throws the exception of a code that a function of the library returned.
void check(int code) {
  if (code == TXL_OK) return;
  if (code == TXL_OUT_OF_MEMORY) throw std::bad_alloc();
  throw std::runtime_error(library().last_error());
}

const txl::Kernels& kernels() {
  const txl::Kernels* in_use = nullptr;
  check(library().kernels(&in_use));
  return *in_use;
}

// A call without its pointers and the length of its memory: sizes, strides and settings, which many calls share.
class Plan {
 public:
  Plan(const py::tuple& call, const py::handle& out, int type, uint32_t drop_below) {
    static_cast<txl::Attention&>(problem_) = txl::attention_of(call, out, static_cast<txl::Type>(type), drop_below);
  }

  // Whether the values of start and end are in [0, M + L], and the table has a row for each distance that they show.
  bool bounds_fit(const py::tuple& call) const {
    txl::Attention a = problem_;
    txl::set_memory(a, call);
    a.start.data = static_cast<const int32_t*>(txl::pointer_of(call[txl::START]));
    a.end.data = static_cast<const int32_t*>(txl::pointer_of(call[txl::END]));
    const txl::Seen seen = txl::find_seen(a.start, a.end, a.B, a.L, a.M, a.left, a.right);
    return !seen.wrong && (a.zero_outside || txl::has_rows(seen, a.T, a.zero_row));
  }

  // Runs forward on tensors of the shapes and strides that the plan was made for, but for the memory's length. lse may
  // be None.
  void forward(const py::tuple& call, const py::handle& out, const py::handle& lse, int threads, uint64_t seed) const {
    const txl::Problem p = problem(call, out, lse, threads, seed);
    int code = TXL_OK;
    txl::without_gil([&] { code = library().forward(p); });
    check(code);
  }

  // Runs backward. gradients: those of the inputs, in their order, each a tensor or None. dlse may be None.
  void backward(const py::tuple& call, const py::handle& out, const py::handle& lse, const py::handle& dout,
                const py::handle& dlse, const py::tuple& gradients, int threads, uint64_t seed) const {
    const txl::Problem p = problem(call, out, lse, threads, seed);
    txl::Gradients g;
#define TXL_ADDRESS(enumerator, name, member) &g.d##member,
    txl::View* const views[txl::INPUTS] = {TXL_INPUTS(TXL_ADDRESS)};
#undef TXL_ADDRESS
    for (size_t i = 0; i < txl::INPUTS; ++i)
      if (!gradients[i].is_none()) *views[i] = txl::view_of(gradients[i]);
    g.dout = txl::view_of(dout);
    g.dlse = static_cast<const float*>(txl::pointer_of(dlse));
    int code = TXL_OK;
    txl::without_gil([&] { code = library().backward(p, g); });
    check(code);
  }

 private:
  txl::Problem problem(const py::tuple& call, const py::handle& out, const py::handle& lse, int threads,
                       uint64_t seed) const {
    txl::Problem p = problem_;
    txl::set_memory(p, call);
    txl::set_pointers(p, call, out, lse);
    p.threads = threads, p.seed = seed;
    return p;
  }

  txl::Problem problem_;
};

// Runs `iterations` rounds at peak rate on each thread and returns the number of floating-point operations done.
double run_peak_loop(int64_t iterations, int threads, bool bf16) {
  const txl::Probes& probes = kernels().probes;
  double operations = 0;
  txl::without_gil([&] { operations = (bf16 ? probes.bf16_dot : probes.fma)(iterations, threads); });
  return operations;
}

void read_once(int64_t data, int64_t floats, int threads) {
  const txl::Probes& probes = kernels().probes;
  txl::without_gil([&] { probes.read(reinterpret_cast<const float*>(data), floats, threads); });
}

void exp_of(int64_t x, int64_t y, int64_t n) {
  kernels().probes.exp(reinterpret_cast<const float*>(x), reinterpret_cast<float*>(y), n);
}

// Finds the interval of each row of a bool mask [B, L, S] whose last axis is contiguous. start, end: int32 [B, L],
// contiguous.
int64_t intervals_of(const py::handle& mask, int64_t B, int64_t L, int64_t S, bool visible, const py::handle& start,
                     const py::handle& end, int threads) {
  const txl::View view = txl::view_of(mask);
  const txl::Mask m{static_cast<const uint8_t*>(view.data), B, L, S, view.s0, view.s1, visible};
  auto* const starts = static_cast<int32_t*>(txl::pointer_of(start));
  auto* const ends = static_cast<int32_t*>(txl::pointer_of(end));
  int64_t hole = -1;
  int code = TXL_OK;
  txl::without_gil([&] { code = library().intervals(m, starts, ends, threads, &hole); });
  check(code);
  return hole;
}

std::vector<std::string> isas(bool only_supported) {
  std::vector<std::string> names;
  size_t count = 0;
  const txl::Kernels* const all = library().all_kernels(&count);
  for (size_t n = 0; n < count; ++n)
    if (!only_supported || all[n].supported()) names.push_back(all[n].isa);
  return names;
}

std::string why_not_amx() {
  const char* reason = "";
  check(library().why_not_amx(&reason));
  return reason;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "C++ kernels of txl_kernels. Call them through txl_kernels.rel_attention, which checks its arguments.";
  m.attr("FIELDS") = txl::field_names();
  m.attr("SOURCE_HASH") = TXL_SOURCE_HASH;
  m.def("set_library", &set_library);
  py::class_<Plan>(m, "Plan", py::module_local())
      .def(py::init<const py::tuple&, const py::handle&, int, uint32_t>(), py::arg("call"), py::arg("out"),
           py::arg("type"), py::arg("drop_below"))
      .def("bounds_fit", &Plan::bounds_fit, py::arg("call"))
      .def("forward", &Plan::forward, py::arg("call"), py::arg("out"), py::arg("lse"), py::arg("threads"),
           py::arg("seed"))
      .def("backward", &Plan::backward, py::arg("call"), py::arg("out"), py::arg("lse"), py::arg("dout"),
           py::arg("dlse"), py::arg("gradients"), py::arg("threads"), py::arg("seed"));
  txl::define_tensor_metadata(m);
  txl::define_signature(m);
  m.def("intervals", &intervals_of);
  m.def("fma", &run_peak_loop, py::arg("iterations"), py::arg("threads"), py::arg("bf16") = false);
  m.def("read", &read_once, py::arg("pointer"), py::arg("floats"), py::arg("threads"));
  m.def("exp", &exp_of, py::arg("from_pointer"), py::arg("to_pointer"), py::arg("count"));
  m.def("isa", [] { return std::string(kernels().isa); }, "The instruction set in use.");
  m.def("isas", &isas, py::arg("only_supported"), "Instruction sets of this build, fastest first.");
  m.def("why_not_amx", &why_not_amx, "Why the system does not let this process use AMX; empty if it does.");
  m.def(
      "emulated_multiplications", [] { return library().emulated_multiplications(); },
      "Multiplications that emulated_bf16 has done in this process; 0 in a build without it.");
  m.def(
      "force_isa", [](const std::string& name) { check(library().force_isa(name.c_str())); },
      "Uses this instruction set from now on; '' for the fastest.");
  m.def(
      "set_openmp", [](uint64_t gomp_parallel) { library().set_openmp(gomp_parallel); },
      "Address of GOMP_parallel in torch's OpenMP runtime, or 0.");
  m.def("threading", [] { return std::string(library().threading()); });
}
