//! Default streams, as keys.

use shim_ffi::Variant;

/// The legacy default stream as a key.
pub(crate) const LEGACY: usize = 1;
/// The calling thread's default stream as a key.
pub(crate) const PER_THREAD: usize = 2;

/// The stream that stream 0 means, as a key.
pub(crate) const fn default_stream(variant: Variant) -> usize {
    match variant {
        Variant::Legacy => LEGACY,
        Variant::Ptsz | Variant::Ptds => PER_THREAD,
    }
}
