// One lazily touched anonymous mapping with huge pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hpcdecode {

constexpr size_t kHugePage = size_t{2} << 20;

class Arena {
  public:
    explicit Arena(size_t bytes);  // throws std::runtime_error when the address space is refused
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    // Pages of [offset, offset + bytes) are to come from NUMA node `node` while it has any; call before they are
    // touched. A node that this process may not use, or -1, changes nothing.
    void bind(size_t offset, size_t bytes, int node);
    // Has memory found for a huge page, as writing to it would; what it holds stays.
    void populate(size_t huge_page);
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    uint8_t* data_;
    size_t size_, mapped_;
    void* map_;
};

}  // namespace hpcdecode
