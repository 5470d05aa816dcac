// Barriers and the exchanges of a warp.
#include "internals.h"

namespace shardlib {
namespace emulation {
namespace {

// Packed, as on the device, into the 8 bytes that the kernel's shared memory holds.
struct BarrierState {
  uint64_t phase : 1, expected : 14, pending : 14, magic : 10;
  int64_t bytes : 25;  // of asynchronous copies, still to land in this phase
};
constexpr uint64_t kBarrierMagic = 0x155;
static_assert(sizeof(BarrierState) == sizeof(Barrier));

BarrierState& state_of(Barrier* barrier) {
  auto& state = *reinterpret_cast<BarrierState*>(barrier);
  if (state.magic != kBarrierMagic) stop("an mbarrier is used before it is initialized");
  return state;
}

BarrierState& own_state(Barrier* barrier) {
  offset_in_shared(barrier, sizeof *barrier, 8, "an mbarrier");
  return state_of(barrier);
}

void settle(Cta& cta, Barrier* barrier, BarrierState& state) {
  if (state.pending != 0 || state.bytes != 0) return memory_event();
  state.phase = state.phase ^ 1u;
  state.pending = state.expected;
  auto waiters = cta.at_barrier.find(barrier);
  if (waiters != cta.at_barrier.end()) wake(waiters->second);
  memory_event();
}

void check_named(unsigned id, unsigned threads) {
  if (id >= 16 || threads == 0 || threads % 32) stop("a named barrier needs an id below 16 and whole warps");
}

}  // namespace

uint32_t offset_in_shared(const void* p, unsigned bytes, unsigned align, const char* what) {
  const auto offset = static_cast<const unsigned char*>(p) - current->shared;
  if (offset < 0 || size_t(offset) + bytes > self().cta->shared_bytes)
    stop(std::string(what) + " outside shared memory");
  if (offset % align)
    stop(std::string(what) + " in shared memory that is not aligned to " + std::to_string(align) + " bytes");
  return uint32_t(offset);
}

void arrive(Meeting& meeting, unsigned expected) {
  if (meeting.arrived == 0) meeting.expected = expected;
  if (meeting.expected != expected) stop("threads meet at one barrier with different thread counts");
  if (++meeting.arrived < expected) return;
  meeting.arrived = 0;
  ++meeting.generation;
  wake(meeting.waiters);
}

void meet(Meeting& meeting, unsigned expected, Reason why) {
  const uint64_t generation = meeting.generation;
  arrive(meeting, expected);
  if (meeting.generation != generation) return give_way(4);
  while (meeting.generation == generation) wait_in(meeting.waiters, why);
}

const unsigned char (*exchange(uint32_t mask, const void* value, unsigned bytes, int operation))[64] {
  Fiber& me = self();
  if (!(mask >> me.lane & 1)) stop("a warp operation by a lane that its mask leaves out");
  Exchange& x = me.cta->warps[me.warp][mask];
  if (x.meeting.arrived == 0) x.operation = operation;
  if (x.operation != operation) stop("lanes of one warp are at different warp operations");
  auto* slots = x.slots[x.meeting.generation & 1];
  std::memcpy(slots[me.lane], value, bytes);
  meet(x.meeting, unsigned(__builtin_popcount(mask)), {"the lanes 0x%lx of warp %lu", mask, me.warp});
  return slots;
}

void check_barrier(Barrier* barrier) { own_state(barrier); }

void complete_bytes(Cta& cta, Barrier* barrier, unsigned bytes) {
  BarrierState& state = state_of(barrier);
  state.bytes = state.bytes - int64_t(bytes);
  settle(cta, barrier, state);
}

}  // namespace emulation

using namespace emulation;

void barrier_init(Barrier* barrier, unsigned arrivals) {
  if (arrivals == 0 || arrivals >= 1u << 14) stop("an mbarrier for no arrivals, or for too many");
  offset_in_shared(barrier, sizeof *barrier, 8, "an mbarrier");
  auto& state = *reinterpret_cast<BarrierState*>(barrier);
  state.phase = 0, state.expected = arrivals, state.pending = arrivals, state.bytes = 0, state.magic = kBarrierMagic;
}

void barrier_arrive(Barrier* barrier) {
  give_way(24);
  BarrierState& state = own_state(barrier);
  if (state.pending == 0) stop("more arrivals at an mbarrier than it was initialized for");
  state.pending = state.pending - 1u;
  settle(*self().cta, barrier, state);
}

void barrier_arrive_expect(Barrier* barrier, unsigned bytes) {
  BarrierState& state = own_state(barrier);
  state.bytes = state.bytes + int64_t(bytes);
  barrier_arrive(barrier);
}

void barrier_wait(Barrier* barrier, unsigned parity) {
  const BarrierState& state = own_state(barrier);
  give_way(24);
  while (state.phase == (parity & 1u))
    wait_in(self().cta->at_barrier[barrier],
            {"the mbarrier at shared address 0x%lx, phase %lu", shared_offset(barrier), parity & 1u});
}

void named_barrier_sync(unsigned id, unsigned threads) {
  check_named(id, threads);
  drain_stores();
  leave_alias();
  meet(self().cta->named[id], threads, {"named barrier %lu of %lu threads", id, threads});
}

void named_barrier_arrive(unsigned id, unsigned threads) {
  check_named(id, threads);
  drain_stores();
  leave_alias();
  give_way(24);
  arrive(self().cta->named[id], threads);
}

bool elect_one() {
  exchange(kFullMask, "", 1, 1);
  return current->lane == (current->warp * 7 + seed()) % 32;
}

}  // namespace shardlib

void __syncthreads() {
  using namespace shardlib::emulation;
  drain_stores();
  leave_alias();
  meet(self().cta->named[0], block.x * block.y * block.z, {"__syncthreads"});
}
