//! Fills.

use shim_ffi::{CUdeviceptr, CUresult, CUstream};

use super::Done;
use crate::entry::api;
use crate::exec::work::{Fill, Work};
use crate::stream::{Default, Stream};

/// When a call returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Returns {
    /// At once.
    AtOnce,
    /// Once memory that the host can see is filled: page-locked, registered and managed memory.
    /// Fills of device memory are never waited for.
    Filled,
}

fn fill(stream: CUstream, default: Default, returns: Returns, fill: Fill) -> Done {
    let (driver, _, stream) = Stream::of(stream, default)?;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    check(driver, &fill)?;
    if fill.value != 0 {
        // Said at once where it can be: what fails on the device ends the context.
        let size = (fill.width * u64::from(fill.element), fill.height);
        drop(
            driver
                .memory
                .may_fill_rows(fill.address, fill.pitch, size)?,
        );
    }
    let address = fill.address;
    stream.submit(driver, Work::Fill(fill))?;
    let is_seen = returns == Returns::Filled
        && !stream.is_capturing()
        && (driver.memory.region(address)).is_some_and(|region| region.is_seen_by_the_host());
    if is_seen {
        driver.engine.wait_stream(stream.id);
    }
    Ok(())
}

/// Refuses what does not lie in memory or is not aligned.
pub(crate) fn check(driver: &crate::driver::Driver, fill: &Fill) -> Done {
    let element = u64::from(fill.element);
    let row = fill
        .width
        .checked_mul(element)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let aligned = fill.address.is_multiple_of(element)
        && (fill.height == 1 || fill.pitch.is_multiple_of(element));
    let span = fill
        .pitch
        .checked_mul(fill.height - 1)
        .and_then(|above| above.checked_add(row));
    let fits = span.is_some_and(|span| driver.memory.translate(fill.address, span, None).is_some());
    if aligned && fits && (fill.height == 1 || fill.pitch >= row) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

macro_rules! linear {
    ($($name:ident, $element:literal, $value:ty;)*) => {$(
        fn $name(
            default: Default, stream: CUstream, returns: Returns, address: u64, value: $value, width: usize,
        ) -> Done {
            fill(stream, default, returns, Fill {
                address, pitch: 0, value: u32::from(value), element: $element, width: width as u64, height: 1,
            })
        }
    )*};
}
linear! { d8, 1, u8; d16, 2, u16; d32, 4, u32; }

#[expect(
    clippy::too_many_arguments,
    reason = "the driver call's own parameters"
)]
fn plane(
    default: Default,
    stream: CUstream,
    returns: Returns,
    address: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
) -> Done {
    let (width, height, pitch) = (width as u64, height as u64, pitch as u64);
    fill(
        stream,
        default,
        returns,
        Fill {
            address,
            pitch,
            value,
            element,
            width,
            height,
        },
    )
}

const NULL: CUstream = CUstream::NULL;

api! {
    stream fn cuMemsetD8_v2, cuMemsetD8_v2_ptds(default; to: CUdeviceptr, value: u8, count: usize) {
        d8(default, NULL, Returns::Filled, to.0, value, count)
    }

    stream fn cuMemsetD16_v2, cuMemsetD16_v2_ptds(default; to: CUdeviceptr, value: u16, count: usize) {
        d16(default, NULL, Returns::Filled, to.0, value, count)
    }

    stream fn cuMemsetD32_v2, cuMemsetD32_v2_ptds(default; to: CUdeviceptr, value: u32, count: usize) {
        d32(default, NULL, Returns::Filled, to.0, value, count)
    }

    stream fn cuMemsetD8Async, cuMemsetD8Async_ptsz(default; to: CUdeviceptr, value: u8, count: usize, stream: CUstream) {
        d8(default, stream, Returns::AtOnce, to.0, value, count)
    }

    stream fn cuMemsetD16Async, cuMemsetD16Async_ptsz(
        default; to: CUdeviceptr, value: u16, count: usize, stream: CUstream,
    ) {
        d16(default, stream, Returns::AtOnce, to.0, value, count)
    }

    stream fn cuMemsetD32Async, cuMemsetD32Async_ptsz(
        default; to: CUdeviceptr, value: u32, count: usize, stream: CUstream,
    ) {
        d32(default, stream, Returns::AtOnce, to.0, value, count)
    }

    stream fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds(
        default; to: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize,
    ) {
        plane(default, NULL, Returns::Filled, to.0, pitch, value.into(), 1, width, height)
    }

    stream fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds(
        default; to: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize,
    ) {
        plane(default, NULL, Returns::Filled, to.0, pitch, value.into(), 2, width, height)
    }

    stream fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds(
        default; to: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize,
    ) {
        plane(default, NULL, Returns::Filled, to.0, pitch, value, 4, width, height)
    }

    stream fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(
        default; to: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream,
    ) {
        plane(default, stream, Returns::AtOnce, to.0, pitch, value.into(), 1, width, height)
    }

    stream fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(
        default; to: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream,
    ) {
        plane(default, stream, Returns::AtOnce, to.0, pitch, value.into(), 2, width, height)
    }

    stream fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(
        default; to: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize, stream: CUstream,
    ) {
        plane(default, stream, Returns::AtOnce, to.0, pitch, value, 4, width, height)
    }
}
