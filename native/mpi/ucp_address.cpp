// Stands before the functions of UCX by which MPICH gets and takes addresses, for its start under Slurm. MPICH
// publishes the 4,096 bytes that begin at an address (MPIDI_UCX_comm_addr_exchange), in lines of 511 bytes; a line that
// Slurm reads is long enough for 450 of these, and runs of zeros are shortened. So what follows an address is zeros
// here, not whatever lies behind it on the heap, and zeros lie between its parts, which a node with many network
// devices needs. Loaded with RTLD_GLOBAL before MPI, see hpcdecode/mpi/mpich.py.

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr size_t published = 4096;          // MPID_MAX_BC_SIZE
constexpr size_t part = 448, stride = 512;  // bytes of an address, and from its first to those of the next part
constexpr uint64_t mark = 0x7264615f70637568;
constexpr uint64_t has_address = 1;               // UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
constexpr int unsupported = -22, no_memory = -4;  // UCS_ERR_UNSUPPORTED, UCS_ERR_NO_MEMORY

using Bytes = std::vector<char>;
using Get = int(void*, void**, size_t*);
using Release = void(void*, void*);

struct EndpointParameters {  // as ucp_ep_params_t begins
    uint64_t fields;
    const char* address;
};
using Create = int(void*, EndpointParameters*, void**);

struct Head {  // before an address
    uint64_t mark, length;
};

int find_ucx(dl_phdr_info* library, size_t, void* path) {
    if (!std::strstr(library->dlpi_name, "/libucp")) return 0;  // wheels may add to the name
    *static_cast<std::string*>(path) = library->dlpi_name;
    return 1;
}

// The function of this name of the UCX that MPI has loaded; null if there is none.
template <class Function>
Function* of_ucx(const char* name) {
    std::string path;
    dl_iterate_phdr(find_ucx, &path);
    void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

// Calls copy(bytes of a part among all, their place among spread ones, their number) for each part of so many bytes.
template <class Copy>
void each_part(size_t bytes, const Copy& copy) {
    for (size_t done = 0; done < bytes; done += part) copy(done, done / part * stride, std::min(part, bytes - done));
}

}  // namespace

extern "C" {

int ucp_worker_get_address(void* worker, void** address, size_t* length) {
    auto* get = of_ucx<Get>("ucp_worker_get_address");
    auto* release = of_ucx<Release>("ucp_worker_release_address");
    if (!get || !release) return unsupported;
    void* own = nullptr;
    size_t bytes = 0;
    if (int status = get(worker, &own, &bytes)) return status;
    const Head head{mark, bytes};
    Bytes whole(sizeof(head) + bytes);
    std::memcpy(whole.data(), &head, sizeof(head));
    std::memcpy(whole.data() + sizeof(head), own, bytes);
    release(worker, own);
    *length = (whole.size() + part - 1) / part * stride;
    auto* spread = static_cast<char*>(std::calloc(1, std::max(*length, published)));
    if (!spread) return no_memory;
    each_part(whole.size(), [&](size_t from, size_t to, size_t n) { std::memcpy(spread + to, &whole[from], n); });
    *address = spread;
    return 0;
}

void ucp_worker_release_address(void*, void* address) { std::free(address); }

int ucp_ep_create(void* worker, EndpointParameters* parameters, void** endpoint) {
    auto* create = of_ucx<Create>("ucp_ep_create");
    if (!create) return unsupported;
    Head head{};
    const char* spread = parameters->fields & has_address ? parameters->address : nullptr;
    if (spread) std::memcpy(&head, spread, sizeof(head));
    if (head.mark != mark) return create(worker, parameters, endpoint);
    Bytes whole(sizeof(head) + head.length);
    each_part(whole.size(), [&](size_t to, size_t from, size_t n) { std::memcpy(&whole[to], spread + from, n); });
    parameters->address = whole.data() + sizeof(head);
    const int status = create(worker, parameters, endpoint);
    parameters->address = spread;
    return status;
}
}
