//! The host programs, one test each: what they print and how they end is the same with and without us.

mod children;
mod doctor;
mod library;
mod linkage;
mod process;
mod python;
mod threads;
