// Grids of CTAs, every thread a fiber, begun and run in a random but repeatable order.
//
// A fiber runs until a primitive makes it wait or, now and then, yields at random. Some warps are slow for a while, so
// that missing waits show. Asynchronous work (TMA, bulk copies) is done at random moments, half of it only when no fiber
// can run without it. When no fiber can run any more the launch fails, and its text names the waiting fibers and their
// waits. Everything runs on one host thread, so no emulated state needs a lock.
#include <sys/mman.h>

#include <cstdarg>

#include "fiber.h"
#include "internals.h"

namespace shardlib {
namespace emulation {

Thread* current = nullptr;
dim3 grid, block;
float fp16_values[1 << 16];

namespace {

// Exponent and mantissa in float's places make a number 2^112 times too small; infinities and NaN keep a full exponent.
[[maybe_unused]] const bool fp16_values_are_filled = [] {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const uint32_t magnitude = (bits & 0x7fff) << 13;
    const bool finite = (bits & 0x7c00) != 0x7c00;
    const float value = finite ? __uint_as_float(magnitude) * 0x1p112f : __uint_as_float(magnitude | 0x7f800000u);
    fp16_values[bits] = bits & 0x8000 ? -value : value;
  }
  return true;
}();

constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned kGuardBytes = 256;
constexpr uint64_t kStackCanary = 0x5aa5c33c0ff01ee7ull;
constexpr unsigned kIdleSteps = 48;  // doublings of the clock's step before pollers are given up

struct Settings {
  uint64_t seed = 1;
  unsigned resident = 2;         // CTAs of an ordinary launch that live at once
  unsigned multiprocessors = 3;  // what host code is told
} settings;
uint64_t launches = 0;  // since the settings were made: each has an order of its own

struct Machine {
  void (*body)(const void*) = nullptr;
  const void* closure = nullptr;
  std::vector<uint32_t> order;  // in which the CTAs begin
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Fiber*> ready, pollers;
  std::vector<std::function<void()>> soon, late;  // asynchronous work
  Context main{};
  uint64_t random = 0, clock_ns = 0, idle_steps = 0, loads_in_vain = 0;
  unsigned live_fibers = 0;
  bool failed = false, on_main = true;
};
Machine* machine = nullptr;
struct Stopped {};

std::vector<unsigned char*> idle_stacks;
char last_error[4096];

uint32_t random_bits() {  // xorshift64*
  uint64_t& x = machine->random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return uint32_t((x * 0x2545f4914f6cdd1dull) >> 32);
}

std::string place(const Fiber& fiber) {
  const dim3& c = fiber.block_idx;
  return "CTA (" + std::to_string(c.x) + "," + std::to_string(c.y) + "," + std::to_string(c.z) + ") ";
}

[[noreturn]] void to_main() {
  Context unused{};
  switch_context(unused, machine->main);
  std::abort();
}

void do_one(std::vector<std::function<void()>>& actions) {
  const size_t i = random_below(actions.size());
  auto action = std::move(actions[i]);
  actions[i] = std::move(actions.back());
  actions.pop_back();
  action();
  memory_event();
}

// Whether a fiber's warp is slow at present: one in four, for a thousand switches.
bool slow(const Fiber& fiber) {
  const uint64_t epoch = machine->clock_ns >> 13,
                 warp = fiber.warp + 64 * uint64_t(fiber.block_idx.x + 7 * fiber.block_idx.y);
  const uint64_t mixed =
      (epoch * 0x9e3779b97f4a7c15ull + warp * 0xbf58476d1ce4e5b9ull) ^ settings.seed * 0x94d049bb133111ebull;
  return ((mixed * 0xff51afd7ed558ccdull) >> 62) == 0;
}

// The next fiber to run; does asynchronous work on the way. Fails the launch when nothing is left to do.
Fiber* next_fiber() {
  Machine& m = *machine;
  m.clock_ns += 8;
  for (;;) {
    if (!m.soon.empty() && (m.ready.empty() || chance(16))) do_one(m.soon);
    if (!m.ready.empty()) {
      size_t i = random_below(m.ready.size());
      for (int tries = 0; tries < 6 && slow(*m.ready[i]); ++tries) i = random_below(m.ready.size());
      Fiber* fiber = m.ready[i];
      m.ready[i] = m.ready.back();
      m.ready.pop_back();
      return fiber;
    }
    if (!m.soon.empty()) continue;
    if (!m.late.empty()) {
      do_one(m.late);
      continue;
    }
    if (m.pollers.empty() || m.idle_steps > kIdleSteps) {
      current = nullptr;
      stop(who_waits());
    }
    // Only pollers are left: let time pass, ever faster, so that a wait with a limit reaches it.
    m.clock_ns += uint64_t(1) << std::min<uint64_t>(m.idle_steps + 10, 50);
    ++m.idle_steps;
    m.ready.swap(m.pollers);
  }
}

void reschedule() {
  Fiber& me = self();
  Fiber* next = next_fiber();
  if (next != &me) {
    current = next;
    switch_context(me.context, next->context);
  }
  current = &me;
}

void fiber_main() {
  Fiber& me = self();
  machine->body(machine->closure);
  drain_stores();
  if (*reinterpret_cast<uint64_t*>(me.stack) != kStackCanary) stop("the host stack of a thread ran over");
  me.done = true;
  --machine->live_fibers;
  memory_event();
  if (--me.cta->live == 0) to_main();
  Fiber* next = next_fiber();
  current = next;
  Context unused{};
  switch_context(unused, next->context);
  std::abort();
}

unsigned char* take_stack() {
  if (idle_stacks.empty()) {
    void* fresh =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) std::abort();
    idle_stacks.push_back(static_cast<unsigned char*>(fresh));
  }
  unsigned char* stack = idle_stacks.back();
  idle_stacks.pop_back();
  *reinterpret_cast<uint64_t*>(stack) = kStackCanary;
  return stack;
}

void start_cta(dim3 block_idx, unsigned shared_bytes) {
  auto cta = std::make_unique<Cta>();
  const unsigned threads = block.x * block.y * block.z;
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
    fiber->shared = cta->shared;
    fiber->block_idx = block_idx;
    fiber->thread_idx = dim3(rank % block.x, rank / block.x % block.y, rank / block.x / block.y);
    fiber->rank = rank, fiber->lane = rank % 32, fiber->warp = rank / 32;
    fiber->stack = take_stack();
    make_context(fiber->context, fiber->stack, kStackBytes, fiber_main);
    machine->ready.push_back(fiber.get());
    cta->fibers.push_back(std::move(fiber));
  }
  machine->live_fibers += threads;
  machine->ctas.push_back(std::move(cta));
}

