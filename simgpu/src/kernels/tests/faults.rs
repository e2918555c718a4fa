//! What bad addresses, sizes and shapes come to.

use super::*;

/// Arguments under which the kernel touches all of its buffers, and how many of the first ones are
/// addresses.
fn sound_arguments(name: &str) -> (Vec<u64>, [u32; 3], usize) {
    let line = [256, 1, 1];
    let one = bits(1.0);
    match name {
        "sublet_fill_f32" => (vec![slot(0), one, 16], line, 1),
        "sublet_axpy_f32" => (vec![slot(0), slot(1), one, 16], line, 2),
        "sublet_bias_act_f32" | "sublet_bias_act_grad_f32" => {
            (vec![slot(0), slot(1), slot(2), 4, 4, 1], line, 3)
        }
        "sublet_gather_rows_b32" => (vec![slot(0), slot(1), slot(2), 4, 4, 4], line, 3),
        "sublet_busy_us" => (vec![1], line, 0),
        "sublet_busy_steps" => (vec![slot(0), 4], line, 1),
        "sublet_matmul_f32" => (
            vec![slot(0), slot(1), slot(2), 4, 4, 4, 0, 0],
            [16, 16, 1],
            3,
        ),
        "sublet_softmax_xent_f32" => (
            vec![slot(0), slot(1), slot(2), slot(3), slot(4), 4, 4],
            line,
            5,
        ),
        "sublet_xent_mean_f32" => (vec![slot(0), slot(1), slot(2), slot(3), 4], line, 4),
        "sublet_reduce_sum_f32" => (vec![slot(0), slot(1), 16], line, 2),
        "sublet_bias_grad_f32" => (vec![slot(0), slot(1), 4, 4], line, 2),
        "sublet_sgd_f32" => (vec![slot(0), slot(1), slot(2), one, one, one, 16], line, 3),
        "sublet_adam_f32" => {
            let mut args = vec![slot(0), slot(1), slot(2), slot(3)];
            args.extend([one; 7]);
            args.push(16);
            (args, line, 4)
        }
        "sublet_content_hash" => (vec![slot(0), slot(1), 64, 64], line, 2),
        "sublet_hash_fold" => (vec![slot(0), slot(1), 4], line, 2),
        // The other rank's word is 0, which says that it has come to the last round before they
        // wrap round.
        "sublet_all_reduce_f32" => {
            let last = u64::from(u32::MAX);
            (
                vec![slot(0), slot(1), slot(2), slot(3), 16, 0, 2, last],
                line,
                4,
            )
        }
        "sublet_hash_chunks" => (vec![slot(0), slot(2), 1], line, 2),
        other => panic!("no arguments for {other}: add them here with the kernel"),
    }
}

#[test]
fn bad_addresses_are_illegal_for_every_buffer_of_every_kernel() {
    for kernel in all() {
        let (args, block, addresses) = sound_arguments(kernel.name);
        let arena = arena();
        arena.write(slot(2), &[0u32; 4]);
        assert_eq!(
            arena.launch(kernel.name, [1, 1, 1], block, &args),
            Ok(()),
            "{}",
            kernel.name
        );
        for at in 0..addresses {
            let end = slot(8);
            // Unmapped, off by one element at the end of the mapping, wrapping round, misaligned.
            for address in [0x1000, end - 4, u64::MAX - 3, args[at] + 1] {
                let mut args = args.clone();
                args[at] = address;
                let got = arena.launch(kernel.name, [1, 1, 1], block, &args);
                let name = kernel.name;
                let one_element_fits = address == end - 4
                    && matches!(
                        (name, at),
                        ("sublet_xent_mean_f32", 0 | 1)
                            | ("sublet_reduce_sum_f32" | "sublet_busy_steps", 0)
                    );
                if one_element_fits {
                    assert_eq!(got, Ok(()), "{name}, parameter {at} = {address:#x}");
                    continue;
                }
                match got {
                    Err(Fault::IllegalAddress {
                        address: reported,
                        bytes,
                    }) => {
                        assert_eq!(reported, address, "{name}, parameter {at}");
                        assert!(bytes > 0);
                    }
                    other => panic!("{name}, parameter {at} = {address:#x}: {other:?}"),
                }
            }
            // Null is the absence of the gradient for one kernel, and a fault everywhere else.
            let mut args = args.clone();
            args[at] = 0;
            let got = arena.launch(kernel.name, [1, 1, 1], block, &args);
            if (kernel.name, at) == ("sublet_softmax_xent_f32", 0) {
                assert_eq!(got, Ok(()));
            } else {
                assert!(
                    matches!(got, Err(Fault::IllegalAddress { address: 0, .. })),
                    "{}: {got:?}",
                    kernel.name
                );
            }
        }
        assert_eq!(
            (kernel.run)(&Launch {
                grid: [1; 3],
                block,
                shared_bytes: 0,
                args: &[],
                memory: &arena
            }),
            Err(Fault::InvalidValue),
            "{} without arguments",
            kernel.name
        );
    }
}

#[test]
fn sizes_beyond_the_address_space_are_faults() {
    let arena = arena();
    for n in [u64::MAX, u64::MAX / 4 + 2, 1 << 62, 1 << 40] {
        let got = arena.launch("sublet_fill_f32", [1, 1, 1], [256, 1, 1], &[slot(0), 0, n]);
        assert!(
            matches!(got, Err(Fault::IllegalAddress { .. })),
            "{n}: {got:?}"
        );
    }
    let side = u64::from(u32::MAX);
    let args = [slot(0), slot(1), slot(2), side, side, side, 0, 0];
    let got = arena.launch("sublet_matmul_f32", [1, 1, 1], [16, 16, 1], &args);
    assert!(matches!(got, Err(Fault::IllegalAddress { .. })), "{got:?}");
}

#[test]
fn shapes_that_a_kernel_is_not_written_for_are_refused() {
    for name in [
        "sublet_matmul_f32",
        "sublet_xent_mean_f32",
        "sublet_reduce_sum_f32",
        "sublet_content_hash",
        "sublet_hash_fold",
        "sublet_hash_chunks",
    ] {
        let (args, _, _) = sound_arguments(name);
        let got = arena().launch(name, [1, 1, 1], [128, 1, 1], &args);
        assert_eq!(got, Err(Fault::InvalidValue), "{name}");
    }
    let arena = arena();
    let act = [slot(0), slot(1), slot(2), 4, 4, 2];
    assert_eq!(
        arena.launch("sublet_bias_act_f32", [1; 3], [256, 1, 1], &act),
        Err(Fault::InvalidValue)
    );
    let flags = [slot(0), slot(1), slot(2), 4, 4, 4, 4, 0];
    assert_eq!(
        arena.launch("sublet_matmul_f32", [1; 3], [16, 16, 1], &flags),
        Err(Fault::InvalidValue)
    );
    let block_bytes = [slot(0), slot(1), 64, 12];
    assert_eq!(
        arena.launch("sublet_content_hash", [1; 3], [256, 1, 1], &block_bytes),
        Err(Fault::InvalidValue)
    );
}
