"""containerd in a root of Debian's newer suite, with namespaces of its own, and images made by hand. No registry, no network."""

import hashlib
import io
import json
import os
import pathlib
import secrets
import signal
import subprocess
import tarfile
import time

import debian_root
from trial import Failure, Skipped, alive, until

SUITE = "forky"
PACKAGES = ["containerd", "runc", "mount", "busybox-static"]
# What was tried; others may speak another CRI or NRI.
RELEASES = ("2.1",)
# The loader and libraries of glibc that programs in containers need.
LIBRARIES = ["ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1"]
PAUSE, IMAGE = "docker.io/local/pause:1", "docker.io/local/programs:1"
# A state of CRI's.
RUNNING = 1
HERE = pathlib.Path(__file__).resolve().parent


def layer(files, links=()):
    """A layer of an image: what lies where."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        folders = {"bin", "dev", "etc", "proc", "sys", "tmp", "run", "opt"}
        for path in [*files, *(path for path, _ in links)]:
            parts = path.split("/")
            folders |= {"/".join(parts[:at]) for at in range(1, len(parts))}
        for path in sorted(folders):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, source in files.items():
            data = source.read_bytes()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        for path, to in links:
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, to
            tar.addfile(entry)
    return out.getvalue()


def archive(path, tag, data, words):
    """An image of one layer, in the form of `docker save`."""
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"], "Cmd": words}, "rootfs": {"type": "layers", "diff_ids": [digest]}}
    config = json.dumps(config).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(path, "w") as tar:
        for entry_name, content in ((name, config), ("layer.tar", data), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(entry_name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def config(directory, socket, content, cni=None):
    """The configuration of containerd 2, with what it reads and makes below a directory; `cni` says where networks of pods are described."""
    networks = f"""  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['/usr/lib/cni']
    conf_dir = '{cni}'
""" if cni else ""
    return f"""version = 3
root = '{content}'
state = '/run/containerd'
[grpc]
  address = '{socket}'
[plugins.'io.containerd.cri.v1.runtime']
  # Without the right to lower a process's score runc fails otherwise.
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ['{directory}/cdi']
{networks}[plugins.'io.containerd.cri.v1.images']
  # Also where the folder is on a file system that cannot be stacked.
  snapshotter = 'native'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE}'
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = '{directory}/nri.sock'
  plugin_path = '{directory}/nri-plugins'
  plugin_config_path = '{directory}/nri-conf'
