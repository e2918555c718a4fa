"""The servers of Kubernetes 1.20.2 from Debian's source package, built once and kept, and a root of Debian with what they need."""

import os
import pathlib
import shutil
import subprocess
import tempfile

import debian_root
from trial import Skipped

VERSION = "1.20.2"
NAMES = ("kube-apiserver", "kube-scheduler", "kubelet", "kubectl")
# The suite that has the source, with the Go that builds it.
SOURCE_SUITE = "bookworm"
BUILD_PACKAGES = ["golang-1.19-go", "dpkg-dev", "ca-certificates", "apt"]
# containerd 1.7 is the last one that speaks to this kubelet (CRI v1alpha2), and the first one with
# NRI and CDI.
SUITE = "trixie"
PACKAGES = ["containerd", "runc", "containernetworking-plugins", "busybox-static", "etcd-server", "iproute2", "mount"]
CONTAINERD = "1.7."
# TIMEOUT: four minutes on an idle machine of two processors.
BUILD_PATIENCE = 3000
HERE = pathlib.Path(__file__).resolve().parent


def kept(cache):
    """The folder of the binaries, where they were built before."""
    folder = cache / f"kubernetes-{VERSION}"
    return folder if all((folder / name).is_file() for name in NAMES) else None


def binaries(cache):
    """The folder of the binaries; built where they are not there."""
    folder = kept(cache)
    if folder:
        return folder
    print(f"building Kubernetes {VERSION} from Debian's source package: minutes, once", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="sublet-kubernetes-build-"))
    unfinished = cache / f".kubernetes-{VERSION}.{os.getpid()}"
    try:
        tar = debian_root.root_tar(directory, "kubernetes-build", SOURCE_SUITE, BUILD_PACKAGES, patience=900)
        root = directory / "root"
        debian_root.unpack(tar, root, ["golang-1.19-go"])
        tar.unlink()
        shutil.copy2(HERE / "build.sh", root / "build.sh")
        shutil.copy2("/etc/resolv.conf", root / "etc/resolv.conf")
        (root / "out").mkdir()
        inside = 'mount -t proc proc "$0/proc" && exec chroot "$0" sh /build.sh /out'
        words = ["nice", "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "sh", "-c", inside, root]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        debian_root.command([str(word) for word in words], BUILD_PATIENCE, env=env)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(root / "out", unfinished)
        # Another run may have been faster.
        if not kept(cache):
            shutil.rmtree(cache / f"kubernetes-{VERSION}", ignore_errors=True)
            unfinished.rename(cache / f"kubernetes-{VERSION}")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
    return cache / f"kubernetes-{VERSION}"


def root_tar(cache):
    return debian_root.root_tar(cache, "kubernetes", SUITE, PACKAGES)


def unpack(tar, root):
    """A root of its own; the versions of what is in it."""
    versions = debian_root.unpack(tar, root, ["containerd", "runc", "etcd-server"])
    if not versions["containerd"].startswith(CONTAINERD):
        raise Skipped(f"containerd {versions['containerd']} is not {CONTAINERD} ({tar})")
    for name, text in (("hosts", "127.0.0.1 localhost\n"), ("resolv.conf", "")):
        (root / "etc" / name).write_text(text)
    return versions


def version_of(binary):
    """What a server says that it is: `v1.36.4` of `Kubernetes v1.36.4`."""
    try:
        done = subprocess.run([str(binary), "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"{binary}: {error}") from error
    words = done.stdout.split()
    if done.returncode or len(words) != 2 or words[0] != "Kubernetes":
        raise Skipped(f"{binary} is no server of Kubernetes: {(done.stdout + done.stderr).strip()[:200]}")
    return words[1]
