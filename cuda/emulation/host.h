// The host's side of a kernel file: launches and what the device is.
#pragma once
// The machine is optimised although the kernels are not: those are compiled often, and run for milliseconds.
#pragma GCC push_options
#pragma GCC optimize("O3")
#include "memory.h"

namespace shardlib {

struct LaunchShape {
  dim3 grid, block;
  unsigned shared_bytes = 0;
  bool cooperative = false;  // all CTAs live at once
};

template <class... P, class... A>
inline int launch(const LaunchShape& shape, cudaStream_t, void (*kernel)(P...), const A&... arguments) {
  if (shape.shared_bytes > 227u << 10) return fail(1, "a kernel asks for %u bytes of shared memory", shape.shared_bytes);
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return fail(1, "a launch of an empty grid");
  return emulation::run_grid(shape.grid, shape.block, shape.shared_bytes, shape.cooperative,
                             [&] { kernel(static_cast<P>(arguments)...); });
}

inline int multiprocessor_count() { return int(emulation::settings.multiprocessors); }

}  // namespace shardlib

#pragma GCC pop_options
