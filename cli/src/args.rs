//! The command line: each flag declared once, and every mistake reported in one line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use control::{
    Class, DeviceSelector, FailMode, MemLimit, Misbehaviour, OnRefusal, Overflow, PolicyChoice,
    Resize, SliceMode,
};

use crate::config::keys::QUANTUM_MS;
use crate::settings::{parse_flag, parse_share};

const EXIT_CODES: &str = "\
Exit codes:
  the command's own  once `sublet run` has started it
  0    done (`ps` also where no arbiter runs)
  125  sublet itself failed: a bad flag, value or file, a refusal, no arbiter; nothing was started
  126  the command was found but cannot be executed
  127  the command was not found";

/// Several deep-learning jobs on one GPU, each inside its own memory quota and its own share of
/// time.
#[derive(Debug, Parser)]
#[command(name = "sublet", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command as a job: inside a quota, with a share
    Run(Run),
    /// Show the jobs and devices of the arbiter
    Ps(Ps),
    /// Change a running job, or how a device is run
    Set(Set),
    /// Move jobs out of their devices' memory, and hold them there until they are restored
    Evict(Evict),
    /// Bring evicted jobs back, and let them go on
    Restore(Restore),
    /// Evict one job and restore another in one pass: the first frees the memory that the second
    /// needs
    Switch(Switch),
    /// Show driver, devices and quotas, and whether a command's driver calls are all seen
    Doctor(Doctor),
    /// Run the arbiter: the daemon that decides who uses a GPU when
    Arbiter(Arbiter),
    /// Simulate a cluster: a trace of jobs under scheduling and packing policies, in virtual time
    Simulate(Simulate),
    /// The hook above the nodes: run it, submit jobs to it, look at it
    Cluster(crate::cluster_command::args::Cluster),
    /// Print the JSON Schema of the quota file
    Schema,
}

