//! A step of a job on its node: what is registered with the arbiter, and what its tasks get.

use std::path::PathBuf;

use control::{Client, DeviceSelector, JobSettings, JobSpec, MemLimit, Registered, short_bytes};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use crate::arguments::Arguments;
use crate::options::Asked;

/// Steps that run nothing of the user's (slurm.h: SLURM_EXTERN_CONT).
const EXTERN: u32 = 0xffff_fffc;
/// The batch script (SLURM_BATCH_SCRIPT).
const BATCH: u32 = 0xffff_fffb;
/// The shell of `salloc` (SLURM_INTERACTIVE_STEP).
const INTERACTIVE: u32 = 0xffff_fffa;
/// From this release on a step's gres is written `gres/shard:1`, before as `gres:shard:1`.
const SLASH_SINCE: u32 = 0x17_0b_00;

/// A step, as Slurm describes it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Step {
    pub job: u32,
    pub step: u32,
    pub uid: u32,
    pub node: String,
    pub account: String,
    pub name: String,
    /// Devices that Slurm has chosen: indices, or UUIDs.
    pub devices: Vec<String>,
    /// Shards on this node; `None`: it has whole devices, or none.
    pub shards: Option<u64>,
    /// Nodes of the step.
    pub nodes: u32,
}

impl Step {
    /// From the job's variables.
    pub fn of(
        (job, step, uid): (u32, u32, u32),
        node: &str,
        var: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let first = |names: &[&str]| names.iter().find_map(|name| var(name));
        // The host's numbers first: with ConstrainDevices the job's own begin at 0. Of these two
        // Slurm sets the one of this kind of step; the other one may be the user's.
        let own = if is_jobs_own(step) {
            "SLURM_JOB_GPUS"
        } else {
            "SLURM_STEP_GPUS"
        };
        let devices = first(&[own, "CUDA_VISIBLE_DEVICES"]);
        let devices = devices.unwrap_or_default();
        let devices = devices
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        Self {
            job,
            step,
            uid,
            node: node.to_owned(),
            account: var("SLURM_JOB_ACCOUNT").unwrap_or_default(),
            name: var("SLURM_JOB_NAME").unwrap_or_default(),
            devices: devices.map(str::to_owned).collect(),
            shards: var("SLURM_SHARDS_ON_NODE").and_then(|text| text.parse().ok()),
            nodes: 1,
        }
    }

    /// What the arbiter is asked for; `None`: nothing of this step is ours.
    ///
    /// # Errors
    /// What the job asks for cannot be had, in one line.
    pub fn spec(&self, asked: &Asked, arguments: &Arguments) -> Result<Option<JobSpec>, String> {
        if self.step == EXTERN || (asked.is_empty() && self.shards.is_none()) {
            return Ok(None);
        }
        if self.devices.is_empty() {
            return Err(format!(
                "job {} asks for a part of a GPU and has none: add --gres=shard:N, one shard for each {}",
                self.job,
                short_bytes(arguments.shard_bytes)
            ));
        }
        if self.devices.len() > 1 && self.shards.is_some() {
            // How many of them are on which GPU nobody says, and each would get the whole quota.
            return Err(format!(
                "job {}: its shards are on GPUs {}, and a quota is that of one GPU: ask for no more shards than one GPU has",
                self.job,
                self.devices.join(", ")
            ));
        }
        if self.nodes > 1 && self.shards.is_some() && !asked.unaligned {
            // Each rank would wait for the slowest one in every step.
            return Err(format!(
                "job {}: a step over {} nodes shares GPUs, and its turns on them are not at the same time: ask for whole GPUs (--gres=gpu:1), or add --gpu-unaligned where its tasks do not wait for each other",
                self.job, self.nodes
            ));
        }
        let most = self
            .shards
            .map(|shards| shards.saturating_mul(arguments.shard_bytes));
        let mem = match (asked.mem_bytes, most) {
            (Some(asked), Some(most)) if asked > most => {
                return Err(format!(
                    "job {}: --gpu-mem {} is more than its {} shards of {}: ask for {} shards",
                    self.job,
                    short_bytes(asked),
                    self.shards.unwrap_or(0),
                    short_bytes(arguments.shard_bytes),
                    asked.div_ceil(arguments.shard_bytes.max(1))
                ));
            }
            (asked, most) => asked.or(most),
        };
        let device = self.devices.iter().map(|name| selector(name));
        let settings = JobSettings {
            mem: mem.map(MemLimit::Bytes),
            share: asked.share,
            class: asked.class,
            evictable: asked.evictable.then_some(true),
            device: Some(device.collect::<Result<_, String>>()?),
            ..JobSettings::default()
        };
        Ok(Some(JobSpec {
            name: format!("slurm.{}", self.job),
            settings,
            slurm_account: self.account.clone(),
            on_behalf_of: Some(self.uid),
            command: vec![self.name.clone()],
            driver: arguments.driver()?,
            simulated: arguments.sim.is_some(),
            ..JobSpec::default()
        }))
    }
}

