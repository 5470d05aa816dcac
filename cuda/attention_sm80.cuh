// What the sm_80 attention kernels are made of: tiles in shared memory, products of a warp, what hides or drops a
// probability.
//
// A warp's accumulators: float d[n][e] of lane l is the element (row l / 4 + 8 (e / 2), column 8 n + 2 (l % 4) + e % 2)
// of a block of 16 rows. The forward's scores have queries down and keys along; the backward's are transposed.
// Bits for all elements of such a block are a word per lane: bit 4 n + e belongs to d[n][e], so a block has at most 64
// columns. Loops that make bits are rolled: they index no registers.
#pragma once
#include "attention_rows.cuh"

namespace shardlib::sm80 {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr unsigned kMostSharedBytes = 99 << 10;  // what a CTA may have on sm_86, sm_89 and sm_120

// --- tiles ------------------------------------------------------------------------------------------------------------

// Rows of kColumns elements in shared memory. The stride is an odd number of 16-byte words (kColumns is a multiple of
// 16): the eight rows of a matrix that ldmatrix reads lie in different banks.
template <class T, int kRows, int kColumns> struct Tile {
  static constexpr int kStride = kColumns + 8, kBytes = kRows * kStride * int(sizeof(T));
  T* data;

  __device__ __forceinline__ T* at(int row, int column) const { return data + row * kStride + column; }

  // Begins to copy `rows` rows of `columns` elements, a multiple of 8, from global memory; the rest becomes zeros.
  __device__ __forceinline__ void load(const T* from, int64_t row_stride, int rows, int columns) const {
    constexpr int kWide = kColumns / 8;  // copies of a row
    static_assert(kRows * kWide % kThreads == 0);
#pragma unroll
    for (int c = 0; c < kRows * kWide / kThreads; ++c) {
      const int word = c * kThreads + int(threadIdx.x), row = word / kWide, column = word % kWide * 8;
      const bool inside = row < rows && column < columns;
      cp_async_16(at(row, column), inside ? from + row * row_stride + column : from, inside ? 16 : 0);
    }
  }
};

// The element at which this lane's row of four 8x8 matrices begins: the matrices of a 16x16 block go down first, or
// along first.
template <class Tile> __device__ __forceinline__ auto down_first(Tile tile, int row, int column) {
  return tile.at(row + lane_index() % 16, column + lane_index() / 16 * 8);
}
template <class Tile> __device__ __forceinline__ auto along_first(Tile tile, int row, int column) {
  return tile.at(row + lane_index() % 8 + lane_index() / 16 * 8, column + lane_index() / 8 % 2 * 8);
}

// --- products ---------------------------------------------------------------------------------------------------------

// Two blocks of 8 columns more: b holds the fragment of one, then of the other.
template <class T>
__device__ __forceinline__ void mma_two(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[4]) {
  const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
  mma_16816<T>(left, a, first);
  mma_16816<T>(right, a, second);
}

// d [16 kBlocks, 8 kEights] += a b^T: rows `row` and on of a, all rows of b, kDim columns of both.
template <class T, int kDim, int kBlocks, int kEights, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[kBlocks][kEights][4], A a_tile, int row, B b_tile) {
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t a[kBlocks][4], b[4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) ldmatrix_x4(a[m], down_first(a_tile, row + 16 * m, k));
#pragma unroll
    for (int n = 0; n < kEights; n += 2) {
      ldmatrix_x4(b, along_first(b_tile, 8 * n, k));
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) mma_two<T>(d[m][n], d[m][n + 1], a[m], b);
    }
  }
}

// d [16 kBlocks, 8 kEights] += a b: a in fragments, columns `column` and on of b.
template <class T, int kBlocks, int kEights, int kSteps, class B>
__device__ __forceinline__ void accumulate(float (&d)[kBlocks][kEights][4], const uint32_t (&a)[kBlocks][kSteps][4],
                                           B b_tile, int column) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int n = 0; n < kEights; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, down_first(b_tile, 16 * k, column + 8 * n));
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) mma_two<T>(d[m][n], d[m][n + 1], a[m][k], b);
    }
}

