// The C interface: checks arguments, chooses the instruction set, and calls the kernels compiled for it.
#include "native.h"
#include <sys/mman.h>
#include "layout.h"

// One source of kernels, compiled for each instruction set in a namespace of its own. The rest of this file is compiled
// for any x86-64, so that loading the library is safe everywhere.
#define INLINE static inline __attribute__((always_inline))
#define METHOD inline __attribute__((always_inline))

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define LANES 8
namespace {
namespace avx2 {
#include "vector.inc"
#include "product.inc"
#include "attention.inc"
#include "step.inc"
}  // namespace avx2
}  // namespace
#undef LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")
#define LANES 16
namespace {
namespace avx512 {
#include "vector.inc"
#include "product.inc"
#include "attention.inc"
#include "step.inc"
}  // namespace avx512
}  // namespace
#undef LANES
#pragma GCC pop_options

#define EXPORT __attribute__((visibility("default")))

namespace {
int found_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni");
  return wide ? 2 : 1;
}
std::atomic<int> isa_in_use{-1};

bool fits(const EsolmLinear& l, int outputs, int inputs) {
  return l.weight && l.outputs == outputs && l.inputs == inputs && l.format >= ESOLM_FLOAT32 &&
         l.format <= ESOLM_INT4 && (l.format != ESOLM_INT8 || l.scale);
}

bool fits(const EsolmModel& m) {
  if (m.layers < 1 || m.width < 1 || m.heads < 1 || m.kv_heads < 1 || m.inner < 1 || m.vocab < 1) return false;
  if (m.heads % m.kv_heads || m.head_width < 2 || m.head_width % 2 || m.head_width > MAX_HEAD_WIDTH) return false;
  // Sums of 32 bits hold 65536 products of bytes.
  if (m.width > 65536 || m.inner > 65536 || int64_t(m.heads) * m.head_width > 65536) return false;
  if (m.norm_kind < 0 || m.norm_kind > ESOLM_RMS_NORM || m.mlp_kind < 0 || m.mlp_kind > ESOLM_SWIGLU) return false;
  if (m.cache_format != ESOLM_FLOAT32 && m.cache_format != ESOLM_BF16) return false;
  if (!m.blocks || !m.embed || !m.norm.weight || !m.cos != !m.sin || (m.cos && m.positions < 1)) return false;
  const int attended = m.heads * m.head_width, qkv = attended + 2 * m.kv_heads * m.head_width;
  for (int i = 0; i < m.layers; i++) {
    const EsolmBlock& b = m.blocks[i];
    const int first = b.project[1].weight ? qkv - b.project[1].outputs : qkv;
    if (!b.norm1.weight || !b.norm2.weight || !fits(b.project[0], first, m.width)) return false;
    if (b.project[1].weight && (first < 1 || !fits(b.project[1], qkv - first, m.width))) return false;
    const int ups = m.inner * (m.mlp_kind == ESOLM_SWIGLU ? 2 : 1);
    if (!fits(b.out, m.width, attended) || !fits(b.up, ups, m.width) || !fits(b.down, m.width, m.inner)) return false;
  }
  return fits(m.head, m.vocab, m.width);
}

bool fits(const EsolmCall& c) {
  if (c.batch < 1 || c.rows < 1 || c.outs < 0 || c.capacity < 1 || c.threads < 1 || c.extent < 0) return false;
  if (c.span_start < 0 || c.span_stop < c.span_start || c.span_stop > c.rows) return false;
  if (!c.index && int64_t(c.outs) != int64_t(c.batch) * (c.span_stop - c.span_start)) return false;
  if (int64_t(c.batch) * c.rows > 1 << 28 || c.outs > 1 << 28 || c.threads > 1024) return false;
  return (c.tokens || c.inputs) && c.position && c.ranks && c.rank && c.horizon && c.clique && c.keys && c.values && c.scratch &&
         (c.logits || !c.outs) && (c.even || c.lengths);
}

