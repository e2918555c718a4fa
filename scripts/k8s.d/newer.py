"""What Kubernetes has otherwise from 1.34 on: its servers' flags, a controller manager, containerd 2, and the DRA driver on a node in place
of extender and hook. The flags and settings are those that 1.36 was tried with by hand; 1.34 and 1.35 have to be asked for what 1.36 has
switched on (pkg/features/kube_features.go of Kubernetes says since when)."""

import http.client
import shlex
import shutil
import ssl

import control_plane
import nodes
import place
from nodes import GROUPS
from trial import Failure, Skipped, until

CONTROLLERS = 10257
# On by themselves from 1.36 on.
GATES, SWITCHED_ON = ("DRAConsumableCapacity", "DRAExtendedResource"), 36
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
DRIVER = "sublet.dev"
# Controllers of control groups of version 2 that a kubelet looks for, where the machine has them.
UNIFIED = ("cpu", "cpuset", "memory", "pids", "hugetlb")


def gates(minor):
    """What this release has to be asked for."""
    return {} if minor >= SWITCHED_ON else dict.fromkeys(GATES, True)


def make_unified(groups, name):
    """A place for pods where control groups have version 2; which controllers had to be switched on for that."""
    has = (groups / "cgroup.controllers").read_text().split()
    on = (groups / "cgroup.subtree_control").read_text().split()
    missing = [one for one in UNIFIED if one in has and one not in on]
    if missing:
        try:
            (groups / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in missing))
        except OSError as error:
            raise Skipped(f"a kubelet needs the controllers {', '.join(missing)}, which cannot be switched on in {groups}: {error.strerror}") from error
    (groups / name).mkdir()
    return missing


class ControlPlane(control_plane.ControlPlane):
    """Servers that were given; nothing of ours is among them."""

    # What the driver may do is in its manifest, and to be tried with it.
    AUTHORIZATION = "RBAC"
    FIRST_TO_END = ("controllers", "scheduler", "apiserver", "etcd")

    def __init__(self, given, directory, root, sublet, env):
        super().__init__(directory, given.folder, root, sublet, env)
        self.given = given
        self.kubelet_folder = self.dir / "servers"
        if not given.kubectl:
            self.kubectl = sublet.parent / "kubectl"

    def prepare(self):
        super().prepare()
        # In a node's root at a path of its own: the folder may be one that the root has too.
        self.kubelet_folder.mkdir()
        shutil.copy2(self.binaries / "kubelet", self.kubelet_folder)
        if not self.given.kubectl:
            # Debian's, with the C library of its own root.
            loader = [self.root / "lib64/ld-linux-x86-64.so.2", "--library-path", self.root / "usr/lib/x86_64-linux-gnu", self.root / "usr/bin/kubectl"]
            self.kubectl.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, loader))} "$@"\n')
            self.kubectl.chmod(0o755)

    def gates(self):
        asked = gates(self.given.minor)
        return [f"--feature-gates={','.join(f'{name}=true' for name in asked)}"] if asked else []

    def scheduler_config(self):
        return {
            "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration", "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig)},
        }

    def scheduler_flags(self):
        return ["--bind-address=127.0.0.1", f"--secure-port={control_plane.SCHEDULER}", *self.gates()]

    def start_scheduler(self):
        super().start_scheduler()
        self.serves("scheduler", control_plane.SCHEDULER)

    def start_controllers(self):
        """Those that make claims of templates, and free claims whose pods have gone. None looks after nodes: each node's kubelet may be away."""
        words = [self.binaries / "kube-controller-manager", f"--kubeconfig={self.kubeconfig}", f"--authentication-kubeconfig={self.kubeconfig}"]
        words += [f"--authorization-kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={CONTROLLERS}"]
        words += ["--controllers=resourceclaim-controller,garbage-collector-controller,namespace-controller"]
        self.start_one("controllers", *words, *self.gates())
        self.serves("controllers", CONTROLLERS)

    def serves(self, name, port):
        """Waits until a server of this network answers: one that ends says why at once."""
        # It signs its certificate by itself.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

        def answers():
            child = self.started[name]
            if child.poll() is not None:
                raise Failure(f"{child.args[0]} has ended: {self.said(name)[-1500:]}")
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
            try:
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False
            finally:
                connection.close()

        until(f"the {name} answers", answers, 120)

    def start(self):
        self.prepare()
        self.start_etcd()
        self.start_api_server()
        self.start_scheduler()
        self.start_controllers()


class Node(nodes.Node):
    """A node whose GPU is given away by claims."""

    CAPACITY = "80GiB"
    CNI = "1.0.0"
    IMPORT = ("--local",)
    OURS, RECORDS = ("dra", *nodes.Node.OURS), ("dra", *nodes.Node.RECORDS)
    PLUGIN_FLAGS = ()
    KUBELET_FLAGS = ()

    def __init__(self, site, number):
        super().__init__(site, number)
        self.switched_on = []

    def containerd_config(self):
        return place.config(self.dir, "/run/containerd.sock", "/var/lib/containerd", cni=self.dir / "cni")

    def kubelet_release(self):
        return {
            "containerRuntimeEndpoint": "unix:///run/containerd.sock", "failCgroupV1": False, "localStorageCapacityIsolation": False,
            "healthzBindAddress": "127.0.0.1", "registerNode": True,
            # It may not change settings of the kernel here.
            "featureGates": {"KubeletInUserNamespace": True, **gates(self.plane.given.minor)},
        }

    def make_groups(self):
        if (GROUPS / "cgroup.controllers").exists():
            self.switched_on = make_unified(GROUPS, self.group)
        else:
            super().make_groups()

    def groups(self):
        unified = GROUPS / self.group
        return [*super().groups(), *([unified] if unified.is_dir() else [])]

    def arbiter_flags(self):
        return []

    def start_first(self):
        self.start_driver()

    def start_driver(self, token_file=None, env=()):
        words = ["--kubelet-dir", self.kubelet_dir, "--state", self.dir / "dra"]
        words = self.beside_kubelet("dra", token_file or self.plane.token_file, *words)
        return self.start_one("dra", *words, env={**self.env, **dict(env)})

    def registrations(self):
        """How often the kubelet has registered the driver."""
        return self.said("dra").count(f"the kubelet has registered {DRIVER}")

    def slices(self):
        """What the driver has published of this node."""
        found = self.plane.client.get(SLICES)["items"]
        return [one for one in found if one["spec"].get("driver") == DRIVER and one["spec"].get("nodeName") == self.name]

    def is_ready(self):
        return bool(self.status()) and any(one["spec"].get("devices") for one in self.slices()) and self.registrations() > 0

    def left(self):
        """What there is of shares: files of CDI and records."""
        devices = [path for path in (self.dir / "cdi").glob("*.json")]
        records = [path for name in self.RECORDS if (self.dir / name).is_dir() for path in (self.dir / name).iterdir() if path.name != "lock"]
        return [f"{path.parent.name}/{path.name}" for path in [*devices, *records]]

    def stop(self):
        super().stop()
        if self.switched_on:
            try:
                (GROUPS / "cgroup.subtree_control").write_text(" ".join(f"-{one}" for one in self.switched_on))
            except OSError as error:
                print(f"at the end: the controllers {', '.join(self.switched_on)} stay on: {error.strerror}")
