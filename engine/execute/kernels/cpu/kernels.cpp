// The engine's CPU kernels: quantised products, norms, gates, rotary embedding and paged attention.
//
// No torch, no Python: arrays in, arrays out, called through ctypes (library.py mirrors the structs).
// The file is compiled once per tier (KAGARI_TIER) and once without it: that unit holds the threads
// and the choice of tier. Sums run in one order whatever the batch, the tile or the number of
// threads, so a row's bits are its own; products and sums are fused only where `fma` says so.

#include <stdint.h>
#include <string.h>

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

struct Attend {
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

void quantize_row(const float* x, const Quants& to, int64_t row) {
  for (int block = 0; block < to.width / 32; block++) {
    const float* in = x + 32 * block;
    float top = 0;
    for (int i = 0; i < 32; i++) top = __builtin_fabsf(in[i]) > top ? __builtin_fabsf(in[i]) : top;
    const float scale = top / (to.low ? 32639.0f : 127.0f);
    to.scales[row * (to.width / 32) + block] = scale;
    int32_t* sums = to.sums + row * (to.width / 16) + 2 * block;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) {
      const int value = scale > 0 ? (int)__builtin_rintf(in[i] / scale) : 0;
      const int64_t at = row * to.width + 32 * block + i;
      to.high[at] = to.low ? (value + 128) >> 8 : value;
      if (to.low) to.low[at] = value - to.high[at] * 256;
      sums[i / 16] += value;
    }
  }
}

// --- norms, gates, the best logit ----------------------------------------------------------------

// (section C)

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
typedef int32_t Quad __attribute__((vector_size(16), aligned(4), may_alias));

inline Lanes& lanes(float* at) { return *reinterpret_cast<Lanes*>(at); }
inline const Lanes& lanes(const float* at) { return *reinterpret_cast<const Lanes*>(at); }
inline Lanes spread(float value) { return value - Lanes{}; }

inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if KAGARI_TIER == 2
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KAGARI_TIER == 1
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <int A, int B, int C, int D>  // in each 16 bytes, of x's (0–3) and y's (4–7) dwords
inline LaneInts pick(LaneInts x, LaneInts y) {
  const int from[4] = {A, B, C, D};
  LaneInts mask;
  for (int i = 0; i < LANES; i++)
    mask[i] = (i & ~3) + (from[i & 3] & 3) + from[i & 3] / 4 * LANES;
  return __builtin_shuffle(x, y, mask);
}

template <int BY = LANES / 2>
inline Lanes highest(Lanes value) {  // in every lane
  LaneInts mask;
  for (int i = 0; i < LANES; i++) mask[i] = (i + BY) % LANES;
  Lanes other = __builtin_shuffle(value, mask);
  value = value > other ? value : other;
  if constexpr (BY > 1) return highest<BY / 2>(value);
  return value;
}

// e^x for x ≤ 0, 0 below e^-87; the range reduction and polynomial of Cephes' expf (Moshier, 1992).
inline Lanes exponential(Lanes x) {
  const float magic = 12582912.0f + 127.0f;  // 1.5 × 2^23: rounds; 127: the exponent's bias
  Lanes clamped = x < -87.0f ? spread(-87.0f) : x;
  Lanes shifted = fused(clamped, spread(1.44269504f), spread(magic)), n = shifted - magic;
  Lanes r = fused(n, spread(-0.693359375f), clamped);
  r = fused(n, spread(2.12194440e-4f), r);
  Lanes p = fused(spread(1.9875691500e-4f), r, spread(1.3981999507e-3f));
  p = fused(p, r, spread(8.3334519073e-3f));
  p = fused(p, r, spread(4.1665795894e-2f));
  p = fused(p, r, spread(1.6666665459e-1f));
  p = fused(p, r, spread(5.0000001201e-1f));
  p = fused(p, r * r, r) + 1.0f;
  Lanes power = reinterpret_cast<Lanes>(reinterpret_cast<LaneInts>(shifted) << 23);
  return x < -87.0f ? Lanes{} : p * power;
}

