//! The command line of `sublet cluster`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use cluster::live::slurm::MOST_REQUEUES;
use control::Class;
use control::kinds::{Flag, Share};
use control::setting::Kind as _;

use crate::tls_flags::TlsFlags;

/// The hook above the nodes: arbiters report to it (`sublet arbiter --cluster URL`), users submit
/// jobs to it, and it decides where they run
#[derive(Debug, Args)]
pub struct Cluster {
    #[command(subcommand)]
    pub command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Run the hook
    Serve(Box<Serve>),
    /// Submit a job
    Submit(Box<Submit>),
    /// Show the jobs
    Jobs(Show),
    /// Take jobs back
    Cancel(Cancel),
    /// Show hook, nodes and measured pairs
    Status(Show),
    /// Show what was decided, and why
    Log(Log),
    /// Ask where a job of another engine should run; nothing is started
    Decide(Decide),
    /// Place the held jobs of a Slurm cluster: on which node and GPU, by the hook's policies
    Slurm(Box<SlurmPacker>),
    /// Give a node up: what runs there is counted as lost
    Forget(Forget),
    /// Try a node again, now, that gets no new jobs because some did not start there
    Retry(Retry),
    /// Make certificates for hook, nodes and operators, by an authority of your own
    Certificates(Certificates),
    /// Print the token of one node, by which it may speak as itself and do nothing else
    NodeToken(NodeToken),
    /// What the arbiter starts beside each job
    #[command(hide = true)]
    RunJob { dir: PathBuf },
}

#[derive(Debug, Args)]
pub struct Serve {
    /// Directory of its state, made where it is missing
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
    /// Where to listen; port 0 takes a free one, which is then printed
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// File whose first line is the token that all sides share; needed off loopback [default:
    /// DIR/token, made if missing]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub tls: TlsFlags,
    /// The name in certificates of those who may do all that nodes do not: submit, cancel, decide;
    /// may be repeated [default: operator]
    #[arg(long, value_name = "NAME", requires = "tls_client_ca")]
    pub operator: Vec<String>,
    /// Listen off loopback without TLS: others can read jobs, their variables, orders and reports
    #[arg(long, conflicts_with = "tls_cert")]
    pub plain_text: bool,
    /// Who is next; `sublet simulate policies` lists all [default: fifo-backfill, or the sizer
    /// decides]
    #[arg(long, value_name = "POLICY")]
    pub order: Option<String>,
    /// Who shares a GPU: trial, opportunistic, or none [default: trial, or none beside a sizer, a
    /// round allocator or cells]
    #[arg(long, value_name = "POLICY")]
    pub packer: Option<String>,
    /// Which GPUs
    #[arg(long, value_name = "POLICY", default_value = "consolidate-relaxed")]
    pub placer: String,
    /// Whose deadline is promised
    #[arg(long, value_name = "POLICY")]
    pub admission: Option<String>,
    /// How many GPUs, in place of an order and a packer
    #[arg(long, value_name = "POLICY")]
    pub sizer: Option<String>,
    /// Seed of choices among equals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Decide at least so often
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "10s")]
    pub round: Duration,
    /// Shortest window in which a pair is measured
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "30s")]
    pub trial_window: Duration,
    /// Iterations of the slower of the two that the window has to hold
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub trial_iterations: u32,
    /// How long a job's solo speed is measured
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "5s")]
    pub trial_solo: Duration,
    /// A node that is silent for so long gets nothing new
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "10s")]
    pub node_timeout: Duration,
    /// How long a job may take to end when it is asked to
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "10s")]
    pub grace: Duration,
    /// Time before that to end its iteration and save, if it looks for such requests; at most 1m
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "30s")]
    pub save_patience: Duration,
}

/// Where the hook is.
#[derive(Debug, Clone, Args)]
pub struct Hook {
    /// The hook's address, such as http://127.0.0.1:7070 or https://head:7070 [env: SUBLET_CLUSTER]
    #[arg(long, value_name = "URL")]
    pub cluster: Option<String>,
    /// File with its token [env: SUBLET_CLUSTER_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub tls: Tls,
}

