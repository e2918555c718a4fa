//! Every host_kernel against a plain reference in double precision, on random shapes and values.

use super::*;

fn assert_close(what: &str, got: &[f32], want: &[f64], scale: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(
            error <= scale * 1e-5 * want.abs().max(1.0),
            "{what}[{at}]: {got} instead of {want}"
        );
    }
}

#[test]
fn fill_writes_its_range_and_nothing_else() {
    let arena = arena();
    arena.write(slot(0), &[7.0f32; 8]);
    arena.run("sublet_fill_f32", &[slot(0) + 4, bits(-2.5), 6]);
    assert_eq!(
        arena.read::<f32>(slot(0), 8),
        [7.0, -2.5, -2.5, -2.5, -2.5, -2.5, -2.5, 7.0]
    );
}

#[test]
fn axpy_matches_the_reference_also_in_place() {
    let mut random = Random::new(11);
    for _ in 0..50 {
        let n = random.below(600) as usize;
        let (arena, x, y, alpha) = (arena(), random.vec(n), random.vec(n), random.f32());
        arena.write(slot(0), &y);
        arena.write(slot(1), &x);
        arena.run(
            "sublet_axpy_f32",
            &[slot(0), slot(1), bits(alpha), n as u64],
        );
        let want: Vec<f64> = y
            .iter()
            .zip(&x)
            .map(|(y, x)| f64::from(*y) + f64::from(alpha) * f64::from(*x))
            .collect();
        assert_close("y", &arena.read(slot(0), n), &want, 1.0);
        arena.run("sublet_axpy_f32", &[slot(1), slot(1), bits(1.0), n as u64]);
        let want: Vec<f64> = x.iter().map(|x| 2.0 * f64::from(*x)).collect();
        assert_close("x", &arena.read(slot(1), n), &want, 1.0);
    }
}

#[test]
fn matmul_matches_the_reference_for_all_transposes() {
    let mut random = Random::new(12);
    for round in 0..60 {
        let (m, n, k) = (
            1 + random.below(70),
            1 + random.below(110),
            random.below(90),
        );
        let (m, n, k) = if round % 10 == 0 {
            (n, 300.min(9000 / n), m)
        } else {
            (m, n, k)
        };
        let flags = round % 4;
        let (m, n, k) = (m as usize, n as usize, k as usize);
        let (a, b, c) = (random.vec(m * k), random.vec(k * n), random.vec(m * n));
        let beta = if round % 3 == 0 { 0.0 } else { random.f32() };
        let arena = Arena::new(1 << 20);
        let (at_c, at_a, at_b) = (BASE, BASE + (1 << 18), BASE + (2 << 18));
        arena.write(at_a, &a);
        arena.write(at_b, &b);
        // Without beta the old content, here no numbers, must not be read.
        if beta == 0.0 {
            arena.write(at_c, &vec![f32::NAN; m * n]);
        } else {
            arena.write(at_c, &c);
        }
        let args = [
            at_c,
            at_a,
            at_b,
            m as u64,
            n as u64,
            k as u64,
            flags,
            bits(beta),
        ];
        assert_eq!(
            arena.launch("sublet_matmul_f32", [1, 1, 1], [16, 16, 1], &args),
            Ok(())
        );
        let want: Vec<f64> = (0..m * n)
            .map(|at| {
                let (row, col) = (at / n, at % n);
                let sum: f64 = (0..k)
                    .map(|i| {
                        let a = if flags & 1 == 0 {
                            a[row * k + i]
                        } else {
                            a[i * m + row]
                        };
                        let b = if flags & 2 == 0 {
                            b[i * n + col]
                        } else {
                            b[col * k + i]
                        };
                        f64::from(a) * f64::from(b)
                    })
                    .sum();
                sum + f64::from(beta) * if beta == 0.0 { 0.0 } else { f64::from(c[at]) }
            })
            .collect();
        assert_close("c", &arena.read(at_c, m * n), &want, 60.0);
    }
}

