//! HiveD (OSDI 2020) with cells of a quarter GPU: does a tenant wait longer because others are
//! there?
//!
//! *Requests.* Alibaba's pods (openb, 2023): of 7,064 with a GPU, 6,989 ask for one or a part of
//! one, here rounded up to quarters. The trace names no tenants: pods are dealt to four in turn,
//! each of which owns a quarter of nine servers of 8 GPUs, the fewest that hold the 67 GPUs of the
//! busiest moment, and of five, a little less than the busiest week asks for. Pods of class BE are
//! opportunistic. Compared are HiveD's cells, four private clusters, and a quota that counts
//! quarters of GPUs and does not say where they are.

use std::path::Path;

use cluster::cells::{Happened, Reservations, Sharing, asks, play};
use policy::cluster::admission::cells::equal_reservations;

use cluster::trace::Options;

use super::Limit::{AtMost, Reported};
use super::{System, load, mean, row};

const TENANTS: usize = 4;
const NODES: usize = 9;
const FEW_NODES: usize = 5;
/// 8 GPUs of four quarters.
const NODE_LEVEL: usize = 5;

pub const SYSTEM: System = System {
    name: "hived",
    rows: &[
        row(
            "hived_later_than_private",
            "requests",
            AtMost(0.0),
            "none: sharing safety",
        ),
        row("hived_guaranteed", "requests", Reported, "-"),
        row("hived_guaranteed_below_a_gpu", "requests", Reported, "-"),
        row(
            "hived_quota_later_than_private",
            "requests",
            Reported,
            "some, in three schedulers",
        ),
        row(
            "hived_quota_5_servers_later_than_private",
            "requests",
            Reported,
            "some, in three schedulers",
        ),
        row(
            "hived_quota_5_servers_most_extra_wait_min",
            "min",
            Reported,
            "up to 1,000 min of extra queueing",
        ),
        row("hived_wait_mean_s", "s", Reported, "-"),
        row("hived_quota_wait_mean_s", "s", Reported, "-"),
        row("hived_opportunistic_wait_mean_s", "s", Reported, "-"),
        row(
            "hived_private_opportunistic_wait_mean_s",
            "s",
            Reported,
            "-",
        ),
        row("hived_displaced", "times", Reported, "-"),
    ],
    quick: false,
    run: figures,
};

fn figures(data: &Path) -> Vec<f64> {
    let (trace, _) = load(data, "openb/pods.csv", "72", Options::default());
    let asks = asks(&trace, TENANTS);
    let shared = |nodes: usize| {
        let reservations = Reservations {
            nodes,
            node_level: NODE_LEVEL,
            reserved: equal_reservations(nodes, NODE_LEVEL, TENANTS),
        };
        let of = |sharing| play(&asks, &reservations, sharing).expect("equal parts fit");
        [of(Sharing::Cells), of(Sharing::Private), of(Sharing::Quota)]
    };
    let late_s = |of: &[Happened], private: &[Happened]| -> Vec<f64> {
        let both = of.iter().zip(private).filter(|(one, _)| one.guaranteed);
        let wait_s = |one: &Happened| one.waited_s.unwrap_or(f64::INFINITY);
        let longer = |one: &Happened, own: &Happened| match wait_s(one) == wait_s(own) {
            true => 0.0,
            false => wait_s(one) - wait_s(own),
        };
        both.map(|(one, own)| longer(one, own)).collect()
    };
    let later = |of: &[f64]| of.iter().filter(|late_s| **late_s > 1e-9).count() as f64;
    let most_min = |of: &[f64]| of.iter().copied().fold(0.0, f64::max) / 60.0;
    let wait_s = |of: &[Happened], guaranteed: bool| {
        let some = of.iter().filter(|one| one.guaranteed == guaranteed);
        mean(some.filter_map(|one| one.waited_s))
    };
    let [cells, private, quota] = shared(NODES);
    let [few_cells, few_private, few_quota] = shared(FEW_NODES);
    let (quota_s, few_s) = (late_s(&quota, &private), late_s(&few_quota, &few_private));
    let guaranteed = || asks.iter().zip(&cells).filter(|(_, one)| one.guaranteed);
    vec![
        later(&late_s(&cells, &private)) + later(&late_s(&few_cells, &few_private)),
        guaranteed().count() as f64,
        guaranteed().filter(|(ask, _)| ask.quarters < 4).count() as f64,
        later(&quota_s),
        later(&few_s),
        most_min(&few_s),
        wait_s(&cells, true),
        wait_s(&quota, true),
        wait_s(&cells, false),
        wait_s(&private, false),
        cells.iter().map(|one| f64::from(one.displaced)).sum(),
    ]
}
