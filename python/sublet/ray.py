"""Quota and share for the workers of Ray, and where to put them.

    import sublet.ray

    @ray.remote(num_gpus=0.25, runtime_env=sublet.ray.runtime_env(mem="8GiB", share=0.25))
    class Model: ...

    model = Model.options(**sublet.ray.options(mem="8GiB", share=0.25, kind="resnet50-b64")).remote()

Nodes are started with RAY_RUNTIME_ENV_PLUGINS='[{"class": "sublet.ray.Plugin"}]'. Each worker that has a `runtime_env` with the field
`sublet` then is a job of its node's arbiter, and ends as one; a worker that the arbiter does not take runs nothing of the user's.

runtime_env() checks what is asked for and makes that field. options() asks the cluster hook first where the worker should be, and pins it
there. Nothing of Ray is imported before it is needed.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import itertools
import json
import math
import os
import pathlib
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

from .jobs import SubletError, command

__all__ = ["NoPlace", "Options", "Plugin", "check", "options", "refuse", "runtime_env"]

FIELD = "sublet"
# A label of a Ray node: what the hook calls it, where that is not its host's name.
NODE_LABEL = "sublet.dev/node"
# How long a worker waits for space on the GPU, unless it says otherwise: a worker before it may
# just be ending.
WAIT_S = 5.0
# Ray waits a minute for a worker that was started.
LONGEST_WAIT_S = 600.0
# An arbiter may look a driver's devices up first, which takes it seconds.
PROBE_S = 60
ASK_S = 60
# Ray tries a set-up that failed three times, a second apart; the later tries do not wait again.
_RETRIES_S = 4.0
# By when a worker that was placed is in its node's report, or never will be.
_RECENT_S = 20.0
# Ray counts resources in ten-thousandths.
_STEPS = 10_000

_SIZE = r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb]|%)\s*"
_SHARE = r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*%?\s*"
_SPAN = r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ms|s|m|h)\s*"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}"
_JOB = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class NoPlace(SubletError):
    """The hook says that the worker should wait: no candidate can take it now. `unfit` has each of them with the reason."""

    def __init__(self, text, unfit=()):
        super().__init__(text)
        self.unfit = list(unfit)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _size(value):
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return f"{value}B"
    if isinstance(value, str) and re.fullmatch(_SIZE, value) and _parts(value)[0] > 0 and (not value.strip().endswith("%") or _parts(value)[0] <= 100):
        return value.strip()
    return None


def _parts(value):
    """The number of a size, and its unit."""
    found = re.fullmatch(_SIZE, value)
    return float(found[1]), found[2]


def _bytes(text, total):
    """Bytes of a size that was checked, on a device of `total` bytes."""
    number, unit = _parts(text)
    if unit == "%":
        return int(total * number / 100)
    return int(number * 2 ** _UNITS[unit.lower().rstrip("b").rstrip("i")])


def _share(value):
    number = _number_of_share(value)
    if number is None or not 0 < number <= 1:
        return None
    return str(value).strip()


def _number_of_share(value):
    if _is_number(value):
        return float(value)
    if isinstance(value, str) and re.fullmatch(_SHARE, value):
        text = value.strip()
        return float(text.rstrip("% \t")) / (100 if text.endswith("%") else 1)
    return None


def _one_of(*words):
    return lambda value: value if isinstance(value, str) and value in words else None


def _yes(value):
    return value if isinstance(value, bool) else None


def _like(pattern):
    return lambda value: value if isinstance(value, str) and re.fullmatch(pattern, value) else None


def _device(value):
    several = value if isinstance(value, (list, tuple)) else [value]
    good = lambda one: (isinstance(one, int) and not isinstance(one, bool) and one >= 0) or (
        isinstance(one, str) and re.fullmatch(r"[0-9]+|GPU-[0-9A-Fa-f-]+", one)
    )
    return ",".join(map(str, several)) if several and all(map(good, several)) else None


def _wait(value):
    if _is_number(value):
        seconds = float(value)
    elif isinstance(value, str) and re.fullmatch(_SPAN, value):
        found = re.fullmatch(_SPAN, value)
        seconds = float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]
    else:
        return None
    return seconds if 0 <= seconds <= LONGEST_WAIT_S else None


_SIZES = 'a number with a unit such as "8GiB", a part of the device such as "50%", or bytes'
_SHARES = 'a number above 0 and at most 1, or a percentage such as "25%"'

# Each setting: what checks it and makes text of it, and what to write.
WORDS = {
    "mem": (_size, _SIZES),
    "share": (_share, _SHARES),
    "share_min": (_share, _SHARES),
    "share_max": (_share, _SHARES),
    "class": (_one_of("guaranteed", "opportunistic"), '"guaranteed" or "opportunistic"'),
    "device": (_device, "an index or a UUID that begins with GPU-, or a list of them"),
    "evictable": (_yes, "True or False"),
    "overflow": (_one_of("fail", "host"), '"fail" or "host"'),
    "host_memory": (_size, _SIZES),
    "on_arbiter_loss": (_one_of("open", "freeze", "closed"), '"open", "freeze" or "closed"'),
    "step_hook": (_one_of("torch"), '"torch"'),
    "sim": (_yes, "True or False"),
    "name": (_like(_NAME), "1 to 40 letters, digits, `.`, `_` or `-`, the first a letter or digit"),
    "job": (_like(_JOB), "the whole name of one worker's job, as options() makes it"),
    "id": (_like(_NAME), "any word: environments of different ids are set up by themselves"),
    "wait": (_wait, f'a time such as "30s" or seconds, at most {LONGEST_WAIT_S:.0f} s'),
}
# Those that are not flags of `sublet run`.
_OURS = ("name", "job", "id", "wait")
_LIMITS = ("mem", "share", "share_min", "share_max", "class")


def check(settings: Any) -> dict[str, Any]:
    """The settings as flags have them.

    Raises ValueError with the setting, its value, and what to write.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f'runtime_env["{FIELD}"] is {settings!r}: write a dict of settings, such as {{"mem": "8GiB", "share": 0.25}}')
    checked = {}
    for name, value in settings.items():
        if name not in WORDS:
            near = difflib.get_close_matches(str(name), WORDS, 1)
            meant = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(WORDS)}"
            raise ValueError(f'runtime_env["{FIELD}"]: `{name}` is no setting: {meant}')
        taken, remedy = WORDS[name]
        if value is None:
            continue
        text = taken(value)
        if text is None:
            raise ValueError(f'runtime_env["{FIELD}"]: {name} is {value!r}: write {remedy}')
        checked[name] = text
    if not any(name in checked for name in _LIMITS):
        raise ValueError(f'runtime_env["{FIELD}"] limits nothing: give it one of {", ".join(_LIMITS)}')
    return checked


