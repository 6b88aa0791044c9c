// The order of packed weights, and the memory of a step.
#pragma once
#include <math.h>
#include <string.h>
#include "native.h"
#include "pool.h"

namespace {
constexpr int PANEL = 32;       // outputs side by side: a whole number of vectors of both instruction sets
constexpr int GROUP = 32;       // inputs with a common scale in 4 bits; all inputs are padded to a multiple of it
constexpr int OWN_ROWS = 8;     // up to so many rows every thread prepares a copy of a product's input by itself
constexpr int QUERIES = 4;      // rows attended at a time, at most
constexpr int MAX_HEAD_WIDTH = 512;
constexpr int64_t READ_PIECE = 1 << 18;  // bytes that esolm_read takes at a time
constexpr int64_t GROUP_BYTES = PANEL * 2 + GROUP * PANEL / 2;  // scales, then the numbers of a group

inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
inline int padded(int inputs) { return int(round_up(inputs, GROUP)); }
inline int num_panels(int outputs) { return int(round_up(outputs, PANEL) / PANEL); }

inline int64_t panel_bytes(int format, int inputs) {
  const int64_t k = padded(inputs);
  switch (format) {
    case ESOLM_FLOAT32: return k * PANEL * 4;
    case ESOLM_BF16: return k * PANEL * 2;
    case ESOLM_INT8: return k * PANEL;
    default: return k / GROUP * GROUP_BYTES;
  }
}

inline uint16_t to_bf16(float f) {  // to nearest even; a NaN stays one
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return uint16_t(u >> 16 | 64);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t b) {
  const uint32_t u = uint32_t(b) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Where the number of output j and input i stands in a panel, in bytes. A panel is read front to back, once: first all
// outputs for the first input, and so on. Two bf16 inputs share 32 bits, so that widening is a shift or a mask; four
// int8 inputs share 32 bits, which is what one dot-product instruction consumes; in 4 bits, the low and high halves of
// four bytes are inputs 0 to 3 and 4 to 7, so that one mask and one shift give two operands of the int8 instruction.
inline int64_t place(int format, int j, int i) {
  switch (format) {
    case ESOLM_FLOAT32: return (int64_t(i) * PANEL + j) * 4;
    case ESOLM_BF16: return ((int64_t(i) / 2 * PANEL + j) * 2 + i % 2) * 2;
    case ESOLM_INT8: return (int64_t(i) / 4 * PANEL + j) * 4 + i % 4;
    default: return i / GROUP * GROUP_BYTES + PANEL * 2 + (int64_t(i) % GROUP / 8 * PANEL + j) * 4 + i % 4;
  }
}
inline int64_t scale_place(int j, int i) { return i / GROUP * GROUP_BYTES + j * 2; }
inline int shift4(int i) { return i / 4 % 2 * 4; }

// One output between its row of `inputs` numbers and its place in a panel. Bytes are stored unsigned, as the
// instruction wants one operand; the kernels subtract 128 (or 8) times the sum of the inputs.
inline void pack_row(int format, const void* row, const uint16_t* scale, int inputs, uint8_t* panel, int j) {
  for (int i = 0; i < inputs; i++) {
    uint8_t* to = panel + place(format, j, i);
    switch (format) {
      case ESOLM_FLOAT32: memcpy(to, (const float*)row + i, 4); break;
      case ESOLM_BF16: memcpy(to, (const uint16_t*)row + i, 2); break;
      case ESOLM_INT8: *to = uint8_t(((const int8_t*)row)[i] + 128); break;
      default: *to = uint8_t(*to | (((const uint8_t*)row)[i] & 15) << shift4(i));
    }
  }
  if (format == ESOLM_INT4)
    for (int i = 0; i < inputs; i += GROUP) memcpy(panel + scale_place(j, i), scale + i / GROUP, 2);
}
inline void unpack_row(int format, const uint8_t* panel, int j, int inputs, void* row, uint16_t* scale) {
  for (int i = 0; i < inputs; i++) {
    const uint8_t* from = panel + place(format, j, i);
    switch (format) {
      case ESOLM_FLOAT32: memcpy((float*)row + i, from, 4); break;
      case ESOLM_BF16: memcpy((uint16_t*)row + i, from, 2); break;
      case ESOLM_INT8: ((int8_t*)row)[i] = int8_t(*from - 128); break;
      default: ((uint8_t*)row)[i] = uint8_t(*from >> shift4(i) & 15);
    }
  }
  if (format == ESOLM_INT4)
    for (int i = 0; i < inputs; i += GROUP) memcpy(scale + i / GROUP, panel + scale_place(j, i), 2);
}

// Memory of the caller, handed out in cache lines. From address 0 it only counts, so that the size of the scratch memory
// and its use are the same code.
struct Arena {
  uintptr_t base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    T* p = (T*)(base + uintptr_t(used));
    used += round_up(n * int64_t(sizeof(T)), LINE);
    return p;
  }
};

// Rows as whole numbers of 16 bits times a scale: 256 high + low, with the sums that undo the offset of the weights.
struct Quantized {
  int8_t *high, *low;                    // [rows, k], or in blocks
  float* scale;                          // [rows]
  int32_t *sum_high, *sum_low;           // [rows]
  int32_t *group_high, *group_low;       // [rows, k / GROUP], times -8
};
inline Quantized take_quantized(Arena& a, int64_t rows, int k) {
  Quantized q;
  q.high = a.take<int8_t>(rows * k), q.low = a.take<int8_t>(rows * k), q.scale = a.take<float>(rows);
  q.sum_high = a.take<int32_t>(rows), q.sum_low = a.take<int32_t>(rows);
  q.group_high = a.take<int32_t>(rows * k / GROUP), q.group_low = a.take<int32_t>(rows * k / GROUP);
  return q;
}

// The input of a product: each thread's own rows, and what many rows are rearranged into for all threads.
struct Prepared {
  float* floats;
  Quantized whole;
};
inline Prepared take_prepared(Arena& a, int64_t rows, int k) {
  Prepared p;
  p.floats = a.take<float>(rows * k);
  p.whole = take_quantized(a, rows, k);
  return p;
}

constexpr int PHASES_PER_LAYER = 12, MORE_PHASES = 4;

struct Buffers {
  Team::Counter* counters;
  int phases;
  float *h, *asked_h;        // [B N, W] residual, and of the rows that get logits [R, W]
  float* qkv;                // [B N, (H + 2 K) D]
  float *mixed, *asked_mixed;  // [B N, padded H D]
  float* inner;              // [B N, padded outputs of `up`]
  uint8_t* seen;             // [B N, slots], 1 where a new slot sees a slot
  int64_t seen_row;
  int32_t *out, *wanted, *first_wanted;  // rows with logits: flat; by example, sorted and without repeats; where those begin
  Prepared shared;
  Prepared* own;             // of each thread
  float** scores;            // of each thread, [QUERIES, slots]

