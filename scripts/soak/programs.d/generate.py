"""Random programs for play.c that are legal by construction, and a checker that does not trust the construction.

A program is a list of lines (docs/how-to/soak-programs.md). What makes it legal: while a thread owes others a step (a flag that it raises later,
a lock that it holds) it only submits, or waits for streams of its own in which nothing waits for anybody; calls that may wait for the
whole device are made where no stream waits for another thread's later step. `faults` looks at the finished text and finds what breaks that.
"""

import random

QUOTA_MIB = 64
# A quota that is no limit: more than any device of the soak has.
NO_QUOTA_MIB = 1024
KINDS = ("alloc", "pitch", "async", "pool", "vmm", "managed", "array", "graph")
# Calls that may wait for everything on the device.
WHOLE = {"take", "give", "over", "never", "syncall", "context", "nostream", "graph"}
BLOCKING = {"sync", "look", "send", "reach", "wait", "barrier", "join", "watched"}


class Writer:
    """Threads' scripts of all processes, and what is given out: streams, buffers, flags."""

    def __init__(self, rng, devices):
        self.rng, self.devices = rng, devices
        self.quota_mib = NO_QUOTA_MIB if rng.random() < 0.2 else QUOTA_MIB
        self.scripts, self.numbers = {}, {}

    def number(self, kind, scope):
        key = (kind, scope)
        self.numbers[key] = self.numbers.get(key, -1) + 1
        return self.numbers[key]

    def flag(self):
        return self.number("flag", None)

    def emit(self, who, *words):
        self.scripts.setdefault(who, []).append(" ".join(map(str, words)))

    def text(self, evictable):
        lines = [f"devices {self.devices}", f"mem {self.quota_mib}", f"evictable {int(evictable)}"]
        process = None
        for who in sorted(self.scripts):
            if who[0] != process:
                process = who[0]
                lines.append(f"process {process}")
            lines += [f"thread {who[1]}", *self.scripts[who]]
        return lines


class Thread:
    """A thread while its script is written: its own streams, each with a buffer."""

    def __init__(self, writer, process, index, streams=2):
        self.w, self.who, self.process = writer, (process, index), process
        rng = writer.rng
        self.streams = []
        # MiB that it may take at once beside others of its process.
        self.most = 44
        for _ in range(streams):
            device = rng.randrange(writer.devices)
            stream, buffer = writer.number("stream", process), writer.number("buffer", process)
            self.emit("stream", stream, device)
            self.emit("take", buffer, device, rng.choice(("alloc", "alloc", "async", "vmm", "managed")), 2)
            self.streams.append((stream, device, buffer))

    def emit(self, *words):
        self.w.emit(self.who, *words)

    def stream(self):
        return self.w.rng.choice(self.streams)

    def kernels(self, stream, most=12):
        rng = self.w.rng
        self.emit("kernel", stream, rng.choice((5, 20, 50, 100, 200)), rng.randint(1, most))

    def submit(self, stream=None, host=False):
        """Something that never waits."""
        rng = self.w.rng
        number, _, buffer = stream or self.stream()
        what = rng.randrange(7 if host else 5)
        if what < 2:
            self.kernels(number)
        elif what == 2:
            self.emit("fill", number, buffer, rng.randint(1, 99))
        elif what < 5:
            self.emit("set", number, buffer, rng.randint(0, 255), rng.randint(1, 20))
        elif what == 5:
            self.emit(rng.choice(("host", "callback")), number, "lock", rng.randrange(2))
        else:
            self.emit("host", number, "set", self.w.flag())

    def others(self, stream):
        return [one for one in self.streams if one is not stream]


# What a thread does by itself. Each of these leaves nothing behind that waits for it.

def plain(t):
    for _ in range(t.w.rng.randint(1, 5)):
        t.submit(host=True)
    if t.w.rng.random() < 0.6:
        t.emit("sync", t.stream()[0])


def look(t):
    stream, _, buffer = t.stream()
    t.emit("look", stream, buffer)


def send(t):
    stream, _, buffer = t.stream()
    t.emit("send", stream, buffer, t.w.rng.randint(0, 99))