// Every number that is used as an address.
int32_t check_values(const EsolmModel& m, const EsolmCall& c) {
  if (c.extent + c.rows > c.capacity) return ESOLM_FULL;
  for (int b = 0; b < c.batch && !c.even; b++)
    if (c.lengths[b] < 0 || c.lengths[b] > c.extent) return ESOLM_BAD_CALL;
  for (int64_t i = 0; i < int64_t(c.batch) * c.rows && !c.inputs; i++)
    if (c.tokens[i] < 0 || c.tokens[i] >= m.vocab) return ESOLM_BAD_TOKEN;
  for (int b = 0; b < (c.position_stride ? c.batch : 1) && m.cos; b++)
    for (int n = 0; n < c.rows; n++) {
      const int64_t p = c.position[b * c.position_stride + n];
      if (p < 0 || p >= m.positions) return ESOLM_BAD_POSITION;
    }
  const int64_t end = int64_t(c.batch) * (c.span_stop - c.span_start);
  for (int r = 0; r < c.outs && c.index; r++)
    if (c.index[r] < 0 || c.index[r] >= end) return ESOLM_BAD_INDEX;
  return ESOLM_OK;
}

// The rows that get logits, as they were asked for and for each example by itself.
void list_rows(const EsolmCall& c, Buffers& buffers) {
  const int span = c.span_stop - c.span_start, all = c.batch * c.rows;
  for (int i = 0; i < all; i++) buffers.wanted[i] = 0;  // first a flag for each row, then a list in the same place
  for (int r = 0; r < c.outs; r++) {
    const int64_t at = c.index ? c.index[r] : r;
    buffers.out[r] = int32_t(at / span * c.rows + c.span_start + at % span);
    buffers.wanted[buffers.out[r]] = 1;
  }
  int count = 0;
  for (int b = 0; b < c.batch; b++) {
    buffers.first_wanted[b] = count;
    for (int n = 0; n < c.rows; n++)
      if (buffers.wanted[b * c.rows + n]) buffers.wanted[count++] = n;
  }
  buffers.first_wanted[c.batch] = count;
}

void reset(Team::Counter* counters, int count) {
  for (int i = 0; i < count; i++) counters[i].next.store(0, std::memory_order_relaxed);
}
constexpr int LINEAR_PHASES = 4;
}  // namespace