/// Whether Slurm says by the job's variables which devices a step has.
fn is_jobs_own(step: u32) -> bool {
    matches!(step, BATCH | INTERACTIVE)
}

/// The variable in which Slurm lists the nodes of a step; others like it may be the user's.
pub fn node_list(step: u32) -> &'static str {
    if step == BATCH {
        "SLURM_JOB_NODELIST"
    } else {
        "SLURM_STEP_NODELIST"
    }
}

/// The node of a number in a list of Slurm's, such as `n[01-03,7],login`.
pub fn node_of(list: &str, number: u32) -> Option<String> {
    let mut left = u64::from(number);
    let mut rest = list;
    while !rest.is_empty() {
        // Up to the next comma that is in no bracket.
        let mut depth = 0;
        let comma = rest.find(|c| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            c == ',' && depth == 0
        });
        let (one, more) = rest.split_at(comma.unwrap_or(rest.len()));
        rest = more.strip_prefix(',').unwrap_or(more);
        let Some((stem, ranges)) = one.split_once('[') else {
            if left == 0 {
                return Some(one.to_owned());
            }
            left -= 1;
            continue;
        };
        let (ranges, end) = ranges.split_once(']')?;
        for range in ranges.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (low, high) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
            let count = high.checked_sub(low)?.checked_add(1)?;
            if left < count {
                let width = first.len();
                return Some(format!("{stem}{:0width$}{end}", low + left));
            }
            left -= count;
        }
    }
    None
}

fn selector(name: &str) -> Result<DeviceSelector, String> {
    match name.parse::<u32>() {
        Ok(index) => Ok(DeviceSelector::Index(index)),
        Err(_) if name.starts_with("GPU-") => Ok(DeviceSelector::Uuid(name.to_owned())),
        Err(_) => Err(format!(
            "Slurm names the device `{name}`, which is neither an index nor a UUID (MIG is not supported)"
        )),
    }
}

/// Registers a job, within the patience. Run by root.
///
/// # Errors
/// In one line, with the remedy.
pub fn register(
    spec: JobSpec,
    runtime_dir: PathBuf,
    arguments: &Arguments,
) -> Result<Registered, String> {
    let dir = control::paths::RuntimeDir::given(runtime_dir).map_err(|error| error.to_string())?;
    // A peer that closes its socket must not end slurmstepd by SIGPIPE.
    let pipe = SigSet::from_iter([Signal::SIGPIPE]);
    let before = pipe.thread_swap_mask(SigmaskHow::SIG_BLOCK).ok();
    let answer = Client::connect(&dir.api_socket(), arguments.patience)
        .and_then(|mut arbiter| arbiter.register(spec));
    if let Some(before) = before
        && !before.contains(Signal::SIGPIPE)
    {
        take_pending(&pipe);
        let _ = before.thread_set_mask();
    }
    answer.map_err(|error| format!("the node's arbiter did not take the job: {error}"))
}

/// Takes a SIGPIPE that came while it was blocked.
fn take_pending(pipe: &SigSet) {
    let none = nix::libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: both lead to values that live through the call, and no information is asked for.
    unsafe { nix::libc::sigtimedwait(pipe.as_ref(), std::ptr::null_mut(), &raw const none) };
}

/// What tasks of a registered job get, over the variables that they have.
pub fn variables(
    registered: &Registered,
    arguments: &Arguments,
    driver: &str,
    var: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let before = |first: String, list: Option<String>| match list {
        Some(list) if list.split([':', ' ']).any(|one| one == first) => list,
        Some(list) => format!("{first}:{list}"),
        None => first,
    };
    let on_loss = registered
        .settings
        .as_ref()
        .and_then(|settings| settings.on_arbiter_loss);
    let library = arguments.library.display().to_string();
    let mut variables = vec![
        ("LD_PRELOAD", before(library, var("LD_PRELOAD"))),
        (
            "SUBLET_SOCKET",
            registered.channel_socket.display().to_string(),
        ),
        ("SUBLET_TOKEN", registered.token.clone()),
        ("SUBLET_JOB", registered.job.clone()),
        ("SUBLET_DRIVER", driver.to_owned()),
        (
            "SUBLET_ON_ARBITER_LOSS",
            on_loss.unwrap_or_default().to_string(),
        ),
        // A quota was asked for: what cannot be governed does not run.
        ("SUBLET_ON_REFUSAL", "closed".to_owned()),
    ];
    if let Some(sim) = &arguments.sim {
        let sim = sim.display().to_string();
        variables.push(("LD_LIBRARY_PATH", before(sim, var("LD_LIBRARY_PATH"))));
        let words = var("SUBLET_RESIDENCY").unwrap_or_default();
        if !words.contains("touch=") {
            variables.push(("SUBLET_RESIDENCY", format!("{words},touch=0")));
        }
    }
    variables
}

