// Fill memory with one byte: tests poison outputs by it, so that an element which no kernel wrote shows as NaN.
#include "primitives.cuh"

namespace shardlib {
namespace {

// Configuration
constexpr int kThreads = 256;
constexpr int64_t kWide = 16, kMostBlocks = 4096;  // bytes of one store; the grid strides over the rest

// Arguments: bytes before the first 16-byte boundary (head) and after the last one are stored one by one.
struct FillArgs {
  uint8_t* out;
  int64_t head, wides, singles;
  uint8_t byte;
};

// Kernel
__global__ void __launch_bounds__(kThreads) fill(const FillArgs a) {
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
  const uint32_t word = a.byte * 0x01010101u;
  const uint4 words = make_uint4(word, word, word, word);
  for (int64_t i = first; i < a.wides; i += step) store_16(a.out + a.head + i * kWide, words);
  for (int64_t i = first; i < a.singles; i += step) a.out[i < a.head ? i : i + a.wides * kWide] = a.byte;
}

}  // namespace
}  // namespace shardlib

// Entry: every byte of out[bytes] becomes `byte`. Any alignment.
extern "C" int shardlib_fill(void* out, int64_t bytes, int64_t byte, cudaStream_t stream) {
  using namespace shardlib;
  if (bytes == 0) return 0;
  if (byte < 0 || byte > 255) return fail(1, "fill: %lld is no byte", (long long)byte);
  const int64_t gap = -reinterpret_cast<intptr_t>(out) & (kWide - 1), head = gap < bytes ? gap : bytes;
  const int64_t wides = (bytes - head) / kWide, singles = bytes - wides * kWide;
  const int64_t items = wides > singles ? wides : singles, blocks = (items + kThreads - 1) / kThreads;
  LaunchShape shape;
  shape.grid = dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks));
  shape.block = dim3(kThreads);
  return launch(shape, stream, fill, FillArgs{static_cast<uint8_t*>(out), head, wides, singles, uint8_t(byte)});
}
