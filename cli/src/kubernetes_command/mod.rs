//! `sublet kubernetes`: the processes beside a kubelet, a container runtime and Kubernetes'
//! scheduler.

pub mod args;
mod hook;

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use certificates::Versions;
use control::paths::{RuntimeDir, Surroundings};
use kubernetes::advice::Adviser;
use kubernetes::api::{Api, is_name};
use kubernetes::cdi::Folder;
use kubernetes::device_plugin::{Delivery, Plugin};
use kubernetes::dra::Driver;
use kubernetes::node::{Node, Simulated};
use kubernetes::nri::session::Name;
use kubernetes::pods::{Cluster, Kubelet};
use kubernetes::records::Records;
use kubernetes::shares::Shares;
use kubernetes::{extender, files, holder, http_server, nri, serve};

use crate::exit::Result;
use crate::run::driver::{self, Wish};
use crate::run::install::Install;
use args::{Containers, DevicePlugin, Dra, Extender, KubernetesCommand, Nri, Server};

const UNNAMED: &str = "the name of this node is not known: give --node, or set NODE_NAME";

/// What is printed in the end; these end with their process.
///
/// # Errors
/// A flag or file that is wrong, or a place that cannot be used.
pub fn kubernetes(args: &args::Kubernetes) -> Result<String> {
    match &args.command {
        KubernetesCommand::DevicePlugin(args) => device_plugin(args)?,
        KubernetesCommand::Dra(args) => dra(args)?,
        KubernetesCommand::Nri(args) => nri(args)?,
        KubernetesCommand::Extender(args) => extend(args)?,
        KubernetesCommand::Hold => {
            holder::run().context("no plugin has asked this process to keep a job")?
        }
    }
    Ok(String::new())
}

fn device_plugin(args: &DevicePlugin) -> anyhow::Result<()> {
    let cluster = match (api(&args.server)?, named(args.node.as_deref())?) {
        (Some(api), Some(node)) => Some(Cluster { api, node }),
        (Some(_), None) => bail!("{UNNAMED}"),
        (None, _) => None,
    };
    let shares = shares(&args.containers, &args.cdi.cdi_dir, &args.state, "plugin")?;
    let delivery = if args.no_cdi {
        Delivery::Plain
    } else {
        Delivery::Cdi
    };
    let kubelet = Kubelet {
        socket: args.pod_resources.clone(),
    };
    let plugin = Plugin::new(shares, delivery, kubelet, cluster);
    serve::device_plugin(&args.plugins_dir, plugin)?;
    Ok(())
}

fn dra(args: &Dra) -> anyhow::Result<()> {
    let Some(api) = api(&args.server)? else {
        bail!(
            "there is no API server to read claims from: run this in a pod with an account, or give --api-server"
        );
    };
    let Some(node) = named(args.node.as_deref())? else {
        bail!("{UNNAMED}");
    };
    let driver = Driver {
        shares: shares(&args.containers, &args.cdi.cdi_dir, &args.state, "dra")?,
        api,
    };
    serve::dra(&args.kubelet_dir, &node, driver)?;
    Ok(())
}

fn nri(args: &Nri) -> anyhow::Result<()> {
    // Nobody reads these files there: the answer to the runtime has all that a container gets.
    let cdi_dir = args.state.join("containers");
    let shares = shares(&args.containers, &cdi_dir, &args.state, "nri")?;
    let name = Name {
        name: "sublet".into(),
        index: args.index.clone(),
    };
    serve::nri(&args.socket, &name, nri::Plugin::new(shares))?;
    Ok(())
}

