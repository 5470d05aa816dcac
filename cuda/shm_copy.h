// Strided pieces of tensors as streams of bytes: the data that a member sends, and the targets of what it receives.
//
// piece    a strided block of one tensor, in row-major order: rows of `run` bytes, at offsets by `size` and `stride`
// stream   a sequence of pieces; each starts at a multiple of kLine, the bytes in the gaps are undefined
// [a, b)   an interval of a stream; `pack` copies it to flat memory, `unpack` back
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shm {

constexpr size_t kLine = 64;  // bytes of a cache line
constexpr int kDims = 8;      // of a piece, after dims that lie together in memory are one

struct Piece {
    int tensor;  // index into the pointers that a call brings
    int dtype;   // see shm_reduce.h; no matter in copies
    size_t start, bytes;  // its interval of the stream
    size_t offset;        // of its first byte in the tensor
    size_t run;
    int dims;
    int64_t size[kDims];    // outermost first
    int64_t stride[kDims];  // bytes

    bool contiguous() const { return dims == 0; }
};

using Stream = std::vector<Piece>;

// Copy past the caches: for results that are larger than the caches and are read only when they are complete.
inline void stream_copy(char* to, const char* from, size_t n) {
#if defined(__SSE2__)
    size_t head = std::min(n, (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16);
    std::memcpy(to, from, head);
    size_t i = head;
    for (; i + 64 <= n; i += 64) {
        __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 16));
        __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 32));
        __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 48));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), a);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + 16), b);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + 32), c);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + 48), d);
    }
    std::memcpy(to + i, from + i, n - i);
#else
    std::memcpy(to, from, n);
#endif
}

// Streaming stores are weakly ordered: this comes before whatever tells others that they are done.
inline void stream_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

constexpr size_t kStreamed = 1024;  // rows shorter than this gain nothing from streaming stores

template <size_t N, bool Pack>
inline void move_fixed(char* rows, int64_t stride, char* flat, size_t count) {
    for (size_t r = 0; r < count; ++r, rows += stride, flat += N)
        Pack ? std::memcpy(flat, rows, N) : std::memcpy(rows, flat, N);
}

// `count` whole rows, `stride` bytes apart, to or from flat memory.
template <bool Pack>
inline void move_rows(char* rows, int64_t stride, char* flat, size_t run, size_t count, bool past_caches) {
    switch (run) {
        case 1: return move_fixed<1, Pack>(rows, stride, flat, count);
        case 2: return move_fixed<2, Pack>(rows, stride, flat, count);
        case 4: return move_fixed<4, Pack>(rows, stride, flat, count);
        case 8: return move_fixed<8, Pack>(rows, stride, flat, count);
        case 16: return move_fixed<16, Pack>(rows, stride, flat, count);
    }
    for (size_t r = 0; r < count; ++r, rows += stride, flat += run) {
        if (Pack) std::memcpy(flat, rows, run);
        else if (past_caches && run >= kStreamed) stream_copy(rows, flat, run);
        else std::memcpy(rows, flat, run);
    }
}

// Bytes [from, to) of a piece, in its row-major order, to or from flat memory.
template <bool Pack>
inline void move_piece(const Piece& p, char* tensor, size_t from, size_t to, char* flat, bool past_caches) {
    char* base = tensor + p.offset;
    if (p.dims == 0) return move_rows<Pack>(base + from, 0, flat, to - from, 1, past_caches);
    int64_t index[kDims];
    size_t row = from / p.run, skip = from % p.run;
    for (int d = p.dims - 1; d >= 0; --d) {
        index[d] = static_cast<int64_t>(row % p.size[d]);
        row /= p.size[d];
    }
    const int last = p.dims - 1;
    while (from < to) {
        char* at = base;
        for (int d = 0; d < p.dims; ++d) at += index[d] * p.stride[d];
        size_t moved, rows = 1;
        if (skip || to - from < p.run) {  // the interval begins or ends inside this row
            moved = std::min(p.run - skip, to - from);
            move_rows<Pack>(at + skip, 0, flat, moved, 1, past_caches);
            skip = 0;
        } else {
            rows = std::min<size_t>(p.size[last] - index[last], (to - from) / p.run);
            moved = rows * p.run;
            move_rows<Pack>(at, p.stride[last], flat, p.run, rows, past_caches);
        }
        from += moved;
        flat += moved;
        index[last] += static_cast<int64_t>(rows);
        for (int d = last; d > 0 && index[d] == p.size[d]; --d) {
            index[d] = 0;
            ++index[d - 1];
        }
    }
}

// Calls visit(piece, from, to, flat) for the part [from, to) of every piece that lies in the stream's [a, b).
template <class Visit>
inline void each_part(const Stream& stream, size_t a, size_t b, char* flat, Visit visit) {
    for (const Piece& p : stream) {
        if (p.start >= b) break;
        size_t from = std::max(a, p.start), to = std::min(b, p.start + p.bytes);
        if (from < to) visit(p, from - p.start, to - p.start, flat + (from - a));
    }
}

inline void pack(const Stream& s, char* const* tensors, size_t a, size_t b, char* flat) {
    each_part(s, a, b, flat, [&](const Piece& p, size_t from, size_t to, char* at) {
        move_piece<true>(p, tensors[p.tensor], from, to, at, false);
    });
}

inline void unpack(const Stream& s, char* const* tensors, size_t a, size_t b, const char* flat, bool past_caches) {
    each_part(s, a, b, const_cast<char*>(flat), [&](const Piece& p, size_t from, size_t to, char* at) {
        move_piece<false>(p, tensors[p.tensor], from, to, at, past_caches);
    });
}

}  // namespace shm
