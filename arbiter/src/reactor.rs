//! Waiting: one epoll set, one timer with nanoseconds, and the closed list of what can happen.
//!
//! Knows descriptors and numbers only; what an event means is decided in `serve`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

/// Where something happened. The numbers are never used twice, so an event that outlives its
/// subject finds nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The daemon is asked to end.
    Stop,
    /// A client connects.
    ChannelAccept,
    /// The daemon is asked to read its quota file again.
    Reload,
    /// The device watcher has news.
    Devices,
    /// A state was written.
    Saved,
    /// Login names were looked up.
    Names,
    /// Containers' names were looked up.
    ContainerNames,
    /// The quota files were read, or may have changed.
    Rules,
    /// The census has an answer.
    Census,
    /// The directory was looked at.
    Premises,
    /// Devices were claimed.
    Claims,
    /// Operators have asked.
    Desk,
    /// A connected client says hello, or hangs up.
    Greeting(u64),
    /// A client wants something, or its socket was closed by the process that held it.
    Doorbell(u64),
    /// A client's process has ended.
    ClientEnded(u64),
    /// The process that registered a job has ended.
    JobEnded(u64),
}

/// The events of a descriptor that are reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// It can be read.
    Read,
    /// It has something new to read, reported once each time, or the other side is gone.
    Bell,
}

/// Events taken from the kernel at a time.
const BATCH: usize = 64;
/// Key of the timer, which is no event of its own: a passed deadline is found by looking at the
/// clock.
const TIMER: u64 = 0;

/// The set of descriptors waited on.
pub struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    armed_ns: Option<u64>,
    /// What a rest ends with, and when.
    alarm: OwnedFd,
    alarm_ns: u64,
    ready: Vec<epoll::Event>,
}

impl Poller {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let alarm = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        Ok(Self {
            epoll,
            timer,
            armed_ns: None,
            alarm,
            alarm_ns: 0,
            ready: Vec::with_capacity(BATCH),
        })
    }

    /// Waits on `fd` from now on. It has to be [removed](Self::remove) before it is closed where
    /// another process holds the same open file: epoll watches open files, not numbers.
    pub fn add(&self, fd: impl AsFd, event: Event, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(event.key()),
            interest.flags(),
        )?)
    }

    /// Waits on `fd` no longer.
    pub fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events, until `deadline_ns` of the monotonic clock at most, and puts them into
    /// `events`.
    pub fn wait(&mut self, deadline_ns: Option<u64>, events: &mut Vec<Event>) -> io::Result<()> {
        events.clear();
        self.arm(deadline_ns)?;
        self.ready.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.ready), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        for ready in &self.ready {
            let key = ready.data.u64();
            if key == TIMER {
                let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                self.armed_ns = None;
            } else {
                events.extend(Event::from_key(key));
            }
        }
        Ok(())
    }

    /// Sets the end of a [rest](Self::rest) beforehand, at a time at which other timers are due
    /// sooner: then it costs nothing but the call. To set the next timer that is due is 15 to 20 us
    /// on a virtual machine, for it is the hypervisor that is asked.
    pub fn set_alarm(&mut self, at_ns: u64) -> io::Result<()> {
        if self.alarm_ns != at_ns {
            set(&self.alarm, Some(at_ns))?;
            self.alarm_ns = at_ns;
        }
        Ok(())
    }

    /// Sleeps until `until_ns` of the monotonic clock, whatever happens, or until an alarm that was
    /// set to about that time.
    pub fn rest(&mut self, now_ns: u64, until_ns: u64) {
        if self.alarm_ns > now_ns && self.alarm_ns <= until_ns {
            let mut alarm = [PollFd::new(&self.alarm, PollFlags::IN)];
            // A signal ends it early, which does no harm. TIMEOUT: it goes off at `until_ns` at the
            // latest.
            let _ = rustix::event::poll(&mut alarm, None);
        } else {
            crate::clock::sleep_until(until_ns);
        }
    }

    fn arm(&mut self, deadline_ns: Option<u64>) -> io::Result<()> {
        if self.armed_ns != deadline_ns {
            set(&self.timer, deadline_ns)?;
            self.armed_ns = deadline_ns;
        }
        Ok(())
    }
}

/// Sets a timer to `deadline_ns` of the monotonic clock; `None`: to no time.
fn set(timer: &OwnedFd, deadline_ns: Option<u64>) -> io::Result<()> {
    // Zero disarms, so a deadline in the past is set one nanosecond after the clock's zero.
    let at_ns = deadline_ns.map_or(0, |ns| crate::clock::of_the_host(ns).max(1));
    let value = Timespec {
        // CAST: 2^63 ns are 292 years.
        tv_sec: (at_ns / 1_000_000_000) as i64,
        tv_nsec: (at_ns % 1_000_000_000) as i64,
    };
    let never = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let setting = Itimerspec {
        it_interval: never,
        it_value: value,
    };
    rustix::time::timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &setting)?;
    Ok(())
}

