// The kernel of disagg/transport/device/move.cu as host code: one thread after the other.

struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x; };

static thread_local Dim blockIdx, threadIdx, blockDim, gridDim;

#define __global__
#define __device__


#define WORD uint4
#define move_rows move_rows_16
namespace word_16 {
#include MOVE
}
#undef WORD
#undef move_rows
#define WORD uint2
#define move_rows move_rows_8
namespace word_8 {
#include MOVE
}
#undef WORD
#undef move_rows
#define WORD unsigned
#define move_rows move_rows_4
namespace word_4 {
#include MOVE
}
#undef WORD
#undef move_rows
#define WORD unsigned short
#define move_rows move_rows_2
namespace word_2 {
#include MOVE
}
#undef WORD
#undef move_rows
#define WORD unsigned char
#define move_rows move_rows_1
namespace word_1 {
#include MOVE
}

typedef long long number;

extern "C" void launch(int word, unsigned grid, unsigned block, const number* regions,
                       const int2* from_units, const int2* to_units, int units, number first,
                       number rows, int parts, number from_shift, number to_shift) {
  auto run = word == 16  ? word_16::move_rows_16
             : word == 8 ? word_8::move_rows_8
             : word == 4 ? word_4::move_rows_4
             : word == 2 ? word_2::move_rows_2
                         : word_1::move_rows_1;
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
      run(regions, from_units, to_units, units, first, rows, parts, from_shift, to_shift);
}
