"""sublet.ray without Ray: what is refused, what a node's agent does, and what a driver asks the hook, with stand-ins for Ray and for the
command `sublet`."""

import asyncio
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import types
import warnings

import sublet.ray as ours
from sublet import SubletError

GIB = 1 << 30


def refused(kind, words, what, *args, **more):
    try:
        what(*args, **more)
    except kind as error:
        assert words in str(error), (words, str(error))
        return error
    raise AssertionError(f"{args} {more} was taken")


def test_wrong_settings_are_refused_with_value_and_remedy():
    for settings, value, remedy in [
        ("8GiB", "'8GiB'", "write a dict"),
        ([], "[]", "write a dict"),
        ({}, "limits nothing", "give it one of mem, share"),
        ({"mem": None}, "limits nothing", "give it one of"),
        ({"wait": 3}, "limits nothing", "give it one of"),
        ({"memm": "8GiB"}, "`memm` is no setting", "did you mean `mem`?"),
        ({"colour": 1}, "`colour` is no setting", "there are mem, share"),
        ({3: 1}, "`3` is no setting", "there are"),
        ({"mem": "8"}, "mem is '8'", '"8GiB"'),
        ({"mem": "0GiB"}, "mem is '0GiB'", '"8GiB"'),
        ({"mem": "-1GiB"}, "mem is '-1GiB'", '"8GiB"'),
        ({"mem": "101%"}, "mem is '101%'", '"50%"'),
        ({"mem": 0}, "mem is 0", '"8GiB"'),
        ({"mem": 1.5}, "mem is 1.5", '"8GiB"'),
        ({"mem": True}, "mem is True", '"8GiB"'),
        ({"mem": "8GiB; reboot"}, "mem is '8GiB; reboot'", '"8GiB"'),
        ({"share": 0}, "share is 0", "above 0 and at most 1"),
        ({"share": 1.01}, "share is 1.01", "above 0 and at most 1"),
        ({"share": "150%"}, "share is '150%'", "above 0 and at most 1"),
        ({"share": float("nan")}, "share is nan", "above 0 and at most 1"),
        ({"share": float("inf")}, "share is inf", "above 0 and at most 1"),
        ({"share": True}, "share is True", "above 0 and at most 1"),
        ({"share": [0.5]}, "share is [0.5]", "above 0 and at most 1"),
        ({"class": "best"}, "class is 'best'", '"guaranteed" or "opportunistic"'),
        ({"share": 1, "device": "GPU-x"}, "device is 'GPU-x'", "an index or a UUID"),
        ({"share": 1, "device": []}, "device is []", "an index or a UUID"),
        ({"share": 1, "device": -1}, "device is -1", "an index or a UUID"),
        ({"share": 1, "name": "a b"}, "name is 'a b'", "letters, digits"),
        ({"share": 1, "name": "$(reboot)"}, "name is", "letters, digits"),
        ({"share": 1, "name": "a" * 41}, "name is", "1 to 40 letters"),
        ({"share": 1, "wait": "soon"}, "wait is 'soon'", '"30s"'),
        ({"share": 1, "wait": -1}, "wait is -1", '"30s"'),
        ({"share": 1, "wait": "11m"}, "wait is '11m'", "at most 600 s"),
        ({"share": 1, "evictable": "yes"}, "evictable is 'yes'", "True or False"),
        ({"share": 1, "step_hook": "jax"}, "step_hook is 'jax'", '"torch"'),
    ]:
        error = refused(ValueError, value, ours.check, settings)
        assert remedy in str(error), (remedy, str(error))
        if isinstance(settings, dict) and all(isinstance(name, str) for name in settings):
            refused(ValueError, value, ours.runtime_env, **settings)


def test_right_settings_become_flags():
    taken = ours.check({"mem": 3 * GIB, "share": "25%", "device": [0, "GPU-ff"], "evictable": True, "wait": "1.5m", "class": "guaranteed"})
    assert taken == {"mem": f"{3 * GIB}B", "share": "25%", "device": "0,GPU-ff", "evictable": True, "wait": 90.0, "class": "guaranteed"}
    os.environ["SUBLET_COMMAND"] = "/s/sublet"
    words = ours._words({**taken, "sim": False}, "ray.a")
    assert words == [
        "/s/sublet", "run", "--name=ray.a", f"--mem={3 * GIB}B", "--share=25%", "--device=0,GPU-ff", "--evictable", "--class=guaranteed"
    ], words
    env = ours.runtime_env(mem="1GiB", class_="opportunistic")["sublet"]
    assert env["class"] == "opportunistic" and ours.check(env), env
    assert env["id"] != ours.runtime_env(mem="1GiB", class_="opportunistic")["sublet"]["id"], "one environment for all"


