// The engine's CPU kernels: quantised products, norms, gates, rotary embedding and paged attention.
//
// No torch, no Python: arrays in, arrays out. Compiled once per instruction set (KAGARI_ISA: 0 any
// x86-64, 1 AVX2, 2 AVX-512, 3 with bf16, 4 with AMX); host.cpp picks one and has the threads. Sums
// run in one order whatever the batch, the tile or the number of threads, so a row's bits are its
// own; products and sums are fused only where `fma` says so.

#include "abi.h"

#include <immintrin.h>
#include <type_traits>
#include <utility>
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own header (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace {

// --- vectors of 16 lanes: one register or several, as the CPU has them ---------------------------

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));

#if KAGARI_ISA >= 2
#define WIDE(name) _mm512_##name
typedef __m512 Register;
#elif KAGARI_ISA == 1
#define WIDE(name) _mm256_##name
typedef __m256 Register;
#else
#define WIDE(name) _mm_##name
typedef __m128 Register;
#endif
constexpr int REGISTERS = sizeof(Floats) / sizeof(Register);

constexpr int LANES = 16 / REGISTERS;  // of one register
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t LaneInts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Lanes& lanes(float* at) { return *reinterpret_cast<Lanes*>(at); }
inline const Lanes& lanes(const float* at) { return *reinterpret_cast<const Lanes*>(at); }

inline Floats splat(float v) { return v - Floats{}; }
inline Lanes spread(float v) { return v - Lanes{}; }

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }

inline Floats load(const float* at, int lanes, Floats rest = splat(0)) {  // rest: the other lanes
  if (lanes == 16) return load(at);
  memcpy(&rest, at, lanes * sizeof(float));
  return rest;
}

inline void store(float* at, Floats value, int lanes = 16) {
  if (lanes == 16) *reinterpret_cast<Floats*>(at) = value;
  else memcpy(at, &value, lanes * sizeof(float));
}

template <class Vector>
union Registers { Vector whole; Register part[sizeof(Vector) / sizeof(Register)]; };

template <class Vector, class B, class C>
inline Vector fma(Vector a, B b, C c) {  // fused where the set can; b, c: vectors or numbers
#if KAGARI_ISA > 0
  Registers<Vector> x{a}, y{b - Vector{}}, z{c - Vector{}};
  for (unsigned i = 0; i < sizeof a / sizeof(Register); i++)
    z.part[i] = WIDE(fmadd_ps)(x.part[i], y.part[i], z.part[i]);
  return z.whole;
#else
  return a * b + c;
#endif
}

template <class Vector>
inline Vector larger(Vector a, Vector b) {  // b if one is not a number
  Registers<Vector> x{a}, y{b};
  for (unsigned i = 0; i < sizeof a / sizeof(Register); i++)
    x.part[i] = WIDE(max_ps)(x.part[i], y.part[i]);
  return x.whole;
}

template <int d, class Vector, int... i>
inline Vector exchange(Vector v, std::integer_sequence<int, i...>) {  // lane i gets lane i ^ d
  return __builtin_shufflevector(v, v, (i ^ d)...);
}

template <class Vector>
struct Half {  // of its lanes
  typedef std::remove_reference_t<decltype(std::declval<Vector&>()[0])> Lane;
  typedef Lane Type __attribute__((vector_size(sizeof(Vector) / 2)));
};

template <class Vector, class Of, int d = sizeof(Vector) / 8>
inline auto fold(Vector v, const Of& of) {  // all lanes to one: halves, then theirs, and so on
  if constexpr (sizeof(Vector) > sizeof(Register)) {  // compilers shuffle those lane by lane
    union { Vector whole; typename Half<Vector>::Type half[2]; } x{v};
    return fold(of(x.half[0], x.half[1]), of);
  }
  v = of(v, exchange<d>(v, std::make_integer_sequence<int, sizeof(Vector) / 4>()));
  if constexpr (d > 1) return fold<Vector, Of, d / 2>(v, of);
  else return v[0];
}

template <class Vector>
inline auto sum(Vector v) { return fold(v, [](auto a, auto b) { return a + b; }); }

template <class Vector>
inline float highest(Vector v) {
  return fold(v, [](auto a, auto b) { return larger(a, b); });
}

// 2^x for x up to 127, 0 below 2^-126.5; reduction to |r| ≤ 1/2 and polynomial of Cephes' exp2f.
template <class Vector>
inline Vector power_of_two(Vector x) {
  const float magic = 12582912.0f + 127.0f;  // 1.5 × 2^23: rounds; 127: the exponent's bias
  const Vector cut = larger(Vector{} - 126.9f, x), shifted = cut + magic;
  const Vector r = cut - (shifted - magic);
  Vector p = fma(r, 1.535336188e-4f, 1.339887440e-3f);
  p = fma(p, r, 9.618437357e-3f);
  p = fma(p, r, 5.550332471e-2f);
  p = fma(p, r, 2.402264791e-1f);
  p = fma(p, r, 6.931472028e-1f);
  p = fma(p, r, 1.0f);
  typedef decltype(x < x) Bits;
  return p * (Vector)((Bits)shifted << 23);
}

// --- tiles: AMX's eight registers of up to 16 rows of 64 bytes -----------------------------------

#if KAGARI_ISA >= 4
// Compilers move memory accesses across their own intrinsics for these (GCC 12), hence the clobbers.
template <int Tile>
inline void clear_tile() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile)); }

template <int Tile>
inline void load_tile(const void* at, int64_t row_bytes) {
  __asm__ volatile("tileloadd (%0,%1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* at, int64_t row_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1)" ::"r"(at), "r"(row_bytes), "i"(Tile) : "memory");
}

// Sum [rows][16] += A [rows][terms] · B [terms][16], a term being two bf16 numbers.
template <int Sum, int A, int B>
inline void add_pairs() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

// As add_pairs, of terms that are four signed bytes, in integers.
template <int Sum, int A, int B>
inline void add_quads() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

// While it lives, from `have` on: the first six, or four, have so many rows, for sums and As; the
// others as many as there are terms, for Bs.
struct alignas(64) Tiles {
  uint8_t palette = 1, rest[15] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
  const int varied;

  explicit Tiles(int terms, int varied = 6) : varied(varied) {
    memset(rows + varied, terms, 8 - varied);
    row_bytes[4] = row_bytes[5] = 4 * terms;
  }
  void have(int count) {  // clears them, if they had not as many rows
    if (count == rows[0]) return;
    memset(rows, count, varied);
    __asm__ volatile("ldtilecfg %0" ::"m"(*this));
  }
  ~Tiles() {  // a thread's switches need not save them
    if (rows[0]) __asm__ volatile("tilerelease");
  }
};
#endif

// --- quantised products --------------------------------------------------------------------------

typedef int8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));
typedef int16_t SixteenWords __attribute__((vector_size(32), aligned(1), may_alias));

constexpr bool HAS_WORDS = KAGARI_ISA < 2;  // Quants of two planes are words, see there

template <class Values>
inline SixteenWords as_words(Values v) {  // of 16
  return __builtin_convertvector(
      __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15),
      SixteenWords);
}
#if KAGARI_ISA == 1  // compilers narrow lane by lane; none is too large
inline __m256i narrowed(Ints v) {
  union { Ints whole; __m256i half[2]; } x{v};
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.half[0], x.half[1]), 0xd8);
}
inline SixteenWords as_words(Ints v) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  return (SixteenWords)_mm256_shuffle_epi8(narrowed(v), _mm256_broadcastsi128_si256(order));
}
inline Sixteen as_bytes(Ints v) {
  const __m256i all = narrowed(v);
  return (Sixteen)_mm_packs_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
#else
inline Sixteen as_bytes(Ints v) { return __builtin_convertvector(v, Sixteen); }
#endif

template <class Integers>
inline Integers larger_of(Integers a, Integers b) {  // neither is below 0
#if KAGARI_ISA > 0
  constexpr int parts = sizeof a / sizeof(Register);
  union { Integers whole; decltype(WIDE(set1_epi32)(0)) part[parts]; } x{a}, y{b};
  for (int i = 0; i < parts; i++) x.part[i] = WIDE(max_epi32)(x.part[i], y.part[i]);
  return x.whole;
#else
  return a - ((a - b) & ((a - b) >> 31));
#endif
}

#if KAGARI_ISA >= 4
constexpr int MIDDLE = 7;  // of 4-bit quants, which are 0 … 15

// A block's planes' sums by -MIDDLE, then in the upper halves of words.
void count_planes(Ints high, Ints low, int32_t* to) {
  const int32_t highs = sum(high), lows = sum(low);
  to[0] = -MIDDLE * highs, to[1] = -MIDDLE * lows;
  to[2] = highs * 65536, to[3] = lows * 65536;
}
#endif

int32_t largest_bits(const float* x, int64_t count) {  // of its sizes; count: a multiple of 32
  Ints largest = {};
  for (int64_t at = 0; at < count; at += 16)
    largest = larger_of(largest, reinterpret_cast<Ints>(load(x + at)) & 0x7fffffff);
  return fold(largest, [](auto a, auto b) { return larger_of(a, b); });
}

// Blocks of 32 share a scale, or the whole row does: largest / 32512 of 16-bit integers split in two
// signed bytes, or largest / 127 where there is no low plane. It is NaN if one is NaN or infinite.
void quantize_row(const float* x, const Quants& quants, int64_t row, int64_t rows) {
  const Quants to = quants.of(rows);
  const float limit = to.low ? 32512 : 127;
  const bool is_whole = to.counts;  // a row, of `amx`
  int32_t bits = is_whole ? largest_bits(x, to.width) : 0;
  for (int64_t at = 0, first = row * to.width; at < to.width; at += 32, first += 32) {
    const Floats halves[2] = {load(x + at), load(x + at + 16)};
    if (!is_whole) bits = largest_bits(x + at, 32);
    float largest;  // by its bits: a NaN is larger than infinity
    memcpy(&largest, &bits, sizeof largest);
    const bool is_sane = bits < 0x7f800000, is_zero = largest < 1e-30f;  // limit / largest: inf
    const float scale = !is_sane ? NAN : is_zero ? 0 : largest / limit;
    Ints values[2], highs = {};
    for (int half = 0; half < 2; half++) {
      const Floats scaled = is_sane && !is_zero ? halves[half] * (limit / largest) : splat(0);
      // Adding 1.5 × 2²³ rounds to the nearest integer, ties to even, in the lowest bits.
      const Ints value = reinterpret_cast<Ints>(scaled + 12582912.f) - 0x4b400000;
      const Ints high = to.low ? (value + 128) >> 8 : value;
      if (HAS_WORDS && to.low) {
        *reinterpret_cast<SixteenWords*>((half ? to.low : to.high) + first) = as_words(value);
      } else {
        *reinterpret_cast<Sixteen*>(to.high + first + half * 16) = as_bytes(high);
        if (to.low)
          *reinterpret_cast<Sixteen*>(to.low + first + half * 16) = as_bytes(value - (high << 8));
      }
      values[half] = value, highs += high;
    }
#if KAGARI_ISA >= 4
    if (to.counts) count_planes(highs, values[0] + values[1] - (highs << 8), to.counts + first / 8);
#endif
#if KAGARI_ISA >= 2
    Ints sums = __builtin_shufflevector(values[0], values[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                        20, 21, 22, 23) +
                __builtin_shufflevector(values[0], values[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
                                        26, 27, 28, 29, 30, 31);
    const std::make_integer_sequence<int, 16> all;
    sums += exchange<4>(sums, all);
    sums += exchange<2>(sums, all);
    const int32_t both[2] = {sums[0] + sums[1], sums[8] + sums[9]};
#else
    const int32_t both[2] = {sum(values[0]), sum(values[1])};
#endif
    to.scales[first / 32] = scale;
    to.sums[first / 16] = (both[0] + both[1]) * scale;
    to.sums[first / 16 + 1] = both[1] * scale;
  }
}

template <class Sum>
inline Sum in_order(Sum sum) {  // else compilers reorder sums, for which registers lack then
#if KAGARI_ISA < 2
  __asm__("" : "+x"(sum));
#endif
  return sum;
}

// A tile is 16 outputs: in one register or several, as the instruction set has them.

inline LaneInts all_four(const int8_t* at) {
  int32_t bytes;
  memcpy(&bytes, at, sizeof bytes);
  return (LaneInts)WIDE(set1_epi32)(bytes);
}

inline Lanes number(const uint8_t* at, int part, bool wide) {  // a part of 16 fp32 or fp16
  if (wide) return reinterpret_cast<const Lanes*>(at)[part];
#if KAGARI_ISA >= 2
  return (Lanes)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)at));
#elif KAGARI_ISA == 1
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + part));
#else
  uint16_t half[4];
  memcpy(half, at + 8 * part, sizeof half);
  return Lanes{from_half(half[0]), from_half(half[1]), from_half(half[2]), from_half(half[3])};
