// The sizes of thread blocks, and how kernel functions are declared, for every kind of block.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HPC_DEVICE __device__ __forceinline__
#define HPC_BOTH __host__ __device__ inline
#define HPC_UNROLL _Pragma("unroll")
#define HPC_UNROLL2 _Pragma("unroll 2")
#define HPC_UNROLL4 _Pragma("unroll 4")
#else
#define HPC_DEVICE inline
#define HPC_BOTH inline
#define HPC_UNROLL
#define HPC_UNROLL2
#define HPC_UNROLL4
#endif

namespace hpcdecode {

constexpr int kThreads = 128;      // of a block, unless it is launched with others
constexpr int kMostThreads = 256;  // of any block
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

}  // namespace hpcdecode
