// The attention backward for sm_90a, as all its warps see it: tiles, arguments, shared memory, a CTA's work.
#pragma once
#include <cstddef>

#include "attention_tiles.cuh"
#include "attention_turns.cuh"

namespace shardlib {
namespace {

// --- configuration ---------------------------------------------------------------------------------------------------

// How two warpgroups share out a tile of dq: its rows, its columns, or each gives what its own keys add to all of it.
enum class Split { rows, columns, keys };

// Two warpgroups share a block of keys. Up to D = 128 each owns 64 keys, with dk and dv [64, D] in its registers. At
// D = 256 those would not fit ("halved"): both own the same 64 keys, half the columns of dk and dv, and half the scores
// of the queries, and show each other their probabilities in shared memory.
//
//     D    kind     keys  queries  stages  dq is split by
//     64   plain     128      128       2  rows
//     64   general   128       64       2  keys
//     128  both      128       64       2  columns
//     256  both       64       64       1  columns
template <int D_, bool General_> struct Config {
  static constexpr int D = D_;
  static constexpr bool General = General_, Halved = D == 256;
  static constexpr int Groups = 2, Threads = 128 * (Groups + 1);
  static constexpr int ProducerRegisters = 24, ConsumerRegisters = 240;
  static_assert(registers_fit(Groups, ConsumerRegisters, ProducerRegisters));

  static constexpr int Keys = Halved ? 64 : 128, Queries = D == 64 && !General ? 128 : 64, Stages = Halved ? 1 : 2;
  static constexpr Split Dq = Queries == 128 ? Split::rows : D == 64 ? Split::keys : Split::columns;
  // Whether the next tile's scores begin before this tile's dq is written, and dv before dS is known.
  static constexpr bool Ahead = !General && D == 64, EarlyDv = D == 128;

  // A warpgroup's part: scores [64, ScoreColumns], dk and dv [64, Columns], and dq [64, DqColumns] from DqKeys keys.
  static constexpr int ScoreColumns = Halved ? Queries / 2 : Queries, Columns = Halved ? D / 2 : D;
  static constexpr int DqColumns = Dq == Split::columns ? D / 2 : D, DqKeys = Dq == Split::keys ? Keys / 2 : Keys;
  // dq is summed up in runs of one such part, in the order of the registers; a tile has one, or one of each warpgroup.
  static constexpr int DqFloats = 64 * DqColumns, DqBytes = 4 * DqFloats, DqRuns = Dq == Split::keys ? 1 : 2;

  // Bytes of tiles in panels of 64 columns; scores lie as rows of keys.
  static constexpr int Panels = D / 64, KeyPanel = Keys * 128, QueryPanel = Queries * 128;
  static constexpr int KeyBytes = Panels * KeyPanel, QueryBytes = Panels * QueryPanel;
  static constexpr int ScoreBytes = Queries / 64 * KeyPanel, ProbabilityBytes = Halved ? ScoreBytes : 512;
};

// --- arguments -------------------------------------------------------------------------------------------------------

struct Params {
  TensorMap q, k, v, grad_o, dk, dv;
  Sight sight;
  Extras extras;
  const float *lse, *delta;
  float* dq_sum;  // [B, H, query tiles, DqRuns] runs of DqFloats
  Turns turns;    // of the runs
  float* dbias;
  int64_t lse_strides[3], dbias_strides[4];
  int heads, kv_heads, key_tiles, query_tiles;
  float scale, scale_log2;
};

// A CTA's shared memory. Scores are double-buffered: the writers of one iteration are only sure that the readers of the
// last but one are done.
template <class C> struct alignas(1024) Shared {
  unsigned char k[C::KeyBytes], v[C::KeyBytes];
  unsigned char q[C::Stages][C::QueryBytes], grad_o[C::Stages][C::QueryBytes];
  unsigned char ds[2][C::ScoreBytes], p[2][C::ProbabilityBytes];  // p: only where halved
  float dq[C::Groups][C::DqFloats];
  float lse_log2[C::Stages][C::Queries], delta[C::Stages][C::Queries];  // lse in units of log 2
  Barrier k_full, v_full, q_full[C::Stages], q_empty[C::Stages], grad_full[C::Stages], grad_empty[C::Stages];
  Barrier dq_full[C::Groups], dq_empty[C::Groups];
  uint32_t ticket;
};

// --- work ------------------------------------------------------------------------------------------------------------

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

template <class C> __device__ __forceinline__ Work find_work(const Params& p, int index) {
  Work work;
  const int head = index / p.key_tiles;
  work.tile = index - head * p.key_tiles, work.key = work.tile * C::Keys;
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

}  // namespace
}  // namespace shardlib