#endif
}

#if KAGARI_ISA >= 2
inline LaneInts dot(LaneInts sum, LaneInts weights, LaneInts by) {  // four products in each lane
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(by));
  return sum;
}
#else
typedef decltype(WIDE(set1_epi32)(0)) Words;  // two in a lane
inline LaneInts dot(LaneInts sum, Words weights, Words by) {  // two products in each lane
  return in_order(sum + (LaneInts)WIDE(madd_epi16)(weights, by));
}
inline Words even(LaneInts bytes) { return (Words)bytes & WIDE(set1_epi16)(255); }
inline Words odd(LaneInts bytes) { return WIDE(srli_epi16)((Words)bytes, 8); }
#endif

constexpr int PANEL_ROWS = 6;  // so many are only multiplied by a panel, never as packed
constexpr int MOST_ROWS = KAGARI_ISA >= 1 ? PANEL_ROWS : 2;  // held by registers
constexpr int FEW_ROWS = KAGARI_ISA >= 1 ? 4 : 2;   // or by tiles as they are packed
constexpr int GROUP_ROWS = 132, PANEL_BLOCKS = 24;   // rows, and blocks of inputs, of a panel
constexpr int DIRECT_ROWS = 11;  // more are worth a panel

template <int Rows>
constexpr int TILES = HAS_WORDS || Rows == 1 ? 1 : 2;  // taken together

enum Form { NIBBLES, BYTES, WORDS };  // of a run's quants: as packed in 4 or 8 bits, or widened
constexpr Form WIDENED = HAS_WORDS ? WORDS : BYTES;
constexpr int quant_bytes(int form) { return 256 << form; }

struct alignas(64) Panel {  // stays in the first level cache
  uint8_t runs[2][PANEL_BLOCKS][quant_bytes(WIDENED) + 256];  // of two tiles, with fp32
  float spare[GROUP_ROWS][2][16];  // for products not all of which are wanted
};

struct Runs {  // of two tiles, from their block `first` on
  const uint8_t* at[2];
  int64_t step;            // bytes from a block to the next
  const uint8_t* next[2];  // may be fetched meanwhile
  const float* bias;       // [2][16]: where sums begin
  Form form;
  int32_t first, blocks, wide, has_min;
  bool is_halved, is_raw;  // 16 inputs share a scale; as packed: 8-bit quants are stored + 128
};

// Rewrites runs so that many rows unpack them once, numbers as fp32; 8-bit quants, which are
// stored + 128, get minima that make up for it. The second of two minima becomes a difference.
void widen(const Packed& weight, const uint8_t* run, int blocks, Form form, uint8_t* to,
           int64_t step) {
  const Packed from = weight;  // what is written cannot change it
  const int scales = 32 / from.block * REGISTERS, size = from.wide ? 64 : 32;
  for (int b = 0; b < blocks; b++, run += run_bytes(from), to += step) {
    const auto put = [&](int at, LaneInts quads) {
#if KAGARI_ISA < 2
      Words* const words = reinterpret_cast<Words*>(to + at / 64 * 128 + at % 64);
      if (form == WORDS) words[0] = even(quads), words[64 / sizeof(Words)] = odd(quads);
      else
#endif
        *reinterpret_cast<LaneInts*>(to + at) = quads;
    };
    for (int i = 0; i < 64 * from.bits; i += sizeof(LaneInts)) {
      const LaneInts quads = *reinterpret_cast<const LaneInts*>(run + i);
      if (from.bits == 8) put(i, quads);
      else put(i, quads & 0x0f0f0f0f), put(i + 256, (quads >> 4) & 0x0f0f0f0f);
    }
    const auto number_at = [&](int i) {
      return number(run + 64 * from.bits + i / REGISTERS * size, i % REGISTERS, from.wide);
    };
    Lanes* numbers = reinterpret_cast<Lanes*>(to + quant_bytes(form));
    for (int i = 0; i < scales; i++) {
      const Lanes scale = numbers[i] = number_at(i);
      const Lanes minimum = from.has_min ? number_at(scales + i) : Lanes{};
      numbers[scales + i] = from.bits == 8 ? fma(scale, -128.0f, minimum) : minimum;
    }
    for (int i = REGISTERS; i < scales; i++) numbers[scales + i] -= numbers[scales + i - REGISTERS];
  }
}

#define EACH_VECTOR(...)                                 \
  _Pragma("GCC unroll 8") for (int r = 0; r < Rows; r++) \
  _Pragma("GCC unroll 8") for (int v = 0; v < Vectors; v++) __VA_ARGS__

struct Sums {  // [rows][32] floats of two tiles
  float* data;
  int64_t stride;
};

#if KAGARI_ISA < 2
constexpr bool IS_QUICK = KAGARI_ISA == 1;  // one plane is multiplied as bytes by 4-bit quants

inline Words quick_dot(Words sum, LaneInts weights, LaneInts by) {  // a block's fit into words
#if KAGARI_ISA == 1
  return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16((Words)weights, (Words)by)));
#else
  return sum;
#endif
}
#else
constexpr bool IS_QUICK = false;
#endif

// Adds to sums[r] the products of row + r with the runs of that tile, or of both tiles. Meanwhile
// `fetch` bytes of the next runs come for each block. A block's integers are summed exactly; what
// is known at compile time (Parts: a block's scales; Quick: see IS_QUICK) keeps all in registers.
template <int Rows, Form By, int Parts, bool Quick>
__attribute__((noinline))  // alone it gets the registers it needs
void multiply(const Runs& from, int64_t fetch, int tile, const Quants& in, int64_t row, Sums to) {
  constexpr int Tiles = TILES<Rows>, Vectors = Tiles * REGISTERS, Quads = 8 / Parts;
  const Runs runs = from;
  const bool wide = Rows == PANEL_ROWS || runs.wide;
  const bool has_min = Rows == PANEL_ROWS || runs.has_min;
  const int size = wide ? 64 : 32;
  const int64_t width = in.width, first = row * width + runs.first * 32;
  const int64_t step = Rows == PANEL_ROWS ? sizeof(Panel::runs[0][0]) : runs.step;
  const int8_t *high = in.high + first, *low = in.low ? in.low + first : nullptr;
  const float *scales = in.scales + first / 32, *inputs = in.sums + first / 16;
  const uint8_t* at[2] = {runs.at[tile], runs.at[1]};
  Lanes result[Rows][Vectors];
  EACH_VECTOR(result[r][v] = lanes((runs.first ? to.data + r * to.stride : runs.bias) +
                                   tile * 16 + v * LANES));
  for (int64_t b = 0; b < runs.blocks; b++, at[0] += step, at[1] += step) {
    for (int64_t i = 0; i < fetch; i += 64)
      for (int t = 0; t < Tiles; t++)
        __builtin_prefetch(runs.next[tile + t] + b * fetch + i);
    const auto quads = [&](int i, int v) {  // four inputs of each output
      const uint8_t* const quad = at[v / REGISTERS] + 64 * (By == NIBBLES ? i % 4 : i);
      const LaneInts both = reinterpret_cast<const LaneInts*>(quad)[v % REGISTERS];
      return By == NIBBLES ? (both >> (i / 4 * 4)) & 0x0f0f0f0f : both;
    };
#if KAGARI_ISA < 2
    const int8_t* halves[2] = {high + b * 32, (low ? low : high) + b * 32};  // words of 16 inputs
    int64_t stride = width;
    SixteenWords widened[Rows][2];
    if (!low && !Quick) {
      for (int i = 0; i < 2 * Rows; i++)
        widened[i / 2][i % 2] = as_words(
            *reinterpret_cast<const Sixteen*>(halves[0] + i / 2 * width + i % 2 * 16));
      for (int i = 0; i < 2; i++) halves[i] = reinterpret_cast<int8_t*>(&widened[0][i]);
      stride = sizeof widened[0];
    }
#endif
#pragma GCC unroll 2
    for (int part = 0; part < Parts; part++) {
      LaneInts dots[Rows][Vectors] = {};
#if KAGARI_ISA >= 2
      constexpr bool Apart = Rows < PANEL_ROWS;  // few rows: each plane has a chain
      LaneInts lows[Rows][Vectors] = {};
#pragma GCC unroll 2
      for (int plane = 0; plane < 2; plane++) {  // one after the other
        if (plane && !low) continue;
        if (plane && !Apart) EACH_VECTOR(dots[r][v] <<= 8);
#pragma GCC unroll 8
        for (int i = Quads * part; i < Quads * (part + 1); i++) {
          __asm__ volatile("" ::: "memory");  // else later loads come early, and results spill
          EACH_VECTOR({
            const LaneInts weights = quads(i, v);
            const LaneInts by = all_four((plane ? low : high) + r * width + b * 32 + i * 4);
            LaneInts& sum = plane && Apart ? lows[r][v] : dots[r][v];
            sum = dot(sum, weights, by);
          });
        }
      }
      if (Apart && low) EACH_VECTOR(dots[r][v] = (dots[r][v] << 8) + lows[r][v]);
#else
      Words sums[Rows][Vectors] = {};
#pragma GCC unroll 8
      for (int i = Quads * part; i < Quads * (part + 1); i++) {
        if (Quick) {
          __asm__ volatile("" ::: "memory");
          EACH_VECTOR(sums[r][v] = quick_dot(sums[r][v], quads(i, v),
                                             all_four(high + r * width + b * 32 + i * 4)));
          continue;
        }
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
          __asm__ volatile("" ::: "memory");
          EACH_VECTOR({
            const uint8_t* const words = at[0] + 128 * i + 64 * side;
            const Words weights = By == WORDS ? reinterpret_cast<const Words*>(words)[v]
                                  : side ? odd(quads(i, v)) : even(quads(i, v));
            const int8_t* const by = halves[i / 4] + r * stride + i % 4 * 8 + side * 4;
            dots[r][v] = dot(dots[r][v], weights, (Words)all_four(by));
          });
        }
      }
      if (Quick) EACH_VECTOR(dots[r][v] = dot(dots[r][v], sums[r][v], WIDE(set1_epi16)(1)));
#endif
      const int scale_at = quant_bytes(By) + part * size, minimum_at = scale_at + Parts * size;
      EACH_VECTOR({
        const Lanes scale = number(at[v / REGISTERS] + scale_at, v % REGISTERS, wide);
        result[r][v] = fma(__builtin_convertvector(dots[r][v], Lanes),
                           scale * scales[r * (width / 32) + b], result[r][v]);
      });
      if (By != NIBBLES || has_min) EACH_VECTOR({
        const auto minimum_of = [&](int back) {  // of this part, or of the one before
          const uint8_t* numbers = at[v / REGISTERS] - back * size;
          Lanes minimum = {};
          if (By == NIBBLES || has_min) minimum = number(numbers + minimum_at, v % REGISTERS, wide);
          if (By == BYTES && Rows < PANEL_ROWS && runs.is_raw)
            minimum = fma(number(numbers + scale_at, v % REGISTERS, wide), -128.0f, minimum);
          return minimum;
        };
        Lanes minimum = minimum_of(0);
        if (part && Rows < PANEL_ROWS && runs.is_raw) minimum -= minimum_of(1);
        result[r][v] = fma(minimum, inputs[r * (width / 16) + 2 * b + part], result[r][v]);
      });
    }
  }
  EACH_VECTOR(lanes(to.data + r * to.stride + tile * 16 + v * LANES) = result[r][v]);
}

template <int Rows, Form By, bool Quick = false>
void multiply_rows(const Runs& runs, int64_t fetch, const Quants& in, int64_t row, Sums to) {
  const auto by_runs = runs.is_halved ? multiply<Rows, By, 2, Quick> : multiply<Rows, By, 1, Quick>;
  for (int tile = 0; tile < 2; tile += TILES<Rows>)
    by_runs(runs, fetch, tile, in, row, to);
}

