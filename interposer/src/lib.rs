//! `libsublet.so`: the preload library. It runs inside strangers' processes, so it does almost
//! nothing.
//!
//! Loading it runs no code of ours. It bears the driver's SONAME and exports every driver symbol
//! ([`entry`], expanded from the one table): most are one jump to the real driver
//! ([`driver::real`]), the others meter memory ([`memory`], [`metering`]), wait for a grant
//! ([`gate`]), or note what happened. Answers of `cuGetProcAddress` and `dlsym` are swapped for our
//! own by address ([`entry::proc_address`], [`entry::dlsym`]), and the driver's own symbol table is
//! made to lead to us ([`driver::net`]). The first successful `cuInit` attaches to the arbiter
//! ([`attachment::client`]).
//!
//! Where the program has loaded NVML, what that says of memory and processes is made to agree
//! ([`nvml`]).
//!
//! What it must not do, ever: print (but for one line where a process of a job cannot be governed:
//! [`attachment::refusal`]), exit, hang, install a handler, change errno, the current context or
//! the environment, hold a lock across a driver call, call the driver on a capturing stream. Where
//! memory is to be moved ([`residency`]) there is a thread of ours, and a quiesce gate that calls
//! of the program wait at; nowhere else.
//!
//! The modules below stand on floors, from the lowest up: [`ground`], [`driver`], [`attachment`],
//! [`nvml`], [`gate`], [`recording`], [`metering`], [`residency`], [`memory`], [`lifecycle`],
//! [`entry`]. None imports one of a higher floor.

#![allow(non_snake_case, reason = "hooks bear the driver's names")]
// The crate's own tests are a program like any other. Built for them nothing is exported: it would
// stand in for the C library's functions and the driver's.
#![cfg_attr(
    test,
    allow(
        dead_code,
        reason = "what only the exports use, or other processes call"
    )
)]

mod attachment;
mod driver;
mod entry;
mod gate;
mod ground;
mod lifecycle;
mod memory;
mod metering;
mod nvml;
mod recording;
mod residency;
