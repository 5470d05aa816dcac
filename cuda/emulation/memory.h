// Global memory between CTAs: ordered loads and stores, atomics.
//
// A store_16 is seen by others late, unless this thread releases or meets others at a barrier first: data that is
// announced by a flag without a release arrives after the flag.
#pragma once
#include "mma.h"

namespace shardlib {
namespace emulation {
// This thread's stores are seen by all from here on.
void drain_stores();
// Before a flag is read: others may run, and a loop that can never end is reported.
void before_flag();
inline void after_flag() {
  memory_event();
  give_way(4);
}
// An access by a second address of its memory: between two alias fences, with no meeting of the threads in between.
void use_alias();
}  // namespace emulation

uint4 load_16(const void* p);
void store_16(void* p, uint4 value);
inline uint4 load_16_streaming(const void* p) { return load_16(p); }

template <class T> inline T load_acquire_system(const T* p) {
  emulation::before_flag();
  return *p;
}
template <class T> inline T load_acquire_device(const T* p) { return load_acquire_system(p); }
template <class T> inline T load_relaxed_system(const T* p) { return load_acquire_system(p); }
template <class T> inline T load_relaxed_device(const T* p) { return load_acquire_system(p); }

template <class T> inline void store_relaxed_system(T* p, std::common_type_t<T> value) {
  *p = value;
  emulation::after_flag();
}
template <class T> inline void store_release_system(T* p, std::common_type_t<T> value) {
  emulation::drain_stores();
  store_relaxed_system(p, value);
}
template <class T> inline void store_release_device(T* p, std::common_type_t<T> value) {
  store_release_system(p, value);
}

template <class T> inline T add_acquire_release_device(T* p, std::common_type_t<T> value) {  // returns the old value
  emulation::drain_stores();
  const T old = *p;
  *p = T(old + value);
  emulation::after_flag();
  return old;
}
template <class T> inline T add_release_device(T* p, std::common_type_t<T> value) {
  return add_acquire_release_device(p, value);
}

inline void fence_device() { emulation::drain_stores(); }
void fence_alias();

}  // namespace shardlib

namespace shardlib::emulation {
template <class T, class Change> inline T atomically(T* p, Change change) {
  const T old = *p;
  *p = change(old);
  after_flag();
  return old;
}
}  // namespace shardlib::emulation

template <class T> inline T atomicAdd(T* p, std::common_type_t<T> value) {
  return shardlib::emulation::atomically(p, [&](T old) { return T(old + value); });
}
template <class T> inline T atomicExch(T* p, std::common_type_t<T> value) {
  return shardlib::emulation::atomically(p, [&](T) { return value; });
}
