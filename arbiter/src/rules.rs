//! What the rules of the quota files make of jobs: when one registers, when something is asked for
//! it, and when the files have changed while it runs.
//!
//! Which rules match is for [`crate::rulebook`] to say, and what several of them come to for
//! [`control::in_force`]. Here new terms are held against what was promised to others.

use std::collections::BTreeSet;

use control::place::Identity;
use control::{
    Bounds, ConfigReport, ConfigValue, ControlError, ErrorCode, JobSettings, Layer, MemLimit,
    Reply, Settings, in_force, text_of,
};
use policy::TenantId;
use serde_json::Value;

use crate::convert;
use crate::journal::About;
use crate::operator::only_ours;
use crate::options::Subject;
use crate::refusal::{Ceiling, LEAST_SHARE, Refusal};
use crate::serve::Arbiter;
use crate::spec::Spec;
use crate::tenant::Tenant;
use crate::who::Peer;

/// Settings that others were promised something beside.
const PROMISES: [&str; 2] = ["share", "share_min"];

/// Whose job it is that rules are looked up for.
#[derive(Clone, Copy, Debug)]
pub struct Whose<'a> {
    pub uid: u32,
    /// Login name; empty where there is none.
    pub user: &'a str,
    pub identity: &'a Identity,
    /// Its part of what its user has.
    pub user_caps: &'a [Layer],
    /// When it registered.
    pub start_unix_ms: u64,
}

impl<'a> Whose<'a> {
    /// Of a job that is there.
    pub fn of(tenant: &'a Tenant) -> Self {
        Self {
            uid: tenant.uid,
            user: &tenant.user,
            identity: &tenant.identity,
            user_caps: &tenant.user_caps,
            start_unix_ms: tenant.started_unix_ms,
        }
    }
}

/// What people see of a job's terms.
#[derive(PartialEq)]
struct Shown {
    settings: JobSettings,
    bounds: Bounds,
    limits: Vec<Option<u64>>,
}

impl Shown {
    fn of(tenant: &Tenant) -> Self {
        Self {
            settings: tenant.spec.settings.clone(),
            bounds: Bounds {
                from: Vec::new(),
                ..tenant.spec.bounds.clone()
            },
            limits: tenant.limits.to_vec(),
        }
    }
}

impl Arbiter {
    /// Puts in force for a job what it was given and what the rules say. Of one that is `running`
    /// what cannot be changed at run time stays as it is.
    pub(crate) fn go_by_rules(&self, spec: &mut Spec, whose: Whose<'_>, running: bool) {
        self.go_by_rules_but(spec, whose, running, |_| false);
    }

    /// The same, where what rules set of some keys does not count.
    fn go_by_rules_but(
        &self,
        spec: &mut Spec,
        whose: Whose<'_>,
        running: bool,
        left_out: impl Fn(&str) -> bool,
    ) {
        let command = spec.command.join(" ");
        let subject = Subject {
            name: &spec.name,
            command: &command,
            uid: whose.uid,
            user: whose.user,
            identity: whose.identity,
        };
        let mut layers = self.rulebook.layers(&subject);
        for layer in &mut layers.set {
            let counts =
                |about: &control::setting::About| (about.live || !running) && !left_out(about.key);
            layer.settings = layer.settings.only(counts);
        }
        let mut caps = spec.own_caps.clone();
        if !spec.unbound {
            caps.append(&mut layers.caps);
            caps.extend(whose.user_caps.iter().cloned());
        }
        let mut own = spec.own.clone();
        if running {
            // As it was when it began, whatever rules said then.
            own = own.or(&spec.settings.only(|about| left_out(about.key)));
        }
        let totals = self.totals_of(spec);
        let it = in_force(&own, &layers.set, &caps, &totals, whose.start_unix_ms);
        (spec.settings, spec.bounds) = (it.settings, it.bounds);
        if !running {
            let fixed = spec.settings.only(|about| !about.live);
            spec.own = spec.own.clone().or(&fixed);
        }
    }

    /// Memory of a job's devices that quotas may promise, as far as it is known.
    fn totals_of(&self, spec: &Spec) -> Vec<u64> {
        let devices = self.devices.iter().map(|(index, _)| index);
        let own = devices.filter(|index| {
            self.devices
                .entitled(*index, spec.settings.devices(), spec.simulated)
        });
        own.filter_map(|index| self.ledger.usable_bytes(&self.devices, index))
            .collect()
    }

