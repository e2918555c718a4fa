"""A stand-in for a cluster, for tests of the cases of claims: it does what Kubernetes 1.36 did when it was tried, or something wrong."""

import copy
import json
import pathlib
import re
import subprocess
import types
import uuid

import claims
import judgements
from control_plane import ApiError

# As the driver publishes a device of 80 GiB; a test of it holds it to this file.
SLICE = pathlib.Path(__file__).resolve().parents[2] / "kubernetes/data/slice.json"
GIB = 1 << 30


class Cluster:
    """A stand-in for all of it: objects, a scheduler that gives parts of one device, a driver and its arbiter. `wrong` names what it does
    otherwise than it should."""

    def __init__(self, wrong=()):
        self.wrong_ways = {wrong} if isinstance(wrong, str) else set(wrong)
        self.pod_objects, self.claim_objects, self.templates, self.job_objects = {}, {}, {}, {}
        spec = json.loads(SLICE.read_text())
        spec["nodeName"] = spec["pool"]["name"] = "n1"
        self.slice_objects = [{"spec": spec}]

    def kubectl(self, *words, given=None):
        code = 0
        if words[0] == "apply":
            for text in given.split("---\n"):
                self.make(text)
        elif words[:2] == ("delete", "pod"):
            self.delete_pod(words[2])
        elif words[:2] == ("delete", "resourceclaim"):
            self.claim_objects.pop(words[2], None)
        elif words[0] == "exec":
            job = self.job_of(self.claim_of(words[1]))
            # The pods' programs use all that they are promised; one that is promised none has
            # what is left, and a program in it has to write.
            working = [self.job_of(self.claim_of(name)) for name in self.pod_objects]
            if not job["share_asked"] and sum(one["share_asked"] or 0 for one in working if one) > 1 - 1e-9:
                raise subprocess.TimeoutExpired(words, 120)
            asked = float(re.fullmatch(r"([\d.]+)GiB", words[-1])[1]) * GIB
            code = 2 if asked > job["mem_limit_bytes"] and "no quota" not in self.wrong_ways else 0
        self.schedule()
        return subprocess.CompletedProcess(words, code, "", "")

    def make(self, text):
        found = lambda pattern: (re.search(pattern, text) or [None, None])[1]
        kind, name = found(r"kind: (\w+)"), found(r"metadata: \{name: ([\w-]+)\}")
        metadata = {"name": name, "uid": str(uuid.uuid4()), "namespace": "default"}
        if kind in ("ResourceClaim", "ResourceClaimTemplate"):
            asked = {"memory": found(r"memory: (\w+)")} | ({"sm": found(r'sm: "(\d+)"')} if 'sm: "' in text else {})
            spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu-share", "capacity": {"requests": asked}}}]}}
            if kind == "ResourceClaim":
                self.claim_objects[name] = {"metadata": metadata, "spec": spec, "status": {}}
            else:
                self.templates[name] = spec
        elif kind == "Pod":
            one = {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}}
            if "resourceClaimTemplateName" in text:
                called = f"{name}-gpu-x1"
                self.claim_objects[called] = {"metadata": {**metadata, "name": called, "uid": str(uuid.uuid4())}, "spec": self.templates[name], "status": {}}
                one["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": name}]
                one["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": called}]
            elif "limits:" in text:
                called = f"{name}-extended-resources-x1"
                owned = {"name": called, "uid": str(uuid.uuid4()), "annotations": {judgements.OF_EXTENDED: "true"}, "ownerReferences": [{"uid": metadata["uid"]}]}
                spec = {"devices": {"requests": [{"name": "container-0-request-0", "exactly": {"deviceClassName": "gpu-slot", "count": 1}}]}}
                self.claim_objects[called] = {"metadata": owned, "spec": spec, "status": {}}
                one["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": called}
            else:
                one["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": found(r"resourceClaimName: ([\w-]+)")}]
            self.pod_objects[name] = one

    def claim_of(self, name):
        pod = self.pod_objects[name]
        status = pod["status"]
        called = [one.get("resourceClaimName") for one in [*pod["spec"].get("resourceClaims", []), *status.get("resourceClaimStatuses", [])]]
        called += [status.get("extendedResourceClaimStatus", {}).get("resourceClaimName")]
        return self.claim_objects[next(one for one in called if one)]

    def job_of(self, claim):
        return self.job_objects.get(claim["status"].get("job"))

    def delete_pod(self, name):
        if name not in self.pod_objects:
            return
        claim = self.claim_of(name)
        del self.pod_objects[name]
        if "a job stays" not in self.wrong_ways:
            self.job_objects.pop(claim["status"].get("job"), None)
        claim["status"] = {}
        if claim["metadata"]["name"] != name:
            del self.claim_objects[claim["metadata"]["name"]]

    def schedule(self):
        for name, pod in self.pod_objects.items():
            claim = self.claim_of(name)
            if not pod["spec"].get("nodeName"):
                self.give(name, pod, claim)
            if pod["spec"].get("nodeName"):
                self.prepare(name, pod, claim)

    def give(self, name, pod, claim):
        spec = self.slice_objects[0]["spec"]
        device, asked = spec["devices"][0], judgements.requests(claim)
        amounts = {one: judgements.consumed(capacity, asked.get(one)) for one, capacity in device["capacity"].items()}
        text = {"memory": f"{amounts['memory'] // GIB}Gi", "sm": str(amounts["sm"])}
        if "no rounding" in self.wrong_ways and "memory" in asked:
            text["memory"] = asked["memory"]
        share = str(uuid.UUID(int=7)) if "one shareID" in self.wrong_ways else str(uuid.uuid4())
        given = {"driver": "sublet.dev", "pool": "n1", "device": device["name"], "request": "gpu", "shareID": share, "consumedCapacity": text}
        taken = {"allocation": {"devices": {"results": [given]}}, "reservedFor": [{"resource": "pods", "name": name}]}
        trying = [*[one for one in self.claim_objects.values() if one is not claim], {**claim, "status": taken}]
        if judgements.overcommitted(trying, self.slice_objects) and "overcommits" not in self.wrong_ways:
            why = "0/1 nodes are available: 1 cannot allocate all claims."
            if "no reason" in self.wrong_ways:
                why = "0/1 nodes are available: 1 Insufficient cpu."
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}]
            return
        claim["status"] = taken
        pod["spec"]["nodeName"] = "n1"
        pod["status"]["conditions"] = []

    def prepare(self, name, pod, claim):
        given = claim["status"]["allocation"]["devices"]["results"][0]
        memory, share = (judgements.quantity(given["consumedCapacity"][one]) for one in ("memory", "sm"))
        share = float(share / 100)
        held = sum(job["share_asked"] or 0 for job in self.job_objects.values() if job["name"] != claim["status"].get("job"))
        keys = {key: given[key] for key in ("driver", "pool", "device", "shareID")}
        ready = {"type": "Ready", "status": "True", "reason": "Prepared", "lastTransitionTime": "2026-11-26T10:00:00Z"}
        entry = {**keys, "conditions": [ready]}
        if held + share > 1 + 1e-9:
            ready.update(status="False", reason="Refused", message="the node's arbiter refused the job: shares would come to 1.2, above 1")
        else:
            called = f"{claim['metadata']['name']}-{given['shareID'][:8]}"
            claim["status"]["job"] = called
            limit = int(memory) + ("more memory" in self.wrong_ways) * GIB
            job = {"name": called, "id": called, "mem_limit_bytes": limit, "share_asked": share or None, "processes": [{"pid": 1 << 30}], "launches": 0}
            self.job_objects.setdefault(called, job)
            pod["status"]["phase"] = "Running"
            entry["data"] = {"job": called, "memoryBytes": int(memory), "share": share}
        if "no report" not in self.wrong_ways:
            claim["status"]["devices"] = [entry]

    # What a client has.
    def get(self, path):
        self.schedule()
        if path == claims.CLAIMS:
            return {"items": copy.deepcopy(list(self.claim_objects.values()))}
        if path == claims.TEMPLATES:
            return {"items": [{"metadata": {"name": name}} for name in self.templates]}
        if path.startswith(claims.CLAIMS):
            name = path.rsplit("/", 1)[1]
            if name not in self.claim_objects:
                raise ApiError(404, name)
            return copy.deepcopy(self.claim_objects[name])
        if "/events" in path:
            name = path.split("%3D")[1]
            claim = self.claim_of(name)
            said = [one["conditions"][0].get("message", "") for one in claim["status"].get("devices", [])]
            said += [one.get("message", "") for one in self.pod_objects[name]["status"].get("conditions", [])]
            return {"items": [{"message": text} for text in said]}
        if path == "/api/v1/nodes/n1":
            return {"metadata": {"uid": "uid-n1"}}
        raise AssertionError(path)

    def post(self, path, body):
        assert path.endswith("/serviceaccounts/sublet-node/token") and body["spec"]["boundObjectRef"]["kind"] == "Node", path
        return {"status": {"token": "token-of-the-account"}}

    def pod(self, name):
        self.schedule()
        return copy.deepcopy(self.pod_objects.get(name))

    def pods(self):
        return copy.deepcopy(list(self.pod_objects.values()))

    def delete(self, path):
        folder, name = path.rsplit("/", 1)
        if folder.endswith("/pods"):
            self.delete_pod(name)
        else:
            (self.claim_objects if folder == claims.CLAIMS else self.templates).pop(name, None)


