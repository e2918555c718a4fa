//! `sublet cluster`: the hook, and what is asked of it.

pub mod args;
mod certificates;
pub mod node;
mod slurm;

use std::env;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use ::certificates::{ClientFiles, Versions};
use anyhow::{Context, anyhow, bail};
use cluster::live::auth::Token;
use cluster::live::clock::Reading;
use cluster::live::hook::{Config, Hook, MOST_SIGNAL_S, TrialConfig};
use cluster::live::http::client::Client;
use cluster::live::http::server;
use cluster::live::placement::{DecideRequest, Decided};
use cluster::live::service::{self, Service};
use cluster::live::wire::{DecisionView, HookStatus, JobView, NodeView, Submission};
use policy::cluster::Choice;
use policy::cluster::catalogue::is_round_allocator;
use serde_json::{Value, json};

use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};
use args::{Cancel, ClusterCommand, Decide, Forget, Log, Retry, Serve, Show, Submit};

/// TIMEOUT: the hook syncs a disk before it answers.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is printed.
///
/// # Errors
/// A flag or file that is wrong, no hook, or its refusal.
pub fn cluster(args: &args::Cluster) -> Result<String> {
    let printed = match &args.command {
        ClusterCommand::Serve(args) => serve(args),
        ClusterCommand::Submit(args) => submit(args),
        ClusterCommand::Jobs(args) => jobs(args),
        ClusterCommand::Cancel(args) => cancel(args),
        ClusterCommand::Status(args) => status(args),
        ClusterCommand::Log(args) => log(args),
        ClusterCommand::Decide(args) => decide(args),
        ClusterCommand::Slurm(args) => slurm::pack(args),
        ClusterCommand::Forget(args) => forget(args),
        ClusterCommand::Retry(args) => retry(args),
        ClusterCommand::Certificates(args) => certificates::make(args),
        ClusterCommand::NodeToken(args) => certificates::node_token(args),
        ClusterCommand::RunJob { dir } => node::run_job(dir),
    };
    Ok(printed?)
}

fn serve(args: &Serve) -> anyhow::Result<String> {
    let seconds = |span: Duration, what: &str| match span.as_secs_f64() {
        s if s > 0.0 => Ok(s),
        _ => Err(anyhow!("--{what} is 0: a time above 0 is expected")),
    };
    let config = Config {
        choice: choice(args),
        seed: args.seed,
        round_s: seconds(args.round, "round")?,
        trial: TrialConfig {
            window_s: seconds(args.trial_window, "trial-window")?,
            iterations: f64::from(args.trial_iterations),
            solo_s: seconds(args.trial_solo, "trial-solo")?,
        },
        silent_s: seconds(args.node_timeout, "node-timeout")?,
        report_ms: 1000,
        grace_s: args.grace.as_secs_f64(),
        signal_s: args.save_patience.as_secs_f64(),
        version: env!("CARGO_PKG_VERSION").into(),
    };
    if config.signal_s > MOST_SIGNAL_S {
        bail!(
            "--save-patience is {} s: at most {MOST_SIGNAL_S} s are waited for a job that is to save",
            config.signal_s
        );
    }
    if args.token_file.is_none() && !args.listen.ip().is_loopback() {
        bail!(
            "listening at {} lets other hosts submit jobs: give --token-file with a token that both sides share",
            args.listen
        );
    }
    if args.tls.tls_cert.is_none() && !args.plain_text && !args.listen.ip().is_loopback() {
        bail!(
            "listening at {} without TLS lets others read jobs, their variables and orders on the way: give --tls-cert and --tls-key (`sublet cluster certificates` makes them), or --plain-text where the network is your own",
            args.listen
        );
    }
    let say = |line: &str| {
        // Nobody may be listening any more.
        let _ = writeln!(io::stderr(), "sublet cluster: {line}");
    };
    let tls = args.tls.server(Versions::Latest, say)?;
    let hook = Hook::open(&args.state, config, Reading::now())?;
    let id = hook.id().clone();
    // A token on loopback too: every user of this host reaches it, and jobs run as the arbiters'
    // user.
    let token = match &args.token_file {
        Some(file) => service::read_token(file)?,
        None => service::token_or_new(&args.state.join("token"))?,
    };
    if Token::new(&token).node().is_some() {
        bail!("the token is that of a node: a hook takes its own, which `node-token` was given");
    }
    let (listener, address) =
        server::listen(args.listen).map_err(|error| service::ServeError::Listen {
            address: args.listen,
            error,
        })?;
    // One line when it can be asked, for people and for scripts that start it.
    let scheme = if tls.is_some() { "https" } else { "http" };
    say(&format!(
        "{scheme}://{address}, cluster {}, epoch {}",
        id.cluster, id.epoch
    ));
    let mut service = Service::new(hook, &token, Box::new(say));
    if let Some(tls) = tls {
        let operators = match args.operator.as_slice() {
            _ if args.tls.tls_client_ca.is_none() => Vec::new(),
            [] => vec![certificates::OPERATOR.to_owned()],
            names => names.to_vec(),
        };
        service = service.over(tls, operators);
    }
    std::sync::Arc::new(service).serve(listener)?;
    Ok(String::new())
}