/// The variable by which steps of a job with typed shards find them: `srun` refuses to start one
/// that asks by type.
pub fn step_gres(step: &Step, release: u32) -> Option<(&'static str, String)> {
    let shards = step.shards.filter(|_| is_jobs_own(step.step))?;
    let between = if release >= SLASH_SINCE { '/' } else { ':' };
    Some(("SLURM_STEP_GRES", format!("gres{between}shard:{shards}")))
}

#[cfg(test)]
mod tests {
    use control::Class;

    use super::*;

    fn step(vars: &[(&str, &str)]) -> Step {
        Step::of((7, 0, 1000), "host", |name| {
            let found = vars.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn arguments() -> Arguments {
        Arguments::parse(["sim=/sim"]).unwrap()
    }

    #[test]
    fn a_job_gets_what_it_asks_for_on_the_device_that_slurm_chose() {
        let step = step(&[
            ("SLURM_SHARDS_ON_NODE", "8"),
            ("CUDA_VISIBLE_DEVICES", "0"),
            ("SLURM_STEP_GPUS", "3"),
        ]);
        let asked = Asked {
            mem_bytes: Some(6 << 30),
            share: Some(0.25),
            class: Some(Class::Opportunistic),
            evictable: true,
            unaligned: false,
        };
        let spec = step.spec(&asked, &arguments()).unwrap().unwrap();
        assert_eq!(
            (spec.name.as_str(), spec.on_behalf_of),
            ("slurm.7", Some(1000))
        );
        assert_eq!(spec.settings.mem, Some(MemLimit::Bytes(6 << 30)));
        assert_eq!(spec.settings.devices(), [DeviceSelector::Index(3)]);
        assert_eq!(spec.settings.evictable, Some(true));
        assert!(spec.simulated);
    }

    #[test]
    fn what_a_user_exports_is_not_taken_for_slurm_s_choice() {
        let var = |name: &str| match name {
            "SLURM_JOB_GPUS" => Some("1".to_owned()),
            "SLURM_STEP_GPUS" => Some("2".to_owned()),
            _ => None,
        };
        let of = |step| Step::of((7, step, 1000), "n1", var).devices;
        let (job, step) = (vec!["1".to_owned()], vec!["2".to_owned()]);
        assert_eq!(
            (of(BATCH), of(INTERACTIVE), of(0)),
            (job.clone(), job, step)
        );
        assert_eq!(node_list(BATCH), "SLURM_JOB_NODELIST");
        assert_eq!(node_list(INTERACTIVE), "SLURM_STEP_NODELIST");
        assert_eq!(node_list(3), "SLURM_STEP_NODELIST");
    }

    #[test]
    fn a_node_is_found_in_slurm_s_list() {
        for (list, number, node) in [
            ("n1", 0, Some("n1")),
            ("n1,n2", 1, Some("n2")),
            ("n[1-3]", 2, Some("n3")),
            ("n[08-11,20],login", 2, Some("n10")),
            ("n[08-11,20],login", 4, Some("n20")),
            ("n[08-11,20],login", 5, Some("login")),
            ("n[1-2]-ib", 1, Some("n2-ib")),
            ("n1", 1, None),
            ("", 0, None),
            ("n[3-1]", 0, None),
            ("n[1", 0, None),
            ("n[x-y]", 0, None),
            ("n[0-18446744073709551615]", 0, None),
        ] {
            assert_eq!(node_of(list, number).as_deref(), node, "{list} {number}");
        }
    }

    #[test]
    fn shards_are_a_quota_by_themselves_and_its_bound() {
        let vars = [("SLURM_SHARDS_ON_NODE", "4"), ("CUDA_VISIBLE_DEVICES", "1")];
        let spec = step(&vars).spec(&Asked::default(), &arguments());
        assert_eq!(
            spec.unwrap().unwrap().settings.mem,
            Some(MemLimit::Bytes(4 << 30))
        );
        let more = Asked {
            mem_bytes: Some((4 << 30) + 1),
            ..Asked::default()
        };
        let error = step(&vars).spec(&more, &arguments()).unwrap_err();
        assert!(
            error.contains("more than its 4 shards") && error.contains("5 shards"),
            "{error}"
        );
        // On two GPUs each of them would get all of it.
        let two = [("SLURM_SHARDS_ON_NODE", "4"), ("SLURM_STEP_GPUS", "0,1")];
        let error = step(&two).spec(&Asked::default(), &arguments());
        assert!(error.unwrap_err().contains("GPUs 0, 1"));
        let whole = step(&[("SLURM_STEP_GPUS", "0,1")]).spec(&more, &arguments());
        assert_eq!(whole.unwrap().unwrap().settings.devices().len(), 2);
        let huge = [
            ("SLURM_SHARDS_ON_NODE", "18446744073709551615"),
            ("CUDA_VISIBLE_DEVICES", "1"),
        ];
        assert!(step(&huge).spec(&more, &arguments()).is_ok());
    }

    #[test]
    fn a_step_that_shares_gpus_of_several_nodes_says_that_it_needs_no_alignment() {
        let vars = [("SLURM_SHARDS_ON_NODE", "4"), ("SLURM_STEP_GPUS", "0")];
        let over = |nodes, vars: &[(&str, &str)], asked: &Asked| {
            let step = Step {
                nodes,
                ..step(vars)
            };
            step.spec(asked, &arguments())
        };
        let error = over(2, &vars, &Asked::default()).unwrap_err();
        assert!(
            error.contains("over 2 nodes") && error.contains("--gpu-unaligned"),
            "{error}"
        );
        let unaligned = Asked {
            unaligned: true,
            ..Asked::default()
        };
        assert!(over(2, &vars, &unaligned).unwrap().is_some());
        assert!(over(1, &vars, &Asked::default()).unwrap().is_some());
        // Whole GPUs are shared with nobody.
        let quota = Asked {
            mem_bytes: Some(1 << 30),
            ..Asked::default()
        };
        let whole = [("SLURM_STEP_GPUS", "0")];
        assert!(over(2, &whole, &quota).unwrap().is_some());
    }

    #[test]
    fn jobs_without_a_part_of_a_gpu_are_left_alone() {
        assert_eq!(
            step(&[("CUDA_VISIBLE_DEVICES", "0")]).spec(&Asked::default(), &arguments()),
            Ok(None)
        );
        assert_eq!(step(&[]).spec(&Asked::default(), &arguments()), Ok(None));
        let asked = Asked {
            share: Some(0.5),
            ..Asked::default()
        };
        let error = step(&[]).spec(&asked, &arguments()).unwrap_err();
        assert!(error.contains("--gres=shard:N"), "{error}");
        let whole = step(&[("CUDA_VISIBLE_DEVICES", "0")]).spec(&asked, &arguments());
        assert_eq!(whole.unwrap().unwrap().settings.mem, None);
        let mig = step(&[("CUDA_VISIBLE_DEVICES", "MIG-1")]).spec(&asked, &arguments());
        assert!(mig.unwrap_err().contains("`MIG-1`"));
        let outside = Step {
            step: EXTERN,
            shards: Some(4),
            ..Step::default()
        };
        assert_eq!(outside.spec(&asked, &arguments()), Ok(None));
    }

    #[test]
    fn tasks_keep_what_was_preloaded_and_steps_find_their_shards() {
        let registered = Registered {
            job: "slurm.7".into(),
            ..Registered::default()
        };
        let variables = variables(&registered, &arguments(), "/sim/libcuda.so.1", |name| {
            (name == "LD_PRELOAD").then(|| "/own.so".to_owned())
        });
        let get = |name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, v)| v.as_str())
        };
        assert_eq!(
            get("LD_PRELOAD"),
            Some("/usr/lib/sublet/libsublet.so:/own.so")
        );
        assert_eq!(get("SUBLET_RESIDENCY"), Some(",touch=0"));
        let batch = Step {
            step: BATCH,
            shards: Some(4),
            ..Step::default()
        };
        let gres = |release| step_gres(&batch, release).unwrap().1;
        assert_eq!(
            (gres(0x16_05_00), gres(0x18_0b_00)),
            ("gres:shard:4".into(), "gres/shard:4".into())
        );
    }

    #[test]
    fn an_arbiter_that_is_not_there_or_says_nothing_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let arguments = Arguments {
            patience: std::time::Duration::from_millis(50),
            ..arguments()
        };
        let register = || register(JobSpec::default(), dir.path().to_owned(), &arguments);
        let error = register().unwrap_err();
        assert!(error.contains("no arbiter runs"), "{error}");
        // One that takes connections and never answers.
        let path = control::paths::RuntimeDir::given(dir.path().to_owned())
            .unwrap()
            .api_socket();
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        let error = register().unwrap_err();
        assert!(error.contains("did not answer"), "{error}");
        drop(listener);
        assert!(register().unwrap_err().contains("nobody listens"));
    }
}
