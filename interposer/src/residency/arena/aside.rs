//! Frees that wait, and blocks that were freed beside a capture.
//!
//! A free waits for what was submitted before it: the place may be somebody else's right after. To
//! wait for a whole context an event is recorded behind everything in it, which ends every capture
//! there; so that is done while none is in progress and none begins. A block that is freed beside a
//! capture is put aside: nobody is given its place until such an event has passed, which is
//! recorded when no capture is in progress any more. The next free gives it back, or an allocation
//! that would be refused otherwise.
//!
//! Whether the program may free at all beside a capture is the driver's to say.

use std::time::Duration;

use shim_ffi::*;

use super::{Arena, Block, Inner, arenas};
use crate::attachment::client;
use crate::driver::real;
use crate::gate::{self, capture, context};
use crate::ground::clock::{self, now_ns};
use crate::ground::process;
use crate::ground::thread::thread;
use crate::metering::Meter;
use crate::residency::{beginnings, quiesce, tuning};

/// TIMEOUT: how long an allocation that would be refused waits for the end of captures beside which
/// memory was freed. The same thread may have to end them.
const CAPTURES_NS: u64 = 1_000_000_000;
/// Time between two looks at an event.
const LOOK: Duration = Duration::from_micros(10);
const LONGEST_LOOK: Duration = Duration::from_micros(200);

/// A block that was freed beside a capture.
#[derive(Debug)]
pub(super) struct Aside {
    pub(super) address: u64,
    pub(super) block: Block,
    /// Grows from one to the next.
    number: u64,
    /// Recorded behind everything after it was freed; 0: none yet.
    event: usize,
}

/// What [`Arena::allocate`] finds short of is looked for among blocks that are aside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    /// Yes.
    Some,
    /// That was in vain.
    None,
}

/// What the driver answers to a call of the program's that allocates or frees, where a capture
/// forbids it: by the thread's mode, and with the same consequences for the capture.
pub(super) fn allowed() -> Result<(), CUresult> {
    if !capture::any() {
        return Ok(());
    }
    // SAFETY: no allocation lies there; the driver looks whether the thread may free now.
    let answer = thread().own(|| unsafe { real::cuMemFree_v2(CUdeviceptr(0)) });
    match answer {
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Err(answer),
        _ => Ok(()),
    }
}

/// A capture has ended: what was freed beside it waits for what was submitted until now.
pub(crate) fn capture_ended() {
    if crate::residency::active() && !capture::any() {
        arenas().for_each(Arena::mark_aside);
    }
}

fn handle(event: usize) -> CUevent {
    CUevent(std::ptr::with_exposed_provenance_mut(event))
}

/// Waits for an event of ours, beside captures of whichever threads. What it says at `until_ns`, or
/// when the process ends, may be that it is not ready.
fn wait(event: usize, until_ns: u64) -> CUresult {
    let mut nap = LOOK;
    loop {
        // SAFETY: an event of ours, which is never destroyed. The second call does not wait: it
        // lets the driver's pools know, as its own free does.
        let answer = capture::relaxed(|| unsafe {
            match real::cuEventQuery(handle(event)) {
                CUresult::CUDA_SUCCESS => real::cuEventSynchronize(handle(event)),
                other => other,
            }
        });
        if answer != CUresult::CUDA_ERROR_NOT_READY || process::exiting() || now_ns() > until_ns {
            return answer;
        }
        clock::pause(nap);
        nap = (nap * 2).min(LONGEST_LOOK);
    }
}

impl Arena {
    /// Waits for the context, as a free does; false, at once, where that would end a capture.
    pub(super) fn synchronize(&self) -> Result<bool, CUresult> {
        gate::before_sync();
        if !real::exported(Symbol::cuCtxRecordEvent) {
            if capture::any() {
                return Ok(false);
            }
            // SAFETY: the context is alive: it has memory of which the program knows.
            let answer = self.in_context(|| unsafe { real::cuCtxSynchronize() })?;
            return answer.ok().map(|()| true);
        }
        let Some(event) = self.record()? else {
            return Ok(false);
        };
        // Without an end, as the driver's own.
        let answer = wait(event, u64::MAX);
        self.inner().events.push(event);
        match answer {
            CUresult::CUDA_SUCCESS => Ok(true),
            // The process ends.
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            failed => Err(failed),
        }
    }

    /// Records an event behind everything in the context; `None`: a capture is in progress.
    fn record(&self) -> Result<Option<usize>, CUresult> {
        if capture::any() {
            return Ok(None);
        }
        let event = self.event()?;
        let context = CUcontext(std::ptr::with_exposed_provenance_mut(self.context));
        let recorded = beginnings::held_off(|| {
            // SAFETY: as in `synchronize`; an event of ours in that context.
            thread().own(|| unsafe { real::cuCtxRecordEvent(context, handle(event)) })
        });
        match recorded {
            Some(CUresult::CUDA_SUCCESS) => Ok(Some(event)),
            other => {
                self.inner().events.push(event);
                other.map_or(Ok(None), Err)
            }
        }
    }

