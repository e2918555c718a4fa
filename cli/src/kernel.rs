//! `sublet kernel`: kernels of Jupyter whose notebooks run as jobs.
//!
//! A kernel is a folder with a file `kernel.json` that says how a notebook's process is started
//! (jupyter-client, "Making kernels for Jupyter"). Ours are known by a key of ours in its
//! metadata; others are left alone.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};

use crate::args::{KernelInstall, KernelPlace, KernelRemove};
use crate::exit::Result;
use crate::table::{Align, Table};
use crate::whole_file;

const FILE: &str = "kernel.json";
/// In the metadata of a kernel that was made here.
const KEY: &str = "sublet";

/// Writes a kernel; what to print.
///
/// # Errors
/// A name that Jupyter does not take, a Python without ipykernel, a kernel of somebody else's by
/// this name, a folder that cannot be written.
pub fn install(args: &KernelInstall) -> Result<String> {
    let settings = &args.settings.settings;
    settings
        .check()
        .map_err(|(name, message)| anyhow!("the job's {name} is {message}"))?;
    let name = checked(&args.name)?;
    let python = python(args.python.as_deref())?;
    let sublet = env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let mut argv = vec![text(&sublet)?, "run".into(), format!("--name={name}")];
    argv.extend(args.settings.words.iter().cloned());
    if args.sim {
        argv.push("--sim".into());
    }
    argv.push("--".into());
    argv.push(text(&python)?);
    argv.extend(["-m", "ipykernel_launcher", "-f", "{connection_file}"].map(String::from));
    let shown = match &args.display_name {
        Some(shown) => shown.clone(),
        None => match args.settings.words.as_slice() {
            [] => format!("Python 3 (sublet: {name})"),
            words => format!("Python 3 (sublet: {})", words.join(" ").replace("--", "")),
        },
    };
    let kernel = json!({
        "argv": argv,
        "display_name": shown,
        "language": "python",
        "metadata": { "debugger": true, KEY: { "version": env!("CARGO_PKG_VERSION") } },
    });
    let dir = kernels(&args.place)?.join(&name);
    if let Some(theirs) = read(&dir)?
        && !is_ours(&theirs)
    {
        return Err(anyhow!(
            "{} is another program's kernel: choose another --name",
            dir.display()
        )
        .into());
    }
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    // Jupyter may be reading; it finds the old one or the new one.
    let path = dir.join(FILE);
    whole_file::replace(&path, format!("{kernel:#}\n").as_bytes(), None)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(format!(
        "kernel `{name}` is in {}; Jupyter shows it as \"{shown}\"\n",
        dir.display()
    ))
}

/// The kernels that were made here.
///
/// # Errors
/// A folder that cannot be read.
pub fn list(place: &KernelPlace) -> Result<String> {
    let dir = kernels(place)?;
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Ok(format!("no kernels in {}\n", dir.display()));
        }
        Err(error) => {
            return Err(anyhow!(error)
                .context(format!("cannot read {}", dir.display()))
                .into());
        }
    };
    let mut rows = Vec::new();
    for entry in entries.flatten() {
        // What is no kernel, or broken, is not ours to report on.
        let Ok(Some(kernel)) = read(&entry.path()) else {
            continue;
        };
        if is_ours(&kernel) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let shown = kernel["display_name"].as_str().unwrap_or_default();
            rows.push(vec![name, shown.to_owned()]);
        }
    }
    if rows.is_empty() {
        return Ok(format!("no kernels of sublet's in {}\n", dir.display()));
    }
    rows.sort();
    let mut table = Table::new(&[("NAME", Align::Left), ("SHOWN AS", Align::Left)]);
    for row in rows {
        table.row(row);
    }
    Ok(table.render())
}

/// Removes one that was made here.
///
/// # Errors
/// None by that name, another program's, a folder that cannot be written.
pub fn remove(args: &KernelRemove) -> Result<String> {
    let name = checked(&args.name)?;
    let dir = kernels(&args.place)?.join(&name);
    match read(&dir)? {
        None => Err(anyhow!("there is no kernel `{name}` in {}", dir.display()).into()),
        Some(kernel) if !is_ours(&kernel) => {
            Err(anyhow!("{} is another program's kernel", dir.display()).into())
        }
        Some(_) => {
            fs::remove_file(dir.join(FILE))
                .with_context(|| format!("cannot remove {}", dir.join(FILE).display()))?;
            // Somebody's logo may be in it.
            let _ = fs::remove_dir(&dir);
            Ok(format!("kernel `{name}` is removed\n"))
        }
    }
}

