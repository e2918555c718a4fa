//! Every section of the quota file, once: the settings in it, and where in [`Config`] they go. The
//! reader, its "did you mean", the JSON Schema and the page of settings come from here.

use control::kinds::{Count, DeviceMatch, Flag, Ratio, Share, Size};
use control::setting::About;
use control::{DeviceSettings, JobSettings, Settings};

use super::kinds::{AbsolutePath, Groups, ListenAddress, NodeName, Pats, Url, User, Variables};
use super::parse::{self, Reader};
use super::{Config, DeviceRule, JobRule, UserRule};

control::settings! {
    /// Which jobs a `[[rule]]` is for: those that match all of these. Each takes one pattern or a
    /// list of them, of which one must match; * and ? match any characters and any one.
    pub struct JobMatch {
        /// Name of the job.
        name: Pats, unset "any";
        /// The whole command line or its program alone, with or without the program's directory.
        command: Pats, unset "any";
        /// Login name of the user, or the number of one without a name.
        user: Pats, unset "any";
        /// Group of the process that registers the job, its first one or a further one: name or
        /// number, without * and ?.
        group: Groups, unset "any";
        /// Control group of that process: a path such as "/user.slice/*", in any hierarchy.
        cgroup: Pats, unset "any";
        /// Container of that process, by its id of 64 digits; "*" for any container.
        container: Pats, unset "any";
        /// Slurm account of the job. What only the job's own environment says of it is believed
        /// for `cap` and not for `set`.
        slurm_account: Pats, unset "any";
    }
}

control::settings! {
    /// Which device a `[[device]]` section is for.
    pub struct DevicePlace {
        /// Index, UUID, or "*" for every device.
        device: DeviceMatch, unset "required";
    }
}

control::settings! {
    /// Which user a `[[user]]` section is for.
    pub struct UserMatch {
        /// Login name of the user, or the number of one without a name; several in a list. * and ?
        /// match any characters and any one.
        user: Pats, unset "required";
    }
}

control::settings! {
    /// What one user's jobs may have together.
    pub struct UserCeilings {
        /// Most that the shares of the user's guaranteed jobs may sum to.
        share_max: Share, unset "no ceiling";
        /// Most that the memory limits of the user's jobs may sum to.
        mem_max: Size, unset "no ceiling";
        /// Most jobs of the user at the same time.
        jobs_max: Count<1, 256>, unset "256";
    }
}

control::settings! {
    /// What the host gives for memory that is not on its devices.
    pub struct ResidencyRule {
        /// Host memory that evicted and overflowing bytes of all jobs may take together, or a part
        /// of the host's ("50%").
        host_memory: Size, unset "`\"50%\"`";
        /// How many times longer than the switch before it a job stays on the device at the least
        /// while another job waits for its memory.
        slice_over_switch: Ratio<1, 1000>, unset "10";
    }
}

control::settings! {
    /// What one job may have of the arbiter itself.
    pub struct Limits {
        /// Processes of one job that use a device at the same time. Further ones do not start.
        job_processes: Count<1, 4096>, unset "1024";
    }
}

control::settings! {
    /// The hook that the arbiter reports to.
    pub struct ClusterRule {
        /// Address of the hook: "https://HOST:PORT", or "http://HOST:PORT" where it has no TLS.
        url: Url, unset "required";
        /// File with the hook's token, or this node's, by absolute path.
        token_file: AbsolutePath, unset "no token";
        /// Certificate of the authority that vouches for a hook with TLS, in PEM, by absolute path.
        ca_file: AbsolutePath, unset "none; needed with https://";
        /// Certificate of this node in PEM, by absolute path, for a hook that demands one.
        cert_file: AbsolutePath, unset "none is shown";
        /// Its key in PEM, by absolute path; its owner's alone.
        key_file: AbsolutePath, unset "none; needed with `cert_file`";
        /// What this node is called there.
        node: NodeName, unset "the host's name";
        /// As whom the hook's jobs run; needed where the arbiter is root's.
        user: User, unset "the arbiter's user";
        /// Where its jobs' output and working directories lie, by absolute path.
        dir: AbsolutePath, unset "/var/lib/sublet/jobs for the host's arbiter, else the runtime directory";
        /// Variables of the arbiter's environment that its jobs get as well, with commas between:
        /// "LD_LIBRARY_PATH,NCCL_SOCKET_IFNAME".
        env: Variables, unset "none";
        /// true: the simulated GPU is offered, also where there is a real one.
        sim: Flag, unset "`false`";
    }
}

control::settings! {
    /// Where other hosts reach the control API.
    pub struct ApiRule {
        /// Address and port to listen at: "10.0.0.7:7443", or "[::]:7443" for all addresses.
        listen: ListenAddress, unset "not served over TCP";
        /// Certificate with its chain in PEM, by absolute path.
        cert_file: AbsolutePath, unset "none; needed with `listen`";
        /// Its key in PEM, by absolute path; its owner's alone.
        key_file: AbsolutePath, unset "none; needed with `listen`";
        /// The tokens that count, by absolute path; its owner's alone.
        tokens_file: AbsolutePath, unset "none; needed with `listen`";
    }
}

