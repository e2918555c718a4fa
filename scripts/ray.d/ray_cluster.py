"""A real Ray on one host: a head and a second node, each with simulated GPUs and an arbiter of its own, and everything of theirs in one
directory. Daemons are ended by their process ids.
"""

import ctypes
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time

from trial import Failure, Skipped, alive, until

HERE = pathlib.Path(__file__).resolve().parent
PLUGINS = '[{"class": "sublet.ray.Plugin"}]'
LABEL = "sublet.dev/node"
# Simulated GPUs of each node.
NODES = {"n1": 1, "n2": 2}
# What the host is called in the network of its own.
ADDRESS = "10.0.0.1"
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
# The least that Ray takes.
STORE_BYTES = 80_000_000


def started(pid):
    """When a process was started, in ticks; None where it has ended."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return None


def below(roots):
    """Processes that these have started, and those of theirs: number and start."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                pass
    found, waiting = {}, list(roots)
    while waiting:
        parent = waiting.pop()
        for pid, of in parents.items():
            if of == parent and pid not in found:
                found[pid] = started(pid)
                waiting.append(pid)
    return found


def install(folder):
    """A virtual environment with Ray; made once. Returns its programs' folder."""
    venv = folder / "venv"
    wanted = (HERE / "requirements.txt").read_text()
    mark = venv / "complete"
    if not mark.exists() or mark.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
            pip = [venv / "bin/pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", "-r", HERE / "requirements.txt"]
            subprocess.run(pip, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
        except (subprocess.SubprocessError, OSError) as error:
            last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise Skipped(last[-1] if last else str(error)) from error
        mark.write_text(wanted)
    return venv / "bin"


def own_network():
    """Gives this process and all that it starts a network with nobody else in it: Ray obeys all who reach its ports."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET if user == 0 else CLONE_NEWNET | CLONE_NEWUSER):
        raise Skipped(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    try:
        if user != 0:
            # Root there, and this user to the rest of the host: the commands below need that.
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                pathlib.Path(f"/proc/self/{name}").write_text(text)
        for words in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{ADDRESS}/32", "dev", "lo"],
            # Ray takes the address by which others would be reached.
            ["route", "add", "default", "dev", "lo", "src", ADDRESS],
        ):
            subprocess.run(["ip", *words], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (subprocess.SubprocessError, OSError) as error:
        raise Skipped(f"no network of its own: {getattr(error, 'stderr', None) or error}") from error


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Cluster:
    """Ray's processes. `env_of` has each node's variables."""

    def __init__(self, directory, binaries, env_of):
        self.dir = pathlib.Path(directory)
        self.bin = binaries
        self.env_of = env_of
        self.port = free_port()
        self.nodes, self.logs = {}, {}
        self.address = ""

    def start_node(self, name):
        own = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.dir}/ray"] if name == "n1" else [f"--address={self.address}"]
        words = [self.bin / "ray", "start", "--block", *own, "--num-cpus=4", f"--num-gpus={NODES[name]}", f"--labels={LABEL}={name}"]
        words += ["--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
        log = open(self.dir / f"ray-{name}.log", "a")
        child = subprocess.Popen(list(map(str, words)), env=self.env_of(name), cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.nodes[name] = child
        return child

    def said(self, name):
        return (self.dir / f"ray-{name}.log").read_text()

    def start(self):
        for name in NODES:
            child = self.start_node(name)

            def up():
                if child.poll() is not None:
                    raise Failure(f"ray start of {name} ended with {child.returncode}: {self.said(name)[-2000:]}")
                return "Ray runtime started" in self.said(name)

            until(f"{name} of Ray is up", up, 120)
            if name == "n1":
                found = [word.strip("'\"") for word in self.said(name).split() if f":{self.port}" in word]
                address = next((word.split("=")[-1].strip("'\"") for word in found if "address=" in word), None) or (found[0] if found else "")
                if not address:
                    raise Failure(f"no address in {self.said(name)}")
                self.address = address

    def stop(self):
        """Ends what was started, by number; what is left after that is killed."""
        left = below([child.pid for child in self.nodes.values()])
        for child in reversed(list(self.nodes.values())):
            if child.poll() is None:
                child.terminate()
        for child in self.nodes.values():
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        end = time.monotonic() + 5
        while time.monotonic() < end and any(started(pid) == at for pid, at in left.items()):
            time.sleep(0.1)
        for pid, at in left.items():
            if at is not None and started(pid) == at:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        end = time.monotonic() + 10
        while time.monotonic() < end and any(alive(pid) and started(pid) == at for pid, at in left.items()):
            time.sleep(0.1)


class Driver:
    """drive.py in the cluster."""

    def __init__(self, cluster, env, log):
        words = [str(cluster.bin / "python"), str(HERE / "drive.py"), cluster.address]
        self.log = open(log, "a")
        self.child = subprocess.Popen(words, env=env, cwd=cluster.dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.hear(90)

    def hear(self, patience):
        if not select.select([self.child.stdout], [], [], patience)[0]:
            raise Failure(f"the driver has said nothing for {patience} s")
        line = self.child.stdout.readline()
        if not line:
            raise Failure(f"the driver has ended: {pathlib.Path(self.log.name).read_text()[-2000:]}")
        return json.loads(line)

    def silent(self, seconds):
        """Whether it says nothing for so long."""
        return not select.select([self.child.stdout], [], [], seconds)[0]

    def send(self, do, **more):
        self.child.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.child.stdin.flush()

    def ask(self, do, patience=120, **more):
        """What it did; Failure where it could not."""
        self.send(do, **more)
        said = self.hear(patience)
        if "error" in said:
            raise Failure(f"{do} {more}: {said['error']}: {said['says'][-1500:]}")
        return said["is"]

    def refused(self, do, patience=120, **more):
        """The error's type and text; Failure where there was none."""
        self.send(do, **more)
        said = self.hear(patience)
        if "error" not in said:
            raise Failure(f"{do} {more} was not refused: {said['is']}")
        return said["error"], said["says"]

    def close(self):
        if self.child.poll() is None:
            self.child.stdin.close()
            try:
                self.child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