def held_lock(t):
    """A host function takes the lock that the launching thread holds over launches."""
    rng = t.w.rng
    lock, one = rng.randrange(2), t.stream()
    rounds = rng.choice((1, 1, 2, 5))
    for _ in range(rounds):
        t.emit("lock", lock)
        before = rng.random() < 0.5
        if before:
            t.emit(rng.choice(("host", "host", "callback")), one[0], "lock", lock)
        for _ in range(rng.randint(1, 4)):
            t.submit(one if rng.random() < 0.6 else None, host=rng.random() < 0.3)
        t.emit("unlock", lock)
        if not before:
            t.emit("host", one[0], "lock", lock)
    t.emit("sync", one[0])


def owed(t):
    """A stream waits for what this thread does after further submissions."""
    rng = t.w.rng
    flag, one = t.w.flag(), t.stream()
    way = rng.choice(("await", "host", "callback", "graph"))
    if way == "graph":
        graph = t.w.number("graph", t.process)
        t.emit("graph", graph, one[0], "wait", flag, rng.randint(1, 5))
        t.emit("play", graph, one[0])
    elif way == "await":
        t.emit("await", one[0], flag)
    else:
        t.emit(way, one[0], "wait", flag)
    for _ in range(rng.randint(1, 6)):
        t.submit(one if rng.random() < 0.6 else None)
    others = t.others(one)
    if others and rng.random() < 0.4:
        other = rng.choice(others)
        t.submit(other)
        # A stream in which a host function waits is not waited for: they go one after another.
        if t.clean(other):
            t.emit("sync", other[0])
    if way == "await" and others and rng.random() < 0.5:
        t.emit("write", rng.choice(others)[0], flag)
    else:
        t.emit("raise", flag)
    t.emit("sync", one[0])


def handed(t):
    """One stream follows another by an event and takes its contents."""
    if len(t.streams) < 2:
        return plain(t)
    one, two = t.w.rng.sample(t.streams, 2)
    there, back = t.w.number("event", t.process), t.w.number("event", t.process)
    t.submit(one)
    t.emit("record", one[0], there)
    t.emit("follow", two[0], there)
    t.emit("copy", two[0], one[2], two[2])
    t.emit("record", two[0], back)
    t.emit("follow", one[0], back)
    t.submit(one)
    if t.w.rng.random() < 0.5:
        t.emit("reach", back)


def graphs(t):
    rng = t.w.rng
    stream = t.stream()[0]
    graph = t.w.number("graph", t.process)
    t.emit("graph", graph, stream, "lock", rng.randrange(2), rng.randint(1, 6))
    for _ in range(rng.randint(1, 4)):
        t.emit("play", graph, stream)
    t.emit("sync", stream)


def handler(t):
    rng = t.w.rng
    stream, device, _ = t.stream()
    buffer = t.w.number("buffer", t.process)
    t.emit("take", buffer, device, rng.choice(("alloc", "async", "vmm")), 2)
    t.emit("watch", buffer, rng.choice(("copy", "copy", "launch", "allocate")))
    t.emit("watched", stream, rng.choice((20, 200)), rng.choice((40, 120)))
    t.emit("sync", stream)
    t.emit("give", buffer)


