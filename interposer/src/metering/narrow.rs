//! The last granule of a quota.
//!
//! Which granule a small allocation lies in is the driver's choice, so a whole one is prepaid for
//! it. Where no whole one is left, an allocation that fits between others in a granule that is paid
//! for already must not be refused. Whether the driver puts it there cannot be known without
//! asking; but there is space that it can use, and nobody else may take it meanwhile:
//!
//! * one allocation at a time goes this way (it *claims* the space; no lock is held over the call);
//! * a thread that took space with a prepaid granule in hand while somebody claims leaves that
//!   granule to the claim instead of giving it back. If the claimed space went to them, the granule
//!   that the claim then takes is paid for all along;
//! * a thread that freed a whole granule meanwhile leaves its charge, too: it may have been the one
//!   with the space. The driver has it back before the table knows, so the claim waits for the
//!   charge.
//!
//! So the device never gives more than the quota as long as its driver uses space that it has
//! before it takes more. A driver that does not is found out by the first such allocation, which is
//! freed again at once and refused; afterwards this process lets no allocation go this way any
//! more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use channel::{Account, OverLimit, Prepaid};
use shim_ffi::*;

use super::{Meter, live};
use crate::driver::real;
use crate::gate::capture;
use crate::ground::clock;

/// TIMEOUT: another thread's claim or prepaid call lasts as long as the driver's allocation, some
/// microseconds.
const PATIENCE_NS: u64 = 200_000_000;
/// TIMEOUT: how long a thread between the driver's answer and its entry in the table may wait for a
/// processor. It is waited for in vain once: a driver that takes granules although it has space is
/// not trusted again.
const UNSETTLED_NS: u64 = 2_000_000_000;
const PAUSE: Duration = Duration::from_micros(20);
/// Pauses grow up to so many times the first.
const LONGEST: u32 = 64;

/// Whether somebody claims; changed under [`LEFT`]'s lock.
static CLAIMED: AtomicBool = AtomicBool::new(false);
/// What is left to the claim, with its device.
static LEFT: Mutex<Vec<(usize, Left)>> = Mutex::new(Vec::new());
/// This driver takes new granules although it has space.
static DISTRUSTED: AtomicBool = AtomicBool::new(false);

/// A charge that nobody needs any more.
enum Left {
    /// A granule for an allocation that found space.
    Prepaid(Prepaid),
    /// Bytes of granules that were freed.
    Freed(u64),
}

impl Left {
    fn bytes(&self) -> u64 {
        match self {
            Self::Prepaid(prepaid) => prepaid.bytes(),
            Self::Freed(bytes) => *bytes,
        }
    }

    /// Keeps `taken` of it charged, and gives the rest back.
    fn settle(self, account: &Account<'_>, device: usize, taken: u64) {
        match self {
            Self::Prepaid(prepaid) => account.settle(device, prepaid, taken),
            Self::Freed(bytes) => account.release(device, bytes.saturating_sub(taken)),
        }
    }
}

fn left() -> MutexGuard<'static, Vec<(usize, Left)>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// After a call for which a granule was prepaid: settles it, or leaves it to a thread that claims
/// space.
///
/// A claim is published before the space is looked for. So a thread that took that space is in the
/// table already when the claim looks, or sees the claim here, after it has put its allocation into
/// the table.
#[inline]
pub(super) fn settle(meter: &Meter, prepaid: Prepaid, taken: u64) {
    if taken == 0 && CLAIMED.load(Ordering::Relaxed) {
        return hand_over(meter, prepaid);
    }
    meter.account.settle(meter.device, prepaid, taken);
}

#[cold]
fn hand_over(meter: &Meter, prepaid: Prepaid) {
    let mut left = left();
    if CLAIMED.load(Ordering::Relaxed) {
        left.push((meter.device, Left::Prepaid(prepaid)));
    } else {
        drop(left);
        meter.account.settle(meter.device, prepaid, 0);
    }
}

