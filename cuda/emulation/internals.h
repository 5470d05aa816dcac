// What the machine's own files share: CTAs, fibers, who waits for what.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"

namespace shardlib::emulation {

constexpr size_t kSharedBase = 1024;  // so that the shared address 0 is never valid

struct Fiber;
struct Warpgroup;  // wgmma.cpp
struct BulkStore;  // tma.cpp

// Fibers that wait for one thing.
using Waiters = std::vector<Fiber*>;

// The meeting of a fixed number of threads; `generation` counts the meetings that took place.
struct Meeting {
  unsigned arrived = 0, expected = 0;
  uint64_t generation = 0;
  Waiters waiters;
};

// What the lanes of a warp show each other: two sets, so that a quick lane may start the next exchange.
struct Exchange {
  Meeting meeting;
  int operation = 0;
  alignas(16) unsigned char slots[2][32][64];
};

struct CopyInFlight {
  void* to;
  const void* from;
  unsigned valid;
};

struct Cta {
  unsigned live = 0;
  unsigned in_flight = 0;  // asynchronous copies that still use this CTA's shared memory
  unsigned char* shared = nullptr;
  unsigned shared_bytes = 0;
  Meeting named[16];
  std::vector<std::map<uint32_t, Exchange>> warps;  // by the mask of the lanes
  std::vector<std::shared_ptr<Warpgroup>> warpgroups;
  std::map<const void*, std::vector<unsigned char>> static_shared;
  std::map<const void*, Waiters> at_barrier;  // mbarrier -> who waits for its phase
  std::vector<std::unique_ptr<Fiber>> fibers;
};

struct Fiber : Thread {
  void* context = nullptr;
  unsigned char* stack = nullptr;
  Cta* cta = nullptr;
  bool done = false;
  enum { apart, fenced, used } alias = apart;  // whether second addresses of memory may be used, and have been
  Reason why;
  std::vector<std::vector<CopyInFlight>> copy_groups;                // cp.async; the last group is still open
  std::vector<std::vector<std::shared_ptr<BulkStore>>> bulk_groups;  // likewise
  std::vector<std::function<void()>> stores;                         // global stores not yet seen by others
};
inline Fiber& self() { return *static_cast<Fiber*>(current); }

[[noreturn]] void stop(const std::string& what);
uint32_t random_below(size_t n);
inline bool chance(unsigned one_in) { return random_below(one_in) == 0; }
uint64_t seed();

// Work that is done at a random later moment.
void later(std::function<void()> action);

void wait_in(Waiters& waiters, Reason why);
void wake(Waiters& waiters);
std::string who_waits();
// The thread meets others: what they did is ordered for it, but not over addresses.
void leave_alias();

// Arrives; the last of `expected` threads completes the meeting. `meet` also waits for that.
void arrive(Meeting& meeting, unsigned expected);
void meet(Meeting& meeting, unsigned expected, Reason why);

// Checks that [p, p + bytes) lies in the CTA's shared memory at a multiple of `align`; returns its offset there.
uint32_t offset_in_shared(const void* p, unsigned bytes, unsigned align, const char* what);
inline uint32_t shared_offset(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - current->shared) + uint32_t(kSharedBase);
}

// The bytes of an asynchronous copy have landed.
void complete_bytes(Cta& cta, Barrier* barrier, unsigned bytes);
void check_barrier(Barrier* barrier);

uint32_t swizzled(uint32_t address);

}  // namespace shardlib::emulation
