//! How much slower than a device the simulated one is to be, so that few cores can play what many
//! did: one factor for all times, `SUBLET_SIM_DILATION`.
//!
//! The driver, the arbiter and what replays a recording go by it, each by its own clock; a job's
//! preload library learns it from the arbiter. A real device cannot be slowed down: asking for that
//! is an error.

use std::env;
use std::time::Duration;

use anyhow::{anyhow, bail};

const VARIABLE: &str = "SUBLET_SIM_DILATION";

/// Most that times can be multiplied by.
const MOST: u32 = 1000;

/// What all times are multiplied by; 1 where the environment says nothing.
///
/// # Errors
/// It says what cannot be done.
pub fn asked() -> anyhow::Result<u32> {
    let Some(text) = env::var_os(VARIABLE) else {
        return Ok(1);
    };
    let text = text.to_string_lossy();
    match text.parse() {
        Ok(number) if (1..=MOST).contains(&number) => Ok(number),
        _ => Err(anyhow!(
            "the environment variable {VARIABLE}: `{text}` is not a whole number from 1 to {MOST}"
        )),
    }
}

/// Checks that a driver goes by the factor that was asked for. `has`: the factor of a simulated
/// driver; `None`: a real one.
///
/// # Errors
/// It does not.
pub fn must_be(asked: u32, has: Option<u32>) -> anyhow::Result<()> {
    match has {
        Some(has) if has == asked => Ok(()),
        Some(has) => bail!(
            "the simulated GPU's times are multiplied by {has}, and {VARIABLE} is {asked}: end the processes that use it, set SUBLET_SIM_STATE to another directory, or set the variable to {has}"
        ),
        None if asked == 1 => Ok(()),
        None => bail!(
            "{VARIABLE}={asked} is for the simulated GPU alone, and this is a real one: unset it, or ask for the simulated GPU with --sim"
        ),
    }
}

/// How long the host takes for that.
pub fn of_the_host(time: Duration, dilation: u32) -> Duration {
    time.saturating_mul(dilation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_driver_is_not_slowed_down_without_a_word() {
        assert!(must_be(1, None).is_ok() && must_be(4, Some(4)).is_ok());
        let error = must_be(4, None).unwrap_err().to_string();
        assert!(error.contains("SUBLET_SIM_DILATION=4"), "{error}");
        for (asked, has) in [(4, 1), (1, 4)] {
            let error = must_be(asked, Some(has)).unwrap_err().to_string();
            assert!(error.contains(&format!("multiplied by {has}")), "{error}");
        }
        println!(
            "now: a real driver with a dilation of 4: {}",
            must_be(4, None).is_err()
        );
    }
}
