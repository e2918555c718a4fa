//! `sublet cdi generate`: a specification of the Container Device Interface, by which Docker,
//! Podman, containerd and CRI-O give a container a part of a GPU.
//!
//! The version written is the oldest that has all that is used here (`hostPath` of a device node
//! came with 0.5.0): loaders of 1.x read it, and so do those of Debian's releases. A loader refuses
//! a file with a field that it does not know, so nothing else is in it.

use std::env;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use control::paths::{RuntimeDir, Surroundings};
use control::{JobSettings, Settings};
use serde_json::{Value, json};

use crate::args::CdiGenerate;
use crate::exit::Result;
use crate::run::install::Install;

const VERSION: &str = "0.5.0";
const KIND: &str = "sublet.dev/gpu";
/// Where a container has what is ours.
const LIBRARIES: &str = "/opt/sublet";
const RUNTIME: &str = "/run/sublet/containers";
const SIMULATED_STATE: &str = "/run/sublet/simulated";
/// What a job of the simulated driver opens.
const SIMULATED: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// What stands for a device where nobody names one.
const DEFAULTS: [&str; 4] = [
    "all",
    "half:mem=50%,share=0.5",
    "quarter:mem=25%,share=0.25",
    "eighth:mem=12.5%,share=0.125",
];

/// A device of the specification: a name, and what a container that asks for it gets.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    name: String,
    settings: JobSettings,
    /// The variables that say so.
    env: Vec<String>,
}

/// `half`, `half:mem=20GiB,share=0.5`
///
/// # Errors
/// One sentence: the text, and what to write instead.
pub fn parse_slice(text: &str) -> std::result::Result<Slice, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: char| c.is_ascii_alphanumeric();
    if !name.starts_with(edge) || !name.ends_with(edge) || !name.chars().all(fits) {
        return Err(format!(
            "`{name}` is no name of a device: write letters, digits, `-`, `_` and `.`, such as half"
        ));
    }
    let mut slice = Slice {
        name: name.to_owned(),
        settings: JobSettings::default(),
        env: Vec::new(),
    };
    for item in rest.split(',').filter(|item| !item.is_empty()) {
        let (key, value) = item
            .split_once('=')
            .ok_or_else(|| format!("`{item}` is no setting: write KEY=VALUE, such as mem=20GiB"))?;
        let known = || JobSettings::TABLE.iter().map(|setting| setting.about.key);
        let setting = JobSettings::TABLE
            .iter()
            .find(|setting| setting.about.key == key.trim())
            .ok_or_else(|| {
                let keys: Vec<&str> = known().collect();
                format!("`{key}` is no setting: write one of {}", keys.join(", "))
            })?;
        if (setting.is_set)(&slice.settings) {
            return Err(format!("`{key}` stands twice in `{text}`: write it once"));
        }
        slice.settings = (setting.parse)(value)?.or(&slice.settings);
        slice
            .env
            .push(format!("{}={}", setting.about.variable(), value.trim()));
    }
    let checked = slice.settings.check();
    checked.map_err(|(name, message)| format!("the {name} in `{text}` is {message}"))?;
    Ok(slice)
}

