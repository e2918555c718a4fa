//! What was promised to which job: names, shares and quotas, per tenant and device. Refuses before
//! anything is started.
//!
//! Shares of guaranteed jobs on one device sum to 1 at most. Guaranteed jobs that name no share
//! split what the others leave equally, and none of them is let in where that would be less than
//! [`LEAST_SHARE`](crate::refusal::LEAST_SHARE) each. Opportunistic jobs promise each other
//! nothing: their shares are weights among themselves, equal parts where none is named.

use std::collections::BTreeMap;

use control::{DeviceSelector, MemLimit, Overflow};
use policy::TenantId;

use crate::admission::{admit_bounds, admit_share};
use crate::devices::Devices;
use crate::refusal::{AIR, Ceiling, Refusal};
use crate::spec::Spec;
use crate::tenant::Tenant;

/// Jobs at a time, of one user and in all: what the loop does for each of them is bounded by that.
pub const MAX_JOBS_OF_USER: usize = 256;
pub const MAX_JOBS: usize = 1024;
/// Of one user's jobs that have not come to use a device yet, so many have what they were promised
/// kept for them, and so many more for so long. The others are looked at again when they come.
/// TIMEOUT: a program takes seconds to get to its first CUDA call.
const KEPT_FOR: usize = 4;
const KEPT_FOR_A_WHILE: usize = 16;
const KEPT_NS: u64 = 60_000_000_000;

/// Shared blocks that are looked at before the other jobs' pages are left for the next time: one
/// page has 8,192 of them at most.
const BLOCKS_AT_ONCE: usize = 8192;

/// Devices that a job may name.
const MAX_SELECTORS: usize = 64;
/// Bytes of a UUID as people write it; those of MIG devices are the longest.
const MAX_UUID_BYTES: usize = 128;
/// Bytes of a path, as the kernel takes it.
const MAX_PATH_BYTES: usize = 4096;

/// All living jobs, and what is kept from quotas.
#[derive(Debug, Default)]
pub struct Ledger {
    tenants: BTreeMap<TenantId, Tenant>,
    /// Whose page comes next where not all could be read at once.
    unread: Option<TenantId>,
    /// Memory kept from every quota, per device in bytes.
    reserved: [u64; channel::MAX_DEVICES],
    /// Memory of the host, in bytes; 0: not known.
    host_total_bytes: u64,
    /// Of that, what all jobs together may have for what is not on their devices.
    host_limit_bytes: u64,
}

impl Ledger {
    /// A job by number.
    pub fn get(&self, id: TenantId) -> Option<&Tenant> {
        self.tenants.get(&id)
    }

    /// A job by number.
    pub fn get_mut(&mut self, id: TenantId) -> Option<&mut Tenant> {
        self.tenants.get_mut(&id)
    }

