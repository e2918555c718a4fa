"""A network of two namespaces: the controller's, and that of one node, whose link can be cut.

The whole of it is a process's own, with a /run of its own: the namespaces go with it, and the host's network is left alone.
"""

import ctypes
import os
import pathlib
import subprocess
import time

from trial import Failure, Skipped

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000


def run(*words):
    done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise Failure(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


class Network:
    """This process's own network, and that of NODE, with a link between them."""

    NODE = "n2"
    # Nobody else is in these namespaces: any addresses do.
    HERE, there = "10.0.0.1", "10.0.0.2"

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET | CLONE_NEWNS):
            raise Skipped(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
        # Its namespace is that of this process, which waits.
        self.holder = None
        try:
            self.holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"], stdin=subprocess.DEVNULL)
            self.wait_for_holder()
            # Daemons of newer Slurms have sockets in /run, and take away those of others when they
            # end.
            run("mount", "--make-rprivate", "/")
            run("mount", "-t", "tmpfs", "none", "/run")
            self.words = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net"]
            run("ip", "link", "set", "lo", "up")
            run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(self.holder.pid))
            run("ip", "address", "add", f"{self.HERE}/24", "dev", "here")
            run("ip", "link", "set", "here", "up")
            run(*self.words, "ip", "link", "set", "lo", "up")
            run(*self.words, "ip", "address", "add", f"{self.there}/24", "dev", "there")
            run(*self.words, "ip", "link", "set", "there", "up")
        except (OSError, Failure) as error:
            self.close()
            raise Skipped(f"no network of two namespaces: {error}") from error

    def wait_for_holder(self):
        own = os.readlink("/proc/self/ns/net")
        end = time.monotonic() + 30
        while self.holder.poll() is None and time.monotonic() < end:
            entry = pathlib.Path(f"/proc/{self.holder.pid}")
            if os.readlink(entry / "ns/net") != own and (entry / "comm").read_text() == "sleep\n":
                return
            time.sleep(0.01)
        raise Failure("unshare --net makes none")

    def cut(self):
        run("ip", "link", "set", "here", "down")

    def mend(self):
        run("ip", "link", "set", "here", "up")

    def close(self):
        if self.holder and self.holder.poll() is None:
            self.holder.kill()
            self.holder.wait()
