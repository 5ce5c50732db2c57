#!/bin/sh
# Builds the native tests with sanitizers and runs them: on every ISA of this machine, and of the device emulated.
# Usage: run_sanitized.sh [build directory]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/sanitized}
tests="kv_cache prefill state_store numa adapters chain drafts experts products device device_race cuda_calls steady_calls"
[ -e "$build/CMakeCache.txt" ] || ! command -v ninja >/dev/null || export CMAKE_GENERATOR=Ninja
cmake -S "$root" -B "$build" -DHPCDECODE_SANITIZE=ON -DHPCDECODE_PYTHON=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -DNDEBUG" >/dev/null
cmake --build "$build" --parallel 2 --target $(printf '%s_test ' $tests) >"$build/build.log" ||
  { tail -40 "$build/build.log" >&2; exit 1; }
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1} UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
# Two at a time. device_race_test runs under the thread sanitizer, a thread of the system for every one of a block.
for part in $tests; do
  echo "$build"/native/*/"${part}_test"
done | xargs -P 2 -I{} sh -c '{} || { echo "{}: failed" >&2; exit 255; }'
