//! The host programs, one test each: what they print and how they end is the same with and without
//! us.

mod children;
mod doctor;
mod entitled;
mod library;
mod linkage;
mod lookups;
mod memory;
mod process;
mod python;
mod terminal;
mod threads;

testbed::starts_clean!();
