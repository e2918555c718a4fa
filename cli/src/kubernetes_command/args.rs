//! The command line of `sublet kubernetes`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::cluster_command::args::Hook;
use crate::tls_flags::TlsFlags;

/// Beside a kubelet, and beside Kubernetes' scheduler: pods share GPUs, and this node's arbiter
/// enforces what each was given
#[derive(Debug, Args)]
pub struct Kubernetes {
    #[command(subcommand)]
    pub command: KubernetesCommand,
}

#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Serve the kubelet GPU memory in units of a GiB (sublet.dev/gpu-mem-gib)
    DevicePlugin(Box<DevicePlugin>),
    /// Serve the kubelet claims of parts of GPUs (DRA with consumable capacity)
    Dra(Box<Dra>),
    /// Give containers a quota and a share as annotations of their pods say (NRI)
    Nri(Box<Nri>),
    /// Answer Kubernetes' scheduler which node and which GPU a pod should have
    Extender(Box<Extender>),
    /// Keep a share's job; the plugins start this
    #[command(hide = true)]
    Hold,
}

/// Where the API server is. In a pod, its account says so.
#[derive(Debug, Args)]
pub struct Server {
    /// The API server, such as https://10.0.0.1:6443 [default: that of this pod's account]
    #[arg(long, value_name = "URL")]
    pub api_server: Option<String>,
    /// File with the token that the API server accepts
    #[arg(long, value_name = "FILE", requires = "api_server")]
    pub api_token_file: Option<PathBuf>,
    /// File with the certificates to verify the API server by
    #[arg(long, value_name = "FILE", requires = "api_server")]
    pub api_ca: Option<PathBuf>,
}

/// What containers are given.
#[derive(Debug, Args)]
pub struct Containers {
    /// Where host and containers have the preload library; put there from this installation
    /// [default: where it is]
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// CDI kind of the GPUs themselves, such as nvidia.com/gpu: a container is given that device,
    /// by UUID, as well
    #[arg(long, value_name = "KIND")]
    pub gpu_kind: Option<String>,
    /// Device node for every container, such as /dev/nvidiactl; may be repeated
    #[arg(long = "device-node", value_name = "FILE")]
    pub device_nodes: Vec<PathBuf>,
    /// Use the simulated GPU, also where there is a real one
    #[arg(long)]
    pub sim: bool,
    /// Use this driver library instead of searching for libcuda.so.1
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    pub driver: Option<PathBuf>,
}

/// Where containers are given it.
#[derive(Debug, Args)]
pub struct Cdi {
    /// Directory of CDI specifications that the container runtime reads
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
}

/// Registers with the kubelet, and again where that starts anew. Pods keep what they have while
/// this does not run.
#[derive(Debug, Args)]
pub struct DevicePlugin {
    /// The kubelet's directory of device plugins
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    pub plugins_dir: PathBuf,
    /// The kubelet's socket that says which pod has what
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources: PathBuf,
    /// Where this keeps what it has given
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/sublet/kubernetes/device-plugin"
    )]
    pub state: PathBuf,
    /// Name of this node, whose pods and devices these are [env: NODE_NAME]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Answer with variables and mounts in place of a CDI device (Kubernetes before 1.29)
    #[arg(long)]
    pub no_cdi: bool,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub cdi: Cdi,
    #[command(flatten)]
    pub containers: Containers,
}

/// Publishes this node's GPUs, and prepares the claims that the scheduler gives parts of them.
#[derive(Debug, Args)]
pub struct Dra {
    /// The kubelet's directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// Where this keeps what it has prepared
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/sublet/kubernetes/dra"
    )]
    pub state: PathBuf,
    /// Name of this node [env: NODE_NAME]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub cdi: Cdi,
    #[command(flatten)]
    pub containers: Containers,
}

/// Registers with the container runtime, and again where that starts anew. A container whose
/// annotations are wrong, or that the arbiter refuses, does not start. Containers keep what they
/// have while this does not run; those that start then have no limits.
#[derive(Debug, Args)]
pub struct Nri {
    /// The runtime's NRI socket
    #[arg(long, value_name = "FILE", default_value = "/var/run/nri/nri.sock")]
    pub socket: PathBuf,
    /// When this is asked, among a runtime's plugins: two digits, the lowest first
    #[arg(long, value_name = "NN", default_value = "10", value_parser = index)]
    pub index: String,
    /// Where this keeps what it has given
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/sublet/kubernetes/nri"
    )]
    pub state: PathBuf,
    #[command(flatten)]
    pub containers: Containers,
}

fn index(text: &str) -> Result<String, String> {
    match text.as_bytes() {
        [a, b] if a.is_ascii_digit() && b.is_ascii_digit() => Ok(text.to_owned()),
        _ => Err("write two digits, such as 10".into()),
    }
}

/// With --cluster it asks that hook which of the GPUs that fit a pod should have. Everybody who
/// reaches this learns which node has how much free, and can bind pods that ask for units: admit
/// only the scheduler, by its address or by its certificate (--tls-client-ca).
#[derive(Debug, Args)]
pub struct Extender {
    /// Where to listen; port 0 takes a free one, which is then printed
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7071")]
    pub listen: SocketAddr,
    #[command(flatten)]
    pub tls: TlsFlags,
    /// How long a question of the scheduler may take: less than its httpTimeout. Half of it is the
    /// hook's
    #[arg(long, value_name = "TIME", default_value = "4500ms", value_parser = control::parse_span)]
    pub timeout: Duration,
    /// How long the hook may take for an answer; a pod goes by fit alone after that
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = control::parse_span)]
    pub hook_timeout: Duration,
    /// How long a connection to the hook may take before, until the hook has proved that it knows
    /// the token
    #[arg(long, value_name = "TIME", default_value = "250ms", value_parser = control::parse_span)]
    pub hook_connect_timeout: Duration,
    #[command(flatten)]
    pub hook: Hook,
    #[command(flatten)]
    pub server: Server,
}
