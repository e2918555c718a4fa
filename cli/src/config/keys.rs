//! Every section and key of the quota file, once. The reader, its "did you mean" and the JSON
//! Schema come from here.

/// A section of the file.
#[derive(Debug)]
pub struct Section {
    pub name: &'static str,
    /// `[[name]]`, any number of times; else `[name]`, once.
    pub repeated: bool,
    pub doc: &'static str,
    pub keys: &'static [Key],
    /// Keys of which at least one must be there; empty for none.
    pub needs_one_of: &'static [&'static str],
}

#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    pub kind: Kind,
    pub doc: &'static str,
}

/// What a key's value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `"8GiB"` or `"50%"`
    Size,
    /// A number, `0 < x <= 1`
    Share,
    /// `"guaranteed"` or `"opportunistic"`
    Class,
    /// `"open"`, `"freeze"` or `"closed"`
    FailMode,
    /// `"open"` or `"closed"`
    OnRefusal,
    /// `"exclusive"`, `"concurrent"` or `"auto"`
    Mode,
    /// Milliseconds, [`QUANTUM_MS`]
    Quantum,
    /// A policy's name, or a table of its name and its parameters
    Policy,
    /// A whole number, 1 to 64
    Holders,
    /// A whole number, 1 to [`PROCESSES`]
    Processes,
    /// `"report"`, `"demote"` or `"kill"`
    Misbehaviour,
    /// `true` or `false`
    Flag,
    /// A duration such as `"90s"`
    Span,
    /// An index, a UUID, or a list of those
    Devices,
    /// An index, a UUID or `"*"`
    DeviceMatch,
    /// Text with `*` and `?`
    Pattern,
    /// `"host"` or `"fail"`
    Overflow,
    /// An absolute path of a directory
    Directory,
    /// Names of variables with commas between
    Variables,
    /// A number, [`RATIO`]
    Ratio,
    /// `"http://HOST:PORT"`
    Url,
    /// An absolute path
    File,
    /// Name of a node
    Node,
    /// Login name or number of one user
    User,
}

/// Shortest and longest slice, in milliseconds.
pub const QUANTUM_MS: (f64, f64) = (0.5, 1000.0);

/// Most processes that a job can be allowed: places in its page.
pub const PROCESSES: f64 = 4096.0;

/// Least and largest part that a job's stay on the device may have of its switch.
pub const RATIO: (f64, f64) = (1.0, 1000.0);

const fn key(name: &'static str, kind: Kind, doc: &'static str) -> Key {
    Key { name, kind, doc }
}

const MEM: Key = key(
    "mem",
    Kind::Size,
    "Memory limit on each device of the job: 1024-based with a unit (\"8GiB\", \"512M\"), or a part of the device (\"50%\").",
);
const SHARE: Key = key(
    "share",
    Kind::Share,
    "Part of the device's time, above 0 and at most 1.",
);
const SHARE_MIN: Key = key(
    "share_min",
    Kind::Share,
    "Part of the device's time that the job gets at the least while it wants it, whatever its class.",
);
const SHARE_MAX: Key = key(
    "share_max",
    Kind::Share,
    "Part of the device's time that the job gets at the most, also where nobody else wants it.",
);
const GANG: Key = key(
    "gang",
    Kind::Flag,
    "true: the job gets all of its devices at once or none, so that no rank of a collective waits for another one's turn (so by default for a job on several devices); false: each device by itself.",
);
const DEADLINE: Key = key(
    "deadline",
    Kind::Span,
    "Time from the start of the job by which its work should be done (\"90m\"), for the policy `deadline`; needs `work`.",
);
const WORK: Key = key(
    "work",
    Kind::Span,
    "Device time that the job's work takes in all (\"40m\"), for the policies that look at what is left.",
);
const CLASS: Key = key(
    "class",
    Kind::Class,
    "guaranteed: gets its share whenever it wants it; opportunistic: runs in what guaranteed jobs leave.",
);
const DEVICE: Key = key(
    "device",
    Kind::Devices,
    "The device or devices of the job: index, UUID, or a list. Left out: the arbiter chooses.",
);
const ON_ARBITER_LOSS: Key = key(
    "on_arbiter_loss",
    Kind::FailMode,
    "What the job does while the arbiter is gone. open: goes on without slices; freeze: waits; closed: its device calls fail.",
);
const ON_REFUSAL: Key = key(
    "on_refusal",
    Kind::OnRefusal,
    "What becomes of a process of the job that cannot be governed. closed: every driver call of it fails (so by default where mem, share_max or --strict is given); open: it runs without limits.",
);

const EVICTABLE: Key = key(
    "evictable",
    Kind::Flag,
    "true: the job's memory may leave the device while others run, and comes back before its turn.",
);
const OVERFLOW: Key = key(
    "overflow",
    Kind::Overflow,
    "What happens to an allocation above the memory limit. fail: it fails; host: it lives in host memory; needs `evictable`.",
);
const HOST_MEMORY: Key = key(
    "host_memory",
    Kind::Size,
    "Host memory that the job may take for what is not on its devices, or a part of the host's (\"10%\"); needs `evictable`.",
);

pub static DEFAULTS: Section = Section {
    name: "defaults",
    repeated: false,
    doc: "What every job gets where nothing else says otherwise.",
    keys: &[
        MEM,
        SHARE,
        SHARE_MIN,
        SHARE_MAX,
        CLASS,
        DEVICE,
        GANG,
        DEADLINE,
        WORK,
        ON_ARBITER_LOSS,
        ON_REFUSAL,
        EVICTABLE,
        OVERFLOW,
        HOST_MEMORY,
    ],
    needs_one_of: &[],
};

