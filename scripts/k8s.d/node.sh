#!/bin/sh
# node.sh ROOT SHARED DIR NAME ADDRESS BINARIES FLAG...: a node in a root of its own: containerd,
# and a kubelet with these flags, each again whenever it ends; the kubelet not while DIR/hold is
# there. Runs in mount, network and process namespaces that end with it. SHARED and BINARIES are
# seen at their own paths. The interface eth0 is put into its network from outside.
set -eu
. "${0%/*}/../bench/root.sh"
root=$1 shared=$2 dir=$3 name=$4 address=$5 binaries=$6
shift 6
tries=0
until ip link show eth0 >/dev/null 2>&1; do
    tries=$((tries + 1))
    test $tries -lt 300
    sleep 0.1
done
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
ip route add default dev eth0
enter_root "$root" "$shared" "$binaries"
# A kubelet writes these at its start. They are the whole machine's.
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
    kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    file=/run/setting-$(echo $setting | tr / -)
    cat /proc/sys/$setting >"$file"
    mount --bind "$file" /proc/sys/$setting
done
mkdir -p /var/lib/kubelet
mount --bind /var/lib/kubelet /var/lib/kubelet
mount --make-shared /var/lib/kubelet
(while :; do
    containerd --config "$dir/containerd.toml" >>"$dir/containerd.log" 2>&1 || true
    sleep 0.1
done) &
# kubelet 1.20 asks a cloud's address for the machine's name otherwise.
export AWS_EC2_METADATA_DISABLED=true
while :; do
    test -e "$dir/hold" || "$binaries/kubelet" --config="$dir/kubelet.json" --kubeconfig="$dir/kubeconfig" \
        --root-dir=/var/lib/kubelet --hostname-override="$name" --node-ip="$address" \
        --cert-dir="$dir/pki" --node-labels=fleet=kubelets "$@" >>"$dir/kubelet.log" 2>&1 || true
    sleep 0.1
done
