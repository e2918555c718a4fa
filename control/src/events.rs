//! What the journal's lines are about: every kind of event, in the arbiter's word and in plain
//! English.
//!
//! The arbiter writes no kind that is not listed here, and `docs/reference/events.md` has each of
//! them. A reader may meet others: those of a newer arbiter.

/// One kind of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventKind {
    /// As the journal has it.
    pub word: &'static str,
    /// As people are shown it: a few words.
    pub plain: &'static str,
}

const fn kind(word: &'static str, plain: &'static str) -> EventKind {
    EventKind { word, plain }
}

/// All of them: the arbiter's own, those of jobs, of processes, of memory, of trouble.
pub const EVENT_KINDS: [EventKind; 52] = [
    kind("start", "arbiter started"),
    kind("stop", "arbiter stopped"),
    kind("reload", "quota file read"),
    kind("device", "device set"),
    kind("restored", "job taken over"),
    kind("registered", "job registered"),
    kind("changed", "job changed"),
    kind("not_applied", "quota not applied"),
    kind("dormant", "job dormant"),
    kind("woken", "job awake"),
    kind("renamed", "job renamed"),
    kind("ended", "job ended"),
    kind("attached", "process attached"),
    kind("reattached", "process is back"),
    kind("detached", "process gone"),
    kind("refused", "process refused"),
    kind("escaped", "process escaped"),
    kind("strict", "strict job killed"),
    kind("engine_gone", "engine gone"),
    kind("ungoverned", "device not limited"),
    kind("oom", "out of memory"),
    kind("evicted", "evicted"),
    kind("restored_bytes", "restored"),
    kind("not_evicted", "not evicted"),
    kind("not_restored", "not restored"),
    kind("not_fitted", "not fitted"),
    kind("shrunk", "shrunk on the device"),
    kind("grown", "grown on the device"),
    kind("parked", "parked"),
    kind("unparked", "no longer parked"),
    kind("turn_begun", "turn begun"),
    kind("turn_over", "turn over"),
    kind("turn_missed", "no turn in time"),
    kind("turn_needed", "has no turn"),
    kind("host_memory", "host memory short"),
    kind("no_hashes", "copies everything"),
    kind("no_space", "no space on device"),
    kind("misbehaviour", "misbehaviour"),
    kind("forgiven", "forgiven"),
    kind("latency_unmet", "latency target unmet"),
    kind("latency_met", "latency target met"),
    kind("bypass", "without grants"),
    kind("following", "without marks"),
    kind("gap", "without arbiter"),
    kind("missed", "events missed"),
    kind("bad_record", "bad record"),
    kind("journal_lost", "events lost"),
    kind("unsaved", "state not saved"),
    kind("directory", "directory made again"),
    kind("stalled", "arbiter stalled"),
    kind("failure", "arbiter failure"),
    kind("node_refused_hook", "hook refused"),
];

impl EventKind {
    /// The kind of that word; `None`: of another version.
    pub fn of(word: &str) -> Option<&'static Self> {
        EVENT_KINDS.iter().find(|kind| kind.word == word)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_kind_has_its_own_words() {
        let words: BTreeSet<_> = EVENT_KINDS.iter().map(|kind| kind.word).collect();
        let plain: BTreeSet<_> = EVENT_KINDS.iter().map(|kind| kind.plain).collect();
        assert_eq!(words.len(), EVENT_KINDS.len());
        assert_eq!(plain.len(), EVENT_KINDS.len());
        assert_eq!(EventKind::of("oom").unwrap().plain, "out of memory");
        assert_eq!(EventKind::of("hibernated"), None);
    }
}