template <int Rows>
void multiply_rows(const Runs& runs, int64_t fetch, bool is_quick, const Quants& in, int64_t row,
                   Sums to) {
  constexpr bool Widened = Rows == PANEL_ROWS;  // always
  const auto by_form =
      is_quick ? (Widened || runs.form == BYTES ? multiply_rows<Rows, BYTES, IS_QUICK>
                                                : multiply_rows<Rows, NIBBLES, IS_QUICK>)
      : Widened || runs.form == WIDENED ? multiply_rows<Rows, WIDENED>
      : runs.form == NIBBLES ? multiply_rows<Rows, Widened ? WIDENED : NIBBLES>
                             : multiply_rows<Rows, Widened ? WIDENED : BYTES>;
  by_form(runs, fetch, in, row, to);
}

// Rows [row, row + count) by a pair of tiles; an odd last one is taken twice. `next`: the pair that
// this thread is likely to take then.
void multiply_pair(const Gemm& gemm, int64_t pair, int64_t next, int64_t row, int count) {
  const Packed& weight = *gemm.weight;
  const int64_t blocks = weight.k / 32, bytes = run_bytes(weight), tile = pair * 2;
  const bool widens = count > DIRECT_ROWS;
  const bool is_quick = IS_QUICK && !gemm.in->low && weight.bits == 4;
  const int64_t column = tile * 16, left = gemm.columns - column, columns = left < 32 ? left : 32;
  float bias[32] = {};
  if (gemm.bias) memcpy(bias, gemm.bias + column, columns * sizeof(float));
  Panel panel;
  float* const out = gemm.out + row * gemm.stride + column;
  const Sums sums = columns == 32 ? Sums{out, gemm.stride} : Sums{panel.spare[0][0], 32};
  Runs runs{};
  runs.bias = bias;
  runs.step = widens ? sizeof panel.runs[0][0] : bytes;
  runs.form = !widens ? (weight.bits == 4 ? NIBBLES : BYTES) : is_quick ? BYTES : WIDENED;
  runs.wide = widens || weight.wide;
  runs.has_min = widens || weight.has_min;
  runs.is_halved = weight.block == 16;
  runs.is_raw = !widens;
  for (int64_t block = 0; block < blocks; block += PANEL_BLOCKS) {
    runs.first = block;
    runs.blocks = blocks - block < PANEL_BLOCKS ? blocks - block : PANEL_BLOCKS;
    for (int t = 0; t < 2; t++) {
      const int64_t which = tile + t < weight.n / 16 ? tile + t : tile;
      runs.at[t] = weight.data + (which * blocks + block) * bytes;
      runs.next[t] = runs.at[t] + 2 * (next - pair) * blocks * bytes;
      if (!widens) continue;
      uint8_t* const panel_runs = panel.runs[t][0];
      widen(weight, runs.at[t], runs.blocks, runs.form, panel_runs, runs.step);
      runs.at[t] = panel_runs;
    }
    for (int r = 0, rows; r < count; r += rows) {
      const int left = count - r, most = widens ? MOST_ROWS : FEW_ROWS;
      rows = left >= most ? most : left >= FEW_ROWS ? FEW_ROWS : left >= 2 ? 2 : 1;
      const Sums to{sums.data + r * sums.stride, sums.stride};
      for (int i = 0; i < 2 * rows; i++)
        __builtin_prefetch(to.data + i / 2 * to.stride + i % 2 * 16, 1);
      const auto by_rows = rows == MOST_ROWS  ? multiply_rows<MOST_ROWS>
                           : rows == FEW_ROWS ? multiply_rows<FEW_ROWS>
                           : rows == 2        ? multiply_rows<2> : multiply_rows<1>;
      by_rows(runs, r ? 0 : bytes, is_quick, *gemm.in, row + r, to);
    }
  }
  for (int r = 0; columns < 32 && r < count; r++)
    memcpy(out + r * gemm.stride, panel.spare[r], columns * sizeof(float));
}

#if KAGARI_ISA >= 4
// Tiles multiply so quickly that a block's scales, met as floats, would take most of the time. So
// here a row of activations has one scale and an output one unit, in which its blocks' scales and
// minima are rounded to integers. A product is then an integer, exact however it is summed: by
// tiles, as two bytes by two; or, of a few rows, as quants first and scales then.

constexpr int TILED_ROWS = 7;          // fewer take the quants as they are packed
constexpr int TILED_GROUP_ROWS = 512;  // share an unpacking

typedef uint16_t Shorts __attribute__((vector_size(64), may_alias));  // sums may wrap around
typedef uint8_t Bytes __attribute__((vector_size(64), may_alias));

inline LaneInts quad_of(const uint8_t* run, int i) {  // four 4-bit quants of each output
  return (reinterpret_cast<const LaneInts*>(run)[i % 4] >> (i / 4 * 4)) & 0x0f0f0f0f;
}

inline LaneInts words(LaneInts low, LaneInts high) {  // of each lane
  return (low & 0xffff) | high << 16;
}

struct Factors { LaneInts scale, middle; };  // a weight is (quant - MIDDLE) × scale + middle, in units
inline Factors factors_of(const Packed& weight, const uint8_t* run, Lanes per_unit) {
  const auto in_units = [&](int i) {
    return number(run + 256 + i * (weight.wide ? 64 : 32), 0, weight.wide) * per_unit;
  };
  const Lanes scale = in_units(0), minimum = weight.has_min ? in_units(1) : Lanes{};
  const auto rounded = [](Lanes value) { return (LaneInts)_mm512_cvtps_epi32((__m512)value); };
  return {rounded(scale), rounded(fma(scale, float(MIDDLE), minimum))};
}

struct alignas(64) Digits {  // of 16 outputs' weights in units: high × 256 + low
  int8_t high[PANEL_BLOCKS][512], low[PANEL_BLOCKS][512];  // [quads of inputs][16][4]
};

void find_digits(const Packed& packed, const uint8_t* run, int blocks, Lanes per_unit, Digits& to) {
  const Packed weight = packed;
  constexpr uint64_t ODD = 0xaaaaaaaaaaaaaaaa;
  for (int b = 0; b < blocks; b++, run += run_bytes(weight)) {
    const Factors of = factors_of(weight, run, per_unit);
    const Shorts scale = (Shorts)words(of.scale, of.scale);
    const LaneInts minimum = of.middle - of.scale * MIDDLE + 128;
    const Shorts first = (Shorts)words(minimum, minimum);  // + 128: so that high bytes are rounded
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const LaneInts quad = quad_of(run, i);
      const Shorts even = (Shorts)(quad & 0xff00ff) * scale + first;
      const Shorts odd = (Shorts)((quad >> 8) & 0xff00ff) * scale + first;
      const auto join = [](Shorts even, Shorts odd) {  // the even bytes of one and the other's odd
        return (Bytes)_mm512_mask_blend_epi8(ODD, (__m512i)even, (__m512i)odd);
      };
      reinterpret_cast<Bytes*>(to.low[b])[i] = join(even, odd << 8) ^ 128;
      reinterpret_cast<Bytes*>(to.high[b])[i] = join(even >> 8, odd);
    }
  }
}

// What both planes' sums of a panel become, or a plane's by both digits, which it does not round.
inline Lanes combined(Lanes high, Lanes low) { return fma(high, 256.0f, low); }

// So many rows as the tiles have, from `first` on, an index into the planes, by a panel → sums.
void multiply_digits(const Digits& by, int64_t inputs, int step, const Quants& in, int64_t first,
                     int rows, Lanes* sums) {
  LaneInts parts[4][16];
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t i = 0; i < inputs; i += step) {
    load_tile<4>(in.high + first + i, in.width);
    load_tile<6>(by.high[0] + 16 * i, 64);
    add_quads<0, 4, 6>();
    load_tile<7>(by.low[0] + 16 * i, 64);
    add_quads<1, 4, 7>();
    load_tile<5>(in.low + first + i, in.width);
    add_quads<2, 5, 6>();
    add_quads<3, 5, 7>();
  }
  store_tile<0>(parts[0], 64), store_tile<1>(parts[1], 64);
  store_tile<2>(parts[2], 64), store_tile<3>(parts[3], 64);
  for (int r = 0; r < rows; r++) {
    const auto part = [&](int i) { return __builtin_convertvector(parts[i][r], Lanes); };
    sums[r] = combined(combined(part(0), part(1)), combined(part(2), part(3)));
  }
}

inline Lanes sum_of(LaneInts first, LaneInts second) {  // rounded once
  const __m512i a = (__m512i)first, b = (__m512i)second;
  const __m512d low = _mm512_cvtepi32_pd(_mm512_castsi512_si256(a)) +
                      _mm512_cvtepi32_pd(_mm512_castsi512_si256(b));
  const __m512d high = _mm512_cvtepi32_pd(_mm512_extracti32x8_epi32(a, 1)) +
                       _mm512_cvtepi32_pd(_mm512_extracti32x8_epi32(b, 1));
  return (Lanes)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)),
                                   _mm512_cvtpd_ps(high), 1);
}

// Rows [row, row + Rows) by a panel's runs of 16 outputs → sums. A word has room for the sum of a
// block's quants by a plane; beside that of the plane, it meets the block's two factors at once.
template <int Rows>
__attribute__((noinline))
void multiply_quants(const Packed& packed, const uint8_t* run, const uint8_t* next, Lanes per_unit,
                     int64_t first, int64_t blocks, const Quants& in, int64_t row, Lanes* sums) {
  const Packed weight = packed;
  const int64_t width = in.width, bytes = run_bytes(weight), at = row * width + first * 32;
  const int8_t *high = in.high + at, *low = in.low + at;
  const int32_t* counts = in.counts + at / 8;
  LaneInts kept[Rows][2] = {};  // of the first half of a panel: 32 bits have room for no more
  for (int64_t begin = 0; begin < blocks; begin += PANEL_BLOCKS / 2) {
    const int64_t left = blocks - begin, some = left < PANEL_BLOCKS / 2 ? left : PANEL_BLOCKS / 2;
    LaneInts highs[Rows] = {}, lows[Rows] = {};
    for (int64_t b = begin; b < begin + some; b++, run += bytes, next += bytes) {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
      LaneInts by_high[Rows], by_low[Rows];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        by_high[r] = counts[r * (width / 8) + 4 * b] - LaneInts{};
        by_low[r] = counts[r * (width / 8) + 4 * b + 1] - LaneInts{};
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        __asm__ volatile("" ::: "memory");  // see `multiply`
        const LaneInts quad = quad_of(run, i);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
          by_high[r] = dot(by_high[r], quad, all_four(high + r * width + b * 32 + i * 4));
          by_low[r] = dot(by_low[r], quad, all_four(low + r * width + b * 32 + i * 4));
        }
      }
      const Factors of = factors_of(weight, run, per_unit);
      const __m512i factors = (__m512i)words(of.scale, of.middle);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        const int32_t* const count = counts + r * (width / 8) + 4 * b;
        const __m512i high_words = (__m512i)((by_high[r] & 0xffff) | (count[2] - LaneInts{}));
        const __m512i low_words = (__m512i)((by_low[r] & 0xffff) | (count[3] - LaneInts{}));
        highs[r] = (LaneInts)_mm512_dpwssd_epi32((__m512i)highs[r], high_words, factors);
        lows[r] = (LaneInts)_mm512_dpwssd_epi32((__m512i)lows[r], low_words, factors);
      }
    }
    for (int r = 0; r < Rows; r++) {
      sums[r] = combined(sum_of(kept[r][0], highs[r]), sum_of(kept[r][1], lows[r]));
      kept[r][0] = highs[r], kept[r][1] = lows[r];
    }
  }
}

inline bool is_exact(const Packed& weight, const Quants& in) {
  return in.counts && weight.bits == 4 && weight.block == 32;
}

