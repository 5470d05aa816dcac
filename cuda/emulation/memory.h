// Global memory between CTAs: ordered loads and stores, atomics, clocks.
//
// store_16 is seen by others late, unless this thread releases or meets others at a barrier first: data that is
// announced by a flag without a release arrives after the flag.
#pragma once
#include "mma.h"

namespace shardlib {
namespace emulation {

inline void saw_nothing_new() {
  if (++machine->loads_in_vain > 4u << 20) {
    current->why = {"a flag that it loads in a loop without pause_ns()"};
    stop(who_waits());
  }
  give_way(4);
}

}  // namespace emulation

inline uint4 load_16(const void* p) {
  emulation::drain_stores();
  uint4 value;
  std::memcpy(&value, p, 16);
  return value;
}
inline uint4 load_16_streaming(const void* p) { return load_16(p); }
inline void store_16(void* p, uint4 value) {
  if (reinterpret_cast<uintptr_t>(p) % 16) emulation::stop("a 16-byte store to an unaligned address");
  if (emulation::chance(2)) return void(std::memcpy(p, &value, 16));
  emulation::current->stores.push_back([=] { std::memcpy(p, &value, 16); });
}
inline void store_16_streaming(void* p, uint4 value) { store_16(p, value); }

template <class T> inline T load_acquire_system(const T* p) {
  emulation::saw_nothing_new();
  return *p;
}
template <class T> inline T load_acquire_device(const T* p) { return load_acquire_system(p); }
template <class T> inline T load_relaxed_system(const T* p) { return load_acquire_system(p); }
template <class T> inline T load_relaxed_device(const T* p) { return load_acquire_system(p); }
template <class T> inline void store_relaxed_system(T* p, T value) {
  *p = value;
  emulation::memory_event();
  emulation::give_way(4);
}
template <class T> inline void store_release_system(T* p, T value) {
  emulation::drain_stores();
  store_relaxed_system(p, value);
}
template <class T> inline void store_release_device(T* p, T value) { store_release_system(p, value); }
template <class T> inline T add_release_system(T* p, T value) {  // returns the old value
  emulation::drain_stores();
  const T old = *p;
  *p = T(old + value);
  emulation::memory_event();
  emulation::give_way(4);
  return old;
}
template <class T> inline T add_release_device(T* p, T value) { return add_release_system(p, value); }
template <class T> inline T add_acquire_release_system(T* p, T value) { return add_release_system(p, value); }
template <class T> inline T add_acquire_release_device(T* p, T value) { return add_release_system(p, value); }
inline void fence_system() { emulation::drain_stores(); }
inline void fence_device() { emulation::drain_stores(); }

inline uint64_t timer_ns() {
  emulation::machine->clock_ns += 16;
  return emulation::machine->clock_ns;
}
// A short rest in a loop that waits for memory to change.
inline void pause_ns(unsigned) { emulation::poll({"a flag in global memory"}); }

// Shared memory: the dynamic part, and named objects of one CTA (SHARED).
inline unsigned char* shared_memory() { return emulation::current->cta->shared; }
inline uint32_t shared_address(const void* p) { return emulation::shared_offset(p); }
namespace emulation {
template <class T> inline T& static_shared(const void* key) {
  auto& bytes = current->cta->static_shared[key];
  if (bytes.empty()) bytes.assign(sizeof(T), 0xff);
  return *reinterpret_cast<T*>(bytes.data());
}
}  // namespace emulation

}  // namespace shardlib

#define SHARED(type, name)                 \
  static const char shared_key_##name = 0; \
  auto& name = ::shardlib::emulation::static_shared<type>(&shared_key_##name)

template <class T> inline T atomicAdd(T* p, T value) { return shardlib::add_release_device(p, value); }
template <class T> inline T atomicMax(T* p, T value) {
  const T old = *p;
  *p = std::max(old, value);
  shardlib::emulation::memory_event();
  return old;
}
template <class T> inline T atomicExch(T* p, T value) {
  const T old = *p;
  *p = value;
  shardlib::emulation::memory_event();
  return old;
}
template <class T> inline T atomicCAS(T* p, T compare, T value) {
  const T old = *p;
  if (old == compare) *p = value;
  shardlib::emulation::memory_event();
  return old;
}
inline void __threadfence() { shardlib::fence_device(); }
inline void __threadfence_system() { shardlib::fence_system(); }
