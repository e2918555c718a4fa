//! The cluster hook: profiles up, packing decisions down.
//!
//! This room is furnished by the cluster milestone (see `docs/architecture.md`, "Rooms that wait"). It exists so
//! that the direction of imports (`cluster -> policy, control`) is already checked.