#[test]
fn bias_and_activation_with_gradients_match_the_reference() {
    let mut random = Random::new(13);
    for round in 0..40 {
        let (rows, cols) = (1 + random.below(40) as usize, 1 + random.below(70) as usize);
        let act = round % 2;
        let relu = |value: f64| if act == 1 { value.max(0.0) } else { value };
        let (x, bias, dy) = (
            random.vec(rows * cols),
            random.vec(cols),
            random.vec(rows * cols),
        );
        let arena = arena();
        arena.write(slot(1), &x);
        arena.write(slot(2), &bias);
        arena.write(slot(3), &dy);
        let shape = [rows as u64, cols as u64];
        arena.run(
            "sublet_bias_act_f32",
            &[slot(0), slot(1), slot(2), shape[0], shape[1], act],
        );
        let want: Vec<f64> = (0..rows * cols)
            .map(|at| relu(f64::from(x[at]) + f64::from(bias[at % cols])))
            .collect();
        let y = arena.read::<f32>(slot(0), rows * cols);
        assert_close("y", &y, &want, 1.0);
        // In place, with the same bits.
        arena.run(
            "sublet_bias_act_f32",
            &[slot(1), slot(1), slot(2), shape[0], shape[1], act],
        );
        assert_eq!(
            arena.read::<u32>(slot(1), rows * cols),
            arena.read::<u32>(slot(0), rows * cols)
        );

        arena.run(
            "sublet_bias_grad_f32",
            &[slot(4), slot(3), shape[0], shape[1]],
        );
        let want: Vec<f64> = (0..cols)
            .map(|col| (0..rows).map(|row| f64::from(dy[row * cols + col])).sum())
            .collect();
        assert_close("db", &arena.read(slot(4), cols), &want, 40.0);

        arena.run(
            "sublet_bias_act_grad_f32",
            &[slot(3), slot(3), slot(0), shape[0], shape[1], act],
        );
        let want: Vec<f64> = dy
            .iter()
            .zip(&y)
            .map(|(dy, y)| {
                if act == 0 || *y > 0.0 {
                    f64::from(*dy)
                } else {
                    0.0
                }
            })
            .collect();
        assert_close("dx", &arena.read(slot(3), rows * cols), &want, 1.0);
    }
}

#[test]
fn gather_picks_rows_and_zeroes_bad_indices() {
    let arena = arena();
    arena.write(slot(1), &[10u32, 11, 20, 21, 30, 31]);
    arena.write(slot(2), &[2u32, 0, 3, 2]);
    arena.run(
        "sublet_gather_rows_b32",
        &[slot(0), slot(1), slot(2), 4, 2, 3],
    );
    assert_eq!(
        arena.read::<u32>(slot(0), 8),
        [30, 31, 10, 11, 0, 0, 30, 31]
    );
}

#[test]
fn softmax_cross_entropy_matches_the_reference() {
    let mut random = Random::new(14);
    for _ in 0..40 {
        let (rows, cols) = (1 + random.below(60) as usize, 1 + random.below(30) as usize);
        let logits: Vec<f32> = random.vec(rows * cols).iter().map(|x| x * 20.0).collect();
        let labels: Vec<u32> = (0..rows)
            .map(|_| random.below(cols as u64) as u32)
            .collect();
        let arena = arena();
        arena.write(slot(3), &logits);
        arena.write(slot(4), &labels);
        let shape = [rows as u64, cols as u64];
        let args = [
            slot(0),
            slot(1),
            slot(2),
            slot(3),
            slot(4),
            shape[0],
            shape[1],
        ];
        arena.run("sublet_softmax_xent_f32", &args);

        let mut want_gradient = Vec::new();
        let mut want_loss = Vec::new();
        let mut want_correct = Vec::new();
        for (row, label) in logits.chunks(cols).zip(&labels) {
            let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
            let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
            want_loss.push(sum.ln() + top - row[*label as usize]);
            want_correct.push(u32::from(
                row.iter().position(|x| *x == top) == Some(*label as usize),
            ));
            want_gradient.extend((0..cols).map(|col| {
                let hot = if col == *label as usize { 1.0 } else { 0.0 };
                ((row[col] - top).exp() / sum - hot) / rows as f64
            }));
        }
        assert_close("row_loss", &arena.read(slot(1), rows), &want_loss, 10.0);
        assert_close(
            "dlogits",
            &arena.read(slot(0), rows * cols),
            &want_gradient,
            1.0,
        );
        assert_eq!(arena.read::<u32>(slot(2), rows), want_correct);

        let args = [slot(5), slot(6), slot(1), slot(2), shape[0]];
        assert_eq!(
            arena.launch("sublet_xent_mean_f32", [1, 1, 1], [256, 1, 1], &args),
            Ok(())
        );
        let mean = want_loss.iter().sum::<f64>() / rows as f64;
        assert_close("mean", &arena.read(slot(5), 1), &[mean], 10.0);
        assert_eq!(
            arena.read::<u32>(slot(6), 1),
            [want_correct.iter().sum::<u32>()]
        );
    }
}

