"""A real Slurm on one host: slurmctld and two slurmd with two simulated GPUs each, and everything of theirs in one directory.

No munge (auth/none), no systemd, no accounting. Daemons are ended by their process ids.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

from trial import Failure, Skipped, alive, until

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "liblua5.1-0"]
PROGRAMS = ["slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel", "sinfo"]
# Which of our plugins belongs to which Slurm.
PLUGINS = {"22.05": "22_05", "24.11": "24_11", "26.05": "26_05"}
# Shards of a simulated GPU of 16 GiB: the rest is for contexts.
GPU_GIB = 14
GPUS = 2


def install():
    """Slurm's programs; those of the distribution are installed where they are missing."""
    if all(shutil.which(name) for name in PROGRAMS):
        return
    if os.geteuid() != 0:
        raise Skipped("Slurm is not installed, and only root can install it")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    words = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "install", "--no-install-recommends", *PACKAGES]
    try:
        done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(str(error)) from error
    if done.returncode:
        raise Skipped((done.stdout.strip().splitlines() or ["apt-get says nothing"])[-1])


def version():
    """Major and minor of the Slurm that is there."""
    said = subprocess.run(["slurmctld", "-V"], stdout=subprocess.PIPE, text=True, timeout=30).stdout
    found = re.search(r"(\d+\.\d+)", said)
    if not found or found[1] not in PLUGINS:
        raise Skipped(f"`{said.strip()}` is none of {', '.join(PLUGINS)}")
    return found[1]


