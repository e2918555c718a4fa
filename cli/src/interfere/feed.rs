//! What a cluster's hook knows of kinds of job, and what it is given of pairs.
//!
//! The hook decides by its table of pairs which jobs share a GPU. An experiment measures under
//! known conditions what the hook would else find out by trying.

use std::cell::RefCell;

use anyhow::Context as _;
use cluster::live::wire::{Fed, FedPair, Feed, KindView};

use super::matrix::Matrix;
use super::plan::{Mode, Plan};
use crate::args::Interfere;
use crate::cluster_command::{self, args::Hook};

/// Asks the hook that knows kinds, once for all of them.
pub struct Known<'a> {
    args: &'a Interfere,
    kinds: RefCell<Option<Vec<KindView>>>,
}

impl<'a> Known<'a> {
    pub fn new(args: &'a Interfere) -> Self {
        Self {
            args,
            kinds: RefCell::new(None),
        }
    }

    /// # Errors
    /// In words: no hook, or none that knows this kind.
    pub fn kind(&self, wanted: &str) -> Result<KindView, String> {
        let mut kinds = self.kinds.borrow_mut();
        let all = match &mut *kinds {
            Some(all) => all,
            none => {
                let url = self.args.cluster.as_ref().or(self.args.feed.as_ref());
                let asked = client(self.args, url.cloned())
                    .and_then(|mut client| Ok(client.ask("GET", "/v1/kinds", None::<&()>)?));
                none.insert(asked.map_err(|error| format!("{error:#}"))?)
            }
        };
        let found = all.iter().find(|one| one.kind == wanted);
        found.cloned().ok_or_else(|| {
            let known = || all.iter().map(|one| one.kind.as_str());
            match policy::names::nearest(wanted, known()) {
                Some(near) => format!("the hook knows no such kind: did you mean `{near}`?"),
                None => "the hook knows no such kind: submit a job of it once, or write a command"
                    .into(),
            }
        })
    }
}

fn client(
    args: &Interfere,
    cluster: Option<String>,
) -> anyhow::Result<cluster::live::http::client::Client> {
    cluster_command::client(&Hook {
        cluster,
        token_file: args.token_file.clone(),
        tls: args.tls.clone(),
    })
}

/// The mode whose pairs the hook is given: the plan's first one in which an arbiter decides.
pub fn mode(plan: &Plan) -> Option<Mode> {
    let mut modes = plan.modes.iter().copied();
    modes.find(|mode| mode.of_device().is_some())
}

/// Every pair of kinds that was measured with the jobs' own shares. The hook keeps one entry for a
/// pair of kinds: where several jobs are of one kind, it is given the mean of theirs.
pub fn pairs(plan: &Plan, matrix: &Matrix, mode: Mode, gpu: &str) -> Vec<FedPair> {
    let mut found: Vec<([String; 2], Vec<[f64; 2]>)> = Vec::new();
    for ([a, b], slowdowns) in matrix.pairs(plan, mode) {
        let mut kinds = [a.kind(), b.kind()];
        let mut rates = slowdowns.map(|slowdown| (1.0 / slowdown).clamp(0.0, 1.0));
        if found
            .iter()
            .any(|(known, _)| *known == [kinds[1].clone(), kinds[0].clone()])
        {
            kinds.reverse();
            rates.reverse();
        }
        match found.iter_mut().find(|(known, _)| *known == kinds) {
            Some((_, all)) => all.push(rates),
            None => found.push((kinds, vec![rates])),
        }
    }
    let pairs = found.into_iter().map(|(kinds, all)| {
        // CAST: as many as a plan has pairs.
        let mean = |of: usize| all.iter().map(|rates| rates[of]).sum::<f64>() / all.len() as f64;
        let mut rates = [mean(0), mean(1)];
        if kinds[0] == kinds[1] {
            // Which of two alike is the first is chance.
            rates = [(rates[0] + rates[1]) / 2.0; 2];
        }
        FedPair {
            gpu: gpu.to_owned(),
            gpus: 1,
            kinds,
            rates,
        }
    });
    pairs.collect()
}

