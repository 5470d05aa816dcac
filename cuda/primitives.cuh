// The instructions that the kernels are written in: about fifty functions with two implementations.
//
// nvcc compiles them to PTX (device/); any C++17 compiler runs them on emulated threads (emulation/), so that a kernel's
// source is tested on a machine with no GPU. Both sides declare the same names in namespace shardlib. A kernel uses
// these, C++ and CUDA's own words (threadIdx, __syncthreads, shuffles, atomics), and no inline assembly of its own.
#pragma once
#if defined(__CUDACC__)
#include "device/host.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/sync.cuh"
#include "device/tma.cuh"
#include "device/types.cuh"
#include "device/wgmma.cuh"
#else
#include "emulation/memory.h"
#endif
