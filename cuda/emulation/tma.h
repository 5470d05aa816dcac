// The tensor memory accelerator: tiles between global and shared memory, finished at a random later moment.
#pragma once
#include "sync.h"

namespace shardlib {

enum class TileType { bf16, fp16 };

// What cuTensorMapEncodeTiled encodes: 16-bit elements, the 128-byte swizzle. Sizes, strides (bytes) and the box are
// innermost first.
struct alignas(64) TensorMap {
  unsigned char* base = nullptr;
  uint64_t sizes[4] = {}, strides[4] = {};
  uint32_t box[4] = {};
};

int make_tensor_map(TensorMap& map, TileType type, const void* base, const uint64_t (&sizes)[4],
                    const uint64_t (&strides)[3], const uint32_t (&box)[4]);

namespace emulation {
void wait_stores(unsigned latest, bool only_read);
}  // namespace emulation

inline void tma_prefetch(const TensorMap*) {}
void tma_load(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z, int w);
void tma_store(const TensorMap* map, const void* from, int x, int y, int z, int w);
void bulk_reduce_add(float* to, const float* from, unsigned bytes);
void bulk_commit();
template <int N> inline void bulk_wait_read() { emulation::wait_stores(N, true); }
template <int N> inline void bulk_wait() { emulation::wait_stores(N, false); }
inline void fence_async_shared() {}

}  // namespace shardlib
