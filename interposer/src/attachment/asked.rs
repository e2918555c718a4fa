//! What a process asks for that no `sublet run` has started: one in a container, into which an
//! engine or a cluster has put this library and variables that say how much of the GPU it may have.
//!
//! The variables travel as they are; what they mean is the arbiter's to know. Ours say so
//! themselves (`SUBLET_CONTAINER`); those of HAMi, KAI and MPS do too, so that these may have this
//! library loaded in the place of their own.
//!
//! What an engine starts in a container later (`podman exec`) has none of the variables that came
//! with the device. There the container's first process knows them. Where that one cannot be read,
//! or has lost them, nobody here knows the limits: then the process is of the container's job where
//! the arbiter knows it already, and is refused else.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use channel::wire::ASKED_BYTES;

use crate::ground::environment::{of, variable};

/// Where the arbiter of the host is for containers, unless SUBLET_SOCKET says otherwise.
pub(super) const SOCKET: &str = "/run/sublet/containers/channel.sock";

/// Files of the arbiter that no container is shown. The second one outlives it.
const OF_HOST: [&str; 2] = ["/run/sublet/api.sock", "/run/sublet/arbiter.lock"];
/// Where `sublet cdi generate` and `sublet kubernetes` have this library mounted: with it came the
/// variables.
const LIBRARY: &str = "/opt/sublet/libsublet.so";
/// Bytes of the first process's environment; one that is larger counts as one that cannot be read.
const MOST_BYTES: u64 = 1 << 20;

/// Says that this process is in a container whose job it is to register by itself.
pub(super) const CONTAINER: &CStr = c"SUBLET_CONTAINER";
/// Says that the driver simulates.
const SIMULATED: &str = "SUBLET_SIM";
/// The settings of a job.
const OWN: [&str; 19] = [
    "SUBLET_MEM",
    "SUBLET_SHARE",
    "SUBLET_SHARE_MIN",
    "SUBLET_SHARE_MAX",
    "SUBLET_CLASS",
    "SUBLET_DEVICE",
    "SUBLET_GANG",
    "SUBLET_GROUP",
    "SUBLET_DEADLINE",
    "SUBLET_WORK",
    "SUBLET_ON_ARBITER_LOSS",
    "SUBLET_ON_REFUSAL",
    "SUBLET_EVICTABLE",
    "SUBLET_OVERFLOW",
    "SUBLET_HOST_MEMORY",
    "SUBLET_EVICT_AFTER",
    "SUBLET_LATENCY_TARGET",
    "SUBLET_ITERATION_LAUNCHES",
    "SUBLET_NAME",
];
/// HAMi-core's, each also with the number of a device behind it.
const HAMI: [&str; 2] = ["CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"];
const HAMI_DEVICES: u32 = 16;
const MPS: [&str; 2] = [
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
];
/// Of ours, those without which a process that cannot be governed may run on.
const LIMITS: [&str; 2] = ["SUBLET_MEM", "SUBLET_SHARE_MAX"];

const UNREADABLE: &str = "nobody knows what its container may use: /proc/1/environ cannot be read \
    by this user. Once the container's first process, or another one of that user, uses the GPU, \
    its limits hold for all";
const CLEARED: &str = "nobody knows what its container may use: its first process has none of the \
    variables that came with the device. Start the container with a first process that keeps its \
    environment";

/// What the environment asks for.
pub(super) struct Asked {
    /// A line `NAME=value` for each variable.
    pub(super) lines: String,
    /// A limit is among it: the process does not start where nobody enforces it.
    pub(super) limited: bool,
    /// Why it is not known what was asked for. Such lines are taken for a container that the
    /// arbiter knows, and refused for another.
    pub(super) unknown: Option<&'static str>,
    /// The environment of the container's first process, where this one's does not say all.
    first: Vec<u8>,
}

impl Asked {
    /// A variable of this process, or else of its container's first one.
    pub(super) fn value(&self, name: &CStr) -> Option<&[u8]> {
        variable(name).or_else(|| of(&self.first, name.to_bytes()))
    }

    fn unknown(why: &'static str) -> Self {
        Self {
            // This is no name: the arbiter reads it only where it knows the container not yet.
            lines: "SUBLET_NAME=(its container's settings are not known)\n".into(),
            limited: true,
            unknown: Some(why),
            first: Vec::new(),
        }
    }
}

/// The environment of the first process of this one's container, where that has a job's token and
/// this one has lost it.
pub(super) fn first_with_token() -> Option<Vec<u8>> {
    if variable(CONTAINER).is_some() || !is_in_container() {
        return None;
    }
    first_process().filter(|first| of(first, b"SUBLET_TOKEN").is_some())
}

/// What this process asks for; `None`: it does not say that it is a job.
pub(super) fn asked() -> Option<Asked> {
    let own = |name: &str| Some(variable(&CString::new(name).ok()?)?.to_vec());
    asked_in(&own, &|| {
        is_in_container().then(|| Around {
            first: first_process(),
            by_cdi: Path::new(LIBRARY).exists(),
        })
    })
}

