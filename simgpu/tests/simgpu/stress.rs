//! Many threads, streams and events at once: everything ends, and every byte is what the order
//! says.

use shim_ffi::{CUdeviceptr, CUstream};
use simgpu::api;

use crate::random::Random;
use crate::support::*;

#[test]
fn threads_with_streams_of_every_kind_keep_their_order() {
    driver();
    let threads: Vec<_> = (0..4_u64)
        .map(|seed| {
            std::thread::spawn(move || {
                driver();
                let mut random = Random::new(seed);
                let streams = [stream(0), stream(1), CUstream::NULL, CUstream::PER_THREAD];
                let events: Vec<_> = (0..4).map(|_| event(2)).collect();
                let words = alloc(4096);
                upload(words, &[0_u32; 1024]);
                let mut expected = [0_u32; 4];
                for round in 1..400_u32 {
                    let at = random.below(4) as usize;
                    let stream = streams[at];
                    // SAFETY: handles and device addresses only.
                    unsafe {
                        match random.below(5) {
                            0 => ok(api::cuEventRecord(events[at], stream)),
                            1 => ok(api::cuStreamWaitEvent(
                                stream,
                                events[random.below(4) as usize],
                                0,
                            )),
                            2 => {
                                // Each stream writes a word of its own; the last write wins.
                                ok(api::cuMemsetD32Async(
                                    CUdeviceptr(words.0 + 4 * at as u64),
                                    round,
                                    1,
                                    stream,
                                ));
                                expected[at] = round;
                            }
                            3 => {
                                // And copies it to a place far away, behind that write.
                                let from = CUdeviceptr(words.0 + 4 * at as u64);
                                ok(api::cuMemcpyDtoDAsync_v2(
                                    CUdeviceptr(from.0 + 1024),
                                    from,
                                    4,
                                    stream,
                                ));
                                ok(api::cuMemcpyDtoDAsync_v2(
                                    from,
                                    CUdeviceptr(from.0 + 1024),
                                    4,
                                    stream,
                                ));
                            }
                            _ if random.below(8) == 0 => ok(api::cuStreamSynchronize(stream)),
                            _ => ok(api::cuStreamWriteValue32_v2(
                                stream,
                                CUdeviceptr(words.0 + 2048),
                                round,
                                0,
                            )),
                        }
                    }
                }
                for stream in streams {
                    // SAFETY: handles only.
                    ok(unsafe { api::cuStreamSynchronize(stream) });
                }
                assert_eq!(download::<u32>(words, 4), expected);
                free(words);
                for stream in &streams[..2] {
                    // SAFETY: handles only.
                    ok(unsafe { api::cuStreamDestroy_v2(*stream) });
                }
            })
        })
        .collect();
    threads.into_iter().for_each(testbed::join);
}

#[test]
fn threads_that_allocate_and_free_never_share_bytes() {
    driver();
    let threads: Vec<_> = (0..4_u64)
        .map(|seed| {
            std::thread::spawn(move || {
                driver();
                let mut random = Random::new(seed + 100);
                let mut live: Vec<(CUdeviceptr, usize, u8)> = Vec::new();
                for round in 0..300 {
                    if live.len() > 20 || (random.below(3) == 0 && !live.is_empty()) {
                        let (address, bytes, mark) =
                            live.swap_remove(random.below(live.len() as u64) as usize);
                        let found = download::<u8>(address, bytes);
                        assert!(found.iter().all(|byte| *byte == mark), "round {round}");
                        free(address);
                    } else {
                        let most = if random.below(8) == 0 {
                            3 << 20
                        } else {
                            20_000
                        };
                        let bytes = 1 + random.below(most) as usize;
                        let address = alloc(bytes);
                        let mark = (seed * 64 + random.below(64)) as u8;
                        // SAFETY: device addresses only.
                        ok(unsafe { api::cuMemsetD8_v2(address, mark, bytes) });
                        live.push((address, bytes, mark));
                    }
                }
                live.into_iter().for_each(|(address, ..)| free(address));
            })
        })
        .collect();
    threads.into_iter().for_each(testbed::join);
}
