//! Device memory whose content is known: stripes of random words spread over blocks, and the hash
//! of each.
//!
//! A job of many gigabytes is stood for by a part of its bytes: one stripe at the end of every span
//! is written, what lies between is left alone. Copies move all of it; what a copy loses or puts
//! elsewhere shows in a stripe. The hashes are computed by the device (`sublet_hash_chunks`), so
//! that a check reads what kernels read.

use std::rc::Rc;

use crate::gpu::Arg::U64;
use crate::gpu::{Buffer, Gpu, GpuError, Shape};
use crate::pipeline::Pipeline;
use crate::rng::Rng;

/// The kernels that are needed.
pub const KERNELS: [&str; 1] = ["sublet_hash_chunks"];

/// How memory is laid out.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Bytes of each block but the last.
    pub block: u64,
    /// Bytes from one stripe to the next.
    pub span: u64,
    /// Bytes of a stripe, a multiple of 8.
    pub stripe: u64,
}

/// Blocks with stripes.
pub struct Stripes {
    gpu: Rc<Gpu>,
    layout: Layout,
    seed: u64,
    blocks: Vec<Buffer<u64>>,
    /// Block, first word, times written.
    stripes: Vec<(usize, u64, u64)>,
    /// Pairs of address and length.
    list: Buffer<u64>,
    found: Buffer<u64>,
    /// What the device computed when a stripe was written.
    hashes: Vec<[u64; 2]>,
}

impl Stripes {
    /// Allocates `bytes` and writes all stripes.
    ///
    /// # Errors
    /// When the device has no space, or refuses.
    pub fn new(gpu: &Rc<Gpu>, bytes: u64, layout: Layout, seed: u64) -> Result<Stripes, GpuError> {
        let mut blocks = Vec::new();
        let mut stripes = Vec::new();
        let mut left = bytes;
        while left >= layout.stripe {
            let block = left.min(layout.block);
            blocks.push(gpu.alloc("a block", block / 8)?);
            let mut at = 0;
            while at + layout.stripe <= block {
                let end = block.min(at + layout.span);
                stripes.push((blocks.len() - 1, (end - layout.stripe) / 8, 0));
                at += layout.span;
            }
            left -= block;
        }
        let count = stripes.len() as u64; // CAST: a length fits.
        let list: Vec<u64> = stripes
            .iter()
            .flat_map(|(block, word, _)| [blocks[*block].address() + 8 * word, layout.stripe])
            .collect();
        let mut all = Stripes {
            gpu: Rc::clone(gpu),
            layout,
            seed,
            list: gpu.upload("the list of stripes", &list)?,
            found: gpu.alloc("the hashes", 2 * count)?,
            hashes: vec![[0; 2]; stripes.len()],
            blocks,
            stripes,
        };
        all.change(0.0, 1.0)?;
        Ok(all)
    }

    /// Stripes in all.
    #[must_use]
    pub fn count(&self) -> usize {
        self.stripes.len()
    }

    /// Words of stripe `at` after it was written `times` times.
    fn words(&self, at: usize, times: u64) -> Vec<u64> {
        // CAST: a length fits.
        let mut rng = Rng::new(self.seed ^ (at as u64) << 20 ^ times << 52);
        (0..self.layout.stripe / 8).map(|_| rng.bits()).collect()
    }

    /// Writes the stripes from `from` to `to`, as parts of all, anew.
    ///
    /// # Errors
    /// What the driver says.
    pub fn change(&mut self, from: f64, to: f64) -> Result<usize, GpuError> {
        // CAST: rounded to whole stripes.
        let place = |part: f64| (part.clamp(0.0, 1.0) * self.stripes.len() as f64).round() as usize;
        let range = place(from)..place(to);
        for at in range.clone() {
            self.stripes[at].2 += 1;
            let (block, word, times) = self.stripes[at];
            self.blocks[block].write_at(word, &self.words(at, times))?;
        }
        let hashes = self.hash()?;
        for at in range.clone() {
            self.hashes[at] = hashes[at];
        }
        Ok(range.len())
    }

    /// The first words of a stripe as the program wrote them, and as they are on the device, to
    /// tell a wrong copy from a wrong hash.
    ///
    /// # Errors
    /// What the driver says.
    pub fn reread(&self, at: usize) -> Result<bool, GpuError> {
        let (block, word, times) = self.stripes[at];
        // CAST: a stripe is short.
        let found = self.blocks[block].read_at(word, (self.layout.stripe / 8) as usize)?;
        Ok(found == self.words(at, times))
    }

    /// The hash of every stripe, by the device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn hash(&self) -> Result<Vec<[u64; 2]>, GpuError> {
        let count = self.stripes.len();
        let args = [
            self.found.arg(),
            self.list.arg(),
            U64(count as u64), // CAST: a length fits.
        ];
        self.gpu.launch(
            "sublet_hash_chunks",
            Shape::elements(count as u64 * 256),
            &args,
        )?;
        let words = self.found.read(2 * count)?;
        Ok(words
            .chunks_exact(2)
            .map(|pair| [pair[0], pair[1]])
            .collect())
    }

    /// Says that each block is a group.
    pub fn declare(&self, pipeline: Pipeline) {
        for (group, block) in (0u32..).zip(&self.blocks) {
            pipeline.add(group, block.address(), block.bytes());
        }
    }

    /// As [`wrong`](Self::wrong), block by block as their memory is there. `first` is called when
    /// the device has done the first one.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pass(&self, pipeline: Pipeline, first: impl FnOnce()) -> Result<usize, GpuError> {
        let mut first = Some(first);
        for (group, block) in (0u32..).zip(0..self.blocks.len()) {
            // CAST: lengths fit.
            let from = self.stripes.partition_point(|(of, ..)| *of < block) as u64;
            let count = self.stripes.partition_point(|(of, ..)| *of <= block) as u64 - from;
            if count == 0 {
                continue;
            }
            pipeline.begin(group);
            let args = [
                self.found.arg_at(2 * from),
                self.list.arg_at(2 * from),
                U64(count),
            ];
            self.gpu
                .launch("sublet_hash_chunks", Shape::elements(count * 256), &args)?;
            if let Some(first) = first.take() {
                self.gpu.wait()?;
                first();
            }
        }
        let words = self.found.read(2 * self.stripes.len())?;
        let kept = self.hashes.iter().flatten();
        Ok(words
            .iter()
            .zip(kept)
            .filter(|(found, kept)| found != kept)
            .count())
    }

    /// How many stripes are not what was written.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wrong(&self) -> Result<usize, GpuError> {
        let found = self.hash()?;
        Ok(found
            .iter()
            .zip(&self.hashes)
            .filter(|(found, kept)| found != kept)
            .count())
    }
}
