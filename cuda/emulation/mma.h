// What sm_80 has: cp.async, ldmatrix, mma.sync. A copy lands when it is waited for, or at its commit by chance.
#pragma once
#include "wgmma.h"

namespace shardlib {
namespace emulation {

inline void finish_copies(std::vector<CopyInFlight>& group) {
  for (auto& copy : group) {
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.valid);
  }
  group.clear();
}

inline void check_matrix_row(const void* row) {
  const auto offset = static_cast<const unsigned char*>(row) - current->cta->shared;
  if (offset < 0 || size_t(offset) + 16 > current->cta->shared_bytes || offset % 16)
    stop("a matrix row outside shared memory, or not aligned to 16 bytes");
}

template <bool Transposed> inline void load_matrices(uint32_t* out, int count, const void* row) {
  check_matrix_row(row);
  auto* slots = exchange(kFullMask, row, 10 + count + (Transposed ? 8 : 0));
  const unsigned lane = current->lane;
  for (int m = 0; m < count; ++m) {
    uint16_t pair[2];
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned r = Transposed ? lane % 4 * 2 + half : lane / 4, c = Transposed ? lane / 4 : lane % 4 * 2 + half;
      const unsigned char* from;
      std::memcpy(&from, slots[m * 8 + int(r)], sizeof from);
      std::memcpy(&pair[half], from + 2 * c, 2);
    }
    out[m] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
  }
  exchange(kFullMask, 0, 9);  // the rows were read in all lanes before any lane goes on to overwrite them
}

}  // namespace emulation

// Copies 16 bytes into shared memory, the first `valid` of them from `from`, the rest as zeros.
inline void cp_async_16(void* to, const void* from, unsigned valid = 16) {
  using namespace emulation;
  check_matrix_row(to);
  if (valid > 16 || (valid && reinterpret_cast<uintptr_t>(from) % 16)) stop("cp.async from an unaligned address");
  if (current->copy_groups.empty()) current->copy_groups.emplace_back();
  std::memset(to, 0xff, 16);
  current->copy_groups.back().push_back({to, from, valid, 16});
}
inline void cp_async_commit() {
  using namespace emulation;
  auto& groups = current->copy_groups;
  if (groups.empty()) groups.emplace_back();
  if (chance(4)) finish_copies(groups.back());
  groups.emplace_back();
  give_way();
}
// All but this thread's N latest groups have landed, for this thread; a barrier shows them to others.
template <int N> inline void cp_async_wait() {
  auto& groups = emulation::current->copy_groups;
  size_t g = 0;
  for (; g + 1 + N < groups.size(); ++g) emulation::finish_copies(groups[g]);
  groups.erase(groups.begin(), groups.begin() + long(g));
}

// 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) { emulation::load_matrices<false>(out, 4, row); }
inline void ldmatrix_x4_transposed(uint32_t (&out)[4], const void* row) { emulation::load_matrices<true>(out, 4, row); }
inline void ldmatrix_x2(uint32_t (&out)[2], const void* row) { emulation::load_matrices<false>(out, 2, row); }
inline void ldmatrix_x2_transposed(uint32_t (&out)[2], const void* row) { emulation::load_matrices<true>(out, 2, row); }

template <bool Transposed> inline void emulated_stmatrix(void* row, const uint32_t* in) {
  struct Sent { void* row; uint32_t words[4]; } sent{row, {in[0], in[1], in[2], in[3]}};
  emulation::check_matrix_row(row);
  auto* slots = emulation::exchange(kFullMask, sent, Transposed ? 31 : 30);
  const unsigned lane = emulation::current->lane;
  for (unsigned c = 0; c < 8; ++c) {  // this lane writes its own row
    const unsigned m = lane / 8, r = lane % 8;
    const unsigned source = Transposed ? c * 4 + r / 2 : r * 4 + c / 2, half = Transposed ? r % 2 : c % 2;
    std::memcpy(&sent, slots[source], sizeof sent);
    const auto value = uint16_t(sent.words[m] >> (16 * half));
    std::memcpy(static_cast<unsigned char*>(row) + 2 * c, &value, 2);
  }
}
// The inverse of ldmatrix_x4.
inline void stmatrix_x4(void* row, const uint32_t (&in)[4]) { emulated_stmatrix<false>(row, in); }
inline void stmatrix_x4_transposed(void* row, const uint32_t (&in)[4]) { emulated_stmatrix<true>(row, in); }

// d += a b for 16x16 a and 16x8 b, in the fragments of mma.sync.m16n8k16 (b as its 8 columns of 16).
template <class T> inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Sent { uint32_t a[4], b[2]; } sent{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  auto* slots = emulation::exchange(kFullMask, sent, 40);
  const unsigned lane = emulation::current->lane;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + (i >> 1) * 8, column = lane % 4 * 2 + (i & 1);
    float sum = 0;
    for (unsigned pair = 0; pair < 8; ++pair) {  // k = 2 pair, 2 pair + 1
      Sent left, right;
      std::memcpy(&left, slots[row % 8 * 4 + pair % 4], sizeof left);
      std::memcpy(&right, slots[column * 4 + pair % 4], sizeof right);
      const float2 x = unpack<T>(left.a[(row / 8) + (pair / 4) * 2]), y = unpack<T>(right.b[pair / 4]);
      sum += x.x * y.x + x.y * y.y;
    }
    d[i] += sum;
  }
}

}  // namespace shardlib
