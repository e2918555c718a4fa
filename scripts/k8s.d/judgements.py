"""What objects of a Kubernetes from 1.34 on, and jobs of an arbiter, say of parts of devices: functions that ask nobody, and name what is
wrong. What they expect of a scheduler is what 1.36 wrote when it was tried: kubernetes/data/claims.recorded.json, and its request policies
(`consumed`): a request is rounded up to the device's step, and one that is missing is the device's default."""

import fractions
import re

DRIVER = "sublet.dev"
GIB = 1 << 30
# Capacities, as slices name them.
MEMORY, SHARE = "memory", "sm"
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SUFFIXES = {
    "": 1, "m": fractions.Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}
# What a scheduler says where no device has enough.
NO_DEVICE = "cannot allocate all claims"
OF_EXTENDED = "resource.kubernetes.io/extended-resource-claim"


class Unreadable(ValueError):
    """An object is not of the form that it has to be."""


def quantity(text):
    """An amount as Kubernetes writes it, exactly."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mkMGTPE]|[KMGTPE]i)?", str(text))
    if not found:
        raise Unreadable(f"`{text}` is no amount")
    return fractions.Fraction(found[1]) * SUFFIXES[found[2] or ""]


def consumed(capacity, asked):
    """What a request takes of a capacity of a device, by its policy."""
    policy = capacity.get("requestPolicy") or {}
    if asked is None:
        return quantity(policy.get("default", capacity["value"]))
    amount, within = quantity(asked), policy.get("validRange") or {}
    least = quantity(within.get("min", "0"))
    if "step" in within and amount > least:
        step = quantity(within["step"])
        amount = least + -(-(amount - least) // step) * step
    return max(amount, least)


def title(claim):
    return claim["metadata"]["name"]


def parts(claim):
    """What a claim was given of devices of ours."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or []
    return [one for one in results if one.get("driver") == DRIVER]


def part(claim):
    """The only one."""
    found = parts(claim)
    if len(found) != 1:
        raise Unreadable(f"claim {title(claim)} was given {len(found)} parts of devices")
    return found[0]


def requests(claim):
    """What a claim asks for, by capacity; of its only request."""
    asked = claim["spec"]["devices"]["requests"]
    if len(asked) != 1 or "exactly" not in asked[0]:
        raise Unreadable(f"claim {title(claim)} has {len(asked)} requests, and not one for an exact device")
    return (asked[0]["exactly"].get("capacity") or {}).get("requests") or {}


def device_of(slices, given):
    """The device that a part is of, as its slice has it."""
    for one in slices:
        spec = one["spec"]
        if (spec.get("driver"), spec["pool"]["name"]) == (DRIVER, given.get("pool")):
            for device in spec.get("devices") or []:
                if device["name"] == given.get("device"):
                    return device
    raise Unreadable(f"no slice has device {given.get('device')} of pool {given.get('pool')}")


def wrong_amounts(claim, given, slices):
    """Where a part is not what its claim asks for, by the policy of the device's slice."""
    device, asked, found = device_of(slices, given), requests(claim), []
    if not device.get("allowMultipleAllocations"):
        found.append(f"device {device['name']} is not to be shared")
    unknown = sorted(set(asked) - set(device["capacity"]))
    if unknown:
        found.append(f"claim {title(claim)} asks for {', '.join(unknown)}, which its device does not have")
    has = given.get("consumedCapacity") or {}
    for name, capacity in device["capacity"].items():
        wanted = consumed(capacity, asked.get(name))
        if name not in has:
            found.append(f"claim {title(claim)} takes no {name}")
        elif quantity(has[name]) != wanted:
            found.append(f"claim {title(claim)} takes {has[name]} of {name} for {asked.get(name, 'no wish')}, and not {wanted}")
    return found


def overcommitted(claims, slices):
    """Devices of which claims have more than there is."""
    taken, found = {}, []
    for claim in claims:
        for given in parts(claim):
            device_of(slices, given)
            for name, amount in (given.get("consumedCapacity") or {}).items():
                key = (given["pool"], given["device"], name)
                taken[key] = taken.get(key, 0) + quantity(amount)
    for one in slices:
        for device in one["spec"].get("devices") or []:
            for name, capacity in device["capacity"].items():
                has = taken.get((one["spec"]["pool"]["name"], device["name"], name), 0)
                if has > quantity(capacity["value"]):
                    found.append(f"{has} of {name} of device {device['name']} are given away, and it has {capacity['value']}")
    return found


def shared(claims, slices):
    """What is wrong with claims that are to share one device, each with a part of its own."""
    try:
        given = [part(claim) for claim in claims]
        found = [text for claim, one in zip(claims, given) for text in wrong_amounts(claim, one, slices)]
        found += overcommitted(claims, slices)
    except (Unreadable, KeyError, TypeError) as error:
        return [unreadable(error)]
    devices = {(one["pool"], one["device"]) for one in given}
    if len(devices) != 1:
        found.append(f"they are on {len(devices)} devices: {', '.join(sorted('/'.join(one) for one in devices))}")
    ids = [one.get("shareID") for one in given]
    found += [f"claim {title(claim)} has the shareID `{one}`, which is no UUID" for claim, one in zip(claims, ids) if not UUID.fullmatch(str(one))]
    if len(set(ids)) != len(ids):
        found.append(f"they have the shareIDs {', '.join(map(str, ids))}: not each its own")
    for claim in claims:
        users = claim["status"].get("reservedFor") or []
        if [one.get("resource") for one in users] != ["pods"]:
            found.append(f"claim {title(claim)} is reserved for {len(users)} users, and not for one pod")
    return found