/// What is mounted, and from where.
struct Sources {
    library: PathBuf,
    runtime: PathBuf,
    /// Of the simulated driver: its libraries, and the state that its processes share.
    simulated: Option<(Vec<(&'static str, PathBuf)>, PathBuf)>,
    /// The file that names the library to every program.
    preload: Option<PathBuf>,
    nodes: Vec<String>,
}

/// Writes the specification, or returns it to be printed.
///
/// # Errors
/// A name twice, libraries or places that are not there, a file that cannot be written.
pub fn generate(args: &CdiGenerate) -> Result<String> {
    let executable = env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| env::var_os(name))?;
    let dir = match &args.runtime_dir {
        Some(path) => RuntimeDir::given(path.clone())?,
        None => RuntimeDir::find_for_daemon(&Surroundings::of_this_process())?,
    };
    let slices = match args.device.as_slice() {
        [] => DEFAULTS
            .iter()
            .map(|text| parse_slice(text).map_err(|message| anyhow!(message)))
            .collect::<anyhow::Result<Vec<Slice>>>()?,
        given => given.to_vec(),
    };
    for (at, slice) in slices.iter().enumerate() {
        if slices[..at].iter().any(|other| other.name == slice.name) {
            let name = &slice.name;
            return Err(anyhow!("two devices are called `{name}`: give each its own name").into());
        }
    }
    // What is only printed has no place beside it for the file.
    let preload = match &args.output {
        Some(output) if !args.ld_preload => Some(beside(output, ".ld.so.preload")?),
        _ => None,
    };
    let sources = Sources {
        library: real(install.library())?,
        runtime: dir.containers_dir(),
        simulated: match args.sim {
            true => Some(simulated(&install)?),
            false => None,
        },
        preload,
        nodes: match args.sim {
            true => Vec::new(),
            false => nodes(Path::new("/dev")),
        },
    };
    // A container is made with its mounts: they must be there before the arbiter starts.
    dir.ensure(nix::unistd::geteuid().as_raw())?;
    make(&sources.runtime)?;
    if let Some((_, state)) = &sources.simulated {
        make(state)?;
    }
    let text = format!("{:#}\n", specification(&slices, &sources)?);
    let Some(output) = &args.output else {
        return Ok(text);
    };
    if let Some(preload) = &sources.preload {
        replace(preload, &format!("{LIBRARIES}/libsublet.so\n"))?;
    }
    replace(output, &text)?;
    let names: Vec<&str> = slices.iter().map(|slice| slice.name.as_str()).collect();
    Ok(format!(
        "{}: {KIND}={{{}}}\n",
        output.display(),
        names.join(",")
    ))
}

fn specification(slices: &[Slice], sources: &Sources) -> anyhow::Result<Value> {
    let mut env = vec![format!("SUBLET_SOCKET={RUNTIME}/channel.sock")];
    let mut mounts = vec![
        mount(&sources.library, &format!("{LIBRARIES}/libsublet.so"), true)?,
        mount(&sources.runtime, RUNTIME, true)?,
    ];
    match &sources.preload {
        Some(file) => mounts.push(mount(file, "/etc/ld.so.preload", true)?),
        None => env.push(format!("LD_PRELOAD={LIBRARIES}/libsublet.so")),
    }
    if let Some((libraries, state)) = &sources.simulated {
        for (name, path) in libraries {
            mounts.push(mount(path, &format!("{LIBRARIES}/sim/{name}"), true)?);
        }
        mounts.push(mount(state, SIMULATED_STATE, false)?);
        env.extend([
            "SUBLET_SIM=1".to_owned(),
            format!("SUBLET_SIM_STATE={SIMULATED_STATE}"),
            format!("SUBLET_DRIVER={LIBRARIES}/sim/libcuda.so.1"),
            format!("LD_LIBRARY_PATH={LIBRARIES}/sim"),
            // Simulated pins take pages that are not there yet.
            "SUBLET_RESIDENCY=touch=0".to_owned(),
        ]);
    }
    let mut common = json!({ "env": env, "mounts": mounts });
    if !sources.nodes.is_empty() {
        let nodes = sources.nodes.iter().map(|path| json!({ "path": path }));
        common["deviceNodes"] = nodes.collect();
    }
    let devices = slices.iter().map(|slice| {
        let settings = &slice.settings;
        let mut env = vec![format!("SUBLET_CONTAINER={}", slice.name)];
        env.extend(slice.env.iter().cloned());
        if settings.on_refusal.is_none() {
            let word = settings.on_refusal(false).as_str();
            env.push(format!("SUBLET_ON_REFUSAL={word}"));
        }
        json!({ "name": slice.name, "containerEdits": { "env": env } })
    });
    Ok(json!({
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": devices.collect::<Value>(),
        "containerEdits": common,
    }))
}

fn mount(from: &Path, to: &str, read_only: bool) -> anyhow::Result<Value> {
    let from = from.to_str().with_context(|| {
        format!(
            "{} is not UTF-8, which these files are: install sublet elsewhere",
            from.display()
        )
    })?;
    let access = if read_only { "ro" } else { "rw" };
    Ok(json!({
        "hostPath": from,
        "containerPath": to,
        "options": [access, "nosuid", "nodev", "bind"],
    }))
}

/// The simulated driver's libraries and the place of its state.
fn simulated(install: &Install) -> anyhow::Result<(Vec<(&'static str, PathBuf)>, PathBuf)> {
    let libraries = SIMULATED
        .iter()
        .map(|name| Ok((*name, real(&install.sim_dir().join(name))?)));
    let state = env::var_os("SUBLET_SIM_STATE").filter(|dir| !dir.is_empty());
    let state = state.map_or_else(
        || format!("/dev/shm/sublet-simgpu-{}", nix::unistd::getuid()).into(),
        PathBuf::from,
    );
    let state = std::path::absolute(&state).context("cannot tell the present folder")?;
    Ok((libraries.collect::<anyhow::Result<_>>()?, state))
}

/// NVIDIA's device files of this host; of the GPUs those that have a number.
fn nodes(dev: &Path) -> Vec<String> {
    let mut nodes: Vec<String> = fs::read_dir(dev)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| {
            let rest = name.strip_prefix("nvidia");
            rest.is_some_and(|rest| {
                let is_number = !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
                is_number || ["ctl", "-uvm", "-uvm-tools"].contains(&rest)
            })
        })
        .map(|name| format!("/dev/{name}"))
        .collect();
    nodes.sort();
    nodes
}

/// What a link leads to: in a container it would lead elsewhere.
fn real(path: &Path) -> anyhow::Result<PathBuf> {
    fs::canonicalize(path).with_context(|| format!("cannot find {}", path.display()))
}

fn make(dir: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let open = dir.starts_with(control::paths::SYSTEM_DIR);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(if open { 0o755 } else { 0o700 })
        .create(dir)
        .with_context(|| format!("cannot make {}", dir.display()))
}

fn beside(file: &Path, ending: &str) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(file).context("cannot tell the present folder")?;
    let mut name = path.into_os_string();
    name.push(ending);
    Ok(name.into())
}