fn extend(args: &Extender) -> anyhow::Result<()> {
    let Some(api) = api(&args.server)? else {
        bail!(
            "there is no API server to ask for nodes and pods: run this in a pod with an account, or give --api-server"
        );
    };
    for (time, flag) in [
        (args.timeout, "--timeout"),
        (args.hook_timeout, "--hook-timeout"),
        (args.hook_connect_timeout, "--hook-connect-timeout"),
    ] {
        if time.is_zero() {
            bail!("{flag} is 0: a time above 0 is expected");
        }
    }
    let limits = hook::Limits {
        connecting: args.hook_connect_timeout,
        answer: args.hook_timeout,
    };
    let hook = hook::Remote::find(&args.hook, limits)?;
    let asked = limits.connecting + limits.answer;
    if hook.is_some() && asked > args.timeout / 2 {
        bail!(
            "--hook-connect-timeout and --hook-timeout come to {} ms, and the hook has half of --timeout ({} ms): give a longer --timeout, and the scheduler a longer httpTimeout",
            asked.as_millis(),
            args.timeout.as_millis()
        );
    }
    let adviser = hook.map(|hook| Adviser::new(Arc::new(hook), asked));
    let say = |line: &str| {
        let _ = writeln!(io::stderr(), "sublet: {line}");
    };
    // kube-schedulers speak 1.2 as well.
    let tls = args.tls.server(Versions::From12, say)?;
    let address = args.listen;
    let listening = std::net::TcpListener::bind(address)
        .and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (address, listener) = listening.map_err(|error| {
        anyhow!("cannot listen at {address}: {error} (choose another --listen)")
    })?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let extender = extender::Extender::new(api, adviser, args.timeout)
        .context("cannot start a thread for events")?;
    let extender = Arc::new(extender);
    extender
        .tend()
        .context("cannot start a thread for pods that wait")?;
    // One line when it can be asked, for people and for scripts that start it.
    say(&format!("the extender is at {scheme}://{address}"));
    let error = http_server::serve(
        listener,
        http_server::Security {
            tls,
            say: Box::new(say),
        },
        extender::LONGEST_BODY,
        move |method, path, body| extender.answer(method, path, body),
    );
    Err(anyhow!("cannot take connections at {address}: {error}"))
}

fn api(server: &Server) -> anyhow::Result<Option<Api>> {
    Ok(match &server.api_server {
        Some(url) => Some(Api::new(
            url,
            server.api_token_file.clone(),
            server.api_ca.as_deref(),
        )?),
        None => Api::of_this_pod(|name| env::var(name).ok())?,
    })
}

fn named(given: Option<&str>) -> anyhow::Result<Option<String>> {
    let name = given
        .map(ToOwned::to_owned)
        .or_else(|| env::var("NODE_NAME").ok());
    match name.filter(|name| !name.is_empty()) {
        Some(name) if !is_name(&name) => {
            bail!("invalid node name `{name}`: write lower-case letters, digits, `-` and `.`")
        }
        name => Ok(name),
    }
}

fn shares(
    args: &Containers,
    cdi_dir: &Path,
    state: &Path,
    writer: &str,
) -> anyhow::Result<Arc<Shares>> {
    let executable = env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| env::var_os(name))?;
    let wish = match &args.driver {
        Some(path) => Wish::This(path),
        None if args.sim => Wish::Simulated,
        None => Wish::Any,
    };
    let driver = driver::find(wish, &install, env::var_os("LD_LIBRARY_PATH").as_deref())?;
    let simulated = driver.simulated.map(|_| Simulated {
        libraries: install.sim_dir().to_owned(),
        state: env::var_os("SUBLET_SIM_STATE").map(Into::into),
        variables: env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| name.starts_with("SUBLET_SIM_"))
            .collect(),
    });
    if let Some(library) = &args.library {
        place(install.library(), library)
            .with_context(|| format!("{} (give another --library)", library.display()))?;
    }
    let library = args
        .library
        .clone()
        .unwrap_or_else(|| install.library().to_owned());
    let cdi = || {
        format!(
            "the CDI directory {} (give another --cdi-dir)",
            cdi_dir.display()
        )
    };
    let folder = Folder::open(cdi_dir, writer).with_context(cdi)?;
    let node = Node {
        // The host's arbiter, also where it starts after this.
        dir: RuntimeDir::find_for_daemon(&Surroundings::of_this_process())?,
        program: holder::own_program().context("cannot tell which program this is")?,
        driver: driver.path,
        simulated,
        device_nodes: args.device_nodes.clone(),
        gpu_kind: args.gpu_kind.clone(),
        preload: folder.preload(&library).with_context(cdi)?,
        library,
    };
    node.check()?;
    let shares = Shares::open(node, Records::open(state)?, folder)?;
    Ok(Arc::new(shares))
}

/// Puts the preload library where containers are given it, whole or not at all, where another one
/// or none is there. Jobs that have the one before keep it.
fn place(from: &Path, to: &Path) -> io::Result<()> {
    let library = fs::read(from)?;
    if fs::read(to).is_ok_and(|there| there == library) {
        return Ok(());
    }
    fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
    files::replace(to, &library, 0o755)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_placed_whole_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("a/b/to"));
        fs::write(&from, "one").unwrap();
        place(&from, &to).unwrap();
        let first = fs::metadata(&to).unwrap();
        place(&from, &to).unwrap();
        let second = fs::metadata(&to).unwrap();
        assert_eq!(first.modified().unwrap(), second.modified().unwrap());
        fs::write(&from, "two").unwrap();
        place(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"two");
        assert!(place(&dir.path().join("none"), &to).is_err());
    }
}
