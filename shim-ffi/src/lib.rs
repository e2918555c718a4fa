//! C ABI of the CUDA driver: transparent handles, integer-newtype statuses and enumerations, the
//! structures that entry points take, and *the one table* of entry points ([`driver_table`]), from
//! which everything else is expanded.
//!
//! This crate refuses to know what a hook does or how a driver works: it holds names, shapes and
//! classes only.

#![no_std]
#![allow(
    non_upper_case_globals,
    reason = "names of the driver API are kept as they are"
)]
#![allow(
    non_camel_case_types,
    reason = "names of the driver API are kept as they are"
)]

pub mod counts;
mod entry;
mod enums;
mod handles;
pub mod nvml;
pub mod recording;
pub mod resolve;
mod status;
mod structs;
mod table;

pub use entry::{
    Action, Blocks, COUNT, Capture, Context, ENTRIES, Entry, Operands, Records, Role, SYMBOLS,
    Shape, Shares, Space, StreamAt, Symbol, Tracks, Traits, Variant, Waits, Work,
};
pub use enums::*;
pub use handles::*;
pub use status::CUresult;
pub use structs::*;

// The signatures that the table spells out name these without a path; consumers `use shim_ffi::*`.
pub use core::ffi::{c_char, c_void};
