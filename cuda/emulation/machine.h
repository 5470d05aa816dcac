// The emulated machine: grids of CTAs, every thread a fiber, run in a random but repeatable order.
//
// A fiber runs until a primitive makes it wait or, now and then, gives way at random. Asynchronous work (TMA, bulk
// copies) lies in `later` and is done at random moments. When nothing can run any more the launch fails, and its text
// says who waits for what. Everything happens on one host thread, so no emulated state needs a lock.
#pragma once
#include <cstdarg>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "fiber.h"
#include "types.h"

namespace shardlib {
inline thread_local char last_error[4096];

// Keeps the text for shardlib_last_error() and returns the code.
inline int fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return code;
}
}  // namespace shardlib

namespace shardlib::emulation {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kSharedBase = 1024;  // so that the shared address 0 is never valid
constexpr unsigned kGuardBytes = 256;
constexpr uint64_t kStackCanary = 0x5aa5c33c0ff01ee7ull;

struct Fiber;
struct Warpgroup;  // wgmma.h
struct BulkStore;  // tma.h

// What a thread waits for; made into text only when it is reported.
struct Reason {
  const char* format = nullptr;
  uint64_t a = 0, b = 0, c = 0;
};

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
  unsigned valid, bytes;
};

struct Cta {
  dim3 block_idx;
  unsigned live = 0;
  unsigned in_flight = 0;  // asynchronous copies that still use this CTA's shared memory
  unsigned char* shared = nullptr;
  unsigned shared_bytes = 0;
  Meeting named[16];
  std::vector<std::map<uint32_t, Exchange>> warps;
  std::vector<std::shared_ptr<Warpgroup>> warpgroups;
  std::map<const void*, std::vector<unsigned char>> static_shared;
  std::map<const void*, Waiters> at_barrier;  // mbarrier -> who waits for its phase
  std::vector<std::unique_ptr<Fiber>> fibers;
};

struct Fiber {
  Context context{};
  unsigned char* stack = nullptr;
  Cta* cta = nullptr;
  dim3 thread_idx;
  unsigned rank = 0, lane = 0, warp = 0;
  bool done = false;
  Reason why;
  std::vector<std::vector<CopyInFlight>> copy_groups;                      // cp.async, the last one still open
  std::vector<std::vector<std::shared_ptr<BulkStore>>> bulk_groups;        // bulk stores, the last one still open
  std::vector<std::function<void()>> stores;                               // global stores not yet seen by others
};

struct Settings {
  uint64_t seed = 1;
  unsigned resident = 2;         // CTAs of an ordinary launch that live at once
  unsigned multiprocessors = 3;  // what host code is told
};
inline Settings settings;

struct Machine {
  dim3 grid, block;
  std::function<void()> body;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Fiber*> ready, pollers;
  std::vector<std::function<void()>> later;
  Context main{};
  uint64_t random = 0, clock_ns = 0, switches = 0, idle_step = 0, loads_in_vain = 0;
  unsigned live_fibers = 0, live_ctas = 0;
  bool failed = false, on_main = true;
};
struct Stopped {};
inline Machine* machine = nullptr;
inline Fiber* current = nullptr;

inline std::vector<unsigned char*>& idle_stacks() {
  static std::vector<unsigned char*> stacks;
  return stacks;
}

inline uint32_t random_bits() {  // xorshift64*
  uint64_t& x = machine->random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return uint32_t((x * 0x2545f4914f6cdd1dull) >> 32);
}
inline uint32_t random_below(size_t n) { return uint32_t((uint64_t(random_bits()) * n) >> 32); }
inline bool chance(unsigned one_in) { return random_below(one_in) == 0; }

inline std::string describe(const Fiber& fiber) {
  char text[96];
  const dim3& c = fiber.cta->block_idx;
  std::snprintf(text, sizeof text, "CTA (%u,%u,%u) thread %u", c.x, c.y, c.z, fiber.rank);
  return text;
}

[[noreturn]] inline void to_main() {
  Context unused{};
  switch_context(unused, machine->main);
  std::abort();
}

// Ends the launch with an error: the kernel did what the hardware forbids.
[[noreturn]] inline void stop(const std::string& text) {
  machine->failed = true;
  fail(900, "emulation: %s%s%s", current ? describe(*current).c_str() : "", current ? ": " : "", text.c_str());
  if (machine->on_main) throw Stopped{};
  to_main();
}