#[test]
fn softmax_without_gradient_and_with_a_label_out_of_range() {
    let arena = arena();
    arena.write(slot(3), &[1.0f32, 2.0, 3.0, 3.0]);
    arena.write(slot(4), &[0u32, 2]);
    let untouched = arena.read::<u32>(slot(0), 4);
    arena.run(
        "sublet_softmax_xent_f32",
        &[0, slot(1), slot(2), slot(3), slot(4), 2, 2],
    );
    assert_eq!(arena.read::<u32>(slot(0), 4), untouched);
    let losses = arena.read::<f32>(slot(1), 2);
    assert!(
        (losses[0] - 1.313_261_7).abs() < 1e-6 && losses[1].is_nan(),
        "{losses:?}"
    );
    assert_eq!(arena.read::<u32>(slot(2), 2), [0, 0]);
    // Of equal logits the first one is the answer.
    arena.write(slot(4), &[1u32, 0]);
    arena.run(
        "sublet_softmax_xent_f32",
        &[0, slot(1), slot(2), slot(3), slot(4), 2, 2],
    );
    assert_eq!(arena.read::<u32>(slot(2), 2), [1, 1]);
}

#[test]
fn reduce_sum_adds_everything_once_for_any_grid() {
    let mut random = Random::new(15);
    for grid in [1u32, 2, 3, 7, 64] {
        for n in [0usize, 1, 5, 255, 256, 257, 5000] {
            let (arena, x) = (arena(), random.vec(n));
            arena.write(slot(1), &x);
            let args = [slot(0), slot(1), n as u64];
            assert_eq!(
                arena.launch("sublet_reduce_sum_f32", [grid, 1, 1], [256, 1, 1], &args),
                Ok(())
            );
            let args = [slot(2), slot(0), u64::from(grid)];
            assert_eq!(
                arena.launch("sublet_reduce_sum_f32", [1, 1, 1], [256, 1, 1], &args),
                Ok(())
            );
            let want = x.iter().map(|x| f64::from(*x)).sum::<f64>();
            let got = arena.read::<f32>(slot(2), 1)[0];
            assert!(
                (f64::from(got) - want).abs() < 2e-3,
                "grid {grid}, n {n}: {got} instead of {want}"
            );
        }
    }
}

