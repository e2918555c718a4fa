//! What a job uses stays on the device when its limit is lowered, what it does not goes.

use channel::{OrderState, Reason, Verb};
use tests::{Artefacts, wait_until};

use super::{Host, MIB};

const ON_THE_DEVICE: &str = "0 1";

/// A job of two blocks that it uses, made first, and two that it does not; so by the order in which
/// they were made it would be the wrong ones that leave.
struct Job {
    host: Host,
    hot: String,
    cold: String,
    hot_mapped: String,
    cold_mapped: String,
}

impl Job {
    fn start(mechanisms: &str) -> Self {
        let kernels = Artefacts::get()
            .root()
            .join("simgpu/kernels/elementwise.ptx");
        let kernels = kernels.to_str().expect("a path in UTF-8");
        let words = format!("chunk=4194304,reuse=0{mechanisms}");
        let vars = [
            ("SUBLET_RESIDENCY", words.as_str()),
            ("RESIDENT_KERNELS", kernels),
        ];
        let mut host = Host::with(&vars, true, None);
        // Three chunks, of which a kernel gets the first one's address.
        let hot = host.take(&format!("alloc {}", 12 * MIB));
        let hot_mapped = host.take(&format!("vmm {}", 4 * MIB));
        let cold_mapped = host.take(&format!("vmm {}", 4 * MIB));
        let cold = host.take(&format!("alloc {}", 12 * MIB));
        Self {
            host,
            hot,
            cold,
            hot_mapped,
            cold_mapped,
        }
    }

    #[track_caller]
    fn fit(&mut self, bytes: u64) {
        self.host.arbiter.order(Verb::Fit, bytes);
        let state = if bytes >= 32 * MIB {
            OrderState::Resident
        } else {
            OrderState::Partly
        };
        assert_eq!(self.host.arbiter.answered(), (state, Reason::None));
    }

    /// The limit is lowered to half, and raised again; whether what the job uses has stayed on the
    /// device meanwhile.
    #[track_caller]
    fn keeps_what_it_uses(&mut self) -> bool {
        self.fit(16 * MIB);
        let hot = self.host.run.ask(&format!("where {}", self.hot_mapped));
        let cold = self.host.run.ask(&format!("where {}", self.cold_mapped));
        self.fit(32 * MIB);
        for id in [&self.hot_mapped, &self.cold_mapped] {
            let back = self.host.run.ask(&format!("where {id}"));
            assert_eq!(back, ON_THE_DEVICE, "all of it is back");
        }
        hot == ON_THE_DEVICE && cold != ON_THE_DEVICE
    }

    /// Uses the blocks until a lowered limit finds that out.
    fn until_it_is_known(&mut self, mut uses: impl FnMut(&mut Self)) {
        wait_until("the blocks that are used stay on the device", || {
            uses(self);
            self.keeps_what_it_uses().then_some(())
        });
        // What tells both blocks apart is known of one of them; the other one was used while that
        // was looked for.
        uses(self);
    }

    fn launch(&mut self, how: u32) {
        for id in [&self.hot, &self.hot_mapped] {
            self.host.says(&format!("launch {id} {how}"), "0");
        }
    }

    /// Lowers the limit for good, frees one block that leaves the device with nothing less and one
    /// that was on it.
    #[track_caller]
    fn ends_with_the_second_on_the_device(mut self, [away, there]: [String; 2]) {
        self.fit(16 * MIB);
        assert_eq!(self.host.arbiter.footprint().resident_bytes, 16 * MIB);
        let before = self.host.on_the_device();
        self.host.says(&format!("free {away}"), "0");
        assert_eq!(self.host.on_the_device(), before, "it lay in host memory");
        self.host.says(&format!("free {there}"), "0");
        let left = before - self.host.on_the_device();
        assert_eq!(left, 12 * MIB, "all of it lay on the device");
        self.host.ended_well();
    }
}

#[test]
fn what_kernels_name_stays_on_the_device() {
    for how in 0..4 {
        let mut job = Job::start("");
        job.until_it_is_known(|job| job.launch(how));
        let blocks = [job.cold.clone(), job.hot.clone()];
        job.ends_with_the_second_on_the_device(blocks);
    }
}

#[test]
fn what_is_copied_stays_on_the_device() {
    let mut job = Job::start("");
    job.until_it_is_known(|job| {
        for id in [&job.hot, &job.hot_mapped] {
            job.host.says(&format!("fill {id} 1"), "0");
        }
    });
    let blocks = [job.cold.clone(), job.hot.clone()];
    job.ends_with_the_second_on_the_device(blocks);
}

#[test]
fn where_nobody_looks_what_was_made_first_leaves_first() {
    let mut job = Job::start(",look=0");
    for _ in 0..3 {
        job.launch(0);
        assert!(!job.keeps_what_it_uses());
    }
    job.fit(16 * MIB);
    let before = job.host.on_the_device();
    job.host.says(&format!("free {}", job.hot), "0");
    assert_eq!(job.host.on_the_device(), before, "it lay in host memory");
    job.host.ended_well();
}
