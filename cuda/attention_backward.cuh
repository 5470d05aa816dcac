// The attention backward for sm_90a: its tiles and arguments, and the warps that feed the consumers and take their dq.
#pragma once
#include "attention.cuh"

namespace shardlib {
namespace {

// --- configuration ---------------------------------------------------------------------------------------------------

// Two warpgroups share a block of keys. Up to D = 128 each owns 64 keys, with dk and dv [64, D] in its registers. At
// D = 256 those would not fit: both own the same 64 keys, half the columns of dk and dv, and half the queries' scores,
// and show each other their probabilities in shared memory.
template <int D_, bool General_> struct Config {
  static constexpr int D = D_;
  static constexpr bool General = General_;
  static constexpr bool Halved = D == 256;
  static constexpr int Groups = 2, Threads = 128 * (Groups + 1);
  static constexpr int Queries = D == 64 && !General ? 128 : 64;
  static constexpr int Keys = Halved ? 64 : 128;
  static constexpr int Stages = Halved ? 1 : 2;
  // Whether the next tile's scores begin before this tile's dq is written, and dv before dS is known.
  static constexpr bool Ahead = !General && D == 64, EarlyDv = D == 128;
  static constexpr int ProducerRegisters = 24, ConsumerRegisters = 240;
  // One warpgroup's scores are [64, ScoreColumns], its dk and dv [64, Columns]. Its part of dq is [64, DqColumns]: its
  // rows or its columns of a tile, or else what its own keys give to the whole of it.
  static constexpr int ScoreColumns = Halved ? Queries / 2 : Queries;
  static constexpr int Columns = Halved ? D / 2 : D;
  static constexpr bool DqByRows = Queries == 128, DqByKeys = D == 64 && !DqByRows;
  static constexpr int DqColumns = DqByRows || DqByKeys ? D : D / 2, DqKeys = DqByKeys ? Keys / 2 : Keys;
  static constexpr int DqRuns = Queries * D / (64 * DqColumns);
  // Tiles lie in shared memory as panels of 64 columns, 128 bytes a row, swizzled; dS as rows of keys.
  static constexpr int Panels = D / 64;
  static constexpr int KeyPanel = Keys * 128, QueryPanel = Queries * 128;
  static constexpr int KeyBytes = Panels * KeyPanel, QueryBytes = Panels * QueryPanel;
  static constexpr int ScoreBytes = Queries / 64 * KeyPanel;
  static constexpr int DqFloats = 64 * DqColumns, DqBytes = 4 * DqFloats;
  // Where they lie: k, v, the stages of q and of grad_o, two buffers of dS and, where halved, of P, dq, rows, barriers.
  static constexpr int VAt = KeyBytes, QAt = 2 * KeyBytes, GradAt = QAt + Stages * QueryBytes,
                       DsAt = GradAt + Stages * QueryBytes;
  static constexpr int PAt = DsAt + 2 * ScoreBytes, DqAt = PAt + (Halved ? 2 : 0) * ScoreBytes,
                       RowsAt = DqAt + Groups * DqBytes;
  static constexpr int BarriersAt = RowsAt + Stages * Queries * 8, SharedBytes = BarriersAt + 256;
  static_assert(SharedBytes <= 227 << 10);
};

// --- arguments -------------------------------------------------------------------------------------------------------

struct Params {
  TensorMap q, k, v, grad_o, dk, dv;
  Sight sight;
  Extras extras;
  const float *lse, *delta;
  float* dq_sum;    // [B, H, query tiles, DqRuns] runs of DqFloats, each in the order of the registers it came from
  uint32_t* turns;  // of every such run, how many additions it has had; null: they come in any order
  float* dbias;
  int64_t lse_strides[3], dbias_strides[4];
  int heads, kv_heads, key_tiles, query_tiles;
  float scale, scale_log2;
};

// The barriers and tiles of a CTA's shared memory. Scores are double-buffered: the writers of one iteration are only
// sure that the readers of the last but one are done.
template <class C> struct Shared {
  unsigned char *k, *v, *q, *grad_o, *ds, *p;
  float *dq, *rows;  // rows: per stage, log-sum-exps in units of log 2, then deltas
  Barrier *k_full, *v_full, *q_full, *q_empty, *grad_full, *grad_empty, *dq_full, *dq_empty;

  __device__ __forceinline__ explicit Shared(unsigned char* base) {
    k = base, v = base + C::VAt, q = base + C::QAt, grad_o = base + C::GradAt, ds = base + C::DsAt, p = base + C::PAt;
    dq = reinterpret_cast<float*>(base + C::DqAt), rows = reinterpret_cast<float*>(base + C::RowsAt);
    k_full = reinterpret_cast<Barrier*>(base + C::BarriersAt), v_full = k_full + 1, q_full = v_full + 1;
    q_empty = q_full + C::Stages, grad_full = q_empty + C::Stages, grad_empty = grad_full + C::Stages;
    dq_full = grad_empty + C::Stages, dq_empty = dq_full + C::Groups;
  }
};

// A place in the ring of stages: consumers wait for `phase`, producers for the one before it.
template <int Stages> struct Ring {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

// A CTA's keys [key, key + Keys) of one key head, and the query tiles [first, last) that see something of them.
struct Work {
  int batch, kv_head, tile, key, first, last;
};

template <class C> __device__ __forceinline__ Work find_work(const Params& p) {
  Work work;
  const int head = int(blockIdx.x) / p.key_tiles;
  work.tile = int(blockIdx.x) - head * p.key_tiles, work.key = work.tile * C::Keys;
  work.batch = head / p.kv_heads, work.kv_head = head - work.batch * p.kv_heads;
  const int first = p.sight.first_query(work.key), last = p.sight.last_query(min(work.key + C::Keys, p.sight.keys) - 1);
  work.first = first / C::Queries, work.last = last > first ? (last + C::Queries - 1) / C::Queries : work.first;
  return work;
}

// Visits the tiles of queries in the order that every warp of the CTA keeps: visit(query head, query tile).
template <class Visit> __device__ __forceinline__ void each_tile(const Params& p, const Work& work, Visit visit) {
  const int group = p.heads / p.kv_heads;
#pragma unroll 1
  for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head)
#pragma unroll 1
    for (int tile = work.first; tile < work.last; ++tile) visit(head, tile);
}

// --- producers -------------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void load_panels(unsigned char* to, const TensorMap* map, Barrier* full, int panel_bytes,
                                            int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::Panels; ++panel)
    tma_load(to + panel * panel_bytes, map, full, panel * 64, row, head, batch);
}

