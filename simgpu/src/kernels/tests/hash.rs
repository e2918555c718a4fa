//! The content hash against its definition, and what it must tell apart.

use super::*;

fn hashes(arena: &Arena, data: u64, bytes: u64, block_bytes: u64) -> Vec<u64> {
    arena.run("sublet_content_hash", &[slot(7), data, bytes, block_bytes]);
    arena.read(slot(7), bytes.div_ceil(block_bytes) as usize)
}

#[test]
fn content_hash_sees_every_byte_and_only_its_block() {
    let mut random = Random::new(17);
    let arena = arena();
    let data: Vec<u8> = (0..20_003).map(|_| random.next() as u8).collect();
    arena.write(slot(0), &data);
    let before = hashes(&arena, slot(0), 20_003, 4096);
    assert_eq!(before.len(), 5);
    for _ in 0..300 {
        let at = random.below(20_003) as usize;
        let flip = 1u8 << random.below(8);
        arena.write(slot(0) + at as u64, &[data[at] ^ flip]);
        let after = hashes(&arena, slot(0), 20_003, 4096);
        for (block, (before, after)) in before.iter().zip(&after).enumerate() {
            assert_eq!(
                before == after,
                block != at / 4096,
                "byte {at}, block {block}"
            );
        }
        arena.write(slot(0) + at as u64, &[data[at]]);
    }
    // Swapped words, a longer run of zeros and another length are other contents.
    assert_eq!(hashes(&arena, slot(0), 20_003, 4096), before);
    arena.write(slot(0), &data[8..16]);
    arena.write(slot(0) + 8, &data[..8]);
    assert_ne!(hashes(&arena, slot(0), 4096, 4096)[0], before[0]);
    arena.write(slot(0), &[0u8; 4096]);
    let zeros: Vec<u64> = [1u64, 7, 8, 9, 2048, 4096]
        .iter()
        .map(|bytes| hashes(&arena, slot(0), *bytes, 4096)[0])
        .collect();
    for (at, hash) in zeros.iter().enumerate() {
        assert!(!zeros[..at].contains(hash), "lengths {at} collide");
    }
}

#[test]
fn content_hash_matches_its_definition() {
    let arena = arena();
    let data: Vec<u8> = (0..5001u32).map(|at| ((at * at) >> 3) as u8).collect();
    arena.write(slot(0), &data);
    let got = hashes(&arena, slot(0), 5001, 2048);
    arena.write(slot(1), &got);
    let args = [slot(2), slot(1), 3];
    assert_eq!(
        arena.launch("sublet_hash_fold", [1, 1, 1], [256, 1, 1], &args),
        Ok(())
    );
    let fold = arena.read::<u64>(slot(2), 1)[0];
    assert_eq!(
        (got, fold),
        (reference_hashes(&data, 2048), reference_fold(&data, 2048))
    );
    // With another definition all memory would look changed against older hashes.
    assert_eq!(fold, 0x87c1_eb8d_7b3e_9fd2, "{fold:#018x}");
}

