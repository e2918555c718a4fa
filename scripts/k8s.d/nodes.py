"""Nodes with a real kubelet and containerd, and an arbiter and the device plugin beside each of them: those of 1.20. What newer ones have
otherwise is in newer.py."""

import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import time

import place
from control_plane import ADDRESS, API, NETWORK, RESOURCE, run
from programs import Programs
from trial import Failure, Skipped, alive, until

HERE = pathlib.Path(__file__).resolve().parent
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "hugetlb", "net_cls", "net_prio", "perf_event", "systemd")
GROUPS = pathlib.Path("/sys/fs/cgroup")
IMAGE = place.IMAGE
PROGRAMS = ("load", "tenant")


class Node(Programs):
    """One of them."""

    # The memory of its GPU.
    CAPACITY = "16GiB"
    # Version of what describes the network of pods.
    CNI = "0.4.0"
    # How an image is imported, beside its name.
    IMPORT = ()
    # What of ours serves a kubelet or a runtime, and where its records are.
    OURS, RECORDS = ("plugin", "nri"), ("plugin", "nri-state")
    # Kubelets before 1.28 know no CDI device of a plugin.
    PLUGIN_FLAGS = ("--no-cdi",)
    # Where a kubelet is said what it has no field of its configuration for.
    KUBELET_FLAGS = (
        "--container-runtime=remote", "--container-runtime-endpoint=unix:///run/containerd.sock", "--image-service-endpoint=unix:///run/containerd.sock",
    )

    def __init__(self, site, number):
        self.site, self.plane = site, site.plane
        self.name, self.address = f"n{number}", f"{NETWORK}{10 + number}"
        self.dir = site.dir / self.name
        self.root, self.link = self.dir / "root", f"to-{self.name}"
        self.group = f"sublet-{secrets.token_hex(4)}-{self.name}"
        self.child = None
        for name in ("run", "sim", "logs"):
            (self.dir / name).mkdir(parents=True, mode=0o700)
        env = {**site.plain, "SUBLET_RUNTIME_DIR": str(self.dir / "run"), "SUBLET_SIM_STATE": str(self.dir / "sim")}
        super().__init__(self.dir, env | {"SUBLET_SIM_CAPACITY": self.CAPACITY, "SUBLET_SIM_CONTEXT": "0B"})
        self.kubelet_dir = self.root / "var/lib/kubelet"

    def containerd_config(self):
        return f"""version = 2
root = '/var/lib/containerd'
state = '/run/containerd'
[grpc]
  address = '/run/containerd.sock'
[plugins.'io.containerd.grpc.v1.cri']
  # Without the right to lower a process's score runc fails otherwise.
  restrict_oom_score_adj = true
  sandbox_image = '{place.PAUSE}'
  enable_cdi = true
  cdi_spec_dirs = ['{self.dir}/cdi']
  [plugins.'io.containerd.grpc.v1.cri'.containerd]
    # Also where the folder is on a file system that cannot be stacked.
    snapshotter = 'native'
  [plugins.'io.containerd.grpc.v1.cri'.cni]
    bin_dir = '/usr/lib/cni'
    conf_dir = '{self.dir}/cni'
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = '{self.dir}/nri.sock'
  plugin_path = '{self.dir}/nri-plugins'
  plugin_config_path = '{self.dir}/nri-conf'
"""

    def kubelet_config(self):
        """What every release takes."""
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.group}",
            "enforceNodeAllocatable": [], "failSwapOn": False, "makeIPTablesUtilChains": False, "resolvConf": "", "address": self.address,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}}, "authorization": {"mode": "AlwaysAllow"},
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"}, "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s", **self.kubelet_release(),
        }

    def kubelet_release(self):
        """What this release has otherwise."""
        return {"featureGates": {"LocalStorageCapacityIsolation": False}}

    def write_config(self):
        (self.dir / "containerd.toml").write_text(self.containerd_config())
        for name in ("cdi", "cni"):
            (self.dir / name).mkdir()
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": {"type": "host-local", "ranges": [[{"subnet": f"10.1.{self.name[1:]}.0/24"}]], "dataDir": "/run/ipam"}}
        (self.dir / "cni/10-pods.conflist").write_text(json.dumps({"cniVersion": self.CNI, "name": "pods", "plugins": [bridge]}))
        (self.dir / "kubelet.json").write_text(json.dumps(self.kubelet_config()))
        shutil.copy2(self.plane.kubeconfig, self.dir / "kubeconfig")

    def make_groups(self):
        """A place for its pods in each hierarchy of control groups."""
        if (GROUPS / "cgroup.controllers").exists():
            raise Skipped("kubelet 1.20 is run with control groups of version 1, and this machine has version 2 alone")
        for controller in CONTROLLERS:
            if (GROUPS / controller).is_dir():
                (GROUPS / controller / self.group).mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):
            (GROUPS / "cpuset" / self.group / file).write_text((GROUPS / "cpuset" / file).read_text())

    def groups(self):
        """Its places, also where the runtime has made one by itself."""
        return list(GROUPS.glob(f"*/{self.group}"))

    def start(self):
        self.site.unpack(self.root)
        self.write_config()
        self.make_groups()
        words = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "sh", HERE / "node.sh"]
        words += [self.root, self.site.dir, self.dir, self.name, self.address, self.plane.kubelet_folder, *self.KUBELET_FLAGS]
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        out = open(self.dir / "node.log", "w")
        self.child = subprocess.Popen([str(word) for word in words], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        first = until("the node's namespaces are there", self.first)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", first)
        run("ip", "link", "set", self.link, "master", "br0")
        run("ip", "link", "set", self.link, "up")
        self.images()
        self.start_arbiter()
        self.start_first()

    def start_first(self):
        """What of ours is there from the beginning."""
        self.start_plugin()

    def status(self):
        """The node's, once its kubelet is ready."""
        if self.child.poll() is not None:
            raise Skipped(f"no namespaces for {self.name}: {(self.dir / 'node.log').read_text().strip()[-300:]}")
        found = [one for one in self.plane.client.get("/api/v1/nodes")["items"] if one["metadata"]["name"] == self.name]
        status = found[0]["status"] if found else {}
        ready = [one for one in status.get("conditions", []) if one["type"] == "Ready" and one["status"] == "True"]
        return status if ready else None

    def offers(self):
        """The kubelet is ready, and offers units of its GPU."""
        status = self.status()
        return bool(status) and int(status["allocatable"].get(RESOURCE, 0)) > 0

    def is_ready(self):
        """The kubelet is ready, and what of ours is there from the beginning has made its GPU known."""
        return self.offers()

    def units(self):
        """How many it offers."""
        return int(self.plane.client.get(f"/api/v1/nodes/{self.name}")["status"]["allocatable"][RESOURCE])

    def registrations(self):
        """How often its plugin has said that the kubelet knows it."""
        return self.said("plugin").count(f"registered {RESOURCE}")

    def first(self):
        """The first process of its own."""
        children = pathlib.Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split()
        if not children:
            return None
        own = os.readlink("/proc/self/ns/net")
        return int(children[0]) if os.readlink(f"/proc/{children[0]}/ns/net") != own else None

    def processes(self, name):
        """Its processes of this name."""
        space, found = os.readlink(f"/proc/{self.first()}/ns/pid"), []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "comm").read_text().strip() == name and os.readlink(entry / "ns/pid") == space:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def ctr(self, *words):
        return run("nsenter", f"--mount=/proc/{self.first()}/ns/mnt", f"--root=/proc/{self.first()}/root", "/usr/bin/ctr", "-a", "/run/containerd.sock", *words, env={"PATH": "/usr/bin:/bin"})

    def images(self):
        def answers():
            try:
                return self.ctr("version")
            except Failure:
                return None

        until("containerd answers", answers)
        busybox = self.root / "usr/bin/busybox"
        library = lambda name: next(path for path in self.root.glob(f"usr/lib*/**/{name}"))
        files = {"bin/busybox": busybox, "lib64/ld-linux-x86-64.so.2": library(place.LIBRARIES[0])}
        files |= {f"lib/x86_64-linux-gnu/{name}": library(name) for name in place.LIBRARIES[1:]}
        files |= {f"prog/{name}": self.site.bin / name for name in PROGRAMS}
        links = [(f"bin/{name}", "/bin/busybox") for name in ("sh", "sleep", "env", "true")]
        place.archive(self.dir / "pause.tar", place.PAUSE, place.layer({"bin/busybox": busybox}), ["/bin/busybox", "sleep", "86400"])
        place.archive(self.dir / "programs.tar", IMAGE, place.layer(files, links), ["/bin/busybox", "sleep", "86400"])
        for name in ("pause", "programs"):
            self.ctr("-n", "k8s.io", "images", "import", *self.IMPORT, "--snapshotter", "native", self.dir / f"{name}.tar")

    def start_one(self, name, *words, env=None):
        """Starts one that is sublet's."""
        return super().start_one(name, self.site.bin / "sublet", *words, env=env)

    def arbiter_flags(self):
        words = ["--cluster", self.plane.hook_url, "--cluster-token-file", self.plane.dir / "hook-token", "--cluster-node", self.name]
        return [*words, "--cluster-ca", self.plane.certificates / "ca.crt", "--cluster-user", "root", "--cluster-sim"]

    def start_arbiter(self):
        child = self.start_one("arbiter", "arbiter", *self.arbiter_flags())

        def answers():
            if child.poll() is not None:
                raise Failure(f"the arbiter of {self.name} has ended: {self.said('arbiter')[-500:]}")
            return f'"pid":{child.pid},' in self.sublet("ps", "--json", check=False).stdout.replace(" ", "")

        until(f"the arbiter of {self.name} answers", answers)

    def beside_kubelet(self, which, token_file, *words):
        """Words of a command that serves the kubelet, and asks the API server as that token's account."""
        own = ["kubernetes", which, "--sim", "--node", self.name, "--cdi-dir", self.dir / "cdi", "--api-server", f"https://{ADDRESS}:{API}"]
        return [*own, "--api-ca", self.plane.certificates / "ca.crt", "--api-token-file", token_file, *words]

    def start_plugin(self):
        words = ["--state", self.dir / "plugin", *self.PLUGIN_FLAGS]
        words += ["--plugins-dir", self.kubelet_dir / "device-plugins", "--pod-resources", self.kubelet_dir / "pod-resources/kubelet.sock"]
        self.start_one("plugin", *self.beside_kubelet("device-plugin", self.plane.token_file, *words))

    def sublet(self, *words, check=True):
        done = subprocess.run([str(self.site.bin / "sublet"), *map(str, words)], env=self.env, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise Failure(f"sublet {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done

    def jobs(self):
        """The jobs that the arbiter has, by name."""
        jobs = json.loads(self.sublet("ps", "--json").stdout)["jobs"]
        return {job["name"]: job for job in jobs if job["state"] != "gone"}

    def restart_kubelet(self, away_s=0):
        """Kills the kubelet, which starts again by itself, at once or after a time."""
        hold = self.dir / "hold"
        if away_s:
            hold.touch()
        before = self.processes("kubelet")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until("the kubelet has ended", lambda: not any(alive(pid) for pid in before))
        time.sleep(away_s)
        hold.unlink(missing_ok=True)
        until("another kubelet is there", lambda: self.processes("kubelet"))

    def cut(self):
        run("ip", "link", "set", self.link, "down")

    def mend(self):
        run("ip", "link", "set", self.link, "up")

    def stop(self):
        for name in self.OURS:
            self.end_one(name)
        if self.child:
            self.child.kill()
            self.child.wait()
        # Holders of what a failed run has left end with their records.
        for name in self.RECORDS:
            shutil.rmtree(self.dir / name, ignore_errors=True)
        self.end_one("arbiter")
        for group in self.groups():
            for folder, _, _ in os.walk(group, topdown=False):
                try:
                    until(f"{folder} is empty", lambda folder=folder: not pathlib.Path(folder, "cgroup.procs").read_text().strip(), 5)
                    os.rmdir(folder)
                except (OSError, Failure) as error:
                    print(f"at the end: {error}")