/// An engine may be reading: it finds the old file or the new one, and none that is half written.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    if path.is_dir() {
        bail!(
            "{} is a folder: name a file in it, such as {}",
            path.display(),
            path.join("sublet.json").display()
        );
    }
    if let Some(folder) = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    // Loaders look at files that end in .json and .yaml alone.
    let new = beside(path, ".new")?;
    fs::File::create(&new)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&new, path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&new);
        })
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources() -> Sources {
        Sources {
            library: "/opt/lib/libsublet.so".into(),
            runtime: "/run/sublet/containers".into(),
            simulated: None,
            preload: None,
            nodes: vec!["/dev/nvidia0".into(), "/dev/nvidiactl".into()],
        }
    }

    #[test]
    fn a_device_is_a_name_and_settings() {
        let slice = parse_slice("half:mem=20GiB,share=0.5").expect("a device");
        assert_eq!(slice.name, "half");
        assert_eq!(slice.env, ["SUBLET_MEM=20GiB", "SUBLET_SHARE=0.5"]);
        assert!(parse_slice("all").expect("a device").settings.is_empty());
        for text in DEFAULTS {
            parse_slice(text).expect("a default");
        }
        for (bad, word) in [
            ("", "is no name"),
            ("a b", "is no name"),
            ("x=y", "is no name"),
            ("-half", "is no name"),
            ("half:mem", "is no setting"),
            ("half:memory=3GiB", "write one of mem"),
            ("half:mem=20", "`20`"),
            ("half:share=2", "`2`"),
            ("half:mem=1GiB,mem=2GiB", "twice"),
            ("half:share=0.5,share_max=0.2", "share_max"),
        ] {
            let error = parse_slice(bad).expect_err(bad);
            assert!(error.contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn the_specification_has_what_a_container_needs_and_nothing_else() {
        let slices = ["half:mem=50%,share=0.5", "all"].map(|text| parse_slice(text).expect("one"));
        let text = specification(&slices, &sources()).expect("one");
        assert_eq!(text["cdiVersion"], "0.5.0");
        assert_eq!(text["kind"], "sublet.dev/gpu");
        let of = |at: usize| text["devices"][at]["containerEdits"]["env"].clone();
        assert_eq!(text["devices"][0]["name"], "half");
        assert_eq!(
            of(0),
            json!([
                "SUBLET_CONTAINER=half",
                "SUBLET_MEM=50%",
                "SUBLET_SHARE=0.5",
                "SUBLET_ON_REFUSAL=closed"
            ])
        );
        assert_eq!(of(1)[1], "SUBLET_ON_REFUSAL=open");
        let edits = &text["containerEdits"];
        let nodes = json!([{ "path": "/dev/nvidia0" }, { "path": "/dev/nvidiactl" }]);
        assert_eq!(edits["deviceNodes"], nodes);
        assert!(edits["env"].to_string().contains("LD_PRELOAD="));
        assert_eq!(
            edits["mounts"][1],
            json!({
                "hostPath": "/run/sublet/containers",
                "containerPath": "/run/sublet/containers",
                "options": ["ro", "nosuid", "nodev", "bind"],
            })
        );
        // Loaders refuse what they do not know.
        let keys: Vec<&String> = text.as_object().expect("a map").keys().collect();
        assert_eq!(keys, ["cdiVersion", "containerEdits", "devices", "kind"]);
        let with_file = Sources {
            preload: Some("/etc/cdi/sublet.json.ld.so.preload".into()),
            ..sources()
        };
        let text = specification(&slices, &with_file).expect("one").to_string();
        assert!(text.contains("/etc/ld.so.preload") && !text.contains("LD_PRELOAD="));
    }

    #[test]
    fn device_files_are_those_of_gpus_and_their_driver() {
        let dev = tempfile::tempdir().expect("a folder");
        for name in [
            "nvidia0",
            "nvidia12",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia-uvm-tools",
            "nvidia-modeset",
            "nvidia0x",
            "null",
            "nvidia",
        ] {
            fs::write(dev.path().join(name), "").expect("a file");
        }
        let found = nodes(dev.path()).join(" ").replace("/dev/nvidia", "");
        assert_eq!(found, "-uvm -uvm-tools 0 12 ctl");
        assert!(nodes(Path::new("/nonexistent")).is_empty());
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("cdi/sublet.json");
        replace(&path, "one\n").expect("written");
        replace(&path, "two\n").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("read"), "two\n");
        let entries = fs::read_dir(root.path().join("cdi")).expect("listed");
        assert_eq!(entries.count(), 1);
        let error = replace(root.path(), "x").expect_err("a folder").to_string();
        assert!(error.contains("sublet.json"), "{error}");
    }
}
