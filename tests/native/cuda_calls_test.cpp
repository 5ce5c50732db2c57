// What device_cuda.cpp asks of the CUDA runtime, noted by one that has no GPU: devices that it sets, errors that it
// tells or leaves untold.
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "device.h"
#include "noted.h"

using namespace hpcdecode;

namespace {

// Returns what device_count throws, or the number that it returns.
std::string counted() {
    try {
        return std::to_string(device_count());
    } catch (const std::runtime_error& error) {
        return error.what();
    }
}

void test_a_device_in_use_is_not_set() {
    noted.current = 1;
    noted.devices_set.clear();
    {
        const Using device(1);
    }
    CHECK(noted.devices_set.empty(), "%zu calls", noted.devices_set.size());
}

void test_another_device_is_set_and_set_back() {
    noted.current = 2;
    noted.devices_set.clear();
    {
        const Using device(1);
        CHECK(noted.current == 1, "%d", noted.current);
    }
    CHECK((noted.devices_set == std::vector<int>{1, 2}), "%zu calls", noted.devices_set.size());
}

void test_a_driver_that_fails_is_told() {
    noted.of_count = cudaSuccess;
    CHECK(counted() == "3", "%s", counted().c_str());
    noted.of_count = cudaErrorNoDevice, noted.driver_version = 12020;
    CHECK(counted() == "0", "%s", counted().c_str());
    noted.of_count = cudaErrorInsufficientDriver, noted.driver_version = 0;  // no driver
    CHECK(counted() == "0", "%s", counted().c_str());
    noted.driver_version = 12020;
    CHECK(counted() == "CUDA: insufficient driver (the driver runs CUDA 12.2, this was built with 13.0)", "%s",
          counted().c_str());
    CHECK(noted.errors_left == 0, "%d", noted.errors_left);
    noted.of_count = cudaSuccess;
}

void test_full_memory_is_bad_alloc_and_leaves_no_error() {
    noted.of_memory = cudaErrorMemoryAllocation;
    bool thrown = false;
    try {
        const Memory memory(1 << 20, Memory::Kind::kDevice);
    } catch (const std::bad_alloc&) {
        thrown = true;
    }
    CHECK(thrown && noted.errors_left == 0, "%d", noted.errors_left);
    noted.of_memory = cudaSuccess;
}

void test_memory_and_events_are_given_back() {
    {
        Memory memory(100, Memory::Kind::kPinned);
        memory.grow(1000, Memory::Kind::kPinned);
        Event event;
        event.reach();
        event.record(nullptr);
        event.record(nullptr);
        CHECK(noted.events == 1 && noted.blocks == 1, "%d events, %d blocks", noted.events, noted.blocks);
    }
    CHECK(noted.events == 0 && noted.blocks == 0, "%d events, %d blocks", noted.events, noted.blocks);
}

}  // namespace

int main() {
    test_a_device_in_use_is_not_set();
    test_another_device_is_set_and_set_back();
    test_a_driver_that_fails_is_told();
    test_full_memory_is_bad_alloc_and_leaves_no_error();
    test_memory_and_events_are_given_back();
    return report("cuda_calls_test");
}
