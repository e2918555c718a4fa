"""Pods that have parts of a device by claims, under servers from 1.34 on: what their API server says, and what the node's arbiter and the
device's own account say. What is wrong is named by judgements.py."""

import json
import pathlib
import signal
import time

import control_plane
import fleet
import judgements
import kubelets
from control_plane import ApiError
from kubelets import expect, same
from nodes import IMAGE
from trial import Failure, until

PACKAGING = pathlib.Path(__file__).resolve().parents[2] / "packaging/kubernetes"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
SHARE, SLOT, RESOURCE = "gpu-share", "gpu-slot", "sublet.dev/slot"
# Letters of a claim's name in the name of its job (kubernetes/src/claim.rs).
NAME_LETTERS = 40
# Where a debug build of the driver ends itself (kubernetes/src/shares.rs).
PREPARING, UNDOING = ("recorded", "registered", "noted", "written", "kept", "complete"), ("unlisted", "ended")
LOAD = json.dumps(kubelets.LOAD)


def requests(memory, sm):
    share = f', sm: "{sm}"' if sm is not None else ""
    return f"""devices:
  requests:
    - name: gpu
      exactly: {{deviceClassName: {SHARE}, capacity: {{requests: {{memory: {memory}{share}}}}}}}
"""


def indented(text, columns):
    return "".join(" " * columns + line + "\n" for line in text.splitlines())


def claim(name, memory, sm=None):
    return f"""apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
{indented(requests(memory, sm), 2)}"""


def template(name, memory, sm=None):
    return f"""apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {name}}}
spec:
  spec:
{indented(requests(memory, sm), 4)}"""


def pod(name, of):
    """A pod that uses its GPU for as long as it is left; `of` is how it comes by one. With a grace its claim is its own until it has ended."""
    resources, claims = "{claims: [{name: gpu}]}", f"  resourceClaims: [{{name: gpu, {of}}}]\n"
    if of.startswith("limits:"):
        resources, claims = f"{{{of}}}", ""
    return f"""apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  automountServiceAccountToken: false
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: {IMAGE}
      imagePullPolicy: Never
      command: {LOAD}
      resources: {resources}
{claims}"""


def pair(name, memory, sm=None):
    """A claim, and a pod of the same name that has it."""
    return [claim(name, memory, sm), pod(name, f"resourceClaimName: {name}")]