    /// All jobs, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.values()
    }

    /// All jobs, in the order in which they came.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Tenant> {
        self.tenants.values_mut()
    }

    /// Jobs that are not dormant, in the order in which they came.
    pub fn awake(&self) -> impl Iterator<Item = &Tenant> {
        self.iter().filter(|tenant| tenant.dormant.is_none())
    }

    /// Whether there is no job.
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// The job of a name.
    pub fn named(&self, name: &str) -> Option<&Tenant> {
        self.iter().find(|tenant| tenant.spec.name == name)
    }

    /// Takes a name from the dormant job that has it, for one that is awake; the name that it has
    /// from here on, and which job that is.
    pub fn take_name(&mut self, name: &str) -> Option<(String, TenantId)> {
        let id = self
            .iter()
            .find(|tenant| tenant.dormant.is_some() && tenant.spec.name == name)?
            .id;
        let other = self.free_name(name);
        if let Some(tenant) = self.get_mut(id) {
            tenant.spec.name.clone_from(&other);
        }
        Some((other, id))
    }

    /// The job of a token. Tokens are compared as a whole: timing tells nothing about their bytes.
    pub fn of_token(&self, token: &[u8]) -> Option<&Tenant> {
        self.iter().find(|tenant| {
            let differs = tenant
                .token
                .iter()
                .zip(token)
                .fold(0, |d, (a, b)| d | (a ^ b));
            token.len() == tenant.token.len() && differs == 0
        })
    }

    /// Takes a job in.
    pub fn insert(&mut self, tenant: Tenant) {
        self.tenants.insert(tenant.id, tenant);
    }

    /// Reads what the jobs hold from their pages, as far as that takes little time: a page on which
    /// thousands of blocks are listed as shared has its turn, and keeps what it said before until
    /// then.
    pub fn read_accounts(&mut self) {
        let first = self.unread.take().unwrap_or_default();
        let ids: Vec<TenantId> = self
            .tenants
            .range(first..)
            .chain(self.tenants.range(..first))
            .map(|(id, _)| *id)
            .collect();
        let mut looked_at = 0;
        for id in ids {
            if looked_at >= BLOCKS_AT_ONCE {
                self.unread = Some(id);
                return;
            }
            looked_at += self.get_mut(id).map_or(0, Tenant::read_accounts);
        }
    }

    /// Decides anew for whom what was promised is kept: a registration alone costs the others
    /// nothing for long. True where that has changed.
    pub fn keep_promises(&mut self, now_ns: u64) -> bool {
        let mut waiting: BTreeMap<u32, usize> = BTreeMap::new();
        let mut changed = false;
        let comes = |t: &&mut Tenant| !t.has_attached && t.dormant.is_none();
        for tenant in self.tenants.values_mut().filter(comes) {
            let before = waiting.entry(tenant.uid).or_default();
            let young = now_ns < tenant.registered_ns.saturating_add(KEPT_NS);
            let kept = *before < KEPT_FOR || (*before < KEPT_FOR_A_WHILE && young);
            *before += 1;
            changed |= std::mem::replace(&mut tenant.promises, kept) != kept;
        }
        changed
    }

    /// Whether a job that comes to use a device can have what it was promised, where that was not
    /// kept for it.
    ///
    /// # Errors
    /// Others have it.
    pub fn admit_again(&self, id: TenantId, devices: &Devices) -> Result<(), Refusal> {
        let Some(own) = self.get(id).filter(|tenant| !tenant.promises) else {
            return Ok(());
        };
        for place in places(&own.spec, devices) {
            let others = self.awake().filter(|other| {
                other.id != id && other.promises && meets(&own.spec, &other.spec, place, devices)
            });
            admit_share(&own.spec, others)?;
        }
        Ok(())
    }

    /// Lets a job go.
    pub fn remove(&mut self, id: TenantId) -> Option<Tenant> {
        self.tenants.remove(&id)
    }

    /// Keeps so much of a device from every quota.
    pub fn reserve(&mut self, device: usize, bytes: u64) {
        self.reserved[device] = bytes;
    }

    /// What is kept of a device from every quota.
    pub fn reserved_bytes(&self, device: usize) -> u64 {
        self.reserved[device]
    }

    /// What the host has, and what all jobs together may have of it; in bytes.
    pub fn set_host_memory(&mut self, total_bytes: u64, limit_bytes: u64) {
        (self.host_total_bytes, self.host_limit_bytes) = (total_bytes, limit_bytes);
    }

    /// A name that is free: the one given, or the first of `name-2`, `name-3`, ... that is.
    pub fn free_name(&self, name: &str) -> String {
        if self.named(name).is_none() {
            return name.to_owned();
        }
        let mut number = 2u64;
        loop {
            let suffix = format!("-{number}");
            let stem = name.len().min(control::NAME_MAX_BYTES - suffix.len());
            let name = format!("{}{suffix}", &name[..stem]);
            if self.named(&name).is_none() {
                return name;
            }
            number += 1;
        }
    }

    /// Bytes of a device that quotas may promise; `None`: not known yet.
    pub fn usable_bytes(&self, devices: &Devices, device: usize) -> Option<u64> {
        let total = devices.get(device)?.total_bytes;
        (total > 0).then(|| total.saturating_sub(self.reserved[device]))
    }

    /// The limit of a job on a device, percentages resolved and never above the device; `None`: no
    /// limit of its own.
    pub fn limit_bytes(&self, spec: &Spec, devices: &Devices, device: usize) -> Option<u64> {
        let usable = self.usable_bytes(devices, device);
        let resolved = |limit: MemLimit| match (usable, limit) {
            (Some(usable), limit) => Some(limit.resolve(usable).min(usable)),
            (None, MemLimit::Bytes(bytes)) => Some(bytes),
            (None, MemLimit::Percent(_)) => None,
        };
        let caps = spec.bounds.mem.iter().copied();
        let limits = spec.settings.mem.into_iter().chain(caps);
        limits.filter_map(resolved).min()
    }

    /// Whether `spec` can be let in, or become the terms of `own`.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn admit(
        &self,
        spec: &Spec,
        own: Option<TenantId>,
        (uid, user, ceiling): (u32, &str, Ceiling),
        devices: &Devices,
    ) -> Result<(), Refusal> {
        if control::check_name(&spec.name).is_err() {
            // It is as long as a line may be.
            let shown = spec.name.chars().take(2 * control::NAME_MAX_BYTES);
            return Err(Refusal::BadName(shown.collect()));
        }
        let taken = |t: &Tenant| Some(t.id) != own && t.spec.name == spec.name;
        if self.awake().any(taken) {
            return Err(Refusal::NameTaken(spec.name.clone()));
        }
        admit_sizes(spec)?;
        admit_bounds(spec)?;
        self.admit_host(spec)?;
        if own.is_none() {
            self.admit_one_more(uid, user, ceiling.jobs_max)?;
        }
        let count = devices.iter().count();
        let entitled =
            |spec: &Spec, device| devices.entitled(device, spec.settings.devices(), spec.simulated);
        if devices
            .iter()
            .any(|(_, device)| device.simulated == spec.simulated)
        {
            for selector in spec.settings.devices() {
                let answered = (0..count).any(|at| devices.answers(at, selector, spec.simulated));
                if !answered {
                    let known = devices
                        .iter()
                        .filter(|(_, d)| d.simulated == spec.simulated);
                    return Err(Refusal::NoDevice {
                        selector: selector.to_string(),
                        known: known.count(),
                    });
                }
            }
        }
        let own_devices: Vec<usize> = (0..count).filter(|at| entitled(spec, *at)).collect();
        self.admit_mem(spec, &own_devices, devices)?;

        for place in places(spec, devices) {
            let others = || {
                self.awake().filter(move |tenant| {
                    Some(tenant.id) != own && meets(spec, &tenant.spec, place, devices)
                })
            };
            admit_share(spec, others().filter(|tenant| tenant.promises))?;
            if let Some(max) = ceiling.share_max {
                let theirs = others().filter(|tenant| tenant.uid == uid);
                let asked = spec.settings.share.unwrap_or(0.0)
                    + theirs
                        .filter_map(|tenant| tenant.spec.settings.share)
                        .sum::<f64>();
                if asked > max + AIR {
                    return Err(Refusal::UserShare {
                        user: user.to_owned(),
                        asked,
                        max,
                    });
                }
            }
            if let (Some(limit), Some(device)) = (ceiling.mem_max, place)
                && let Some(usable) = self.usable_bytes(devices, device)
            {
                let max = limit.resolve(usable);
                let Some(own_bytes) = self.limit_bytes(spec, devices, device) else {
                    return Err(Refusal::UserMemUnnamed {
                        user: user.to_owned(),
                        max,
                    });
                };
                let theirs = others().filter(|tenant| tenant.uid == uid);
                let asked = theirs
                    .filter_map(|tenant| tenant.limits[device])
                    .fold(own_bytes, u64::saturating_add);
                if asked > max {
                    return Err(Refusal::UserMem {
                        user: user.to_owned(),
                        asked,
                        max,
                    });
                }
            }
        }
        Ok(())
    }

    fn admit_one_more(&self, uid: u32, user: &str, most: Option<usize>) -> Result<(), Refusal> {
        let most = most.map_or(MAX_JOBS_OF_USER, |most| most.min(MAX_JOBS_OF_USER));
        let theirs = self.iter().filter(|tenant| tenant.uid == uid).count();
        if theirs >= most {
            let user = if user.is_empty() {
                uid.to_string()
            } else {
                user.to_owned()
            };
            return Err(Refusal::TooManyJobs {
                user: Some(user),
                most,
            });
        }
        if self.tenants.len() >= MAX_JOBS {
            return Err(Refusal::TooManyJobs {
                user: None,
                most: MAX_JOBS,
            });
        }
        Ok(())
    }

    /// The limit of a job on host memory, percentages resolved; `None`: no limit of its own.
    pub fn host_limit_bytes(&self, spec: &Spec) -> Option<u64> {
        let caps = spec.bounds.host_memory.iter().copied();
        let limits = spec.settings.host_memory.into_iter().chain(caps);
        limits
            .map(|limit| limit.resolve(self.host_total_bytes))
            .min()
    }

    /// Refused is what could never be had.
    fn admit_host(&self, spec: &Spec) -> Result<(), Refusal> {
        if !spec.evictable() {
            return match (spec.overflow(), spec.settings.host_memory) {
                (Overflow::Host, _) => Err(Refusal::NotEvictable("overflow")),
                (_, Some(_)) => Err(Refusal::NotEvictable("host memory")),
                _ if spec.settings.evict_after.is_some() => {
                    Err(Refusal::NotEvictable("evict-after"))
                }
                _ => Ok(()),
            };
        }
        match self.host_limit_bytes(spec) {
            Some(asked) if asked > self.host_limit_bytes => Err(Refusal::HostMemory {
                asked,
                available: self.host_limit_bytes,
            }),
            _ => Ok(()),
        }
    }

    /// A limit that no device of the job could ever hold is refused; on a smaller one of several
    /// the limit is the device.
    fn admit_mem(&self, spec: &Spec, own: &[usize], devices: &Devices) -> Result<(), Refusal> {
        let Some(MemLimit::Bytes(asked)) = spec.settings.mem else {
            return Ok(());
        };
        let largest = own
            .iter()
            .filter_map(|device| Some((*device, self.usable_bytes(devices, *device)?)))
            .max_by_key(|(_, usable)| *usable);
        match largest {
            Some((device, usable)) if asked > usable => Err(Refusal::MemAboveDevice {
                asked,
                device,
                usable,
            }),
            _ => Ok(()),
        }
    }
}