// As multiply_pair, of what is_exact.
void multiply_exactly(const Gemm& gemm, int64_t pair, int64_t next, int64_t row, int count) {
  const Packed& weight = *gemm.weight;
  const Quants& in = *gemm.in;
  const int64_t blocks = weight.k / 32, bytes = run_bytes(weight);
  const bool is_tiled = count >= TILED_ROWS;
  const int step = weight.k % 64 ? 32 : 64;
  Tiles tiles(step / 4);
  for (int64_t tile = pair * 2; tile < pair * 2 + 2 && tile * 16 < gemm.columns; tile++) {
    const int64_t column = tile * 16, left = gemm.columns - column, columns = left < 16 ? left : 16;
    const Lanes unit = lanes(units_of(weight) + column), per_unit = 1 / unit;
    const Floats bias = gemm.bias ? load(gemm.bias + column, columns) : Floats{};
    for (int64_t block = 0, some; block < blocks; block += some) {
      some = blocks - block < PANEL_BLOCKS ? blocks - block : PANEL_BLOCKS;
      const uint8_t* const runs = weight.data + (tile * blocks + block) * bytes;
      const auto add = [&](int64_t row, Lanes sum) {
        float* const out = gemm.out + row * gemm.stride + column;
        const Lanes before = (Lanes)(block ? load(out, columns) : bias);
        store(out, (Floats)fma(sum, unit * in.scales[row * blocks], before), columns);
      };
      Digits digits;
      if (is_tiled) find_digits(weight, runs, some, per_unit, digits);
      for (int r = 0, rows; r < count; r += rows) {
        const int left = count - r;
        Lanes sums[16];
        if (is_tiled) {
          tiles.have(rows = left < 16 ? left : 16);
          multiply_digits(digits, some * 32, step, in, (row + r) * in.width + block * 32, rows, sums);
        } else {
          rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
          const auto by_rows = rows == 4   ? multiply_quants<4>
                               : rows == 2 ? multiply_quants<2> : multiply_quants<1>;
          by_rows(weight, runs, runs + 2 * (next - pair) * blocks * bytes, per_unit, block, some,
                  in, row + r, sums);
        }
        for (int i = 0; i < rows; i++) add(row + r + i, sums[i]);
      }
    }
  }
}
#endif

void run_gemm(const void* args, const Step* step) {
  Gemm gemm = *static_cast<const Gemm*>(args);
  const int64_t rows = gemm.only_last ? step->num_last : step->rows;
  const Quants in = gemm.in->of(rows);
  gemm.in = &in;
  int64_t group_rows = GROUP_ROWS;
  auto multiply = multiply_pair;
#if KAGARI_ISA >= 4
  if (is_exact(*gemm.weight, in))
    group_rows = TILED_GROUP_ROWS, multiply = multiply_exactly;
#endif
  const int64_t groups = (rows + group_rows - 1) / group_rows;
  const int64_t pairs = (gemm.weight->n / 16 + 1) / 2;
  // Few rows wait for memory, which comes faster in long ways; many take a microsecond or more.
  const int64_t grain = rows > 8 ? 8192 / (gemm.weight->k * (rows + 8)) + 1
                                 : pairs / (2 * kagari_threads()) + 1;
  const int64_t of_others = grain * (kagari_threads() - 1);
  parallel(pairs * groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i % groups * group_rows, left = rows - row;
      const int64_t next = i + 1 < end ? i + 1 : i + 1 + of_others;
      multiply(gemm, i / groups, next / groups, row, left < group_rows ? left : group_rows);
    }
  });
}

void run_embed(const void* args, const Step* step) {
  const Embed& embed = *static_cast<const Embed*>(args);
  const Packed& from = *embed.table;
  const auto number = [&](const uint8_t* at, int lane) {
    float value;
    uint16_t half;
    if (from.wide) return memcpy(&value, at + 4 * lane, sizeof value), value;
    return memcpy(&half, at + 2 * lane, sizeof half), from_half(half);
  };
  parallel(step->rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int lane = step->ids[row] % 16, size = from.wide ? 64 : 32;
      const int64_t bytes = run_bytes(from);
      const uint8_t* run = from.data + step->ids[row] / 16 * (from.k / 32) * bytes;
      for (int64_t at = 0; at < from.k; at += 32, run += bytes)
        for (int i = 0; i < 32; i++) {
          const uint8_t* scales = run + 64 * from.bits + i / from.block * size;
          const uint8_t byte = run[(from.bits == 8 ? i / 4 : i / 4 % 4) * 64 + lane * 4 + i % 4];
          const int quant = from.bits == 8 ? byte - 128 : byte >> (i / 16 * 4) & 15;
          float value = number(scales, lane) * quant;
          if (from.has_min) value += number(scales + 32 / from.block * size, lane);
          embed.out[row * from.k + at + i] = value * embed.scale;
        }
    }
  });
}

// --- norms, gates, the best logit ----------------------------------------------------------------

inline int64_t rows_a_share(int32_t width) { return 8192 / width + 1; }  // some microseconds

// Calls body(column, lanes) for each 16 columns and the rest.
template <class Body>
inline void each_vector(int32_t width, const Body& body) {
  int32_t column = 0;
  for (; column + 16 <= width; column += 16) body(column, 16);
  if (column < width) body(column, width - column);
}

inline float norm_factor(const float* x, int32_t width, float eps) {  // 1 / root mean square
  Floats squares = {};
  each_vector(width, [&](int32_t at, int lanes) {
    const Floats value = load(x + at, lanes);
    squares = fma(value, value, squares);
  });
  return 1.0f / __builtin_sqrtf(sum(squares) / width + eps);
}

// A row of `out` (of whole blocks, if it is quantised too), else `spare`, filled up with zeros.
inline float* row_or(float* out, int64_t row, int32_t width, float* spare, const Quants* quants) {
  if (out) return out + row * width;
  for (int32_t i = width; quants && i < quants->width; i++) spare[i] = 0;
  return spare;
}

void run_norm(const void* args, const Step* step) {
  const Norm& op = *static_cast<const Norm*>(args);
  const int32_t width = op.width, rows = op.only_last ? step->num_last : step->rows;
  parallel(rows, rows_a_share(width), [&](int64_t begin, int64_t end) {
    float* spare = (float*)__builtin_alloca(sizeof(float) * (width + 32));
    for (int64_t row = begin; row < end; row++) {
      float* x = op.x + (op.only_last ? step->last[row] : row) * (int64_t)width;
      if (op.added) {
        const float* added = op.added + row * width;
        const float factor = op.post ? norm_factor(added, width, op.eps) : 1;
        each_vector(width, [&](int32_t at, int lanes) {
          Floats value = load(added + at, lanes);
          if (op.post) value = value * factor * load(op.post + at, lanes);
          store(x + at, load(x + at, lanes) + value, lanes);
        });
      }
      if (!op.gain) continue;
      const float factor = norm_factor(x, width, op.eps);
      float* out = row_or(op.out, row, width, spare, op.quants);
      each_vector(width, [&](int32_t at, int lanes) {
        store(out + at, load(x + at, lanes) * factor * load(op.gain + at, lanes), lanes);
      });
      if (op.quants) quantize_row(out, *op.quants, row, rows);
    }
  });
}

void run_gate(const void* args, const Step* step) {
  const Gate& op = *static_cast<const Gate*>(args);
  const int32_t width = op.width;
  parallel(step->rows, rows_a_share(2 * width), [&](int64_t begin, int64_t end) {
    float* spare = (float*)__builtin_alloca(sizeof(float) * (width + 32));
    for (int64_t row = begin; row < end; row++) {
      const float* in = op.in + row * 2 * width;
      float* out = row_or(op.out, row, width, spare, op.quants);
      each_vector(width, [&](int32_t at, int lanes) {
        Floats x = load(in + at, lanes), t = x;
        if (op.is_gelu)  // x / (1 + e^-2u) = x (1 + tanh u) / 2, u = √(2/π) (x + 0.044715 x³)
          t = x * fma(x * x, 0.0713548139f, 1.59576917f);
        const Floats divisor = power_of_two(larger(t, splat(-88.0f)) * -1.44269504f) + 1.0f;
        store(out + at, x / divisor * load(in + width + at, lanes), lanes);
      });
      if (op.quants) quantize_row(out, *op.quants, row, step->rows);
    }
  });
}

void run_best(const void* args, const Step* step) {
  const Best& op = *static_cast<const Best*>(args);
  constexpr int32_t PART = 512;  // columns, of which the first best part is looked through again
  parallel(step->num_last, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* logits = op.logits + row * op.columns;
      const float lowest = -__builtin_inff();
      float best = lowest;
      int32_t id = 0;
      Ints odd = {};  // below 0 in lanes that met NaN
      for (int32_t first = 0; first < op.columns; first += PART) {
        Floats top = splat(lowest);
        each_vector(op.columns - first < PART ? op.columns - first : PART, [&](int at, int lanes) {
          const Floats value = load(logits + first + at, lanes, splat(lowest));
          odd |= 0x7f800000 - (reinterpret_cast<Ints>(value) & 0x7fffffff);
          top = larger(value, top);
        });
        const float found = highest(top);
        if (found > best) best = found, id = first;
      }
      while (id + 1 < op.columns && logits[id] < best) id++;
      bool is_number = true;
      for (int i = 0; i < 16; i++) is_number &= odd[i] >= 0;
      op.ids[row] = id;
      op.values[row] = is_number ? best : __builtin_nanf("");
    }
  });
}

// --- attention -----------------------------------------------------------------------------------

// Keys and values are read in absolute tiles of 64 keys. A row's softmax runs online (Milakov &
// Gimelshein, 2018) over the tiles of an absolute stretch; stretches are then merged in ascending
// order (Dao et al., 2023: "split KV"). So a row's bits do not depend on what it is computed with.

#if KAGARI_ISA < 2
#define ALONE __attribute__((noinline))  // a function alone gets the registers it needs
#else
#define ALONE inline
#endif

constexpr int TILE_ROWS = 6, TILE_COLUMNS = KAGARI_ISA >= 2 ? 4 : 2;    // registers that sum
constexpr int MAX_DIM = 256, BLOCK_ROWS = 96, PIECES_PER_THREAD = 4;
constexpr float FLOOR = -1e30f;     // below any score
constexpr float HIDDEN = -2e30f;    // below FLOOR: its weight is 0 whatever the highest score

struct Run {  // sixteen keys and values [dim] of a page, of which begin … end - 1 may be read
  const char* keys;
  const char* values;
  int begin, end;
  const uint16_t *key_scales, *value_scales;  // bf16, of quantised ones
};

struct Ahead {  // keys and values that come next, fetched line by line between other work
  const char* keys;
  const char* values;
  bool has_room;  // in the first level cache, beside those in use; else they come to the second

  Ahead from(int64_t offset) const { return {keys + offset, values + offset, has_room}; }

  // Always inline: GCC 12 takes a function that does nothing else for one without effect.
  __attribute__((always_inline)) void fetch(int64_t offset) const {
    if (has_room) __builtin_prefetch(keys + offset), __builtin_prefetch(values + offset);
    else __builtin_prefetch(keys + offset, 0, 2), __builtin_prefetch(values + offset, 0, 2);
  }
};

// What a lane multiplies at a time, a term, is a number as fp32; with bf16 instructions, and bf16
// pages, it is a pair of bf16 numbers: both products are added to its fp32 sum. `Element` is a
// page's, or Pair for terms that are pairs already. Codes of quantised pages are exact in either.

struct Pair { uint16_t numbers[2]; };
struct Int8 { int8_t bits; };
struct Fp8 { int8_t bits; };  // E4M3 (Micikevicius et al., 2022): 1 sign, 4 exponent, 3 mantissa
template <class Element>
constexpr bool IS_CODE = sizeof(Element) == 1;  // value = code × its token's scale
template <class Element>
constexpr int TERM = KAGARI_ISA >= 3 && !std::is_same_v<Element, float> ? 2 : 1;  // numbers of one
template <class Element>
constexpr int SPLIT = 4 / sizeof(Element) / TERM<Element>;  // terms of a dword of page elements
template <class Element>
constexpr bool TILED = KAGARI_ISA >= 4 && TERM<Element> == 2;  // however few the rows
template <class Element>
constexpr int ROWS = TILED<Element> ? 16 : TILE_ROWS;  // multiplied at once
template <class Element>
using Term = std::conditional_t<TERM<Element> == 2, Pair, float>;

template <class Element>
inline Lanes add_products(Lanes a, Lanes b, Lanes sum) {
#if KAGARI_ISA >= 3
  if constexpr (TERM<Element> == 2) return (Lanes)_mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
  return fma(a, b, sum);
}