// c [rows][columns] = c × scales (0 if null) + a [rows][depth] · b [depth][columns], ascending.
template <int ROWS, int COLUMNS>
inline void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          float* c, int64_t c_stride, const float* scales, int depth) {
  Lanes sums[ROWS][COLUMNS] = {};
  if (scales)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++)
        sums[r][j] = lanes(c + r * c_stride + j * LANES) * scales[r];
  for (int d = 0; d < depth; d++, b += b_stride) {
    Lanes column[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; j++) column[j] = lanes(b + j * LANES);
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

template <int ROWS>
void multiply(int rows, const float* a, int64_t a_stride, const float* b, int columns, float* c,
              int64_t c_stride, const float* scales, int depth) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1)
      multiply<ROWS - 1>(rows, a, a_stride, b, columns, c, c_stride, scales, depth);
    return;
  }
  int done = 0;
  for (; done + TILE_COLUMNS * LANES <= columns; done += TILE_COLUMNS * LANES)
    multiply_tile<ROWS, TILE_COLUMNS>(a, a_stride, b + done, columns, c + done, c_stride, scales,
                                      depth);
  for (; done < columns; done += LANES)
    multiply_tile<ROWS, 1>(a, a_stride, b + done, columns, c + done, c_stride, scales, depth);
}

struct Workspace {  // a thread's own; a state: weighted values [dim], highest score, sum of weights
  float queries[BLOCK_ROWS * MAX_DIM];        // [rows][dim]
  float keys[MAX_DIM * KEY_TILE];             // [dim][64]
  float values[KEY_TILE * MAX_DIM];           // [64][dim]
  float scores[TILE_ROWS * KEY_TILE];         // then weights
  float weights[BLOCK_ROWS * LANES];          // [rows][LANES]: sums of weights in a segment
  float segment[BLOCK_ROWS * (MAX_DIM + 16)]; // states
  float merged[BLOCK_ROWS * (MAX_DIM + 16)];  // states
  float partly[2][16 * MAX_DIM];              // 16 keys and values, some of them out of bounds
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

// The 16 bytes at each of LANES / 4 places.
inline LaneInts quads(const int32_t* at, int64_t stride) {
  auto part = [&](int i) { return *reinterpret_cast<const Quad*>(at + i * stride); };
#if KAGARI_TIER == 2
  __m512i all = _mm512_castsi128_si512((__m128i)part(0));
  all = _mm512_inserti32x4(all, (__m128i)part(1), 1);
  all = _mm512_inserti32x4(all, (__m128i)part(2), 2);
  return (LaneInts)_mm512_inserti32x4(all, (__m128i)part(3), 3);
#elif KAGARI_TIER == 1
  return (LaneInts)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)part(0)),
                                           (__m128i)part(1), 1);
#else
  return part(0);
#endif
}

// Rows of `dwords` dwords, one a key → `to` [dwords][64], LANES keys at once; bf16 pairs → 2 rows.
inline void transpose(const int32_t* from, int dwords, bool is_float, float* to) {
  for (int first = 0; first < dwords; first += 4) {
    LaneInts row[4];
    for (int i = 0; i < 4; i++) row[i] = quads(from + i * dwords + first, 4 * dwords);
    LaneInts a = pick<0, 4, 1, 5>(row[0], row[1]), b = pick<2, 6, 3, 7>(row[0], row[1]);
    LaneInts c = pick<0, 4, 1, 5>(row[2], row[3]), d = pick<2, 6, 3, 7>(row[2], row[3]);
    LaneInts turned[4] = {pick<0, 1, 4, 5>(a, c), pick<2, 3, 6, 7>(a, c),
                          pick<0, 1, 4, 5>(b, d), pick<2, 3, 6, 7>(b, d)};
    for (int i = 0; i < 4; i++) {
      if (is_float) {
        lanes(to + (first + i) * KEY_TILE) = reinterpret_cast<Lanes>(turned[i]);
      } else {
        float* pair = to + 2 * (first + i) * KEY_TILE;
        lanes(pair) = reinterpret_cast<Lanes>(turned[i] << 16);
        lanes(pair + KEY_TILE) = reinterpret_cast<Lanes>(turned[i] & (int32_t)0xffff0000);
      }
    }
  }
}

inline void widen(const uint16_t* from, int count, float* to) {
  typedef uint16_t Narrow __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  for (int i = 0; i < count; i += LANES)
    lanes(to + i) = reinterpret_cast<Lanes>(__builtin_convertvector(
        *reinterpret_cast<const Narrow*>(from + i), LaneInts) << 16);
}