/// Refuses what no job can need: the arbiter keeps it for as long as the job lives, and writes it
/// to a file.
fn admit_sizes(spec: &Spec) -> Result<(), Refusal> {
    for (what, limit) in [
        ("memory limit", spec.settings.mem),
        ("limit on host memory", spec.settings.host_memory),
    ] {
        if let Some(limit) = limit.filter(|limit| !limit.is_valid()) {
            return Err(Refusal::MemRange(what, limit));
        }
    }
    let devices = spec.settings.devices();
    let uuids = devices.iter().map(|selector| match selector {
        DeviceSelector::Uuid(uuid) => uuid.len(),
        DeviceSelector::Index(_) => 0,
    });
    for (what, length, most) in [
        ("devices", devices.len(), MAX_SELECTORS),
        ("bytes in a UUID", uuids.max().unwrap_or(0), MAX_UUID_BYTES),
        (
            "bytes in the driver's path",
            spec.driver.as_os_str().len(),
            MAX_PATH_BYTES,
        ),
    ] {
        if length > most {
            return Err(Refusal::TooLong(what, length, most));
        }
    }
    if spec.settings.deadline.is_some() && spec.settings.work.is_none() {
        return Err(Refusal::DeadlineWithoutWork);
    }
    Ok(())
}

/// Where a job may meet others. Before any device is known, all jobs of the same driver are taken
/// to meet.
fn places(spec: &Spec, devices: &Devices) -> Vec<Option<usize>> {
    let count = devices.iter().count();
    let own: Vec<Option<usize>> = (0..count)
        .filter(|at| devices.entitled(*at, spec.settings.devices(), spec.simulated))
        .map(Some)
        .collect();
    if own.is_empty() { vec![None] } else { own }
}

