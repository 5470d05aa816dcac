// Tiles of q, k, v and o between global memory and a CTA of sm_90a, and what such a CTA may have.
//
// A tile lies in shared memory as panels of 64 columns, 128 bytes a row, swizzled. C is a kernel's configuration.
#pragma once
#include "attention.cuh"

namespace shardlib {

constexpr int kMostSharedBytes = 227 << 10;

// Whether the threads of `consumers` warpgroups may have `more` registers each, and those of a producer `fewer`: the
// launch gives all threads as many, in eights, of the 64 Ki of an SM, and they can only share these out anew.
constexpr bool registers_fit(int consumers, int more, int fewer) {
  const int threads = 128 * (consumers + 1), launched = (64 << 10) / threads / 8 * 8;
  return 128 * (consumers * more + fewer) <= threads * launched;
}

// One tile, panel by panel; the barrier counts its bytes.
template <class C>
__device__ __forceinline__ void load_panels(unsigned char* to, int panel_bytes, const TensorMap* map, Barrier* full,
                                            int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::Panels; ++panel)
    tma_load(to + panel * panel_bytes, map, full, panel * 64, row, head, batch);
}

// --- host ----------------------------------------------------------------------------------------------------------

// A map of [batch, heads, rows, D] with boxes of 64 columns.
inline int map_tiles(TensorMap& map, const AttentionArgs& a, const void* base, const int64_t* strides, int64_t heads,
                     int64_t rows, int box_rows) {
  const uint64_t sizes[4] = {uint64_t(a.head_dim), uint64_t(rows), uint64_t(heads), uint64_t(a.batch)};
  uint64_t bytes[3];
  for (int d = 0; d < 3; ++d) bytes[d] = sizes[d + 1] > 1 ? uint64_t(strides[2 - d]) * 2 : 16;  // of one: never stepped
  const uint32_t box[4] = {64, uint32_t(box_rows), 1, 1};
  return make_tensor_map(map, a.dtype == SHARDLIB_BF16 ? TileType::bf16 : TileType::fp16, base, sizes, bytes, box);
}

}  // namespace shardlib
