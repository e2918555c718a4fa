# To be sourced. enter_root ROOT [SHARED...] [-- ...]: makes ROOT the root directory of this shell
# and of what it starts, with the machine's devices, and with each directory of SHARED at its own
# path. In mount and process namespaces of its own. runc wants a root that it can leave: a chroot is
# none.
enter_root() {
    root=$1
    shift
    mount --bind "$root" "$root"
    for shared in "$@"; do
        test "$shared" != -- || break
        mkdir -p "$root$shared"
        mount --bind "$shared" "$root$shared"
    done
    cd "$root"
    mount -t proc proc proc
    mount --rbind /sys sys
    mount --rbind /dev dev
    mkdir -p .old
    pivot_root . .old
    cd /
    PATH=/usr/sbin:/usr/bin:/sbin:/bin
    export PATH
    umount -l .old
    mount -t tmpfs tmpfs /run
}
