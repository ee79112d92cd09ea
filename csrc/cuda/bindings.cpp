// The Python module txl_kernels._cuda. A stream is an integer; Python has checked everything that
// comes in.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <iterator>

#include "../python/call.h"
#include "../python/interpreter.h"
#include "launch.h"

#ifndef TXL_MODULE  // the tests' emulation, which has the kernels in the module
#define TXL_MODULE _cuda
#include "loaded_library.h"
#define TXL_LOADS_LIBRARY
#endif

namespace py = pybind11;

namespace {

// Whether every row of [n0, n1, n2, D] starts at a multiple of 16 bytes if the first does.
bool rows_aligned(const txl::View& x, int64_t n0, int64_t n1, int64_t n2, int64_t unit) {
  const auto fits = [&](int64_t size, int64_t stride) { return size <= 1 || stride % unit == 0; };
  return n0 * n1 * n2 == 0 || (fits(n0, x.s0) && fits(n1, x.s1) && fits(n2, x.s2));
}

// All of a call but where its tensors lie: calls of the same shapes and strides share one. The keys
// are split twice, for rows that are read 16 bytes at a time and for rows that lie anywhere.
class DecodePlan {
 public:
  DecodePlan(const py::tuple& call, const py::handle& out, int type, uint32_t drop_below, int multiprocessors,
             int device)
      : device_(device) {
    txl_cuda::DecodeProblem p;
    static_cast<txl::Attention&>(p) = txl::attention_of(call, out, static_cast<txl::Type>(type), drop_below);
    txl::set_memory(p, call);
    const int64_t unit = p.type == txl::Type::f32 ? 4 : 8;
    p.aligned = rows_aligned(p.k, p.B, p.Hkv, p.L, unit) && rows_aligned(p.v, p.B, p.Hkv, p.L, unit) &&
                rows_aligned(p.k_mem, p.B, p.Hkv, p.M, unit) && rows_aligned(p.v_mem, p.B, p.Hkv, p.M, unit) &&
                rows_aligned(p.r, p.H, p.T, 1, unit);
    p.with_terms = !call[txl::Q_POS].is_none() || !call[txl::SINK].is_none() || p.Hkv != p.H || p.zero_outside;
    const int64_t floats = txl_cuda::split_decode(p, multiprocessors);
    strided_ = p;
    p.aligned = false;
    workspace_ = std::max(floats, txl_cuda::split_decode(p, multiprocessors));
    anywhere_ = p;
  }

  // Floats of workspace that a call needs at most.
  int64_t workspace() const { return workspace_; }

  // Loads the kernels that calls will run.
  void load() const {
    const txl_cuda::OnDevice on(device_);
    txl_cuda::load_decode(strided_);
    txl_cuda::load_decode(anywhere_);
  }

  // Enqueues a call; partial: pointer to that workspace.
  void forward(const py::tuple& call, const py::handle& out, const py::handle& lse, int64_t partial,
               int64_t stream) const {
    txl::Attention given = strided_;
    txl::set_pointers(given, call, out, lse);
    txl_cuda::DecodeProblem p = starts_aligned(given) ? strided_ : anywhere_;
    static_cast<txl::Attention&>(p) = given;
    p.seed = static_cast<const int64_t*>(txl::pointer_of(call[txl::SEED]));
    p.partial = reinterpret_cast<float*>(partial);
    txl::without_gil([&] {
      const txl_cuda::OnDevice on(device_);
      txl_cuda::forward_decode(p, reinterpret_cast<void*>(stream));
    });
  }

  const txl_cuda::DecodeProblem& problem() const { return strided_; }

 private:
  // Whether the first row of each is at a multiple of 16 bytes.
  static bool starts_aligned(const txl::Attention& a) {
    for (const txl::View* x : {&a.k, &a.v, &a.k_mem, &a.v_mem, &a.r})
      if (reinterpret_cast<uintptr_t>(x->data) % 16) return false;
    return true;
  }

  txl_cuda::DecodeProblem strided_, anywhere_;
  int device_;  // the GPU's number; -1: the current one
  int64_t workspace_ = 0;
};

// The same for the Hopper kernels.
class PrefillPlan {
 public:
  PrefillPlan(const py::tuple& call, const py::handle& out, int type, uint32_t drop_below, int multiprocessors,
              int device)
      : device_(device) {
    static_cast<txl::Attention&>(problem_) = txl::attention_of(call, out, static_cast<txl::Type>(type), drop_below);
    txl::set_memory(problem_, call);
    problem_.has_q_pos = !call[txl::Q_POS].is_none(), problem_.has_sink = !call[txl::SINK].is_none();
    workspace_ = txl_cuda::split_prefill(problem_, multiprocessors);
    backward_parts_ = txl_cuda::split_backward(problem_, multiprocessors);
  }

  // Floats of workspace that forward needs.
  int64_t workspace() const { return workspace_; }

  void load() const {
    const txl_cuda::OnDevice on(device_);
    txl_cuda::load_prefill(problem_);
  }

