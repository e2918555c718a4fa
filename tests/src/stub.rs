//! The recording driver: a `libcuda.so.1` in C, generated from the one table, in which every
//! function writes down what it was called with. It computes nothing, so whatever a program gets
//! past the preload library is seen here as it came.

use std::fmt::Write;
use std::path::PathBuf;

use shim_ffi::{SYMBOLS, Variant};

use crate::programs::{self, Kind};

/// The recording driver, built.
///
/// # Panics
/// When the compiler refuses it.
pub fn driver() -> PathBuf {
    let template = include_str!("../stub/driver.c");
    programs::compile("recording_driver", &source(template), "", Kind::Library)
}

/// The template with the table's rows in place of its marker.
fn source(template: &str) -> String {
    let mut rows = String::new();
    for (index, symbol) in SYMBOLS.iter().enumerate() {
        let entry = symbol.entry();
        writeln!(
            rows,
            "    ROW({index}, {}, \"{}\", {}, {}) \\",
            entry.name(),
            entry.base_name,
            entry.introduced,
            u8::from(entry.variant != Variant::Legacy)
        )
        .expect("written to memory");
    }
    template.replace("/* rows */", &rows)
}
