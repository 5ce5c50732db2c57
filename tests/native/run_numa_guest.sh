#!/bin/sh
# Runs the NUMA test in an emulated machine of two nodes, for machines that have one: about 10 s, no speed to be seen.
# Needs qemu-system-x86_64, a static busybox, cpio, and a kernel image with NUMA and a serial console.
# Usage: run_numa_guest.sh KERNEL [build directory]
set -eu
kernel=${1:?usage: run_numa_guest.sh KERNEL [build directory]}
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${2:-$root/build/static}
cmake -S "$root" -B "$build" -DHPCDECODE_PYTHON=OFF -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null
cmake --build "$build" --target numa_test --parallel 2 >/dev/null

guest=$(mktemp -d)
trap 'rm -rf "$guest"' EXIT
mkdir -p "$guest/root/proc" "$guest/root/sys" "$guest/root/dev"
cp "$(command -v "${BUSYBOX:-busybox}")" "$guest/root/busybox"
cp "$build/native/attn_cpu/numa_test" "$guest/root/test"
cat >"$guest/root/init" <<'INIT'
#!/busybox sh
/busybox mount -t proc proc /proc
/busybox mount -t sysfs sys /sys
/busybox mount -t devtmpfs dev /dev
/test && echo "guest: passed"
/busybox poweroff -f
INIT
chmod +x "$guest/root/init"
(cd "$guest/root" && find . | cpio -o -H newc 2>/dev/null | gzip) >"$guest/init.gz"
timeout -k 5 120 qemu-system-x86_64 -nographic -no-reboot -m 1024 -smp 4 -cpu max \
    -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M \
    -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 \
    -kernel "$kernel" -initrd "$guest/init.gz" \
    -append "console=ttyS0 quiet numa_balancing=disable panic=-1" </dev/null >"$guest/log" 2>&1 || true
cat "$guest/log"
grep -q "^2 NUMA nodes" "$guest/log" && grep -q "guest: passed" "$guest/log"
