// What one thread block computes, written once for the device and for a serial executor on the host
// (host_block.h), which runs the threads of a phase one after the other.
//
// A block is given as a `Block`:
//   block.phase(f)       f(thread) for every thread of the block, then a barrier
//   block.x(), y(), z()  which block of the grid this is
//   block.memory()       the block's shared memory, counted in floats
//   Block::PerThread<T>  a T of every thread that outlives a phase: registers
// Threads of one phase must not depend on each other. Shared memory is read and written through
// Memory::read and Memory::write only, so that the host can check every access.
#pragma once

#include <cstdint>
#include <type_traits>

#include "matrix.h"

// Functions of the kernels are device code for nvcc and ordinary code for the host's compiler;
// GRAFT_BOTH marks those that nvcc needs on both sides.
#if defined(__CUDACC__)
#define GRAFT_DEVICE __device__ __forceinline__
#define GRAFT_BOTH __host__ __device__ __forceinline__
#else
#define GRAFT_DEVICE inline
#define GRAFT_BOTH inline
#endif
#if defined(__CUDA_ARCH__)
#define GRAFT_UNROLL _Pragma("unroll")
#define GRAFT_UNROLL_LITTLE _Pragma("unroll 4")  // where more would take registers for nothing
#else
#define GRAFT_UNROLL
#define GRAFT_UNROLL_LITTLE
#endif

namespace graft::cuda {

using kernels::bf16;

// Tokens of a chunk, and the side of the square that a block's threads compute at once: each thread
// 4 rows of up to 4 columns.
inline constexpr int kChunk = 64;
inline constexpr int kThreads = 256;

GRAFT_BOTH int blocks_of(int64_t n, int64_t size) {
  return static_cast<int>((n + size - 1) / size);
}

// Consecutive numbers that one instruction loads or stores.
template <int N>
struct alignas(4 * N) Pack {
  float at[static_cast<unsigned>(N)];
};

// ------------------------------------------------------------------ shared memory

// A matrix in shared memory by its place: element (i, j) lies at `at + i * ld + j`.
struct Place {
  int at = 0, ld = 0;
};

// Hands out places one after the other; each starts at 16 bytes.
class Carver {
 public:
  GRAFT_BOTH Place matrix(int rows, int columns) {
    // 4 more than a multiple of 32 banks: rows read side by side lie in different banks.
    const int ld = (columns + 31) / 32 * 32 + 4;
    const Place place{used_, ld};
    used_ += rows * ld;
    return place;
  }
  GRAFT_BOTH Place row(int n) {
    const Place place{used_, 0};
    used_ += (n + 3) / 4 * 4;
    return place;
  }
  GRAFT_BOTH int used() const { return used_; }

 private:
  int used_ = 0;
};

template <class Memory>
struct Tile {
  Memory memory;
  Place place;

