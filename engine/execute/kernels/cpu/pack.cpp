// Packing: a GGUF file's quantised blocks become the runs that the kernels read, number for number.

#include "abi.h"

namespace {

enum { Q4_0 = 2, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q4_K = 12, Q5_K, Q6_K };  // ggml.h, and the layouts

struct Ggml {
  int32_t type, weights, bytes;  // of a block in the file
  int32_t quants, zero;          // where its quants begin, what packing adds to each
  int32_t bits, block, wide, has_min;  // as in Packed
};

constexpr Ggml GGML[] = {
    {Q4_0, 32, 18, 2, 0, 4, 32, 0, 1},     {Q4_1, 32, 20, 4, 0, 4, 32, 0, 1},
    {Q5_0, 32, 22, 6, 112, 8, 32, 0, 0},   {Q5_1, 32, 24, 8, 128, 8, 32, 0, 1},
    {Q8_0, 32, 34, 2, 128, 8, 32, 0, 0},   {Q4_K, 256, 144, 16, 0, 4, 32, 1, 1},
    {Q5_K, 256, 176, 48, 128, 8, 32, 1, 1}, {Q6_K, 256, 210, 0, 96, 8, 16, 1, 0},
};

struct Weights {  // 32 of an output
  uint8_t quants[32];  // those of 8 bits + 128
  float numbers[4];    // one or two scales, then as many minima
};

float half_at(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return from_half(half);
}

uint16_t to_half(float value) {  // of what a half can hold; infinite where it is too large
  uint32_t bits, sign;
  memcpy(&bits, &value, sizeof bits);
  sign = bits >> 16 & 0x8000;
  value = fabsf(value) > 65504 ? INFINITY : value * 0x1p-112f;  // moves the exponent
  memcpy(&bits, &value, sizeof bits);
  return sign | (bits >> 13 & 0x7fff);
}

void read(const Ggml& form, const uint8_t* from, int part, Weights& to) {  // from part × 32 on
  const uint8_t* low = from + form.quants;
  const auto each = [&](auto quant) {
    for (int i = 0; i < 32; i++) to.quants[i] = form.zero + quant(i);
  };
  const float d = half_at(from), m = half_at(from + 2);
  to.numbers[0] = d, to.numbers[1] = m;
  switch (form.type) {
    case Q4_0:
      to.numbers[1] = -8 * d;
      [[fallthrough]];
    case Q4_1:
      return each([&](int i) { return low[i % 16] >> i / 16 * 4 & 15; });
    case Q5_0:
    case Q5_1:  // the fifth bits lie before the others
      return each([&](int i) {
        return (low[i % 16] >> i / 16 * 4 & 15) + (low[i / 8 - 4] >> i % 8 & 1) * 16;
      });
    case Q8_0:
      return each([&](int i) { return static_cast<int8_t>(low[i]); });
    case Q6_K: {
      const uint8_t *high = from + 128 + part / 4 * 32, *scales = from + 192 + part * 2;
      for (int i = 0; i < 2; i++)
        to.numbers[i] = half_at(from + 208) * static_cast<int8_t>(scales[i]);
      low += part / 4 * 64 + part % 2 * 32;
      return each([&](int i) {
        return (low[i] >> part % 4 / 2 * 4 & 15) + (high[i] >> part % 4 * 2 & 3) * 16;
      });
    }
  }
  // Q4_K, Q5_K: 6-bit scales and minima, eight of each in twelve bytes
  const uint8_t *first = from + 4 + part % 4, *second = first + 4, *third = first + 8;
  to.numbers[0] = d * (part < 4 ? *first & 63 : (*third & 15) + (*first >> 6) * 16);
  to.numbers[1] = -m * (part < 4 ? *second & 63 : (*third >> 4) + (*second >> 6) * 16);
  low += part / 2 * 32;
  const int fifth = form.type == Q5_K ? 16 : 0;
  each([&](int i) {
    return (low[i] >> part % 2 * 4 & 15) + (from[16 + i] >> part & 1) * fifth;
  });
}

void put(const Weights& weights, const Packed& as, uint8_t* run, int lane) {
  const uint8_t* quants = weights.quants;
  for (int i = 0; i < 4 * as.bits; i++)
    run[i / 4 * 64 + lane * 4 + i % 4] = as.bits == 8 ? quants[i] : quants[i] | quants[i + 16] << 4;
  const int size = as.wide ? 4 : 2;
  uint8_t* at = run + 64 * as.bits + lane * size;
  for (int i = 0; i < 32 / as.block * (as.has_min ? 2 : 1); i++, at += 16 * size) {
    const uint16_t half = to_half(weights.numbers[i]);
    memcpy(at, as.wide ? static_cast<const void*>(weights.numbers + i) : &half, size);
  }
}

float most(const Weights& weights, const Packed& as) {  // the largest that quants of 4 bits can mean
  float largest = 0;
  for (int i = 0; i < 32 / as.block; i++) {
    const float minimum = as.has_min ? weights.numbers[32 / as.block + i] : 0;
    largest = fmaxf(largest, fmaxf(fabsf(minimum), fabsf(15 * weights.numbers[i] + minimum)));
  }
  return largest;
}

// Packs what read(output, block of 32 inputs, Weights&) gives for the outputs [0, n).
template <class Read>
void pack(int64_t n, const Packed& as, const Read& read) {
  const int64_t blocks = as.k / 32, bytes = run_bytes(as);
  float* const units = units_of(as);
  parallel((n + 15) / 16, 4, [&](int64_t begin, int64_t end) {
    memset(as.data + begin * blocks * bytes, 0, (end - begin) * blocks * bytes);
    for (int64_t output = begin * 16; output < end * 16; output++) {
      float largest = 0;
      for (int64_t i = 0; i < blocks && output < n; i++) {
        Weights weights;
        read(output, i, weights);
        put(weights, as, as.data + (output / 16 * blocks + i) * bytes, output % 16);
        largest = fmaxf(largest, most(weights, as));
      }
      units[output] = as.bits == 4 && largest > 1e-30f ? largest / 32504 : 1;
    }
  });
}

const Ggml* find(int32_t type) {
  for (const Ggml& form : GGML)
    if (form.type == type) return &form;
  return nullptr;
}

}  // namespace