fn meets(spec: &Spec, other: &Spec, place: Option<usize>, devices: &Devices) -> bool {
    let entitled = |device| devices.entitled(device, other.settings.devices(), other.simulated);
    other.simulated == spec.simulated && place.is_none_or(entitled)
}

#[cfg(test)]
mod tests {
    use channel::wire::DeviceId;
    use control::DeviceSelector;

    use super::*;
    use crate::tenant::example;

    const ANYBODY: (u32, &str, Ceiling) = (
        1,
        "one",
        Ceiling {
            share_max: None,
            mem_max: None,
            jobs_max: None,
            from: String::new(),
        },
    );

    fn devices(totals: &[u64]) -> Devices {
        let mut devices = Devices::default();
        for (at, total_bytes) in totals.iter().enumerate() {
            let id = DeviceId {
                uuid: [at as u8 + 1; 16],
                total_bytes: *total_bytes,
            };
            devices.meet(&id, true, &mut 0);
        }
        devices
    }

    fn with(name: &str, change: impl FnOnce(&mut Spec)) -> Spec {
        let mut spec = example(0, name).spec;
        change(&mut spec);
        spec
    }

    fn ledger(specs: &[Spec]) -> Ledger {
        let mut ledger = Ledger::default();
        for (at, spec) in specs.iter().enumerate() {
            let mut tenant = example(at as u64 + 1, "");
            tenant.spec = spec.clone();
            ledger.insert(tenant);
        }
        ledger
    }

