//! Native host_kernels of the kernels in `simgpu/kernels/*.cu`.
//!
//! Every kernel of the shipped PTX has a host_kernel here with the same name and the same parameter
//! list, so a program that loads the PTX computes the same result, up to rounding, on a real GPU
//! and on the simulated one. A host_kernel knows nothing of contexts, streams or time: it gets a
//! launch, translates the device addresses it touches, computes, and says what the launch would
//! cost. Results depend only on the arguments (and for `sublet_reduce_sum_f32` on the grid), never
//! on the machine or on scheduling, so they are equal to the bit from run to run.
//!
//! As on hardware, ordering accesses to memory between concurrent launches is the program's duty.

mod chunks;
mod collective;
mod elementwise;
mod hash;
mod loss;
mod matmul;
mod operand;
mod optim;
mod reduce;
#[cfg(test)]
mod tests;

use std::ops::Range;

/// Translates device addresses for kernels. Implemented by the simulated device.
pub trait DeviceMemory {
    /// The host pointer for `[dptr, dptr + bytes)` if that range is wholly mapped and accessible.
    ///
    /// The pointer must be congruent to `dptr` modulo 16 and stay valid for reads and writes of
    /// `bytes` bytes until the launch that asked for it returns.
    fn translate(&self, dptr: u64, bytes: u64) -> Option<*mut u8>;

    /// The same for who only reads.
    fn translate_to_read(&self, dptr: u64, bytes: u64) -> Option<*mut u8> {
        self.translate(dptr, bytes)
    }

    /// What of a range, which has been translated, may hold anything but zeros.
    fn written(&self, dptr: u64, bytes: u64) -> Written<'_> {
        Written {
            end: dptr + bytes,
            ranges: std::iter::once(dptr..dptr + bytes).collect(),
            read: None,
        }
    }
}

/// What is known of a range without a look at its bytes.
pub struct Written<'a> {
    /// How far it is known, which may be short of the range's end.
    pub end: u64,
    /// What may hold anything but zeros, in order: what was never written is left out.
    pub ranges: Vec<Range<u64>>,
    /// Copies words at an address of the range, where that is cheaper than a look through the
    /// address; false: they could not be had.
    pub read: Option<Reader<'a>>,
}

/// Takes an address and what is to be filled.
pub type Reader<'a> = Box<dyn Fn(u64, &mut [u64]) -> bool + 'a>;

/// One launch of a kernel as the driver sees it.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Each parameter, zero-extended from its size ([`Kernel::param_sizes`]).
    pub args: &'a [u64],
    /// The memory that the addresses among the parameters refer to.
    pub memory: &'a dyn DeviceMemory,
}

/// What ends a launch early. The context carries it from then on, as a sticky error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The kernel touched memory that is not mapped, or an address that is not aligned to its
    /// element: `CUDA_ERROR_ILLEGAL_ADDRESS` (700).
    IllegalAddress {
        /// The device address where the access starts.
        address: u64,
        /// The length of the access in bytes.
        bytes: u64,
    },
    /// The launch has another shape than the kernel is written for: `CUDA_ERROR_INVALID_VALUE` (1).
    InvalidValue,
}

/// The work of a launch. The device turns it into a duration by the roofline of its profile.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Floating-point operations (integer ones where the kernel has no others).
    pub flops: f64,
    /// Bytes of device memory read and written.
    pub bytes: f64,
    /// Nanoseconds that the launch takes whatever the device is.
    pub fixed_ns: u64,
}

/// See [`Kernel::waits`].
pub type Waits = fn(&Launch<'_>) -> Result<bool, Fault>;

/// A kernel's native host kernel.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The entry's name in the PTX.
    pub name: &'static str,
    /// For a kernel that spins until other launches have begun: whether they have. It is asked from
    /// the moment at which the launch itself begins, again and again until it says so; then comes
    /// `run`. `None`: it waits for nobody.
    ///
    /// # Errors
    /// As `run`.
    pub waits: Option<Waits>,
    /// Bytes of each parameter, 1 to 8.
    pub param_sizes: &'static [u8],
    /// Computes what the kernel computes.
    ///
    /// # Errors
    /// The fault that the launch runs into. Memory may be partly written by then, as on hardware.
    pub run: fn(&Launch<'_>) -> Result<(), Fault>,
    /// The work of the launch, from its shape and arguments alone.
    pub cost: fn(&Launch<'_>) -> Cost,
}

static KERNELS: [Kernel; 18] = [
    elementwise::FILL,
    elementwise::AXPY,
    elementwise::BIAS_ACT,
    elementwise::BIAS_ACT_GRAD,
    elementwise::GATHER_ROWS,
    elementwise::BUSY,
    elementwise::BUSY_STEPS,
    matmul::MATMUL,
    loss::SOFTMAX_XENT,
    loss::XENT_MEAN,
    reduce::REDUCE_SUM,
    reduce::BIAS_GRAD,
    optim::SGD,
    optim::ADAM,
    hash::CONTENT_HASH,
    hash::HASH_FOLD,
    chunks::HASH_CHUNKS,
    collective::ALL_REDUCE,
];

/// What the kernels of a replay begin with, before the name of the one that they stand for.
const STAND_IN: &str = "sublet_replay__";

/// The host kernel of the kernel `name`, if there is one.
#[must_use]
pub fn find(name: &str) -> Option<&'static Kernel> {
    if name.starts_with(STAND_IN) {
        return Some(&elementwise::REPLAYED);
    }
    KERNELS.iter().find(|kernel| kernel.name == name)
}

/// All host kernels.
#[must_use]
pub fn all() -> &'static [Kernel] {
    &KERNELS
}