    /// Goes by the rules as they are now with every job; how many have other terms from here on.
    /// One whose new terms cannot be promised keeps what it was promised. Where the rules are new,
    /// what root has given beyond the old ones ends.
    pub(crate) fn apply_rules(&mut self, new: bool) -> u32 {
        self.read_accounts();
        let ids: Vec<TenantId> = self.ledger.iter().map(|tenant| tenant.id).collect();
        let before: Vec<Shown> = self.ledger.iter().map(Shown::of).collect();
        for tenant in self.ledger.iter_mut() {
            tenant.spec.unbound &= !new;
            tenant.user_caps.clear();
        }
        // What some give back others may have been promised: those that get less come first.
        let mut waiting = ids.clone();
        for _ in 0..2 {
            waiting.retain(|id| self.apply_rules_to(*id).is_err());
        }
        for id in waiting {
            self.keep_promised(id);
        }
        self.fit_users();
        self.publish_limits();
        self.publish_terms();
        let mut changed = 0;
        // What comes of a start, or of devices that are known now, is no news.
        for (id, before) in ids.into_iter().zip(before).filter(|_| new) {
            changed += u32::from(self.tell_of_change(id, &before));
        }
        changed
    }

    /// # Errors
    /// The terms that rules give it cannot be promised beside what others were promised.
    fn apply_rules_to(&mut self, id: TenantId) -> Result<(), Refusal> {
        let Some(tenant) = self.ledger.get(id) else {
            return Ok(());
        };
        let mut spec = tenant.spec.clone();
        self.go_by_rules(&mut spec, Whose::of(tenant), true);
        self.take_terms(id, spec)
    }

    fn take_terms(&mut self, id: TenantId, spec: Spec) -> Result<(), Refusal> {
        let Some(tenant) = self.ledger.get(id) else {
            return Ok(());
        };
        if tenant.dormant.is_none() && spec.settings != tenant.spec.settings {
            let (uid, user) = (tenant.uid, tenant.user.clone());
            self.admit(&spec, Some(id), (uid, &user, &Ceiling::default()))?;
            self.admit_overflow(id, &spec)?;
        }
        if let Some(tenant) = self.ledger.get_mut(id) {
            tenant.spec = spec;
        }
        Ok(())
    }

    /// A job keeps the share that it was promised, and has the rest of its new terms; where it
    /// cannot have these either, it goes on as it was.
    fn keep_promised(&mut self, id: TenantId) {
        let Err(refusal) = self.apply_rules_to(id) else {
            return;
        };
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        let mut spec = tenant.spec.clone();
        let promised = |key: &str| PROMISES.contains(&key);
        self.go_by_rules_but(&mut spec, Whose::of(tenant), true, promised);
        let kept = match self.take_terms(id, spec) {
            Ok(()) => "it keeps the share that it has",
            Err(_) => "it goes on as it was",
        };
        let now_ns = self.clock.mono_ns();
        let reason = convert::refusal(&refusal);
        if let Some(tenant) = self.ledger.get_mut(id)
            && tenant.allowance.spend(now_ns).is_some()
        {
            let name = tenant.spec.name.clone();
            let message =
                format!("job `{name}` cannot have what the quota files say: {kept}: {reason}");
            let fields = [("reason", Value::from(reason.to_string()))];
            self.journal
                .write("not_applied", About::job(&name, id.0), message, &fields);
        }
    }

    /// Where a user's jobs have more together than the quota files let them, each has the same part
    /// of what it had.
    fn fit_users(&mut self) {
        let uids: BTreeSet<u32> = self.ledger.awake().map(|tenant| tenant.uid).collect();
        for uid in uids {
            let first = self.ledger.awake().find(|tenant| tenant.uid == uid);
            let Some(user) = first.map(|tenant| tenant.user.clone()) else {
                continue;
            };
            let ceiling = self.rulebook.ceiling(uid, &user);
            if ceiling.share_max.is_none() && ceiling.mem_max.is_none() {
                continue;
            }
            for (id, settings) in self.fitting(uid, &ceiling) {
                let Some(tenant) = self.ledger.get_mut(id).filter(|one| !one.spec.unbound) else {
                    continue;
                };
                tenant.user_caps = vec![Layer {
                    from: format!("all jobs of a user, {}", ceiling.from),
                    settings,
                }];
                // What is less was promised by what was more.
                let _ = self.apply_rules_to(id);
            }
        }
    }