def unreadable(error):
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def condition(conditions, kind):
    found = [one for one in conditions or [] if one.get("type") == kind]
    return found[0] if len(found) == 1 else {}


def waiting(pod, claim, words=NO_DEVICE):
    """What is wrong with a pod that is to wait since its claim does not fit."""
    found = []
    if parts(claim):
        found.append(f"claim {title(claim)} was given a part")
    if pod["spec"].get("nodeName"):
        found.append(f"pod {title(pod)} is on {pod['spec']['nodeName']}")
    if pod["status"].get("phase") != "Pending":
        found.append(f"pod {title(pod)} is {pod['status'].get('phase')}")
    placed = condition(pod["status"].get("conditions"), "PodScheduled")
    if (placed.get("status"), placed.get("reason")) != ("False", "Unschedulable") or words not in placed.get("message", ""):
        found.append(f"pod {title(pod)} does not say `{words}`: {placed.get('status')} {placed.get('reason')} {placed.get('message')}")
    return found


def device_status(claim, given):
    """What the driver says of a part in the claim's status."""
    keys = ("driver", "pool", "device", "shareID")
    listed = (claim.get("status") or {}).get("devices") or []
    found = [one for one in listed if all(one.get(key) == given.get(key) for key in keys)]
    if len(found) != 1:
        raise Unreadable(f"the status of claim {title(claim)} has {len(found)} entries for share {given.get('shareID')}, among {len(listed)}")
    return found[0]


def reported(claim, jobs):
    """What is wrong with the driver's report of a claim that is prepared, beside the jobs that its arbiter has."""
    try:
        given = part(claim)
        entry = device_status(claim, given)
        ready, data = condition(entry.get("conditions"), "Ready"), entry.get("data") or {}
        memory, share = (quantity(given["consumedCapacity"][name]) for name in (MEMORY, SHARE))
    except (Unreadable, KeyError) as error:
        return [unreadable(error)]
    found = []
    if len(claim["status"]["devices"]) != 1:
        found.append(f"the status of claim {title(claim)} has {len(claim['status']['devices'])} entries, and its device is one")
    if (ready.get("status"), ready.get("reason")) != ("True", "Prepared"):
        found.append(f"claim {title(claim)} is not ready: {ready.get('status')} {ready.get('reason')} {ready.get('message')}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(ready.get("lastTransitionTime"))):
        found.append(f"claim {title(claim)} says not since when: {ready.get('lastTransitionTime')}")
    if data.get("memoryBytes") != memory or data.get("share") != float(share / 100):
        found.append(f"claim {title(claim)} says {data.get('memoryBytes')} bytes and a share of {data.get('share')}, and has {memory} and {share} %")
    return found + in_force(claim, jobs.get(data.get("job")))


def in_force(claim, job):
    """What is wrong with the job of a claim, by its arbiter."""
    if not job:
        return [f"the arbiter has no job of claim {title(claim)}"]
    amounts = part(claim)["consumedCapacity"]
    memory, share = (quantity(amounts.get(name, "0")) for name in (MEMORY, SHARE))
    wanted = float(share / 100) or None
    if (job.get("mem_limit_bytes"), job.get("share_asked")) != (memory, wanted):
        return [f"claim {title(claim)} has {job.get('mem_limit_bytes')} bytes and {job.get('share_asked')} in force, and not {memory} and {wanted}"]
    return []


def refused(claim, words):
    """What is wrong with a claim that the node is to have refused, with these words."""
    given = parts(claim)
    if not given:
        return [f"claim {title(claim)} was given nothing"]
    found = []
    for one in given:
        try:
            ready = condition(device_status(claim, one).get("conditions"), "Ready")
        except Unreadable as error:
            found.append(str(error))
            continue
        if (ready.get("status"), ready.get("reason")) != ("False", "Refused") or words not in ready.get("message", ""):
            found.append(f"claim {title(claim)} does not say `{words}`: {ready.get('status')} {ready.get('reason')} {ready.get('message')}")
    return found


def extended(pod, claim, device_class, slices):
    """What is wrong with a claim that a scheduler has made of a pod's extended resource, without a wish of an amount."""
    found = []
    if (pod["status"].get("extendedResourceClaimStatus") or {}).get("resourceClaimName") != title(claim):
        found.append(f"pod {title(pod)} does not name claim {title(claim)}")
    if (claim["metadata"].get("annotations") or {}).get(OF_EXTENDED) != "true":
        found.append(f"claim {title(claim)} is not marked as that of an extended resource")
    owners = [one.get("uid") for one in claim["metadata"].get("ownerReferences") or []]
    if owners != [pod["metadata"]["uid"]]:
        found.append(f"claim {title(claim)} is not the pod's: {owners}")
    try:
        classes = [one["exactly"]["deviceClassName"] for one in claim["spec"]["devices"]["requests"]]
        if classes != [device_class]:
            found.append(f"claim {title(claim)} asks for {classes}, and not for {device_class}")
        found += wrong_amounts(claim, part(claim), slices)
    except (Unreadable, KeyError, TypeError) as error:
        found.append(unreadable(error))
    return found


def stayed(before, after):
    """What is wrong with claims that were to stay as they are, each part with its shareID."""
    now, found = {claim["metadata"]["uid"]: claim for claim in after}, []
    for claim in before:
        same = now.get(claim["metadata"]["uid"])
        if not same:
            found.append(f"claim {title(claim)} is gone, or was made anew")
        elif parts(same) != parts(claim):
            found.append(f"claim {title(claim)} has other parts: {parts(same)} in place of {parts(claim)}")
    return found