def command(folder, text):
    """A stand-in for `sublet`."""
    program = pathlib.Path(folder) / "sublet"
    program.write_text(f"#!{sys.executable}\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["SUBLET_COMMAND"] = str(program)


# Takes a job from the third question on, and else becomes what `--refused` says.
TAKES_THE_THIRD = """
import os, pathlib, sys
asked = pathlib.Path(__file__).with_name("asked")
count = len(asked.read_text().splitlines()) if asked.exists() else 0
asked.open("a").write(" ".join(sys.argv[1:]) + "|" + os.environ.get("SUBLET_RUNTIME_DIR", "") + os.environ.get("OTHER", "") + "\\n")
flags, words = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
if count >= 2:
    os.environ["GOVERNED"] = "1"
    os.execvp(words[0], words)
instead = [flag.split("=", 1)[1] for flag in flags if flag.startswith("--refused=")]
os.environ["SUBLET_REFUSED"] = f"no space for number {count}"
os.execv(instead[0], instead + words)
"""


def test_a_node_s_agent_waits_for_space_and_says_why_there_is_none():
    with tempfile.TemporaryDirectory() as folder:
        command(folder, TAKES_THE_THIRD)
        node = ours._Node()
        settings = ours.check({"mem": "1GiB", "wait": 0})
        start = lambda settings: asyncio.run(node.may_start(settings, {"SUBLET_RUNTIME_DIR": "/r", "OTHER": "x"}))
        error = refused(SubletError, "no space for number 0", start, settings)
        assert "asked for: mem=1GiB" in str(error), error
        # Ray asks again at once: no second wait for what has just been refused.
        long = ours.check({"mem": "1GiB", "wait": 600})
        node._gave_up[json.dumps(long, sort_keys=True)] = ours.time.monotonic()
        refused(SubletError, "no space for number 1", start, long)
        start(ours.check({"share": 0.5, "wait": 30}))
        lines = (pathlib.Path(folder) / "asked").read_text().splitlines()
        assert len(lines) == 3 and all(line.endswith("|/r") for line in lines), lines
    os.environ["SUBLET_COMMAND"] = "/nowhere/sublet"
    refused(SubletError, "/nowhere/sublet cannot be run", start, settings)
    command_without = 'import sys; print("sublet: unexpected flag", file=sys.stderr); sys.exit(125)'
    with tempfile.TemporaryDirectory() as folder:
        command(folder, command_without)
        refused(SubletError, "unexpected flag", start, ours.check({"mem": "2GiB", "wait": 0}))


class Context:
    def __init__(self):
        self.env_vars = {}
        # As Ray's: words of a shell.
        self.py_executable = sys.executable + " -c 'import os; print(dict(os.environ))'"


def worker(settings):
    """What a worker's process becomes, started as Ray does: its environment, its number, and its stderr."""
    context = Context()
    ours._wrap(ours.check(settings), context)
    child = subprocess.Popen(
        ["bash", "-c", f"exec {context.py_executable} more words"], env={**os.environ, **context.env_vars}, stdout=subprocess.PIPE, text=True
    )
    said = child.communicate(timeout=60)[0]
    return eval(said), child.pid, context


def test_a_worker_is_the_job_and_one_that_is_refused_says_so():
    with tempfile.TemporaryDirectory() as folder:
        command(folder, TAKES_THE_THIRD)
        environment, pid, _ = worker({"mem": "1GiB", "name": "it", "wait": 60})
        assert environment["GOVERNED"] == "1" and ours.json.loads(environment["SUBLET_RAY"])["wait"] == 30, environment
        lines = (pathlib.Path(folder) / "asked").read_text().splitlines()
        # One process from the shell to the worker, and one name.
        assert len(lines) == 3 and all(f"--name=ray.it.{pid} " in line for line in lines), lines
        (pathlib.Path(folder) / "asked").unlink()
        environment, _, context = worker({"mem": "1GiB", "job": "ray.it-1", "device": [0, 1], "wait": 0})
        assert "GOVERNED" not in environment and environment["SUBLET_RAY_REFUSED"] == "no space for number 0", environment
        assert environment["__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"] == "sublet.ray.refuse"
        assert environment["PYTHONPATH"].split(":")[0] == str(pathlib.Path(ours.__file__).parents[1])
        assert context.env_vars["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert (pathlib.Path(folder) / "asked").read_text().count("--name=ray.it-1 ") == 1
    os.environ["SUBLET_RAY_REFUSED"] = "no space"
    refused(SubletError, "no space", ours.refuse)
    del os.environ["SUBLET_RAY_REFUSED"]


# The hook: three GPUs on two nodes, and decisions that the test writes down.
HOOK = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
if os.environ.get("SUBLET_CLUSTER") == "http://away":
    sys.exit("sublet: http://away does not answer")
if sys.argv[1:] == ["cluster", "status", "--json"]:
    gpu = lambda uuid: {"uuid": uuid, "name": "T4", "total_bytes": 16 << 30}
    print(json.dumps({"nodes": [{"name": "n1", "devices": [gpu("GPU-1")]}, {"name": "n2", "devices": [gpu("GPU-2"), gpu("GPU-3")]}]}))
elif sys.argv[1:] == ["cluster", "decide", "-"]:
    asked = json.loads(sys.stdin.read())
    with (here / "asked").open("a") as file:
        file.write(json.dumps(asked) + "\\n")
    node, device = (here / "answer").read_text().split()
    unfit = [{"node": "n1", "uuid": "GPU-1", "reason": "full"}] if node == "-" else []
    node, device = (node, device) if node != "-" else ("", "")
    print(json.dumps({"node": node, "device": device, "share": 0.5 if node else 0, "expected_slowdown": 1.25, "confidence": 0.9,
                      "reason": "because", "beside": [], "unfit": unfit}))
"""


class Strategy:
    def __init__(self, node_id, soft):
        self.node_id, self.soft = node_id, soft


def stand_in_for_ray(nodes, free=None):
    """Modules with what sublet.ray takes of Ray's."""
    names = ["ray", "ray.util", "ray.util.scheduling_strategies", "ray._private", "ray._private.state", "ray._private.runtime_env"]
    modules = {name: types.ModuleType(name) for name in [*names, "ray._private.runtime_env.plugin"]}
    modules["ray"].is_initialized = lambda: nodes is not None
    modules["ray"].nodes = lambda: nodes
    modules["ray.util.scheduling_strategies"].NodeAffinitySchedulingStrategy = Strategy
    modules["ray._private.state"].available_resources_per_node = lambda: free or {}
    modules["ray._private.runtime_env.plugin"].RuntimeEnvPlugin = type("RuntimeEnvPlugin", (), {})
    sys.modules.update(modules)


def ray_node(number, gpus=1, labels=None, hostname="h", alive=True):
    return {"NodeID": number, "Alive": alive, "Resources": {"GPU": gpus} if gpus else {}, "Labels": labels or {}, "NodeManagerHostname": hostname}


NODES = [
    ray_node("a", labels={"sublet.dev/node": "n1"}),
    ray_node("b", 2, hostname="n2"),
    ray_node("c", 0, hostname="n2"),
    ray_node("d", hostname="n1", alive=False),
    ray_node("e", hostname="elsewhere"),
]


def test_a_driver_asks_the_hook_and_pins_what_it_says():
    with tempfile.TemporaryDirectory() as folder:
        command(folder, HOOK)
        answer = pathlib.Path(folder) / "answer"
        asked = lambda: json.loads((pathlib.Path(folder) / "asked").read_text().splitlines()[-1])
        stand_in_for_ray(NODES)
        ours._recent.clear()
        answer.write_text("n1 GPU-1")
        options = ours.options(mem="12GiB", share=0.25, kind="resnet", busy=0.4, name="it")
        question, env = asked(), options["runtime_env"]["sublet"]
        assert question["job"] == {"id": env["job"], "kind": "resnet", "busy": 0.4, "mem_bytes": 12 * GIB, "share": 0.25}, question
        assert [(one["node"], one["uuid"], one["residents"]) for one in question["candidates"]] == [
            ("n1", "GPU-1", []), ("n2", "GPU-2", []), ("n2", "GPU-3", [])
        ], question
        assert env["job"].startswith("ray.it-") and "device" not in env and options["num_gpus"] == 0.75, options
        assert (options["scheduling_strategy"].node_id, options["scheduling_strategy"].soft) == ("a", False)
        assert options.decision["expected_slowdown"] == 1.25 and options.decision["reason"] == "because"
        # The next question has the first answer's worker, which no report has yet. A node with
        # several GPUs needs to know which; a share that was not asked for is the hook's.
        answer.write_text("n2 GPU-3")
        options = ours.options(mem="25%")
        residents = [one["residents"] for one in asked()["candidates"]]
        assert residents == [[{"id": env["job"], "kind": "resnet", "share": 0.5, "mem_bytes": 12 * GIB}], [], []], residents
        assert asked()["job"]["mem_bytes"] == 4 * GIB and "share" not in asked()["job"]
        env = options["runtime_env"]["sublet"]
        assert (env["device"], env["share"], options["num_gpus"], options["scheduling_strategy"].node_id) == ("GPU-3", 0.5, 0.5, "b"), options
        # Those that Ray has no space on come in question only where all are full.
        stand_in_for_ray(NODES, {"a": {"GPU": 0.1}, "b": {"GPU": 2}})
        ours.options(share=0.25)
        assert {one["node"] for one in asked()["candidates"]} == {"n2"}, asked()
        stand_in_for_ray(NODES, {"a": {"GPU": 0.1}, "b": {}})
        ours.options(share=0.25)
        assert {one["node"] for one in asked()["candidates"]} == {"n1", "n2"}, asked()


def test_a_driver_hears_why_there_is_no_advice():
    with tempfile.TemporaryDirectory() as folder:
        command(folder, HOOK)
        (pathlib.Path(folder) / "answer").write_text("- -")
        stand_in_for_ray(NODES)
        error = refused(ours.NoPlace, "should wait: because (n1 GPU-1: full)", ours.options, share=0.5)
        assert error.unfit == [{"node": "n1", "uuid": "GPU-1", "reason": "full"}]
        asked = lambda: len((pathlib.Path(folder) / "asked").read_text().splitlines())
        before = asked()
        refused(ours.NoPlace, "should wait", ours.options, share=0.5, patience=2)
        assert asked() >= before + 2, "it has not asked again"
        refused(ours.NoPlace, "should wait", ours.options, share=0.5, fallback=True)
        (pathlib.Path(folder) / "answer").write_text("n9 GPU-9")
        refused(SubletError, "n9 GPU-9, which was no candidate", ours.options, share=0.5)
        refused(SubletError, "http://away does not answer", ours.options, share=0.5, cluster="http://away")
        refused(ValueError, "share is 5", ours.options, share=5, cluster="http://away", fallback=True)
        refused(SubletError, "give share or num_gpus", no_warning, mem="1GiB", cluster="http://away", fallback=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            options = ours.options(mem="1GiB", share=0.3, cluster="http://away", fallback=True)
        assert "without advice: " in str(said[0].message) and "http://away" in str(said[0].message), said
        assert options.decision is None and options["num_gpus"] == 0.3 and "scheduling_strategy" not in options, options
        stand_in_for_ray([ray_node("e", hostname="elsewhere")])
        refused(SubletError, "the hook knows the nodes n1, n2, and Ray has elsewhere", ours.options, share=0.5)
        stand_in_for_ray([ray_node("a", hostname="n1"), ray_node("b", hostname="n1")])
        refused(SubletError, "two nodes of Ray are `n1`", ours.options, share=0.5)
        stand_in_for_ray(None)
        refused(SubletError, "call ray.init() first", ours.options, share=0.5)
    os.environ["SUBLET_COMMAND"] = "/nowhere/sublet"
    stand_in_for_ray(NODES)
    refused(SubletError, "/nowhere/sublet", ours.options, share=0.5)


def no_warning(**more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ours.options(**more)


def test_the_plugin_is_ray_s_and_refuses_what_it_cannot_limit():
    stand_in_for_ray(NODES)
    plugin = ours.Plugin
    assert issubclass(plugin, sys.modules["ray._private.runtime_env.plugin"].RuntimeEnvPlugin) and plugin.name == "sublet"
    refused(ValueError, "mem is '8'", plugin.validate, {"sublet": {"mem": "8"}})
    refused(ValueError, '"container"', plugin.validate, {"sublet": {"mem": "8GiB"}, "container": {"image": "x"}})
    plugin.validate({"sublet": {"mem": "8GiB"}})
    os.environ["SUBLET_COMMAND"] = "/s/sublet"
    context = Context()
    plugin().modify_context([], {"sublet": {"mem": "8GiB"}}, context, None)
    assert context.py_executable.startswith("/s/sublet run --name=ray.worker.$$ --mem=8GiB --refused="), context.py_executable


if __name__ == "__main__":
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            test()
    print("well")
