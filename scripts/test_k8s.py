#!/usr/bin/env python3
"""Tests of scripts/k8s: which servers it takes, what its judgements accept and refuse, and its cases of claims on a stand-in.

    python3 scripts/test_k8s.py

Needs no build, no root and no server: servers are shell scripts, and the cluster is a few lines that do what Kubernetes 1.36 did when it was
tried (kubernetes/data/claims.recorded.json), or something wrong.
"""

import contextlib
import copy
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts/bench", "scripts/containerd.d", "scripts/k8s.d")]
import claims  # noqa: E402
import fleet  # noqa: E402
import judgements  # noqa: E402
import kubelets  # noqa: E402
import newer  # noqa: E402
import place  # noqa: E402
import servers  # noqa: E402
import sharing  # noqa: E402
import trial  # noqa: E402
from control_plane import ApiError  # noqa: E402
from stand_in import SLICE, Cluster, Node  # noqa: E402
from transcript import WIDTH, Transcript  # noqa: E402
from trial import Failure, Skipped  # noqa: E402

RECORDED = ROOT / "kubernetes/data/claims.recorded.json"
GIB = 1 << 30


class Directory(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.directory = pathlib.Path(self.temporary.name)
        self.addCleanup(self.temporary.cleanup)


class TermTest(Directory):
    """SIGTERM at a trial."""

    def test_what_was_started_is_ended_also_where_it_comes_twice(self):
        script = f"""
import pathlib, subprocess, sys, time
sys.path.insert(0, {str(ROOT / "scripts/bench")!r})
import trial
trial.ends_by_term()
child = subprocess.Popen(["sleep", "600"])
try:
    pathlib.Path("started").write_text(str(child.pid))
    time.sleep(600)
finally:
    pathlib.Path("ending").touch()
    trial.until("it comes again", lambda: pathlib.Path("again").exists())
    # What ends the rest hears it.
    assert subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode == -15
    child.kill()
    child.wait()
    pathlib.Path("ended").touch()
"""
        done = subprocess.Popen([sys.executable, "-c", script], cwd=self.directory)
        self.addCleanup(done.kill)
        there = lambda name: (self.directory / name).exists()
        trial.until("it runs", lambda: there("started") and (self.directory / "started").read_text())
        done.terminate()
        trial.until("it ends", lambda: there("ending"))
        done.terminate()
        (self.directory / "again").touch()
        self.assertEqual(done.wait(60), 143)
        self.assertTrue(there("ended"))
        self.assertFalse(trial.alive(int((self.directory / "started").read_text())))

    def test_trials_take_it(self):
        for name in ("k8s", "containerd", "slurm", "ray"):
            main = (ROOT / "scripts" / name).read_text().split("def main():")[1]
            self.assertLess(main.index("    ends_by_term()\n"), main.index("run(options)"), name)


class ServersTest(Directory):
    """--servers: a folder is taken, or refused with what was found."""

    def program(self, name, script):
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def release(self, version, **others):
        for name in servers.GIVEN:
            self.program(name, f"echo 'Kubernetes {others.get(name.replace('-', '_'), version)}'")

    def refused(self, pattern):
        with self.assertRaisesRegex(servers.Refused, pattern) as caught:
            servers.given(self.directory)
        self.assertNotIn("\n", str(caught.exception))

    def test_servers_of_one_release_are_taken(self):
        self.release("v1.36.4")
        given = servers.given(self.directory)
        self.assertEqual((given.version, given.minor, given.kubectl), ("v1.36.4", 36, False))
        self.assertIn("kubectl", given.root.packages)
        self.program("kubectl", """echo '{"clientVersion": {"gitVersion": "v1.36.4"}}'""")
        given = servers.given(self.directory)
        self.assertTrue(given.kubectl)
        self.assertNotIn("kubectl", given.root.packages)
        self.release("v1.34.0-rc.1+0123abc")
        self.program("kubectl", """echo '{"clientVersion": {"gitVersion": "v1.34.0-rc.1+0123abc"}}'""")
        self.assertEqual(servers.given(self.directory).minor, 34)

    def test_a_folder_without_servers_is_refused(self):
        self.refused("has no kube-apiserver, kube-scheduler, kube-controller-manager, kubelet: give the folder")
        self.release("v1.36.4")
        (self.directory / "kubelet").unlink()
        self.refused("has no kubelet: give the folder")
        with self.assertRaisesRegex(servers.Refused, "there is no folder .*/none: give the folder"):
            servers.given(self.directory / "none")
        with self.assertRaisesRegex(servers.Refused, "there is no folder"):
            servers.given(self.directory / "kube-apiserver")

    def test_several_versions_are_refused_with_what_was_found(self):
        self.release("v1.36.4", kubelet="v1.35.0")
        self.refused(r"several versions \(kube-apiserver v1.36.4, .*kubelet v1.35.0\): give the folder")
        self.release("v1.36.4")
        self.program("kubectl", """echo '{"clientVersion": {"gitVersion": "v1.20.2"}}'""")
        self.refused("several versions .*kubectl v1.20.2")

    def test_servers_before_resource_claims_are_refused(self):
        for version in ("v1.20.2", "v1.33.9", "v0.99.0"):
            self.release(version)
            self.refused(f"has Kubernetes {version}: give .* from 1.34 on, or leave --servers out")

    def test_what_is_no_server_is_refused_with_what_it_says(self):
        self.release("v1.36.4")
        for script, words in [
            ("echo hello; echo you", "says `hello you`"),
            ("echo 'Kubernetes v1.36.4'; exit 3", "exit status 3"),
            ("echo 'flag provided but not defined' >&2; exit 2", "says `flag provided but not defined`"),
            (r"printf '\377\376\000'", "is no server of Kubernetes"),
            ("echo 'Kubernetes v1'", "says `Kubernetes v1`"),
            ("exec yes", "is no server of Kubernetes: asked for --version it says `y y y"),
        ]:
            self.program("kubelet", script)
            self.refused(words)
        (self.directory / "kubelet").write_bytes(b"\x7fELF of another machine")
        self.refused("kubelet does not run: Exec format error")
        (self.directory / "kubelet").chmod(0o644)
        self.refused("kubelet does not run: Permission denied")
        self.release("v1.36.4")
        for text in ("no JSON", "[]", '{"clientVersion": {"gitVersion": 7}}'):
            self.program("kubectl", f"echo '{text}'")
            self.refused("kubectl is no kubectl")

    def test_one_that_does_not_answer_is_refused(self):
        self.release("v1.36.4")
        self.program("kubelet", f"echo $$ > {self.directory}/pid\nsleep 600 & echo $! >> {self.directory}/pid\nwait")
        with unittest.mock.patch.object(servers, "ANSWER", 5):
            self.refused("kubelet does not answer to --version within 5 s")
        pids = [int(pid) for pid in (self.directory / "pid").read_text().split()]
        self.assertEqual(len(pids), 2)
        trial.until("all of it has ended", lambda: not any(trial.alive(pid) for pid in pids), 10)

    def test_the_script_says_it_in_one_line_and_ends_with_2(self):
        folder, none = str(self.directory), str(self.directory / "none")
        for words in (["--servers", folder], ["--servers", none], ["--transcript", folder], ["--servers", folder, "--transcript", folder],
                      ["--servers", folder, "--transcript", f"{none}/x"]):
            done = subprocess.run([ROOT / "scripts/k8s", *words], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertRegex(done.stderr.splitlines()[-1], "^k8s: (--servers: |error: --transcript: )")

    def test_a_root_with_another_containerd_or_an_old_etcd_is_none(self):
        (self.directory / "etc").mkdir()
        for versions, said in [
            ({"containerd": "2.2.1-1", "etcd-server": "3.5.16-4"}, "containerd 2.2.1-1 is none of 2.1"),
            ({"containerd": "2.1.9+ds1-5", "etcd-server": "3.4.23-4"}, "etcd 3.4.23-4 is older than 3.5"),
            ({"containerd": "2.1.9+ds1-5", "etcd-server": "3.5.16-4"}, None),
            ({"containerd": "2.1.9+ds1-5", "etcd-server": "3.10.0-1"}, None),
        ]:
            with unittest.mock.patch.object(servers.debian_root, "unpack", return_value=versions):
                if said:
                    with self.assertRaisesRegex(Skipped, said):
                        servers.unpack("tar", self.directory, servers.ROOT_OF_GIVEN)
                else:
                    self.assertEqual(servers.unpack("tar", self.directory, servers.ROOT_OF_GIVEN), versions)


class SettingsTest(Directory):
    """What newer releases are started with."""

    def given(self, minor):
        return servers.Given(self.directory / "given", f"v1.{minor}.0", False)

    def plane(self, minor):
        return newer.ControlPlane(self.given(minor), self.directory, self.directory / "root", self.directory / "sublet", {})

    def test_what_1_36_has_switched_on_is_asked_for_before(self):
        self.assertEqual(self.plane(36).gates(), [])
        (self.directory / "log").rmdir()
        self.assertEqual(self.plane(35).gates(), ["--feature-gates=DRAConsumableCapacity=true,DRAExtendedResource=true"])

    def test_a_server_that_ends_says_why(self):
        plane = self.plane(36)
        plane.start_one("scheduler", "sh", "-c", "echo 'unknown flag: --other' >&2; exit 1", env={"PATH": os.environ["PATH"]})
        with self.assertRaisesRegex(Failure, "sh has ended: unknown flag: --other"):
            plane.serves("scheduler", 1)

    def test_a_scheduler_of_1_36_is_asked_for_nothing_of_before(self):
        plane = self.plane(36)
        self.assertEqual(plane.scheduler_flags(), ["--bind-address=127.0.0.1", "--secure-port=10259"])
        config = plane.scheduler_config()
        self.assertEqual((config["apiVersion"], "extenders" in config), ("kubescheduler.config.k8s.io/v1", False))

    def test_a_node_has_the_settings_that_1_36_ran_with(self):
        plane = self.plane(35)
        site = types.SimpleNamespace(dir=self.directory, plain={}, plane=plane)
        plane.kubeconfig.write_text("{}")
        node = newer.Node(site, 1)
        node.write_config()
        kubelet = json.loads((node.dir / "kubelet.json").read_text())
        wanted = {
            "failCgroupV1": False, "containerRuntimeEndpoint": "unix:///run/containerd.sock", "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{node.group}",
            "enforceNodeAllocatable": [], "localStorageCapacityIsolation": False,
        }
        self.assertEqual({name: kubelet[name] for name in wanted}, wanted)
        self.assertEqual(kubelet["featureGates"], {"KubeletInUserNamespace": True, "DRAConsumableCapacity": True, "DRAExtendedResource": True})
        containerd = (node.dir / "containerd.toml").read_text()
        for line in ("version = 3", "restrict_oom_score_adj = true", "enable_cdi = true", f"cdi_spec_dirs = ['{node.dir}/cdi']", f"sandbox = '{place.PAUSE}'",
                     "bin_dirs = ['/usr/lib/cni']", f"conf_dir = '{node.dir}/cni'", "address = '/run/containerd.sock'"):
            self.assertIn(line, containerd)
        self.assertEqual(node.env["SUBLET_SIM_CAPACITY"], "80GiB")

    def test_groups_of_version_2_get_the_controllers_that_are_missing(self):
        (self.directory / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids misc\n")
        control = self.directory / "cgroup.subtree_control"
        control.write_text("cpu io memory pids\n")
        self.assertEqual(newer.make_unified(self.directory, "pods"), ["cpuset", "hugetlb"])
        self.assertEqual(control.read_text(), "+cpuset +hugetlb")
        self.assertTrue((self.directory / "pods").is_dir())
        control.write_text("cpuset cpu io memory hugetlb pids\n")
        self.assertEqual(newer.make_unified(self.directory, "more"), [])
        control.unlink()
        control.symlink_to("/proc/self/cgroup")
        with self.assertRaisesRegex(Skipped, "a kubelet needs the controllers cpu, .* cannot be switched on"):
            newer.make_unified(self.directory, "none")


class QuantityTest(unittest.TestCase):
    def test_amounts_are_exact(self):
        for text, value in [("30Gi", 30 * GIB), ("40500Mi", 40500 << 20), ("100", 100), ("0", 0), ("1.5Gi", 3 * GIB // 2), ("500m", 0.5), ("2k", 2000)]:
            self.assertEqual(judgements.quantity(text), value)
        for text in ("", "-1Gi", "lots", "1 Gi", "NaN", "1Gi\n", "Gi", "1e400", None):
            with self.assertRaises(judgements.Unreadable):
                judgements.quantity(text)

    def test_a_request_is_rounded_as_the_policy_says(self):
        memory = json.loads(SLICE.read_text())["devices"][0]["capacity"]["memory"]
        for asked, value in [("30Gi", 30), ("40500Mi", 40), ("40960Mi", 40), ("40961Mi", 41), ("1Mi", 1), ("1", 1), (None, 1)]:
            self.assertEqual(judgements.consumed(memory, asked), value * GIB, asked)
        self.assertEqual(judgements.consumed({"value": "80Gi"}, None), 80 * GIB)
        self.assertEqual(judgements.consumed({"value": "80Gi"}, "3Gi"), 3 * GIB)
        odd = {"value": "80Gi", "requestPolicy": {"default": "1Gi", "validRange": {"min": "3Gi", "step": "2Gi"}}}
        self.assertEqual(judgements.consumed(odd, "4Gi"), 5 * GIB)


class JudgementsTest(unittest.TestCase):
    """What 1.36 wrote is right, and what differs from it is named."""

    def setUp(self):
        self.a, self.b, self.c = json.loads(RECORDED.read_text())["items"]
        spec = json.loads(SLICE.read_text())
        spec["devices"][0]["name"], spec["pool"]["name"] = "gpu-0", "fake1"
        self.slices = [{"spec": spec}]

    def given(self, claim):
        return claim["status"]["allocation"]["devices"]["results"][0]

    def names(self, found, words):
        self.assertTrue(any(words in text for text in found), f"no `{words}` in {found}")

    def test_the_recorded_claims_share_a_device(self):
        self.assertEqual(judgements.shared([self.a, self.b], self.slices), [])
        self.assertEqual(judgements.overcommitted([self.a, self.b, self.c], self.slices), [])

    def test_claims_that_do_not_share_as_they_should_are_named(self):
        def wrong(change, words):
            kept = copy.deepcopy((self.a, self.b, self.slices))
            change()
            self.names(judgements.shared([self.a, self.b], self.slices), words)
            self.a, self.b, self.slices = kept

        device = lambda: self.slices[0]["spec"]["devices"][0]
        wrong(lambda: self.given(self.b).update(shareID=self.given(self.a)["shareID"]), "not each its own")
        wrong(lambda: self.given(self.b).pop("shareID"), "which is no UUID")
        wrong(lambda: self.given(self.b).update(shareID="share-1"), "which is no UUID")
        wrong(lambda: self.given(self.b)["consumedCapacity"].update(memory="40500Mi"), "takes 40500Mi of memory for 40500Mi")
        wrong(lambda: self.given(self.b)["consumedCapacity"].update(memory="39Gi"), "takes 39Gi of memory")
        wrong(lambda: self.given(self.a)["consumedCapacity"].update(sm="0"), "takes 0 of sm for 40")
        wrong(lambda: self.given(self.a)["consumedCapacity"].pop("sm"), "takes no sm")
        wrong(lambda: self.given(self.a).pop("consumedCapacity"), "takes no memory")
        wrong(lambda: self.given(self.a)["consumedCapacity"].update(memory="thirty"), "`thirty` is no amount")
        wrong(lambda: self.given(self.a).update(device="gpu-1"), "no slice has device gpu-1")
        wrong(lambda: device().pop("allowMultipleAllocations"), "is not to be shared")
        wrong(lambda: device()["capacity"]["memory"].update(value="64Gi"), "are given away, and it has 64Gi")
        wrong(lambda: device()["capacity"].pop("sm"), "asks for sm, which its device does not have")
        wrong(lambda: self.a["status"]["allocation"]["devices"]["results"].append(self.given(self.a)), "was given 2 parts")
        wrong(lambda: self.given(self.a).update(driver="gpu.example.com"), "was given 0 parts")
        wrong(lambda: self.b["status"].pop("reservedFor"), "is reserved for 0 users")
        wrong(lambda: self.slices.clear(), "no slice has device gpu-0")
        self.names(judgements.shared([self.a, self.c], self.slices), "claim c was given 0 parts")

        def another():
            self.slices[0]["spec"]["devices"].append({**device(), "name": "gpu-1"})
            self.given(self.b).update(device="gpu-1")

        wrong(another, "they are on 2 devices: fake1/gpu-0, fake1/gpu-1")

    def pod(self, message="0/1 nodes are available: 1 cannot allocate all claims. preemption: 0/1 nodes are available", **status):
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        return {"metadata": {"name": "c", "uid": "uid-c"}, "spec": {}, "status": {"phase": "Pending", "conditions": [condition], **status}}

    def test_a_pod_waits_with_the_scheduler_s_reason(self):
        self.assertEqual(judgements.waiting(self.pod(), self.c), [])
        self.names(judgements.waiting(self.pod(), self.a), "claim a was given a part")
        self.names(judgements.waiting(self.pod("0/1 nodes are available: 1 Insufficient cpu"), self.c), "does not say")
        self.names(judgements.waiting(self.pod(conditions=[]), self.c), "does not say")
        self.names(judgements.waiting(self.pod(phase="Running"), self.c), "is Running")
        self.names(judgements.waiting({**self.pod(), "spec": {"nodeName": "n1"}}, self.c), "is on n1")

    def report(self, claim, **condition):
        given = self.given(claim)
        ready = {"type": "Ready", "status": "True", "reason": "Prepared", "message": "quota and share are in force", "lastTransitionTime": "2026-11-26T10:00:00Z"}
        memory = int(judgements.quantity(given["consumedCapacity"]["memory"]))
        data = {"job": "a-e59bb7b6", "uuid": "GPU-1", "memoryBytes": memory, "share": float(given["consumedCapacity"]["sm"]) / 100}
        keys = {key: given[key] for key in ("driver", "pool", "device", "shareID")}
        claim["status"]["devices"] = [{**keys, "conditions": [{**ready, **condition}], "data": data}]
        return claim["status"]["devices"][0]

    def test_the_driver_s_report_is_held_against_claim_and_arbiter(self):
        jobs = {"a-e59bb7b6": {"mem_limit_bytes": 30 * GIB, "share_asked": 0.4}}
        self.report(self.a)
        self.assertEqual(judgements.reported(self.a, jobs), [])
        for change, words in [
            (lambda entry: entry.update(shareID=str(uuid.uuid4())), "has 0 entries for share"),
            (lambda entry: entry.pop("shareID"), "has 0 entries for share"),
            (lambda entry: entry.update(pool="n2"), "has 0 entries for share"),
            (lambda entry: entry.pop("conditions"), "is not ready: None"),
            (lambda entry: entry["conditions"][0].update(status="False", reason="Refused", message="no"), "is not ready: False Refused no"),
            (lambda entry: entry["conditions"].append(entry["conditions"][0]), "is not ready: None"),
            (lambda entry: entry["conditions"][0].pop("lastTransitionTime"), "says not since when"),
            (lambda entry: entry["data"].update(memoryBytes=1), "says 1 bytes"),
            (lambda entry: entry["data"].update(share=0.5), "a share of 0.5"),
            (lambda entry: entry["data"].update(job="another"), "the arbiter has no job"),
            (lambda entry: entry.pop("data"), "says None bytes"),
        ]:
            change(self.report(self.a))
            self.names(judgements.reported(self.a, jobs), words)
        self.report(self.a)
        self.names(judgements.reported(self.a, {"a-e59bb7b6": {"mem_limit_bytes": 31 * GIB, "share_asked": 0.4}}), "in force, and not")
        self.names(judgements.reported(self.a, {"a-e59bb7b6": {"mem_limit_bytes": 30 * GIB, "share_asked": None}}), "in force, and not")
        self.a["status"]["devices"] *= 2
        self.names(judgements.reported(self.a, jobs), "has 2 entries for share")
        del self.a["status"]["devices"]
        self.names(judgements.reported(self.a, jobs), "has 0 entries for share")
        self.names(judgements.reported(self.c, jobs), "was given 0 parts")
        # No promise of time is none in force.
        entry = self.report(self.b)
        entry["data"]["job"] = "b"
        self.assertEqual(judgements.reported(self.b, {"b": {"mem_limit_bytes": 40 * GIB, "share_asked": None}}), [])

    def test_a_refusal_is_one_with_its_reason(self):
        self.report(self.a, status="False", reason="Refused", message="the node's arbiter refused the job: shares would be above 1")
        self.assertEqual(judgements.refused(self.a, "above 1"), [])
        self.names(judgements.refused(self.a, "no memory"), "does not say `no memory`")
        self.report(self.a)
        self.names(judgements.refused(self.a, "above 1"), "True Prepared")
        self.names(judgements.refused(self.c, "above 1"), "was given nothing")
        self.names(judgements.refused(self.b, "above 1"), "has 0 entries")

    def of_extended(self):
        claim = copy.deepcopy(self.b)
        claim["metadata"].update(name="ext-extended-resources-x1", annotations={judgements.OF_EXTENDED: "true"})
        claim["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "ext", "uid": "uid-ext", "controller": True}]
        exactly = {"deviceClassName": "gpu-slot", "allocationMode": "ExactCount", "count": 1}
        claim["spec"]["devices"]["requests"] = [{"name": "container-0-request-0", "exactly": exactly}]
        self.given(claim).update(request="container-0-request-0", consumedCapacity={"memory": "1Gi", "sm": "0"})
        pod = {"metadata": {"name": "ext", "uid": "uid-ext"}, "status": {"extendedResourceClaimStatus": {"resourceClaimName": claim["metadata"]["name"]}}}
        return pod, claim

    def test_an_extended_resource_is_a_claim_of_the_policy_s_default(self):
        self.assertEqual(judgements.extended(*self.of_extended(), "gpu-slot", self.slices), [])
        for change, words in [
            (lambda pod, claim: self.given(claim)["consumedCapacity"].update(memory="80Gi"), "takes 80Gi of memory for no wish"),
            (lambda pod, claim: pod["status"].clear(), "does not name claim"),
            (lambda pod, claim: claim["metadata"].pop("annotations"), "is not marked"),
            (lambda pod, claim: claim["metadata"].pop("ownerReferences"), "is not the pod's"),
            (lambda pod, claim: claim["spec"]["devices"]["requests"][0]["exactly"].update(deviceClassName="gpu-share"), "asks for ['gpu-share']"),
            (lambda pod, claim: claim["status"].clear(), "was given 0 parts"),
        ]:
            pod, claim = self.of_extended()
            change(pod, claim)
            self.names(judgements.extended(pod, claim, "gpu-slot", self.slices), words)

    def test_claims_that_stayed_have_the_same_parts(self):
        after = copy.deepcopy([self.b, self.a, self.c])
        self.assertEqual(judgements.stayed([self.a, self.b], after), [])
        self.given(after[0])["shareID"] = str(uuid.uuid4())
        self.names(judgements.stayed([self.a, self.b], after), "claim b-gpu-xgb5l has other parts")
        after[1]["metadata"]["uid"] = "another"
        self.names(judgements.stayed([self.a, self.b], after), "claim a is gone, or was made anew")


class CasesTest(Directory):
    """The cases of claims on the stand-in: they hold where it does what it should, and fail where it does not."""

    def setUp(self):
        super().setUp()
        quick = lambda what, holds, patience=60.0: trial.until(what, holds, min(patience, 0.3))
        for module in (claims, kubelets):
            patch = unittest.mock.patch.object(module, "until", quick)
            patch.start()
            self.addCleanup(patch.stop)
        for target, name, value in [(claims.time, "sleep", lambda seconds: None), (kubelets, "share_of", self.share_of)]:
            patch = unittest.mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.got = 0.4

    def share_of(self, site, pods, names, seconds):
        return self.got, 1.0

    def site(self, wrong=()):
        cluster = Cluster(wrong)
        plane = types.SimpleNamespace(client=cluster, dir=self.directory, certificates=self.directory, write_private=lambda path, text: path.write_text(text))
        site = types.SimpleNamespace(
            plane=plane, kubectl=cluster.kubectl, quick=False, release=False, bin=pathlib.Path("/bin"), transcript=Transcript(),
            wrong=[], lost=0, seen=set(), cluster=cluster,
        )
        site.nodes = [Node(cluster)]
        site.transcript.case("a case", "")
        return site

    def run_case(self, case, wrong=()):
        site, metrics = self.site(wrong), []
        with contextlib.redirect_stdout(io.StringIO()):
            case(site, metrics)
        return site, metrics

    def fails(self, case, wrong, words):
        with self.assertRaisesRegex(Failure, words):
            self.run_case(case, wrong)

    def test_two_claims_share_a_device(self):
        site, metrics = self.run_case(claims.claims)
        self.assertEqual([(row["name"], row["got"], row["wanted"]) for row in metrics], [("k8s_claims_share_error", 0.4, 0.4)])
        self.assertEqual((site.wrong, site.lost), ([], 0))
        given = [judgements.part(one) for one in site.cluster.claim_objects.values()]
        self.assertEqual([one["consumedCapacity"] for one in given], [{"memory": "30Gi", "sm": "40"}, {"memory": "40Gi", "sm": "60"}])
        for wrong, words in [("one shareID", "not each its own"), ("no rounding", "takes 40500Mi of memory"), ("more memory", "in force, and not"), ("no quota", "31 GiB in a: 0")]:
            self.fails(claims.claims, wrong, words)
        self.got = 0.5
        self.fails(claims.claims, (), "0.500 instead of 0.4")

    def test_a_third_and_a_fourth_claim_wait(self):
        site, _ = self.run_case(claims.waits)
        self.assertEqual((site.cluster.pod_objects, site.cluster.job_objects), ({}, {}))
        self.fails(claims.waits, "overcommits", "c has a reason: not within")
        self.fails(claims.waits, "no reason", "does not say `cannot allocate all claims`")
        self.fails(claims.waits, "a job stays", "d uses the GPU: not within")

    def test_an_extended_resource_has_a_share(self):
        site, _ = self.run_case(claims.extended)
        self.assertEqual(site.cluster.claim_objects, {})
        self.fails(claims.extended, "more memory", "in force, and not")

    def test_conditions_follow(self):
        site, _ = self.run_case(claims.conditions)
        self.assertNotIn("by-hand", site.nodes[0].started)
        self.fails(claims.conditions, "no report", "has 0 entries for share")

    def test_restarts_leave_claims_and_nothing_else(self):
        site, _ = self.run_case(claims.restart)
        self.assertEqual((site.cluster.pod_objects, site.cluster.claim_objects, site.cluster.job_objects), ({}, {}, {}))
        # One at first, one each time that it was killed, two for each step; the kubelet's two.
        steps = len(claims.PREPARING) + len(claims.UNDOING)
        self.assertEqual(site.nodes[0].times, 1 + 2 + 2 * steps + 2)
        self.fails(claims.restart, "the driver loses jobs", "after the driver was killed: a is not what it was")
        self.fails(claims.restart, "the driver ends well", "the driver has ended with 0")
        self.fails(claims.restart, "the kubelet makes claims anew", "is gone, or was made anew")
        self.fails(claims.restart, "a job stays", "jobs of hung are gone: not within")

    def test_the_steps_are_those_of_the_driver(self):
        text = (ROOT / "kubernetes/src/shares.rs").read_text()
        listed = text.split("pub const STEPS")[1].split("[", 2)[2].split("]")[0]
        self.assertEqual(re.findall(r'"(\w+)"', listed), [*claims.PREPARING, *claims.UNDOING])
        self.assertIn(f"const NAME_CHARS: usize = {claims.NAME_LETTERS};", (ROOT / "kubernetes/src/claim.rs").read_text())

    def test_the_driver_has_the_account_of_its_manifest(self):
        def asked(error):
            return unittest.mock.patch.object(claims.control_plane, "Client", lambda ca, token: types.SimpleNamespace(get=unittest.mock.Mock(side_effect=error)))

        with asked(ApiError(403, "forbidden")):
            site, _ = self.run_case(claims.account)
            self.assertEqual((self.directory / "account-token").read_text(), "token-of-the-account\n")
            self.assertIsNone(site.nodes[0].started["dra"].token_file, "with its own token again")
            self.fails(claims.account, "no report", "has 0 entries for share")
        with asked(ApiError(500, "broken")):
            self.fails(claims.account, (), "the API server says 500")
        with asked(None):
            self.fails(claims.account, (), "the account may read secrets")

    def test_every_case_says_what_it_shows(self):
        text = (ROOT / "scripts/k8s").read_text().split('"""')[1]
        for case in [*claims.CASES, *fleet.CASES, *kubelets.CASES]:
            self.assertTrue(case.__doc__, case.__name__)
            self.assertRegex(text, rf"(?m)^{case.__name__} +\w")


class TranscriptTest(unittest.TestCase):
    def test_a_page_has_commands_answers_and_verdicts_in_100_columns(self):
        transcript = Transcript()
        transcript.command("before any case", said="nothing of it is kept")
        transcript.case("claims", "Two claims share a device.")
        transcript.command("kubectl apply -f -", "kind: Pod\n\nmetadata: {name: a}\n", "pod/a created\n")
        transcript.command("kubectl get", said=json.dumps({"a" * 300: "b c " * 100}) + "\n```\n" + "line\n" * 100)
        transcript.note("both hold")
        transcript.verdict("holds")
        transcript.case("waits", "A third one waits.")
        transcript.verdict("FAILS: several\nlines")
        transcript.case("extended", "It was not come to.")
        page = transcript.page("A title", "About it. " * 30, sharing.table([sharing.metric("k8s_orphans", 0, "processes", budget=0)]))
        self.assertTrue(all(len(line) <= WIDTH for line in page.splitlines()))
        for words in ("# A title\n", "$ kubectl apply -f -\n", "          kind: Pod\n", "pod/a created", "# both hold", "holds (0.0 s)", "FAILS: several lines (0.0 s)", "not ended", "more lines"):
            self.assertIn(words, page)
        self.assertNotIn("before any case", page)
        self.assertRegex(page, r"(?m)^## figures\n\n```text\nmetric .*\nk8s_orphans +0.0000 processes +- +0\n```$")
        self.assertEqual(page.count("```"), 8, "what is quoted ends no block")
        self.assertNotIn("figures", transcript.page("A title", "About it."))


if __name__ == "__main__":
    unittest.main()
