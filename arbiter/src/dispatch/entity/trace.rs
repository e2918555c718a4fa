//! What a tenant is in the middle of, as the device's timeline has it: a span begins when it is
//! first seen, and is handed on when it has ended.
//!
//! Invariants: the slices and drains of a tenant do not overlap, and device time that it is charged
//! is in exactly one of them, or not in one yet (`pending_ns`). Spans that a client can cause by
//! what it writes are no more than the looks at it, and its iterations no more than one each
//! [`ITERATIONS_NS`].

use policy::TenantId;

use crate::tally::growth;
use crate::timeline::{Kind, Span};

/// Shorter iterations are in one span together.
const ITERATIONS_NS: u64 = 10_000_000;

/// How a tenant stands now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Standing {
    /// When its gate opened, and the length of its slice in microseconds.
    pub slice: Option<(u64, u32)>,
    /// Since when it drains.
    pub drain_ns: Option<u64>,
    pub waits: bool,
    /// What its memory does, and what that has copied.
    pub moves: Option<Kind>,
    pub copied_bytes: u64,
    /// Boundaries of its iterations, and when the last one was, as its client says.
    pub boundary: Option<(u64, u64)>,
    /// What it was charged.
    pub device_ns: u64,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Trace {
    /// Device time that is in spans.
    in_spans_ns: u64,
    slice: Option<(u64, u32)>,
    drain_ns: Option<u64>,
    /// When its drain has ended, where that was found now.
    drained_ns: Option<u64>,
    wait_ns: Option<u64>,
    moves: Option<(Kind, u64)>,
    iterations: Option<(u64, u64)>,
}

impl Trace {
    /// So much was charged before anybody looked.
    pub fn begin_at(&mut self, device_ns: u64) {
        self.in_spans_ns = device_ns;
    }

    /// Its drain has ended then.
    pub fn note_drained(&mut self, drained_ns: u64) {
        self.drained_ns = Some(drained_ns);
    }

    /// Looks, and hands on what has ended.
    pub fn look(
        &mut self,
        tenant: TenantId,
        now_ns: u64,
        now: Standing,
        mut ended: impl FnMut(Span),
    ) {
        let mut end = |kind, (start_ns, end_ns): (u64, u64), device_ns, count| {
            ended(Span {
                kind,
                tenant: Some(tenant),
                start_ns,
                end_ns: end_ns.clamp(start_ns, now_ns.max(start_ns)),
                device_ns,
                count,
            });
        };
        let opened_ns = now.slice.map(|(opened_ns, _)| opened_ns);
        let drained_ns = self.drained_ns.take();
        if let Some(since_ns) = self
            .drain_ns
            .filter(|since_ns| now.drain_ns != Some(*since_ns))
        {
            let ends_ns = drained_ns.or(opened_ns).unwrap_or(now_ns);
            let device_ns = self.take(now.device_ns);
            end(Kind::Drain, (since_ns, ends_ns), device_ns, 0);
        }
        if let Some((since_ns, quantum_us)) = self.slice
            && opened_ns != Some(since_ns)
        {
            let ends_ns = now.drain_ns.unwrap_or(now_ns);
            let device_ns = self.take(now.device_ns);
            end(
                Kind::Slice,
                (since_ns, ends_ns),
                device_ns,
                quantum_us.into(),
            );
        }
        (self.slice, self.drain_ns) = (now.slice, now.drain_ns);
        match self.wait_ns {
            None if now.waits => self.wait_ns = Some(now_ns),
            Some(since_ns) if !now.waits => {
                self.wait_ns = None;
                end(Kind::Wait, (since_ns, opened_ns.unwrap_or(now_ns)), 0, 0);
            }
            _ => {}
        }
        if let Some((kind, since_ns)) = self.moves
            && now.moves != Some(kind)
        {
            self.moves = None;
            end(kind, (since_ns, now_ns), 0, now.copied_bytes);
        }
        if let (None, Some(kind)) = (self.moves, now.moves) {
            self.moves = Some((kind, now_ns));
        }
        let Some((count, at_ns)) = now.boundary else {
            self.iterations = None;
            return;
        };
        let at_ns = if at_ns == 0 {
            now_ns
        } else {
            at_ns.min(now_ns)
        };
        match self.iterations {
            None => self.iterations = Some((count, at_ns)),
            Some((before, since_ns))
                if before != count && at_ns >= since_ns.saturating_add(ITERATIONS_NS) =>
            {
                self.iterations = Some((count, at_ns));
                let iterations = growth(before, count).unwrap_or(0);
                end(Kind::Iterations, (since_ns, at_ns), 0, iterations);
            }
            Some(_) => {}
        }
    }

    fn take(&mut self, device_ns: u64) -> u64 {
        let new_ns = device_ns.saturating_sub(self.in_spans_ns);
        self.in_spans_ns = device_ns;
        new_ns
    }

    /// Of what it was charged, what is in no span yet.
    pub fn pending_ns(&self, device_ns: u64) -> u64 {
        device_ns.saturating_sub(self.in_spans_ns)
    }

    /// Whether its memory was on its way.
    pub fn moves(&self) -> bool {
        self.moves.is_some()
    }

