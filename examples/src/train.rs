//! Training on the digits: the order of images, steps, evaluation, and saving and restoring all of
//! it.
//!
//! The device computes everything; the host draws the order of images, and reads the losses of an
//! epoch at its end. A run is a function of its [`Config`] alone: its losses have the same bits
//! every time, also when it was saved and restored.

use std::rc::Rc;

use crate::checkpoint::{Checkpoint, Config};
use crate::digits::{Images, PIXELS};
use crate::gpu::Arg::{F32, U32, U64};
use crate::gpu::{Buffer, Gpu, GpuError, Shape};
use crate::mlp::{self, Mlp};
use crate::rng::Rng;

/// The kernel that stands for the work of a larger model.
pub const BUSY: &str = "sublet_busy_us";

/// What the held-out images say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Mean cross-entropy.
    pub loss: f32,
    /// Part of the images that are recognised, 0 to 1.
    pub accuracy: f64,
}

/// Slots of a history of gradients.
const SLOTS: u64 = 128;
/// What is left of a slot's content when it is in turn again.
const DECAY: f32 = 0.125;

/// Gradients of earlier steps, in slots spread evenly over a buffer that stands for the state of a
/// larger model: every step adds what it finds in its slot and leaves its own there. So a loss
/// depends on every slot, and on bytes written 128 steps before.
struct History {
    slots: Buffer<f32>,
    /// Elements from one slot to the next.
    stride: u64,
}

impl History {
    fn new(gpu: &Rc<Gpu>, bytes: u64, weights: u64) -> Result<History, GpuError> {
        // CAST: an element has four bytes.
        let stride = (bytes / size_of::<f32>() as u64 / SLOTS).max(weights);
        let slots = gpu.alloc("the history of gradients", stride * SLOTS)?;
        for slot in 0..SLOTS {
            let args = [slots.arg_at(slot * stride), F32(0.0), U64(weights)];
            gpu.launch("sublet_fill_f32", Shape::elements(weights), &args)?;
        }
        Ok(History { slots, stride })
    }
}

/// A training run on a device.
pub struct Trainer {
    gpu: Rc<Gpu>,
    config: Config,
    mlp: Mlp,
    images: Device,
    held_out: Device,
    order: Buffer<u32>,
    batch: Device,
    losses: Buffer<f32>,
    hits: Buffer<u32>,
    rng: Rng,
    order_state: u64,
    step: u64,
    epoch: u64,
    position: u32,
    /// Losses of steps before the restored checkpoint in its epoch.
    restored_losses: Vec<f32>,
    extra_us: u64,
    history: Option<History>,
}

/// Images on the device.
struct Device {
    pixels: Buffer<f32>,
    labels: Buffer<u32>,
    count: u32,
}

impl Device {
    fn upload(gpu: &Rc<Gpu>, images: &Images) -> Result<Device, GpuError> {
        Ok(Device {
            pixels: gpu.upload("the images", &images.pixels)?,
            labels: gpu.upload("the labels", &images.labels)?,
            count: images.count(),
        })
    }
}

impl Trainer {
    /// A run at its start. `extra_us` microseconds of device time are added to every step, to stand
    /// for a larger model.
    ///
    /// # Errors
    /// When the device has no space, or refuses.
    pub fn new(
        gpu: &Rc<Gpu>,
        config: Config,
        (training, held_out): &(Images, Images),
        extra_us: u64,
    ) -> Result<Trainer, GpuError> {
        let mut rng = Rng::new(config.seed);
        let weights = mlp::initial_weights(config.hidden, &mut rng);
        let rows = config.batch.max(held_out.count());
        let steps = training.count().div_ceil(config.batch);
        Ok(Trainer {
            gpu: Rc::clone(gpu),
            config,
            mlp: Mlp::new(gpu, config.hidden, rows, &weights)?,
            images: Device::upload(gpu, training)?,
            held_out: Device::upload(gpu, held_out)?,
            order: gpu.alloc("the order of images", u64::from(training.count()))?,
            batch: Device {
                pixels: gpu.alloc(
                    "the batch's images",
                    u64::from(config.batch) * u64::from(PIXELS),
                )?,
                labels: gpu.alloc("the batch's labels", u64::from(config.batch))?,
                count: config.batch,
            },
            // One more for the evaluation.
            losses: gpu.alloc("the losses", u64::from(steps) + 1)?,
            hits: gpu.alloc("the hits", u64::from(steps) + 1)?,
            order_state: rng.state,
            rng,
            step: 0,
            epoch: 0,
            position: 0,
            restored_losses: Vec::new(),
            extra_us,
            history: None,
        })
    }

    /// Gives the run a history of its gradients in `bytes` of device memory, all of which has a
    /// part in the losses. They are those of another run than without it. It is not part of a
    /// checkpoint.
    ///
    /// # Errors
    /// When the device has no space, or refuses.
    pub fn keep_history(&mut self, bytes: u64) -> Result<(), GpuError> {
        let weights = mlp::weight_count(self.config.hidden);
        self.history = Some(History::new(&self.gpu, bytes, weights)?);
        Ok(())
    }