  // Enqueues a call; partial: pointer to that workspace.
  void forward(const py::tuple& call, const py::handle& out, const py::handle& lse, int64_t partial,
               int64_t stream) const {
    txl_cuda::Problem p = problem_;
    txl::set_pointers(p, call, out, lse);
    p.seed = static_cast<const int64_t*>(txl::pointer_of(call[txl::SEED]));
    p.partial = reinterpret_cast<float*>(partial);
    txl::without_gil([&] {
      const txl_cuda::OnDevice on(device_);
      txl_cuda::forward_prefill(p, reinterpret_cast<void*>(stream));
    });
  }

  // Floats of workspace that backward needs; as for it.
  int64_t backward_workspace(const py::tuple& gradients, int64_t slots, int64_t tables) const {
    return txl_cuda::workspace_of(problem_, gradients_of(gradients, slots, tables));
  }

  // Enqueues backward. gradients: of the call's inputs, in their order, each a tensor or None; slots: 0, or for the
  // same bits; tables: of float32 sums of the gradient of r; workspace: pointer to its floats.
  void backward(const py::tuple& call, const py::handle& out, const py::handle& lse, const py::handle& dout,
                const py::handle& dlse, const py::tuple& gradients, int64_t slots, int64_t tables, int64_t workspace,
                int64_t stream) const {
    txl_cuda::Problem p = problem_;
    txl::set_pointers(p, call, out, lse);
    p.out = txl::view_of(out);
    p.seed = static_cast<const int64_t*>(txl::pointer_of(call[txl::SEED]));
    txl_cuda::Gradients x = gradients_of(gradients, slots, tables);
    x.dout = txl::view_of(dout), x.dlse = static_cast<const float*>(txl::pointer_of(dlse));
    x.workspace = reinterpret_cast<float*>(workspace);
    txl::without_gil([&] {
      const txl_cuda::OnDevice on(device_);
      txl_cuda::backward(p, x, reinterpret_cast<void*>(stream));
    });
  }

  const txl_cuda::Problem& problem() const { return problem_; }
  int64_t backward_parts() const { return backward_parts_; }

 private:
  txl_cuda::Gradients gradients_of(const py::tuple& gradients, int64_t slots, int64_t tables) const {
    txl_cuda::Gradients x;
    txl::View no_r_bias;
    txl::View* const views[txl::INPUTS] = {&x.dq,     &x.dk,     &x.dv,      &x.dr_out, &x.du,   &x.dw,
                                           &x.dk_mem, &x.dv_mem, &no_r_bias, &x.dq_pos, &x.dsink};
    if (gradients.size() != std::size(views)) throw py::value_error("not the gradients of a call's inputs");
    for (size_t n = 0; n < std::size(views); ++n)
      if (!gradients[n].is_none()) *views[n] = txl::view_of(gradients[n]);
    x.parts = backward_parts_, x.slots = slots, x.tables = tables;
    return x;
  }

  txl_cuda::Problem problem_;
  int device_;
  int64_t workspace_ = 0, backward_parts_ = 1;
};

}  // namespace

PYBIND11_MODULE(TXL_MODULE, m) {
  m.doc() = "CUDA kernels of txl_kernels, decode and prefill; see txl_kernels/backends/cuda.py.";
  m.attr("FIELDS") = txl::field_names();
  m.attr("SOURCE_HASH") = TXL_SOURCE_HASH;
  txl::define_tensor_metadata(m);
#ifdef TXL_LOADS_LIBRARY
  txl_cuda::define_library(m);
#endif
  m.def("no_driver", &txl_cuda::no_driver, "Why no GPU can be used; empty if one can.");
  py::class_<DecodePlan>(m, "DecodePlan")
      .def(py::init<const py::tuple&, const py::handle&, int, uint32_t, int, int>(), py::arg("call"), py::arg("out"),
           py::arg("type"), py::arg("drop_below"), py::arg("multiprocessors"), py::arg("device"))
      .def_property_readonly("parts", [](const DecodePlan& x) { return x.problem().parts; })
      .def_property_readonly("part_keys", [](const DecodePlan& x) { return x.problem().part_keys; })
      .def_property_readonly("workspace", &DecodePlan::workspace)
      .def("load", &DecodePlan::load)
      .def("forward", &DecodePlan::forward);
  py::class_<PrefillPlan>(m, "PrefillPlan")
      .def(py::init<const py::tuple&, const py::handle&, int, uint32_t, int, int>(), py::arg("call"), py::arg("out"),
           py::arg("type"), py::arg("drop_below"), py::arg("multiprocessors"), py::arg("device"))
      .def_property_readonly("parts", [](const PrefillPlan& x) { return x.problem().parts; })
      .def_property_readonly("workspace", &PrefillPlan::workspace)
      .def_property_readonly("backward_parts", &PrefillPlan::backward_parts)
      .def("backward_workspace", &PrefillPlan::backward_workspace)
      .def("load", &PrefillPlan::load)
      .def("forward", &PrefillPlan::forward)
      .def("backward", &PrefillPlan::backward);
}
