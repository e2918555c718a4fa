//! The command line of `sublet frontend`.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand};
use cluster::frontend::Address;

#[derive(Debug, Args)]
pub struct Frontend {
    #[command(subcommand)]
    pub command: FrontendCommand,
}

#[derive(Debug, Subcommand)]
pub enum FrontendCommand {
    /// Stand between clients and the instances of a service, over HTTP/1.1
    Run(Box<FrontendRun>),
    /// Show a frontend: load, instances, and whether the agreement is kept
    Status(FrontendStatus),
}

/// Predicts the load, uses as many instances as keep the agreement, and sends nothing to the
/// others. Several frontends of a service, each with the same instances, agree without asking each
/// other. An instance is a job: started with
/// `sublet run --name NAME --evictable --evict-after TIME` it leaves the GPU when nobody uses it,
/// and a frontend has it back before it is needed.
#[derive(Debug, Args)]
pub struct FrontendRun {
    /// Where clients connect: HOST:PORT, or unix:/PATH
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Address,
    /// An instance: the name of its job, and where it listens (HOST:PORT or unix:/PATH); repeat it
    #[arg(long = "instance", value_name = "NAME=ADDRESS", required = true, value_parser = parse_instance)]
    pub instances: Vec<(String, Address)>,
    /// What was agreed: so many percent of the requests are answered within so long
    #[arg(long, value_name = "pPERCENT=TIME")]
    pub sla: Agreement,
    /// Requests may come so many times as fast as predicted
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_burst)]
    pub burst: f64,
    /// Frontends of the service; each gets an equal part of the requests
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub frontends: u32,
    /// Requests that an instance is given at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub concurrency: u32,
    /// Instances in use at the least, whatever comes
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=256))]
    pub least: u32,
    /// Instances in use at the most [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub most: Option<u32>,
    /// How long it looks back
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_history)]
    pub history: Duration,
    /// Refuse requests that have waited longer than a response may take
    #[arg(long)]
    pub prune: bool,
    /// Give any request to another instance where the first one broke off before it answered; else
    /// only GET, HEAD, PUT, DELETE, OPTIONS and TRACE, and what was not sent yet
    #[arg(long)]
    pub retry: bool,
    /// Longest time from a request to the end of its answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time)]
    pub timeout: Duration,
    /// After SIGTERM: how long what is under way may take
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    pub drain: Duration,
    /// Connections of clients at a time
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub connections: u32,
    /// Longest body of a request
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = parse_body)]
    pub max_body: u64,
    /// Where its status and its figures for Prometheus are read
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    pub admin: SocketAddr,
}

#[derive(Debug, Args)]
pub struct FrontendStatus {
    /// Its --admin address, as it said when it began
    #[arg(value_name = "ADDR:PORT")]
    pub admin: SocketAddr,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `p99=200ms`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Agreement {
    /// The part of the requests, above 0 and below 1.
    pub level: f64,
    pub within: Duration,
}

impl FromStr for Agreement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no agreement: write a percentile above p0 and below p100, and a time up to 1h, such as p99=200ms"
            )
        };
        let (percent, time) = text.split_once('=').ok_or_else(wrong)?;
        let digits = percent.strip_prefix('p').ok_or_else(wrong)?;
        let is_plain = |c: char| c.is_ascii_digit() || c == '.';
        if !digits.chars().all(is_plain) {
            return Err(wrong());
        }
        let percent: f64 = digits.parse().map_err(|_| wrong())?;
        let level = percent / 100.0;
        let within = control::parse_span(time).map_err(|_| wrong())?;
        let is_time = (Duration::from_micros(10)..=Duration::from_secs(3600)).contains(&within);
        match level > 0.0 && level < 1.0 && is_time {
            true => Ok(Self { level, within }),
            false => Err(wrong()),
        }
    }
}

fn parse_instance(text: &str) -> Result<(String, Address), String> {
    let (name, address) = text.split_once('=').ok_or_else(|| {
        format!("`{text}` is no instance: write the name of its job and where it listens, such as a=127.0.0.1:8001")
    })?;
    control::check_name(name).map_err(|error| error.to_string())?;
    let address: Address = address.parse()?;
    match &address {
        Address::Tcp(text) if text.ends_with(":0") => Err(format!(
            "`{text}` has no port: write the one at which `{name}` listens"
        )),
        _ => Ok((name.to_owned(), address)),
    }
}

fn parse_burst(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(burst) if (1.0..=100.0).contains(&burst) => Ok(burst),
        _ => Err(format!(
            "`{text}` is no burst: write a number from 1 to 100"
        )),
    }
}

fn between(text: &str, least: Duration, most: Duration) -> Result<Duration, String> {
    let time = control::parse_span(text).map_err(|error| error.to_string())?;
    match (least..=most).contains(&time) {
        true => Ok(time),
        false => Err(format!(
            "`{text}` is outside {} to {}",
            control::short_span(least),
            control::short_span(most)
        )),
    }
}

fn parse_history(text: &str) -> Result<Duration, String> {
    between(text, Duration::from_secs(2), Duration::from_secs(3600))
}

fn parse_time(text: &str) -> Result<Duration, String> {
    between(text, Duration::from_millis(10), Duration::from_secs(86_400))
}

fn parse_body(text: &str) -> Result<u64, String> {
    match control::parse_bytes(text) {
        Ok(bytes) if (1..=1 << 30).contains(&bytes) => Ok(bytes),
        Ok(bytes) => Err(format!("{bytes} bytes: write a size up to 1GiB")),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agreement_is_a_percentile_and_a_time() {
        let agreed: Agreement = "p99.9=200ms".parse().unwrap();
        assert!((agreed.level - 0.999).abs() < 1e-12);
        assert_eq!(agreed.within, Duration::from_millis(200));
        for wrong in [
            "",
            "p99",
            "99=1s",
            "p=1s",
            "p0=1s",
            "p100=1s",
            "p-1=1s",
            "pNaN=1s",
            "pinf=1s",
            "p1e1=1s",
            "p99=",
            "p99=0s",
            "p99=-1s",
            "p99=2h",
            "p99=200",
            "p99=1s=2s",
        ] {
            let error = wrong.parse::<Agreement>().unwrap_err();
            assert!(error.contains("p99=200ms"), "{wrong}: {error}");
        }
    }

    #[test]
    fn an_instance_is_a_job_and_an_address() {
        let (name, address) = parse_instance("a=unix:/run/x=y").unwrap();
        assert_eq!(
            (name.as_str(), address.to_string().as_str()),
            ("a", "unix:/run/x=y")
        );
        for (wrong, word) in [
            ("127.0.0.1:80", "a=127.0.0.1:8001"),
            ("a b=h:1", "`a b`"),
            ("=h:1", "letters"),
            ("a=h", "HOST:PORT"),
            ("a=h:0", "no port"),
            ("a=h:00", "no port"),
        ] {
            let error = parse_instance(wrong).unwrap_err();
            assert!(error.contains(word), "{wrong}: {error}");
        }
    }

    #[test]
    fn numbers_are_within_bounds() {
        for wrong in ["0.9", "101", "NaN", "inf", "x", "-1"] {
            assert!(parse_burst(wrong).is_err(), "{wrong}");
        }
        for wrong in ["1s", "2h", "60", "x"] {
            assert!(parse_history(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0s", "1ms", "2d"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0B", "2GiB", "8"] {
            assert!(parse_body(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_body("1KiB"), Ok(1024));
    }
}
