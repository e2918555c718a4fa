"""A short JAX program: a small network trained by jit-compiled steps, with JAX's own way of taking most of the memory first.

Prints one JSON object. Run bare and governed, `result` must be the same.
"""

import hashlib
import json

import jax
import jax.numpy as jnp


def main():
    device = jax.devices()[0]
    keys = jax.random.split(jax.random.PRNGKey(5), 4)
    x = jax.random.normal(keys[0], (256, 128))
    y = jax.random.normal(keys[1], (256, 16))
    weights = [0.1 * jax.random.normal(keys[2], (128, 512)), 0.1 * jax.random.normal(keys[3], (512, 16))]

    def loss_of(weights):
        return jnp.mean((jax.nn.gelu(x @ weights[0]) @ weights[1] - y) ** 2)

    @jax.jit
    def step(weights):
        loss, slopes = jax.value_and_grad(loss_of)(weights)
        return loss, [w - 0.05 * s for w, s in zip(weights, slopes)]

    losses = []
    for _ in range(30):
        loss, weights = step(weights)
        losses.append(float(loss))
    stats = device.memory_stats() or {}
    print(json.dumps({"version": jax.__version__, "platform": device.platform, "result": hashlib.sha256(repr(losses).encode()).hexdigest(),
                      "last_loss": losses[-1], "limit_bytes": stats.get("bytes_limit"), "peak_bytes": stats.get("peak_bytes_in_use")}))


main()