    /// What it is in the middle of, and since when.
    pub fn open(&self) -> Vec<(Kind, u64)> {
        let slice = self.slice.map(|(since_ns, _)| (Kind::Slice, since_ns));
        let drain = self.drain_ns.map(|since_ns| (Kind::Drain, since_ns));
        let wait = self.wait_ns.map(|since_ns| (Kind::Wait, since_ns));
        let open = [slice, drain, wait, self.moves];
        open.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    struct Watched(Trace, Vec<(Kind, u64, u64, u64, u64)>);

    impl Watched {
        fn look(&mut self, now_ns: u64, now: Standing) {
            let seen = &mut self.1;
            self.0.look(TenantId(7), now_ns, now, |span| {
                assert_eq!(span.tenant, Some(TenantId(7)));
                let Span {
                    kind,
                    start_ns,
                    end_ns,
                    device_ns,
                    count,
                    ..
                } = span;
                seen.push((kind, start_ns, end_ns, device_ns, count));
            });
        }

        fn seen(&mut self) -> Vec<(Kind, u64, u64, u64, u64)> {
            std::mem::take(&mut self.1)
        }
    }

    fn watched() -> Watched {
        Watched(Trace::default(), Vec::new())
    }

    #[test]
    fn waiting_a_slice_and_its_drain_follow_each_other_and_have_all_device_time() {
        let mut trace = watched();
        let waits = Standing {
            waits: true,
            ..Standing::default()
        };
        trace.look(10, waits);
        trace.look(20, waits);
        let holds = Standing {
            slice: Some((30, 5000)),
            ..Standing::default()
        };
        trace.look(31, holds);
        assert_eq!(trace.seen(), [(Kind::Wait, 10, 30, 0, 0)]);
        trace.look(
            90,
            Standing {
                device_ns: 40,
                ..holds
            },
        );
        assert_eq!(trace.0.pending_ns(45), 45);
        assert_eq!(trace.0.open(), [(Kind::Slice, 30)]);
        let drains = Standing {
            drain_ns: Some(100),
            device_ns: 70,
            ..Standing::default()
        };
        trace.look(101, drains);
        assert_eq!(trace.seen(), [(Kind::Slice, 30, 100, 70, 5000)]);
        trace.0.note_drained(115);
        trace.look(
            120,
            Standing {
                device_ns: 85,
                ..Standing::default()
            },
        );
        assert_eq!(trace.seen(), [(Kind::Drain, 100, 115, 15, 0)]);
        assert_eq!((trace.0.pending_ns(85), trace.0.open().len()), (0, 0));
    }

    #[test]
    fn a_slice_that_begins_before_the_end_of_a_drain_ends_it() {
        let mut trace = watched();
        let drains = Standing {
            drain_ns: Some(100),
            ..Standing::default()
        };
        trace.look(100, drains);
        let holds = Standing {
            slice: Some((150, 2000)),
            device_ns: 20,
            ..Standing::default()
        };
        trace.look(151, holds);
        // It keeps the device, and loses it and has it again between two looks.
        trace.look(
            190,
            Standing {
                slice: Some((150, 3000)),
                ..holds
            },
        );
        trace.look(
            200,
            Standing {
                slice: Some((195, 2000)),
                device_ns: 50,
                ..holds
            },
        );
        assert_eq!(
            trace.seen(),
            [
                (Kind::Drain, 100, 150, 20, 0),
                (Kind::Slice, 150, 200, 30, 3000),
            ]
        );
        // What it was charged before it came back is in no span.
        trace.0.begin_at(1000);
        trace.look(
            210,
            Standing {
                device_ns: 1005,
                ..Standing::default()
            },
        );
        assert_eq!(trace.seen(), [(Kind::Slice, 195, 210, 5, 2000)]);
    }

    #[test]
    fn a_move_is_one_span_from_its_drain_to_its_end() {
        let mut trace = watched();
        let moves = |kind| Standing {
            moves: Some(kind),
            copied_bytes: 4096,
            ..Standing::default()
        };
        (10..20).for_each(|ns| trace.look(ns, moves(Kind::Evict)));
        // It fails on the way, and comes back.
        trace.look(20, moves(Kind::Restore));
        trace.look(
            30,
            Standing {
                copied_bytes: 5000,
                ..Standing::default()
            },
        );
        assert_eq!(
            trace.seen(),
            [
                (Kind::Evict, 10, 20, 0, 4096),
                (Kind::Restore, 20, 30, 0, 5000),
            ]
        );
    }

    #[test]
    fn short_iterations_share_a_span_and_a_client_s_times_are_kept_in_order() {
        let mut trace = watched();
        let boundary = |count, at_ns| Standing {
            boundary: Some((count, at_ns)),
            ..Standing::default()
        };
        trace.look(100 * MS, boundary(5, 99 * MS));
        (0..8).for_each(|ms| trace.look((101 + ms) * MS, boundary(6 + ms, (100 + ms) * MS)));
        assert_eq!(trace.seen(), [], "less than ten milliseconds");
        trace.look(112 * MS, boundary(15, 111 * MS));
        trace.look(140 * MS, boundary(16, 139 * MS));
        assert_eq!(
            trace.seen(),
            [
                (Kind::Iterations, 99 * MS, 111 * MS, 0, 10),
                (Kind::Iterations, 111 * MS, 139 * MS, 0, 1),
            ]
        );
        // Times of the past and of the future, counts that go back, and none.
        trace.look(150 * MS, boundary(17, 1));
        trace.look(151 * MS, boundary(3, u64::MAX));
        trace.look(170 * MS, boundary(4, 0));
        trace.look(171 * MS, Standing::default());
        trace.look(190 * MS, boundary(9, 190 * MS));
        let seen = trace.seen();
        assert_eq!(
            seen.iter().map(|one| (one.1, one.2)).collect::<Vec<_>>(),
            [(139 * MS, 151 * MS), (151 * MS, 170 * MS)]
        );
    }
}
