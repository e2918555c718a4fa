//! HostKernels of `loss.cu`: softmax cross-entropy with its gradient, and the mean over a batch.

use super::operand::area;
use super::{Cost, Fault, Kernel, Launch};

/// Threads of the one block of `sublet_xent_mean_f32`.
const MEAN_THREADS: usize = 256;

/// For every row of `logits`: the cross-entropy with its label, whether the largest logit (the
/// first of equal ones) is the label's, and the gradient of the batch's mean loss — `(f32* dlogits,
/// f32* row_loss, u32* row_correct, const f32* logits, const u32* labels, u32 rows, u32 cols)`.
///
/// `dlogits` may be null (forward only) or be `logits`. A label that is not below `cols` makes its
/// row's loss and gradient NaN.
pub(super) const SOFTMAX_XENT: Kernel = Kernel {
    name: "sublet_softmax_xent_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 8, 8, 4, 4],
    run: softmax_xent,
    cost: |launch| {
        let elements = launch.size(5) * launch.size(6);
        let gradient = if launch.u64(0) == Ok(0) { 0.0 } else { 4.0 };
        Cost {
            flops: 8.0 * elements,
            bytes: (12.0 + gradient) * elements + 12.0 * launch.size(5),
            fixed_ns: 0,
        }
    },
};

fn softmax_xent(launch: &Launch<'_>) -> Result<(), Fault> {
    let (rows, cols) = (launch.u32(5)?, launch.u32(6)?);
    if rows == 0 {
        return Ok(());
    }
    if cols == 0 {
        return Err(Fault::InvalidValue);
    }
    let gradient = match launch.u64(0)? {
        0 => None,
        address => Some(launch.at::<f32>(address, area(rows, cols))?),
    };
    let row_loss = launch.buffer::<f32>(1, u64::from(rows))?;
    let row_correct = launch.buffer::<u32>(2, u64::from(rows))?;
    let logits = launch.buffer::<f32>(3, area(rows, cols))?;
    let labels = launch.buffer::<u32>(4, u64::from(rows))?;
    // CAST: `logits` is in memory, so its width fits usize.
    let width = cols as usize;
    let scale = 1.0 / rows as f32; // CAST: the CUDA source converts the same way.
    let mut exps = vec![0.0f32; width];
    for (row, logits) in logits.chunks_exact(width).enumerate() {
        // PANIC: `row < rows`, the length of the three per-row buffers.
        let label = labels[row].get();
        let mut top = logits[0].get();
        let mut top_at = 0u32;
        for (at, logit) in (0u32..).zip(logits) {
            if logit.get() > top {
                top = logit.get();
                top_at = at;
            }
        }
        let mut sum = 0.0f32;
        for (exp, logit) in exps.iter_mut().zip(logits) {
            *exp = (logit.get() - top).exp();
            sum += *exp;
        }
        let (loss, correct) = match logits.get(label as usize) {
            Some(logit) => (sum.ln() - (logit.get() - top), u32::from(top_at == label)),
            None => (f32::NAN, 0),
        };
        row_loss[row].set(loss);
        row_correct[row].set(correct);
        let Some(gradient) = gradient else { continue };
        let out = &gradient[row * width..(row + 1) * width];
        for ((at, out), exp) in (0u32..).zip(out).zip(&exps) {
            let hot = if at == label { 1.0 } else { 0.0 };
            let value = if label < cols {
                (exp / sum - hot) * scale
            } else {
                f32::NAN
            };
            out.set(value);
        }
    }
    Ok(())
}

/// The mean of the rows' losses and the number of correct rows — `(f32* mean_loss, u32* correct,
/// const f32* row_loss, const u32* row_correct, u32 rows)`. One block of 256 threads.
pub(super) const XENT_MEAN: Kernel = Kernel {
    name: "sublet_xent_mean_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 8, 4],
    run: xent_mean,
    cost: |launch| Cost {
        flops: 2.0 * launch.size(4),
        bytes: 8.0 * launch.size(4) + 8.0,
        fixed_ns: 0,
    },
};

fn xent_mean(launch: &Launch<'_>) -> Result<(), Fault> {
    if launch.block != [256, 1, 1] || launch.grid != [1, 1, 1] {
        return Err(Fault::InvalidValue);
    }
    let rows = launch.u32(4)?;
    let mean_loss = launch.buffer::<f32>(0, 1)?;
    let correct = launch.buffer::<u32>(1, 1)?;
    let row_loss = launch.buffer::<f32>(2, u64::from(rows))?;
    let row_correct = launch.buffer::<u32>(3, u64::from(rows))?;
    let mut slots = [0.0f32; MEAN_THREADS];
    for (at, loss) in row_loss.iter().enumerate() {
        slots[at % MEAN_THREADS] += loss.get(); // PANIC: a remainder is below the length.
    }
    let sum = super::reduce::fold_states(&mut slots);
    let hits = row_correct
        .iter()
        .fold(0u32, |hits, hit| hits.wrapping_add(hit.get()));
    // CAST: the CUDA source converts the same way. PANIC: both buffers have one element.
    mean_loss[0].set(sum / rows as f32);
    correct[0].set(hits);
    Ok(())
}
