// Messages in parts: one launch moves as much of each as the data area holds.
#pragma once
#include "bytes.cuh"
#include "peers.cuh"

namespace shardlib {

// The part of every message that one launch moves: bytes [first, first + length), in `rounds` chunks of a slice.
struct Window { int64_t first, length, rounds; };

__host__ __device__ __forceinline__ int64_t in_window(const Window& w, int64_t bytes) {
  return max(int64_t(0), min(bytes - w.first, w.length));
}

// Each half of the data area has slots of this size, one for a message.
__host__ __device__ __forceinline__ int64_t slot_bytes(const Group& g, int64_t slots) {
  return g.window / slots / 128 * 128;
}

// --- host -----------------------------------------------------------------------------------------------------------

// Calls launch_window(window) until all of every message is moved; with nothing to move once, as the ranks meet.
template <class Launch>
int for_windows(const Group& g, int64_t longest, int64_t slots, bool staged, Launch launch_window) {
  // The last 128 bytes of a slot are room for a message that begins off a multiple of 16.
  const int64_t length = staged ? slot_bytes(g, slots) - 128 : max(longest, int64_t(128));
  if (length < 128)
    return fail(1, "a window of %lld bytes is too small for %lld messages", (long long)g.window, (long long)slots);
  for (int64_t first = 0; first == 0 || first < longest; first += length) {
    const int64_t slice = slice_bytes(min(longest - first, length), g.ctas);
    const int64_t rounds = max(int64_t(1), (slice + g.chunk - 1) / g.chunk);
    if (rounds >= int64_t(1) << kStepBits) return fail(1, "%lld chunks are too many for one launch", (long long)rounds);
    if (const int code = launch_window(Window{first, length, rounds})) return code;
  }
  return 0;
}

}  // namespace shardlib
