//! Of a handle's memory the device knows what copies have written, and asks for the rest. However
//! memory is written, hashes and copies see all of it.

use shim_ffi::{CUDA_MEMCPY2D, CUdeviceptr, CUfunction, CUmemorytype, CUstream};
use simgpu::api;
use simgpu::entry::In;

use crate::random::Random;
use crate::residency::{DEVICE, map, pinned, reserve, unmap};
use crate::support::*;

const MIB: usize = 1 << 20;
/// Three handles next to each other.
const HANDLE: usize = 2 * MIB;
const BYTES: usize = 3 * HANDLE;

/// The range as it is and as it should be.
struct Range {
    at: CUdeviceptr,
    expected: Vec<u8>,
    random: Random,
    fill: CUfunction,
    hash: CUfunction,
    host_copy: *mut u8,
}

impl Range {
    fn new(seed: u64) -> Self {
        driver();
        let module = module(&[
            ("sublet_fill_f32", &["u64", "f32", "u64"]),
            ("sublet_hash_chunks", &["u64", "u64", "u64"]),
        ]);
        let range = Self {
            at: reserve(BYTES),
            expected: vec![0; BYTES],
            random: Random::new(seed),
            fill: function(module, "sublet_fill_f32"),
            hash: function(module, "sublet_hash_chunks"),
            host_copy: pinned(BYTES),
        };
        range.make();
        range
    }

    fn make(&self) {
        for at in (0..BYTES).step_by(HANDLE) {
            map(self.address(at), HANDLE, DEVICE);
        }
    }

    fn address(&self, at: usize) -> CUdeviceptr {
        CUdeviceptr(self.at.0 + at as u64)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit as u64) as usize
    }

    /// Somewhere in it: a start that is a multiple of `align`, and a length that is one, often
    /// short and seldom long.
    fn part(&mut self, align: usize) -> (usize, usize) {
        let longest = [5000, 300_000, 2_500_000][self.below(3)];
        let length = (1 + self.below(longest)).next_multiple_of(align);
        let at = self.below(BYTES - length) / align * align;
        (at, length)
    }

    /// Writes in one of the ways that there are.
    fn write(&mut self, round: usize) {
        let value = 1 + (round % 250) as u8;
        // SAFETY: all of it inside of the mapping and of host memory of ours.
        unsafe {
            match self.below(9) {
                0 => {
                    let (at, length) = self.part(1);
                    ok(api::cuMemsetD8_v2(self.address(at), value, length));
                    self.expected[at..at + length].fill(value);
                }
                1 => {
                    let (at, length) = self.part(1);
                    ok(api::cuMemsetD8_v2(self.address(at), 0, length));
                    self.expected[at..at + length].fill(0);
                }
                2 => {
                    let (at, length) = self.part(1);
                    upload(self.address(at), &vec![value; length]);
                    self.expected[at..at + length].fill(value);
                }
                3 => {
                    let (at, length) = self.part(4);
                    let number = f32::from(value);
                    let args = [
                        self.address(at).0,
                        number.to_bits().into(),
                        length as u64 / 4,
                    ];
                    launch(self.fill, CUstream::NULL, &args);
                    for word in self.expected[at..at + length].chunks_exact_mut(4) {
                        word.copy_from_slice(&number.to_ne_bytes());
                    }
                }
                4 => {
                    let at = self.below(BYTES / 8) * 8;
                    let word = u64::from(value) << 56 | 3;
                    let (stream, to) = (stream(0), self.address(at));
                    ok(api::cuStreamWriteValue64_v2(stream, to, word, 0));
                    ok(api::cuStreamSynchronize(stream));
                    ok(api::cuStreamDestroy_v2(stream));
                    self.expected[at..at + 8].copy_from_slice(&word.to_ne_bytes());
                }
                5 => {
                    // From another place in it, over each other or not.
                    let (from, length) = self.part(1);
                    let to = self.below(BYTES - length);
                    let (to_address, from_address) = (self.address(to), self.address(from));
                    ok(api::cuMemcpyDtoD_v2(to_address, from_address, length));
                    self.expected.copy_within(from..from + length, to);
                }
                6 => {
                    let (rows, width, pitch) = (1 + self.below(40), 1 + self.below(3000), 4096);
                    let at = self.below(BYTES - rows * pitch);
                    let source = vec![value; rows * width];
                    let mut copy = CUDA_MEMCPY2D {
                        srcHost: source.as_ptr().cast(),
                        srcPitch: width,
                        dstDevice: self.address(at),
                        dstPitch: pitch,
                        WidthInBytes: width,
                        Height: rows,
                        ..CUDA_MEMCPY2D::default()
                    };
                    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
                    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
                    ok(api::cuMemcpy2D_v2(In::new(&raw const copy)));
                    for row in 0..rows {
                        let start = at + row * pitch;
                        self.expected[start..start + width].fill(value);
                    }
                }
                7 => {
                    // Out, and back from page-locked memory that is empty here and there.
                    ok(api::cuMemcpyDtoH_v2(self.host_copy.cast(), self.at, BYTES));
                    let (at, length) = self.part(1);
                    self.host_copy.add(at).write_bytes(value, length);
                    self.expected[at..at + length].fill(value);
                    unmap(self.at, BYTES);
                    self.make();
                    ok(api::cuMemcpyHtoD_v2(self.at, self.host_copy.cast(), BYTES));
                }
                _ => {
                    let (at, length) = self.part(4);
                    let word = u32::from(value) << 24 | 1;
                    ok(api::cuMemsetD32_v2(self.address(at), word, length / 4));
                    for bytes in self.expected[at..at + length].chunks_exact_mut(4) {
                        bytes.copy_from_slice(&word.to_ne_bytes());
                    }
                }
            }
        }
        synchronize();
    }

    /// The hashes of its chunks, were it at `at`.
    fn hashes(&self, at: CUdeviceptr) -> Vec<u64> {
        let chunk = 512 << 10;
        let list: Vec<u64> = (0..BYTES)
            .step_by(chunk)
            .flat_map(|offset| [at.0 + offset as u64, chunk as u64])
            .collect();
        let (table, found) = (alloc(8 * list.len()), alloc(8 * list.len()));
        upload(table, &list);
        let args = [found.0, table.0, list.len() as u64 / 2];
        try_launch_block(self.hash, CUstream::NULL, 256, &args).expect("a launch");
        let hashes = download(found, list.len());
        free(table);
        free(found);
        hashes
    }
}

#[test]
fn hashes_and_copies_see_every_write() {
    for seed in 1..=4 {
        let mut range = Range::new(seed);
        let plain = alloc(BYTES);
        for round in 0..60 {
            range.write(round);
            upload(plain, &range.expected);
            assert_eq!(
                range.hashes(range.at),
                range.hashes(plain),
                "seed {seed}, round {round}"
            );
            assert!(
                download::<u8>(range.at, BYTES) == range.expected,
                "seed {seed}, round {round}"
            );
        }
        free(plain);
        unmap(range.at, BYTES);
        // SAFETY: as allocated.
        ok(unsafe { api::cuMemFreeHost(range.host_copy.cast()) });
    }
}
