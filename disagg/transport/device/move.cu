// Copies rows of a KV cache: from blocks to a contiguous chunk, back, or from blocks to blocks.
//
// A row is one unit (some tokens of one block) of one region (layer). Rows are numbered region by
// region. `regions` holds, for each of them, kColumns numbers as in moves.py; `from_units` and
// `to_units` say in which block and where in it each unit lies, null where units follow one another.
// A row is copied in `parts` parts, each by one thread block; there is one kernel for each width of
// word, and the widest is used that all addresses, strides and lengths allow.

typedef long long i64;

enum {
  kBase, kBlock, kUnit, kOuter, kInner,  // of the side that is read, then of the one written
  kTo = 5,
  kInnerCount = 10, kPieceBytes, kRowBytes, kColumns
};

__device__ inline i64 row_start(const i64* side, const int2* units, int unit, i64 shift) {
  int block = unit, within = 0;
  if (units) {
    block = units[unit].x;
    within = units[unit].y;
  }
  return side[kBase] + shift + block * side[kBlock] + within * side[kUnit];
}

// One run of bytes on both sides: what whole blocks are in most layouts. Four loads under way for
// each thread; waiting for one at a time leaves the memory idle.
template <typename Word>
__device__ inline void copy_run(const char* from, char* to, unsigned at, unsigned end) {
  const unsigned step = blockDim.x;
  for (; at < end; at += 4 * step) {
    Word held[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const unsigned word = at + k * step;
      if (word < end) held[k] = ((const Word*)from)[word];
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const unsigned word = at + k * step;
      if (word < end) ((Word*)to)[word] = held[k];
    }
  }
}

// Pieces of a row that lie apart on one side at least.
template <typename Word>
__device__ inline void copy_pieces(const i64* region, const char* from, char* to, unsigned at,
                                   unsigned end) {
  const i64 from_outer = region[kOuter], from_inner = region[kInner];
  const i64 to_outer = region[kTo + kOuter], to_inner = region[kTo + kInner];
  const unsigned inner = (unsigned)region[kInnerCount];
  const unsigned piece = (unsigned)(region[kPieceBytes] / sizeof(Word));
  const unsigned step = blockDim.x;
  while (at < end) {
    Word held[4];
    char* target[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const unsigned word = at + k * step;
      if (word < end) {
        const unsigned which = word / piece, within = word - which * piece;
        const unsigned i = which / inner, j = which - i * inner;
        held[k] =
            *(const Word*)(from + i * from_outer + j * from_inner + (i64)within * sizeof(Word));
        target[k] = to + i * to_outer + j * to_inner + (i64)within * sizeof(Word);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (at + k * step < end) *(Word*)target[k] = held[k];
    }
    at += 4 * step;
  }
}

template <typename Word>
__device__ inline void move_rows(const i64* regions, const int2* from_units, const int2* to_units,
                                 int units, i64 first, i64 rows, int parts, i64 from_shift,
                                 i64 to_shift) {
  for (i64 work = blockIdx.x; work < rows * parts; work += gridDim.x) {
    const i64 row = first + work / parts;
    const unsigned part = (unsigned)(work % parts);
    const i64* region = regions + row / units * kColumns;
    const int unit = (int)(row % units);
    const char* from = (const char*)row_start(region, from_units, unit, from_shift);
    char* to = (char*)row_start(region + kTo, to_units, unit, to_shift);

    const unsigned words = (unsigned)(region[kRowBytes] / sizeof(Word));
    const unsigned end = (unsigned)((i64)words * (part + 1) / parts);
    const unsigned at = (unsigned)((i64)words * part / parts) + threadIdx.x;
    if (region[kPieceBytes] == region[kRowBytes])
      copy_run<Word>(from, to, at, end);
    else
      copy_pieces<Word>(region, from, to, at, end);
  }
}

#define KERNEL(bytes, Word)                                                                       \
  extern "C" __global__ void move_rows_##bytes(                                                   \
      const i64* regions, const int2* from_units, const int2* to_units, int units, i64 first,     \
      i64 rows, int parts, i64 from_shift, i64 to_shift) {                                        \
    move_rows<Word>(regions, from_units, to_units, units, first, rows, parts, from_shift,         \
                    to_shift);                                                                    \
  }

KERNEL(16, uint4)
KERNEL(8, uint2)
KERNEL(4, unsigned int)
KERNEL(2, unsigned short)
KERNEL(1, unsigned char)
