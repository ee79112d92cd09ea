// The Python module txl_kernels._cuda. Raw pointers, strides and a stream as an integer; Python has checked everything.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <vector>

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

using Ints = std::vector<int64_t>;

txl_cuda::View view(const Ints& x) { return {reinterpret_cast<const void*>(x.at(0)), x.at(1), x.at(2), x.at(3)}; }

txl_cuda::Bounds bounds(const Ints& x) { return {reinterpret_cast<const int32_t*>(x.at(0)), x.at(1), x.at(2)}; }

// sizes: B, H, L, M, D, T, zero_row, causal, window (0: none), aligned.
// tensors: views of q, k, v, k_mem, v_mem, r, content_bias, position_bias, out.
txl_cuda::Problem problem(const std::array<int64_t, 10>& sizes, float scale, uint32_t drop_below, float keep_scale,
                          int64_t seed, const std::vector<Ints>& tensors, const Ints& start, const Ints& end,
                          int64_t lse) {
  txl_cuda::Problem p = {};
  p.B = sizes[0], p.H = sizes[1], p.L = sizes[2], p.M = sizes[3], p.D = sizes[4], p.T = sizes[5];
  p.zero_row = sizes[6], p.causal = sizes[7] != 0, p.window = sizes[8], p.aligned = sizes[9] != 0;
  p.scale = scale, p.drop_below = drop_below, p.keep_scale = keep_scale;
  p.seed = reinterpret_cast<const int64_t*>(seed);
  txl_cuda::View* const views[] = {&p.q, &p.k, &p.v, &p.k_mem, &p.v_mem, &p.r, &p.u, &p.w, &p.out};
  for (size_t i = 0; i < std::size(views); ++i) *views[i] = view(tensors.at(i));
  p.start = bounds(start), p.end = bounds(end);
  p.lse = reinterpret_cast<float*>(lse);
  return p;
}

// One call, split; the workspace comes later.
class Decode {
 public:
  Decode(int type, const txl_cuda::Problem& p, int multiprocessors)
      : type_(static_cast<txl_cuda::Type>(type)), problem_(p), split_(txl_cuda::split(p, multiprocessors)) {
    problem_.parts = split_.parts, problem_.part_keys = split_.part_keys;
  }

  const txl_cuda::Split& split() const { return split_; }

  void forward(int64_t partial, int64_t stream) {
    problem_.partial = reinterpret_cast<float*>(partial);
    py::gil_scoped_release unlocked;
    txl_cuda::forward(type_, problem_, reinterpret_cast<void*>(stream));
  }

 private:
  txl_cuda::Type type_;
  txl_cuda::Problem problem_;
  txl_cuda::Split split_;
};

}  // namespace

PYBIND11_MODULE(TXL_MODULE, m) {
  m.doc() = "CUDA kernels of txl_kernels for few queries; see txl_kernels/cuda.py.";
  m.attr("compiler") = TXL_CUDA_COMPILER;
  m.attr("architectures") = TXL_CUDA_ARCHITECTURES;
  m.def("no_driver", &txl_cuda::no_driver, "Why no GPU can be used; empty if one can.");
  py::class_<Decode>(m, "Decode")
      .def(py::init([](int type, const std::array<int64_t, 10>& sizes, float scale, uint32_t drop_below,
                       float keep_scale, int64_t seed, const std::vector<Ints>& tensors, const Ints& start,
                       const Ints& end, int64_t lse, int multiprocessors) {
        return Decode(type, problem(sizes, scale, drop_below, keep_scale, seed, tensors, start, end, lse),
                      multiprocessors);
      }))
      .def_property_readonly("parts", [](const Decode& d) { return d.split().parts; })
      .def_property_readonly("part_keys", [](const Decode& d) { return d.split().part_keys; })
      .def_property_readonly("workspace", [](const Decode& d) { return d.split().partial_floats; })
      .def("forward", &Decode::forward, "Enqueues the call; partial: pointer to `workspace` floats.");
}