// Writes a vector of an array's numbers, from number `at` on, as its terms have them.
template <class Element>
inline void put(float* array, int at, Lanes numbers) {
#if KAGARI_ISA >= 3
  if constexpr (TERM<Element> == 2) {
    uint16_t* to = reinterpret_cast<uint16_t*>(array) + at;
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
    return;
  }
#endif
  lanes(array + at) = numbers;
}

inline LaneInts widened(const uint16_t* at) {
#if KAGARI_ISA >= 2
  return (LaneInts)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
#elif KAGARI_ISA == 1
  return (LaneInts)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
#else
  return (LaneInts)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)at), _mm_setzero_si128());
#endif
}

inline LaneInts widened(const int8_t* at) {
#if KAGARI_ISA >= 2
  return (LaneInts)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif KAGARI_ISA == 1
  return (LaneInts)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
  int32_t four;
  memcpy(&four, at, sizeof four);
  __m128i bytes = _mm_cvtsi32_si128(four);
  bytes = _mm_unpacklo_epi8(bytes, bytes);
  return (LaneInts)_mm_srai_epi32(_mm_unpacklo_epi16(bytes, bytes), 24);
#endif
}

// What codes with their sign extended mean.
inline Lanes decoded(LaneInts code, Int8) { return __builtin_convertvector(code, Lanes); }
inline Lanes decoded(LaneInts code, Fp8) {
  // The exponent's 4 bits become 8; the product moves their bias from 7 to 127, subnormals' too.
  return (Lanes)((code << 20) & (int32_t)0x87f00000) * 0x1p120f;
}

inline Lanes joined(Lanes first, Lanes second) {  // fp32 that is exact in bf16 → pairs
  return (Lanes)(((LaneInts)first >> 16 & 0xffff) | (LaneInts)second);
}

// Terms of LANES columns: of a row, or of it and another.
inline Lanes terms(const float* at, const float*) { return lanes(at); }
inline Lanes terms(const Pair* at, const Pair*) { return *reinterpret_cast<const Lanes*>(at); }
inline Lanes terms(const uint16_t* at, const uint16_t* other) {
  if constexpr (TERM<uint16_t> == 1) return (Lanes)(widened(at) << 16);
  else return (Lanes)(widened(at) | widened(other) << 16);
}
template <class Code>
inline Lanes terms(const Code* at, const Code* other) {
  const Lanes row = decoded(widened(&at->bits), Code{});
  if constexpr (TERM<Code> == 1) return row;
  else return joined(row, decoded(widened(&other->bits), Code{}));
}

// One of the terms that dwords of page elements hold.
inline Lanes term_of(LaneInts dword, int, float) { return (Lanes)dword; }
inline Lanes term_of(LaneInts dword, int which, uint16_t) {
  if constexpr (TERM<uint16_t> == 2) return (Lanes)dword;
  return (Lanes)(which ? dword & (int32_t)0xffff0000 : dword << 16);
}
template <class Code>
inline Lanes term_of(LaneInts dword, int which, Code code) {
  const auto byte = [=](int i) { return decoded((dword << (24 - 8 * i)) >> 24, code); };
  if constexpr (TERM<Code> == 1) return byte(which);
  else return joined(byte(2 * which), byte(2 * which + 1));
}

// c [rows][columns] = c × scales (0 if null) + a [rows][depth] · b [depth][columns], ascending;
// depth counts terms. Page elements that are to become pairs have two rows a term.
template <int ROWS, int COLUMNS, class Element>
ALONE void multiply_tile(const float* a, int64_t a_stride, const Element* b, int64_t b_stride,
                         float* c, int64_t c_stride, const float* scales, int depth, Ahead ahead) {
  constexpr int STEP = sizeof(Element) < 4 ? TERM<Element> : 1;
  Lanes sums[ROWS][COLUMNS] = {};
  if (scales)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++)
        sums[r][j] = lanes(c + r * c_stride + j * LANES) * scales[r];
  for (int d = 0; d < depth; d++, b += STEP * b_stride) {
    for (int i = 0; sizeof(Element) < 4 && i < STEP; i++)
      ahead.fetch((d * STEP + i) * COLUMNS * LANES * (int)sizeof(Element) / 2);
    const auto column = [&](int j) { return terms(b + j * LANES, b + j * LANES + b_stride); };
    const auto value = [&](int r) { return spread(a[r * a_stride + d]); };
    if constexpr (ROWS < COLUMNS) {  // the fewer are held by registers meanwhile
      Lanes values[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) values[r] = value(r);
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++) {
        const Lanes by = column(j);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          sums[r][j] = in_order(add_products<Element>(values[r], by, sums[r][j]));
      }
    } else {
      Lanes columns[COLUMNS];
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++) columns[j] = column(j);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Lanes by = value(r);
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; j++)
          sums[r][j] = add_products<Element>(by, columns[j], sums[r][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; j++) lanes(c + r * c_stride + j * LANES) = sums[r][j];
}

// With page elements of 1 or 2 bytes also fetches what is ahead, half as many bytes as b has.
template <int ROWS, class Element>
void multiply(int rows, const float* a, int64_t a_stride, const Element* b, int columns, float* c,
              int64_t c_stride, const float* scales, int depth, Ahead ahead) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1)
      multiply<ROWS - 1>(rows, a, a_stride, b, columns, c, c_stride, scales, depth, ahead);
    return;
  }
  const int lines = depth * TERM<Element> * sizeof(Element) / 2;  // bytes ahead of a column of b
  constexpr int COLUMNS = ROWS <= 3 ? 4 : TILE_COLUMNS;  // registers that sum
  int at = 0;
  for (; at + COLUMNS * LANES <= columns; at += COLUMNS * LANES)
    multiply_tile<ROWS, COLUMNS>(a, a_stride, b + at, columns, c + at, c_stride, scales, depth,
                                 ahead.from(lines * at));
  for (; at < columns; at += LANES)
    multiply_tile<ROWS, 1>(a, a_stride, b + at, columns, c + at, c_stride, scales, depth,
                           ahead.from(lines * at));
}

#if KAGARI_ISA >= 4
// `multiply` by tiles, of so many rows and terms as `Tiles` has: c + a · b, or a · b.
template <bool IS_FIRST>
void multiply_tiled(const float* a, int64_t a_stride, const Pair* b, int columns, float* c,
                    int64_t c_stride, int depth, int terms) {
  const auto tiles = [&](auto count, int at) {  // of sums, side by side
    const auto each = [&](auto of) {
      of(std::integral_constant<int, 0>());
      if constexpr (count == 1) return;
      of(std::integral_constant<int, 1>());
      of(std::integral_constant<int, 2>());
      of(std::integral_constant<int, 3>());
    };
    each([&](auto i) {
      if constexpr (IS_FIRST) clear_tile<i>();
      else load_tile<i>(c + at + 16 * i, 4 * c_stride);
    });
    for (int d = 0; d < depth; d += terms) {
      load_tile<4>(a + d, 4 * a_stride);
      each([&](auto i) {
        load_tile<6 + i % 2>(b + d * columns + at + 16 * i, 4 * columns);
        add_pairs<i, 4, 6 + i % 2>();
      });
    }
    each([&](auto i) { store_tile<i>(c + at + 16 * i, 4 * c_stride); });
  };
  int at = 0;
  for (; at + 64 <= columns; at += 64) tiles(std::integral_constant<int, 4>(), at);
  for (; at < columns; at += 16) tiles(std::integral_constant<int, 1>(), at);
}
#endif

struct Workspace {  // a thread's own; a state: weighted values [dim], highest score, sum of weights
  float queries[BLOCK_ROWS * MAX_DIM];        // [rows][terms of dim]
  float keys[MAX_DIM * KEY_TILE];             // [terms of dim][64]
  float values[KEY_TILE * MAX_DIM];           // [terms of 64][dim]
  float scores[16 * KEY_TILE];                // then weights, as terms
  float others[16 * KEY_TILE];                // weights as terms of their own, see attend_few_tiled
  float weights[BLOCK_ROWS * LANES];          // [rows][LANES]: sums of weights in a stretch
  float stretch[BLOCK_ROWS * (MAX_DIM + 16)]; // states
  float merged[BLOCK_ROWS * (MAX_DIM + 16)];  // states
  float copy[3][16 * MAX_DIM];                // of runs some of which must not be read
  uint16_t bf16[2][16 * MAX_DIM];             // runs' codes
  float key_scales[KEY_TILE], value_scales[KEY_TILE];  // of codes
};
static __thread Workspace workspace __attribute__((aligned(64)));

