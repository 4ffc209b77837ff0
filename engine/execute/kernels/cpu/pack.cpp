// Packing: a file's quantised blocks into the runs that the kernels read.

#include "abi.h"

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
