#!/bin/sh
# inside.sh ROOT SHARED CONFIG LOG: containerd in a root of its own, again whenever it ends. Runs in
# mount, network and process namespaces that end with it. SHARED is seen at its own path.
set -eu
root=$1 shared=$2 config=$3 log=$4
mount --bind "$root" "$root"
mkdir -p "$root$shared"
mount --bind "$shared" "$root$shared"
cd "$root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mkdir -p .old
# runc wants a root that it can leave: a chroot is none.
pivot_root . .old
cd /
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umount -l .old
mount -t tmpfs tmpfs /run
while :; do
    containerd --config "$config" >>"$log" 2>&1 || true
    sleep 0.1
done