/// What was asked for, and the defaults beside it: a sizer takes the place of order and packer, a
/// round allocator that of a packer.
fn choice(args: &Serve) -> Choice {
    let by_default = |name: &str| Some(name.to_owned());
    let walks = args.sizer.is_none();
    let binds = args
        .admission
        .as_deref()
        .is_some_and(|name| name.starts_with("cells"));
    let order = args.order.clone();
    let rounds = order.as_deref().is_some_and(is_round_allocator);
    let packer = args.packer.clone();
    Choice {
        order: order.or_else(|| by_default("fifo-backfill").filter(|_| walks)),
        packer: packer
            .or_else(|| by_default("trial").filter(|_| walks && !binds && !rounds))
            .filter(|packer| packer != "none"),
        placer: args.placer.clone(),
        admission: args.admission.clone(),
        sizer: args.sizer.clone(),
    }
}

pub fn client(hook: &args::Hook) -> anyhow::Result<Client> {
    client_within(hook, PATIENCE)
}

/// A variable that is set to something.
fn var(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Which hook is named, on the command line or in a variable.
pub fn url(hook: &args::Hook) -> Option<String> {
    hook.cluster.clone().or_else(|| var("SUBLET_CLUSTER"))
}

/// A client whose requests take no longer than `patience` each.
pub fn client_within(hook: &args::Hook, patience: Duration) -> anyhow::Result<Client> {
    let Some(url) = url(hook) else {
        bail!("which hook? give --cluster https://HOST:PORT, or set SUBLET_CLUSTER");
    };
    let file = hook
        .token_file
        .clone()
        .or_else(|| var("SUBLET_CLUSTER_TOKEN_FILE").map(PathBuf::from));
    let Some(file) = file else {
        bail!(
            "the hook answers those who know its token: give --token-file FILE, or set SUBLET_CLUSTER_TOKEN_FILE"
        );
    };
    let token = service::read_token(&file)?;
    let files = hook.tls.files()?;
    // Files are read for each command: nothing changes under it.
    Ok(Client::open(
        &url,
        &token,
        files.as_ref(),
        patience,
        |_| (),
    )?)
}

impl args::Tls {
    /// The files that are named, on the command line or in variables.
    ///
    /// # Errors
    /// One without another.
    pub fn files(&self) -> anyhow::Result<Option<ClientFiles>> {
        let or = |flag: &Option<PathBuf>, name| flag.clone().or_else(|| var(name).map(Into::into));
        client_files(
            or(&self.ca_file, "SUBLET_CLUSTER_CA_FILE"),
            or(&self.cert_file, "SUBLET_CLUSTER_CERT_FILE"),
            or(&self.key_file, "SUBLET_CLUSTER_KEY_FILE"),
        )
    }
}

/// The files of a client: an authority, and perhaps a certificate with its key.
pub fn client_files(
    authority: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
) -> anyhow::Result<Option<ClientFiles>> {
    let own = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (Some(certificate), None) => {
            bail!("{} has no key: name its file, too", certificate.display())
        }
        (None, Some(key)) => bail!("{} has no certificate: name its file, too", key.display()),
    };
    match (authority, own) {
        (Some(authority), own) => Ok(Some(ClientFiles { authority, own })),
        (None, None) => Ok(None),
        (None, Some((certificate, _))) => bail!(
            "{} is shown to no hook that nobody vouches for: name the file with the certificate of its authority, too",
            certificate.display()
        ),
    }
}

