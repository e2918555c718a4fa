"""Pods on nodes that are objects and nothing else: how long their placement takes, and whether it is right, by this script's own count."""

import json
import os
import random
import signal
import threading
import time

import sharing
from control_plane import RESOURCE, ApiError, Watch
from trial import Failure, until

GPUS, GIB = 2, 80
# What pods ask for: GiB and share. Together they take about three quarters of the memory of half
# the nodes, so that GPUs are shared and large pods have to find space.
SIZES = [(4, None), (8, "0.1"), (16, "0.25"), (24, "0.3"), (40, "0.5"), (60, "0.6"), (10, "10%")]
DEVICES, DEVICE, SHARE, DECISION = (f"sublet.dev/{name}" for name in ("devices", "gpu", "share", "decision"))


def node(name):
    """As a device plugin and a kubelet have written it; nobody looks whether it is alive."""
    devices = [{"uuid": f"GPU-{name}-{at}", "gib": GIB} for at in range(GPUS)]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    has = {"cpu": "64", "memory": "512Gi", "pods": "110", RESOURCE: str(GPUS * GIB)}
    conditions = [{"type": "Ready", "status": "True", "reason": "Object", "message": "", "lastHeartbeatTime": now, "lastTransitionTime": now}]
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "fleet": "objects"}, "annotations": {DEVICES: json.dumps(devices)}},
        "status": {"capacity": has, "allocatable": has, "conditions": conditions},
    }


def pod(name, gib, share=None, nodes="objects", containers=1, **labels):
    """A pod; without GiB one that asks for nothing of ours."""
    one = {"image": "none", "resources": {"limits": {RESOURCE: str(gib)}} if gib else {}}
    annotations = {} if share is None else {SHARE: share}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {"automountServiceAccountToken": False, "nodeSelector": {"fleet": nodes}, "terminationGracePeriodSeconds": 0,
                 "containers": [{"name": f"c{at}", **one} for at in range(containers)]},
    }


def part(text):
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


class Fleet:
    """Nodes that are objects, and the pods on them."""

    def __init__(self, plane, count):
        self.plane, self.client, self.count = plane, plane.client, count
        self.watch, self.made = Watch(plane.client), {}
        for at in range(count):
            self.client.post("/api/v1/nodes", node(f"object-{at:03}"))

    def create(self, name, gib, share=None, **more):
        """Makes a pod; asks again while the server is away, until `patience` is over."""
        begun = time.monotonic()
        body = pod(name, gib, share, **more)
        while True:
            try:
                made = self.client.post("/api/v1/namespaces/default/pods", body)
                break
            except (OSError, ApiError) as error:
                # A request whose answer was lost has made it all the same.
                if isinstance(error, ApiError) and error.status == 409:
                    made = self.client.pod(name)
                    break
                if isinstance(error, ApiError) and error.status < 500 and error.status != 429 or time.monotonic() > begun + 120:
                    raise Failure(f"pod {name} cannot be made: {error}") from error
                time.sleep(0.2)
        self.made[made["metadata"]["uid"]] = begun
        return made["metadata"]["uid"]

    def stream(self, prefix, count, rate, seed=1, plain=None):
        """Pods at a steady rate, whether the ones before are placed or not; their uids. Beside every tenth of them one comes that asks for
        nothing of ours: uids of these are added to `plain`, if there is such a list."""
        chosen = random.Random(seed)
        start, uids = time.monotonic(), []
        for at in range(count):
            time.sleep(max(0.0, start + at / rate - time.monotonic()))
            gib, share = chosen.choice(SIZES)
            uids.append(self.create(f"{prefix}-{at}", gib, share, wave=prefix))
            if plain is not None and at % 10 == 0:
                plain.append(self.create(f"{prefix}-plain-{at}", 0, wave="plain"))
        return uids

    def placed(self, uids, patience=180):
        """Waits until all of them have a node; seconds from creation to that."""
        def missing():
            return [uid for uid in uids if uid not in self.watch.bound]

        try:
            until("all pods are placed", lambda: not missing(), patience)
        except Failure as error:
            left = [pod for pod in self.client.pods() if pod["metadata"]["uid"] in set(missing())]
            why = [message(pod) for pod in left]
            raise Failure(f"{error}: {len(left)} wait: {why[:2]}; extender: {self.plane.said('extender')[-300:]}") from error
        return sorted(self.watch.bound[uid] - self.made[uid] for uid in uids)

    def overcommitted(self):
        """GPUs whose pods have more memory or time than there is, pods without a GPU of their node, and pods that were ever on two nodes: counted
        from what the API server has, and from nothing of ours."""
        memory, time_of, wrong = {}, {}, []
        for one in self.client.pods():
            at = one["spec"].get("nodeName")
            if not at or one["spec"].get("nodeSelector", {}).get("fleet") != "objects":
                continue
            notes = one["metadata"].get("annotations", {})
            device = notes.get(DEVICE, "")
            if not one["spec"]["containers"][0]["resources"].get("limits"):
                continue
            if not device.startswith(f"GPU-{at}-"):
                wrong.append(f"{one['metadata']['name']} on {at} has GPU `{device}`")
            gib = sum(int(c["resources"]["limits"][RESOURCE]) for c in one["spec"]["containers"])
            memory[device] = memory.get(device, 0) + gib
            time_of[device] = time_of.get(device, 0.0) + part(notes.get(SHARE, "0"))
        wrong += [f"{device} has {gib} GiB" for device, gib in memory.items() if gib > GIB]
        wrong += [f"{device} has a share of {share}" for device, share in time_of.items() if share > 1 + 1e-9]
        wrong += [f"pod {uid} was on {sorted(nodes)}" for uid, nodes in self.watch.nodes.items() if len(nodes) > 1]
        return wrong

    def clear(self):
        """Takes all pods of these nodes away."""
        for one in self.client.pods():
            if one["spec"].get("nodeSelector", {}).get("fleet") == "objects":
                self.client.delete(f"/api/v1/namespaces/default/pods/{one['metadata']['name']}")
        until("the pods are gone", lambda: not [p for p in self.client.pods() if p["spec"].get("nodeSelector", {}).get("fleet") == "objects"])

    def close(self):
        self.watch.close()


