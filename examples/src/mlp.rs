//! A network of one hidden layer, `softmax(relu(x W1 + b1) W2 + b2)`, on the kernels of the
//! library.
//!
//! All weights lie in one buffer, as do their gradients and Adam's moments: W1 (64 x hidden), b1,
//! W2 (hidden x 10), b2.

use std::rc::Rc;

use crate::digits::{CLASSES, PIXELS};
use crate::gpu::Arg::{F32, U32, U64};
use crate::gpu::{Arg, Buffer, Gpu, GpuError, Shape};
use crate::rng::Rng;

/// The kernels that a network needs.
pub const KERNELS: [&str; 9] = [
    "sublet_fill_f32",
    "sublet_matmul_f32",
    "sublet_bias_act_f32",
    "sublet_bias_act_grad_f32",
    "sublet_bias_grad_f32",
    "sublet_softmax_xent_f32",
    "sublet_xent_mean_f32",
    "sublet_adam_f32",
    "sublet_gather_rows_b32",
];

/// What a history of gradients needs besides.
pub const ADD: &str = "sublet_axpy_f32";

const TRANSPOSE_A: u32 = 1;
const TRANSPOSE_B: u32 = 2;
const ACT_NONE: u32 = 0;
const ACT_RELU: u32 = 1;

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPSILON: f32 = 1e-8;

/// The network with its activations for a number of rows.
pub struct Mlp {
    gpu: Rc<Gpu>,
    hidden: u32,
    weights: Buffer<f32>,
    gradients: Buffer<f32>,
    first_moments: Buffer<f32>,
    second_moments: Buffer<f32>,
    activations: Buffer<f32>,
    hidden_gradient: Buffer<f32>,
    logits: Buffer<f32>,
    logits_gradient: Buffer<f32>,
    row_loss: Buffer<f32>,
    row_correct: Buffer<u32>,
}

/// Where the parts of the weights begin, and how many there are.
struct Layout {
    b1: u64,
    w2: u64,
    b2: u64,
    count: u64,
}

impl Layout {
    fn of(hidden: u32) -> Layout {
        let (hidden, inputs, classes) = (u64::from(hidden), u64::from(PIXELS), u64::from(CLASSES));
        let b1 = inputs * hidden;
        let w2 = b1 + hidden;
        let b2 = w2 + hidden * classes;
        Layout {
            b1,
            w2,
            b2,
            count: b2 + classes,
        }
    }
}

/// The number of weights of a network with `hidden` units.
#[must_use]
pub fn weight_count(hidden: u32) -> u64 {
    Layout::of(hidden).count
}

/// First weights: uniform with the variance of He et al. 2015 (2 / inputs), biases 0.
#[must_use]
pub fn initial_weights(hidden: u32, rng: &mut Rng) -> Vec<f32> {
    let mut weights = Vec::new();
    for (inputs, outputs) in [(PIXELS, hidden), (hidden, CLASSES)] {
        let bound = (6.0 / f64::from(inputs)).sqrt() as f32; // CAST: rounding to a float is meant.
        weights
            .extend((0..u64::from(inputs) * u64::from(outputs)).map(|_| bound * rng.signed_unit()));
        weights.extend((0..outputs).map(|_| 0.0));
    }
    weights
}

/// Adam's factors 1 - beta^t at step `step`, counted from 1.
fn corrections(step: u64) -> (f32, f32) {
    // CAST: beyond 2^31 steps both powers are 0; rounding to floats is meant.
    let step = i32::try_from(step).unwrap_or(i32::MAX);
    (
        (1.0 - BETA1.powi(step)) as f32,
        (1.0 - BETA2.powi(step)) as f32,
    )
}

impl Mlp {
    /// A network with the given weights and moments of 0, for up to `rows` rows at a time.
    ///
    /// # Errors
    /// When the device has no space, or refuses.
    ///
    /// # Panics
    /// When the number of weights is not that of a network with `hidden` units.
    pub fn new(gpu: &Rc<Gpu>, hidden: u32, rows: u32, weights: &[f32]) -> Result<Mlp, GpuError> {
        let count = weight_count(hidden);
        assert_eq!(
            weights.len() as u64,
            count,
            "the weights belong to another network"
        ); // CAST: a length fits.
        let rows = u64::from(rows);
        let mlp = Mlp {
            gpu: Rc::clone(gpu),
            hidden,
            weights: gpu.upload("the weights", weights)?,
            gradients: gpu.alloc("the gradients", count)?,
            first_moments: gpu.alloc("the first moments", count)?,
            second_moments: gpu.alloc("the second moments", count)?,
            activations: gpu.alloc("the activations", rows * u64::from(hidden))?,
            hidden_gradient: gpu.alloc("the hidden layer's gradient", rows * u64::from(hidden))?,
            logits: gpu.alloc("the logits", rows * u64::from(CLASSES))?,
            logits_gradient: gpu.alloc("the logits' gradient", rows * u64::from(CLASSES))?,
            row_loss: gpu.alloc("the rows' losses", rows)?,
            row_correct: gpu.alloc("the rows' hits", rows)?,
        };
        for moments in [&mlp.first_moments, &mlp.second_moments] {
            gpu.launch(
                "sublet_fill_f32",
                Shape::elements(count),
                &[moments.arg(), F32(0.0), U64(count)],
            )?;
        }
        Ok(mlp)
    }

