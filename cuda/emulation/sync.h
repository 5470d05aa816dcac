// Barriers of a CTA, mbarriers, and what the lanes of a warp do together.
#pragma once
#include "machine.h"

namespace shardlib {
namespace emulation {

inline void drain_stores() {
  if (current->stores.empty()) return;
  for (auto& store : current->stores) store();
  current->stores.clear();
  memory_event();
}

// True for the thread that completes the meeting.
inline bool arrive(Meeting& meeting, unsigned expected) {
  if (meeting.arrived == 0) meeting.expected = expected;
  if (meeting.expected != expected) stop("threads meet at one barrier with different thread counts");
  if (++meeting.arrived < expected) return false;
  meeting.arrived = 0;
  ++meeting.generation;
  wake(meeting.waiters);
  return true;
}

inline void meet(Meeting& meeting, unsigned expected, Reason why) {
  const uint64_t generation = meeting.generation;
  if (arrive(meeting, expected)) return give_way(4);
  while (meeting.generation == generation) wait_in(meeting.waiters, why);
}

// Shows `value` to the lanes of `mask` and returns the slots of all lanes, valid until this lane's second next call.
template <class T>
inline unsigned char (*exchange(uint32_t mask, const T& value, int operation))[64] {
  static_assert(sizeof(T) <= 64);
  Fiber& self = *current;
  if (!(mask >> self.lane & 1)) stop("a warp operation by a lane that its mask leaves out");
  Exchange& x = self.cta->warps[self.warp][mask];
  if (x.meeting.arrived == 0) x.operation = operation;
  if (x.operation != operation) stop("lanes of one warp are at different warp operations");
  auto* slots = x.slots[x.meeting.generation & 1];
  std::memcpy(slots[self.lane], &value, sizeof value);
  meet(x.meeting, unsigned(__builtin_popcount(mask)), {"the lanes 0x%lx of warp %lu", mask, self.warp});
  return slots;
}

// Packed as on the device into the 8 bytes that the kernel's shared memory holds.
struct BarrierState {
  uint64_t phase : 1, expected : 14, pending : 14, magic : 10;
  int64_t bytes : 25;
};
constexpr uint64_t kBarrierMagic = 0x155;
static_assert(sizeof(BarrierState) == 8);

inline uint32_t shared_offset(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - current->cta->shared) + uint32_t(kSharedBase);
}

inline BarrierState& barrier_state(Cta& cta, void* barrier) {
  const auto offset = size_t(static_cast<unsigned char*>(barrier) - cta.shared);
  if (offset + 8 > cta.shared_bytes || offset % 8) stop("an mbarrier that does not lie in shared memory, or unaligned");
  auto& state = *static_cast<BarrierState*>(barrier);
  if (state.magic != kBarrierMagic) stop("an mbarrier is used before it is initialised");
  return state;
}

inline void barrier_settle(Cta& cta, void* barrier, BarrierState& state) {
  if (state.pending != 0 || state.bytes != 0) return memory_event();
  state.phase = state.phase ^ 1u;
  state.pending = state.expected;
  auto waiters = cta.at_barrier.find(barrier);
  if (waiters != cta.at_barrier.end()) wake(waiters->second);
  memory_event();
}

inline void barrier_complete_bytes(Cta& cta, void* barrier, unsigned bytes) {
  auto& state = barrier_state(cta, barrier);
  state.bytes = state.bytes - int64_t(bytes);
  barrier_settle(cta, barrier, state);
}

}  // namespace emulation

struct alignas(8) Barrier { uint64_t state; };

inline void barrier_init(Barrier* barrier, unsigned arrivals) {
  if (arrivals == 0 || arrivals >= 1u << 14) emulation::stop("an mbarrier for no arrivals, or for too many");
  auto* state = reinterpret_cast<emulation::BarrierState*>(barrier);
  state->phase = 0, state->expected = arrivals, state->pending = arrivals, state->bytes = 0;
  state->magic = emulation::kBarrierMagic;
}
inline void barrier_init_fence() {}

inline void barrier_arrive(Barrier* barrier) {
  emulation::give_way();
  auto& cta = *emulation::current->cta;
  auto& state = emulation::barrier_state(cta, barrier);
  if (state.pending == 0) emulation::stop("more arrivals at an mbarrier than it was initialised for");
  state.pending = state.pending - 1u;
  emulation::barrier_settle(cta, barrier, state);
}