// The same accumulators as one row of numbers, for the functions of attention_rows.cuh.
template <int kEights> __device__ __forceinline__ float (&flat(float (&d)[kEights][4]))[4 * kEights] {
  return reinterpret_cast<float(&)[4 * kEights]>(d);
}

// Writes a block that was packed as the left operand of a product to the 16 rows from `row` on of a tile.
template <class Tile, int kSteps>
__device__ __forceinline__ void store_fragments(Tile tile, int row, const uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint32_t*>(
          tile.at(row + lane_index() / 4 + i % 2 * 8, 16 * k + i / 2 * 8 + lane_index() % 4 * 2)) = a[k][i];
}

// Writes a block's rows below `rows` and columns below `columns` (even) to global memory, each times its row's factor.
// `row` and `column` are the block's own place.
template <class T, int kEights>
__device__ __forceinline__ void store_block(T* to, int64_t row_stride, const float (&d)[kEights][4], int row, int rows,
                                            int column, int columns, float upper, float lower) {
  const int r = row + int(lane_index()) / 4, c = column + int(lane_index()) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
    if (c + 8 * n >= columns) break;
    auto* at = to + r * row_stride + c + 8 * n;
    if (r < rows) *reinterpret_cast<uint32_t*>(at) = pack<T>(d[n][0] * upper, d[n][1] * upper);
    if (r + 8 < rows) *reinterpret_cast<uint32_t*>(at + 8 * row_stride) = pack<T>(d[n][2] * lower, d[n][3] * lower);
  }
}

// --- what hides, moves or drops a probability -------------------------------------------------------------------------

// Which queries and keys a block of scores joins. kKeysDown: its rows are keys.
template <bool kKeysDown> struct Block {
  int query, key;  // of its first element

  __device__ __forceinline__ int query_of(int n, int e) const {
    return query + (kKeysDown ? 8 * n + int(lane_index()) % 4 * 2 + e % 2 : int(lane_index()) / 4 + e / 2 * 8);
  }
  __device__ __forceinline__ int key_of(int n, int e) const {
    return key + (kKeysDown ? int(lane_index()) / 4 + e / 2 * 8 : 8 * n + int(lane_index()) % 4 * 2 + e % 2);
  }
};

// Whether no query of [i, i + rows) sees any key of [j, j + columns), by position.
__device__ __forceinline__ bool blind(const Sight& sight, int i, int rows, int j, int columns) {
  return i >= sight.queries || j >= sight.end(i + rows - 1) || j + columns <= sight.begin(i);
}

// Bits of the elements whose query sees their key, by position and by mask. `head` is query 0's row.
template <int kEights, bool kKeysDown>
__device__ __forceinline__ uint32_t seen(const Sight& sight, const Extras& extras, const RowExtras& head,
                                         Block<kKeysDown> block) {
  constexpr int kQueries = kKeysDown ? 8 * kEights : 16, kKeys = kKeysDown ? 16 : 8 * kEights;
  static_assert(kEights <= 8);
  if (!head.mask && block.query + kQueries <= sight.queries && sight.whole(block.query, kQueries, block.key, kKeys))
    return ~0u;
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = block.query_of(n, e), j = block.key_of(n, e);
      bool sees = i < sight.queries && j >= sight.begin(i) && j < sight.end(i);
      if (head.mask && sees) sees = head.mask[i * extras.mask_strides[2] + j * extras.mask_strides[3]] != 0;
      bits |= uint32_t(sees) << (4 * n + e);
    }
  return bits;
}

// Scores become logits in units of log 2. Elements outside the tensors take the values of the nearest inside.
template <int kEights, bool kKeysDown>
__device__ __forceinline__ void add_extras(float (&s)[kEights][4], const Sight& sight, const Extras& extras,
                                           const RowExtras& head, Block<kKeysDown> block) {
#pragma unroll
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int distance = block.query_of(n, e) + sight.shift - block.key_of(n, e);
      s[n][e] = s[n][e] * extras.scale_log2 - head.slope_log2 * fabsf(float(distance));
    }
  if (!extras.bias) return;
  const bool wide = extras.bias_dtype == SHARDLIB_F32, is_bf16 = extras.bias_dtype == SHARDLIB_BF16;
  const int64_t size = wide ? 4 : 2, row = extras.bias_strides[2] * size, column = extras.bias_strides[3] * size;
  const unsigned char* bias = static_cast<const unsigned char*>(extras.bias) + head.bias * size;
