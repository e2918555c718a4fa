//! Beyond LD_PRELOAD: each task gets a mount namespace of its own, in which `/etc/ld.so.preload`
//! names the preload library. A program that cleans its environment is preloaded all the same; the
//! host sees nothing of it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// What the dynamic linker reads (ld.so(8)).
const PRELOAD: &str = "/etc/ld.so.preload";

/// Has this process, and what it becomes, see `file` as `/etc/ld.so.preload`.
///
/// # Errors
/// In one line, with the remedy.
pub fn preload(file: &Path) -> Result<(), String> {
    let shown = file.display();
    let meta = fs::metadata(file).map_err(|error| format!("enforce={shown}: {error}"))?;
    // Every program of the job loads what it names.
    if !meta.is_file() || meta.uid() != 0 || meta.mode() & 0o022 != 0 {
        return Err(format!(
            "enforce={shown}: others than root could change it: run `chown root` and `chmod 644` on it"
        ));
    }
    if !Path::new(PRELOAD).exists() {
        return Err(format!(
            "enforce={shown}: this node has no {PRELOAD} to lay it over: create an empty one"
        ));
    }
    if let Some(hidden) = hidden(&read(Path::new(PRELOAD))?, &read(file)?) {
        return Err(format!(
            "enforce={shown}: this node preloads {hidden} by {PRELOAD}, which it would hide: name it in {shown}, too"
        ));
    }
    let none: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS)
        .map_err(|errno| format!("no mount namespace for the task: {errno}"))?;
    // What is mounted on the host later is seen, and what is mounted here is not seen there.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)
        .map_err(|errno| format!("the task's mounts cannot be made its own: {errno}"))?;
    mount(Some(file), PRELOAD, none, MsFlags::MS_BIND, none)
        .map_err(|errno| format!("{shown} cannot be laid over {PRELOAD}: {errno}"))?;
    Ok(())
}

fn read(file: &Path) -> Result<String, String> {
    let bytes = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A library of the node that `own` lacks. Words are apart by spaces or colons, and a `#` begins a
/// remark.
fn hidden<'a>(node: &'a str, own: &str) -> Option<&'a str> {
    fn libraries(text: &str) -> impl Iterator<Item = &str> {
        let words = |line| str::split(line, [' ', '\t', ':']).filter(|word| !word.is_empty());
        let lines = text.lines();
        lines.flat_map(move |line| words(line.split('#').next().unwrap_or(line)))
    }
    libraries(node).find(|library| !libraries(own).any(|known| known == *library))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_the_node_preloads_is_not_hidden() {
        let own = "/lib/libsublet.so /lib/audit.so\n";
        for node in [
            "",
            "\n# /lib/x.so\n",
            "/lib/audit.so\n",
            "/lib/audit.so:/lib/libsublet.so",
        ] {
            assert_eq!(hidden(node, own), None, "{node}");
        }
        assert_eq!(
            hidden("/lib/audit.so\n/lib/trace.so # x\n", own),
            Some("/lib/trace.so")
        );
    }

    #[test]
    fn a_file_that_others_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("preload");
        assert!(preload(&file).unwrap_err().contains("No such file"));
        fs::write(&file, "/lib/libsublet.so\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(preload(&file).unwrap_err().contains("chmod 644"));
        assert!(
            preload(dir.path())
                .unwrap_err()
                .contains("others than root")
        );
    }
}
