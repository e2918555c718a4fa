//! Division of resources as small exact problems: the orders approximate them, and the round
//! allocators use them.

mod carbyne;
mod drf;
mod gavel;
mod hug;
mod synergy;
mod trade;

pub use carbyne::{Fluid, Schedule, altruistic, equal_parts, fair_schedule};
pub use drf::{drf, fill};
pub use gavel::{
    Combination, Division, NoDivision, finish_time_fairness, finish_time_fairness_of_types,
    max_min, max_min_of_types,
};
pub use hug::{Hug, hug};
pub use synergy::{Given, Sensitivity, tune};
pub use trade::{Holding, Trader, by_tickets, trade};