// What is wrong with the way that a CTA ended, or null.
const char* end_cta(Cta& cta) {
  const char* wrong = nullptr;
  for (unsigned i = 0; i < kGuardBytes; ++i)
    if (cta.shared[cta.shared_bytes + i] != 0xff) wrong = "a store ran past the end of shared memory";
  if (cta.in_flight > 0) wrong = "a CTA ended before its asynchronous copies were done with its shared memory";
  for (auto& fiber : cta.fibers) idle_stacks.push_back(fiber->stack);
  std::free(cta.shared);
  return wrong;
}

// Starts CTAs as there is room and runs until the grid is done.
int run_ctas(const LaunchShape& shape) {
  Machine& m = *machine;
  size_t started = 0;
  while (started < m.order.size() || m.live_fibers > 0) {
    for (; started < m.order.size() && (shape.cooperative || m.ctas.size() < settings.resident); ++started) {
      const uint32_t i = m.order[started];
      start_cta(dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y), shape.shared_bytes);
    }
    current = nullptr;
    Fiber* first = next_fiber();
    current = first;
    m.on_main = false;
    switch_context(m.main, first->context);
    m.on_main = true;
    if (m.failed) return 900;
    for (size_t i = m.ctas.size(); i-- > 0;) {
      if (m.ctas[i]->live > 0) continue;
      const char* wrong = end_cta(*m.ctas[i]);
      m.ctas.erase(m.ctas.begin() + long(i));
      if (wrong) return fail(900, "emulation: %s", wrong);
    }
  }
  while (!m.soon.empty()) do_one(m.soon);
  while (!m.late.empty()) do_one(m.late);
  return 0;
}

}  // namespace

void stop(const std::string& what) {
  machine->failed = true;
  const std::string where = current ? place(self()) + "thread " + std::to_string(current->rank) + ": " : "";
  fail(900, "emulation: %s%s", where.c_str(), what.c_str());
  if (machine->on_main) throw Stopped{};
  to_main();
}
void stop(const char* what) { stop(std::string(what)); }

std::string who_waits() {
  std::map<std::string, std::vector<unsigned>> by_reason;
  for (auto& cta : machine->ctas)
    for (auto& fiber : cta->fibers)
      if (!fiber->done) {
        const Reason& why = fiber->why;
        char what[160] = "runs";
        if (why.format) std::snprintf(what, sizeof what, why.format, why.a, why.b, why.c);
        by_reason[place(*fiber) + (why.format ? "waits for " : "") + what].push_back(fiber->rank);
      }
  std::string text = "no progress";
  int lines = 0;
  for (auto& [reason, ranks] : by_reason) {
    if (++lines > 24) return text + "\n  ...";
    text += "\n  " + reason + ": thread" + (ranks.size() > 1 ? "s " : " ");
    for (size_t i = 0, j; i < ranks.size(); i = j + 1) {
      for (j = i; j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1;) ++j;
      text += (i ? "," : "") + std::to_string(ranks[i]) + (j > i ? "-" + std::to_string(ranks[j]) : "");
    }
  }
  return text;
}

