// Tiles of keys and values on their way from global memory to the consumers.
//
// C is a kernel's configuration: Stages of KvBytes, each a tile of Keys rows that lies as Panels of 64 columns, 128 bytes a
// row, swizzled, KvPanel bytes each.
#pragma once
#include "primitives.cuh"

namespace shardlib {

// A ring of stages in shared memory: one barrier says that a stage is full, another that it is empty.
template <class C> struct Ring {
  unsigned char* tiles;
  Barrier *full, *empty;
  int stage = 0;
  unsigned phase = 0;  // of `full`; the producer waits for the phase of `empty` before it

  __device__ __forceinline__ void next() {
    if (++stage == C::Stages) stage = 0, phase ^= 1;
  }
};

// One tile, panel by panel; the barrier counts its bytes.
template <class C>
__device__ __forceinline__ void load_panels(unsigned char* to, int panel_bytes, const TensorMap* map, Barrier* full,
                                            int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::Panels; ++panel)
    tma_load(to + panel * panel_bytes, map, full, panel * 64, row, head, batch);
}

// Fills the next stage of a ring.
template <class C>
__device__ __forceinline__ void load_stage(Ring<C>& ring, const TensorMap* map, int tile, int head, int batch) {
  Barrier* full = &ring.full[ring.stage];
  barrier_wait(&ring.empty[ring.stage], ring.phase ^ 1);
  barrier_arrive_expect(full, C::KvBytes);
  load_panels<C>(ring.tiles + ring.stage * C::KvBytes, C::KvPanel, map, full, tile * C::Keys, head, batch);
  ring.next();
}

// A consumer's view: the descriptor of the stage once it is full, and its return when its products are complete.
template <class C> __device__ __forceinline__ uint64_t full_stage(const Ring<C>& ring, uint64_t descriptor) {
  barrier_wait(&ring.full[ring.stage], ring.phase);
  return descriptor + ((ring.stage * C::KvBytes) >> 4);
}
template <class C> __device__ __forceinline__ void release_stage(Ring<C>& ring) {
  if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[ring.stage]);
  ring.next();
}

}  // namespace shardlib