    /// One of the arena's events that nobody uses.
    fn event(&self) -> Result<usize, CUresult> {
        const DISABLE_TIMING: u32 = 2;
        let unused = self.inner().events.pop();
        if let Some(event) = unused {
            return Ok(event);
        }
        let mut event = CUevent::NULL;
        // SAFETY: valid pointer to a local. It goes with the context.
        let make = || unsafe { real::cuEventCreate(&raw mut event, DISABLE_TIMING) };
        self.in_context(|| capture::relaxed(make))?.ok()?;
        Ok(event.0.expose_provenance())
    }

    /// Makes `calls` with the arena's context current.
    fn in_context<T>(&self, calls: impl FnOnce() -> T) -> Result<T, CUresult> {
        let thread = thread();
        if let Some(attached) = client::current() {
            context::refresh(thread, attached);
        }
        if thread.context.get() == self.context || thread.context.get() == 0 {
            return Ok(calls());
        }
        let context = CUcontext(std::ptr::with_exposed_provenance_mut(self.context));
        // SAFETY: as in `synchronize`. Put back on the same thread.
        let push = || unsafe { real::cuCtxPushCurrent_v2(context) };
        thread.own(push).ok()?;
        let result = calls();
        let mut popped = CUcontext::NULL;
        // SAFETY: valid pointer to a local.
        let _ = thread.own(|| unsafe { real::cuCtxPopCurrent_v2(&raw mut popped) });
        Ok(result)
    }

    /// Whether blocks are aside.
    pub(super) fn has_aside(&self) -> bool {
        !self.inner().aside.is_empty()
    }

    /// Blocks that are aside and are behind no event yet are behind one from here on, if no capture
    /// is in progress.
    pub(super) fn mark_aside(&self) {
        let upto = {
            let inner = self.inner();
            if inner.aside.iter().all(|aside| aside.event != 0) {
                return;
            }
            inner.asides
        };
        let Ok(Some(event)) = self.record() else {
            return;
        };
        let mut inner = self.inner();
        let unmarked = |aside: &&mut Aside| aside.event == 0 && aside.number <= upto;
        let mut count = 0;
        for aside in inner.aside.iter_mut().filter(unmarked) {
            aside.event = event;
            count += 1;
        }
        if count == 0 {
            inner.events.push(event);
        }
    }

    /// Waits until blocks that are aside may be given back, and does so; whether some were. Outside
    /// the quiesce gate.
    pub(super) fn reclaim(&self) -> Patience {
        let until_ns = now_ns() + CAPTURES_NS;
        let (number, event) = loop {
            self.mark_aside();
            let last = |inner: &Inner| {
                let marked = inner.aside.iter().rfind(|aside| aside.event != 0);
                marked.map(|aside| (aside.number, aside.event))
            };
            let found = last(&self.inner());
            match found {
                Some(found) => break found,
                None if !self.has_aside() || now_ns() > until_ns || process::exiting() => {
                    return Patience::None;
                }
                None => clock::pause(LONGEST_LOOK),
            }
        };
        // CAST: half a minute.
        let until_ns = now_ns() + tuning::SPACE.as_nanos() as u64;
        if wait(event, until_ns) == CUresult::CUDA_ERROR_NOT_READY {
            return Patience::None;
        }
        match quiesce::pass() {
            Ok(_pass) if self.give_back(number) => Patience::Some,
            _ => Patience::None,
        }
    }

    /// Gives back what was put aside up to that one. Inside the quiesce gate.
    pub(super) fn give_back(&self, upto: u64) -> bool {
        let (gone, any) = {
            let mut inner = self.inner();
            let inner = &mut *inner;
            let (over, left): (Vec<_>, Vec<_>) = std::mem::take(&mut inner.aside)
                .into_iter()
                .partition(|aside| aside.number <= upto);
            inner.aside = left;
            for aside in &over {
                let used = |event: usize| inner.aside.iter().any(|other| other.event == event);
                if aside.event != 0 && !used(aside.event) && !inner.events.contains(&aside.event) {
                    inner.events.push(aside.event);
                }
            }
            let any = !over.is_empty();
            let gone: Vec<_> = over
                .into_iter()
                .filter_map(|aside| inner.end(aside.address, aside.block))
                .collect();
            (gone, any)
        };
        for (start, bytes, chunks) in gone {
            self.let_go(start, bytes, &chunks);
        }
        any
    }

    /// What the end of a block leaves goes, and is charged no longer.
    pub(super) fn let_go(&self, start: u64, bytes: u64, chunks: &[u64]) {
        let freed = self.dispose(start, bytes, chunks);
        if let Some(meter) = Meter::on(self.device) {
            meter.release(freed);
        }
    }
}

impl Inner {
    /// Takes a block out whose place nobody may have yet; whether it was there.
    pub(super) fn put_aside(&mut self, address: u64) -> bool {
        let Some(block) = self.blocks.remove(&address) else {
            return false;
        };
        self.asides += 1;
        self.aside.push(Aside {
            address,
            block,
            number: self.asides,
            event: 0,
        });
        true
    }
}
