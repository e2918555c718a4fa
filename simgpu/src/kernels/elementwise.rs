//! HostKernels of `elementwise.cu` and `busy.cu`: one output element from a few inputs, and a
//! kernel that only takes time.

use std::cell::Cell;

use super::operand::area;
use super::{Cost, Fault, Kernel, Launch};

/// No activation.
const ACT_NONE: u32 = 0;
/// Rectified linear unit.
const ACT_RELU: u32 = 1;

/// `out[i] = value` — `(f32* out, f32 value, u64 n)`.
pub(super) const FILL: Kernel = Kernel {
    name: "sublet_fill_f32",
    waits: None,
    param_sizes: &[8, 4, 8],
    run: |launch| {
        let value = launch.f32(1)?;
        for out in launch.buffer::<f32>(0, launch.u64(2)?)? {
            out.set(value);
        }
        Ok(())
    },
    cost: |launch| Cost {
        flops: 0.0,
        bytes: 4.0 * launch.size(2),
        fixed_ns: 0,
    },
};

/// `y[i] += alpha * x[i]` — `(f32* y, const f32* x, f32 alpha, u64 n)`.
pub(super) const AXPY: Kernel = Kernel {
    name: "sublet_axpy_f32",
    waits: None,
    param_sizes: &[8, 8, 4, 8],
    run: |launch| {
        let n = launch.u64(3)?;
        let (y, x) = (launch.buffer::<f32>(0, n)?, launch.buffer::<f32>(1, n)?);
        let alpha = launch.f32(2)?;
        for (y, x) in y.iter().zip(x) {
            y.set(y.get() + alpha * x.get());
        }
        Ok(())
    },
    cost: |launch| Cost {
        flops: 2.0 * launch.size(3),
        bytes: 12.0 * launch.size(3),
        fixed_ns: 0,
    },
};

/// `out[r][c] = act(x[r][c] + bias[c])`, `out` may be `x` —
/// `(f32* out, const f32* x, const f32* bias, u32 rows, u32 cols, u32 act)`.
pub(super) const BIAS_ACT: Kernel = Kernel {
    name: "sublet_bias_act_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 4, 4, 4],
    run: bias_act,
    cost: |launch| Cost {
        flops: 2.0 * launch.size(3) * launch.size(4),
        bytes: 8.0 * launch.size(3) * launch.size(4) + 4.0 * launch.size(4),
        fixed_ns: 0,
    },
};

fn bias_act(launch: &Launch<'_>) -> Result<(), Fault> {
    let (rows, cols, act) = (launch.u32(3)?, launch.u32(4)?, launch.u32(5)?);
    let count = area(rows, cols);
    if count == 0 {
        return Ok(());
    }
    let out = launch.buffer::<f32>(0, count)?;
    let x = launch.buffer::<f32>(1, count)?;
    let bias = launch.buffer::<f32>(2, u64::from(cols))?;
    let rows = out.chunks_exact(bias.len()).zip(x.chunks_exact(bias.len()));
    match act {
        ACT_NONE => rows.for_each(|(out, x)| bias_row(out, x, bias, |sum| sum)),
        // As `fmaxf` in the CUDA source: NaN becomes 0.
        ACT_RELU => rows
            .for_each(|(out, x)| bias_row(out, x, bias, |sum| if sum > 0.0 { sum } else { 0.0 })),
        _ => return Err(Fault::InvalidValue),
    }
    Ok(())
}

fn bias_row(out: &[Cell<f32>], x: &[Cell<f32>], bias: &[Cell<f32>], act: impl Fn(f32) -> f32) {
    for ((out, x), bias) in out.iter().zip(x).zip(bias) {
        out.set(act(x.get() + bias.get()));
    }
}

