// The device of launches.
#include "launch.cuh"

namespace txl_cuda {

OnDevice::OnDevice(int device) {
#ifdef __CUDACC__
  if (device < 0) return;
  int current = -1;
  check(cudaGetDevice(&current));
  if (current == device) return;
  check(cudaSetDevice(device));
  before_ = current;
#else
  static_cast<void>(device);
#endif
}
OnDevice::~OnDevice() {
#ifdef __CUDACC__
  if (before_ >= 0) static_cast<void>(cudaSetDevice(before_));
#endif
}

const char* no_driver() {
#ifdef __CUDACC__
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaErrorInsufficientDriver) return "no usable NVIDIA driver";
  if (error != cudaSuccess) return cudaGetErrorString(error);
#endif
  return "";
}

}  // namespace txl_cuda
