#!/bin/sh
# Builds the native tests with sanitizers and runs them: on every ISA of this machine, and of the device emulated.
# Usage: run_sanitized.sh [build directory]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/sanitized}
cmake -S "$root" -B "$build" -DHPCDECODE_SANITIZE=ON -DHPCDECODE_PYTHON=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build" --target kv_cache_test numa_test prefill_test state_store_test adapters_test chain_test experts_test products_test device_test device_race_test --parallel 2 >/dev/null
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1} UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
for part in kv_cache numa prefill state_store; do
  "$build/native/attn_cpu/${part}_test"
done
"$build/native/ops_cpu/adapters_test"
"$build/native/ops_cpu/chain_test"
"$build/native/ops_cpu/experts_test"
"$build/native/ops_cpu/products_test"
"$build/native/attn_cuda/device_test"
"$build/native/attn_cuda/device_race_test"  # under the thread sanitizer, a thread of the system for every one of a block
