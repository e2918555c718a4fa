#!/bin/sh
# in_root.sh ROOT HOST SHARED... -- COMMAND...: runs the command in a root of its own, as a machine
# named HOST that has each directory of SHARED at its own path. Runs in mount, network, process and
# host name namespaces that end with it.
set -eu
. "${0%/*}/../bench/root.sh"
root=$1 host=$2
shift 2
enter_root "$root" "$@"
while [ "$1" != -- ]; do
    shift
done
shift
echo "$host" >/proc/sys/kernel/hostname
ip link set lo up
# Newer Slurms ask for addresses of a kind that the machine has besides loopback's.
ip link add d0 type veth peer name d1
ip address add 10.0.1.1/24 dev d0
ip link set d0 up
ip link set d1 up
exec "$@"
