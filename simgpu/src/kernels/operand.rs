//! How a host_kernel reads its parameters and reaches device memory.
//!
//! Device buffers are seen as slices of `Cell`s: the caller may pass one buffer as input and output
//! (in-place kernels), and cells may alias where `&mut` slices may not.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;

use super::{Fault, Launch};

/// Bit patterns that device memory may hold: any pattern is a value.
pub(super) trait Word: Copy {}
impl Word for u8 {}
impl Word for u32 {}
impl Word for u64 {}
impl Word for f32 {}

impl<'a> Launch<'a> {
    /// Parameter `index` as 64 bits.
    pub(super) fn u64(&self, index: usize) -> Result<u64, Fault> {
        self.args.get(index).copied().ok_or(Fault::InvalidValue)
    }

    /// Parameter `index` as 32 bits.
    pub(super) fn u32(&self, index: usize) -> Result<u32, Fault> {
        // CAST: a 32-bit parameter arrives zero-extended; the upper half is nothing.
        self.u64(index).map(|bits| bits as u32)
    }

    /// Parameter `index` as a float.
    pub(super) fn f32(&self, index: usize) -> Result<f32, Fault> {
        self.u32(index).map(f32::from_bits)
    }

    /// Parameter `index` as a number for the cost model: a missing one costs nothing.
    pub(super) fn size(&self, index: usize) -> f64 {
        // CAST: the cost model needs no more than 53 bits.
        self.u64(index).unwrap_or(0) as f64
    }

    /// The `count` elements at the device address in parameter `index`. Nothing is translated for
    /// zero elements: a kernel with no work touches no memory.
    pub(super) fn buffer<T: Word>(&self, index: usize, count: u64) -> Result<&'a [Cell<T>], Fault> {
        self.at(self.u64(index)?, count)
    }

    /// The `count` words at the device address in parameter `index`, which other launches write
    /// meanwhile, also those of other processes.
    pub(super) fn words(&self, index: usize, count: u64) -> Result<&'a [AtomicU32], Fault> {
        let cells = self.buffer::<u32>(index, count)?;
        // SAFETY: a cell and an atomic of 32 bits are laid out alike, and the cells may be aliased;
        // kernels that share words reach them by this function alone.
        Ok(unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<AtomicU32>(), cells.len()) })
    }

    /// The `count` elements at `address`.
    pub(super) fn at<T: Word>(&self, address: u64, count: u64) -> Result<&'a [Cell<T>], Fault> {
        self.cells(address, count, |bytes| {
            self.memory.translate(address, bytes)
        })
    }

    /// The same, of which none will be written.
    pub(super) fn read<T: Word>(&self, address: u64, count: u64) -> Result<&'a [Cell<T>], Fault> {
        self.cells(address, count, |bytes| {
            self.memory.translate_to_read(address, bytes)
        })
    }

    fn cells<T: Word>(
        &self,
        address: u64,
        count: u64,
        translate: impl FnOnce(u64) -> Option<*mut u8>,
    ) -> Result<&'a [Cell<T>], Fault> {
        if count == 0 {
            return Ok(&[]);
        }
        // CAST: the size of an element is at most 8.
        let bytes = count.saturating_mul(size_of::<T>() as u64);
        let fault = Fault::IllegalAddress { address, bytes };
        let length = usize::try_from(count).map_err(|_| fault)?;
        if address == 0 || isize::try_from(bytes).is_err() || address.checked_add(bytes).is_none() {
            return Err(fault);
        }
        let host = translate(bytes).ok_or(fault)?.cast::<Cell<T>>();
        if !host.is_aligned() {
            return Err(fault);
        }
        // SAFETY: `translate` promises `bytes` accessible bytes at `host` until the launch returns,
        // `'a` ends with the launch; the pointer is aligned (checked above), any bits are a `T`,
        // and shared cells tolerate aliasing buffers.
        Ok(unsafe { std::slice::from_raw_parts(host, length) })
    }
}

/// `rows * cols` as a count of elements.
pub(super) fn area(rows: u32, cols: u32) -> u64 {
    u64::from(rows) * u64::from(cols)
}

/// A copy of the elements, for loops that want plain slices.
pub(super) fn load<T: Word>(cells: &[Cell<T>]) -> Vec<T> {
    cells.iter().map(Cell::get).collect()
}
