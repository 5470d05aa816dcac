// Synchronization between the ranks of a group: epochs, flags in each other's memory, waits with a time limit.
//
//   workspace[r]   symmetric memory of rank r, mapped by all ranks; zeros when the group is made:
//                  Control, flags [kCounters][kMaxRanks][kMaxCtas], packets [2][ranks][packet_words], data [2][window]
//
// Every call on a group is one epoch, counted in device memory so that a replayed CUDA graph counts on. In each call
// every rank receives a flag from every other one. So a rank that has finished epoch e knows that all have begun e, and
// hence finished e - 1: the half of epoch e - 1 may be overwritten in epoch e + 1 without more synchronization. A
// group's calls run one after the other, in the same order on all ranks.
//
// A flag holds the call's number, the collective and its form, and the rank's step in it. So ranks that run different
// collectives or forms (direct reads and staging, sums and copies) never use each other's data: a rank that sees another
// rank's different flag gives up.
//
// A launch runs `present` ranks from `rank` on, one row of CTAs each (blockIdx.y): one rank if every rank has a GPU, all
// of them if they are virtual ranks of one GPU. CTA i of a rank synchronizes only with CTAs i of the others.
#pragma once
#include "primitives.cuh"

#include "collectives.h"

namespace shardlib {

constexpr int kMaxCtas = 256;
constexpr int kMaxThreads = 512;
constexpr int kCounters = 2;
constexpr int kSpins = 32;  // looks at a flag before the first rest

enum Answer : unsigned { kNotYet, kThere, kElsewhere };  // what a look at a flag tells
enum Counter : unsigned { kArrived, kDone, kPacket };  // packets carry their own flag

// What a rank says when it gave up. `state` is written last.
enum Report { kState, kOp, kRank, kPeer, kCounter, kCta, kTarget, kSeen, kReportWords };

struct alignas(128) Control {
  uint64_t epoch;      // of the last call that ended
  uint32_t finished;   // CTAs that are through with this call
  uint32_t broken;     // a wait of this rank ran out: later calls return at once
};

struct Agreement { uint32_t faults[2]; };

// What a thread knows about the call that it takes part in.
struct Call {
  const Group& group;
  unsigned rank;
  int64_t form;
  unsigned waits;
  uint64_t epoch;
  Control* control;
  Agreement* agreement;
};

__device__ __forceinline__ Control* control_of(const Group& g, unsigned rank) {
  return reinterpret_cast<Control*>(g.workspace[rank]);
}
__device__ __forceinline__ uint64_t* flag_of(const Group& g, unsigned owner, unsigned counter, unsigned from) {
  auto* flags = reinterpret_cast<uint64_t*>(g.workspace[owner] + sizeof(Control));
  return flags + (counter * kMaxRanks + from) * kMaxCtas + blockIdx.x;
}
// Where the packets to `owner` from `from` lie; each is 4 bytes of data below the 32 low bits of the epoch.
__device__ __forceinline__ uint64_t* packets_of(const Call& c, unsigned owner, unsigned from) {
  const Group& g = c.group;
  const int64_t start = sizeof(Control) + sizeof(uint64_t) * kCounters * kMaxRanks * kMaxCtas;
  const int64_t slot = int64_t(c.epoch & 1) * g.ranks + from;
  return reinterpret_cast<uint64_t*>(g.workspace[owner] + start) + slot * g.packet_words;
}
// Where, in every workspace, the half of the data area begins that this call may fill.
__device__ __forceinline__ int64_t data_offset(const Call& c) {
  const Group& g = c.group;
  const int64_t words = int64_t(kCounters) * kMaxRanks * kMaxCtas + 2 * g.ranks * g.packet_words;
  return int64_t(sizeof(Control)) + int64_t(sizeof(uint64_t)) * words + int64_t(c.epoch & 1) * g.window;
}

// The value of a flag after `step` signals of this call: 40 bits of its number, 4 of what it is, 20 of the step. It
// only grows.
constexpr int kStepBits = 20, kWayBits = 4;
static_assert(3 * kForms <= 1 << kWayBits);  // of three collectives
__device__ __forceinline__ uint64_t mark(const Call& c, int64_t step) {
  const uint64_t way = uint64_t(c.group.op * kForms + c.form);
  return (c.epoch << kWayBits | way) << kStepBits | uint64_t(step);
}
// A flag of the same call must be of the same collective and form. One of a later call is of a rank that has finished
// this one, and hence has compared.
__device__ __forceinline__ Answer answer(uint64_t seen, uint64_t target) {
  constexpr int kCall = kWayBits + kStepBits;
  if (seen >> kCall == target >> kCall && seen >> kStepBits != target >> kStepBits) return kElsewhere;
  return seen >= target ? kThere : kNotYet;
}

// Every thread of the CTA calls it first. False when this rank is broken: then the CTA returns at once.
__device__ __forceinline__ bool begin(Call& c) {
  SHARED(Agreement, agreement);
  c.agreement = &agreement;
  c.control = control_of(c.group, c.rank);
  c.epoch = load_relaxed_device(&c.control->epoch) + 1;
  if (threadIdx.x == 0) agreement.faults[0] = load_relaxed_device(&c.control->broken), agreement.faults[1] = 0;
  __syncthreads();
  const bool whole = agreement.faults[0] == 0;
  __syncthreads();
  return whole;
}

// Every thread of the CTA calls it last. The last CTA of a rank ends the rank's call.
__device__ __forceinline__ void end(const Call& c) {
  __syncthreads();
  if (threadIdx.x == 0 && add_acquire_release_device(&c.control->finished, 1u) == gridDim.x - 1) {
    c.control->finished = 0;
    store_release_device(&c.control->epoch, c.epoch);
  }
}

// The first thread of a rank that gives up leaves word; the others only stop.
__device__ __forceinline__ void give_up(const Group& g, unsigned rank, unsigned peer, unsigned counter, uint64_t target,
                                     uint64_t seen) {
  if (atomicExch(&control_of(g, rank)->broken, 1u) != 0) return;
  uint64_t* report = g.report[rank];
  report[kOp] = uint64_t(g.op), report[kRank] = rank, report[kPeer] = peer;
  report[kCounter] = counter, report[kCta] = blockIdx.x, report[kTarget] = target, report[kSeen] = seen;
  store_release_system(&report[kState], uint64_t(1));
}

// Looks until `judge(what it saw)` is kThere; false when it is kElsewhere, when the time is up, or when another thread
// of this rank gave up.
template <class Look, class Judge>
__device__ __forceinline__ bool wait(const Call& c, unsigned peer, unsigned counter, uint64_t target, Look look,
                                     Judge judge) {
  uint64_t start = 0;
  for (int looks = 0;; ++looks) {
    const uint64_t seen = look();
    const Answer said = judge(seen);
    if (said == kThere) return true;
    if (said == kNotYet && looks < kSpins) continue;
    const uint64_t now = timer_ns();
    if (start == 0) start = now;
    if (said == kElsewhere || now - start > uint64_t(c.group.limit_ns)) {
      give_up(c.group, c.rank, peer, counter, target, seen);
      return false;
    }
    if (load_relaxed_device(&c.control->broken) != 0) return false;
    pause_ns(32);
  }
}

// Tells all peers that what this CTA wrote and read so far is done with: they may read it, or write over it.
__device__ __forceinline__ void signal_all(const Call& c, unsigned counter, uint64_t value) {
  __syncthreads();  // the stores of the whole CTA come first
  const unsigned peer = threadIdx.x;
  if (peer < c.group.ranks && peer != c.rank) store_release_system(flag_of(c.group, peer, counter, c.rank), value);
}

// Until all peers have signalled `target`. The whole CTA gets the same answer; with false it goes to end().
__device__ __forceinline__ bool wait_all(Call& c, unsigned counter, uint64_t target) {
  uint32_t& faults = c.agreement->faults[c.waits++ & 1];  // two, for a thread that still looks at the last answer
  const unsigned peer = threadIdx.x;
  if (peer < c.group.ranks && peer != c.rank) {
    const uint64_t* flag = flag_of(c.group, c.rank, counter, peer);
    const bool came = wait(c, peer, counter, target, [&] { return load_acquire_system(flag); },
                           [&](uint64_t seen) { return answer(seen, target); });
    if (!came) faults = 1;
  }
  __syncthreads();
  return faults == 0;
}

// An empty message goes as a packet, too: every rank hears from every other.
__device__ __forceinline__ int64_t packets_for(int64_t bytes) { return max(int64_t(1), (bytes + 3) / 4); }

// 4 bytes with their epoch in one store: who sees the one sees the other, and nothing else has to be ordered.
__device__ __forceinline__ void send_packet(const Call& c, unsigned to, int64_t i, uint32_t word) {
  store_relaxed_system(packets_of(c, to, c.rank) + i, c.epoch << 32 | word);
}
__device__ __forceinline__ bool receive_packet(const Call& c, unsigned from, int64_t i, uint32_t& word) {
  const uint64_t* packet = packets_of(c, c.rank, from) + i;
  const uint32_t epoch = uint32_t(c.epoch);
  return wait(c, from, kPacket, epoch, [&] {
    const uint64_t both = load_relaxed_system(packet);
    word = uint32_t(both);
    return both >> 32;
  }, [&](uint64_t seen) { return seen == epoch ? kThere : kNotYet; });
}

// --- host -----------------------------------------------------------------------------------------------------------

// Checks the arguments of a group: 0, or a code whose text shardlib_last_error() returns.
inline int check_group(const Group& g) {
  if (g.ranks < 2 || g.ranks > kMaxRanks)
    return fail(1, "a group has 2 to %d ranks, not %lld", kMaxRanks, (long long)g.ranks);
  if (g.rank < 0 || g.present < 1 || g.rank + g.present > g.ranks)
    return fail(1, "a launch of ranks %lld to %lld in a group of %lld", (long long)g.rank,
                (long long)(g.rank + g.present - 1), (long long)g.ranks);
  if (g.ctas < 1 || g.ctas > kMaxCtas) return fail(1, "a rank has 1 to %d CTAs, not %lld", kMaxCtas, (long long)g.ctas);
  if (g.threads < 32 || g.threads > kMaxThreads || g.threads % 32)
    return fail(1, "a CTA has a multiple of 32 threads up to %d, not %lld", kMaxThreads, (long long)g.threads);
  if (g.window % 128 || g.chunk < 128 || g.chunk % 128)
    return fail(1, "windows and chunks are multiples of 128 bytes, not %lld and %lld", (long long)g.window,
                (long long)g.chunk);
  // Of a kernel with launch bounds of kMaxThreads as many threads always have registers on a multiprocessor.
  if (g.present > 1 && g.present * g.ctas > multiprocessor_count() * int64_t(kMaxThreads / g.threads))
    return fail(1, "%lld virtual ranks of %lld CTAs of %lld threads do not run at the same time", (long long)g.present,
                (long long)g.ctas, (long long)g.threads);
  return 0;
}

inline LaunchShape shape_of(const Group& g) {
  LaunchShape shape;
  shape.grid = dim3(unsigned(g.ctas), unsigned(g.present));
  shape.block = dim3(unsigned(g.threads));
  shape.cooperative = g.present > 1;
  return shape;
}

}  // namespace shardlib