/// Flags beat SUBLET_MEM, SUBLET_SHARE, ... in the environment, those beat the quota file.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct Run {
    /// Memory limit on each device: 8GiB, 512M (1024-based), or 50% of the device [env: SUBLET_MEM]
    #[arg(long, value_name = "SIZE|PCT", allow_hyphen_values = true)]
    pub mem: Option<MemLimit>,
    /// Part of the device's time, above 0 and at most 1 [env: SUBLET_SHARE]
    #[arg(long, value_name = "F", value_parser = parse_share, allow_hyphen_values = true)]
    pub share: Option<f64>,
    /// Part of the device's time that the job gets at the least while it wants it [env:
    /// SUBLET_SHARE_MIN]
    #[arg(long, value_name = "F", value_parser = parse_share, allow_hyphen_values = true)]
    pub share_min: Option<f64>,
    /// Part of the device's time that it gets at the most, also when alone [env: SUBLET_SHARE_MAX]
    #[arg(long, value_name = "F", value_parser = parse_share, allow_hyphen_values = true)]
    pub share_max: Option<f64>,
    /// guaranteed: gets its share whenever it wants it; opportunistic: runs in what others leave
    /// [env: SUBLET_CLASS]
    #[arg(long, value_name = "guaranteed|opportunistic")]
    pub class: Option<Class>,
    /// Name of the job [default: from the command] [env: SUBLET_NAME]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub name: Option<String>,
    /// Device of the job, by UUID or index; several by comma or by repeating it [env:
    /// SUBLET_DEVICE]
    #[arg(long = "device", value_name = "UUID|INDEX", value_delimiter = ',')]
    pub devices: Vec<DeviceSelector>,
    /// All devices of the job at once or none [default: true where it has several] [env:
    /// SUBLET_GANG]
    #[arg(long, value_name = "true|false", value_parser = parse_flag)]
    pub gang: Option<bool>,
    /// When its work should be done, from now: 90s, 20m, 1.5h; needs --work [env: SUBLET_DEADLINE]
    #[arg(long, value_name = "TIME", value_parser = control::parse_span)]
    pub deadline: Option<Duration>,
    /// Device time that its work takes in all [env: SUBLET_WORK]
    #[arg(long, value_name = "TIME", value_parser = control::parse_span)]
    pub work: Option<Duration>,
    /// Quota file [default: sublet.toml here, in ~/.config/sublet or /etc/sublet] [env:
    /// SUBLET_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What the job does while the arbiter is gone [env: SUBLET_ON_ARBITER_LOSS]
    #[arg(long, value_name = "open|freeze|closed")]
    pub on_arbiter_loss: Option<FailMode>,
    /// What becomes of a process that cannot be governed [default: closed with --mem, --share-max
    /// or --strict, else open] [env: SUBLET_ON_REFUSAL]
    #[arg(long, value_name = "closed|open")]
    pub on_refusal: Option<OnRefusal>,
    /// Let the job's memory leave the device while others run [env: SUBLET_EVICTABLE]
    #[arg(long, value_name = "true|false", value_parser = parse_flag, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub evictable: Option<bool>,
    /// What becomes of allocations above the memory limit; host: they live in host memory; needs
    /// --evictable [env: SUBLET_OVERFLOW]
    #[arg(long, value_name = "host|fail")]
    pub overflow: Option<Overflow>,
    /// Host memory that the job may take for what is not on its devices; needs --evictable [env:
    /// SUBLET_HOST_MEMORY]
    #[arg(long, value_name = "SIZE|PCT", allow_hyphen_values = true)]
    pub host_memory: Option<MemLimit>,
    /// Submissions that make an iteration of the job, where they are not to be found out [env:
    /// SUBLET_LAUNCHES_PER_ITERATION]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iteration_launches: Option<u64>,
    /// Fail where a process uses the job's devices that is part of no job
    #[arg(long)]
    pub strict: bool,
    /// Reach link namespaces (LD_AUDIT) and children that lose LD_PRELOAD (CUDA_INJECTION64_PATH)
    /// as well
    #[arg(long)]
    pub deep: bool,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    /// Use this driver library instead of searching for libcuda.so.1
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    pub driver: Option<PathBuf>,
    /// The command and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Ps {
    /// Print one JSON object: arbiter, devices, jobs
    #[arg(long)]
    pub json: bool,
    /// Show what is known of each job's iterations, memory and copies instead; with --json that is
    /// part of it anyway
    #[arg(long)]
    pub profile: bool,
}

/// Exits with 1 where something gets past the library, or would.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print one JSON object; the command's own output is dropped
    #[arg(long)]
    pub json: bool,
    /// Run the command as `sublet run --deep` does
    #[arg(long)]
    pub deep: bool,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    /// Use this driver library instead of searching for libcuda.so.1
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    pub driver: Option<PathBuf>,
    /// A command to run as a job and to watch, with its arguments
    #[arg(value_name = "CMD", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// Takes effect within a slice, and outlives the arbiter. What is refused changes nothing.
