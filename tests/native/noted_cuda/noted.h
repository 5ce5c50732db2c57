// A CUDA runtime without a GPU: memory is the host's, streams do their work at once, and calls are noted.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <vector>

struct NotedCall {
    std::string name;
    int device;  // that is current then
    int age;     // of an event that is waited for: steps since it was recorded
};

struct NotedRuntime {
    int current = 0;                      // device
    int step = 0;                         // of the test, which counts them
    cudaError_t of_count = cudaSuccess;   // of cudaGetDeviceCount, which finds three devices
    cudaError_t of_memory = cudaSuccess;  // of allocations
    int driver_version = 13000;           // 0: none
    int errors_left = 0;                  // errors that were not asked for
    int events = 0, blocks = 0;           // that there are, of memory
    std::vector<NotedCall> calls;
    std::vector<int> devices_set;         // in order
    std::map<cudaEvent_t, int> recorded;  // step

    int count(const std::string& name) const;
};

extern NotedRuntime noted;
