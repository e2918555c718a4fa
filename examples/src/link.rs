//! How fast the link between host and device is, by itself: the floor that moving a job's memory is
//! measured against.

use std::rc::Rc;
use std::time::Instant;

use cudarc::driver::{result, sys};
use serde::Serialize;

use crate::gpu::{Buffer, Gpu, GpuError, failed};

/// Bytes of one copy.
const PART: usize = 64 << 20;
/// Bytes of a buffer on either side; copies of more go over it again.
const BUFFER: u64 = 1 << 30;

/// Seconds that copies of so many bytes took.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Link {
    /// In each direction.
    pub bytes: u64,
    /// Device to page-locked memory.
    pub out_s: f64,
    /// Page-locked memory to device.
    pub in_s: f64,
    /// Both at once, until the later one has ended.
    pub both_s: f64,
    /// Locking of as many bytes.
    pub lock_s: f64,
}

/// Page-locked memory, given back on drop.
struct Pinned {
    pointer: *mut u8,
    bytes: usize,
}

impl Pinned {
    fn new(bytes: usize) -> Result<Pinned, GpuError> {
        // SAFETY: what it holds is not read before it is written, and bytes are valid for any bits.
        let pointer = unsafe { result::malloc_host(bytes, 0) }
            .map_err(|error| failed(format!("cannot lock {bytes} bytes of memory"), error))?;
        Ok(Pinned {
            pointer: pointer.cast(),
            bytes,
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and freed once. Nothing more can be done about a failure on
        // the way out.
        let _ = unsafe { result::free_host(self.pointer.cast()) };
    }
}

/// A direction: a stream, memory on both sides.
struct Way {
    stream: sys::CUstream,
    device: Buffer<u8>,
    host: Pinned,
}

impl Way {
    fn open(gpu: &Rc<Gpu>, bytes: u64) -> Result<Way, GpuError> {
        Ok(Way {
            stream: result::stream::create(result::stream::StreamKind::NonBlocking)
                .map_err(|error| failed("cannot create a stream", error))?,
            device: gpu.alloc("the link's buffer", bytes)?,
            host: Pinned::new(bytes as usize)?, // CAST: at most 1 GiB.
        })
    }

    /// Queues copies of `bytes` in all.
    fn copy(&self, bytes: u64, out: bool) -> Result<(), GpuError> {
        let mut left = bytes;
        while left > 0 {
            let mut at = 0;
            while at < self.host.bytes && left > 0 {
                let count = PART
                    .min(self.host.bytes - at)
                    .min(usize::try_from(left).unwrap_or(PART));
                let device = self.device.address() + at as u64; // CAST: an offset fits.
                // SAFETY: the range lies in the allocation, which lives until `wait` has returned:
                // `Way` is dropped later.
                let host =
                    unsafe { std::slice::from_raw_parts_mut(self.host.pointer.add(at), count) };
                // SAFETY: both sides have `count` bytes and stay until the stream has been waited
                // for.
                unsafe {
                    if out {
                        result::memcpy_dtoh_async(host, device, self.stream)
                    } else {
                        result::memcpy_htod_async(device, host, self.stream)
                    }
                }
                .map_err(|error| failed("cannot queue a copy", error))?;
                at += count;
                left -= count as u64; // CAST: at most `left`.
            }
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), GpuError> {
        // SAFETY: the stream is this way's.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| failed("waiting for copies", error))
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        // SAFETY: created by `open` and destroyed once, after its copies. Nothing more can be done
        // about a failure.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Measures copies of `bytes` each way, one direction at a time and both at once; the best of
/// three.
///
/// # Errors
/// What the driver says.
pub fn measure(gpu: &Rc<Gpu>, bytes: u64) -> Result<Link, GpuError> {
    let buffer = bytes.min(BUFFER);
    let begun = Instant::now();
    let (one, two) = (Way::open(gpu, buffer)?, Way::open(gpu, buffer)?);
    // CAST: a ratio of sizes.
    let lock_s = begun.elapsed().as_secs_f64() * bytes as f64 / (2 * buffer) as f64;
    let mut link = Link {
        bytes,
        out_s: f64::INFINITY,
        in_s: f64::INFINITY,
        both_s: f64::INFINITY,
        lock_s,
    };
    for _ in 0..3 {
        let timed = |ways: &[(&Way, bool)]| -> Result<f64, GpuError> {
            let begun = Instant::now();
            for (way, out) in ways {
                way.copy(bytes, *out)?;
            }
            for (way, _) in ways {
                way.wait()?;
            }
            Ok(begun.elapsed().as_secs_f64())
        };
        link.out_s = link.out_s.min(timed(&[(&one, true)])?);
        link.in_s = link.in_s.min(timed(&[(&two, false)])?);
        link.both_s = link.both_s.min(timed(&[(&one, true), (&two, false)])?);
    }
    Ok(link)
}

/// Copies `bytes` to the device from ordinary memory, over one buffer.
///
/// # Errors
/// What the driver says.
pub fn upload(gpu: &Rc<Gpu>, bytes: u64) -> Result<(), GpuError> {
    let host = vec![1_u8; PART];
    let device = gpu.alloc("the upload's buffer", PART as u64)?; // CAST: a constant.
    let mut left = bytes;
    while left > 0 {
        let part = PART.min(usize::try_from(left).unwrap_or(PART));
        device.write(&host[..part])?;
        left -= part as u64; // CAST: at most `left`.
    }
    Ok(())
}