// A tile of one kv head as fp32; keys outside [first, last] become zero and are not read.
void load_tile(const Arena& arena, const int32_t* pages, int kv_head, int tile, int first, int last,
               Workspace& work) {
  const int dim = arena.dim, bytes = arena.is_float ? 4 : 2, row = dim * bytes;
  const int64_t head = (int64_t)arena.page_size * dim;
  for (int at = 0; at < KEY_TILE; at += 16) {
    const int key = tile * KEY_TILE + at;
    if (key > last || key + 15 < first) {
      for (int d = 0; d < dim; d++) memset(work.keys + d * KEY_TILE + at, 0, 64);
      memset(work.values + at * dim, 0, 64 * dim);
      continue;
    }
    const char* keys = static_cast<const char*>(arena.data) +
        bytes * (pages[key / arena.page_size] * arena.page_stride + arena.layer_offset +
                 kv_head * head + key % arena.page_size * dim);
    const char* values = keys + bytes * arena.kv_heads * head;
    if (key < first || key + 15 > last) {
      const int begin = key < first ? first - key : 0, end = key + 15 > last ? last - key + 1 : 16;
      memset(work.partly, 0, sizeof work.partly);
      const char** sides[2] = {&keys, &values};
      for (int i = 0; i < 2; i++) {
        char* copy = reinterpret_cast<char*>(work.partly[i]);
        memcpy(copy + begin * row, *sides[i] + begin * row, (end - begin) * row);
        *sides[i] = copy;
      }
    }
    for (int i = 0; i < 16; i += LANES)
      transpose(reinterpret_cast<const int32_t*>(keys + i * row), row / 4, arena.is_float,
                work.keys + at + i);
    if (arena.is_float) memcpy(work.values + at * dim, values, 16 * row);
    else widen(reinterpret_cast<const uint16_t*>(values), 16 * dim, work.values + at * dim);
  }
}

// One row's scores → weights. Only keys first … last of the tile are seen. Returns by how much the
// row's earlier sums shrink.
inline float soften(float* scores, int first, int last, float* high, float* weights) {
  Lanes best = spread(*high), sum = {};
  LaneInts key;
  for (int i = 0; i < LANES; i++) key[i] = i;
  for (int i = 0; i < KEY_TILE; i += LANES, key += LANES) {
    Lanes score = lanes(scores + i);
    score = (key >= first) & (key <= last) ? score : spread(HIDDEN);
    best = score > best ? score : best;
    lanes(scores + i) = score;
  }
  best = highest(best);
  const float shrink = exponential(spread(*high) - best)[0];
  for (int i = 0; i < KEY_TILE; i += LANES) {
    Lanes weight = exponential(lanes(scores + i) - best);
    lanes(scores + i) = weight;
    sum += weight;
  }
  lanes(weights) = lanes(weights) * shrink + sum;
  *high = best[0];
  return shrink;
}

inline void clear_state(float* state, int dim) {
  memset(state, 0, 4 * (dim + 16));
  state[dim] = FLOOR;
}

inline void merge_state(float* into, const float* later, int dim) {
  const float high = later[dim] > into[dim] ? later[dim] : into[dim];
  const float keep = exponential(spread(into[dim] - high))[0];
  const float add = exponential(spread(later[dim] - high))[0];
  for (int d = 0; d < dim; d += LANES)
    lanes(into + d) = fused(lanes(later + d), spread(add), lanes(into + d) * keep);
  into[dim] = high;
  into[dim + 1] = later[dim + 1] * add + into[dim + 1] * keep;
}

inline int first_seen(const Attend& attend, int position) {  // the first key that a token sees
  return attend.window && position >= attend.window ? position - attend.window + 1 : 0;
}

struct Block {  // consecutive tokens of a span
  const Span* span;
  float* states;  // [kv head][segment][row] if its segments are several threads' work, else null
  int32_t first_token, tokens, first_segment, num_segments;
  int32_t left;   // work items not done
};

struct Piece { int32_t block, first_segment, num_segments; };  // × kv heads: the work items

void write_state(const Attend& attend, float* out, const Block& block, int kv_head, int row,
                 const float* state) {
  const int dim = attend.arena.dim, group = attend.heads / attend.arena.kv_heads;
  const int64_t token = block.span->first_row + block.first_token + row / group;
  float* to = out + (token * attend.heads + kv_head * group + row % group) * dim;
  for (int d = 0; d < dim; d += LANES)  // + 0: a sum of nothing but zeros has no sign
    lanes(to + d) = lanes(state + d) / state[dim + 1] + 0.0f;
}

