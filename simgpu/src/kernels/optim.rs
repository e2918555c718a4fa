//! HostKernels of `optim.cu`: parameter updates.

use super::{Cost, Kernel};

/// SGD with momentum and weight decay, `v = momentum * v + (g + decay * w); w -= lr * v` —
/// `(f32* w, f32* v, const f32* g, f32 lr, f32 momentum, f32 weight_decay, u64 n)`.
pub(super) const SGD: Kernel = Kernel {
    name: "sublet_sgd_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 4, 4, 4, 8],
    run: |launch| {
        let n = launch.u64(6)?;
        let w = launch.buffer::<f32>(0, n)?;
        let v = launch.buffer::<f32>(1, n)?;
        let g = launch.buffer::<f32>(2, n)?;
        let (lr, momentum, decay) = (launch.f32(3)?, launch.f32(4)?, launch.f32(5)?);
        for ((w, v), g) in w.iter().zip(v).zip(g) {
            let velocity = momentum * v.get() + (g.get() + decay * w.get());
            v.set(velocity);
            w.set(w.get() - lr * velocity);
        }
        Ok(())
    },
    cost: |launch| Cost {
        flops: 6.0 * launch.size(6),
        bytes: 20.0 * launch.size(6),
        fixed_ns: 0,
    },
};

/// Adam with decoupled weight decay (Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019,
/// algorithm 2) — `(f32* w, f32* m, f32* v, const f32* g, f32 lr, f32 beta1, f32 beta2, f32 eps,
/// f32 weight_decay, f32 correction1, f32 correction2, u64 n)`. `correction1 = 1 - beta1^t` and
/// `correction2 = 1 - beta2^t` come from the caller, who counts steps.
pub(super) const ADAM: Kernel = Kernel {
    name: "sublet_adam_f32",
    waits: None,
    param_sizes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 8],
    run: |launch| {
        let n = launch.u64(11)?;
        let w = launch.buffer::<f32>(0, n)?;
        let m = launch.buffer::<f32>(1, n)?;
        let v = launch.buffer::<f32>(2, n)?;
        let g = launch.buffer::<f32>(3, n)?;
        let (lr, beta1, beta2) = (launch.f32(4)?, launch.f32(5)?, launch.f32(6)?);
        let (eps, decay) = (launch.f32(7)?, launch.f32(8)?);
        let (correction1, correction2) = (launch.f32(9)?, launch.f32(10)?);
        for (((w, m), v), g) in w.iter().zip(m).zip(v).zip(g) {
            let g = g.get();
            let first = beta1 * m.get() + (1.0 - beta1) * g;
            let second = beta2 * v.get() + (1.0 - beta2) * g * g;
            m.set(first);
            v.set(second);
            let step = (first / correction1) / ((second / correction2).sqrt() + eps);
            w.set(w.get() - lr * (step + decay * w.get()));
        }
        Ok(())
    },
    cost: |launch| Cost {
        flops: 16.0 * launch.size(11),
        bytes: 28.0 * launch.size(11),
        fixed_ns: 0,
    },
};
