// Global memory between CTAs and between devices: ordered loads and stores, atomics, clocks.
#pragma once
#include "types.cuh"

namespace shardlib {

__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Read once: the first to leave the caches.
__device__ __forceinline__ uint4 load_16_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
#define SHARDLIB_ORDERED(NAME, ORDER, SCOPE)                                                   \
  __device__ __forceinline__ uint32_t load_##NAME(const uint32_t* p) {                         \
    uint32_t v;                                                                                \
    asm volatile("ld." ORDER "." SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); \
    return v;                                                                                  \
  }                                                                                            \
  __device__ __forceinline__ uint64_t load_##NAME(const uint64_t* p) {                         \
    uint64_t v;                                                                                \
    asm volatile("ld." ORDER "." SCOPE ".global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); \
    return v;                                                                                  \
  }
SHARDLIB_ORDERED(acquire_system, "acquire", "sys")
SHARDLIB_ORDERED(acquire_device, "acquire", "gpu")
SHARDLIB_ORDERED(relaxed_system, "relaxed", "sys")
SHARDLIB_ORDERED(relaxed_device, "relaxed", "gpu")
#undef SHARDLIB_ORDERED

#define SHARDLIB_ORDERED(NAME, ORDER, SCOPE)                                                 \
  __device__ __forceinline__ void store_##NAME(uint32_t* p, uint32_t v) {                    \
    asm volatile("st." ORDER "." SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); \
  }                                                                                          \
  __device__ __forceinline__ void store_##NAME(uint64_t* p, uint64_t v) {                    \
    asm volatile("st." ORDER "." SCOPE ".global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); \
  }
SHARDLIB_ORDERED(relaxed_system, "relaxed", "sys")
SHARDLIB_ORDERED(release_system, "release", "sys")
SHARDLIB_ORDERED(release_device, "release", "gpu")
#undef SHARDLIB_ORDERED

// Adds, and returns the old value.
#define SHARDLIB_ORDERED(NAME, ORDER, SCOPE)                                                                       \
  __device__ __forceinline__ uint32_t add_##NAME(uint32_t* p, uint32_t v) {                                        \
    uint32_t old;                                                                                                  \
    asm volatile("atom." ORDER "." SCOPE ".global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory"); \
    return old;                                                                                                    \
  }
SHARDLIB_ORDERED(release_device, "release", "gpu")
SHARDLIB_ORDERED(acquire_release_device, "acq_rel", "gpu")
#undef SHARDLIB_ORDERED

__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Between accesses to one place by two addresses: its own, and a multicast one.
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

__device__ __forceinline__ uint64_t timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
// A short rest in a loop that waits for memory to change.
__device__ __forceinline__ void pause_ns(unsigned ns) { __nanosleep(ns); }

}  // namespace shardlib
