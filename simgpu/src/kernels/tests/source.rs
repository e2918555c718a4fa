//! The CUDA sources, run on the CPU thread by thread, against the host_kernels: that both compute
//! the same is known without a GPU.
//!
//! Needs a C++20 compiler as `c++`; without one there is nothing to run, and the test says so.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::*;

/// Where the arena lies in the emulator. `BASE` may be taken there; these addresses are free in any
/// small process.
const EMULATED: u64 = 0x10_0000_0000;

/// How an output compares.
#[derive(Clone, Copy, PartialEq)]
enum Output {
    /// Floats, equal up to rounding: the compiler may fuse and reorder nothing else.
    Floats,
    /// Bits.
    Bits,
}

struct Emulator {
    folder: PathBuf,
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // A leftover in the temporary folder fails nothing.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Emulator {
    fn build() -> Option<Emulator> {
        let compiler = Command::new("c++")
            .arg("--version")
            .stdout(Stdio::null())
            .status();
        if !compiler.is_ok_and(|status| status.success()) {
            eprintln!("no C++ compiler: the CUDA sources are not compared with the host_kernels");
            return None;
        }
        let folder = std::env::temp_dir().join(format!("sublet-emulate-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
        let emulator = Emulator { folder };
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let built = Command::new("c++")
            .args([
                "-std=c++20",
                "-O1",
                "-w",
                "-pthread",
                "-ffp-contract=off",
                "-o",
            ])
            .arg(emulator.folder.join("emulate"))
            .arg(sources.join("emulate.cpp"))
            .output()
            .expect("the compiler runs");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
        Some(emulator)
    }

    /// The arena's content after the launch, or `None` when the kernel trapped.
    fn launch(
        &self,
        arena: &[u8],
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        args: &[u64],
    ) -> Option<Vec<u8>> {
        let mut request = [0u8; 64].to_vec();
        request[..name.len()].copy_from_slice(name.as_bytes());
        request.extend(
            grid.iter()
                .chain(&block)
                .flat_map(|side| side.to_le_bytes()),
        );
        let mut padded = [0u64; 12];
        for (padded, arg) in padded.iter_mut().zip(args) {
            // Addresses in the arena move with it.
            let offset = arg.wrapping_sub(BASE);
            *padded = if offset <= arena.len() as u64 {
                EMULATED + offset
            } else {
                *arg
            };
        }
        request.extend(
            padded
                .iter()
                .chain(&[EMULATED, arena.len() as u64])
                .flat_map(|word| word.to_le_bytes()),
        );
        request.extend(arena);
        let mut child = Command::new(self.folder.join("emulate"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the emulator starts");
        child
            .stdin
            .take()
            .expect("stdin is a pipe")
            .write_all(&request)
            .expect("the emulator reads its request");
        let output = child.wait_with_output().expect("the emulator ends");
        // Without a code it died of a signal: the trap's.
        output.status.code()?;
        assert!(
            output.status.success(),
            "{name}: the emulator ended with {}",
            output.status
        );
        Some(output.stdout)
    }
}

/// Launches host kernel and source on the same memory and compares all of it; `outputs` are the
/// slots that the kernel writes.
fn compare(
    emulator: &Emulator,
    arena: &Arena,
    (name, grid, block): (&str, [u32; 3], [u32; 3]),
    args: &[u64],
    outputs: &[(u64, Output)],
) {
    let before: Vec<u8> = arena.read(BASE, arena.length as usize);
    let emulated = emulator
        .launch(&before, name, grid, block, args)
        .unwrap_or_else(|| panic!("{name} trapped"));
    assert_eq!(arena.launch(name, grid, block, args), Ok(()), "{name}");
    let after: Vec<u8> = arena.read(BASE, arena.length as usize);
    assert!(
        outputs.is_empty() || before != after,
        "{name} wrote nothing"
    );
    for at in (0..after.len()).step_by(4) {
        let word = |bytes: &[u8]| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (host_kernel, source) = (word(&after), word(&emulated));
        let slot_of_word = slot(at as u64 / 65536);
        let floats = outputs.contains(&(slot_of_word, Output::Floats));
        let (host_kernel_value, source_value) =
            (f32::from_bits(host_kernel), f32::from_bits(source));
        let close = floats
            && (host_kernel_value - source_value).abs() <= 2e-5 * source_value.abs().max(1.0);
        let both_nan = floats && host_kernel_value.is_nan() && source_value.is_nan();
        assert!(
            host_kernel == source || close || both_nan,
            "{name}{args:x?} at {:#x}: the host_kernel has {host_kernel_value} ({host_kernel:#x}), the source {source_value} ({source:#x})",
            BASE + at as u64
        );
    }
}

/// An arena whose slots hold numbers.
fn numbers(random: &mut Random) -> Arena {
    let arena = arena();
    arena.write(BASE, &random.vec(8 * 65536 / 4));
    arena
}

#[test]
fn the_cuda_sources_compute_what_the_host_kernels_compute() {
    use Output::{Bits, Floats};
    let Some(emulator) = Emulator::build() else {
        return;
    };
    let mut random = Random::new(21);
    let line = [256, 1, 1];
    for round in 0..4u64 {
        let grid = [1 + random.below(3) as u32, 1, 1];
        let n = 1 + random.below(3000);
        let (rows, cols) = (1 + random.below(90), 1 + random.below(60));
        let act = round % 2;
        let check = |kernel, args: &[u64], outputs: &[(u64, Output)], random: &mut Random| {
            compare(&emulator, &numbers(random), kernel, args, outputs);
        };
        let [s0, s1, s2, s3, s4, s5] = [0, 1, 2, 3, 4, 5].map(slot);
        let number = bits(random.f32());
        check(
            ("sublet_fill_f32", grid, [96, 1, 1]),
            &[s0, number, n],
            &[(s0, Bits)],
            &mut random,
        );
        check(
            ("sublet_axpy_f32", grid, [96, 1, 1]),
            &[s0, s1, number, n],
            &[(s0, Floats)],
            &mut random,
        );
        let args = [s0, s1, s2, rows, cols, act];
        check(
            ("sublet_bias_act_f32", grid, line),
            &args,
            &[(s0, Floats)],
            &mut random,
        );
        check(
            ("sublet_bias_act_grad_f32", grid, line),
            &args,
            &[(s0, Bits)],
            &mut random,
        );
        check(
            ("sublet_bias_grad_f32", grid, line),
            &[s0, s1, rows, cols],
            &[(s0, Floats)],
            &mut random,
        );
        check(
            ("sublet_reduce_sum_f32", grid, line),
            &[s0, s1, n],
            &[(s0, Floats)],
            &mut random,
        );
        let rates = [0.01, 0.9, 0.5].map(bits);
        let args = [s0, s1, s2, rates[0], rates[1], rates[2], n];
        check(
            ("sublet_sgd_f32", grid, line),
            &args,
            &[(s0, Floats), (s1, Floats)],
            &mut random,
        );

        let (m, n, k) = (
            1 + random.below(120),
            1 + random.below(120),
            random.below(60),
        );
        let beta = if act == 0 { 0 } else { number };
        let args = [s0, s1, s2, m, n, k, round, beta];
        let kernel = (
            "sublet_matmul_f32",
            [grid[0], 1 + random.below(3) as u32, 1],
            [16, 16, 1],
        );
        check(kernel, &args, &[(s0, Floats)], &mut random);

        // Adam's second moments are not negative; labels and indices are small.
        let arena = numbers(&mut random);
        let moments: Vec<f32> = random.vec(4096).iter().map(|value| value.abs()).collect();
        arena.write(s2, &moments);
        let mut args = vec![s0, s1, s2, s3];
        args.extend([0.01, 0.9, 0.999, 1e-4, 0.1, 0.1, 0.001].map(bits));
        args.push(1 + random.below(3000));
        compare(
            &emulator,
            &arena,
            ("sublet_adam_f32", grid, line),
            &args,
            &[(s0, Floats), (s1, Floats), (s2, Floats)],
        );

        let arena = numbers(&mut random);
        // One label in about `cols + 1` is out of range, likewise for indices.
        let labels: Vec<u32> = (0..rows).map(|_| random.below(cols + 1) as u32).collect();
        arena.write(s4, &labels);
        let gradient = if act == 0 { 0 } else { s0 };
        let outputs = [(s0, Floats), (s1, Floats), (s2, Bits)];
        let args = [gradient, s1, s2, s3, s4, rows, cols];
        compare(
            &emulator,
            &arena,
            ("sublet_softmax_xent_f32", grid, [32, 1, 1]),
            &args,
            &outputs,
        );
        let args = [s0, s5, s1, s2, rows];
        compare(
            &emulator,
            &arena,
            ("sublet_xent_mean_f32", [1; 3], line),
            &args,
            &[(s0, Floats), (s5, Bits)],
        );
        let args = [s0, s1, s4, rows, 7, cols];
        compare(
            &emulator,
            &arena,
            ("sublet_gather_rows_b32", grid, line),
            &args,
            &[(s0, Bits)],
        );

        let bytes = 1 + random.below(30_000);
        let args = [s1, s0 + 8 * act, bytes, 8 * (1 + random.below(900))];
        compare(
            &emulator,
            &arena,
            ("sublet_content_hash", grid, line),
            &args,
            &[(s1, Bits)],
        );
        let args = [s2, s1, random.below(700)];
        compare(
            &emulator,
            &arena,
            ("sublet_hash_fold", [1; 3], line),
            &args,
            &[(s2, Bits)],
        );
    }

    for round in 0..3 {
        chunks_agree(&emulator, &mut random, round);
    }

    // The last of three ranks: the others' words and rows are there.
    for round in 0..3u32 {
        let arena = numbers(&mut random);
        let own = random.below(3);
        arena.write(
            slot(4),
            &[0, 1, 2].map(|rank| round + u32::from(rank != own)),
        );
        let args = [
            slot(0),
            slot(1),
            slot(4),
            slot(2),
            900,
            own,
            3,
            round.into(),
        ];
        compare(
            &emulator,
            &arena,
            ("sublet_all_reduce_f32", [1; 3], line),
            &args,
            &[(slot(0), Bits), (slot(2), Bits), (slot(4), Bits)],
        );
    }

    // What the host kernels refuse as InvalidValue is a trap there.
    for name in [
        "sublet_matmul_f32",
        "sublet_xent_mean_f32",
        "sublet_reduce_sum_f32",
        "sublet_content_hash",
        "sublet_hash_chunks",
        "sublet_all_reduce_f32",
    ] {
        let arena = numbers(&mut random);
        let memory: Vec<u8> = arena.read(BASE, arena.length as usize);
        let args = [slot(0), slot(1), slot(2), slot(3), 8, 8, 0, 0];
        assert!(
            emulator
                .launch(&memory, name, [1; 3], [64, 1, 1], &args)
                .is_none(),
            "{name} took another shape"
        );
    }
}

/// The hash of many ranges: addresses in memory, which the arena's move does not reach, are moved
/// here.
fn chunks_agree(emulator: &Emulator, random: &mut Random, count: u64) {
    let arena = arena();
    let data: Vec<u64> = (0..6000).map(|_| random.next()).collect();
    arena.write(slot(0), &data);
    let chunks: Vec<(u64, u64)> = (0..count)
        .map(|at| (8 * random.below(900), 8 * (at + random.below(5000))))
        .collect();
    let list = |base: u64| -> Vec<u64> {
        chunks
            .iter()
            .flat_map(|(offset, bytes)| [base + offset, *bytes])
            .collect()
    };
    let args = [slot(2), slot(1), count];
    let shape = ("sublet_hash_chunks", [2, 1, 1], [256, 1, 1]);
    arena.write(slot(1), &list(EMULATED));
    let before: Vec<u8> = arena.read(BASE, arena.length as usize);
    let after = emulator
        .launch(&before, shape.0, shape.1, shape.2, &args)
        .expect("it traps for bad chunks only");
    let at = (slot(2) - BASE) as usize;
    let emulated: Vec<u64> = after[at..at + 16 * count as usize]
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
        .collect();
    arena.write(slot(1), &list(BASE));
    assert_eq!(arena.launch(shape.0, shape.1, shape.2, &args), Ok(()));
    assert_eq!(
        arena.read::<u64>(slot(2), 2 * count as usize),
        emulated,
        "{chunks:?}"
    );
}