class Pods(kubelets.Pods):
    """What is asked of pods that have claims."""

    def kubectl(self, *words, given=None):
        done = self.site.kubectl(*words, given=given)
        if done.returncode:
            raise Failure(f"kubectl {' '.join(words)}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def apply(self, *objects):
        self.kubectl("apply", "-f", "-", given="---\n".join(objects))

    def note(self, text):
        self.site.transcript.say(text)

    def holds(self, found, what):
        """What was judged: nothing wrong is found."""
        if found:
            raise Failure(f"{what}: {'; '.join(found)}")
        self.note(f"{what}: holds")

    def comes(self, what, judge, patience=60):
        """Waits until nothing wrong is found."""
        last = []

        def right():
            last[:] = judge()
            return not last

        try:
            until(what, right, patience)
        except Failure as error:
            raise Failure(f"{error}: {'; '.join(last)}") from error
        self.note(f"{what}: holds")

    def claims(self):
        return self.client.get(CLAIMS)["items"]

    def claim_of(self, name):
        """The claim of a pod, by what its status or its own text says."""
        found = self.client.pod(name) or {}
        status = found.get("status") or {}
        of = [one.get("resourceClaimName") for one in [*(found.get("spec", {}).get("resourceClaims") or []), *(status.get("resourceClaimStatuses") or [])]]
        of += [(status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")]
        called = next((one for one in of if one), None)
        if not called:
            return None
        try:
            return self.client.get(f"{CLAIMS}/{called}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def the_claim_of(self, name):
        return until(f"pod {name} has a claim", lambda: self.claim_of(name))

    def job(self, name):
        """The job of a pod's claim, as its arbiter has it."""
        of = self.claim_of(name)
        given = judgements.parts(of) if of else []
        if not given:
            return None
        letters = [letter for letter in given[0].get("shareID", "") if letter.isalnum()]
        begins = f"{judgements.title(of)[:NAME_LETTERS]}-{''.join(letters[:8])}"
        return next((job for called, job in self.node(name).jobs().items() if called.startswith(begins)), None)

    def has(self, name, below, above, launches=True):
        """The pod works; what its claim was given is in force, by its arbiter and inside its container."""
        self.works(name, launches=launches)
        of = self.claim_of(name)
        job = self.job(name)
        found = judgements.in_force(of, job)
        self.site.lost += len(found)
        given = judgements.part(of)
        self.holds(found, f"{name} has {given['consumedCapacity']} of {given['device']} as share {given['shareID']}, in force as job {job and job['name']}")
        self.quota(name, below, above)

    def none_has_too_much(self):
        found = judgements.overcommitted(self.claims(), self.site.nodes[0].slices())
        self.site.wrong += found
        self.holds(found, "no device has more given away than it has")

    def remove(self, *names):
        """Takes pods and their claims away, and waits until nothing of them is left."""
        gone = [(name, self.job(name)) for name in names]
        for name in names:
            self.kubectl("delete", "pod", name, "--ignore-not-found")
            self.kubectl("delete", "resourceclaim", name, "--ignore-not-found")
        jobs = {job["name"] for _, job in gone if job}
        until(f"jobs of {', '.join(names)} are gone", lambda: not jobs & set(self.site.nodes[0].jobs()))

    def clear(self, patience=60):
        node = self.site.nodes[0]
        for one in self.client.pods():
            self.delete(one["metadata"]["name"])
        until("the pods are gone", lambda: not self.client.pods(), patience)
        for path in (CLAIMS, TEMPLATES):
            for one in self.client.get(path)["items"]:
                self.client.delete(f"{path}/{one['metadata']['name']}")
            until("the claims are gone", lambda path=path: not self.client.get(path)["items"], patience)
        self.nothing_left(node, patience)
        until("no record and no file of a share is left", lambda: not node.left(), patience)


def two(site, second=60):
    """Two pods that share the GPU, each by a claim; made where they are not there. Their parts add up to all of the time, unless the second one
    is to have less."""
    pods = Pods(site)
    if not pods.client.pod("a"):
        pods.apply(*pair("a", "30Gi", 40))
    of = pods.claim_of("b")
    if of and judgements.requests(of).get("sm") != str(second):
        pods.remove("b")
    if not pods.client.pod("b"):
        # A template is not changed: there may be one that says something else.
        pods.kubectl("delete", "resourceclaimtemplate", "b", "--ignore-not-found")
        pods.apply(template("b", "40500Mi", second), pod("b", "resourceClaimTemplateName: b"))
    for name in ("a", "b"):
        pods.works(name)
    return pods


def claims(site, metrics):
    """Two claims of 30Gi and 40500Mi share one device, each with a shareID of its own, inside quota and share."""
    pods = two(site)
    pods.kubectl("get", "resourceslices", "-o", "jsonpath={.items[*].spec.devices}")
    pods.kubectl("get", "resourceclaims", "-o", 'jsonpath={range .items[*]}{.metadata.name}{" "}{.status.allocation.devices.results}{"\\n"}{end}')
    found = judgements.shared([pods.the_claim_of(name) for name in ("a", "b")], site.nodes[0].slices())
    pods.holds(found, "both are parts of one device, rounded as its policy says, each with its own shareID")
    pods.has("a", 29, 31)
    pods.has("b", 39, 41)
    pods.none_has_too_much()
    pods.note(kubelets.measured(site, pods, metrics, "k8s_claims_share_error", ("a", "b"), 0.4))


def waits(site, metrics):
    """A claim whose memory, and one whose time, is not free: their pods wait with the reason, and run when another one is gone."""
    pods = two(site)
    pods.apply(*pair("c", "20Gi"), *pair("d", "1Gi", 10))
    for name in ("c", "d"):
        said = until(f"{name} has a reason", lambda name=name: fleet.message(pods.client.pod(name)))
        pods.holds(judgements.waiting(pods.client.pod(name), pods.the_claim_of(name)), f"{name} waits ({said})")
        until(f"an event of {name} says so", lambda name=name: judgements.NO_DEVICE in pods.events(name))
    pods.kubectl("get", "pods")
    pods.kubectl("delete", "pod", "b")
    begun = time.monotonic()
    for name in ("c", "d"):
        until(f"{name} is on a node", lambda name=name: pods.client.pod(name)["spec"].get("nodeName"), 90)
        pods.note(f"{name} is on a node {time.monotonic() - begun:.1f} s after b is gone")
    pods.works("c", launches=False)
    pods.has("d", 0.5, 2)
    pods.none_has_too_much()
    # With none of the time promised c has what the others leave: a program in it would wait long.
    pods.remove("a", "d")
    pods.has("c", 19, 21)
    pods.remove("c")


def extended(site, metrics):
    """A pod that names a resource only has a share by the default of the device's policy."""
    pods = Pods(site)
    pods.apply(pod("ext", f'limits: {{{RESOURCE}: "1"}}'))
    pods.works("ext", launches=False)
    of = pods.the_claim_of("ext")
    pods.kubectl("get", "pod", "ext", "-o", "jsonpath={.status.extendedResourceClaimStatus}")
    pods.kubectl("get", "resourceclaim", judgements.title(of), "-o", "jsonpath={.status.allocation.devices.results}")
    found = judgements.extended(pods.client.pod("ext"), of, SLOT, site.nodes[0].slices())
    pods.holds(found, "the scheduler has made a claim of the resource")
    pods.has("ext", 0.5, 2, launches=False)
    pods.none_has_too_much()
    pods.remove("ext")
    until("its claim is gone", lambda: not [one for one in pods.claims() if judgements.title(one) == judgements.title(of)])


def conditions(site, metrics):
    """A claim's status says that its share is in force, or why the node has refused it, and follows when that changes."""
    pods, node = two(site), site.nodes[0]
    shown = "jsonpath={.status.devices}"
    for name in ("a", "b"):
        pods.comes(f"the status of {name}'s claim says that its share is in force", lambda name=name: judgements.reported(pods.the_claim_of(name), node.jobs()))
        pods.kubectl("get", "resourceclaim", judgements.title(pods.claim_of(name)), "-o", shown)
    pods.remove("b")
    # What the scheduler does not know of: a job that was started on the node by hand.
    words = ["--sim", "--name", "by-hand", "--mem", "4GiB", "--share", "0.5", "--", site.bin / "load", *kubelets.LOAD[1:]]
    node.start_one("by-hand", "run", *words)
    try:
        until("a job was started by hand", lambda: "by-hand" in node.jobs())
        pods.note("beside a, a job with half of the time was started on the node by hand")
        pods.apply(*pair("e", "2Gi", 30))
        pods.comes("the status of e's claim says why the node has refused it", lambda: judgements.refused(pods.the_claim_of("e"), "above 1"), 90)
        pods.kubectl("get", "resourceclaim", "e", "-o", shown)
        until("an event of e says so", lambda: "above 1" in pods.events("e"), 30)
    finally:
        node.end_one("by-hand")
    pods.note("that job has ended")
    pods.works("e")
    pods.comes("the status of e's claim says that its share is in force", lambda: judgements.reported(pods.the_claim_of("e"), node.jobs()))
    pods.kubectl("get", "resourceclaim", "e", "-o", shown)
    pods.remove("e")


def registered(node, since, what):
    until(f"the kubelet has registered {what}", lambda: node.registrations() > since, 90)


def driver_anew(node, **more):
    """Kills the driver and starts another one."""
    since = node.registrations()
    node.end_one("dra", signal.SIGKILL)
    child = node.start_driver(**more)
    registered(node, since, "the driver that was started anew")
    return child


def killed_at(site, pods, step):
    """The driver ends itself at that step of a claim's preparing or undoing."""
    node, name = site.nodes[0], f"at-{step}"
    if step in UNDOING:
        pods.apply(*pair(name, "2Gi", 10))
        pods.works(name, launches=False)
    child = driver_anew(node, env={"SUBLET_FAULT_KUBERNETES": step})
    if step in PREPARING:
        pods.apply(*pair(name, "2Gi", 10))
    else:
        pods.kubectl("delete", "pod", name, "--wait=false")
    until(f"the driver has ended at `{step}`", lambda: child.poll() is not None)
    expect(child.returncode == -signal.SIGKILL, f"the driver has ended with {child.returncode}: {node.said('dra')[-300:]}")
    driver_anew(node)
    if step in PREPARING:
        pods.has(name, 1, 3, launches=False)
        jobs = [called for called in node.jobs() if called.startswith(f"{name}-")]
        expect(len(jobs) == 1, f"{name} has the jobs {jobs}")
    pods.remove(name)


def restart(site, metrics):
    """The driver is killed between and during calls of the kubelet, and the kubelet is: claims and jobs stay, and nothing is left over."""
    # Time is left to promise to those that come: who is promised none waits long beside two that
    # use all they can get.
    pods, node = two(site, 20), site.nodes[0]
    before = {name: pods.works(name) for name in ("a", "b")}
    objects = [pods.the_claim_of(name) for name in before]
    driver_anew(node)
    same(site, pods, before, "after the driver was killed")
    pods.note("the driver was killed and started: both go on")
    # It hangs while it is asked, and is killed there.
    node.started["dra"].send_signal(signal.SIGSTOP)
    pods.apply(*pair("hung", "2Gi", 10))
    until("hung is on a node", lambda: pods.client.pod("hung")["spec"].get("nodeName"))
    time.sleep(2)
    driver_anew(node)
    pods.has("hung", 1, 3, launches=False)
    pods.remove("hung")
    # Release builds do not end themselves.
    steps = [] if site.release else ["registered", "complete", "ended"] if site.quick else [*PREPARING, *UNDOING]
    for step in steps:
        killed_at(site, pods, step)
        same(site, pods, before, f"after the driver was killed at `{step}`")
    for away in (0, 3):
        since = node.registrations()
        node.restart_kubelet(away)
        registered(node, since, "the driver with a kubelet that was started anew")
        until("the node is ready", node.is_ready)
        same(site, pods, before, "after a restart of the kubelet")
        pods.apply(*pair(f"new-{away}", "2Gi", 10))
        pods.has(f"new-{away}", 1, 3, launches=False)
        pods.remove(f"new-{away}")
    pods.holds(judgements.stayed(objects, pods.claims()), "both claims have the parts and shareIDs of before")
    pods.clear()
    pods.note("all pods and claims are deleted: no job, no process, no record and no CDI file is left")


def account(site, metrics):
    """The driver does its work with what packaging/kubernetes/base/access.yaml lets it do, and may do nothing else."""
    pods, node, plane = Pods(site), site.nodes[0], site.plane
    for name in ("namespace.yaml", "access.yaml"):
        pods.kubectl("apply", "-f", "-", given=(PACKAGING / "base" / name).read_text())
    uid = pods.client.get(f"/api/v1/nodes/{node.name}")["metadata"]["uid"]
    # As the token of a pod on that node is: the API server knows which one it is.
    bound = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": uid}
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600, "boundObjectRef": bound}}
    token = pods.client.post("/api/v1/namespaces/sublet-system/serviceaccounts/sublet-node/token", asked)["status"]["token"]
    file = plane.dir / "account-token"
    plane.write_private(file, token + "\n")
    try:
        control_plane.Client(plane.certificates / "ca.crt", token).get("/api/v1/secrets")
    except ApiError as error:
        expect(error.status == 403, f"asked for secrets with that account the API server says {error}")
    else:
        raise Failure("the account may read secrets")
    heard = len(node.said("dra"))
    driver_anew(node, token_file=file)
    pods.apply(*pair("own", "2Gi", 10))
    pods.has("own", 1, 3)
    pods.comes("the status of its claim is written by that account", lambda: judgements.reported(pods.the_claim_of("own"), node.jobs()))
    said = node.said("dra")[heard:]
    expect("answered 403" not in said, f"the account may not do all: {said[-500:]}")
    pods.remove("own")
    driver_anew(node)


def device_plugin(site, metrics):
    """On the same node the device plugin in place of the driver, with CDI devices."""
    node = site.nodes[0]
    Pods(site).clear()
    node.end_one("dra")
    node.start_plugin()
    until("the node offers units", node.offers)
    kubelets.shares(site, metrics)
    kubelets.Pods(site).clear()
    node.end_one("plugin")
    until("no record and no file of a share is left", lambda: not node.left())
    node.start_driver()


CASES = [claims, waits, extended, conditions, restart, account, device_plugin]