/// A section of the file.
pub struct Section {
    pub name: &'static str,
    /// `[[name]]`, any number of times; else `[name]`, once.
    pub repeated: bool,
    pub doc: &'static str,
    /// What may stand in it.
    pub keys: fn() -> Vec<About>,
    /// Tables that may stand in it.
    pub parts: &'static [Part],
    /// Keys and tables of which at least one must be there; empty for none.
    pub needs_one_of: &'static [&'static str],
    /// Takes every key of it.
    pub read: fn(&mut Reader<'_, '_>, &mut Config),
}

/// A table in a section.
pub struct Part {
    pub name: &'static str,
    pub doc: &'static str,
    pub keys: fn() -> Vec<About>,
}

impl Section {
    pub fn heading(&self) -> String {
        if self.repeated {
            format!("[[{}]]", self.name)
        } else {
            format!("[{}]", self.name)
        }
    }
}

/// The rows of a table of settings without their struct.
pub fn keys<S: Settings>() -> Vec<About> {
    S::TABLE.iter().map(|setting| setting.about).collect()
}

pub static SECTIONS: [Section; 8] = [
    Section {
        name: "defaults",
        repeated: false,
        doc: "What every job gets where nothing else says otherwise.",
        keys: keys::<JobSettings>,
        parts: &[],
        needs_one_of: &[],
        read: |reader, config| {
            config.defaults.push(JobRule {
                set: parse::job_settings(reader),
                from: reader.place(),
                ..JobRule::default()
            });
        },
    },
    Section {
        name: "device",
        repeated: true,
        doc: "How the arbiter runs a device. The first section that matches a device is the one it gets.",
        keys: || [keys::<DevicePlace>(), keys::<DeviceSettings>()].concat(),
        parts: &[],
        needs_one_of: &["device"],
        read: |reader, config| {
            config.devices.push(DeviceRule {
                device: reader.take::<DevicePlace>().device.flatten(),
                settings: parse::device_settings(reader),
            });
        },
    },
    Section {
        name: "residency",
        repeated: false,
        doc: "How jobs share memory that does not hold all of them: what the host gives for it, and how long a job stays.",
        keys: keys::<ResidencyRule>,
        parts: &[],
        needs_one_of: &[],
        read: |reader, config| {
            config.residency = reader.take();
        },
    },
    Section {
        name: "limits",
        repeated: false,
        doc: "What one job may have of the arbiter itself.",
        keys: keys::<Limits>,
        parts: &[],
        needs_one_of: &[],
        read: |reader, config| {
            config.limits = reader.take();
        },
    },
    Section {
        name: "cluster",
        repeated: false,
        doc: "The hook that the arbiter reports to, and whose jobs it runs; for `sublet arbiter`, not for one that `sublet run` starts. Flags win.",
        keys: keys::<ClusterRule>,
        parts: &[],
        needs_one_of: &["url"],
        read: |reader, config| {
            config.cluster = reader.take();
        },
    },
    Section {
        name: "api",
        repeated: false,
        doc: "Serves the control API to other hosts, over TCP with TLS and tokens; for `sublet arbiter`, not for one that `sublet run` starts. Read when the arbiter starts. Flags win.",
        keys: keys::<ApiRule>,
        parts: &[],
        needs_one_of: &["listen"],
        read: |reader, config| {
            config.api = reader.take();
        },
    },
    Section {
        name: "user",
        repeated: true,
        doc: "Ceilings on what a user's jobs may have together; of time and memory, on one device. The first section that matches a user is the one it gets.",
        keys: || [keys::<UserMatch>(), keys::<UserCeilings>()].concat(),
        parts: &[],
        needs_one_of: &["user"],
        read: |reader, config| {
            let matches: UserMatch = reader.take();
            let ceilings = reader.take();
            config.users.extend(matches.user.map(|user| UserRule {
                user,
                ceilings,
                from: reader.place(),
            }));
        },
    },
    Section {
        name: "rule",
        repeated: true,
        doc: "What jobs get. Every rule that matches a job counts: a later one beats an earlier one, and each cap holds. Without `match` a rule is for every job.",
        keys: Vec::new,
        parts: &[
            Part {
                name: "match",
                doc: "The jobs that the rule is for: those that match all of it.",
                keys: keys::<JobMatch>,
            },
            Part {
                name: "set",
                doc: "What a job gets that does not ask for something else.",
                keys: keys::<JobSettings>,
            },
            Part {
                name: "cap",
                doc: "The most that a job gets, whatever it asks for. `class = \"opportunistic\"` keeps it from being guaranteed.",
                keys: caps,
            },
        ],
        needs_one_of: &["set", "cap"],
        read: |reader, config| {
            let matches = reader.part("match", |part| part.take());
            let set = reader.part("set", parse::job_settings);
            let cap = reader.part("cap", |part| part.take());
            config.rules.push(JobRule {
                matches: matches.unwrap_or_default(),
                set: set.unwrap_or_default(),
                cap: cap.unwrap_or_default(),
                from: reader.place(),
            });
        },
    },
];

/// The settings that may be capped.
pub fn caps() -> Vec<About> {
    let mut caps = keys::<JobSettings>();
    caps.retain(|about| about.capped);
    caps
}
