// Barriers of a CTA, mbarriers, and what the lanes of a warp do together.
#pragma once
#include "machine.h"

namespace shardlib {

constexpr uint32_t kFullMask = 0xffffffffu;

struct alignas(8) Barrier {
  uint64_t state;
};

void barrier_init(Barrier* barrier, unsigned arrivals);
inline void barrier_init_fence() {}
void barrier_arrive(Barrier* barrier);
void barrier_arrive_expect(Barrier* barrier, unsigned bytes);
void barrier_wait(Barrier* barrier, unsigned parity);

void named_barrier_sync(unsigned id, unsigned threads);
void named_barrier_arrive(unsigned id, unsigned threads);

bool elect_one();
inline unsigned lane_index() { return emulation::current->lane; }
inline unsigned warp_index() { return emulation::current->warp; }

template <int N> inline void registers_decrease() { static_assert(N % 8 == 0 && N >= 24 && N <= 256); }
template <int N> inline void registers_increase() { static_assert(N % 8 == 0 && N >= 24 && N <= 256); }

namespace emulation {

// Shows `bytes` (at most 64) to the lanes of `mask` and returns all lanes' slots, valid until this lane's second next
// call. The lanes must be at the same operation.
const unsigned char (*exchange(uint32_t mask, const void* value, unsigned bytes, int operation))[64];

template <class T> inline T from_lane(const unsigned char (*slots)[64], int lane) {
  T value;
  std::memcpy(&value, slots[lane], sizeof value);
  return value;
}
template <class T> inline T shuffle(uint32_t mask, T value, int lane) {
  static_assert(sizeof(T) <= 64);
  return from_lane<T>(exchange(mask, &value, sizeof value, 3), lane);
}

}  // namespace emulation
}  // namespace shardlib

void __syncthreads();
inline void __syncwarp(uint32_t mask = 0xffffffffu) { shardlib::emulation::exchange(mask, &mask, 4, 2); }

template <class T> inline T __shfl_sync(uint32_t mask, T value, int lane, int width = 32) {
  const int self = int(shardlib::emulation::current->lane);
  return shardlib::emulation::shuffle(mask, value, (self & ~(width - 1)) | (lane & (width - 1)));
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32) {
  const int self = int(shardlib::emulation::current->lane), other = self ^ bits;
  return shardlib::emulation::shuffle(mask, value, (other ^ self) < width ? other : self);
}
