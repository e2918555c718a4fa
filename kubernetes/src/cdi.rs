//! CDI: what a container gets, in a file that its runtime reads.
//!
//! Source: the Container Device Interface specification, version 0.5.0, which every reader of a
//! newer one takes. Readers refuse unknown fields, so none is here that is not of that version.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::files;

/// The version that is written.
pub const VERSION: &str = "0.5.0";
/// Vendor and class of the devices that pods are given.
pub const KIND: &str = "sublet.dev/share";

/// What changes in a container.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`
    #[serde(skip_serializing_if = "Vec::is_empty")]
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

/// A file of the specification: devices of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec<'a> {
    cdi_version: &'static str,
    /// Vendor and class, such as [`KIND`].
    kind: &'a str,
    devices: &'a [Device],
    /// What each of them has beside its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    container_edits: Option<&'a Edits>,
}

/// A device that a container can ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    pub name: String,
    pub container_edits: Edits,
}

impl<'a> Spec<'a> {
    /// Devices of that kind; `common`: what each of them has beside its own.
    pub fn new(kind: &'a str, devices: &'a [Device], common: Option<&'a Edits>) -> Self {
        Self {
            cdi_version: VERSION,
            kind,
            devices,
            container_edits: common,
        }
    }
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

    /// Writes the file that names the library to every program of a container, and returns where it
    /// is. It does not end as a device's file does, which goes when it is not wanted.
    ///
    /// # Errors
    /// Those of the disk; a path of the library that such a file cannot have.
    pub fn preload(&self, library: &Path) -> io::Result<PathBuf> {
        let separates = |c: char| c.is_whitespace() || c == ':';
        let Some(text) = library.to_str().filter(|text| !text.contains(separates)) else {
            return Err(io::Error::other(format!(
                "{} has blanks or `:`, or is not UTF-8, and ld.so.preload takes neither",
                library.display()
            )));
        };
        let name = format!("{}ld.so.preload", self.prefix);
        let path = std::path::absolute(self.path.join(name))?;
        files::replace(&path, format!("{text}\n").as_bytes(), 0o644)?;
        Ok(path)
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
    pub fn write(&self, key: &str, devices: &[Device]) -> io::Result<()> {
        let text = serde_json::to_vec(&Spec::new(KIND, devices, None))?;
        // A runtime reads files that end in `.json`, and may do so at any time.
        files::replace(&self.file(key), &text, 0o600)
    }

    /// Removes the file of a key, if there is one.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn remove(&self, key: &str) -> io::Result<()> {
        files::remove(&self.file(key))
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
        let device = Device {
            name: "a".into(),
            container_edits: edits,
        };
        folder.write("uid", &[device]).unwrap();
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
        let preload = folder.preload(Path::new("/l/libsublet.so")).unwrap();
        assert_eq!(fs::read_to_string(&preload).unwrap(), "/l/libsublet.so\n");
        assert!(folder.preload(Path::new("/l l/libsublet.so")).is_err());
        folder.keep_only(|key| key == "uid").unwrap();
        assert!(path.exists());
        folder.keep_only(|_| false).unwrap();
        let left: Vec<_> = fs::read_dir(&folder.path).unwrap().collect();
        assert_eq!(left.len(), 3, "what is another's stays: {left:?}");
        assert!(preload.exists());
        folder.remove("uid").unwrap();
    }

    #[test]
    fn devices_of_another_kind_share_what_is_common() {
        let common = Edits {
            device_nodes: vec![DeviceNode {
                path: "/dev/nvidiactl".into(),
            }],
            ..Edits::default()
        };
        let devices = [Device {
            name: "half".into(),
            container_edits: Edits::default(),
        }];
        let text = serde_json::to_string(&Spec::new("sublet.dev/gpu", &devices, Some(&common)));
        assert_eq!(
            text.unwrap(),
            r#"{"cdiVersion":"0.5.0","kind":"sublet.dev/gpu","devices":[{"name":"half","containerEdits":{}}],"containerEdits":{"deviceNodes":[{"path":"/dev/nvidiactl"}]}}"#
        );
    }

    #[test]
    fn a_path_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStringExt as _;
        let path = std::ffi::OsString::from_vec(b"/l/\xff".to_vec());
        let edits = Edits {
            device_nodes: vec![DeviceNode { path: path.into() }],
            ..Edits::default()
        };
        assert!(serde_json::to_string(&edits).is_err());
    }
}
