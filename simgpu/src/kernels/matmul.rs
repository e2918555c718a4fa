//! HostKernel of `matmul.cu`: a dense matrix product with transpose flags.

use std::cell::Cell;

use super::operand::{area, load};
use super::{Cost, Fault, Kernel, Launch};

/// `a` is stored transposed, `k` rows of `m`.
const TRANSPOSE_A: u32 = 1;
/// `b` is stored transposed, `n` rows of `k`.
const TRANSPOSE_B: u32 = 2;

/// `c = op(a) op(b) + beta c`, row-major, `op(a)` is m x k and `op(b)` is k x n; `beta == 0` does
/// not read `c` — `(f32* c, const f32* a, const f32* b, u32 m, u32 n, u32 k, u32 flags, f32 beta)`.
/// Blocks of 16 x 16 threads.
pub(super) const MATMUL: Kernel = Kernel {
    name: "sublet_matmul_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 4, 4, 4, 4, 4],
    run: matmul,
    cost: |launch| {
        let (m, n, k) = (launch.size(3), launch.size(4), launch.size(5));
        // Every block of 16 x 16 reads its own strips of `a` and `b`; the caches keep them for its
        // neighbours, so each matrix is counted once.
        let passes_over_c = if launch.f32(7) == Ok(0.0) { 1.0 } else { 2.0 };
        Cost {
            flops: 2.0 * m * n * k,
            bytes: 4.0 * (m * k + k * n + passes_over_c * m * n),
            fixed_ns: 0,
        }
    },
};

/// Rows of `b` and columns of `c` that the inner loops work on at a time: 64 x 256 floats stay in
/// the second-level cache.
const PANEL_K: usize = 64;
const PANEL_N: usize = 256;

fn matmul(launch: &Launch<'_>) -> Result<(), Fault> {
    if launch.block != [16, 16, 1] {
        return Err(Fault::InvalidValue);
    }
    let (m, n, k) = (launch.u32(3)?, launch.u32(4)?, launch.u32(5)?);
    let (flags, beta) = (launch.u32(6)?, launch.f32(7)?);
    if flags & !(TRANSPOSE_A | TRANSPOSE_B) != 0 {
        return Err(Fault::InvalidValue);
    }
    if area(m, n) == 0 {
        return Ok(());
    }
    let c = launch.buffer::<f32>(0, area(m, n))?;
    let a = launch.buffer::<f32>(1, area(m, k))?;
    let b = launch.buffer::<f32>(2, area(k, n))?;
    // CAST: all three are in memory, so their sides fit usize.
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let a = if flags & TRANSPOSE_A == 0 {
        load(a)
    } else {
        transposed(a, k, m)
    };
    let b = if flags & TRANSPOSE_B == 0 {
        load(b)
    } else {
        transposed(b, n, k)
    };
    let mut out = vec![0.0f32; m * n];
    multiply(&mut out, &a, &b, n, k);
    for (c, sum) in c.iter().zip(&out) {
        c.set(if beta == 0.0 {
            *sum
        } else {
            *sum + beta * c.get()
        });
    }
    Ok(())
}

/// `out += a b`; every element's sum runs over k in ascending order, whatever the blocking, so its
/// bits are the same for every blocking and on every machine.
fn multiply(out: &mut [f32], a: &[f32], b: &[f32], n: usize, k: usize) {
    if k == 0 {
        return;
    }
    for n0 in (0..n).step_by(PANEL_N) {
        let n1 = (n0 + PANEL_N).min(n);
        for k0 in (0..k).step_by(PANEL_K) {
            let k1 = (k0 + PANEL_K).min(k);
            for (out, a) in out.chunks_exact_mut(n).zip(a.chunks_exact(k)) {
                let out = &mut out[n0..n1];
                for (a, b) in a[k0..k1].iter().zip(b[k0 * n..].chunks(n)) {
                    for (out, b) in out.iter_mut().zip(&b[n0..n1]) {
                        *out += a * b;
                    }
                }
            }
        }
    }
}

/// The `cols` x `rows` transpose of `rows` x `cols` elements.
fn transposed(cells: &[Cell<f32>], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0f32; rows * cols];
    for (row, cells) in cells.chunks_exact(cols.max(1)).enumerate() {
        for (col, cell) in cells.iter().enumerate() {
            out[col * rows + row] = cell.get(); // PANIC: `col < cols` and `row < rows`.
        }
    }
    out
}
