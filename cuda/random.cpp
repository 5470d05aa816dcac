// Random numbers for a part of a tensor, drawn from the place of every element in the whole: ops/random/philox.py, on the CPU.
//
//   index     row-major place in the whole tensor
//   block     four words of 32 bits: Philox4x32-10 of a number, keyed by seed and counter
//   single    what takes 32 bits: word index & 3 of block index >> 2
//   double    what takes 64 bits: words 2 (index & 1) and the next, low one first, of block index >> 1
//
// Every value is made of additions, multiplications, divisions and square roots, each rounded by itself (build/build_recipe.py
// forbids fused ones), so that it depends neither on the width of vectors nor on where a row begins, and so that
// ops/random/distributions.py finds the same bits with torch. A change here is a change there.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Compiled for the widest vectors of the machine at hand, too.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif
#define INLINE inline __attribute__((always_inline))  // a function takes over the instructions of the one it is in

constexpr int BLOCKS = 64;  // at most, drawn together: word w of block b is words[w][b]
using Words = uint32_t[4][BLOCKS];

struct Draw {
  uint64_t seed, counter;
  uint64_t p;  // bernoulli: ones have words below it; uniform: binary digits of a number
};

INLINE void philox(const Draw& draw, uint64_t first, int n, Words& c) {
  for (int b = 0; b < n; ++b) {
    const uint64_t block = first + b;
    c[0][b] = uint32_t(block), c[1][b] = uint32_t(block >> 32);
    c[2][b] = uint32_t(draw.counter), c[3][b] = uint32_t(draw.counter >> 32);
  }
  uint32_t k0 = uint32_t(draw.seed), k1 = uint32_t(draw.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int b = 0; b < n; ++b) {
      const uint64_t p0 = uint64_t(c[0][b]) * 0xD2511F53u, p1 = uint64_t(c[2][b]) * 0xCD9E8D57u;
      const uint32_t x = c[1][b], y = c[3][b];
      c[0][b] = uint32_t(p1 >> 32) ^ x ^ k0, c[1][b] = uint32_t(p1);
      c[2][b] = uint32_t(p0 >> 32) ^ y ^ k1, c[3][b] = uint32_t(p0);
    }
}

// --- arithmetic on single and double numbers --------------------------------------------------------------------------

struct Single {
  using F = float;
  using I = int32_t;
  using U = uint32_t;
  static constexpr int bits = 32, digits = 24, log_terms = 4, sine_terms = 4, angle = 32, open = 31;
  static constexpr I root_half = 0x3F3504F3;  // the bits of sqrt(1/2)
  static INLINE F value(I n) { return float(n); }
};

struct Double {
  using F = double;
  using I = int64_t;
  using U = uint64_t;
  static constexpr int bits = 64, digits = 53, log_terms = 10, sine_terms = 8, angle = 55, open = 53;
  static constexpr I root_half = 0x3FE6A09E667F3BCD;
  // Of at most 53 bits, by exact steps: few processors convert vectors of 64-bit integers.
  static INLINE F value(I n) {
    return double(int32_t(n >> 32)) * 4294967296.0 + (double(int32_t(uint32_t(n) >> 1)) * 2.0 + double(int32_t(n & 1)));
  }
};

template <class T>
constexpr typename T::F power(int n) {  // of two; -63 to 0
  return typename T::F(1) / typename T::F(uint64_t(1) << -n);
}

template <class T>
INLINE typename T::F uniform(typename T::U w, int digits) {
  return T::value(typename T::I(w >> (T::bits - digits))) * (typename T::F(1) / T::value(typename T::I(1) << digits));
}

