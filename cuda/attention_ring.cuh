// The ring of stages through which keys and values reach the consumers of the forward for sm_90a.
//
// C is its configuration: Stages of KvBytes, each a tile of Keys rows, in panels of KvPanel bytes.
#pragma once
#include "attention_tiles.cuh"

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