  Buffers(Arena& a, const EsolmModel& m, const EsolmCall& c) {
    const int64_t all = int64_t(c.batch) * c.rows, slots = c.extent + c.rows;
    const int attended = m.heads * m.head_width, ups = m.inner * (m.mlp_kind == ESOLM_SWIGLU ? 2 : 1);
    const int widest = std::max(padded(m.width), std::max(padded(attended), padded(m.inner)));
    phases = m.layers * PHASES_PER_LAYER + MORE_PHASES;
    counters = a.take<Team::Counter>(phases);
    h = a.take<float>(all * m.width), asked_h = a.take<float>(int64_t(c.outs) * m.width);
    qkv = a.take<float>(all * (attended + 2 * m.kv_heads * m.head_width));
    mixed = a.take<float>(all * padded(attended)), asked_mixed = a.take<float>(int64_t(c.outs) * padded(attended));
    inner = a.take<float>(std::max<int64_t>(all, c.outs) * padded(ups));
    seen_row = round_up(slots, 16);
    seen = a.take<uint8_t>(all * seen_row);
    out = a.take<int32_t>(c.outs), wanted = a.take<int32_t>(all), first_wanted = a.take<int32_t>(c.batch + 1);
    shared = take_prepared(a, std::max<int64_t>(all, c.outs), widest);
    own = a.take<Prepared>(c.threads), scores = a.take<float*>(c.threads);
    for (int i = 0; i < c.threads; i++) {
      const Prepared mine = take_prepared(a, OWN_ROWS, widest);
      float* const row = a.take<float>(QUERIES * seen_row);
      if (a.base) own[i] = mine, scores[i] = row;
    }
  }
};
}  // namespace