/// Gives the pairs to the hook, and says what it took.
///
/// # Errors
/// No pair, no hook, or its refusal.
pub fn feed(args: &Interfere, url: &str, pairs: Vec<FedPair>) -> anyhow::Result<String> {
    if pairs.is_empty() {
        anyhow::bail!("nothing to give to the hook at {url}: no pair was measured");
    }
    let fed: Fed = client(args, Some(url.to_owned()))?
        .ask("POST", "/v1/pairs", Some(&Feed { pairs }))
        .with_context(|| {
            format!("the hook at {url} was not given the pairs (the same command tries it again)")
        })?;
    Ok(format!(
        "hook: {} pairs taken, {} in its table\n",
        fed.taken, fed.pairs
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::plan;
    use super::super::store::tests::record;
    use super::*;

    #[test]
    fn pairs_are_speeds_relative_to_solo_by_kind() {
        let text = "[experiment]\nrepeat = 1\nmodes = [\"exclusive\"]\n\
            [[job]]\nname = \"a\"\nkind = \"k a\"\ncommand = [\"x\"]\n\
            [[job]]\nname = \"b\"\ncommand = [\"y\", \"1\"]\n";
        let plan = plan::parse(text, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let records = [
            record("exclusive a #1", &[("a", 100.0)]),
            record("exclusive b #1", &[("b", 40.0)]),
            record("exclusive a+b #1", &[("a", 50.0), ("b", 41.0)]),
        ];
        let matrix = Matrix::of(&plan, &records);
        let mode = mode(&plan).unwrap();
        let pairs = pairs(&plan, &matrix, mode, "T4");
        assert_eq!(
            pairs.len(),
            1,
            "what was not measured is not made up: {pairs:?}"
        );
        assert_eq!(pairs[0].kinds, ["k a", "y 1"]);
        assert!((pairs[0].rates[0] - 0.5).abs() < 1e-9);
        assert_eq!(pairs[0].rates[1], 1.0, "nobody is faster than solo");
    }
    #[test]
    fn jobs_of_one_kind_are_one_pair_with_the_mean() {
        let text = "[experiment]\nrepeat = 1\nmodes = [\"exclusive\"]\n\
            [[job]]\nname = \"a\"\nkind = \"k\"\ncommand = [\"x\"]\n\
            [[job]]\nname = \"b\"\nkind = \"l\"\ncommand = [\"x\"]\n\
            [[job]]\nname = \"c\"\nkind = \"k\"\ncommand = [\"y\"]\n";
        let plan = plan::parse(text, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let records = [
            record("exclusive a #1", &[("a", 100.0)]),
            record("exclusive b #1", &[("b", 100.0)]),
            record("exclusive c #1", &[("c", 100.0)]),
            record("exclusive a+b #1", &[("a", 50.0), ("b", 80.0)]),
            // Of `l` and `k` again, the other way round.
            record("exclusive b+c #1", &[("b", 60.0), ("c", 70.0)]),
            record("exclusive a+c #1", &[("a", 40.0), ("c", 60.0)]),
        ];
        let matrix = Matrix::of(&plan, &records);
        let pairs = pairs(&plan, &matrix, Mode::Exclusive, "T4");
        let close = |one: [f64; 2], other: [f64; 2]| {
            one.iter()
                .zip(other)
                .all(|(one, other)| (one - other).abs() < 1e-9)
        };
        let [mixed, alike] = &pairs[..] else {
            panic!("one for each pair of kinds: {pairs:?}");
        };
        assert_eq!(mixed.kinds, ["k", "l"]);
        assert!(close(mixed.rates, [0.6, 0.7]), "{mixed:?}");
        assert_eq!(alike.kinds, ["k", "k"]);
        assert!(close(alike.rates, [0.5, 0.5]), "{alike:?}");
    }
}
