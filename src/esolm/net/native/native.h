// The C interface of the native step: one cached pass of a transformer, from tokens to logits, in one call.
//
// No Python or PyTorch headers: one binary serves every version of both. The architecture is data (sizes, kinds and
// optional parts), so that another member of the family is another value and not another copy of the code.
//
// Shapes: B batch, N new slots, C capacity of the cache, H heads, K heads of keys and values, D head width, W width,
// I inner width of the MLP, V vocabulary, R rows that get logits.
#pragma once
#include <stdint.h>

#define ESOLM_NATIVE_VERSION 2  // raise it with every change of this file

extern "C" {

enum EsolmFormat {
  ESOLM_FLOAT32 = 0,
  ESOLM_BF16 = 1,
  ESOLM_INT8 = 2,  // -127 to 127, a scale for each output
  ESOLM_INT4 = 3,  // 0 to 15 standing for -8 to 7, a bf16 scale for each 32 inputs of an output
};
enum EsolmNormKind { ESOLM_LAYER_NORM = 0, ESOLM_RMS_NORM = 1 };
enum EsolmMlpKind {
  ESOLM_GELU_TANH = 0,
  ESOLM_SWIGLU = 1,  // `up` has 2 I outputs: first the gates, then the values that they multiply
};

// What a function returns. Everything but ESOLM_OK means that nothing was written.
enum EsolmStatus {
  ESOLM_OK = 0,
  ESOLM_NO_INSTRUCTIONS = 1,  // the CPU lacks AVX2 and FMA
  ESOLM_BAD_MODEL = 2,        // sizes or kinds that do not fit together
  ESOLM_BAD_CALL = 3,         // sizes of a call
  ESOLM_BAD_TOKEN = 4,        // an id outside the vocabulary
  ESOLM_BAD_POSITION = 5,     // a position outside the rotary table
  ESOLM_BAD_INDEX = 6,        // a row outside [B, span]
  ESOLM_FULL = 7,             // the new slots do not fit into the cache
};

struct EsolmLinear {
  const void* weight;  // by esolm_pack
  const float* scale;  // [outputs], ESOLM_INT8 only
  const float* bias;   // [outputs], or null
  int32_t outputs, inputs, format, reserved;
};

struct EsolmNorm {
  const float* weight;  // null: this norm is left out
  const float* bias;    // or null
  double eps;
};

struct EsolmBlock {
  EsolmNorm norm1, norm2;       // before attention and before the MLP, [W]
  EsolmNorm q_norm, k_norm;     // RMSNorm of each head before the rotation, [D]; weight null without QK-norm
  EsolmLinear project[2];       // queries, keys, values side by side: H D + 2 K D outputs in one or two parts
  EsolmLinear out, up, down;
};

struct EsolmModel {
  int32_t layers, width, heads, kv_heads, head_width, inner, vocab;
  int32_t norm_kind, mlp_kind;
  int32_t cache_format;         // of keys, values and the embedding: ESOLM_FLOAT32 or ESOLM_BF16
  int64_t positions;            // rows of the rotary table
  const float *cos, *sin;       // [positions, D/2], rotating the pairs (i, i + D/2); null: no rotation
  const EsolmBlock* blocks;
  EsolmNorm norm;
  EsolmLinear head;             // a tied head is one whose weights were packed from the embedding
  const void* embed;            // [V, W] in cache_format
};

// Labels as in core/visibility.py. A stride is 0 where all examples share one row.
struct EsolmCall {
  int32_t batch, rows, outs, capacity, threads, span_start, span_stop, even;
  int64_t extent;               // the longest example's committed slots
  const int64_t* lengths;       // [B] committed slots of each example; not read if even
  const int64_t* tokens;        // [B, N]; not read if there are inputs
  const float* inputs;          // [B, N, W], embedded by the caller; or null
  const int64_t* position;      // [B|1, N]
  const int64_t* ranks;         // [B|1, C] of committed slots
  const int64_t *rank, *horizon, *clique;  // [B|1, N] of new slots
  int64_t position_stride, ranks_stride, rank_stride, horizon_stride, clique_stride;
  void* const* keys;            // a pointer for each layer, [B, K, C, D]
  void* const* values;
  const int64_t* index;         // [R], flat into [B, span] in any order; null: all of span
  float* logits;                // [R, V]
  char* scratch;
  int64_t scratch_bytes;        // at least esolm_scratch_bytes
};

int32_t esolm_version(void);
int64_t esolm_struct_bytes(int32_t which);  // of Linear, Norm, Block, Model, Call, to compare with the caller's

// The instruction set in use: 0 none, 1 AVX2 + FMA, 2 AVX-512 + VNNI. want >= 0 lowers it, for tests.
int32_t esolm_isa(int32_t want);

// Weights [outputs, inputs] into the order in which they are read, and back. `weight` holds float, bf16, int8 or (one a
// byte) 4-bit numbers; `scale` [outputs, inputs / 32 rounded up] in bf16 for ESOLM_INT4 and null otherwise.
int64_t esolm_packed_bytes(int32_t format, int32_t outputs, int32_t inputs);
void esolm_pack(int32_t format, const void* weight, const uint16_t* scale, int32_t outputs, int32_t inputs, void* out);
void esolm_unpack(int32_t format, const void* packed, int32_t outputs, int32_t inputs, void* weight, uint16_t* scale);
void esolm_huge_pages(void* memory, int64_t bytes);

// y [rows, outputs] = x [rows, inputs] times the weights, plus the bias, then GELU if asked for.
int64_t esolm_linear_scratch_bytes(const struct EsolmLinear*, int32_t rows, int32_t threads);
int32_t esolm_linear(const struct EsolmLinear*, const float* x, int32_t rows, float* y, int32_t gelu, int32_t threads,
                     char* scratch);

int64_t esolm_scratch_bytes(const struct EsolmModel*, const struct EsolmCall*);
int32_t esolm_step(const struct EsolmModel*, const struct EsolmCall*);

// Read all of `memory` once, on as many threads, as fast as a step reads weights: what a step is measured against. Returns
// the sum of its 32-bit words, so that nothing is left out.
uint32_t esolm_read(const void* memory, int64_t bytes, int32_t threads);

// Run on the threads of a GNU OpenMP that is already in the process (null: on threads of this library).
void esolm_openmp(void* gomp_parallel, void* omp_get_num_threads);
}