// One thread: k and v once, then q and grad_o of every tile.
template <class C> __device__ __forceinline__ void load_tiles(const Params& p, const Shared<C>& s, const Work& work) {
  if (work.first == work.last) return;
  barrier_arrive_expect(s.k_full, C::KeyBytes);
  load_panels<C>(s.k, &p.k, s.k_full, C::KeyPanel, work.key, work.kv_head, work.batch);
  barrier_arrive_expect(s.v_full, C::KeyBytes);
  load_panels<C>(s.v, &p.v, s.v_full, C::KeyPanel, work.key, work.kv_head, work.batch);
  Ring<C::Stages> ring;
  each_tile(p, work, [&](int head, int tile) {
    Barrier *q_full = s.q_full + ring.stage, *grad_full = s.grad_full + ring.stage;
    barrier_wait(s.q_empty + ring.stage, ring.phase ^ 1);
    barrier_arrive_expect(q_full, C::QueryBytes);
    load_panels<C>(s.q + ring.stage * C::QueryBytes, &p.q, q_full, C::QueryPanel, tile * C::Queries, head, work.batch);
    barrier_wait(s.grad_empty + ring.stage, ring.phase ^ 1);
    barrier_arrive_expect(grad_full, C::QueryBytes);
    load_panels<C>(s.grad_o + ring.stage * C::QueryBytes, &p.grad_o, grad_full, C::QueryPanel, tile * C::Queries, head,
                   work.batch);
    ring.next();
  });
}

// One warp: log-sum-exp and delta of every tile's rows. A row that sees nothing, or is none, gets the log-sum-exp that
// makes its probabilities zero.
template <class C> __device__ __forceinline__ void load_rows(const Params& p, const Shared<C>& s, const Work& work) {
  const int lane = int(lane_index());
  Ring<C::Stages> ring;
  each_tile(p, work, [&](int head, int tile) {
    const float* lse = p.lse + work.batch * p.lse_strides[0] + head * p.lse_strides[1];
    const float* delta = p.delta + (int64_t(work.batch) * p.heads + head) * p.sight.queries;
    float* rows = s.rows + ring.stage * C::Queries * 2;
    barrier_wait(s.q_empty + ring.stage, ring.phase ^ 1);
#pragma unroll
    for (int i = lane; i < C::Queries; i += 32) {
      const int row = tile * C::Queries + i;
      const float sum = row < p.sight.queries ? lse[row * p.lse_strides[2]] : SHARDLIB_MINUS_INFINITY;
      const bool nothing = sum == SHARDLIB_MINUS_INFINITY;
      rows[i] = nothing ? -SHARDLIB_MINUS_INFINITY : sum * kLog2E;
      rows[C::Queries + i] = nothing ? 0.0f : delta[row];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.q_full + ring.stage);
    ring.next();
  });
}

// One thread per warpgroup: adds its part of dq to the sums.
template <class C>
__device__ __forceinline__ void add_dq(const Params& p, const Shared<C>& s, const Work& work, int group) {
  unsigned phase = 0;
  each_tile(p, work, [&](int head, int tile) {
    const int64_t run =
        ((int64_t(work.batch) * p.heads + head) * p.query_tiles + tile) * C::DqRuns + (C::DqByKeys ? 0 : group);
    barrier_wait(s.dq_full + group, phase);
    if (p.turns) {
      const int before = work.tile - p.sight.begin(tile * C::Queries) / C::Keys;  // CTAs with earlier keys
      const uint32_t turn = uint32_t(C::DqByKeys ? C::Groups * before + group : before);
      while (load_acquire_device(p.turns + run) != turn) pause_ns(64);
    }
    bulk_reduce_add(p.dq_sum + run * C::DqFloats, s.dq + group * C::DqFloats, C::DqBytes);
    bulk_commit();
    bulk_wait_read<0>();
    barrier_arrive(s.dq_empty + group);
    if (p.turns) {
      bulk_wait<0>();
      fence_device();
      add_release_device(p.turns + run, 1u);
    }
    phase ^= 1;
  });
}

}  // namespace
}  // namespace shardlib
