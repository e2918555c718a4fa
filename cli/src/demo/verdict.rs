//! What came of the demonstration, as a table and as what was promised and not kept.

use control::short_bytes;
use serde::Serialize;

use crate::table::{Align, Table};

/// How far a share may be off. A host that other programs keep busy costs a point or two in runs as
/// short as these.
const MAX_SHARE_ERROR: f64 = 0.05;
/// What an example program ends with that got no memory.
const OUT_OF_MEMORY: i32 = 2;

/// A job, at its end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    /// The share that it asked for; `None`: what others leave.
    pub share: Option<f64>,
    /// Its part of the device time that both trainers got; `None`: not measured.
    pub got: Option<f64>,
    pub limit_bytes: u64,
    pub peak_bytes: Option<u64>,
    pub steps_per_s: Option<f64>,
    pub loss: Option<f64>,
    /// Its exit code, or 128 and its signal.
    pub exit: i32,
    /// The end of what it wrote to stderr.
    pub said: String,
}

pub fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        ("JOB", Align::Left),
        ("SHARE", Align::Right),
        ("GOT", Align::Right),
        ("LIMIT", Align::Right),
        ("PEAK", Align::Right),
        ("STEPS/S", Align::Right),
        ("LOSS", Align::Right),
        ("EXIT", Align::Right),
    ]);
    let shown = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
    };
    for row in rows {
        table.row(vec![
            row.name.clone(),
            shown(row.share, 2),
            shown(row.got, 3),
            short_bytes(row.limit_bytes),
            row.peak_bytes.map_or_else(|| "-".into(), short_bytes),
            shown(row.steps_per_s, 0),
            shown(row.loss, 6),
            row.exit.to_string(),
        ]);
    }
    table.render()
}

/// What was promised and not kept, a sentence each.
pub fn broken(rows: &[Row]) -> Vec<String> {
    let mut broken = Vec::new();
    for row in rows {
        let name = &row.name;
        match (row.share, row.got) {
            (Some(share), Some(got)) if (got - share).abs() > MAX_SHARE_ERROR => broken.push(
                format!("`{name}` asked for a share of {share:.2} and got {got:.3} (is this host busy with other programs?)"),
            ),
            (Some(share), None) => broken.push(format!(
                "`{name}` asked for a share of {share:.2} and got no device time"
            )),
            _ => {}
        }
        if let Some(peak) = row.peak_bytes
            && peak > row.limit_bytes
        {
            broken.push(format!(
                "`{name}` held {} with a limit of {}",
                short_bytes(peak),
                short_bytes(row.limit_bytes)
            ));
        }
        let (meant, what) = match row.share {
            Some(_) => (0, "was to end well"),
            None => (OUT_OF_MEMORY, "was to be refused memory"),
        };
        if row.exit != meant {
            broken.push(format!(
                "`{name}` {what} (exit code {meant}) and ended with {}: {}",
                row.exit,
                row.said.trim()
            ));
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> [Row; 2] {
        let trainer = Row {
            name: "steady".into(),
            share: Some(0.75),
            got: Some(0.761),
            limit_bytes: 512 << 20,
            peak_bytes: Some(400 << 20),
            steps_per_s: Some(301.4),
            loss: Some(0.081_235),
            exit: 0,
            said: String::new(),
        };
        let greedy = Row {
            name: "greedy".into(),
            share: None,
            got: None,
            peak_bytes: None,
            steps_per_s: None,
            loss: None,
            exit: 2,
            said: "train_mlp: out of device memory\n".into(),
            ..trainer.clone()
        };
        [trainer, greedy]
    }

    #[test]
    fn what_was_kept_is_no_complaint() {
        assert_eq!(broken(&rows()), Vec::<String>::new());
        let text = table(&rows());
        assert!(text.contains("steady   0.75  0.761"), "{text}");
        assert!(text.contains("greedy      -      -"), "{text}");
    }

    #[test]
    fn each_promise_that_is_broken_is_named_with_its_figures() {
        let [mut steady, mut greedy] = rows();
        steady.got = Some(0.5);
        steady.peak_bytes = Some(600 << 20);
        greedy.exit = 0;
        let broken = broken(&[steady.clone(), greedy]);
        assert_eq!(broken.len(), 3, "{broken:?}");
        assert!(
            broken[0].contains("share of 0.75 and got 0.500"),
            "{broken:?}"
        );
        assert!(
            broken[1].contains("held 600MiB with a limit of 512MiB"),
            "{broken:?}"
        );
        assert!(
            broken[2].contains("(exit code 2) and ended with 0"),
            "{broken:?}"
        );
        steady.got = None;
        steady.peak_bytes = None;
        steady.exit = 139;
        steady.said = "a fault\n".into();
        let broken = super::broken(&[steady]);
        assert!(broken[0].contains("got no device time"), "{broken:?}");
        assert!(broken[1].ends_with("ended with 139: a fault"), "{broken:?}");
    }
}
