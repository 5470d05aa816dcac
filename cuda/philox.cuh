// Philox4x32-10 (Salmon et al. 2011): the library's one source of random bits, the same as ops/random/philox.py.
//
// The 32 bits of element `index` of a tensor are word `index & 3` of the block `index >> 2`, keyed by the seed and
// counted on by the counter. So any part of a tensor can be drawn anywhere, and drawn again.
#pragma once
#include "primitives.cuh"

namespace shardlib {

struct PhiloxKey {
  uint64_t seed, counter;
};

// Four words for the elements 4 block to 4 block + 3.
__device__ __forceinline__ uint4 philox(PhiloxKey key, uint64_t block) {
  uint32_t k0 = uint32_t(key.seed), k1 = uint32_t(key.seed >> 32);
  uint4 c = make_uint4(uint32_t(block), uint32_t(block >> 32), uint32_t(key.counter), uint32_t(key.counter >> 32));
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
    c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c;
}

__device__ __forceinline__ uint32_t philox_word(uint4 block, unsigned lane) {
  const uint32_t low = lane & 1 ? block.y : block.x, high = lane & 1 ? block.w : block.z;
  return lane & 2 ? high : low;
}

}  // namespace shardlib