// -log(u) for u uniform between 0 and 1. With u = 2^e m, m from sqrt(1/2) to sqrt(2), log m is 2 artanh(s) by its
// series in s = (m - 1) / (m + 1). Never 0: where u is rounded to 1, the middle of what it stands for.
template <class T>
INLINE typename T::F exponential(typename T::U w) {
  using F = typename T::F;
  const F u = (T::value(typename T::I(w >> (T::bits - T::open))) + F(0.5)) * power<T>(-T::open);
  typename T::I i;
  std::memcpy(&i, &u, sizeof i);
  const typename T::I e = (i - T::root_half) >> (T::digits - 1);
  i -= e * (typename T::I(1) << (T::digits - 1));
  F m;
  std::memcpy(&m, &i, sizeof m);
  const F s = (m - F(1)) / (m + F(1)), z = s * s;
  F sum = F(1.0 / (2 * T::log_terms + 1));
  for (int k = T::log_terms - 1; k >= 0; --k) sum = sum * z + F(1.0 / (2 * k + 1));
  const F minus_log = F(int32_t(e)) * F(-0.6931471805599453) - (s + s) * sum;
  return std::max(minus_log, power<T>(-1 - T::digits));
}

template <class F>
struct Turn {
  F sine, cosine;
};

// Sine and cosine of the angle 2 pi w / 2^bits: quarter turns, and at most an eighth of one on either side.
template <class T>
INLINE Turn<typename T::F> turn(typename T::U w) {
  using F = typename T::F;
  using U = typename T::U;
  const U quarters = (w + (U(1) << (T::bits - 3))) >> (T::bits - 2);
  const typename T::I rest = typename T::I(w - (quarters << (T::bits - 2)));
  const F whole = F(6.283185307179586) * power<T>(-T::angle);
  const F x = (T::value(rest >> (T::bits - T::angle)) + F(0.5)) * whole, z = x * x;
  F sine = F(1), cosine = F(1);  // 1 - z / 6 (1 - z / 20 (...)) and 1 - z / 2 (1 - z / 12 (...))
  for (int k = T::sine_terms; k > 0; --k) {
    sine = F(1) - z * F(1.0 / (2 * k * (2 * k + 1))) * sine;
    cosine = F(1) - z * F(1.0 / (2 * k * (2 * k - 1))) * cosine;
  }
  sine = sine * x;
  const bool odd = quarters & 1;
  const F a = odd ? cosine : sine, b = odd ? sine : cosine;
  return {quarters & 2 ? -a : a, (quarters + 1) & 2 ? -b : b};
}

// --- kinds ------------------------------------------------------------------------------------------------------------

enum Kind { WORD, LONG, BERNOULLI, UNIFORM, NORMAL, EXPONENTIAL, CAUCHY };
enum Type { BYTE, INT64, FLOAT, DOUBLE };

template <class T>
INLINE typename T::U number(const Words& c, int b, int k) {
  if constexpr (T::bits == 32) return c[k][b];
  else return uint64_t(c[2 * k + 1][b]) << 32 | c[2 * k][b];
}

template <class T, int kind, class Out>
INLINE Out value(typename T::U w, const Draw& draw) {
  if constexpr (kind == WORD) return Out(w);
  else if constexpr (kind == LONG) return Out(w >> 1);
  else if constexpr (kind == BERNOULLI) return Out(w < draw.p);
  else if constexpr (kind == UNIFORM) return uniform<T>(w, int(draw.p));
  else if constexpr (kind == EXPONENTIAL) return exponential<T>(w);
  else {  // the tangent of half the angle that a uniform number is: it repeats after half a turn
    const Turn<typename T::F> t = turn<T>(w >> 1);
    return t.sine / t.cosine;
  }
}

template <class T, int kind, class Out>
INLINE void convert(const Draw& draw, const Words& c, int n, Out* out) {
  constexpr int per_block = 128 / T::bits;
  if constexpr (kind == NORMAL) {  // Box and Muller (1958): neighbors share a radius
    for (int k = 0; k < per_block; k += 2)
      for (int b = 0; b < n; ++b) {
        const typename T::F e = exponential<T>(number<T>(c, b, k)), radius = std::sqrt(e + e);
        const Turn<typename T::F> t = turn<T>(number<T>(c, b, k + 1));
        out[b * per_block + k] = radius * t.cosine, out[b * per_block + k + 1] = radius * t.sine;
      }
  } else {
    for (int b = 0; b < n; ++b)
      for (int k = 0; k < per_block; ++k) out[b * per_block + k] = value<T, kind, Out>(number<T>(c, b, k), draw);
  }
}

