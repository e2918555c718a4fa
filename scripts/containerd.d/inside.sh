#!/bin/sh
# inside.sh ROOT SHARED CONFIG LOG: containerd in a root of its own, again whenever it ends. Runs in
# mount, network and process namespaces that end with it. SHARED is seen at its own path.
set -eu
. "${0%/*}/../bench/root.sh"
root=$1 shared=$2 config=$3 log=$4
enter_root "$root" "$shared"
while :; do
    containerd --config "$config" >>"$log" 2>&1 || true
    sleep 0.1
done