def free_ports(count):
    """Ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """slurmctld with nodes n1 and n2."""

    NODES = ("n1", "n2")
    # The one on which `enforce=` is tried.
    ENFORCED = "n2"

    def __init__(self, directory, plugstack, lua=None, network=None):
        self.dir = pathlib.Path(directory)
        # Nodes that have a network namespace of their own; the others are at the controller's.
        self.network = network
        self.address = network.HERE if network else "127.0.0.1"
        self.release = version()
        self.ports = free_ports(3)
        self.host = socket.gethostname().split(".")[0]
        self.conf = self.dir / "slurm.conf"
        (self.dir / "ctld").mkdir()
        # Jobs are another user's.
        self.out = self.dir / "out"
        self.out.mkdir()
        self.out.chmod(0o1777)
        (self.dir / "plugstack.conf").write_text(plugstack)
        if lua:
            (self.dir / "job_submit.lua").write_text(lua)
        for at in range(GPUS * len(self.NODES)):
            os.mknod(self.dir / f"gpu{at}", 0o666 | 0o020000, os.makedev(1, 3))
        self.conf.write_text(self.text(lua is not None))
        (self.dir / "gres.conf").write_text(self.gres())
        (self.dir / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if self.release != "22.05" else "")
        # Nothing of this process's surroundings reaches a job but what a test gives it.
        self.env = {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf), "LANG": "C.UTF-8"}

    def text(self, lua):
        ctld, *nodes = self.ports
        lines = [
            "ClusterName=sublet",
            f"SlurmctldHost={self.host}({self.address})",
            f"SlurmctldPort={ctld}",
            "AuthType=auth/none" if self.release == "22.05" else "AuthType=auth/slurm",
            "CredType=cred/none" if self.release == "22.05" else "CredType=cred/slurm",
            "SlurmUser=root",
            f"StateSaveLocation={self.dir}/ctld",
            f"SlurmdSpoolDir={self.dir}/%n",
            f"SlurmctldPidFile={self.dir}/ctld.pid",
            f"SlurmdPidFile={self.dir}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.dir}/ctld.log",
            f"SlurmdLogFile={self.dir}/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "MailProg=/bin/true",
            "MessageTimeout=5",
            "ReturnToService=2",
            "SlurmdTimeout=5",
            "KillWait=2",
            "SlurmdParameters=config_overrides",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0" + (",extra_constraints" if self.release != "22.05" else ""),
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "DefMemPerCPU=100",
            "GresTypes=gpu,shard",
            f"PlugStackConfig={self.dir}/plugstack.conf",
        ]
        if lua:
            lines.append("JobSubmitPlugins=lua")
        gres = ",".join(f"gpu:g{at}:1" for at in range(GPUS))
        for name, port in zip(self.NODES, nodes):
            lines.append(
                f"NodeName={name} NodeHostname={self.host} NodeAddr={self.address_of(name)} Port={port} CPUs=8 Sockets=1 CoresPerSocket=8 "
                f"ThreadsPerCore=1 RealMemory=4000 Gres={gres},shard:{GPU_GIB * GPUS} Feature={name} State=UNKNOWN"
            )
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES")
        return "\n".join(lines) + "\n"

    def address_of(self, node):
        return self.network.there if self.network and node == self.network.NODE else self.address

    def inside(self, node):
        """The words before a command that runs in the node's network."""
        return self.network.words if self.network and node == self.network.NODE else []

    def gres(self):
        lines = []
        for number, name in enumerate(self.NODES):
            lines += [f"NodeName={name} Name=gpu Type=g{at} File={self.dir}/gpu{number * GPUS + at}" for at in range(GPUS)]
            lines.append(f"NodeName={name} Name=shard Count={GPU_GIB * GPUS}")
        return "\n".join(lines) + "\n"

    def call(self, *words, check=True, patience=30, **more):
        """Standard output of one of Slurm's programs."""
        env = {**self.env, **more.pop("env", {})}
        done = subprocess.run(
            [str(word) for word in words], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=patience, **more
        )
        if check and done.returncode:
            raise Failure(f"{' '.join(map(str, words))}: {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout if check else done

    def daemon(self, *words, env=()):
        out = open(self.dir / f"{words[0]}.out", "a")
        done = subprocess.run([*map(str, words)], env={**self.env, **dict(env)}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=60)
        if done.returncode:
            raise Failure(f"{' '.join(map(str, words))}: {(self.dir / (words[0] + '.out')).read_text()[-2000:]}")

    def start_node(self, name):
        words = ["slurmd", "-N", name, "-f", self.conf]
        if name == self.ENFORCED and self.own_etc():
            # Where the host has no /etc/ld.so.preload, this node has one, and the host has none.
            words = ["unshare", "-m", "--propagation", "private", "sh", "-c", 'mount --bind "$0" /etc && exec "$@"', self.dir / "etc", *words]
        self.daemon(*self.inside(name), *words)

    def own_etc(self):
        """Whether the enforced node can have an /etc of its own, which is then there."""
        at = self.dir / "etc"
        if not at.exists():
            may = subprocess.run(["unshare", "-m", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=30)
            if may.returncode:
                return False
            subprocess.run(["cp", "-a", "/etc", at], check=True, timeout=60)
            (at / "ld.so.preload").touch()
        return True

    def start(self):
        if self.release != "22.05":
            key = self.dir / "slurm.key"
            key.write_bytes(os.urandom(64))
            key.chmod(0o600)
        self.daemon("slurmctld", "-c", "-f", self.conf)
        for name in self.NODES:
            self.start_node(name)
        self.idle()

    def states(self):
        done = self.call("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)

    def idle(self):
        until("both nodes are idle", lambda: set(self.states().values()) == {"idle"} and len(self.states()) == 2)

    def pid_of(self, name):
        file = self.dir / ("ctld.pid" if name == "slurmctld" else f"slurmd-{name}.pid")
        return int(file.read_text()) if file.exists() and file.read_text().strip() else None

    def kill(self, name, number=signal.SIGTERM):
        pid = self.pid_of(name)
        if pid is None:
            return
        try:
            os.kill(pid, number)
            until(f"{name} has ended", lambda: not alive(pid), 20)
        except ProcessLookupError:
            pass
        except Failure:
            os.kill(pid, signal.SIGKILL)

    def stop(self):
        """Ends jobs, then daemons, then what a daemon that was killed has left."""
        try:
            for number in self.call("squeue", "-h", "-o", "%i", check=False).stdout.split():
                self.call("scancel", number, check=False)
            until("no job is left", lambda: not self.call("squeue", "-h", check=False).stdout.split(), 15)
        except (Failure, subprocess.TimeoutExpired) as error:
            print(f"at the end: {error}")
        for name in (*self.NODES, "slurmctld"):
            self.kill(name)
        for pid in self.stepds():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def stepds(self):
        """Processes of slurmstepd that belong to this cluster, by their environment."""
        own = f"SLURM_CONF={self.conf}".encode()
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if (entry / "comm").read_text() == "slurmstepd\n" and own in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (OSError, ValueError):
                pass
        return found

    def queue(self):
        """All jobs by number, as JSON has them: a job's name may look like any line of text."""
        return {job["job_id"]: job for job in json.loads(self.call("squeue", "--json"))["jobs"]}

    def job(self, number):
        """What `scontrol show job` says, by field; the first of a name counts."""
        done = self.call("scontrol", "-o", "-d", "show", "job", number, check=False)
        return dict(reversed(re.findall(r"(\S+?)=(\S*)", done.stdout)))

    def state(self, number):
        job = self.queue().get(number)
        if job is None:
            # The queue of newer Slurms has no job that is over.
            return self.job(number).get("JobState", "gone")
        # A list where Slurm is newer.
        return "".join(job["job_state"])

    def submit(self, script, *options, env=(), user=None):
        """The number of a batch job; of this user's, if given: newer Slurms let root submit for no other."""
        file = self.dir / f"script-{time.monotonic_ns()}"
        file.write_text(script)
        out = self.out / "job-%j.out"
        become = {"user": user, "group": "nogroup", "extra_groups": []} if user else {}
        said = self.call("sbatch", "--parsable", "-o", out, *options, file, env=dict(env), cwd="/", **become)
        return int(said.strip().split(";")[0])

    def output(self, number):
        file = self.out / f"job-{number}.out"
        return file.read_text(errors="replace") if file.exists() else ""


def stepd_above(pid):
    """The slurmstepd that a task descends from."""
    while pid > 1:
        try:
            if pathlib.Path(f"/proc/{pid}/comm").read_text() == "slurmstepd\n":
                return pid
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        pid = int(stat.rsplit(")", 1)[1].split()[1])
    return None
