// What sm_80 has: cp.async, ldmatrix, mma.sync; and stmatrix of sm_90.
#pragma once
#include "wgmma.h"

namespace shardlib {
namespace emulation {
void wait_copies(unsigned latest);
void load_matrices(uint32_t (&out)[4], const void* row, bool transposed);
void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*decode)(uint16_t));
}  // namespace emulation

void cp_async_16(void* to, const void* from, unsigned valid = 16);
void cp_async_commit();
template <int N> inline void cp_async_wait() { emulation::wait_copies(N); }

inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) { emulation::load_matrices(out, row, false); }
inline void ldmatrix_x4_transposed(uint32_t (&out)[4], const void* row) { emulation::load_matrices(out, row, true); }
void stmatrix_x4(void* row, const uint32_t (&in)[4]);

template <class T> inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::multiply(d, a, b, emulation::decode<T>);
}

}  // namespace shardlib
