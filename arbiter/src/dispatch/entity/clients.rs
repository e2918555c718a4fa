//! The processes of a tenant on a device: their gates, and the in-flight bound that they were
//! given.
//!
//! Invariant: the gates of a tenant move together; only co-ranks (`co_ranks`) are let in alone.

use std::rc::Rc;

use channel::arbiter::ClientPages;
use channel::{Grant, Window};

use crate::peer::{self, Activity};

/// The clients of a tenant that can be granted the device.
#[derive(Debug)]
pub struct Clients {
    of: Vec<(u64, Rc<ClientPages>)>,
    window: Window,
}

impl Clients {
    /// None yet; those that come are given this in-flight bound.
    pub fn new(window: Window) -> Self {
        Self {
            of: Vec::new(),
            window,
        }
    }

    /// All of them, by number.
    pub fn all(&self) -> &[(u64, Rc<ClientPages>)] {
        &self.of
    }

    /// One comes.
    pub fn add(&mut self, client: u64, pages: Rc<ClientPages>) {
        self.of.push((client, pages));
    }

    /// One is gone. False where it was none of these.
    pub fn remove(&mut self, client: u64) -> bool {
        let before = self.of.len();
        self.of.retain(|(id, _)| *id != client);
        self.of.len() != before
    }

    /// Opens their gates. True where threads were woken.
    pub fn open(&mut self, device: usize, grant: &Grant) -> bool {
        let mut woken = false;
        for (_, pages) in &self.of {
            woken |= pages.arbiter.open(device, grant) > 0;
        }
        self.window = grant.window;
        woken
    }

    /// Closes their gates.
    pub fn close(&self, device: usize) {
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
        self.of
            .iter()
            .map(|(_, pages)| peer::activity(pages, device))
            .fold(Activity::default(), Activity::and)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(clients.remove(7) && !clients.remove(7));
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
