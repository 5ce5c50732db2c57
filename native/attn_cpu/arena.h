// One lazily touched anonymous mapping with huge pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hpcdecode {

class Arena {
  public:
    explicit Arena(size_t bytes);  // throws std::runtime_error when the address space is refused
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    uint8_t* data_;
    size_t size_, mapped_;
    void* map_;
};

}  // namespace hpcdecode
