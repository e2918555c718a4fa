//! The kernels of a replay: each spins for as long as the one took that it stands for.
//!
//! The blocks that are on the device at the same time spin, and those after them end at once. So
//! how long a kernel takes is what it is asked to, and what a launch of its grid costs besides:
//! [`Kernels::fit`] measures that on the device that it runs on, for each shape.

use std::ffi::CString;
use std::fmt::Write as _;

use anyhow::Context;

use super::cuda::{Cuda, Word};
use super::plan::Shape;
use crate::record::numbers::{OWN, STAND_IN};

/// How long a kernel of some shape takes: what its spinning blocks are asked to, and `besides_ns`.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    pub blocks: u64,
    pub besides_ns: u64,
}

/// Of one device.
pub struct Kernels<'a> {
    cuda: &'a Cuda,
    device: i32,
    module: Word,
    /// One that no recording takes for part of the job.
    own: Word,
}

const ONE_THREAD: Shape = Shape {
    function: 0,
    grid: [1; 3],
    block: [1; 3],
    shared_bytes: 0,
};

/// Largest alignment that is asked of anything here.
const MAX_DYNAMIC_SHARED: u32 = 8;
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;
const MULTIPROCESSORS: u32 = 16;

/// PTX of a kernel for each name: the first so many blocks spin until the device's clock has moved
/// on by so many nanoseconds. Parameters: nanoseconds, blocks.
fn image(names: &[String]) -> String {
    let mut text = ".version 6.4\n.target sm_50\n.address_size 64\n".to_owned();
    for name in names {
        let _ = write!(
            text,
            "\n.visible .entry {name}(\n\t.param .u64 {name}_param_0,\n\
             \t.param .u64 {name}_param_1\n)\n{{\n\
             \t.reg .pred %p<3>;\n\t.reg .b32 %r<6>;\n\t.reg .b64 %rd<11>;\n\
             \tld.param.u64 %rd1, [{name}_param_0];\n\
             \tld.param.u64 %rd2, [{name}_param_1];\n\
             \tmov.u32 %r1, %ctaid.x;\n\
             \tmov.u32 %r2, %ctaid.y;\n\
             \tmov.u32 %r3, %ctaid.z;\n\
             \tmov.u32 %r4, %nctaid.x;\n\
             \tmov.u32 %r5, %nctaid.y;\n\
             \tcvt.u64.u32 %rd3, %r2;\n\
             \tmad.wide.u32 %rd4, %r3, %r5, %rd3;\n\
             \tcvt.u64.u32 %rd5, %r1;\n\
             \tcvt.u64.u32 %rd6, %r4;\n\
             \tmad.lo.u64 %rd7, %rd4, %rd6, %rd5;\n\
             \tsetp.ge.u64 %p1, %rd7, %rd2;\n\
             \t@%p1 bra $E_{name};\n\
             \tmov.u64 %rd8, %globaltimer;\n\
             $L_{name}:\n\
             \tmov.u64 %rd9, %globaltimer;\n\
             \tsub.s64 %rd10, %rd9, %rd8;\n\
             \tsetp.lt.u64 %p2, %rd10, %rd1;\n\
             \t@%p2 bra $L_{name};\n\
             $E_{name}:\n\
             \tret;\n}}\n"
        );
    }
    text
}

/// What a kernel is called here: after the one that it stands for, where PTX allows that.
pub fn called(name: &str, number: u32) -> String {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$';
    match !name.is_empty() && name.len() <= 1024 && name.bytes().all(allowed) {
        true => format!("{STAND_IN}{name}"),
        false => format!("{STAND_IN}kernel_{number}"),
    }
}

impl<'a> Kernels<'a> {
    /// Kernels of these names, in the current context.
    ///
    /// # Errors
    /// The driver does not load them.
    pub fn new(cuda: &'a Cuda, device: i32, names: &[String]) -> anyhow::Result<Self> {
        let mut unique = names.to_vec();
        unique.push(OWN.to_owned());
        unique.sort();
        unique.dedup();
        let text = CString::new(image(&unique))?;
        let mut module = 0;
        // SAFETY: a zero-terminated text, and a valid pointer to a local.
        unsafe { cuda.module_load(&raw mut module, text.as_ptr().cast()) }
            .context("the driver does not load the kernels of a replay")?;
        let mut kernels = Self {
            cuda,
            device,
            module,
            own: 0,
        };
        kernels.own = kernels.get(OWN)?;
        Ok(kernels)
    }

    pub fn get(&self, name: &str) -> anyhow::Result<Word> {
        let (name, mut function) = (CString::new(name)?, 0);
        // SAFETY: a zero-terminated name in a module that is loaded.
        unsafe {
            self.cuda
                .function(&raw mut function, self.module, name.as_ptr())?;
        }
        Ok(function)
    }

    /// Lets a kernel be launched in this shape.
    ///
    /// # Errors
    /// It takes more shared memory than this device has.
    pub fn allow(&self, kernel: Word, shape: &Shape) -> anyhow::Result<()> {
        if shape.shared_bytes <= SHARED_WITHOUT_ASKING {
            return Ok(());
        }
        let bytes = i32::try_from(shape.shared_bytes).unwrap_or(i32::MAX);
        // SAFETY: a function of the module.
        unsafe { self.cuda.function_set(kernel, MAX_DYNAMIC_SHARED, bytes) }.with_context(|| {
            format!("a kernel of the recording takes {bytes} bytes of shared memory")
        })
    }

