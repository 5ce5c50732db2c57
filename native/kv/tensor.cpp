#include "tensor.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>

namespace nb = nanobind;

namespace hpcdecode {
namespace {

using Tensor = nb::dlpack::dltensor;

struct ExchangeTable {
    struct {
        uint32_t major, minor;
    } version;
    void* previous;
    void* allocate;
    void* managed_from_object;
    void* object_from_managed;
    int (*tensor_from_object)(void* object, Tensor* out);
    void* work_stream;
};

// Returns the exchange table of a type, or null. Remembers the last type, because calls come with one kind of tensor.
const ExchangeTable* exchange_table(PyTypeObject* type) {
    static PyTypeObject* seen = nullptr;
    static const ExchangeTable* table = nullptr;
    if (type == seen) return table;
    const ExchangeTable* found = nullptr;
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (capsule != nullptr && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        found = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        if (found->version.major != 1 || found->tensor_from_object == nullptr) found = nullptr;
    }
    Py_XDECREF(capsule);
    PyErr_Clear();
    Py_XINCREF(reinterpret_cast<PyObject*>(type));
    Py_XDECREF(reinterpret_cast<PyObject*>(seen));
    seen = type;
    table = found;
    return table;
}

std::string dtype_name(nb::dlpack::dtype t) {
    static const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    return (t.code < 7 ? kinds[t.code] : "dtype") + std::to_string(t.bits);
}

[[noreturn]] void wrong_type(const char* name, const std::string& expected, const std::string& got) {
    throw nb::type_error((std::string(name) + ": expected " + expected + ", got " + got).c_str());
}

// A borrowed view that lives as long as `h` and `keep`.
struct View {
    void* data;
    int ndim;
    nb::dlpack::dtype dtype;
    int64_t shape[2], stride[2];
    nb::object keep;
};

void check_device(const char* name, int device, int came) {
    if (came == device) return;
    wrong_type(name, device == kCpu ? "a CPU tensor" : "a CUDA tensor", "one on another device");
}

View view_of(nb::handle h, const char* name, const char* expected, bool writable, int device = kCpu) {
    View v{};
    const auto fill = [&](void* data, int ndim, nb::dlpack::dtype dtype, const int64_t* shape, const int64_t* strides) {
        v.data = data;
        v.ndim = ndim;
        v.dtype = dtype;
        int64_t dense = 1;
        for (int i = ndim; i-- > 0;) {
            if (i < 2) v.shape[i] = shape[i];
            if (i < 2) v.stride[i] = strides ? strides[i] : dense;
            dense *= shape[i];
        }
    };
    if (const ExchangeTable* table = exchange_table(Py_TYPE(h.ptr()))) {
        Tensor t{};
        if (table->tensor_from_object(h.ptr(), &t) != 0) throw nb::python_error();
        check_device(name, device, t.device.device_type);
        fill(static_cast<uint8_t*>(t.data) + t.byte_offset, t.ndim, t.dtype, t.shape, t.strides);
        return v;
    }
    nb::ndarray<nb::ro> ro;
    nb::ndarray<> rw;
    if (writable ? nb::try_cast(h, rw, false) : nb::try_cast(h, ro, false)) {
        if (writable) {
            check_device(name, device, rw.device_type());
            fill(rw.data(), static_cast<int>(rw.ndim()), rw.dtype(), rw.shape_ptr(), rw.stride_ptr());
        } else {
            check_device(name, device, ro.device_type());
            fill(const_cast<void*>(ro.data()), static_cast<int>(ro.ndim()), ro.dtype(), ro.shape_ptr(),
                 ro.stride_ptr());
        }
        return v;
    }
    wrong_type(name, expected, nb::cast<std::string>(nb::str(h.type())));
}

bool is(nb::dlpack::dtype t, nb::dlpack::dtype_code code, int bits) {
    return t.code == static_cast<uint8_t>(code) && t.bits == bits && t.lanes == 1;
}

}  // namespace

Matrix read_matrix(nb::handle h, const char* name, bool writable, int device) {
    const std::string expected = std::string(writable ? "a writable" : "a") + " 2-D float32 or bfloat16 " +
                                 (device == kCpu ? "CPU" : "CUDA") + " tensor";
    const View v = view_of(h, name, expected.c_str(), writable, device);
    Matrix m{};
    if (is(v.dtype, nb::dlpack::dtype_code::Float, 32)) {
        m.type = ActType::kF32;
    } else if (is(v.dtype, nb::dlpack::dtype_code::Bfloat, 16)) {
        m.type = ActType::kBF16;
    } else {
        wrong_type(name, "float32 or bfloat16", dtype_name(v.dtype));
    }
    if (v.ndim != 2)
        throw std::invalid_argument(std::string(name) + ": expected 2 dimensions, got " + std::to_string(v.ndim));
    const bool filled = v.shape[0] > 0;
    if (filled && v.shape[1] > 1 && v.stride[1] != 1) {
        throw std::invalid_argument(std::string(name) + ": expected a contiguous last dimension, got stride " +
                                    std::to_string(v.stride[1]));
    }
    if (writable && v.shape[0] > 1 && std::abs(v.stride[0]) < v.shape[1]) {
        throw std::invalid_argument(std::string(name) + ": expected rows that do not overlap, got row stride " +
                                    std::to_string(v.stride[0]));
    }
    m.data = v.data;
    m.rows = v.shape[0];
    m.columns = v.shape[1];
    m.stride = v.stride[0];
    return m;
}

std::vector<float> read_floats(nb::handle h, const char* name) {
    const View v = view_of(h, name, "a 1-D float32 CPU tensor", false);
    if (!is(v.dtype, nb::dlpack::dtype_code::Float, 32)) wrong_type(name, "float32", dtype_name(v.dtype));
    if (v.ndim != 1)
        throw std::invalid_argument(std::string(name) + ": expected 1 dimension, got " + std::to_string(v.ndim));
    std::vector<float> out(v.shape[0]);
    for (int64_t i = 0; i < v.shape[0]; ++i) out[i] = static_cast<const float*>(v.data)[i * v.stride[0]];
    return out;
}

Bytes read_bytes(nb::handle h, const char* name) {
    const View v = view_of(h, name, "a writable 1-D uint8 CPU tensor", true);
    if (!is(v.dtype, nb::dlpack::dtype_code::UInt, 8)) wrong_type(name, "uint8", dtype_name(v.dtype));
    if (v.ndim != 1 || (v.shape[0] > 1 && v.stride[0] != 1)) {
        throw std::invalid_argument(std::string(name) + ": expected a contiguous 1-D tensor");
    }
    return {static_cast<uint8_t*>(v.data), v.shape[0]};
}

Ints read_ints(nb::handle h, const char* name) {
    if (PyList_Check(h.ptr()) || PyTuple_Check(h.ptr())) {
        nb::module_ numpy = nb::module_::import_("numpy");
        nb::object array = numpy.attr("array")(h, nb::arg("dtype") = "int32");
        Ints out = read_ints(array, name);
        out.owner = array;
        return out;
    }
    const View v = view_of(h, name, "a 1-D int32 array", false);
    if (!is(v.dtype, nb::dlpack::dtype_code::Int, 32)) wrong_type(name, "int32", dtype_name(v.dtype));
    if (v.ndim != 1 || (v.shape[0] > 1 && v.stride[0] != 1)) {
        throw std::invalid_argument(std::string(name) + ": expected a contiguous 1-D array");
    }
    if (v.shape[0] > INT32_MAX) throw std::invalid_argument(std::string(name) + ": too long");
    return {static_cast<const int32_t*>(v.data), static_cast<int>(v.shape[0]), nb::object()};
}

Sequences read_sequences(nb::handle slots, nb::handle counts) {
    Sequences s{read_ints(slots, "slots"), read_ints(counts, "counts")};
    if (s.slots.size != s.counts.size) {
        throw std::invalid_argument("slots and counts: expected the same length, got " + std::to_string(s.slots.size) +
                                    " and " + std::to_string(s.counts.size));
    }
    return s;
}

void bind_common(nb::module_& m) {
    nb::set_leak_warnings(false);  // objects may live until the interpreter ends
    nb::exception<CapacityError>(m, "CapacityError", PyExc_RuntimeError).attr("__doc__") =
        "The KV cache has too few free blocks; nothing was changed.";
    nb::class_<LayerShape>(m, "LayerShape", "The shape of one attention layer.")
        .def(
            "__init__",
            [](LayerShape* s, int kv_heads, int k_dim, int v_dim, int q_heads, float scale,
               std::optional<int64_t> window, std::optional<float> softcap, bool sinks, bool latent, int index_heads,
               int index_dim, int64_t index_topk, bool chunked, int64_t compress_rate, int64_t index_pool,
               int64_t index_local, int bias_dim, nb::handle bias_profiles, bool row_sinks) {
                if ((window && *window < 1) || (chunked && !window) || (softcap && !(*softcap > 0))) {
                    throw std::invalid_argument(
                        "window and softcap: expected positive values, or None; a chunk has a window");
                }
                const auto bias =
                    PositionBias::of(bias_dim, bias_profiles.is_none() ? std::vector<float>()
                                                                       : read_floats(bias_profiles, "bias_profiles"));
                new (s) LayerShape{kv_heads,
                                   k_dim,
                                   v_dim,
                                   q_heads,
                                   scale,
                                   {window.value_or(0), chunked},
                                   softcap.value_or(0),
                                   sinks,
                                   latent,
                                   index_heads,
                                   index_dim,
                                   index_topk,
                                   compress_rate,
                                   index_pool,
                                   index_local,
                                   bias,
                                   row_sinks};
            },
            nb::arg("kv_heads"), nb::arg("k_dim"), nb::arg("v_dim"), nb::arg("q_heads"), nb::arg("scale"),
            nb::arg("window").none(), nb::arg("softcap").none(), nb::arg("sinks"), nb::arg("latent") = false,
            nb::arg("index_heads") = 0, nb::arg("index_dim") = 0, nb::arg("index_topk") = 0, nb::arg("chunked") = false,
            nb::arg("compress_rate") = 0, nb::arg("index_pool") = 1, nb::arg("index_local") = 0,
            nb::arg("bias_dim") = 0, nb::arg("bias_profiles").none() = nb::none(), nb::arg("row_sinks") = false,
            nb::sig("def __init__(self, kv_heads: int, k_dim: int, v_dim: int, q_heads: int, scale: float, "
                    "window: int | None, softcap: float | None, sinks: bool, latent: bool = False, "
                    "index_heads: int = 0, index_dim: int = 0, index_topk: int = 0, chunked: bool = False, "
                    "compress_rate: int = 0, index_pool: int = 1, index_local: int = 0, bias_dim: int = 0, "
                    "bias_profiles: _Floats | None = None, row_sinks: bool = False) -> None"),
            R"(Describe an attention layer.

Args:
    kv_heads: Number of key and value heads.
    k_dim: Elements of a query head and of a key head.
    v_dim: Elements of a value head.
    q_heads: Number of query heads, a multiple of kv_heads.
    scale: Factor of every score q.k.
    window: Positions that a query sees, its own included, or None for all.
    softcap: Bound c of scores, which become c * tanh(score / c), or None.
    sinks: True if every head has one more logit in the softmax's denominator.
    latent: True if the values are the first v_dim elements of K, which rows and the KV cache have once.
    index_heads: Heads of the layer's indexer; 0 if it has none.
    index_dim: Elements of an index query head and of an index key; 0 without an indexer.
    index_topk: Tokens that a token attends to at most, chosen by the indexer or by that of the layer before; 0
        for all.
    chunked: True if a query sees the positions of its own chunk of `window` positions alone.
    compress_rate: Tokens of which each compressed entry is made; 0 for none. A query sees those that are
        complete, or index_topk of them, beside its window. A row has an entry behind k, then the index key.
    index_pool: Tokens that are chosen together, by the index key of the last one. Those behind the last
        whole pool are attended to as well. index_topk is whole pools.
    index_local: If positive, pools are blocks, of which every KV head attends to as many of the last ones,
        and to those that its own index head chooses by the largest q.k; every token has an index key.
    bias_dim: Numbers that a row has for each query head, behind the queries; 0 for none. Their products with
        the profiles are added to the scores.
    bias_profiles: float32 [bias_dim * extent], by distance between query and key; None for profiles that
        are minus the distance.
    row_sinks: True if rows have a sink for each query head, behind the numbers of biases.

Raises:
    ValueError: If window or softcap is not positive, a chunk has no window, or profiles are not bias_dim alike.)");
}

}  // namespace hpcdecode
