// The attention backward for sm_90a: the warps that feed the consumers, and those that take their dq.
#pragma once
#include "attention_backward.cuh"

namespace shardlib {
namespace {

// One thread: k and v once, then q and grad_o of every tile.
template <class C> __device__ __forceinline__ void load_tiles(const Params& p, Shared<C>& s, const Work& work) {
  if (work.first == work.last) return;
  barrier_arrive_expect(&s.k_full, C::KeyBytes);
  load_panels<C>(s.k, C::KeyPanel, &p.k, &s.k_full, work.key, work.kv_head, work.batch);
  barrier_arrive_expect(&s.v_full, C::KeyBytes);
  load_panels<C>(s.v, C::KeyPanel, &p.v, &s.v_full, work.key, work.kv_head, work.batch);
  Ring<C::Stages> ring;
  each_tile(p, work, [&](int head, int tile) {
    const int i = ring.stage, row = tile * C::Queries;
    barrier_wait(&s.q_empty[i], ring.phase ^ 1);
    barrier_arrive_expect(&s.q_full[i], C::QueryBytes);
    load_panels<C>(s.q[i], C::QueryPanel, &p.q, &s.q_full[i], row, head, work.batch);
    barrier_wait(&s.grad_empty[i], ring.phase ^ 1);
    barrier_arrive_expect(&s.grad_full[i], C::QueryBytes);
    load_panels<C>(s.grad_o[i], C::QueryPanel, &p.grad_o, &s.grad_full[i], row, head, work.batch);
    ring.next();
  });
}

// One warp: log-sum-exp and delta of every tile's rows. A row that sees nothing, or is none, gets the log-sum-exp that
// makes its probabilities zero.
template <class C> __device__ __forceinline__ void load_rows(const Params& p, Shared<C>& s, const Work& work) {
  const int lane = int(lane_index());
  Ring<C::Stages> ring;
  each_tile(p, work, [&](int head, int tile) {
    const float* lse = p.lse + work.batch * p.lse_strides[0] + head * p.lse_strides[1];
    const float* delta = p.delta + (int64_t(work.batch) * p.heads + head) * p.sight.queries;
    barrier_wait(&s.q_empty[ring.stage], ring.phase ^ 1);
#pragma unroll
    for (int i = lane; i < C::Queries; i += 32) {
      const int row = tile * C::Queries + i;
      const float sum = row < p.sight.queries ? lse[row * p.lse_strides[2]] : SHARDLIB_MINUS_INFINITY;
      const bool nothing = sum == SHARDLIB_MINUS_INFINITY;
      s.lse_log2[ring.stage][i] = nothing ? -SHARDLIB_MINUS_INFINITY : sum * kLog2E;
      s.delta[ring.stage][i] = nothing ? 0.0f : delta[row];
    }
    barrier_arrive(&s.q_full[ring.stage]);
    ring.next();
  });
}

// One thread per warpgroup: adds its part of dq to the sums. In turn, where there are turns: after the CTAs with earlier
// keys that these queries see, and the second warpgroup after the first, where both add to one run.
template <class C>
__device__ __forceinline__ void add_dq(const Params& p, Shared<C>& s, const Work& work, int group) {
  constexpr bool kOneRun = C::Dq == Split::keys;
  unsigned phase = 0;
  each_tile(p, work, [&](int head, int tile) {
    const int64_t run =
        ((int64_t(work.batch) * p.heads + head) * p.query_tiles + tile) * C::DqRuns + (kOneRun ? 0 : group);
    barrier_wait(&s.dq_full[group], phase);
    if (p.turns.words) {
      const int before = work.tile - p.sight.begin(tile * C::Queries) / C::Keys;
      p.turns.wait(run, kOneRun ? C::Groups * before + group : before);
    }
    bulk_reduce_add(p.dq_sum + run * C::DqFloats, s.dq[group], C::DqBytes);
    bulk_commit();
    bulk_wait_read<0>();
    barrier_arrive(&s.dq_empty[group]);
    if (p.turns.words) {
      bulk_wait<0>();
      p.turns.pass(run);
    }
    phase ^= 1;
  });
}

}  // namespace
}  // namespace shardlib
