// wgmma: 64 x N x 16 products of a warpgroup, decoded from the real descriptor bits and carried out late.
#pragma once
#include "tma.h"

namespace shardlib {

enum class Major { k, mn };

namespace emulation {

// One product of a warpgroup, as one of its threads issues it.
struct Issue {
  int columns;
  uint64_t a, b;             // descriptors
  const uint32_t* fragment;  // A in registers, or null
  float* registers;          // the thread's part of the accumulator
  bool accumulate;
  Major a_major, b_major;
  float (*decode)(uint16_t);
};
void issue(const Issue& issue);
void pin(const void* registers, size_t bytes);
void wait_products(unsigned latest);

template <class T> inline float decode(uint16_t bits) { return to_float(T{bits}); }

}  // namespace emulation

uint64_t wgmma_descriptor(const void* tile, unsigned leading, unsigned stride);
void wgmma_fence();
void wgmma_commit();
template <int N> inline void wgmma_wait() { emulation::wait_products(N); }

template <class T, int N, Major A = Major::k, Major B = Major::k>
inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256);
  emulation::issue({N, a, b, nullptr, d, accumulate, A, B, emulation::decode<T>});
}
template <class T, int N, Major B = Major::k>
inline void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256);
  emulation::issue({N, 0, b, a, d, accumulate, Major::k, B, emulation::decode<T>});
}

template <int R> inline void wgmma_pin(float (&d)[R]) { emulation::pin(d, sizeof d); }
template <int S> inline void wgmma_pin(uint32_t (&a)[S][4]) {
  for (auto& fragment : a) emulation::pin(fragment, sizeof fragment);
}

}  // namespace shardlib