    /// The caps that bring a user's jobs below its ceilings; none where they are.
    fn fitting(&self, uid: u32, ceiling: &Ceiling) -> Vec<(TenantId, JobSettings)> {
        let mut caps: Vec<(TenantId, JobSettings)> = Vec::new();
        let mut lower = |id: TenantId, share: Option<f64>, bytes: Option<u64>| {
            let at = caps.iter().position(|(known, _)| *known == id);
            let at = at.unwrap_or_else(|| {
                caps.push((id, JobSettings::default()));
                caps.len() - 1
            });
            let settings = &mut caps[at].1;
            if let Some(share) = share {
                let share = share.max(LEAST_SHARE);
                settings.share = Some(settings.share.map_or(share, |known| known.min(share)));
            }
            if let Some(bytes) = bytes {
                let known = match settings.mem {
                    Some(MemLimit::Bytes(known)) => known,
                    _ => u64::MAX,
                };
                settings.mem = Some(MemLimit::Bytes(known.min(bytes.max(1))));
            }
        };
        // Before any device is known, all of them are taken to meet.
        let mut places: Vec<Option<usize>> = self.devices.iter().map(|(at, _)| Some(at)).collect();
        if places.is_empty() {
            places.push(None);
        }
        for place in places {
            let there: Vec<&Tenant> = self
                .ledger
                .awake()
                .filter(|tenant| tenant.uid == uid)
                .filter(|tenant| {
                    let spec = &tenant.spec;
                    place.is_none_or(|index| {
                        self.devices
                            .entitled(index, spec.settings.devices(), spec.simulated)
                    })
                })
                .collect();
            let shares = there.iter().filter_map(|tenant| tenant.spec.settings.share);
            let sum: f64 = shares.sum();
            if let Some(max) = ceiling
                .share_max
                .filter(|max| sum > max + crate::refusal::AIR)
            {
                for tenant in &there {
                    if let Some(share) = tenant.spec.settings.share {
                        lower(tenant.id, Some(share * max / sum), None);
                    }
                }
            }
            let usable = place.and_then(|index| {
                let usable = self.ledger.usable_bytes(&self.devices, index)?;
                Some((index, usable))
            });
            if let (Some(limit), Some((index, usable))) = (ceiling.mem_max, usable) {
                let max = limit.resolve(usable);
                let limit_of = |tenant: &Tenant| {
                    self.ledger
                        .limit_bytes(&tenant.spec, &self.devices, index)
                        .unwrap_or(usable)
                };
                let sum: u128 = there.iter().map(|one| u128::from(limit_of(one))).sum();
                if sum > u128::from(max) {
                    for tenant in &there {
                        let part = u128::from(limit_of(tenant)) * u128::from(max) / sum;
                        lower(tenant.id, None, u64::try_from(part).ok());
                    }
                }
            }
        }
        caps
    }

    /// Writes into the journal what is different for a job; whether something is.
    fn tell_of_change(&mut self, id: TenantId, before: &Shown) -> bool {
        let now_ns = self.clock.mono_ns();
        let Some(tenant) = self.ledger.get_mut(id) else {
            return false;
        };
        let after = Shown::of(tenant);
        if after == *before {
            return false;
        }
        if let Some(left_out) = tenant.allowance.spend(now_ns) {
            let name = tenant.spec.name.clone();
            let differs = |key: &str| {
                text_of(&after.settings, key) != text_of(&before.settings, key)
                    || (key == "mem" && after.limits != before.limits)
            };
            let mut fields = vec![("by", Value::from("config"))];
            let mut words = Vec::new();
            for setting in JobSettings::TABLE {
                let key = setting.about.key;
                if differs(key) {
                    let value = text_of(&after.settings, key);
                    let value = value.unwrap_or_else(|| "not set".into());
                    words.push(format!("{key} {value}"));
                    fields.push((key, Value::from(value)));
                }
            }
            let capped = after.bounds.capped.iter().map(ToString::to_string);
            let capped: Vec<String> = capped.collect();
            if !capped.is_empty() {
                fields.push(("capped", Value::from(capped)));
            }
            if left_out > 0 {
                fields.push(("left_out", Value::from(left_out)));
            }
            let words = if words.is_empty() {
                "other caps".into()
            } else {
                words.join(", ")
            };
            let message = format!("job `{name}` has new terms by the quota files: {words}");
            self.journal
                .write("changed", About::job(&name, id.0), message, &fields);
        }
        true
    }