    /// How a shape's time follows from what its blocks are asked to take.
    ///
    /// # Errors
    /// A launch of that shape fails.
    pub fn fit(&self, shape: &Shape) -> anyhow::Result<Fit> {
        // Of what a grid costs the function is no part.
        self.allow(self.own, shape)?;
        let blocks = self.at_once(shape);
        let besides_ns = shortest(|| self.besides(shape, blocks))?;
        Ok(Fit { blocks, besides_ns })
    }

    /// How many blocks of a shape are on the device at the same time.
    fn at_once(&self, shape: &Shape) -> u64 {
        let (mut each, mut processors) = (0, 0);
        let threads = shape.block.iter().product::<u32>().min(1024);
        // SAFETY: valid pointers to locals, a function of the module.
        let known = unsafe {
            let shared = shape.shared_bytes as usize; // CAST: 32 bits fit.
            // CAST: 1024 at most.
            self.cuda
                .occupancy(&raw mut each, self.own, threads as i32, shared)
                .and_then(|()| {
                    self.cuda
                        .device_attribute(&raw mut processors, MULTIPROCESSORS, self.device)
                })
        };
        match known {
            // CAST: not negative.
            Ok(()) => (each.max(1) as u64) * (processors.max(1) as u64),
            Err(_) => u64::MAX,
        }
    }

    /// What kernels take besides what they are asked to, the mean of some, by events around each.
    ///
    /// The device's clock may move on by a whole microsecond at a time, and a kernel that spins
    /// ends when it does: the next one would begin at the same place between two ticks each time.
    /// So empty kernels come before each, another number of them, and lengths differ by fractions
    /// of a microsecond.
    fn besides(&self, shape: &Shape, blocks: u64) -> anyhow::Result<u64> {
        const TIMES: usize = 16;
        const LEAST_NS: u64 = 3000;
        const MORE_NS: u64 = 2000;
        // So long that all that follows is queued behind it.
        const BEFORE_NS: u64 = 800_000;
        // What the clock's steps can make of a length.
        const STEP_NS: u64 = 1200;
        let cuda = self.cuda;
        let asked = |nth: usize| LEAST_NS + MORE_NS * nth as u64 / TIMES as u64;
        let mut events = [[0; 2]; TIMES];
        // SAFETY: valid pointers to locals; events and functions of our own, on the default stream.
        unsafe {
            for event in events.as_flattened_mut() {
                cuda.event_create(event, 0)?;
            }
            self.launch(self.own, &ONE_THREAD, [BEFORE_NS, 1], 0)?;
            for (nth, [before, after]) in events.iter().enumerate() {
                for _ in 0..=nth % 5 {
                    self.launch(self.own, &ONE_THREAD, [0, 0], 0)?;
                }
                cuda.event_record(*before, 0)?;
                self.launch(self.own, shape, [asked(nth), blocks], 0)?;
                cuda.event_record(*after, 0)?;
            }
            cuda.synchronize()?;
            let mut all = Vec::new();
            for (nth, [before, after]) in events.iter().enumerate() {
                let mut ms = 0.0;
                cuda.event_time(&raw mut ms, *before, *after)?;
                // CAST: a time that is not negative.
                let ns = (f64::from(ms) * 1e6).max(0.0) as u64;
                all.push(ns.saturating_sub(asked(nth)));
            }
            for event in events.as_flattened() {
                cuda.event_destroy(*event)?;
            }
            // Longer ones are those that the host was late with.
            let least = all.iter().copied().min().unwrap_or(0);
            all.retain(|besides| *besides <= least + STEP_NS);
            Ok(all.iter().sum::<u64>() / all.len().max(1) as u64)
        }
    }

    /// Launches a kernel whose first `blocks` blocks take `ns`.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(
        &self,
        kernel: Word,
        shape: &Shape,
        [mut ns, mut blocks]: [u64; 2],
        stream: Word,
    ) -> anyhow::Result<()> {
        let mut parameters = [(&raw mut ns).cast(), (&raw mut blocks).cast()];
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        // SAFETY: a function of our own module, with its two parameters.
        unsafe {
            self.cuda.launch(
                kernel,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shape.shared_bytes,
                stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}

/// The shortest of a few looks at a length, until two are alike. A host that is short of time makes
/// kernels that follow each other longer, never shorter; a process is slowest at its first ones.
fn shortest(mut look: impl FnMut() -> anyhow::Result<u64>) -> anyhow::Result<u64> {
    const MORE: usize = 5;
    const ALIKE_NS: u64 = 100;
    let mut least = look()?;
    for _ in 0..MORE {
        let next = look()?;
        let alike = next.abs_diff(least) <= (least / 100).max(ALIKE_NS);
        least = least.min(next);
        if alike {
            break;
        }
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_host_that_is_slow_at_first_does_not_make_the_kernels_of_a_replay_shorter() {
        let shortest_of = |looks: &[u64]| {
            let mut looks = looks.iter().copied();
            shortest(|| looks.next().ok_or_else(|| anyhow!("one look too many"))).unwrap()
        };
        assert_eq!(shortest_of(&[612_000, 102_000, 100_000, 100_400]), 100_000);
        assert_eq!(shortest_of(&[100_000, 100_000]), 100_000);
        assert_eq!(shortest_of(&[900, 790, 680, 570, 460, 340]), 340);
    }
}
