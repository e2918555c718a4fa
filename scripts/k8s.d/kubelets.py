"""Pods under real kubelets: shares, quotas, and what happens when something of it ends."""

import json
import os
import signal
import statistics
import time

import sharing
from control_plane import RESOURCE
from trial import Failure, alive, until
from fleet import message
from nodes import IMAGE

GIB = 1 << 30
OUT_OF_MEMORY = 2
POINTS = 3
# With less of the time than this the two do not compete for it.
BUSY = 0.9
# A day: a pod is to work for as long as it is left, also on a busy machine.
LOAD = ["/prog/load", "--kernel-us", "500", "--for-ms", "86400000", "--json"]
PODS = "/api/v1/namespaces/default/pods"
JOB, STATUS, DEVICE = (f"sublet.dev/{name}" for name in ("job", "status", "gpu"))
# What a user asks kubectl for.
COLUMNS = r"NAME:.metadata.name,NODE:.spec.nodeName,JOB:.metadata.annotations.sublet\.dev/job,STATUS:.metadata.annotations.sublet\.dev/status"


def expect(holds, text):
    if not holds:
        raise Failure(text)


def pod(name, gib=None, share=None, node=None, words=LOAD, restart="Never", annotations=()):
    annotations = {**dict(annotations), **({} if share is None else {"sublet.dev/share": share})}
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": list(words)}
    if gib is not None:
        container["resources"] = {"limits": {RESOURCE: str(gib)}}
    chosen = {"fleet": "kubelets", **({"kubernetes.io/hostname": node.name} if node else {})}
    spec = {"automountServiceAccountToken": False, "nodeSelector": chosen, "restartPolicy": restart, "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations}, "spec": spec}


class Pods:
    """What is asked of pods of real kubelets."""

    def __init__(self, site):
        self.site, self.client = site, site.plane.client

    def create(self, name, *rest, **more):
        self.client.post(PODS, pod(name, *rest, **more))

    def delete(self, *names):
        for name in names:
            self.client.delete(f"{PODS}/{name}")

    def phase(self, name):
        found = self.client.pod(name)
        return found["status"].get("phase") if found else None

    def events(self, name):
        found = self.client.get(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{name}")
        return " | ".join(one.get("message", "") for one in found["items"])

    def annotation(self, name, key):
        return (self.client.pod(name) or {"metadata": {}})["metadata"].get("annotations", {}).get(key, "")

    def node(self, name):
        at = self.client.pod(name)["spec"].get("nodeName")
        return next(node for node in self.site.nodes if node.name == at)

    def job(self, name):
        """The job of a pod as its arbiter has it: the plugin says on the pod which one it is."""
        called = self.annotation(name, JOB)
        return self.node(name).jobs().get(called) if called else None

    def works(self, name, patience=100, launches=True):
        """Waits until the pod's program uses the GPU; without `launches` until it could: beside others that want all of the time.

        A scheduler that was notified that there is no space asks again with the next change that it knows of, or after a minute."""
        def there():
            phase = self.phase(name)
            if phase in ("Failed", "Succeeded", None):
                raise Failure(f"pod {name} is {phase}: {json.dumps((self.client.pod(name) or {}).get('status'))[:1500]} {self.events(name)}")
            job = self.job(name)
            return job if job and job["processes"] and (job["launches"] > 0 or not launches) else None

        try:
            job = until(f"{name} uses the GPU", there, patience)
        except Failure as error:
            raise Failure(f"{error}: {self.phase(name)}: {message(self.client.pod(name) or {})} {self.events(name)[-600:]}") from error
        self.site.seen |= {process["pid"] for process in job["processes"]}
        return job

    def in_force(self, name, gib, share):
        """Whether that is what the arbiter enforces, soon: the share is read from the pod's annotation."""
        try:
            return until(f"{name} has {gib} GiB and {share}", lambda: (job := self.job(name)) and job["mem_limit_bytes"] == gib * GIB and job["share_asked"] == share and job, 30)
        except Failure as error:
            self.site.lost += 1
            raise Failure(f"{error}: {self.job(name)}: {self.annotation(name, STATUS)}") from error

    def takes(self, name, gib):
        """The exit code of a program in the pod that takes so much."""
        done = self.site.kubectl("exec", name, "--", "/prog/tenant", "--bytes", f"{gib}GiB")
        return done.returncode, done.stderr

    def quota(self, name, below, above):
        code, said = self.takes(name, below)
        expect(code == 0, f"{below} GiB in {name}: {code}: {said}")
        code, said = self.takes(name, above)
        if code != OUT_OF_MEMORY:
            self.site.lost += 1
            raise Failure(f"{above} GiB in {name}: {code}: {said}")

    def nothing_left(self, node, patience=60):
        """No job, no process of one, and all units are free."""
        until(f"the arbiter of {node.name} has no job", lambda: not node.jobs(), patience)
        until("processes have ended", lambda: not any(alive(pid) for pid in self.site.seen))

    def clear(self, patience=60):
        for one in self.client.pods():
            self.delete(one["metadata"]["name"])
        until("the pods are gone", lambda: not self.client.pods())
        for node in self.site.nodes:
            self.nothing_left(node, patience)


def two(site):
    """Two pods that share the GPU of the first node, made once."""
    pods = Pods(site)
    for name, gib, share in (("hopper", 6, "0.75"), ("turing", 4, "0.25")):
        if not pods.client.pod(name):
            pods.create(name, gib, share, site.nodes[0])
    pods.works("hopper")
    pods.works("turing")
    return pods


def share_of(site, pods, names, seconds):
    """What the first of two pods had of the device's time, by the device's own account, and how much of the time that one was busy."""
    pids = {name: pods.works(name)["processes"][0]["pid"] for name in names}
    account = sharing.Account(site.nodes[0].env, 5)
    try:
        # What was begun under other shares is over.
        time.sleep(0.5)
        begin = time.monotonic_ns()
        time.sleep(seconds)
        end = time.monotonic_ns()
        time.sleep(0.05)
    finally:
        account.close()
    used = {name: account.used(begin, end, pid) for name, pid in pids.items()}
    return used[names[0]] / max(sum(used.values()), 1), sum(used.values()) / (end - begin)


def measured(site, pods, metrics, metric, names, wanted):
    """The part of the device's time that the first of two pods has beside the second, against what is wanted; a line for people."""
    # A machine that others load too: a measurement that misses is made twice more, and the median
    # counts. Where the programs have too few processors to ask for the GPU, no share can be seen.
    seconds = 2 if site.quick else 5
    seen = [share_of(site, pods, names, seconds)]
    if abs(seen[0][0] - wanted) * 100 > POINTS:
        seen += [share_of(site, pods, names, seconds) for _ in range(2)]
    got, busy = (statistics.median(one[at] for one in seen) for at in (0, 1))
    error = abs(got - wanted) * 100
    more = {"got": round(got, 4), "wanted": wanted, "busy": round(busy, 3), "load": round(os.getloadavg()[0], 1)}
    if busy < BUSY and error > POINTS:
        why = f"the GPU had work for {busy:.0%} of the time: this machine is too busy for the two programs"
        metrics.append({**sharing.metric(metric, 0, "points"), "value": None, "reason": why, **more})
        return f"not measured: {why}"
    metrics.append({**sharing.metric(metric, error, "points", budget=POINTS), **more})
    expect(error <= POINTS, f"{got:.3f} instead of {wanted}")
    return f"{names[0]} had {got:.3f} of the device's time, and {wanted} was promised"


def shares(site, metrics):
    """Two pods on one GPU: each inside its quota, and its share within 3 points by the device's own account."""
    pods = two(site)
    pods.in_force("hopper", 6, 0.75)
    pods.in_force("turing", 4, 0.25)
    pods.quota("hopper", 5, 7)
    pods.quota("turing", 3, 5)
    until("the pod says that its share is in force", lambda: "in force" in pods.annotation("hopper", STATUS), 30)
    site.kubectl("get", "pods", "-o", f"custom-columns={COLUMNS}")
    site.transcript.say(measured(site, pods, metrics, "k8s_share_error", ("hopper", "turing"), 0.75))


def over_quota(site, metrics):
    """A pod that does not fit waits with the reason, and runs as soon as another one is gone."""
    pods, node = two(site), site.nodes[0]
    free = node.units() - 10
    pods.create("large", free + 1, None, node)
    pods.create("busy", 1, "0.5", node)
    for name, words in (("large", f"Insufficient {RESOURCE}"), ("busy", "has a share of 0 free, and 0.5 is asked for")):
        said = until(f"{name} has a reason", lambda name=name: message(pods.client.pod(name)))
        expect(words in said and pods.phase(name) == "Pending", f"{name}: no `{words}` in: {said}")
        site.transcript.note(f"{name} waits: {said}")
    pods.delete("turing")
    begun = time.monotonic()
    pods.works("large")
    site.transcript.say(f"large runs {time.monotonic() - begun:.1f} s after turing was deleted")
    expect(pods.phase("busy") == "Pending", "it was placed, and no time is left for it")
    pods.delete("hopper")
    pods.works("busy")
    pods.in_force("busy", 1, 0.5)
    pods.clear()


def allocate(site, metrics):
    """The plugin is killed at all moments of pods' starts: each runs inside its quota or is refused, and nothing is left."""
    pods, node = Pods(site), site.nodes[0]
    # It hangs in the middle of Allocate, and is killed there.
    plugin = node.started["plugin"]
    plugin.send_signal(signal.SIGSTOP)
    pods.create("in-allocate", 3, None, node)
    until("it is bound", lambda: pods.client.pod("in-allocate")["spec"].get("nodeName"))
    time.sleep(2)
    node.end_one("plugin", signal.SIGKILL)
    node.start_plugin()
    said = until("it is refused, or runs", lambda: pods.phase("in-allocate") in ("Failed", "Running") and pods.client.pod("in-allocate")["status"])
    site.transcript.say(f"killed while it is asked: {said.get('phase')}: {said.get('reason', '')} {said.get('message', '')[:160]}")
    until("the node has its units again", node.is_ready)
    delays = (0.05, 0.2) if site.quick else (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    ran = 0
    for at, delay in enumerate(delays):
        pods.create(f"killed-{at}", 3, "0.2", node)
        time.sleep(delay)
        node.end_one("plugin", signal.SIGKILL)
        node.start_plugin()
        until(f"killed-{at} is refused, or runs", lambda at=at: pods.phase(f"killed-{at}") in ("Failed", "Running"), 90)
        if pods.phase(f"killed-{at}") == "Running":
            ran += 1
            pods.works(f"killed-{at}")
            pods.quota(f"killed-{at}", 2, 4)
        pods.delete(f"killed-{at}")
        until("the node has its units", node.is_ready)
    pods.create("after", 3, "0.2", node)
    pods.works("after")
    pods.in_force("after", 3, 0.2)
    site.transcript.say(f"{ran} of {len(delays)} ran")
    # Units of a pod that was refused come back after two minutes.
    pods.clear(150)


def same(site, pods, before, what):
    """The jobs of before, with the same processes, which still work."""
    for name, job in before.items():
        now = pods.works(name)
        pids = [[one["pid"] for one in at["processes"]] for at in (job, now)]
        if now["id"] != job["id"] or pids[0] != pids[1] or now["mem_limit_bytes"] != job["mem_limit_bytes"]:
            site.lost += 1
            raise Failure(f"{what}: {name} is not what it was: {now}")
        until(f"{name} goes on", lambda name=name, seen=now["launches"]: pods.job(name)["launches"] > seen)


def kubelet(site, metrics):
    """The kubelet is killed and started again: its pods go on, the plugin registers again, and new pods get units."""
    pods, node = two(site), site.nodes[0]
    before = {name: pods.works(name) for name in ("hopper", "turing")}
    for away in (0, 3):
        registered = node.registrations()
        node.restart_kubelet(away)
        until("the plugin registers again", lambda registered=registered: node.registrations() > registered, 90)
        until("the node is ready", node.is_ready)
        same(site, pods, before, "after a restart of the kubelet")
        pods.create(f"new-{away}", 2, None, node)
        pods.works(f"new-{away}", launches=False)
        pods.in_force(f"new-{away}", 2, None)
        pods.delete(f"new-{away}")
        until("its job is gone", lambda: len(node.jobs()) == 2)


def away(site, metrics):
    """The API server is away for a while: pods go on, and all is as it was afterwards."""
    pods = two(site)
    before = {name: pods.works(name) for name in ("hopper", "turing")}
    site.plane.end_one("apiserver", signal.SIGKILL)
    begun, jobs = time.monotonic(), site.nodes[0].jobs()
    time.sleep(site.away_s)
    for name, job in site.nodes[0].jobs().items():
        expect(job["launches"] > jobs[name]["launches"], f"{name} did not go on")
    site.plane.start_api_server()
    site.transcript.say(f"away for {time.monotonic() - begun:.0f} s")
    same(site, pods, before, "after the API server was away")
    pods.create("later", 2, None, site.nodes[0])
    pods.works("later", launches=False)
    pods.delete("later")
    until("its job is gone", lambda: len(site.nodes[0].jobs()) == 2)


def cut_off(site, metrics):
    """A node is cut off the network and comes back: its pods go on, and start nowhere twice."""
    pods, node = two(site), site.nodes[0]
    before = {name: pods.works(name) for name in ("hopper", "turing")}
    node.cut()
    jobs = node.jobs()
    pods.create("meanwhile", 2, None, node)
    # With a grace, which a node that is away does not hear of.
    pods.client.ask("DELETE", f"{PODS}/turing", {"gracePeriodSeconds": 1})
    time.sleep(site.away_s)
    for name, job in node.jobs().items():
        expect(job["launches"] > jobs[name]["launches"], f"{name} did not go on")
    expect(len(node.jobs()) == 2, f"something else has started: {list(node.jobs())}")
    node.mend()
    until("the pod that was deleted is gone", lambda: pods.client.pod("turing") is None, 90)
    pods.works("meanwhile", launches=False)
    same(site, pods, {"hopper": before["hopper"]}, "after the node was cut off")
    expect(len(node.jobs()) == 2 and not site.nodes[1].jobs(), f"started twice: {[list(one.jobs()) for one in site.nodes]}")
    expect(not any(alive(one["pid"]) for one in before["turing"]["processes"]), "a process of the pod that is gone is left")
    pods.delete("meanwhile")


def killed(site, metrics):
    """kill -9 of a pod's process: memory and units are free, and no process is left; with restartPolicy Always it starts anew."""
    pods, node = two(site), site.nodes[0]
    job = pods.works("hopper")
    os.kill(job["processes"][0]["pid"], signal.SIGKILL)
    until("the pod has failed", lambda: pods.phase("hopper") == "Failed")
    until("its job is gone", lambda: job["name"] not in node.jobs())
    pods.delete("hopper")
    pods.create("again", 6, "0.5", node, restart="Always")
    first = pods.works("again")
    os.kill(first["processes"][0]["pid"], signal.SIGKILL)

    def started_anew():
        now = pods.job("again")
        return now if now and now["processes"] and now["processes"][0]["pid"] != first["processes"][0]["pid"] else None

    now = until("it is started again", started_anew, 90)
    site.seen |= {process["pid"] for process in now["processes"]}
    pods.in_force("again", 6, 0.5)
    pods.quota("again", 5, 7)
    pods.clear()


def nri(site, metrics):
    """On the second node the NRI plugin, in place of the device plugin, gives quota and share to a pod of annotations alone."""
    pods, node = Pods(site), site.nodes[1]
    node.end_one("plugin")
    node.start_one("nri", "kubernetes", "nri", "--sim", "--socket", node.dir / "nri.sock", "--state", node.dir / "nri-state")
    until("the NRI plugin is registered", lambda: "registered at" in node.said("nri"))
    pods.create("ampere", node=node, annotations={"sublet.dev/gpu-mem": "3Gi", "sublet.dev/share": "0.5"})

    def works():
        jobs = [job for name, job in node.jobs().items() if name.startswith("ampere-main-")]
        return jobs[0] if jobs and jobs[0]["processes"] and jobs[0]["launches"] > 0 else None

    job = until("ampere uses the GPU", works)
    site.seen |= {process["pid"] for process in job["processes"]}
    expect((job["mem_limit_bytes"], job["share_asked"]) == (3 * GIB, 0.5), f"not 3 GiB and 0.5: {job}")
    pods.quota("ampere", 2, 4)
    pods.create("wrong", node=node, annotations={"sublet.dev/gpu-mem": "lots"})
    until("the refusal stands in the pod's events", lambda: "sublet.dev/gpu-mem: `lots` is no amount" in pods.events("wrong"))
    os.kill(job["processes"][0]["pid"], signal.SIGKILL)
    until("the pod has failed", lambda: pods.phase("ampere") == "Failed")
    pods.clear()
    node.end_one("nri")
    node.start_plugin()
    until("the node has its units again", node.is_ready)


CASES = [shares, over_quota, allocate, kubelet, away, cut_off, killed, nri]
