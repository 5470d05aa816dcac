// The order in which CTAs add to shared sums, for results with the same bits in every run.
//
// A CTA takes a ticket when it begins, and chooses its work by it. So it only waits for CTAs that began before it,
// whatever the order in which the card starts CTAs, and however few run at once.
#pragma once
#include "primitives.cuh"

namespace shardlib {

struct Turns {
  uint32_t* words;  // tickets taken; then, of each sum, the additions that it has had. Null: these come in any order

  // One thread takes the CTA's ticket to `place` in shared memory; behind a barrier all have the index of its work.
  __device__ __forceinline__ void take(uint32_t* place) const {
    if (words) *place = atomicAdd(words, 1u);
  }
  __device__ __forceinline__ int index(const uint32_t* place) const { return int(words ? *place : blockIdx.x); }

  // One thread waits until a sum has had `before` additions, and counts the CTA's own when it is done.
  __device__ __forceinline__ void wait(int64_t sum, int before) const {
    while (load_acquire_device(words + 1 + sum) != uint32_t(before)) pause_ns(64);
  }
  __device__ __forceinline__ void pass(int64_t sum) const {
    fence_device();
    add_release_device(words + 1 + sum, 1u);
  }
};

// Of the words for so many sums, zeros when a launch begins.
inline int64_t turn_bytes(int64_t sums) { return 4 * (1 + sums); }

}  // namespace shardlib