EXPORT int64_t kagari_packed_bytes(const Packed* as) {
  return as->n / 16 * (int64_t)(as->k / 32) * run_bytes(*as) + as->n * sizeof(float);
}

// Describes n rows of k weights of a GGML type, all but where they lie; -1: no kernel reads them.
EXPORT int32_t kagari_ggml_form(int32_t type, int64_t n, int64_t k, Packed* as) {
  const Ggml* from = find(type);
  if (!from || k % from->weights) return -1;
  *as = {nullptr, int32_t((n + 15) / 16 * 16), int32_t(k), from->bits, from->block, from->wide,
         from->has_min};
  return 0;
}

// Packs n rows of blocks, to as.data; output i is row order[i], or i.
EXPORT void kagari_pack_ggml(int32_t type, const uint8_t* rows, int64_t n, const int32_t* order,
                             const Packed* as) {
  const Ggml& form = *find(type);
  const int64_t parts = form.weights / 32, row_bytes = as->k / form.weights * form.bytes;
  pack(n, *as, [&](int64_t output, int64_t i, Weights& to) {
    const uint8_t* row = rows + (order ? order[output] : output) * row_bytes;
    read(form, row + i / parts * form.bytes, i % parts, to);
  });
}

// Packs quants [n][k], unsigned if of 4 bits, signed if of 8, to as.data; scales and minima (or
// null) [n][k / block], such as a half can hold unless as.wide.
EXPORT void kagari_pack(const uint8_t* quants, const float* scales, const float* minima, int64_t n,
                        const Packed* as) {
  const int64_t halves = 32 / as->block;
  pack(n, *as, [&](int64_t output, int64_t i, Weights& to) {
    const int64_t at = output * (as->k / 32) + i;
    for (int j = 0; j < 32; j++) to.quants[j] = quants[at * 32 + j] ^ (as->bits == 8 ? 128 : 0);
    memcpy(to.numbers, scales + at * halves, halves * sizeof(float));
    if (minima) memcpy(to.numbers + halves, minima + at * halves, halves * sizeof(float));
  });
}