fn submit(args: &Submit) -> anyhow::Result<String> {
    let asked = Submission {
        name: args.name.clone().unwrap_or_default(),
        kind: args.kind.clone().unwrap_or_default(),
        user: args.user.clone().unwrap_or_default(),
        command: args.command.clone(),
        env: args.env.iter().cloned().collect(),
        dir: args
            .dir
            .as_ref()
            .map_or_else(String::new, |dir| dir.display().to_string()),
        gpus: args.gpus,
        max_gpus: args.max_gpus,
        share: args.share,
        mem_bytes: args.mem,
        class: args.class,
        work_s: args.work.map(|work| work.as_secs_f64()),
        deadline_s: args.deadline.map(|deadline| deadline.as_secs_f64()),
        weight: args.weight,
        restartable: args.restartable,
        evictable: args.evictable,
        once: args.once.clone().unwrap_or_default(),
    };
    let job: JobView = client(&args.hook)?
        .ask("POST", "/v1/jobs", Some(&asked))
        .context("the job was not taken")?;
    if let Some(share) = args.share.filter(|_| job.share_asked.is_none()) {
        bail!(
            "the hook is of an earlier version and knows no parts of GPUs: job {id} was to have {share} of one and gets whole ones; take it back with `sublet cluster cancel {id}`, or start the hook's new version",
            id = job.id
        );
    }
    Ok(if args.json {
        object(serde_json::to_value(job)?)
    } else {
        format!("{}\n", job.id)
    })
}

/// The jobs that it shares its devices with.
fn beside(job: &JobView) -> String {
    let all = match job.beside_all.as_slice() {
        [] => job.beside.as_slice(),
        all => all,
    };
    let all: Vec<String> = all.iter().map(u64::to_string).collect();
    all.join(",")
}

fn get<T: serde::de::DeserializeOwned>(hook: &args::Hook, path: &str) -> anyhow::Result<T> {
    Ok(client(hook)?.ask("GET", path, None::<&()>)?)
}

fn jobs(args: &Show) -> anyhow::Result<String> {
    let jobs: Vec<JobView> = get(&args.hook, "/v1/jobs")?;
    if args.json {
        return Ok(object(json!({ "jobs": jobs })));
    }
    let mut table = Table::new(&[
        ("ID", Align::Right),
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("GPUS", Align::Right),
        ("NODE", Align::Left),
        ("SHARE", Align::Right),
        ("BESIDE", Align::Right),
        ("RATE", Align::Right),
        ("ATTEMPTS", Align::Right),
        ("WHY", Align::Left),
    ]);
    for job in &jobs {
        let or_none = |text: String| {
            if text.is_empty() {
                "-".to_owned()
            } else {
                text
            }
        };
        table.row(vec![
            job.id.to_string(),
            job.name.clone(),
            job.phase.as_str().to_owned(),
            job.gpus.to_string(),
            or_none(job.node.clone()),
            if job.node.is_empty() {
                "-".into()
            } else {
                format!("{:.2}", job.share)
            },
            or_none(beside(job)),
            job.rate.map_or("-".into(), |rate| format!("{rate:.2}")),
            job.attempts.to_string(),
            or_none(job.reason.clone()),
        ]);
    }
    Ok(table.render())
}

fn cancel(args: &Cancel) -> anyhow::Result<String> {
    let mut client = client(&args.hook)?;
    let mut text = String::new();
    for id in &args.ids {
        let job: JobView = client.ask("DELETE", &format!("/v1/jobs/{id}"), None::<&()>)?;
        text += &format!("{id}: {}\n", job.phase.as_str());
    }
    Ok(text)
}

