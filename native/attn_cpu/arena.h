// An anonymous mapping with huge pages, touched when it is used.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hpcdecode {

constexpr size_t kHugePage = size_t{2} << 20;

class Arena {
  public:
    // Throws std::runtime_error with the purpose when the address space is refused.
    explicit Arena(size_t bytes, const char* purpose = "the KV cache");
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    // Lets pages of [offset, offset + bytes) come from NUMA node `node` while it has any. Call before they are touched.
    // Does nothing for -1, and for a node that this process may not use.
    void bind(size_t offset, size_t bytes, int node);
    // Lets the system find memory for a huge page, as writing to it would. What the page holds stays.
    void populate(size_t huge_page);
    void populate(size_t offset, size_t bytes);  // the same for whole pages of any size
    // Gives whole pages back to the system. They hold zeros then.
    void discard(size_t offset, size_t bytes);
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    uint8_t* data_;
    size_t size_, mapped_;
    void* map_;
};

}  // namespace hpcdecode