uint32_t random_below(size_t n) { return uint32_t((uint64_t(random_bits()) * n) >> 32); }
uint64_t seed() { return settings.seed; }
void later(std::function<void()> action) { (chance(2) ? machine->soon : machine->late).push_back(std::move(action)); }

void memory_event() {
  machine->idle_steps = 0;
  machine->loads_in_vain = 0;
  if (machine->pollers.empty()) return;
  machine->ready.insert(machine->ready.end(), machine->pollers.begin(), machine->pollers.end());
  machine->pollers.clear();
}

void give_way(unsigned one_in) {
  if (!chance(one_in)) return;
  machine->ready.push_back(&self());
  reschedule();
}

void wait_in(Waiters& waiters, Reason why) {
  Fiber& me = self();
  me.why = why;
  waiters.push_back(&me);
  reschedule();
  me.why = {};
}

void wake(Waiters& waiters) {
  machine->ready.insert(machine->ready.end(), waiters.begin(), waiters.end());
  waiters.clear();
  memory_event();
}

void poll(Reason why) { wait_in(machine->pollers, why); }

void before_flag() {
  if (++machine->loads_in_vain > 4u << 20) {
    self().why = {"a flag that it loads in a loop without pause_ns()"};
    stop(who_waits());
  }
  give_way(4);
}

void drain_stores() {
  auto& stores = self().stores;
  if (stores.empty()) return;
  for (auto& store : stores) store();
  stores.clear();
  memory_event();
}

void use_alias() {
  if (self().alias == Fiber::apart) stop("a second address of memory is used with no alias fence before");
  self().alias = Fiber::used;
}

void leave_alias() {
  if (self().alias == Fiber::used) stop("a second address of memory was used with no alias fence behind");
  self().alias = Fiber::apart;
}

void* static_shared(const void* key, unsigned bytes) {
  auto& object = self().cta->static_shared[key];
  if (object.empty()) object.assign(bytes, 0xff);
  return object.data();
}

int run_grid(const LaunchShape& shape, void (*body)(const void*), const void* closure) {
  if (shape.shared_bytes > 227u << 10)
    return fail(1, "a kernel asks for %u bytes of shared memory", shape.shared_bytes);
  if (uint64_t(shape.grid.x) * shape.grid.y * shape.grid.z == 0) return fail(1, "a launch of an empty grid");
  Machine m;
  machine = &m;
  grid = shape.grid, block = shape.block;
  m.body = body, m.closure = closure;
  m.random = (settings.seed * 0x9e3779b97f4a7c15ull + ++launches) | 1;
  for (int i = 0; i < 8; ++i) random_bits();
  const uint64_t many = uint64_t(grid.x) * grid.y * grid.z;
  for (uint64_t i = 0; i < many; ++i) {
    m.order.push_back(uint32_t(i));
    std::swap(m.order.back(), m.order[random_below(i + 1)]);
  }
  int code = 900;
  try {
    code = run_ctas(shape);
  } catch (const Stopped&) {
  }
  for (auto& cta : m.ctas) end_cta(*cta);
  current = nullptr;
  machine = nullptr;
  return code;
}

}  // namespace emulation

int fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(emulation::last_error, sizeof emulation::last_error, format, arguments);
  va_end(arguments);
  return code;
}

int multiprocessor_count() { return int(emulation::settings.multiprocessors); }

uint64_t timer_ns() { return emulation::machine->clock_ns += 16; }

void fence_alias() {
  emulation::drain_stores();
  emulation::self().alias = emulation::Fiber::fenced;
}

uint4 load_16(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) emulation::stop("a 16-byte load from an unaligned address");
  emulation::drain_stores();
  uint4 value;
  std::memcpy(&value, p, 16);
  return value;
}

void store_16(void* p, uint4 value) {
  if (reinterpret_cast<uintptr_t>(p) % 16) emulation::stop("a 16-byte store to an unaligned address");
  if (emulation::chance(2)) return void(std::memcpy(p, &value, 16));
  emulation::self().stores.push_back([=] { std::memcpy(p, &value, 16); });
}

}  // namespace shardlib

extern "C" const char* shardlib_last_error() { return shardlib::emulation::last_error; }

extern "C" void shardlib_emulation_configure(uint64_t seed, unsigned resident, unsigned multiprocessors) {
  shardlib::emulation::settings = {seed, resident, multiprocessors};
  shardlib::emulation::launches = 0;
}