void attend_piece(const Attend& attend, const Step& step, float* out, const Block& block,
                  const Piece& piece, int kv_head) {
  Workspace& work = workspace;
  const Arena& arena = attend.arena;
  const int dim = arena.dim, width = dim + 16, group = attend.heads / arena.kv_heads;
  const int rows = block.tokens * group, start = block.span->start + block.first_token;
  const int last = start + block.tokens - 1;
  for (int t = 0; t < block.tokens; t++)
    memcpy(work.queries + t * group * dim, attend.queries + dim *
               ((int64_t)(block.span->first_row + block.first_token + t) * attend.heads +
                kv_head * group), 4 * group * dim);
  for (int r = 0; r < rows; r++) clear_state(work.merged + r * width, dim);
  const int end = piece.first_segment + piece.num_segments;
  for (int segment = piece.first_segment; segment < end; segment++) {
    for (int r = 0; r < rows; r++) clear_state(work.segment + r * width, dim);
    memset(work.weights, 0, 4 * rows * LANES);
    constexpr int TILES = KEY_SEGMENT / KEY_TILE;
    for (int tile = segment * TILES; tile < (segment + 1) * TILES; tile++) {
      const int first_key = tile * KEY_TILE;
      if (first_key > last || first_key + KEY_TILE <= first_seen(attend, start)) continue;
      load_tile(arena, step.pages + block.span->first_page, kv_head, tile, first_seen(attend, start), last,
                work);
      for (int r = 0; r < rows; r += TILE_ROWS) {
        const int count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
        float shrinks[TILE_ROWS];
        multiply<TILE_ROWS>(count, work.queries + r * dim, dim, work.keys, KEY_TILE, work.scores,
                            KEY_TILE, nullptr, dim);
        for (int i = 0; i < count; i++) {
          const int position = start + (r + i) / group;
          shrinks[i] = soften(work.scores + i * KEY_TILE, first_seen(attend, position) - first_key,
                              position - first_key, work.segment + (r + i) * width + dim,
                              work.weights + (r + i) * LANES);
        }
        multiply<TILE_ROWS>(count, work.scores, KEY_TILE, work.values, dim,
                            work.segment + r * width, width, shrinks, KEY_TILE);
      }
    }
    for (int r = 0; r < rows; r++) {
      float* state = work.segment + r * width;
      for (int i = 0; i < LANES; i++) state[dim + 1] += work.weights[r * LANES + i];
      if (!block.states) merge_state(work.merged + r * width, state, dim);
    }
    if (block.states)
      memcpy(block.states + ((int64_t)kv_head * block.num_segments + segment -
                             block.first_segment) * rows * width, work.segment, 4 * rows * width);
  }
  if (!block.states)
    for (int r = 0; r < rows; r++)
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
      const int first_segment = first_seen(attend, span->start + first) / KEY_SEGMENT;
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
    for (int s = 0; s < block.num_segments; s += each, block.left += kv_heads) {
      const int left = block.num_segments - s;
      pieces[num_pieces++] = {b, block.first_segment + s, left < each ? left : each};
    }
  }
  parallel((int64_t)num_pieces * kv_heads, 1, [&](int64_t begin, int64_t finish) {
    for (int64_t i = begin; i < finish; i++) {
      const Piece& piece = pieces[i / kv_heads];
      Block& block = blocks[piece.block];
      attend_piece(attend, *step, out, block, piece, i % kv_heads);
      if (__atomic_sub_fetch(&block.left, 1, __ATOMIC_ACQ_REL) == 0)
        finish_block(attend, out, block);
    }
  });
}

}  // namespace

#define KAGARI_NAME(tier) KAGARI_NAME_(tier)
#define KAGARI_NAME_(tier) kagari_tier_##tier
extern "C" const Tier KAGARI_NAME(KAGARI_TIER);
extern "C" const Tier KAGARI_NAME(KAGARI_TIER) = {
    "", {nullptr, nullptr, nullptr, run_rope, run_attend, nullptr, nullptr}};

#else  // ==== the threads and the choice of tier ==================================================

// Floats of Attend.scratch for steps of so many rows and contexts; with less, less is split.
extern "C" __attribute__((visibility("default"))) int64_t kagari_attention_scratch(
    int32_t rows, int32_t heads, int32_t dim, int32_t context_tokens, int32_t threads) {
  const int64_t split = rows < 4 * threads ? rows : 4 * threads;
  const int64_t states = split * heads * (context_tokens / KEY_SEGMENT + 1) * (dim + 16);
  return attention_tables(rows, threads) + (int64_t)rows * heads * dim +
         (states < 1 << 23 ? states : 1 << 23);
}

// (section C)

#endif
