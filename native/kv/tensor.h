// Reads tensors that arrive from Python: torch through the DLPack C exchange table (no Python call), others through
// nanobind. The table's layout is that of the DLPack specification, version 1.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "block_table.h"
#include "matrix.h"

namespace hpcdecode {

// Device types of DLPack.
constexpr int kCpu = 1, kCuda = 2;

// All throw nanobind::type_error or std::invalid_argument that name the argument.
Matrix read_matrix(nanobind::handle h, const char* name, bool writable, int device = kCpu);
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
struct Sequences {
    Ints slots, counts;
};
Sequences read_sequences(nanobind::handle slots, nanobind::handle counts);

// What the modules of all backends have: LayerShape and CapacityError, each module its own.
void bind_common(nanobind::module_& m);

}  // namespace hpcdecode