// A head [dim], normed if it has a gain, turned by its position (halves layout, Su et al., 2021).
inline void turn_head(const float* in, const float* gain, float eps, const float* cos,
                      const float* sin, float scale, int dim, float* to) {
  const int half = dim / 2;
  float norm = 1;
  if (gain) {
    Lanes squares = {};
    int i = 0;
    for (; i + LANES <= dim; i += LANES) squares = fma(lanes(in + i), lanes(in + i), squares);
    float sum = 0;
    for (int j = 0; j < LANES; j++) sum += squares[j];
    for (; i < dim; i++) sum += in[i] * in[i];
    norm = 1 / __builtin_sqrtf(sum / dim + eps);
  }
  for (int i = 0; i < half; i++) {
    const float a = gain ? in[i] * norm * gain[i] : in[i];
    const float b = gain ? in[half + i] * norm * gain[half + i] : in[half + i];
    to[i] = (a * cos[i] - b * sin[i]) * scale;
    to[half + i] = (b * cos[i] + a * sin[i]) * scale;
  }
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// To nearest, ties to even. |value| ≤ 127.
inline int8_t to_int8(float value) {
  return bits_of(value + 12582912.f) - 0x4b400000;  // 1.5 × 2²³: an integer in the lowest bits
}

// To nearest, ties to even. |value| ≤ 448, the largest.
inline uint8_t to_fp8(float value) {
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  const uint32_t subnormal = bits_of(__builtin_fabsf(value) + 0x1p14f) - 0x46800000;  // × 2⁹
  return (bits >> 24 & 0x80) | (size < 0x3c800000 ? subnormal : normal);  // below 2⁻⁶
}

// A token's key or value as codes under one scale, its largest ÷ the largest code, rounded up: no
// code is clipped. The scale is NaN if a number is none.
inline void write_codes(const Arena& arena, uint8_t* to, uint16_t* scale_to, const float* from) {
  const int dim = arena.dim;
  uint32_t largest = 0;  // by its bits: a NaN is larger than infinity
  for (int i = 0; i < dim; i++) {
    const uint32_t size = bits_of(from[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  float scale;
  memcpy(&scale, &largest, sizeof scale);
  const bool is_sane = largest < 0x7f800000;
  const uint32_t bits = (bits_of(scale / (arena.precision == FP8 ? 448 : 127)) + 0xffff) >> 16;
  *scale_to = is_sane ? bits : 0x7fc0;
  if (!is_sane || !bits) {
    memset(to, 0, dim);
    return;
  }
  const uint32_t rounded = bits << 16;
  memcpy(&scale, &rounded, sizeof scale);
  if (arena.precision == FP8) for (int i = 0; i < dim; i++) to[i] = to_fp8(from[i] / scale);
  else for (int i = 0; i < dim; i++) to[i] = to_int8(from[i] / scale);
}

// A token's key or value [dim] to its place among a head's in a page.
inline void write_slot(const Arena& arena, uint8_t* head, int64_t token, const float* from) {
  uint8_t* const to = head + token * arena.dim * code_bytes(arena.precision);
  if (arena.precision == FP32) {
    memcpy(to, from, 4 * arena.dim);
  } else if (arena.precision == BF16) {
    for (int i = 0; i < arena.dim; i++) {  // to nearest, ties to even
      const uint32_t bits = bits_of(from[i]);
      reinterpret_cast<uint16_t*>(to)[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
  } else {
    uint16_t* const scales = reinterpret_cast<uint16_t*>(head + codes_bytes(arena));
    write_codes(arena, to, scales + token, from);
  }
}

void run_rope(const void* args, const Step* step) {
  const Rope& rope = *static_cast<const Rope*>(args);
  const Arena& arena = rope.arena;
  const int dim = arena.dim, half = dim / 2, turned = rope.heads + arena.kv_heads;
  parallel(step->rows, 4, [&](int64_t begin, int64_t end) {
    float* const key = workspace.queries;
    for (int64_t row = begin; row < end; row++) {
      const int64_t position = step->positions[row];
      uint8_t* head = arena.data + step->slots_page[row] * arena.page_stride + arena.layer_offset;
      for (int h = 0; h < turned + arena.kv_heads; h++) {
        const float* in = rope.qkv + (row * (turned + arena.kv_heads) + h) * dim;
        float* query = rope.queries + (row * rope.heads + h) * dim;
        if (h < turned)
          turn_head(in, rope.gain ? rope.gain + h * dim : nullptr, rope.eps,
                    rope.cos + position * half, rope.sin + position * half,
                    h < rope.heads ? rope.query_scale : 1, dim, h < rope.heads ? query : key);
        if (h < rope.heads) continue;
        // Keys, then values follow each other.
        write_slot(arena, head, position % arena.page_size, h < turned ? key : in);
        head += head_bytes(arena);
      }
    }
  });
}

// Dwords first … first + 3 of LANES rows of `dwords` dwords, transposed.
struct Turned { LaneInts dword[4]; };
inline Turned turn_rows(const int32_t* rows, int dwords, int first) {
  auto quads = [=](int row) {  // 16 bytes of each fourth row
    auto quad = [=](int i) {
      return _mm_loadu_si128((const __m128i*)(rows + (row + 4 * i) * dwords + first));
    };
#if KAGARI_ISA >= 2
    __m512i all = _mm512_inserti32x4(_mm512_castsi128_si512(quad(0)), quad(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(all, quad(2), 2), quad(3), 3);
#elif KAGARI_ISA == 1
    return _mm256_inserti128_si256(_mm256_castsi128_si256(quad(0)), quad(1), 1);
#else
    return quad(0);
#endif
  };
  auto row0 = quads(0), row1 = quads(1), row2 = quads(2), row3 = quads(3);
  auto a = WIDE(unpacklo_epi32)(row0, row1), b = WIDE(unpackhi_epi32)(row0, row1);
  auto c = WIDE(unpacklo_epi32)(row2, row3), d = WIDE(unpackhi_epi32)(row2, row3);
  return {{(LaneInts)WIDE(unpacklo_epi64)(a, c), (LaneInts)WIDE(unpackhi_epi64)(a, c),
           (LaneInts)WIDE(unpacklo_epi64)(b, d), (LaneInts)WIDE(unpackhi_epi64)(b, d)}};
}

// Scores of a run's keys for a few queries [dim]: what `multiply` gives, but no copy of keys. Three
// sums at a time would wait for each other.
template <int ROWS, class Element>
ALONE void score_keys(int rows, const float* queries, const int32_t* keys, int dwords,
                      float* scores, Ahead ahead) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1)
      score_keys<ROWS - 1, Element>(rows, queries, keys, dwords, scores, ahead);
    return;
  }
  constexpr int GROUPS = LANES < 16 && ROWS < 4 ? 2 : 1;
  for (int at = 0; at < 16; at += GROUPS * LANES) {
    Lanes sums[ROWS][GROUPS] = {};
    for (int first = 0; first < dwords; first += 4) {
      for (int i = 0; i < 8 * GROUPS * LANES; i += 64)
        ahead.fetch(2 * at * dwords + 2 * first * GROUPS * LANES + i);
      Turned turned[GROUPS];
#pragma GCC unroll 2
      for (int g = 0; g < GROUPS; g++)
        turned[g] = turn_rows(keys + (at + g * LANES) * dwords, dwords, first);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < SPLIT<Element>; j++) {
          Lanes column[GROUPS];
#pragma GCC unroll 2
          for (int g = 0; g < GROUPS; g++)
            column[g] = term_of(turned[g].dword[i], j, Element{});
          const float* query = queries + (first + i) * SPLIT<Element> + j;
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++, query += SPLIT<Element> * dwords) {
            const Lanes value = spread(*query);
#pragma GCC unroll 2
            for (int g = 0; g < GROUPS; g++)
              sums[r][g] = in_order(add_products<Element>(value, column[g], sums[r][g]));
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int g = 0; g < GROUPS; g++) lanes(scores + r * KEY_TILE + at + g * LANES) = sums[r][g];
  }
}

inline Run find_run(const Arena& arena, const int32_t* pages, int kv_head, int key, int first,
                    int last) {
  Run run = {nullptr, nullptr, key < first ? first - key : 0, 16, nullptr, nullptr};
  if (key + 15 > last) run.end = last - key + 1;
  if (run.begin >= run.end) return run;
  const int64_t page = pages[key / arena.page_size], token = key % arena.page_size;
  const uint8_t* const keys =
      arena.data + page * arena.page_stride + arena.layer_offset + kv_head * head_bytes(arena);
  const uint8_t* const values = keys + arena.kv_heads * head_bytes(arena);
  const int64_t at = token * arena.dim * code_bytes(arena.precision);
  run.keys = reinterpret_cast<const char*>(keys + at);
  run.values = reinterpret_cast<const char*>(values + at);
  run.key_scales = reinterpret_cast<const uint16_t*>(keys + codes_bytes(arena)) + token;
  run.value_scales = reinterpret_cast<const uint16_t*>(values + codes_bytes(arena)) + token;
  return run;
}

// A run's keys or values [16][dim], or a copy with zeros where they must not be read.
template <class Element>
inline const Element* whole(const Run& run, const char* from, int dim, float* copy) {
  if (run.begin > 0 || run.end < 16) {
    const int row = dim * sizeof(Element);
    memset(copy, 0, 16 * row);
    if (run.begin < run.end)
      memcpy(reinterpret_cast<char*>(copy) + run.begin * row, from + run.begin * row,
             (run.end - run.begin) * row);
    from = reinterpret_cast<const char*>(copy);
  }
  return reinterpret_cast<const Element*>(from);
}

// A tile's terms: of keys [terms of dim][64], of values [terms of 64][dim]; zero where a run must
// not be read. Tiles' pairs of values are a key of a run and the same one of the next.
template <class Element>
void load_terms(const Run* runs, int dim, Workspace& work) {
  const int dwords = dim * sizeof(Element) / 4;
  const Element* values[2] = {};
  float* to = work.values;
  for (int g = 0; g < KEY_TILE / 16; g++) {
    const Element* keys = whole<Element>(runs[g], runs[g].keys, dim, work.copy[2]);
    for (int i = 0; i < 16; i += LANES)
      for (int first = 0; first < dwords; first += 4) {
        const Turned turned =
            turn_rows(reinterpret_cast<const int32_t*>(keys + i * dim), dwords, first);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          float* to = work.keys + (first + j) * SPLIT<Element> * KEY_TILE + 16 * g + i;
#pragma GCC unroll 4
          for (int which = 0; which < SPLIT<Element>; which++, to += KEY_TILE)
            lanes(to) = term_of(turned.dword[j], which, Element{});
        }
      }
    const bool is_other = TILED<Element> && g % 2;
    values[is_other] = whole<Element>(runs[g], runs[g].values, dim, work.copy[is_other]);
    if (TILED<Element> && !is_other) continue;
    const Element* const others = TILED<Element> ? values[1] : values[0] + dim;
    for (int i = 0; i < 16 * dim; i += (TILED<Element> ? 1 : TERM<Element>) * dim)
      for (int d = i; d < i + dim; d += LANES, to += LANES)
        lanes(to) = terms(values[0] + d, others + d);
  }
}

// A tile's scales as fp32, 0 where a run must not be read.
inline void load_scales(const Run* runs, Workspace& work) {
  for (int at = 0; at < KEY_TILE; at += 16) {
    const Run& run = runs[at / 16];
    float *const keys = work.key_scales + at, *const values = work.value_scales + at;
    if (run.begin == 0 && run.end == 16) {
      for (int i = 0; i < 16; i += LANES) {
        lanes(keys + i) = (Lanes)(widened(run.key_scales + i) << 16);
        lanes(values + i) = (Lanes)(widened(run.value_scales + i) << 16);
      }
      continue;
    }
    memset(keys, 0, 64);
    memset(values, 0, 64);
    for (int i = run.begin; i < run.end; i++) {
      const uint32_t key = (uint32_t)run.key_scales[i] << 16;
      const uint32_t value = (uint32_t)run.value_scales[i] << 16;
      memcpy(keys + i, &key, sizeof key);
      memcpy(values + i, &value, sizeof value);
    }
  }
}

inline void clear_state(float* state, int dim) {
  memset(state, 0, 4 * (dim + 16));
  state[dim] = FLOOR;
}

inline void merge_state(float* into, const float* later, int dim) {
  const float high = later[dim] > into[dim] ? later[dim] : into[dim];
  const float keep = power_of_two(spread(into[dim] - high))[0];
  const float add = power_of_two(spread(later[dim] - high))[0];
  for (int d = 0; d < dim; d += LANES)
    lanes(into + d) = fma(lanes(later + d), add, lanes(into + d) * keep);
  into[dim] = high;
  into[dim + 1] = later[dim + 1] * add + into[dim + 1] * keep;
}

inline int first_seen(int window, int position) {  // the first key that a token sees
  return window && position >= window ? position - window + 1 : 0;
}

struct Block {  // consecutive tokens of a span
  const Span* span;
  float* states;  // [kv head][stretch][row] if its stretches are several work items', else null
  int32_t first_token, tokens, first_stretch, num_stretches;
  int32_t first_own;  // stretch: those before are computed with other blocks'
  int32_t left;       // work items not done
};

// Whole stretches, of a block or of several that read the same pages there; × kv heads: work items.
struct Piece { int32_t first_block, num_blocks, first_key, last_key; };

void write_state(const Attend& attend, float* out, const Block& block, int kv_head, int row,
                 const float* state) {
  const int dim = attend.arena.dim, group = attend.heads / attend.arena.kv_heads;
  const int64_t token = block.span->first_row + block.first_token + row / group;
  float* to = out + (token * attend.heads + kv_head * group + row % group) * dim;
  for (int d = 0; d < dim; d += LANES)  // + 0: a sum of nothing but zeros has no sign
    lanes(to + d) = lanes(state + d) / state[dim + 1] + 0.0f;
}

struct Rows {  // what a work item attends with: its blocks' rows of one kv head
  int dim, group, count, start, window;  // start: the first token's position
};

// 2^x. Where weights are rounded to bf16 it may be off by 2^-18.5: a polynomial of x's fraction.
template <class Element>
inline Lanes weight_of(Lanes x) {
#if KAGARI_ISA >= 4
  if constexpr (TILED<Element>) {
    const Lanes part = (Lanes)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    Lanes p = fma(part, 0.013534168f, 0.0520114611f);
    p = fma(p, part, 0.241442756f);
    p = fma(p, part, 0.693003835f);
    p = fma(p, part, 1.00000259f);
    return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)x);
  }
#endif
  return power_of_two(x);
}

#if KAGARI_ISA >= 4
// Weights as tiles' terms: the lower halves are bf16 numbers. No weight is below 0, so that half a
// unit is added to round it.
inline LaneInts low_halves(Lanes weight) { return ((LaneInts)weight + 0x8000) >> 16; }
inline LaneInts high_halves(Lanes weight) {
  return ((LaneInts)weight + 0x8000) & (int32_t)0xffff0000;
}
#endif

// Scores of rows first … first + count - 1 → weights; shrinks: what their earlier sums become. Over
// codes: sums → scores, and the weights are those of the values' codes. Tiles' weights are pairs as
// values are, or IS_FEW: each is a pair with 0, in work.scores the other way round than in
// work.others.
template <class Element, bool IS_FEW = false>
void soften(const Rows& of, int tile, int first, int count, Workspace& work, float* shrinks) {
  float best[16] = {}, before[16] = {};
  for (int i = 0; i < count; i++) {
    float* const scores = work.scores + i * KEY_TILE;
    for (int j = 0; IS_CODE<Element> && j < KEY_TILE; j += LANES)
      lanes(scores + j) *= lanes(work.key_scales + j);
    const int position = of.start + (first + i) / of.group;
    const int begin = first_seen(of.window, position) - tile * KEY_TILE;
    const int end = position - tile * KEY_TILE;
    if (begin > 0 || end < KEY_TILE - 1) {
      LaneInts key;
      for (int j = 0; j < LANES; j++) key[j] = j;
      for (int j = 0; j < KEY_TILE; j += LANES, key += LANES)
        lanes(scores + j) = (key >= begin) & (key <= end) ? lanes(scores + j) : spread(HIDDEN);
    }
    float* const high = work.stretch + (first + i) * (of.dim + 16) + of.dim;
    Lanes top = spread(before[i] = *high);
    for (int j = 0; j < KEY_TILE; j += LANES) top = larger(lanes(scores + j), top);
    best[i] = *high = highest(top);
  }
  for (int i = 0; i < ROWS<Element>; i += LANES)
    lanes(before + i) = power_of_two(lanes(before + i) - lanes(best + i));
  for (int i = 0; i < count; i++) {
    float* const scores = work.scores + i * KEY_TILE;
    Lanes sum = {};
    for (int j = 0; j < KEY_TILE; j += LANES) {
      const Lanes power = weight_of<Element>(lanes(scores + j) - best[i]);
      const Lanes weight = IS_CODE<Element> ? power * lanes(work.value_scales + j) : power;
      sum += power;
#if KAGARI_ISA >= 4
      if constexpr (TILED<Element>) {
        LaneInts* const to = reinterpret_cast<LaneInts*>(scores + (IS_FEW ? j : j / 2 & -LANES));
        if (IS_FEW || j % (2 * LANES) == 0) *to = low_halves(weight);
        else *to |= high_halves(weight);
        if (IS_FEW)
          *reinterpret_cast<LaneInts*>(work.others + i * KEY_TILE + j) = high_halves(weight);
        continue;
      }
#endif
      put<Element>(scores, j, weight);
    }
    float* const weights = work.weights + (first + i) * LANES;
    lanes(weights) = lanes(weights) * before[i] + sum;
    shrinks[i] = before[i];
  }
}

// Many rows: the tile's keys and values become terms once for all. Values behind the last that a
// row sees have weight 0 and are left out, as are whole tiles that it does not see.
template <class Element>
void attend_many(const Rows& of, int tile, const Run* runs, Workspace& work) {
  const int dim = of.dim, width = dim + 16, first_key = tile * KEY_TILE;
  const int depth = dim / TERM<Element>;
  const auto keys = reinterpret_cast<const Term<Element>*>(work.keys);
  const auto values = reinterpret_cast<const Term<Element>*>(work.values);
  float shrinks[ROWS<Element>];
  load_terms<Element>(runs, dim, work);
  if (IS_CODE<Element>) load_scales(runs, work);
  for (int r = 0; r < of.count; r += ROWS<Element>) {
    const int count = of.count - r < ROWS<Element> ? of.count - r : ROWS<Element>;
    const int seen = of.start + (r + count - 1) / of.group - first_key + 1;
    const int first = first_seen(of.window, of.start + r / of.group);
    if (seen <= 0 || first >= first_key + KEY_TILE) continue;
#if KAGARI_ISA >= 4
    if constexpr (TILED<Element>) {
      const int terms = dim % 32 ? 8 : 16;
      float* const state = work.stretch + r * width;
      multiply_tiled<true>(work.queries + r * depth, depth, keys, KEY_TILE, work.scores, KEY_TILE,
                           depth, terms);
      soften<Element>(of, tile, r, count, work, shrinks);
      for (int i = 0; i < count; i++)
        if (shrinks[i] != 1)  // as they mostly are
          for (int d = 0; d < dim; d += LANES) lanes(state + i * width + d) *= shrinks[i];
      multiply_tiled<false>(work.scores, KEY_TILE, values, dim, state, width, KEY_TILE / 2, terms);
      continue;
    }
#endif
    multiply<TILE_ROWS>(count, work.queries + r * depth, depth, keys, KEY_TILE, work.scores,
                        KEY_TILE, nullptr, depth, {});
    soften<Element>(of, tile, r, count, work, shrinks);
    const int rest = TERM<Element> - 1;  // of a term that is seen in part
    multiply<TILE_ROWS>(count, work.scores, KEY_TILE, values, dim, work.stretch + r * width, width,
                        shrinks, ((seen < KEY_TILE ? seen : KEY_TILE) + rest) / TERM<Element>, {});
  }
}

#if KAGARI_ISA >= 4
// A run's keys or values [16][dim] as bf16, in which codes are exact; room: 0 or 1.
template <class Element>
inline const uint16_t* as_bf16(const Run& run, const char* from, int dim, Workspace& work,
                               int room) {
  const Element* numbers = whole<Element>(run, from, dim, work.copy[room]);
  if constexpr (IS_CODE<Element>) {
    for (int i = 0; i < 16 * dim; i += LANES)
      put<Element>(reinterpret_cast<float*>(work.bf16[room]), i,
                   decoded(widened(&numbers[i].bits), Element{}));
    return work.bf16[room];
  } else {
    return numbers;
  }
}

// At most 16 rows by tiles: what `attend_many` gives, bit for bit, but keys and values are used as
// they are read. work.keys: the queries, [terms of dim][16]. As a pair's two products are summed
// apart and then each other, a run's values can meet weights that are pairs with 0, which leave the
// even dims or the odd ones; both runs' sums then follow each other as one pair's do in a tile.
template <class Element>
void attend_few_tiled(const Rows& of, int tile, const Run* runs, const Ahead* ahead,
                      Workspace& work) {
  const int dim = of.dim, width = dim + 16;
  float shrinks[16];
  constexpr int SIZE = sizeof(Element);
  // In small portions: many at once would hold up what follows.
  const auto fetch = [&](int run, int line, int lines) {
    for (int i = 0; i < lines; i++) ahead[run].fetch(64 * (line + i));
  };
  for (int g = 0; g < KEY_TILE / 16; g += 2) {
    const uint16_t *const first = as_bf16<Element>(runs[g], runs[g].keys, dim, work, 0),
                   *const second = as_bf16<Element>(runs[g + 1], runs[g + 1].keys, dim, work, 1);
    float scores[2][16][16];  // of keys by rows
    clear_tile<4>(), clear_tile<5>();
    for (int d = 0; d < dim; d += 32) {
      const int line = d * SIZE / 4;
      load_tile<7>(work.keys + 8 * d, 64);
      fetch(g / 2, line, 2 * SIZE);
      load_tile<6>(first + d, 2 * dim);
      fetch(g / 2, line + 2 * SIZE, 2 * SIZE);
      add_pairs<4, 6, 7>();
      fetch(g / 2, line + 4 * SIZE, 2 * SIZE);
      load_tile<6>(second + d, 2 * dim);
      fetch(g / 2, line + 6 * SIZE, 2 * SIZE);
      add_pairs<5, 6, 7>();
    }
    store_tile<4>(scores[0], 64), store_tile<5>(scores[1], 64);
    for (int i = 0; i < 2; i++)
      for (int r = 0; r < of.count; r += 4) {
        const Turned turned = turn_rows(reinterpret_cast<const int32_t*>(scores[i]), 16, r);
        for (int j = 0; j < 4 && r + j < of.count; j++)
          lanes(work.scores + (r + j) * KEY_TILE + 16 * (g + i)) = (Lanes)turned.dword[j];
      }
  }
  if (IS_CODE<Element>) load_scales(runs, work);
  soften<Element, true>(of, tile, 0, of.count, work, shrinks);
  const auto part = [&](int g) { return work.values + g * 16 * dim; };  // a run's sums [rows][dim]
  for (int g = 0; g < KEY_TILE / 16; g++) {
    const uint16_t* const values = as_bf16<Element>(runs[g], runs[g].values, dim, work, g % 2);
    load_tile<0>(work.scores + 16 * g, 4 * KEY_TILE);
    load_tile<1>(work.others + 16 * g, 4 * KEY_TILE);
    for (int d = 0; d < dim; d += 32) {
      const int line = d * SIZE / 4 + g % 2 * 4 * SIZE;
      load_tile<7>(values + d, 2 * dim);
      fetch(2 + g / 2, line, SIZE);
      clear_tile<2>(), clear_tile<3>();
      add_pairs<2, 0, 7>();
      fetch(2 + g / 2, line + SIZE, SIZE);
      add_pairs<3, 1, 7>();
      fetch(2 + g / 2, line + 2 * SIZE, SIZE);
      store_tile<2>(part(g) + d, 4 * dim);
      fetch(2 + g / 2, line + 3 * SIZE, SIZE);
      store_tile<3>(part(g) + d + 16, 4 * dim);
    }
  }
  for (int r = 0; r < of.count; r++)
    for (int d = 0; d < dim; d += 32) {
      Lanes* const state = reinterpret_cast<Lanes*>(work.stretch + r * width + d);
      state[0] *= shrinks[r], state[1] *= shrinks[r];
      for (int g = 0; g < KEY_TILE / 16; g += 2) {
        const auto sum = [&](int at) {
          at += r * dim + d;
          return lanes(part(g) + at) + lanes(part(g + 1) + at);
        };
        const Lanes even = sum(0), odd = sum(16);
        state[0] += __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                            22, 7, 23);
        state[1] += __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                            29, 14, 30, 15, 31);
      }
    }
}