def memory(t, most=0):
    """Memory near the quota, by every kind of call."""
    rng, most = t.w.rng, most or t.most
    device = rng.randrange(t.w.devices)
    for _ in range(rng.randint(1, 3)):
        buffer = t.w.number("buffer", t.process)
        t.emit("take", buffer, device, rng.choice(KINDS), 2 * rng.randint(most // 4, most // 2))
        t.submit()
        t.emit("give", buffer)


def refused(t):
    never = t.w.quota_mib > QUOTA_MIB and t.w.rng.random() < 0.7
    t.emit("never" if never else "over", t.w.rng.randrange(t.w.devices), t.w.rng.choice((1, 5, 50)))


def context(t):
    t.emit("context", t.w.rng.randrange(t.w.devices))


def everything(t):
    t.emit("syncall", t.w.rng.randrange(t.w.devices))


def nap(t):
    t.emit("nap", t.w.rng.choice((1, 3, 10)))


OWN = [(plain, 5), (look, 3), (send, 2), (held_lock, 5), (owed, 6), (handed, 3), (graphs, 2), (memory, 2), (refused, 1), (context, 1),
       (everything, 1), (nap, 1)]


# What two threads do together, of one process or of two; where no call may wait for everything.

def pipeline(t, u):
    rng = t.w.rng
    one, two = t.stream(), u.stream()
    for _ in range(rng.choice((1, 2, 5, 20))):
        there, back = t.w.flag(), t.w.flag()
        t.submit(one)
        t.emit("write", one[0], there)
        t.emit("await", one[0], back)
        u.emit("await", two[0], there)
        u.submit(two)
        u.emit("write", two[0], back)
    t.submit(one)
    u.emit("sync", two[0])
    t.emit("sync", one[0])


def raised(t, u):
    """One's stream waits for what the other raises after work of its own."""
    flag, one, two = t.w.flag(), t.stream(), u.stream()
    t.emit("await", one[0], flag)
    for _ in range(t.w.rng.randint(1, 4)):
        t.submit(one)
    u.submit(two)
    if t.w.rng.random() < 0.5:
        u.emit("sync", two[0])
    u.emit("raise", flag)
    t.emit("sync", one[0])


def waited(t, u):
    """One thread waits for a host function of the other's."""
    flag, one = t.w.flag(), t.stream()
    t.submit(one)
    t.emit("host", one[0], "set", flag)
    u.emit("wait", flag)
    u.submit()
    t.emit("sync", one[0])


def behind(t, u):
    """A copy from pageable memory behind a host function that waits for the other thread."""
    flag, one = t.w.flag(), t.stream()
    t.emit("host", one[0], "wait", flag)
    t.emit("send", one[0], one[2], t.w.rng.randint(0, 99))
    u.submit()
    u.submit()
    u.emit("raise", flag)
    t.emit("look", one[0], one[2])


def pair(rng, t, u, hosts_block):
    choices = [pipeline, raised, behind] if hosts_block else [pipeline, raised, waited]
    rng.choice(choices)(*((t, u) if rng.random() < 0.5 else (u, t)))


def clean(t, stream):
    """Whether nothing in a stream is a host function: none since its last synchronisation."""
    for line in reversed(t.w.scripts[t.who]):
        words = line.split()
        if words[0] in ("sync", "look") and words[1] == str(stream[0]):
            return True
        if words[0] in ("host", "callback") and words[1] == str(stream[0]) or words[0] == "play" and words[2] == str(stream[0]):
            return False
        if words[0] == "follow" and words[1] == str(stream[0]):
            return False
    return True


Thread.clean = clean


def phases(rng, threads, count):
    """Phases of own work, and of work together; all threads meet in between."""
    for t in threads:
        t.most = t.most // len(threads)
    for _ in range(count):
        if len(threads) > 1:
            for t in threads:
                # Nothing is left in a stream: what comes next waits for nothing of before.
                for stream in t.streams:
                    t.emit("sync", stream[0])
                t.emit("barrier")
        if len(threads) > 1 and rng.random() < 0.5:
            hosts_block = rng.random() < 0.5
            for _ in range(rng.randint(1, 4)):
                pair(rng, *rng.sample(threads, 2), hosts_block)
        else:
            for t in threads:
                for _ in range(rng.randint(1, 4)):
                    rng.choices([what for what, _ in OWN], [weight for _, weight in OWN])[0](t)
    for t in threads:
        for stream in t.streams:
            t.emit("look", stream[0], stream[2])


def together(rng, writer):
    threads = [Thread(writer, 0, index, rng.randint(1, 3)) for index in range(rng.choice((1, 1, 2, 2, 3)))]
    phases(rng, threads, rng.randint(1, 4))
    if len(threads) == 1 and rng.random() < 0.3:
        threads[0].submit()
        threads[0].emit("exit", rng.choice((1, 2, 3)))


def one_thread(rng, writer):
    t = Thread(writer, 0, 0, rng.randint(1, 3))
    if rng.random() < 0.5:
        handler(t)
    phases(rng, [t], rng.randint(1, 3))
    if rng.random() < 0.3:
        handler(t)


def large(rng, t):
    """Most of the quota on one device."""
    buffer = t.w.number("buffer", t.process)
    t.emit("take", buffer, rng.randrange(t.w.devices), rng.choice(("alloc", *KINDS[:7])), 2 * rng.randint(18, 26))
    return buffer


def followed(rng, writer):
    """Processes that end, each in its way, and are followed by others with memory at the quota."""
    if rng.random() < 0.3:
        # Their parent uses the device as well; a shell does not.
        Thread(writer, 0, 0, 1).submit()
    for child in range(1, rng.randint(4, 12)):
        t = Thread(writer, child, 0, 1)
        large(rng, t)
        for _ in range(rng.randint(1, 3)):
            t.submit()
        if rng.random() < 0.5:
            t.emit("look", t.streams[0][0], t.streams[0][2])
        end = rng.choice((0, 1, 2, 3))
        if end:
            t.emit("exit", end)
        writer.emit((0, 0), "spawn", child, 0)
        if rng.random() < 0.15:
            writer.emit((0, 0), "spawn", child + 40, 1)
            writer.emit((0, 0), "join", child + 40, 0)
        writer.emit((0, 0), "join", child, 9 if end == 3 else 0)


def executed(rng, writer):
    last = rng.randint(2, 6)
    for process in range(last):
        t = Thread(writer, process, 0, 1)
        large(rng, t)
        t.submit()
        if process < last - 1:
            t.emit("exec", process + 1)
        else:
            t.emit("look", t.streams[0][0], t.streams[0][2])


def ranks(rng, writer):
    """Two processes that depend on each other by words that both see."""
    for child in (1, 2):
        writer.emit((0, 0), "spawn", child, 0)
    both = [Thread(writer, child, 0, rng.randint(1, 2)) for child in (1, 2)]
    for _ in range(rng.randint(1, 4)):
        pair(rng, *both, rng.random() < 0.5)
        for t in both:
            if rng.random() < 0.5:
                t.emit("look", t.streams[0][0], t.streams[0][2])
    for child in (1, 2):
        writer.emit((0, 0), "join", child, 0)


def pressed(rng, writer):
    """Memory at the quota, by every kind of call, one after the other."""
    t = Thread(writer, 0, 0, 1)
    for _ in range(rng.randint(2, 5)):
        memory(t, most=52)
        plain(t)
    t.emit("look", t.streams[0][0], t.streams[0][2])


def starved(rng, writer):
    """One thread computes, another tries for memory that it cannot have."""
    one, two = Thread(writer, 0, 0, 1), Thread(writer, 0, 1, 1)
    for t in (one, two):
        t.emit("barrier")
    one.emit("kernel", one.streams[0][0], 200, rng.choice((500, 900)))
    one.emit("sync", one.streams[0][0])
    two.emit("over", two.streams[0][1], rng.choice((1000, 4000)))
    for t in (one, two):
        t.emit("look", t.streams[0][0], t.streams[0][2])


SHAPES = [(together, 42), (one_thread, 18), (followed, 10), (executed, 6), (ranks, 10), (pressed, 12), (starved, 2)]


def program(seed):
    """The program of a seed, as lines."""
    rng = random.Random(seed)
    while True:
        writer = Writer(rng, rng.choice((1, 1, 1, 1, 2, 2, 3, 4)))
        evictable = rng.random() < 0.5
        rng.choices([what for what, _ in SHAPES], [weight for _, weight in SHAPES])[0](rng, writer)
        lines = writer.text(evictable)
        if not faults(lines):
            return lines


# The checker.

def parse(lines):
    """Scripts by (process, thread): lists of words."""
    scripts, process, thread = {}, 0, 0
    for line in lines:
        words = line.partition("#")[0].split()
        if not words or words[0] in ("devices", "mem", "evictable"):
            continue
        if words[0] == "process":
            process, thread = int(words[1]), 0
        elif words[0] == "thread":
            thread = int(words[1])
        else:
            scripts.setdefault((process, thread), []).append(words)
    return scripts


class Graph:
    """What must have happened before what. Nodes are numbers; what is before a node is a set of bits."""

    def __init__(self):
        self.edges = []

    def node(self, *before):
        self.edges.append([one for one in before if one is not None])
        return len(self.edges) - 1

    def before(self):
        """For each node all that is before it, itself included; None where there is a circle."""
        done, order, state = {}, [], [0] * len(self.edges)
        for root in range(len(self.edges)):
            stack = [(root, iter(self.edges[root]))] if not state[root] else []
            if stack:
                state[root] = 1
            while stack:
                node, rest = stack[-1]
                for after in rest:
                    if state[after] == 1:
                        return None
                    if state[after] == 0:
                        state[after] = 1
                        stack.append((after, iter(self.edges[after])))
                        break
                else:
                    state[node] = 2
                    order.append(node)
                    stack.pop()
        for node in order:
            bits = 1 << node
            for one in self.edges[node]:
                bits |= done[one]
            done[node] = bits
        return done


def faults(lines):
    """Why a program is not legal; nothing where it is."""
    scripts = parse(lines)
    graph = Graph()
    wrong = []
    begin, end, raised, waits, recorded = {}, {}, {}, [], {}
    sections, hosts, wholes, queued, meets, held_by = [], [], [], [], {}, {}
    spawned, flags = {}, set()
    # Streams of each process.
    made = {process: set() for process, _ in scripts}
    for (process, _), ops in scripts.items():
        made[process] |= {int(words[1]) for words in ops if words[0] == "stream"}
    for who, ops in scripts.items():
        begin[who] = graph.node()
        at, head, events, lock, plans = begin[who], {}, {}, None, {}
        for index, words in enumerate(ops):
            op, number = words[0], [int(word) if word.lstrip("-").isdigit() else 0 for word in words]
            issue = at
            at = graph.node(issue)
            here = f"process {who[0]} thread {who[1]} operation {index} ({' '.join(words)})"
            if lock is not None and (op in BLOCKING or op in WHOLE or op == "lock"):
                wrong.append(f"{here}: waits while a lock is held")

            def work(stream, *before):
                if stream not in made[who[0]]:
                    wrong.append(f"{here}: there is no such stream")
                done = graph.node(issue, head.get(stream), *before)
                head[stream] = done
                queued.append((who[0], issue, done))
                return done

            def hosted(stream, kind, which):
                done = work(stream)
                hosts.append((who[0], issue, done, kind, which))
                if kind == "wait":
                    waits.append((done, which, here))
                elif kind == "set":
                    raised.setdefault(which, done)
                return done

            if op in ("kernel", "fill", "set", "copy"):
                work(number[1])
            elif op == "send":
                graph.edges[at].append(work(number[1]))
            elif op in ("host", "callback"):
                hosted(number[1], words[2], number[3])
            elif op == "graph":
                plans[number[1]] = (words[3], number[4])
            elif op == "play":
                if number[1] not in plans:
                    wrong.append(f"{here}: the graph was not made")
                    continue
                kind, which = plans[number[1]]
                if kind == "set" and which in flags:
                    continue
                hosted(number[2], kind, which)
            elif op == "await":
                waits.append((work(number[1]), number[2], here))
            elif op == "write":
                if number[2] in raised:
                    wrong.append(f"{here}: the flag is raised twice")
                raised[number[2]] = work(number[1])
            elif op == "raise":
                if number[1] in raised:
                    wrong.append(f"{here}: the flag is raised twice")
                raised[number[1]] = at
            elif op == "wait":
                waits.append((at, number[1], here))
            elif op == "record":
                events[number[2]] = work(number[1])
            elif op == "follow":
                if number[2] not in events:
                    wrong.append(f"{here}: the event was not recorded")
                work(number[1], events.get(number[2]))
            elif op == "reach":
                if number[1] not in events:
                    wrong.append(f"{here}: the event was not recorded")
                    continue
                graph.edges[at].append(events[number[1]])
            elif op in ("sync", "look", "watched"):
                if op == "watched":
                    work(number[1])
                elif head.get(number[1]) is not None:
                    graph.edges[at].append(head[number[1]])
            elif op == "lock":
                lock = (number[1], at)
            elif op == "unlock":
                if lock is None:
                    wrong.append(f"{here}: no lock is held")
                    continue
                sections.append((who, lock[0], lock[1], at, here))
                lock = None
            elif op == "barrier":
                meets.setdefault(who[0], {}).setdefault(who, []).append((issue, at))
            elif op == "spawn":
                spawned[number[1]] = at
            elif op == "exec":
                spawned[number[1]] = at
            elif op == "join":
                if not [key for key in scripts if key[0] == number[1]] and number[1] not in spawned:
                    wrong.append(f"{here}: there is no such process")
                end.setdefault(("join", number[1]), []).append(at)
            if op in WHOLE:
                wholes.append((who[0], issue, at, here))
        if lock is not None:
            wrong.append(f"process {who[0]} thread {who[1]}: a lock is held at its end")
        end[who] = at
    for (process, _), node in [(who, node) for who, node in begin.items()]:
        if process in spawned:
            graph.edges[node].append(spawned[process])
        elif process != 0:
            wrong.append(f"process {process} is never started")
    for key, nodes in end.items():
        if key[0] == "join":
            for node in nodes:
                graph.edges[node] += [at for who, at in end.items() if who[0] == key[1]]
    for process, of in meets.items():
        counts = {len(of.get(who, ())) for who in scripts if who[0] == process}
        if len(counts) > 1:
            wrong.append(f"process {process}: threads meet a different number of times")
            continue
        for number in range(counts.pop()):
            arrivals = [one[number] for one in of.values()]
            for _, after in arrivals:
                graph.edges[after] += [issue for issue, _ in arrivals]
    for node, flag, here in waits:
        if flag not in raised:
            wrong.append(f"{here}: nobody raises the flag")
        else:
            graph.edges[node].append(raised[flag])
    if wrong:
        return wrong
    before = graph.before()
    if before is None:
        return ["a circle: something waits for itself"]

    def needs(node, other):
        return bool(before[node] >> other & 1)

    # Who wants a lock may come while another has it.
    takers = [(process, issue, done, which) for process, issue, done, kind, which in hosts if kind == "lock"]
    for who, lock, taken, given, here in sections:
        for process, _, done, which in takers:
            if process == who[0] and which == lock and needs(given, done) and not needs(taken, done):
                wrong.append(f"{here}: the lock's holder waits for a host function that wants it")
        for other, which, taken_too, given_too, _ in sections:
            if other != who and other[0] == who[0] and which == lock and needs(given, taken_too) and not needs(taken, given_too):
                wrong.append(f"{here}: two threads wait for each other's lock")
    # Host functions of a process may go one after another, in any order that their streams allow.
    for process, issue, done, kind, which in hosts:
        if kind == "set":
            continue
        release = [raised[which]] if kind == "wait" else [given for who, lock, _, given, _ in sections if who[0] == process and lock == which]
        for one, _, other, _, _ in hosts:
            if one != process or other == done or needs(issue, other):
                continue
            for freed in release:
                taken = next((a for _, _, a, b, _ in sections if b == freed), None) if kind == "lock" else None
                if needs(freed, other) and not needs(done, other) and not (taken is not None and needs(taken, other)):
                    wrong.append("a host function may stand before another one that it waits for")
                elif kind == "wait" and needs(freed, other) and not before_in_stream(before, done, other, freed):
                    wrong.append("a host function may stand before another one that it waits for")
    # What may wait for the whole device waits for whatever may have been submitted by then.
    for process, issue, at, here in wholes:
        for one, submitted, done in queued:
            if one == process and not needs(submitted, at) and needs(done, at):
                wrong.append(f"{here}: may wait for work that waits for it")
    return sorted(set(wrong))


def before_in_stream(before, done, other, freed):
    """Whether `other` comes before `done` by its stream, whatever frees `done`."""
    return bool(before[done] >> other & 1) and not bool(before[freed] >> other & 1)
