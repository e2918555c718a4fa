//! The columns of the table of jobs: what is in each, how it sorts, and which fit beside each
//! other.

use std::cmp::Ordering;

use control::short_bytes;

use super::model::Job;
use crate::printable::printable;
use crate::ps::short_time;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    Id,
    Name,
    User,
    Class,
    State,
    Gpu,
    Share,
    Got,
    GotBars,
    Memory,
    Limit,
    Evicted,
    MemoryBars,
    InFlight,
    Iteration,
    Slowdown,
    Launches,
    Oom,
    Processes,
}

/// A column's place on the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    pub column: Column,
    pub x: u16,
    pub width: u16,
}

/// Between two columns.
const GAP: u16 = 1;
/// What the name takes where there is space, and each of the bars.
const NAME_MOST: u16 = 24;
const BARS_MOST: u16 = 30;

impl Column {
    /// In the order in which they stand.
    pub const ALL: [Self; 19] = [
        Self::Id,
        Self::Name,
        Self::User,
        Self::Class,
        Self::State,
        Self::Gpu,
        Self::Share,
        Self::Got,
        Self::GotBars,
        Self::Memory,
        Self::Limit,
        Self::Evicted,
        Self::MemoryBars,
        Self::InFlight,
        Self::Iteration,
        Self::Slowdown,
        Self::Launches,
        Self::Oom,
        Self::Processes,
    ];

    /// In the order in which they are given space.
    const BY_NEED: [Self; 19] = [
        Self::Name,
        Self::State,
        Self::Got,
        Self::Memory,
        Self::Share,
        Self::Limit,
        Self::GotBars,
        Self::Gpu,
        Self::Slowdown,
        Self::Iteration,
        Self::User,
        Self::Evicted,
        Self::MemoryBars,
        Self::InFlight,
        Self::Id,
        Self::Oom,
        Self::Class,
        Self::Launches,
        Self::Processes,
    ];

    pub fn title(self) -> &'static str {
        match self {
            Self::Id => "ID",
            Self::Name => "NAME",
            Self::User => "USER",
            Self::Class => "CLASS",
            Self::State => "STATE",
            Self::Gpu => "GPU",
            Self::Share => "SHARE",
            Self::Got => "GOT",
            Self::GotBars => "GOT 1m",
            Self::Memory => "MEM",
            Self::Limit => "LIMIT",
            Self::Evicted => "EVICTED",
            Self::MemoryBars => "MEM 1m",
            Self::InFlight => "FLIGHT",
            Self::Iteration => "ITER",
            Self::Slowdown => "SLOW",
            Self::Launches => "LAUNCH/S",
            Self::Oom => "OOM",
            Self::Processes => "PIDS",
        }
    }

    /// What it takes at the least.
    fn width(self) -> u16 {
        match self {
            Self::Name => 11,
            Self::User | Self::State | Self::Memory | Self::Limit | Self::Evicted => 8,
            Self::GotBars | Self::MemoryBars | Self::Iteration | Self::Launches => 8,
            Self::Class => 13,
            Self::InFlight => 6,
            Self::Share | Self::Got | Self::Slowdown | Self::Id => 5,
            Self::Processes => 4,
            Self::Gpu | Self::Oom => 3,
        }
    }

    pub fn is_number(self) -> bool {
        !matches!(
            self,
            Self::Name | Self::User | Self::Class | Self::State | Self::Gpu
        ) && !self.is_bars()
    }

    pub fn is_bars(self) -> bool {
        matches!(self, Self::GotBars | Self::MemoryBars)
    }

    /// What stands in it; nothing where it has bars.
    pub fn text(self, job: &Job) -> String {
        let status = &job.status;
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let part = |part: f64| format!("{part:.2}");
        match self {
            Self::Id => status.id.to_string(),
            Self::Name => printable(&status.name),
            Self::User => user_of(job),
            Self::Class => status.class.to_string(),
            Self::State => state_of(job).into(),
            Self::Gpu => or_dash(gpus_of(job)),
            Self::Share => or_dash(status.share_asked.map(part)),
            Self::Got => or_dash(job.share_got.map(part)),
            Self::GotBars | Self::MemoryBars => String::new(),
            Self::Memory => short_bytes(status.mem_used_bytes),
            Self::Limit => or_dash(status.mem_limit_bytes.map(short_bytes)),
            Self::Evicted if status.residence.is_none() => "-".into(),
            Self::Evicted => short_bytes(job.evicted_bytes()),
            Self::InFlight => or_dash(status.in_flight_marks.map(|marks| marks.to_string())),
            Self::Iteration => or_dash(job.iteration_ns().map(short_time)),
            Self::Slowdown => or_dash(job.slowdown().map(part)),
            Self::Launches => or_dash(job.launches_per_s.map(|rate| format!("{rate:.0}"))),
            Self::Oom => status.oom_count.to_string(),
            Self::Processes => status.processes.len().to_string(),
        }
    }

    /// Numbers by size and words by the alphabet; what is not known comes first.
    pub fn compare(self, a: &Job, b: &Job) -> Ordering {
        let number = |a: Option<f64>, b: Option<f64>| {
            let known = |value: Option<f64>| value.unwrap_or(f64::NEG_INFINITY);
            known(a).total_cmp(&known(b))
        };
        let (x, y) = (&a.status, &b.status);
        match self {
            Self::Id => x.id.cmp(&y.id),
            Self::Share => number(x.share_asked, y.share_asked),
            Self::Got | Self::GotBars => number(a.share_got, b.share_got),
            Self::Memory | Self::MemoryBars => x.mem_used_bytes.cmp(&y.mem_used_bytes),
            Self::Limit => x.mem_limit_bytes.cmp(&y.mem_limit_bytes),
            Self::Evicted => a.evicted_bytes().cmp(&b.evicted_bytes()),
            Self::InFlight => x.in_flight_marks.cmp(&y.in_flight_marks),
            Self::Iteration => a.iteration_ns().cmp(&b.iteration_ns()),
            Self::Slowdown => number(a.slowdown(), b.slowdown()),
            Self::Launches => number(a.launches_per_s, b.launches_per_s),
            Self::Oom => x.oom_count.cmp(&y.oom_count),
            Self::Processes => x.processes.len().cmp(&y.processes.len()),
            Self::Name | Self::User | Self::Class | Self::State | Self::Gpu => {
                self.text(a).cmp(&self.text(b))
            }
        }
    }
}

