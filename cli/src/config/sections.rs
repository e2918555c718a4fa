//! Every section of the quota file, once: the settings in it, and where in [`Config`] they go. The
//! reader, its "did you mean", the JSON Schema and the page of settings come from here.

use control::kinds::{Count, DeviceMatch, Flag, Ratio, Share, Size};
use control::setting::About;
use control::{DeviceSettings, JobSettings, Settings};

use super::error::ConfigError;
use super::kinds::{AbsolutePath, NodeName, Pat, Url, User, Variables};
use super::parse::{self, Reader};
use super::{Config, DeviceRule, JobRule, TenantRule};

control::settings! {
    /// Which jobs a `[[job]]` section is for: those that match all of its patterns.
    pub struct JobMatch {
        /// Name of the job; * and ? match any characters and any one.
        name: Pat, unset "any";
        /// The whole command line or its program alone, with or without the program's directory; *
        /// and ? match any characters and any one.
        command: Pat, unset "any";
        /// Login name of the user; * and ? match any characters and any one.
        user: Pat, unset "any";
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
    /// Which user a `[[tenant]]` section is for.
    pub struct TenantMatch {
        /// Login name of the user; * and ? match any characters and any one.
        user: Pat, unset "required";
    }
}

control::settings! {
    /// What one user's jobs may have together.
    pub struct TenantCeilings {
        /// Most that the shares of the user's guaranteed jobs may sum to.
        share_max: Share, unset "no ceiling";
        /// Most that the memory limits of the user's jobs may sum to.
        mem_max: Size, unset "no ceiling";
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
        /// Address of the hook: "http://HOST:PORT".
        url: Url, unset "required";
        /// File with the hook's token, by absolute path.
        token_file: AbsolutePath, unset "no token";
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

/// A section of the file.
pub struct Section {
    pub name: &'static str,
    /// `[[name]]`, any number of times; else `[name]`, once.
    pub repeated: bool,
    pub doc: &'static str,
    /// What may stand in it.
    pub keys: fn() -> Vec<About>,
    /// Keys of which at least one must be there; empty for none.
    pub needs_one_of: &'static [&'static str],
    /// Takes every key of it.
    pub read: fn(&mut Reader<'_, '_>, &mut Config) -> Result<(), ConfigError>,
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

pub static SECTIONS: [Section; 7] = [
    Section {
        name: "defaults",
        repeated: false,
        doc: "What every job gets where nothing else says otherwise.",
        keys: keys::<JobSettings>,
        needs_one_of: &[],
        read: |reader, config| {
            config.defaults = parse::job_settings(reader)?;
            Ok(())
        },
    },
    Section {
        name: "device",
        repeated: true,
        doc: "How the arbiter runs a device. The first section that matches a device is the one it gets.",
        keys: || [keys::<DevicePlace>(), keys::<DeviceSettings>()].concat(),
        needs_one_of: &["device"],
        read: |reader, config| {
            config.devices.push(DeviceRule {
                device: reader.take::<DevicePlace>()?.device.flatten(),
                settings: parse::device_settings(reader)?,
            });
            Ok(())
        },
    },
    Section {
        name: "residency",
        repeated: false,
        doc: "How jobs share memory that does not hold all of them: what the host gives for it, and how long a job stays.",
        keys: keys::<ResidencyRule>,
        needs_one_of: &[],
        read: |reader, config| {
            config.residency = reader.take()?;
            Ok(())
        },
    },
    Section {
        name: "limits",
        repeated: false,
        doc: "What one job may have of the arbiter itself.",
        keys: keys::<Limits>,
        needs_one_of: &[],
        read: |reader, config| {
            config.limits = reader.take()?;
            Ok(())
        },
    },
    Section {
        name: "cluster",
        repeated: false,
        doc: "The hook that the arbiter reports to, and whose jobs it runs; for `sublet arbiter`, not for one that `sublet run` starts. Flags win.",
        keys: keys::<ClusterRule>,
        needs_one_of: &["url"],
        read: |reader, config| {
            config.cluster = reader.take()?;
            Ok(())
        },
    },
    Section {
        name: "tenant",
        repeated: true,
        doc: "Ceilings on what a user's jobs may have together on one device. The first section that matches a user is the one it gets.",
        keys: || [keys::<TenantMatch>(), keys::<TenantCeilings>()].concat(),
        needs_one_of: &["user"],
        read: |reader, config| {
            config.tenants.push(TenantRule {
                // PANIC: the section needs it, and the reader has checked.
                user: reader.take::<TenantMatch>()?.user.expect("a required key"),
                ceilings: reader.take()?,
            });
            Ok(())
        },
    },
    Section {
        name: "job",
        repeated: true,
        doc: "Settings for the jobs that match all patterns of the section. The first section that matches a job is the one it gets.",
        keys: || [keys::<JobMatch>(), keys::<JobSettings>()].concat(),
        needs_one_of: &["name", "command", "user"],
        read: |reader, config| {
            config.jobs.push(JobRule {
                matches: reader.take()?,
                settings: parse::job_settings(reader)?,
            });
            Ok(())
        },
    },
];
