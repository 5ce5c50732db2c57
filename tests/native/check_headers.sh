#!/bin/sh
# Compiles every native header alone, without its output: each must include what it uses.
# One that the file of its name includes first has been compiled alone there.
# Headers that need nvcc, nanobind or the other architecture's instructions are left out.
set -eu
cd "$(dirname "$0")/../../native"
baseline=''
best=''
if [ "$(uname -m)" = x86_64 ]; then
  baseline='-mavx2 -mfma -mf16c'
  best="$baseline -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni"
fi
failed=0
for header in $(find . -name '*.h' | sort); do
  own=${header%.h}.cpp
  [ ! -f "$own" ] || [ "$(grep -m1 '^#include' "$own")" != "#include \"${header##*/}\"" ] || continue
  case $header in
    ./kv/tensor.h | */bind_*.h | ./attn_cuda/block_device.h | ./attn_cuda/launch.h) continue ;;
    ./attn_cpu/kernels/vec_neon.h) [ -n "$best" ] && continue || flags='' ;;
    *avx* | *bf16* | *quad* | *pair* | *tile*.h) [ -n "$best" ] || continue; flags=$best ;;
    ./attn_cpu/kernels/vec_generic.h) flags=$baseline ;;
    *) flags=$best ;;
  esac
  [ "$header" != ./attn_cpu/kernels/vec_avx2.h ] || flags=$baseline
  echo "#include \"$header\"" |
    "${CXX:-c++}" -std=c++17 -fsyntax-only -Wall -Wextra -DHPCDECODE_DEVICE_TYPE=1 $flags -I. -Ikv -Ithreads -Itiles -x c++ - ||
    { echo "$header does not compile alone" >&2; failed=1; }
done
exit $failed
