//! A process of the job: threads that take and give back memory of every family.
//!
//! | letter | family |
//! |---|---|
//! | `p` | `cuMemAlloc`, `cuMemAllocPitch` |
//! | `m` | `cuMemAllocManaged` |
//! | `a` | the default pool, with thresholds and trims |
//! | `o` | pools of a thread's own, destroyed with and without memory in use |
//! | `v` | physical handles: many references, many mappings, either gone first; shared |
//! | `s` | handles, addresses of other processes: their owner keeps them, frees them, is killed |
//! | `r` | arrays |
//! | `g` | graphs with allocation nodes: built or captured, launched, trimmed |
//! | `c` | contexts destroyed with memory in them |
//! | `x` | requests beyond the quota |
//!
//! The parent writes a number of operations; each thread does its part; when nothing moves any
//! more, three figures come back: operations, refusals for want of memory, and errors that should
//! not have been.

use std::io::{BufRead, Write};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::*;

mod families;
mod shared;

use super::held::Held;
use super::post::Post;
use crate::api::Api;
use crate::rng::{Rng, mix};

const GRANULE: usize = 2 << 20;
/// Things that a thread holds at most.
const MOST: usize = 40;
/// Every family.
const ALL: &[u8] = b"ppppppmaaaaoovvsssrrggcx";

#[derive(Default)]
struct Figures {
    ops: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

struct Thread<'a> {
    api: Api,
    rng: Rng,
    own: CUcontext,
    stream: CUstream,
    pool: CUmemoryPool,
    /// Counts this thread's pools.
    pools: u64,
    held: Vec<Held>,
    held_bytes: u64,
    cap_bytes: u64,
    families: &'a [u8],
    figures: &'a Figures,
    post: &'a Post,
}

/// Serves the parent until its pipe ends. `words`: seed, threads, MiB that a thread wants,
/// families, the post's two ends.
///
/// # Errors
/// Wrong words, or no driver.
pub fn run(words: &[String]) -> std::io::Result<()> {
    let wrong = || std::io::Error::other(format!("wrong words for a worker: {words:?}"));
    let number = |at: usize| {
        words
            .get(at)
            .and_then(|word| word.parse::<u64>().ok())
            .ok_or_else(wrong)
    };
    let (seed, threads, cap_mib) = (number(0)?, number(1)? as usize, number(2)?);
    let families = words
        .get(3)
        .map(|word| word.as_bytes())
        .filter(|word| !word.is_empty());
    let families = families.unwrap_or(ALL);
    let [to, from] = [4, 5].map(|at| words.get(at).map_or("", String::as_str));
    let post = Post::from_words(to, from)?;
    let (begin, end) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    let (per_thread, figures) = (AtomicU64::new(0), Figures::default());
    let main = prepare().map_err(std::io::Error::other)?;
    std::thread::scope(|scope| -> std::io::Result<()> {
        for number in 0..threads as u64 {
            let (begin, end, per_thread, figures) = (&begin, &end, &per_thread, &figures);
            let post = &post;
            scope.spawn(move || {
                let Ok(mut thread) =
                    Thread::new(mix(seed ^ number), cap_mib << 20, families, figures, post)
                else {
                    eprintln!("accounting: a thread has no driver");
                    std::process::exit(1);
                };
                loop {
                    begin.wait();
                    let ops = per_thread.load(Relaxed);
                    if ops == 0 {
                        return;
                    }
                    for _ in 0..ops {
                        thread.step();
                    }
                    thread.rest();
                    end.wait();
                }
            });
        }
        let mut line = String::new();
        while std::io::stdin().lock().read_line(&mut line)? > 0 {
            let ops: u64 = line.trim().parse().map_err(|_| wrong())?;
            line.clear();
            per_thread.store(ops.div_ceil(threads as u64).max(1), Relaxed);
            begin.wait();
            end.wait();
            // Nothing is under way: what pools need not keep goes now, and is seen to have gone.
            // SAFETY: a plain call.
            let _ = unsafe { main.cuCtxSynchronize() };
            let take = |figure: &AtomicU64| figure.swap(0, Relaxed);
            let (ops, refused) = (take(&figures.ops), take(&figures.refused));
            writeln!(
                std::io::stdout(),
                "{ops} {refused} {}",
                take(&figures.failed)
            )?;
        }
        per_thread.store(0, Relaxed);
        begin.wait();
        Ok(())
    })
}

