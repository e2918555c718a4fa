//! `sublet cdi generate`: a specification of the Container Device Interface, by which Docker,
//! Podman, containerd and CRI-O give a container a part of a GPU.
//!
//! The driver and the device files of a GPU are `nvidia.com/gpu`'s to bring, which a container asks
//! for as well.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use control::paths::{RuntimeDir, Surroundings};
use kubernetes::cdi::{Device, Edits, Mount, Spec};

use self::args::{CdiGenerate, Slice, parse_slice};
use crate::exit::Result;
use crate::run::install::Install;
use crate::whole_file;

pub mod args;

const KIND: &str = "sublet.dev/gpu";
/// Where a container has what is ours; the library looks for itself there.
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

/// What is mounted, and from where.
struct Sources {
    library: PathBuf,
    runtime: PathBuf,
    /// Of the simulated driver: its libraries, and the state that its processes share.
    simulated: Option<(Vec<(&'static str, PathBuf)>, PathBuf)>,
    /// The file that names the library to every program.
    preload: Option<PathBuf>,
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
    };
    // A container is made with its mounts: they must be there before the arbiter starts.
    dir.ensure(nix::unistd::geteuid().as_raw())?;
    make_mounted(&sources.runtime)?;
    if let Some((_, state)) = &sources.simulated {
        make_mounted(state)?;
    }
    let text = specification(&slices, &sources)?;
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

/// The specification as text.
fn specification(slices: &[Slice], sources: &Sources) -> anyhow::Result<String> {
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
    // No device nodes: they would be every device's, and so every container's, also of one that was
    // given a single GPU by `nvidia.com/gpu=0`.
    let common = Edits {
        env,
        mounts,
        device_nodes: Vec::new(),
    };
    let devices = slices.iter().map(|slice| {
        let mut env = vec![format!("SUBLET_CONTAINER={}", slice.name)];
        env.extend(slice.env.iter().cloned());
        Device {
            name: slice.name.clone(),
            container_edits: Edits {
                env,
                ..Edits::default()
            },
        }
    });
    let devices: Vec<Device> = devices.collect();
    let text = serde_json::to_string_pretty(&Spec::new(KIND, &devices, Some(&common)))?;
    Ok(text + "\n")
}

fn mount(from: &Path, to: &str, read_only: bool) -> anyhow::Result<Mount> {
    if from.to_str().is_none() {
        bail!(
            "{} is not UTF-8, which these files are: install sublet elsewhere",
            from.display()
        );
    }
    let access = if read_only { "ro" } else { "rw" };
    Ok(Mount {
        host_path: from.into(),
        container_path: to.into(),
        options: vec![access, "nosuid", "nodev", "bind"],
    })
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

/// What a link leads to, which in a container would lead elsewhere; a file that the users in
/// containers may read. One that they cannot is not loaded, and nobody says so.
fn real(path: &Path) -> anyhow::Result<PathBuf> {
    let cannot = || format!("cannot find {}", path.display());
    let path = fs::canonicalize(path).with_context(cannot)?;
    let mode = fs::metadata(&path)
        .with_context(cannot)?
        .permissions()
        .mode();
    if mode & 0o004 == 0 {
        bail!(
            "users in containers cannot read {0}, and would run without limits: chmod o+r {0}",
            path.display()
        );
    }
    Ok(path)
}

/// Makes a folder that is mounted.
fn make_mounted(dir: &Path) -> anyhow::Result<()> {
    let open = dir.starts_with(control::paths::SYSTEM_DIR);
    make(dir, if open { 0o755 } else { 0o700 })
}

/// Makes a folder, and those that it lies in, with that mode whatever the umask says. What is there
/// stays as it is.
fn make(dir: &Path, mode: u32) -> anyhow::Result<()> {
    let is_missing = |at: &&Path| !at.as_os_str().is_empty() && !at.exists();
    let missing: Vec<&Path> = dir.ancestors().take_while(is_missing).collect();
    let mut made = fs::create_dir_all(dir);
    for at in missing {
        made = made.and_then(|()| fs::set_permissions(at, fs::Permissions::from_mode(mode)));
    }
    made.with_context(|| format!("cannot make {}", dir.display()))
}

fn beside(file: &Path, ending: &str) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(file).context("cannot tell the present folder")?;
    let mut name = path.into_os_string();
    name.push(ending);
    Ok(name.into())
}

/// Writes a file that engines, of whatever user, and programs in containers read.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    if path.is_dir() {
        bail!(
            "{} is a folder: name a file in it, such as {}",
            path.display(),
            path.join("sublet.json").display()
        );
    }
    if let Some(folder) = path.parent() {
        make(folder, 0o755)?;
    }
    // Loaders look at files that end in .json and .yaml alone: not at one that is being written.
    whole_file::replace(path, text.as_bytes(), Some(0o644))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn sources() -> Sources {
        Sources {
            library: "/opt/lib/libsublet.so".into(),
            runtime: "/run/sublet/containers".into(),
            simulated: None,
            preload: None,
        }
    }

