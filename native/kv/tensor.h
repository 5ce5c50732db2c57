// Reads tensors that come from Python. Part of the Python modules only.
//
// Torch tensors come through the DLPack C exchange table, without a Python call; others come through nanobind. The
// table has the layout of the DLPack specification, version 1.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "block_table.h"
#include "matrix.h"

// Types of arguments in Python signatures. native/stubs.txt defines these names for the stubs.
#define HPCDECODE_SLOTS "slots: _Ints, counts: _Ints"
#define HPCDECODE_MATRIX(name) name ": _Matrix"
#define HPCDECODE_SINKS "sinks: _Floats | None"

namespace hpcdecode {

// Device types of DLPack.
constexpr int kCpu = 1, kCuda = 2;

// All throw nanobind::type_error or std::invalid_argument with the argument's name.
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

// Binds LayerShape and CapacityError. Every module has classes of its own.
void bind_common(nanobind::module_& m);

}  // namespace hpcdecode