/// Only containers see one of the arbiter's sockets and nothing else of its files. One in a folder
/// that this user may not look into is there as well.
fn is_in_container() -> bool {
    let is_there = |path: &str| !matches!(Path::new(path).try_exists(), Ok(false));
    is_there(SOCKET) && !OF_HOST.into_iter().any(is_there)
}

/// The container of a process that does not say itself that it is in one.
struct Around {
    /// The environment with which its first process was started; `None`: it may not be read.
    first: Option<Vec<u8>>,
    /// It has a device of ours, and with that came variables.
    by_cdi: bool,
}

/// The environment with which the container's first process was started, where it may be read.
fn first_process() -> Option<Vec<u8>> {
    let mut text = Vec::new();
    let file = File::open("/proc/1/environ").ok()?;
    file.take(MOST_BYTES).read_to_end(&mut text).ok()?;
    // Of one that was cut short it is not known what is missing.
    ((text.len() as u64) < MOST_BYTES).then_some(text)
}

type Look<'a> = &'a dyn Fn(&str) -> Option<Vec<u8>>;

fn asked_in(own: Look<'_>, around: &dyn Fn() -> Option<Around>) -> Option<Asked> {
    let is_hamis = has_hami(own);
    let container = CONTAINER.to_str().unwrap_or_default();
    if own(container).is_some() {
        return Some(asked_of(is_hamis, own));
    }
    let Some(around) = around() else {
        return is_hamis.then(|| asked_of(true, own));
    };
    let Some(first) = around.first else {
        // Without a device of ours the variables came by the image or the command: then all of the
        // container's processes have them, and one that has some has not lost them.
        let says = is_hamis || OWN.iter().any(|name| own(name).is_some());
        return Some(match says && !around.by_cdi {
            true => asked_of(true, own),
            false => Asked::unknown(UNREADABLE),
        });
    };
    let of_first = |name: &str| of(&first, name.as_bytes()).map(<[u8]>::to_vec);
    if around.by_cdi && of_first(container).is_none() {
        return Some(Asked::unknown(CLEARED));
    }
    // What came with a device replaced what the command said: it does so here, too.
    let both = |name: &str| match around.by_cdi {
        true => of_first(name).or_else(|| own(name)),
        false => own(name).or_else(|| of_first(name)),
    };
    let asked = asked_of(true, &both);
    Some(Asked { first, ..asked })
}

fn has_hami(said: Look<'_>) -> bool {
    HAMI.iter().any(|name| {
        let of_device = |at| said(&format!("{name}_{at}")).is_some();
        said(name).is_some() || (0..HAMI_DEVICES).any(of_device)
    })
}

fn asked_of(with_hami: bool, said: Look<'_>) -> Asked {
    let mut lines = String::new();
    let mut say = |name: &str| -> Option<Vec<u8>> {
        let value = said(name)?;
        // What cannot be a value of ours is sent as it is, for the refusal to name it.
        let text = String::from_utf8_lossy(&value).replace('\n', " ");
        lines.push_str(name);
        lines.push('=');
        lines.push_str(&text);
        lines.push('\n');
        Some(value)
    };
    let mut limited = false;
    say(SIMULATED);
    for name in OWN {
        limited |= say(name).is_some() && LIMITS.contains(&name);
    }
    for name in HAMI.into_iter().filter(|_| with_hami) {
        let is_limit = |value: Vec<u8>| hami_limits(name, &value);
        limited |= say(name).is_some_and(is_limit);
        for device in 0..HAMI_DEVICES {
            limited |= say(&format!("{name}_{device}")).is_some_and(is_limit);
        }
    }
    // MPS enforces its own where it runs, and they are no reason to look for us.
    for name in MPS {
        say(name);
    }
    if lines.len() > ASKED_BYTES {
        // Cut short it might say something else. This is no name, and the arbiter says so.
        lines = format!("SUBLET_NAME=more than {ASKED_BYTES} bytes of settings\n");
        limited = true;
    }
    Asked {
        lines,
        limited,
        unknown: None,
        first: Vec::new(),
    }
}

