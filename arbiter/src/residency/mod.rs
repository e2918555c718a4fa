//! Where the memory of jobs is: on their devices, or in host memory for as long as others need the room.
//!
//! `station` follows one process on one device, `keeper` one device with all its jobs, `books` the host memory of all of them,
//! `move_requests` what operators ask for. Who stays, who leaves and for how long is decided in `policy::residency`; the lane's
//! hook is `dispatch/switch.rs`.

mod books;
mod guest;
mod keeper;
mod move_requests;
mod pins;
mod station;
mod survey;

pub use books::HostBooks;
pub use guest::{Guest, Lodging};
pub use keeper::{Crowd, Keeper, News, Whereabouts};
pub use move_requests::MoveRequest;
pub use station::State;
pub(crate) use survey::sum;