  template <int N>
  GRAFT_DEVICE Pack<N> pack(int i, int j) const {
    return memory.template read<N>(place.at + i * place.ld + j);
  }
  template <int N>
  GRAFT_DEVICE void put(int i, int j, const Pack<N>& x) const {
    memory.template write<N>(place.at + i * place.ld + j, x);
  }
  GRAFT_DEVICE float operator()(int i, int j) const { return pack<1>(i, j).at[0]; }
  GRAFT_DEVICE float operator()(int j) const { return pack<1>(0, j).at[0]; }
  GRAFT_DEVICE void set(int i, int j, float x) const { put<1>(i, j, {{x}}); }
  GRAFT_DEVICE void set(int j, float x) const { set(0, j, x); }
  GRAFT_DEVICE Tile from(int i, int j) const {
    return {memory, {place.at + i * place.ld + j, place.ld}};
  }
};

template <class Block>
GRAFT_DEVICE auto tile(Block& block, Place place) {
  return Tile<typename Block::Memory>{block.memory(), place};
}

// ------------------------------------------------------------------ numbers and rows

GRAFT_BOTH float bits_to_float(uint32_t bits) {
  union {
    uint32_t bits;
    float number;
  } x{bits};
  return x.number;
}
GRAFT_BOTH uint32_t float_to_bits(float number) {
  union {
    float number;
    uint32_t bits;
  } x{number};
  return x.bits;
}

GRAFT_BOTH float number(float x) { return x; }
GRAFT_BOTH float number(bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }

template <class E>
GRAFT_BOTH E stored(float x);
template <>
GRAFT_BOTH float stored<float>(float x) {
  return x;
}
// To nearest, ties to even; what is no number stays none.
template <>
GRAFT_BOTH bf16 stored<bf16>(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <class E>
struct alignas(4 * sizeof(E)) FourOf {
  std::remove_const_t<E> at[4];
};

// Rows in global memory, `columns` wide; beyond them there are zeros. data nullptr: absent.
template <class E>
struct GlobalRows {
  E* data = nullptr;
  int64_t stride = 0;
  int rows = 0, columns = 0;
  bool fours = false;  // four numbers at a multiple of four lie as one instruction wants them

  GlobalRows() = default;
  GRAFT_BOTH GlobalRows(E* data_, int64_t stride_, int rows_, int columns_)
      : data(data_),
        stride(stride_),
        rows(rows_),
        columns(columns_),
        fours(reinterpret_cast<uintptr_t>(data_) % (4 * sizeof(E)) == 0 && stride_ % 4 == 0) {}

  GRAFT_BOTH float load(int i, int j) const {
    return i < rows && j < columns ? number(data[i * stride + j]) : 0.0f;
  }
  GRAFT_BOTH Pack<4> load4(int i, int j) const {
    Pack<4> out;
    if (fours && i < rows && j + 4 <= columns) {
      const auto in = *reinterpret_cast<const FourOf<E>*>(data + i * stride + j);
      GRAFT_UNROLL
      for (int x = 0; x < 4; ++x) out.at[x] = number(in.at[x]);
      return out;
    }
    GRAFT_UNROLL
    for (int x = 0; x < 4; ++x) out.at[x] = load(i, j + x);
    return out;
  }
  GRAFT_BOTH void store(int i, int j, float x) const {
    if (i < rows && j < columns) data[i * stride + j] = stored<E>(x);
  }
  template <unsigned N>
  GRAFT_BOTH void store(int i, int j, const float (&x)[N]) const {
    if constexpr (N == 4) {
      if (fours && i < rows && j + 4 <= columns) {
        FourOf<E> out;
        GRAFT_UNROLL
        for (int c = 0; c < 4; ++c) out.at[c] = stored<E>(x[c]);
        *reinterpret_cast<FourOf<E>*>(data + i * stride + j) = out;
        return;
      }
    }
    GRAFT_UNROLL
    for (unsigned c = 0; c < N; ++c) store(i, j + static_cast<int>(c), x[c]);
  }
};

// A tensor [batch, tokens, heads, width] by its strides, each row contiguous. data nullptr: absent.
template <class E>
struct Tensor {
  E* data = nullptr;
  int64_t batch = 0, token = 0, head = 0;

  // Tokens [first, first + n) of one head.
  GRAFT_BOTH GlobalRows<E> rows(int b, int h, int64_t first, int n, int width) const {
    if (data == nullptr) return {};
    return {data + b * batch + h * head + first * token, token, n, width};
  }
};

// ------------------------------------------------------------------ the device's block

#if defined(__CUDACC__)
struct DeviceMemory {
  float* base;

  template <int N>
  __device__ __forceinline__ Pack<N> read(int at) const {
    return *reinterpret_cast<const Pack<N>*>(base + at);
  }
  template <int N>
  __device__ __forceinline__ void write(int at, const Pack<N>& x) const {
    *reinterpret_cast<Pack<N>*>(base + at) = x;
  }
};

class DeviceBlock {
 public:
  using Memory = DeviceMemory;

  template <class T>
  struct PerThread {
    T own;
    __device__ __forceinline__ explicit PerThread(DeviceBlock&) : own{} {}
    __device__ __forceinline__ T& operator[](int) { return own; }
  };

  template <class F>
  __device__ __forceinline__ void phase(const F& f) {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  __device__ __forceinline__ int x() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int y() const { return static_cast<int>(blockIdx.y); }
  __device__ __forceinline__ int z() const { return static_cast<int>(blockIdx.z); }
  __device__ __forceinline__ Memory memory() const {
    extern __shared__ __align__(16) float shared[];
    return {shared};
  }
};
#endif

// ------------------------------------------------------------------ launches

struct Grid {
  int x = 1, y = 1, z = 1;
};

// What the device at hand offers, for the choice of tiles.
struct DeviceLimits {
  int processors = 1;
  int shared = 48 * 1024;  // bytes of shared memory a block may have
};

}  // namespace graft::cuda
