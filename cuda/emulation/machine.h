// The emulated machine, as kernels and launchers see it: threads, launches, errors, clocks.
//
// These headers hold declarations and what is templated; the machine itself is compiled once, from the .cpp files here.
#pragma once
#include "types.h"

namespace shardlib {

// Keeps the text for shardlib_last_error() and returns the code.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

struct LaunchShape {
  dim3 grid, block;
  unsigned shared_bytes = 0;
  bool cooperative = false;  // all CTAs live at once
};

namespace emulation {

struct Thread {
  dim3 thread_idx, block_idx;
  unsigned rank = 0, lane = 0, warp = 0;
  unsigned char* shared = nullptr;  // the CTA's dynamic shared memory
};
extern Thread* current;
extern dim3 grid, block;

// What a thread waits for; made into text only when it is reported.
struct Reason {
  const char* format = nullptr;
  uint64_t a = 0, b = 0, c = 0;
};

// Ends the launch with an error: the kernel did what the hardware forbids.
[[noreturn]] void stop(const char* what);
// Lets others run, once in so many calls: no program may rely on who runs first.
void give_way(unsigned one_in);
// Waits until something in memory has changed, or time has passed.
void poll(Reason why);
// Says that it has: another thread may be polling for it.
void memory_event();

int run_grid(const LaunchShape& shape, void (*body)(const void*), const void* closure);
template <class Body> inline int run_grid(const LaunchShape& shape, const Body& body) {
  return run_grid(shape, [](const void* closure) { (*static_cast<const Body*>(closure))(); }, &body);
}

// The CTA's object behind SHARED(type, name): bytes of its own, all ones at first.
void* static_shared(const void* key, unsigned bytes);

}  // namespace emulation

template <class... P, class... A>
inline int launch(const LaunchShape& shape, cudaStream_t, void (*kernel)(P...), const A&... arguments) {
  return emulation::run_grid(shape, [&] { kernel(static_cast<P>(arguments)...); });
}
int multiprocessor_count();

uint64_t timer_ns();
// A short rest in a loop that waits for memory to change.
inline void pause_ns(unsigned) { emulation::poll({"a flag in global memory"}); }

inline unsigned char* shared_memory() { return emulation::current->shared; }

}  // namespace shardlib

#define threadIdx (::shardlib::emulation::current->thread_idx)
#define blockIdx (::shardlib::emulation::current->block_idx)
#define blockDim (::shardlib::emulation::block)
#define gridDim (::shardlib::emulation::grid)

#define SHARED(type, name)                 \
  static const char shared_key_##name = 0; \
  auto& name = *static_cast<type*>(::shardlib::emulation::static_shared(&shared_key_##name, sizeof(type)))
