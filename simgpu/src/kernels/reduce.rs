//! HostKernels of `reduce.cu`: sums in a fixed order.

use super::operand::area;
use super::{Cost, Fault, Kernel, Launch};

/// Threads of a block.
const THREADS: usize = 256;

/// Adds the threads pairwise, halving their number, as the blocks do in shared memory.
pub(super) fn fold_states(slots: &mut [f32; THREADS]) -> f32 {
    let mut half = THREADS / 2;
    while half > 0 {
        let (low, high) = slots.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    slots[0]
}

/// `sums[b]` = the sum of the `b`-th of `gridDim.x` equal chunks of `x` — `(f32* sums, const f32*
/// x, u64 n)`. Blocks of 256 threads. A second launch over the sums with a grid of one gives the
/// whole.
pub(super) const REDUCE_SUM: Kernel = Kernel {
    name: "sublet_reduce_sum_f32",
    waits: None,
    param_sizes: &[8, 8, 8],
    run: reduce_sum,
    cost: |launch| Cost {
        flops: launch.size(2),
        bytes: 4.0 * launch.size(2) + 4.0 * f64::from(launch.grid[0]),
        fixed_ns: 0,
    },
};

fn reduce_sum(launch: &Launch<'_>) -> Result<(), Fault> {
    if launch.block != [256, 1, 1] || launch.grid[0] == 0 || launch.grid[1..] != [1, 1] {
        return Err(Fault::InvalidValue);
    }
    let n = launch.u64(2)?;
    let sums = launch.buffer::<f32>(0, u64::from(launch.grid[0]))?;
    let x = launch.buffer::<f32>(1, n)?;
    // CAST: `x` is in memory, so a part of its length fits usize.
    let chunk = n.div_ceil(u64::from(launch.grid[0])).max(1) as usize;
    let mut chunks = x.chunks(chunk);
    for sum in sums {
        let mut slots = [0.0f32; THREADS];
        for row in chunks.next().unwrap_or(&[]).chunks(THREADS) {
            for (thread, x) in slots.iter_mut().zip(row) {
                *thread += x.get();
            }
        }
        sum.set(fold_states(&mut slots));
    }
    Ok(())
}

/// `db[c] = sum over r of dy[r][c]` — `(f32* db, const f32* dy, u32 rows, u32 cols)`.
pub(super) const BIAS_GRAD: Kernel = Kernel {
    name: "sublet_bias_grad_f32",
    waits: None,
    param_sizes: &[8, 8, 4, 4],
    run: bias_grad,
    cost: |launch| Cost {
        flops: launch.size(2) * launch.size(3),
        bytes: 4.0 * launch.size(2) * launch.size(3) + 4.0 * launch.size(3),
        fixed_ns: 0,
    },
};

fn bias_grad(launch: &Launch<'_>) -> Result<(), Fault> {
    let (rows, cols) = (launch.u32(2)?, launch.u32(3)?);
    if cols == 0 {
        return Ok(());
    }
    let db = launch.buffer::<f32>(0, u64::from(cols))?;
    let dy = launch.buffer::<f32>(1, area(rows, cols))?;
    let mut sums = vec![0.0f32; db.len()];
    for row in dy.chunks_exact(db.len()) {
        for (sum, dy) in sums.iter_mut().zip(row) {
            *sum += dy.get();
        }
    }
    for (db, sum) in db.iter().zip(&sums) {
        db.set(*sum);
    }
    Ok(())
}
