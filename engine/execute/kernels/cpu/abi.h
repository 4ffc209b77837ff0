// What the units share: the structs that library.py mirrors, and what an instruction set exports.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int KEY_TILE = 64, KEY_STRETCH = 256;  // attention: softmax's steps, and what is merged

enum Kind : int32_t { EMBED, NORM, GEMM, ROPE, ATTEND, GATE, BEST };  // of an Op, by its args' type

struct Packed {  // [n][k] weights: per 16 outputs and 32 inputs one run of quants, scales, minima
  uint8_t* data;        // runs [n / 16][k / 32], then units [n], see `units_of`
  int32_t n, k;         // as stored: n rounded up to 16, k a multiple of 32
  int32_t bits, block;  // 4 or 8 bits a quant; 16 or 32 inputs a scale
  int32_t wide;         // scales and minima are fp32, else fp16
  int32_t has_min;
};

// Sets that cannot multiply bytes by bytes (`scalar`, `avx2`) have the integers of both planes as
// words: those of a block's first 16 inputs in `high`, of the others in `low`; of each four, their
// order is 0, 2, 1, 3, as a mask and a shift part four bytes.
struct Quants {  // rows of activations as integers: value = (high × 256 + low) × scale
  int8_t* high;    // [rows][width]
  int8_t* low;     // [rows][width]; null: value = high × scale (INT8 activations)
  float* scales;   // [rows][width / 32]
  float* sums;     // [rows][width / 32][2] of a block's values, and of the last 16 of them
  int32_t width;   // a multiple of 32
  int32_t few;     // fewer rows than that have the high plane alone
  int32_t* counts; // of `amx` [rows][width / 32][4], see count_planes: a row has one scale; or null

  Quants of(int64_t rows) const {
    Quants quants = *this;
    if (rows < few) quants.low = nullptr, quants.counts = nullptr;
    return quants;
  }
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

enum Precision : int32_t { BF16, FP32, INT8, FP8 };  // of pages

struct Arena {  // [page][layer][K,V][kv head][token][dim]; a head's codes are followed by its scales
  uint8_t* data;
  int64_t page_stride;  // bytes from page to page
  int64_t layer_offset; // bytes from a page's start to this layer's keys
  int32_t kv_heads, page_size, dim, precision;
};

static inline int code_bytes(int32_t precision) {
  return precision == FP32 ? 4 : precision == BF16 ? 2 : 1;
}

// Of a head in a page: [token][dim] codes, then, of quantised ones, a bf16 scale each token.
static inline int64_t codes_bytes(const Arena& of) {
  return (int64_t)of.page_size * of.dim * code_bytes(of.precision);
}
static inline int64_t head_bytes(const Arena& of) {
  return codes_bytes(of) + (code_bytes(of.precision) == 1 ? 2 * of.page_size : 0);
}

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
using Kernels = RunOp[7];  // by Kind
// scalar, avx2, avx512, avx512_bf16, amx
extern "C" const Kernels kagari_isa_0, kagari_isa_1, kagari_isa_2, kagari_isa_3, kagari_isa_4;

// Calls body(context, begin, end) over [0, count) in runs of `grain`, on all threads of the pool.
using RunRange = void (*)(void* context, int64_t begin, int64_t end);
extern "C" void kagari_parallel(int64_t count, int64_t grain, RunRange body, void* context);
extern "C" int32_t kagari_threads();  // with the caller's
extern "C" int64_t kagari_near_bytes();  // of a core's first level cache of data

template <class Body>
static inline void parallel(int64_t count, int64_t grain, const Body& body) {
  kagari_parallel(count, grain, [](void* context, int64_t begin, int64_t end) {
    (*static_cast<const Body*>(context))(begin, end);
  }, const_cast<Body*>(&body));
}

// Bytes of a run: 16 outputs × 32 inputs, its scales and minima.
static inline int64_t run_bytes(const Packed& p) {
  return p.bits * 64 + (32 / p.block) * 16 * (p.wide ? 4 : 2) * (p.has_min ? 2 : 1);
}

// Of each output's weights: with 4 bits a quant, the largest there can be ÷ 32,504; else 1.
static inline float* units_of(const Packed& p) {
  return reinterpret_cast<float*>(p.data + p.n / 16 * (int64_t)(p.k / 32) * run_bytes(p));
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