def _plain(settings):
    """Settings of a function's keywords: `class_` is `class`."""
    return {name.rstrip("_"): value for name, value in settings.items() if value is not None}


def runtime_env(**settings: Any) -> dict[str, Any]:
    """A `runtime_env` by which a worker is a job: `runtime_env(mem="8GiB", share=0.25)`, with `class_="opportunistic"` for `class`.

    Raises ValueError for what cannot be. Each call makes an environment of its own, which nodes set up anew: Ray remembers for ten minutes
    that one has failed.
    """
    settings = _plain(settings)
    check(settings)
    if not {"id", "job"} & settings.keys():
        settings["id"] = secrets.token_hex(4)
    return {FIELD: settings}


# On a node.


def _words(settings, name):
    """`sublet run` with its flags."""
    words = [command(), "run", f"--name={name}"]
    for key, text in settings.items():
        if key not in _OURS and text is not False:
            flag = "--" + key.replace("_", "-")
            words.append(flag if text is True else f"{flag}={text}")
    return words


# Numbers of threads that ask at once.
_probes = itertools.count(1)
_SAY = 'printf "%s\\n" "$SUBLET_REFUSED"; exit 125'


def refusal(settings: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> str | None:
    """Why this node's arbiter would not take such a job now; None where it would."""
    name = settings.get("job") or f"ray.set-up.{os.getpid()}.{next(_probes)}"
    instead = [f"--refused={word}" for word in ("/bin/sh", "-c", _SAY, "sublet")]
    environment = {**os.environ, **{key: value for key, value in (variables or {}).items() if key.startswith("SUBLET_")}}
    words = [*_words(settings, name), *instead, "--", "true"]
    try:
        done = subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"this node's arbiter has not answered for {PROBE_S} s: `sublet doctor` on the node says more"
    except OSError as error:
        return f"{words[0]} cannot be run on this node: {error}"
    if done.returncode == 0:
        return None
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or [f"{words[0]} ended with exit code {done.returncode}"]
    return lines[-1].removeprefix("sublet: ")


class _Node:
    """What the plugin does in a node's agent; of Ray's classes it needs none."""

    def __init__(self):
        self._gave_up = {}

    async def may_start(self, settings, variables):
        """Returns when the node's arbiter would take such a job. Raises SubletError where it does not in time."""
        now = time.monotonic()
        self._gave_up = {key: at for key, at in self._gave_up.items() if now - at < _RETRIES_S}
        key = json.dumps(settings, sort_keys=True)
        end = now if key in self._gave_up else now + settings.get("wait", WAIT_S)
        loop = asyncio.get_running_loop()
        while True:
            why = await loop.run_in_executor(None, functools.partial(refusal, settings, variables))
            if why is None:
                return
            if time.monotonic() >= end:
                self._gave_up[key] = time.monotonic()
                raise SubletError(f"{why} [asked for: {_shown(settings)}]")
            await asyncio.sleep(0.25)


def _shown(settings):
    return ", ".join(f"{name}={text}" for name, text in settings.items() if name not in ("id", "job"))


def _wrap(settings, context):
    """Has the worker be started by `sublet run`, so that its process is the job."""
    # The shell that starts the worker becomes it: its number is the worker's.
    name = settings.get("job") or f"ray.{settings.get('name', 'worker')}."
    run = _words(settings, name)
    own = "" if "job" in settings else "$$"
    worker = str(pathlib.Path(__file__).with_name("ray_worker.py"))
    instead = [sys.executable, "-I", "-S", worker]
    refused = [f"--refused={word}" for word in instead]
    quoted = [shlex.quote(word) + (own if word.startswith("--name=") else "") for word in run]
    context.env_vars["SUBLET_RAY"] = json.dumps(
        {
            "run": [*run, *refused],
            "pid": not settings.get("job"),
            # Ray gives a worker that was started up after a minute.
            "wait": min(settings.get("wait", WAIT_S), 30.0),
            "path": str(pathlib.Path(__file__).parents[1]),
        }
    )
    if "device" in settings:
        # Ray would name the one that it has counted.
        context.env_vars["CUDA_VISIBLE_DEVICES"] = settings["device"]
        context.env_vars["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    context.py_executable = " ".join([*quoted, *map(shlex.quote, refused), "--", context.py_executable])


def refuse() -> None:
    """What a worker runs, and nothing after it, that its node's arbiter has not taken."""
    raise SubletError(os.environ.get("SUBLET_RAY_REFUSED") or "this worker's node has refused it")


@functools.lru_cache(maxsize=None)
def _plugin():
    from ray._private.runtime_env.plugin import RuntimeEnvPlugin

    class Plugin(RuntimeEnvPlugin):
        """The field `sublet` of a runtime_env, in each node's agent."""

        name = FIELD
        # After all that choose the worker's Python.
        priority = 100

        def __init__(self):
            self._node = _Node()

        @staticmethod
        def validate(runtime_env_dict: dict) -> None:
            """Raises ValueError for settings that cannot be."""
            for other in ("container", "image_uri"):
                if runtime_env_dict.get(other):
                    raise ValueError(f'runtime_env has both "{FIELD}" and "{other}": give the container its part of the GPU by a CDI device of sublet')
            check(runtime_env_dict[FIELD])

        async def create(self, uri, runtime_env, context, logger) -> float:
            """Raises SubletError where the node's arbiter is away or has no space."""
            await self._node.may_start(check(runtime_env[FIELD]), context.env_vars)
            return 0

        def modify_context(self, uris, runtime_env, context, logger) -> None:
            """Has the worker be started by `sublet run`."""
            _wrap(check(runtime_env[FIELD]), context)

    # Where Ray looks for it.
    Plugin.__module__, Plugin.__qualname__ = __name__, "Plugin"
    return Plugin


def __getattr__(name):
    if name == "Plugin":
        return _plugin()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# In a driver.


class Options(dict):
    """Options for `.options(**..)` of a task or an actor. `decision` is what the hook has said, None where it was not there to be asked."""

    def __init__(self, options, decision):
        super().__init__(options)
        self.decision = decision


_recent: list[tuple[float, str, str, dict[str, Any]]] = []
_recent_lock = threading.Lock()


def _sublet(words, hook, text=None):
    environment = dict(os.environ)
    environment.update({name: value for name, value in hook.items() if value})
    program = command()
    try:
        done = subprocess.run([program, *words], env=environment, input=text or "", capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SubletError(f"{program} {words[0]} {words[1]}: {error}") from error
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SubletError(line.removeprefix("sublet: "))
    return json.loads(done.stdout)


def _ray_nodes():
    """Ray's nodes that have a GPU: number, names that the hook may know them by, GPUs in all and free."""
    import ray

    if not ray.is_initialized():
        raise SubletError("this program is part of no Ray cluster yet: call ray.init() first")
    try:
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
    except (ImportError, AttributeError):
        free = {}
    nodes = []
    for node in ray.nodes():
        gpus = node.get("Resources", {}).get("GPU", 0)
        if node.get("Alive") and gpus > 0:
            label = (node.get("Labels") or {}).get(NODE_LABEL)
            names = [label] if label else [node.get("NodeManagerHostname"), node.get("NodeName")]
            left = free.get(node["NodeID"], {}).get("GPU", 0) if free else gpus
            nodes.append({"id": node["NodeID"], "names": [name for name in names if name], "gpus": gpus, "free": left})
    return nodes


def _matched(ray_nodes, hook_nodes):
    """Pairs of a Ray node and the hook's, and names of those that the hook does not know."""
    by_name = {node["name"]: node for node in hook_nodes}
    pairs, unknown, taken = [], [], {}
    for node in ray_nodes:
        name = next((name for name in node["names"] if name in by_name), None)
        if name is None:
            unknown.append("/".join(node["names"]))
        elif name in taken:
            raise SubletError(f"two nodes of Ray are `{name}`: start each by `ray start --labels {NODE_LABEL}=NAME` with what the hook calls it")
        else:
            taken[name] = node
            pairs.append((node, by_name[name]))
    return pairs, unknown


def _question(settings, profile, pairs, now):
    """The body of POST /v1/decide."""
    with _recent_lock:
        _recent[:] = [one for one in _recent if now - one[0] < _RECENT_S]
        placed = list(_recent)
    candidates = []
    for _, hook_node in pairs:
        for device in hook_node["devices"]:
            beside = [job for _, node, uuid, job in placed if (node, uuid) == (hook_node["name"], device["uuid"])]
            candidates.append({"node": hook_node["name"], "uuid": device["uuid"], "residents": beside})
    job = {key: value for key, value in profile.items() if value is not None}
    if "mem" in settings:
        # Of a part of the device, that of the largest.
        job["mem_bytes"] = max((_bytes(settings["mem"], device["total_bytes"]) for _, node in pairs for device in node["devices"]), default=0)
    if "share" in settings:
        job["share"] = _number_of_share(settings["share"])
    if "class" in settings:
        job["class"] = settings["class"]
    return {"job": job, "candidates": candidates}


def _fraction(settings, total):
    """The part of a GPU that Ray counts: the larger one of time and memory."""
    parts = [_number_of_share(settings["share"])] if "share" in settings else []
    if "mem" in settings and (total or settings["mem"].endswith("%")):
        parts.append(_bytes(settings["mem"], total or 100) / (total or 100))
    if not parts:
        return None
    return min(1.0, max(1, math.ceil(max(parts) * _STEPS - 1e-6)) / _STEPS)


def options(
    *,
    kind: str = "",
    busy: float | None = None,
    confidence: float | None = None,
    work_s: float | None = None,
    deadline_s: float | None = None,
    weight: float | None = None,
    num_gpus: float | None = None,
    patience: float = 0.0,
    fallback: bool = False,
    cluster: str | None = None,
    token_file: str | None = None,
    **settings: Any,
) -> Options:
    """Options for one task or actor, on the node that the cluster hook chooses: `Model.options(**sublet.ray.options(mem="8GiB", share=0.25))`.

    settings: of runtime_env().
    kind, busy, confidence, work_s, deadline_s, weight: what is known of the job, as `POST /v1/decide` takes it.
    num_gpus: what Ray is to count. Without it the larger one of the share and the quota's part of the GPU, so that Ray promises neither of
        them twice.
    patience: for how many seconds to ask again where the hook says that the job should wait.
    fallback: go on without advice, with a warning, where the hook cannot be asked.
    cluster, token_file: where the hook is and its token, else SUBLET_CLUSTER and SUBLET_CLUSTER_TOKEN_FILE.

    Raises ValueError for settings that cannot be, NoPlace where the job should wait, SubletError where the hook cannot be asked.
    """
    settings = _plain(settings)
    checked = check(settings)
    name = settings.pop("name", "worker")
    settings["job"] = f"ray.{name}-{secrets.token_hex(4)}"
    given = {"busy": busy, "confidence": confidence, "work_s": work_s, "deadline_s": deadline_s, "weight": weight}
    profile = {"id": settings["job"], "kind": kind or name, **given}
    hook = {"SUBLET_CLUSTER": cluster, "SUBLET_CLUSTER_TOKEN_FILE": token_file}
    end = time.monotonic() + patience
    nodes = _ray_nodes()
    while True:
        try:
            decision, node, device = _decide(checked, profile, hook, nodes, num_gpus)
        except NoPlace:
            if time.monotonic() >= end:
                raise
            time.sleep(min(2.0, max(0.05, end - time.monotonic())))
            nodes = _ray_nodes()
            continue
        except SubletError as error:
            if not fallback:
                raise SubletError(f"the cluster hook was not asked where to put `{settings['job']}`: {error} (or pass fallback=True)") from error
            warnings.warn(f"sublet: `{settings['job']}` goes without advice: {error}", stacklevel=2)
            part = _fraction(checked, 0) if num_gpus is None else num_gpus
            if part is None:
                raise SubletError("without the hook the GPU's memory is not known: give share or num_gpus") from error
            return Options({"num_gpus": part, "runtime_env": runtime_env(**settings)}, None)
        break
    if "share" not in checked and decision["share"] > 0 and checked.get("class") != "opportunistic":
        settings["share"] = checked["share"] = decision["share"]
    if len(device["all"]) > 1 and "device" not in checked:
        settings["device"] = device["uuid"]
    part = num_gpus if num_gpus is not None else _fraction(checked, device["total_bytes"])
    placed = {"id": profile["id"], "kind": profile["kind"], "share": decision["share"] or None}
    placed["mem_bytes"] = _bytes(checked["mem"], device["total_bytes"]) if "mem" in checked else None
    with _recent_lock:
        _recent.append((time.monotonic(), decision["node"], decision["device"], {key: value for key, value in placed.items() if value is not None}))
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    chosen = {
        "num_gpus": part if part is not None else 1,
        "runtime_env": runtime_env(**settings),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["id"], soft=False),
    }
    return Options(chosen, decision)


def _decide(checked, profile, hook, nodes, num_gpus):
    """The hook's decision, with the Ray node and the device that it names."""
    status = _sublet(["cluster", "status", "--json"], hook)
    pairs, unknown = _matched(nodes, status["nodes"])
    if not pairs:
        known = ", ".join(node["name"] for node in status["nodes"]) or "none"
        seen = ", ".join(unknown) or "none with a GPU"
        raise SubletError(
            f"the hook knows the nodes {known}, and Ray has {seen}: start the nodes' arbiters with --cluster, "
            f"and name nodes by `ray start --labels {NODE_LABEL}=NAME` where the hook's names are others"
        )
    # Where Ray has no space, the worker would wait, and does so only where all are full.
    need = lambda node: num_gpus if num_gpus is not None else _fraction(checked, max((d["total_bytes"] for d in node["devices"]), default=0)) or 0
    free = [(ray_node, node) for ray_node, node in pairs if ray_node["free"] + 1e-9 >= need(node)]
    question = _question(checked, profile, free or pairs, time.monotonic())
    decision = _sublet(["cluster", "decide", "-"], hook, json.dumps(question))
    if not decision["node"]:
        why = "; ".join(f"{one['node']} {one['uuid']}: {one['reason']}" for one in decision["unfit"][:8])
        raise NoPlace(f"`{profile['id']}` should wait: {decision['reason']}" + (f" ({why})" if why else ""), decision["unfit"])
    for ray_node, node in pairs:
        if node["name"] == decision["node"]:
            for device in node["devices"]:
                if device["uuid"] == decision["device"]:
                    return decision, ray_node, {**device, "all": node["devices"]}
    raise SubletError(f"the hook names {decision['node']} {decision['device']}, which was no candidate")