    /// Queues the forward pass over `rows` rows of `x`; the logits stay in the network.
    ///
    /// # Errors
    /// What the driver says.
    pub fn forward(&self, x: &Buffer<f32>, rows: u32) -> Result<(), GpuError> {
        let (hidden, at) = (self.hidden, Layout::of(self.hidden));
        let [w1, b1, w2, b2] = [0, at.b1, at.w2, at.b2].map(|at| self.weights.arg_at(at));
        self.matmul(
            [self.activations.arg(), x.arg(), w1],
            [rows, hidden, PIXELS],
            0,
        )?;
        self.bias_act(&self.activations, b1, [rows, hidden], ACT_RELU)?;
        self.matmul(
            [self.logits.arg(), self.activations.arg(), w2],
            [rows, CLASSES, hidden],
            0,
        )?;
        self.bias_act(&self.logits, b2, [rows, CLASSES], ACT_NONE)
    }

    /// Queues the loss of the logits of `rows` rows: the mean goes to element `at` of `mean`, the
    /// number of right answers to that of `correct`; with `gradient` the logits' gradient is kept
    /// for [`Mlp::backward`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn loss(
        &self,
        labels: &Buffer<u32>,
        rows: u32,
        gradient: bool,
        (mean, correct, at): (&Buffer<f32>, &Buffer<u32>, u64),
    ) -> Result<(), GpuError> {
        let gradient = if gradient {
            self.logits_gradient.arg()
        } else {
            U64(0)
        };
        let per_row = [
            gradient,
            self.row_loss.arg(),
            self.row_correct.arg(),
            self.logits.arg(),
            labels.arg(),
        ];
        let args = [per_row.as_slice(), &[U32(rows), U32(CLASSES)]].concat();
        self.gpu.launch(
            "sublet_softmax_xent_f32",
            Shape::elements(u64::from(rows)),
            &args,
        )?;
        let args = [
            mean.arg_at(at),
            correct.arg_at(at),
            self.row_loss.arg(),
            self.row_correct.arg(),
            U32(rows),
        ];
        self.gpu.launch("sublet_xent_mean_f32", Shape::BLOCK, &args)
    }

    /// Queues the gradients of the batch that went through [`Mlp::forward`] and [`Mlp::loss`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn backward(&self, x: &Buffer<f32>, rows: u32) -> Result<(), GpuError> {
        let (hidden, at) = (self.hidden, Layout::of(self.hidden));
        let [w1, b1, w2, b2] = [0, at.b1, at.w2, at.b2].map(|at| self.gradients.arg_at(at));
        let outputs = self.logits_gradient.arg();
        self.matmul(
            [w2, self.activations.arg(), outputs],
            [hidden, CLASSES, rows],
            TRANSPOSE_A,
        )?;
        self.bias_grad([b2, outputs], [rows, CLASSES])?;
        let inner = self.hidden_gradient.arg();
        self.matmul(
            [inner, outputs, self.weights.arg_at(at.w2)],
            [rows, hidden, CLASSES],
            TRANSPOSE_B,
        )?;
        let args = [
            inner,
            inner,
            self.activations.arg(),
            U32(rows),
            U32(hidden),
            U32(ACT_RELU),
        ];
        self.gpu
            .launch("sublet_bias_act_grad_f32", elements(rows, hidden), &args)?;
        self.matmul([w1, x.arg(), inner], [PIXELS, hidden, rows], TRANSPOSE_A)?;
        self.bias_grad([b1, inner], [rows, hidden])
    }

    /// Queues Adam's update by the gradients of the last [`Mlp::backward`]; `step` counts from 1.
    ///
    /// # Errors
    /// What the driver says.
    pub fn update(&self, step: u64, lr: f32) -> Result<(), GpuError> {
        let count = weight_count(self.hidden);
        let (correction1, correction2) = corrections(step);
        // CAST: the kernel works in floats.
        let numbers = [
            lr,
            BETA1 as f32,
            BETA2 as f32,
            EPSILON,
            0.0,
            correction1,
            correction2,
        ]
        .map(F32);
        let buffers = [
            &self.weights,
            &self.first_moments,
            &self.second_moments,
            &self.gradients,
        ]
        .map(Buffer::arg);
        let args = [buffers.as_slice(), &numbers, &[U64(count)]].concat();
        self.gpu
            .launch("sublet_adam_f32", Shape::elements(count), &args)
    }

    /// Queues `gradients += decay * slot` and then `slot = gradients`, with the slot of `history`
    /// that begins at `element`: what was learnt when the slot was last in turn has a say once
    /// more.
    ///
    /// # Errors
    /// What the driver says.
    pub fn recall(&self, history: &Buffer<f32>, element: u64, decay: f32) -> Result<(), GpuError> {
        let count = weight_count(self.hidden);
        let (slot, gradients) = (history.arg_at(element), self.gradients.arg());
        let shape = Shape::elements(count);
        for (to, from, factor) in [(gradients, slot, decay), (slot, gradients, 1.0)] {
            if factor == 1.0 {
                let zero = [to, F32(0.0), U64(count)];
                self.gpu.launch("sublet_fill_f32", shape, &zero)?;
            }
            self.gpu
                .launch(ADD, shape, &[to, from, F32(factor), U64(count)])?;
        }
        Ok(())
    }

    /// The logits of the last forward pass over `rows` rows.
    ///
    /// # Errors
    /// What the driver says to the copy, or to the work before it.
    pub fn logits(&self, rows: u32) -> Result<Vec<f32>, GpuError> {
        self.logits.read(rows as usize * CLASSES as usize)
    }

    /// The weights and Adam's two moments, after all queued updates.
    ///
    /// # Errors
    /// What the driver says to the copies, or to the work before them.
    pub fn state(&self) -> Result<[Vec<f32>; 3], GpuError> {
        // CAST: the weights are in memory, so their number fits usize.
        let count = weight_count(self.hidden) as usize;
        Ok([
            self.weights.read(count)?,
            self.first_moments.read(count)?,
            self.second_moments.read(count)?,
        ])
    }

    /// Replaces the weights.
    ///
    /// # Errors
    /// What the driver says to the copy.
    pub fn set_weights(&self, weights: &[f32]) -> Result<(), GpuError> {
        self.weights.write(weights)
    }

    /// Sets Adam's two moments.
    ///
    /// # Errors
    /// What the driver says to the copies.
    pub fn set_moments(&self, first: &[f32], second: &[f32]) -> Result<(), GpuError> {
        self.first_moments.write(first)?;
        self.second_moments.write(second)
    }

    /// `c = op(a) op(b)` with `[c, a, b]` and the sides `[m, n, k]`.
    fn matmul(&self, [c, a, b]: [Arg; 3], [m, n, k]: [u32; 3], flags: u32) -> Result<(), GpuError> {
        let args = [c, a, b, U32(m), U32(n), U32(k), U32(flags), F32(0.0)];
        self.gpu
            .launch("sublet_matmul_f32", Shape::tiles(m, n), &args)
    }

    fn bias_act(
        &self,
        x: &Buffer<f32>,
        bias: Arg,
        [rows, cols]: [u32; 2],
        act: u32,
    ) -> Result<(), GpuError> {
        let args = [x.arg(), x.arg(), bias, U32(rows), U32(cols), U32(act)];
        self.gpu
            .launch("sublet_bias_act_f32", elements(rows, cols), &args)
    }

    fn bias_grad(&self, [db, dy]: [Arg; 2], [rows, cols]: [u32; 2]) -> Result<(), GpuError> {
        let args = [db, dy, U32(rows), U32(cols)];
        self.gpu.launch(
            "sublet_bias_grad_f32",
            Shape::elements(u64::from(cols)),
            &args,
        )
    }
}

fn elements(rows: u32, cols: u32) -> Shape {
    Shape::elements(u64::from(rows) * u64::from(cols))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_weights_fill_the_layout() {
        let weights = initial_weights(32, &mut Rng::new(1));
        assert_eq!(weights.len() as u64, weight_count(32));
        let at = Layout::of(32);
        let bias1 = &weights[at.b1 as usize..at.w2 as usize];
        let bias2 = &weights[at.b2 as usize..];
        assert_eq!((bias1, bias2), ([0.0; 32].as_slice(), [0.0; 10].as_slice()));
        let bound = (6.0f32 / 64.0).sqrt();
        let (low, high) = weights[..at.b1 as usize]
            .iter()
            .fold((0.0f32, 0.0f32), |(low, high), w| {
                (low.min(*w), high.max(*w))
            });
        assert!(
            -bound <= low && low < -0.9 * bound && 0.9 * bound < high && high < bound,
            "{low} to {high}"
        );
    }

    #[test]
    fn corrections_follow_the_formula() {
        let (first, second) = corrections(1);
        assert!((first - 0.1).abs() < 1e-7 && (second - 0.001).abs() < 1e-9);
        assert_eq!(corrections(u64::MAX), (1.0, 1.0));
    }
}
