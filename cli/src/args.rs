//! The command line: each flag declared once, and every mistake reported in one line.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use control::{DeviceSelector, DeviceSettings, JobSettings, Resize};

use crate::flags::{Flags, Written};
use crate::mistake;

const EXIT_CODES: &str = "\
Exit codes:
  the command's own  once `sublet run` has started it
  0    done (`ps`, `top`, `events` and `metrics --once` also where no arbiter runs)
  124  `sublet acquire` had no turn in time
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
    /// Train two small jobs beside each other on the simulated GPU, to see what sublet does
    Demo(Demo),
    /// Show the jobs and devices of the arbiter
    Ps(Ps),
    /// Watch devices and jobs on the terminal, and change jobs by keys
    Top(Top),
    /// Show what happened: jobs, processes, refusals, memory, devices
    Events(Events),
    /// Serve the figures of the arbiter, its devices and its jobs to Prometheus
    Metrics(Metrics),
    /// Write what the devices do for a while to a file that Perfetto opens
    Trace(Trace),
    /// Change the settings of a running job
    Set(Set),
    /// Give jobs no device time until they are resumed
    Pause(Names),
    /// Give paused jobs their turns again
    Resume(Names),
    /// Change how a device is run
    Device(Device),
    /// Have the arbiter read its quota file again
    Reload(Reload),
    /// Move jobs out of their devices' memory, and hold them there until they are restored
    Evict(Evict),
    /// Bring evicted jobs back, and let them go on
    Restore(Restore),
    /// Evict one job and restore another in one pass: the first frees the memory that the second
    /// needs
    Switch(Switch),
    /// Wait for a job's turn in its group, and for its memory
    Acquire(AcquireTurn),
    /// Give a job's turn up: it stops until it has acquired again
    Yield(YieldTurn),
    /// Show the groups of jobs that take turns by themselves
    Groups(ListGroups),
    /// Serve these turns by the gRPC interface of llm-d's RL time slicing
    Timeslice(Timeslice),
    /// Use as many instances of a service as keep its agreed response times
    Frontend(crate::frontend::args::Frontend),
    /// Show driver, devices and quotas, and whether a command's driver calls are all seen
    Doctor(Doctor),
    /// Measure which jobs slow each other down on a GPU, and by how much
    Interfere(Interfere),
    /// Run a command, and record its calls of the CUDA driver to a file
    Record(RecordJob),
    /// Make the calls of a recording again, with kernels that take as long
    Replay(Replay),
    /// Kernels of Jupyter whose notebooks run as jobs
    Kernel(Kernel),
    /// Give containers parts of a GPU: a file for Docker, Podman and Kubernetes
    Cdi(crate::cdi::args::Cdi),
    /// Run the arbiter: the daemon that decides who uses a GPU when
    Arbiter(Arbiter),
    /// Simulate a cluster: a trace of jobs under scheduling and packing policies, in virtual time
    Simulate(Simulate),
    /// The hook above the nodes: run it, submit jobs to it, look at it
    Cluster(crate::cluster_command::args::Cluster),
    /// Pods share GPUs: device plugin, DRA driver, scheduler extender
    Kubernetes(crate::kubernetes_command::args::Kubernetes),
    /// Check quota files, show what is in force, print their schema
    Config(ConfigArgs),
    /// Print a completion script for a shell
    Completions(Completions),
    /// Write a man page for each command
    Man(Man),
}

