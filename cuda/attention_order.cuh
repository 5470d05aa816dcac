// The order in which persistent CTAs take tiles of queries.
//
// Heads are processed in sections whose keys and values fit into L2 together. Within a section the last queries of all
// heads come first: under a causal mask they see the most keys. CTAs take tiles in snake order: the CTA with the
// longest tile of a round has the shortest of the next.
#pragma once
#include "attention.cuh"

namespace shardlib {

struct WorkOrder {
  int batch, heads;      // of the whole call
  int row_tiles, tiles;  // tiles of queries per head; of the whole call
  int section_heads;     // heads (of all batches) per section
};

// One tile: queries [row, row + rows of a tile) of head `head`; row is -1 when the round has no tile for this CTA.
struct Work {
  int batch, head, row;
};

// This CTA's tile of a round; false when no round is left.
__device__ __forceinline__ bool take_work(const WorkOrder& order, int rows, int round, Work& work) {
  const int64_t before = int64_t(round) * gridDim.x;
  if (before >= order.tiles) return false;
  const int64_t index = before + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  work.row = -1;
  if (index >= order.tiles) return true;
  const int per_section = order.section_heads * order.row_tiles, section = int(index) / per_section;
  const int rest = int(index) - section * per_section, first = section * order.section_heads;
  const int many = min(order.section_heads, order.batch * order.heads - first), head = first + rest % many;
  work.batch = head / order.heads, work.head = head - work.batch * order.heads;
  work.row = (order.row_tiles - 1 - rest / many) * rows;
  return true;
}

inline int make_order(WorkOrder& order, const AttentionArgs& a, int rows) {
  const int64_t row_tiles = (a.queries + rows - 1) / rows, heads = a.batch * a.heads;
  if (row_tiles * heads >= int64_t(1) << 31)
    return fail(1, "attention: %lld tiles of queries; at most 2^31", (long long)(row_tiles * heads));
  constexpr int64_t l2_share = int64_t(24) << 20;  // about half of an H100's
  const int64_t head_bytes = (a.keys > 0 ? a.keys : 1) * a.head_dim * 4, fit = l2_share / head_bytes;
  const int64_t section = (fit > 1 ? fit : 1) * (a.heads / a.kv_heads);
  order.batch = int(a.batch), order.heads = int(a.heads);
  order.row_tiles = int(row_tiles), order.tiles = int(row_tiles * heads);
  order.section_heads = int(section < heads ? section : heads);
  return 0;
}

}  // namespace shardlib
