//! Faults on demand:
//! `SUBLET_SIM_FAULT="oom:after=10;sticky:kernel=foo;endless:kernel=foo;slow:call=cuMemAlloc,us=5"`

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::{CUresult, Symbol};

use crate::settings::BadConfig;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Fault {
    /// Every allocation after the first `after` of the process is refused.
    OutOfMemory { after: u64 },
    /// The kernel fails with `status`, which then sticks to its context.
    Sticky { kernel: String, status: u32 },
    /// The kernel runs until the process ends.
    Endless { kernel: String },
    /// The call takes `us` microseconds more.
    Slow { call: String, us: u64 },
    /// The call answers success and does nothing after the first `after` calls.
    Lose { call: String, after: u64 },
    /// The call answers `status` after the first `after` calls, `times` times.
    Fail {
        call: String,
        status: u32,
        after: u64,
        times: u64,
    },
}

/// All faults asked for.
#[derive(Debug, Default)]
pub struct Faults {
    faults: Vec<(Fault, AtomicU64)>,
    allocations: AtomicU64,
}

impl Faults {
    /// Reads the specification.
    ///
    /// # Errors
    /// The part that is wrong and what is expected.
    pub fn parse(text: &str) -> Result<Self, BadConfig> {
        let mut faults = Vec::new();
        for part in text
            .split(';')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let bad = |why: &str| BadConfig(format!("SUBLET_SIM_FAULT: \"{part}\": {why}"));
            let (kind, rest) = part.split_once(':').unwrap_or((part, ""));
            let mut values = std::collections::BTreeMap::new();
            for pair in rest.split(',').filter(|pair| !pair.is_empty()) {
                let (key, value) = pair
                    .split_once('=')
                    .ok_or_else(|| bad("expected KEY=VALUE"))?;
                values.insert(key.trim(), value.trim());
            }
            let mut text = |key: &str| {
                values
                    .remove(key)
                    .map(str::to_owned)
                    .ok_or_else(|| bad(&format!("{key}= is missing")))
            };
            let number =
                |key: &str,
                 default: Option<u64>,
                 text: &mut dyn FnMut(&str) -> Result<String, BadConfig>| {
                    match (text(key), default) {
                        (Ok(value), _) => value
                            .parse()
                            .map_err(|_| bad(&format!("{key}={value} is not a number"))),
                        (Err(_), Some(default)) => Ok(default),
                        (Err(error), None) => Err(error),
                    }
                };
            let fault = match kind {
                "oom" => Fault::OutOfMemory {
                    after: number("after", Some(0), &mut text)?,
                },
                "sticky" => Fault::Sticky {
                    status: number(
                        "status",
                        Some(u64::from(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS.0)),
                        &mut text,
                    )? as u32,
                    kernel: text("kernel")?,
                },
                "endless" => Fault::Endless {
                    kernel: text("kernel")?,
                },
                "slow" => Fault::Slow {
                    us: number("us", None, &mut text)?,
                    call: text("call")?,
                },
                "fail" => Fault::Fail {
                    status: number("status", None, &mut text)? as u32,
                    after: number("after", Some(0), &mut text)?,
                    times: number("times", Some(u64::MAX), &mut text)?,
                    call: text("call")?,
                },
                "lose" => Fault::Lose {
                    after: number("after", Some(0), &mut text)?,
                    call: text("call")?,
                },
                _ => {
                    return Err(bad(
                        "unknown kind; use oom, sticky, endless, slow, fail or lose",
                    ));
                }
            };
            if let Fault::Slow { call, .. } | Fault::Fail { call, .. } | Fault::Lose { call, .. } =
                &fault
                && Symbol::from_name(call.as_bytes()).is_none()
            {
                return Err(bad(&format!("call={call} is no driver function")));
            }
            if let Some(key) = values.keys().next() {
                return Err(bad(&format!("unknown key {key}")));
            }
            faults.push((fault, AtomicU64::new(0)));
        }
        Ok(Self {
            faults,
            allocations: AtomicU64::new(0),
        })
    }

    /// True when nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// Counts an allocation.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where asked for.
    pub fn allocation(&self) -> Result<(), CUresult> {
        if self.faults.is_empty() {
            return Ok(());
        }
        let count = self.allocations.fetch_add(1, Relaxed);
        let refused = self
            .faults
            .iter()
            .any(|(fault, _)| matches!(fault, Fault::OutOfMemory { after } if count >= *after));
        if refused {
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
        } else {
            Ok(())
        }
    }

    /// What is wrong with a kernel: a forced status, and whether it never ends.
    pub fn kernel(&self, name: &str) -> (Option<CUresult>, bool) {
        let mut status = None;
        let mut endless = false;
        for (fault, _) in &self.faults {
            match fault {
                Fault::Sticky {
                    kernel,
                    status: forced,
                } if kernel == name => status = Some(CUresult(*forced)),
                Fault::Endless { kernel } if kernel == name => endless = true,
                _ => {}
            }
        }
        (status, endless)
    }

    /// Delays or refuses a call; the status may be that of success, without the call.
    ///
    /// # Errors
    /// The status asked for.
    pub fn call(&self, symbol: Symbol) -> Result<(), CUresult> {
        let name = symbol.entry().name();
        for (fault, count) in &self.faults {
            match fault {
                Fault::Slow { call, us } if call == name => {
                    std::thread::sleep(std::time::Duration::from_micros(*us));
                }
                Fault::Fail {
                    call,
                    status,
                    after,
                    times,
                } if call == name => {
                    let calls = count.fetch_add(1, Relaxed);
                    if calls >= *after && calls - after < *times {
                        return Err(CUresult(*status));
                    }
                }
                Fault::Lose { call, after }
                    if call == name && count.fetch_add(1, Relaxed) >= *after =>
                {
                    return Err(CUresult::CUDA_SUCCESS);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_fail_after_the_given_number() {
        let faults = Faults::parse("oom:after=2").unwrap();
        assert_eq!(faults.allocation(), Ok(()));
        assert_eq!(faults.allocation(), Ok(()));
        assert_eq!(faults.allocation(), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    }

    #[test]
    fn kernels_and_calls_are_matched_by_name() {
        let faults = Faults::parse(
            "sticky:kernel=a; endless:kernel=b; fail:call=cuMemAlloc_v2,status=2,after=1; lose:call=cuMemsetD8_v2",
        )
        .unwrap();
        assert_eq!(
            faults.kernel("a"),
            (Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), false)
        );
        assert_eq!(faults.kernel("b"), (None, true));
        assert_eq!(faults.kernel("c"), (None, false));
        assert_eq!(faults.call(Symbol::cuMemAlloc_v2), Ok(()));
        assert_eq!(
            faults.call(Symbol::cuMemAlloc_v2),
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
        );
        assert_eq!(faults.call(Symbol::cuMemFree_v2), Ok(()));
        assert_eq!(
            faults.call(Symbol::cuMemsetD8_v2),
            Err(CUresult::CUDA_SUCCESS),
            "not carried out, and not reported"
        );
    }

    #[test]
    fn a_call_may_fail_some_times_and_work_again() {
        let faults = Faults::parse("fail:call=cuMemAlloc_v2,status=2,after=1,times=2").unwrap();
        let works: Vec<bool> = (0..5)
            .map(|_| faults.call(Symbol::cuMemAlloc_v2).is_ok())
            .collect();
        assert_eq!(works, [true, false, false, true, true]);
    }

    #[test]
    fn bad_specifications_are_refused_with_the_part() {
        for text in [
            "boom",
            "slow:call=cuMemAlloc_v2",
            "slow:call=cuFrobnicate,us=1",
            "oom:after=x",
            "oom:before=1",
            "sticky",
        ] {
            assert!(Faults::parse(text).unwrap_err().0.contains(text), "{text}");
        }
    }
}
