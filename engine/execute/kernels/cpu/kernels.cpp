// The engine's CPU kernels: quantised products, norms, gates, rotary embedding and paged attention.
//
// No torch, no Python: arrays in, arrays out, called through ctypes (library.py mirrors the structs).
// The file is compiled once per tier (KAGARI_TIER) and once without it: that unit holds the threads
// and the choice of tier. Sums run in one order whatever the batch, the tile or the number of
// threads, so a row's bits are its own; products and sums are fused only where `fma` says so.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// --- what both sides of the file know -----------------------------------------------------------

constexpr int KEY_TILE = 64, KEY_SEGMENT = 256;  // attention: softmax's steps, and what is merged

enum Kind : int32_t { EMBED, NORM, GEMM, ROPE, ATTEND, GATE, BEST };  // of an Op, by its args' type

struct Packed {  // [n][k] weights: per 16 outputs and 32 inputs one run of quants, scales, minima
  const uint8_t* data;
  int32_t n, k;         // as stored: n rounded up to 16, k a multiple of 32
  int32_t bits, block;  // 4 or 8 bits a quant; 16 or 32 inputs a scale
  int32_t wide;         // scales and minima are fp32, else fp16
  int32_t has_min;
};

struct Quants {  // rows of activations as integers: value = (high × 256 + low) × scale
  int8_t* high;    // [rows][width]
  int8_t* low;     // [rows][width]; null: value = high × scale (INT8 activations)
  float* scales;   // [rows][width / 32]
  int32_t* sums;   // [rows][width / 16]: Σ (high × 256 + low), or Σ high
  int32_t width;   // a multiple of 32
};

struct Span {  // consecutive rows of one sequence, at positions start, start + 1, …
  int32_t first_row, num_rows, start, first_page;  // first_page: index into Step.pages
};

struct Step {
  int32_t rows, num_spans, num_last, padding;
  const int32_t* ids;        // [rows]
  const int32_t* positions;  // [rows]
  const int32_t* slots_page; // [rows]: the page that holds each row's position
  const Span* spans;         // in row order, covering all rows
  const int32_t* pages;      // page ids, the spans' tables one after the other
  const int32_t* last;       // [num_last] rows whose logits are wanted
};

struct Arena {  // [page][layer][K,V][kv head][token][dim]
  void* data;
  int64_t page_stride;  // elements from page to page
  int64_t layer_offset; // elements from a page's start to this layer's keys
  int32_t kv_heads, page_size, dim, is_float;  // is_float: fp32, else bf16
};

struct Embed { const Packed* table; float* out; float scale; };  // out [rows][k]

struct Norm {  // x += added (normed by post, if any); then x normed → out and/or quants
  float* x;            // [rows][width]
  const float* added;  // [rows][width], or null
  const float* post;   // gain [width] of a norm of `added`, or null
  const float* gain;   // [width], or null: only the sum is wanted
  float* out;          // [rows][width], or null
  const Quants* quants;  // or null
  float eps;
  int32_t width;
  int32_t only_last;  // rows are Step.last; x is not changed, and `added` is null
};

struct Gemm {
  const Packed* weight;
  const Quants* in;
  const float* bias;  // [n], or null
  float* out;         // [rows][stride]; the first `columns` of a row are written
  int32_t columns, stride;
  int32_t only_last;  // in holds Step.num_last rows
};

struct Rope {  // turns queries and keys, scales queries, writes keys and values to their pages
  const float* qkv;   // [rows][(heads + 2 × kv heads) × dim]
  const float* gain;  // [heads + kv heads][dim] of a norm of each query and key head, or null
  const float* cos;   // [position][dim / 2]; halves layout
  const float* sin;
  float* queries;     // [rows][heads × dim]
  Arena arena;
  int32_t heads;
  float eps, query_scale;
};

struct Attend {  // dim a multiple of 16 up to 256, at most 96 heads a kv head, pages of 16 × 2^n
  const float* queries;  // [rows][heads × dim]
  Arena arena;
  float* out;            // [rows][heads × dim], or null
  const Quants* quants;  // of out's rows, or null
  float* scratch;        // [scratch_floats], see kagari_attention_scratch
  int32_t heads, window; // window 0: all keys
  int64_t scratch_floats;
  int32_t threads, padding;
};

static inline int64_t attention_tables(int64_t rows, int64_t threads) {  // in floats
  return 32 * (rows + threads);
}

struct Gate {  // [rows][2 × width] → activation(first half) × second half
  const float* in;
  float* out;            // [rows][width], or null
  const Quants* quants;  // or null
  int32_t width, is_gelu;
};

struct Best {  // the first highest logit of each row of [num_last][columns]
  const float* logits;
  int32_t* ids;    // [num_last]
  float* values;   // [num_last]; not finite if any logit of the row is NaN or +inf
  int32_t columns;
};

struct Op { int32_t kind, padding; const void* args; };

using RunOp = void (*)(const void* args, const Step* step);
struct Tier { const char* name; RunOp run[7]; };  // by Kind
extern "C" const Tier kagari_tier_0, kagari_tier_1, kagari_tier_2;

// Calls body(context, begin, end) over [0, count) in runs of `grain`, on all threads of the pool.
extern "C" void kagari_parallel(int64_t count, int64_t grain,
                                void (*body)(void*, int64_t, int64_t), void* context);

// Bytes of a run: 16 outputs × 32 inputs, its scales and minima.
static inline int64_t run_bytes(const Packed& p) {
  return p.bits * 64 + (32 / p.block) * 16 * (p.wide ? 4 : 2) * (p.has_min ? 2 : 1);
}

static inline float from_half(uint16_t half) {
  uint32_t bits = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;  // moves the exponent, and makes subnormals normal
  memcpy(&bits, &value, sizeof bits);
  bits |= sign | ((half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
  memcpy(&value, &bits, sizeof value);
  return value;
}

#ifdef KAGARI_TIER  // ==== a tier's kernels =======================================================

#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own header (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace {

// --- vectors of 16 lanes: one register or several, as the tier has them --------------------------

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(64), aligned(1), may_alias));

inline Floats splat(float v) { return Floats{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats value) { *reinterpret_cast<Floats*>(at) = value; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if KAGARI_TIER == 2
  return reinterpret_cast<Floats>(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
#elif KAGARI_TIER == 1
  union { Floats whole; __m256 half[2]; } x{a}, y{b}, z{c};
  for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
  return z.whole;
#else
  return a * b + c;
#endif
}

#if KAGARI_TIER == 2
inline Ints above(Floats a, Floats b) { return a > b; }  // all ones where it holds
inline Floats choose(Ints where, Floats a, Floats b) { return where ? a : b; }
#else  // the compiler would go lane by lane through comparisons wider than its registers
typedef float Part __attribute__((vector_size(KAGARI_TIER ? 32 : 16)));
inline Ints above(Floats a, Floats b) {
  union { Floats whole; Part part[64 / sizeof(Part)]; } x{a}, y{b};
  union { Ints whole; decltype(x.part[0] > x.part[0]) part[64 / sizeof(Part)]; } result;
  for (unsigned i = 0; i < 64 / sizeof(Part); i++) result.part[i] = x.part[i] > y.part[i];
  return result.whole;
}
inline Floats choose(Ints where, Floats a, Floats b) {
  return reinterpret_cast<Floats>((where & reinterpret_cast<Ints>(a)) |
                                  (~where & reinterpret_cast<Ints>(b)));
}
#endif

inline Floats load_bf16(const uint16_t* at) {
  return reinterpret_cast<Floats>(
      __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Ints) << 16);
}

inline void store_bf16(uint16_t* at, Floats value) {  // to nearest, ties to even
  Ints bits = reinterpret_cast<Ints>(value);
  Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *reinterpret_cast<Halves*>(at) = __builtin_convertvector(rounded, Halves);
}

inline Floats load_part(const float* at, int count) {  // of 16 lanes; the others are 0
  Floats value = splat(0);
  memcpy(&value, at, count * sizeof(float));
  return value;
}

inline void store_part(float* at, Floats value, int count) {
  memcpy(at, &value, count * sizeof(float));
}

inline float sum(Floats value) {  // of the lanes, halves folded together
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) value[i] += value[i + half];
  return value[0];
}

// e^x, x cut to 88; 0 below -87; within 1 ulp. 2^n e^r with |r| <= ln 2 / 2, polynomial fitted.
inline Floats exponential(Floats x) {
  Floats top = splat(88.0f), shift = splat(12582912.0f);  // 1.5 × 2^23: rounds to an integer
  Floats cut = choose(above(x, top), top, x);
  Floats shifted = fma(cut, splat(1.44269504f), shift), n = shifted - shift;
  Floats r = fma(n, splat(-0.693359375f), cut);
  r = fma(n, splat(2.12194442e-4f), r);
  Floats p = fma(splat(1.37513888e-3f), r, splat(8.36892333e-3f));
  p = fma(p, r, splat(4.16695327e-2f));
  p = fma(p, r, splat(1.66665182e-1f));
  p = fma(p, r, splat(4.99999881e-1f));
  p = fma(p, r * r, r) + 1.0f;
  Ints power = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
  Floats value = p * reinterpret_cast<Floats>(power);
  return choose(above(splat(-87.0f), x), splat(0), value);
}

template <class Body>
inline void parallel(int64_t count, int64_t grain, const Body& body) {
  kagari_parallel(count, grain, [](void* context, int64_t begin, int64_t end) {
    (*static_cast<const Body*>(context))(begin, end);
  }, const_cast<Body*>(&body));
}

// --- quantised products --------------------------------------------------------------------------

typedef int8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));