/// Makes the calling thread one that runs soon after it wakes up.
///
/// Its timers are as exact as the hardware allows: a slice ends when it ends. And it asks the
/// scheduler for turns of 0.1 ms, the shortest there are: among threads of equal weight the one
/// with the earliest deadline goes first, and a thread with a shorter turn that wakes up takes the
/// core from one with a longer one (Linux 6.12; see sched(7) and sched_setattr(2)). It gets no more
/// time for it, only sooner. Older kernels take no notice.
pub fn be_prompt() {
    use nix::libc;
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    let mut attributes = libc::sched_attr {
        // CAST: 48 bytes.
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: a valid pointer to a structure of the size that is given; 0 is the calling thread.
    let got = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            0,
            &raw mut attributes,
            attributes.size,
            0,
        )
    };
    // A class that somebody has chosen for the daemon is left alone.
    // CAST: the constant is 0.
    if got != 0 || attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.sched_runtime = 100_000;
    // SAFETY: as above; the structure is the thread's own, but for the length of a turn.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

impl Interest {
    fn flags(self) -> EventFlags {
        match self {
            Self::Read => EventFlags::IN | EventFlags::RDHUP,
            Self::Bell => EventFlags::IN | EventFlags::RDHUP | EventFlags::ET,
        }
    }
}

impl Event {
    /// Kind in the upper byte, number below; numbers count from 1 and stay far below 2^56.
    fn key(self) -> u64 {
        let (kind, id) = match self {
            Self::Stop => (1, 0),
            Self::ChannelAccept => (2, 0),
            Self::Devices => (4, 0),
            Self::Greeting(id) => (5, id),
            Self::Doorbell(id) => (6, id),
            Self::ClientEnded(id) => (7, id),
            Self::JobEnded(id) => (9, id),
            Self::Reload => (11, 0),
            Self::Saved => (12, 0),
            Self::Census => (13, 0),
            Self::Names => (14, 0),
            Self::Rules => (15, 0),
            Self::Desk => (16, 0),
            Self::ContainerNames => (17, 0),
            Self::Premises => (18, 0),
            Self::Claims => (19, 0),
        };
        (kind << 56) | (id & ((1 << 56) - 1))
    }

    fn from_key(key: u64) -> Option<Self> {
        let id = key & ((1 << 56) - 1);
        Some(match key >> 56 {
            1 => Self::Stop,
            2 => Self::ChannelAccept,
            4 => Self::Devices,
            5 => Self::Greeting(id),
            6 => Self::Doorbell(id),
            7 => Self::ClientEnded(id),
            9 => Self::JobEnded(id),
            11 => Self::Reload,
            12 => Self::Saved,
            13 => Self::Census,
            14 => Self::Names,
            15 => Self::Rules,
            16 => Self::Desk,
            17 => Self::ContainerNames,
            18 => Self::Premises,
            19 => Self::Claims,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_the_kernel() {
        for event in [
            Event::Stop,
            Event::ChannelAccept,
            Event::Devices,
            Event::Reload,
            Event::Saved,
            Event::Names,
            Event::ContainerNames,
            Event::Premises,
            Event::Claims,
            Event::Rules,
            Event::Census,
            Event::Desk,
            Event::Greeting(1),
            Event::Doorbell(2),
            Event::ClientEnded(3),
            Event::JobEnded((1 << 56) - 1),
        ] {
            assert_eq!(Event::from_key(event.key()), Some(event));
        }
        assert_eq!(Event::from_key(TIMER), None);
    }

    #[test]
    fn a_deadline_ends_the_wait_and_not_before() {
        let mut poller = Poller::new().expect("epoll");
        let mut events = vec![Event::Stop];
        for ahead_ns in [0, 3_000_000] {
            let deadline = crate::clock::mono_ns() + ahead_ns;
            poller.wait(Some(deadline), &mut events).expect("wait");
            assert!(crate::clock::mono_ns() >= deadline);
            assert!(events.is_empty());
        }
        poller.wait(Some(0), &mut events).expect("the past");
    }

    #[test]
    fn a_rest_ends_by_itself_with_an_alarm_and_without_one() {
        let mut poller = Poller::new().expect("epoll");
        for alarm in [None, Some(1_000_000), Some(600_000_000_000)] {
            let now_ns = crate::clock::mono_ns();
            if let Some(ahead_ns) = alarm {
                poller.set_alarm(now_ns + ahead_ns).expect("alarm");
            }
            poller.rest(now_ns, now_ns + 2_000_000);
            let rested_ns = crate::clock::mono_ns() - now_ns;
            let least_ns = alarm.map_or(2_000_000, |ns: u64| ns.min(2_000_000));
            assert!(
                (least_ns..60_000_000_000).contains(&rested_ns),
                "{rested_ns}"
            );
        }
    }
}