fn status(args: &Show) -> anyhow::Result<String> {
    let status: HookStatus = get(&args.hook, "/v1/status")?;
    if args.json {
        return Ok(object(serde_json::to_value(status)?));
    }
    let counts: Vec<String> = status
        .jobs
        .iter()
        .map(|(phase, count)| format!("{count} {phase}"))
        .collect();
    let mut text = format!(
        "cluster {}, epoch {}: {}\njobs: {}; {} pairs made, {} split\n",
        status.hook.cluster,
        status.hook.epoch,
        status.policies,
        if counts.is_empty() {
            "none".into()
        } else {
            counts.join(", ")
        },
        status.packs,
        status.unpacks
    );
    for node in &status.nodes {
        let devices: Vec<&str> = node
            .devices
            .iter()
            .map(|device| device.name.as_str())
            .collect();
        let state = match (node.up, node.silent_s) {
            _ if !node.refusal.is_empty() => {
                format!("does nothing that this hook says ({})", node.refusal)
            }
            (true, _) if !node.shut.is_empty() => format!("up, {}", no_new_jobs(node)),
            (true, _) => "up".to_owned(),
            (false, Some(s)) => format!("silent for {s:.0} s"),
            (false, None) => "not heard since the hook started".to_owned(),
        };
        let jobs: Vec<String> = node.jobs.iter().map(ToString::to_string).collect();
        let jobs = if jobs.is_empty() {
            "no job".into()
        } else {
            format!("jobs {}", jobs.join(" "))
        };
        text += &format!(
            "{}: {state}, {} x {}, {jobs}\n",
            node.name,
            devices.len(),
            devices.first().unwrap_or(&"-")
        );
    }
    for pair in &status.pairs {
        let word = match (pair.estimated, pair.refused) {
            (true, _) => format!("not measured, confidence {:.2}", pair.confidence),
            (_, true) => "refused".into(),
            (_, false) => "good".into(),
        };
        text += &format!(
            "pair on {}: `{}` {:.2} and `{}` {:.2}: {word}{}\n",
            pair.gpu,
            pair.kinds[0],
            pair.rates[0],
            pair.kinds[1],
            pair.rates[1],
            match &pair.outliers[..] {
                [] => String::new(),
                far => format!(" (far off: {})", far.join(" ")),
            }
        );
    }
    for speed in &status.speeds {
        let unit = if speed.iterations {
            "iterations"
        } else {
            "launches"
        };
        let source = if speed.measured {
            format!("measured on {}", counted(speed.nodes, "node"))
        } else {
            format!("not measured, confidence {:.2}", speed.confidence)
        };
        text += &format!(
            "speed of `{}` on {} x {}: {:.2} {unit}/s, {:.2} of the fastest type: {source}\n",
            speed.kind, speed.gpus, speed.gpu, speed.per_s, speed.relative
        );
    }
    if status.past_jobs > 0 {
        text += &format!("{} past jobs remembered\n", status.past_jobs);
    }
    Ok(text)
}

fn counted(count: u64, of: &str) -> String {
    format!("{count} {of}{}", if count == 1 { "" } else { "s" })
}

fn log(args: &Log) -> anyhow::Result<String> {
    let lines: Vec<DecisionView> = get(&args.hook, &format!("/v1/decisions?above={}", args.above))?;
    if args.json {
        return Ok(object(json!({ "decisions": lines })));
    }
    let line = |line: &DecisionView| {
        let beside = line
            .beside
            .map_or_else(String::new, |other| format!(" beside {other}"));
        let job = if line.job == 0 {
            String::new()
        } else {
            format!(" job {}{beside}", line.job)
        };
        format!(
            "{} {}.{:03} {}{job}: {}\n",
            line.seq,
            line.unix_ms / 1000,
            line.unix_ms % 1000,
            line.kind,
            line.text
        )
    };
    Ok(lines.iter().map(line).collect())
}

fn decide(args: &Decide) -> anyhow::Result<String> {
    let text = if args.file.as_os_str() == "-" {
        io::read_to_string(io::stdin())
    } else {
        std::fs::read_to_string(&args.file)
    };
    let text = text.with_context(|| format!("{} cannot be read", args.file.display()))?;
    let asked: DecideRequest = serde_json::from_str(&text)
        .with_context(|| format!("{} is no question", args.file.display()))?;
    let decided: Decided = client(&args.hook)?.ask("POST", "/v1/decide", Some(&asked))?;
    Ok(object(serde_json::to_value(decided)?))
}

/// Why a node gets none, and until when.
fn no_new_jobs(node: &NodeView) -> String {
    let until = match (node.trial, node.tried_in_s) {
        (Some(job), _) => format!("job {job} tries it"),
        (None, Some(s)) => format!("tried again in {s:.0} s"),
        (None, None) => "the next job tries it".to_owned(),
    };
    format!(
        "no new jobs as {} did not start there ({}); {until}",
        counted(node.failed_starts, "job"),
        node.shut
    )
}

fn retry(args: &Retry) -> anyhow::Result<String> {
    let path = format!("/v1/nodes/{}/pause", args.node);
    let node: NodeView = client(&args.hook)?.ask("DELETE", &path, None::<&()>)?;
    Ok(match node.shut.is_empty() {
        true => format!("{} gets jobs\n", args.node),
        false => format!("{}: {}\n", args.node, no_new_jobs(&node)),
    })
}

fn forget(args: &Forget) -> anyhow::Result<String> {
    let _: Value =
        client(&args.hook)?.ask("DELETE", &format!("/v1/nodes/{}", args.node), None::<&()>)?;
    Ok(format!("{} is given up\n", args.node))
}