/// The definition of the hash, written down once more without threads in lockstep.
fn reference_hash(words: &[u64], bytes: u64) -> u64 {
    let mix = |word: u64| {
        let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ word >> 31
    };
    let absorb = |state: u64, word: u64| {
        (state ^ word)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29)
    };
    let mut slots: Vec<u64> = (0..256)
        .map(|thread| {
            words
                .iter()
                .skip(thread)
                .step_by(256)
                .fold(mix(thread as u64 + 1), |state, word| absorb(state, *word))
        })
        .collect();
    while slots.len() > 1 {
        let half = slots.len() / 2;
        slots = (0..half)
            .map(|at| absorb(mix(slots[at]), slots[at + half]))
            .collect();
    }
    mix(slots[0] ^ bytes.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn reference_hashes(data: &[u8], block: usize) -> Vec<u64> {
    data.chunks(block)
        .map(|block| {
            let words: Vec<u64> = block
                .chunks(8)
                .map(|bytes| {
                    let mut word = [0u8; 8];
                    word[..bytes.len()].copy_from_slice(bytes);
                    u64::from_le_bytes(word)
                })
                .collect();
            reference_hash(&words, block.len() as u64)
        })
        .collect()
}

fn reference_fold(data: &[u8], block: usize) -> u64 {
    let hashes = reference_hashes(data, block);
    reference_hash(&hashes, 8 * hashes.len() as u64)
}

fn chunk_hashes(arena: &Arena, chunks: &[[u64; 2]]) -> Vec<[u64; 2]> {
    arena.write(slot(6), &chunks.concat());
    let args = [slot(7), slot(6), chunks.len() as u64];
    arena.run("sublet_hash_chunks", &args);
    arena
        .read::<u64>(slot(7), 2 * chunks.len())
        .chunks_exact(2)
        .map(|pair| [pair[0], pair[1]])
        .collect()
}

#[test]
fn a_chunk_s_hash_tells_every_bit_and_the_pattern_that_deceives_one_half() {
    let mut random = Random::new(23);
    let arena = arena();
    let data: Vec<u64> = (0..2048).map(|_| random.next()).collect();
    arena.write(slot(0), &data);
    let chunks = [[slot(0), 8192], [slot(0) + 8192, 8192], [slot(0), 0]];
    let before = chunk_hashes(&arena, &chunks);
    assert_eq!(chunk_hashes(&arena, &chunks), before);
    for _ in 0..200 {
        let at = random.below(2048) as usize;
        arena.write(slot(0) + 8 * at as u64, &[data[at] ^ 1 << random.below(64)]);
        let after = chunk_hashes(&arena, &chunks);
        for chunk in 0..3 {
            let same = chunk != at / 1024;
            assert_eq!(before[chunk][0] == after[chunk][0], same, "word {at}");
            assert_eq!(before[chunk][1] == after[chunk][1], same, "word {at}");
        }
        arena.write(slot(0) + 8 * at as u64, &data[at..=at]);
    }
    // The top bit of a word and the bit that the first half rotates it to, in the thread's next
    // word.
    arena.write(slot(0) + 8 * 5, &[data[5] ^ 1 << 63]);
    arena.write(slot(0) + 8 * 261, &[data[261] ^ 1 << 28]);
    let after = chunk_hashes(&arena, &chunks);
    assert_eq!(before[0][0], after[0][0], "the first half is deceived");
    assert_ne!(before[0][1], after[0][1], "the second is not");
}

#[test]
fn a_chunk_s_hash_keeps_its_definition_and_untouched_memory_is_zeros() {
    let arena = arena();
    let data: Vec<u64> = (0..1000_u64).map(|at| at * at).collect();
    arena.write(slot(0), &data);
    arena.write(slot(1), &[0_u64; 1000]);
    let found = chunk_hashes(&arena, &[[slot(0), 8000], [slot(1), 8000]]);
    // With another definition all memory would look changed against older hashes.
    assert_eq!(
        found,
        [
            [0x197e_d939_59f5_b0b5, 0x3674_b1e8_c3a4_e400],
            [0x05bc_3253_8aba_6506, 0xe6a4_4de6_c12d_3e6a]
        ],
        "{found:#x?}"
    );
    /// Of the second range nothing was written but a few bytes in its middle, or nothing at all.
    struct Sparse(Arena, Vec<std::ops::Range<u64>>);
    impl DeviceMemory for Sparse {
        fn translate(&self, dptr: u64, bytes: u64) -> Option<*mut u8> {
            self.0.translate(dptr, bytes)
        }
        fn written(&self, dptr: u64, bytes: u64) -> Written<'_> {
            let all = std::iter::once(dptr..dptr + bytes).collect();
            Written {
                end: dptr + bytes,
                ranges: if dptr == slot(1) { self.1.clone() } else { all },
                read: None,
            }
        }
    }
    let hashes = |memory: &Sparse| {
        let args = [slot(7), slot(6), 2];
        let launch = Launch {
            grid: [1; 3],
            block: [256, 1, 1],
            shared_bytes: 0,
            args: &args,
            memory,
        };
        let kernel = find("sublet_hash_chunks").expect("the kernel exists");
        assert_eq!((kernel.run)(&launch), Ok(()));
        assert_eq!((kernel.cost)(&launch).bytes, 16_000.0 + 64.0);
        memory.0.read::<u64>(slot(7), 4)
    };
    let mut memory = Sparse(arena, Vec::new());
    assert_eq!(hashes(&memory), found.concat());
    // Rows of zeros before and behind what was written count as if they had been read.
    let middle = slot(1) + 4096;
    memory.0.write(middle, &[7_u64; 10]);
    let read = chunk_hashes(&memory.0, &[[slot(0), 8000], [slot(1), 8000]]).concat();
    assert_ne!(read, found.concat());
    memory.1.push(middle..middle + 80);
    assert_eq!(hashes(&memory), read);
}