#[test]
fn optimisers_match_the_reference() {
    let mut random = Random::new(16);
    for step in 1..20 {
        let n = 1 + random.below(300) as usize;
        let (w, m, g) = (random.vec(n), random.vec(n), random.vec(n));
        let v: Vec<f32> = random.vec(n).iter().map(|v| v.abs()).collect();
        let arena = arena();
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let (w64, m64, v64, g64) = (wide(&w), wide(&m), wide(&v), wide(&g));

        arena.write(slot(0), &w);
        arena.write(slot(1), &m);
        arena.write(slot(3), &g);
        let args = [
            slot(0),
            slot(1),
            slot(3),
            bits(0.1),
            bits(0.9),
            bits(0.01),
            n as u64,
        ];
        arena.run("sublet_sgd_f32", &args);
        let want_m: Vec<f64> = (0..n)
            .map(|i| 0.9 * m64[i] + g64[i] + 0.01 * w64[i])
            .collect();
        let want_w: Vec<f64> = (0..n).map(|i| w64[i] - 0.1 * want_m[i]).collect();
        assert_close("velocity", &arena.read(slot(1), n), &want_m, 1.0);
        assert_close("w", &arena.read(slot(0), n), &want_w, 1.0);

        arena.write(slot(0), &w);
        arena.write(slot(1), &m);
        arena.write(slot(2), &v);
        let (correction1, correction2) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
        let numbers = [
            0.01,
            0.9,
            0.999,
            1e-3,
            0.1,
            correction1 as f32,
            correction2 as f32,
        ]
        .map(bits);
        let mut args = vec![slot(0), slot(1), slot(2), slot(3)];
        args.extend(numbers);
        args.push(n as u64);
        arena.run("sublet_adam_f32", &args);
        let want_m: Vec<f64> = (0..n).map(|i| 0.9 * m64[i] + 0.1 * g64[i]).collect();
        let want_v: Vec<f64> = (0..n)
            .map(|i| 0.999 * v64[i] + 0.001 * g64[i] * g64[i])
            .collect();
        let want_w: Vec<f64> = (0..n)
            .map(|i| {
                let step = (want_m[i] / correction1) / ((want_v[i] / correction2).sqrt() + 1e-3);
                w64[i] - 0.01 * (step + 0.1 * w64[i])
            })
            .collect();
        assert_close("m", &arena.read(slot(1), n), &want_m, 1.0);
        assert_close("v", &arena.read(slot(2), n), &want_v, 1.0);
        assert_close("w", &arena.read(slot(0), n), &want_w, 10.0);
    }
}

#[test]
fn busy_costs_its_time_and_touches_nothing() {
    let arena = Arena::new(0);
    let args = [2_500];
    let launch = Launch {
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        args: &args,
        memory: &arena,
    };
    let kernel = find("sublet_busy_us").expect("the kernel exists");
    assert_eq!((kernel.run)(&launch), Ok(()));
    assert_eq!(
        (kernel.cost)(&launch),
        Cost {
            flops: 0.0,
            bytes: 0.0,
            fixed_ns: 2_500_000
        }
    );
}

#[test]
fn a_rank_goes_on_when_all_have_come_and_sums_what_they_brought() {
    const N: u64 = 5;
    let arena = arena();
    arena.write(slot(6), &[0u32; 2]);
    let waits = find("sublet_all_reduce_f32").and_then(|kernel| kernel.waits);
    let waits = waits.expect("it waits for its peers");
    let args = |rank: u64, round: u64| {
        let [out, input] = [slot(2 * rank), slot(2 * rank + 1)];
        [out, input, slot(6), slot(7), N, rank, 2, round]
    };
    let may_go_on = |args: &[u64]| {
        waits(&Launch {
            grid: [1; 3],
            block: [32, 1, 1],
            shared_bytes: 0,
            args,
            memory: &arena,
        })
    };
    let finish = |args: &[u64]| {
        assert_eq!(
            arena.launch("sublet_all_reduce_f32", [1; 3], [32, 1, 1], args),
            Ok(())
        );
        arena.read::<f32>(args[0], N as usize)
    };
    for round in 0..5 {
        let given = [0, 1].map(|rank| {
            let numbers: Vec<f32> = (0..N).map(|at| (10 * round + rank + at) as f32).collect();
            arena.write(args(rank, round)[1], &numbers);
            numbers
        });
        // The first to come waits, however often it asks; the other one may be a whole round ahead
        // by the time it sums.
        let (first, second) = (args(round % 2, round), args(1 - round % 2, round));
        assert_eq!(
            (may_go_on(&first), may_go_on(&first)),
            (Ok(false), Ok(false))
        );
        assert_eq!(may_go_on(&second), Ok(true));
        let sums: Vec<f32> = given[0].iter().zip(&given[1]).map(|(a, b)| a + b).collect();
        assert_eq!(finish(&second), sums);
        arena.write(second[1], &[0.5f32; N as usize]);
        let ahead = args(1 - round % 2, round + 1);
        assert_eq!(may_go_on(&ahead), Ok(false));
        assert_eq!(may_go_on(&first), Ok(true));
        assert_eq!(finish(&first), sums);
        // Back to the beginning of the next round.
        arena.write(slot(6), &[round as u32 + 1; 2]);
    }
    let mut none = args(0, 0);
    none[6] = 0;
    assert_eq!(may_go_on(&none), Err(Fault::InvalidValue));
}