"""


class Containerd:
    """containerd, and a client that asks it as a kubelet does."""

    def __init__(self, directory, cri, programs):
        self.dir = pathlib.Path(directory)
        self.client, self.programs = cri, programs
        self.root, self.socket = self.dir / "root", self.dir / "containerd.sock"
        self.nri, self.cdi, self.log = self.dir / "nri.sock", self.dir / "cdi", self.dir / "containerd.log"
        self.group = f"sublet-{secrets.token_hex(4)}"
        self.child, self.pods = None, []

    def unpack(self, tar):
        versions = debian_root.unpack(tar, self.root, ["containerd", "runc"])
        # What every machine has, and pods are given.
        for name, text in (("hosts", "127.0.0.1 localhost\n"), ("resolv.conf", "")):
            (self.root / "etc" / name).write_text(text)
        if not versions["containerd"].startswith(tuple(f"{release}." for release in RELEASES)):
            raise Skipped(f"containerd {versions['containerd']} is none of {', '.join(RELEASES)} ({tar})")
        return versions

    def start(self):
        for path in (self.cdi, self.dir / "logs"):
            path.mkdir(exist_ok=True)
        configured = self.dir / "containerd.toml"
        configured.write_text(config(self.dir, self.socket, self.dir / "content"))
        words = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "sh", HERE / "inside.sh"]
        words += [self.root, self.dir, configured, self.log]
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        out = open(self.dir / "inside.log", "w")
        self.child = subprocess.Popen([str(word) for word in words], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.answers()
        busybox = self.root / "usr/bin/busybox"
        library = lambda name: next(path for path in self.root.glob(f"usr/lib*/**/{name}"))
        files = {"bin/busybox": busybox, "lib64/ld-linux-x86-64.so.2": library(LIBRARIES[0])}
        files |= {f"lib/x86_64-linux-gnu/{name}": library(name) for name in LIBRARIES[1:]}
        files |= {f"prog/{path.name}": path for path in self.programs}
        links = [(f"bin/{name}", "/bin/busybox") for name in ("sh", "sleep", "env", "true")]
        archive(self.dir / "pause.tar", PAUSE, layer({"bin/busybox": busybox}), ["/bin/busybox", "sleep", "86400"])
        archive(self.dir / "programs.tar", IMAGE, layer(files, links), ["/bin/busybox", "sleep", "86400"])
        for name in ("pause", "programs"):
            words = [self.root / "usr/bin/ctr", "-a", self.socket, "-n", "k8s.io", "images", "import", "--local", "--snapshotter", "native", self.dir / f"{name}.tar"]
            done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
            if done.returncode:
                raise Failure(f"image {name}: {done.stderr.strip()}")

    def answers(self):
        def asked():
            if self.child.poll() is not None:
                raise Skipped(f"no namespaces for containerd: {(self.dir / 'inside.log').read_text().strip()[-300:]}")
            try:
                return self.call("Version")
            except Failure:
                return None

        try:
            return until("containerd answers", asked)
        except Failure as error:
            raise Failure(f"{error}: {(self.log.read_text() if self.log.exists() else '')[-1000:]}") from error

    def call(self, method, **question):
        done = subprocess.run([self.client, self.socket, method, json.dumps(question)], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise Failure(done.stderr.strip())
        return json.loads(done.stdout)

    def processes(self):
        """Those of its own: the first one of its namespace, and containerd."""
        children = lambda pid: [int(n) for n in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        first = children(self.child.pid)[0]
        return first, [pid for pid in children(first) if pathlib.Path(f"/proc/{pid}/comm").read_text() == "containerd\n"]

    def restart(self):
        """Kills containerd; another one starts by itself."""
        _, (pid,) = self.processes()
        os.kill(pid, signal.SIGKILL)
        until("containerd has ended", lambda: not alive(pid))
        until("another one is there", lambda: self.processes()[1])
        self.answers()

    def pod(self, name, annotations=()):
        pod = {"name": name, "uid": f"uid-{name}", "cgroup": f"/{self.group}", "logs": str(self.dir / "logs"), "annotations": dict(annotations)}
        pod_id = self.call("RunPodSandbox", **pod)["id"]
        self.pods.append(pod_id)
        return {"pod_id": pod_id, "pod": pod}

    def container(self, pod, name, words, resources=(), cdi=()):
        """Makes and starts one."""
        config = {"name": name, "image": IMAGE, "command": list(map(str, words)), "resources": dict(resources), "cdi": list(cdi)}
        made = self.call("CreateContainer", **pod, **config)["id"]
        self.call("StartContainer", id=made)
        return made

    def execute(self, container, *words):
        return self.call("ExecSync", id=container, command=list(map(str, words)))

    def stop_container(self, container):
        try:
            self.call("StopContainer", id=container)
        except Failure:
            # One that ends by itself meanwhile, which containerd may not have noted yet.
            pass
        until("the container has ended", lambda: self.call("ContainerStatus", id=container)["state"] != RUNNING)

    def remove(self, *containers):
        for container in containers:
            self.stop_container(container)
            self.call("RemoveContainer", id=container)

    def remove_pod(self, pod):
        self.call("StopPodSandbox", id=pod["pod_id"])
        self.call("RemovePodSandbox", id=pod["pod_id"])
        self.pods.remove(pod["pod_id"])

    def stop(self):
        """Ends all of it: what is in its namespace ends with the first process there."""
        if self.child:
            if self.child.poll() is None:
                for pod in self.pods:
                    try:
                        self.call("StopPodSandbox", id=pod)
                    except (Failure, subprocess.TimeoutExpired):
                        pass
            self.child.kill()
            self.child.wait()
        for controller in pathlib.Path("/sys/fs/cgroup").glob(f"**/{self.group}"):
            for folder, _, _ in os.walk(controller, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    time.sleep(0.1)
                    try:
                        os.rmdir(folder)
                    except OSError as error:
                        print(f"at the end: {error}")
