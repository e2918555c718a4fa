//! Every number of the rule, with its unit and where it comes from.

use std::num::NonZeroU32;

/// The numbers of the rule. Times in nanoseconds; the rest are parts of one.
///
/// "Model" is the discrete-event model in the crate's tests: jobs recorded on an H200 and synthetic
/// ones on a device with slices of 2 ms and turns of 140 us. What varying a number costs there is
/// said in points of the sum of speeds (1.00: one job alone).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Constants {
    /// How often the executor looks. Model: 1 ms costs 0.04 beside a job that waits in each step.
    pub look_ns: u64,
    /// Over how long means are taken. Model: 25 to 200 ms within one point.
    pub mean_ns: u64,
    /// How much of a job may be in flight. Model: 6 ms makes the worst second miss 3.9 points of
    /// kernel time in place of 2.7.
    pub cap_ns: u64,
    /// The same of a job that is ahead while another is owed time, and of an opportunistic one.
    pub narrow_ns: u64,
    /// The same of every job beside one of the latency class.
    pub latency_cap_ns: u64,
    /// From how much a job is owed, others that are ahead are shut for it; also by how much they
    /// have to be ahead. Model: half of it costs 0.03.
    pub owed_ns: u64,
    /// From how much a promise is missed, others stay shut through a job's gaps as well.
    pub promise_ns: u64,
    /// Through how long a gap.
    pub through_gap_ns: u64,
    /// Below how much pending work a job no longer needs the others shut.
    pub nearly_empty_ns: u64,
    /// Below how much pending work of the last one the next job enters that takes turns, and how
    /// long a gap of the holder opens to all.
    pub enter_ns: u64,
    /// How long others stay shut after a latency job's queue is empty.
    pub latency_linger_ns: u64,
    /// How long after its last request a latency job keeps its neighbours narrow.
    pub latency_active_ns: u64,
    /// Bound of each balance, before the largest kernel is added.
    pub bound_ns: u64,
    /// Bound of the time of turns that is not charged yet, before the largest kernel is added.
    pub lost_ns: u64,
    /// How much a largest kernel adds to the bound at most.
    pub bound_kernel_ns: u64,
    /// Bound of what a latency job may save up, for a whole device.
    pub slack_ns: u64,
    /// What it has of that when it joins.
    pub slack_first_ns: u64,
    /// Part of the device that an entitlement is short of, so that noise owes nobody. Model: 0.005
    /// costs 0.04, 0.03 makes the worst second 1.5 points worse.
    pub tolerance: f64,
    /// The same for all jobs together: what they all forgo, a job that is ahead would gain.
    pub tolerance_all: f64,
    /// Below which delay a job counts as not held up by the device.
    pub unhindered: f64,
    /// A job fills the device where its work is this many times its own time on the host.
    pub fills: f64,
    /// From which delay a job that visits shortly takes turns with those that fill the device, and
    /// what part of looks has to see such a visit.
    pub visits_delay: f64,
    /// See [`Constants::visits_delay`].
    pub visits: f64,
    /// How long one of several jobs that fill the device has it.
    pub quantum_ns: u64,
    /// For how long after it last wanted the device a job still takes turns.
    pub absent_ns: u64,
    /// When a shut gate opens by itself unless a look renews it.
    pub expiry_ns: u64,
    /// How long an idle device waits for a process before that is banned, beside twice its largest
    /// kernel.
    pub stall_ns: u64,
    /// Largest kernel that counts there.
    pub stall_kernel_ns: u64,
    /// The first ban; each next one is twice as long.
    pub ban_first_ns: u64,
    /// The longest ban.
    pub ban_most_ns: u64,
    /// Device time after which a ban's memory is gone.
    pub ban_forget_ns: u64,
    /// From how long on a job that wants nothing is absent.
    pub service_gap_ns: u64,
    /// A service is absent for this part of the time at least, and uses at most that part of its
    /// share.
    pub service_absent: f64,
    /// See [`Constants::service_absent`].
    pub service_uses: f64,
    /// Over how long that is seen.
    pub service_mean_ns: u64,
    /// What `share_max` lets a job save up, for a whole device.
    pub bucket_ns: u64,
    /// How long a next one that takes turns waits at most until the last one's queue is empty.
    pub drain_ns: u64,
    /// How long a job is measured alone at a time, how often, and for how long in all.
    pub solo_ns: u64,
    /// See [`Constants::solo_ns`].
    pub solo_every_ns: u64,
    /// See [`Constants::solo_ns`].
    pub solo_enough_ns: u64,
    /// How many such stretches a job is given at most.
    pub solo_stretches: u32,
    /// How long a job is below its floor beside kernels of at least
    /// [`Constants::long_kernel_ns`] before the two get slices.
    pub below_floor_ns: u64,
    /// See [`Constants::below_floor_ns`].
    pub long_kernel_ns: u64,
    /// How long slices last after the last doubt.
    pub doubt_ns: u64,
    /// Finished work over the time that passed that is still believed.
    pub excess: f64,
    /// By how much it may be beyond.
    pub excess_ns: u64,
    /// Largest kernel that is believed to have been finished at once.
    pub excess_kernel_ns: u64,
    /// Part of the time with work on the device that is finished at least, where nobody hides
    /// work.
    pub least: f64,
    /// Time alone after which the scale of a job's weights is learnt.
    pub learn_ns: u64,
}