/// Flags beat SUBLET_MEM, SUBLET_SHARE, ... in the environment, those beat the quota file.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct Run {
    #[command(flatten)]
    pub settings: Flags<JobSettings, false>,
    /// Name of the job [default: from the command] [env: SUBLET_NAME]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub name: Option<String>,
    /// Quota file of its user [default: sublet.toml here, or ~/.config/sublet/config.toml] [env:
    /// SUBLET_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Fail where a process uses the job's devices that is part of no job
    #[arg(long)]
    pub strict: bool,
    /// Reach link namespaces (LD_AUDIT) and children that lose LD_PRELOAD (CUDA_INJECTION64_PATH)
    /// as well
    #[arg(long)]
    pub deep: bool,
    /// End an iteration where an optimizer of PyTorch has stepped, in every Python process of the
    /// job
    #[arg(long, value_name = "torch", value_parser = ["torch"])]
    pub step_hook: Option<String>,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    /// Use this driver library instead of searching for libcuda.so.1
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    pub driver: Option<PathBuf>,
    /// A word of a command for engines that start a job's processes themselves. No arbiter is
    /// started then; and where the command is not, these words with the command behind them take
    /// its place, with the reason in SUBLET_REFUSED
    #[arg(long, value_name = "WORD", hide = true)]
    pub refused: Vec<OsString>,
    /// The command and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// Two jobs train at shares of 0.75 and 0.25 under an arbiter of their own; a third asks for more
/// memory than it may have. Takes about 20 seconds and leaves nothing behind. Exits with 1 where
/// something was not kept.
#[derive(Debug, Args)]
pub struct Demo {
    /// Use this machine's GPU
    #[arg(long)]
    pub gpu: bool,
    /// How long the two train
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0, value_parser = parse_demo_seconds)]
    pub seconds: f64,
    /// Print one JSON object: what each job asked for and got
    #[arg(long)]
    pub json: bool,
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

/// Shows devices and jobs until `q`; `?` lists the keys. A change is asked about before it is made.
#[derive(Debug, Args)]
pub struct Top {
    /// Look at the arbiter this often: 100ms to 1h
    #[arg(long, value_name = "TIME", value_parser = parse_interval, default_value = "1s")]
    pub interval: Duration,
    /// Without the keys that change jobs
    #[arg(long)]
    pub readonly: bool,
    /// Print one frame as plain text, after one interval; needs no terminal
    #[arg(long)]
    pub once: bool,
    /// Print one JSON object after each interval; with --once a single one
    #[arg(long)]
    pub json: bool,
}

/// Prints the arbiter's journal, oldest first: time in UTC, what it was, the job, and a sentence.
/// Works also where no arbiter runs.
#[derive(Debug, Args)]
pub struct Events {
    /// Go on with what happens from here on, until Ctrl-C; begins with the last 10 events, or as
    /// --since and -n say
    #[arg(short, long)]
    pub follow: bool,
    /// Only events of the job with this name or number (`id` in `sublet ps --json`)
    #[arg(long, value_name = "NAME|ID", value_parser = parse_name)]
    pub job: Option<String>,
    /// Only events on this device
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<DeviceSelector>,
    /// Only events since then: how long ago (10m), or a time (2026-11-23T20:15:00Z)
    #[arg(long, value_name = "WHEN", value_parser = crate::when::parse_since)]
    pub since: Option<u64>,
    /// Only the last so many of the events that are asked for
    #[arg(short = 'n', value_name = "LINES")]
    pub lines: Option<usize>,
    /// Print one JSON object for each event
    #[arg(long)]
    pub json: bool,
}

/// Asks the arbiter at each scrape of /metrics. Where it does not answer, `sublet_up` is 0.
#[derive(Debug, Args)]
pub struct Metrics {
    /// Where to listen; port 0 takes a free one, which is then printed. Everybody who reaches it
    /// reads the names of jobs and users
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9464")]
    pub listen: SocketAddr,
    /// Print the figures once, in Prometheus's text format, and end
    #[arg(long)]
    pub once: bool,
}

/// The file is in Chrome's trace event format. Times are Unix time, as in traces of PyTorch's
/// profiler. Ctrl-C ends it early, with what there is.
#[derive(Debug, Args)]
pub struct Trace {
    /// The file to write; it takes its place in the end
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// For how long
    #[arg(long = "for", value_name = "TIME", value_parser = control::parse_span, default_value = "30s")]
    pub duration: Duration,
    /// Only spans of the job with this name or number (`id` in `sublet ps --json`)
    #[arg(long, value_name = "NAME|ID", value_parser = parse_name)]
    pub job: Option<String>,
    /// Only spans on this device
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<DeviceSelector>,
}

