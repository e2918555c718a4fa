//! What a job asks for in the environment. A flag beats it, and it beats the quota file.

use std::ffi::OsString;

use control::{JobSettings, Settings};

/// A variable with a value that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("the environment variable {name}: {message}")]
pub struct BadVariable {
    name: String,
    message: String,
}

/// The settings in the environment, and the job's name.
///
/// # Errors
/// [`BadVariable`] with the name, the value and the remedy. An empty variable counts as unset.
pub fn from_environment(
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<(JobSettings, Option<String>), BadVariable> {
    let text = |name: &str| -> Result<Option<String>, BadVariable> {
        let value = var(name).filter(|value| !value.is_empty());
        value
            .map(OsString::into_string)
            .transpose()
            .map_err(|value| BadVariable {
                name: name.to_owned(),
                message: format!(
                    "`{}` is no UTF-8 text: set it anew or unset it",
                    value.display()
                ),
            })
    };
    let mut settings = JobSettings::default();
    for setting in JobSettings::TABLE {
        let name = setting.about.variable();
        if let Some(text) = text(&name)? {
            let parsed = (setting.parse)(&text).map_err(|message| BadVariable { name, message })?;
            settings = parsed.or(&settings);
        }
    }
    let name = text("SUBLET_NAME")?;
    if let Some(name) = &name {
        control::check_name(name).map_err(|error| BadVariable {
            name: "SUBLET_NAME".into(),
            message: error.to_string(),
        })?;
    }
    Ok((settings, name))
}

#[cfg(test)]
mod tests {
    use control::{DeviceSelector, MemLimit};

    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<(JobSettings, Option<String>), BadVariable> {
        from_environment(|name| {
            let var = vars.iter().find(|(key, _)| *key == name);
            var.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn every_setting_has_a_variable() {
        for setting in JobSettings::TABLE {
            let text = setting.about.kind.example.replace(['"', '[', ']'], "");
            let (settings, name) = read(&[(&setting.about.variable(), &text)]).unwrap();
            assert!((setting.is_set)(&settings), "{}", setting.about.key);
            assert_eq!(name, None);
        }
        let (settings, name) = read(&[
            ("SUBLET_MEM", "50%"),
            ("SUBLET_SHARE", "25%"),
            ("SUBLET_DEVICE", "0, GPU-ff"),
            ("SUBLET_ITERATION_LAUNCHES", " 12 "),
            ("SUBLET_NAME", "train"),
        ])
        .unwrap();
        assert_eq!(
            settings,
            JobSettings {
                mem: Some(MemLimit::Percent(50.0)),
                share: Some(0.25),
                device: Some(vec![
                    DeviceSelector::Index(0),
                    DeviceSelector::Uuid("GPU-ff".into())
                ]),
                iteration_launches: Some(12),
                ..JobSettings::default()
            }
        );
        assert_eq!(name.as_deref(), Some("train"));
        let empty = read(&[("SUBLET_MEM", "")]).unwrap().0;
        assert!(empty.is_empty());
    }

    #[test]
    fn a_bad_variable_is_named_with_its_value() {
        for (name, value) in [
            ("SUBLET_MEM", "20"),
            ("SUBLET_SHARE", "1.01"),
            ("SUBLET_SHARE", "half"),
            ("SUBLET_SHARE_MAX", "2"),
            ("SUBLET_GANG", "maybe"),
            ("SUBLET_DEADLINE", "soon"),
            ("SUBLET_CLASS", "best"),
            ("SUBLET_DEVICE", "0,x"),
            ("SUBLET_ON_ARBITER_LOSS", "die"),
            ("SUBLET_ON_REFUSAL", "freeze"),
            ("SUBLET_NAME", "a b"),
            ("SUBLET_EVICTABLE", "yes"),
            ("SUBLET_OVERFLOW", "disk"),
            ("SUBLET_HOST_MEMORY", "3"),
            ("SUBLET_ITERATION_LAUNCHES", "0"),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            let shown = value.rsplit(',').next().unwrap();
            assert!(error.contains(name) && error.contains(shown), "{error}");
        }
    }
}
