//! The processes of a tenant on a device: their gates, and the in-flight bound that they were
//! given.
//!
//! Invariants: the gates of a tenant move together; only co-ranks (`co_ranks`) are let in alone.
//! What the tenant has submitted never falls: what a process had is kept when it ends.

use std::cell::RefCell;
use std::rc::Rc;

use channel::arbiter::ClientPages;
use channel::{Grant, Window};

use crate::peer::{self, Activity};
use crate::tally::OnDevice;

/// The clients of a tenant that can be granted the device.
#[derive(Debug)]
pub struct Clients {
    of: Vec<(u64, Rc<ClientPages>)>,
    window: Window,
    /// Their gates are closed until a time at which they open by themselves.
    shut: bool,
    launches: RefCell<Launches>,
}

/// What was submitted since the tenant came.
#[derive(Debug, Default)]
struct Launches {
    /// What was counted of each client, in their order.
    of: Vec<OnDevice>,
    total: u64,
}

impl Launches {
    fn count(&mut self, clients: &[(u64, Rc<ClientPages>)], device: usize) -> u64 {
        for (counted, (_, pages)) in self.of.iter_mut().zip(clients) {
            let more = counted.count(pages, device);
            self.total = self.total.saturating_add(more);
        }
        self.total
    }
}

impl Clients {
    /// None yet; those that come are given this in-flight bound.
    pub fn new(window: Window) -> Self {
        Self {
            of: Vec::new(),
            window,
            shut: false,
            launches: RefCell::default(),
        }
    }

    /// All of them, by number.
    pub fn all(&self) -> &[(u64, Rc<ClientPages>)] {
        &self.of
    }

    /// One comes.
    pub fn add(&mut self, client: u64, pages: Rc<ClientPages>) {
        self.launches.get_mut().of.push(OnDevice::from(&pages));
        self.of.push((client, pages));
    }

    /// One is gone; what it has submitted stays. False where it was none of these.
    pub fn remove(&mut self, client: u64, device: usize) -> bool {
        let Some(at) = self.of.iter().position(|(id, _)| *id == client) else {
            return false;
        };
        let launches = self.launches.get_mut();
        launches.count(&self.of, device);
        launches.of.remove(at);
        self.of.remove(at);
        true
    }

    /// Opens their gates. True where threads were woken.
    pub fn open(&mut self, device: usize, grant: &Grant) -> bool {
        let mut woken = false;
        for (_, pages) in &self.of {
            woken |= pages.arbiter.open(device, grant) > 0;
        }
        self.window = grant.window;
        self.shut = false;
        woken
    }

    /// Closes their gates until a time at which they open by themselves.
    pub fn shut(&mut self, device: usize, until_ns: u64) {
        for (_, pages) in &self.of {
            pages.arbiter.shut(device, until_ns);
        }
        self.shut = true;
    }

    /// Whether they were closed so, and not opened or closed otherwise since.
    pub fn are_shut(&self) -> bool {
        self.shut
    }

    /// Closes their gates.
    pub fn close(&mut self, device: usize) {
        self.shut = false;
        for (_, pages) in &self.of {
            pages.arbiter.close(device);
        }
    }

    /// Gives them an in-flight bound, where it is another one.
    pub fn set_window(&mut self, device: usize, window: Window) {
        if window == self.window {
            return;
        }
        self.window = window;
        for (_, pages) in &self.of {
            pages.arbiter.set_window(device, window);
        }
    }

    /// The in-flight bound that they were given, however little is left of a slice.
    pub fn window_us(&self) -> u32 {
        self.window.us
    }

    /// Whether one of them waits at its gate.
    pub fn wait(&self, device: usize) -> bool {
        self.of.iter().any(|(_, pages)| peer::waits(pages, device))
    }

    /// What they claim, taken together.
    pub fn sample(&self, device: usize) -> Activity {
        let claimed = self.of.iter();
        let claimed = claimed.map(|(_, pages)| peer::activity(pages, device));
        Activity {
            launches: self.launches.borrow_mut().count(&self.of, device),
            ..claimed.fold(Activity::default(), Activity::and)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_submitted_never_falls_whatever_processes_threads_and_liars_do() {
        let pages: Vec<Rc<ClientPages>> = (0..3)
            .map(|_| Rc::new(ClientPages::create().expect("pages")))
            .collect();
        let launch = |at: usize, thread: usize, times: u64| {
            let thread = pages[at].client.thread(thread);
            (0..times).for_each(|_| thread.count_launch());
        };
        launch(0, 0, 50);
        let mut both = [0, 1].map(|_| Clients::new(Window::always(0)));
        for clients in &mut both {
            (0..3).for_each(|at| clients.add(at as u64, Rc::clone(&pages[at])));
        }
        let counted =
            |both: &[Clients; 2]| [0, 1].map(|device| both[device].sample(device).launches);
        assert_eq!(
            counted(&both),
            [0, 0],
            "what was before it came does not count"
        );
        launch(0, 0, 7);
        launch(1, 0, 100);
        assert_eq!(counted(&both), [107, 0]);
        // A thread goes to another device, and back.
        pages[1].client.thread(0).set_device(1);
        launch(1, 0, 5);
        assert_eq!(counted(&both), [107, 5]);
        pages[1].client.thread(0).set_device(0);
        launch(1, 0, 3);
        assert_eq!(counted(&both), [110, 5]);
        // A process ends after it has submitted more.
        launch(1, 0, 10);
        for (device, clients) in both.iter_mut().enumerate() {
            assert!(clients.remove(1, device));
        }
        assert_eq!(counted(&both), [120, 5]);
        launch(2, 3, 4);
        assert_eq!(counted(&both), [124, 5]);
    }

    #[test]
    fn all_gates_move_together_and_one_that_is_gone_is_left_alone() {
        let pages: Vec<Rc<ClientPages>> = (0..2)
            .map(|_| Rc::new(ClientPages::create().expect("pages")))
            .collect();
        let mut clients = Clients::new(Window::always(500));
        for (id, pages) in (7..).zip(&pages) {
            clients.add(id, Rc::clone(pages));
        }
        let are_open = || [0, 1].map(|at: usize| pages[at].arbiter.is_open(0));
        let windows =
            || [0, 1].map(|at: usize| pages[at].arbiter.device(0).map(|it| it.window_us()));
        let grant = Grant {
            number: 1,
            quantum_us: 2000,
            deadline_mono_ns: 0,
            window: Window::always(3000),
        };
        assert!(!clients.open(0, &grant), "nobody slept");
        assert_eq!(are_open(), [true; 2]);
        assert_eq!((clients.window_us(), windows()), (3000, [Some(3000); 2]));
        assert!(clients.remove(7, 0) && !clients.remove(7, 0));
        clients.close(0);
        assert_eq!(are_open(), [true, false]);
        clients.set_window(0, Window::always(700));
        assert_eq!(windows(), [Some(3000), Some(700)]);
        let wider = Window {
            us: 700,
            most_us: 9000,
        };
        clients.set_window(0, wider);
        let device = pages[1].arbiter.device(0).expect("device");
        assert_eq!((clients.window_us(), device.window()), (700, wider));
        pages[0].client.want(0).expect("device").begin_waiting();
        assert!(!clients.wait(0) && !clients.sample(0).waits);
        pages[1].client.want(0).expect("device").begin_waiting();
        assert!(clients.wait(0) && clients.sample(0).waits);
    }
}
