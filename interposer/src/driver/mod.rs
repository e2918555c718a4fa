//! The real driver and the dynamic linker: where the driver's functions are, and how calls come to
//! us instead.

pub(crate) mod addresses;
pub(crate) mod audit;
pub(crate) mod elf;
pub(crate) mod injection;
pub(crate) mod loader;
pub(crate) mod net;
#[cfg(not(test))]
mod old_libc;
pub(crate) mod own;
pub(crate) mod real;
pub(crate) mod spawn;
pub(crate) mod trace;
pub(crate) mod unwind;