/// The file has what a job calls and how long its kernels take; no data, no values of parameters,
/// no paths. Runs the command outside of every job, unless this is itself part of one. Ends with
/// the command's own exit code.
#[derive(Debug, Args)]
pub struct RecordJob {
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// How large the file may be; what comes after that is not recorded, and the command goes on
    #[arg(long, value_name = "SIZE", value_parser = parse_max_size, default_value = "256MiB")]
    pub max_size: u64,
    /// Write numbers in place of the names of kernels
    #[arg(long)]
    pub no_names: bool,
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

/// A CUDA program like any other: `sublet run -- sublet replay job.slr` runs it as a job.
#[derive(Debug, Args)]
pub struct Replay {
    /// The recording
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    /// Use this driver library instead of searching for libcuda.so.1
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    pub driver: Option<PathBuf>,
    /// Divide all times by this
    #[arg(long, value_name = "FACTOR", value_parser = parse_speed, default_value = "1")]
    pub speed: f64,
    /// Begin anew at the end, for so long
    #[arg(long = "for", value_name = "TIME", value_parser = control::parse_span)]
    pub duration: Option<Duration>,
    /// Print what is in the recording, and replay nothing
    #[arg(long)]
    pub show: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Replay one process of several: a replay starts itself so
    #[arg(long, hide = true)]
    pub process: Option<u16>,
    /// Write every moment how many there were so far; of a recording of one process
    #[arg(long, hide = true)]
    pub count: Option<Counted>,
}

/// What a replay counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Counted {
    Launches,
    Iterations,
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

/// Runs each job of the plan by itself and beside each other one, and writes a report: heat map,
/// tables, every raw figure. Stopped at any point, the same command goes on. Exits with 1 where
/// runs failed.
#[derive(Debug, Args)]
pub struct Interfere {
    /// The plan: jobs, which of them run together, modes, times
    #[arg(value_name = "PLAN.toml")]
    pub plan: PathBuf,
    /// Where runs and report are kept
    #[arg(long, value_name = "DIR", required_unless_present = "dry_run")]
    pub out: Option<PathBuf>,
    /// How often each run is made [default: the plan's, or 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: Option<u32>,
    /// Seed of the order and of the confidence intervals [default: the plan's, or 1]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Make the runs again that failed
    #[arg(long)]
    pub retry: bool,
    /// Print the time that it takes and every run, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    /// The device to share: index or UUID
    #[arg(long, value_name = "N|UUID", default_value = "0")]
    pub device: String,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    /// Use this driver library instead of searching for libcuda.so.1
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    pub driver: Option<PathBuf>,
    /// Give what was measured to this cluster hook, which decides by it which jobs share a GPU
    #[arg(long, value_name = "URL")]
    pub feed: Option<String>,
    /// The hook that knows the kinds of the plan [default: that of --feed; env: SUBLET_CLUSTER]
    #[arg(long, value_name = "URL")]
    pub cluster: Option<String>,
    /// File with the hook's token [env: SUBLET_CLUSTER_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub tls: crate::cluster_command::args::Tls,
}

/// Takes effect within a slice, and outlives the arbiter. What is refused changes nothing.
#[derive(Debug, Args)]
pub struct Set {
    /// Name of the job, as `sublet ps` shows it
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub settings: Flags<JobSettings, true>,
    /// Time of an iteration without other jobs ("2350us"): the base of the slowdown; 0 forgets it
    #[arg(long, value_name = "TIME|0", value_parser = parse_solo_iteration)]
    pub solo_iteration: Option<Duration>,
    /// Ask the job to end its iteration, save, and prepare to run on so many GPUs (0: none); `stay`
    /// takes that back
    #[arg(long, value_name = "GPUS|stay", allow_hyphen_values = true)]
    pub resize: Option<Resize>,
    /// Print one JSON object: the job as it stands
    #[arg(long)]
    pub json: bool,
}

/// A paused job keeps its memory and gets no device time until it is resumed.
#[derive(Debug, Args)]
pub struct Names {
    /// Names of the jobs, as `sublet ps` shows them
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
    /// Print one JSON object: the jobs as they stand
    #[arg(long)]
    pub json: bool,
}

/// As SIGHUP does. What `sublet device set` has changed gives way to the file.
#[derive(Debug, Args)]
pub struct Reload {
    /// Print one JSON object: the file and how many sections are in force
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Device {
    #[command(subcommand)]
    pub command: DeviceCommand,
}

#[derive(Debug, Subcommand)]
pub enum DeviceCommand {
    /// Change how a device is run, until the quota file is read again
    Set(DeviceSet),
}

/// Takes effect within a slice. What is refused changes nothing.
#[derive(Debug, Args)]
pub struct DeviceSet {
    /// UUID, index, or `all`
    #[arg(value_name = "UUID|INDEX|all", value_parser = parse_one_or_all)]
    pub device: OneOrAll,
    #[command(flatten)]
    pub settings: Flags<DeviceSettings, true>,
    /// Print one JSON object: the devices as they stand
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Kernel {
    #[command(subcommand)]
    pub command: KernelCommand,
}

#[derive(Debug, Subcommand)]
pub enum KernelCommand {
    /// Make a kernel, or make it anew
    Install(Box<KernelInstall>),
    /// Show the kernels that were made so
    List(KernelPlace),
    /// Remove one of them
    Remove(KernelRemove),
}

/// A notebook with this kernel is a job with these limits; two notebooks are two jobs.
#[derive(Debug, Args)]
pub struct KernelInstall {
    #[command(flatten)]
    pub settings: Written<JobSettings>,
    /// Name of the kernel and of its jobs
    #[arg(long, value_name = "NAME", default_value = "sublet")]
    pub name: String,
    /// What Jupyter shows [default: the limits]
    #[arg(long, value_name = "TEXT")]
    pub display_name: Option<String>,
    /// The Python of the notebooks, with ipykernel [default: python3 on the PATH]
    #[arg(long, value_name = "FILE")]
    pub python: Option<PathBuf>,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    #[command(flatten)]
    pub place: KernelPlace,
}

#[derive(Debug, Args)]
pub struct KernelRemove {
    /// Name of the kernel
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub place: KernelPlace,
}

#[derive(Debug, Clone, Args)]
pub struct KernelPlace {
    /// Jupyter's data folder, in which `kernels` is [default: JUPYTER_DATA_DIR, else
    /// ~/.local/share/jupyter]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Where to write them; made where it is missing
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Quota files say what jobs get and what users may have. Where they lie and who beats whom:
/// docs/reference/config.md.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Report everything that is wrong with quota files; exits with 1 where something is
    Check(ConfigCheck),
    /// Show what is in force for a job or a user, and where it stands
    Show(ConfigShow),
    /// Print the JSON Schema of quota files, or the page of all settings
    Schema(Schema),
}

/// Needs no arbiter.
#[derive(Debug, Args)]
pub struct ConfigCheck {
    /// Files to check [default: those of the folder, and the user's own]
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Folder with config.toml and config.d/*.toml [default: /etc/sublet] [env: SUBLET_CONFIG_DIR]
    #[arg(long, value_name = "DIR", conflicts_with = "files")]
    pub config_dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Without a job, what a job of yours gets that asks for nothing.
#[derive(Debug, Args)]
pub struct ConfigShow {
    /// Show the job of this process
    #[arg(long, value_name = "PID", conflicts_with = "user")]
    pub job_of: Option<u32>,
    /// Show what a job of this user gets
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Schema {
    /// Print the page of all settings in Markdown instead
    #[arg(long)]
    pub markdown: bool,
}

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

/// Ends with 0 where the job has the turn, with 124 where it did not come in time.
#[derive(Debug, Args)]
pub struct AcquireTurn {
    /// Name of the job, as `sublet ps` shows it [default: the one that this command is part of]
    #[arg(value_name = "NAME")]
    pub job: Option<String>,
    /// Group of jobs that take turns [default: the one that the job is in, else `default`]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub group: Option<String>,
    /// Give up waiting after this long
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "1h")]
    pub timeout: Duration,
    /// Print one JSON object: whether the job has the turn, how long it waited, and whether its
    /// memory came back
    #[arg(long)]
    pub json: bool,
}

/// Returns at once. The job's memory stays until another job of the group asks for its turn.
#[derive(Debug, Args)]
pub struct YieldTurn {
    /// Name of the job, as `sublet ps` shows it [default: the one that this command is part of]
    #[arg(value_name = "NAME")]
    pub job: Option<String>,
    /// Fail where the job is not in this group
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub group: Option<String>,
    /// Print one JSON object: how many jobs wait, and whether the job's memory stays
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ListGroups {
    /// Print one JSON object: the groups
    #[arg(long)]
    pub json: bool,
}

/// For programs that were written for llm-d's orchestrator. Serves root and its own user; job_id is
/// the name of a job, group_id that of a group.
#[derive(Debug, Args)]
pub struct Timeslice {
    /// Where to listen: `unix:FILE` for gRPC [default: timeslice.sock in the arbiter's directory]
    #[arg(long, value_name = "FILE")]
    pub socket: Option<PathBuf>,
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

fn parse_demo_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (5.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("`{text}` is no number of seconds from 5 to 3600")),
    }
}

fn parse_solo_iteration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    control::parse_span(text).map_err(|error| format!("{error}, or 0 to forget it"))
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = control::parse_span(text).map_err(|error| error.to_string())?;
    if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&interval) {
        return Err(format!(
            "`{text}` is outside 100ms to 1h: write a time such as 1s"
        ));
    }
    Ok(interval)
}

/// A duration, or 0 for none.
fn parse_idle_exit(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    control::parse_span(text).map_err(|error| format!("{error}, or 0 for never"))
}

#[derive(Debug, Args)]
pub struct Arbiter {
    /// End when there has been no job for a while; what `sublet run` starts by itself
    #[arg(long)]
    pub embedded: bool,
    /// End after this long without a job, such as 10s; 0 for never [default: 0, or 10s with
    /// --embedded]
    #[arg(long, value_name = "TIME", value_parser = parse_idle_exit)]
    pub idle_exit: Option<Duration>,
    /// Where the sockets and files are [default: /run/sublet for root, else as `sublet run` looks]
    /// [env: SUBLET_RUNTIME_DIR]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// End the running arbiter instead; its jobs go on as their --on-arbiter-loss says
    #[arg(long, conflicts_with_all = ["embedded", "idle_exit", "config", "config_dir"])]
    pub stop: bool,
    /// Quota file beside those of the folder [default: ~/.config/sublet/config.toml of a user that
    /// is not root] [env: SUBLET_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Folder with config.toml and config.d/*.toml [default: /etc/sublet] [env: SUBLET_CONFIG_DIR]
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: crate::cluster_command::node::ClusterFlags,
    #[command(flatten)]
    pub api: crate::api_flags::ApiFlags,
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
    /// What a trace holds: jobs, lengths, and how they waited where they came from, by cause
    Trace(TraceSummary),
    /// What finish times would be worth under a reward curve, and with more or less slack in it
    WhatIf(Box<WhatIf>),
    /// Where the layers of a model go on GPUs of several types, and what that gains
    Plan(Plan),
    /// Whether tenants with reserved cells, down to a quarter of a GPU, wait because of each other
    Cells(Cells),
    /// How many instances of a service are ready, who decides that, and whether it answers in time
    Serve(Box<Serve>),
}

#[derive(Debug, Args)]
pub struct TraceSummary {
    /// A trace of any known format, or times of iterations of Alibaba's PAI
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,
    /// Only this part of the trace
    #[arg(long, value_name = "NAME")]
    pub part: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Cells {
    /// Trace of jobs; on one GPU, the part that a job asks for is its busy fraction
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Servers
    #[arg(long, value_name = "N")]
    pub nodes: u32,
    /// GPUs of a server, a power of two
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub gpus_per_node: u32,
    /// Tenants, each with an equal reservation
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub tenants: u32,
    /// Only this part of the trace
    #[arg(long, value_name = "NAME")]
    pub part: Option<String>,
    /// Only the first so many jobs
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Serve {
    /// Requests, a CSV file: arrival_s, and service_s or context_tokens and generated_tokens
    #[arg(value_name = "FILE")]
    pub requests: PathBuf,
    /// A response is in time within so many seconds
    #[arg(long, value_name = "SECS")]
    pub within: f64,
    /// The part of the requests that has to be answered in time
    #[arg(long, value_name = "F", default_value_t = 0.99)]
    pub level: f64,
    /// Keep enough for so many times the predicted rate
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    pub burst: f64,
    /// Instances that there may be
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub instances: u32,
    /// Frontends, which decide each for itself
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub frontends: u32,
    /// Seconds until an instance that stands by has its memory back: bytes over the link's speed
    #[arg(long = "return", value_name = "SECS", default_value_t = 1.0)]
    pub return_s: f64,
    /// Seconds until a cold instance can answer
    #[arg(long, value_name = "SECS", default_value_t = 60.0)]
    pub start: f64,
    /// Seconds without a request or a word of a frontend after which memory is given back
    #[arg(long, value_name = "SECS", default_value_t = 10.0)]
    pub keep: f64,
    /// Seconds of standing by after which an instance ends [default: never]
    #[arg(long, value_name = "SECS")]
    pub standby: Option<f64>,
    /// Instances that stand by in the beginning; the others are cold [default: all]
    #[arg(long, value_name = "N")]
    pub warm: Option<u32>,
    /// Seconds that a frontend looks back
    #[arg(long, value_name = "SECS", default_value_t = 60)]
    pub history: u32,
    /// Drop requests that have waited longer than a response may take
    #[arg(long)]
    pub prune: bool,
    /// Seconds that a token of the question costs
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub context_token: f64,
    /// Seconds that a token of the answer costs
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub generated_token: f64,
    /// Seed of all chance
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Plan {
    /// The model and the GPUs, a TOML file: [link], [[gpu]] and [[group]]
    #[arg(value_name = "FILE")]
    pub model: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
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
    /// Print one JSON object: the policies
    #[arg(long)]
    pub json: bool,
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    match (0.01..=1000.0).contains(&speed) {
        true => Ok(speed),
        false => Err(format!("{speed} is not between 0.01 and 1000")),
    }
}

/// Least bytes of a recording: its header, its end and some calls.
const SIZE_LEAST: u64 = 64 << 10;

fn parse_max_size(text: &str) -> Result<u64, String> {
    match control::parse_bytes(text) {
        Ok(bytes) if bytes >= SIZE_LEAST => Ok(bytes),
        Ok(bytes) => Err(format!("{bytes} bytes are too few: give 64KiB or more")),
        Err(error) => Err(error.to_string()),
    }
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
    let args: Vec<OsString> = args.into_iter().collect();
    Cli::try_parse_from(&args).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Early::Show(format!("{}\n", error.to_string().trim_end()))
        }
        _ => Early::Wrong(format!(
            "{} (see `{}`)",
            mistake::sentence(&error),
            mistake::help_of(Cli::command(), &args)
        )),
    })
}

#[cfg(test)]
mod tests {
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
        assert_eq!(run.settings.0.devices(), expected);
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
            (&["set"], &["NAME", "`sublet set --help`"]),
            (&["set", "a", "--device", "0"], &["'--device'"]),
            (
                &["set", "a", "--evictable"],
                &["'--evictable'", "`sublet set --help`"],
            ),
            (
                &["device", "set", "gpu", "--mode", "auto"],
                &["`gpu`", "`all`", "`sublet device set --help`"],
            ),
            (
                &["device", "set", "0", "--mode", "shared"],
                &["`shared`", "auto", "lend"],
            ),
            (&["device", "set", "0", "--policy", "a b"], &["`a b`"]),
            (
                &["device", "set", "0", "--quantum", "5"],
                &["`5`", "0.5ms to 1s"],
            ),
            (
                &["device", "set", "0", "--mem-reserve", "1GiB"],
                &["'--mem-reserve'"],
            ),
            (&["pause"], &["NAME", "`sublet pause --help`"]),
            (&["set", "a", "--deadline", "soon"], &["`soon`", "90s"]),
            (
                &["set", "a", "--solo-iteration", "5"],
                &["`5`", "0 to forget"],
            ),
            (
                &["arbiter", "--idle-exit", "10"],
                &["`10`", "--idle-exit", "90s"],
            ),
            (&["ps", "extra"], &["'extra'"]),
            (
                &[
                    "frontend",
                    "run",
                    "--listen",
                    "h:1",
                    "--instance",
                    "a=h:2",
                    "--sla",
                    "99",
                ],
                &["'99'", "p99=200ms", "`sublet frontend run --help`"],
            ),
            (
                &["frontend", "run", "--listen", "8000", "--sla", "p99=1s"],
                &["'8000'", "HOST:PORT"],
            ),
            (
                &["frontend", "run", "--listen", "h:1", "--sla", "p99=1s"],
                &["--instance"],
            ),
            (
                &[
                    "frontend",
                    "run",
                    "--listen",
                    "h:1",
                    "--sla",
                    "p99=1s",
                    "--instance",
                    "a",
                ],
                &["'a'", "a=127.0.0.1:8001"],
            ),
            (&["frontend", "status"], &["ADDR:PORT"]),
            (&["events", "--since", "5"], &["`5`", "10m", "T20:15:00Z"]),
            (&["events", "--job", "a b"], &["`a b`"]),
            (&["events", "--device", "x"], &["`x`", "UUID"]),
            (&["events", "-n", "-1"], &["`sublet events --help`"]),
            (&["events", "-n", "many"], &["'many'"]),
            (&["interfere"], &["PLAN.toml", "`sublet interfere --help`"]),
            (&["interfere", "p.toml"], &["--out"]),
            (
                &["interfere", "p.toml", "--out", "o", "--repeat", "0"],
                &["'0'", "--repeat"],
            ),
            (&["metrics", "--listen", "9464"], &["'9464'", "--listen"]),
            (&["top", "--interval", "5"], &["`5`", "90s"]),
            (&["top", "--interval", "10ms"], &["`10ms`", "100ms to 1h"]),
            (&["top", "--interval", "2h"], &["`2h`", "100ms to 1h"]),
            (&["top", "train"], &["'train'", "`sublet top --help`"]),
            (&["trace"], &["--output", "`sublet trace --help`"]),
            (&["trace", "-o", "t", "--for", "5"], &["'5'", "--for"]),
            (&["trace", "-o", "t", "--device", "x"], &["`x`", "UUID"]),
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
    fn a_mistake_leads_to_the_help_of_its_command() {
        for (args, help) in [
            (&["--colour"][..], "(see `sublet --help`)"),
            (&["ps", "--colour"], "(see `sublet ps --help`)"),
            (
                &["device", "set", "0", "--colour"],
                "(see `sublet device set --help`)",
            ),
            (
                &["cluster", "submit", "--colour"],
                "(see `sublet cluster submit --help`)",
            ),
            (&["completions", "tcl"], "(see `sublet completions --help`)"),
        ] {
            let message = wrong(args);
            assert!(message.ends_with(help), "{message}");
        }
    }

    #[test]
    fn without_a_command_the_help_is_shown() {
        for (args, word) in [
            (&["sublet"][..], "Usage: sublet "),
            (&["sublet", "device"], "Usage: sublet device "),
        ] {
            let Err(Early::Show(text)) = parse(args.iter().map(OsString::from)) else {
                panic!("no help for {args:?}");
            };
            assert!(text.contains(word), "{text}");
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