// The elements of n blocks. One function for everything, since templates have no clones.
WIDE void blocks(int kind, int type, const Draw& draw, uint64_t first, int n, void* out) {
  Words c;
  philox(draw, first, n, c);
  const auto f = static_cast<float*>(out);
  const auto d = static_cast<double*>(out);
  const auto l = static_cast<int64_t*>(out);
  switch (kind) {
    case WORD: return convert<Single, WORD>(draw, c, n, l);
    case LONG: return convert<Double, LONG>(draw, c, n, l);
    case BERNOULLI:
      if (type == BYTE) return convert<Single, BERNOULLI>(draw, c, n, static_cast<uint8_t*>(out));
      if (type == FLOAT) return convert<Single, BERNOULLI>(draw, c, n, f);
      return convert<Single, BERNOULLI>(draw, c, n, d);
    case UNIFORM:
      return type == FLOAT ? convert<Single, UNIFORM>(draw, c, n, f) : convert<Double, UNIFORM>(draw, c, n, d);
    case NORMAL:
      return type == FLOAT ? convert<Single, NORMAL>(draw, c, n, f) : convert<Double, NORMAL>(draw, c, n, d);
    case EXPONENTIAL:
      return type == FLOAT ? convert<Single, EXPONENTIAL>(draw, c, n, f) : convert<Double, EXPONENTIAL>(draw, c, n, d);
    case CAUCHY:
      return type == FLOAT ? convert<Single, CAUCHY>(draw, c, n, f) : convert<Double, CAUCHY>(draw, c, n, d);
  }
}

// The elements start to start + n - 1 of the whole.
void row(int kind, int type, const Draw& draw, uint64_t start, int64_t n, char* out) {
  constexpr int size_of[] = {1, 8, 4, 8};
  const int size = size_of[type], per_block = kind == LONG || (type == DOUBLE && kind != BERNOULLI) ? 2 : 4;
  alignas(64) double aside[BLOCKS * 4];
  while (n > 0) {
    const int skip = int(start % per_block);
    const int64_t have = std::min<int64_t>(n, int64_t(BLOCKS) * per_block - skip);
    const int count = int((skip + have + per_block - 1) / per_block);
    const bool exact = !skip && have == int64_t(count) * per_block;
    blocks(kind, type, draw, start / per_block, count, exact ? static_cast<void*>(out) : aside);
    if (!exact) std::memcpy(out, reinterpret_cast<char*>(aside) + skip * size, have * size);
    start += have, n -= have, out += have * size;
  }
}

}  // namespace

// Fills `out`, contiguous of shape size[0..rank), with the elements that begin at first[0..rank) of a tensor of shape
// whole[0..rank); `kind` and `type` are the enums above. The caller sees to it that the part lies in the whole.
extern "C" void shardlib_random(int kind, int type, uint64_t seed, uint64_t counter, uint64_t p, int rank,
                                const int64_t* size, const int64_t* first, const int64_t* whole, void* out) {
  constexpr int64_t size_of[] = {1, 8, 4, 8};
  const Draw draw{seed, counter, p};
  int64_t rows = 1, length = 1;
  int outer = rank;  // dims from here on are one row: whole, but for the first of them
  for (bool all = true; outer > 0 && all; --outer) {
    length *= size[outer - 1];
    all = size[outer - 1] == whole[outer - 1];
  }
  for (int d = 0; d < outer; ++d) rows *= size[d];
  for (int64_t r = 0; r < rows && length; ++r) {
    uint64_t start = 0, stride = 1;
    int64_t rest = r;
    for (int d = rank - 1; d >= 0; --d) {
      const int64_t at = d < outer ? rest % size[d] : 0;
      if (d < outer) rest /= size[d];
      start += uint64_t(first[d] + at) * stride, stride *= uint64_t(whole[d]);
    }
    row(kind, type, draw, start, length, static_cast<char*>(out) + r * length * size_of[type]);
  }
}
