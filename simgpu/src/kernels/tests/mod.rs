//! Tests of the host_kernels: the memory they run on, and what all of them share.

mod faults;
mod hash;
mod ptx;
mod source;
mod values;

use std::cell::UnsafeCell;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

use super::*;

/// A range of device memory at a fixed address, everything else is unmapped.
struct Arena {
    bytes: UnsafeCell<Vec<u128>>,
    length: u64,
}

const BASE: u64 = 0x7f00_0000_0000;

impl DeviceMemory for Arena {
    fn translate(&self, dptr: u64, bytes: u64) -> Option<*mut u8> {
        let offset = dptr.checked_sub(BASE)?;
        if offset.checked_add(bytes)? > self.length {
            return None;
        }
        // SAFETY: the offset is inside the vector, which is never resized; the tests are
        // single-threaded per arena.
        Some(unsafe {
            (*self.bytes.get())
                .as_mut_ptr()
                .cast::<u8>()
                .add(offset as usize)
        })
    }
}

impl Arena {
    fn new(length: u64) -> Arena {
        // Dirty memory: a kernel that forgets to write is found out.
        let words =
            vec![0xA5A5_A5A5_A5A5_A5A5_A5A5_A5A5_A5A5_A5A5_u128; length.div_ceil(16) as usize];
        Arena {
            bytes: UnsafeCell::new(words),
            length,
        }
    }

    fn write<T: Copy>(&self, dptr: u64, values: &[T]) {
        let host = self
            .translate(dptr, size_of_val(values) as u64)
            .expect("the test's buffer is mapped");
        // SAFETY: the range was just translated, it holds `values.len()` elements and nothing else
        // refers to it now.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), host, size_of_val(values))
        }
    }

    fn read<T: Copy>(&self, dptr: u64, count: usize) -> Vec<T> {
        let host = self
            .translate(dptr, (count * size_of::<T>()) as u64)
            .expect("the test's buffer is mapped");
        // SAFETY: as in `write`; the elements are plain numbers, valid for any bits, read without
        // assuming alignment.
        (0..count)
            .map(|at| unsafe { host.cast::<T>().add(at).read_unaligned() })
            .collect()
    }

    fn launch(
        &self,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        args: &[u64],
    ) -> Result<(), Fault> {
        let kernel = find(name).expect("the kernel exists");
        assert_eq!(
            kernel.param_sizes.len(),
            args.len(),
            "{name}: the test passes another number of parameters"
        );
        for (size, arg) in kernel.param_sizes.iter().zip(args) {
            assert!(
                *size == 8 || *arg >> (8 * size) == 0,
                "{name}: {arg:#x} does not fit {size} bytes"
            );
        }
        let launch = Launch {
            grid,
            block,
            shared_bytes: 0,
            args,
            memory: self,
        };
        let cost = (kernel.cost)(&launch);
        assert!(
            cost.flops.is_finite()
                && cost.bytes.is_finite()
                && cost.flops >= 0.0
                && cost.bytes >= 0.0
        );
        (kernel.run)(&launch)
    }

    fn run(&self, name: &str, args: &[u64]) {
        assert_eq!(
            self.launch(name, [3, 1, 1], [256, 1, 1], args),
            Ok(()),
            "{name}"
        );
    }
}

/// Numbers for the properties, seeded per test so that a failure repeats.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn f32(&mut self) -> f32 {
        (self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0) * 4.0
    }

    fn vec(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| self.f32()).collect()
    }
}

fn bits(value: f32) -> u64 {
    u64::from(value.to_bits())
}

/// Disjoint buffers of 64 KiB for the small shapes of these tests.
fn slot(number: u64) -> u64 {
    BASE + number * 65536
}

fn arena() -> Arena {
    Arena::new(8 * 65536)
}

#[test]
fn names_are_unique_and_found() {
    for kernel in all() {
        assert_eq!(find(kernel.name).map(|found| found.name), Some(kernel.name));
        assert_eq!(
            all()
                .iter()
                .filter(|other| other.name == kernel.name)
                .count(),
            1
        );
    }
    assert!(find("sublet_no_such_kernel").is_none());
}
