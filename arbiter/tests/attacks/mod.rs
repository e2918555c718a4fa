//! Jobs that use what is theirs to write, their pages and their connections, against everybody
//! else.

mod disk;
mod extremes;
mod floods;
mod lookups;
mod pages;
