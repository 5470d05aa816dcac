// The attention backward for sm_90a: its products, as a warpgroup issues them. Each is one commit group.
#pragma once
#include "attention_backward.cuh"

namespace shardlib {
namespace {

// scores = a b^T over D: a's 64 rows are keys, b's are queries.
template <class T, class C>
__device__ __forceinline__ void issue_scores(float (&scores)[C::ScoreColumns / 2], uint64_t a, uint64_t b) {
  wgmma_pin(scores);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::D / 16; ++step) {
    const int inside = step % 4 * 32;
    wgmma<T, C::ScoreColumns>(scores, a + ((step / 4 * C::KeyPanel + inside) >> 4),
                              b + ((step / 4 * C::QueryPanel + inside) >> 4), step > 0);
  }
  wgmma_commit();
}

// sum += scores b over the queries, from registers or, where they are halved, from shared memory.
template <class T, class C>
__device__ __forceinline__ void issue_sum(float (&sum)[C::Columns / 2], uint32_t (&scores)[C::ScoreColumns / 16][4],
                                          uint64_t shared_scores, uint64_t b) {
  wgmma_pin(sum);
  if constexpr (!C::Halved) wgmma_pin(scores);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::Queries / 16; ++step) {
    const uint64_t rows = b + ((step * 2048) >> 4);
    if constexpr (C::Halved) {
      wgmma<T, C::Columns, Major::k, Major::mn>(sum, shared_scores + ((step * 32) >> 4), rows, true);
    } else {
      wgmma<T, C::Columns, Major::mn>(sum, scores[step], rows, true);
    }
  }
  wgmma_commit();
}

// dq = dS k over the keys.
template <class T, class C>
__device__ __forceinline__ void issue_dq(float (&dq)[C::DqColumns / 2], uint64_t ds, uint64_t k) {
  wgmma_pin(dq);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::DqKeys / 16; ++step)
    wgmma<T, C::DqColumns, Major::mn, Major::mn>(dq, ds + ((step * 2048) >> 4), k + ((step * 2048) >> 4), step > 0);
  wgmma_commit();
}

}  // namespace
}  // namespace shardlib