inline void barrier_arrive_expect(Barrier* barrier, unsigned bytes) {
  auto& state = emulation::barrier_state(*emulation::current->cta, barrier);
  state.bytes = state.bytes + int64_t(bytes);
  barrier_arrive(barrier);
}

inline bool barrier_test(Barrier* barrier, unsigned parity) {
  const auto& state = emulation::barrier_state(*emulation::current->cta, barrier);
  if (state.phase != (parity & 1u)) return true;
  emulation::poll({"an mbarrier at 0x%lx, phase %lu", emulation::shared_offset(barrier), parity & 1u});
  return state.phase != (parity & 1u);
}

inline void barrier_wait(Barrier* barrier, unsigned parity) {
  auto& cta = *emulation::current->cta;
  const auto& state = emulation::barrier_state(cta, barrier);
  emulation::give_way();
  while (state.phase == (parity & 1u))
    emulation::wait_in(cta.at_barrier[barrier],
                       {"the mbarrier at shared address 0x%lx, phase %lu", emulation::shared_offset(barrier), parity & 1u});
}

inline void named_barrier_sync(unsigned id, unsigned threads) {
  if (id >= 16 || threads == 0 || threads % 32) emulation::stop("a named barrier needs an id below 16 and whole warps");
  emulation::drain_stores();
  emulation::meet(emulation::current->cta->named[id], threads, {"named barrier %lu of %lu threads", id, threads});
}

inline void named_barrier_arrive(unsigned id, unsigned threads) {
  if (id >= 16 || threads == 0 || threads % 32) emulation::stop("a named barrier needs an id below 16 and whole warps");
  emulation::drain_stores();
  emulation::give_way();
  emulation::arrive(emulation::current->cta->named[id], threads);
}

constexpr uint32_t kFullMask = 0xffffffffu;

// One lane of the warp, the same at every call; which one is not promised.
inline bool elect_one() {
  const auto& fiber = *emulation::current;
  emulation::exchange(kFullMask, 0, 1);
  return fiber.lane == (fiber.warp * 7 + emulation::settings.seed) % 32;
}

inline unsigned lane_index() { return emulation::current->lane; }
inline unsigned warp_index() { return emulation::current->warp; }  // the same value in all lanes, known to the compiler

template <int N> inline void registers_decrease() { static_assert(N % 8 == 0 && N >= 24 && N <= 256); }
template <int N> inline void registers_increase() { static_assert(N % 8 == 0 && N >= 24 && N <= 256); }

}  // namespace shardlib

inline void __syncthreads() {
  using namespace shardlib::emulation;
  drain_stores();
  const dim3& b = machine->block;
  meet(current->cta->named[0], b.x * b.y * b.z, {"__syncthreads"});
}
inline void __syncwarp(uint32_t mask = 0xffffffffu) { shardlib::emulation::exchange(mask, 0, 2); }

template <class T> inline T __shfl_sync(uint32_t mask, T value, int lane, int width = 32) {
  auto* slots = shardlib::emulation::exchange(mask, value, 3);
  const int self = int(shardlib::emulation::current->lane);
  T result;
  std::memcpy(&result, slots[(self & ~(width - 1)) | (lane & (width - 1))], sizeof result);
  return result;
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32) {
  const int lane = int(shardlib::emulation::current->lane);
  const int other = lane ^ bits;
  return __shfl_sync(mask, value, (other & ~(width - 1)) == (lane & ~(width - 1)) ? other : lane, width);
}
template <class T> inline T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = int(shardlib::emulation::current->lane) & (width - 1);
  return __shfl_sync(mask, value, lane + int(delta) < width ? lane + int(delta) : lane, width);
}
template <class T> inline T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = int(shardlib::emulation::current->lane) & (width - 1);
  return __shfl_sync(mask, value, lane >= int(delta) ? lane - int(delta) : lane, width);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  auto* slots = shardlib::emulation::exchange(mask, predicate, 4);
  uint32_t result = 0;
  for (int lane = 0; lane < 32; ++lane) {
    int value = 0;
    if (mask >> lane & 1) std::memcpy(&value, slots[lane], sizeof value);
    result |= uint32_t(value != 0) << lane;
  }
  return result;
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
