//! Every section and key of the quota file, once. The reader, its "did you mean" and the JSON Schema come from here.

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
    /// `"exclusive"`, `"concurrent"` or `"auto"`
    Mode,
    /// Milliseconds, [`QUANTUM_MS`]
    Quantum,
    /// An index, a UUID, or a list of those
    Devices,
    /// An index, a UUID or `"*"`
    DeviceMatch,
    /// Text with `*` and `?`
    Pattern,
    /// `true` or `false`
    Switch,
}

/// Shortest and longest slice, in milliseconds.
pub const QUANTUM_MS: (f64, f64) = (0.5, 1000.0);

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

pub static DEFAULTS: Section = Section {
    name: "defaults",
    repeated: false,
    doc: "What every job gets where nothing else says otherwise.",
    keys: &[MEM, SHARE, CLASS, DEVICE, ON_ARBITER_LOSS],
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
            "exclusive: one job at a time, in slices; concurrent: all at once, only memory is limited; auto: the arbiter decides.",
        ),
        key(
            "quantum_ms",
            Kind::Quantum,
            "Length of a slice in milliseconds.",
        ),
        key(
            "early_wake",
            Kind::Switch,
            "Wakes the next job shortly before its slice begins, so that it is up when it does.",
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
        CLASS,
        DEVICE,
        ON_ARBITER_LOSS,
    ],
    needs_one_of: &["name", "command", "user"],
};

pub static SECTIONS: [&Section; 4] = [&DEFAULTS, &DEVICES, &TENANTS, &JOBS];
