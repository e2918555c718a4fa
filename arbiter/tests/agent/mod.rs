//! What stands in for the interposer's side of residency: device memory that only counts, and an
//! agent that moves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use channel::client::ClientEnd;

/// Device memory that the clients of a test share.
#[derive(Debug)]
pub struct FakeMemory {
    free_bytes: AtomicU64,
}

impl FakeMemory {
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            free_bytes: AtomicU64::new(bytes),
        })
    }

    pub fn free_bytes(&self) -> u64 {
        self.free_bytes.load(Relaxed)
    }

    pub fn take(&self, bytes: u64) -> bool {
        let less = |free: u64| free.checked_sub(bytes);
        let taken = self.free_bytes.fetch_update(Relaxed, Relaxed, less);
        taken.is_ok()
    }

    pub fn give(&self, bytes: u64) {
        self.free_bytes.fetch_add(bytes, Relaxed);
    }
}

/// Carries out orders as the interposer's agent does, chunk by chunk, on bytes that only count.
/// Moves 8 MiB in a quarter of a millisecond and a bit.
pub struct Agent {
    /// What it refuses an eviction for; [`channel::Reason::None`]: nothing.
    pub refuses: Arc<parking_lot::Mutex<channel::Reason>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

const CHUNK: u64 = 8 << 20;

impl Agent {
    /// Of a client with so many evictable bytes, of which nothing is on the device yet; it takes
    /// them now.
    pub fn start(client: &ClientEnd, memory: &Arc<FakeMemory>, bytes: u64) -> Self {
        use channel::{Answer, Footprint, OrderState, Reason, Verb};
        let stop = Arc::new(AtomicBool::new(false));
        let refuses = Arc::new(parking_lot::Mutex::new(Reason::None));
        let (half, own) = (client.arbiter, client.client);
        assert!(half.residency().evictable, "the job is evictable");
        assert!(memory.take(bytes), "there is space at the start");
        let account = channel::Account::new(client.tenant, half.tenant_slot()).expect("slot");
        account
            .reserve(0, bytes, channel::NO_LIMIT)
            .expect("no limit");
        let mut claimed = Footprint {
            evictable_bytes: bytes,
            resident_bytes: bytes,
            ..Footprint::default()
        };
        own.want(0).expect("device").set_footprint(&claimed);
        let (ended, why) = (Arc::clone(&stop), Arc::clone(&refuses));
        let memory = Arc::clone(memory);
        let thread = std::thread::spawn(move || {
            let want = own.want(0).expect("device");
            let mut done = 0;
            while !ended.load(Relaxed) {
                let seen = half.orders();
                let order = half.device(0).and_then(|device| device.order());
                let Some(order) = order.filter(|order| order.number != done) else {
                    half.wait_for_orders(seen, Duration::from_millis(20));
                    continue;
                };
                done = order.number;
                let answer = |state, reason| {
                    want.answer(Answer {
                        number: order.number,
                        state,
                        reason,
                    });
                };
                let refused = *why.lock();
                if order.verb == Verb::Evict && refused != Reason::None {
                    answer(OrderState::Refused, refused);
                    continue;
                }
                answer(OrderState::Working, Reason::None);
                let all = claimed.evictable_bytes;
                let target = match order.verb {
                    Verb::Evict => 0,
                    Verb::Restore => all,
                    Verb::Fit => order.resident_target_bytes.min(all),
                };
                // A wake-up, as when memory has become free, is no new order.
                let stands = || {
                    let newest = half.device(0).and_then(|device| device.order());
                    newest.is_some_and(|newest| newest.number == order.number)
                };
                while claimed.resident_bytes != target && stands() {
                    std::thread::sleep(Duration::from_micros(250));
                    if ended.load(Relaxed) {
                        return;
                    }
                    if claimed.resident_bytes > target {
                        let bytes = CHUNK.min(claimed.resident_bytes - target);
                        claimed.resident_bytes -= bytes;
                        claimed.moved_out_bytes += bytes;
                        memory.give(bytes);
                    } else {
                        let bytes = CHUNK.min(target - claimed.resident_bytes);
                        if !memory.take(bytes) {
                            continue;
                        }
                        claimed.resident_bytes += bytes;
                        claimed.moved_in_bytes += bytes;
                    }
                    claimed.host_bytes = claimed.host_bytes.max(all - claimed.resident_bytes);
                    want.set_footprint(&claimed);
                }
                if claimed.resident_bytes != target {
                    continue;
                }
                answer(
                    match order.verb {
                        Verb::Evict => OrderState::Evicted,
                        _ if claimed.resident_bytes == all => OrderState::Resident,
                        _ => OrderState::Partly,
                    },
                    Reason::None,
                );
            }
        });
        Self {
            refuses,
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = testbed::joined(thread);
        }
    }
}