    #[test]
    fn the_specification_has_what_a_container_needs_and_nothing_else() {
        let slices = ["half:mem=50%,share=0.5", "all"].map(|text| parse_slice(text).expect("one"));
        let read = |sources: &Sources| -> Value {
            let text = specification(&slices, sources).expect("one");
            serde_json::from_str(&text).expect("JSON")
        };
        let text = read(&sources());
        assert_eq!(text["cdiVersion"], "0.5.0");
        assert_eq!(text["kind"], "sublet.dev/gpu");
        let of = |at: usize| text["devices"][at]["containerEdits"]["env"].clone();
        assert_eq!(text["devices"][0]["name"], "half");
        assert_eq!(
            of(0),
            json!([
                "SUBLET_CONTAINER=half",
                "SUBLET_MEM=50%",
                "SUBLET_SHARE=0.5"
            ])
        );
        // Without a limit nothing is said of refusals: a limit that the command asks for says it.
        assert_eq!(of(1), json!(["SUBLET_CONTAINER=all"]));
        let edits = &text["containerEdits"];
        let parts: Vec<&String> = edits.as_object().expect("a map").keys().collect();
        assert_eq!(
            parts,
            ["env", "mounts"],
            "a GPU is another device's to give"
        );
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
        let text = read(&with_file).to_string();
        assert!(text.contains("/etc/ld.so.preload") && !text.contains("LD_PRELOAD="));
    }

    #[test]
    fn defaults_are_devices() {
        for text in DEFAULTS {
            parse_slice(text).expect("a default");
        }
    }

    #[test]
    fn users_in_containers_can_read_what_is_mounted_whatever_the_umask() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("etc/cdi/sublet.json");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        let private = fs::Permissions::from_mode(0o600);
        replace(&path, "one\n").expect("written");
        fs::set_permissions(&path, private).expect("set");
        let folder = path.parent().expect("a folder");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("set");
        replace(&path, "two\n").expect("written");
        assert_eq!(mode(&path), 0o644);
        assert_eq!(mode(folder), 0o700, "what was there is its owner's");
        assert_eq!(mode(&root.path().join("etc")), 0o755);
        make(&root.path().join("a/b"), 0o711).expect("made");
        assert_eq!(mode(&root.path().join("a")), 0o711);
        assert_eq!(mode(&root.path().join("a/b")), 0o711);
        // A mode that a umask of 077 leaves.
        let library = root.path().join("libsublet.so");
        fs::write(&library, "").expect("written");
        fs::set_permissions(&library, fs::Permissions::from_mode(0o700)).expect("set");
        let error = real(&library).expect_err("not readable").to_string();
        assert!(error.contains("chmod o+r"), "{error}");
        fs::set_permissions(&library, fs::Permissions::from_mode(0o644)).expect("set");
        real(&library).expect("readable");
    }

    #[test]
    fn a_folder_is_no_file() {
        let root = tempfile::tempdir().expect("a folder");
        let error = replace(root.path(), "x").expect_err("a folder").to_string();
        assert!(error.contains("sublet.json"), "{error}");
    }
}
