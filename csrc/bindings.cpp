// The Python module txl_kernels._native. Raw pointers and strides only; Python has checked everything that comes in.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cxxabi.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "signature.h"

namespace py = pybind11;

namespace {

using Ints = std::vector<int64_t>;

// (pointer, stride, stride, stride): of the axes before the last.
txl::View view(const Ints& x) { return {reinterpret_cast<void*>(x.at(0)), x.at(1), x.at(2), x.at(3)}; }

txl::Bounds bounds(const Ints& x) { return {reinterpret_cast<const int32_t*>(x.at(0)), x.at(1), x.at(2)}; }

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Takes the GIL again. At interpreter shutdown CPython ends a daemon thread that asks for it by unwinding its stack;
// that must not pass through destructors (py::gil_scoped_release would end the process, handles would count references
// without the GIL), so such a thread waits here for the process to end.
void take_gil(PyThreadState* state) {
#ifdef __GLIBCXX__
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  PyEval_RestoreThread(state);
#endif
}

// Runs f without the GIL.
template <class F>
void without_gil(const F& f) {
  std::exception_ptr error;
  const bool ending = finalizing();  // then this is the thread that ends the interpreter, and it may have the GIL again
  PyThreadState* state = PyEval_SaveThread();
  try {
    f();
  } catch (...) {
    error = std::current_exception();
  }
  while (!ending && finalizing()) pause();  // a daemon thread has nobody to return to
  take_gil(state);
  if (error) std::rethrow_exception(error);
}

// A call whose sizes, strides and settings are known, and only pointers are not: what many calls have in common.
class Plan {
 public:
  explicit Plan(const txl::Problem& p) : problem_(p) {}

  // call: the fields of txl_kernels.call.Call, tensors of the shapes and strides that the plan was made for.
  void forward(const py::tuple& call, const py::handle& out, const py::handle& lse, int threads, uint64_t seed) const {
    txl::Problem p = problem_;
    txl::View* const views[] = {&p.q, &p.k, &p.v, &p.r, &p.u, &p.w, &p.k_mem, &p.v_mem};
    for (size_t i = 0; i < std::size(views); ++i) views[i]->data = pointer_of(call[i]);
    p.start.data = static_cast<const int32_t*>(pointer_of(call[8]));
    p.end.data = static_cast<const int32_t*>(pointer_of(call[9]));
    p.out.data = pointer_of(out);
    p.lse = static_cast<float*>(pointer_of(lse));
    p.threads = threads, p.seed = seed;
    const txl::Kernels& kernels = txl::kernels();
    without_gil([&] { kernels.forward(p); });
  }

  // Of the very tensors the plan was made from. gradients: views of dout, dq, dk, dv, dk_mem, dv_mem, dr, du, dw.
  void backward(const std::vector<Ints>& gradients, int64_t dlse) const {
    txl::Gradients g;
    txl::View* const views[] = {&g.dout, &g.dq, &g.dk, &g.dv, &g.dk_mem, &g.dv_mem, &g.dr, &g.du, &g.dw};
    for (size_t i = 0; i < std::size(views); ++i) *views[i] = view(gradients.at(i));
    g.dlse = reinterpret_cast<const float*>(dlse);
    const txl::Kernels& kernels = txl::kernels();
    without_gil([&] { kernels.backward(problem_, g); });
  }

 private:
  static void* pointer_of(const py::handle& x) {
    static PyObject* const name = PyUnicode_InternFromString("data_ptr");
    if (x.is_none()) return nullptr;
    return reinterpret_cast<void*>(txl::call_method(x, name).cast<int64_t>());
  }

  txl::Problem problem_;
};

// sizes: B, H, L, M, D, T, zero_row, causal, window (0: none), bf16, threads.
// tensors: views of q, k, v, k_mem, v_mem, r, content_bias, position_bias, out.
Plan make_plan(const std::array<int64_t, 11>& sizes, float scale, uint32_t drop_below, float keep_scale, uint64_t seed,
               const std::vector<Ints>& tensors, const Ints& start, const Ints& end, int64_t lse) {
  txl::Problem p;
  p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.M = sizes[3], p.D = sizes[4], p.T = sizes[5];
  p.zero_row = sizes[6], p.causal = sizes[7] != 0, p.window = sizes[8];
  p.type = sizes[9] ? txl::Type::bf16 : txl::Type::f32;
  p.threads = static_cast<int>(sizes[10]);
  p.scale = scale, p.drop_below = drop_below, p.keep_scale = keep_scale, p.seed = seed;
  txl::View* const views[] = {&p.q, &p.k, &p.v, &p.k_mem, &p.v_mem, &p.r, &p.u, &p.w, &p.out};
  for (size_t i = 0; i < std::size(views); ++i) *views[i] = view(tensors.at(i));
  p.start = bounds(start), p.end = bounds(end);
  p.lse = reinterpret_cast<float*>(lse);
  return Plan(p);
}

// Floating-point operations done in about `iterations` rounds on each thread.
double busy(int64_t iterations, int threads) {
  const txl::Kernels& kernels = txl::kernels();
  double operations = 0;
  without_gil([&] { operations = kernels.fma(iterations, threads); });
  return operations;
}

void read_once(int64_t data, int64_t floats, int threads) {
  const txl::Kernels& kernels = txl::kernels();
  without_gil([&] { kernels.read(reinterpret_cast<const float*>(data), floats, threads); });
}

void exp_of(int64_t x, int64_t y, int64_t n) {
  txl::kernels().exp(reinterpret_cast<const float*>(x), reinterpret_cast<float*>(y), n);
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
  py::class_<Plan>(m, "Plan").def(py::init(&make_plan)).def("forward", &Plan::forward).def("backward", &Plan::backward);
  txl::define_signature(m);
  m.def("fma", &busy, py::arg("iterations"), py::arg("threads"));
  m.def("read", &read_once, py::arg("pointer"), py::arg("floats"), py::arg("threads"));
  m.def("exp", &exp_of, py::arg("from_pointer"), py::arg("to_pointer"), py::arg("count"));
  m.def("isa", [] { return std::string(txl::kernels().isa); }, "The instruction set in use.");
  m.def("isas", &isas, py::arg("only_supported"), "Instruction sets of this build, best first.");
  m.def("force_isa", &txl::force_isa, "Uses this instruction set from now on; '' for the best.");
  m.def("set_openmp", &txl::set_openmp, "Address of GOMP_parallel in torch's OpenMP runtime, or 0.");
  m.def("threading", [] { return std::string(txl::threading()); });
}
