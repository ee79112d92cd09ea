// The Python module txl_kernels._cuda. Raw pointers, strides and a stream as an integer; Python has checked everything.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "launch.h"

#ifndef TXL_MODULE
#define TXL_MODULE _cuda
#endif
#ifndef TXL_CUDA_COMPILER
#define TXL_CUDA_COMPILER "none"
#define TXL_CUDA_ARCHITECTURES "none"
#endif

namespace py = pybind11;

namespace {

constexpr size_t VIEWS = 9;                       // q, k, v, k_mem, v_mem, r, content_bias, position_bias, out
constexpr size_t ROWS_BEGIN = 1, ROWS_END = 6;    // those that are read 16 bytes at a time
using Pointers = std::array<int64_t, VIEWS + 4>;  // the views', start, end, seed, lse; 0: not given

template <class T>
T* pointer(int64_t x) {
  return reinterpret_cast<T*>(x);
}

// All of a call but where its tensors lie: calls of the same shapes and strides share one.
class Plan {
 public:
  // sizes: B, H, L, M, D, T, zero_row, causal, window (0: none). strides: three for every view, two for start and end.
  // aligned: strides of rows are multiples of 16 bytes.
  Plan(int type, const std::array<int64_t, 9>& sizes, float scale, uint32_t drop_below, float keep_scale,
       const std::array<std::array<int64_t, 3>, VIEWS>& strides, const std::array<std::array<int64_t, 2>, 2>& bounds,
       bool aligned, int multiprocessors)
      : type_(static_cast<txl_cuda::Type>(type)) {
    txl_cuda::Problem p = {};
    p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.M = sizes[3], p.D = sizes[4], p.T = sizes[5];
    p.zero_row = sizes[6], p.causal = sizes[7] != 0, p.window = sizes[8];
    p.scale = scale, p.drop_below = drop_below, p.keep_scale = keep_scale;
    for (size_t i = 0; i < VIEWS; ++i) *views(p)[i] = {nullptr, strides[i][0], strides[i][1], strides[i][2]};
    p.start = {nullptr, bounds[0][0], bounds[0][1]}, p.end = {nullptr, bounds[1][0], bounds[1][1]};
    const auto split = [&](bool rows_aligned) {
      p.aligned = rows_aligned;
      const int64_t floats = txl_cuda::split(p, multiprocessors);
      return Split{p, floats};
    };
    strided_ = split(aligned), anywhere_ = split(false);
  }

  // Floats of workspace that a call needs.
  int64_t workspace(const Pointers& at) const { return split_for(at).floats; }

  // Enqueues a call; partial: pointer to that workspace.
  void forward(const Pointers& at, int64_t partial, int64_t stream) const {
    txl_cuda::Problem p = split_for(at).problem;
    for (size_t i = 0; i < VIEWS; ++i) views(p)[i]->data = pointer<void>(at[i]);
    p.start.data = pointer<int32_t>(at[VIEWS]), p.end.data = pointer<int32_t>(at[VIEWS + 1]);
    p.seed = pointer<int64_t>(at[VIEWS + 2]), p.lse = pointer<float>(at[VIEWS + 3]);
    p.partial = pointer<float>(partial);
    py::gil_scoped_release unlocked;
    txl_cuda::forward(type_, p, pointer<void>(stream));
  }

  const txl_cuda::Problem& problem() const { return strided_.problem; }

 private:
  struct Split {
    txl_cuda::Problem problem;
    int64_t floats;
  };

  static std::array<txl_cuda::View*, VIEWS> views(txl_cuda::Problem& p) {
    return {&p.q, &p.k, &p.v, &p.k_mem, &p.v_mem, &p.r, &p.u, &p.w, &p.out};
  }

  // Rows are aligned if their strides are and the first of them is.
  const Split& split_for(const Pointers& at) const {
    for (size_t i = ROWS_BEGIN; i < ROWS_END; ++i)
      if (at[i] % 16) return anywhere_;
    return strided_;
  }

  txl_cuda::Type type_;
  Split strided_, anywhere_;
};

}  // namespace

PYBIND11_MODULE(TXL_MODULE, m) {
  m.doc() = "CUDA kernels of txl_kernels for few queries; see txl_kernels/cuda.py.";
  m.attr("compiler") = TXL_CUDA_COMPILER;
  m.attr("architectures") = TXL_CUDA_ARCHITECTURES;
  m.def("no_driver", &txl_cuda::no_driver, "Why no GPU can be used; empty if one can.");
  py::class_<Plan>(m, "Plan")
      .def(py::init<int, const std::array<int64_t, 9>&, float, uint32_t, float,
                    const std::array<std::array<int64_t, 3>, VIEWS>&, const std::array<std::array<int64_t, 2>, 2>&,
                    bool, int>())
      .def_property_readonly("parts", [](const Plan& x) { return x.problem().parts; })
      .def_property_readonly("part_keys", [](const Plan& x) { return x.problem().part_keys; })
      .def("workspace", &Plan::workspace)
      .def("forward", &Plan::forward);
}
