// Shared addresses, mbarriers, named barriers, roles of warps.
#pragma once
#include "types.cuh"

namespace shardlib {

constexpr uint32_t kFullMask = 0xffffffffu;

// The dynamic shared memory of the CTA, aligned as the 128-byte swizzle needs it.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char shardlib_dynamic_shared[];
  return shardlib_dynamic_shared;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A named object in the CTA's static shared memory.
#define SHARED(type, name) __shared__ type name

struct alignas(8) Barrier {
  uint64_t state;
};

__device__ __forceinline__ void barrier_init(Barrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Shows fresh mbarriers to the copy engine; a __syncthreads() must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and has the phase wait for that many bytes of asynchronous copies too.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Until the phase of this parity is over; a try may sleep for a while in hardware.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Barriers 1 to 15 are free; 0 is __syncthreads(). `threads` counts those that sync and those that arrive.
__device__ __forceinline__ void named_barrier_sync(unsigned id, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(unsigned id, unsigned threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One lane of the warp, the same at every call; which one is not promised.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}
__device__ __forceinline__ unsigned lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned warp_index() { return __shfl_sync(kFullMask, threadIdx.x / 32, 0); }

// Registers per thread of this warpgroup; every role's branch calls one of the two once, at its beginning.
template <int N> __device__ __forceinline__ void registers_decrease() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_increase() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace shardlib
