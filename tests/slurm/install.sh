#!/bin/sh
# Installs Slurm from the system's packages, for the tests in this folder; starts no service.
set -e
if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/slurm: expected root and apt-get to install Slurm; its tests will be skipped" >&2
    exit 0
fi
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq &&
    apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmi2-0 ||
    echo "tests/slurm: Slurm cannot be installed from the system's packages; its tests will be skipped" >&2
