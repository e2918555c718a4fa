"""etcd, kube-apiserver and kube-scheduler, with the extender and the hook that they are to work with, and a client that counts on nothing.

All of it listens in a network namespace of its own, which ends with this process.
"""

import ctypes
import http.client
import json
import os
import pathlib
import secrets
import ssl
import subprocess
import threading
import time

from programs import Programs
from trial import Failure, Skipped, until

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
# Nobody else is in this network: any addresses do.
ADDRESS, NETWORK = "10.0.0.1", "10.0.0."
API, ETCD, SCHEDULER, EXTENDER = 16443, 23790, 10259, 7071
RESOURCE = "sublet.dev/gpu-mem-gib"


def run(*words, env=None, patience=60):
    done = subprocess.run([str(word) for word in words], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience)
    if done.returncode:
        raise Failure(f"{' '.join(map(str, words))}: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout


def private_network():
    """This process's own network and mounts, with a bridge that nodes are put on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWNS):
        raise Skipped(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    try:
        run("mount", "--make-rprivate", "/")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "address", "add", f"{ADDRESS}/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        # kube-apiserver wants to know which address it would be reached at.
        run("ip", "route", "add", "default", "dev", "br0")
    except (OSError, Failure) as error:
        raise Skipped(f"no network of its own: {error}") from error


class ApiError(Exception):
    """The API server's answer is another one than 2xx."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text[:1000]}")
        self.status = status


class Client:
    """Asks the API server; one connection for each thread."""

    def __init__(self, ca, token):
        self.context = ssl.create_default_context(cafile=str(ca))
        self.token, self.local = token, threading.local()

    def connection(self, patience=30):
        return http.client.HTTPSConnection(ADDRESS, API, timeout=patience, context=self.context)

    def headers(self, media="application/json"):
        return {"Authorization": f"Bearer {self.token}", "Content-Type": media, "Accept": "application/json"}

    def ask(self, method, path, body=None, media="application/json"):
        """The answer; asks again only where a connection that was kept is found closed."""
        text = None if body is None else json.dumps(body)
        kept = getattr(self.local, "connection", None)
        for connection in [kept, None] if kept else [None]:
            fresh = connection is None
            connection = connection or self.connection()
            try:
                connection.request(method, path, text, self.headers(media))
                answer = connection.getresponse()
                said = answer.read().decode()
            except (OSError, http.client.HTTPException):
                connection.close()
                self.local.connection = None
                if fresh:
                    raise
                continue
            self.local.connection = connection
            if not 200 <= answer.status < 300:
                raise ApiError(answer.status, said)
            return json.loads(said) if said.startswith("{") else said
        return None

    def get(self, path):
        return self.ask("GET", path)

    def post(self, path, body):
        return self.ask("POST", path, body)

    def patch(self, path, body):
        return self.ask("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path):
        try:
            return self.ask("DELETE", path, {"gracePeriodSeconds": 0})
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def delete_all(self, path, selector):
        """What is below a path with these labels."""
        return self.ask("DELETE", f"{path}?labelSelector={selector}")

    def pods(self):
        return self.get("/api/v1/namespaces/default/pods")["items"]

    def pod(self, name):
        try:
            return self.get(f"/api/v1/namespaces/default/pods/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None


class Watch:
    """When pods were first seen on a node, and on which nodes each has ever been: the API server's own stream of changes."""

    def __init__(self, client):
        self.client, self.bound, self.nodes = client, {}, {}
        self.ends, self.thread = False, threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def note(self, pod):
        node = pod["spec"].get("nodeName")
        if node:
            uid = pod["metadata"]["uid"]
            self.bound.setdefault(uid, time.monotonic())
            self.nodes.setdefault(uid, set()).add(node)

    def follow(self):
        version = None
        while not self.ends:
            try:
                if version is None:
                    listed = self.client.get("/api/v1/namespaces/default/pods")
                    version = listed["metadata"]["resourceVersion"]
                    for pod in listed["items"]:
                        self.note(pod)
                connection = self.client.connection(patience=5)
                path = f"/api/v1/namespaces/default/pods?watch=1&resourceVersion={version}&timeoutSeconds=300"
                connection.request("GET", path, headers=self.client.headers())
                answer = connection.getresponse()
                while not self.ends:
                    line = answer.readline()
                    if not line:
                        break
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        version = None
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    self.note(event["object"])
                connection.close()
            except (OSError, http.client.HTTPException, ApiError, ValueError):
                # Away, or nothing has changed for a while.
                time.sleep(0.1)

    def close(self):
        self.ends = True
        self.thread.join()


class ControlPlane(Programs):
    """The servers, all below one directory: those of 1.20. What newer ones have otherwise is in newer.py."""

    # Who may do what among those that the server knows.
    AUTHORIZATION = "AlwaysAllow"
    # Those that are ended first, so that nobody waits for one that is gone.
    FIRST_TO_END = ("scheduler", "extender", "hook", "apiserver", "etcd")

    def __init__(self, directory, binaries, root, sublet, env):
        self.dir, self.binaries, self.root = pathlib.Path(directory), pathlib.Path(binaries), pathlib.Path(root)
        super().__init__(self.dir / "log", env)
        self.sublet = sublet
        self.logs.mkdir()
        self.token = secrets.token_hex(16)
        self.token_file = self.dir / "api-token"
        self.kubeconfig, self.hook_url, self.client = self.dir / "kubeconfig", "", None
        self.certificates = self.dir / "lab"
        self.kubectl, self.kubelet_folder = self.binaries / "kubectl", self.binaries

    def write_private(self, path, text):
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)

    def prepare(self):
        run(self.sublet, "cluster", "certificates", self.certificates, "--hook", ADDRESS, "--operator", env=self.env)
        self.write_private(self.token_file, self.token + "\n")
        self.write_private(self.dir / "tokens.csv", f'{self.token},admin,admin,"system:masters"\n')
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": f"https://{ADDRESS}:{API}", "certificate-authority": str(self.certificates / "ca.crt")}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        }
        self.write_private(self.kubeconfig, json.dumps(config))
        self.client = Client(self.certificates / "ca.crt", self.token)

    def start_etcd(self):
        # In its root: its C library is another one than this machine's.
        (self.root / "etcd").mkdir(exist_ok=True)
        client, peer = f"http://127.0.0.1:{ETCD}", f"http://127.0.0.1:{ETCD + 1}"
        words = ["chroot", self.root, "/usr/bin/etcd", "--data-dir", "/etcd/data", "--unsafe-no-fsync", "--listen-client-urls", client]
        words += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self.start_one("etcd", *words)

    def start_api_server(self):
        lab = self.certificates
        words = [self.binaries / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{ETCD}", f"--bind-address={ADDRESS}", f"--advertise-address={ADDRESS}"]
        words += [f"--secure-port={API}", f"--tls-cert-file={lab}/hook.crt", f"--tls-private-key-file={lab}/hook.key", f"--cert-dir={self.dir}/certs"]
        words += [f"--token-auth-file={self.dir}/tokens.csv", f"--authorization-mode={self.AUTHORIZATION}", "--allow-privileged=true"]
        # Without a controller manager nobody makes accounts or takes the taint of a new node away.
        words += ["--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"]
        words += ["--service-account-issuer=https://kubernetes", f"--service-account-key-file={lab}/hook.crt", f"--service-account-signing-key-file={lab}/hook.key"]
        words += ["--service-cluster-ip-range=10.233.0.0/24", "--endpoint-reconciler-type=none", "--kubelet-preferred-address-types=InternalIP"]
        self.start_one("apiserver", *words, *self.gates())
        self.ready()

    def gates(self):
        """What is to be switched on, as a flag of every server."""
        return []

    def ready(self):
        def answers():
            child = self.started["apiserver"]
            if child.poll() is not None:
                raise Failure(f"kube-apiserver has ended: {self.said('apiserver')[-1500:]}")
            try:
                return self.client.get("/readyz") == "ok"
            except (OSError, http.client.HTTPException, ApiError):
                return False

        until("kube-apiserver is ready", answers, 120)

    def scheduler_config(self):
        """As docs/how-to/kubernetes.md says, with the extender over HTTPS; JSON is YAML."""
        lab = self.certificates
        extender = {
            "urlPrefix": f"https://{ADDRESS}:{EXTENDER}", "enableHTTPS": True, "filterVerb": "filter", "prioritizeVerb": "prioritize", "bindVerb": "bind", "weight": 5,
            "nodeCacheCapable": True, "managedResources": [{"name": RESOURCE, "ignoredByScheduler": False}],
            "tlsConfig": {"caFile": f"{lab}/ca.crt", "certFile": f"{lab}/operator.crt", "keyFile": f"{lab}/operator.key"},
        }
        return {
            "apiVersion": "kubescheduler.config.k8s.io/v1beta1", "kind": "KubeSchedulerConfiguration", "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig)}, "percentageOfNodesToScore": 100, "extenders": [extender],
        }

    def start_scheduler(self):
        config = self.dir / "scheduler.json"
        config.write_text(json.dumps(self.scheduler_config()))
        self.start_one("scheduler", self.binaries / "kube-scheduler", f"--config={config}", *self.scheduler_flags())

    def scheduler_flags(self):
        return ["--port=0", "--secure-port=0"]

    def start_hook(self):
        state = self.dir / "hook"
        words = [self.sublet, "cluster", "serve", "--state", state, "--listen", f"{ADDRESS}:0", "--token-file", self.dir / "hook-token"]
        words += ["--tls-cert", self.certificates / "hook.crt", "--tls-key", self.certificates / "hook.key", "--node-timeout", "5s"]
        if not (self.dir / "hook-token").exists():
            self.write_private(self.dir / "hook-token", secrets.token_hex(32) + "\n")
        self.start_one("hook", *words)

        def address():
            return next((word.rstrip(",") for word in self.said("hook").split() if word.startswith("https://")), None)

        self.hook_url = until("the hook listens", address)

    def start_extender(self, hook=True):
        lab = self.certificates
        words = [self.sublet, "kubernetes", "extender", "--listen", f"{ADDRESS}:{EXTENDER}", "--tls-cert", lab / "hook.crt", "--tls-key", lab / "hook.key"]
        words += ["--tls-client-ca", lab / "ca.crt", "--api-server", f"https://{ADDRESS}:{API}", "--api-ca", lab / "ca.crt", "--api-token-file", self.token_file]
        if hook:
            words += ["--cluster", self.hook_url, "--token-file", self.dir / "hook-token", "--ca-file", lab / "ca.crt"]
        child = self.start_one("extender", *words)
        context = ssl.create_default_context(cafile=str(lab / "ca.crt"))
        context.load_cert_chain(lab / "operator.crt", lab / "operator.key")

        def answers():
            if child.poll() is not None:
                raise Failure(f"the extender has ended: {self.said('extender')[-1000:]}")
            connection = http.client.HTTPSConnection(ADDRESS, EXTENDER, timeout=5, context=context)
            try:
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False
            finally:
                connection.close()

        until("the extender answers", answers)

    def start(self):
        self.prepare()
        self.start_etcd()
        self.start_api_server()
        self.start_hook()
        self.start_extender()
        self.start_scheduler()

    def stop(self):
        for name in [*self.FIRST_TO_END, *self.started]:
            self.end_one(name)
