//! Arrays and texture objects, as their handles stand for them.

use shim_ffi::{CUDA_ARRAY3D_DESCRIPTOR, CUDA_RESOURCE_DESC};

/// An array.
pub struct Array {
    pub id: u64,
    pub context: u64,
    pub address: u64,
    pub descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    pub row_bytes: usize,
    pub pitch: usize,
    pub bytes: u64,
}

/// A texture object: what it was made from, and nothing that could be sampled.
pub struct Texture {
    pub descriptor: CUDA_RESOURCE_DESC,
}

// SAFETY: the descriptor is given back as it came; nothing follows its pointers.
unsafe impl Send for Texture {}
// SAFETY: as above.
unsafe impl Sync for Texture {}