/// A driver with the primary context current on the calling thread.
fn prepare() -> Result<Api, String> {
    let api = Api::open()?;
    if !api.preloaded() {
        return Err("this is not a governed process: the preload library is not there".to_owned());
    }
    let mut context = CUcontext::NULL;
    // SAFETY: plain calls with a valid output.
    let ready = unsafe {
        api.cuInit(0)
            .ok()
            .and_then(|()| {
                api.cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0))
                    .ok()
            })
            .and_then(|()| api.cuCtxSetCurrent(context).ok())
    };
    ready.map_err(|status| format!("no device: {status:?}"))?;
    Ok(api)
}

impl<'a> Thread<'a> {
    fn new(
        seed: u64,
        cap_bytes: u64,
        families: &'a [u8],
        figures: &'a Figures,
        post: &'a Post,
    ) -> Result<Self, String> {
        let api = prepare()?;
        let (mut own, mut stream) = (CUcontext::NULL, CUstream::NULL);
        // SAFETY: valid outputs.
        unsafe {
            let _ = api.cuCtxGetCurrent(&raw mut own);
            let _ = api.cuStreamCreate(&raw mut stream, 1);
        }
        Ok(Self {
            api,
            rng: Rng::new(seed),
            own,
            stream,
            pool: CUmemoryPool::NULL,
            pools: 1,
            held: Vec::new(),
            held_bytes: 0,
            cap_bytes,
            families,
            figures,
            post,
        })
    }

    /// What every operation's result goes through.
    fn heard(&self, what: &str, result: Result<(), CUresult>) -> bool {
        match result {
            Ok(()) => true,
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                self.figures.refused.fetch_add(1, Relaxed);
                false
            }
            Err(status) => {
                if self.figures.failed.fetch_add(1, Relaxed) < 3 {
                    eprintln!("accounting: {what}: {status:?}");
                }
                false
            }
        }
    }

    fn keep(&mut self, held: Held) {
        self.held_bytes += held.bytes();
        self.held.push(held);
    }

    fn give_back_one(&mut self) {
        if !self.held.is_empty() {
            let which = self.rng.below(self.held.len());
            self.give_back(which);
        }
    }

    fn give_back(&mut self, which: usize) {
        let held = self.held.swap_remove(which);
        self.held_bytes -= held.bytes();
        let what = format!("giving back {held:?}");
        let result = held.give_back(&self.api, self.own, self.stream);
        self.heard(&what, result);
    }

    fn size(&mut self) -> usize {
        match self.rng.below(16) {
            0..=7 => self.rng.between(1, 64 << 10),
            8..=11 => self.rng.between(64 << 10, 1 << 20),
            12..=14 => self.rng.between(1 << 20, 5 << 20),
            _ => self.rng.between(4 << 20, 20 << 20),
        }
    }

    fn step(&mut self) {
        self.figures.ops.fetch_add(1, Relaxed);
        if self.held.len() >= MOST || self.held_bytes > self.cap_bytes || self.rng.one_in(3) {
            return self.give_back_one();
        }
        match self.rng.pick(self.families) {
            b'p' => self.plain(),
            b'm' => self.managed(),
            b'a' => self.pooled(),
            b'o' => self.own_pool(),
            b'v' => self.physical(),
            b's' => self.shared(),
            b'r' => self.array(),
            b'g' => self.graph(),
            b'c' => self.context(),
            b'x' => self.beyond(),
            _ => self.give_back_one(),
        }
    }

    /// What is left of a destroyed pool is charged as a whole until it is all given back.
    fn give_back_orphans(&mut self) {
        let pools = self.pools;
        let orphan =
            |held: &Held| matches!(held, Held::Pooled { pool, .. } if (1..pools).contains(pool));
        while let Some(which) = self.held.iter().position(orphan) {
            self.give_back(which);
        }
        // SAFETY: a plain call.
        let waited = unsafe { self.api.cuStreamSynchronize(self.stream) };
        self.heard("cuStreamSynchronize", waited.ok());
    }

    /// The end of a round: some of it goes, and everything submitted is waited for.
    fn rest(&mut self) {
        if self.rng.one_in(4) {
            while !self.held.is_empty() {
                self.give_back_one();
            }
        }
        self.give_back_orphans();
        // SAFETY: a plain call.
        let waited = unsafe { self.api.cuStreamSynchronize(self.stream) };
        self.heard("cuStreamSynchronize", waited.ok());
    }
}