/// Whether a value of HAMi's limits something: 0 does not, nor does all of the time. One that
/// cannot be read is the arbiter's to refuse.
fn hami_limits(name: &str, value: &[u8]) -> bool {
    let text = value.trim_ascii();
    let digits = text
        .strip_suffix(b"k")
        .or_else(|| text.strip_suffix(b"K"))
        .or_else(|| text.strip_suffix(b"m"))
        .or_else(|| text.strip_suffix(b"M"))
        .or_else(|| text.strip_suffix(b"g"))
        .or_else(|| text.strip_suffix(b"G"))
        .unwrap_or(text);
    let number = std::str::from_utf8(digits).ok();
    match number.and_then(|digits| digits.parse::<u64>().ok()) {
        None => true,
        Some(0) => false,
        Some(percent) if name == HAMI[1] => percent < 100 && digits.len() == text.len(),
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look<'a>(vars: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<Vec<u8>> + 'a {
        move |name| {
            let var = vars.iter().find(|(key, _)| *key == name);
            var.map(|(_, value)| value.as_bytes().to_vec())
        }
    }

    fn within(own: &[(&str, &str)], first: Option<&str>, by_cdi: bool) -> Option<Asked> {
        let first = first.map(|text| text.replace(' ', "\0").into_bytes());
        let around = || {
            Some(Around {
                first: first.clone(),
                by_cdi,
            })
        };
        asked_in(&look(own), &around)
    }

    #[test]
    fn a_container_whose_limits_are_not_known_is_never_one_without_limits() {
        for (own, first) in [
            (&[][..], None),
            (&[("PATH", "/bin")], Some("")),
            (&[], Some("PATH=/bin SUBLET_MEM=1GiB")),
            (&[("CUDA_DEVICE_SM_LIMIT", "30")], None),
            (&[("SUBLET_MEM", "70GiB")], None),
            (&[("SUBLET_MEM", "70GiB")], Some("")),
        ] {
            let asked = within(own, first, true).expect("one of a container");
            assert!(
                asked.limited && asked.unknown.is_some(),
                "{own:?} {first:?}"
            );
            // The arbiter refuses this name, which it reads for a new container only.
            let name = asked.lines.strip_prefix("SUBLET_NAME=").expect("a name");
            assert!(name.contains(' '), "{}", asked.lines);
        }
        let asked = within(&[], None, false).expect("one of a container");
        assert!(asked.limited && asked.unknown.is_some());
    }

    #[test]
    fn one_that_says_something_or_nobody_has_asked_for_anything_is_as_it_says() {
        let hami = [("CUDA_DEVICE_SM_LIMIT", "30")];
        let asked = within(&hami, None, false).expect("HAMi's");
        assert_eq!(asked.lines, "CUDA_DEVICE_SM_LIMIT=30\n");
        assert!(asked.limited && asked.unknown.is_none());
        // A socket and a library, and no word of a limit.
        let asked = within(&[], Some("PATH=/bin"), false).expect("one of a container");
        assert!(!asked.limited && asked.unknown.is_none());
        assert_eq!(asked.lines, "");
        let nowhere = || None;
        assert!(asked_in(&look(&[]), &nowhere).is_none());
        assert!(asked_in(&look(&[("SUBLET_MEM", "1GiB")]), &nowhere).is_none());
        assert!(asked_in(&look(&hami), &nowhere).is_some());
    }

    #[test]
    fn the_first_process_says_what_came_with_the_device() {
        let first = "SUBLET_CONTAINER=half SUBLET_MEM=1GiB SUBLET_ON_ARBITER_LOSS=freeze";
        let own = [("SUBLET_MEM", "70GiB"), ("SUBLET_NAME", "mine")];
        let asked = within(&own, Some(first), true).expect("one of a container");
        let lines: Vec<&str> = asked.lines.lines().collect();
        assert_eq!(
            lines,
            [
                "SUBLET_MEM=1GiB",
                "SUBLET_ON_ARBITER_LOSS=freeze",
                "SUBLET_NAME=mine"
            ]
        );
        assert!(asked.limited && asked.unknown.is_none());
        let of_first = asked.value(c"SUBLET_ON_ARBITER_LOSS");
        assert_eq!(of_first, Some(&b"freeze"[..]));
        assert_eq!(asked.value(CONTAINER), Some(&b"half"[..]));
        // One that says itself where it is needs nobody.
        let own = [("SUBLET_CONTAINER", "half"), ("SUBLET_MEM", "2GiB")];
        let asked = asked_in(&look(&own), &|| unreachable!()).expect("one");
        assert_eq!(asked.lines, "SUBLET_MEM=2GiB\n");
    }

    #[test]
    fn hamis_words_for_no_limit_are_none() {
        let (memory, time) = (HAMI[0], HAMI[1]);
        for (name, value, limits) in [
            (memory, "0", false),
            (memory, "0m", false),
            (memory, " 0 ", false),
            (memory, "1", true),
            (memory, "100", true),
            (memory, "much", true),
            (time, "0", false),
            (time, "99", true),
            (time, "100", false),
            (time, "1k", false),
            (time, "half", true),
        ] {
            assert_eq!(
                hami_limits(name, value.as_bytes()),
                limits,
                "{name}={value}"
            );
            let vars = [(name, value)];
            let asked = asked_in(&look(&vars), &|| None).expect("HAMi's");
            assert_eq!(asked.limited, limits, "{name}={value}");
        }
    }

    #[test]
    fn more_than_fits_is_refused_and_not_let_go() {
        let long = "x".repeat(ASKED_BYTES);
        let vars = [("SUBLET_CONTAINER", "c"), ("SUBLET_GANG", long.as_str())];
        let asked = asked_in(&look(&vars), &|| None).expect("one");
        assert!(asked.limited && asked.lines.contains("more than"));
    }
}
