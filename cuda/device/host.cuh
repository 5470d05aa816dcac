// The host's side of a kernel file: errors as text, launches, what the device is.
#pragma once
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

namespace shardlib {

inline thread_local char last_error[4096];

// Keeps the text for shardlib_last_error() and returns the code.
inline int fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return code;
}

struct LaunchShape {
  dim3 grid, block;
  unsigned shared_bytes = 0;
  bool cooperative = false;  // all CTAs live at once
};

// Launches kernel(arguments...); 0, or an error code with its text in shardlib_last_error().
template <class... P, class... A>
inline int launch(const LaunchShape& shape, cudaStream_t stream, void (*kernel)(P...), const A&... arguments) {
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > 48u << 10)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.shared_bytes));
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid, config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes, config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.attrs = &attribute;
    config.numAttrs = shape.cooperative ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
  }
  if (error == cudaSuccess) return 0;
  cudaGetLastError();  // the next launch shall not report this one's error
  return fail(int(error),
              "a kernel of %u x %u x %u CTAs of %u threads with %u bytes of shared memory was not launched: %s",
              shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x, shape.shared_bytes, cudaGetErrorString(error));
}

inline int multiprocessor_count() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

}  // namespace shardlib

extern "C" inline __attribute__((used)) const char* shardlib_last_error() { return shardlib::last_error; }