#pragma unroll
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = min(block.query_of(n, e), sight.queries - 1), j = min(block.key_of(n, e), sight.keys - 1);
      const unsigned char* at = bias + i * row + j * column;
      const uint32_t bits = wide ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
      const float x = wide ? __uint_as_float(bits) : is_bf16 ? __uint_as_float(bits << 16) : unpack<fp16>(bits).x;
      s[n][e] += x * kLog2E;
    }
}

template <int kEights> __device__ __forceinline__ void hide(float (&s)[kEights][4], uint32_t seen) {
  if (seen == ~0u) return;
#pragma unroll
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!(seen >> (4 * n + e) & 1)) s[n][e] = SHARDLIB_MINUS_INFINITY;
}

// Bits 0 to 3: whether dropout keeps the probabilities of keys j to j + 3 of query i.
__device__ __forceinline__ uint32_t kept_four(const Extras& extras, const RowExtras& head, PhiloxKey key, int i, int j) {
  const int64_t position = extras.k_offset + j;
  const uint64_t place = uint64_t(head.dropout_row + i * extras.row_blocks + (position >> 2));
  const unsigned skip = unsigned(position & 3);
  uint32_t bits = 0;
#pragma unroll 1
  for (unsigned block = 0; block < (skip ? 2u : 1u); ++block) {  // a second one when the four are not aligned
    const uint4 words = philox(key, place + block);
    const uint32_t four = uint32_t(words.x >= extras.threshold) | uint32_t(words.y >= extras.threshold) << 1 |
                          uint32_t(words.z >= extras.threshold) << 2 | uint32_t(words.w >= extras.threshold) << 3;
    bits |= four << (4 * block);
  }
  return bits >> skip & 15;
}

// Bits of the elements that dropout keeps. 16 x 8 elements are 32 fours of keys: a lane draws one, then each asks the
// lanes that drew its own.
template <int kEights, bool kKeysDown>
__device__ __forceinline__ uint32_t kept(const Extras& extras, const RowExtras& head, Block<kKeysDown> block) {
  const int lane = int(lane_index()), down = lane / 4, along = lane % 4 * 2;
  const PhiloxKey key = {uint64_t(extras.key[0]), uint64_t(extras.key[1])};
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kEights; ++n) {
    const int i = block.query + (kKeysDown ? 8 * n + lane % 8 : lane % 16);
    const int j = block.key + (kKeysDown ? lane / 8 * 4 : 8 * n + lane / 16 * 4);
    const uint32_t mine = kept_four(extras, head, key, i, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = down + e / 2 * 8, column = along + e % 2;
      const uint32_t theirs = __shfl_sync(kFullMask, mine, kKeysDown ? column + row / 4 * 8 : row + column / 4 * 16);
      bits |= (theirs >> ((kKeysDown ? row : column) % 4) & 1) << (4 * n + e);
    }
  }
  return bits;
}

// --- host -------------------------------------------------------------------------------------------------------------

// run.call<T, kWidth>() for the element type and the least width of tiles that holds the head dim.
template <class Run> inline auto for_type_and_width(const AttentionArgs& a, const Run& run) {
  const bool is_bf16 = a.dtype == SHARDLIB_BF16;
  if (a.head_dim <= 64) return is_bf16 ? run.template call<bf16, 64>() : run.template call<fp16, 64>();
  if (a.head_dim <= 128) return is_bf16 ? run.template call<bf16, 128>() : run.template call<fp16, 128>();
  return is_bf16 ? run.template call<bf16, 256>() : run.template call<fp16, 256>();
}

}  // namespace shardlib::sm80