/// Jupyter's own rule for names, in lower case: its folders are looked up so.
fn checked(name: &str) -> anyhow::Result<String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    if name.is_empty() || name.starts_with('.') || !name.chars().all(fits) {
        bail!(
            "`{name}` is no name of a kernel: write lower-case letters, digits, `-`, `_` and `.`"
        );
    }
    Ok(name.to_owned())
}

/// Where Jupyter looks for a user's kernels: jupyter-core, `jupyter_data_dir`.
fn kernels(place: &KernelPlace) -> anyhow::Result<PathBuf> {
    let var = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let data = match &place.dir {
        Some(dir) => std::path::absolute(dir).context("cannot tell the present folder")?,
        None => var("JUPYTER_DATA_DIR")
            .or_else(|| var("XDG_DATA_HOME").map(|dir| dir.join("jupyter")))
            .or_else(|| var("HOME").map(|dir| dir.join(".local/share/jupyter")))
            .context("neither JUPYTER_DATA_DIR nor HOME is set: say where with --dir")?,
    };
    Ok(data.join("kernels"))
}

/// The Python of the notebooks, which must have ipykernel.
fn python(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let python = match given {
        Some(path) => std::path::absolute(path).context("cannot tell the present folder")?,
        None => env::var_os("PATH")
            .iter()
            .flat_map(env::split_paths)
            .flat_map(|dir| [dir.join("python3"), dir.join("python")])
            .find(|path| path.is_file())
            .context("no python3 is on the PATH: say which with --python")?,
    };
    let found = Command::new(&python)
        .args(["-c", "import ipykernel_launcher"])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    if !found.status.success() {
        bail!(
            "{0} has no ipykernel: run `{0} -m pip install ipykernel`, or name another with --python",
            python.display()
        );
    }
    Ok(python)
}

fn text(path: &Path) -> anyhow::Result<String> {
    let text = path.to_str();
    text.map(str::to_owned)
        .with_context(|| format!("{} is not UTF-8, which Jupyter's files are", path.display()))
}

/// The kernel in that folder; `None`: there is none.
fn read(dir: &Path) -> anyhow::Result<Option<Value>> {
    let path = dir.join(FILE);
    match fs::read(&path) {
        // What is there and no JSON is not ours.
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or(Value::Null))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(anyhow!(error).context(format!("cannot read {}", path.display()))),
    }
}

fn is_ours(kernel: &Value) -> bool {
    kernel["metadata"][KEY].is_object()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_jupyter_takes() {
        for good in ["gpu-quarter", "a", "py3.12_x"] {
            assert_eq!(checked(good).unwrap(), good);
        }
        for bad in ["", "Upper", "a b", "../x", ".hidden", "a/b", "é"] {
            let error = checked(bad).unwrap_err().to_string();
            assert!(error.contains("is no name of a kernel"), "{bad}: {error}");
        }
    }

    #[test]
    fn what_was_not_made_here_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let place = KernelPlace {
            dir: Some(root.path().to_owned()),
        };
        assert!(list(&place).unwrap().starts_with("no kernels in "));
        let dir = root.path().join("kernels/python3");
        fs::create_dir_all(&dir).unwrap();
        for theirs in [
            r#"{"argv": ["python"], "metadata": {"debugger": true}}"#,
            "{",
            "[]",
        ] {
            fs::write(dir.join(FILE), theirs).unwrap();
            assert!(list(&place).unwrap().starts_with("no kernels of sublet's"));
            let args = KernelRemove {
                name: "python3".into(),
                place: place.clone(),
            };
            let error = remove(&args).unwrap_err().line();
            assert!(error.contains("another program's kernel"), "{error}");
            assert_eq!(fs::read_to_string(dir.join(FILE)).unwrap(), theirs);
        }
        let args = KernelRemove {
            name: "none".into(),
            place,
        };
        let error = remove(&args).unwrap_err().line();
        assert!(error.contains("there is no kernel `none`"), "{error}");
    }
}