/// For a hook with TLS.
#[derive(Debug, Clone, Default, Args)]
pub struct Tls {
    /// Certificate of the authority that vouches for a hook with TLS [env: SUBLET_CLUSTER_CA_FILE]
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Certificate to show a hook that demands one [env: SUBLET_CLUSTER_CERT_FILE]
    #[arg(long, value_name = "FILE")]
    pub cert_file: Option<PathBuf>,
    /// Its key [env: SUBLET_CLUSTER_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Show {
    #[command(flatten)]
    pub hook: Hook,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Submit {
    #[command(flatten)]
    pub hook: Hook,
    /// Print one JSON object, the job, instead of its number
    #[arg(long)]
    pub json: bool,
    /// Name of the job [default: from the command]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Kind of job, such as resnet50-b64: the key for measurements of pairs [default: the command
    /// line]
    #[arg(long, value_name = "WORD")]
    pub kind: Option<String>,
    /// Whose job, for policies that are fair between users
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// GPUs, all on one node
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus: u32,
    /// The job can go on with any number of GPUs up to this; with --restartable and a sizer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_gpus: Option<u32>,
    /// Part of one GPU, from 0.01 to below 1, with --mem of its memory: the job shares that GPU
    /// with others of which the parts add up to one at most [default: whole GPUs]
    #[arg(long, value_name = "SHARE", value_parser = Share::parse, requires = "mem")]
    pub share: Option<f64>,
    /// Memory limit on each device: 8GiB, 512M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub mem: Option<u64>,
    /// guaranteed or opportunistic
    #[arg(long, value_name = "guaranteed|opportunistic", default_value_t)]
    pub class: Class,
    /// How long it takes alone
    #[arg(long, value_name = "TIME", value_parser = control::parse_span)]
    pub work: Option<Duration>,
    /// When it should be done, from now
    #[arg(long, value_name = "TIME", value_parser = control::parse_span)]
    pub deadline: Option<Duration>,
    /// Weight among jobs
    #[arg(long, value_name = "F")]
    pub weight: Option<f64>,
    /// It keeps its progress itself: it may be stopped and started again, anywhere
    #[arg(long, value_name = "true|false", value_parser = Flag::parse, num_args = 0..=1, default_missing_value = "true", default_value = "false")]
    pub restartable: bool,
    /// Its memory may leave its GPUs while others run: it may share one with jobs with which it
    /// does not fit into the memory at once
    #[arg(long, value_name = "true|false", value_parser = Flag::parse, num_args = 0..=1, default_missing_value = "true", default_value = "false")]
    pub evictable: bool,
    /// Variable for the job; may be repeated
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub env: Vec<(String, String)>,
    /// Directory to run in, as the nodes have it [default: one of its own]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// The same word twice is one job
    #[arg(long, value_name = "WORD")]
    pub once: Option<String>,
    /// The command and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Cancel {
    #[command(flatten)]
    pub hook: Hook,
    /// Numbers of the jobs
    #[arg(value_name = "ID", required = true)]
    pub ids: Vec<u64>,
}

#[derive(Debug, Args)]
pub struct Log {
    #[command(flatten)]
    pub hook: Hook,
    /// Only lines with a number above this
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub above: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Decide {
    #[command(flatten)]
    pub hook: Hook,
    /// The question as JSON, the body of POST /v1/decide; `-`: from standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

#[derive(Debug, Args)]
pub struct SlurmPacker {
    #[command(flatten)]
    pub hook: Hook,
    /// How often to look at Slurm's queue
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "2s")]
    pub every: Duration,
    /// Look once, and end
    #[arg(long)]
    pub once: bool,
    /// GPU memory that one shard stands for
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1GiB")]
    pub shard: u64,
    /// Slurm's program
    #[arg(long, value_name = "FILE", default_value = "scontrol")]
    pub scontrol: PathBuf,
    /// Keep free memory and share of each node's GPUs in the node's `Extra`, as JSON
    #[arg(long)]
    pub node_extra: bool,
    /// Requeue the job that came last to a GPU where a job takes more than F times as long for an
    /// iteration as solo
    #[arg(long, value_name = "F", value_parser = parse_slowdown)]
    pub requeue_above: Option<f64>,
    /// Suspend a job that was submitted with --gpu-evictable, in place of requeueing it: its memory
    /// leaves the GPU before, and it goes on once the other job has ended
    #[arg(long, requires = "requeue_above")]
    pub suspend: bool,
    /// Only where it is so slow for that long without a break
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "30s")]
    pub requeue_sustained: Duration,
    /// Only so soon after the job has started, whose work since then is lost
    #[arg(long, value_name = "TIME", value_parser = control::parse_span, default_value = "10m")]
    pub requeue_within: Duration,
    /// Only so often each job
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_REQUEUES)))]
    pub requeue_most: u32,
}

#[derive(Debug, Args)]
pub struct Forget {
    #[command(flatten)]
    pub hook: Hook,
    /// The node
    #[arg(value_name = "NODE")]
    pub node: String,
}

#[derive(Debug, Args)]
pub struct Retry {
    #[command(flatten)]
    pub hook: Hook,
    /// The node
    #[arg(value_name = "NODE")]
    pub node: String,
}

/// What is there is kept, unless --renew is given. Each certificate FILE.crt has its key FILE.key
/// beside it: ca (the authority: its key vouches for anybody, so keep it where nobody looks for
/// it), hook, operator, node-NAME.
#[derive(Debug, Args)]
pub struct Certificates {
    /// Directory of the files, made where it is missing
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// A name or address by which nodes and users reach the hook; may be repeated
    #[arg(long, value_name = "HOST")]
    pub hook: Vec<String>,
    /// A node, by its name in the cluster; may be repeated
    #[arg(long, value_name = "NODE")]
    pub node: Vec<String>,
    /// One for users who submit jobs, and for programs that ask the hook to decide
    #[arg(long)]
    pub operator: bool,
    /// Revoke all certificates that somebody has had until now, by the name of its files: node-a,
    /// hook, operator; may be repeated. The list comes into DIR/ca.crt, for all hosts
    #[arg(long, value_name = "NAME")]
    pub revoke: Vec<String>,
    /// Put new ones in the place of those that are there; the authority stays
    #[arg(long)]
    pub renew: bool,
    /// How long they are good for
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub days: u32,
}

/// The hook knows it by the node's name: it keeps no list.
#[derive(Debug, Args)]
pub struct NodeToken {
    /// The node, by its name in the cluster
    #[arg(value_name = "NODE")]
    pub node: String,
    /// File with the hook's token
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,
}

fn parse_size(text: &str) -> Result<u64, String> {
    control::parse_bytes(text).map_err(|error| error.to_string())
}

fn parse_slowdown(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    number.filter(|number| *number > 1.0).ok_or_else(|| {
        format!("`{text}` is no slowdown: write how many times as long an iteration may take, such as 2.5")
    })
}

fn parse_variable(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
    pair.map(|(name, value)| (name.to_owned(), value.to_owned()))
        .ok_or_else(|| format!("`{text}` is no variable: write NAME=VALUE"))
}
