#!/bin/sh
# Builds the native tests with counters of lines, runs them, and prints what they reach; coverage-native.xml has it all.
# Usage: run_coverage.sh GCOVR [build directory]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
gcovr=$1
build=${2:-$root/build/coverage}
cmake -S "$root" -B "$build" -DHPCDECODE_PYTHON=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS=--coverage >/dev/null
cmake --build "$build" --target kv_cache_test numa_test prefill_test state_store_test adapters_test chain_test experts_test products_test device_test --parallel 2 >/dev/null
find "$build" -name '*.gcda' -delete
for part in kv_cache numa prefill state_store; do
  "$build/native/attn_cpu/${part}_test"
done
"$build/native/ops_cpu/adapters_test"
"$build/native/ops_cpu/chain_test"
"$build/native/ops_cpu/experts_test"
"$build/native/ops_cpu/products_test"
"$build/native/attn_cuda/device_test"
cd "$root"
"$gcovr" --root . --filter native/ --merge-lines --gcov-ignore-parse-errors=all --xml coverage-native.xml --print-summary "$build"