// While it lives subnormal numbers are 0, as tiles have them whatever the thread has set.
struct Flushing {
  const unsigned before = _mm_getcsr();
  Flushing() { _mm_setcsr(before | 0x8040); }
  ~Flushing() { _mm_setcsr(before); }
};
#endif

// At most TILE_ROWS rows: keys and values are used as they are read.
template <class Element>
void attend_few(const Rows& of, int tile, const Run* runs, const Ahead* ahead, Workspace& work) {
  const int dim = of.dim, row = dim * (int)sizeof(Element), dwords = row / 4;
  for (int g = 0; g < KEY_TILE / 16; g++) {
    if (runs[g].begin >= runs[g].end) {  // hidden from all: any finite scores
      for (int r = 0; r < of.count; r++) memset(work.scores + r * KEY_TILE + 16 * g, 0, 64);
      continue;
    }
    const Element* keys = whole<Element>(runs[g], runs[g].keys, dim, work.copy[0]);
    score_keys<TILE_ROWS, Element>(of.count, work.queries, reinterpret_cast<const int32_t*>(keys),
                                   dwords, work.scores + 16 * g, ahead[g]);
  }
  if (IS_CODE<Element>) load_scales(runs, work);
  float scales[2][TILE_ROWS] = {{}, {1, 1, 1, 1, 1, 1}};  // of the first run of values, of others
  soften<Element>(of, tile, 0, of.count, work, scales[0]);
  for (int g = 0, later = 0; g < KEY_TILE / 16; g++) {
    if (runs[g].begin >= runs[g].end) continue;
    const Element* values = whole<Element>(runs[g], runs[g].values, dim, work.copy[0]);
    multiply<TILE_ROWS>(of.count, work.scores + 16 * g / TERM<Element>, KEY_TILE, values, dim,
                        work.stretch, dim + 16, scales[later], 16 / TERM<Element>,
                        ahead[g].from(8 * row));
    later = 1;
  }
}

constexpr int TILE_RUNS = KEY_TILE / 16;

void find_tile(const Attend& attend, const Step& step, const Block& block, const Piece& piece,
               int kv_head, int tile, Run* runs) {
  for (int i = 0; i < TILE_RUNS; i++)
    runs[i] = find_run(attend.arena, step.pages + block.span->first_page, kv_head,
                       tile * KEY_TILE + 16 * i, piece.first_key, piece.last_key);
}