def message(pod):
    """What its condition says of its placement."""
    conditions = {c["type"]: c for c in pod.get("status", {}).get("conditions", [])}
    return conditions.get("PodScheduled", {}).get("message", "")


def quantile(sorted_values, part_of):
    return sorted_values[min(len(sorted_values) - 1, int(part_of * len(sorted_values)))]


def placement(site, metrics):
    """Pods on nodes that are objects come at a steady rate: time from creation to a node, and what each GPU has then."""
    fleet, count, rate = site.fleet, site.pods, site.rate
    begun = time.monotonic()
    plain = []
    uids = fleet.stream("steady", count, rate, plain=plain)
    took, others = fleet.placed(uids), fleet.placed(plain)
    seconds = time.monotonic() - begun
    wrong = fleet.overcommitted()
    used = len({one["metadata"]["annotations"][DEVICE] for one in fleet.client.pods() if one["metadata"].get("labels", {}).get("wave") == "steady"})
    site.transcript.say(f"{count} pods on {fleet.count} nodes in {seconds:.0f} s: {used} GPUs are used, and {len(wrong)} have more than they can")
    more = {"nodes": fleet.count, "pods": count, "rate_per_s": rate, "seconds": round(seconds, 1), "gpus_used": used, "load": round(os.getloadavg()[0], 1)}
    for name, part_of in (("p50", 0.5), ("p99", 0.99)):
        baseline = quantile(others, part_of) * 1000
        metrics.append({**sharing.metric(f"k8s_schedule_{name}_ms", quantile(took, part_of) * 1000, "ms", baseline=baseline), **more})
    site.wrong += wrong
    if wrong:
        raise Failure(f"{len(wrong)} wrong: {wrong[:3]}")


def waits(site, metrics):
    """Pods that fit nowhere wait, and their condition and event say why in one line."""
    fleet = site.fleet
    for name, gib, more, words in [
        ("too-much", 81, {}, "81 GiB"),
        ("no-such-share", 4, {"share": "1.5"}, "sublet.dev/share: `1.5`"),
        ("two-ask", 4, {"containers": 2}, "2 containers of the pod ask for"),
    ]:
        fleet.create(name, gib, **more)
        said = until(f"{name} has a reason", lambda name=name: message(fleet.client.pod(name)))
        site.transcript.say(f"{name}: {said}")
        if words not in said or len(said) > 500:
            raise Failure(f"{name}: no `{words}` in a line that can be read: {len(said)} characters: {said[:600]}")
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{name}"
        until(f"an event of {name} says so", lambda path=path, words=words: any(words in e.get("message", "") for e in fleet.client.get(path)["items"]))
        fleet.client.delete(f"/api/v1/namespaces/default/pods/{name}")


def disturbed(site, prefix, disturb):
    """Pods come at the same rate while something happens in the middle."""
    fleet, uids = site.fleet, []
    failed = []

    def come():
        try:
            uids.extend(fleet.stream(prefix, site.pods // 5, site.rate, seed=len(prefix)))
        except Failure as error:
            failed.append(error)

    thread = threading.Thread(target=come)
    before = {one["metadata"]["uid"]: one["spec"].get("nodeName") for one in fleet.client.pods()}
    thread.start()
    time.sleep(site.pods / 5 / site.rate / 2)
    try:
        disturb()
    finally:
        thread.join()
    if failed:
        raise failed[0]
    fleet.placed(uids)
    after = {one["metadata"]["uid"]: one["spec"].get("nodeName") for one in fleet.client.pods()}
    moved = [uid for uid, at in before.items() if at and after.get(uid) != at]
    wrong = fleet.overcommitted() + [f"pod {uid} has moved or is gone" for uid in moved]
    site.wrong += wrong
    if wrong:
        raise Failure(f"{len(wrong)} wrong: {wrong[:3]}")


def extender(site, metrics):
    """The extender is killed and started again while pods come: all are placed, none twice, nothing has more than it can."""

    def disturb():
        site.plane.end_one("extender", signal.SIGKILL)
        time.sleep(2)
        site.plane.start_extender()

    disturbed(site, "restarted", disturb)


def api_server(site, metrics):
    """The API server is killed, and is away for a while: the same."""

    def disturb():
        site.plane.end_one("apiserver", signal.SIGKILL)
        time.sleep(site.away_s)
        site.plane.start_api_server()

    disturbed(site, "away", disturb)
    site.fleet.clear()


CASES = [placement, waits, extender, api_server]