pub static DEVICES: Section = Section {
    name: "device",
    repeated: true,
    doc: "How the arbiter runs a device. The first section that matches a device is the one it gets.",
    keys: &[
        key(
            "device",
            Kind::DeviceMatch,
            "Index, UUID, or \"*\" for every device.",
        ),
        key(
            "mode",
            Kind::Mode,
            "exclusive: one job at a time, in slices; concurrent: all at once, only memory is limited; auto: all at once while that serves every guaranteed job as well as slices would, else slices.",
        ),
        key(
            "policy",
            Kind::Policy,
            "Who runs next: the name of a slice policy, or { name = \"...\", parameter = number }.",
        ),
        key(
            "holders",
            Kind::Holders,
            "How many jobs may hold the device at once in slices, where the policy makes use of it.",
        ),
        key(
            "quantum_ms",
            Kind::Quantum,
            "Longest slice in milliseconds, and what two jobs have while one of them is guaranteed. Left out: 50, and 5 for those.",
        ),
        key(
            "quantum_min_ms",
            Kind::Quantum,
            "Shortest slice in milliseconds.",
        ),
        key(
            "early_wake",
            Kind::Flag,
            "true: the next job is woken shortly before its turn and polls, so that a hand-over costs no scheduler's wake-up.",
        ),
        key(
            "misbehaviour",
            Kind::Misbehaviour,
            "What happens to a job that harms the others. report: it is reported; demote: it also runs after all others until it behaves; kill: its processes are ended.",
        ),
        key(
            "mem_reserve",
            Kind::Size,
            "Memory kept from every quota, for what is not a job's.",
        ),
    ],
    needs_one_of: &["device"],
};

pub static TENANTS: Section = Section {
    name: "tenant",
    repeated: true,
    doc: "Ceilings on what a user's jobs may have together on one device. The first section that matches a user is the one it gets.",
    keys: &[
        key(
            "user",
            Kind::Pattern,
            "Login name of the user; * and ? match any characters and any one.",
        ),
        key(
            "share_max",
            Kind::Share,
            "Most that the shares of the user's guaranteed jobs may sum to.",
        ),
        key(
            "mem_max",
            Kind::Size,
            "Most that the memory limits of the user's jobs may sum to.",
        ),
    ],
    needs_one_of: &["user"],
};

pub static JOBS: Section = Section {
    name: "job",
    repeated: true,
    doc: "Settings for the jobs that match all patterns of the section. The first section that matches a job is the one it gets.",
    keys: &[
        key(
            "name",
            Kind::Pattern,
            "Name of the job; * and ? match any characters and any one.",
        ),
        key(
            "command",
            Kind::Pattern,
            "The whole command line or its program alone, with or without the program's directory; * and ? match any characters and any one.",
        ),
        key(
            "user",
            Kind::Pattern,
            "Login name of the user; * and ? match any characters and any one.",
        ),
        MEM,
        SHARE,
        SHARE_MIN,
        SHARE_MAX,
        CLASS,
        DEVICE,
        GANG,
        DEADLINE,
        WORK,
        ON_ARBITER_LOSS,
        ON_REFUSAL,
        EVICTABLE,
        OVERFLOW,
        HOST_MEMORY,
    ],
    needs_one_of: &["name", "command", "user"],
};

pub static RESIDENCY: Section = Section {
    name: "residency",
    repeated: false,
    doc: "How jobs share memory that does not hold all of them: what the host gives for it, and how long a job stays.",
    keys: &[
        key(
            "host_memory",
            Kind::Size,
            "Host memory that evicted and overflowing bytes of all jobs may take together, or a part of the host's (\"50%\", as where nothing is said).",
        ),
        key(
            "slice_over_switch",
            Kind::Ratio,
            "How many times longer than the switch before it a job stays on the device at the least while another job waits for its memory: 1 to 1000; 10 by default.",
        ),
    ],
    needs_one_of: &[],
};

pub static LIMITS: Section = Section {
    name: "limits",
    repeated: false,
    doc: "What one job may have of the arbiter itself.",
    keys: &[key(
        "job_processes",
        Kind::Processes,
        "Processes of one job that use a device at the same time: 1 to 4096; 1024 where nothing is said. Further ones do not start.",
    )],
    needs_one_of: &[],
};

pub static CLUSTER: Section = Section {
    name: "cluster",
    repeated: false,
    doc: "The hook that the arbiter reports to, and whose jobs it runs; for `sublet arbiter`, not for one that `sublet run` starts. Flags win.",
    keys: &[
        key(
            "url",
            Kind::Url,
            "Address of the hook: \"http://HOST:PORT\".",
        ),
        key(
            "token_file",
            Kind::File,
            "File with the hook's token, by absolute path.",
        ),
        key(
            "node",
            Kind::Node,
            "What this node is called there. Left out: the host's name.",
        ),
        key(
            "user",
            Kind::User,
            "As whom the hook's jobs run; needed where the arbiter is root's.",
        ),
        key(
            "dir",
            Kind::Directory,
            "Where its jobs' output and working directories lie, by absolute path. Left out: /var/lib/sublet/jobs for the host's arbiter, else the runtime directory.",
        ),
        key(
            "env",
            Kind::Variables,
            "Variables of the arbiter's environment that its jobs get as well, with commas between: \"LD_LIBRARY_PATH,NCCL_SOCKET_IFNAME\".",
        ),
        key(
            "sim",
            Kind::Flag,
            "true: the simulated GPU is offered, also where there is a real one.",
        ),
    ],
    needs_one_of: &["url"],
};

pub static SECTIONS: [&Section; 7] = [
    &DEFAULTS, &DEVICES, &RESIDENCY, &LIMITS, &CLUSTER, &TENANTS, &JOBS,
];