    fn share(name: &str, share: f64) -> Spec {
        with(name, |spec| spec.settings.share = Some(share))
    }

    #[test]
    fn shares_sum_to_one_and_no_further() {
        for devices in [devices(&[100]), Devices::default()] {
            let ledger = ledger(&[share("a", 0.75)]);
            let admit = |spec: &Spec| ledger.admit(spec, None, ANYBODY, &devices);
            assert_eq!(admit(&share("b", 0.25)), Ok(()));
            let refused = Refusal::ShareSum {
                asked: 0.26,
                promised: 0.75,
            };
            assert_eq!(admit(&share("b", 0.26)), Err(refused));
            assert_eq!(admit(&share("b", 1.5)), Err(Refusal::ShareRange(1.5)));
            assert!(admit(&share("b", f64::NAN)).is_err());
            let low = with("b", |spec| {
                spec.settings.share = Some(0.9);
                spec.settings.class = Some(control::Class::Opportunistic);
            });
            assert_eq!(admit(&low), Ok(()));
            // Ten tenths are one, whatever floating point says.
            let tenths: Vec<Spec> = (0..9).map(|at| share(&format!("t{at}"), 0.1)).collect();
            let nine = self::ledger(&tenths);
            assert_eq!(
                nine.admit(&share("b", 0.1), None, ANYBODY, &devices),
                Ok(())
            );
        }
    }

