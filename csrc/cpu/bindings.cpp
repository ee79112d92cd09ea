// The Python module txl_kernels._native. Its callers have validated all arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../python/call.h"
#include "../python/interpreter.h"
#include "dispatch.h"
#include "intervals.h"
#include "runtime.h"

namespace py = pybind11;

namespace {

// A call without its pointers and the length of its memory: sizes, strides and settings, which many calls share.
class Plan {
 public:
  Plan(const py::tuple& call, const py::handle& out, int type, uint32_t drop_below) {
    static_cast<txl::Attention&>(problem_) = txl::attention_of(call, out, static_cast<txl::Type>(type), drop_below);
    zeros_.resize(static_cast<size_t>(std::max(problem_.D, problem_.Dr)));
  }

  // Runs forward on tensors of the shapes and strides that the plan was made for, but for the memory's length. lse may
  // be None.
  void forward(const py::tuple& call, const py::handle& out, const py::handle& lse, int threads, uint64_t seed) const {
    const txl::Problem p = problem(call, out, lse, threads, seed);
    const txl::EntryPoints& run = txl::kernels().entry_points(p);
    txl::without_gil([&] { run.forward(p); });
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
    const txl::EntryPoints& run = txl::kernels().entry_points(p);
    txl::without_gil([&] { run.backward(p, g); });
  }

 private:
  txl::Problem problem(const py::tuple& call, const py::handle& out, const py::handle& lse, int threads,
                       uint64_t seed) const {
    txl::Problem p = problem_;
    txl::set_memory(p, call);
    txl::set_pointers(p, call, out, lse);
    for (txl::View* bias : {&p.u, &p.w})
      if (!bias->data) bias->data = const_cast<float*>(zeros_.data());
    p.threads = threads, p.seed = seed;
    return p;
  }

  txl::Problem problem_;
  std::vector<float> zeros_;  // one row of a bias that is None, for all heads; also zeros in bf16
};

// Runs `iterations` rounds at peak rate on each thread and returns the number of floating-point operations done.
double run_peak_loop(int64_t iterations, int threads, bool bf16) {
  const txl::Probes& probes = txl::kernels().probes;
  double operations = 0;
  txl::without_gil([&] { operations = (bf16 ? probes.bf16_dot : probes.fma)(iterations, threads); });
  return operations;
}

void read_once(int64_t data, int64_t floats, int threads) {
  const txl::Probes& probes = txl::kernels().probes;
  txl::without_gil([&] { probes.read(reinterpret_cast<const float*>(data), floats, threads); });
}

void exp_of(int64_t x, int64_t y, int64_t n) {
  txl::kernels().probes.exp(reinterpret_cast<const float*>(x), reinterpret_cast<float*>(y), n);
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
  txl::without_gil([&] { hole = txl::intervals(m, starts, ends, threads); });
  return hole;
}

std::vector<std::string> isas(bool only_supported) {
  std::vector<std::string> names;
  for (const txl::Kernels& k : txl::all_kernels())
    if (!only_supported || k.supported()) names.push_back(k.isa);
  return names;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "C++ kernels of txl_kernels. Call them through txl_kernels.rel_attention, which checks its arguments.";
  m.attr("FIELDS") = txl::field_names();
  m.attr("SOURCE_HASH") = TXL_SOURCE_HASH;
  py::class_<Plan>(m, "Plan", py::module_local())
      .def(py::init<const py::tuple&, const py::handle&, int, uint32_t>(), py::arg("call"), py::arg("out"),
           py::arg("type"), py::arg("drop_below"))
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
  m.def("isa", [] { return std::string(txl::kernels().isa); }, "The instruction set in use.");
  m.def("isas", &isas, py::arg("only_supported"), "Instruction sets of this build, fastest first.");
  m.def("why_not_amx", &txl::why_not_amx, "Why the system does not let this process use AMX; empty if it does.");
  m.def("bf16_dot_speedup", &txl::bf16_dot_speedup,
        "Throughput of VDPBF16PS relative to float32 FMA, measured once; 0 without AVX512_BF16, or with AMX.");
  m.def("emulated_multiplications", &txl::emulated_multiplications,
        "Multiplications that emulated_bf16 has done in this process; 0 in a build without it.");
  m.def("force_isa", &txl::force_isa, "Uses this instruction set from now on; '' for the fastest.");
  m.def("set_openmp", &txl::set_openmp, "Address of GOMP_parallel in torch's OpenMP runtime, or 0.");
  m.def("threading", [] { return std::string(txl::threading()); });
}