#[derive(Debug, Args)]
pub struct Set {
    /// Name of the job, as `sublet ps` shows it
    #[arg(required_unless_present_any = ["device", "reload"])]
    pub name: Option<String>,
    /// New memory limit: 8GiB, 512M, or 50% of the device
    #[arg(long, value_name = "SIZE|PCT", allow_hyphen_values = true)]
    pub mem: Option<MemLimit>,
    /// New part of the device's time, above 0 and at most 1
    #[arg(long, value_name = "F", value_parser = parse_share, allow_hyphen_values = true)]
    pub share: Option<f64>,
    /// New least part of the device's time
    #[arg(long, value_name = "F", value_parser = parse_share, allow_hyphen_values = true)]
    pub share_min: Option<f64>,
    /// New largest part of the device's time
    #[arg(long, value_name = "F", value_parser = parse_share, allow_hyphen_values = true)]
    pub share_max: Option<f64>,
    /// New class
    #[arg(long, value_name = "guaranteed|opportunistic")]
    pub class: Option<Class>,
    /// Time of an iteration without other jobs, in microseconds: the base of the slowdown; 0
    /// forgets it
    #[arg(long, value_name = "US")]
    pub solo_iteration_us: Option<u64>,
    /// All devices of the job at once or none
    #[arg(long, value_name = "true|false", value_parser = parse_flag)]
    pub gang: Option<bool>,
    /// When its work should be done, from now: 90s, 20m, 1.5h
    #[arg(long, value_name = "TIME", value_parser = control::parse_span)]
    pub deadline: Option<Duration>,
    /// Device time that its work takes in all, what is done included
    #[arg(long, value_name = "TIME", value_parser = control::parse_span)]
    pub work: Option<Duration>,
    /// What becomes of allocations above the memory limit of an evictable job
    #[arg(long, value_name = "host|fail")]
    pub overflow: Option<Overflow>,
    /// New host memory of an evictable job
    #[arg(long, value_name = "SIZE|PCT", allow_hyphen_values = true)]
    pub host_memory: Option<MemLimit>,
    /// Ask the job to end its iteration, save, and prepare to run on so many GPUs (0: none); `stay`
    /// takes that back
    #[arg(long, value_name = "GPUS|stay", allow_hyphen_values = true)]
    pub resize: Option<Resize>,
    /// Give the job no device time until it is resumed
    #[arg(long, conflicts_with = "resume")]
    pub pause: bool,
    /// Give a paused job its turns again
    #[arg(long)]
    pub resume: bool,
    /// Change a device instead of a job: UUID, index, or `all`
    #[arg(long, value_name = "UUID|INDEX|all", value_parser = parse_one_or_all, conflicts_with_all = JOB_FLAGS)]
    pub device: Option<OneOrAll>,
    /// exclusive: slices; concurrent: all at once; auto: whichever serves better
    #[arg(long, value_name = "MODE")]
    pub mode: Option<SliceMode>,
    /// Slice policy, with parameters: stride, or NAME:key=number,key=number
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<PolicyChoice>,
    /// How many jobs may hold the device at once in slices, where the policy makes use of it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub holders: Option<u32>,
    /// Longest slice in milliseconds, and what two jobs have while one of them is guaranteed
    #[arg(long, value_name = "MS", value_parser = parse_quantum)]
    pub quantum_ms: Option<f64>,
    /// Shortest slice in milliseconds
    #[arg(long, value_name = "MS", value_parser = parse_quantum)]
    pub quantum_min_ms: Option<f64>,
    /// Wake the next job shortly before its turn
    #[arg(long, value_name = "true|false", value_parser = parse_flag)]
    pub early_wake: Option<bool>,
    /// What happens to a job that harms the others
    #[arg(long, value_name = "report|demote|kill")]
    pub misbehaviour: Option<Misbehaviour>,
    /// Have the arbiter read its quota file again; what was set on devices by hand gives way to it
    #[arg(long, exclusive = true)]
    pub reload: bool,
}

/// Flags of `set` that are about a job.
const JOB_FLAGS: [&str; 15] = [
    "name",
    "mem",
    "share",
    "share_min",
    "share_max",
    "class",
    "gang",
    "deadline",
    "work",
    "pause",
    "resume",
    "solo_iteration_us",
    "overflow",
    "host_memory",
    "resize",
];

/// Moves only memory that is on the devices, and nothing if host memory cannot hold all of it.
#[derive(Debug, Args)]
pub struct Evict {
    #[command(flatten)]
    pub how: MoveFlags,
    /// Names of the jobs, as `sublet ps` shows them
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// A job whose memory another job has taken comes back in its turn.
#[derive(Debug, Args)]
pub struct Restore {
    #[command(flatten)]
    pub how: MoveFlags,
    /// Names of the jobs, as `sublet ps` shows them
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Switch {
    #[command(flatten)]
    pub how: MoveFlags,
    /// The job that leaves
    #[arg(value_name = "OUT")]
    pub out: String,
    /// The job that comes
    #[arg(value_name = "IN")]
    pub back: String,
}

#[derive(Debug, Args)]
pub struct MoveFlags {
    /// Print one JSON object: outcome, bytes and times of each job
    #[arg(long)]
    pub json: bool,
    /// Give up waiting after this long; the jobs go on moving
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "2m")]
    pub timeout: Duration,
}

