//! The rule of `lend` on a model of a device: the scenarios, random mixes, and the invariants.

mod attacks;
mod device;
mod governor;
mod invariants;
mod json;
mod measure;
mod programs;
mod properties;
mod recording;
mod rule;
mod scenarios;
mod table;