template <int d>
inline Ints exchange(Ints v) {  // lane i gets lane i ^ d
  return __builtin_shufflevector(v, v, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d,
                                 8 ^ d, 9 ^ d, 10 ^ d, 11 ^ d, 12 ^ d, 13 ^ d, 14 ^ d, 15 ^ d);
}

template <class Fold>
inline int32_t folded(Ints v, const Fold& fold) {
  v = fold(v, exchange<8>(v));
  v = fold(v, exchange<4>(v));
  v = fold(v, exchange<2>(v));
  return fold(v, exchange<1>(v))[0];
}

// Blocks of 32 share a scale: largest / 32512 of 16-bit integers split in two signed bytes, or
// largest / 127 where there is no low plane. A block with a NaN or infinity gets the scale NaN.
void quantize_row(const float* x, const Quants& to, int64_t row) {
  const float limit = to.low ? 32512 : 127;
  for (int64_t at = 0, block = row * to.width / 32; at < to.width; at += 32, block++) {
    const Floats halves[2] = {load(x + at), load(x + at + 16)};
    const auto larger = [](Ints a, Ints b) { return a - ((a - b) & ((a - b) >> 31)); };  // if ≥ 0
    const int32_t bits = folded(larger(reinterpret_cast<Ints>(halves[0]) & 0x7fffffff,
                                       reinterpret_cast<Ints>(halves[1]) & 0x7fffffff), larger);
    float largest;  // by its bits: a NaN is larger than infinity
    memcpy(&largest, &bits, sizeof largest);
    const bool is_sane = bits < 0x7f800000, is_zero = largest < 1e-30f;  // limit / largest: inf
    to.scales[block] = !is_sane ? NAN : is_zero ? 0 : largest / limit;
    for (int half = 0; half < 2; half++) {
      const int64_t first = block * 32 + half * 16;
      const Floats scaled = is_sane && !is_zero ? halves[half] * (limit / largest) : splat(0);
      // Adding 1.5 × 2²³ rounds to the nearest integer, ties to even, in the lowest bits.
      const Ints value = reinterpret_cast<Ints>(scaled + 12582912.f) - 0x4b400000;
      const Ints high = to.low ? (value + 128) >> 8 : value;
      *reinterpret_cast<Sixteen*>(to.high + first) = __builtin_convertvector(high, Sixteen);
      if (to.low)
        *reinterpret_cast<Sixteen*>(to.low + first) =
            __builtin_convertvector(value - (high << 8), Sixteen);
      to.sums[block * 2 + half] = folded(value, [](Ints a, Ints b) { return a + b; });
    }
  }
}

// A tile is 16 outputs: in one register or several, as the tier has them.
#if KAGARI_TIER == 2
#define WIDE(name) _mm512_##name
#elif KAGARI_TIER == 1
#define WIDE(name) _mm256_##name
#else
#define WIDE(name) _mm_##name
#endif
constexpr int PARTS = KAGARI_TIER == 2 ? 1 : KAGARI_TIER == 1 ? 2 : 4;
constexpr int PLANES = KAGARI_TIER == 2 ? 2 : 1;  // one after the other, or both at once
typedef float Reals __attribute__((vector_size(64 / PARTS), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(64 / PARTS), aligned(4), may_alias));

inline Reals all(float x) { return (Reals)WIDE(set1_ps)(x); }

inline Whole all_four(const int8_t* at) {
  int32_t bytes;
  memcpy(&bytes, at, sizeof bytes);
  return (Whole)WIDE(set1_epi32)(bytes);
}

inline Reals multiply_add(Reals a, Reals b, Reals c) {
#if KAGARI_TIER == 0
  return a * b + c;
#else
  return (Reals)WIDE(fmadd_ps)(a, b, c);
#endif
}

inline Reals number(const uint8_t* at, int part, bool wide) {  // a part of 16 fp32 or fp16
  if (wide) return reinterpret_cast<const Reals*>(at)[part];
#if KAGARI_TIER == 2
  return (Reals)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)at));
#elif KAGARI_TIER == 1
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + part));
#else
  uint16_t half[4];
  memcpy(half, at + 8 * part, sizeof half);
  return Reals{from_half(half[0]), from_half(half[1]), from_half(half[2]), from_half(half[3])};
#endif
}

// `four` are four activations of a row, for all lanes; `dot` adds their products with each lane's
// four weights to it.
#if KAGARI_TIER == 2
typedef Whole Four;
inline Four four(const int8_t* plane, const int8_t*) { return all_four(plane); }
inline Whole dot(Whole sum, Whole weights, Four by) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(by));
  return sum;
}
#else
typedef decltype(WIDE(set1_epi32)(0)) Words;
struct Four { Words even, odd; };  // as 16 bits
inline Four four(const int8_t* high, const int8_t* low) {
  const Words bytes = (Words)all_four(high), shifted = WIDE(slli_epi16)(bytes, 8);
  if (!low) return {WIDE(srai_epi16)(shifted, 8), WIDE(srai_epi16)(bytes, 8)};
  const Words rest = (Words)all_four(low), odd = bytes & WIDE(set1_epi16)(-256);
  return {WIDE(add_epi16)(shifted, WIDE(srai_epi16)(WIDE(slli_epi16)(rest, 8), 8)),
          WIDE(add_epi16)(odd, WIDE(srai_epi16)(rest, 8))};
}
inline Whole dot(Whole sum, Whole weights, const Four& by) {
  const Words even = (Words)weights & WIDE(set1_epi16)(255);
  const Words odd = WIDE(srli_epi16)((Words)weights, 8);
  return sum + (Whole)WIDE(madd_epi16)(even, by.even) + (Whole)WIDE(madd_epi16)(odd, by.odd);
}
#endif

constexpr int MOST_ROWS = KAGARI_TIER == 2 ? 6 : 2;  // held in registers, by a panel's two tiles
constexpr int FEW_ROWS = KAGARI_TIER == 2 ? 4 : 2;   // or by tiles as they are packed
constexpr int GROUP_ROWS = 66, PANEL_BLOCKS = 24;    // rows, and blocks of inputs, of a panel
constexpr int DIRECT_ROWS = 11;                      // more are worth a panel

struct alignas(64) Panel {  // stays in the first level cache
  uint8_t runs[2][PANEL_BLOCKS][768];  // of two tiles, as 8 bits and fp32
  float sums[GROUP_ROWS][2][16];       // of the rows' products so far
};

struct Runs {  // of two tiles, from their block `first` on
  const uint8_t* at[2];
  int64_t step;            // bytes from a block to the next
  const uint8_t* next[2];  // may be fetched meanwhile
  int32_t first, blocks, bits, wide, has_min;
  bool is_halved, is_signed;  // 16 inputs share a scale; 8-bit quants are stored + 128
};

// Rewrites runs as 8 bits and fp32, so that many rows unpack them once.
void widen(const Packed& from, const uint8_t* run, int blocks, uint8_t (*to)[768]) {
  const int count = 32 / from.block * (from.has_min ? 2 : 1), size = from.wide ? 64 : 32;
  for (int b = 0; b < blocks; b++, run += run_bytes(from)) {
    if (from.bits == 8) memcpy(to[b], run, 512);
    for (int i = 0; from.bits == 4 && i < 256; i += sizeof(Whole)) {
      const Whole both = *reinterpret_cast<const Whole*>(run + i);
      *reinterpret_cast<Whole*>(to[b] + i) = both & 0x0f0f0f0f;
      *reinterpret_cast<Whole*>(to[b] + i + 256) = (both >> 4) & 0x0f0f0f0f;
    }
    const uint8_t* numbers = run + 64 * from.bits;
    for (int i = 0; i < count * PARTS; i++)
      reinterpret_cast<Reals*>(to[b] + 512)[i] =
          number(numbers + i / PARTS * size, i % PARTS, from.wide);
  }
}

#define EACH_VECTOR(...)                                 \
  _Pragma("GCC unroll 8") for (int r = 0; r < Rows; r++) \
  _Pragma("GCC unroll 8") for (int v = 0; v < Vectors; v++) __VA_ARGS__