inline std::string who_waits() {
  std::map<std::string, std::vector<unsigned>> by_reason;
  for (auto& cta : machine->ctas)
    for (auto& fiber : cta->fibers)
      if (!fiber->done) {
        char place[64];
        std::snprintf(place, sizeof place, "CTA (%u,%u,%u) ", cta->block_idx.x, cta->block_idx.y, cta->block_idx.z);
        const Reason& why = fiber->why;
        char what[160] = "runs";
        if (why.format) std::snprintf(what, sizeof what, why.format, why.a, why.b, why.c);
        by_reason[std::string(place) + (why.format ? "waits for " : "") + what].push_back(fiber->rank);
      }
  std::string text = "no progress";
  int lines = 0;
  for (auto& [reason, ranks] : by_reason) {
    if (++lines > 24) return text + "\n  ...";
    text += "\n  " + reason + ": thread" + (ranks.size() > 1 ? "s " : " ");
    for (size_t i = 0; i < ranks.size();) {
      size_t j = i;
      while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
      text += (i ? "," : "") + std::to_string(ranks[i]) + (j > i ? "-" + std::to_string(ranks[j]) : "");
      i = j + 1;
    }
  }
  return text;
}

// Something that another thread may be polling for has happened.
inline void memory_event() {
  machine->idle_step = 0;
  machine->loads_in_vain = 0;
  if (machine->pollers.empty()) return;
  machine->ready.insert(machine->ready.end(), machine->pollers.begin(), machine->pollers.end());
  machine->pollers.clear();
}

inline void do_one_later() {
  const size_t i = random_below(machine->later.size());
  auto action = std::move(machine->later[i]);
  machine->later[i] = std::move(machine->later.back());
  machine->later.pop_back();
  action();
  memory_event();
}

// The next fiber to run; does asynchronous work on the way. Fails the launch when nothing is left to do.
inline Fiber* next_fiber() {
  Machine& m = *machine;
  m.clock_ns += 8;
  for (;;) {
    if (!m.later.empty() && (m.ready.empty() || chance(16))) do_one_later();
    if (!m.ready.empty()) {
      const size_t i = random_below(m.ready.size());
      Fiber* fiber = m.ready[i];
      m.ready[i] = m.ready.back();
      m.ready.pop_back();
      return fiber;
    }
    if (!m.later.empty()) continue;
    if (m.pollers.empty() || m.idle_step > 48) {
      current = nullptr;
      stop(who_waits());
    }
    // Only pollers are left: let time pass, ever faster, so that a wait with a limit reaches it.
    m.clock_ns += uint64_t(1) << std::min<uint64_t>(m.idle_step + 10, 50);
    ++m.idle_step;
    m.ready.swap(m.pollers);
  }
}

inline void reschedule() {
  Fiber* self = current;
  Fiber* next = next_fiber();
  if (next == self) {
    current = self;
    return;
  }
  ++machine->switches;
  current = next;
  switch_context(self->context, next->context);
  current = self;
}

// Gives way at random, so that no program relies on who runs first.
inline void give_way(unsigned one_in = 24) {
  if (!chance(one_in)) return;
  machine->ready.push_back(current);
  reschedule();
}

inline void wait_in(Waiters& waiters, Reason why) {
  current->why = why;
  waiters.push_back(current);
  reschedule();
  current->why = {};
}

inline void wake(Waiters& waiters) {
  machine->ready.insert(machine->ready.end(), waiters.begin(), waiters.end());
  waiters.clear();
  memory_event();
}

// Waits until something in memory has changed, or time has passed.
inline void poll(Reason why) {
  current->why = why;
  machine->pollers.push_back(current);
  reschedule();
  current->why = {};
}

inline void fiber_main() {
  Fiber* self = current;
  machine->body();
  for (auto& store : self->stores) store();
  self->stores.clear();
  if (*reinterpret_cast<uint64_t*>(self->stack) != kStackCanary) stop("the host stack of a thread ran over");
  self->done = true;
  --machine->live_fibers;
  memory_event();
  if (--self->cta->live == 0) to_main();
  current = next_fiber();
  Context unused{};
  switch_context(unused, current->context);
  std::abort();
}

inline unsigned char* take_stack() {
  auto& idle = idle_stacks();
  if (idle.empty()) {
    void* fresh = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) std::abort();
    idle.push_back(static_cast<unsigned char*>(fresh));
  }
  unsigned char* stack = idle.back();
  idle.pop_back();
  *reinterpret_cast<uint64_t*>(stack) = kStackCanary;
  return stack;
}

