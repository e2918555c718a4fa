//! Which of the driver's symbols are in the table, in the preload library and in the simulated
//! driver.

use std::collections::{BTreeMap, BTreeSet};

use shim_ffi::{Action, ENTRIES};

use crate::elf::Library;
use crate::hooks_doc::ACTIONS;

/// The counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// Symbols in the classification.
    pub csv_symbols: usize,
    /// Symbols in the table.
    pub table_symbols: usize,
    /// Symbols by what the preload library does with them, by the action's name.
    pub by_action: BTreeMap<&'static str, usize>,
    /// Symbols that are more than a jump.
    pub hooked: usize,
    /// Symbols that the simulated driver implements.
    pub simulated: usize,
    /// Symbols that it answers with `CUDA_ERROR_NOT_SUPPORTED`.
    pub not_supported: usize,
    /// What is missing somewhere, in words.
    pub unaccounted: Vec<String>,
}

/// Symbol and action of every row of the classification that the table was written from.
pub fn classification() -> BTreeMap<String, String> {
    let text = include_str!("../../shim-ffi/data/driver.csv");
    let mut lines = text.lines();
    let header = fields(lines.next().unwrap_or_default());
    let column = |name: &str| header.iter().position(|field| field == name);
    let (Some(symbol), Some(action)) = (column("symbol"), column("interposer_action")) else {
        return BTreeMap::new();
    };
    lines
        .map(fields)
        .filter_map(|row| Some((row.get(symbol)?.clone(), row.get(action)?.clone())))
        .collect()
}

/// Splits a line at commas outside double quotes.
fn fields(line: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut quoted = false;
    for ch in line.chars() {
        match ch {
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(String::new()),
            ch => {
                if let Some(field) = out.last_mut() {
                    field.push(ch);
                }
            }
        }
    }
    out
}

/// Compares the classification with the table and with what the two libraries export.
pub fn count(preload: &Library, driver: &Library) -> Coverage {
    let csv = classification();
    let mut unaccounted = Vec::new();
    let table: BTreeSet<&str> = ENTRIES.iter().map(|entry| entry.name()).collect();
    for symbol in csv.keys() {
        if !table.contains(symbol.as_str()) {
            unaccounted.push(format!("{symbol} is not in the table"));
        }
    }
    let name_of = |action: Action| {
        ACTIONS
            .iter()
            .find(|(other, _, _)| *other == action)
            .map_or("", |(_, name, _)| *name)
    };
    for entry in ENTRIES {
        let name = entry.name();
        match csv.get(name) {
            None => unaccounted.push(format!("{name} is not in the classification")),
            Some(action) if action != name_of(entry.action) => unaccounted.push(format!(
                "{name} is to be {action} and is {}",
                name_of(entry.action)
            )),
            Some(_) => {}
        }
        for (library, what) in [
            (preload, "the preload library"),
            (driver, "the simulated driver"),
        ] {
            if !library.exports.contains(name) {
                unaccounted.push(format!("{what} does not export {name}"));
            }
        }
    }
    let simulated = ENTRIES.iter().filter(|entry| entry.simulated).count();
    Coverage {
        csv_symbols: csv.len(),
        table_symbols: ENTRIES.len(),
        by_action: ACTIONS
            .iter()
            .map(|(action, name, _)| {
                let rows = ENTRIES.iter().filter(|entry| entry.action == *action);
                (*name, rows.count())
            })
            .collect(),
        hooked: ENTRIES
            .iter()
            .filter(|entry| entry.action != Action::PassThrough)
            .count(),
        simulated,
        not_supported: ENTRIES.len() - simulated,
        unaccounted,
    }
}