// Adds to sums[r][tile] the products of row + r with the runs of that tile, or of both tiles.
// Meanwhile `fetch` bytes of the next runs come for each block. A block's integers are summed
// exactly; what is known at compile time (Parts: a block's scales) keeps all in registers.
template <int Rows, int Bits, int Parts>
__attribute__((noinline))  // alone it gets the registers it needs
void multiply(const Runs& from, int64_t fetch, int tile, const Quants& in, int64_t row,
              float (*sums)[2][16]) {
  constexpr int Tiles = Rows == 1 ? 1 : 2, Vectors = Tiles * PARTS, Quads = 8 / Parts;
  constexpr bool Apart = PLANES == 2 && Rows < 6;  // few rows: planes in chains of their own
  const Runs runs = from;
  const bool wide = Rows == 6 || runs.wide;
  const int size = wide ? 64 : 32;
  const int64_t width = in.width, first = row * width + runs.first * 32;
  const int64_t step = Rows == 6 ? sizeof(Panel::runs[0][0]) : runs.step;
  const int8_t *high = in.high + first, *low = in.low ? in.low + first : nullptr;
  const float* scales = in.scales + first / 32;
  const int32_t* totals = in.sums + first / 16;
  const uint8_t* at[2] = {runs.at[tile], runs.at[1]};
  float inputs[Rows][PANEL_BLOCKS * Parts];  // their sums: what a row has of each minimum
  for (int r = 0; runs.has_min && r < Rows; r++) {
    const int32_t* total = totals + r * (width / 16);
    const float* scale = scales + r * (width / 32);
    for (int b = 0; b < runs.blocks; b++)
      if (Parts == 1) inputs[r][b] = (total[2 * b] + total[2 * b + 1]) * scale[b];
      else for (int i = 2 * b; i < 2 * b + 2; i++) inputs[r][i] = total[i] * scale[b];
  }
  Reals result[Rows][Vectors];
  EACH_VECTOR(result[r][v] = reinterpret_cast<const Reals*>(sums[r][tile])[v]);
  for (int64_t b = 0; b < runs.blocks; b++, at[0] += step, at[1] += step) {
    for (int64_t i = 0; i < fetch; i += 64)
      for (int t = 0; t < Tiles; t++)
        __builtin_prefetch(runs.next[tile + t] + b * fetch + i);
#pragma GCC unroll 2
    for (int part = 0; part < Parts; part++) {
      Whole dots[Rows][Vectors] = {}, lows[Rows][Vectors] = {};
#pragma GCC unroll 2
      for (int plane = 0; plane < PLANES; plane++) {
        if (plane && !low) continue;
        if (plane && !Apart) EACH_VECTOR(dots[r][v] <<= 8);
#pragma GCC unroll 8
        for (int i = Quads * part; i < Quads * (part + 1); i++) {
          __asm__ volatile("" ::: "memory");  // else later loads come early, and results spill
          const int64_t quad = 64 * (i % Bits);
          EACH_VECTOR({
            Whole weights = reinterpret_cast<const Whole*>(at[v / PARTS] + quad)[v % PARTS];
            if (Bits == 4) weights = (weights >> (i / 4 * 4)) & 0x0f0f0f0f;
            const int64_t offset = r * width + b * 32 + i * 4;
            const Four by = four((plane ? low : high) + offset,
                                 PLANES == 1 && low ? low + offset : nullptr);
            Whole& sum = plane && Apart ? lows[r][v] : dots[r][v];
            sum = dot(sum, weights, by);
          });
        }
      }
      if (Apart && low) EACH_VECTOR(dots[r][v] = (dots[r][v] << 8) + lows[r][v]);
      if (Bits == 8 && runs.is_signed) EACH_VECTOR({
        const int32_t* total = totals + r * (width / 16) + 2 * b;
        dots[r][v] -= (Parts == 2 ? total[part] : total[0] + total[1]) * 128;
      });
      const int scale_at = 64 * Bits + part * size, minimum_at = scale_at + Parts * size;
      EACH_VECTOR({
        const Reals scale = number(at[v / PARTS] + scale_at, v % PARTS, wide);
        result[r][v] = multiply_add(__builtin_convertvector(dots[r][v], Reals),
                                    scale * scales[r * (width / 32) + b], result[r][v]);
      });
      if (runs.has_min) EACH_VECTOR({
        const Reals minimum = number(at[v / PARTS] + minimum_at, v % PARTS, wide);
        result[r][v] = multiply_add(minimum, all(inputs[r][b * Parts + part]), result[r][v]);
      });
    }
  }
  EACH_VECTOR(reinterpret_cast<Reals*>(sums[r][tile])[v] = result[r][v]);
}

template <int Rows>
void multiply_rows(const Runs& runs, int64_t fetch, const Quants& in, int64_t row,
                   float (*sums)[2][16]) {
  constexpr int Bits = Rows == 6 ? 8 : 4;  // six rows: of a panel
  const auto by_runs = runs.is_halved
      ? (runs.bits == 4 ? multiply<Rows, Bits, 2> : multiply<Rows, 8, 2>)
      : (runs.bits == 4 ? multiply<Rows, Bits, 1> : multiply<Rows, 8, 1>);
  for (int tile = 0; tile < 2; tile += Rows == 1 ? 1 : 2)  // one row: one stream after the other
    by_runs(runs, fetch, tile, in, row, sums);
}

// Writes rows [row, row + count) of the tiles `tile` and the next.
inline void finish(const Gemm& gemm, int64_t tile, int64_t row, int count, float (*sums)[2][16]) {
  for (int t = 0; t < 2 && (tile + t) * 16 < gemm.columns; t++) {
    const int64_t column = (tile + t) * 16;
    const int lanes = gemm.columns - column < 16 ? gemm.columns - column : 16;
    const Floats bias = gemm.bias ? load_part(gemm.bias + column, lanes) : splat(0);
    float* out = gemm.out + row * gemm.stride + column;
    for (int r = 0; r < count; r++, out += gemm.stride) {
      const Floats value = load(sums[r][t]), sum = gemm.bias ? value + bias : value;
      if (lanes == 16) store(out, sum); else store_part(out, sum, lanes);
    }
  }
}

// Rows [row, row + count) by the tiles `tile` and the next; an odd last one is taken twice.
void multiply_pair(const Gemm& gemm, int64_t tile, int64_t row, int count) {
  const Packed& weight = *gemm.weight;
  const int64_t blocks = weight.k / 32, bytes = run_bytes(weight);
  const bool widens = count > DIRECT_ROWS;
  Panel panel;
  memset(panel.sums, 0, count * sizeof panel.sums[0]);
  Runs runs{};
  runs.step = widens ? sizeof panel.runs[0][0] : bytes;
  runs.bits = widens ? 8 : weight.bits;
  runs.wide = widens || weight.wide;
  runs.has_min = weight.has_min;
  runs.is_halved = weight.block == 16;
  runs.is_signed = weight.bits == 8;
  for (int64_t block = 0; block < blocks; block += PANEL_BLOCKS) {
    runs.first = block;
    runs.blocks = blocks - block < PANEL_BLOCKS ? blocks - block : PANEL_BLOCKS;
    for (int t = 0; t < 2; t++) {
      const int64_t which = tile + t < weight.n / 16 ? tile + t : tile;
      runs.at[t] = weight.data + (which * blocks + block) * bytes;
      runs.next[t] = runs.at[t] + 2 * blocks * bytes;  // the next pair's
      if (!widens) continue;
      widen(weight, runs.at[t], runs.blocks, panel.runs[t]);
      runs.at[t] = panel.runs[t][0];
    }
    const bool is_last = block + runs.blocks == blocks;
    for (int r = 0, rows; r < count; r += rows) {
      const int left = count - r, most = widens ? MOST_ROWS : FEW_ROWS;
      rows = left >= most ? most : left >= FEW_ROWS ? FEW_ROWS : left >= 2 ? 2 : 1;
      for (int i = 0; is_last && i < 2 * rows; i++)
        __builtin_prefetch(gemm.out + (row + r + i / 2) * gemm.stride + (tile + i % 2) * 16, 1);
      const auto by_rows = rows == MOST_ROWS  ? multiply_rows<MOST_ROWS>
                           : rows == FEW_ROWS ? multiply_rows<FEW_ROWS>
                           : rows == 2        ? multiply_rows<2> : multiply_rows<1>;
      by_rows(runs, r ? 0 : bytes, *gemm.in, row + r, panel.sums + r);
      // At once: nobody waits for these stores while the next rows are multiplied.
      if (is_last) finish(gemm, tile, row + r, rows, panel.sums + r);
    }
  }
}

void run_gemm(const void* args, const Step* step) {
  const Gemm& gemm = *static_cast<const Gemm*>(args);
  const int64_t rows = gemm.only_last ? step->num_last : step->rows;
  const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
  const int64_t pairs = (gemm.weight->n / 16 + 1) / 2;
  const int64_t grain = 8192 / (gemm.weight->k * (rows + 8)) + 1;  // a microsecond or more
  parallel(pairs * groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i % groups * GROUP_ROWS, left = rows - row;
      multiply_pair(gemm, i / groups * 2, row, left < GROUP_ROWS ? left : GROUP_ROWS);
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

inline int64_t rows_a_chunk(int32_t width) { return 8192 / width + 1; }  // some microseconds

// Calls body(column, lanes) for each 16 columns and the rest.
template <class Body>
inline void each_vector(int32_t width, const Body& body) {
  int32_t column = 0;
  for (; column + 16 <= width; column += 16) body(column, 16);
  if (column < width) body(column, width - column);
}

inline Floats load_lanes(const float* at, int lanes) {
  return lanes == 16 ? load(at) : load_part(at, lanes);
}

inline void store_lanes(float* at, Floats value, int lanes) {
  if (lanes == 16) store(at, value); else store_part(at, value, lanes);
}

inline Floats norm_factor(const float* x, int32_t width, float eps) {  // 1 / root mean square
  Floats squares = splat(0);
  each_vector(width, [&](int32_t at, int lanes) {
    Floats value = load_lanes(x + at, lanes);
    squares = fma(value, value, squares);
  });
  return splat(1.0f / __builtin_sqrtf(sum(squares) / width + eps));
}

// A row of `out` (of whole blocks, if it is quantised too), else `spare`, filled up with zeros.
inline float* row_or(float* out, int64_t row, int32_t width, float* spare, const Quants* quants) {
  if (out) return out + row * width;
  for (int32_t i = width; quants && i < quants->width; i++) spare[i] = 0;
  return spare;
}

void run_norm(const void* args, const Step* step) {
  const Norm& op = *static_cast<const Norm*>(args);
  int32_t width = op.width, rows = op.only_last ? step->num_last : step->rows;
  parallel(rows, rows_a_chunk(width), [&](int64_t begin, int64_t end) {
    float* spare = (float*)__builtin_alloca(sizeof(float) * (width + 32));
    for (int64_t row = begin; row < end; row++) {
      float* x = op.x + (op.only_last ? step->last[row] : row) * (int64_t)width;
      if (op.added) {
        const float* added = op.added + row * width;
        Floats factor = op.post ? norm_factor(added, width, op.eps) : splat(1);
        each_vector(width, [&](int32_t at, int lanes) {
          Floats value = load_lanes(added + at, lanes);
          if (op.post) value = value * factor * load_lanes(op.post + at, lanes);
          store_lanes(x + at, load_lanes(x + at, lanes) + value, lanes);
        });
      }
      if (!op.gain) continue;
      Floats factor = norm_factor(x, width, op.eps);
      float* out = row_or(op.out, row, width, spare, op.quants);
      each_vector(width, [&](int32_t at, int lanes) {
        Floats value = load_lanes(x + at, lanes) * factor * load_lanes(op.gain + at, lanes);
        store_lanes(out + at, value, lanes);
      });
      if (op.quants) quantize_row(out, *op.quants, row);
    }
  });
}

void run_gate(const void* args, const Step* step) {
  const Gate& op = *static_cast<const Gate*>(args);
  int32_t width = op.width;
  parallel(step->rows, rows_a_chunk(2 * width), [&](int64_t begin, int64_t end) {
    float* spare = (float*)__builtin_alloca(sizeof(float) * (width + 32));
    for (int64_t row = begin; row < end; row++) {
      const float* in = op.in + row * 2 * width;
      float* out = row_or(op.out, row, width, spare, op.quants);
      each_vector(width, [&](int32_t at, int lanes) {
        Floats x = load_lanes(in + at, lanes), t = x;
        if (op.is_gelu)  // x / (1 + e^-2u) = x (1 + tanh u) / 2, u = √(2/π) (x + 0.044715 x³)
          t = x * fma(x * x, splat(0.0713548139f), splat(1.59576917f));
        Floats value = x / (exponential(-t) + 1.0f) * load_lanes(in + width + at, lanes);
        store_lanes(out + at, value, lanes);
      });
      if (op.quants) quantize_row(out, *op.quants, row);
    }
  });
}

void run_best(const void* args, const Step* step) {
  const Best& op = *static_cast<const Best*>(args);
  parallel(step->num_last, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* logits = op.logits + row * op.columns;
      Floats best = splat(-__builtin_inff());
      Ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      Ints ids = index, odd = index;  // odd: below 0 in lanes that met NaN
      each_vector(op.columns, [&](int32_t at, int lanes) {
        Floats value = best;  // what is beyond the row is never better
        if (lanes == 16) value = load(logits + at);
        else memcpy(&value, logits + at, lanes * sizeof(float));
        Ints better = above(value, best);
        best = choose(better, value, best);
        ids = (better & (index + at)) | (~better & ids);
        odd |= 0x7f800000 - (reinterpret_cast<Ints>(value) & 0x7fffffff);
      });
      int chosen = 0;
      bool is_number = odd[0] >= 0;
      for (int i = 1; i < 16; i++) {
        bool better = best[i] > best[chosen] || (best[i] == best[chosen] && ids[i] < ids[chosen]);
        if (better) chosen = i;
        is_number &= odd[i] >= 0;
      }
      op.ids[row] = ids[chosen];
      op.values[row] = is_number ? best[chosen] : __builtin_nanf("");
    }
  });
}