inline void start_cta(dim3 block_idx, unsigned shared_bytes) {
  Machine& m = *machine;
  auto cta = std::make_unique<Cta>();
  const unsigned threads = m.block.x * m.block.y * m.block.z;
  cta->block_idx = block_idx;
  cta->live = threads;
  cta->shared_bytes = shared_bytes;
  const size_t bytes = (shared_bytes + kGuardBytes + 1023) / 1024 * 1024;
  cta->shared = static_cast<unsigned char*>(std::aligned_alloc(1024, bytes));
  std::memset(cta->shared, 0xff, bytes);  // NaN in every format: who reads what nobody wrote shall see it
  cta->warps.resize((threads + 31) / 32);
  cta->warpgroups.resize((threads + 127) / 128);
  for (unsigned rank = 0; rank < threads; ++rank) {
    auto fiber = std::make_unique<Fiber>();
    fiber->cta = cta.get();
    fiber->rank = rank;
    fiber->thread_idx = dim3(rank % m.block.x, rank / m.block.x % m.block.y, rank / m.block.x / m.block.y);
    fiber->lane = rank % 32, fiber->warp = rank / 32;
    fiber->stack = take_stack();
    make_context(fiber->context, fiber->stack, kStackBytes, fiber_main);
    m.ready.push_back(fiber.get());
    cta->fibers.push_back(std::move(fiber));
  }
  m.live_fibers += threads;
  ++m.live_ctas;
  m.ctas.push_back(std::move(cta));
}

// What is wrong with the way that a CTA ended, or null.
inline const char* end_cta(Cta& cta) {
  const char* wrong = nullptr;
  for (unsigned i = 0; i < kGuardBytes; ++i)
    if (cta.shared[cta.shared_bytes + i] != 0xff) wrong = "a store ran past the end of shared memory";
  if (cta.in_flight > 0) wrong = "a CTA ended before its asynchronous copies were done with its shared memory";
  for (auto& fiber : cta.fibers) idle_stacks().push_back(fiber->stack);
  std::free(cta.shared);
  return wrong;
}

// Runs a grid; 0, or an error code with its text kept for shardlib_last_error().
inline int run_grid(dim3 grid, dim3 block, unsigned shared_bytes, bool cooperative, std::function<void()> body) {
  static uint64_t launches = 0;
  Machine m;
  m.grid = grid, m.block = block, m.body = std::move(body);
  m.random = (settings.seed * 0x9e3779b97f4a7c15ull + ++launches) | 1;
  machine = &m;
  for (int i = 0; i < 8; ++i) random_bits();
  std::vector<dim3> todo;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) todo.emplace_back(x, y, z);
  size_t started = 0;
  int code = 0;
  while (code == 0 && (started < todo.size() || m.live_fibers > 0)) {
    while (started < todo.size() && (cooperative || m.live_ctas < settings.resident)) start_cta(todo[started++], shared_bytes);
    try {
      current = nullptr;
      Fiber* first = next_fiber();
      current = first;
      m.on_main = false;
      switch_context(m.main, first->context);
    } catch (const Stopped&) {
    }
    m.on_main = true;
    if (m.failed) {
      code = 900;
      break;
    }
    for (size_t i = 0; i < m.ctas.size();) {
      if (m.ctas[i]->live > 0) {
        ++i;
        continue;
      }
      if (const char* wrong = end_cta(*m.ctas[i])) code = fail(900, "emulation: %s", wrong);
      m.ctas.erase(m.ctas.begin() + long(i));
      --m.live_ctas;
    }
  }
  try {
    while (code == 0 && !m.later.empty()) do_one_later();
  } catch (const Stopped&) {
    code = 900;
  }
  for (auto& cta : m.ctas) end_cta(*cta);
  current = nullptr;
  machine = nullptr;
  return code;
}

}  // namespace shardlib::emulation

#define threadIdx (::shardlib::emulation::current->thread_idx)
#define blockIdx (::shardlib::emulation::current->cta->block_idx)
#define blockDim (::shardlib::emulation::machine->block)
#define gridDim (::shardlib::emulation::machine->grid)

extern "C" inline __attribute__((used)) const char* shardlib_last_error() { return shardlib::last_error; }

extern "C" inline __attribute__((used)) void shardlib_emulation_configure(
    uint64_t seed, unsigned resident, unsigned multiprocessors) {
  shardlib::emulation::settings = {seed, resident, multiprocessors};
}