    #[test]
    fn jobs_without_a_share_split_what_is_left() {
        let devices = devices(&[100]);
        let plain = |name| with(name, |_| ());
        let ledger = ledger(&[share("a", 0.5), plain("b"), plain("c")]);
        let weights: Vec<u32> = ledger
            .terms(&devices, 0, &crate::clock::host())
            .iter()
            .map(|t| t.1.weight_ppm)
            .collect();
        assert_eq!(weights, [500_000, 250_000, 250_000]);
        assert_eq!(ledger.admit(&plain("d"), None, ANYBODY, &devices), Ok(()));
        let greedy = ledger.admit(&share("d", 0.49), None, ANYBODY, &devices);
        assert!(
            matches!(greedy, Err(Refusal::NothingLeft { waiting: 2, .. })),
            "{greedy:?}"
        );
        let full = self::ledger(&[share("a", 1.0)]);
        let latecomer = full.admit(&plain("d"), None, ANYBODY, &devices);
        assert!(
            matches!(latecomer, Err(Refusal::NothingLeft { waiting: 1, .. })),
            "{latecomer:?}"
        );
        // One that changes its own share does not count twice.
        assert_eq!(
            full.admit(&share("a", 0.9), Some(TenantId(1)), ANYBODY, &devices),
            Ok(())
        );
    }

    #[test]
    fn registrations_that_never_come_lock_nobody_out_and_cost_nobody_a_share() {
        let devices = devices(&[100]);
        let plain = |name: &str| with(name, |_| ());
        for each in [None, Some(0.01)] {
            let specs: Vec<Spec> = (0..98)
                .map(|at| with(&format!("r{at}"), |spec| spec.settings.share = each))
                .collect();
            let mut ledger = ledger(&specs);
            let honest = share("honest", 0.5);
            let before = ledger.admit(&honest, None, ANYBODY, &devices);
            assert!(before.is_err(), "all of them are promised something");
            assert!(ledger.keep_promises(1) && !ledger.keep_promises(1));
            assert_eq!(ledger.admit(&honest, None, ANYBODY, &devices), Ok(()));
            // After a minute a few of them are left, of each user.
            assert!(ledger.keep_promises(KEPT_NS + 1));
            let kept = ledger.iter().filter(|t| t.promises).count();
            assert_eq!(kept, KEPT_FOR);
            let weight = |ledger: &Ledger| {
                ledger.terms(&devices, 0, &crate::clock::host())[97]
                    .1
                    .weight_ppm
            };
            assert_eq!(
                weight(&ledger),
                if each.is_none() { 250_000 } else { 10_000 }
            );
            // One that comes after all is looked at again.
            let latecomer = TenantId(98);
            assert_eq!(ledger.admit_again(latecomer, &devices), Ok(()));
            let mut greedy = example(200, "");
            greedy.spec = share("greedy", 0.99 - each.unwrap_or(0.0) * 4.0);
            greedy.has_attached = true;
            ledger.insert(greedy);
            ledger.keep_promises(KEPT_NS + 1);
            assert!(each.is_some() || ledger.admit_again(latecomer, &devices).is_err());
            ledger.get_mut(TenantId(1)).expect("kept").has_attached = true;
            assert_eq!(
                ledger.admit_again(TenantId(1), &devices),
                Ok(()),
                "kept for it"
            );
            assert_eq!(
                ledger.admit(&plain("b"), None, ANYBODY, &devices).is_err(),
                each.is_none()
            );
        }
    }

    #[test]
    fn a_user_has_so_many_jobs_and_no_more() {
        let devices = devices(&[100]);
        let low = |name: &str| {
            with(name, |spec| {
                spec.settings.class = Some(control::Class::Opportunistic);
            })
        };
        let specs: Vec<Spec> = (0..MAX_JOBS_OF_USER)
            .map(|at| low(&format!("r{at}")))
            .collect();
        let ledger = ledger(&specs);
        let refused = ledger.admit(&low("more"), None, ANYBODY, &devices);
        let most = Refusal::TooManyJobs {
            user: Some("one".into()),
            most: MAX_JOBS_OF_USER,
        };
        assert_eq!(refused, Err(most));
        let other = (2, "two", Ceiling::default());
        assert_eq!(ledger.admit(&low("more"), None, other, &devices), Ok(()));
        // Those that are there can be changed.
        let own = Some(TenantId(1));
        assert_eq!(ledger.admit(&low("r0"), own, ANYBODY, &devices), Ok(()));
    }

