// Keys of a tile of the attention forward for sm_90a, by head dim, plain or general. `python -m tests.validation.gpu.session` tries
// others, and with --write puts the fastest here: a row is one line.
#pragma once

namespace shardlib {

template <int D, bool General> constexpr int kForwardKeys = 0;
template <> constexpr int kForwardKeys<64, false> = 128;
template <> constexpr int kForwardKeys<96, false> = 128;
template <> constexpr int kForwardKeys<128, false> = 128;
template <> constexpr int kForwardKeys<256, false> = 80;
template <> constexpr int kForwardKeys<64, true> = 64;
template <> constexpr int kForwardKeys<128, true> = 64;
template <> constexpr int kForwardKeys<256, true> = 48;

}  // namespace shardlib