/// One device, or every one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OneOrAll {
    One(DeviceSelector),
    All,
}

fn parse_host(word: &str) -> Result<cluster::HostDivision, String> {
    cluster::HostDivision::of(word)
        .ok_or_else(|| format!("`{word}` is not known: write proportional or tune"))
}

fn parse_one_or_all(text: &str) -> Result<OneOrAll, String> {
    if text == "all" {
        return Ok(OneOrAll::All);
    }
    text.parse()
        .map(OneOrAll::One)
        .map_err(|error: control::BadDevice| format!("{error}, or `all`"))
}

fn parse_quantum(text: &str) -> Result<f64, String> {
    let (least, most) = QUANTUM_MS;
    text.parse()
        .ok()
        .filter(|ms| (least..=most).contains(ms))
        .ok_or_else(|| {
            format!("`{text}` is no slice: write milliseconds from {least} to {most}, such as 5")
        })
}

#[derive(Debug, Args)]
pub struct Arbiter {
    /// End when there has been no job for a while; what `sublet run` starts by itself
    #[arg(long)]
    pub embedded: bool,
    /// End after so many seconds without a job; 0 for never [default: 0, or 10 with --embedded]
    #[arg(long, value_name = "SECS")]
    pub idle_exit: Option<u64>,
    /// Where the sockets and files are [default: /run/sublet for root, else as `sublet run` looks]
    /// [env: SUBLET_RUNTIME_DIR]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// End the running arbiter instead; its jobs go on as their --on-arbiter-loss says
    #[arg(long, conflicts_with_all = ["embedded", "idle_exit", "config"])]
    pub stop: bool,
    /// Quota file, for its device and tenant sections [env: SUBLET_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: crate::cluster_command::node::ClusterFlags,
}

/// Several orders, packers, placers or sizers make a sweep: every combination is run, in parallel.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Simulate {
    #[command(subcommand)]
    pub command: Option<SimulateCommand>,
    #[command(flatten)]
    pub run: SimulateRun,
}

