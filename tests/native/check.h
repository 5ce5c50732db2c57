// No framework: a failed check prints where and what, and the exit status is 1.
#pragma once
#include <cstdio>

namespace {

int failures = 0;

#define CHECK(condition, ...)                                           \
    do {                                                                \
        if (!(condition)) {                                             \
            std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                                   \
            std::printf("\n");                                          \
            ++failures;                                                 \
        }                                                               \
    } while (0)

int report(const char* name) {
    std::printf("%s: %s, %d checks failed\n", name, failures == 0 ? "passed" : "FAILED", failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace
