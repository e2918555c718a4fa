//! Processes of containers, which nobody has registered: they come with no token and say what they
//! ask for, and the container that the kernel says they are in is their job.
//!
//! All processes of a container are one job, whatever their users: the first one's asking counts,
//! as that of any user does, and the rules of the host cap it. What a later one asks for is not
//! read, so what a container has is not raised from inside. A container that can write to its tree
//! of control groups can make groups that look like other containers, though: each is a job of its
//! own then, and caps by rules and by users hold for all of them.

use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use channel::wire::{Hello, Outcome};
use control::environment::{self, Asked};
use control::{JobSettings, JobSpec};
use policy::TenantId;

use crate::attach::Verdict;
use crate::behalf;
use crate::container::{self, InContainer, Origin};
use crate::convert::NotIn;
use crate::descriptors::Descriptors;
use crate::peer;
use crate::serve::Arbiter;
use crate::who::Peer;

/// Says that the process's driver simulates.
const SIMULATED: &str = "SUBLET_SIM";
/// Digits of a container's id in a name.
const SHORT: usize = 12;

impl Arbiter {
    /// The job of the container that a process is in; registers it where there is none yet.
    ///
    /// # Errors
    /// What becomes of the process meanwhile, or instead.
    pub(crate) fn job_of_container(
        &mut self,
        hello: &Hello,
        (pid, uid, process): (u32, u32, BorrowedFd<'_>),
        may_hold: bool,
        now_ns: u64,
    ) -> Result<TenantId, Verdict> {
        let refused = |outcome, text: String| Verdict::Out(NotIn::new(outcome, text));
        let origin = Origin::of(pid);
        // Looked at after the files were read: if it lives, they were its.
        let origin = if peer::has_ended(process) {
            Ok(Origin::Unknown)
        } else {
            origin
        };
        let key = match origin {
            Ok(Origin::Container(key)) => key,
            Ok(Origin::Here) => {
                let text =
                    "it has no token and is in no container: start the program with `sublet run`";
                return Err(refused(Outcome::UnknownToken, text.into()));
            }
            // Nobody walks in over TCP.
            Ok(Origin::Unknown | Origin::NotLookedAt | Origin::Remote(_)) => {
                let text = "it has no token, and the container that it is in cannot be seen";
                return Err(refused(Outcome::UnknownToken, text.into()));
            }
            Err(_) => return Err(refused(Outcome::Failed, Descriptors::lack())),
        };
        let known = self.ledger.iter().find(|tenant| {
            let same = tenant
                .container
                .as_ref()
                .is_some_and(|one| *one.key == *key);
            same && (tenant.process.is_some() || !container::is_nameless(&key))
        });
        if let Some(tenant) = known {
            return Ok(tenant.id);
        }
        let (asked, simulated) =
            read(&hello.asked).map_err(|text| refused(Outcome::Malformed, text))?;
        let user_named = self.names.ask(uid, now_ns);
        let host_known = simulated || !self.discovery.waits_for_host();
        if may_hold && !(user_named && host_known) {
            return Err(Verdict::Hold);
        }
        // Rules go by it: one that could not be read is not taken for that of anybody.
        let identity = container::identity_of(pid, &key);
        if !container::is_in(&identity, &key) || peer::has_ended(process) {
            let text = "the process has ended, or was moved into another container";
            return Err(refused(Outcome::UnknownToken, text.into()));
        }
        let place = &identity.place;
        let named = container::is_nameless(&key) || {
            let top = || container::top_of(pid, &key);
            self.container_names.ask(&place.container, top)
        };
        if may_hold && !named {
            return Err(Verdict::Hold);
        }
        if !user_named {
            self.names.give_up(uid);
        }
        let settings = asked.below(&JobSettings::default());
        settings.check().map_err(|(name, message)| {
            refused(
                Outcome::Malformed,
                format!("the container's {name} is {message}"),
            )
        })?;
        let called = self.container_names.of(&place.container).to_owned();
        let name = asked
            .name
            .unwrap_or_else(|| job_name(&called, &place.runtime, &place.container));
        let job = JobSpec {
            // A container has no part in jobs of Slurm's, whatever it calls itself.
            name: self.ledger.free_name(&behalf::unreserved(name)),
            settings,
            pid: container::top_of(pid, &key),
            command: vec![hello.command.clone()],
            simulated,
            ..JobSpec::default()
        };
        let peer = Peer {
            pid: job.pid,
            uid,
            origin: Origin::Container(Arc::clone(&key)),
        };
        let registered = self
            .register_as(job, &peer, identity)
            .map_err(|error| refused(Outcome::Full, error.to_string()))?;
        let id = TenantId(registered.id);
        if let Some(tenant) = self.ledger.get_mut(id) {
            // Its processes are older than its registration.
            tenant.since_ticks = tenant.since_ticks.min(tenant.started_ticks);
            tenant.container = Some(InContainer {
                key: key.to_string(),
                name: called,
            });
        }
        Ok(id)
    }

    /// Containers' names were looked up.
    pub(crate) fn on_container_names(&mut self, now_ns: u64) {
        self.container_names.take();
        self.answer_greetings(now_ns);
    }
}

/// What is asked for in these lines, and whether the driver simulates.
fn read(asked: &str) -> Result<(Asked, bool), String> {
    let value = |name: &str| {
        let lines = asked.lines().filter_map(|line| line.split_once('='));
        let mut said = lines.filter(|(variable, _)| *variable == name);
        said.next().map(|(_, value)| OsString::from(value))
    };
    let simulated = value(SIMULATED).is_some_and(|value| !value.is_empty());
    let asked = environment::asked(value).map_err(|error| error.to_string())?;
    Ok((asked, simulated))
}

/// After the container; by its id where it has no name.
fn job_name(called: &str, runtime: &str, id: &str) -> String {
    if !called.is_empty() {
        return control::name_from_command(&[called]);
    }
    let runtime = if runtime.is_empty() {
        "container"
    } else {
        runtime
    };
    let id = id.strip_prefix("pidns-").unwrap_or(id);
    let short: String = id.chars().take(SHORT).collect();
    format!("{runtime}-{short}")
}

#[cfg(test)]
mod tests {
    use control::Settings as _;

    use super::*;

    #[test]
    fn what_a_process_asks_for_is_a_line_for_each_variable() {
        let (asked, simulated) =
            read("SUBLET_SIM=1\nSUBLET_MEM=8GiB\nCUDA_DEVICE_SM_LIMIT=30\nnonsense\n")
                .expect("read");
        let settings = asked.below(&JobSettings::default());
        assert!(simulated && settings.mem.is_some());
        assert_eq!(settings.share_max, Some(0.3));
        let (nothing, simulated) = read("").expect("read");
        assert!(nothing.own.is_empty() && !simulated);
        let error = read("SUBLET_MEM=20\n").expect_err("no unit");
        assert!(
            error.contains("SUBLET_MEM") && error.contains("`20`"),
            "{error}"
        );
    }

    #[test]
    fn a_job_is_called_after_its_container() {
        let id = "0123456789abcdef";
        assert_eq!(job_name("hopper", "docker", id), "hopper");
        assert_eq!(job_name("", "podman", id), "podman-0123456789ab");
        assert_eq!(job_name("", "", "pidns-4026532180"), "container-4026532180");
        for odd in ["/", "ä ö", "../../x", "-c"] {
            let name = job_name(odd, "", id);
            control::check_name(&name).expect("a name");
        }
    }
}
