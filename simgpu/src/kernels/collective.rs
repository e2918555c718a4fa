//! HostKernel of `collective.cu`: a collective operation whose ranks' kernels spin until all of
//! them have begun.
//!
//! The host_kernel does not spin itself: it says whether the others have come, and the device is
//! busy with asking.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Cost, Fault, Kernel, Launch};

/// `out[i] = sum over ranks of in[i]`, in the order of ranks, `out` may be `in` — `(f32* out, const
/// f32* in, u32* arrived, f32* parts, u64 n, u32 rank, u32 ranks, u32 round)`. One block.
pub(super) const ALL_REDUCE: Kernel = Kernel {
    name: "sublet_all_reduce_f32",
    waits: Some(|launch| Ranks::of(launch)?.meet()),
    param_sizes: &[8, 8, 8, 8, 8, 4, 4, 4],
    run: |launch| {
        let ranks = Ranks::of(launch)?;
        ranks.meet()?;
        ranks.sum(launch)
    },
    cost: |launch| Cost {
        flops: launch.size(4) * launch.size(6),
        bytes: 4.0 * launch.size(4) * (3.0 + launch.size(6)),
        fixed_ns: 0,
    },
};

/// What the ranks share, as one of them sees it in one round.
struct Ranks<'a> {
    /// A word per rank.
    arrived: &'a [AtomicU32],
    /// A row per rank, of this round.
    rows: &'a [Cell<f32>],
    input: &'a [Cell<f32>],
    own: usize,
    /// What the words of those that have come say.
    here: u32,
}

impl<'a> Ranks<'a> {
    fn of(launch: &Launch<'a>) -> Result<Self, Fault> {
        let (n, rank, ranks) = (launch.u64(4)?, launch.u32(5)?, launch.u32(6)?);
        let round = launch.u32(7)?;
        let one_block = launch.grid == [1, 1, 1] && launch.block[1..] == [1, 1];
        if !one_block || rank >= ranks {
            return Err(Fault::InvalidValue);
        }
        let both = launch.buffer(3, n.saturating_mul(2 * u64::from(ranks)))?;
        let (even, odd) = both.split_at(both.len() / 2);
        Ok(Self {
            arrived: launch.words(2, u64::from(ranks))?,
            rows: if round & 1 == 0 { even } else { odd },
            input: launch.buffer(1, n)?,
            // CAST: below the length of a slice.
            own: rank as usize,
            here: round.wrapping_add(1),
        })
    }

    fn has_come(&self, word: &AtomicU32) -> bool {
        // SYNC(arrived): pairs with the Release in `meet`, of any rank's process; its row is there.
        // CAST: the sign of the distance is what counts.
        (word.load(Acquire).wrapping_sub(self.here) as i32) >= 0
    }

    /// Comes, unless it has already. True when all others have come as well.
    fn meet(&self) -> Result<bool, Fault> {
        let own = self.arrived.get(self.own).ok_or(Fault::InvalidValue)?;
        // CAST: as above.
        if (own.load(Relaxed).wrapping_sub(self.here) as i32) < 0 {
            let row = self.rows.iter().skip(self.own * self.input.len());
            for (part, value) in row.zip(self.input) {
                part.set(value.get());
            }
            // SYNC(arrived): publishes the row.
            own.store(self.here, Release);
        }
        Ok(self.arrived.iter().all(|word| self.has_come(word)))
    }

    fn sum(&self, launch: &Launch<'a>) -> Result<(), Fault> {
        let n = self.input.len();
        // CAST: the input's length came from 64 bits.
        for (at, out) in launch.buffer::<f32>(0, n as u64)?.iter().enumerate() {
            let parts = self.rows.iter().skip(at).step_by(n.max(1));
            out.set(parts.fold(0.0, |sum, part| sum + part.get()));
        }
        Ok(())
    }
}