// --- attention -----------------------------------------------------------------------------------

// Keys and values are read in absolute tiles of 64 keys. A row's softmax runs online (Milakov &
// Gimelshein, 2018) over the tiles of an absolute segment; segments are then merged in ascending
// order (Dao et al., 2023: "split KV"). So a row's bits do not depend on what it is computed with.

constexpr int LANES = KAGARI_TIER == 2 ? 16 : KAGARI_TIER == 1 ? 8 : 4;  // of one register
constexpr int TILE_ROWS = 6, TILE_COLUMNS = KAGARI_TIER == 2 ? 4 : 2;    // registers that sum
constexpr int MAX_DIM = 256, BLOCK_ROWS = 96, PIECES_PER_THREAD = 4;
constexpr float FLOOR = -1e30f;     // below any score
constexpr float HIDDEN = -2e30f;    // below FLOOR: its weight is 0 whatever the highest score

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t LaneInts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Lanes& lanes(float* at) { return *reinterpret_cast<Lanes*>(at); }
inline const Lanes& lanes(const float* at) { return *reinterpret_cast<const Lanes*>(at); }
inline Lanes spread(float value) { return value - Lanes{}; }

#if KAGARI_TIER == 2
#define WIDE(name) _mm512_##name
#elif KAGARI_TIER == 1
#define WIDE(name) _mm256_##name
#else
#define WIDE(name) _mm_##name
#endif

inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if KAGARI_TIER > 0
  return WIDE(fmadd_ps)(a, b, c);
#else
  return a * b + c;
#endif
}

inline float highest(Lanes value) {
  union { Lanes whole; __m128 part[LANES / 4]; } parts{value};
  __m128 best = parts.part[0];
  for (int i = 1; i < LANES / 4; i++) best = _mm_max_ps(best, parts.part[i]);
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  best = _mm_max_ps(best, _mm_shuffle_ps(best, best, 1));
  return _mm_cvtss_f32(best);
}

inline Lanes larger(Lanes a, Lanes b) { return WIDE(max_ps)(a, b); }  // b if one is not a number

// 2^x for x ≤ 0, 0 below 2^-126.5; reduction to |r| ≤ 1/2 and polynomial of Cephes' exp2f.
inline Lanes power_of_two(Lanes x) {
  const float magic = 12582912.0f + 127.0f;  // 1.5 × 2^23: rounds; 127: the exponent's bias
  const Lanes cut = larger(spread(-126.9f), x), shifted = cut + magic, r = cut - (shifted - magic);
  Lanes p = fused(spread(1.535336188e-4f), r, spread(1.339887440e-3f));
  p = fused(p, r, spread(9.618437357e-3f));
  p = fused(p, r, spread(5.550332471e-2f));
  p = fused(p, r, spread(2.402264791e-1f));
  p = fused(p, r, spread(6.931472028e-1f));
  p = fused(p, r, spread(1));
  return p * reinterpret_cast<Lanes>(reinterpret_cast<LaneInts>(shifted) << 23);
}

struct Run {  // sixteen keys and values [dim] of a page, of which begin … end - 1 may be read
  const char* keys;
  const char* values;
  int begin, end;
};

struct Ahead {  // keys and values that come next, fetched line by line between other work
  const char* keys;
  const char* values;

  Ahead from(int64_t offset) const { return {keys + offset, values + offset}; }

  // Always inline: GCC 12 takes a function that does nothing else for one without effect.
  __attribute__((always_inline)) void fetch(int64_t offset) const {
    __builtin_prefetch(keys + offset, 0, 2);
    __builtin_prefetch(values + offset, 0, 2);
  }
};

inline Lanes widened(const float* at) { return lanes(at); }

inline Lanes widened(const uint16_t* at) {  // bf16
#if KAGARI_TIER == 2
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
#elif KAGARI_TIER == 1
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
#else
  __m128i bits = _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)at), _mm_setzero_si128());
#endif
  return (Lanes)WIDE(slli_epi32)(bits, 16);
}

// c [rows][columns] = c × scales (0 if null) + a [rows][depth] · b [depth][columns], ascending.
template <int ROWS, int COLUMNS, class Element>
inline void multiply_tile(const float* a, int64_t a_stride, const Element* b, int64_t b_stride,
                          float* c, int64_t c_stride, const float* scales, int depth,
                          Ahead ahead) {
  Lanes sums[ROWS][COLUMNS] = {};
  if (scales)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++)
        sums[r][j] = lanes(c + r * c_stride + j * LANES) * scales[r];
  for (int d = 0; d < depth; d++, b += b_stride) {
    if (sizeof(Element) == 2) ahead.fetch(d * COLUMNS * LANES);
    Lanes column[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; j++) column[j] = widened(b + j * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      Lanes value = spread(a[r * a_stride + d]);
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++) sums[r][j] = fused(value, column[j], sums[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; j++) lanes(c + r * c_stride + j * LANES) = sums[r][j];
}

// With bf16 also fetches depth × columns bytes of what is ahead.
template <int ROWS, class Element>
void multiply(int rows, const float* a, int64_t a_stride, const Element* b, int columns, float* c,
              int64_t c_stride, const float* scales, int depth, Ahead ahead) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1)
      multiply<ROWS - 1>(rows, a, a_stride, b, columns, c, c_stride, scales, depth, ahead);
    return;
  }
  int at = 0;
  for (; at + TILE_COLUMNS * LANES <= columns; at += TILE_COLUMNS * LANES)
    multiply_tile<ROWS, TILE_COLUMNS>(a, a_stride, b + at, columns, c + at, c_stride, scales, depth,
                                      ahead.from(depth * at));
  for (; at < columns; at += LANES)
    multiply_tile<ROWS, 1>(a, a_stride, b + at, columns, c + at, c_stride, scales, depth,
                           ahead.from(depth * at));
}

