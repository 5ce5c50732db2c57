// Reads tensors that arrive from Python: torch through the DLPack C exchange table (no Python call), others through
// nanobind. The table's layout is that of the DLPack specification, version 1.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "engine.h"

namespace hpcdecode {

// All throw nanobind::type_error or std::invalid_argument that name the argument.
Matrix read_matrix(nanobind::handle h, const char* name, bool writable);
std::vector<float> read_floats(nanobind::handle h, const char* name);
struct Bytes {
    uint8_t* data;
    int64_t size;
};
Bytes read_bytes(nanobind::handle h, const char* name);
struct Ints {
    const int32_t* data;
    int size;
    nanobind::object owner;
};
Ints read_ints(nanobind::handle h, const char* name);

}  // namespace hpcdecode