/// Gives back what a free has given back to the device, or leaves it to a thread that claims space.
/// Called when the table knows of the free: a claim that has seen the space there is seen here.
#[inline]
pub(super) fn released(account: &Account<'_>, device: usize, bytes: u64) {
    if CLAIMED.load(Ordering::Relaxed) {
        let mut left = left();
        if CLAIMED.load(Ordering::Relaxed) {
            left.push((device, Left::Freed(bytes)));
            return;
        }
    }
    account.release(device, bytes);
}

/// One thread's claim to space.
struct Claim<'a>(&'a Meter);

impl<'a> Claim<'a> {
    fn new(meter: &'a Meter) -> Option<Self> {
        let begun = clock::now_ns();
        let mut pauses = 1;
        loop {
            let taken = {
                let _left = left();
                CLAIMED.swap(true, Ordering::Relaxed)
            };
            if !taken {
                return Some(Self(meter));
            }
            if clock::now_ns().saturating_sub(begun) > PATIENCE_NS {
                return None;
            }
            clock::pause(PAUSE * pauses);
            pauses = (pauses * 2).min(LONGEST);
        }
    }

    /// A charge for what the call has taken: that of somebody who had the space before, or of the
    /// space itself.
    fn compensated(&self, taken: u64) -> bool {
        let Meter {
            account, device, ..
        } = self.0;
        let begun = clock::now_ns();
        loop {
            let mut left = left();
            let here: u64 = left
                .iter()
                .filter(|one| one.0 == *device)
                .map(|one| one.1.bytes())
                .sum();
            if here >= taken {
                let mut missing = taken;
                for (_, one) in left.extract_if(.., |one| one.0 == *device) {
                    let kept = missing.min(one.bytes());
                    missing -= kept;
                    one.settle(account, *device, kept);
                }
                return true;
            }
            drop(left);
            if clock::now_ns().saturating_sub(begun) > UNSETTLED_NS {
                return false;
            }
            clock::pause(PAUSE);
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut left = left();
        CLAIMED.store(false, Ordering::Relaxed);
        for (device, one) in left.drain(..) {
            one.settle(&self.0.account, device, 0);
        }
    }
}

/// An allocation of `bytes` for which no whole granule is left: made if there is space in those
/// that are paid for.
///
/// # Errors
/// There is no space: both back, and no call was made.
#[cold]
#[inline(never)]
pub(super) fn allocate<Call, Made>(
    meter: &Meter,
    bytes: u64,
    over: OverLimit,
    call: Call,
    made: Made,
) -> Result<CUresult, (Call, Made)>
where
    Call: FnOnce() -> CUresult,
    Made: FnOnce() -> (u64, u64),
{
    let narrow = bytes != 0
        && bytes <= live::SMALL
        && over.used_bytes <= over.limit_bytes
        && !DISTRUSTED.load(Ordering::Relaxed)
        // Looked at before anybody is kept waiting: most of the time there is none.
        && live::space(meter.context, meter.device as u16, bytes);
    let Some(claim) = narrow.then(|| Claim::new(meter)).flatten() else {
        return Err((call, made));
    };
    if !live::space(meter.context, meter.device as u16, bytes) {
        return Err((call, made));
    }
    let result = call();
    if !result.is_ok() {
        return Ok(result);
    }
    let (address, bytes) = made();
    let taken = live::insert(address, meter.live(bytes));
    if taken == 0 || claim.compensated(taken) {
        return Ok(result);
    }
    drop(claim);
    DISTRUSTED.store(true, Ordering::Relaxed);
    if meter.try_reserve(taken).is_ok() {
        return Ok(result);
    }
    // SAFETY: what the driver has just made and nobody has heard of.
    let free = || unsafe { real::cuMemFree_v2(CUdeviceptr(address)) };
    let _ = capture::relaxed(free);
    // Others may have come to lie in the same granule meanwhile: then it stays, and somebody has to
    // pay.
    let freed = live::remove(address).map_or(0, |(_, freed)| freed);
    meter.force(taken.saturating_sub(freed));
    Ok(meter.refuse(over, bytes))
}