class Node:
    """The node of a stand-in."""

    name, env = "n1", {}

    def __init__(self, cluster):
        self.cluster, self.started, self.times, self.heard = cluster, {}, 0, ""
        self.start_driver()

    def jobs(self):
        self.cluster.schedule()
        for job in self.cluster.job_objects.values():
            job["launches"] += 1
        return copy.deepcopy(self.cluster.job_objects)

    def slices(self):
        return copy.deepcopy(self.cluster.slice_objects)

    def registrations(self):
        return self.times

    def said(self, name):
        return self.heard

    def is_ready(self):
        return True

    offers = is_ready

    def left(self):
        return ["dra/uid.json"] if self.cluster.job_objects else []

    def start_driver(self, token_file=None, env=()):
        self.times += 1
        step = dict(env).get("SUBLET_FAULT_KUBERNETES")
        if "the driver loses jobs" in self.cluster.wrong_ways and self.times > 1:
            for job in self.cluster.job_objects.values():
                job["id"] += "-anew"
        returns = 0 if "the driver ends well" in self.cluster.wrong_ways else -9
        child = types.SimpleNamespace(poll=lambda: returns if step else None, returncode=returns if step else None, send_signal=lambda how: None, token_file=token_file)
        self.started["dra"] = child
        return child

    def start_plugin(self):
        self.started["plugin"] = types.SimpleNamespace(poll=lambda: None)

    def start_one(self, name, *words, env=None):
        self.started[name] = words
        if name == "by-hand":
            self.cluster.job_objects[name] = {"name": name, "id": name, "mem_limit_bytes": 4 * GIB, "share_asked": 0.5, "processes": [], "launches": 0}

    def end_one(self, name, how=None):
        self.started.pop(name, None)
        if name == "by-hand":
            self.cluster.job_objects.pop(name, None)

    def restart_kubelet(self, away_s=0):
        self.times += 1
        if "the kubelet makes claims anew" in self.cluster.wrong_ways:
            for claim in self.cluster.claim_objects.values():
                claim["metadata"]["uid"] = str(uuid.uuid4())