impl Constants {
    /// The numbers as the model found them.
    pub const MODEL: Self = Self {
        look_ns: 200_000,
        mean_ns: 50_000_000,
        cap_ns: 3_000_000,
        narrow_ns: 500_000,
        latency_cap_ns: 300_000,
        owed_ns: 2_000_000,
        promise_ns: 5_000_000,
        through_gap_ns: 1_000_000,
        nearly_empty_ns: 200_000,
        enter_ns: 300_000,
        latency_linger_ns: 300_000,
        latency_active_ns: 1_000_000_000,
        bound_ns: 20_000_000,
        lost_ns: 100_000_000,
        bound_kernel_ns: 200_000_000,
        slack_ns: 200_000_000,
        slack_first_ns: 5_000_000,
        tolerance: 0.015,
        tolerance_all: 0.04,
        unhindered: 0.01,
        fills: 1.2,
        visits_delay: 0.3,
        visits: 0.03,
        quantum_ns: 10_000_000,
        absent_ns: 1_000_000,
        expiry_ns: 3_000_000,
        stall_ns: 1_300_000,
        stall_kernel_ns: 50_000_000,
        ban_first_ns: 5_000_000,
        ban_most_ns: 160_000_000,
        ban_forget_ns: 100_000_000,
        service_gap_ns: 1_000_000,
        service_absent: 0.3,
        service_uses: 0.6,
        service_mean_ns: 500_000_000,
        bucket_ns: 10_000_000,
        drain_ns: 4_000_000,
        solo_ns: 5_000_000,
        solo_every_ns: 2_000_000_000,
        solo_enough_ns: 20_000_000,
        solo_stretches: 16,
        below_floor_ns: 500_000_000,
        long_kernel_ns: 2_000_000,
        doubt_ns: 5_000_000_000,
        excess: 1.1,
        excess_ns: 100_000_000,
        excess_kernel_ns: 2_000_000_000,
        least: 0.4,
        learn_ns: 5_000_000,
    };

    /// The same rule where everything takes `by` times as long.
    #[must_use]
    pub fn dilated(self, by: NonZeroU32) -> Self {
        let by = u64::from(by.get());
        let longer = |span: u64| span.saturating_mul(by);
        Self {
            look_ns: longer(self.look_ns),
            mean_ns: longer(self.mean_ns),
            cap_ns: longer(self.cap_ns),
            narrow_ns: longer(self.narrow_ns),
            latency_cap_ns: longer(self.latency_cap_ns),
            owed_ns: longer(self.owed_ns),
            promise_ns: longer(self.promise_ns),
            through_gap_ns: longer(self.through_gap_ns),
            nearly_empty_ns: longer(self.nearly_empty_ns),
            enter_ns: longer(self.enter_ns),
            latency_linger_ns: longer(self.latency_linger_ns),
            latency_active_ns: longer(self.latency_active_ns),
            bound_ns: longer(self.bound_ns),
            lost_ns: longer(self.lost_ns),
            bound_kernel_ns: longer(self.bound_kernel_ns),
            slack_ns: longer(self.slack_ns),
            slack_first_ns: longer(self.slack_first_ns),
            quantum_ns: longer(self.quantum_ns),
            absent_ns: longer(self.absent_ns),
            expiry_ns: longer(self.expiry_ns),
            stall_ns: longer(self.stall_ns),
            stall_kernel_ns: longer(self.stall_kernel_ns),
            ban_first_ns: longer(self.ban_first_ns),
            ban_most_ns: longer(self.ban_most_ns),
            ban_forget_ns: longer(self.ban_forget_ns),
            service_gap_ns: longer(self.service_gap_ns),
            service_mean_ns: longer(self.service_mean_ns),
            bucket_ns: longer(self.bucket_ns),
            drain_ns: longer(self.drain_ns),
            solo_ns: longer(self.solo_ns),
            solo_every_ns: longer(self.solo_every_ns),
            solo_enough_ns: longer(self.solo_enough_ns),
            solo_stretches: self.solo_stretches,
            below_floor_ns: longer(self.below_floor_ns),
            long_kernel_ns: longer(self.long_kernel_ns),
            doubt_ns: longer(self.doubt_ns),
            learn_ns: longer(self.learn_ns),
            service_absent: self.service_absent,
            service_uses: self.service_uses,
            excess: self.excess,
            excess_ns: longer(self.excess_ns),
            excess_kernel_ns: longer(self.excess_kernel_ns),
            least: self.least,
            tolerance: self.tolerance,
            tolerance_all: self.tolerance_all,
            unhindered: self.unhindered,
            fills: self.fills,
            visits_delay: self.visits_delay,
            visits: self.visits,
        }
    }
}

impl Default for Constants {
    fn default() -> Self {
        Self::MODEL
    }
}
