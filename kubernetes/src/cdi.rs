//! CDI: what a container gets, in a file that its runtime reads.
//!
//! Source: the Container Device Interface specification, version 0.5.0, which every reader of a
//! newer one takes. Readers refuse unknown fields, so none is here that is not of that version.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Vendor and class of our devices.
pub const KIND: &str = "sublet.dev/share";

/// What changes in a container.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
}

/// A file or directory of the host that a container sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    pub host_path: PathBuf,
    pub container_path: PathBuf,
    pub options: Vec<&'static str>,
}

/// A device node of the host; its numbers are looked up by the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceNode {
    pub path: PathBuf,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    cdi_version: &'static str,
    kind: &'static str,
    devices: Vec<Device<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Device<'a> {
    name: &'a str,
    container_edits: &'a Edits,
}

/// The directory of specifications, and what files of ours are called there.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
    prefix: String,
}

impl Folder {
    /// That directory, made where it is missing, for one of several writers.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(path: &Path, writer: &str) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        Ok(Self {
            path: path.to_owned(),
            prefix: format!("{}-{writer}-", KIND.replace('/', "-")),
        })
    }

    /// The full name of a device, as a runtime is asked for it.
    pub fn id(name: &str) -> String {
        format!("{KIND}={name}")
    }

    fn file(&self, key: &str) -> PathBuf {
        self.path.join(format!("{}{key}.json", self.prefix))
    }

    /// Writes the file of a key, whole or not at all. Only its owner reads it: tokens are in it.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(&self, key: &str, devices: &[(String, Edits)]) -> io::Result<()> {
        let spec = Spec {
            cdi_version: "0.5.0",
            kind: KIND,
            devices: devices
                .iter()
                .map(|(name, container_edits)| Device {
                    name,
                    container_edits,
                })
                .collect(),
        };
        // A runtime reads files that end in `.json`, and may do so at any time.
        let mut beside = tempfile::Builder::new()
            .prefix(&format!(".{}", self.prefix))
            .suffix(".new")
            .tempfile_in(&self.path)?;
        beside.write_all(serde_json::to_string(&spec)?.as_bytes())?;
        beside.as_file().sync_all()?;
        beside
            .persist(self.file(key))
            .map_err(|error| error.error)?;
        Ok(())
    }

    /// Removes the file of a key, if there is one.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn remove(&self, key: &str) -> io::Result<()> {
        match fs::remove_file(self.file(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes our files whose key is not wanted, and what a killed writer has left.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn keep_only(&self, wanted: impl Fn(&str) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let key = name.strip_prefix(&self.prefix);
            let key = key.and_then(|rest| rest.strip_suffix(".json"));
            let hidden = name.strip_prefix('.');
            let left = hidden.is_some_and(|name| name.starts_with(&self.prefix));
            if left || key.is_some_and(|key| !wanted(key)) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_file_says_what_a_container_gets_and_goes_again() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::open(&dir.path().join("cdi"), "dra").unwrap();
        let edits = Edits {
            env: vec!["SUBLET_JOB=a".into()],
            mounts: vec![Mount {
                host_path: "/l/libsublet.so".into(),
                container_path: "/l/libsublet.so".into(),
                options: vec!["ro", "bind"],
            }],
            device_nodes: Vec::new(),
        };
        folder.write("uid", &[("a".into(), edits)]).unwrap();
        let path = folder.file("uid");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            r#"{"cdiVersion":"0.5.0","kind":"sublet.dev/share","devices":[{"name":"a","containerEdits":{"env":["SUBLET_JOB=a"],"mounts":[{"hostPath":"/l/libsublet.so","containerPath":"/l/libsublet.so","options":["ro","bind"]}]}}]}"#
        );
        for theirs in ["nvidia.json", "sublet.dev-share-plugin-uid.json"] {
            fs::write(folder.path.join(theirs), "theirs").unwrap();
        }
        fs::write(folder.path.join(".sublet.dev-share-dra-x.new"), "half").unwrap();
        folder.keep_only(|key| key == "uid").unwrap();
        assert!(path.exists());
        folder.keep_only(|_| false).unwrap();
        let left: Vec<_> = fs::read_dir(&folder.path).unwrap().collect();
        assert_eq!(left.len(), 2, "what is another's stays: {left:?}");
        folder.remove("uid").unwrap();
    }
}