#[derive(Debug, Args)]
pub struct SimulateRun {
    /// The trace: a CSV file of any known format, recognised by its header
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The cluster: 96xV100, 16x4xT4 (nodes x GPUs x type), several by comma, or a file
    #[arg(long, value_name = "SPEC")]
    pub cluster: Option<String>,
    /// Who is next; name[:key=value,...]; repeat for a sweep [default: fifo, or the sizer decides]
    #[arg(long, value_name = "NAME")]
    pub order: Vec<String>,
    /// Who shares a GPU; `none` for nobody, in a sweep
    #[arg(long, value_name = "NAME")]
    pub packer: Vec<String>,
    /// Which GPUs a job gets
    #[arg(long, value_name = "NAME", default_value = "anywhere")]
    pub placer: Vec<String>,
    /// Whose deadline is promised
    #[arg(long, value_name = "NAME")]
    pub admission: Option<String>,
    /// How many GPUs a job gets, in place of an order and a packer; `none` for none, in a sweep
    #[arg(long, value_name = "NAME")]
    pub sizer: Vec<String>,
    /// Only this part of the trace: a virtual cluster, a cluster
    #[arg(long, value_name = "NAME")]
    pub part: Option<String>,
    /// Only the first so many jobs
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Leave out jobs that ask for more GPUs than this
    #[arg(long, value_name = "N")]
    pub max_gpus: Option<u32>,
    /// Where the speed tables are [default: beside the trace]
    #[arg(long, value_name = "DIR")]
    pub speeds: Option<PathBuf>,
    /// Take durations from the speed tables where jobs have speed curves, without a sizer too
    #[arg(long)]
    pub elastic: bool,
    /// GPU-seconds of past jobs, one a line after a header: for `gittins`
    #[arg(long, value_name = "FILE")]
    pub past: Option<PathBuf>,
    /// Decide in rounds of so many seconds [default: at every event]
    #[arg(long, value_name = "SECS")]
    pub round: Option<f64>,
    /// What a job loses when it gets GPUs again, in seconds
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub restart: f64,
    /// What a job loses when it gets GPUs for the first time, in seconds
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub start: f64,
    /// Model the cores and memory of servers, divided so: proportional to GPUs, or tune (by need,
    /// nobody slower than in proportion)
    #[arg(long, value_name = "proportional|tune", value_parser = parse_host, requires = "sensitivity")]
    pub host: Option<cluster::HostDivision>,
    /// How kinds of job depend on cores and memory:
    /// model,num_gpus,cpus_per_gpu,mem_gb_per_gpu,norm_tput
    #[arg(long, value_name = "FILE", requires = "host")]
    pub sensitivity: Option<PathBuf>,
    /// How far estimates and measurements are off: 0.1 is about 10 %
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    pub noise: f64,
    /// Seed of all chance
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write a picture: distribution and means of the completion times
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum SimulateCommand {
    /// Print every policy with its tags and parameters
    Policies(Policies),
    /// What finish times would be worth under a reward curve, and with more or less slack in it
    WhatIf(Box<WhatIf>),
}

#[derive(Debug, Args)]
pub struct WhatIf {
    #[command(flatten)]
    pub run: SimulateRun,
    /// Reward by finish time: until:reward, several by comma; until in seconds, durations (2x) or
    /// deadlines of the trace (d). The first step is the deadline that policies see
    #[arg(long, value_name = "CURVE")]
    pub sla: cluster::reward::Sla,
    /// Multiply all times of the curve by each of these
    #[arg(long, value_name = "F,...", value_delimiter = ',', default_value = "1")]
    pub slack: Vec<f64>,
}

#[derive(Debug, Args)]
pub struct Policies {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

fn parse_name(name: &str) -> Result<String, control::BadName> {
    control::check_name(name).map(|()| name.to_owned())
}

/// What to do instead of running a command.
#[derive(Debug)]
pub enum Early {
    /// Help or version, for stdout.
    Show(String),
    /// What is wrong, in one line.
    Wrong(String),
}

/// # Errors
/// [`Early`] where there is no command to run.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Early> {
    Cli::try_parse_from(args).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Early::Show(format!("{}\n", error.to_string().trim_end()))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Early::Wrong("no command given: try `sublet run CMD...`, or see `sublet --help`".into())
        }
        _ => Early::Wrong(one_line(&error.to_string())),
    })
}

