//! Where the memory of jobs is: on their devices, or in host memory while others need the space.
//!
//! `client_state` follows one process on one device, `manager` one device with all its jobs,
//! `books` and `capacity` the memory that there is for all of them, `move_queue` what operators ask
//! for. `policy::residency` decides who stays, who leaves and for how long; the scheduler's hook is
//! `dispatch/switch.rs`. What the arbiter does with all of it is in `residency_survey` and
//! `residency_moves`.

mod books;
mod capacity;
mod client_state;
mod job_view;
mod manager;
mod move_queue;
mod pins;

pub use books::HostBooks;
pub use capacity::Capacity;
pub use client_state::State;
pub use job_view::{JobView, ResidencyTerms};
pub use manager::{Crowd, News, ResidencyManager, ResidencyStatus};
pub use move_queue::{MAX_MOVE_REQUESTS, MoveQueue, MoveRequest};