// A work item on pages of such elements. `after`: the first tile of this thread's next one, empty
// runs if it is not known.
template <class Element>
void attend_piece(const Attend& attend, const Step& step, float* out, const Block* blocks,
                  const Piece& piece, int kv_head, const Run* after) {
  Workspace& work = workspace;
  const Block& block = blocks[0];
  const int dim = attend.arena.dim, width = dim + 16;
  const int group = attend.heads / attend.arena.kv_heads;
  const int block_rows = block.tokens * group;
  // Several blocks see all of these keys.
  const int start = piece.num_blocks > 1 ? piece.last_key : block.span->start + block.first_token;
  const Rows of = {dim, group, piece.num_blocks * block_rows, start, attend.window};
#if KAGARI_ISA >= 4
  // Rows of an odd count of 16 dims do not fill a tile's.
  const bool is_few = TILED<Element> ? of.count <= 16 && dim % 32 == 0 : of.count <= TILE_ROWS;
  Tiles tiles(dim % 32 ? 8 : 16, is_few ? 4 : 6);
  if (TILED<Element>) tiles.have(is_few ? of.count : 16);
#else
  const bool is_few = of.count <= TILE_ROWS;
#endif
  for (int t = 0; t < piece.num_blocks * block.tokens; t++) {
    const Block& its = blocks[t / block.tokens];
    const int64_t token = its.span->first_row + its.first_token + t % block.tokens;
    const float* from = attend.queries + (token * attend.heads + kv_head * group) * dim;
    float* const to = work.queries + t * group * dim / TERM<Element>;
    for (int i = 0; i < group * dim; i += LANES)  // × log2 e: the softmax is of powers of two
      put<Element>(to, i, lanes(from + i) * 1.44269504f);
  }
  if (TILED<Element> && is_few) {
    const int depth = dim / 2;
    for (int r = 0; r < of.count; r++)
      for (int d = 0; d < depth; d++) work.keys[16 * d + r] = work.queries[r * depth + d];
  }
  for (int r = 0; r < of.count; r++) clear_state(work.merged + r * width, dim);

  const bool has_room = 4 * KEY_TILE * dim * (int)sizeof(Element) <= kagari_near_bytes() * 3 / 4;
  constexpr int TILES = KEY_STRETCH / KEY_TILE;
  const int first_tile = piece.first_key / KEY_TILE, last_tile = piece.last_key / KEY_TILE;
  Run runs[2][TILE_RUNS];
  find_tile(attend, step, block, piece, kv_head, first_tile, runs[first_tile & 1]);
  for (int tile = first_tile; tile <= last_tile; tile++) {
    const Run* const now = runs[tile & 1];
    Run* const next = runs[~tile & 1];
    if (tile < last_tile) find_tile(attend, step, block, piece, kv_head, tile + 1, next);
    else memcpy(next, after, sizeof runs[0]);
    Ahead ahead[TILE_RUNS];
    for (int i = 0; i < TILE_RUNS; i++) {
      const char* nowhere = reinterpret_cast<const char*>(work.values);
      const char *keys = next[i].keys, *values = next[i].values;
      ahead[i] = {keys ? keys : nowhere, keys ? values : nowhere, has_room};
    }
    if (tile == first_tile || tile % TILES == 0) {
      for (int r = 0; r < of.count; r++) clear_state(work.stretch + r * width, dim);
      memset(work.weights, 0, sizeof(Lanes) * of.count);
    }
    if (!is_few) attend_many<Element>(of, tile, now, work);
#if KAGARI_ISA >= 4
    else if constexpr (TILED<Element>) attend_few_tiled<Element>(of, tile, now, ahead, work);
#endif
    else attend_few<Element>(of, tile, now, ahead, work);
    if ((tile + 1) % TILES && tile < last_tile) continue;
    for (int r = 0; r < of.count; r++) {
      float* state = work.stretch + r * width;
      for (int i = 0; i < LANES; i++) state[dim + 1] += work.weights[r * LANES + i];
      if (!block.states) merge_state(work.merged + r * width, state, dim);
    }
    const int size = block_rows * width, stretch = tile / TILES - block.first_stretch;
    for (int b = 0; block.states && b < piece.num_blocks; b++)
      memcpy(blocks[b].states + size * ((int64_t)kv_head * blocks[b].num_stretches + stretch),
             work.stretch + b * size, 4 * size);
  }
  if (!block.states)
    for (int r = 0; r < of.count; r++)
      write_state(attend, out, block, kv_head, r, work.merged + r * width);
}

// What follows a block's last work item, on the thread that did it.
void finish_block(const Attend& attend, float* out, const Block& block, int64_t all_rows) {
  const int dim = attend.arena.dim, width = dim + 16;
  const int rows = block.tokens * (attend.heads / attend.arena.kv_heads);
  if (block.states)
    for (int i = 0; i < attend.arena.kv_heads * rows; i++) {
      float* state = workspace.merged;
      clear_state(state, dim);
      for (int s = 0; s < block.num_stretches; s++)
        merge_state(state, block.states + (((int64_t)i / rows * block.num_stretches + s) * rows +
                                           i % rows) * width, dim);
      write_state(attend, out, block, i / rows, i % rows, state);
    }
  if (attend.quants)
    for (int64_t i = block.span->first_row + block.first_token, n = block.tokens; n > 0; i++, n--)
      quantize_row(out + i * attend.heads * dim, *attend.quants, i, all_rows);
}

struct Work {  // a step's, as it is parted
  const Attend& attend;
  const Step& step;
  float *free_states, *end;  // of the scratch
  Block* blocks;             // at most one a row
  Piece* pieces;             // at most two a row
  int num_blocks = 0, num_pieces = 0;

  int group() const { return attend.heads / attend.arena.kv_heads; }
  int most_tokens() const { return group() < BLOCK_ROWS ? BLOCK_ROWS / group() : 1; }  // of a piece

  void add_blocks(const Span& span) {
    int first = (span.num_rows - 1) / most_tokens() * most_tokens(), after = span.num_rows;
    for (; first >= 0; after = first, first -= most_tokens()) {  // the longest work first
      const int stretch = first_seen(attend.window, span.start + first) / KEY_STRETCH;
      const int last_stretch = (span.start + after - 1) / KEY_STRETCH;
      blocks[num_blocks++] = {&span, nullptr, first, after - first, stretch,
                              last_stretch - stretch + 1, stretch, 0};
    }
  }

  int64_t states_of(const Block& block) const {  // floats
    return (int64_t)attend.arena.kv_heads * block.num_stretches * block.tokens * group() *
           (attend.arena.dim + 16);
  }

  bool have_states(int first, int after) {  // blocks that have none get them if there is room
    int64_t floats = 0;
    for (int b = first; b < after; b++) floats += blocks[b].states ? 0 : states_of(blocks[b]);
    if (floats > end - free_states) return false;
    for (int b = first; b < after; b++)
      if (!blocks[b].states) {
        blocks[b].states = free_states;
        free_states += states_of(blocks[b]);
      }
    return true;
  }

  bool read_same(const Block& a, const Block& b, int stretch) const {  // all of it
    const int after = (stretch + 1) * KEY_STRETCH, size = attend.arena.page_size;
    if (a.span->start < after || b.span->start < after) return false;
    const int first = after - KEY_STRETCH, last = (after - 1) / size;
    const int32_t *const of_a = step.pages + a.span->first_page,
                  *const of_b = step.pages + b.span->first_page;
    for (int page = first / size; page <= last; page++)
      if (of_a[page] != of_b[page]) return false;
    return true;
  }

  void add_piece(int first, int count, int stretch, int after_stretch) {
    pieces[num_pieces++] = {first, count, stretch * KEY_STRETCH, after_stretch * KEY_STRETCH - 1};
  }

  // Of blocks of a row each that read the same before a stretch: pieces of what several read the
  // same from there on, as a trie has their prefixes (Juravsky et al., 2024: "Hydragen", with a
  // tree of shared prefixes). Moves blocks only within the range, so that its pieces stay true.
  void share_prefixes(int first, int after, int stretch) {
    for (int same; first < after; first = same) {
      same = first + 1;
      for (int b = same; b < after; b++)
        if (read_same(blocks[first], blocks[b], stretch)) std::swap(blocks[b], blocks[same++]);
      const int most = most_tokens(), count = (same - first + most - 1) / most;
      if (same == first + 1 || num_pieces + count > step.rows || !have_states(first, same)) continue;
      const auto all_read_same = [&](int later) {
        for (int b = first + 1; b < same; b++)
          if (!read_same(blocks[first], blocks[b], later)) return false;
        return true;
      };
      int last = stretch + 1;
      while (all_read_same(last)) last++;
      for (int b = first; b < same; b++) blocks[b].first_own = last;
      for (int b = first; b < same; b += most)
        add_piece(b, same - b < most ? same - b : most, stretch, last);
      share_prefixes(first, same, last);
    }
  }

  int64_t cost(const Piece& piece) const {  // rows, and what loading a tile takes: of one kv head
    const int rows = piece.num_blocks * blocks[piece.first_block].tokens * group();
    return (int64_t)(rows + 24) * (piece.last_key + 1 - piece.first_key) / KEY_STRETCH;
  }
};

void run_attend(const void* args, const Step* step) {
  const Attend& attend = *static_cast<const Attend*>(args);
  const int kv_heads = attend.arena.kv_heads;
  Block* const blocks = reinterpret_cast<Block*>(attend.scratch);
  Piece* const wholes = reinterpret_cast<Piece*>(blocks + step->rows);
  Piece* const pieces = wholes + 2 * step->rows;  // at most as many, and eight a thread
  static_assert(sizeof(Block) + 4 * sizeof(Piece) <= 128 && 8 * sizeof(Piece) <= 128);
  float* states = attend.scratch + attention_tables(step->rows, attend.threads);
  float* out = attend.out;
  if (!out) {
    out = states;
    states += (int64_t)step->rows * attend.heads * attend.arena.dim;
  }
  Work work = {attend, *step, states, attend.scratch + attend.scratch_floats, blocks, wholes};
  for (bool is_alone : {false, true}) {  // one row, behind the others
    const int first = work.num_blocks;
    for (int s = 0; s < step->num_spans; s++)
      if ((step->spans[s].num_rows == 1) == is_alone) work.add_blocks(step->spans[s]);
    if (is_alone && !attend.window) work.share_prefixes(first, work.num_blocks, 0);
  }
  for (int b = 0; b < work.num_blocks; b++)
    work.add_piece(b, 1, blocks[b].first_own, blocks[b].first_stretch + blocks[b].num_stretches);
  int64_t total = 0;
  for (int p = 0; p < work.num_pieces; p++) total += work.cost(wholes[p]);
  const int64_t share = total * kv_heads / (PIECES_PER_THREAD * attend.threads) + 1;
  int num_pieces = 0;
  for (int p = 0; p < work.num_pieces; p++) {
    const Piece& whole = wholes[p];
    const Block& block = blocks[whole.first_block];
    int keys = whole.last_key + 1 - whole.first_key;  // of each piece
    if (attend.threads > 1 && keys > KEY_STRETCH && work.cost(whole) > share &&
        work.have_states(whole.first_block, whole.first_block + 1)) {
      keys = keys / KEY_STRETCH * share / work.cost(whole) * KEY_STRETCH;
      if (keys < KEY_STRETCH) keys = KEY_STRETCH;
    }
    const int start = block.span->start + block.first_token;
    const int first = first_seen(attend.window, start), last = start + block.tokens - 1;
    for (int begin = whole.first_key; begin <= whole.last_key; begin += keys) {
      const int end = begin + keys - 1 < whole.last_key ? begin + keys - 1 : whole.last_key;
      pieces[num_pieces++] = {whole.first_block, whole.num_blocks, begin > first ? begin : first,
                              end < last ? end : last};
      for (int b = 0; b < whole.num_blocks; b++) blocks[whole.first_block + b].left += kv_heads;
    }
  }
  // Of many items one takes a few at once, so that the next one's first tile can be fetched.
  const int64_t items = (int64_t)num_pieces * kv_heads, grain = items < 16 * attend.threads ||
      step->rows > step->num_spans ? 1 : kv_heads;
  parallel(items, grain, [&](int64_t begin, int64_t finish) {
#if KAGARI_ISA >= 4
    const Flushing flushing;
#endif
    for (int64_t i = begin; i < finish; i++) {
      const Piece& piece = pieces[i / kv_heads];
      Block* const its = blocks + piece.first_block;
      Run after[TILE_RUNS] = {};
      if (i + 1 < finish) {
        const Piece& then = pieces[(i + 1) / kv_heads];
        find_tile(attend, *step, blocks[then.first_block], then, (i + 1) % kv_heads,
                  then.first_key / KEY_TILE, after);
      }
      const int32_t precision = attend.arena.precision;
      const auto by_element = precision == FP32   ? attend_piece<float>
                              : precision == BF16 ? attend_piece<uint16_t>
                              : precision == INT8 ? attend_piece<Int8> : attend_piece<Fp8>;
      by_element(attend, *step, out, its, piece, i % kv_heads, after);
      for (int b = 0; b < piece.num_blocks; b++)
        if (__atomic_sub_fetch(&its[b].left, 1, __ATOMIC_ACQ_REL) == 0)
          finish_block(attend, out, its[b], step->rows);
    }
  });
}

}  // namespace

#define JOINED(isa) kagari_isa_##isa
#define NAMED(isa) JOINED(isa)
extern "C" const Kernels NAMED(KAGARI_ISA) = {run_embed,  run_norm, run_gemm, run_rope,
                                               run_attend, run_gate, run_best};