    /// What is in force, for a job or for a user.
    pub(crate) fn config_report(
        &self,
        pid: Option<u32>,
        user: Option<String>,
        peer: &Peer,
    ) -> Result<Reply, ControlError> {
        let mut report = ConfigReport {
            status: self.rulebook.status(),
            ..ConfigReport::default()
        };
        let (settings, bounds, caps, ceiling);
        if let Some(pid) = pid {
            let found = self.ledger.iter().find(|tenant| {
                let clients = tenant.clients.iter().filter_map(|id| self.clients.get(*id));
                tenant.spec.pid == pid
                    || clients.into_iter().any(|client| client.pid == pid)
                    || tenant.members.iter().any(|member| member.pid == pid)
            });
            let Some(tenant) = found else {
                let message = format!("process {pid} is part of no job");
                return Err(ControlError::new(ErrorCode::NoSuchJob, message)
                    .with_hint("`sublet ps --json` lists the processes of jobs"));
            };
            let tenant = self.tenant_of(&tenant.spec.name, peer)?;
            report.job = Some(tenant.spec.name.clone());
            report.user = self.user_text(tenant.uid, &tenant.user);
            ceiling = self.rulebook.ceiling(tenant.uid, &tenant.user);
            caps = self.caps_of(&tenant.spec, Whose::of(tenant));
            (settings, bounds) = (tenant.spec.settings.clone(), tenant.spec.bounds.clone());
        } else {
            let own = self.names.of(peer.uid).to_owned();
            let own = self.user_text(peer.uid, &own);
            let user = user.unwrap_or_else(|| own.clone());
            let mut identity = Identity::default();
            if user == own && peer.pid != 0 {
                identity = Identity::of_process(peer.pid);
            } else if user != own {
                only_ours(peer)?;
            }
            let whose = Whose {
                uid: peer.uid,
                user: &user,
                identity: &identity,
                user_caps: &[],
                start_unix_ms: self.clock.unix_ms(),
            };
            let mut spec = convert::spec(control::JobSpec::default(), String::new(), 0);
            self.go_by_rules(&mut spec, whose, false);
            ceiling = self.rulebook.ceiling(peer.uid, &user);
            caps = self.caps_of(&spec, whose);
            report.user = user;
            (settings, bounds) = (spec.settings, spec.bounds);
        }
        let value = |key: &str, value: String, from: &str| ConfigValue {
            key: key.to_owned(),
            value,
            from: from.to_owned(),
        };
        for (key, from) in &bounds.from {
            let text = text_of(&settings, key);
            report
                .settings
                .extend(text.map(|text| value(key, text, from)));
        }
        for layer in caps {
            for setting in JobSettings::TABLE {
                let key = setting.about.key;
                let text = text_of(&layer.settings, key);
                report
                    .caps
                    .extend(text.map(|text| value(key, text, &layer.from)));
            }
        }
        let totals = [
            ("share_max", ceiling.share_max.map(|max| max.to_string())),
            ("mem_max", ceiling.mem_max.map(|max| max.to_string())),
            ("jobs_max", ceiling.jobs_max.map(|max| max.to_string())),
        ];
        for (key, text) in totals {
            report
                .totals
                .extend(text.map(|text| value(key, text, &ceiling.from)));
        }
        report.capped = bounds.capped;
        Ok(Reply::Config(Box::new(report)))
    }

    fn user_text(&self, uid: u32, user: &str) -> String {
        if user.is_empty() {
            uid.to_string()
        } else {
            user.to_owned()
        }
    }

    /// The caps that hold for a job.
    fn caps_of(&self, spec: &Spec, whose: Whose<'_>) -> Vec<Layer> {
        let command = spec.command.join(" ");
        let subject = Subject {
            name: &spec.name,
            command: &command,
            uid: whose.uid,
            user: whose.user,
            identity: whose.identity,
        };
        let mut caps = spec.own_caps.clone();
        if !spec.unbound {
            caps.extend(self.rulebook.layers(&subject).caps);
            caps.extend(whose.user_caps.iter().cloned());
        }
        caps
    }
}