/// `dx[i] = dy[i] * act'(y[i])` from the activation's output `y`, `dx` may be `dy` —
/// `(f32* dx, const f32* dy, const f32* y, u32 rows, u32 cols, u32 act)`.
pub(super) const BIAS_ACT_GRAD: Kernel = Kernel {
    name: "sublet_bias_act_grad_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 4, 4, 4],
    run: |launch| {
        let (rows, cols, act) = (launch.u32(3)?, launch.u32(4)?, launch.u32(5)?);
        let count = area(rows, cols);
        let dx = launch.buffer::<f32>(0, count)?;
        let dy = launch.buffer::<f32>(1, count)?;
        let y = launch.buffer::<f32>(2, count)?;
        let elements = dx.iter().zip(dy).zip(y);
        match act {
            ACT_NONE => elements.for_each(|((dx, dy), _)| dx.set(dy.get())),
            ACT_RELU => elements
                .for_each(|((dx, dy), y)| dx.set(if y.get() > 0.0 { dy.get() } else { 0.0 })),
            _ => return Err(Fault::InvalidValue),
        }
        Ok(())
    },
    cost: |launch| Cost {
        flops: launch.size(3) * launch.size(4),
        bytes: 12.0 * launch.size(3) * launch.size(4),
        fixed_ns: 0,
    },
};

/// `out[r][c] = x[index[r]][c]` for elements of 32 bits, `rows` of them out of `source_rows` —
/// `(u32* out, const u32* x, const u32* index, u32 rows, u32 cols, u32 source_rows)`. An index that
/// is not below `source_rows` reads nothing and writes zeros.
pub(super) const GATHER_ROWS: Kernel = Kernel {
    name: "sublet_gather_rows_b32",
    waits: None,
    param_sizes: &[8, 8, 8, 4, 4, 4],
    run: |launch| {
        let (rows, cols, source_rows) = (launch.u32(3)?, launch.u32(4)?, launch.u32(5)?);
        if area(rows, cols) == 0 {
            return Ok(());
        }
        let out = launch.buffer::<u32>(0, area(rows, cols))?;
        let x = launch.buffer::<u32>(1, area(source_rows, cols))?;
        let index = launch.buffer::<u32>(2, u64::from(rows))?;
        // CAST: `out` has `rows * cols` elements in memory, so `cols` fits usize.
        let cols = cols as usize;
        for (out, index) in out.chunks_exact(cols).zip(index) {
            // CAST: a row number is 32 bits.
            match x.chunks_exact(cols).nth(index.get() as usize) {
                Some(row) => out.iter().zip(row).for_each(|(out, x)| out.set(x.get())),
                None => out.iter().for_each(|out| out.set(0)),
            }
        }
        Ok(())
    },
    cost: |launch| Cost {
        flops: 0.0,
        bytes: 8.0 * launch.size(3) * launch.size(4) + 4.0 * launch.size(3),
        fixed_ns: 0,
    },
};

/// Keeps the device busy for `us` microseconds — `(u64 us)`. Its cost is its time.
pub(super) const BUSY: Kernel = Kernel {
    name: "sublet_busy_us",
    waits: None,
    param_sizes: &[8],
    run: |launch| launch.u64(0).map(|_| ()),
    cost: |launch| Cost {
        flops: 0.0,
        bytes: 0.0,
        fixed_ns: launch.u64(0).unwrap_or(0).saturating_mul(1000),
    },
};

/// A replay's kernel: keeps the device busy for `ns` nanoseconds — `(u64 ns, u64 blocks)`. Its PTX
/// is the replay's own.
pub(super) static REPLAYED: Kernel = Kernel {
    name: "sublet_replay",
    waits: None,
    param_sizes: &[8, 8],
    run: |launch| launch.u64(1).map(|_| ()),
    cost: |launch| Cost {
        flops: 0.0,
        bytes: 0.0,
        fixed_ns: launch.u64(0).unwrap_or(0),
    },
};

/// `out[0]` = what `steps` steps of `x = x / 2 + 1` come to from 0 on, step by step on each thread
/// — `(f32* out, u64 steps)`.
pub(super) const BUSY_STEPS: Kernel = Kernel {
    name: "sublet_busy_steps",
    waits: None,
    param_sizes: &[8, 8],
    run: |launch| {
        // From the 25th on it is 2 to the bit.
        let steps = launch.u64(1)?.min(32);
        let x = (0..steps).fold(0.0, |x: f32, _| x * 0.5 + 1.0);
        launch.buffer::<f32>(0, 1)?[0].set(x);
        Ok(())
    },
    cost: |launch| Cost {
        flops: 0.0,
        bytes: 4.0,
        // Four cycles for a step that waits for the one before it, at 2 GHz.
        fixed_ns: launch.u64(1).unwrap_or(0).saturating_mul(2),
    },
};