extern "C" {
EXPORT int32_t esolm_version(void) { return ESOLM_NATIVE_VERSION; }

EXPORT int64_t esolm_struct_bytes(int32_t which) {
  const int64_t sizes[] = {sizeof(EsolmLinear), sizeof(EsolmNorm), sizeof(EsolmBlock), sizeof(EsolmModel), sizeof(EsolmCall)};
  return which < 0 || which > 4 ? 0 : sizes[which];
}

EXPORT int32_t esolm_isa(int32_t want) {
  if (want >= 0 || isa_in_use < 0) isa_in_use = want < 0 ? found_isa() : std::min<int>(want, found_isa());
  return isa_in_use;
}

EXPORT void esolm_openmp(void* parallel, void* threads) {
  openmp = {(GompParallel)parallel, (int (*)())threads, getpid()};
}

EXPORT void esolm_huge_pages(void* memory, int64_t bytes) {
  const uintptr_t first = uintptr_t(round_up(int64_t(memory), 4096)), end = (uintptr_t(memory) + bytes) / 4096 * 4096;
  if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
}

EXPORT int64_t esolm_packed_bytes(int32_t format, int32_t outputs, int32_t inputs) {
  return num_panels(outputs) * panel_bytes(format, inputs);
}

EXPORT void esolm_pack(int32_t format, const void* weight, const uint16_t* scale, int32_t outputs, int32_t inputs,
                       void* out) {
  const int64_t size = panel_bytes(format, inputs), bytes = format == ESOLM_FLOAT32 ? 4 : format == ESOLM_BF16 ? 2 : 1;
  const int64_t groups = padded(inputs) / GROUP;
  for (int p = 0; p < num_panels(outputs); p++) {
    uint8_t* panel = (uint8_t*)out + p * size;
    memset(panel, 0, size_t(size));  // inputs behind the last meet zeros; outputs behind the last are not written
    for (int64_t r = int64_t(p) * PANEL; r < std::min(int64_t(outputs), int64_t(p + 1) * PANEL); r++)
      pack_row(format, (const char*)weight + r * inputs * bytes, scale ? scale + r * groups : nullptr, inputs, panel,
               int(r % PANEL));
  }
}

EXPORT void esolm_unpack(int32_t format, const void* packed, int32_t outputs, int32_t inputs, void* weight,
                         uint16_t* scale) {
  const int64_t size = panel_bytes(format, inputs), bytes = format == ESOLM_FLOAT32 ? 4 : format == ESOLM_BF16 ? 2 : 1;
  const int64_t groups = padded(inputs) / GROUP;
  for (int64_t r = 0; r < outputs; r++)
    unpack_row(format, (const uint8_t*)packed + r / PANEL * size, int(r % PANEL), inputs, (char*)weight + r * inputs * bytes,
               scale ? scale + r * groups : nullptr);
}

EXPORT int64_t esolm_linear_scratch_bytes(const EsolmLinear* l, int32_t rows, int32_t threads) {
  Arena arena{0};
  arena.take<Team::Counter>(LINEAR_PHASES), arena.take<Prepared>(threads);
  for (int i = 0; i < threads; i++) take_prepared(arena, OWN_ROWS, padded(l->inputs));
  take_prepared(arena, rows, padded(l->inputs));
  return arena.used + LINE;
}

EXPORT int32_t esolm_linear(const EsolmLinear* l, const float* x, int32_t rows, float* y, int32_t gelu, int32_t threads,
                            char* scratch) {
  if (esolm_isa(-1) == 0) return ESOLM_NO_INSTRUCTIONS;
  if (!fits(*l, l->outputs, l->inputs) || l->inputs > 65536 || rows < 0 || threads < 1) return ESOLM_BAD_CALL;
  Arena arena{uintptr_t(round_up(int64_t(scratch), LINE))};
  Team team(arena.take<Team::Counter>(LINEAR_PHASES));
  reset(team.counters, LINEAR_PHASES);
  Prepared* own = arena.take<Prepared>(threads);
  for (int i = 0; i < threads; i++) own[i] = take_prepared(arena, OWN_ROWS, padded(l->inputs));
  Prepared shared = take_prepared(arena, rows, padded(l->inputs));
  if (esolm_isa(-1) == 2)
    avx512::linear(*l, x, rows, {y, l->outputs, l->bias, gelu ? avx512::GELU : avx512::STORE, l->outputs}, team, own,
                   shared, threads);
  else
    avx2::linear(*l, x, rows, {y, l->outputs, l->bias, gelu ? avx2::GELU : avx2::STORE, l->outputs}, team, own, shared,
                 threads);
  return ESOLM_OK;
}

EXPORT uint32_t esolm_read(const void* memory, int64_t bytes, int32_t threads) {
  const int64_t pieces = std::min<int64_t>(bytes / READ_PIECE, 1 << 30);
  uint32_t total = 0;
  for (int64_t i = pieces * READ_PIECE; i + 4 <= bytes; i += 4) total += *(const uint32_t*)((const char*)memory + i);
  if (esolm_isa(-1) == 0 || threads < 1) return total;
  Team::Counter counter;
  Team team(&counter);
  return total + (esolm_isa(-1) == 2 ? avx512::read_pieces : avx2::read_pieces)((const char*)memory, pieces, team, threads);
}

EXPORT int64_t esolm_scratch_bytes(const EsolmModel* m, const EsolmCall* c) {
  Arena arena{0};
  Buffers counted(arena, *m, *c);
  return arena.used + LINE;
}

EXPORT int32_t esolm_step(const EsolmModel* m, const EsolmCall* c) {
  if (esolm_isa(-1) == 0) return ESOLM_NO_INSTRUCTIONS;
  if (!fits(*m)) return ESOLM_BAD_MODEL;
  if (!fits(*c) || c->scratch_bytes < esolm_scratch_bytes(m, c)) return ESOLM_BAD_CALL;
  if (const int32_t status = check_values(*m, *c)) return status;
  Arena arena{uintptr_t(round_up(int64_t(c->scratch), LINE))};
  Buffers buffers(arena, *m, *c);
  reset(buffers.counters, buffers.phases);
  list_rows(*c, buffers);
  (esolm_isa(-1) == 2 ? avx512::step : avx2::step)(*m, *c, buffers);
  return ESOLM_OK;
}
}
