// Reductions of the members' contributions, in the order of members: every member and every runtime gets the same bits.
#pragma once

#include <cstddef>

namespace shm {

// Codes that ops/collectives/transport/shm_streams.py uses too. A complex number is two floats here: only sums of them are reduced.
enum Dtype { kF32, kF64, kBF16, kF16, kI8, kI16, kI32, kI64, kU8, kBool, kDtypes };
enum Kind { kSum, kMax, kMin, kKinds };

constexpr size_t kTile = 4096;  // bytes of result that are reduced at a time; they stay in the first-level cache

size_t element_size(int dtype);

// to[i] = from[0][i] (+) from[1][i] (+) ... (+) from[n-1][i] for `count` elements and n > 1. Floats of 16 bits are
// accumulated in 32 and rounded once; a NaN wins a maximum or minimum; integers wrap around; a sum of bools is "or".
// `to` may be one of `from`, but not overlap one otherwise. All pointers are aligned to the element.
void reduce(int dtype, int kind, const char* const* from, int n, char* to, size_t count);

}  // namespace shm