    /// Puts the run where `checkpoint` was taken. Its configuration must be this run's.
    ///
    /// # Errors
    /// What the driver says to the copies.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), GpuError> {
        self.mlp.set_weights(&checkpoint.weights)?;
        self.mlp
            .set_moments(&checkpoint.first_moments, &checkpoint.second_moments)?;
        (self.step, self.epoch, self.position) =
            (checkpoint.step, checkpoint.epoch, checkpoint.position);
        self.order_state = checkpoint.order_state;
        self.rng.state = checkpoint.order_state;
        self.restored_losses.clone_from(&checkpoint.losses);
        if self.position > 0 {
            self.draw_order()?;
        }
        Ok(())
    }

    /// The run as it is, after all queued work.
    ///
    /// # Errors
    /// What the driver says to the copies, or to the work before them.
    pub fn checkpoint(&self) -> Result<Checkpoint, GpuError> {
        let [weights, first_moments, second_moments] = self.mlp.state()?;
        Ok(Checkpoint {
            config: self.config,
            step: self.step,
            epoch: self.epoch,
            position: self.position,
            order_state: self.order_state,
            losses: self.epoch_losses()?,
            weights,
            first_moments,
            second_moments,
        })
    }

    /// Whether `checkpoint` is sound for this run, or the sentence that says why it is not.
    ///
    /// # Errors
    /// The sentence.
    pub fn accepts(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        let (theirs, ours) = (checkpoint.config, self.config);
        if theirs != ours {
            return Err(format!(
                "it was made with --hidden {} --batch {} --lr {} --seed {}, this run has --hidden {} --batch {} --lr {} --seed {}",
                theirs.hidden,
                theirs.batch,
                theirs.lr,
                theirs.seed,
                ours.hidden,
                ours.batch,
                ours.lr,
                ours.seed
            ));
        }
        let count = mlp::weight_count(ours.hidden);
        let fits = [
            &checkpoint.weights,
            &checkpoint.first_moments,
            &checkpoint.second_moments,
        ]
        .iter()
        .all(|values| values.len() as u64 == count); // CAST: a length fits 64 bits.
        let steps = checkpoint.position.div_ceil(ours.batch);
        let whole = checkpoint.position < self.images.count
            && checkpoint.position.is_multiple_of(ours.batch);
        if !fits || !whole || checkpoint.losses.len() != steps as usize {
            return Err("its parts do not fit together".to_owned());
        }
        Ok(())
    }

    /// Steps done.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Epochs done.
    #[must_use]
    pub fn epochs(&self) -> u64 {
        self.epoch
    }

    /// Queues one step. At the end of an epoch waits for it and returns the mean of its losses.
    ///
    /// # Errors
    /// What the driver says to the work, or to work before it.
    pub fn advance(&mut self) -> Result<Option<f32>, GpuError> {
        if self.position == 0 {
            self.order_state = self.rng.state;
            self.restored_losses.clear();
            self.draw_order()?;
        }
        let rows = self.config.batch.min(self.images.count - self.position);
        let index = self.order.arg_at(u64::from(self.position));
        let pixels = [self.batch.pixels.arg(), self.images.pixels.arg(), index];
        let labels = [self.batch.labels.arg(), self.images.labels.arg(), index];
        for (buffers, cols) in [(pixels, PIXELS), (labels, 1)] {
            let args = [
                buffers.as_slice(),
                &[U32(rows), U32(cols), U32(self.images.count)],
            ]
            .concat();
            self.gpu.launch(
                "sublet_gather_rows_b32",
                Shape::elements(u64::from(rows) * u64::from(cols)),
                &args,
            )?;
        }
        self.mlp.forward(&self.batch.pixels, rows)?;
        let slot = u64::from(self.position / self.config.batch);
        self.mlp.loss(
            &self.batch.labels,
            rows,
            true,
            (&self.losses, &self.hits, slot),
        )?;
        self.mlp.backward(&self.batch.pixels, rows)?;
        if let Some(history) = &self.history {
            let at = self.step % SLOTS * history.stride;
            self.mlp.recall(&history.slots, at, DECAY)?;
        }
        self.mlp.update(self.step + 1, self.config.lr)?;
        if self.extra_us > 0 {
            self.gpu
                .launch(BUSY, Shape::THREAD, &[U64(self.extra_us)])?;
        }
        self.step += 1;
        self.position += rows;
        if self.position < self.images.count {
            return Ok(None);
        }
        let losses = self.epoch_losses()?;
        self.epoch += 1;
        self.position = 0;
        self.order_state = self.rng.state;
        self.restored_losses.clear();
        // CAST: an epoch has few steps.
        Ok(Some(losses.iter().sum::<f32>() / losses.len() as f32))
    }

    /// Classifies the held-out images, after all queued steps.
    ///
    /// # Errors
    /// What the driver says to the work, or to work before it.
    pub fn evaluate(&self) -> Result<Score, GpuError> {
        self.mlp
            .forward(&self.held_out.pixels, self.held_out.count)?;
        let steps = self.images.count.div_ceil(self.config.batch);
        let at = u64::from(steps);
        self.mlp.loss(
            &self.held_out.labels,
            self.held_out.count,
            false,
            (&self.losses, &self.hits, at),
        )?;
        let count = steps as usize + 1;
        let (losses, hits) = (self.losses.read(count)?, self.hits.read(count)?);
        // PANIC: both have `count` elements.
        Ok(Score {
            loss: losses[count - 1],
            accuracy: f64::from(hits[count - 1]) / f64::from(self.held_out.count),
        })
    }

    fn draw_order(&mut self) -> Result<(), GpuError> {
        self.order.write(&self.rng.permutation(self.images.count))
    }

    /// The losses of the current epoch's steps so far.
    fn epoch_losses(&self) -> Result<Vec<f32>, GpuError> {
        let steps = self.position.div_ceil(self.config.batch) as usize;
        let mut losses = self.losses.read(steps)?;
        for (loss, restored) in losses.iter_mut().zip(&self.restored_losses) {
            *loss = *restored;
        }
        Ok(losses)
    }
}
