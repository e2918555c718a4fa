"""The servers of Kubernetes: those of 1.20.2 from Debian's source package, built once and kept, or a folder of newer ones that was given.
And a root of Debian with what either of them needs."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import tempfile

import debian_root
import place
from trial import Skipped

VERSION = "1.20.2"
NAMES = ("kube-apiserver", "kube-scheduler", "kubelet", "kubectl")
# The suite that has the source, with the Go that builds it.
SOURCE_SUITE = "bookworm"
BUILD_PACKAGES = ["golang-1.19-go", "dpkg-dev", "ca-certificates", "apt"]
# What every root has.
PACKAGES = ["containerd", "runc", "containernetworking-plugins", "busybox-static", "etcd-server", "iproute2", "mount"]
# TIMEOUT: four minutes on an idle machine of two processors.
BUILD_PATIENCE = 3000
HERE = pathlib.Path(__file__).resolve().parent
# Of newer releases: the first one that has resource.k8s.io/v1.
GIVEN = ("kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet")
OLDEST = (1, 34)
WANTED = f"give the folder with {', '.join(GIVEN)} of one release from {OLDEST[0]}.{OLDEST[1]} on"
# TIMEOUT: a server says its version within a second.
ANSWER = 20
# Bytes of an answer.
LONGEST = 1 << 16


class Refused(Exception):
    """What was given is not what it has to be."""


@dataclasses.dataclass(frozen=True)
class Root:
    """A root of Debian: its name, its suite, its packages, and the releases of them that were tried."""

    name: str
    suite: str
    packages: tuple
    containerd: tuple
    etcd: tuple


# containerd 1.7 is the last one that speaks to kubelet 1.20 (CRI v1alpha2), and the first one with
# NRI and CDI.
ROOT_OF_BUILT = Root("kubernetes", "trixie", tuple(PACKAGES), ("1.7",), (3, 4))
# Kubernetes from 1.34 on wants etcd 3.5, and 1.36 was tried with containerd 2.1.
ROOT_OF_GIVEN = Root("kubernetes-given", place.SUITE, tuple(PACKAGES), place.RELEASES, (3, 5))


@dataclasses.dataclass(frozen=True)
class Given:
    """A folder of servers."""

    folder: pathlib.Path
    version: str
    # Whether it has a kubectl too.
    kubectl: bool

    @property
    def minor(self):
        return number(self.version)[1]

    @property
    def root(self):
        """The root to run them with."""
        if self.kubectl:
            return ROOT_OF_GIVEN
        return dataclasses.replace(ROOT_OF_GIVEN, name="kubernetes-given-kubectl", packages=(*ROOT_OF_GIVEN.packages, "kubectl"))


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


def root_tar(cache, root):
    return debian_root.root_tar(cache, root.name, root.suite, list(root.packages))


def unpack(tar, folder, root):
    """A tree of its own; the versions of what is in it."""
    versions = debian_root.unpack(tar, folder, ["containerd", "runc", "etcd-server"])
    if not versions["containerd"].startswith(tuple(f"{release}." for release in root.containerd)):
        raise Skipped(f"containerd {versions['containerd']} is none of {', '.join(root.containerd)} ({tar})")
    if number(versions["etcd-server"]) < root.etcd:
        raise Skipped(f"etcd {versions['etcd-server']} is older than {'.'.join(map(str, root.etcd))} ({tar})")
    for name, text in (("hosts", "127.0.0.1 localhost\n"), ("resolv.conf", "")):
        (folder / "etc" / name).write_text(text)
    return versions


def number(version):
    """The first two numbers of a version: (1, 36) of `v1.36.4`."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def asked(binary, *words):
    """What a program answers, in one line. It may be anything: its answer is bounded, and nothing of it stays when its time is over."""
    bound = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST, LONGEST))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen([str(binary), *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, preexec_fn=bound)
        except OSError as error:
            raise Refused(f"{binary} does not run: {error.strerror}") from error
        try:
            code = child.wait(timeout=ANSWER)
        except subprocess.TimeoutExpired as error:
            raise Refused(f"{binary} does not answer to {words[0]} within {ANSWER} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, " ".join((texts[0] or texts[1]).split())


def version_of(binary):
    """What a server says that it is: `v1.36.4` of `Kubernetes v1.36.4`."""
    code, said = asked(binary, "--version")
    found = re.fullmatch(r"Kubernetes (v\d+\.\d+\.\S+)", said)
    if code or not found:
        raise Refused(f"{binary} is no server of Kubernetes: asked for --version it says `{said[:100]}` (exit status {code})")
    return found[1]


def version_of_kubectl(binary):
    code, said = asked(binary, "version", "--client", "--output=json")
    try:
        version = json.loads(said)["clientVersion"]["gitVersion"]
    except (ValueError, KeyError, TypeError):
        version = None
    if code or not isinstance(version, str):
        raise Refused(f"{binary} is no kubectl: asked for its version it says `{said[:100]}` (exit status {code})")
    return version


def given(folder):
    """The servers of a folder, which are all of one release."""
    folder = pathlib.Path(folder).resolve()
    if not folder.is_dir():
        raise Refused(f"there is no folder {folder}: {WANTED}")
    missing = [name for name in GIVEN if not (folder / name).is_file()]
    if missing:
        raise Refused(f"{folder} has no {', '.join(missing)}: {WANTED}")
    kubectl = (folder / "kubectl").is_file()
    versions = {name: version_of(folder / name) for name in GIVEN}
    if kubectl:
        versions["kubectl"] = version_of_kubectl(folder / "kubectl")
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise Refused(f"{folder} has several versions ({found}): {WANTED}")
    version = versions["kubelet"]
    if number(version) < OLDEST:
        raise Refused(f"{folder} has Kubernetes {version}: {WANTED}, or leave --servers out, which runs {VERSION}")
    return Given(folder, version, kubectl)