pub fn user_of(job: &Job) -> String {
    match job.status.user.as_str() {
        "" => job.status.uid.to_string(),
        user => printable(user),
    }
}

/// As the arbiter says; a job that is away by an operator's word is paused for that.
pub fn state_of(job: &Job) -> &'static str {
    if job.status.evicted {
        "evicted"
    } else {
        job.status.state.as_str()
    }
}

fn gpus_of(job: &Job) -> Option<String> {
    let gpus: Vec<String> = (job.status.devices.iter())
        .map(|device| device.index.to_string())
        .collect();
    (!gpus.is_empty()).then(|| gpus.join(","))
}

/// The columns that fit, each at its place: as many as possible, those that are needed most first.
/// What is left goes to the name, then to the bars.
pub fn place(width: u16) -> Vec<Placed> {
    let mut fitting: Vec<(Column, u16)> = Vec::new();
    let mut left = width;
    for column in Column::BY_NEED {
        let gap = if fitting.is_empty() { 0 } else { GAP };
        let Some(rest) = left.checked_sub(column.width() + gap) else {
            break;
        };
        left = rest;
        fitting.push((column, column.width()));
    }
    if fitting.is_empty() && width > 0 {
        fitting.push((Column::Name, width));
        left = 0;
    }
    let mut grow = |column: Column, most: u16| {
        if let Some((_, width)) = fitting.iter_mut().find(|(one, _)| *one == column) {
            let more = left.min(most.saturating_sub(*width));
            *width += more;
            left -= more;
        }
    };
    grow(Column::Name, NAME_MOST);
    // In turns, so that both are about as wide.
    for most in (0..=BARS_MOST).step_by(2) {
        grow(Column::GotBars, most);
        grow(Column::MemoryBars, most);
    }
    let mut x = 0;
    let mut placed = Vec::new();
    for column in Column::ALL {
        let Some((_, width)) = fitting.iter().find(|(one, _)| *one == column) else {
            continue;
        };
        placed.push(Placed {
            column,
            x,
            width: *width,
        });
        x += width + GAP;
    }
    placed
}

#[cfg(test)]
mod tests {
    use control::{JobDevice, JobState, Profile};

    use super::*;

    #[test]
    fn every_column_has_its_place_and_its_need() {
        for column in Column::ALL {
            assert!(Column::BY_NEED.contains(&column), "{column:?}");
            assert!(column.title().len() <= usize::from(column.width()));
        }
    }

    #[test]
    fn columns_fit_whatever_the_width() {
        for width in 0..400 {
            let placed = place(width);
            assert_eq!(placed.is_empty(), width == 0);
            let mut free = 0;
            for one in &placed {
                assert!(one.x >= free, "{width}: {placed:?}");
                assert!(one.width > 0);
                free = one.x + one.width;
            }
            assert!(free <= width, "{width}: {placed:?}");
        }
        assert_eq!(place(400).len(), Column::ALL.len());
        let at_80: Vec<Column> = place(80).iter().map(|one| one.column).collect();
        for column in [Column::Share, Column::Got, Column::Limit, Column::Slowdown] {
            assert!(at_80.contains(&column), "{at_80:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_not_zero() {
        let mut job = Job::default();
        for column in [
            Column::Got,
            Column::Share,
            Column::Limit,
            Column::InFlight,
            Column::Iteration,
            Column::Slowdown,
            Column::Launches,
            Column::Evicted,
            Column::Gpu,
        ] {
            assert_eq!(column.text(&job), "-", "{column:?}");
        }
        job.share_got = Some(0.0);
        job.status.profile = Some(Box::new(Profile {
            iteration_ns: Some(12_345_678),
            slowdown: Some(2.057),
            ..Profile::default()
        }));
        job.status.devices = vec![JobDevice::default(), JobDevice::default()];
        job.status.devices[1].index = 3;
        assert_eq!(Column::Got.text(&job), "0.00");
        assert_eq!(Column::Iteration.text(&job), "12.35ms");
        assert_eq!(Column::Slowdown.text(&job), "2.06");
        assert_eq!(Column::Gpu.text(&job), "0,3");
        job.status.state = JobState::Paused;
        assert_eq!(Column::State.text(&job), "paused");
        job.status.evicted = true;
        assert_eq!(Column::State.text(&job), "evicted");
    }

    #[test]
    fn every_column_sorts() {
        let mut less = Job::default();
        let mut more = Job::default();
        more.status.id = 10;
        less.status.id = 9;
        (less.status.name, more.status.name) = ("a".into(), "b".into());
        (less.share_got, more.share_got) = (None, Some(0.0));
        (less.status.mem_limit_bytes, more.status.mem_limit_bytes) = (Some(9), Some(10));
        for column in [Column::Id, Column::Name, Column::Got, Column::Limit] {
            assert_eq!(column.compare(&less, &more), Ordering::Less, "{column:?}");
        }
        for column in Column::ALL {
            assert_eq!(column.compare(&less, &less), Ordering::Equal, "{column:?}");
        }
    }
}
