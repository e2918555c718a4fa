//! One colour for each slowdown, from light to dark: it survives print and colour blindness.

/// Red, green, blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

const STOPS: [(f64, Colour); 6] = [
    (1.0, Colour(255, 255, 229)),
    (1.25, Colour(254, 227, 145)),
    (1.5, Colour(254, 196, 79)),
    (2.0, Colour(236, 112, 20)),
    (2.5, Colour(153, 52, 4)),
    (3.0, Colour(84, 28, 4)),
];

/// Below 1 and above 3 it is that of the end.
pub fn of_slowdown(slowdown: f64) -> Colour {
    let after = STOPS.partition_point(|stop| stop.0 < slowdown);
    let (Some(before), Some(to)) = (after.checked_sub(1), STOPS.get(after)) else {
        // PANIC: there are stops.
        return STOPS[after.min(STOPS.len() - 1)].1;
    };
    let from = STOPS[before];
    let part = (slowdown - from.0) / (to.0 - from.0);
    // CAST: between two bytes.
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * part).round() as u8;
    Colour(
        mix(from.1.0, to.1.0),
        mix(from.1.1, to.1.1),
        mix(from.1.2, to.1.2),
    )
}

impl Colour {
    pub fn hex(self) -> String {
        format!("#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }

    pub fn light(self) -> bool {
        let sum = 299 * u32::from(self.0) + 587 * u32::from(self.1) + 114 * u32::from(self.2);
        sum > 140_000
    }

    /// A colour of text on it.
    pub fn readable(self) -> &'static str {
        match self.light() {
            true => "#222222",
            false => "#ffffff",
        }
    }

    /// As a terminal of 256 colours has it: text and ground.
    pub fn of_terminal(self) -> String {
        let part = |value: u8| u32::from(value) * 5 / 255;
        let ground = 16 + 36 * part(self.0) + 6 * part(self.1) + part(self.2);
        let text = if self.light() { 16 } else { 231 };
        format!("\x1b[38;5;{text};48;5;{ground}m")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_slowdown_is_darker_and_text_stays_readable() {
        assert_eq!(of_slowdown(0.5), STOPS[0].1);
        assert_eq!(of_slowdown(9.0), STOPS[5].1);
        assert_eq!(of_slowdown(2.0).hex(), "#ec7014");
        let light = |at: f64| {
            let Colour(r, g, b) = of_slowdown(at);
            u32::from(r) + u32::from(g) + u32::from(b)
        };
        assert!((10..30).all(|at| light(f64::from(at) / 10.0) >= light(f64::from(at + 1) / 10.0)));
        assert_eq!(of_slowdown(1.0).readable(), "#222222");
        assert_eq!(of_slowdown(3.0).readable(), "#ffffff");
        assert_eq!(of_slowdown(1.0).of_terminal(), "\x1b[38;5;16;48;5;230m");
    }
}
