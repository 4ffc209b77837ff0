// The engine's CPU kernels: quantised products, norms, gates, rotary embedding and paged attention.
//
// No torch, no Python: arrays in, arrays out, called through ctypes (library.py mirrors the structs).
// The file is compiled once per tier (KAGARI_TIER) and once without it: that unit holds the threads
// and the choice of tier. Sums run in one order whatever the batch, the tile or the number of
// threads, so a row's bits are its own; products and sums are fused only where `fma` says so.

#include <stdint.h>
#include <string.h>

// --- what both sides of the file know -----------------------------------------------------------

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

struct Attend {
  const float* queries;  // [rows][heads × dim]
  Arena arena;
  float* out;            // [rows][heads × dim], or null
  const Quants* quants;  // of out's rows, or null
  float* scratch;        // see attention_scratch_floats
  int32_t heads, window; // window 0: all keys
};

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

// Calls body(context, begin, end) over [0, count) in runs of `grain`, on all threads of the pool.
extern "C" void kagari_parallel(int64_t count, int64_t grain,
                                void (*body)(void*, int64_t, int64_t), void* context);

#ifdef KAGARI_TIER  // ==== a tier's kernels =======================================================

#if KAGARI_TIER > 0
#include <immintrin.h>
#endif

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

inline Floats load_bf16(const uint16_t* at) {
  return reinterpret_cast<Floats>(
      __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Ints) << 16);
}

inline void store_bf16(uint16_t* at, Floats value) {  // to nearest, ties to even
  Ints bits = reinterpret_cast<Ints>(value);
  Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *reinterpret_cast<Halves*>(at) = __builtin_convertvector(rounded, Halves);
}

template <class Body>
inline void parallel(int64_t count, int64_t grain, const Body& body) {
  kagari_parallel(count, grain, [](void* context, int64_t begin, int64_t end) {
    (*static_cast<const Body*>(context))(begin, end);
  }, const_cast<Body*>(&body));
}

// --- quantised products --------------------------------------------------------------------------

void quantize_row(const float* x, const Quants& to, int64_t row);

// (section A)

// --- norms, gates, the best logit ----------------------------------------------------------------

// (section C)

// --- attention -----------------------------------------------------------------------------------

// (section B)

}  // namespace

#else  // ==== the threads and the choice of tier ==================================================

// (section C)

#endif
