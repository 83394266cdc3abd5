// The kernels of disagg/transport/device/move.cu as host code: one thread after the other.

struct int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x; };

static thread_local Dim blockIdx, threadIdx, blockDim, gridDim;

#define __global__
#define __device__

#include MOVE

extern "C" void launch(int word, unsigned grid, unsigned block, const i64* regions,
                       const int2* from_units, const int2* to_units, int units, i64 first,
                       i64 rows, int parts, i64 from_shift, i64 to_shift) {
  auto run = word == 16  ? move_rows_16
             : word == 8 ? move_rows_8
             : word == 4 ? move_rows_4
             : word == 2 ? move_rows_2
                         : move_rows_1;
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
      run(regions, from_units, to_units, units, first, rows, parts, from_shift, to_shift);
}