    #[test]
    fn jobs_on_different_devices_do_not_meet() {
        let devices = devices(&[100, 100]);
        let on = |name, index| {
            with(name, |spec| {
                spec.settings.share = Some(1.0);
                spec.settings.device = Some(vec![DeviceSelector::Index(index)]);
            })
        };
        let ledger = ledger(&[on("a", 0)]);
        assert_eq!(ledger.admit(&on("b", 1), None, ANYBODY, &devices), Ok(()));
        assert!(ledger.admit(&on("b", 0), None, ANYBODY, &devices).is_err());
        let nowhere = ledger.admit(&on("b", 7), None, ANYBODY, &devices);
        let refused = Refusal::NoDevice {
            selector: "7".into(),
            known: 2,
        };
        assert_eq!(nowhere, Err(refused));
    }

    #[test]
    fn quotas_stay_within_the_device_and_its_reserve() {
        let devices = devices(&[1000, 400]);
        let mut ledger = ledger(&[]);
        ledger.reserve(0, 100);
        let mem = |mem| with("a", |spec| spec.settings.mem = Some(mem));
        assert_eq!(
            ledger.admit(&mem(MemLimit::Bytes(900)), None, ANYBODY, &devices),
            Ok(())
        );
        let refused = Refusal::MemAboveDevice {
            asked: 901,
            device: 0,
            usable: 900,
        };
        let asked = ledger.admit(&mem(MemLimit::Bytes(901)), None, ANYBODY, &devices);
        assert_eq!(asked, Err(refused));
        let limits = |spec: &Spec| [0, 1].map(|at| ledger.limit_bytes(spec, &devices, at));
        assert_eq!(limits(&mem(MemLimit::Bytes(500))), [Some(500), Some(400)]);
        assert_eq!(
            limits(&mem(MemLimit::Percent(50.0))),
            [Some(450), Some(200)]
        );
        assert_eq!(limits(&with("a", |_| ())), [None, None]);
    }

    #[test]
    fn names_are_unique_where_named_and_numbered_where_derived() {
        let ledger = ledger(&[with("train", |_| ()), with("train-2", |_| ())]);
        let taken = ledger.admit(&with("train", |_| ()), None, ANYBODY, &devices(&[1]));
        assert_eq!(taken, Err(Refusal::NameTaken("train".into())));
        assert_eq!(ledger.free_name("train"), "train-3");
        assert_eq!(ledger.free_name("other"), "other");
        let long = "x".repeat(control::NAME_MAX_BYTES);
        let with_long = self::ledger(&[with(&long, |_| ())]);
        assert_eq!(with_long.free_name(&long).len(), control::NAME_MAX_BYTES);
    }

    #[test]
    fn a_users_jobs_stay_below_the_users_ceiling_together() {
        let devices = devices(&[1000]);
        let mut ledger = ledger(&[share("a", 0.3)]);
        ledger.get_mut(TenantId(1)).expect("a").limits[0] = Some(300);
        let user = (
            1,
            "one",
            Ceiling {
                share_max: Some(0.5),
                mem_max: Some(MemLimit::Percent(50.0)),
                ..Ceiling::default()
            },
        );
        let ask = |share: f64, bytes: u64| {
            let spec = with("b", |spec| {
                (spec.settings.share, spec.settings.mem) =
                    (Some(share), Some(MemLimit::Bytes(bytes)));
            });
            ledger.admit(&spec, None, user.clone(), &devices)
        };
        assert_eq!(ask(0.2, 200), Ok(()));
        assert!(matches!(ask(0.21, 200), Err(Refusal::UserShare { .. })));
        assert!(matches!(
            ask(0.2, 201),
            Err(Refusal::UserMem {
                asked: 501,
                max: 500,
                ..
            })
        ));
        let unnamed = ledger.admit(&with("b", |_| ()), None, user.clone(), &devices);
        assert!(matches!(unnamed, Err(Refusal::UserMemUnnamed { .. })));
    }
}
