// The tensor memory accelerator: tiles between global and shared memory, finished at a random later moment.
#pragma once
#include "sync.h"

namespace shardlib {

enum class TileType { bf16, fp16, f32 };
enum class Swizzle { none, b32, b64, b128 };

// What cuTensorMapEncodeTiled encodes. Sizes, strides (bytes) and the box are innermost first.
struct alignas(64) TensorMap {
  unsigned char* base = nullptr;
  int rank = 0;
  unsigned element_bytes = 0;
  TileType type = TileType::bf16;
  Swizzle swizzle = Swizzle::none;
  uint64_t sizes[5] = {}, strides[5] = {};
  uint32_t box[5] = {};
};

int make_tensor_map(TensorMap& map, TileType type, int rank, const void* base, const uint64_t* sizes,
                    const uint64_t* strides, const uint32_t* box, Swizzle swizzle);

namespace emulation {
void load_tile(void* to, const TensorMap& map, Barrier* barrier, int rank, const int* at);
void store_tile(const TensorMap& map, const void* from, bool add, int rank, const int* at);
void store_bytes(void* to, const void* from, unsigned bytes, bool add);
void wait_stores(unsigned latest, bool only_read);
}  // namespace emulation

inline void tma_prefetch(const TensorMap*) {}
template <class... C> inline void tma_load(void* to, const TensorMap* map, Barrier* barrier, C... coordinates) {
  const int at[] = {int(coordinates)...};
  emulation::load_tile(to, *map, barrier, int(sizeof...(C)), at);
}
template <class... C> inline void tma_store(const TensorMap* map, const void* from, C... coordinates) {
  const int at[] = {int(coordinates)...};
  emulation::store_tile(*map, from, false, int(sizeof...(C)), at);
}
template <class... C> inline void tma_reduce_add(const TensorMap* map, const void* from, C... coordinates) {
  const int at[] = {int(coordinates)...};
  emulation::store_tile(*map, from, true, int(sizeof...(C)), at);
}

void bulk_load(void* to, const void* from, unsigned bytes, Barrier* barrier);
inline void bulk_store(void* to, const void* from, unsigned bytes) { emulation::store_bytes(to, from, bytes, false); }
inline void bulk_reduce_add(float* to, const float* from, unsigned bytes) {
  emulation::store_bytes(to, from, bytes, true);
}
void bulk_commit();
template <int N> inline void bulk_wait_read() { emulation::wait_stores(N, true); }
template <int N> inline void bulk_wait() { emulation::wait_stores(N, false); }
inline void fence_async_shared() {}

}  // namespace shardlib