/// clap writes paragraphs: the error, tips, the usage. What is kept are the first two kinds, on one
/// line.
fn one_line(rendered: &str) -> String {
    let paragraphs = rendered.split("\n\n").flat_map(|paragraph| {
        // Tips follow each other without an empty line between them.
        paragraph.split("\n  tip:").enumerate().map(|(i, text)| {
            if i == 0 {
                text.to_owned()
            } else {
                format!("tip:{text}")
            }
        })
    });
    let mut message = String::new();
    let mut usage = "sublet --help".to_owned();
    for paragraph in paragraphs {
        let text = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some(error) = text.strip_prefix("error: ") {
            message = error.to_owned();
        } else if let Some(tip) = text.strip_prefix("tip: ") {
            // "to pass '--x' as a value, use '-- --x'" is right for other programs, and wrong for a
            // launcher.
            if !tip.starts_with("to pass ") {
                message = format!("{message}; {tip}");
            }
        } else if let Some(line) = text.strip_prefix("Usage: sublet ") {
            let sub = line
                .split(' ')
                .next()
                .filter(|word| word.chars().all(|c| c.is_ascii_lowercase()));
            usage = sub.map_or(usage, |sub| format!("sublet {sub} --help"));
        }
    }
    format!("{message} (see `{usage}`)")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn wrong(args: &[&str]) -> String {
        let args = ["sublet"].iter().chain(args).map(OsString::from);
        match parse(args) {
            Err(Early::Wrong(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn run(args: &[&str]) -> Run {
        let args = ["sublet", "run"].iter().chain(args).map(OsString::from);
        match parse(args).unwrap().command {
            Command::Run(run) => run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_declarations_hold_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_after_the_command_is_the_commands() {
        let words = |run: Run| run.command;
        assert_eq!(
            words(run(&["a", "--mem", "20", "-x"])),
            ["a", "--mem", "20", "-x"]
        );
        assert_eq!(
            words(run(&["--sim", "--", "a", "--", "b"])),
            ["a", "--", "b"]
        );
        assert_eq!(words(run(&["--", "--odd"])), ["--odd"]);
        assert!(run(&["--sim", "a", "--json"]).sim);
    }

    #[test]
    fn devices_come_by_comma_and_by_repetition() {
        let run = run(&["--device", "0,2", "--device", "GPU-ff", "a"]);
        let expected = [
            DeviceSelector::Index(0),
            DeviceSelector::Index(2),
            DeviceSelector::Uuid("GPU-ff".into()),
        ];
        assert_eq!(run.devices, expected);
    }

    #[test]
    fn mistakes_are_one_line_with_value_and_remedy() {
        for (args, words) in [
            (
                &["run", "--memm", "1G", "a"][..],
                &["'--memm'", "'--mem'", "`sublet run --help`"][..],
            ),
            (&["run", "--mem", "20", "a"], &["'20'", "20GiB", "50%"]),
            (&["run", "--mem", "-1G", "a"], &["`-1G`", "20GiB"]),
            (&["run", "--share", "1.5", "a"], &["`1.5`", "at most 1"]),
            (&["run", "--share", "-1", "a"], &["`-1`", "above 0"]),
            (
                &["run", "--class", "best", "a"],
                &["`best`", "opportunistic"],
            ),
            (&["run", "--device", "x", "a"], &["`x`", "UUID"]),
            (&["run", "--name", "a b", "a"], &["`a b`", "letters"]),
            (&["run", "--mem"], &["--mem"]),
            (&["run"], &["CMD", "`sublet run --help`"]),
            (
                &["run", "--sim", "--driver", "/x", "a"],
                &["--sim", "--driver"],
            ),
            (&["runn"], &["'runn'", "'run'"]),
            (&[], &["`sublet run CMD...`"]),
            (&["set"], &["NAME", "`sublet set --help`"]),
            (&["set", "a", "--device", "0"], &["NAME", "--device"]),
            (
                &["set", "--device", "gpu", "--mode", "auto"],
                &["`gpu`", "`all`"],
            ),
            (
                &["set", "--device", "0", "--mode", "shared"],
                &["`shared`", "auto"],
            ),
            (&["set", "--device", "0", "--policy", "a b"], &["`a b`"]),
            (
                &["set", "--device", "0", "--quantum-ms", "0"],
                &["`0`", "1000"],
            ),
            (
                &["set", "a", "--pause", "--resume"],
                &["--pause", "--resume"],
            ),
            (&["set", "a", "--deadline", "soon"], &["`soon`", "90s"]),
            (&["set", "a", "--reload"], &["--reload"]),
            (&["arbiter", "--idle-exit", "x"], &["'x'", "--idle-exit"]),
            (&["ps", "extra"], &["'extra'"]),
            (&["evict"], &["NAME", "`sublet evict --help`"]),
            (&["switch", "a"], &["IN"]),
            (&["evict", "a", "--timeout", "0"], &["'0'", "--timeout"]),
            (
                &["run", "--overflow", "disk", "a"],
                &["`disk`", "host or fail"],
            ),
            (&["simulate", "--round", "x"], &["'x'", "--round"]),
        ] {
            let message = wrong(args);
            assert!(!message.contains('\n'), "{message}");
            for word in words {
                assert!(message.contains(word), "{args:?}: {message}");
            }
        }
    }

    #[test]
    fn help_tells_the_exit_codes() {
        for args in [&["sublet", "--help"][..], &["sublet", "run", "--help"]] {
            let Err(Early::Show(text)) = parse(args.iter().map(OsString::from)) else {
                panic!("no help for {args:?}");
            };
            for code in ["125", "126", "127"] {
                assert!(text.contains(code), "{text}");
            }
        }
    }
}