struct Workspace {  // a thread's own; a state: weighted values [dim], highest score, sum of weights
  float queries[BLOCK_ROWS * MAX_DIM];        // [rows][dim]
  float keys[MAX_DIM * KEY_TILE];             // [dim][64]
  float values[KEY_TILE * MAX_DIM];           // [64][dim]
  float scores[TILE_ROWS * KEY_TILE];         // then weights
  float weights[BLOCK_ROWS * LANES];          // [rows][LANES]: sums of weights in a segment
  float segment[BLOCK_ROWS * (MAX_DIM + 16)]; // states
  float merged[BLOCK_ROWS * (MAX_DIM + 16)];  // states
  float copy[16 * MAX_DIM];                   // of keys some of which must not be read
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
    for (; i + LANES <= dim; i += LANES) squares = fused(lanes(in + i), lanes(in + i), squares);
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

inline void write_slot(const Arena& arena, int64_t element, const float* from) {
  typedef uint32_t Bits __attribute__((may_alias));
  if (arena.is_float) {
    memcpy(static_cast<float*>(arena.data) + element, from, 4 * arena.dim);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(arena.data) + element;
  for (int i = 0; i < arena.dim; i++) {  // to nearest, ties to even
    const uint32_t bits = reinterpret_cast<const Bits*>(from)[i];
    to[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
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
      int64_t slot = step->slots_page[row] * arena.page_stride + arena.layer_offset +
                     position % arena.page_size * dim;
      for (int h = 0; h < turned + arena.kv_heads; h++) {
        const float* in = rope.qkv + (row * (turned + arena.kv_heads) + h) * dim;
        float* query = rope.queries + (row * rope.heads + h) * dim;
        if (h < turned)
          turn_head(in, rope.gain ? rope.gain + h * dim : nullptr, rope.eps,
                    rope.cos + position * half, rope.sin + position * half,
                    h < rope.heads ? rope.query_scale : 1, dim, h < rope.heads ? query : key);
        if (h < rope.heads) continue;
        write_slot(arena, slot, h < turned ? key : in);  // keys, then values follow each other
        slot += (int64_t)arena.page_size * dim;
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
#if KAGARI_TIER == 2
    __m512i all = _mm512_inserti32x4(_mm512_castsi128_si512(quad(0)), quad(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(all, quad(2), 2), quad(3), 3);
#elif KAGARI_TIER == 1
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

inline Lanes low_half(LaneInts pair) { return reinterpret_cast<Lanes>(pair << 16); }
inline Lanes high_half(LaneInts pair) {
  return reinterpret_cast<Lanes>(pair & (int32_t)0xffff0000);
}

// Scores of LANES keys [dim] for a few queries [dim]: what `multiply` gives, without a copy of keys.
template <int ROWS, bool IS_FLOAT>
void score_keys(int rows, const float* queries, const int32_t* keys, int dwords, float* scores,
                Ahead ahead) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1)
      score_keys<ROWS - 1, IS_FLOAT>(rows, queries, keys, dwords, scores, ahead);
    return;
  }
  const int dim = IS_FLOAT ? dwords : 2 * dwords;
  Lanes sums[ROWS] = {};
  for (int first = 0; first < dwords; first += 4) {
    for (int i = 0; i < 8 * LANES; i += 64) ahead.fetch(2 * first * LANES + i);
    const Turned turned = turn_rows(keys, dwords, first);
    auto add = [&](int d, Lanes column) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        sums[r] = fused(spread(queries[r * dim + d]), column, sums[r]);
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      if (IS_FLOAT) {
        add(first + i, reinterpret_cast<Lanes>(turned.dword[i]));
      } else {
        add(2 * (first + i), low_half(turned.dword[i]));
        add(2 * (first + i) + 1, high_half(turned.dword[i]));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) lanes(scores + r * KEY_TILE) = sums[r];
}

inline Run find_run(const Arena& arena, const int32_t* pages, int kv_head, int key, int first,
                    int last) {
  const int row = arena.dim * (arena.is_float ? 4 : 2);
  Run run = {nullptr, nullptr, key < first ? first - key : 0, 16};
  if (key + 15 > last) run.end = last - key + 1;
  if (run.begin >= run.end) return run;
  const int64_t page = pages[key / arena.page_size], head = (int64_t)arena.page_size * row;
  run.keys = static_cast<const char*>(arena.data) + kv_head * head +
             key % arena.page_size * (int64_t)row +
             (page * arena.page_stride + arena.layer_offset) * (arena.is_float ? 4 : 2);
  run.values = run.keys + arena.kv_heads * head;
  return run;
}

// The run's keys, or a copy with zeros where it must not be read.
inline const int32_t* whole_keys(const Run& run, int row, float* copy) {
  if (run.begin == 0 && run.end == 16) return reinterpret_cast<const int32_t*>(run.keys);
  memset(copy, 0, 16 * row);
  memcpy(reinterpret_cast<char*>(copy) + run.begin * row, run.keys + run.begin * row,
         (run.end - run.begin) * row);
  return reinterpret_cast<const int32_t*>(copy);
}

// A tile as fp32: keys [dim][64], values [64][dim]; zero where a run must not be read.
void load_tile(const Run* runs, int dim, bool is_float, Workspace& work) {
  const int row = dim * (is_float ? 4 : 2);
  for (int at = 0; at < KEY_TILE; at += 16) {
    const Run& run = runs[at / 16];
    float* values = work.values + at * dim;
    if (run.begin >= run.end) {
      for (int d = 0; d < dim; d++) memset(work.keys + d * KEY_TILE + at, 0, 64);
      memset(values, 0, 64 * dim);
      continue;
    }
    const int32_t* keys = whole_keys(run, row, work.copy);
    for (int i = 0; i < 16; i += LANES) {
      for (int first = 0; first < row / 4; first += 4) {
        const Turned turned = turn_rows(keys + i * row / 4, row / 4, first);
        for (int j = 0; j < 4; j++) {
          const LaneInts dword = turned.dword[j];
          float* to = work.keys + (first + j) * (is_float ? 1 : 2) * KEY_TILE + at + i;
          lanes(to) = is_float ? reinterpret_cast<Lanes>(dword) : low_half(dword);
          if (!is_float) lanes(to + KEY_TILE) = high_half(dword);
        }
      }
    }
    if (run.end - run.begin < 16) memset(values, 0, 64 * dim);
    for (int i = run.begin * dim; i < run.end * dim; i += LANES)
      lanes(values + i) = is_float ? widened(reinterpret_cast<const float*>(run.values) + i)
                                   : widened(reinterpret_cast<const uint16_t*>(run.values) + i);
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
    lanes(into + d) = fused(lanes(later + d), spread(add), lanes(into + d) * keep);
  into[dim] = high;
  into[dim + 1] = later[dim + 1] * add + into[dim + 1] * keep;
}

inline int first_seen(int window, int position) {  // the first key that a token sees
  return window && position >= window ? position - window + 1 : 0;
}

struct Block {  // consecutive tokens of a span
  const Span* span;
  float* states;  // [kv head][segment][row] if its segments are several threads' work, else null
  int32_t first_token, tokens, first_segment, num_segments;
  int32_t left;   // work items not done
};

struct Piece { int32_t block, first_key, last_key; };  // of whole segments; × kv heads: work items

void write_state(const Attend& attend, float* out, const Block& block, int kv_head, int row,
                 const float* state) {
  const int dim = attend.arena.dim, group = attend.heads / attend.arena.kv_heads;
  const int64_t token = block.span->first_row + block.first_token + row / group;
  float* to = out + (token * attend.heads + kv_head * group + row % group) * dim;
  for (int d = 0; d < dim; d += LANES)  // + 0: a sum of nothing but zeros has no sign
    lanes(to + d) = lanes(state + d) / state[dim + 1] + 0.0f;
}

struct Rows {  // what a work item attends with: the block's rows of one kv head
  int dim, group, count, start, window;  // start: the first token's position
  bool is_float;
};

// Scores of rows first … first + count - 1 → weights; shrinks: what their earlier sums become.
void soften(const Rows& of, int tile, int first, int count, Workspace& work, float* shrinks) {
  float best[16] = {}, before[16] = {};
  for (int i = 0; i < count; i++) {
    float* const scores = work.scores + i * KEY_TILE;
    const int position = of.start + (first + i) / of.group;
    const int begin = first_seen(of.window, position) - tile * KEY_TILE;
    const int end = position - tile * KEY_TILE;
    if (begin > 0 || end < KEY_TILE - 1) {
      LaneInts key;
      for (int j = 0; j < LANES; j++) key[j] = j;
      for (int j = 0; j < KEY_TILE; j += LANES, key += LANES)
        lanes(scores + j) = (key >= begin) & (key <= end) ? lanes(scores + j) : spread(HIDDEN);
    }
    float* const high = work.segment + (first + i) * (of.dim + 16) + of.dim;
    Lanes top = spread(before[i] = *high);
    for (int j = 0; j < KEY_TILE; j += LANES) top = larger(lanes(scores + j), top);
    best[i] = *high = highest(top);
  }
  for (int i = 0; i < TILE_ROWS; i += LANES)
    lanes(before + i) = power_of_two(lanes(before + i) - lanes(best + i));
  for (int i = 0; i < count; i++) {
    Lanes sum = {};
    for (int j = i * KEY_TILE; j < (i + 1) * KEY_TILE; j += LANES)
      sum += lanes(work.scores + j) = power_of_two(lanes(work.scores + j) - best[i]);
    float* const weights = work.weights + (first + i) * LANES;
    lanes(weights) = lanes(weights) * before[i] + sum;
    shrinks[i] = before[i];
  }
}

// Many rows: the tile's keys and values are turned and widened once for all. Values behind the last
// that a row sees have weight 0 and are left out, as are whole tiles that it does not see.
void attend_many(const Rows& of, int tile, const Run* runs, Workspace& work) {
  const int dim = of.dim, width = dim + 16, first_key = tile * KEY_TILE;
  float shrinks[TILE_ROWS];
  load_tile(runs, dim, of.is_float, work);
  for (int r = 0; r < of.count; r += TILE_ROWS) {
    const int count = of.count - r < TILE_ROWS ? of.count - r : TILE_ROWS;
    const int seen = of.start + (r + count - 1) / of.group - first_key + 1;
    const int first = first_seen(of.window, of.start + r / of.group);
    if (seen <= 0 || first >= first_key + KEY_TILE) continue;
    multiply<TILE_ROWS>(count, work.queries + r * dim, dim, work.keys, KEY_TILE, work.scores,
                        KEY_TILE, nullptr, dim, {});
    soften(of, tile, r, count, work, shrinks);
    multiply<TILE_ROWS>(count, work.scores, KEY_TILE, work.values, dim, work.segment + r * width,
                        width, shrinks, seen < KEY_TILE ? seen : KEY_TILE, {});
  }
}

// At most TILE_ROWS rows: keys and values are used as they are read.
template <class Element>
void attend_few(const Rows& of, int tile, const Run* runs, const Ahead* ahead, Workspace& work) {
  const int dim = of.dim, row = dim * (int)sizeof(Element), dwords = row / 4;
  for (int g = 0; g < KEY_TILE / 16; g++) {
    if (runs[g].begin >= runs[g].end) {  // hidden from all: any finite scores
      for (int r = 0; r < of.count; r++) memset(work.scores + r * KEY_TILE + 16 * g, 0, 64);
      continue;
    }
    const int32_t* keys = whole_keys(runs[g], row, work.copy);
    for (int i = 0; i < 16; i += LANES)
      score_keys<TILE_ROWS, sizeof(Element) == 4>(
          of.count, work.queries, keys + i * dwords, dwords, work.scores + 16 * g + i,
          ahead[g].from(2 * i * dwords));
  }
  float scales[2][TILE_ROWS] = {{}, {1, 1, 1, 1, 1, 1}};  // of the first run of values, of others
  soften(of, tile, 0, of.count, work, scales[0]);
  for (int g = 0, later = 0; g < KEY_TILE / 16; g++) {
    const int begin = runs[g].begin, count = runs[g].end - begin;
    if (count <= 0) continue;
    multiply<TILE_ROWS>(of.count, work.scores + 16 * g + begin, KEY_TILE,
                        reinterpret_cast<const Element*>(runs[g].values) + begin * dim, dim,
                        work.segment, dim + 16, scales[later], count, ahead[g].from(8 * row));
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

// A work item. `after`: the first tile of this thread's next one, empty runs if it is not known.
void attend_piece(const Attend& attend, const Step& step, float* out, const Block& block,
                  const Piece& piece, int kv_head, const Run* after) {
  Workspace& work = workspace;
  const Arena& arena = attend.arena;
  const int dim = arena.dim, width = dim + 16, group = attend.heads / arena.kv_heads;
  const Rows of = {dim, group, block.tokens * group, block.span->start + block.first_token,
                   attend.window, arena.is_float != 0};
  const int64_t token = block.span->first_row + block.first_token;
  for (int t = 0; t < block.tokens; t++) {
    const float* from = attend.queries + ((token + t) * attend.heads + kv_head * group) * dim;
    float* const to = work.queries + t * group * dim;  // × log2 e: the softmax is of powers of two
    for (int i = 0; i < group * dim; i += LANES) lanes(to + i) = lanes(from + i) * 1.44269504f;
  }
  for (int r = 0; r < of.count; r++) clear_state(work.merged + r * width, dim);

  constexpr int TILES = KEY_SEGMENT / KEY_TILE;
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
      ahead[i] = {next[i].keys ? next[i].keys : nowhere, next[i].keys ? next[i].values : nowhere};
    }
    if (tile == first_tile || tile % TILES == 0) {
      for (int r = 0; r < of.count; r++) clear_state(work.segment + r * width, dim);
      memset(work.weights, 0, sizeof(Lanes) * of.count);
    }
    if (of.count > TILE_ROWS) attend_many(of, tile, now, work);
    else if (of.is_float) attend_few<float>(of, tile, now, ahead, work);
    else attend_few<uint16_t>(of, tile, now, ahead, work);
    if ((tile + 1) % TILES && tile < last_tile) continue;
    for (int r = 0; r < of.count; r++) {
      float* state = work.segment + r * width;
      for (int i = 0; i < LANES; i++) state[dim + 1] += work.weights[r * LANES + i];
      if (!block.states) merge_state(work.merged + r * width, state, dim);
    }
    if (block.states)
      memcpy(block.states + of.count * width * ((int64_t)kv_head * block.num_segments +
                                                 tile / TILES - block.first_segment),
             work.segment, 4 * of.count * width);
  }
  if (!block.states)
    for (int r = 0; r < of.count; r++)
      write_state(attend, out, block, kv_head, r, work.merged + r * width);
}

// What follows a block's last work item, on the thread that did it.
void finish_block(const Attend& attend, float* out, const Block& block) {
  const int dim = attend.arena.dim, width = dim + 16;
  const int rows = block.tokens * (attend.heads / attend.arena.kv_heads);
  if (block.states)
    for (int i = 0; i < attend.arena.kv_heads * rows; i++) {
      float* state = workspace.merged;
      clear_state(state, dim);
      for (int s = 0; s < block.num_segments; s++)
        merge_state(state, block.states + (((int64_t)i / rows * block.num_segments + s) * rows +
                                           i % rows) * width, dim);
      write_state(attend, out, block, i / rows, i % rows, state);
    }
  if (attend.quants)
    for (int64_t i = block.span->first_row + block.first_token, n = block.tokens; n > 0; i++, n--)
      quantize_row(out + i * attend.heads * dim, *attend.quants, i);
}

void run_attend(const void* args, const Step* step) {
  const Attend& attend = *static_cast<const Attend*>(args);
  const int kv_heads = attend.arena.kv_heads, group = attend.heads / kv_heads;
  const int block_tokens = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1;
  Block* const blocks = reinterpret_cast<Block*>(attend.scratch);  // at most one a row
  Piece* const pieces = reinterpret_cast<Piece*>(blocks + step->rows);
  static_assert(sizeof(Block) + 2 * sizeof(Piece) <= 128 && 8 * sizeof(Piece) <= 128);
  float* states = attend.scratch + attention_tables(step->rows, attend.threads);
  float* const end = attend.scratch + attend.scratch_floats;
  float* out = attend.out;
  if (!out) {
    out = states;
    states += (int64_t)step->rows * attend.heads * attend.arena.dim;
  }
  int num_blocks = 0, num_pieces = 0;
  int64_t total = 0;
  auto cost = [&](const Block& block) {  // rows, and what loading a tile takes: of one kv head
    return (int64_t)block.num_segments * (block.tokens * group + 24);
  };
  for (int s = 0; s < step->num_spans; s++) {
    const Span* span = step->spans + s;
    int first = (span->num_rows - 1) / block_tokens * block_tokens, after = span->num_rows;
    for (; first >= 0; after = first, first -= block_tokens) {  // the longest work first
      const int first_segment = first_seen(attend.window, span->start + first) / KEY_SEGMENT;
      const int last_segment = (span->start + after - 1) / KEY_SEGMENT;
      blocks[num_blocks] = {span, nullptr, first, after - first, first_segment,
                            last_segment - first_segment + 1, 0};
      total += cost(blocks[num_blocks++]);
    }
  }
  const int64_t share = total * kv_heads / (PIECES_PER_THREAD * attend.threads) + 1;
  for (int b = 0; b < num_blocks; b++) {
    Block& block = blocks[b];
    int each = block.num_segments;
    const int64_t floats = (int64_t)kv_heads * block.num_segments * block.tokens * group *
                           (attend.arena.dim + 16);
    if (attend.threads > 1 && each > 1 && cost(block) > share && floats <= end - states) {
      block.states = states;
      states += floats;
      each = each * share / cost(block);
      if (each < 1) each = 1;
    }
    const int start = block.span->start + block.first_token;
    const int first = first_seen(attend.window, start), last = start + block.tokens - 1;
    for (int s = 0; s < block.num_segments; s += each, block.left += kv_heads) {
      const int begin = (block.first_segment + s) * KEY_SEGMENT, end = begin + each * KEY_SEGMENT;
      pieces[num_pieces++] = {b, begin > first ? begin : first, end > last ? last : end - 1};
    }
  }
  // Of many items one takes a few at once, so that the next one's first tile can be fetched.
  const int64_t items = (int64_t)num_pieces * kv_heads, grain = items < 16 * attend.threads ||
      step->rows > step->num_spans ? 1 : kv_heads;
  parallel(items, grain, [&](int64_t begin, int64_t finish) {
    for (int64_t i = begin; i < finish; i++) {
      const Piece& piece = pieces[i / kv_heads];
      Block& block = blocks[piece.block];
      Run after[TILE_RUNS] = {};
      if (i + 1 < finish) {
        const Piece& then = pieces[(i + 1) / kv_heads];
        find_tile(attend, *step, blocks[then.block], then, (i + 1) % kv_heads,
                  then.first_key / KEY_TILE, after);
      }
      attend_piece(attend, *step, out, block, piece, i % kv_heads, after);
      if (__atomic_sub_fetch(&block.left, 1, __ATOMIC_ACQ_REL) == 0)
        finish_block(attend, out, block);
    }
  });
}

}  // namespace

#if KAGARI_TIER == 2
extern "C" const Tier kagari_tier_2 = {"avx512",
#elif KAGARI_TIER == 1
extern "C" const Tier kagari_tier_1 = {"avx2",
#else
extern "C" const Tier kagari_tier_0 = {"scalar",
#endif
    {run_embed, run_norm, run_gemm, run_rope, run_attend, run_gate, run_best},
};

#else  // ==== the threads and the choice of tier ==================================================

#include <atomic>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xmmintrin.h>

namespace {

// --- the pool ------------------------------------------------------------------------------------
//
// A job is cut into chunks. `claim` = job number << 24 | chunks left: a thread owns a chunk once its
// compare-exchange has taken one off, so a thread that wakes late, with an old job in mind, fails
// and touches nothing. What the job is may be read by owners of a chunk only; it is written only
// between jobs, when no chunk is owned. The caller waits for owned chunks, never for a thread that
// has not woken. (A number recurs after 2^40 jobs: years.)

constexpr int LEFT_BITS = 24, MAX_WORKERS = 255;
constexpr uint64_t LEFT_MASK = (1 << LEFT_BITS) - 1;
constexpr int64_t SPIN_NS = 100000;  // longer than the gaps between a step's jobs
constexpr int64_t LOST_NS = 2000000, FIRST_REST_NS = 5000000, LAST_REST_NS = 320000000;

using Body = void (*)(void*, int64_t, int64_t);

struct Job { Body body; void* context; int64_t count, grain, chunks; };

alignas(64) std::atomic<uint64_t> claim;
Job job;
std::atomic<int> caller_cpu;
alignas(64) std::atomic<uint32_t> done;    // chunks of this job that workers have finished
std::atomic<uint32_t> caller_sleeps;
std::atomic<int64_t> wait_began;
alignas(64) std::atomic<uint32_t> bell;    // futex of the workers: counts wake-ups
std::atomic<uint32_t> sleepers;            // at least the workers that sleep or are about to
std::atomic<uint32_t> stopping;
std::atomic<int32_t> resting;
alignas(64) std::atomic<uint32_t> in_use;  // a caller is inside; a second one goes alone

pthread_t workers[MAX_WORKERS];
int num_workers;
pid_t home;  // a forked child has no workers to join
int64_t jobs, long_waits, longest_wait_ns;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t ns = 0) {  // 0: for good
  timespec limit{ns / 1000000000, ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, ns ? &limit : nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

template <class Ready>
bool spin(int64_t ns, const Ready& ready, bool gives_way) {  // until ready, or for ns
  for (int64_t start = 0; ; ) {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      _mm_pause();
    }
    if (gives_way && sched_getcpu() == caller_cpu.load(std::memory_order_relaxed)) return false;
    int64_t now = now_ns();
    if (!start) start = now;
    if (now - start > ns) return false;
  }
}

uint32_t work(uint64_t number) {  // runs chunks of this job until none is left; returns how many
  uint32_t ran = 0;
  uint64_t at = claim.load(std::memory_order_acquire);
  while (at >> LEFT_BITS == number && (at & LEFT_MASK)) {
    if (!claim.compare_exchange_weak(at, at - 1, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) continue;
    int64_t begin = (job.chunks - (int64_t)(at & LEFT_MASK)) * job.grain;
    int64_t end = begin + job.grain;
    job.body(job.context, begin, end < job.count ? end : job.count);
    ran++;
    at = claim.load(std::memory_order_acquire);
  }
  return ran;
}

// Where other programs use the CPUs, a worker may be descheduled inside a chunk while the caller
// waits. One that loses the caller more than a third of the time brings nothing: it rests, for twice
// as long each time it soon happens again.
struct Rest {
  int64_t ns = FIRST_REST_NS, ended = 0, lost = 0, counted = 0;
  long switches = 0;

  void count() {  // the caller has been waiting for this worker, who may be to blame
    rusage used;
    getrusage(RUSAGE_THREAD, &used);
    bool was_descheduled = used.ru_nivcsw != switches;
    switches = used.ru_nivcsw;
    if (!was_descheduled) return;
    int64_t now = now_ns();
    lost -= (now - counted) / 3;
    lost = (lost > 0 ? lost : 0) + now - wait_began.load();
    counted = now;
    if (lost > LOST_NS) take();
  }

  void take() {
    int64_t now = now_ns();
    ns = now - ended > 8 * ns ? FIRST_REST_NS : ns < LAST_REST_NS ? 2 * ns : ns;
    resting.fetch_add(1);
    for (int64_t end = now + ns; now < end && !stopping.load(); now = now_ns())
      sleep_on(stopping, 0, end - now);
    resting.fetch_sub(1);
    ended = counted = now;
    lost = 0;
  }
};

bool move_away() {  // from the caller's CPU; false where there is no other
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return false;
  others = allowed;
  CPU_CLR(caller_cpu.load(std::memory_order_relaxed), &others);
  bool moved = CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others);
  return moved && !sched_setaffinity(0, sizeof allowed, &allowed);
}

// A program beside its caller: the first worker that sees it runs it as a caller would, unless the
// one who posted it comes to wait for it before; who waits helps like a worker.
enum : uint32_t { NONE, POSTED, TAKEN, FINISHED };
struct Posted { const Op* ops; int32_t count; const Step* step; } posted;
std::atomic<uint32_t> posted_state;

bool run_posted();

void ring() {
  if (sleepers.load() && sleepers.exchange(0)) {
    bell.fetch_add(1);
    wake_all(bell);
  }
}

template <class Over>
void serve(const Over& over, Rest* rest) {  // job after job until over; rest: a worker's
  uint64_t seen = (claim.load() >> LEFT_BITS) - 1;
  auto called = [&] {
    return claim.load(std::memory_order_acquire) >> LEFT_BITS != seen || over() ||
           (rest && posted_state.load(std::memory_order_relaxed) == POSTED);
  };
  while (true) {
    if (!spin(SPIN_NS, called, true)) {
      sleepers.fetch_add(1);
      uint32_t rung = bell.load();
      if (!called()) sleep_on(bell, rung);
      bool in_the_way = sched_getcpu() == caller_cpu.load(std::memory_order_relaxed);
      if (in_the_way && !move_away() && rest) rest->take();
      continue;
    }
    if (over()) return;
    if (rest && run_posted()) continue;
    seen = claim.load(std::memory_order_acquire) >> LEFT_BITS;
    if (uint32_t ran = work(seen)) {
      done.fetch_add(ran);  // the caller may go on: from here the job is not ours to touch
      if (caller_sleeps.load()) {
        wake_all(done);
        if (rest) rest->count();
      }
    }
  }
}

void* worker(void*) {
  Rest rest;
  serve([] { return stopping.load() != 0; }, &rest);
  return nullptr;
}

void wait_for(uint32_t others) {
  auto finished = [&] { return done.load() == others; };
  if (finished()) return;
  int64_t start = now_ns();
  wait_began.store(start);
  while (!spin(SPIN_NS, finished, false)) {  // a worker was descheduled inside a chunk: give way
    caller_sleeps.store(1);
    uint32_t before = done.load();
    if (before != others) sleep_on(done, before);
    caller_sleeps.store(0);
  }
  int64_t waited = now_ns() - start;
  if (waited > 1000000) long_waits++;
  if (waited > longest_wait_ns) longest_wait_ns = waited;
}

void stop_workers() {
  if (home == getpid()) {
    stopping.store(1);
    bell.fetch_add(1);
    wake_all(bell);
    wake_all(stopping);
    for (int i = 0; i < num_workers; i++) pthread_join(workers[i], nullptr);
  } else {
    in_use.store(0);
  }
  num_workers = 0;
  stopping.store(0);
  sleepers.store(0);
  resting.store(0);
}

bool start_workers(int count) {
  home = getpid();
  sigset_t all, before;  // signals are the main thread's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (num_workers < count) {
    if (pthread_create(&workers[num_workers], nullptr, worker, nullptr)) break;
    num_workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return num_workers == count;
}

// --- the tiers -----------------------------------------------------------------------------------

const Tier* tier = nullptr;

bool cpu_has(int index) {
  if (index == 2)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  if (index == 1)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  return index == 0;
}

}  // namespace

extern "C" void kagari_parallel(int64_t count, int64_t grain, Body body, void* context) {
  int64_t chunks = count <= 0 ? 0 : (count + grain - 1) / grain;
  if (chunks < 2 || chunks > (int64_t)LEFT_MASK || !num_workers || in_use.exchange(1)) {
    for (int64_t begin = 0; begin < count; begin += grain)
      body(context, begin, begin + grain < count ? begin + grain : count);
    return;
  }
  jobs++;
  caller_cpu.store(sched_getcpu(), std::memory_order_relaxed);
  job = {body, context, count, grain, chunks};
  done.store(0, std::memory_order_relaxed);
  uint64_t number = (claim.load(std::memory_order_relaxed) >> LEFT_BITS) + 1;
  claim.store(number << LEFT_BITS | (uint64_t)chunks);
  ring();
  wait_for((uint32_t)chunks - work(number));
  in_use.store(0);
}

EXPORT int32_t kagari_open(int32_t index, int32_t threads) {
  // → the tier (-1 asks for the best); -1: this CPU lacks it; -2: the threads cannot start
  __builtin_cpu_init();
  if (index < 0) for (index = 2; !cpu_has(index); ) index--;
  if (index > 2 || !cpu_has(index)) return -1;
  stop_workers();
  const Tier* tiers[] = {&kagari_tier_0, &kagari_tier_1, &kagari_tier_2};
  tier = tiers[index];
  if (threads < 1 || threads > MAX_WORKERS + 1 || !start_workers(threads - 1)) {
    stop_workers();
    return -2;
  }
  return index;
}

EXPORT void kagari_close() { stop_workers(); }

EXPORT const char* kagari_tier_name() { return tier ? tier->name : ""; }

EXPORT void kagari_run(const Op* ops, int32_t count, const Step* step) {
  unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);  // the workers' rounding and subnormals, whatever the caller has set
  for (int32_t i = 0; i < count; i++) tier->run[ops[i].kind](ops[i].args, step);
  _mm_setcsr(mode);
}

namespace {

bool run_posted() {
  uint32_t expected = POSTED;
  if (!posted_state.compare_exchange_strong(expected, TAKEN)) return false;
  kagari_run(posted.ops, posted.count, posted.step);
  posted_state.store(FINISHED);
  ring();
  return true;
}

}  // namespace

// kagari_run beside the caller, who goes on at once; one at a time, and then kagari_finish.
EXPORT void kagari_start(const Op* ops, int32_t count, const Step* step) {
  posted = {ops, count, step};
  posted_state.store(POSTED);
  ring();
}

EXPORT void kagari_finish() {
  unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);
  if (posted_state.load() != NONE && !run_posted())
    serve([] { return posted_state.load() == FINISHED; }, nullptr);
  posted_state.store(NONE);
  _mm_setcsr(mode);
}

EXPORT void kagari_pool_stats(int64_t* out) {  // jobs, waits over 1 ms, longest wait µs, workers
  int64_t stats[] = {jobs, long_waits, longest_wait_ns / 1000, num_workers - resting.load()};
  memcpy(out, stats, sizeof stats);
}

EXPORT void kagari_verify_tags(const int64_t* tags, const int32_t* pages,
                               const int64_t* generations, const int32_t* rows, int64_t pairs,
                               uint8_t* wrong) {  // see reference.py; wrong [rows] comes zeroed
  for (int64_t i = 0; i < pairs; i++) wrong[rows[i]] |= tags[pages[i]] != generations[i];
}

EXPORT int64_t kagari_sizeof(int32_t index) {  // of the structs, in the file's order
  static const int64_t sizes[] = {sizeof(Packed), sizeof(Quants), sizeof(Span), sizeof(Step),
                                  sizeof(Arena), sizeof(Embed), sizeof(Norm), sizeof(Gemm),
                                  sizeof(Rope), sizeof(Attend), sizeof(Gate), sizeof(Best),
                                  sizeof(Op)};
  return index >= 0 && index < 13 ? sizes[index] : -1;
}

// --- packing -------------------------------------------------------------------------------------

namespace {

uint16_t to_half(float value) {  // to nearest, ties to even
  uint32_t bits, sign;
  memcpy(&bits, &value, sizeof bits);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits >= 0x38800000) return sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
  memcpy(&value, &bits, sizeof value);
  value += 0.5f;  // whose last bit is worth a subnormal's
  memcpy(&bits, &value, sizeof bits);
  return sign | (bits - 0x3f000000);
}

struct Block {  // 32 weights of an output
  uint8_t quants[32];  // as stored: those of 8 bits + 128
  float scales[2], minima[2];
};

void put(const Block& block, const Packed& as, uint8_t* run, int lane) {
  for (int i = 0; i < 32; i += 4)
    if (as.bits == 8)
      memcpy(run + i * 16 + lane * 4, block.quants + i, 4);
    else if (i < 16)
      for (int j = i; j < i + 4; j++)
        run[i * 16 + lane * 4 + j - i] = block.quants[j] | block.quants[j + 16] << 4;
  const int halves = 32 / as.block, size = as.wide ? 4 : 2;
  uint8_t* at = run + 64 * as.bits + lane * size;
  for (int i = 0; i < halves * (as.has_min ? 2 : 1); i++, at += 16 * size) {
    const float value = i < halves ? block.scales[i] : block.minima[i - halves];
    const uint16_t half = to_half(value);
    if (as.wide) memcpy(at, &value, 4); else memcpy(at, &half, 2);
  }
}

// Calls read(output, block of 32 inputs, Block&) for the outputs [0, n) and packs what it gives.
template <class Read>
void pack(const Packed& as, uint8_t* out, const Read& read) {
  const auto tile = [&](int64_t begin, int64_t end) {
    const int64_t blocks = as.k / 32, bytes = run_bytes(as);
    memset(out + begin * blocks * bytes, 0, (end - begin) * blocks * bytes);
    for (int64_t output = begin * 16; output < end * 16 && output < as.n; output++)
      for (int64_t i = 0; i < blocks; i++) {
        Block block;
        read(output, i, block);
        put(block, as, out + (output / 16 * blocks + i) * bytes, output % 16);
      }
  };
  kagari_parallel((as.n + 15) / 16, 4, [](void* context, int64_t begin, int64_t end) {
    (*static_cast<const decltype(tile)*>(context))(begin, end);
  }, const_cast<void*>(static_cast<const void*>(&tile)));
}

struct Ggml { int32_t type, bits, block, wide, has_min, weights, bytes; };  // ggml-common.h

constexpr Ggml GGML_FORMS[] = {
    {2, 4, 32, 0, 1, 32, 18},    {3, 4, 32, 0, 1, 32, 20},    {6, 8, 32, 0, 0, 32, 22},
    {7, 8, 32, 0, 1, 32, 24},    {8, 8, 32, 0, 0, 32, 34},    {12, 4, 32, 1, 1, 256, 144},
    {13, 8, 32, 1, 1, 256, 176}, {14, 8, 16, 1, 0, 256, 210},
};

const Ggml* find_ggml(int32_t type) {
  for (const Ggml& form : GGML_FORMS)
    if (form.type == type) return &form;
  return nullptr;
}

float half_at(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return from_half(half);
}

// The 32 weights from `part` × 32 of a block as GGML has them, exactly.
void read_ggml(int32_t type, const uint8_t* from, int part, Block& to) {
  const float d = half_at(from), m = half_at(from + 2);
  to.scales[0] = d;
  to.minima[0] = type == 2 ? -8 * d : m;
  const int head = type == 2 ? 2 : type == 3 ? 4 : type == 6 ? 6 : 8;
  uint32_t fifths = 0;
  if (type == 6 || type == 7) memcpy(&fifths, from + head - 4, 4);
  if (type < 8) {  // q4_0, q4_1, q5_0, q5_1
    const int zero = type == 6 ? 112 : type == 7 ? 128 : 0;
    for (int i = 0; i < 32; i++)
      to.quants[i] = (from[head + i % 16] >> (i / 16 * 4) & 15) + (fifths >> i & 1) * 16 + zero;
  } else if (type == 8) {  // q8_0
    for (int i = 0; i < 32; i++) to.quants[i] = from[2 + i] ^ 128;
  } else if (type == 14) {  // q6_K
    const uint8_t *low = from + part / 4 * 64 + part % 2 * 32, *high = from + 128 + part / 4 * 32;
    for (int i = 0; i < 32; i++)
      to.quants[i] = 96 + (low[i] >> (part % 4 / 2 * 4) & 15) + (high[i] >> part % 4 * 2 & 3) * 16;
    for (int i = 0; i < 2; i++)
      to.scales[i] = half_at(from + 208) * static_cast<int8_t>(from[192 + 2 * part + i]);
  } else {  // q4_K, q5_K: 6-bit scales and minima, eight of each in twelve bytes
    const uint8_t *six = from + 4, *quants = from + (type == 12 ? 16 : 48) + part / 2 * 32;
    const int j = part % 4;
    to.scales[0] = d * (part < 4 ? six[j] & 63 : (six[j + 8] & 15) | six[j] >> 6 << 4);
    to.minima[0] = -m * (part < 4 ? six[j + 4] & 63 : six[j + 8] >> 4 | six[j + 4] >> 6 << 4);
    for (int i = 0; i < 32; i++)
      to.quants[i] = (quants[i] >> (part % 2 * 4) & 15) +
                     (type == 13 ? 128 + (from[16 + i] >> part & 1) * 16 : 0);
  }
}

}  // namespace

EXPORT int64_t kagari_packed_bytes(int64_t n, int64_t k, int32_t bits, int32_t block, int32_t wide,
                                   int32_t has_min) {
  return (n + 15) / 16 * (k / 32) * run_bytes({nullptr, 0, 0, bits, block, wide, has_min});
}

EXPORT int32_t kagari_ggml_form(int32_t ggml_type, int32_t* bits, int32_t* block, int32_t* wide,
                                int32_t* has_min) {
  const Ggml* form = find_ggml(ggml_type);
  if (!form) return -1;
  *bits = form->bits, *block = form->block, *wide = form->wide, *has_min = form->has_min;
  return 0;
}

// Rows of GGML blocks; output i is row order[i], or i. Returns -1 for a type without a kernel.
EXPORT int32_t kagari_pack_ggml(int32_t ggml_type, const uint8_t* rows, int64_t n, int64_t k,
                                const int32_t* order, uint8_t* out) {
  const Ggml* form = find_ggml(ggml_type);
  if (!form || k % form->weights) return -1;
  const int64_t parts = form->weights / 32, row_bytes = k / form->weights * form->bytes;
  const Packed as{nullptr, int32_t(n), int32_t(k), form->bits, form->block, form->wide,
                  form->has_min};
  pack(as, out, [&](int64_t output, int64_t i, Block& block) {
    const uint8_t* row = rows + (order ? order[output] : output) * row_bytes;
    read_ggml(ggml_type, row + i / parts * form->bytes, i % parts, block);
  });
  return 0;
}

// quants [n][k], unsigned if of 4 bits, signed if of 8; scales and minima [n][k / block].
EXPORT void kagari_pack(const uint8_t* quants, const float* scales, const float* minima,
                        const Packed* describing, uint8_t* out) {
  const Packed& as = *describing;
  pack(as, out, [&](int64_t output, int64_t i, Block& block) {
    const int halves = 32 / as.block;
    for (int j = 0; j < 32; j++)
      block.quants[j] = quants[output * as.k + i * 32 + j] ^ (as.bits == 8 ? 128 : 0);
    for (int j = 0; j < halves; j++) {
      const int64_t at = (output * (as.k / 32) + i) * halves + j;
      block.scales[j] = scales[at];
      block.minima[j] = minima ? minima[at] : 0;
    }
  });
}

// Floats of Attend.scratch for steps of so many rows and contexts; with less, less is split.
EXPORT int64_t kagari_attention_scratch(int32_t rows, int32_t heads, int32_t dim,
                                        int32_t context_tokens, int32_t threads) {
  const int64_t split = rows < 32 * threads ? rows : 32 * threads;
  const int64_t states = split * heads * (context_tokens / KEY_SEGMENT + 1) * (dim + 16);
  return attention_tables(rows, threads) + (int64_t)rows * heads * dim +
         (states < 1 << 23 ? states : 1 << 23);
}

#endif
