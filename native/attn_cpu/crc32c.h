// The checksum of blocks that leave memory: CRC-32C (Castagnoli), as of iSCSI and ext4.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hpcdecode {

// Continues a checksum over `size` more bytes; that of nothing is 0.
uint32_t crc32c(const uint8_t* data, size_t size, uint32_t crc = 0);

// Takes the checksums of n times `size` bytes, some of which are read side by side.
void crc32c_each(const uint8_t* const* data, size_t size, int n, uint32_t* sums);

// The same without instructions for it.
uint32_t crc32c_by_table(const uint8_t* data, size_t size, uint32_t crc = 0);

}  // namespace hpcdecode
